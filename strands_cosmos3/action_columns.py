"""What columns of an action row mean: grippers, tool frames, and which columns belong to which
limb. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import finite_array, typed_fields
from strands_cosmos3.errors import InputError

CAMERA_LIMBS = ("head", "camera")
"""Limbs that carry only a camera."""
POSE9 = ("tx", "ty", "tz", "r0", "r1", "r2", "r3", "r4", "r5")
"""Columns of a pose delta: translation [m], then the first two columns of the rotation matrix
(rot6d).
"""


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
            InputError, NonFiniteError: The value is not numeric, or holds NaN or infinity.
        """
        fraction = (finite_array(value, "a gripper value", None) - self.closed_value) / (
            self.open_value - self.closed_value
        )
        return np.minimum(np.maximum(fraction, 0.0), 1.0)

    def from_fraction(self, fraction: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gripper value of an open fraction, with the shape of ``fraction``. Errors
        as :meth:`to_fraction`.
        """
        return self.closed_value + finite_array(fraction, "an open fraction", None) * (
            self.open_value - self.closed_value
        )


MODEL_GRIPPER = GripperConvention(open_value=1.0, closed_value=0.0)
WIRE_GRIPPER = GripperConvention(open_value=0.0, closed_value=1.0)
PANDA_FINGER = GripperConvention(open_value=0.04, closed_value=0.0, unit="m")
PANDA_TENDON = GripperConvention(open_value=255.0, closed_value=0.0, unit="ctrl")
UMI_WIDTH = GripperConvention(open_value=0.0967, closed_value=0.0, unit="m")


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


def tool_frame(
    parent: str,
    yaw_deg: float = 0.0,
    xyz_m: tuple[float, float, float] = (0.0, 0.0, 0.0),
    rotation: NDArray[np.float64] | None = None,
    *,
    checked: bool,
    source: str,
) -> ToolFrame:
    """Return a tool frame turned about its parent's z axis, or by a rotation [3, 3] whose digits
    may be rounded.
    """
    c, s = np.cos(np.deg2rad(yaw_deg)), np.sin(np.deg2rad(yaw_deg))
    T = np.eye(4)
    if rotation is None:
        T[:3, :3] = np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
    else:
        # published digits are rounded: take the nearest rotation
        U, _, Vt = np.linalg.svd(rotation)
        T[:3, :3] = U @ Vt
    T[:3, 3] = xyz_m
    T.setflags(write=False)
    return ToolFrame(parent, T, checked, source)


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
        """Whether the limb carries a camera and nothing to act with; a robot may lack it."""
        return self.name in CAMERA_LIMBS
