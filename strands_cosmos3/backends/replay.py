"""A recorded end-effector trajectory as ``midtrain`` chunks: real motion without a model.

Each chunk leads from its anchor to the recording's poses at the rows' times, so a replay corrects its own drift as
a policy would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.actions.rotations import euler_xyz_to_matrix, interpolate_poses, se3
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.checks import F64, finite_array, instance_of, positive, rigid_transform
from strands_cosmos3.embodiments import WIRE_GRIPPER, get_embodiment
from strands_cosmos3.errors import BackendError, InputError, ResourceNotFoundError
from strands_cosmos3.types import ActionChunk, Request

_LINK8_TO_COSMOS = np.array([[0.0, -1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
"""DROID's dataset right-multiplies Rz(+90 deg) onto the recorded panda_link8 poses (cosmos-framework pose_utils)."""
_DROID_FPS = 15.0


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded motion.

    Args:
        T_base_cosmos: [N, 4, 4] poses of the Cosmos frame in the robot's base, the first at time zero.
        gripper: [N] open fractions.
        fps: Poses a second.
        q_start_rad: [7] joint angles of the first pose.
        source: Its origin, in words.
    """

    T_base_cosmos: F64
    gripper: F64
    fps: float
    q_start_rad: F64
    source: str = ""

    def __post_init__(self) -> None:
        T = rigid_transform(self.T_base_cosmos, "T_base_cosmos", batch=True)
        if len(T) < 2:
            raise InputError("a recording needs at least two poses.")
        gripper = finite_array(self.gripper, "gripper", (len(T),))
        if (gripper < 0).any() or (gripper > 1).any():
            raise InputError("gripper holds open fractions in [0, 1] (1 = open).")
        positive(self.fps, "fps")
        for name, value in (
            ("T_base_cosmos", T),
            ("gripper", gripper),
            ("q_start_rad", finite_array(self.q_start_rad, "q_start_rad", (7,))),
        ):
            object.__setattr__(self, name, value)

    @property
    def t_s(self) -> F64:
        """[N] times of the poses."""
        return np.arange(len(self.T_base_cosmos)) / self.fps

    @property
    def duration_s(self) -> float:
        """Time of the last pose."""
        return float(self.t_s[-1])

    def at(self, t_s: F64) -> tuple[F64, F64]:
        """Poses [M, 4, 4] and open fractions [M] at times [M]; the ends hold beyond the recording."""
        t = np.clip(t_s, 0.0, self.duration_s)
        poses = interpolate_poses(self.T_base_cosmos, self.t_s, t)
        nearest = np.clip(np.ceil(t * self.fps - 1e-6).astype(int), 0, len(self.gripper) - 1)
        return poses, self.gripper[nearest]

    def save_npz(self, path: str | Path) -> None:
        """Write the project's own format, which :func:`load_recording` reads back."""
        np.savez_compressed(
            path,
            T_base_cosmos=self.T_base_cosmos,
            gripper=self.gripper,
            fps=self.fps,
            q_start_rad=self.q_start_rad,
            source=self.source,
        )


def load_recording(path: str | Path) -> Recording:
    """Read a recording: a DROID episode as JSON, this project's npz, or the npz of ``rollout --npz``.

    The JSON holds raw DROID poses (panda_link8, xyz and extrinsic xyz Euler angles, 15 Hz), a gripper with 1 = closed, and
    the joint angles of frame 0.

    Raises:
        ResourceNotFoundError: No such file.
        InputError: The file is neither, or lacks a field; the message names it.
    """
    file = Path(path)
    if not file.is_file():
        raise ResourceNotFoundError(
            f"no recording at {str(file)!r}; give a DROID episode (.json), or the .npz of a rollout (rollout --npz)."
        )
    try:
        if file.suffix == ".json":
            return _from_droid(cast("dict[str, Any]", instance_of(json.loads(file.read_text()), dict, "an episode")))
        with np.load(file, allow_pickle=False) as data:
            if "T_base_hand_achieved" in data:
                return _from_rollout(data)
            T, gripper, fps, q = (data[name] for name in ("T_base_cosmos", "gripper", "fps", "q_start_rad"))
            return Recording(T, gripper, float(fps), q, str(data["source"]) if "source" in data else "")
    except KeyError as error:
        raise InputError(f"{str(file)!r} is no recording: it lacks {error}.") from None
    except (ValueError, TypeError, AttributeError, OSError, EOFError, BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(file)!r} is no recording: {error}") from None


def _from_rollout(arrays: Mapping[str, Any]) -> Recording:
    """Return the motion of the arm in a file of ``rollout --npz``, at 15 Hz, with the gripper as it was commanded."""
    t_s = finite_array(arrays["t_s"], "t_s", (None,))
    rows = np.searchsorted(t_s, np.arange(t_s[0], t_s[-1], 1 / _DROID_FPS))
    frame = get_embodiment("droid").tool_frame
    assert frame is not None
    T = np.asarray(arrays["T_base_hand_achieved"])[rows] @ frame.T_parent_cosmos
    q, gripper = arrays["q_achieved_rad"][0], np.clip(arrays["gripper_commanded"][rows], 0.0, 1.0)
    return Recording(T, gripper, _DROID_FPS, q, "a rollout of this project")


def _from_droid(episode: dict[str, Any]) -> Recording:
    rows = finite_array(episode["cartesian_position_xyz_eulerxyz"], "cartesian_position_xyz_eulerxyz", (None, 6))
    T_base_link8 = se3(euler_xyz_to_matrix(rows[:, 3:]), rows[:, :3])
    return Recording(
        T_base_link8 @ _LINK8_TO_COSMOS,
        WIRE_GRIPPER.to_fraction(finite_array(episode["gripper_action"], "gripper_action", (len(rows),))),
        _DROID_FPS,
        episode["joint_position_frame0"],
        str(episode.get("source", "")),
    )


class ReplayBackend(Backend):
    """Replays a recording. The request's motion time says where in the recording the arm should be.

    Args:
        recording: The recording.
    """

    name = "replay"
    requires_images = False
    instruction_free_actions = "a recorded motion"

    def __init__(self, recording: Recording):
        self.recording = recording

    def infer(self, request: Request) -> ActionChunk:
        """Return rows from the anchor along the recording.

        Raises:
            BackendError: The request has no measured pose, or asks for another action space than ``midtrain``.
            ActionOutOfRangeError: The arm is so far from the recording that a row would be out of range.
        """
        if request.T_base_cosmos is None or request.action_space.name != "midtrain":
            raise BackendError("replay answers 'midtrain' chunks from a measured pose; name the robot, e.g. robot='panda'.")
        fps = self.recording.fps
        due_s = request.t_motion_s + request.action_space.row_times_s(request.n_rows, fps)
        poses, gripper = self.recording.at(due_s)
        anchor = request.T_base_cosmos if request.T_base_anchor is None else request.T_base_anchor
        rows = encode_chunk(np.concatenate((anchor[None], poses)), gripper, request.embodiment)
        return ActionChunk(rows, request.action_space, get_embodiment(request.embodiment), fps, seed=request.seed)
