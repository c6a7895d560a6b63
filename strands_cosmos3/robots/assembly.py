"""The MuJoCo model of a robot: its parts put together, its ranges and servo gains set, and every
name checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.drives import require_drives
from strands_cosmos3.robots.spec import Limb, ModelPart, RobotSpec
from strands_cosmos3.robots.spec_file import model_file

_OPTIONS = ("timestep", "integrator", "cone", "impratio")
"""Physics options that attaching drops; without the elliptic cone, grasps creep."""
_CONTACT_OPTIONS = ("cone", "impratio")


@typed()
def load_robot(robot: RobotSpec) -> mujoco.MjModel:
    """Compile a robot's model. Its base, or the parts' common origin, is the world's origin.

    Raises:
        ResourceNotFoundError: A model file does not exist.
        ConfigError: MuJoCo cannot read or compile it, or it lacks something that the robot names,
            or a limb's joints are not those between the world and its frame, or an actuator drives
            something else.
    """
    with robot.named_in_errors():
        model = _compiled(robot)
        _require_names(model, robot)
        require_drives(model, robot)
        for limb in robot.limbs:
            _require_chain(model, limb)
            narrow_ranges(model, limb)
            _require_home(model, limb)
        return model


def _compiled(robot: RobotSpec) -> mujoco.MjModel:
    try:
        spec = assembled(robot.model)
        for limb in robot.limbs:
            set_servos(spec, limb)
            complete(spec, limb)
        return spec.compile()
    except (ValueError, mujoco.FatalError) as error:
        if isinstance(error, ConfigError):
            raise
        files = ", ".join(part.file for part in robot.model)
        raise ConfigError(
            f"MuJoCo cannot compile {files} of robot {robot.name!r}: {error}"
        ) from error


@typed()
def assembled(parts: tuple[ModelPart, ...], first: str | Path | None = None) -> mujoco.MjSpec:
    """Return the specification of a robot's parts; ``first`` is another file for the first one.

    Physics options are those of the first part, but the contacts' are those of what is mounted on
    it.

    Raises:
        ConfigError: MuJoCo cannot read or join the files, or one lacks a body that a part names, or
            there are no parts.
        ResourceNotFoundError: A file is missing.
    """
    if not parts:
        raise ConfigError("a robot's model needs at least one part.")
    paths = (
        [model_file(part) for part in parts]
        if first is None
        else [first, *(model_file(part) for part in parts[1:])]
    )
    try:
        return _joined(
            parts,
            [
                _edited(mujoco.MjSpec.from_file(str(path)), part)
                for path, part in zip(paths, parts, strict=True)
            ],
        )
    except (ValueError, mujoco.FatalError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"MuJoCo cannot load {', '.join(repr(str(path)) for path in paths)}: {error}"
        ) from error


def _edited(file: mujoco.MjSpec, part: ModelPart) -> mujoco.MjSpec:
    for name in part.without:
        file.delete(_body(file, name, part))
    for first, second in part.exclude:
        file.add_exclude(
            bodyname1=_body(file, first, part).name, bodyname2=_body(file, second, part).name
        )
    return file


def _body(spec: mujoco.MjSpec, name: str, part: ModelPart) -> Any:
    if (body := spec.body(name)) is None:
        have = ", ".join(one.name for one in spec.bodies if one.name)
        raise ConfigError(
            f"the part {part.file!r} names the body {name!r}, which the model does not have; it "
            f"has: {have}."
        )
    return body


def _joined(parts: tuple[ModelPart, ...], files: list[mujoco.MjSpec]) -> mujoco.MjSpec:
    if parts[0].prefix or parts[0].yaw_deg:
        whole = mujoco.MjSpec()
        for name in _OPTIONS:
            setattr(whole.option, name, getattr(files[0].option, name))
    else:  # attaching without a prefix makes MuJoCo warn
        whole, files, parts = _moved(files[0], parts[0].position_m), files[1:], parts[1:]
        if parts:  # a URDF's options, which would remove finger pads and what is only seen
            whole.compiler.fusestatic = whole.compiler.discardvisual = False
    for part, file in zip(parts, files, strict=True):
        half = np.deg2rad(part.yaw_deg) / 2
        on = whole.worldbody if part.mount is None else _body(whole, part.mount, part)
        for name in _CONTACT_OPTIONS if part.mount is not None else ():
            setattr(whole.option, name, getattr(file.option, name))
        frame = on.add_frame(pos=part.position_m, quat=[np.cos(half), 0.0, 0.0, np.sin(half)])
        for key in list(file.keys):  # a key of one part says nothing of the others
            file.delete(key)
        whole.attach(file, prefix=part.prefix, frame=frame)
    return whole


def _moved(file: mujoco.MjSpec, by_m: tuple[float, float, float]) -> mujoco.MjSpec:
    world = file.worldbody
    for one in (*world.bodies, *world.geoms, *world.sites, *world.cameras) if any(by_m) else ():
        one.pos = np.add(one.pos, by_m)
    return file


@typed()
def set_servos(spec: mujoco.MjSpec, limb: Limb) -> None:
    """Make position servos of a limb's actuators, with its gains if it has any; one that the
    model lacks is added.
    """
    if limb.gains is None:
        return
    kp, kd = (figures.values for figures in limb.gains)
    for i, name in enumerate(limb.actuators):
        actuator = spec.actuator(name)
        if actuator is None:
            actuator = spec.add_actuator(
                name=name, target=limb.joints[i], trntype=mujoco.mjtTrn.mjTRN_JOINT
            )
        actuator.set_to_position(kp=kp[i], kv=kd[i])
        actuator.ctrllimited = 0  # a motor's range is of torques


@typed()
def complete(spec: mujoco.MjSpec, limb: Limb) -> None:
    """Add what a model lacks: the site of the limb's tool centre point, and that its first link
    cannot collide with its base.

    MuJoCo ignores contacts between neighbours, but not with one that is fixed to the world.
    """
    first = None if (joint := spec.joint(limb.joints[0])) is None else joint.parent
    if first is not None and first.parent.name not in ("", "world"):
        pair = {first.name, first.parent.name}
        if not any({one.bodyname1, one.bodyname2} == pair for one in spec.excludes):
            spec.add_exclude(bodyname1=first.parent.name, bodyname2=first.name)
    if limb.tool is not None and spec.site(limb.tool) is None and spec.body(limb.frame) is not None:
        half = np.deg2rad(limb.tool_roll_deg) / 2
        spec.body(limb.frame).add_site(
            name=limb.tool, pos=limb.tool_m, quat=[np.cos(half), np.sin(half), 0.0, 0.0]
        )


def _require_names(model: mujoco.MjModel, robot: RobotSpec) -> None:
    """Raise ConfigError unless the model has everything that the robot names."""
    for limb in robot.limbs:
        gripper = limb.gripper
        _require(model, robot, "joint", (*limb.joints, *(gripper.joints if gripper else ())))
        _require(
            model, robot, "actuator", (*limb.actuators, *([gripper.actuator] if gripper else []))
        )
        _require(model, robot, "body", gripper.fingers if gripper else ())
        _require(model, robot, limb.frame_type, (limb.frame,))
        _require(model, robot, "site", () if limb.tool is None else (limb.tool,))
        _require(model, robot, "body", (limb.base,))
    _require(model, robot, "body", [camera.body for camera in robot.cameras])


def _require(model: mujoco.MjModel, robot: RobotSpec, kind: str, names: Iterable[str]) -> None:
    count = {"joint": model.njnt, "actuator": model.nu, "body": model.nbody, "site": model.nsite}[
        kind
    ]
    look_up: Any = getattr(model, kind)
    have = [look_up(i).name for i in range(count)]
    if missing := [name for name in names if name not in have]:
        raise ConfigError(
            f"robot {robot.name!r} names the {kind} {', '.join(missing)}, which its model does "
            "not have; it has: "
            f"{', '.join(filter(None, have)) or 'none'}."
        )


def _require_chain(model: mujoco.MjModel, limb: Limb) -> None:
    found = joints_to(model, frame_body(model, limb))
    if found != limb.joints:
        raise ConfigError(
            f"the joints of limb {limb.name!r} must be all those between the world and "
            f"{limb.frame!r}, base first: "
            f"{', '.join(found) or 'none'}; got {', '.join(limb.joints)}. Remove a joint that is "
            "to stay still from the model."
        )

    first, last = (
        int(model.jnt_bodyid[model.joint(name).id]) for name in (limb.joints[0], limb.joints[-1])
    )
    if int(model.body(limb.base).id) not in _up_from(model, first)[1:]:
        raise ConfigError(
            f"the base {limb.base!r} of limb {limb.name!r} must be a body that is fixed to the "
            "world and carries the joint "
            f"{limb.joints[0]!r}: "
            f"{', '.join(filter(None, (model.body(body).name for body in _up_from(model, first)[1:])))}."
        )
    if limb.tool is not None and last not in _up_from(model, int(model.site(limb.tool).bodyid[0])):
        raise ConfigError(
            f"the tool {limb.tool!r} of limb {limb.name!r} is a site that its joint "
            f"{limb.joints[-1]!r} does not move; each "
            "limb needs one of its own, beyond its last joint."
        )


def _up_from(model: mujoco.MjModel, body: int) -> list[int]:
    """A body, its parent and so on, up to the world."""
    found = [body]
    while body > 0:
        body = int(model.body_parentid[body])
        found.append(body)
    return found


def _require_home(model: mujoco.MjModel, limb: Limb) -> None:
    for name, angle in zip(limb.joints, limb.home, strict=True):
        joint = model.joint(name).id
        low, high = model.jnt_range[joint].tolist()
        if model.jnt_limited[joint] and not low <= angle <= high:
            raise ConfigError(
                f"home of limb {limb.name!r} has {name!r} at {angle:g}, outside its range {low:g} "
                f"to {high:g}; give an angle "
                "within the model's range and the limb's own limits."
            )


@typed()
def narrow_ranges(model: mujoco.MjModel, limb: Limb) -> None:
    """Narrow the joints' ranges, and those of their position servos, to the limb's; ConfigError
    if nothing is left of one.
    """
    limits = limb.limits
    if limits.q_min is None or limits.q_max is None:
        return
    for joint, actuator, low, high in zip(
        limb.joints, limb.actuators, limits.q_min.values, limits.q_max.values, strict=True
    ):
        j, a = model.joint(joint).id, model.actuator(actuator).id
        if model.jnt_limited[j]:
            low, high = max(low, model.jnt_range[j, 0]), min(high, model.jnt_range[j, 1])
        if low >= high:
            raise ConfigError(
                f"the limits of limb {limb.name!r} leave nothing of the range that the model "
                f"gives {joint!r}."
            )
        model.jnt_range[j], model.jnt_limited[j] = (low, high), 1
        if model.actuator_biastype[a] == mujoco.mjtBias.mjBIAS_AFFINE:
            model.actuator_ctrlrange[a], model.actuator_ctrllimited[a] = (low, high), 1


def frame_body(model: mujoco.MjModel, limb: Limb) -> int:
    """Id of the body that carries a limb's frame."""
    instance_of(model, mujoco.MjModel, "model")
    of_site = instance_of(limb, Limb, "limb").frame_type == "site"
    return (
        int(model.site_bodyid[model.site(limb.frame).id])
        if of_site
        else int(model.body(limb.frame).id)
    )


def tool_in_body(model: mujoco.MjModel, limb: Limb) -> F64:
    """Position [3] of a limb's tool centre point in the frame of :func:`frame_body`."""
    instance_of(model, mujoco.MjModel, "model")
    if instance_of(limb, Limb, "limb").frame_type == "body":
        return limb.T_frame_tool[:3, 3]
    site, turned = model.site(limb.frame), np.zeros(3)
    mujoco.mju_rotVecQuat(turned, limb.T_frame_tool[:3, 3], site.quat)
    return site.pos + turned


@typed()
def joints_to(model: mujoco.MjModel, body: int) -> tuple[str, ...]:
    """Return the names of the joints between the world and a body, base first."""
    if not 0 <= body < model.nbody:
        raise ConfigError(f"the model has the bodies 0 to {model.nbody - 1}, not {body}.")
    names: list[str] = []
    while body > 0:
        first, count = int(model.body_jntadr[body]), int(model.body_jntnum[body])
        names = [*(model.joint(j).name for j in range(first, first + count)), *names]
        body = int(model.body_parentid[body])
    return tuple(names)


@typed()
def home_configuration(model: mujoco.MjModel, robot: RobotSpec) -> F64:
    """Return the configuration [nq] of a robot's model at home, with open grippers."""
    _require_names(model, robot)
    q = model.qpos0.copy()
    for limb in robot.limbs:
        for joint, angle in zip(limb.joints, limb.home, strict=True):
            q[model.joint(joint).qposadr[0]] = angle
        if limb.gripper is not None:
            for joint in limb.gripper.joints:
                q[model.joint(joint).qposadr[0]] = limb.gripper.opening.open_value
    return q


@typed()
def base_pose(model: mujoco.MjModel, limb: Limb) -> F64:
    """Return the pose [4, 4] ``T_world_base`` of a limb's base, which does not move."""
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    found = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, limb.base)
    if found < 0 or model.body_weldid[found] != 0:
        raise ConfigError(
            f"the base {limb.base!r} of limb {limb.name!r} must be a body that is fixed to the "
            "world."
        )
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = data.xmat[found].reshape(3, 3), data.xpos[found]
    return T
