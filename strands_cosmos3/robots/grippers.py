"""Find the gripper of a limb in a MuJoCo model: its jaws, its actuator, and which end is open."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import GripperConvention
from strands_cosmos3.robots.actuators import actuators_of, control_address, driven_joints
from strands_cosmos3.robots.model import bodies_up_from, joint_names
from strands_cosmos3.robots.spec import GripperSpec

JAW_WORDS = ("finger", "jaw", "claw", "knuckle", "thumb", "pinch", "clamp")
"""In names of joints and bodies; "grip" in a joint's only, because a hand is a gripper as well."""
_SETTLE_S = 1.5
_ARMATURE, _DAMPING = 0.01, 0.1  # light parts without damping do not settle
_HELD = 1e9  # armature of joints that stay
_STILL_M = 1e-4
_SAME = 0.03  # of the way, by which joints differ that go together
_CORNERS = np.stack(np.meshgrid(*[(-1.0, 1.0)] * 3), axis=-1).reshape(-1, 3)


def joints_beyond(model: mujoco.MjModel, body: int) -> list[int]:
    """Return the ids of the joints of bodies that a body carries."""
    bodies = enumerate(model.jnt_bodyid.tolist())
    return [joint for joint, link in bodies if body in bodies_up_from(model, link)[1:]]


def is_named_jaw(model: mujoco.MjModel, joint: int) -> bool:
    """Return whether a joint or its body is called a jaw."""
    name = model.joint(joint).name.lower()
    body = model.body(int(model.jnt_bodyid[joint])).name.lower()
    return "grip" in name or any(word in name or word in body for word in JAW_WORDS)


def find_gripper(
    model: mujoco.MjModel, hand: int, home: F64, name: str, notes: list[str]
) -> GripperSpec | None:
    """Return the gripper on a hand (a body) of a limb, with the model at ``home`` [nq]; None,
    and a note, if there is none.

    Its actuator is commanded to both ends of its range: the gripper is open where the finger tips
    are farther apart. Where they show nothing, the upper end is assumed to be open.
    """
    beyond = joints_beyond(model, hand)
    movers = [a for a in actuators_of(model) if set(driven_joints(model, a)) & set(beyond)]
    if len(movers) != 1:
        names = ", ".join(model.actuator(a).name for a in movers)
        notes.append(
            f"{name}: its gripper has several actuators ({names}), and a robot's has one; leave "
            "one in the model, and couple the other fingers to it by a joint equality."
            if movers
            else f"{name}: no gripper was found; describe one in a table [limbs.gripper]. Suction "
            "is not supported. If the last joint is a jaw, it is no joint of the limb: give it a "
            "name with 'jaw' in the model, and inspect that again."
        )
        return None
    (actuator,) = movers
    joint = next(j for j in driven_joints(model, actuator) if j in beyond)
    ctrl = model.actuator_ctrlrange[control_address(model, [actuator])[0]]
    if ctrl[0] >= ctrl[1] or not model.jnt_limited[joint]:
        notes.append(
            f"{name}: a gripper without ranges was left out; describe it in a table "
            "[limbs.gripper]."
        )
        return None
    ends = _at_ends(model, beyond, actuator, ctrl, home)
    low_m, high_m = _gaps_m(model, hand, ends)
    measured = abs(high_m - low_m) > _STILL_M
    opens_up = high_m > low_m or not measured
    address = model.jnt_qposadr[beyond]
    q = np.array([data.qpos[address] for data in ends]) if measured else model.jnt_range[beyond].T
    closed_open = slice(None) if opens_up else slice(None, None, -1)
    ctrl, q = ctrl[closed_open], q[closed_open]
    of_joint = q[:, [beyond.index(joint)]]
    slack = _SAME * abs(of_joint[1] - of_joint[0])
    together = np.flatnonzero((np.abs(q - of_joint) < slack).all(axis=0))
    closed, opened = of_joint[:, 0].clip(*model.jnt_range[joint]).round(4).tolist()
    why = "where its tips were measured to be farther apart" if measured else "as assumed"
    notes.append(f"{name}: whether the gripper is open at {opened:g} ({ctrl[1]:g}), {why}.")
    slides = model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE
    if not slides or len(together) < len(beyond):
        notes.append(
            f"{name}: the gripper's fingers, the bodies that hold things, and gap_m, the gap "
            "between them at evenly spaced positions from closed to open."
        )
    return GripperSpec(
        joint_names(model, (beyond[i] for i in together.tolist())),
        model.actuator(actuator).name,
        GripperConvention(opened, closed, "m" if slides else "rad"),
        GripperConvention(float(ctrl[1]), float(ctrl[0]), "ctrl"),
    )


def _at_ends(
    model: mujoco.MjModel, beyond: list[int], actuator: int, ctrl: F64, home: F64
) -> list[mujoco.MjData]:
    """A gripper settled at each control, with the hand held still and nothing in the way."""
    alone = copy.copy(model)
    flags = mujoco.mjtDisableBit
    alone.opt.disableflags |= flags.mjDSBL_CONTACT | flags.mjDSBL_GRAVITY
    of_gripper = np.isin(alone.dof_jntid, beyond)
    alone.dof_armature[:] += np.where(of_gripper, _ARMATURE, _HELD)
    alone.dof_damping[of_gripper] += _DAMPING
    alone.opt.tolerance = 0.0  # MuJoCo relates it to the inertia
    ends: list[mujoco.MjData] = []
    for value in ctrl.tolist():
        data = mujoco.MjData(alone)
        data.qpos[:] = home
        data.ctrl[control_address(model, [actuator])] = value
        mujoco.mj_step(alone, data, round(_SETTLE_S / alone.opt.timestep))
        mujoco.mj_kinematics(alone, data)
        ends.append(data)
    return ends


def _gaps_m(model: mujoco.MjModel, hand: int, ends: list[mujoco.MjData]) -> tuple[float, float]:
    """Distance of the finger tips at both ends: of the points that move farthest to either side,
    or of a single jaw's from the hand. Equal if nothing moves.
    """
    fingers = [b for b in range(model.nbody) if hand in bodies_up_from(model, b)[1:]]
    of_hand = np.flatnonzero(model.body_weldid == model.body_weldid[hand]).tolist()
    points = np.stack([_points(model, data, fingers) for data in ends])
    palm = np.stack([_points(model, data, of_hand) for data in ends])
    way = points[1] - points[0]
    far_m = np.linalg.norm(way, axis=1)
    if far_m.max(initial=0.0) < _STILL_M:
        return 0.0, 0.0
    tip = int(far_m.argmax())
    opposed = np.where(way @ way[tip] < 0, far_m, 0.0)
    other = points[:, [opposed.argmax()]] if opposed.max() > far_m[tip] / 2 else palm
    low_m, high_m = np.linalg.norm(other - points[:, [tip]], axis=2).min(axis=1, initial=np.inf)
    return (float(low_m), float(high_m)) if other.size else (0.0, 0.0)


def _points(model: mujoco.MjModel, data: mujoco.MjData, bodies: Sequence[int]) -> F64:
    """Points [n, 3] in the world on the shapes of bodies (ids): vertices of meshes, and corners of
    boxes around anything else.
    """
    found = [np.empty((0, 3))]
    for geom in np.flatnonzero(np.isin(model.geom_bodyid, bodies)).tolist():
        points = model.geom_aabb[geom, :3] + _CORNERS * model.geom_aabb[geom, 3:]
        if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH:
            mesh = model.mesh(int(model.geom_dataid[geom]))
            first = int(mesh.vertadr[0])
            points = model.mesh_vert[first : first + int(mesh.vertnum[0])]
        found.append(data.geom_xpos[geom] + points @ data.geom_xmat[geom].reshape(3, 3).T)
    return np.concatenate(found)
