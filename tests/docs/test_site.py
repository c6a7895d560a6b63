"""The notebook runs from top to bottom, and the documentation site builds without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import strands_cosmos3
from helpers.code_blocks import ROOT

pytestmark = pytest.mark.slow


def test_the_notebook_runs(tmp_path: Path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples/pick_a_cube.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without outputs
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    printed = "".join(
        out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", [])
    )
    assert "is not understood: nothing on its table is yellow" in printed
    shown = [
        out
        for cell in notebook.cells
        for out in cell.get("outputs", [])
        if out["output_type"] == "execute_result"
    ]
    assert "text/html" in shown[0]["data"]  # the film, inline
    assert (tmp_path / "pick.mp4").stat().st_size > 10_000


def test_the_site_builds_strictly(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    api = (tmp_path / "site/api/index.html").read_text(encoding="utf-8")
    classes = [name for name in strands_cosmos3.__all__ if name != "__version__"]
    assert not [name for name in classes if f'.{name}"' not in api], (
        "docs/api.md lacks public names"
    )
