"""``infer --self-test`` and the script for a first run on a GPU, on small checkpoints on the
CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from strands_cosmos3.cli import main
from strands_cosmos3.commands.self_test import (
    GOLDEN_PROMPTS,
    TASK,
    _check_answer,
    _check_composite,
)
from strands_cosmos3.robots.panda import HOME_Q

ROOT = Path(__file__).resolve().parents[1]


def test_the_bundled_policy_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        main(["infer", "--self-test", "--device", "cpu", "--out", str(tmp_path / "bundled")]) == 0
    )
    report = json.loads((tmp_path / "bundled_self_test.json").read_text())
    states = {check["what"]: check["state"] for check in report["checks"]}
    assert states.pop("caption") == "note"  # not the released policies' setting
    assert set(states.values()) == {"ok"}
    assert "direction" in states
    assert report["rows"] == [16, 10]
    assert "nothing failed" in capsys.readouterr().out


def test_the_golden_captions_are_those_of_the_contract():
    """Of cosmos-framework's own functions: tests/assets/framework_golden.json, made by
    make_framework_golden.py.
    """
    golden = json.loads((ROOT / "tests/assets/framework_golden.json").read_text())["captions"]
    for kind, caption in GOLDEN_PROMPTS.items():
        asked = [TASK, kind, "concat_view", 33, 15, [544, 736]]
        (expected,) = [entry[-1] for entry in golden if entry[:-1] == asked]
        assert caption == expected


def test_wrong_answers_are_found():
    still = np.repeat(HOME_Q[None], 32, axis=0)

    def failed(q: np.ndarray) -> set[str]:
        return {
            check.what
            for check in _check_answer(q, q, np.ones(len(q)), still)
            if check.state == "failed"
        }

    assert failed(still) == set()
    assert failed(np.full((32, 7), np.nan)) == {"finite"}
    assert failed(still + 1.0) == {"first row"}
    assert failed(np.where(np.arange(32)[:, None] % 2, still + 0.3, still)) == {"speed"}
    swapped = torch.zeros(3, 544, 736)
    assert _check_composite(swapped, (33, 540, 640)).state == "failed"


@pytest.mark.slow
def test_the_first_run_on_a_gpu_writes_its_report(tmp_path: Path):
    script = [
        sys.executable,
        str(ROOT / "benchmarks/first_gpu_run.py"),
        "--small",
        "--device",
        "cpu",
        "--repeats",
        "1",
    ]
    subprocess.run([*script, "--out", str(tmp_path / "r.json")], check=True, cwd=tmp_path)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["self_test"][0]
    assert report["eager"]["median_ms"]["total_ms"] > 0
    assert "error" not in report["eager"]
