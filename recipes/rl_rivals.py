"""``python -m recipes.rl_rivals``: what else adapts a policy to a displaced camera, in the
time of a run of ``strands-cosmos3 rl``.

dagger: Expert labels at the states that the policy visits (arXiv 1011.0686).
offset: One constant offset of the hand at the end of each chunk, six numbers, fitted on rollouts.
wider: Demonstrations with the wrist camera up to 5 cm off.

``recipes/rl_rivals.md`` has the commands, and those of ``awfm`` and ``rft``.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import decode_limbs
from strands_cosmos3.actions.rotations import se3_between, so3_log
from strands_cosmos3.backends.base import Backend, WrappedBackend
from strands_cosmos3.checks import F64
from strands_cosmos3.commands.demos import Demos
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.evaluation.plan import Assignment, Condition, hashed
from strands_cosmos3.evaluation.policies import PolicySource
from strands_cosmos3.evaluation.settings import Settings, make_settings
from strands_cosmos3.evaluation.statistics import rate_of
from strands_cosmos3.fleet.actor_pool import ActorPool
from strands_cosmos3.fleet.cluster import cluster
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.resources import load_json, write_json, write_whole
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.post import PostTraining
from strands_cosmos3.training.rl.controller import ReinforcementLearning
from strands_cosmos3.training.rl.exploration import Exploration, displaced
from strands_cosmos3.training.rl.groups import Group, rated
from strands_cosmos3.training.rl.options import RLConfig
from strands_cosmos3.training.rl.rollout import Branching, Episode, RolloutWorker
from strands_cosmos3.types import ActionChunk, Request
from strands_cosmos3.worlds.table import randomized_scene
from strands_cosmos3.worlds.table.demo_config import DemoConfig
from strands_cosmos3.worlds.table.expert import ScriptedBackend
from strands_cosmos3.worlds.world import Executed

_LABELLED = 40  # iterations whose states are learnt from
_SCENES = 33  # of the offset's rollouts
_STEP = 1.0  # of the offset, in mean better offsets
_WIDE_M, _LOOKS = 0.05, 0.2  # of the wrist camera; of the other ranges of demonstrations
_RECORDING = 0.4  # of the time for demonstrations


@dataclass(frozen=True)
class Rival:
    """What all of them have."""

    out: Path
    """Folder of the run; the same one resumes."""
    model: str = "assets/table_policy"
    """Checkpoint to begin from."""
    conditions: str = "mount=4"
    """The condition to adapt to."""
    budget: float = 0.3
    """Hours of wall-clock time."""
    workers: int = 2
    """Processes."""
    duration: float = 12.0
    """Longest episode in simulated seconds."""

    def settings(self, **options: Any) -> Settings:
        """Return the settings of episodes."""
        common = {"model": self.model, "tasks": "pick", "conditions": self.conditions}
        return make_settings({**common, "duration": self.duration, **options})


class LabellingWorker(RolloutWorker):
    """Rolls the policy out; in each visited state the second chunk of a group is the expert's."""

    def explore(self, assignment: Assignment, how: Exploration, seed: int) -> Episode:
        """Run an episode of groups of two, of which the expert's chunk is the better."""
        session, expert = self.session, ScriptedBackend(turns=True, funnel=True)
        policy, branched, _ = self.begin(assignment)
        cpu_s, duration_s, groups = time.process_time(), 0.0, list[Group]()
        executed, horizon_s = Executed(False, 0.0), self.settings.duration_s(assignment.task)
        while not executed.ended and duration_s < horizon_s:
            instruction = assignment.policy_instruction
            branch = Branching(session, policy, branched, instruction, whole=True)
            asked = replace(branched.request, privileged=branch.observation.privileged)
            label = expert.plan(asked, starts_cruising=True, askew=True)  # as the recipe's labels
            rows = [branched.chunk.action, label.action]
            _, executed = branch.run(branched.chunk.action)
            duration_s += executed.duration_s or horizon_s
            counts = [len(label.action)] * 2
            request = branched.request
            groups.append(self.group(assignment, request, branch, rows, [0.0, 1.0], counts))
        cpu_s = time.process_time() - cpu_s
        return Episode(groups, executed.success, cpu_s, 0.0, False)


class Labelled(ReinforcementLearning):
    """Flow matching to the expert's chunks, in the states of all iterations."""

    worker = LabellingWorker

    def __init__(self, settings: Settings, folder: Path, config: RLConfig):
        super().__init__(settings, folder, config, lambda i, _, figures: print(i, dict(figures)))
        self._take, self.learner.take = self.learner.take, self._take_all

    def _take_all(
        self, groups: Sequence[Group], sampled_with: Mapping[str, torch.Tensor], iteration: int
    ) -> None:
        path = self.folder / "labels" / f"{iteration:06d}.pkl"
        write_whole(path, lambda unfinished: unfinished.write_bytes(pickle.dumps(list(groups))))
        every: list[Group] = []
        for i in range(max(0, iteration + 1 - _LABELLED), iteration + 1):
            every += pickle.loads((path.parent / f"{i:06d}.pkl").read_bytes())
        self._take(every, sampled_with, iteration)


@dataclass(frozen=True)
class Dagger(Rival):
    """Let an expert label the states that the policy visits."""

    episodes: int = 16
    """Episodes of an iteration."""
    until: int | None = None
    """Number of iterations at most."""
    judged: int = 10
    """Held-out episodes before and after."""

    def run(self) -> None:
        """Learn, and write the checkpoint."""
        config = RLConfig(
            algorithm="rft",
            episodes=self.episodes,
            steps=40,
            evaluate_every=10**6,
            evaluate_episodes=self.judged,
        )
        run = Labelled(self.settings(), self.out, config)
        print(run.run(3600 * self.budget, self.workers, until=self.until))


class OffsetBackend(WrappedBackend):
    """A backend whose chunks are displaced by a constant offset [6]."""

    def __init__(self, inner: Backend, offset: F64):
        super().__init__(inner)
        self._offset = offset

    def infer(self, request: Request) -> ActionChunk:
        """Return the inner backend's chunk, displaced."""
        chunk = self._inner.infer(request)
        anchors = request.limb_anchors or request.limb_poses
        offset = dict.fromkeys(anchors, self._offset)
        rows = displaced(chunk, anchors, offset, len(chunk.action))
        return replace(chunk, action=rows)


class OffsetSource(PolicySource):
    """Policies with a constant offset [6]."""

    offset: F64 = np.zeros(6)

    def policy(self, condition: Condition, arguments: Mapping[str, Any]) -> Any:
        """Return an episode's policy, and what times its answers."""
        policy, monitor = super().policy(condition, arguments)
        assert isinstance(policy, Cosmos3Policy)
        policy.backend = OffsetBackend(policy.backend, self.offset)
        return policy, monitor


class OffsetWorker(RolloutWorker):
    """Explores around, and evaluates, a policy with a constant offset."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._policies = self._source = OffsetSource(settings)

    def take_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Let the policy have another offset from now on."""
        self._source.offset = np.array(weights["offset"])

    def improvement(self, assignment: Assignment, how: Exploration, seed: int) -> tuple[F64, bool]:
        """Run an episode of groups; return the mean of better offsets [6] relative to the present
        one, and success.
        """
        episode = self.explore(assignment, how, seed)
        better = np.zeros((0, 6))
        if episode.groups:
            rating, tells = rated(np.array([group.rewards for group in episode.groups]))
            offsets = np.array([self._offsets(group) for group in episode.groups])
            better = (2 * (2 * rating - 1)[..., None] * offsets).mean(1)[tells]
        return better.mean(0) if len(better) else np.zeros(6), episode.success

    def _offsets(self, group: Group) -> F64:
        """Return the offsets [K, 6] of a group's chunks from its first."""
        embodiment = get_embodiment(self.settings.embodiment)
        space = embodiment.action_space("midtrain")
        ends = [
            decode_limbs(ActionChunk(rows.astype(float), space, embodiment), {"arm": np.eye(4)})
            for rows in group.rows
        ]
        T = [end.by_limb["arm"].T_base_frame[-1] for end in ends]
        steps = [se3_between(T[0], each) for each in T]
        return np.array([[*step[:3, 3], *so3_log(step[:3, :3])] for step in steps])


@dataclass(frozen=True)
class Offset(Rival):
    """Fit one constant offset of the hand, and measure it."""

    episodes: int = 8
    """Episodes of an iteration."""
    until: int | None = None
    """Number of iterations at most."""
    seeds: int = 200
    """Scenes of the evaluation, those of `evaluate`."""
    learning: RLConfig = field(default_factory=RLConfig)

    def run(self) -> None:
        """Fit and measure; ``offset.json`` has the offset after each iteration."""
        self.out.mkdir(parents=True, exist_ok=True)
        path, settings = self.out / "offset.json", self.settings(seeds=self.episodes)
        fresh = {"offsets": [[0.0] * 6], "success": [], "seconds": 0.0}
        state = load_json(path) if path.exists() else fresh
        make = partial(OffsetWorker, settings)
        with (
            cluster(None, self.workers),
            ActorPool(make, self.workers, settings.episode_timeout) as pool,
        ):
            while state["seconds"] < 3600 * self.budget and (
                self.until is None or len(state["success"]) < self.until
            ):
                self._iterate(pool, state)
                write_json(path, state)
                print(len(state["success"]), state["success"][-1], state["offsets"][-1])
            self._measure(pool, state)

    def _iterate(self, pool: ActorPool, state: dict[str, Any]) -> None:
        started_s, i = time.monotonic(), len(state["success"])
        config, offset = self.learning, np.array(state["offsets"][-1])
        how = Exploration(
            config.pairs, config.shift_cm / 100, np.deg2rad(config.turn_deg), config.grasp
        )
        pool.publish(i + 1, {"offset": offset})
        seed = hashed(_SCENES, i)
        plan = self.settings(seeds=self.episodes, seed=seed).plan()
        calls = [(assignment, how, seed + k) for k, assignment in enumerate(plan)]
        results = pool.results(i, "improvement", calls, i + 1)
        step = _STEP * np.mean([better for better, _ in results], axis=0)
        state["offsets"].append((offset + step).tolist())
        state["success"].append(float(np.mean([success for _, success in results])))
        state["seconds"] += time.monotonic() - started_s

    def _measure(self, pool: ActorPool, state: dict[str, Any]) -> None:
        latest = np.mean(state["offsets"][-10:], axis=0)  # single steps are noisy
        version = len(state["success"]) + 1
        pool.publish(version, {"offset": latest})
        plan = self.settings(seeds=self.seeds, duration=20.0).plan()
        records = pool.results("run", "run", [(assignment,) for assignment in plan], version)
        rate = rate_of([bool(record["success"]) for record in records])
        write_json(self.out / "success.json", {"offset": latest.tolist(), **rate})
        print(rate)


@dataclass(frozen=True)
class WideDemos(Demos):
    """Demonstrations whose wrist camera is up to 5 cm off."""

    def record(self, root: Path, episodes: range) -> None:
        """Record episodes, in a worker process."""
        randomized_scene.WRIST_JITTER_M = _WIDE_M / self.table.visual_randomization
        super().record(root, episodes)


@dataclass(frozen=True)
class Wider(Rival):
    """Record wider demonstrations, and post-train on them."""

    rate: float = 0.7
    """Episodes a second that all workers record together."""
    lr: float = 2e-4
    """Learning rate."""
    batch: int = 48
    """Windows of a step."""
    pilot: int = 10
    """Steps from which the number of all is estimated."""

    def run(self) -> None:
        """Record, train for the time that is left, and write the checkpoint."""
        started_s, budget_s, demos = time.monotonic(), 3600 * self.budget, self.out / "demos"
        if not demos.exists():
            table = DemoConfig(tasks=("pick",), visual_randomization=_LOOKS)
            episodes = max(1, round(budget_s * _RECORDING * self.rate))
            WideDemos(demos, episodes=episodes, workers=self.workers, table=table).run()
        torch.set_num_threads(self.workers)
        config = PostConfig(
            train=("*",),
            steps=10**6,
            batch=self.batch,
            lr=self.lr,
            policy_frames=1,
            stats="packaged",
        )
        run = PostTraining(self.model, demos, self.out / "training", config)
        pilot_s = time.monotonic()
        run.run(self.pilot)
        each_s = (time.monotonic() - pilot_s) / self.pilot
        left_s = budget_s - (time.monotonic() - started_s)
        steps = max(self.pilot + 1, int(left_s / each_s))
        run = PostTraining(self.model, demos, self.out / "training", replace(config, steps=steps))
        print(run.run(), steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of them."""
    rivals = {"dagger": Dagger, "offset": Offset, "wider": Wider}
    tyro.extras.subcommand_cli_from_dict(rivals, args=arguments).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
