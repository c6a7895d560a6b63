"""Two processes train as one does: the same loss at every step, the same weights, and a run may
change their number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import post_training, sharded_training
from helpers.environments import ROOT, TESTS
from recipes.random_checkpoint import write_checkpoint


def torchrun(folder: Path, until: int) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["-m", "helpers.sharded_training", str(folder), str(until)]
    paths = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_processes_have_the_loss_and_the_weights_of_one(tmp_path, harness, launcher):
    """Forked ranks have what torchrun tells its own, and import nothing."""
    sharded_training.main(tmp_path / "one", 8)
    alone = json.loads((tmp_path / "one/losses-8.json").read_text())
    if launcher == "torchrun":
        torchrun(tmp_path / "two", 5)
    else:
        harness.group(2, joined=False).run("train", folder=str(tmp_path / "two"), until=5)
    first = json.loads((tmp_path / "two/losses-5.json").read_text())
    assert first == pytest.approx(alone[:5], rel=1e-4)
    sharded_training.main(tmp_path / "two", 8)  # and on with a single process
    rest = json.loads((tmp_path / "two/losses-8.json").read_text())
    assert rest == pytest.approx(alone[5:], rel=1e-4)
    states = [
        torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("one", "two")
    ]
    for name, weight in states[0]["ema"].items():
        torch.testing.assert_close(states[1]["ema"][name], weight, rtol=0, atol=2e-4)


def test_processes_save_their_state_together_whatever_their_clocks_say(tmp_path, harness):
    """Saving gathers the weights: a process that saved a step before the others ended the run."""
    harness.group(2, joined=False).run(
        "train_by_clocks_of_their_own", folder=str(tmp_path / "two"), until=8
    )
    sharded_training.main(tmp_path / "one", 8)
    alone, shared = (
        json.loads((tmp_path / run / "losses-8.json").read_text()) for run in ("one", "two")
    )
    assert shared == pytest.approx(alone, rel=1e-4)


def test_two_processes_post_train_and_validate_as_one_does(tmp_path, harness):
    """The windows of a step, five, are shared out three to two, and so are those of a
    validation.
    """
    source = write_checkpoint(tmp_path / "source", sizes=post_training.SMALL, seed=4)
    dataset = post_training.made_up_arm(tmp_path / "arm", ("open the drawer", "close the drawer"))
    post_training.main(source, dataset, tmp_path / "one")
    where = {"source": str(source), "dataset": str(dataset), "folder": str(tmp_path / "two")}
    harness.group(2, joined=False).run("post_train", **where, until=4)
    post_training.main(source, dataset, tmp_path / "two")  # and on with a single process
    one, two = (
        (tmp_path / run / "validation.jsonl").read_text().splitlines() for run in ("one", "two")
    )
    assert [json.loads(line)["step"] for line in one] == [2, 4, 6]
    for alone, shared in zip(one, two, strict=True):
        assert json.loads(shared) == pytest.approx(json.loads(alone), rel=1e-4)
    states = [
        torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("one", "two")
    ]
    for name, weight in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], weight, rtol=0, atol=2e-4)
