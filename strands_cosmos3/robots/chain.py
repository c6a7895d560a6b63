"""A serial chain: where one point of an arm is, and how it moves, for many joint states at once.
numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, finite_array, mask_array, require_rows, rigid_transform


@dataclass(frozen=True, eq=False)
class SerialChain:
    """Joints from the base to a point.

    Args:
        T_parent_joint: [n, 4, 4] pose of each joint's frame, at angle zero, in the previous
            joint's; joints turn about, or slide along, their z axis.
        point_m: [3] the point in the last joint's frame.
        slides: [n] whether a joint slides.

    Raises:
        InputError, ShapeError, NonFiniteError: An array is malformed.
    """

    T_parent_joint: F64
    point_m: F64
    slides: NDArray[np.bool_]

    def __post_init__(self) -> None:
        T = rigid_transform(self.T_parent_joint, "T_parent_joint", batch=True)
        object.__setattr__(self, "T_parent_joint", T)
        object.__setattr__(self, "point_m", finite_array(self.point_m, "point_m", (3,)))
        object.__setattr__(self, "slides", mask_array(self.slides, "slides", len(T)))

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
        require_rows(len(self.slides), q_rad, qd_rad_s, qdd_rad_s2, axes=2)
        x = np.zeros((3, 3, len(q_rad)))  # position, velocity, acceleration; axis; M
        x[0] = self.point_m[:, None]
        q, qd, qdd = (
            np.ascontiguousarray(q_rad.T),
            np.ascontiguousarray(qd_rad_s.T),
            np.ascontiguousarray(qdd_rad_s2.T),
        )
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
                    x[k, 0], x[k, 1] = value.real, value.imag
            x = self.T_parent_joint[i, :3, :3] @ x
            x[0] += self.T_parent_joint[i, :3, 3, None]
        return x[0].T, x[1].T, x[2].T

    def frames(self, q_rad: F64) -> F64:
        """Return the pose [..., 4, 4] of the last joint's frame in the base at joint angles
        [..., n].
        """
        require_rows(len(self.slides), q_rad)
        T = np.broadcast_to(np.eye(4), (*q_rad.shape[:-1], 4, 4))
        for joint, T_parent in enumerate(self.T_parent_joint):
            step = np.zeros((*q_rad.shape[:-1], 4, 4))
            step[...] = T_parent
            if self.slides[joint]:
                step[..., :3, 3] += q_rad[..., joint, None] * T_parent[:3, 2]
            else:
                c, s = np.cos(q_rad[..., joint, None]), np.sin(q_rad[..., joint, None])
                step[..., :3, 0] = T_parent[:3, 0] * c + T_parent[:3, 1] * s
                step[..., :3, 1] = T_parent[:3, 1] * c - T_parent[:3, 0] * s
            T = T @ step
        return T

    def position(self, q_rad: F64) -> F64:
        """Return the point's position [M, 3] in the base frame at joint angles [M, n]."""
        require_rows(len(self.slides), q_rad, axes=2)
        x = np.repeat(self.point_m[:, None], len(q_rad), axis=1)
        turn = np.exp(1j * q_rad.T)
        for i in range(len(turn) - 1, -1, -1):
            if self.slides[i]:
                x[2] += q_rad[:, i]
            else:
                c = (x[0] + 1j * x[1]) * turn[i]
                x[0], x[1] = c.real, c.imag
            x = self.T_parent_joint[i, :3, :3] @ x + self.T_parent_joint[i, :3, 3, None]
        return x.T
