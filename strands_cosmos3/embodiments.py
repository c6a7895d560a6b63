"""Table of the Cosmos 3 embodiments: action columns, tool frames, units, gripper conventions,
rates, sampling presets.

This module is data only: ``actions`` decodes rows, ``observe`` composes camera views and the
backends choose sampling settings from it. Robots differ by entries of the table, not by branches in
the code.

Source of the values: NVIDIA cosmos-framework (release 2026-08-21: ``domain_utils``, ``pose_utils``,
``action_policy_server_robolab``) and the Cosmos 3 model cards. A tool frame with ``checked=False``
is taken from there and not verified on recorded data; DROID's was verified on a recorded episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.action_columns import MODEL_GRIPPER as MODEL_GRIPPER
from strands_cosmos3.action_columns import PANDA_FINGER as PANDA_FINGER
from strands_cosmos3.action_columns import PANDA_TENDON as PANDA_TENDON
from strands_cosmos3.action_columns import POSE9 as POSE9
from strands_cosmos3.action_columns import UMI_WIDTH as UMI_WIDTH
from strands_cosmos3.action_columns import WIRE_GRIPPER as WIRE_GRIPPER
from strands_cosmos3.action_columns import GripperConvention as GripperConvention
from strands_cosmos3.action_columns import LimbColumns as LimbColumns
from strands_cosmos3.action_columns import ToolFrame as ToolFrame
from strands_cosmos3.action_columns import tool_frame as _tool
from strands_cosmos3.checks import instance_of, positive, typed, typed_fields, whole_number
from strands_cosmos3.errors import ActionSpaceError, InputError, UnknownNameError

Meaning = Literal["pose_delta", "pose_absolute", "joint_position", "raw"]
ViewPoint = Literal["ego", "third_person", "wrist", "concat", "top_down_2d", "video_game"]

_MAX_ROWS = 100_000


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
        """Return when each row is due, in seconds after the observation: [n_rows]; InputError
        for another count or rate.
        """
        rows = np.arange(whole_number(n_rows, "n_rows", 1, _MAX_ROWS))
        return (rows + self.row_lead) / positive(fps, "fps")


JOINT_POS = ActionSpace(
    "joint_pos",
    "joint_position",
    (*(f"joint_{i}" for i in range(7)), "gripper"),
    False,
    True,
    0,
    row_lead=0,
)
POSE_ABS = ActionSpace(
    "pose_abs",
    "pose_absolute",
    ("x", "y", "z", "qx", "qy", "qz", "qw", "gripper"),
    False,
    False,
    1,
    row_lead=1,
)


def _midtrain(columns: tuple[str, ...], meaning: Meaning, normalized: bool) -> ActionSpace:
    return ActionSpace("midtrain", meaning, columns, normalized, False, 1, row_lead=1)


_IDENTITY = _tool("ee", checked=False, source="cosmos-framework pose_utils: no correction")
_DROID_TOOL = _tool(
    "hand",
    135.0,
    checked=True,
    source="panda_link8 (hand Rz(+45)) then Rz(+90); DROID success_48330",
)
_BRIDGE_TO_OPENCV = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
# rotation of link_gripper in link_gripper_tcp: a calibrated tilt of 0.27 degrees
_FRACTAL_TCP_TO_GRIPPER = np.array(
    [
        [0.9999897671, -0.0008686425, 0.0044397163],
        [0.0008745501, 0.9999987346, -0.0013288658],
        [-0.0044385564, 0.0013327349, 0.9999892615],
    ]
)


@dataclass(frozen=True)
class Sampling:
    """Settings of the denoising sampler. None means unset; :meth:`over` takes unset fields from a
    preset.

    Args:
        num_steps: Denoising steps.
        guidance_scale: g in ``v = u + g (c - u)`` (classifier-free guidance); 1 skips the
            unconditional pass.
        flow_shift: Shift of the flow-matching noise schedule.
        guidance_interval: Bounds (lo, hi) of the timesteps with guidance, lo < t < hi; None means
            all timesteps.

    Raises:
        InputError: ``num_steps`` is below 1, or a field has another type.
    """

    num_steps: int | None = None
    guidance_scale: float | None = None
    flow_shift: float | None = None
    guidance_interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        typed_fields(self)
        if self.num_steps is not None and self.num_steps < 1:
            raise InputError(f"num_steps must be at least 1, got {self.num_steps}.")

    @typed()
    def over(self, preset: Sampling) -> Sampling:
        """Return the preset, overridden by the fields that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        return replace(
            preset, **{name: value for name, value in values.items() if value is not None}
        )


MIDTRAIN_PRESET = Sampling(num_steps=30, guidance_scale=1.0, flow_shift=10.0)
POLICY_PRESET = Sampling(num_steps=4, guidance_scale=3.0, flow_shift=5.0)
EDGE_POLICY_PRESET = replace(POLICY_PRESET, guidance_interval=(960.0, 1001.0))


@dataclass(frozen=True)
class CameraRig:
    """Camera views on which an embodiment was trained, in the order in which they are composed.

    Args:
        views: Names of the views.
        wire_names: Keys of the same views in the openpi / RoboLab protocol.
        view_hw: (height, width) in pixels to which each view is letterboxed before composition.
    """

    views: tuple[str, ...]
    wire_names: tuple[str, ...]
    view_hw: tuple[int, int]


DROID_RIG = CameraRig(
    ("wrist", "exterior_1", "exterior_2"),
    (
        "observation/wrist_image_left",
        "observation/exterior_image_1_left",
        "observation/exterior_image_2_left",
    ),
    (360, 640),
)
DUAL_RIG = CameraRig(
    ("front", "left", "right"),
    ("observation/front_image", "observation/left_image", "observation/right_image"),
    (360, 640),
)
"""RoboMIND's two Frankas: camera_front above camera_left and camera_right. Where these two stand
is not stated.
"""


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
    presets: Mapping[str, Sampling] = field(
        default_factory=lambda: MappingProxyType({"midtrain": MIDTRAIN_PRESET})
    )
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
        """Whether rows are what a controller was told, so that they follow from no measured
        pose.
        """
        return self.translation_scale is None

    @typed()
    def action_space(self, name: str | None = None) -> ActionSpace:
        """Return an action space by name; None returns the default.

        Raises:
            ActionSpaceError: The embodiment has no such action space; the message lists those it
                has.
        """
        if name is None:
            return next(iter(self.spaces.values()))
        if name not in self.spaces:
            available = ", ".join(self.spaces)
            raise ActionSpaceError(
                f"embodiment {self.name!r} has no action space {name!r}; it has: {available}."
            )
        return self.spaces[name]

    def preset(self, action_space: str | None = None) -> Sampling:
        """Return the sampling preset of an action space."""
        return self.presets.get(self.action_space(action_space).name, MIDTRAIN_PRESET)

    def chunk_rows(self, action_space: str | None = None) -> int:
        """Return the number of rows per inference in an action space."""
        return self.chunk[self.action_space(action_space).name]

    @property
    def raw_action_layout(self) -> tuple[str, ...]:
        """Columns of the default action space."""
        return self.action_space().columns


def _prefix(prefix: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}_{column}" for column in columns)


def _numbered(prefix: str, n: int) -> tuple[str, ...]:
    return tuple(f"{prefix}_{i}" for i in range(n))


_ARM = (*POSE9, "grasp")
_DUAL = (*_prefix("left", _ARM), *_prefix("right", _ARM))
_AGIBOT = (*_prefix("head", POSE9), *_prefix("right", _ARM), *_prefix("left", _ARM))
_HAND = (
    *_prefix("camera", POSE9),
    *_prefix("right_wrist", POSE9),
    *_numbered("right_hand", 15),
    *_prefix("left_wrist", POSE9),
    *_numbered("left_hand", 15),
)
_AS_DROID = replace(_DROID_TOOL, checked=False, source="cosmos-framework: as DROID")
_AGIBOT_SOURCE = "cosmos-framework agibot_fk, agibot_spec; poses include the base's motion"
_WRIST = _tool(
    "wrist",
    -90.0,
    checked=False,
    source="cosmos-framework human_hand_pose_lerobot_dataset: wrist Rz(-90)",
)


def _limb(
    name: str,
    columns: tuple[str, ...],
    tool: ToolFrame,
    gripper: GripperConvention | None = None,
    prefix: str | None = None,
) -> LimbColumns:
    """The columns that begin at ``<prefix>_tx`` (``tx`` if the prefix is empty); finger tips
    follow a human wrist.
    """
    prefix = name if prefix is None else prefix
    first = columns.index(f"{prefix}_tx" if prefix else "tx")
    after, fingers = first + len(POSE9), f"{name}_hand_0"
    tips = (
        slice(columns.index(fingers), columns.index(fingers) + 15) if fingers in columns else None
    )
    return LimbColumns(
        name, slice(first, after), tool, None if gripper is None else after, gripper, tips
    )


_DUAL_LIMBS = tuple(_limb(side, _DUAL, _AS_DROID, MODEL_GRIPPER) for side in ("left", "right"))
_AGIBOT_LIMBS = (
    _limb("head", _AGIBOT, _tool("head_camera_link", checked=False, source=_AGIBOT_SOURCE)),
    _limb(
        "right",
        _AGIBOT,
        _tool("gripper_r_base_link", 90.0, checked=False, source=_AGIBOT_SOURCE),
        MODEL_GRIPPER,
    ),
    _limb(
        "left",
        _AGIBOT,
        _tool("gripper_l_base_link", -90.0, checked=False, source=_AGIBOT_SOURCE),
        MODEL_GRIPPER,
    ),
)
_HAND_LIMBS = (
    _limb("camera", _HAND, _IDENTITY),
    _limb("right", _HAND, _WRIST, prefix="right_wrist"),
    _limb("left", _HAND, _WRIST, prefix="left_wrist"),
)
# UR's frame 6; attachment_site of cosmos-framework's model
_UR_TOOL = replace(_IDENTITY, parent="tool0")
_UMI_TOOL = _tool(
    "camera", xyz_m=(0.0, 0.086, 0.09), checked=False, source="cosmos-framework: UMI camera -> EEF"
)
_FRACTAL_TOOL = _tool(
    "link_gripper_tcp",
    xyz_m=(-0.0050618476, -0.0016717725, -0.1635144743),
    rotation=_FRACTAL_TCP_TO_GRIPPER
    @ np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]),
    checked=False,
    source="cosmos-framework fractal_lerobot_dataset: TCP -> link_gripper, then Rz(-90); from "
    "link_gripper it is Rz(-90) alone",
)
_BRIDGE_TOOL = _tool(
    "gripper_link",
    rotation=_BRIDGE_TO_OPENCV,
    checked=False,
    source="cosmos-framework bridge_orig_lerobot_dataset: x right, z forward; from "
    "ee_gripper_link also (-0.093575, 0, 0) m",
)


def _domain(
    name: str,
    domain_id: int,
    columns: tuple[str, ...],
    *,
    meaning: Meaning = "pose_delta",
    fps: float | None = None,
    chunk: int = 16,
    view: ViewPoint | None = None,
    gripper: GripperConvention | None = None,
    tool: ToolFrame = _IDENTITY,
    stats: str | None = None,
    normalized: bool = True,
    translation_scale: float | None = 1.0,
    limbs: tuple[LimbColumns, ...] = (),
    rig: CameraRig | None = None,
    camera: str | None = None,
) -> Embodiment:
    normalized = normalized and meaning != "raw"
    if columns[: len(POSE9)] == POSE9:
        limbs = (_limb("camera" if gripper is None else "arm", columns, tool, gripper, prefix=""),)
    return Embodiment(
        name,
        domain_id,
        MappingProxyType({"midtrain": _midtrain(columns, meaning, normalized)}),
        fps,
        MappingProxyType({"midtrain": chunk}),
        view,
        gripper,
        tool,
        stats=stats,
        translation_scale=translation_scale,
        limbs=limbs,
        rig=rig,
        camera=camera,
    )


_DROID = replace(
    _domain(
        "droid_lerobot",
        8,
        _ARM,
        fps=15,
        view="concat",
        gripper=MODEL_GRIPPER,
        tool=_DROID_TOOL,
        stats="droid_lerobot",
    ),
    spaces=MappingProxyType(
        {
            "midtrain": _midtrain(_ARM, "pose_delta", True),
            "joint_pos": JOINT_POS,
            "pose_abs": POSE_ABS,
        }
    ),
    chunk=MappingProxyType({"midtrain": 16, "joint_pos": 32, "pose_abs": 16}),
    presets=MappingProxyType(
        {"midtrain": MIDTRAIN_PRESET, "joint_pos": POLICY_PRESET, "pose_abs": MIDTRAIN_PRESET}
    ),
    rig=DROID_RIG,
)

_DOMAINS = (
    _domain("no_action", 0, (), meaning="raw"),
    _domain("av", 1, POSE9, fps=10, chunk=60, view="ego", normalized=False, translation_scale=1.35),
    _domain("camera_pose", 2, POSE9, fps=30, chunk=60, view="ego", normalized=False),
    _domain("hand_pose", 3, _HAND, fps=15, view="ego", stats="hand_pose", limbs=_HAND_LIMBS),
    _domain("pusht", 4, ("x", "y"), meaning="raw"),
    # translations reach 0.94 per row at 20 Hz, so they are in controller units, not metres
    _domain(
        "libero",
        5,
        _ARM,
        fps=20,
        view="concat",
        gripper=MODEL_GRIPPER,
        stats="libero",
        translation_scale=None,
    ),
    _domain(
        "umi",
        6,
        (*POSE9, "width"),
        fps=20,
        view="wrist",
        gripper=UMI_WIDTH,
        tool=_UMI_TOOL,
        stats="umi",
    ),
    _domain(
        "bridge_orig_lerobot",
        7,
        _ARM,
        fps=5,
        view="ego",
        gripper=MODEL_GRIPPER,
        tool=_BRIDGE_TOOL,
        stats="bridge_orig_lerobot",
    ),
    _DROID,
    _domain(
        "robomind-franka",
        8,
        _ARM,
        fps=10,
        view="concat",
        gripper=MODEL_GRIPPER,
        tool=_AS_DROID,
        stats="robomind-franka",
    ),
    _domain("galbot", 9, _numbered("joint", 30), meaning="raw"),
    _domain(
        "robomind-franka-dual",
        12,
        _DUAL,
        fps=10,
        view="concat",
        gripper=MODEL_GRIPPER,
        tool=_AS_DROID,
        stats="robomind-franka-dual",
        limbs=_DUAL_LIMBS,
        rig=DUAL_RIG,
    ),
    _domain(
        "robomind-ur",
        13,
        _ARM,
        fps=10,
        view="third_person",
        gripper=MODEL_GRIPPER,
        tool=_UR_TOOL,
        stats="robomind-ur",
        camera="camera_top",
    ),
    *(
        _domain(
            name,
            15,
            _AGIBOT,
            fps=10,
            view="concat",
            gripper=MODEL_GRIPPER,
            stats="agibotworld",
            limbs=_AGIBOT_LIMBS,
        )
        for name in ("agibotworld", "agibot_gear_gripper", "agibot_gear_gripper_ext")
    ),
    _domain("xdof_yam", 16, _DUAL, gripper=MODEL_GRIPPER),
    _domain("molmoact2_yam", 16, _DUAL, gripper=MODEL_GRIPPER),
    _domain("abc_yam", 16, _DUAL, gripper=MODEL_GRIPPER),
    _domain("robotwin", 17, _numbered("joint", 14), meaning="raw"),
    _domain(
        "fractal",
        20,
        _ARM,
        fps=3,
        view="ego",
        gripper=MODEL_GRIPPER,
        tool=_FRACTAL_TOOL,
        stats="fractal",
    ),
    _domain("drawanything", 21, _numbered("action", 3), meaning="raw"),
    _domain("behavior1k_lerobot", 22, _numbered("action", 23), meaning="raw"),
    _domain("maniparena", 23, _numbered("action", 20), meaning="raw"),
)
_EMBODIMENTS: Mapping[str, Embodiment] = MappingProxyType({row.name: row for row in _DOMAINS})
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "droid": "droid_lerobot",
        "franka": "droid_lerobot",
        "panda": "droid_lerobot",
        "bridge": "bridge_orig_lerobot",
        "widowx": "bridge_orig_lerobot",
        "umi_lerobot": "umi",
        "fractal_lerobot": "fractal",
        "google_robot": "fractal",
        "agibot": "agibotworld",
        "agibotworld_beta": "agibotworld",
        "human_hand_pose": "hand_pose",
        "embodiment_b": "galbot",
        "robomind_franka": "robomind-franka",
        "robomind_franka_dual": "robomind-franka-dual",
        "robomind_ur": "robomind-ur",
    }
)
NUM_DOMAINS = 32
"""Number of domains in the model's domain-aware heads."""
ACTION_DIM = 64
"""Width of the model's action rows; an embodiment uses the leading columns."""


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
    return _domain(f"domain_{domain_id}", domain_id, _numbered("action", width), meaning="raw")
