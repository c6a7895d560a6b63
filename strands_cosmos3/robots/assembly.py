"""The MuJoCo model of a robot: its parts put together, its ranges and servo gains set, and every name checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.spec import Limb, ModelPart, RobotSpec
from strands_cosmos3.robots.spec_file import model_file

_OPTIONS = ("timestep", "integrator", "cone", "impratio")
"""Physics options that attaching drops; without the elliptic cone, grasps creep."""


@typed()
def load_robot(robot: RobotSpec) -> mujoco.MjModel:
    """Compile a robot's model. Its base, or the parts' common origin, is the world's origin.

    Raises:
        ResourceNotFoundError: A model file does not exist.
        ConfigError: MuJoCo cannot read or compile it, or it lacks something that the robot names, or a limb's joints are not
            those between the world and its frame.
    """
    try:
        spec = _assembled(robot.model)
        for limb in robot.limbs:
            set_servos(spec, limb)
        model = spec.compile()
    except (ValueError, mujoco.FatalError) as error:
        if isinstance(error, ConfigError):
            raise
        files = ", ".join(part.file for part in robot.model)
        raise ConfigError(f"MuJoCo cannot compile {files} of robot {robot.name!r}: {error}") from error
    _require_names(model, robot)
    for limb in robot.limbs:
        _require_chain(model, limb)
        narrow_ranges(model, limb)
    return model


def _assembled(parts: tuple[ModelPart, ...]) -> mujoco.MjSpec:
    files = [mujoco.MjSpec.from_file(str(model_file(part))) for part in parts]
    first = parts[0]
    if len(parts) == 1 and not first.prefix and not any(first.position_m) and not first.yaw_deg:
        return files[0]
    whole = mujoco.MjSpec()
    for name in _OPTIONS:
        setattr(whole.option, name, getattr(files[0].option, name))
    for part, file in zip(parts, files, strict=True):
        half = np.deg2rad(part.yaw_deg) / 2
        frame = whole.worldbody.add_frame(pos=part.position_m, quat=[np.cos(half), 0.0, 0.0, np.sin(half)])
        for key in list(file.keys):  # a key of one part says nothing of the others
            file.delete(key)
        whole.attach(file, prefix=part.prefix, frame=frame)
    return whole


@typed()
def set_servos(spec: mujoco.MjSpec, limb: Limb) -> None:
    """Make position servos of a limb's actuators, with its gains if it has any; one that the model lacks is added."""
    if limb.gains is None:
        return
    kp, kd = (figures.values for figures in limb.gains)
    for i, name in enumerate(limb.actuators):
        actuator = spec.actuator(name)
        if actuator is None:
            actuator = spec.add_actuator(name=name, target=limb.joints[i], trntype=mujoco.mjtTrn.mjTRN_JOINT)
        actuator.set_to_position(kp=kp[i], kv=kd[i])
        actuator.ctrllimited = 0  # a motor's range is of torques


def _require_names(model: mujoco.MjModel, robot: RobotSpec) -> None:
    """Raise ConfigError unless the model has everything that the robot names."""
    for limb in robot.limbs:
        gripper = limb.gripper
        _require(model, robot, "joint", (*limb.joints, *(gripper.joints if gripper else ())))
        _require(model, robot, "actuator", (*limb.actuators, *([gripper.actuator] if gripper else [])))
        _require(model, robot, limb.frame_type, (limb.frame,))
        _require(model, robot, "site", () if limb.tool is None else (limb.tool,))
        _require(model, robot, "body", (limb.base,))
    _require(model, robot, "body", [camera.body for camera in robot.cameras])


def _require(model: mujoco.MjModel, robot: RobotSpec, kind: str, names: Iterable[str]) -> None:
    count = {"joint": model.njnt, "actuator": model.nu, "body": model.nbody, "site": model.nsite}[kind]
    look_up: Any = getattr(model, kind)
    have = [look_up(i).name for i in range(count)]
    if missing := [name for name in names if name not in have]:
        raise ConfigError(
            f"robot {robot.name!r} names the {kind} {', '.join(missing)}, which its model does not have; it has: "
            f"{', '.join(filter(None, have)) or 'none'}."
        )


def _require_chain(model: mujoco.MjModel, limb: Limb) -> None:
    found = joints_to(model, frame_body(model, limb))
    if found != limb.joints:
        raise ConfigError(
            f"the joints of limb {limb.name!r} must be all those between the world and {limb.frame!r}, base first: "
            f"{', '.join(found) or 'none'}; got {', '.join(limb.joints)}. Remove a joint that is to stay still from the model."
        )


@typed()
def narrow_ranges(model: mujoco.MjModel, limb: Limb) -> None:
    """Narrow the joints' ranges, and those of their position servos, to the limb's; ConfigError if nothing is left of one."""
    limits = limb.limits
    if limits.q_min is None or limits.q_max is None:
        return
    for joint, actuator, low, high in zip(limb.joints, limb.actuators, limits.q_min.values, limits.q_max.values, strict=True):
        j, a = model.joint(joint).id, model.actuator(actuator).id
        if model.jnt_limited[j]:
            low, high = max(low, model.jnt_range[j, 0]), min(high, model.jnt_range[j, 1])
        if low >= high:
            raise ConfigError(f"the limits of limb {limb.name!r} leave nothing of the range that the model gives {joint!r}.")
        model.jnt_range[j], model.jnt_limited[j] = (low, high), 1
        if model.actuator_biastype[a] == mujoco.mjtBias.mjBIAS_AFFINE:
            model.actuator_ctrlrange[a], model.actuator_ctrllimited[a] = (low, high), 1


def frame_body(model: mujoco.MjModel, limb: Limb) -> int:
    """Id of the body that carries a limb's frame."""
    instance_of(model, mujoco.MjModel, "model")
    of_site = instance_of(limb, Limb, "limb").frame_type == "site"
    return int(model.site_bodyid[model.site(limb.frame).id]) if of_site else int(model.body(limb.frame).id)


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
        raise ConfigError(f"the base {limb.base!r} of limb {limb.name!r} must be a body that is fixed to the world.")
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = data.xmat[found].reshape(3, 3), data.xpos[found]
    return T
