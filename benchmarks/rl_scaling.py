"""Reinforcement learning on more workers: measured here, and on a fake clock.

    python benchmarks/rl_scaling.py measure
    python benchmarks/rl_scaling.py simulate --step-s 0.05 --weights-gb 0.2

``measure`` times the same episodes of groups on one worker and on two. ``simulate`` hands out
episodes as :mod:`strands_cosmos3.training.rl.controller` does, on a clock of its own, for up to 64
workers; its times are those that runs on two cores took (docs/rl.md).
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import tyro

from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.fleet.actor_pool import ActorPool
from strands_cosmos3.fleet.cluster import cluster
from strands_cosmos3.training.rl.exploration import Exploration
from strands_cosmos3.training.rl.rollout import RolloutWorker

WORKERS = 1, 2, 4, 8, 16, 32, 64
_LEAST, _MOST = 3, 10  # groups of an episode


@dataclass(frozen=True)
class Times:
    """What things take. The defaults are those of the bundled policy, on one core each."""

    chunk_s: float = 0.07
    """A question to the policy, with its pictures."""
    branch_s: float = 0.05
    """A chunk that is run from a saved state."""
    pairs: int = 4
    """Pairs of displaced chunks in a group."""
    step_s: float = 1.4
    """A training step."""
    steps: int = 20
    """Training steps of an iteration."""
    weights_gb: float = 0.0092
    """Weights of a version, in 10^9 bytes: those that are trained."""
    link_gb_s: float = 1.0
    """What leaves the trainer's machine in a second."""

    @property
    def group_s(self) -> float:
        """A group."""
        return self.chunk_s + (2 * self.pairs + 1) * self.branch_s


@dataclass(frozen=True)
class Shares:
    """What a simulated run spent its time on."""

    iteration_s: float
    trainer_idle: float
    workers_idle: float
    staleness: float
    """Mean age of the weights that sampled, in versions."""


@dataclass
class _Clock:
    """Workers, the link that weights leave by, and what has been done so far."""

    times: Times
    workers: int
    rng: np.random.Generator
    free_s: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    has: dict[int, int] = field(default_factory=dict[int, int])
    link_s: float = 0.0
    busy_s: float = 0.0

    def sample(self, episodes: int, from_s: float, version: int) -> float:
        """Run an iteration's episodes, which are queued at a time; return when the last ends."""
        last_s = from_s
        for _ in range(episodes):
            at_s, worker = heapq.heappop(self.free_s)
            at_s = max(at_s, from_s)
            if self.has.get(worker, 0) != version:
                self.link_s = max(self.link_s, at_s) + self.times.weights_gb / self.times.link_gb_s
                at_s, self.has[worker] = self.link_s, version
            took_s = int(self.rng.integers(_LEAST, _MOST, endpoint=True)) * self.times.group_s
            self.busy_s += took_s
            last_s = max(last_s, at_s + took_s)
            heapq.heappush(self.free_s, (at_s + took_s, worker))
        return last_s


def simulate(
    times: Times, workers: int, staleness: int, episodes: int, iterations: int = 50, seed: int = 0
) -> Shares:
    """Return what a run of some iterations spends its time on."""
    clock = _Clock(times, workers, np.random.default_rng(seed))
    clock.free_s = [(0.0, worker) for worker in range(workers)]
    now_s, submitted, ages = 0.0, 0, list[int]()
    sampled_s = dict[int, float]()
    for i in range(iterations):
        for ahead in range(submitted, min(i + staleness, iterations - 1) + 1):
            version = max(0, ahead - staleness)
            sampled_s[ahead] = clock.sample(episodes, now_s, version)
            ages.append(ahead - version)
        submitted = i + staleness + 1
        now_s = max(now_s, sampled_s[i]) + times.steps * times.step_s
    return Shares(
        now_s / iterations,
        1 - iterations * times.steps * times.step_s / now_s,
        1 - clock.busy_s / (workers * now_s),
        float(np.mean(ages)),
    )


@dataclass(frozen=True)
class Simulate:
    """Print a table for 1 to 64 workers."""

    times: tyro.conf.OmitArgPrefixes[Times] = field(default_factory=Times)
    episodes: int = 8
    """Least episodes of an iteration; each worker has one."""

    def run(self) -> None:
        """Print it."""
        print("workers episodes staleness  iteration  episodes/h  trainer idle  workers idle  age")
        for workers in WORKERS:
            episodes = max(self.episodes, workers)
            for staleness in (0, 1):
                found = simulate(self.times, workers, staleness, episodes)
                rate = 3600 * episodes / found.iteration_s
                print(
                    f"{workers:7} {episodes:8} {staleness:9} {found.iteration_s:9.1f}s "
                    f"{rate:11.0f} {found.trainer_idle:13.0%} {found.workers_idle:13.0%} "
                    f"{found.staleness:4.2f}"
                )


@dataclass(frozen=True)
class Measure:
    """Time the same episodes on one worker and on two, each after a warm-up."""

    episodes: int = 16
    """Episodes of groups."""

    def run(self) -> None:
        """Print episodes a minute, and their ratio."""
        model = str(embedded_checkpoint("droid", "panda", "pick"))
        options = {"model": model, "tasks": "pick", "conditions": "mount=4", "duration": 12.0}
        settings = make_settings({**options, "seeds": self.episodes})
        how, plan = Exploration(4, 0.015, 0.035, 0.25), settings.plan()
        rates = list[float]()
        for workers in (1, 2):
            make = partial(RolloutWorker, settings)
            with cluster(None, workers), ActorPool(make, workers, settings.episode_timeout) as pool:
                pool.results("warm", "explore", 2 * workers * [(plan[0], how, 0)], 0)
                started_s = time.monotonic()
                calls = [(assignment, how, k) for k, assignment in enumerate(plan)]
                pool.results("measured", "explore", calls, 0)
                rates.append(60 * len(plan) / (time.monotonic() - started_s))
            print(f"{workers} workers: {rates[-1]:.1f} episodes a minute")
        print(f"two workers are {rates[1] / rates[0]:.2f} times one")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of them."""
    commands = {"measure": Measure, "simulate": Simulate}
    tyro.extras.subcommand_cli_from_dict(commands, args=arguments).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
