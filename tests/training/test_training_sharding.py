"""Two processes train as one does: the same loss at every step, the same weights, and a run may
change their number.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import post_training, reinforcement, sharded_training
from helpers.environments import ROOT, TESTS
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.training.loop import read_curve
from strands_cosmos3.training.rl.exploration import Exploration
from strands_cosmos3.training.rl.rollout import RolloutWorker


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
    require_close_weights(tmp_path, "ema")


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
    require_close_weights(tmp_path, "model")


def test_two_processes_learn_by_reinforcement_as_one_does(tmp_path, harness):
    """The chunks of a step, five, are shared out three to two; a run may go on with one process."""
    model = str(embedded_checkpoint("droid", "panda", "pick"))
    settings = replace(reinforcement.settings_of(model), duration=0.5)  # a single group
    worker = RolloutWorker(settings)
    explored = worker.explore(settings.plan()[0], Exploration(2, 0.02, 0.03, 0.5), 1)
    worker.close()
    episode = tmp_path / "episode"
    episode.write_bytes(pickle.dumps(explored))
    reinforcement.main(model, episode, tmp_path / "one", 3)
    names = {"model": model, "episode": str(episode), "folder": str(tmp_path / "two")}
    harness.group(2, joined=False).run("reinforce", **names, until=2)
    assert len(Checkpoint.open(tmp_path / "two/checkpoint").weights.shapes) > 20
    reinforcement.main(model, episode, tmp_path / "two", 3)
    one, two = (read_curve(tmp_path / run / "rollouts.jsonl") for run in ("one", "two"))
    assert [line["step"] for line in two] == [2, 4, 6]
    for alone, shared in zip(one, two, strict=True):
        for name in ("loss", "policy", "old_deviation", "kept_deviation"):
            assert shared[name] == pytest.approx(alone[name], rel=2e-3, abs=1e-7)
    require_close_weights(tmp_path, "ema")


def require_close_weights(folder: Path, kind: str) -> None:
    """Require weights of one kind to be close in the states of runs ``one`` and ``two``."""
    one, two = (
        torch.load(folder / run / "state.pt", weights_only=True)[kind] for run in ("one", "two")
    )
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=2e-4)
