"""Specification of a dataset: features, frame rate, and the schema of an arm's episodes.

Names follow LeRobot (``observation.state``, ``observation.images.<camera>``, ``action``,
``next.done``). A feature's ``info`` documents what LeRobot does not specify, e.g. units and frames;
it is stored in ``meta/info.json``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strands_cosmos3.checks import (
    differences,
    instance_of,
    known_name,
    positive,
    require_type,
    typed,
)
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ConfigError, InputError, ShapeError

STATE = "observation.state"
EE_POSE = "observation.ee_pose"
ACTION = "action"
DONE = "next.done"
SUCCESS = "next.success"
IMAGES = "observation.images."
GRIPPER = "gripper"
"""Column of the state: the measured open fraction."""
POSE_COLUMNS = ("x", "y", "z", "qx", "qy", "qz", "qw")
POSE_MEANING = {"frame": "cosmos", "parent": "base", "unit": "m"}
STATE_MEANING = {"unit": "rad", "gripper_open": 1.0}
"""What the info of poses and states says; a dataset that says otherwise is of other numbers."""
EXPERT = "expert.rows"
LABELLED = "expert.labelled"
INSTRUCTIONS = "instructions"
"""Features of demonstrations: an expert's chunks for several goals, and whether a frame has
them. The first one's info may name the goals' instructions.
"""
VIDEO = "video"
NUMERIC = ("float32", "float64", "int64", "int32", "bool")
MAX_SIDE_PX = 16_384
MAX_COLUMNS = 4096
MAX_FPS = 1000

_KEY = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class Feature:
    """A numeric column or a camera of a dataset.

    Args:
        dtype: ``"float32"``, ``"float64"``, ``"int64"``, ``"int32"``, ``"bool"``, or ``"video"``.
        shape: Shape of one frame's value: [n] for numbers, [H, W, 3] for a camera, height and width
            even.
        names: Name of each of the n numbers, or None.
        info: Further documentation, serializable as JSON; stored in ``meta/info.json``.

    Raises:
        UnknownNameError: The dtype is not supported.
        ShapeError: The shape does not fit the dtype, or the number of names is not n.
        InputError: Two columns have one name.
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)

    def __post_init__(self) -> None:
        kinds = {"dtype": str, "shape": Sequence, "names": Sequence | None, "info": Mapping}
        for name, kind in kinds.items():
            require_type(getattr(self, name), kind, name)
        object.__setattr__(self, "shape", tuple(self.shape))
        shape = list(self.shape)
        known_name(self.dtype, "dtype of a feature", (*NUMERIC, VIDEO))
        if not all(type(side) is int and side > 0 for side in shape):
            raise ShapeError(f"a feature's shape must consist of positive integers, got {shape}.")
        if self.is_video:
            fits = len(shape) == 3 and shape[2] == 3 and not (shape[0] % 2 or shape[1] % 2)
            if not fits or max(shape) > MAX_SIDE_PX:
                raise ShapeError(
                    "a camera's shape must be [H, W, 3] with H and W even and at most "
                    f"{MAX_SIDE_PX} pixels, got {shape}."
                )
        elif len(shape) != 1 or shape[0] > MAX_COLUMNS:
            raise ShapeError(
                f"a numeric feature's shape must be [n] with n at most {MAX_COLUMNS}, got {shape}."
            )
        elif self.names is not None and len(self.names) != shape[0]:
            raise ShapeError(
                f"a feature of shape {shape} needs {shape[0]} names, got {len(self.names)}."
            )
        elif self.names and len(set(self.names)) < len(self.names):
            raise InputError(
                "the names of a feature's columns must differ, got "
                f"{', '.join(map(str, self.names))[:80]}."
            )

    @property
    def is_video(self) -> bool:
        """Whether this is a camera."""
        return self.dtype == VIDEO


_INDEX = Feature("int64", (1,))
BOOKKEEPING: Mapping[str, Feature] = {
    "timestamp": Feature("float32", (1,)),
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), _INDEX),
}
"""Columns of every dataset, filled by the writer."""


@dataclass(frozen=True)
class DatasetSpec:
    """Frame rate and features of a dataset's episodes.

    Args:
        fps: Frames per second, at most 1000; a writer needs a whole number.
        features: Features by key, without the bookkeeping columns.
        robot_type: Name of the robot, e.g. ``"panda"``.

    Raises:
        InputError: The rate is not above zero, a key is invalid, or there is no feature.
        ConfigError: A key is reserved for the writer.
    """

    fps: float
    features: Mapping[str, Feature]
    robot_type: str | None = None

    def __post_init__(self) -> None:
        require_type(self.fps, float, "fps of a dataset")
        rate = positive(self.fps, "fps of a dataset")
        if rate > MAX_FPS:
            raise InputError(f"fps of a dataset must be at most {MAX_FPS}, got {rate!r}.")
        object.__setattr__(self, "fps", int(rate) if rate.is_integer() else rate)
        if self.robot_type is not None:
            instance_of(self.robot_type, str, "robot_type")
        for key, feature in instance_of(self.features, Mapping, "features").items():
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise InputError(
                    "a feature's key must consist of letters, digits, '_' and "
                    f"single dots, got {key!r}."
                )
            if key in BOOKKEEPING:
                raise ConfigError(f"{key!r} is filled by the writer; leave it out of the features.")
            instance_of(feature, Feature, f"feature {key!r}")
        if not self.features:
            raise InputError("a dataset needs at least one feature.")
        object.__setattr__(self, "features", dict(self.features))

    @property
    def cameras(self) -> dict[str, Feature]:
        """The cameras, by key."""
        return {key: feature for key, feature in self.features.items() if feature.is_video}

    @property
    def columns(self) -> dict[str, Feature]:
        """The numeric features, by key."""
        return {key: feature for key, feature in self.features.items() if not feature.is_video}

    def differences(self, other: DatasetSpec) -> list[str]:
        """Describe the differences that keep two specs from sharing one dataset."""
        return differences(self._described(), other._described(), "{} {} and {}", "absent")

    def _described(self) -> dict[str, str]:
        """Return what a dataset has one of; names and info count for numbers only."""
        described = {"fps": repr(self.fps), "robot type": repr(self.robot_type)}
        for key, feature in self.features.items():
            names = "" if feature.names is None else f" ({', '.join(feature.names)})"
            meaning = "" if feature.is_video else f"{names} {dict(feature.info)}"
            described[key] = f"{feature.dtype} {list(feature.shape)}{meaning}"
        return described


@typed()
def camera_key(view: str) -> str:
    """Return the feature key of a view: ``observation.images.<view>``."""
    return IMAGES + view


@typed()
def arm_spec(
    cameras: Mapping[str, tuple[int, int]],
    embodiment: str | Embodiment = "droid",
    fps: int | None = None,
    n_joints: int | Mapping[str, int] = 7,
    robot_type: str = "panda",
    extra: Mapping[str, Feature] | None = None,
) -> DatasetSpec:
    """Return the spec of a dataset recorded with one arm, or with several limbs. docs/datasets.md
    describes each feature.

    Actions are unnormalised ``midtrain`` rows of the commanded Cosmos frame; ``normalize_chunk``
    normalises them. State and poses of several limbs follow each other in the order of the
    embodiment's columns, each with the limb's name before its own.

    Args:
        cameras: View name -> (height, width) in pixels, both even.
        embodiment: Embodiment of the ``midtrain`` rows.
        fps: Frames per second; None means the embodiment's rate.
        n_joints: Number of the only arm's joints; of several limbs, by the limb's name.
        robot_type: Name of the robot.
        extra: Further features by key.

    Raises:
        ConfigError: The embodiment's rows are not pose deltas of these limbs, or the frame rate is
            not a whole number.
    """
    embodiment = get_embodiment(embodiment)
    space = embodiment.action_space("midtrain")
    limbs = [limb for limb in embodiment.limbs if not limb.is_camera]
    names = [limb.name for limb in limbs]
    if not isinstance(n_joints, Mapping):
        n_joints = {names[0] if len(names) == 1 else "arm": n_joints}
    if (
        space.meaning != "pose_delta"
        or set(names) != set(n_joints)
        or any(limb.gripper_column is None for limb in limbs)
    ):
        raise ConfigError(
            f"the rows of {embodiment.name!r} are not pose deltas and grippers of the limbs "
            f"{', '.join(n_joints)}; it moves {', '.join(names) or 'none that its source states'}."
        )
    joints = {limb_prefix(name, names): n_joints[name] for name in names}
    rate = embodiment.fps if fps is None else fps
    if rate is None or rate != int(rate):
        raise ConfigError(
            f"fps must be a whole number, got {rate} (embodiment {embodiment.name!r}); pass fps."
        )
    meaning = {
        "embodiment": embodiment.name,
        "action_space": space.name,
        "normalized": False,
        "frame": "cosmos",
    }
    state = tuple(
        prefix + name
        for prefix, n in joints.items()
        for name in (*(f"joint_{i}" for i in range(n)), GRIPPER)
    )
    poses = tuple(prefix + name for prefix in joints for name in POSE_COLUMNS)
    features = {
        STATE: Feature("float32", (len(state),), state, STATE_MEANING),
        EE_POSE: Feature("float32", (len(poses),), poses, POSE_MEANING),
        ACTION: Feature("float32", (space.width,), space.columns, meaning),
        **dict.fromkeys((DONE, SUCCESS), Feature("bool", (1,))),
        **(extra or {}),
        **{camera_key(view): Feature(VIDEO, (*size, 3)) for view, size in cameras.items()},
    }
    return DatasetSpec(int(rate), features, robot_type)


def limb_prefix(name: str, limbs: Collection[str]) -> str:
    """Return what stands before a limb's columns: its name, or nothing if it is the only one of
    ``limbs``.
    """
    return "" if len(limbs) == 1 else f"{name}_"
