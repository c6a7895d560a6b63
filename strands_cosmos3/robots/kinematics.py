"""Forward kinematics of a limb for many joint states at once, from its model. numpy beside the
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.robots.assembly import base_pose, frame_body
from strands_cosmos3.robots.chain import SerialChain
from strands_cosmos3.robots.model import chain_to_body
from strands_cosmos3.robots.panda import HAND_LIMITS, HOME_Q, T_flange_hand, T_link7_flange
from strands_cosmos3.robots.spec import Limb

_SAME = 1e-9
_PROBE_RAD = 0.3


@dataclass(frozen=True, eq=False)
class LimbKinematics:
    """The pose of a limb's frame in its base: a chain of joints, and fixed transforms [4, 4]
    beyond the last one.
    """

    chain: SerialChain
    beyond: tuple[F64, ...]

    def __post_init__(self) -> None:
        instance_of(self.chain, SerialChain, "chain")
        instance_of(self.beyond, tuple, "beyond")

    def forward(self, q_rad: F64) -> F64:
        """Return ``T_base_frame`` [..., 4, 4] at joint angles [..., n]; ShapeError for another
        number of joints.
        """
        T = self.chain.frames(q_rad)
        for fixed in self.beyond:
            T = T @ fixed
        return T


_FRANKA = LimbKinematics(HAND_LIMITS.chain, (T_link7_flange, T_flange_hand))
"""The Franka's published kinematics. A model of it rounds them, in the last digit of a double."""


@typed()
def kinematics_of(model: mujoco.MjModel, limb: Limb) -> LimbKinematics:
    """Return a limb's kinematics by its model; published figures stand for a model that agrees with
    them to 1e-9.

    UnknownNameError or ConfigError says that the model lacks a joint, the frame or the base.
    """
    data, body = mujoco.MjData(model), frame_body(model, limb)
    chain = chain_to_body(model, body, limb.joints)
    for joint in limb.joints:
        data.qpos[model.joint(joint).qposadr[0]] = 0.0
    mujoco.mj_kinematics(model, data)
    at_zero = np.linalg.inv(chain.frames(np.zeros(len(limb.joints)))) @ _pose(data, limb)
    first = np.linalg.inv(base_pose(model, limb)) @ chain.T_parent_joint[0]
    found = LimbKinematics(
        SerialChain(np.stack((first, *chain.T_parent_joint[1:])), chain.point_m, chain.slides),
        (at_zero,),
    )
    if len(limb.joints) == len(HOME_Q):
        probes = HOME_Q + np.array((-_PROBE_RAD, 0.0, _PROBE_RAD))[:, None]
        if np.abs(found.forward(probes) - _FRANKA.forward(probes)).max() < _SAME:
            return _FRANKA
    return found


def _pose(data: mujoco.MjData, limb: Limb) -> F64:
    found = data.site(limb.frame) if limb.frame_type == "site" else data.body(limb.frame)
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = found.xmat.reshape(3, 3), found.xpos
    return T
