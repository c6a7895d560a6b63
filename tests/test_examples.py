"""The examples run as they stand; those for strands-robots in its own environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.environments import ROOT, strands_robots

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
HOSTED = [path for path in EXAMPLES if "strands_robots" in path.read_text()]


def run(python: str, example: Path, folder: Path) -> None:
    done = subprocess.run([python, str(example)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path not in HOSTED], ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path):
    run(sys.executable, example, tmp_path)


@pytest.mark.peers
@pytest.mark.parametrize("example", HOSTED, ids=lambda path: path.stem)
def test_example_runs_inside_strands_robots(example: Path, tmp_path: Path, pytestconfig: pytest.Config):
    run(strands_robots(pytestconfig), example, tmp_path)
