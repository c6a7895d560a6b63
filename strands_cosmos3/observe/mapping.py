"""From a flat observation (strands-robots' kind) to :class:`Observation`, and from joint targets to
action dictionaries.

The canonical names are those of the ``joint_pos`` space: ``joint_0`` .. ``joint_6`` and
``gripper``; of a robot with several limbs, with the limb's name before each (``left_joint_0``). A
mapping says which key of the robot stands behind each, and in what unit its grippers are. A view
that the model was trained on is found under its own name (``wrist``), under its key on the openpi
wire (``observation/wrist_image_left``, with or without ``observation/``), under LeRobot's
(``observation.images.wrist``), or under the name that the user maps to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, known_name, of_grippers
from strands_cosmos3.embodiments import (
    GRIPPERS,
    JOINT_POS,
    MODEL_GRIPPER,
    CameraRig,
    GripperConvention,
)
from strands_cosmos3.errors import (
    ConfigError,
    InputError,
    ObservationError,
    ResourceNotFoundError,
    UnknownNameError,
)
from strands_cosmos3.robots.catalogue import PANDA, get_robot
from strands_cosmos3.robots.spec import Limb
from strands_cosmos3.types import Observation

CANONICAL = JOINT_POS.columns
ONE_VIEW = "image"
"""The view of a domain that composes none: its only picture."""
_GRIPPER = CANONICAL[-1]


@dataclass(frozen=True)
class CameraMapping:
    """The views of a rig and the names under which they are found.

    Args:
        views: View -> the names under which it is looked for, in this order.
        mapped: View -> key, for views that the user mapped; they are looked for under that key
            only.
    """

    views: Mapping[str, tuple[str, ...]]
    mapped: Mapping[str, str]

    @property
    def names(self) -> dict[str, str]:
        """Every name that stands for a view -> the view."""
        return {name: view for view, names in self.views.items() for name in names}

    def unmapped(self) -> tuple[str, ...]:
        """Views that the user's mapping leaves out; none if there is no such mapping."""
        return tuple(view for view in self.views if view not in self.mapped) if self.mapped else ()

    def require(self, cameras: Iterable[str]) -> None:
        """Raise ObservationError unless every view is among some cameras' names; the message says
        which are missing, what there is, and how to map it.
        """
        self._keys(list(cameras))

    def read(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pictures by view; ObservationError as :meth:`require`."""
        cameras = [str(name) for name, value in flat.items() if getattr(value, "ndim", 0) == 3]
        alone = cameras[0] if len(cameras) == 1 else None
        return {view: flat[key] for view, key in self._keys(cameras, alone, flat).items()}

    def _keys(
        self, cameras: Sequence[str], alone: str | None = None, flat: Collection[str] = ()
    ) -> dict[str, str]:
        """The key of each view; a domain's only view may be ``alone``, under any name."""
        keys: dict[str, str] = {}
        missing: dict[str, str] = {}
        for view, usual_names in self.views.items():
            names = (self.mapped[view],) if view in self.mapped else usual_names
            key = next((name for name in names if name in (flat or cameras)), None)
            if key is None and view == ONE_VIEW:
                key = alone
            if key is None:
                missing[view] = names[0]
            else:
                keys[view] = key
        if missing:
            named = ", ".join(map(repr, missing.values()))
            listed = ", ".join(map(repr, missing))
            views = "" if named == listed else f" (view {listed})"
            raise ObservationError(
                f"the observation lacks camera {named}{views}; it has: "
                f"{', '.join(cameras) or 'no camera'}. Map another name to it with "
                f"observation_mapping={{{next(iter(missing))!r}: '<its camera>'}}."
            )
        return keys


def _cameras_of(rig: CameraRig | None) -> CameraMapping:
    """The views of a rig, found by name; without a rig, the one picture that there is."""
    if rig is None:
        names = (ONE_VIEW, "observation/image", "observation.images.image")
        return CameraMapping({ONE_VIEW: names}, {})
    views = {
        view: (view, wire, wire.removeprefix("observation/"), f"observation.images.{view}")
        for view, wire in zip(rig.views, rig.wire_names, strict=True)
    }
    return CameraMapping(views, {})


def only_picture(images: Mapping[str, Any], embodiment: str) -> Any:
    """Return the picture of an embodiment that composes no views; ObservationError if there is
    none, or more than one.
    """
    if ONE_VIEW in images:
        return images[ONE_VIEW]
    if len(images) != 1:
        raise ObservationError(
            f"embodiment {embodiment!r} composes no views and takes one picture, got "
            f"{', '.join(images) or 'none'}."
        )
    return next(iter(images.values()))


@dataclass(frozen=True)
class RobotMapping:
    """Keys and units of a robot by canonical name.

    Args:
        observed: Canonical name -> key of the observation.
        commanded: Canonical name -> key of the action.
        cameras: Where to find the views.
        observed_units: Unit of each gripper in observations, by its canonical name.
        commanded_units: Likewise in actions.
    """

    observed: Mapping[str, str]
    commanded: Mapping[str, str]
    cameras: CameraMapping
    observed_units: Mapping[str, GripperConvention]
    commanded_units: Mapping[str, GripperConvention]

    @property
    def joints(self) -> tuple[str, ...]:
        """Canonical names of the joints, base first, limb by limb."""
        return tuple(name for name in self.observed if name not in self.observed_units)

    @property
    def joint_keys(self) -> list[str]:
        """The observation's keys of the joints, base first."""
        return [self.observed[name] for name in self.joints]

    @property
    def joint_commands(self) -> list[str]:
        """The action's keys of the joints, base first."""
        return [self.commanded[name] for name in self.joints]

    @property
    def gripper_keys(self) -> list[str]:
        """The action's keys of the grippers, limb by limb."""
        return [self.commanded[name] for name in self.observed_units]

    def read(
        self,
        flat: Mapping[str, Any],
        t_capture_s: float,
        images: bool = False,
        t_motion_s: float | Callable[[F64], float] | None = None,
        state: bool = True,
    ) -> Observation:
        """Return the observation in a flat dictionary.

        Args:
            flat: Joint angles [rad] and grippers by key, ``<joint>.vel`` [rad/s] where known,
                cameras as uint8 [H, W, 3].
            t_capture_s: Its time stamp.
            images: Whether to read the cameras.
            t_motion_s: Its time on the motion's own clock, or what tells it by the joint angles.
            state: Whether the joints and the grippers must be there. Zeros and an open gripper
                stand for missing ones.

        Raises:
            ObservationError: A key is missing or holds something else; the message lists what there
                is.
        """
        if not isinstance(flat, Mapping):
            raise ObservationError(
                f"an observation is a mapping from names to values, got {type(flat).__name__}."
            )
        if state:
            self.require_state(flat)
        q = [_number(flat, key, 0.0) for key in self.joint_keys]
        qd = [_number(flat, f"{key}.vel", 0.0) for key in self.joint_keys]
        openings = [
            float(unit.to_fraction(_number(flat, self.observed[name], unit.open_value)))
            for name, unit in self.observed_units.items()
        ]
        gripper = of_grippers(np.array(openings))
        views = self.cameras.read(flat) if images else {}
        q_rad = np.array(q)
        at_s = t_motion_s(q_rad) if callable(t_motion_s) else t_motion_s
        return Observation(q_rad, gripper, views, np.array(qd), t_capture_s, at_s)

    def write(
        self, q_rad: NDArray[np.float64], gripper: float | NDArray[np.float64] | None
    ) -> dict[str, float]:
        """One step of actions, as Python floats: joint angles [rad] and the gripper(s) in the
        robot's own unit.
        """
        step = dict(zip(self.joint_commands, map(float, q_rad), strict=True))
        if gripper is not None:
            openings = zip(self.commanded_units.items(), np.atleast_1d(gripper), strict=True)
            for (name, unit), opening in openings:
                step[self.commanded[name]] = float(unit.from_fraction(opening))
        return step

    def with_units_of(self, other: RobotMapping) -> RobotMapping:
        """Return this mapping with another one's units of the commanded grippers, where both
        command the same key.
        """
        same = {
            name: unit
            for name, unit in other.commanded_units.items()
            if self.commanded.get(name) == other.commanded[name]
        }
        return replace(self, commanded_units={**self.commanded_units, **same})

    def commanding(self, units: Sequence[GripperConvention | None]) -> RobotMapping:
        """Return this mapping with other units of the commanded grippers, limb by limb; None
        keeps the present one.
        """
        commanded = {
            name: unit or present
            for (name, present), unit in zip(self.commanded_units.items(), units, strict=True)
        }
        return replace(self, commanded_units=commanded)

    def require_state(self, names: Collection[str]) -> None:
        """Refuse an observation of these names: a joint or a gripper is not among them.

        Raises:
            ObservationError: The message says what is missing and what there is.
        """
        if missing := [name for name, key in self.observed.items() if key not in names]:
            keys = ", ".join(repr(self.observed[name]) for name in missing)
            raise ObservationError(
                f"the observation lacks {keys}; it has: {', '.join(map(str, names)) or 'nothing'}. "
                f"Of the {len(self.observed)} state keys, {', '.join(missing)} has none: give the "
                "policy the robot whose names these are (robot='panda'), or "
                f"observation_mapping={{{missing[0]!r}: '<its key>'}}."
            )


def _number(flat: Mapping[str, Any], key: str, default: float) -> float:
    if key not in flat:
        return default
    with suppress(TypeError, ValueError):
        value = np.asarray(flat[key])
        if value.size == 1 and value.dtype.kind in "fiu":
            return float(value.item())
    raise ObservationError(f"observation {key!r} must be one number, got {flat[key]!r}.")


def resolve_mapping(
    robot: str | None,
    state_keys: Sequence[str] | None = None,
    observation_mapping: Mapping[str, str] | None = None,
    action_mapping: Mapping[str, str] | None = None,
    rig: CameraRig | None = None,
    observed_gripper: str | GripperConvention | None = None,
    commanded_gripper: str | GripperConvention | None = None,
) -> RobotMapping:
    """Return the mapping for a robot: its built-in one, or the user's state keys in order; explicit
    entries win.

    Args:
        robot: Name of a robot, or None. Of several limbs, canonical names begin with the limb's:
            ``left_joint_0``.
        state_keys: Seven joints and a gripper, in order; a robot keeps its own.
        observation_mapping: Canonical or view name -> key of the observation; for cameras also the
            other way round, as strands-robots writes it: camera ->
            ``observation/wrist_image_left``.
        action_mapping: Canonical name -> key of the action.
        rig: The cameras of the embodiment.
        observed_gripper: One of :data:`~.embodiments.GRIPPERS`, or a convention. None is that of
            the robot's finger joint (metres for a Panda's), else the fraction.
        commanded_gripper: Likewise.

    Raises:
        ConfigError: No built-in mapping for the robot, an unknown name in a mapping, two names for
            one key, or a limb that is commanded by another's key.
        InputError: The state keys are malformed, or do not name seven joints and a gripper.
        UnknownNameError: No such gripper unit.
    """
    if state_keys is not None:
        require_state_keys(state_keys)
    limbs = _limbs_of(robot)
    limb_of = {name: limb for limb in limbs for name in _limb_keys(limb, limbs)}
    keys = {name: key for limb in limbs for name, key in _limb_keys(limb, limbs).items()}
    keys = keys or _keys_of(state_keys)
    cameras = _cameras_of(rig)
    states, views = _split(observation_mapping, cameras, tuple(keys))
    observed = {**keys, **states}
    renamed = {name: key for name, key in (action_mapping or {}).items() if name in keys}
    commanded = {**keys, **renamed}
    _require_injective("observation_mapping", observed)
    _require_injective("action_mapping", commanded)
    _require_uncrossed(observed, commanded, limb_of)
    return RobotMapping(
        observed,
        commanded,
        replace(cameras, mapped=views),
        _gripper_units(observed, limb_of, observed_gripper),
        _gripper_units(commanded, limb_of, commanded_gripper),
    )


def _limbs_of(robot: str | None) -> tuple[Limb, ...]:
    """The limbs of a robot, which must have grippers."""
    if robot is None:
        return ()
    try:
        limbs = get_robot(robot).limbs
    except (UnknownNameError, InputError, ConfigError, ResourceNotFoundError) as error:
        raise ConfigError(
            f"robot {robot!r} has no built-in mapping: {error} Or give None with state keys."
        ) from None
    if any(limb.gripper is None for limb in limbs):
        raise ConfigError(
            f"robot {robot!r} has no gripper, and a policy commands one; give None with state keys."
        )
    return limbs


def _limb_keys(limb: Limb, limbs: Sequence[Limb]) -> dict[str, str]:
    """Canonical name -> the limb's joint, and its gripper's first; of one limb of several with
    its name as a prefix.
    """
    prefix = "" if len(limbs) == 1 else f"{limb.name}_"
    fingers = () if limb.gripper is None else limb.gripper.joints
    joints = {f"{prefix}joint_{i}": name for i, name in enumerate(limb.joints)}
    return {**joints, **{f"{prefix}{_GRIPPER}": finger for finger in fingers[:1]}}


def _keys_of(state_keys: Sequence[str] | None) -> dict[str, str]:
    """Canonical name -> the user's key, without a robot."""
    keys = CANONICAL if state_keys is None else state_keys
    if len(keys) != len(CANONICAL):
        raise InputError(
            f"set_robot_state_keys: got {len(keys)} state keys{_missing_of(keys)}; without "
            f"robot='panda' they must be eight, {', '.join(CANONICAL)}, in this order and under "
            "the robot's own names."
        )
    return dict(zip(CANONICAL, keys, strict=True))


def _missing_of(keys: Sequence[str]) -> str:
    """Say which of the eight is missing, by name where the names are known ones, else by place."""
    if len(keys) > len(CANONICAL):
        return f", {', '.join(map(repr, keys[len(CANONICAL) :]))} beyond the eighth"
    for names in (CANONICAL, _limb_keys(PANDA.limb(), PANDA.limbs).values()):
        if set(keys) <= set(names):
            return f", without {', '.join(repr(name) for name in names if name not in keys)}"
    return f", none for {', '.join(CANONICAL[len(keys) :])}"


def _gripper_units(
    keys: Mapping[str, str], limb_of: Mapping[str, Limb], unit: str | GripperConvention | None
) -> dict[str, GripperConvention]:
    """The unit of each gripper, by its canonical name: the given one; or that of its finger joint,
    where it is counted by that.
    """
    if unit is not None and not isinstance(unit, GripperConvention):
        known_name(unit, "gripper unit", GRIPPERS)
        unit = GRIPPERS[unit]
    units: dict[str, GripperConvention] = {}
    for name in (name for name in keys if name.endswith(_GRIPPER)):
        gripper = limb_of.get(name, PANDA.limb()).gripper
        by_finger = gripper is not None and keys[name] in gripper.joints
        units[name] = unit or (gripper.opening if gripper and by_finger else MODEL_GRIPPER)
    return units


def _split(
    mapping: Mapping[str, str] | None, cameras: CameraMapping, canonical: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """An observation mapping's states (one of the ``canonical`` names -> key) and views (view ->
    key).

    Raises:
        ConfigError: An entry names neither; the message lists the valid names.
    """
    states: dict[str, str] = {}
    views: dict[str, str] = {}
    for name, key in _entries("observation_mapping", mapping).items():
        if name in canonical:
            states[name] = key
        elif name in cameras.names:
            views[cameras.names[name]] = key
        elif key in cameras.names and key.startswith("observation/"):
            # camera -> server key, as strands-robots has it
            views[cameras.names[key]] = name
        else:
            raise ConfigError(
                f"observation_mapping: {name!r} is not a canonical name or a view, which it maps "
                "to a key of the observation; valid names: "
                f"{', '.join((*canonical, *cameras.views))}."
            )
    _require_injective("observation_mapping", views)
    return states, views


def rename_columns(
    columns: Sequence[str], action_mapping: Mapping[str, str] | None
) -> tuple[str, ...]:
    """Return an action's columns, renamed by ``action_mapping`` where it names some of them.

    Raises:
        ConfigError: An entry names no column, or two columns would get one name.
    """
    renamed = _entries("action_mapping", action_mapping)
    if unknown := [name for name in renamed if name not in columns]:
        raise ConfigError(
            f"action_mapping: {', '.join(map(repr, unknown))} is not a column of the action; "
            f"valid: {', '.join(columns)}."
        )
    names = {column: renamed.get(column, column) for column in columns}
    _require_injective("action_mapping", names)
    return tuple(names.values())


def _entries(option: str, mapping: Mapping[str, str] | None) -> dict[str, str]:
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping) or not all(
        isinstance(text, str) and text for item in mapping.items() for text in item
    ):
        raise ConfigError(f"{option} maps names to names, got {mapping!r}.")
    return dict(mapping)


def _require_injective(option: str, entries: Mapping[str, str]) -> None:
    twice = [key for key, n in Counter(entries.values()).items() if n > 1]
    if twice:
        names = [name for name, key in entries.items() if key == twice[0]]
        raise ConfigError(
            f"{option}: {' and '.join(map(repr, names))} have the same key {twice[0]!r}; every "
            "name needs its own."
        )


def _require_uncrossed(
    observed: Mapping[str, str], commanded: Mapping[str, str], limb_of: Mapping[str, Limb]
) -> None:
    """Refuse a key that is commanded for one limb, but observed as another's or called after the
    other; names may differ.
    """
    limbs = {limb.name for limb in limb_of.values()}
    if len(limbs) < 2:
        return
    observed_as = {key: name for name, key in observed.items()}

    def limbs_in(key: str) -> set[str]:
        """The limbs whose names are words of a key, such as ``left`` in ``left_joint1``."""
        return set(re.split(r"[\W\d_]+", key.lower())) & limbs

    for name, key in commanded.items():
        of_observed = limbs_in(observed[name])
        of_commanded = limbs_in(key)
        renamed = len(of_observed) == len(of_commanded) == 1 and of_observed != of_commanded
        if limb_of[observed_as.get(key, name)] is not limb_of[name] or renamed:
            raise ConfigError(
                f"{name!r} is observed as {observed[name]!r} and commanded as {key!r}, which is "
                "another arm's; the arms would be exchanged. Map it to one arm in "
                "observation_mapping and action_mapping."
            )


def require_state_keys(state_keys: object) -> None:
    """Raise InputError unless these are distinct, non-empty names in a sequence."""
    if isinstance(state_keys, str) or not isinstance(state_keys, Sequence) or not state_keys:
        raise InputError(
            "set_robot_state_keys: robot_state_keys must be a non-empty list of "
            f"names, got {state_keys!r}."
        )
    if not all(isinstance(key, str) and key.strip() for key in state_keys) or len(
        set(state_keys)
    ) != len(state_keys):
        raise InputError(
            "set_robot_state_keys: each name must be a non-empty string and occur once, "
            f"got {list(state_keys)!r}."
        )
