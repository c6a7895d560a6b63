"""The Cosmos 3 embodiments: action columns, tool frames, units, grippers, cameras, rates, sampling
presets.

The values are data in ``embodiments.toml``, with their sources; this module reads them. ``actions``
decodes rows, ``observe`` composes camera views and the backends choose sampling settings from them.
Robots differ by entries of the table, not by branches in the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import finite_array, instance_of, typed_fields, whole_number, within
from strands_cosmos3.errors import ActionSpaceError, InputError, UnknownNameError
from strands_cosmos3.options import MODEL_BACKENDS, option
from strands_cosmos3.tables import from_tables, read_toml

Meaning = Literal["pose_delta", "pose_absolute", "joint_position", "raw"]
ViewPoint = Literal["ego", "third_person", "wrist", "concat", "top_down_2d", "video_game"]

POSE9 = ("tx", "ty", "tz", "r0", "r1", "r2", "r3", "r4", "r5")
"""Columns of a pose delta: translation [m], then the first two columns of the rotation matrix
(rot6d).
"""
CAMERA_LIMBS = ("head", "camera")
"""Limbs that carry only a camera."""
MODEL_SPACES = ("joint_pos", "midtrain")
"""Names of the action spaces of checkpoints."""
NUM_DOMAINS = 32
"""Number of domains in the model's domain-aware heads."""
ACTION_DIM = 64
"""Width of the model's action rows; an embodiment uses the leading columns."""
_FINGER_TIPS = 15
_TABLES = read_toml(Path(__file__).with_suffix(".toml"))


@dataclass(frozen=True)
class ActionSpace:
    """Format of an action chunk: the meaning of its columns and the timing of its rows.

    Args:
        name: ``midtrain``, ``joint_pos`` or ``pose_abs``.
        meaning: Kind of action; it selects the decoder.
        columns: Names of the columns.
        normalized: Whether the model's rows are normalised with the embodiment's statistics.
        state_row: Whether row 0 of the model's sequence is the clean proprioceptive state.
        mrope_offset: Offset of the action rows' temporal position (0 with a state row, else 1).
        row_lead: Row i is due ``(i + row_lead) / fps`` seconds after the observation: 0 if row 0 is
            commanded at once.
    """

    name: str
    meaning: Meaning
    columns: tuple[str, ...]
    normalized: bool
    state_row: bool
    mrope_offset: int
    row_lead: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.columns)

    def row_times_s(self, n_rows: int, fps: float) -> NDArray[np.float64]:
        """Return when each row is due, in seconds after the observation: [n_rows]."""
        return (np.arange(n_rows) + self.row_lead) / fps


_BEYOND = 0.2  # of its range, by which a measured gripper may lie outside


@dataclass(frozen=True)
class GripperConvention:
    """Linear map between a gripper value and the open fraction in [0, 1] (1 = open) that the
    package uses internally.

    Args:
        open_value: Value of the open gripper.
        closed_value: Value of the closed gripper.
        unit: Unit of the value, e.g. ``"fraction"``, ``"m"``, ``"ctrl"``.

    Raises:
        InputError: The two values are equal, or not finite numbers.
    """

    open_value: float
    closed_value: float
    unit: str = "fraction"

    def __post_init__(self) -> None:
        typed_fields(self)
        if (
            not np.isfinite(self.open_value - self.closed_value)
            or self.open_value == self.closed_value
        ):
            raise InputError(
                f"open_value {self.open_value!r} and closed_value {self.closed_value!r} must be "
                "finite and differ."
            )

    def to_fraction(self, value: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the open fraction of a gripper value, clipped to [0, 1], with the shape of
        ``value``.

        Raises:
            InputError, NonFiniteError: The value is not numeric, or holds NaN or infinity, which
                clipping would hide.
        """
        fraction = (finite_array(value, "a gripper value", None) - self.closed_value) / (
            self.open_value - self.closed_value
        )
        return np.minimum(np.maximum(fraction, 0.0), 1.0)

    def outlier(self, value: NDArray[np.float64]) -> float | None:
        """Return the value that lies farthest outside the range if it does so by more than a fifth
        of it, and so is of another unit; else None.
        """
        values = np.asarray(value, np.float64)
        middle = (self.open_value + self.closed_value) / 2
        off = np.abs(values - middle) / abs(self.open_value - self.closed_value)
        return float(values.flat[off.argmax()]) if off.max(initial=0) > 0.5 + _BEYOND else None

    def from_fraction(self, fraction: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gripper value of an open fraction, with the shape of ``fraction``."""
        return self.closed_value + np.asarray(fraction, np.float64) * (
            self.open_value - self.closed_value
        )


@dataclass(frozen=True, eq=False)
class ToolFrame:
    """Pose of the Cosmos frame, the frame whose motion the model predicts, on the robot.

    Args:
        parent: Body or link of the robot to which the frame is fixed.
        T_parent_cosmos: [4, 4] pose of the Cosmos frame in the parent's frame (right-multiplied
            onto the parent's pose).
        checked: Whether the transform was verified on recorded data.
        source: Origin of the transform.
    """

    parent: str
    T_parent_cosmos: NDArray[np.float64]
    checked: bool
    source: str


@dataclass(frozen=True, eq=False)
class LimbColumns:
    """The columns of a row that belong to one limb: a pose delta and, for some limbs, a gripper or
    finger tips.

    Args:
        name: Name by which it is joined to a robot's limb: ``"arm"``, ``"left"``, ``"right"``,
            ``"head"`` or ``"camera"``.
        pose: The nine columns of its pose delta.
        tool_frame: Frame whose motion they are.
        gripper_column: Index of its gripper's column, or None.
        gripper: Convention of that column, or None.
        finger_tips: Columns of the positions of five finger tips in the tool frame, or None.
    """

    name: str
    pose: slice
    tool_frame: ToolFrame
    gripper_column: int | None = None
    gripper: GripperConvention | None = None
    finger_tips: slice | None = None

    @property
    def is_camera(self) -> bool:
        """Whether the limb carries only a camera; a robot may lack it."""
        return self.name in CAMERA_LIMBS


@dataclass(frozen=True)
class Sampling:
    """Settings of the denoising sampler. None means unset; :meth:`over` takes unset fields from a
    preset.

    Raises:
        InputError: ``num_steps`` is below 1, guidance out of range, or a field has another type.
    """

    num_steps: int | None = option(None, *MODEL_BACKENDS, "service")
    """Denoising steps; None: the checkpoint's preset. A policy server takes them with
    --dialect vllm-omni only.
    """
    guidance_scale: float | None = option(None, *MODEL_BACKENDS)
    """g in v = u + g (c - u), classifier-free guidance; 1 skips the unconditional pass. None: the
    checkpoint's preset.
    """
    flow_shift: float | None = option(None, *MODEL_BACKENDS)
    """Shift of the flow-matching noise schedule; None: the checkpoint's preset."""
    guidance_interval: tuple[float, float] | None = option(None, *MODEL_BACKENDS)
    """Bounds lo, hi of the timesteps with guidance, lo < t < hi, of 1000; None: the checkpoint's
    preset, else all timesteps.
    """

    def __post_init__(self) -> None:
        typed_fields(self)
        if self.num_steps is not None and self.num_steps < 1:
            raise InputError(f"num_steps must be at least 1, got {self.num_steps}.")
        if self.guidance_scale is not None:
            within(self.guidance_scale, "guidance_scale", 0.0, 100.0)
        if self.guidance_interval is not None:
            lo, hi = finite_array(self.guidance_interval, "guidance_interval", (2,))
            if lo >= hi:
                raise InputError(f"guidance_interval must be lo < hi, got {lo:g} and {hi:g}.")

    def over(self, preset: Sampling) -> Sampling:
        """Return the preset, overridden by the fields that are set."""
        values = {
            field.name: value
            for field in fields(Sampling)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(preset, **values)


@dataclass(frozen=True)
class CameraRig:
    """Camera views on which an embodiment was trained, and the composite that is made of them.

    Args:
        views: Names of the views, in the order in which they are composed.
        wire_names: Keys of the same views in the openpi / RoboLab protocol.
        view_hw: (height, width) in pixels to which each view is letterboxed before composition.
        boxes: Place of each view in the composite: (top, left, height, width) in pixels.
        layout: Sentence of a caption that describes the composite, or empty.

    Raises:
        InputError: Not every view has one key and one box.
    """

    views: tuple[str, ...]
    wire_names: tuple[str, ...]
    view_hw: tuple[int, int]
    boxes: tuple[tuple[int, int, int, int], ...]
    layout: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.views) == len(self.wire_names) == len(self.boxes):
            raise InputError(
                f"a rig needs one of wire_names and one of boxes for each view; views "
                f"{list(self.views)} have {len(self.wire_names)} and {len(self.boxes)}."
            )

    @property
    def composite_hw(self) -> tuple[int, int]:
        """(height, width) of the composite in pixels."""
        return (
            max(top + height for top, _, height, _ in self.boxes),
            max(left + width for _, left, _, width in self.boxes),
        )


@dataclass(frozen=True, eq=False)
class Embodiment:
    """A robot, or another source of actions, and the format of its actions and views.

    Args:
        name: Name of the domain in cosmos-framework.
        domain_id: Index of its weights in the model's domain-aware heads (0..31).
        spaces: Action spaces of its checkpoints by name; the first is the default.
        fps: Action rows per second, or None if the source does not state it.
        chunk: Rows per inference, by action space.
        view_point: Viewpoint that its prompt describes, or None for the default.
        gripper: Convention of the model's gripper column, or None if there is none.
        tool_frame: Frame whose motion the model predicts.
        presets: Sampling settings by action space.
        stats: Name of its normalisation statistics, or None if there are none.
        rig: Cameras to compose into one picture, or None if views are not composed.
        translation_scale: Metres per unit of translation. None means that the unit is unknown:
            decoding raises an error.
        limbs: The columns of each limb, by name, in the columns' order; empty if the source does
            not state them.
        camera: Name of its only view, where views are not composed and the source names it.
    """

    name: str
    domain_id: int
    spaces: Mapping[str, ActionSpace]
    fps: float | None
    chunk: Mapping[str, int]
    view_point: ViewPoint | None
    gripper: GripperConvention | None
    tool_frame: ToolFrame
    presets: Mapping[str, Sampling]
    stats: str | None = None
    rig: CameraRig | None = None
    translation_scale: float | None = 1.0
    limbs: tuple[LimbColumns, ...] = ()
    camera: str | None = None

    @property
    def view_names(self) -> tuple[str, ...]:
        """Names of its views; DROID's where the source names none."""
        if self.camera is not None:
            return (self.camera,)
        return (DROID_RIG if self.rig is None else self.rig).views

    @property
    def in_controller_units(self) -> bool:
        """Whether rows are commands of a controller, so that they do not follow from measured
        poses.
        """
        return self.translation_scale is None

    def action_space(self, name: str | None = None) -> ActionSpace:
        """Return an action space by name; None returns the default.

        Raises:
            ActionSpaceError: The embodiment has no such action space; the message lists those it
                has.
        """
        if name is None:
            return next(iter(self.spaces.values()))
        if name not in tuple(self.spaces):  # an unhashable name too
            raise ActionSpaceError(
                f"embodiment {self.name!r} has no action space {name!r}; it "
                f"has: {', '.join(self.spaces)}."
            )
        return self.spaces[name]

    def preset(self, action_space: str | None = None) -> Sampling:
        """Return the sampling preset of an action space."""
        return self.presets[self.action_space(action_space).name]

    def chunk_rows(self, action_space: str | None = None) -> int:
        """Return the number of rows per inference in an action space."""
        return self.chunk[self.action_space(action_space).name]

    @property
    def raw_action_layout(self) -> tuple[str, ...]:
        """Columns of the default action space."""
        return self.action_space().columns


def _space(name: str, columns: tuple[str, ...] = (), **values: Any) -> ActionSpace:
    """An action space; ``columns`` are an embodiment's own, of midtrain rows."""
    table = {**_TABLES["spaces"][name], **values}
    return ActionSpace(name, columns=tuple(table.pop("columns", columns)), **table)


def _tool(name: str) -> ToolFrame:
    table = _TABLES["tools"][name]
    yaw_rad = np.deg2rad(table.get("yaw_deg", 0.0))
    c, s = np.cos(yaw_rad), np.sin(yaw_rad)
    T = np.eye(4)
    T[:3, :3] = np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
    if "rotation" in table:  # published digits are rounded: take the nearest rotation
        U, _, Vt = np.linalg.svd(np.array(table["rotation"]))
        T[:3, :3] = U @ Vt
    T[:3, 3] = table.get("xyz_m", 0.0)
    T.setflags(write=False)
    return ToolFrame(table["parent"], T, table["checked"], table["source"])


def _limb(
    columns: tuple[str, ...],
    name: str,
    prefix: str,
    tool: ToolFrame,
    gripper: GripperConvention | None,
    fingers: str | None = None,
) -> LimbColumns:
    """The columns from ``<prefix>tx`` on: a pose delta, and then the gripper's if it has one."""
    first = columns.index(f"{prefix}tx")
    end = first + len(POSE9)
    tips = None
    if fingers is not None:
        first_tip = columns.index(f"{fingers}_0")
        tips = slice(first_tip, first_tip + _FINGER_TIPS)
    column = None if gripper is None else end
    return LimbColumns(name, slice(first, end), tool, column, gripper, tips)


def _limbs(columns: tuple[str, ...], table: Mapping[str, Any]) -> tuple[LimbColumns, ...]:
    gripper = GRIPPERS.get(table["gripper"])
    tool = _tool(table["tool"])
    if columns[: len(POSE9)] == POSE9:
        return (_limb(columns, "camera" if gripper is None else "arm", "", tool, gripper),)
    return tuple(
        _limb(
            columns,
            limb["name"],
            f"{limb['columns']}_",
            _tool(limb["tool"]),
            GRIPPERS.get(limb.get("gripper", "")),
            limb.get("fingers"),
        )
        for limb in table.get("limbs", ())
    )


def _embodiment(table: Mapping[str, Any]) -> Embodiment:
    columns = tuple(_TABLES["columns"][table["columns"]])
    meaning = table["meaning"]
    own_spaces = table["spaces"]
    normalized = table.get("normalized", meaning != "raw")
    midtrain = _space("midtrain", columns, meaning=meaning, normalized=normalized)
    spaces: dict[str, Any] = {
        "midtrain": {"chunk": table["chunk"], "preset": "midtrain"},
        **own_spaces,
    }
    return Embodiment(
        name=table["name"],
        domain_id=table["domain_id"],
        spaces=MappingProxyType(
            {"midtrain": midtrain, **{name: _space(name) for name in own_spaces}}
        ),
        chunk=MappingProxyType({name: space["chunk"] for name, space in spaces.items()}),
        gripper=GRIPPERS.get(table["gripper"]),
        tool_frame=_tool(table["tool"]),
        presets=MappingProxyType(
            {name: PRESETS[space["preset"]] for name, space in spaces.items()}
        ),
        rig=RIGS[table["rig"]] if "rig" in table else None,
        translation_scale=None if "in_controller_units" in table else table["translation_scale"],
        limbs=_limbs(columns, table),
        **{name: table.get(name) for name in ("fps", "view_point", "stats", "camera")},
    )


def _embodiment_tables() -> dict[str, dict[str, Any]]:
    """The tables of embodiments by name; one that is like another has the other's values too."""
    tables: dict[str, dict[str, Any]] = {}
    for table in _TABLES["embodiments"]:
        similar = tables[table["like"]] if "like" in table else _TABLES["defaults"]
        tables[table["name"]] = {**similar, "aliases": [], **table}
    return tables


GRIPPERS = from_tables(GripperConvention, _TABLES["grippers"])
"""Units in which grippers are counted, by name."""
MODEL_GRIPPER = GRIPPERS["fraction"]
WIRE_GRIPPER = GRIPPERS["closed_fraction"]
PANDA_FINGER = GRIPPERS["finger_m"]
PRESETS = from_tables(Sampling, _TABLES["presets"])
RIGS = from_tables(CameraRig, _TABLES["rigs"])
JOINT_POS = _space("joint_pos")
POSE_ABS = _space("pose_abs")
DROID_RIG = RIGS["droid"]
_ROWS = _embodiment_tables()
_EMBODIMENTS = {name: _embodiment(table) for name, table in _ROWS.items()}
_ALIASES = {alias: name for name, table in _ROWS.items() for alias in table["aliases"]}


def list_embodiments() -> tuple[str, ...]:
    """Return the names of all embodiments, ordered by domain id."""
    return tuple(_EMBODIMENTS)


def get_embodiment(name: str | Embodiment) -> Embodiment:
    """Return an embodiment by name or alias (``droid``, ``franka``, ``panda``, ``umi``, ``av``,
    ``bridge``, ...).

    Raises:
        UnknownNameError: No such embodiment; the message lists all names and aliases.
    """
    if isinstance(name, Embodiment):
        return name
    key = instance_of(name, str, "the name of an embodiment").strip().lower()
    key = _ALIASES.get(key, key)
    if key not in _EMBODIMENTS:
        raise UnknownNameError("embodiment", name, (*_EMBODIMENTS, *_ALIASES))
    return _EMBODIMENTS[key]


def raw_embodiment(domain_id: int, width: int) -> Embodiment:
    """Return an embodiment for a domain id alone: ``width`` action columns that are not decoded.

    Raises:
        InputError: The id is outside 0..31 or the width outside 1..64.
    """
    domain_id = whole_number(domain_id, "domain id", 0, NUM_DOMAINS - 1)
    width = whole_number(width, "raw width", 1, ACTION_DIM)
    columns = tuple(f"action_{i}" for i in range(width))
    raw = get_embodiment("no_action")
    spaces = {"midtrain": replace(raw.action_space(), columns=columns)}
    return replace(
        raw, name=f"domain_{domain_id}", domain_id=domain_id, spaces=MappingProxyType(spaces)
    )
