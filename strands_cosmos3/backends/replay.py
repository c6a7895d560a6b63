"""A recorded end-effector trajectory as ``midtrain`` chunks: real motion without a model.

Each chunk leads from its anchor to the recording's poses at the rows' times, so a replay corrects
its own drift as a policy would.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, is_zipfile

import numpy as np

from strands_cosmos3.actions.decode import encode_limbs
from strands_cosmos3.actions.rotations import euler_xyz_to_matrix, interpolate_poses, se3
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.checks import (
    F64,
    finite_array,
    instance_of,
    positive,
    rigid,
    whole_number,
    within,
)
from strands_cosmos3.embodiments import WIRE_GRIPPER, ToolFrame, get_embodiment
from strands_cosmos3.errors import BackendError, ConfigError, InputError, ResourceNotFoundError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.types import ActionChunk, Request

if TYPE_CHECKING:
    from strands_cosmos3.datasets.reader import RecordedEpisode

_LINK8_TO_COSMOS = np.array(
    [[0.0, -1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
)
"""DROID's dataset right-multiplies Rz(+90 deg) onto the recorded panda_link8 poses
(cosmos-framework pose_utils).
"""
_DROID_FPS = 15.0


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded motion.

    Args:
        T_base_cosmos: [N, 4, 4] poses of the Cosmos frame in the robot's base, the first at time
            zero.
        gripper: [N] open fractions.
        fps: Poses a second.
        q_start_rad: [n] joint angles of the first pose.
        source: Its origin, in words.
    """

    T_base_cosmos: F64
    gripper: F64
    fps: float
    q_start_rad: F64
    source: str = ""

    def __post_init__(self) -> None:
        T = rigid(self.T_base_cosmos, "T_base_cosmos", 1)
        if len(T) < 2:
            raise InputError("a recording needs at least two poses.")
        gripper = within(self.gripper, "gripper", 0.0, 1.0, (len(T),))
        positive(self.fps, "fps")
        for name, value in (
            ("T_base_cosmos", T),
            ("gripper", gripper),
            ("q_start_rad", finite_array(self.q_start_rad, "q_start_rad", (None,))),
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
        """Poses [M, 4, 4] and open fractions [M] at times [M]; the ends hold beyond the
        recording.
        """
        t = np.clip(t_s, 0.0, self.duration_s)
        poses = interpolate_poses(self.T_base_cosmos, self.t_s, t)
        nearest = np.clip(np.ceil(t * self.fps - 1e-6).astype(int), 0, len(self.gripper) - 1)
        return poses, self.gripper[nearest]

    def save_npz(self, path: str | Path) -> None:
        """Write the project's own format, which :func:`load_recording` reads back."""
        np.savez_compressed(path, **vars(self))


@dataclass(frozen=True, eq=False)
class LimbRecording:
    """A recorded motion of a robot's limbs.

    Args:
        by_limb: The motion of each limb, by the limb's name, with poses in its own base; all have
            the same times.
        embodiment: Name of the embodiment whose tool frames they are of; None, of a file, is
            DROID's tool frame in the rows of any single arm.
        robot: Name of the robot that moved, if it is known.
    """

    by_limb: Mapping[str, Recording]
    embodiment: str | None = "droid"
    robot: str | None = None

    def __post_init__(self) -> None:
        instance_of(self.by_limb, Mapping, "by_limb")
        get_embodiment(self.embodiment or "droid")
        times = {
            (len(instance_of(motion, Recording, f"recording of {name!r}").t_s), motion.fps)
            for name, motion in self.by_limb.items()
        }
        if len(times) != 1:
            raise InputError(
                "by_limb holds the recording of one limb or more, all of them with the same times."
            )

    @property
    def fps(self) -> float:
        """Poses a second."""
        return next(iter(self.by_limb.values())).fps

    @property
    def duration_s(self) -> float:
        """Time of the last pose."""
        return next(iter(self.by_limb.values())).duration_s

    def tool_frame(self, limb: str) -> ToolFrame:
        """Return the tool frame that a robot's limb is recorded with; that of one limb needs no
        common name.
        """
        embodiment = get_embodiment(self.embodiment or "droid")
        if len(self.by_limb) == 1:
            return embodiment.tool_frame
        frames = {columns.name: columns.tool_frame for columns in embodiment.limbs}
        return frames.get(limb, embodiment.tool_frame)

    def named_as(self, limbs: Collection[str]) -> Mapping[str, Recording]:
        """Return the recording by limb; that of one limb has the name of a robot's only one."""
        if len(limbs) == len(self.by_limb) == 1:
            return dict(zip(limbs, self.by_limb.values(), strict=True))
        return self.by_limb

    def of_limbs(self, limbs: Iterable[Any]) -> dict[str, Recording]:
        """Return the recording of each of a robot's limbs, joined by name; two arms of one limb
        need no common name.

        Args:
            limbs: :class:`~strands_cosmos3.robots.spec.Limb`, in the robot's order.

        Raises:
            ConfigError: The recording has other limbs, or a limb another number of joints.
        """
        n_joints = {limb.name: len(limb.joints) for limb in limbs}
        joined = self.named_as(n_joints)
        recorded = {name: len(motion.q_start_rad) for name, motion in joined.items()}
        if recorded != n_joints:
            have, expected = (
                ", ".join(f"{name} ({n} joints)" for name, n in counts.items())
                for counts in (recorded, n_joints)
            )
            raise ConfigError(
                f"the recording moves {have}, and the robot has {expected}; name the robot "
                "that it is of (--robot)."
            )
        return {name: joined[name] for name in n_joints}


def load_episode(folder: str | Path, episode: int = 0) -> LimbRecording:
    """Read an episode of a dataset (``rollout --dataset``) as it was commanded, limb by limb.

    Raises:
        InputError: There is no such episode.
        DatasetError: The folder is no dataset, or it does not say which columns belong to which
            limb.
    """
    with needed_by("a dataset"):
        from strands_cosmos3.datasets import Dataset
    with Dataset(folder) as dataset:
        if not len(dataset):
            raise InputError(f"{str(folder)!r} has no episodes.")
        number = whole_number(episode, "the episode", 0, len(dataset) - 1)
        return commanded_motion(dataset[number])


def commanded_motion(episode: RecordedEpisode) -> LimbRecording:
    """Return an episode of an open dataset as it was commanded. Errors: as :func:`load_episode`."""
    from strands_cosmos3.datasets.reader import embodiment_of, recorded_limbs

    dataset = episode.dataset
    motions = {
        name: Recording(
            limb.T_base_commanded,
            np.append(limb.gripper[:1], limb.gripper_commanded),
            dataset.fps,
            limb.q_rad[0],
            f"episode {episode.index} of {dataset.root}",
        )
        for name, limb in recorded_limbs(episode).items()
    }
    return LimbRecording(motions, embodiment_of(episode).name, dataset.spec.robot_type)


def recording_at(path: str | Path, episode: int | None = None) -> Recording | LimbRecording:
    """Read a file as :func:`load_recording` does, or an episode of a dataset's folder, by default
    the first.

    Raises:
        InputError: An episode of a file; else as those functions.
    """
    if Path(path).is_dir():
        return load_episode(path, 0 if episode is None else episode)
    if episode is not None:
        raise InputError(
            f"{str(path)!r} is no dataset's folder, so it has no episode {episode}; leave the "
            "episode out."
        )
    return load_recording(path)


def load_recording(path: str | Path) -> Recording:
    """Read a recording: a DROID episode as JSON, this project's npz, or the npz of ``rollout
    --npz``.

    The JSON holds raw DROID poses (panda_link8, xyz and extrinsic xyz Euler angles, 15 Hz), a
    gripper with 1 = closed, and the joint angles of frame 0.

    Raises:
        ResourceNotFoundError: No such file.
        InputError: The file is neither, or lacks a field; the message names it.
    """
    file = Path(path)
    if not file.is_file():
        raise ResourceNotFoundError(
            f"no recording at {str(file)!r}; give a DROID episode (.json), or the .npz of a "
            "rollout (rollout --npz)."
        )
    try:
        if file.suffix == ".json":
            episode: Any = json.loads(file.read_text(encoding="utf-8-sig"))
            instance_of(episode, dict, "an episode")
            return _from_droid(episode)
        if not is_zipfile(file):
            raise InputError(f"{str(file)!r} is no recording: it is neither .json nor .npz.")
        with np.load(file, allow_pickle=False) as data:
            if "T_base_hand_achieved" in data:
                return _from_rollout(data)
            if "q_achieved_rad" in data:
                raise InputError(
                    f"{str(file)!r} is of several limbs; record a dataset (rollout --dataset) and "
                    "replay its folder."
                )
            T, gripper, fps, q = (
                data[name] for name in ("T_base_cosmos", "gripper", "fps", "q_start_rad")
            )
            return Recording(
                T, gripper, float(fps), q, str(data["source"]) if "source" in data else ""
            )
    except KeyError as error:
        raise InputError(f"{str(file)!r} is no recording: it lacks {error}.") from None
    except (ValueError, TypeError, AttributeError, OSError, EOFError, BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(file)!r} is no recording: {error}") from None


def _from_rollout(arrays: Mapping[str, Any]) -> Recording:
    """Return the motion of the arm in a file of ``rollout --npz``, at 15 Hz, with the gripper as
    it was commanded.
    """
    t_s = finite_array(arrays["t_s"], "t_s", (None,))
    rows = np.searchsorted(t_s, np.arange(t_s[0], t_s[-1], 1 / _DROID_FPS))
    frame = get_embodiment("droid").tool_frame
    assert frame is not None
    T = np.asarray(arrays["T_base_hand_achieved"])[rows] @ frame.T_parent_cosmos
    # droid's frame is a Panda's
    q = finite_array(arrays["q_achieved_rad"], "q_achieved_rad", (len(t_s), 7))[0]
    gripper = np.clip(arrays["gripper_commanded"][rows], 0.0, 1.0)
    return Recording(T, gripper, _DROID_FPS, q, "a rollout of this project")


def _from_droid(episode: dict[str, Any]) -> Recording:
    rows = finite_array(
        episode["cartesian_position_xyz_eulerxyz"], "cartesian_position_xyz_eulerxyz", (None, 6)
    )
    T_base_link8 = se3(euler_xyz_to_matrix(rows[:, 3:]), rows[:, :3])
    return Recording(
        T_base_link8 @ _LINK8_TO_COSMOS,
        WIRE_GRIPPER.to_fraction(
            finite_array(episode["gripper_action"], "gripper_action", (len(rows),))
        ),
        _DROID_FPS,
        finite_array(episode["joint_position_frame0"], "joint_position_frame0", (7,)),
        str(episode.get("source", "")),
    )


def replay_backend(model: Recording | LimbRecording | str | Path) -> ReplayBackend:
    """Return the backend that replays a recording, or the one at a path (:func:`recording_at`)."""
    is_recording = isinstance(model, Recording | LimbRecording)
    return ReplayBackend(model if is_recording else recording_at(model))


class ReplayBackend(Backend):
    """Replays a recording. The request's motion time says where in the recording the arm should be.

    Args:
        recording: The recording, of one arm or by limb.
    """

    info = BackendInfo(
        name="replay",
        requires_images=False,
        preferred_space="midtrain",
        instruction_free_actions="a recorded motion",
    )

    def __init__(self, recording: Recording | LimbRecording):
        if isinstance(recording, Recording):
            recording = LimbRecording({"arm": recording}, None)
        self.recording = recording
        self.info = replace(self.info, recorded_robot=recording.robot)

    def infer(self, request: Request) -> ActionChunk:
        """Return rows from each limb's anchor along its recording; two single arms need no common
        name.

        Raises:
            BackendError: The request has no measured pose, asks for another action space than
                ``midtrain``, or is for another embodiment or other limbs than the recording.
            ActionOutOfRangeError: The arm is so far from the recording that a row would be out of
                range.
        """
        recording = self.recording
        anchors = request.departures
        space = request.action_space
        if space.name != "midtrain":
            raise BackendError(f"replay answers 'midtrain' chunks, not {space.name!r}.")
        embodiment = get_embodiment(recording.embodiment or request.embodiment)
        motions = recording.named_as(anchors)
        if request.embodiment.name != embodiment.name or set(anchors) != set(motions):
            raise BackendError(
                f"the recording is of embodiment {embodiment.name!r} and moves "
                f"{', '.join(motions)}; it cannot be replayed for {request.embodiment.name!r} with "
                f"the limbs {', '.join(anchors) or 'of no robot'}. Name the robot that it is of, "
                "e.g. robot='panda', and its embodiment."
            )
        due_s = request.t_motion_s + space.row_times_s(request.n_rows, recording.fps)
        poses: dict[str, F64] = {}
        grippers: dict[str, F64] = {}
        for name, motion in motions.items():
            ahead, grippers[name] = motion.at(due_s)
            poses[name] = np.concatenate((anchors[name][None], ahead))
        rows = encode_limbs(poses, grippers, embodiment)
        return ActionChunk(rows, space, embodiment, recording.fps, seed=request.seed)
