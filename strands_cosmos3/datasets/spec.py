"""What a dataset holds: its features, their types and shapes, its frame rate; the schema of an arm's episodes.

The names follow LeRobot (``observation.state``, ``observation.images.<camera>``, ``action``, ``next.done``). What LeRobot
leaves open is stated in a feature's ``info``, which travels in ``meta/info.json`` beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from strands_cosmos3.checks import instance_of, whole_number
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ConfigError, InputError, ShapeError, UnknownNameError

STATE = "observation.state"
EE_POSE = "observation.ee_pose"
ACTION = "action"
DONE = "next.done"
SUCCESS = "next.success"
IMAGES = "observation.images."
POSE_COLUMNS = ("x", "y", "z", "qx", "qy", "qz", "qw")
VIDEO = "video"
NUMERIC = ("float32", "float64", "int64", "int32", "bool")
MAX_SIDE_PX = 16_384
MAX_COLUMNS = 4096

_KEY = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Feature:
    """One column of a dataset, or one camera.

    Args:
        dtype: ``"float32"``, ``"float64"``, ``"int64"``, ``"int32"``, ``"bool"``, or ``"video"``.
        shape: Of one frame's value: [n] for numbers, [H, W, 3] for a camera, height and width even.
        names: One name for each of the n numbers, or None.
        info: Whatever a reader must know beside that, JSON-ready; it is kept in ``meta/info.json``.

    Raises:
        UnknownNameError: No such dtype.
        ShapeError: The shape is not of that kind, or the names are not as many as the numbers.
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=lambda: _NOTHING, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.dtype not in (*NUMERIC, VIDEO):
            raise UnknownNameError("dtype of a feature", self.dtype, (*NUMERIC, VIDEO))
        sides = [side for side in self.shape if isinstance(side, int) and not isinstance(side, bool) and side > 0]
        if len(sides) != len(self.shape):
            raise ShapeError(f"a feature's shape holds whole numbers above zero, got {list(self.shape)}.")
        if self.dtype == VIDEO:
            if len(sides) != 3 or sides[2] != 3 or sides[0] % 2 or sides[1] % 2 or max(sides) > MAX_SIDE_PX:
                raise ShapeError(
                    f"a camera's shape is [H, W, 3] with H and W even and at most {MAX_SIDE_PX}, got {list(self.shape)}."
                )
        elif len(sides) != 1 or sides[0] > MAX_COLUMNS:
            raise ShapeError(f"a numeric feature's shape is [n] with n at most {MAX_COLUMNS}, got {list(self.shape)}.")
        elif self.names is not None and len(self.names) != sides[0]:
            raise ShapeError(f"a feature of {sides[0]} numbers needs as many names, got {len(self.names)}.")

    def __reduce__(self) -> tuple[Any, ...]:  # a read-only view of a dictionary cannot be pickled
        return Feature, (self.dtype, self.shape, self.names, dict(self.info))

    @property
    def is_video(self) -> bool:
        """Whether it is a camera."""
        return self.dtype == VIDEO


BOOKKEEPING: Mapping[str, Feature] = MappingProxyType(
    {
        "timestamp": Feature("float32", (1,)),
        "frame_index": Feature("int64", (1,)),
        "episode_index": Feature("int64", (1,)),
        "index": Feature("int64", (1,)),
        "task_index": Feature("int64", (1,)),
    }
)
"""Columns of every dataset, filled by the writer."""


@dataclass(frozen=True)
class DatasetSpec:
    """What every episode of a dataset holds.

    Args:
        fps: Frames a second, a whole number.
        features: Feature by key, without the bookkeeping columns.
        robot_type: Which robot, e.g. ``"panda"``.

    Raises:
        InputError: A rate that is no whole number above zero, a key that cannot be a file's name, or no feature at all.
        ConfigError: A key that belongs to the writer.
    """

    fps: int
    features: Mapping[str, Feature]
    robot_type: str | None = None

    def __post_init__(self) -> None:
        whole_number(self.fps, "fps of a dataset", 1, 1000)
        for key, feature in instance_of(self.features, Mapping, "features").items():
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise InputError(f"a feature's key is made of letters, digits, '_' and single dots, got {key!r}.")
            if key in BOOKKEEPING:
                raise ConfigError(f"{key!r} is filled by the writer; leave it out of the features.")
            instance_of(feature, Feature, f"feature {key!r}")
        if not self.features:
            raise InputError("a dataset needs at least one feature.")
        object.__setattr__(self, "features", MappingProxyType(dict(self.features)))

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetSpec, (self.fps, dict(self.features), self.robot_type)

    @property
    def cameras(self) -> dict[str, Feature]:
        """The cameras, by key."""
        return {key: feature for key, feature in self.features.items() if feature.is_video}

    @property
    def columns(self) -> dict[str, Feature]:
        """The numeric features, by key."""
        return {key: feature for key, feature in self.features.items() if not feature.is_video}

    def differences(self, other: DatasetSpec) -> list[str]:
        """What keeps two specs from sharing one dataset, in words; nothing where they may."""
        found = [
            f"{name} {mine!r} and {theirs!r}"
            for name, mine, theirs in (
                ("fps", self.fps, other.fps),
                ("robot type", self.robot_type, other.robot_type),
            )
            if mine != theirs
        ]
        for key in sorted({*self.features, *other.features}):
            mine, theirs = self.features.get(key), other.features.get(key)
            if mine is None or theirs is None:
                found.append(f"{key} {'absent' if mine is None else 'present'} and {'absent' if theirs is None else 'present'}")
            elif mine != theirs:
                found.append(f"{key} {_brief(mine)} and {_brief(theirs)}")
            elif not mine.is_video and mine.info != theirs.info:
                found.append(f"{key} {dict(mine.info)} and {dict(theirs.info)}")
        return found


def _brief(feature: Feature) -> str:
    names = "" if feature.names is None or feature.is_video else f" ({', '.join(feature.names)})"
    return f"{feature.dtype} {list(feature.shape)}{names}"


def camera_key(view: str) -> str:
    """The feature key of a camera's view: ``observation.images.<view>``."""
    return IMAGES + view


def arm_spec(
    cameras: Mapping[str, tuple[int, int]],
    embodiment: str | Embodiment = "droid",
    fps: int | None = None,
    n_joints: int = 7,
    robot_type: str = "panda",
    extra: Mapping[str, Feature] | None = None,
) -> DatasetSpec:
    """The schema of an arm's episodes. At frame i, time ``i / fps``:

    - ``observation.state`` [n + 1]: measured joint angles [rad], then the gripper's open fraction (1 = open).
    - ``observation.ee_pose`` [7]: measured pose of the **Cosmos frame** in the robot's base: position [m], quaternion xyzw.
    - ``action`` [10]: the ``midtrain`` row towards frame i + 1, **raw** (not normalised): translation [m] and rot6d of the
      commanded Cosmos frame at i + 1 seen from the one at i, then the commanded open fraction. Raw, because statistics
      can be computed from it and any can be applied to it; ``normalize_chunk`` turns it into the model's own scale.
    - ``next.done``, ``next.success`` [1]: whether the episode ends, and has succeeded, with this frame.
    - ``observation.images.<view>`` [H, W, 3].

    Args:
        cameras: View name -> (height, width) in pixels, both even.
        embodiment: Whose ``midtrain`` rows; it must be one arm's.
        fps: Frames a second; the embodiment's own by default.
        n_joints: Joints of the arm.
        robot_type: Which robot.
        extra: More features, by key.

    Raises:
        ConfigError: The embodiment's rows are not one arm's pose delta, or it has no rate and none is given.
    """
    embodiment = get_embodiment(embodiment)
    space = embodiment.action_space("midtrain")
    if space.meaning != "pose_delta" or space.width > 10:
        raise ConfigError(f"the rows of {embodiment.name!r} are not one arm's pose delta; build a DatasetSpec of your own.")
    rate = embodiment.fps if fps is None else fps
    if rate is None or rate != int(rate):
        raise ConfigError(f"embodiment {embodiment.name!r} has no whole frame rate of its own ({rate}); pass fps.")
    meaning = {"embodiment": embodiment.name, "action_space": space.name, "normalized": False, "frame": "cosmos"}
    joints = tuple(f"joint_{i}" for i in range(n_joints))
    features = {
        STATE: Feature("float32", (n_joints + 1,), (*joints, "gripper"), {"unit": "rad", "gripper_open": 1.0}),
        EE_POSE: Feature("float32", (7,), POSE_COLUMNS, {"frame": "cosmos", "parent": "base", "unit": "m"}),
        ACTION: Feature("float32", (space.width,), space.columns, meaning),
        DONE: Feature("bool", (1,)),
        SUCCESS: Feature("bool", (1,)),
        **dict(extra or {}),
        **{camera_key(view): Feature(VIDEO, (*size, 3)) for view, size in cameras.items()},
    }
    return DatasetSpec(int(rate), features, robot_type)
