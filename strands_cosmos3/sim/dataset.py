"""Recording of episodes into a dataset: the measured and the commanded motion, at exactly the
dataset's times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.actions.rotations import se3_between
from strands_cosmos3.checks import F64
from strands_cosmos3.datasets.arm_rows import pose7
from strands_cosmos3.datasets.spec import (
    ACTION,
    DONE,
    EE_POSE,
    STATE,
    SUCCESS,
    DatasetSpec,
    arm_spec,
    camera_key,
)
from strands_cosmos3.datasets.writer import DatasetWriter, EpisodeWriter
from strands_cosmos3.embodiments import Embodiment, LimbColumns, get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import PHYSICS_HZ
from strands_cosmos3.robots.spec import Limb, RobotSpec, join_arms
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.sim.scene import SceneLimb
from strands_cosmos3.sim.simulated_arm import SimulatedArm
from strands_cosmos3.types import Rollout

Views = Mapping[str, NDArray[np.uint8]]
Observe = Callable[[mujoco.MjData], Views]


def rollout_spec(embodiment: str | Embodiment = "droid", robot: RobotSpec = PANDA) -> DatasetSpec:
    """Return the schema of recorded rollouts: :func:`~strands_cosmos3.datasets.arm_spec` with the
    embodiment's cameras.

    Raises ConfigError if the embodiment has other limbs than the robot, if a tool frame of it is
    not on the robot's hand, or if its rate does not divide the physics'.
    """
    embodiment = get_embodiment(embodiment)
    joints = {columns.name: len(limb.joints) for limb, columns in _joined(robot, embodiment)}
    cameras = dict.fromkeys(embodiment.view_names, VIEW_HW)
    spec = arm_spec(cameras, embodiment, None, joints, robot.name)
    if PHYSICS_HZ % spec.fps:
        raise ConfigError(f"{spec.fps} frames a second do not divide the physics' {PHYSICS_HZ} Hz.")
    return spec


def _joined(robot: RobotSpec, embodiment: Embodiment) -> list[tuple[Limb, LimbColumns]]:
    """The robot's limbs with their columns, in the columns' order."""
    order = [columns.name for columns in embodiment.limbs]
    joined = sorted(join_arms(robot, embodiment), key=lambda pair: order.index(pair[1].name))
    for limb, columns in joined:
        if limb.frame_called(columns.tool_frame.parent) != limb.frame:
            raise ConfigError(
                f"the tool frame of {embodiment.name!r} is fixed to {columns.tool_frame.parent!r} "
                "and not to the robot's "
                f"{limb.frame!r}; use an embodiment of this robot, e.g. droid for the Panda's hand."
            )
    return joined


@dataclass(frozen=True)
class _Sample:
    """Measurements and commands at the time of one frame, limb by limb in the columns' order."""

    state: F64  # [sum of n + 1] measured
    T_base_measured: list[F64]
    T_base_commanded: list[F64]
    gripper_commanded: list[float]
    views: Views


class RolloutRecorder:
    """Records episodes into a dataset.

    At frame i, exactly ``i / fps`` after the start: the measured angles and gripper, the measured
    pose of the Cosmos frame, the views (as the policy sees them: drawn from the kinematics of the
    physics step that ends there), and the action that was commanded from there to frame i + 1: the
    motion between the **commanded** poses of the Cosmos frame, and the gripper's command at i + 1.
    Rows begin at the pose of frame 0, where the arm rests on its reference; integrated from there
    they are the commanded path, independent of the policy's chunks, of stretched time and of stops.

    The last moment is not a frame, because no command follows it. The writer's spec is
    :func:`rollout_spec`; the poses are those of the embodiment's tool frame. Of several limbs, each
    has its own columns, joined by name, and poses in its own base.

    Attributes:
        saved: Number of episodes that were saved; one that ended before its first frame is not.
    """

    def __init__(self, writer: DatasetWriter, embodiment: str | Embodiment = "droid"):
        self._writer = writer
        self._embodiment = get_embodiment(embodiment)
        self._steps_a_frame = round(PHYSICS_HZ / writer.spec.fps)
        self.saved = 0

    @contextmanager
    def recording(
        self, arm: SimulatedArm, observe: Observe, instruction: str
    ) -> Iterator[Callable[[Rollout], Rollout]]:
        """Record in the block; yields a function that saves the finished rollout and returns it.

        The robot must stand at the episode's beginning, at rest. An exception discards the episode.
        ConfigError if the dataset is another robot's, or the embodiment's tool frame is not on its
        hand.
        """
        if (robot := arm.scene.robot.name) != (kind := self._writer.spec.robot_type):
            raise ConfigError(
                f"the dataset has episodes of robot {kind!r}, not {robot!r}; "
                "record into another folder."
            )
        limbs = [
            (arm.scene.limbs[limb.name], columns)
            for limb, columns in _joined(arm.scene.robot, self._embodiment)
        ]
        with self._writer.episode(instruction or "no instruction") as episode:
            steps = _EpisodeRecorder(
                episode, arm, observe, limbs, self._embodiment, self._steps_a_frame
            )
            arm.on_step = steps.step
            try:
                yield steps.finish
            finally:
                arm.on_step = None
            if episode.length:
                self.saved += 1
            else:
                episode.discard()


@dataclass(eq=False)
class _EpisodeRecorder:
    """Samples one episode at the dataset's rate."""

    _episode: EpisodeWriter
    _arm: SimulatedArm
    _observe: Observe
    _limbs: list[tuple[SceneLimb, LimbColumns]]
    _embodiment: Embodiment
    _steps_a_frame: int

    def __post_init__(self) -> None:
        order = list(self._arm.scene.limbs)
        self._gripper_of = [order.index(limb.limb.name) for limb, _ in self._limbs]
        still = encode_pose_delta(np.eye(4))
        self._still_row = np.zeros(self._embodiment.action_space("midtrain").width)
        for columns in self._embodiment.limbs:
            self._still_row[columns.pose] = still
        self._steps = 0
        at_rest = self._arm.executor.reference
        self._last = self._sample(at_rest.q_rad, self._arm.joint_state()[2])

    def step(self, q_commanded_rad: F64, gripper_commanded: float | F64) -> None:
        """Take note of a physics step with these references at its end."""
        self._steps += 1
        if self._steps % self._steps_a_frame:
            return
        sample = self._sample(q_commanded_rad, gripper_commanded)
        self._write(self._last, sample)
        self._last = sample

    def _sample(self, q_commanded_rad: F64, gripper_commanded: float | F64) -> _Sample:
        q, _, gripper = self._arm.joint_state()
        measured, commanded = (
            np.atleast_1d(values)[self._gripper_of] for values in (gripper, gripper_commanded)
        )
        own = [
            np.append(q[limb.columns], opening)
            for (limb, _), opening in zip(self._limbs, measured, strict=True)
        ]
        poses = self._poses(q)
        poses_commanded = self._poses(q_commanded_rad)
        views = self._observe(self._arm.data)
        return _Sample(np.concatenate(own), poses, poses_commanded, commanded.tolist(), views)

    def _poses(self, q_rad: F64) -> list[F64]:
        """The pose [4, 4] of each limb's Cosmos frame in its base."""
        return [
            limb.kinematics.forward(q_rad[limb.columns]) @ columns.tool_frame.T_parent_cosmos
            for limb, columns in self._limbs
        ]

    def _write(self, sample: _Sample, after: _Sample) -> None:
        row = self._still_row.copy()
        for i, (_, columns) in enumerate(self._limbs):
            row[columns.pose] = encode_pose_delta(
                se3_between(sample.T_base_commanded[i], after.T_base_commanded[i])
            )
            if columns.gripper is not None and columns.gripper_column is not None:
                row[columns.gripper_column] = columns.gripper.from_fraction(
                    after.gripper_commanded[i]
                )
        frame: dict[str, Any] = {
            STATE: sample.state,
            EE_POSE: pose7(np.stack(sample.T_base_measured)).ravel(),
            ACTION: row,
            DONE: False,
            SUCCESS: False,
        }
        self._episode.add(frame | {camera_key(name): view for name, view in sample.views.items()})

    def finish(self, rollout: Rollout) -> Rollout:
        """Save the episode if it has a frame; return its rollout."""
        if self._episode.length:
            self._episode.replace_last(DONE, True)
            self._episode.replace_last(SUCCESS, bool(rollout.success))
            names = "seed", "task", "success", "model_sha256"
            note = {name: getattr(rollout, name) for name in names}
            self._episode.save({**note, "outcome": str(rollout.outcome)})
        return rollout
