"""Recording of episodes into a dataset: the measured and the commanded motion, at exactly the dataset's times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.actions.rotations import matrix_to_quaternion, se3_between
from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.datasets.episode import EpisodeWriter
from strands_cosmos3.datasets.spec import ACTION, DONE, EE_POSE, STATE, SUCCESS, DatasetSpec, arm_spec, camera_key
from strands_cosmos3.datasets.writer import DatasetWriter
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import PHYSICS_HZ
from strands_cosmos3.robots.spec import Limb, RobotSpec
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.sim.simulated_arm import SimulatedArm
from strands_cosmos3.types import Rollout

Views = Mapping[str, NDArray[np.uint8]]
Observe = Callable[[mujoco.MjData], Views]


@typed()
def rollout_spec(embodiment: str | Embodiment = "droid", robot: RobotSpec = PANDA) -> DatasetSpec:
    """Return the schema of recorded rollouts: :func:`~strands_cosmos3.datasets.arm_spec` with the embodiment's cameras.

    Raises ConfigError if the embodiment's tool frame is not on the robot's hand, or its rate does not divide the physics'.
    """
    embodiment, limb = get_embodiment(embodiment), robot.limb()
    spec = arm_spec(dict.fromkeys(embodiment.view_names, VIEW_HW), embodiment, None, len(limb.joints), robot.name)
    _require_tool(embodiment, limb)
    if PHYSICS_HZ % spec.fps:
        raise ConfigError(f"{spec.fps} frames a second do not divide the physics' {PHYSICS_HZ} Hz.")
    return spec


def _require_tool(embodiment: Embodiment, limb: Limb) -> None:
    if limb.frame_called(embodiment.tool_frame.parent) != limb.frame:
        raise ConfigError(
            f"the tool frame of {embodiment.name!r} is fixed to {embodiment.tool_frame.parent!r} and not to the robot's "
            f"{limb.frame!r}; use an embodiment of this robot, e.g. droid for the Panda's hand."
        )


@dataclass(frozen=True)
class _Sample:
    """Measurements and commands at the time of one frame."""

    state: F64  # [n + 1] measured
    T_base_measured: F64
    T_base_commanded: F64
    gripper_commanded: float
    views: Views


class RolloutRecorder:
    """Records episodes into a dataset.

    At frame i, exactly ``i / fps`` after the start: the measured angles and gripper, the measured pose of the Cosmos frame,
    the views (as the policy sees them: drawn from the kinematics of the physics step that ends there), and the action that
    was commanded from there to frame i + 1: the motion between the **commanded** poses of the Cosmos frame, and the
    gripper's command at i + 1. Rows begin at the pose of frame 0, where the arm rests on its reference; integrated from
    there they are the commanded path, independent of the policy's chunks, of stretched time and of stops.

    The last moment is not a frame, because no command follows it. The writer's spec is :func:`rollout_spec`; the poses are
    those of the embodiment's tool frame.
    """

    def __init__(self, writer: DatasetWriter, embodiment: str | Embodiment = "droid"):
        self._writer = instance_of(writer, DatasetWriter, "writer")
        self._embodiment = get_embodiment(embodiment)
        self._steps_a_frame = PHYSICS_HZ // writer.spec.fps

    @contextmanager
    def recording(self, arm: SimulatedArm, observe: Observe, instruction: str) -> Iterator[Callable[[Rollout], Rollout]]:
        """Record in the block; yields a function that saves the finished rollout and returns it.

        The robot must stand at the episode's beginning, at rest. An exception discards the episode. ConfigError if the
        dataset is another robot's, or the embodiment's tool frame is not on its hand.
        """
        if (robot := arm.scene.robot.name) != (kind := self._writer.spec.robot_type):
            raise ConfigError(f"the dataset has episodes of robot {kind!r}, not {robot!r}; record into another folder.")
        _require_tool(self._embodiment, arm.scene.limb)
        T_hand_cosmos = self._embodiment.tool_frame.T_parent_cosmos
        with self._writer.episode(instruction or "no instruction") as episode:
            step_recorder = _EpisodeRecorder(episode, arm, observe, T_hand_cosmos, self._steps_a_frame)

            def keep(rollout: Rollout) -> Rollout:
                step_recorder.finish(rollout)
                return rollout

            arm.on_step = step_recorder.step
            try:
                yield keep
            finally:
                arm.on_step = None
            if not episode.length:
                episode.discard()


class _EpisodeRecorder:
    """Samples one episode at the dataset's rate."""

    def __init__(self, episode: EpisodeWriter, arm: SimulatedArm, observe: Observe, T_hand_cosmos: F64, steps_a_frame: int):
        self._episode, self._arm, self._observe = episode, arm, observe
        self._T_hand_cosmos, self._steps_a_frame = T_hand_cosmos, steps_a_frame
        self._steps = 0
        self._last = self._sample(arm.executor.reference.q_rad, float(arm.joint_state()[2]))

    def step(self, q_commanded_rad: F64, gripper_commanded: float) -> None:
        """Take note of a physics step with these references at its end."""
        self._steps += 1
        if self._steps % self._steps_a_frame:
            return
        sample = self._sample(q_commanded_rad, gripper_commanded)
        self._write(self._last, sample)
        self._last = sample

    def _sample(self, q_commanded_rad: F64, gripper_commanded: float) -> _Sample:
        q, _, gripper = self._arm.joint_state()
        return _Sample(
            np.append(q, gripper),
            self._arm.scene.kinematics.forward(q) @ self._T_hand_cosmos,
            self._arm.scene.kinematics.forward(q_commanded_rad) @ self._T_hand_cosmos,
            gripper_commanded,
            self._observe(self._arm.data),
        )

    def _write(self, sample: _Sample, after: _Sample) -> None:
        delta = encode_pose_delta(se3_between(sample.T_base_commanded, after.T_base_commanded))
        T = sample.T_base_measured
        frame: dict[str, Any] = {
            STATE: sample.state,
            EE_POSE: np.concatenate((T[:3, 3], matrix_to_quaternion(T[:3, :3]))),
            ACTION: np.append(delta, after.gripper_commanded),
            DONE: False,
            SUCCESS: False,
        }
        self._episode.add(frame | {camera_key(name): view for name, view in sample.views.items()})

    def finish(self, rollout: Rollout) -> None:
        """Save the episode if it has a frame."""
        if not self._episode.length:
            return
        self._episode.replace_last(DONE, True)
        self._episode.replace_last(SUCCESS, bool(rollout.success))
        note = {
            "seed": rollout.seed,
            "task": rollout.task,
            "outcome": str(rollout.outcome),
            "success": rollout.success,
            "model_sha256": rollout.model_sha256,
        }
        self._episode.save(note)
