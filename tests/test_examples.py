"""The examples run as they stand; those for strands-robots in its own environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.environments import ROOT, strands_robots

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path, pytestconfig: pytest.Config):
    python = strands_robots(pytestconfig) if "strands_robots" in example.read_text() else sys.executable
    done = subprocess.run([python, str(example)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
