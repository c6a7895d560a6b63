"""The examples run as they stand; those for strands-robots in its own environment."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.environments import ROOT, strands_robots

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
HOSTED = [path for path in EXAMPLES if "strands_robots" in path.read_text()]
FETCHING = [path for path in EXAMPLES if "fetch_model" in path.read_text()]
WORLDS = [path for path in EXAMPLES if "(ArmWorld)" in path.read_text()]
LIBERO = [path for path in EXAMPLES if "Libero-v0" in path.read_text()]


SCRIPTS = [*EXAMPLES, *sorted((ROOT / "benchmarks").glob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_command_of_a_docstring_has_a_line_of_its_own(script: Path):
    """Indented lines can be pasted: one command, with a comment after it or on a line before."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for line in lines:
        command, _, _ = line.partition("# ")
        assert re.match(r"(python|strands-cosmos3|cd|make|pip) |$", command), line
        assert not re.search(r" (python|strands-cosmos3) ", command), line


def run(python: str, example: Path, folder: Path) -> None:
    done = subprocess.run([python, str(example)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    "example",
    sorted({*EXAMPLES} - {*HOSTED, *LIBERO, *FETCHING, *WORLDS}),
    ids=lambda path: path.stem,
)
def test_example_runs(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    if "gymnasium" in example.read_text():
        pytest.importorskip("gymnasium", reason="pip install 'strands-cosmos3[gym]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("number", "module", "install"),
    [
        ("01", "mink", ".[sim]"),
        ("02", "mink", ".[sim]"),
        ("03", "torch", ".[engine]"),
        ("04", "websockets", ".[serve,sim]"),
        ("05", "strands_robots", "strands-robots>="),
        ("06", "pyarrow", ".[data,sim]"),
        ("07", "mink", ".[sim]"),
        ("08", "mujoco", ".[sim]"),
        ("09", "msgpack", ".[serve,sim]"),
        ("10", "franky", "franky-control"),
        ("11", "gymnasium", ".[gym,sim]"),
        ("10", "mink", ".[sim]"),
        ("12", "openpi_client", "openpi-client"),
        ("13", "mink", ".[sim]"),
        ("14", "mujoco", ".[sim]"),
    ],
)
def test_without_its_packages_an_example_ends_in_one_line(
    number: str, module: str, install: str, monkeypatch: pytest.MonkeyPatch
):
    example = next(path for path in EXAMPLES if path.name.startswith(number))
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    arguments = ("--host", "127.0.0.1", "--payload-kg", "0") if number == "10" else ()
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(example), run_name="__main__")
    assert str(ended.value).startswith(module)
    assert " is not installed: pip install " in str(ended.value)
    assert install in str(ended.value)
    assert "\n" not in str(ended.value)


@pytest.mark.robots
@pytest.mark.parametrize("example", FETCHING, ids=lambda path: path.stem)
def test_example_adds_a_robot(example: Path, tmp_path: Path):
    run(sys.executable, example, tmp_path)
    assert len(example.read_text().splitlines()) <= 60


@pytest.mark.peers
@pytest.mark.parametrize("example", HOSTED, ids=lambda path: path.stem)
def test_example_runs_inside_strands_robots(
    example: Path, tmp_path: Path, pytestconfig: pytest.Config
):
    run(strands_robots(pytestconfig), example, tmp_path)


STOPS_AFTER_TWO = """
import numpy as np
class WebsocketClientPolicy:
    calls = 0
    def __init__(self, port): pass
    def infer(self, asked):
        assert asked["observation/image"].shape == asked["observation/wrist_image"].shape == (256, 256, 3)
        assert asked["observation/state"].shape == (8,)
        self.calls += 1
        if self.calls > 2:
            raise SystemExit(asked["prompt"])
        return {"actions": np.zeros((10, 7))}
"""


@pytest.mark.libero
def test_the_libero_example_asks_as_openpis_policies_expect(tmp_path: Path):
    package = tmp_path / "openpi_client"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "websocket_client_policy.py").write_text(STOPS_AFTER_TWO)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(LIBERO[0])], capture_output=True, text=True, env=environment
    )
    assert "pick up the alphabet soup and place it in the basket" in done.stderr
