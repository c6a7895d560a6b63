"""Derive a robot's specification from a MuJoCo model, and a list of figures to complete."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.actuators import (
    actuators_of,
    direct_actuators,
    driven_joints,
    servo_faults,
)
from strands_cosmos3.robots.grippers import (
    find_gripper,
    is_named_jaw,
    joints_beyond,
    turns_beside,
)
from strands_cosmos3.robots.limits import joint_torque
from strands_cosmos3.robots.model import (
    assembled,
    has_frame,
    joint_names,
    joints_to,
    left_out,
    mujoco_errors,
)
from strands_cosmos3.robots.spec import Camera, Figures, Limb, LimbLimits, ModelPart, RobotSpec

_LEAST_JOINTS = 4  # of a limb; a shorter branch is a finger
_MOST_FINGERS = 2  # joints of a finger
_TOOL_NAMES = ("tcp", "pinch", "grasp", "ee", "attachment")
_SIDES = ("left", "right")
_ALIGNED = 0.9  # cosine between the axes of a site and those that were measured
_EMBODIMENT = "droid"  # of a robot that names none
_WRIST = "wrist"
_LOOK_M = 0.2


def inspect_model(path: str | Path) -> tuple[RobotSpec, list[str]]:
    """Derive a robot from an ``.xml`` model: limbs, joints, ranges, actuators, torques, grippers
    and home.

    Returns:
        The robot, and sentences that say what the model does not state and has to be completed or
        checked.

    Raises:
        ConfigError: It is no .xml file, MuJoCo cannot read it, or it has no chain of at least four
            actuated joints.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() != ".xml" or not path.is_file():
        raise ConfigError(
            f"a robot is derived from MuJoCo's .xml file of its model, got {str(path)!r}. `robot "
            "list` has the robots that need none."
        )
    with mujoco_errors(f"load {str(path)!r}"):
        model = assembled((ModelPart(str(path.resolve())),)).compile()
    _require_names(model, path)
    bodies = _limb_ends(model)
    if not bodies:
        raise ConfigError(
            f"{str(path)!r} has no chain of at least {_LEAST_JOINTS} hinges or slides; it is not "
            "an arm."
        )
    notes: list[str] = []
    names = _limb_names(model, bodies)
    limbs = tuple(_limb(model, body, name, notes) for body, name in zip(bodies, names, strict=True))
    notes.append("title, source: what the robot is, and where its figures come from.")
    cameras = _cameras(model, limbs, notes)
    robot = RobotSpec(path.stem, "", (ModelPart(str(path.resolve())),), limbs, cameras)
    if settings := left_out(robot):
        notes.append(f"a scene has its own; not taken over: {', '.join(settings)}.")
    return robot, notes


def _require_names(model: mujoco.MjModel, path: Path) -> None:
    """Refuse what no limb can name: a base that floats, and joints or actuators without a name."""
    kinds = model.jnt_type.tolist()
    bodies = model.jnt_bodyid.tolist()
    for joint, (kind, body) in enumerate(zip(kinds, bodies, strict=True)):
        name = model.joint(joint).name
        of_body = f"body {model.body(body).name!r}"
        if kind in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
            if not name:
                raise ConfigError(
                    f"{str(path)!r} has a joint without a name on {of_body}; name it there."
                )
        elif joints_beyond(model, body):
            raise ConfigError(
                f"{str(path)!r} stands on a free or ball joint, {name!r} of {of_body}; delete that "
                "joint from the model, which fixes the base, and joints that are not to move, such "
                "as legs."
            )
    if unnamed := [a for a in actuators_of(model) if not model.actuator(a).name]:
        driven = joint_names(model, (j for a in unnamed for j in driven_joints(model, a)))
        raise ConfigError(
            f"{str(path)!r} has {len(unnamed)} actuators without a name, of "
            f"{', '.join(driven) or 'no joint'}; name them there."
        )


def _limb_ends(model: mujoco.MjModel) -> list[int]:
    """The last body of each limb: beyond it there are only fingers, or nothing that moves."""
    below = [0] * model.nbody  # joints of the longest chain from a body on
    children: list[list[int]] = [[] for _ in range(model.nbody)]
    for body in range(model.nbody - 1, 0, -1):
        children[model.body_parentid[body]].insert(0, body)
        longest = max((below[child] for child in children[body]), default=0)
        below[body] = longest + int(model.body_jntnum[body])
    ends: list[int] = []

    def collect_ends(body: int) -> None:
        moving = [child for child in children[body] if below[child]]
        branches = [child for child in moving if below[child] >= _LEAST_JOINTS]
        if not branches and len(moving) == 1 and not _is_finger(model, moving[0], below):
            branches = moving
        for child in branches:
            collect_ends(child)
        if not branches and len(joints_to(model, body)) >= _LEAST_JOINTS:
            ends.append(_hand_of(model, body, children))

    collect_ends(0)
    return ends


def _is_finger(model: mujoco.MjModel, body: int, below: list[int]) -> bool:
    """Whether the moving part at a body is a gripper's single jaw: a slide, a joint that an
    equality couples, one that is named so, or a last hinge that turns beside the hand.
    """
    if below[body] > _MOST_FINGERS or not model.body_jntnum[body]:
        return False
    first = model.joint(int(model.body_jntadr[body]))
    coupled = model.eq_type == mujoco.mjtEq.mjEQ_JOINT
    return bool(
        first.type[0] == mujoco.mjtJoint.mjJNT_SLIDE
        or any(word in first.name.lower() for word in ("grip", "finger"))
        or first.id in np.append(model.eq_obj1id[coupled], model.eq_obj2id[coupled])
        or (below[body] == 1 and (is_named_jaw(model, first.id) or turns_beside(model, first.id)))
    )


def _hand_of(model: mujoco.MjModel, body: int, children: list[list[int]]) -> int:
    """The last body on the way to the fingers that is fixed to the limb's last link, or that
    link, if fingers are on it.
    """
    if any(model.body_jntnum[child] for child in children[body]):
        return body
    fixed = [
        child for child in children[body] if not model.body_jntnum[child] and model.body(child).name
    ]
    return _hand_of(model, fixed[0], children) if len(fixed) == 1 else body


def _limb_names(model: mujoco.MjModel, bodies: list[int]) -> list[str]:
    if len(bodies) == 1:
        return ["arm"]
    names = []
    for i, body in enumerate(bodies):
        joints = joint_names(model, joints_to(model, body))
        text = " ".join((model.body(body).name, *joints)).lower()
        sides = [side for side in _SIDES if side in text]
        names.append(sides[0] if len(sides) == 1 else f"limb{i + 1}")
    return names if len(set(names)) == len(names) else [f"limb{i + 1}" for i in range(len(bodies))]


def _limb(model: mujoco.MjModel, body: int, name: str, notes: list[str]) -> Limb:
    ids = joints_to(model, body)
    joints = joint_names(model, ids)
    limbs_base = model.body(int(model.body_parentid[model.jnt_bodyid[ids[0]]])).name or "world"
    actuator_of = {
        name: direct_actuators(model, joint)[:1] for name, joint in zip(joints, ids, strict=True)
    }
    if missing := [joint for joint, actuator in actuator_of.items() if not actuator]:
        notes.append(
            f"{name}: no actuator drives {', '.join(missing)}; give gains (kp, kd), and position "
            "servos are added."
        )
    elif reasons := servo_faults(model, [actuator for (actuator,) in actuator_of.values()]):
        notes.append(
            f"{name}: not position servos: {', '.join(reasons)}; give gains (kp, kd), and they "
            "become such."
        )
    if unlimited := joint_names(model, (joint for joint in ids if not model.jnt_limited[joint])):
        notes.append(
            f"{name}: the model does not limit {', '.join(unlimited)}; give q_min and q_max, else "
            "+-2 pi is assumed."
        )
    torques = tuple(joint_torque(model, joint) or 0.0 for joint in ids)
    notes.append(
        f"{name}: velocity, acceleration and jerk limits, with their source; what "
        "is left out is assumed."
    )
    home = _home(model, ids, name, notes)
    qpos = model.qpos0.copy()
    qpos[model.jnt_qposadr[ids]] = home
    found = find_gripper(model, body, qpos, name, notes)
    tool, T_tool = _tool(model, body, None if found is None else found.T_hand_tool, name, notes)
    parent = get_embodiment(_EMBODIMENT).tool_frame.parent
    frames = {} if has_frame(model, parent) else {parent: tool or model.body(body).name}
    if frames:
        notes.append(
            f"{name}: whether {frames[parent]!r} is the frame {parent!r}, whose motion an "
            "embodiment's rows are: z out of the hand, and y along the opening of its fingers."
        )
    return Limb(
        name,
        joints,
        tuple(
            model.actuator(actuator[0]).name if actuator else f"{joint}_servo"
            for joint, actuator in actuator_of.items()
        ),
        frame=model.body(body).name,
        base=limbs_base,
        home=tuple(home),
        limits=LimbLimits(
            torque=Figures(torques, "the model's force ranges") if min(torques) > 0 else None
        ),
        tool=tool,
        tool_m=tuple(T_tool[:3, 3].round(5).tolist()),
        tool_quat=None if np.allclose(T_tool[:3, :3], np.eye(3)) else _quaternion(T_tool),
        gripper=None if found is None else found.spec,
        frames=frames,
    )


def _home(model: mujoco.MjModel, ids: list[int], name: str, notes: list[str]) -> list[float]:
    """The keyframe "home", or the first one, or zero moved into the joints' ranges."""
    key = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_KEY, "home")
    if key < 0:
        taken = f"the keyframe {model.key(0).name!r}" if model.nkey else "zero, within the ranges"
        notes.append(
            f"{name}: home, as the model has no keyframe 'home': {taken}. An episode begins there, "
            "so the hand should be above the workspace, with its fingers down."
        )
    q = model.key_qpos[max(key, 0)] if model.nkey else model.qpos0
    angles = q[model.jnt_qposadr[ids]]
    low, high = model.jnt_range[ids].T
    return np.where(model.jnt_limited[ids] > 0, np.clip(angles, low, high), angles).tolist()


def _tool(
    model: mujoco.MjModel, body: int, T_measured: F64 | None, name: str, notes: list[str]
) -> tuple[str | None, F64]:
    """A site of the hand that is called a tool centre point, unless its axes contradict the
    fingers' motion; else the point that was measured between them. With its pose [4, 4].
    """
    sites = [model.site(i) for i in range(model.nsite) if model.site_bodyid[i] == body]
    named = [site for word in _TOOL_NAMES for site in sites if word in site.name.lower()]
    for site in named:
        T = np.eye(4)
        T[:3, 3] = site.pos
        turn = np.empty(9)
        mujoco.mju_quat2Mat(turn, site.quat)
        T[:3, :3] = turn.reshape(3, 3)
        if T_measured is None:
            return site.name, T
        aligned = np.abs(np.diag(T[:3, :3].T @ T_measured[:3, :3]))
        if aligned.min() > _ALIGNED and T[:3, 2] @ T_measured[:3, 2] > 0:
            return site.name, T
    if T_measured is None:
        return None, np.eye(4)
    names = {model.site(i).name for i in range(model.nsite)}
    tool = f"{name}_tcp" if name in _SIDES else "tcp"
    while tool in names:
        tool = f"measured_{tool}"
    refused = f" ({named[0].name!r} of the model does not point out of the hand)" if named else ""
    notes.append(
        f"{name}: tool_m and tool_quat of {tool!r}, measured between the finger tips{refused}."
    )
    return tool, T_measured


def _quaternion(T: F64) -> tuple[float, float, float, float]:
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, T[:3, :3].flatten())
    w, x, y, z = quat.round(6).tolist()
    return w, x, y, z


def _cameras(
    model: mujoco.MjModel, limbs: tuple[Limb, ...], notes: list[str]
) -> tuple[Camera, ...]:
    """The only limb's wrist camera: the model's of that name, or the only one on its last link."""
    (first, *further) = limbs
    carried = model.body_weldid[model.cam_bodyid] == model.body_weldid[model.body(first.frame).id]
    fixed = model.cam_mode == mujoco.mjtCamLight.mjCAMLIGHT_FIXED
    on_hand = [model.camera(i) for i in np.flatnonzero(carried & fixed).tolist()]
    chosen = [camera for camera in on_hand if camera.name == _WRIST] or on_hand
    if further or len(chosen) != 1:
        if not further:
            notes.append(f"cameras: none is named {_WRIST!r}; add one in a table [[cameras]].")
        return ()
    (camera,) = chosen
    turn = np.empty(9)
    mujoco.mju_quat2Mat(turn, camera.quat)
    _, up, back = turn.reshape(3, 3).T
    body = model.body(int(camera.bodyid[0])).name
    target = tuple((camera.pos - _LOOK_M * back).round(5).tolist())
    position = tuple(camera.pos.tolist())
    fovy = float(camera.fovy[0])
    return (Camera(_WRIST, body, position, target, fovy, tuple(up.round(6).tolist())),)
