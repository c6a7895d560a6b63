"""What a rollout worker does: episodes in which each visited state is a group of chunks, run from
there one by one in physics alone.

Chunks are executed whole, even where the policy replans earlier: an offset is largest at a chunk's
end, and there it shows whether it was a good one.

The episode goes on after a member that is drawn, never chosen by its reward. Where a session cannot
return to a state, or its world does not say how far a task has come, only that member is run, and
its worth is the sum of the rewards from there on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.backends.base import Backend, WrappedBackend
from strands_cosmos3.backends.engine_backend import EngineBackend
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.evaluation.plan import Assignment, Condition
from strands_cosmos3.evaluation.runner import UNUSABLE, AssignmentRunner
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.training.adapters import merged_weights
from strands_cosmos3.training.rl.exploration import Exploration, group_of
from strands_cosmos3.training.rl.groups import Group
from strands_cosmos3.training.rl.value import returns_of
from strands_cosmos3.types import ActionChunk, JointTrajectory, Request
from strands_cosmos3.worlds import Session
from strands_cosmos3.worlds.arms import ArmSession
from strands_cosmos3.worlds.world import Executed

_TICKS = 4  # between two looks at the goal
_SUCCESS, _FAULT, _HELD, _TOUCHED = 1.0, 1.0, 0.5, 0.5
"""Reward of success, and penalties of a fault, of a chunk that limits or collisions hold, and of
touching what stands fixed.
"""
_OWN = 0.5  # how often an episode goes on after the policy's own chunk


@dataclass(frozen=True, eq=False)
class Episode:
    """An episode's groups in the order of time, and how it went."""

    groups: list[Group]
    success: bool
    cpu_s: float
    shift_m: float  # mean distance of the chunks' ends that were tried from their mean
    unusable: bool  # whether an answer that no chunk can be made of ended it


class BranchedBackend(WrappedBackend):
    """A backend that can be made to answer other rows than its own.

    Attributes:
        rows: [T, D] rows to answer; None asks the inner backend.
        request, chunk: The latest request that the inner backend answered, and its answer.
    """

    request: Request
    chunk: ActionChunk

    def __init__(self, inner: Backend):
        super().__init__(inner)
        self.rows: NDArray[np.float64] | None = None

    def infer(self, request: Request) -> ActionChunk:
        """Return the inner backend's answer, or these rows."""
        if self.rows is not None:
            return replace(self.chunk, action=self.rows, scores={})  # no inference to be counted
        self.request, self.chunk = request, self._inner.infer(request)
        return self.chunk


class RolloutWorker(AssignmentRunner):
    """Runs an evaluation's episodes, and episodes of groups, with weights that it is given."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._domain = get_embodiment(settings.embodiment).domain_id
        self._base: dict[str, torch.Tensor] = {}  # weights that adapters are added to
        self._whole = False
        for first in settings.plan(seeds=1):
            self.session.reset(first.start)
            self._whole |= not self.session.can_restore or self.session.potential() is None

    def take_weights(self, weights: Mapping[str, NDArray[np.float32]]) -> None:
        """Let the policy answer with other weights from now on; with adapters, they are added."""
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        engine = self._native(self.settings.conditions[0]).engine
        assert isinstance(engine, Cosmos3Engine)  # a replica's ranks keep their weights
        tower = engine.transformer

        def base(name: str) -> torch.Tensor:
            if name not in self._base:
                own = tower.get_parameter(name.removeprefix("transformer."))
                self._base[name] = own.detach().clone()
            return self._base[name]

        engine.take_weights(merged_weights(tensors, base), self._domain)

    def explore(self, assignment: Assignment, how: Exploration, seed: int) -> Episode:
        """Run an episode of groups; ``seed`` is that of offsets and of the members that it goes on
        after.

        Raises:
            Cosmos3Error: Something other than a chunk or an answer failed.
        """
        session, rng = self.session, np.random.default_rng(seed)
        policy, branched, monitor = self.begin(assignment)
        cpu_s, duration_s, groups, spreads = time.process_time(), 0.0, list[Group](), list[float]()
        horizon_s = self.settings.duration_s(assignment.task)
        executed, unusable = Executed(False, 0.0), False
        whole = self._whole or how.whole_episodes
        while not executed.ended and duration_s < horizon_s:
            try:
                branch = Branching(session, policy, branched, assignment.policy_instruction, whole)
                rows = group_of(branched.chunk, branch.anchors, how, rng)
            except UNUSABLE:  # as in an evaluation, the episode has failed
                if monitor.lost is not None:
                    raise
                unusable = True
                break
            goes_on = 0 if rng.random() < _OWN else int(rng.integers(len(rows)))
            tried = [goes_on] if whole else range(len(rows))
            rewards, counts = list[float](), list[int]()
            for member in tried:
                reward, result = branch.run(rows[member])
                rewards.append(reward)
                counts.append(result.rows)
                if member == goes_on:
                    executed = result
                    kept = None if whole else session.save(policy)
            if kept is not None:  # pyright: ignore[reportPossiblyUnbound]
                session.restore(kept, policy)
            duration_s += executed.duration_s or horizon_s
            rows = [rows[member] for member in tried]
            groups.append(self.group(assignment, branched.request, branch, rows, rewards, counts))
            if branch.ends_m:  # no arm may follow the only chunk, or rows name no poses
                ends = np.array(branch.ends_m)
                spreads.append(float(np.linalg.norm(ends - ends.mean(0), axis=1).mean()))
        spread_m = float(np.mean(spreads)) if spreads else 0.0
        cpu_s = time.process_time() - cpu_s
        if whole:
            returns = returns_of([float(group.rewards[0]) for group in groups])
            groups = [
                replace(group, rewards=np.array([worth]))
                for group, worth in zip(groups, returns, strict=True)
            ]
        return Episode(groups, executed.success, cpu_s, spread_m, unusable)

    def begin(self, assignment: Assignment) -> tuple[Cosmos3Policy, BranchedBackend, Any]:
        """Begin an episode; return its policy, that one's backend, and what saw a lost replica."""
        policy, monitor = self._begin(assignment)
        assert isinstance(policy, Cosmos3Policy)  # of a checkpoint
        if isinstance(self.session, ArmSession):
            # as in a run: rows that would collide hold the arm
            policy.set_obstacles(self.session.robot.scene.obstacles)
        branched = policy.backend = BranchedBackend(policy.backend)
        policy.reset(assignment.noise_seed(None))
        return policy, branched, monitor

    def _native(self, condition: Condition) -> EngineBackend:
        backend = self._policies.backend_for(condition)
        assert isinstance(backend, EngineBackend)  # the command takes checkpoints only
        return backend

    def group(
        self,
        assignment: Assignment,
        request: Request,
        branch: Branching,
        rows: list[F64],
        rewards: list[float],
        counts: list[int],
    ) -> Group:
        """Return a visited state with the chunks that were run from it."""
        backend, rig = self._native(assignment.condition), request.embodiment.rig
        (seen,) = backend.engine_requests([request])
        pixels = [seen.cond_video_pixels]
        if branch.plain_views is not None and rig is not None:
            plain = backend.compose(branch.plain_views, rig)
            (unseen,) = backend.engine_requests([replace(request, composite=plain)])
            plain_pixels = unseen.cond_video_pixels
            # the start policy's answer to the run's own pictures is what is to change
            if not torch.equal(plain_pixels, pixels[0]):
                pixels.append(plain_pixels)
        assert seen.neg_text_ids is not None  # a processor made it
        engine, (_, height, width) = backend.engine, seen.video_shape
        assert isinstance(engine, Cosmos3Engine)
        with torch.inference_mode():
            latents = engine.vae.encode(torch.cat(pixels).to(engine.device))
        of_pictures = latents[..., :height, :width].float().cpu().numpy()
        state = seen.action_prefix
        of_state = np.empty(0) if state is None else state[0, : seen.raw_action_dim].cpu().numpy()
        return Group(
            of_pictures[0],
            of_pictures[1] if len(pixels) > 1 else np.empty(0, np.float32),
            of_state.astype(np.float32),
            tuple(seen.text_ids[0].tolist()),
            tuple(seen.neg_text_ids[0].tolist()),
            np.stack(rows).astype(np.float32),
            np.array(rewards),
            np.array(counts),
        )


class Branching:
    """A visited state, its question to the policy, and the chunks that are run from it."""

    def __init__(
        self,
        session: Session,
        policy: Cosmos3Policy,
        branched: BranchedBackend,
        instruction: str,
        whole: bool,
    ):
        self._session, self._policy, self._branched = session, policy, branched
        self._instruction, self.observation = instruction, session.observation()
        self._state = None if whole else session.save(policy)
        self._of_policy, self._before = policy.snapshot(), session.potential() or 0.0
        self.plain_views = session.plain_views()
        branched.rows = None
        policy.plan(self.observation, instruction)
        request = branched.request
        self.anchors = request.limb_anchors or request.limb_poses
        self.ends_m: list[F64] = []

    def run(self, rows: F64) -> tuple[float, Executed]:
        """Run a chunk from the state; return its reward, and what it did."""
        session, branched = self._session, self._branched
        if self._state is None:
            self._policy.restore(self._of_policy)
        else:
            session.restore(self._state, self._policy)
        branched.rows = rows
        try:
            plan = self._policy.plan(self.observation, self._instruction)
            if isinstance(plan, JointTrajectory):
                arm = next(iter(plan.limb_poses.values()))
                self.ends_m.append(arm.T_base_frame[-1, :3, 3])
            executed = session.execute(plan, ticks=_TICKS)
        except UNUSABLE as error:
            return -_FAULT, Executed(False, 0.0, str(error))
        reward = (session.potential() or 0.0) - self._before + _SUCCESS * executed.success
        reward -= _FAULT * (executed.fault is not None) + _TOUCHED * executed.touched
        held = plan.held if isinstance(plan, JointTrajectory) else None
        return reward - (0.0 if held is None else _HELD * float(held.mean())), executed
