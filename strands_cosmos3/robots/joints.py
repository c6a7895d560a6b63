"""Joints of an arm: the serial chain that moves a point, and the limits of joints and hand. numpy
only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, finite_array, positive
from strands_cosmos3.errors import Cosmos3Error, InputError


@dataclass(frozen=True, eq=False)
class SerialChain:
    """Joints from the base to a point.

    Args:
        T_parent_joint: [n, 4, 4] pose of each joint's frame, at angle zero, in the previous
            joint's; joints turn about, or slide along, their z axis.
        point_m: [3] the point in the last joint's frame.
        slides: [n] whether a joint slides.
    """

    T_parent_joint: F64
    point_m: F64
    slides: NDArray[np.bool_]

    @cached_property
    def reach_m(self) -> F64:
        """[n] how fast the point moves at most if one joint moves: 1 for a slide, the length of
        the arm beyond a hinge.
        """
        links = np.linalg.norm(np.vstack((self.T_parent_joint[1:, :3, 3], self.point_m)), axis=1)
        return np.where(self.slides, 1.0, np.cumsum(links[::-1])[::-1])

    def motion(self, q_rad: F64, qd_rad_s: F64, qdd_rad_s2: F64) -> tuple[F64, F64, F64]:
        """Return the point's position, velocity and acceleration [M, 3] in the base frame, from
        joint states [M, n].

        From the tip to the base. A turn by q takes ``c = x + iy`` to ``c e^iq``; the derivatives
        follow by the product rule.
        """
        x = np.zeros((3, 3, len(q_rad)))  # position, velocity, acceleration; axis; M
        x[0] = self.point_m[:, None]
        q, qd, qdd = (np.ascontiguousarray(x.T) for x in (q_rad, qd_rad_s, qdd_rad_s2))
        turn = np.exp(1j * q)
        for i in range(len(q) - 1, -1, -1):
            if self.slides[i]:
                x[:, 2] += (q[i], qd[i], qdd[i])
            else:
                c, v, a = x[:, 0] + 1j * x[:, 1]
                spin = 1j * qd[i]
                c, v, a = c * turn[i], v * turn[i], a * turn[i]
                for k, value in enumerate(
                    (c, v + spin * c, a + spin * (2 * v + spin * c) + 1j * qdd[i] * c)
                ):
                    x[k, 0] = value.real
                    x[k, 1] = value.imag
            x = self.T_parent_joint[i, :3, :3] @ x
            x[0] += self.T_parent_joint[i, :3, 3, None]
        return x[0].T, x[1].T, x[2].T

    def frames(self, q_rad: F64) -> F64:
        """Return the pose [..., 4, 4] of the last joint's frame in the base at joint angles
        [..., n].
        """
        return self.joint_frames(q_rad)[-1]

    def joint_frames(self, q_rad: F64) -> list[F64]:
        """Return the pose [..., 4, 4] of each joint's frame likewise."""
        x, y, z = np.moveaxis(self.T_parent_joint[:, :3, :3], 2, 0)
        turn_rad = np.where(self.slides, 0.0, q_rad)[..., None]
        c, s = np.cos(turn_rad), np.sin(turn_rad)
        steps = np.empty((*q_rad.shape, 4, 4))
        steps[:] = self.T_parent_joint
        steps[..., :3, 0] = x * c + y * s
        steps[..., :3, 1] = y * c - x * s
        steps[..., :3, 3] += np.where(self.slides, q_rad, 0.0)[..., None] * z
        frames: list[F64] = []
        T = np.eye(4)
        for step in np.moveaxis(steps, -3, 0):
            T = T @ step
            frames.append(T)
        return frames

    def position(self, q_rad: F64) -> F64:
        """Return the point's position [M, 3] in the base frame at joint angles [M, n]."""
        still = np.zeros_like(q_rad)
        return self.motion(q_rad, still, still)[0]


@dataclass(frozen=True, eq=False)
class HandLimits:
    """Speed [m/s] and acceleration [m/s^2] that one point of the arm may reach, and the chain of
    joints that moves it.

    ``joints`` are the indices of the chain's joints among those of the limits, e.g. of the second
    of two arms; None is all.
    """

    chain: SerialChain
    velocity: float
    acceleration: float
    joints: tuple[int, ...] | None = None

    def of_chain(self, values: F64) -> F64:
        """Return the columns of the chain's joints from values [..., n] of all limited joints."""
        return values if self.joints is None else values[..., list(self.joints)]


LIMIT_NAMES = ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque")


@dataclass(frozen=True, eq=False)
class JointLimits:
    """Limits of an arm's joints: angles in rad, velocity in rad/s, acceleration in rad/s^2, jerk in
    rad/s^3, torque in N m.

    Every array is [n] and read-only. ``hands`` limit a point of each arm as well. ``assumed`` says
    that nobody states some of the rates, and the default was taken.

    Raises:
        ShapeError, NonFiniteError: An array is not n finite numbers, n being the first one's
            length.
        InputError: A lower limit is not below its upper one, another is not above zero, or the
            hand's chain has other joints.
    """

    q_min: F64
    q_max: F64
    velocity: F64
    acceleration: F64
    jerk: F64
    torque: F64
    hands: tuple[HandLimits, ...] = ()
    assumed: bool = False

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            joints = None if name == "q_min" else len(self.q_min)
            object.__setattr__(self, name, finite_array(getattr(self, name), name, (joints,)))
        if not (self.q_min < self.q_max).all():
            raise InputError(
                f"q_min {self.q_min} must lie below q_max {self.q_max} in every joint."
            )
        for name in ("velocity", "acceleration", "jerk", "torque"):
            if not (getattr(self, name) > 0).all():
                raise InputError(f"{name} limits must be above zero, got {getattr(self, name)}.")
        for hand in self.hands:
            joints = range(len(hand.chain.slides)) if hand.joints is None else hand.joints
            if max(joints) >= len(self.q_min) or (
                hand.joints is None and len(joints) != len(self.q_min)
            ):
                raise InputError(
                    f"the hand's chain has {len(joints)} joints, but the limits {len(self.q_min)}."
                )

    def outside(self, q_rad: F64, tolerance_rad: float = 0.0) -> str | None:
        """Say which joint of a configuration [n] lies outside its range by more than a
        tolerance; None if all are inside.
        """
        beyond = np.maximum(self.q_min - q_rad, q_rad - self.q_max)
        joint = int(np.argmax(beyond))
        if beyond[joint] <= tolerance_rad:
            return None
        return (
            f"joint {joint + 1} of {len(q_rad)} is at {q_rad[joint]:.4f} rad, outside its range "
            f"[{self.q_min[joint]:.4f}, {self.q_max[joint]:.4f}]"
        )

    def require_start(
        self, q_rad: F64, tolerance_rad: float, error: type[Cosmos3Error] = InputError
    ) -> None:
        """Raise an error if a motion cannot start at angles [n], because one lies outside its range
        by more than a tolerance.
        """
        if (outside := self.outside(q_rad, tolerance_rad)) is not None:
            raise error(
                f"no motion can start here: {outside}. Move the arm inside first, "
                "e.g. to its home position."
            )

    def require_rows(
        self, q_rad: F64, error: type[Cosmos3Error], remedy: str, tolerance_rad: float = 0.0
    ) -> None:
        """Raise an error with a remedy if rows [T, n] command a joint outside its range by more
        than a tolerance.
        """
        if q_rad.shape[1] != len(self.q_min):
            raise error(
                f"the rows have {q_rad.shape[1]} joints, but the arm has "
                f"{len(self.q_min)}; {remedy}"
            )
        for row, angles_rad in enumerate(q_rad):
            if (outside := self.outside(angles_rad, tolerance_rad)) is not None:
                raise error(f"row {row}: {outside}; {remedy}")

    def only(self, joints: NDArray[np.bool_]) -> JointLimits:
        """Return the limits of some of the joints, without the hand's."""
        return JointLimits(*(getattr(self, name)[joints] for name in LIMIT_NAMES))

    def derated(self, factor: float) -> JointLimits:
        """Return these limits with velocity, acceleration and jerk times ``factor``, the hand's as
        well.

        An :class:`InputError` says that the factor lies outside (0, 1].
        """
        if not positive(factor, "a derating factor") <= 1.0:
            raise InputError(f"a derating factor must lie in (0, 1], got {factor!r}.")
        hands = tuple(
            replace(hand, velocity=hand.velocity * factor, acceleration=hand.acceleration * factor)
            for hand in self.hands
        )
        rates = {
            name: getattr(self, name) * factor for name in ("velocity", "acceleration", "jerk")
        }
        return replace(self, hands=hands, **rates)
