"""How a rank's process ends: with its status, its output flushed, and without Python's shutdown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITNESS = "import atexit; atexit.register(print, 'came to the end of Python', flush=True)\n"


@pytest.fixture
def run(tmp_path: Path):
    """Runs Python in which whoever comes to its end says so; returns (status, what was printed,
    on standard error).
    """
    (tmp_path / "sitecustomize.py").write_text(WITNESS)

    def go(*arguments: str, **environment: str) -> tuple[int, str, str]:
        paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
        known = {
            name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env={**known, "PYTHONPATH": paths, **environment},
        )
        return done.returncode, done.stdout, done.stderr

    return go


def test_what_was_said_is_written_and_the_status_kept(run):
    code = (
        "import logging.handlers, sys; from strands_cosmos3.parallel.rank import "
        "exit_rank; "
        "late = logging.handlers.MemoryHandler(99, target=logging.StreamHandler()); "
        "logging.getLogger().addHandler(late); "
        "logging.warning('logged'); sys.stdout.write('said'); sys.stderr.write('cried'); "
        "exit_rank(7)"
    )
    status, said, cried = run("-c", code)
    assert (status, said) == (7, "said"), "and nobody came to the end of Python"
    assert "logged" in cried
    assert "cried" in cried


def test_output_that_cannot_be_written_is_no_success(run):
    code = (
        "import sys; from strands_cosmos3.parallel.rank import exit_rank; "
        "sys.stdout = open('/dev/full', 'w'); print('x'); exit_rank({})"
    )
    assert run("-c", code.format(0))[0] == 120
    assert run("-c", code.format(3))[0] == 3


REFUSED = ["infer", "--model", "x", "--tp", "2", "--prompt", "p"]


SLOW = pytest.mark.slow
NO_ERROR, USAGE = (["--version"], 0), (["doctor", "--nonsense"], 2)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [NO_ERROR, USAGE, *(pytest.param(*c, marks=SLOW) for c in ((["--help"], 0), (REFUSED, 2)))],
)
def test_the_command_line_under_torchrun_leaves(run, arguments, status):
    launched = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1"}
    found, said, _ = run("-m", "strands_cosmos3", *arguments, **launched)
    assert found == status
    assert "came to the end of Python" not in said


@pytest.mark.parametrize(("arguments", "status"), [NO_ERROR, pytest.param(REFUSED, 2, marks=SLOW)])
def test_the_command_line_elsewhere_ends_as_any_program(run, arguments, status):
    found, said, _ = run("-m", "strands_cosmos3", *arguments)
    assert found == status
    assert "came to the end of Python" in said


def test_a_rank_leaves_though_nobody_reads_what_it_prints(tmp_path: Path):
    end = tmp_path / "end"
    (tmp_path / "sitecustomize.py").write_text(
        f"import atexit; atexit.register(open, {str(end)!r}, 'w')\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
    nobody, closed = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-u", "-m", "strands_cosmos3", "--version"]
    assert subprocess.run(command, stdout=closed, stderr=closed, env=environment).returncode == 1
    os.close(closed)
    assert not end.exists()


def test_an_error_that_nobody_expected_is_told_and_ends_with_1(run):
    code = (
        "from strands_cosmos3 import cli; from strands_cosmos3.commands.doctor import Doctor; "
        "Doctor.run = lambda self: 1 / 0; import sys; sys.argv[1:] = ['doctor']; cli.program()"
    )
    status, said, cried = run("-c", code, TORCHELASTIC_RUN_ID="none")
    assert (status, said) == (1, "")
    assert "ZeroDivisionError" in cried
