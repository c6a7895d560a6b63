"""Derive a robot's specification from a MuJoCo model, and a list of figures to complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import require_file
from strands_cosmos3.robots.actuators import (
    actuators_of,
    direct_actuators,
    driven_joints,
    servo_faults,
)
from strands_cosmos3.robots.grippers import find_gripper, is_named_jaw, joints_beyond
from strands_cosmos3.robots.limits import joint_torque
from strands_cosmos3.robots.model import (
    assembled,
    has_frame,
    joint_names,
    joints_to,
    left_out,
    mujoco_errors,
)
from strands_cosmos3.robots.spec import Figures, Limb, LimbLimits, ModelPart, RobotSpec

_LEAST_JOINTS = 4  # of a limb; a shorter branch is a finger
_MOST_FINGERS = 2  # joints of a finger
_TOOL_NAMES = ("tcp", "pinch", "grasp", "ee", "attachment")
_SIDES = ("left", "right")
_LISTED = "`robot list` has the robots that need none."
_EMBODIMENT = "droid"  # of a robot that names none


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
    if path.suffix.lower() != ".xml":
        raise ConfigError(
            f"a robot is derived from MuJoCo's .xml file of its model, got {str(path)!r}. {_LISTED}"
        )
    require_file(path, ConfigError, hint=f"A model's file is needed, got {str(path)!r}. {_LISTED}")
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
    notes.append(
        "cameras: one for each view of the embodiment, in tables [[cameras]], such as name = "
        '"wrist"; the model\'s own are not taken over.'
    )
    robot = RobotSpec(path.stem, "", (ModelPart(str(path.resolve())),), limbs)
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
    equality couples, or one that is named so.
    """
    if below[body] > _MOST_FINGERS or not model.body_jntnum[body]:
        return False
    first = model.joint(int(model.body_jntadr[body]))
    coupled = model.eq_type == mujoco.mjtEq.mjEQ_JOINT
    return bool(
        first.type[0] == mujoco.mjtJoint.mjJNT_SLIDE
        or is_named_jaw(model, first.id)
        or first.id in np.append(model.eq_obj1id[coupled], model.eq_obj2id[coupled])
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
    if not model.body(body).name:
        raise ConfigError(
            f"the body that joint {joints[-1]!r} moves has no name, and a limb needs that of its "
            'hand: name it in the model, e.g. <body name="hand">.'
        )
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
    gripper = find_gripper(model, body, qpos, name, notes)
    site = _tool(model, body)
    axes = "z out of the hand, and y along the opening of its fingers"
    notes.append(
        f"{name}: tool and tool_m, the point between its finger tips: {axes}; where the frame has "
        "other axes, add a site named 'tcp' to its body in the model, and inspect that again."
        if site is None
        else f"{name}: whether the tool {site.name!r} has {axes}."
    )
    parent = get_embodiment(_EMBODIMENT).tool_frame.parent
    if not has_frame(model, parent):
        notes.append(
            f"{name}: frames, such as {{{parent} = {model.body(body).name!r}}}: the body or site "
            f"whose motion an embodiment's rows are, {axes}."
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
        tool=None if site is None else site.name,
        tool_m=(0.0, 0.0, 0.0) if site is None else tuple(site.pos.tolist()),
        gripper=gripper,
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


def _tool(model: mujoco.MjModel, body: int) -> Any:
    """The site of a body that is called a tool centre point, or None."""
    sites = [model.site(i) for i in range(model.nsite) if model.site_bodyid[i] == body]
    return next((site for word in _TOOL_NAMES for site in sites if word in site.name.lower()), None)
