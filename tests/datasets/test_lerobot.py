"""Read by the lerobot package itself: `make test-lerobot`.

lerobot 0.6.1 wants Python 3.12, numpy < 2.3 and torch < 2.12 (with CUDA's libraries, some 3 GB), so
it lives in an environment of its own, made once in pytest's cache (`.pytest_cache/d/lerobot`); it
runs on the CPU. `LEROBOT_PYTHON` names another one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from helpers import environments
from helpers.environments import TESTS
from helpers.small_episodes import columns, fill, picture, spec
from strands_cosmos3.datasets import ACTION, STATE, DatasetWriter, merge_datasets

pytestmark = pytest.mark.slow
SCRIPT = TESTS / "helpers/lerobot_reads.py"
LENGTHS = [40, 5, 33]


@pytest.fixture(scope="session")
def lerobot(pytestconfig: pytest.Config) -> str:
    return environments.lerobot(pytestconfig)


@pytest.mark.parametrize("merged", [False, True], ids=["written", "merged"])
def test_lerobot_reads_what_was_written(lerobot: str, tmp_path: Path, merged: bool):
    root = tmp_path / "set"
    with DatasetWriter(root, spec(), commit_every=2) as writer:
        fill(writer, LENGTHS)
    if merged:
        with DatasetWriter(tmp_path / "more", spec()) as writer:
            fill(writer, [7], first=3)
        merge_datasets([root, tmp_path / "more"], tmp_path / "all").close()
        root = tmp_path / "all"
    lengths = [*LENGTHS, 7] if merged else LENGTHS
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("PYTHONPATH", None)
    out = tmp_path / "seen.npz"
    done = subprocess.run(
        [lerobot, str(SCRIPT), str(root), str(out)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["fps"], said["episodes"], said["frames"]) == (15, len(lengths), sum(lengths))
    assert said["cameras"] == ["observation.images.wrist", "observation.images.exterior_1"]
    assert said["tasks"] == [f"pick up cube {k % 3}" for k in range(len(lengths))]
    with np.load(out) as seen:
        truth = [columns(n, k) for k, n in enumerate(lengths)]
        for key in (ACTION, STATE):
            np.testing.assert_allclose(
                seen[key], np.concatenate([values[key] for values in truth]), atol=1e-6
            )
        np.testing.assert_allclose(
            seen["q99"], np.quantile(seen[ACTION].astype(float), 0.99, axis=0), atol=1e-6
        )
        for episode, row, frame in zip(seen["episode"], seen["row"], seen["wrist"], strict=True):
            shown = np.round(frame.transpose(1, 2, 0) * 255).astype(int)
            off = [
                np.abs(shown - picture(int(episode), k, 0)).mean() for k in range(lengths[episode])
            ]
            assert int(np.argmin(off)) == row
            assert min(off) < 3
