"""The controller of a run: rollout workers sample with one version of the weights, the trainer
learns from what they return, and offers the next version.

What an iteration samples and draws follows from its number and its weight version alone. So it does
not depend on the number of workers, and a run that was killed goes on with the same weights to the
bit.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.metadata import write_metadata
from strands_cosmos3.engine.preflight import available_bytes, gib
from strands_cosmos3.engine.weight_files import weight_digests
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.plan import Assignment, hashed
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.statistics import rate_of
from strands_cosmos3.fleet.actor_pool import ActorPool, PoolJob
from strands_cosmos3.fleet.cluster import cluster, joinable
from strands_cosmos3.resources import sha256, write_folder, write_whole
from strands_cosmos3.training.adapters import adapter_numbers
from strands_cosmos3.training.closed_loop import CLOSED_LOOP
from strands_cosmos3.training.cost import duration, machine
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import Loop, Metrics, TrainLoopConfig, mean_metrics, read_curve
from strands_cosmos3.training.matching import SINGLE_PROCESS, DataShard
from strands_cosmos3.training.post import SETTINGS, write_trained
from strands_cosmos3.training.rl.exploration import Exploration
from strands_cosmos3.training.rl.groups import Group
from strands_cosmos3.training.rl.learner import Learner
from strands_cosmos3.training.rl.options import RLConfig
from strands_cosmos3.training.rl.rollout import Episode, RolloutWorker
from strands_cosmos3.training.run_manifest import keep_settings
from strands_cosmos3.training.sharding import patient_group

Lesson = tuple[Sequence[Group], Mapping[str, torch.Tensor]]
"""Groups, and the weights that sampled them."""
VERSIONS, VALUES = "versions", "values"
ROLLOUTS = "rollouts"
"""Name of the curve of iterations."""
_FREE = ("lr", "evaluate_every", "evaluate_episodes")  # options that may change during a run
_SMALLEST = 1 / 3  # of the offsets, in terms of the first ones
_SCENES, _HELD_OUT, _FILMS = 31, 32, 2
_ENDLESS = 10**9
_FIXED_BYTES, _TRAINED_BYTES = 8, 36
"""Of a weight: the policy and a copy that is written; of one that is trained, also the two policies
that it is compared with, its average, its gradient, two moments, and another copy at the end.
"""
_NOT_KEPT = (
    "--keep holds nothing under {}: there are no other pictures of the same states without it, and "
    "the policy may unlearn what it could."
)
_WHOLE = (
    "world {!r} does not return to states, or does not say how far a task has come: whole episodes "
    "are compared, of which more are needed."
)
_CARD = Template("""\
# $task of $world under $condition, by reinforcement learning

Made by `strands-cosmos3 rl`: $algorithm, from $source.

| | |
|---|---|
| sampled | $iterations iterations, $episodes episodes, $chunks chunks, one simulation each |
| time | $time; $machine |
| success on held-out scenes, before | $before |
| after | $after |

The scenes of training and of this table are not those of `evaluate`, which measures both policies
on the same unseen ones (docs/rl.md). Without the condition, it tells what was unlearnt.
""")


class ReinforcementLearning:
    """A run that learns one task, or several, under one condition.

    Args:
        settings: Checkpoint, world, tasks, condition and duration of episodes, as an evaluation's.
        folder: Folder of state, curves, films and the new checkpoint; a state is resumed.
        on_iteration: Called after each with their number, :attr:`used_s` and figures of the last.
        share: This process among those that train: the first one also samples, measures and
            writes, and tells the others what to learn.

    Attributes:
        memory_bytes: What training takes; simulators come on top.
        worker: What samples; made of the settings, in a process of its own.

    Raises:
        CheckpointError, InstructionError: The checkpoint cannot be used, or not for a task.
        ConfigError: The folder holds another run; there is too little memory.
    """

    worker: type[RolloutWorker] = RolloutWorker

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        config: RLConfig,
        on_iteration: Callable[[int, float, Metrics], None] = lambda *_: None,
        share: DataShard = SINGLE_PROCESS,
    ):
        self.settings, self.folder, self.config = settings, folder, config
        self._on_iteration, self._share = on_iteration, share
        if config.batch < share.ranks:
            raise ConfigError(
                f"--batch {config.batch} has no chunk for some of "
                f"{share.ranks} processes; raise it."
            )
        self.checkpoint = Checkpoint.open(locate(str(settings.policy.model)))
        self.checkpoint.require_released("reinforcement learning")
        self.memory_bytes = self._require_memory()
        self.embodiment = get_embodiment(settings.embodiment)
        how = {name: value for name, value in asdict(config).items() if name not in _FREE}
        world = settings.get_world()
        facts = {"checkpoint": self.checkpoint.digest, **world.identity(settings.robot)}
        if ":" in settings.world:
            facts["world_sha256"] = sha256(Path(inspect.getfile(type(world))))
        facts |= {"tasks": settings.tasks, "condition": self._condition.identity()}
        if (language := self.checkpoint.language) is not None:
            for instruction in {episode.policy_instruction for episode in settings.plan()}:
                language.understand(instruction)
        values = folder / VALUES
        self.learner = Learner(self.checkpoint, self.embodiment, config, values, share)
        # after what may refuse a run: its folder would refuse the corrected one
        if not share.rank:
            keep_settings(folder / SETTINGS, how | facts | {"duration": settings.duration})
        self._group = patient_group() if share.ranks > 1 else None
        steps = TrainLoopConfig(
            _ENDLESS,
            config.lr,
            warmup=config.steps,
            decay=0.0,
            ema=config.average,
            log_every=config.steps,
        )
        self._loop = Loop(self.learner.policy, self.learner.loss, steps, folder)
        self._submitted = self.iteration

    def _require_memory(self) -> int:
        """Return the bytes that training takes; ConfigError if that many are not free."""
        config, shapes = self.config, self.checkpoint.weights.shapes
        free = available_bytes(torch.device("cpu"))
        needed = _TRAINED_BYTES * adapter_numbers(shapes, config.lora_rank, config.lora_targets)
        for name, shape in shapes.items():
            trained = any(fnmatch(name, pattern) for pattern in config.trained)
            needed += math.prod(shape) * (_TRAINED_BYTES if trained else _FIXED_BYTES)
        if needed > free:
            remedy = "choose a smaller checkpoint" if config.lora_rank else "train --lora-rank 16"
            raise ConfigError(
                f"{self.checkpoint.root}: training takes {gib(needed)}, and {gib(free)} are free; "
                f"{remedy}, or name fewer weights with --train."
            )
        return needed

    @property
    def iteration(self) -> int:
        """Number of the present iteration, which is the version of its weights."""
        return self._loop.step // self.config.steps

    @property
    def _condition(self) -> Any:
        return self.settings.conditions[0]

    @property
    def used_s(self) -> float:
        """Wall-clock time of the iterations so far [s]."""
        return sum(line["seconds"] for line in read_curve(self.folder / f"{ROLLOUTS}.jsonl"))

    def run(
        self, budget_s: float, workers: int, address: str | None = None, until: int | None = None
    ) -> Path:
        """Learn until the time is used up, or until an iteration, and write the checkpoint."""
        target = self.folder / "checkpoint"
        if self._share.rank:
            self._follow()
            return target
        make = partial(self.worker, self.settings)
        with (
            cluster(joinable(address), workers),
            ActorPool(make, workers, self.settings.episode_timeout) as pool,
        ):
            self._submitted = self.iteration
            if not self.iteration:
                self._film(pool, "before")
            while self.used_s < budget_s and (until is None or self.iteration < until):
                self._iterate(pool)
            weights = self._publish(pool, self.iteration)
            self._broadcast(None)
            if self._loop.lacks(CLOSED_LOOP):
                self._evaluate(pool)
            self._film(pool, "after")
        write_folder(target, partial(self._fill, self.learner.policy_of(weights)))
        return target

    def _follow(self) -> None:
        """Learn what the first process tells, until it has done."""
        while True:
            self._version(self.iteration)  # every process has a part of it
            if (lesson := self._broadcast(None)) is None:
                return
            self._learn(*lesson)

    def _broadcast(self, lesson: Lesson | None) -> Lesson | None:
        """Return the lesson of the first process."""
        lessons = [lesson]
        if self._group is not None:
            dist.broadcast_object_list(lessons, 0, self._group)
        return lessons[0]

    def _learn(
        self,
        groups: Sequence[Group],
        weights: Mapping[str, torch.Tensor],
        on_step: Callable[[int, Metrics], None] = lambda *_: None,
    ) -> None:
        """Learn from the groups of an iteration, which these weights sampled."""
        self.learner.take(groups, weights, self.iteration)
        end = (self.iteration + 1) * self.config.steps
        (self._loop.run if self.learner.kept else self._loop.skip)(end, on_step)

    def _iterate(self, pool: ActorPool) -> None:
        started_s, i, config = time.monotonic(), self.iteration, self.config
        weights = self._publish(pool, i)
        if i % config.evaluate_every == 0 and self._loop.lacks(CLOSED_LOOP):
            self._evaluate(pool)
        sampled_with = max(0, i - config.staleness)
        if sampled_with < i:
            weights = self._publish(pool, sampled_with)
        for ahead in range(self._submitted, i + config.staleness + 1):
            self._submit(pool, ahead, max(0, ahead - config.staleness))
        self._submitted = i + config.staleness + 1
        episodes: list[Episode] = [pool.result((i, k)) for k in range(config.episodes)]
        groups = [g for e in episodes for g in e.groups]
        alike = groups and not any(g.plain.size for g in groups)
        if config.keep and alike and self._condition.world.identity():
            warnings.warn(_NOT_KEPT.format(self._condition.name), stacklevel=2)
        if groups and groups[0].rewards.size == 1 and not config.whole_episodes:
            warnings.warn(_WHOLE.format(self.settings.world), stacklevel=2)
        seen, figures = list[Metrics](), dict[str, float]()

        def record(step: int, metrics: Metrics) -> None:
            seen.append(metrics)
            if step == (i + 1) * config.steps:  # before the state is saved, which is resumed
                figures.update(
                    self._figures(i, episodes),
                    staleness=i - sampled_with,
                    worker_deaths=pool.deaths,
                    **mean_metrics(seen),
                    seconds=time.monotonic() - started_s,
                )
                self._loop.record(ROLLOUTS, figures)

        self._broadcast((groups, weights))
        self._learn(groups, weights, record)
        self._drop_before(i - config.staleness)  # the state before this one may be resumed
        self._on_iteration(i + 1, self.used_s, figures)

    def _figures(self, i: int, episodes: list[Episode]) -> dict[str, float]:
        learner = self.learner
        groups = [g.rewards for e in episodes for g in e.groups]
        gains = [rewards.max() - rewards[0] for rewards in groups]
        return {
            "success": float(np.mean([e.success for e in episodes])),
            "gain": float(sum(gains)) / max(len(groups), 1),
            **learner.figures,
            "unusable": sum(e.unusable for e in episodes),
            "groups": len(groups),
            "dropped": learner.dropped,
            "chunks": sum(rewards.size for rewards in groups),
            "spread_mm": float(np.mean([e.shift_m for e in episodes]) * 1e3),
            "rollout_cpu_s": sum(e.cpu_s for e in episodes),
            "weight_version": i,
        }

    def _submit(self, pool: ActorPool, iteration: int, version: int) -> None:
        """Queue the episodes of an iteration, with the weights of a version."""
        config = self.config
        scale = max(config.anneal**iteration, _SMALLEST)
        how = Exploration(
            config.pairs,
            config.shift_cm / 100 * scale,
            np.deg2rad(config.turn_deg) * scale,
            config.grasp,
            config.whole_episodes,
        )
        plan = self._plan(hashed(config.seed, _SCENES, iteration), config.episodes)
        for k, assignment in enumerate(plan):
            arguments = assignment, how, hashed(config.seed, iteration, k)
            pool.submit(PoolJob((iteration, k), "explore", arguments, version))

    def _plan(self, base: int, episodes: int) -> list[Assignment]:
        """Return episodes, the tasks in turn."""
        tasks = len(self.settings.tasks)
        settings = replace(self.settings, seeds=-(-episodes // tasks), seed=base)
        return sorted(settings.plan(), key=lambda a: a.index)[:episodes]

    def _evaluate(self, pool: ActorPool) -> None:
        """Record success on held-out scenes, the same each time."""
        plan = self._plan(hashed(self.config.seed, _HELD_OUT), self.config.evaluate_episodes)
        records = pool.results(
            ("evaluation", self.iteration), "run", [(a,) for a in plan], self.iteration
        )
        rate = rate_of([bool(record["success"]) for record in records])
        self._loop.record(
            CLOSED_LOOP,
            {"success": rate["rate"], "low": rate["low"], "high": rate["high"], "of": rate["of"]},
        )

    def _film(self, pool: ActorPool, name: str) -> None:
        """Write films of some held-out scenes."""
        plan = self._plan(hashed(self.config.seed, _HELD_OUT), _FILMS)
        films = pool.results(name, "film", [(a,) for a in plan], self.iteration)
        for k, (_, film) in enumerate(films):
            path = self.folder / "films" / f"{name}-{k}.mp4"
            write_whole(path, lambda unfinished, film=film: unfinished.write_bytes(film))

    def _publish(self, pool: ActorPool, version: int) -> Mapping[str, torch.Tensor]:
        """Offer the weights of a version to the pool, and return them."""
        weights = self._version(version)
        pool.publish(version, {name: tensor.numpy() for name, tensor in weights.items()})
        return weights

    def _version(self, version: int) -> Mapping[str, torch.Tensor]:
        """Return the weights of a version, which are stored when its iteration begins: within an
        iteration their average is already another.
        """
        path = self.folder / VERSIONS / f"{version:06d}.pt"
        if version == self.iteration and self._loop.step % self.config.steps == 0:
            weights = self._loop.average()
            if not self._share.rank:
                write_whole(path, lambda unfinished: torch.save(weights, unfinished))
            return weights
        return torch.load(path, map_location="cpu", weights_only=True)

    def _drop_before(self, version: int) -> None:
        for path in (*self.folder.glob(f"{VERSIONS}/*.pt"), *self.folder.glob(f"{VALUES}/*.npy")):
            if int(path.stem) < version:
                path.unlink()

    def _fill(self, policy: TrainedPolicy, target: Path) -> None:
        write_trained(self.checkpoint, policy.cpu(), self.embodiment.domain_id, target)
        learnt = {
            **asdict(self.config),
            "tasks": self.settings.tasks,
            "condition": self._condition.identity(),
        }
        fields = {"reinforcement_learning": learnt, "sha256": weight_digests(target)}
        write_metadata(target, fields)
        (target / "README.md").write_text(self._card(), encoding="utf-8")

    def _card(self) -> str:
        lines = read_curve(self.folder / f"{ROLLOUTS}.jsonl")
        success = [
            f"{line['success']:.0%} of {line['of']} ({line['low']:.0%} to {line['high']:.0%})"
            for line in read_curve(self.folder / f"{CLOSED_LOOP}.jsonl")
        ]
        return _CARD.substitute(
            task=", ".join(self.settings.tasks),
            world=self.settings.world,
            condition=self._condition.name,
            algorithm=self.config.algorithm,
            source=f"{self.checkpoint.root.name}, digest {self.checkpoint.digest[:16]}",
            iterations=len(lines),
            episodes=len(lines) * self.config.episodes,
            chunks=sum(line["chunks"] for line in lines),
            time=duration(self.used_s),
            machine=machine(),
            before=success[0],
            after=success[-1],
        )
