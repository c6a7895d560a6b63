"""Every code block of README and docs runs, or says why not in `<!-- not run by tests: ... -->`
above it.

A page's Python blocks share one namespace and folder, its shell blocks the folder. What is not run
is parsed: Python by the compiler, this package's commands by the command line.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from itertools import groupby
from pathlib import Path

import pytest

from helpers.code_blocks import LANGUAGES, ROOT, Block, blocks
from strands_cosmos3 import cli

pytestmark = pytest.mark.slow
BLOCKS = blocks()
CODE = [block for block in BLOCKS if block.language != "text"]
RUN = [
    list(group)
    for _, group in groupby(
        (b for b in CODE if b.reason is None and b.language not in ("toml", "yaml")),
        lambda b: b.page,
    )
]
SECONDS = 900


def test_every_block_is_of_a_known_language_and_reasons_are_sentences():
    assert len(CODE) > 20
    assert not [f"{block}: {block.language}" for block in BLOCKS if block.language not in LANGUAGES]
    for block in CODE:
        if block.reason is not None:
            print(f"{block}: not run: {block.reason}")
            assert len(block.reason.split()) >= 3, f"{block}: {block.reason!r} is no reason"


@pytest.mark.parametrize("block", [block for block in CODE if block.language == "python"], ids=str)
def test_python_compiles(block: Block):
    compile(block.code, str(block), "exec")


@pytest.mark.parametrize("block", [block for block in CODE if block.is_shell], ids=str)
def test_commands_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Flags and values of each command exist, also of those that are not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evaluation.toml").touch()  # its options are defaults of `evaluate --config`
    for command in block.commands:
        words = shlex.split(command)
        if words and words[0] == "torchrun":
            words = ["strands-cosmos3", *words[words.index("strands_cosmos3") + 1 :]]
        if words and words[0] == "strands-cosmos3":
            arguments, said = [word for word in words[1:] if word != "..."], StringIO()
            with redirect_stderr(said):
                status: object = 0
                try:
                    cli._parsed(arguments)
                except SystemExit as end:
                    status = end.code
            assert not status, f"{block}: {command}\n{said.getvalue()}"
        elif words and words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), (
                f"{block}: no such target: {command}"
            )


@pytest.mark.parametrize("page", RUN, ids=lambda page: page[0].page.name)
def test_blocks_run(page: list[Block], tmp_path: Path):
    """In order, each page in a process of its own."""
    script = ["set -e"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    python: list[str] = []
    for block in page:
        if block.is_shell:
            script += block.commands
        else:
            python.append(f"# {block}\n{block.code}")
    (tmp_path / "blocks.py").write_text("\n".join(python))
    script += ["python blocks.py"] if python else []
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, (
        f"{', '.join(map(str, page))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
