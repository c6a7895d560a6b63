"""Find the gripper of a limb in a MuJoCo model: its jaws, its actuator, which of its ends is open,
and the point between its fingers.

Names help, but what decides is how the parts move: the actuator is commanded to both ends of its
range, and where its finger tips are farther apart, the gripper is open.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import GripperConvention
from strands_cosmos3.robots.actuators import (
    actuators_of,
    control_address,
    driven_joints,
    position_servos,
    servo_faults,
)
from strands_cosmos3.robots.model import bodies_up_from, joint_names
from strands_cosmos3.robots.spec import GripperSpec

JAW_WORDS = ("finger", "jaw", "claw", "knuckle", "thumb", "pinch", "clamp")
"""In names of joints and bodies; "grip" in a joint's only, because a hand is a gripper as well."""
_SETTLE_S = 1.5
_ARMATURE = 0.01
_DAMPING = 0.1  # in N m s/rad, or N s/m
_STILL = 1e-4  # rad or m
_SAME = 0.03  # of the way: joints that go together, and a range's end that is reached
_TIPS = 0.8  # of the farthest way: points that move as far are finger tips
_MOST_POINTS = 400  # of a geom
_ON_AXIS = 0.2  # of a link's length: its points lie around the axis of a joint that rolls it
_BESIDE = 0.5  # of a jaw's length, by which the hand reaches beyond the jaw's hinge
_INSET = 0.15  # of the tips' depth, by which things are held short of their ends
_LEAST_STEP_M = 1e-4
_FRACTIONS = np.linspace(0.0, 1.0, 6)


def joints_beyond(model: mujoco.MjModel, body: int) -> list[int]:
    """Return the ids of the joints of bodies that a body carries."""
    bodies = enumerate(model.jnt_bodyid.tolist())
    return [joint for joint, link in bodies if body in bodies_up_from(model, link)[1:]]


def points_of(
    model: mujoco.MjModel, data: mujoco.MjData, bodies: Sequence[int] | NDArray[np.intp]
) -> F64:
    """Return points [n, 3] in the world on the shapes of bodies (ids): the vertices of meshes, and
    the corners of boxes around anything else.
    """
    corners = np.stack(np.meshgrid(*[(-1.0, 1.0)] * 3), axis=-1).reshape(-1, 3)
    found = [np.empty((0, 3))]
    for geom in np.flatnonzero(np.isin(model.geom_bodyid, bodies)).tolist():
        if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_PLANE:
            continue
        points = model.geom_aabb[geom, :3] + corners * model.geom_aabb[geom, 3:]
        if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH:
            mesh = model.geom_dataid[geom]
            first, number = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
            vertices = model.mesh_vert[first : first + number]
            points = vertices[:: 1 + int(number) // _MOST_POINTS]
        found.append(data.geom_xpos[geom] + points @ data.geom_xmat[geom].reshape(3, 3).T)
    return np.concatenate(found)


def is_named_jaw(model: mujoco.MjModel, joint: int) -> bool:
    """Return whether a joint or its body is called a jaw."""
    name = model.joint(joint).name.lower()
    body = model.body(int(model.jnt_bodyid[joint])).name.lower()
    return "grip" in name or any(word in name or word in body for word in JAW_WORDS)


def turns_beside(model: mujoco.MjModel, joint: int) -> bool:
    """Whether a hinge turns the last link against a part of the hand beside it, as a jaw does: the
    link does not roll about its own axis, and the hand reaches well beyond the hinge.
    """
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    link = int(model.jnt_bodyid[joint])
    weld = model.body_weldid
    hand = int(weld[model.body_parentid[link]])
    of_link = points_of(model, data, np.flatnonzero(weld == weld[link])) - data.xanchor[joint]
    of_hand = points_of(model, data, np.flatnonzero(weld == hand)) - data.xpos[hand]
    if not len(of_link) or not len(of_hand) or hand == 0:
        return False
    length_m = np.linalg.norm(of_link, axis=1).max()
    aside_m = np.linalg.norm(np.cross(data.xaxis[joint], of_link.mean(axis=0)))
    to_hinge_m = np.linalg.norm(data.xanchor[joint] - data.xpos[hand])
    beyond_m = np.linalg.norm(of_hand, axis=1).max() - to_hinge_m
    return bool(aside_m > _ON_AXIS * length_m and beyond_m > _BESIDE * length_m)


@dataclass(frozen=True)
class FoundGripper:
    """A gripper, and where it holds things.

    Args:
        T_hand_tool: Pose [4, 4] between its finger tips in the hand's frame, z out of the hand and
            y along the opening; None where it could not be told.
    """

    spec: GripperSpec
    T_hand_tool: F64 | None


def find_gripper(
    model: mujoco.MjModel, hand: int, home: F64, name: str, notes: list[str]
) -> FoundGripper | None:
    """Return the gripper on a hand (a body) of a limb, with the model at ``home`` [nq]; None,
    and a note, if there is none.
    """
    beyond = joints_beyond(model, hand)
    movers = [a for a in actuators_of(model) if set(driven_joints(model, a)) & set(beyond)]
    if not movers:
        notes.append(
            f"{name}: no gripper was found; describe one in a table [limbs.gripper]. Suction is "
            "not supported. If the last joint is a jaw, it is none of the limb's joints."
        )
        return None
    if movers[1:]:
        names = ", ".join(model.actuator(a).name for a in movers)
        notes.append(
            f"{name}: its gripper has several actuators ({names}), and a robot's has one; leave "
            "one in the model, and couple the other fingers to it by a joint equality."
        )
        return None
    (actuator,) = movers
    direct = [joint for joint in driven_joints(model, actuator) if joint in beyond]
    motion = _Motion(model, hand, beyond, home)
    ctrl = _ctrl_range(model, actuator, direct[0])
    ends = None if ctrl is None else motion.at(actuator, np.array(ctrl))
    if ctrl is None or ends is None or not model.jnt_limited[direct[0]]:
        notes.append(
            f"{name}: a gripper without ranges was left out; describe it in a table "
            "[limbs.gripper]."
        )
        return None
    if not motion.part(*ends):
        notes.append(
            f"{name}: whether the gripper is open with {model.joint(direct[0]).name!r} at its "
            "upper end, as assumed; its parts do not show it. Else exchange the values."
        )
        return FoundGripper(_assumed(model, actuator, direct[0], beyond, ctrl), None)
    if motion.gap(ends[0]) > motion.gap(ends[1]):
        ctrl = ctrl[1], ctrl[0]
    steps = motion.at(actuator, ctrl[0] + _FRACTIONS * (ctrl[1] - ctrl[0]))
    spec = _spec(model, actuator, direct[0], motion, steps, ctrl)
    moved = model.joint(direct[0])
    notes.append(
        f"{name}: whether the gripper is open with {moved.name!r} at "
        f"{spec.opening.open_value:g}, where its tips were measured to be farther apart."
    )
    if len(beyond) == 1 and not is_named_jaw(model, direct[0]):
        notes.append(
            f"{name}: whether {moved.name!r} is a gripper's jaw, as taken; if it is a joint of the "
            "arm, add it to joints, actuators and home, and give the limb the frame beyond it."
        )
    return FoundGripper(spec, motion.tool(steps))


def _ctrl_range(model: mujoco.MjModel, actuator: int, joint: int) -> tuple[float, float] | None:
    """The controls of a gripper's ends: the actuator's range, or those of its joint's range."""
    (address,) = control_address(model, [actuator])
    low, high = model.actuator_ctrlrange[address].tolist()
    if model.actuator_ctrllimited[address] and low < high:
        return low, high
    if servo_faults(model, [actuator]) or not model.jnt_limited[joint]:
        return None
    low, high = position_servos(model, [actuator]).ctrl(model.jnt_range[joint][:, None])[:, 0]
    return float(low), float(high)


def _assumed(
    model: mujoco.MjModel, actuator: int, joint: int, beyond: list[int], ctrl: tuple[float, float]
) -> GripperSpec:
    low, high = model.jnt_range[joint].tolist()
    alike = (j for j in beyond if np.allclose(model.jnt_range[j], model.jnt_range[joint]))
    unit = "m" if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE else "rad"
    return GripperSpec(
        joint_names(model, alike),
        model.actuator(actuator).name,
        GripperConvention(high, low, unit),
        GripperConvention(ctrl[1], ctrl[0], "ctrl"),
    )


def _spec(
    model: mujoco.MjModel,
    actuator: int,
    joint: int,
    motion: _Motion,
    steps: list[F64],
    ctrl: tuple[float, float],
) -> GripperSpec:
    address = model.jnt_qposadr[motion.joints]
    travel = np.array([steps[0][address], steps[-1][address]])
    of_joint = travel[:, motion.joints.index(joint)]
    slack = _SAME * abs(of_joint[1] - of_joint[0])
    alike = (np.abs(travel - of_joint[:, None]) < slack).all(axis=0)
    together = [j for j, same in zip(motion.joints, alike, strict=True) if same]
    ends = model.jnt_range[joint]
    near = ends[np.abs(of_joint[:, None] - ends).argmin(axis=1)]
    closed, opened = np.where(np.abs(near - of_joint) < slack, near, of_joint.round(5)).tolist()
    slides = bool((model.jnt_type[together] == mujoco.mjtJoint.mjJNT_SLIDE).all())
    bodies = {int(model.jnt_bodyid[j]) for j in together}
    plain = slides and opened > closed and abs(closed) < slack and set(motion.fingers) <= bodies
    gap_m = np.array([motion.gap(q, nearest=True) for q in steps])
    gap_m = np.minimum.accumulate(gap_m[::-1])[::-1]  # closed fingers may lie in each other
    gap_m = np.maximum(gap_m, _LEAST_STEP_M * np.arange(len(gap_m))).round(4)
    fingers = tuple(model.body(body).name for body in motion.fingers)
    grows = bool((np.diff(gap_m) > 0).all())
    return GripperSpec(
        joint_names(model, together),
        model.actuator(actuator).name,
        GripperConvention(opened, closed, "m" if slides else "rad"),
        GripperConvention(ctrl[1], ctrl[0], "ctrl"),
        fingers=() if plain or not all(fingers) else fingers,
        gap_m=() if plain or not grows else tuple(gap_m.tolist()),
    )


class _Motion:
    """How a gripper's parts move, with the hand held still and nothing in the way."""

    def __init__(self, model: mujoco.MjModel, hand: int, joints: list[int], home: F64):
        self.model = copy.copy(model)
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
        self.model.opt.gravity[:] = 0.0
        of_gripper = np.isin(model.dof_jntid, joints)  # light parts without damping do not settle
        self.model.dof_armature[of_gripper] += _ARMATURE
        self.model.dof_damping[of_gripper] += _DAMPING
        self.data = mujoco.MjData(self.model)
        self.hand, self.joints, self.home = hand, joints, home
        self.fingers: list[int] = []
        self._still = ~of_gripper
        joint_of_qpos = np.repeat(np.arange(model.njnt), np.diff([*model.jnt_qposadr, model.nq]))
        self._kept = ~np.isin(joint_of_qpos, joints)
        weld = model.body_weldid
        of_hand = np.flatnonzero(weld == weld[hand])
        carried = [b for b in range(model.nbody) if hand in bodies_up_from(model, b)]
        self._bodies = np.union1d(carried, of_hand)
        sizes = [len(points_of(model, self.data, [body])) for body in self._bodies]
        self._owner = np.repeat(self._bodies, sizes)
        self._is_hand = np.isin(self._owner, of_hand)
        self._sides: list[NDArray[np.intp]] = []

    def at(self, actuator: int, ctrl: F64) -> list[F64]:
        """Settle at each control; return the configurations [nq]."""
        model, data = self.model, self.data
        (address,) = control_address(model, [actuator])
        settled: list[F64] = []
        mujoco.mj_resetData(model, data)
        data.qpos[:] = self.home
        for value in ctrl.tolist():
            data.ctrl[address] = value
            for _ in range(round(_SETTLE_S / model.opt.timestep)):
                mujoco.mj_step(model, data)
                data.qpos[self._kept] = self.home[self._kept]
                data.qvel[self._still] = 0.0
            settled.append(data.qpos.copy())
        return settled

    def part(self, first: F64, second: F64) -> bool:
        """Find the finger tips: what moves farthest between two configurations, and to which
        side. False if nothing moves.
        """
        way = self._points(second) - self._points(first)
        way[self._is_hand] = 0.0
        far_m = np.linalg.norm(way, axis=1)
        most_m = far_m.max(initial=0.0)
        if not most_m > _STILL:  # or it diverged
            return False
        along = way @ way[far_m.argmax()]
        are_tips = far_m > _TIPS * most_m
        one, other = (np.flatnonzero(are_tips & (sign * along > 0)) for sign in (1.0, -1.0))
        self._sides = [one, other if other.size else self._facing(one, first, second)]
        self.fingers = [self._holder(side) for side in self._sides if side.size]
        return len(set(self.fingers)) == len(self._sides)

    def _facing(self, tips: NDArray[np.intp], *ends: F64) -> NDArray[np.intp]:
        """The other finger of a single jaw: the points of the hand that the jaw's tips are nearest
        to, at the end where they are.
        """
        of_hand = np.flatnonzero(self._is_hand)
        if not of_hand.size:
            return of_hand
        nearest: list[tuple[float, NDArray[np.intp]]] = []
        for q in ends:
            points = self._points(q)
            apart_m = np.linalg.norm(points[tips, None] - points[of_hand], axis=-1)
            met = of_hand[np.unique(apart_m.argmin(axis=1))]
            nearest.append((float(apart_m.min(axis=1).mean()), met))
        return min(nearest, key=lambda found: found[0])[1]

    def gap(self, q: F64, nearest: bool = False) -> float:
        """Distance of the two sides' finger tips: of their nearest points, or of their middles."""
        one, other = self._tips(q)
        if nearest:
            return float(np.linalg.norm(one[:, None] - other, axis=-1).min())
        return float(np.linalg.norm(one.mean(axis=0) - other.mean(axis=0)))

    def tool(self, steps: list[F64]) -> F64 | None:
        """Pose between the tips in the hand's frame, by configurations from closed to open."""
        one, other = self._tips(steps[0])
        data = self.data
        R = data.xmat[self.hand].reshape(3, 3).copy()
        origin_m = data.xpos[self.hand].copy()
        middle_m = (one.mean(axis=0) + other.mean(axis=0)) / 2
        y = self._tips(steps[1])[0].mean(axis=0) - one.mean(axis=0)
        y /= np.linalg.norm(y)
        z = middle_m - origin_m
        z -= (z @ y) * y
        if np.linalg.norm(z) < _STILL:
            return None
        z /= np.linalg.norm(z)
        depths_m = (one - middle_m) @ z
        middle_m += (depths_m.max() - _INSET * np.ptp(depths_m)) * z
        T = np.eye(4)
        T[:3, :3] = R.T @ np.column_stack((np.cross(y, z), y, z))
        T[:3, 3] = R.T @ (middle_m - origin_m)
        return T

    def _tips(self, q: F64) -> tuple[F64, F64]:
        """The points [n, 3] of each side's finger tips, in the world."""
        points = self._points(q)
        one, other = (points[side] for side in self._sides)
        return one, other

    def _points(self, q: F64) -> F64:
        """The points [n, 3] of hand and gripper, in the world."""
        self.data.qpos[:] = q
        mujoco.mj_kinematics(self.model, self.data)
        return points_of(self.model, self.data, self._bodies)

    def _holder(self, side: NDArray[np.intp]) -> int:
        """The last body of a side's tips that can touch things, such as a pad."""
        model = self.model
        solid = model.geom_bodyid[(model.geom_contype | model.geom_conaffinity) > 0]
        bodies = np.unique(self._owner[side]).tolist()
        return max(bodies, key=lambda body: (body in solid, len(bodies_up_from(model, body))))
