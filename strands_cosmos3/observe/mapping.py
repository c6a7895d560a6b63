"""From a flat observation (strands-robots' kind) to :class:`Observation`, and from joint targets to action dictionaries.

The canonical names are those of the ``joint_pos`` space: ``joint_0`` .. ``joint_6`` and ``gripper``. A mapping says which
key of the robot stands behind each, and in what unit its gripper is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.embodiments import JOINT_POS, MODEL_GRIPPER, PANDA_FINGER, GripperConvention
from strands_cosmos3.errors import ConfigError, InputError, ObservationError
from strands_cosmos3.types import Observation

CANONICAL = JOINT_POS.columns
_JOINTS, _GRIPPER = CANONICAL[:-1], CANONICAL[-1]
_PANDA_KEYS = {**{f"joint_{i}": f"joint{i + 1}" for i in range(7)}, "gripper": "finger_joint1"}
_ROBOTS = {"panda": _PANDA_KEYS, "franka": _PANDA_KEYS}
_GRIPPER_UNITS = {"finger_joint1": PANDA_FINGER, "finger_joint2": PANDA_FINGER}


@dataclass(frozen=True)
class RobotMapping:
    """Which keys of a robot stand behind the canonical names.

    Args:
        observed: Canonical name (or view name) -> key of the observation.
        commanded: Canonical name -> key of the action.
    """

    observed: Mapping[str, str]
    commanded: Mapping[str, str]

    def read(self, flat: Mapping[str, Any], t_capture_s: float, views: Sequence[str] = ()) -> Observation:
        """The observation behind a flat dictionary.

        Args:
            flat: Joint angles [rad] and a gripper by key, ``<joint>.vel`` [rad/s] where known, cameras as uint8 [H, W, 3].
            t_capture_s: Its time stamp.
            views: Cameras that must be there.

        Raises:
            ObservationError: A key is missing or holds something else; the message lists what there is.
        """
        if not isinstance(flat, Mapping):
            raise ObservationError(f"an observation is a mapping from names to values, got {type(flat).__name__}.")
        q = [self._number(flat, self.observed[name]) for name in _JOINTS]
        qd = [self._number(flat, f"{self.observed[name]}.vel", default=0.0) for name in _JOINTS]
        key = self.observed[_GRIPPER]
        gripper = float(_unit(key).to_fraction(self._number(flat, key)))
        images = {view: self._image(flat, self.observed.get(view, view)) for view in views}
        return Observation(np.array(q), gripper, images, np.array(qd), t_capture_s)

    def write(self, q_rad: NDArray[np.float64], gripper: float | None) -> dict[str, float]:
        """One step of actions, as Python floats: joint angles [rad] and the gripper in the robot's own unit."""
        step = {self.commanded[name]: float(angle) for name, angle in zip(_JOINTS, q_rad, strict=True)}
        if gripper is not None:
            key = self.commanded[_GRIPPER]
            step[key] = float(_unit(key).from_fraction(gripper))
        return step

    def _number(self, flat: Mapping[str, Any], key: str, default: float | None = None) -> float:
        if key not in flat:
            if default is not None:
                return default
            raise ObservationError(f"the observation lacks {key!r}; it has: {', '.join(map(str, flat)) or 'nothing'}.")
        try:
            value = np.asarray(flat[key])
            if value.size != 1 or value.dtype.kind not in "fiu":
                raise ValueError("not a single number")
            return float(value.reshape(()))
        except (TypeError, ValueError):
            raise ObservationError(f"observation {key!r} must be one number, got {flat[key]!r}.") from None

    def _image(self, flat: Mapping[str, Any], key: str) -> Any:
        if key not in flat:
            cameras = [str(name) for name, value in flat.items() if getattr(value, "ndim", 0) == 3]
            raise ObservationError(
                f"the observation lacks camera {key!r}; it has: {', '.join(cameras) or 'no camera'}. Map another name to "
                "it with observation_mapping={'<view>': '<key>'}."
            )
        return flat[key]


def resolve_mapping(
    robot: str | None,
    state_keys: Sequence[str] | None = None,
    observation_mapping: Mapping[str, str] | None = None,
    action_mapping: Mapping[str, str] | None = None,
) -> RobotMapping:
    """The mapping for a robot: its built-in one, or the user's state keys in order, with explicit entries winning.

    Raises:
        ConfigError: The robot has no built-in mapping; the message lists those that have.
        InputError: The state keys are malformed, or do not name seven joints and a gripper.
    """
    if robot is not None and robot not in _ROBOTS:
        raise ConfigError(f"robot {robot!r} has no built-in mapping; valid: {', '.join(_ROBOTS)}, or None with state keys.")
    if state_keys is not None:
        _require_keys(state_keys)
    keys = dict(zip(CANONICAL, CANONICAL, strict=True))
    if robot is not None:
        keys = dict(_ROBOTS[robot])
    elif state_keys is not None:
        if len(state_keys) != len(CANONICAL):
            raise InputError(
                f"{len(state_keys)} state keys; without robot='panda' they must be eight, seven joints and a gripper, in order."
            )
        keys = dict(zip(CANONICAL, state_keys, strict=True))
    return RobotMapping({**keys, **(observation_mapping or {})}, {**keys, **(action_mapping or {})})


def _require_keys(state_keys: Sequence[str]) -> None:
    if isinstance(state_keys, str) or not isinstance(state_keys, Sequence) or not state_keys:
        raise InputError(f"state keys are a non-empty list of names, got {state_keys!r}.")
    if not all(isinstance(key, str) and key for key in state_keys) or len(set(state_keys)) != len(state_keys):
        raise InputError(f"state keys must be non-empty strings, each once; got {list(state_keys)!r}.")


def _unit(key: str) -> GripperConvention:
    return _GRIPPER_UNITS.get(key, MODEL_GRIPPER)
