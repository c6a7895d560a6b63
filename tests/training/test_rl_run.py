"""Whole runs of reinforcement learning: the same weights with any number of workers, and after
kill -9.
"""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("mujoco")
pytest.importorskip("ray")

import numpy as np
import torch

from strands_cosmos3.cli import main
from strands_cosmos3.commands.rl import RLCommand
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.fleet.actor_pool import ActorPool, PoolJob
from strands_cosmos3.resources import Closeable
from strands_cosmos3.training.loop import read_curve
from strands_cosmos3.training.rl import controller
from strands_cosmos3.training.rl.controller import ReinforcementLearning
from strands_cosmos3.training.rl.options import RLConfig
from strands_cosmos3.training.rl.rollout import RolloutWorker
from strands_cosmos3.training.state import read_state

PROGRAM = """
import os, signal, sys
from pathlib import Path
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.training.rl.controller import ReinforcementLearning
from strands_cosmos3.training.rl.options import RLConfig
from strands_cosmos3.training.rl.rollout import RolloutWorker

folder, workers, until, staleness = sys.argv[1], *map(int, sys.argv[3:6])
options = {"model": sys.argv[2], "tasks": "pick", "conditions": "mount=4", "duration": 2.0}
mark = Path(folder) / "killed"

class DyingWorker(RolloutWorker):
    def explore(self, *arguments):
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().explore(*arguments)

config = RLConfig(episodes=2, pairs=1, steps=2, batch=6, evaluate_episodes=1, staleness=staleness)
learning = ReinforcementLearning(make_settings(options), Path(folder), config)
if workers > 1:  # one of them dies, and another takes its place
    learning.worker = DyingWorker
learning.run(1e9, workers, until=until)
"""


class PickledPool(Closeable):
    """Workers in this process that do the jobs in turn. What goes to another process and comes
    from it is pickled. Of two workers, the latest job comes first, and the first one that explores
    is lost with its answer.
    """

    def __init__(self, make: Callable[[], RolloutWorker], workers: int, timeout_s: float):
        self.deaths, self._make = 0, pickle.dumps(make)
        self._workers = [pickle.loads(self._make)() for _ in range(workers)]
        self._versions, self._weights = [0] * workers, dict[int, bytes]()
        self._jobs, self._done = list[bytes](), dict[object, bytes]()

    def publish(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        self._weights[version] = pickle.dumps(weights)

    results = ActorPool.results

    def submit(self, job: PoolJob) -> None:
        self._jobs.append(pickle.dumps(job))

    def result(self, key: object) -> Any:
        two = len(self._workers) == 2
        while key not in self._done:
            place = len(self._done) % len(self._workers)
            job = pickle.loads(self._jobs.pop(-1 if two else 0))
            if two and job.method == "explore" and not self.deaths:
                self._answer(place, job)
                self._replace(place)
            self._done[job.key] = pickle.dumps(self._answer(place, job))
        return pickle.loads(self._done[key])

    def _answer(self, place: int, job: PoolJob) -> Any:
        worker = self._workers[place]
        if job.version != self._versions[place]:
            worker.take_weights(pickle.loads(self._weights[job.version]))
            self._versions[place] = job.version
        return getattr(worker, job.method)(*job.arguments)

    def _replace(self, place: int) -> None:
        self.deaths += 1
        self._workers[place].close()
        self._workers[place], self._versions[place] = pickle.loads(self._make)(), 0

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def command(folder: Path, workers: int, until: int, staleness: int = 1) -> list[str]:
    model = str(embedded_checkpoint("droid", "panda", "pick"))
    numbers = map(str, (workers, until, staleness))
    return [sys.executable, "-c", PROGRAM, str(folder), model, *numbers]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state, _ = read_state(folder)
    return {**state["model"], **{f"average.{name}": t for name, t in state["ema"].items()}}


TIMES_AND_DEATHS = "seconds", "rollout_cpu_s", "worker_deaths"


def require_equal(folder: Path, other: Path) -> None:
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    figures = [
        [{n: v for n, v in line.items() if n not in TIMES_AND_DEATHS} for line in curve]
        for curve in (read_curve(path / "rollouts.jsonl") for path in (folder, other))
    ]
    assert figures[0] == figures[1]


def test_two_workers_in_this_process_learn_the_same_as_one(tmp_path, monkeypatch):
    """With jobs in another order, a worker that is replaced, and an interruption."""
    monkeypatch.setattr(controller, "ActorPool", PickledPool)
    monkeypatch.setattr(controller, "cluster", lambda address, workers: nullcontext())
    monkeypatch.setattr(controller, "_FILMS", 1)
    model = str(embedded_checkpoint("droid", "panda", "pick"))
    options = {"model": model, "tasks": "pick", "conditions": "mount=4", "duration": 0.6}
    config = RLConfig(episodes=2, pairs=1, steps=2, batch=6, evaluate_episodes=1, staleness=1)

    def learn(folder: Path, workers: int, until: int) -> None:
        run = ReinforcementLearning(make_settings(options), folder, config)
        run.run(1e9, workers, until=until)

    one, two = tmp_path / "one", tmp_path / "two"
    learn(one, 1, 2)
    monkeypatch.setattr(ReinforcementLearning, "_film", lambda *_: None)  # nothing is learnt of it
    learn(two, 2, 1)
    learn(two, 2, 2)
    require_equal(one, two)
    assert (one / "checkpoint/transformer").is_dir()
    assert (one / "films/after-0.mp4").stat().st_size > 1000
    assert "mount=4" in (one / "checkpoint/README.md").read_text()
    lines = read_curve(one / "rollouts.jsonl")
    assert [line["staleness"] for line in lines] == [0, 1]
    assert all(line["groups"] > line["dropped"] for line in lines), "each moved the weights"


@pytest.mark.slow
def test_two_workers_that_die_and_are_interrupted_learn_the_same_as_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run(command(one, 1, 2), check=True)
    subprocess.run(command(two, 2, 1), check=True)
    subprocess.run(command(two, 2, 2), check=True)
    require_equal(one, two)
    assert [line["worker_deaths"] for line in read_curve(two / "rollouts.jsonl")] == [1, 0]


@pytest.mark.slow
def test_a_run_that_is_killed_at_ten_points_learns_the_same(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, 1, 6), check=True)
    rng = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen(command(killed, 1, 6), start_new_session=True)
        time.sleep(rng.uniform(8, 40))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(killed, 1, 6), check=True)
    ours, theirs = weights(killed), weights(whole)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--conditions", "mount=1,mount=2"), "one condition"),
        (("--grasp", "1.5"), "--grasp must be a fraction"),
        (("--budget", "0"), "--budget"),
        (("--pairs", "0"), "--pairs"),
        (("--task", "pack"), "pack"),
        (("--keep", "-1"), "--keep"),
        (("--lora-rank", "-1"), "--lora-rank"),
        (("--workers", "0", "--budget", "1e-6"), "--workers"),
        (("--task", "stack"), "it does not know 'stack'"),
        (("--task", "pick,stack"), "it does not know 'stack'"),
        (("--train", "nothing*"), "nothing*"),
        (("--lora-rank", "4", "--lora-targets", "q", "z"), "--lora-targets z"),
        *(
            (("--conditions", name, "--budget", "1e-6"), "leave conditions of the policy out")
            for name in ("blank", "steps=2", "replan=8+mount=4", "latency=0.2", "swapped")
        ),
    ],
)
def test_what_cannot_be_learnt_is_refused_in_one_line(tmp_path, capsys, flags, message):
    model = str(embedded_checkpoint("droid", "panda", "pick"))
    assert main(["rl", "--out", str(tmp_path / "run"), "--model", model, *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert not (tmp_path / "run" / "settings.json").exists()  # the corrected run may follow


def test_a_penalty_that_pulls_a_policy_back_is_said(tmp_path):
    pulled = RLCommand(tmp_path, "model", learning=RLConfig(kl_beta=1e-2))
    with pytest.warns(UserWarning, match="--kl-beta 0.01 pulls the policy back"):
        pulled._require_numbers()
