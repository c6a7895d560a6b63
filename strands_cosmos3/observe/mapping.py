"""From a flat observation (strands-robots' kind) to :class:`Observation`, and from joint targets to
action dictionaries.

The canonical names are those of the ``joint_pos`` space: ``joint_0`` .. ``joint_6`` and
``gripper``. A mapping says which key of the robot stands behind each, and in what unit its gripper
is. A view that the model was trained on is found under its own name (``wrist``), under its key on
the openpi wire (``observation/wrist_image_left``, with or without ``observation/``), under LeRobot's
(``observation.images.wrist``), or under the name that the user maps to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import of_grippers
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

ONE_VIEW = "image"
"""The view of a domain that composes none: its only picture."""


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

    def with_mapped(self, given: Mapping[str, str]) -> CameraMapping:
        """The same views, those in ``given`` (view -> key) looked for under that key."""
        return CameraMapping(self.views, {**self.mapped, **given})

    def unmapped(self) -> tuple[str, ...]:
        """Views that the user's mapping leaves out; none if there is no such mapping."""
        return tuple(view for view in self.views if view not in self.mapped) if self.mapped else ()

    def key_of(self, view: str, names: Iterable[str]) -> str | None:
        """The name that holds a view, or None."""
        have = set(names)
        return next((name for name in self._candidates(view) if name in have), None)

    def require(self, names: Iterable[str]) -> None:
        """Refuse names among which a view is not.

        Raises:
            ObservationError: The message says which views are missing, what there is, and how to
                map it.
        """
        names = tuple(names)
        if missing := [view for view in self.views if self.key_of(view, names) is None]:
            raise _lacks([self._candidates(view)[0] for view in missing], missing, names)

    def read(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The pictures by view.

        Raises:
            ObservationError: One is missing; the message says which, what there is, and how to map
                it.
        """
        cameras = [str(name) for name, value in flat.items() if getattr(value, "ndim", 0) == 3]
        found = {view: self.key_of(view, flat) for view in self.views}
        if found.get(ONE_VIEW, "") is None and len(cameras) == 1:
            found[ONE_VIEW] = cameras[0]
        if missing := [view for view, key in found.items() if key is None]:
            raise _lacks([self._candidates(view)[0] for view in missing], missing, cameras)
        return {view: flat[key] for view, key in found.items() if key is not None}

    def _candidates(self, view: str) -> tuple[str, ...]:
        return (self.mapped[view],) if view in self.mapped else self.views[view]


def cameras_of(rig: CameraRig | None) -> CameraMapping:
    """The views of a rig, found by name; without a rig, the one picture that there is."""
    if rig is None:
        return CameraMapping(
            {ONE_VIEW: (ONE_VIEW, "observation/image", "observation.images.image")}, {}
        )
    views = {
        view: (view, wire, wire.removeprefix("observation/"), f"observation.images.{view}")
        for view, wire in zip(rig.views, rig.wire_names, strict=True)
    }
    return CameraMapping(views, {})


def _lacks(looked_for: list[str], views: list[str], cameras: Iterable[str]) -> ObservationError:
    of = "" if looked_for == views else f" (view {', '.join(map(repr, views))})"
    return ObservationError(
        f"the observation lacks camera {', '.join(map(repr, looked_for))}{of}; it has: "
        f"{', '.join(cameras) or 'no camera'}. "
        f"Map another name to it with observation_mapping={{{views[0]!r}: '<its camera>'}}."
    )


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


CANONICAL = JOINT_POS.columns
_GRIPPER = CANONICAL[-1]


def _limb_keys(limb: Limb, prefix: str = "") -> dict[str, str]:
    """Canonical name -> the limb's joint, and its gripper's first; of one limb of several with
    its name as a prefix.
    """
    joints = {f"{prefix}joint_{i}": name for i, name in enumerate(limb.joints)}
    return (
        joints
        if limb.gripper is None
        else {**joints, f"{prefix}{_GRIPPER}": limb.gripper.joints[0]}
    )


def _prefix(limb: Limb, limbs: tuple[Limb, ...]) -> str:
    return "" if len(limbs) == 1 else f"{limb.name}_"


_PANDA_KEYS = _limb_keys(PANDA.limbs[0])


@dataclass(frozen=True)
class RobotMapping:
    """Which keys of a robot stand behind the canonical names.

    Args:
        observed: Canonical name -> key of the observation.
        commanded: Canonical name -> key of the action.
        cameras: Where to find the views.
        observed_gripper: Unit of the observation's gripper.
        commanded_gripper: Unit of the action's gripper.
        gripper_units: Instead of both, by the gripper's canonical name, of a robot with several.
        commanded_units: Instead of these for actions, likewise.
    """

    observed: Mapping[str, str]
    commanded: Mapping[str, str]
    cameras: CameraMapping
    observed_gripper: GripperConvention = MODEL_GRIPPER
    commanded_gripper: GripperConvention = MODEL_GRIPPER
    gripper_units: Mapping[str, GripperConvention] = field(
        default_factory=lambda: MappingProxyType({})
    )
    commanded_units: Mapping[str, GripperConvention] = field(
        default_factory=lambda: MappingProxyType({})
    )

    @property
    def joints(self) -> tuple[str, ...]:
        """Canonical names of the joints, base first, limb by limb."""
        return tuple(name for name in self.observed if not name.endswith(_GRIPPER))

    @property
    def grippers(self) -> tuple[str, ...]:
        """Canonical names of the grippers, limb by limb."""
        return tuple(name for name in self.observed if name.endswith(_GRIPPER))

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
        return [self.commanded[name] for name in self.grippers]

    def read(
        self,
        flat: Mapping[str, Any],
        t_capture_s: float,
        images: bool = False,
        t_motion_s: float | None = None,
        state: bool = True,
    ) -> Observation:
        """Return the observation in a flat dictionary.

        Args:
            flat: Joint angles [rad] and a gripper by key, ``<joint>.vel`` [rad/s] where known,
                cameras as uint8 [H, W, 3].
            t_capture_s: Its time stamp.
            images: Whether to read the cameras.
            t_motion_s: Its time on the motion's own clock.
            state: Whether the joints and the gripper must be there. Zeros and an open gripper stand
                for missing ones.

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
        missing = None if state else 0.0
        q = [self._number(flat, key, missing) for key in self.joint_keys]
        qd = [self._number(flat, f"{key}.vel", default=0.0) for key in self.joint_keys]
        opening = [
            float(
                self.gripper_units.get(name, self.observed_gripper).to_fraction(
                    self._number(flat, self.observed[name])
                )
            )
            if state or self.observed[name] in flat
            else 1.0
            for name in self.grippers
        ]
        gripper = of_grippers(np.array(opening))
        views = self.cameras.read(flat) if images else {}
        return Observation(np.array(q), gripper, views, np.array(qd), t_capture_s, t_motion_s)

    def write(
        self, q_rad: NDArray[np.float64], gripper: float | NDArray[np.float64] | None
    ) -> dict[str, float]:
        """One step of actions, as Python floats: joint angles [rad] and the gripper(s) in the
        robot's own unit.
        """
        step = {
            self.commanded[name]: float(angle)
            for name, angle in zip(self.joints, q_rad, strict=True)
        }
        for name, opening in zip(
            self.grippers,
            () if gripper is None else np.atleast_1d(gripper),
            strict=gripper is not None,
        ):
            unit = {**self.gripper_units, **self.commanded_units}.get(name, self.commanded_gripper)
            step[self.commanded[name]] = float(unit.from_fraction(opening))
        return step

    def with_unit_of(self, other: RobotMapping) -> RobotMapping:
        """Return this mapping with the unit of another one's commanded gripper(s), where both
        command the same key.
        """
        kept = {
            name: unit
            for name, unit in other.commanded_units.items()
            if self.commanded.get(name) == other.commanded[name]
        }
        same = self.commanded.get(_GRIPPER) == other.commanded.get(_GRIPPER)
        return replace(
            self,
            commanded_units=kept,
            **({"commanded_gripper": other.commanded_gripper} if same else {}),
        )

    def commanding(self, units: Sequence[GripperConvention | None]) -> RobotMapping:
        """Return this mapping with other units of the commanded grippers, limb by limb; None
        keeps the present one.
        """
        if len(units) != len(self.grippers):
            raise InputError(
                f"{len(units)} units for the grippers {', '.join(self.grippers)}; give one for "
                "each."
            )
        found = {
            name: unit for name, unit in zip(self.grippers, units, strict=True) if unit is not None
        }
        if self.grippers == (_GRIPPER,):
            return replace(self, commanded_gripper=found.get(_GRIPPER, self.commanded_gripper))
        return replace(self, commanded_units=found)

    def require_state(self, names: Collection[str]) -> None:
        """Refuse an observation of these names: a joint or the gripper is not among them.

        Raises:
            ObservationError: The message says what is missing and what there is.
        """
        if missing := [name for name, key in self.observed.items() if key not in names]:
            have = ", ".join(map(str, names)) or "nothing"
            keys = ", ".join(repr(self.observed[name]) for name in missing)
            raise ObservationError(
                f"the observation lacks {keys}; it has: {have}. Of the {len(self.observed)} state "
                "keys, "
                f"{', '.join(missing)} has none: give the policy the robot whose names these are "
                "(robot='panda'), or "
                f"observation_mapping={{{missing[0]!r}: '<its key>'}}."
            )

    def _number(self, flat: Mapping[str, Any], key: str, default: float | None = None) -> float:
        if default is not None and key not in flat:
            return default
        try:
            value = np.asarray(flat[key])
            if value.size != 1 or value.dtype.kind not in "fiu":
                raise ValueError("not a single number")
            return float(value.reshape(()))
        except (TypeError, ValueError):
            raise ObservationError(
                f"observation {key!r} must be one number, got {flat[key]!r}."
            ) from None


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
        observed_gripper: One of :data:`~.embodiments.GRIPPERS`, or a convention. None is that of the robot's
            finger joint (metres for a Panda's), else the fraction.
        commanded_gripper: Likewise.

    Raises:
        ConfigError: No built-in mapping for the robot, an unknown name in a mapping, two names for
            one key, or a limb that is commanded by another's key.
        InputError: The state keys are malformed, or do not name seven joints and a gripper.
        UnknownNameError: No such gripper unit.
    """
    keys = _keys_of(limbs := _limbs_of(robot), state_keys)
    states, views = split_observation_mapping(observation_mapping, cameras_of(rig), tuple(keys))
    observed = {**keys, **states}
    commanded = {
        **keys,
        **{name: key for name, key in (action_mapping or {}).items() if name in keys},
    }
    for what, entries in (("observation_mapping", observed), ("action_mapping", commanded)):
        _require_injective(what, entries)
    _require_uncrossed(observed, commanded, limbs)
    cameras = cameras_of(rig).with_mapped(views)
    if len(limbs) > 1:
        own = {
            f"{_prefix(limb, limbs)}{_GRIPPER}": limb.gripper.opening
            for limb in limbs
            if limb.gripper is not None
        }
        units = {} if observed_gripper or commanded_gripper else own
        return RobotMapping(
            observed,
            commanded,
            cameras,
            _gripper(observed_gripper, "", None),
            _gripper(commanded_gripper, "", None),
            units,
        )
    limb = limbs[0] if limbs else None
    return RobotMapping(
        observed,
        commanded,
        cameras,
        _gripper(observed_gripper, observed[_GRIPPER], limb),
        _gripper(commanded_gripper, commanded[_GRIPPER], limb),
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


def _keys_of(limbs: tuple[Limb, ...], state_keys: Sequence[str] | None) -> dict[str, str]:
    """Canonical name -> the robot's key."""
    if state_keys is not None:
        require_state_keys(state_keys)
    if limbs:
        return {
            name: key
            for limb in limbs
            for name, key in _limb_keys(limb, _prefix(limb, limbs)).items()
        }
    keys = CANONICAL if state_keys is None else state_keys
    if len(keys) != len(CANONICAL):
        raise InputError(
            f"set_robot_state_keys: got {len(keys)} state keys{_missing_of(keys)}; without "
            "robot='panda' they must be eight, "
            f"{', '.join(CANONICAL)}, in this order and under the robot's own names."
        )
    return dict(zip(CANONICAL, keys, strict=True))


def _missing_of(keys: Sequence[str]) -> str:
    """Say which of the eight is missing, by name where the names are known ones, else by place."""
    if len(keys) > len(CANONICAL):
        return f", {', '.join(map(repr, keys[len(CANONICAL) :]))} beyond the eighth"
    for known in (dict(zip(CANONICAL, CANONICAL, strict=True)), _PANDA_KEYS):
        if set(keys) <= set(known.values()):
            return f", without {', '.join(repr(key) for key in known.values() if key not in keys)}"
    return f", none for {', '.join(CANONICAL[len(keys) :])}"


def split_observation_mapping(
    given: Mapping[str, str] | None, cameras: CameraMapping, canonical: Sequence[str] = CANONICAL
) -> tuple[dict[str, str], dict[str, str]]:
    """An observation mapping's states (one of the ``canonical`` names -> key) and views (view ->
    key).

    Raises:
        ConfigError: An entry names neither; the message lists the valid names.
    """
    states: dict[str, str] = {}
    views: dict[str, str] = {}
    for name, key in _entries("observation_mapping", given):
        if name in canonical:
            states[name] = key
        elif name in cameras.names:
            views[cameras.names[name]] = key
        elif key in cameras.names and key.startswith("observation/"):
            # camera -> server key, as strands-robots has it
            views[cameras.names[key]] = name
        else:
            raise ConfigError(
                f"observation_mapping: {name!r} stands for nothing. It maps a canonical name to a "
                "key of the observation; "
                f"valid names: {', '.join((*canonical, *cameras.views))}."
            )
    _require_injective("observation_mapping", views)
    return states, views


def rename_columns(
    columns: Sequence[str], action_mapping: Mapping[str, str] | None
) -> tuple[str, ...]:
    """What an action's raw columns are called, where ``action_mapping`` names some of them.

    Raises:
        ConfigError: An entry names no column, or two columns would get one name.
    """
    given = dict(_entries("action_mapping", action_mapping))
    if unknown := [name for name in given if name not in columns]:
        raise ConfigError(
            f"action_mapping: {', '.join(map(repr, unknown))} is no column of the action; valid: "
            f"{', '.join(columns)}."
        )
    names = {column: given.get(column, column) for column in columns}
    _require_injective("action_mapping", names)
    return tuple(names.values())


def _entries(what: str, given: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if given is None:
        return []
    if not isinstance(given, Mapping) or not all(
        isinstance(text, str) and text for item in given.items() for text in item
    ):
        raise ConfigError(f"{what} maps names to names, got {given!r}.")
    return list(given.items())


def _require_injective(what: str, entries: Mapping[str, str]) -> None:
    twice = [key for key, n in Counter(entries.values()).items() if n > 1]
    if twice:
        names = [name for name, key in entries.items() if key == twice[0]]
        raise ConfigError(
            f"{what}: {' and '.join(map(repr, names))} both stand for {twice[0]!r}; every name "
            "needs its own key."
        )


def _require_uncrossed(
    observed: Mapping[str, str], commanded: Mapping[str, str], limbs: tuple[Limb, ...]
) -> None:
    """Refuse a key that is commanded for one limb, but observed as another's or called after the
    other; names may differ.
    """
    limb_of = {name: limb.name for limb in limbs for name in _limb_keys(limb, _prefix(limb, limbs))}
    observed_as = {key: name for name, key in observed.items()}
    for name, key in commanded.items() if len(limbs) > 1 else ():
        seen, called = _limbs_called(observed[name], limbs), _limbs_called(key, limbs)
        other = observed_as.get(key, name)
        if limb_of[other] != limb_of[name] or (len(seen) == len(called) == 1 and seen != called):
            raise ConfigError(
                f"{name!r} is observed as {observed[name]!r} and commanded as {key!r}, which is "
                "another arm's; the arms would "
                "be exchanged. Map it to one arm in observation_mapping and action_mapping."
            )


def _limbs_called(key: str, limbs: tuple[Limb, ...]) -> set[str]:
    """The limbs whose names are words of a key, such as ``left`` in ``left_joint1``."""
    return set(re.split(r"[\W\d_]+", key.lower())) & {limb.name for limb in limbs}


def _gripper(
    given: str | GripperConvention | None, key: str, limb: Limb | None
) -> GripperConvention:
    if given is None:
        own = (PANDA.limbs[0] if limb is None else limb).gripper
        return own.opening if own is not None and key in own.joints else MODEL_GRIPPER
    if isinstance(given, GripperConvention):
        return given
    if not isinstance(given, str) or given not in GRIPPERS:
        raise UnknownNameError("gripper unit", given, GRIPPERS)
    return GRIPPERS[given]


def require_state_keys(state_keys: object) -> None:
    """Raise InputError unless these are distinct, non-empty names in a sequence."""
    if isinstance(state_keys, str) or not isinstance(state_keys, Sequence) or not state_keys:
        raise InputError(
            "set_robot_state_keys: robot_state_keys must be a non-empty list of names, got "
            f"{state_keys!r}."
        )
    if not all(isinstance(key, str) and key.strip() for key in state_keys) or len(
        set(state_keys)
    ) != len(state_keys):
        raise InputError(
            "set_robot_state_keys: each name must be a non-empty string and occur once, got "
            f"{list(state_keys)!r}."
        )
