"""MuJoCo models of robots: their parts put together, names and drives checked, kinematics read from
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, typed
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.embodiments import GripperConvention
from strands_cosmos3.errors import (
    ConfigError,
    Cosmos3Error,
    EnvironmentalError,
    ResourceNotFoundError,
    UnknownNameError,
)
from strands_cosmos3.extras import needed_by
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.actuators import (
    control_address,
    driven_joints,
    position_servos,
    servo_faults,
)
from strands_cosmos3.robots.catalogue import PANDA, model_file
from strands_cosmos3.robots.joints import SerialChain
from strands_cosmos3.robots.panda import FRANKA_CHAIN, HOME_Q, T_flange_hand, T_link7_flange
from strands_cosmos3.robots.settings import leave_settings_out, settings_left_out
from strands_cosmos3.robots.spec import IMPRATIO, GripperSpec, Limb, ModelPart, RobotSpec

PHYSICS_HZ = 600  # 40 steps per row of a 15 Hz chunk
_ROUNDING = 0.02  # of a range: a gripper's value may lie this far outside
_SAME = 1e-9
_PROBE_RAD = 0.3
_ADDED = " Give a limb gains (kp, kd), and the servos that its joints lack are added."
MEETS_ALL = {"contype": 2**31 - 1, "conaffinity": 2**31 - 1}
"""Contact bits of what is no robot's: it meets every geom that meets anything."""


def panda_path() -> Path:
    """Path of the bundled MJCF file; :class:`ResourceNotFoundError` if the installation lacks
    it.
    """
    return resource("assets/panda.xml")


def load_panda() -> mujoco.MjModel:
    """Load the bundled Franka Panda with its hand: qpos = 7 joints [rad], then 2 fingers [m]; ctrl
    = 8 actuators.

    The physics run at 600 Hz with ``implicitfast``. The base is the world's origin. Names are in
    ``robots.panda``.
    """
    return mujoco.MjModel.from_xml_path(str(panda_path()))


def _menagerie_path() -> Path:
    with needed_by("the 'menagerie' arm"):
        from robot_descriptions import loaders  # noqa: F401 - before the network is used
    from git.exc import GitError

    try:
        return Path(import_module("robot_descriptions.panda_mj_description").MJCF_PATH)
    except (GitError, OSError, RuntimeError, ValueError) as error:  # no git, no network, no space
        raise EnvironmentalError(
            f"MuJoCo Menagerie's panda could not be fetched or read ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); it is cloned from GitHub at its first use. Use the "
            "bundled arm, 'panda', or the path of an .xml or .mjb file."
        ) from error


@typed()
def model_path(spec: str | Path | None = None) -> Path:
    """Return the path of an arm's model file.

    Args:
        spec: None or ``"panda"`` for the bundled arm, the path of an ``.xml`` or ``.mjb`` file, or
            ``"menagerie"`` for MuJoCo Menagerie's panda, which is downloaded at its first use.

    Raises:
        UnknownNameError, ResourceNotFoundError: It is neither a known name nor a path, or the file
            does not exist.
        MissingDependencyError, EnvironmentalError: ``menagerie`` without robot_descriptions, or it
            could not be downloaded.
    """
    if spec is None or spec == "panda":
        return panda_path()
    if spec == "menagerie":
        return _menagerie_path()
    path = Path(spec).expanduser()
    if path.suffix.lower() not in (".xml", ".mjb"):
        raise UnknownNameError(
            "arm model", str(spec), ("panda", "menagerie", "a path ending in .xml or .mjb")
        )
    if not path.is_file():
        raise ResourceNotFoundError(
            f"arm model {str(path)!r} does not exist; give an existing file or 'panda'."
        )
    return path


@contextmanager
def mujoco_errors(action: str) -> Iterator[None]:
    """Raise ConfigError, "MuJoCo cannot ``action``", for what MuJoCo raises in the block."""
    try:
        yield
    except (ValueError, mujoco.FatalError) as error:
        if isinstance(error, Cosmos3Error):
            raise
        raise ConfigError(f"MuJoCo cannot {action}: {' '.join(str(error).split())}") from error


def load_model(
    spec: str | Path | mujoco.MjModel | None = None, obstacles: Sequence[Obstacle] = ()
) -> mujoco.MjModel:
    """Load and compile an arm's model; ``spec`` is as in :func:`model_path`, or a model, which is
    returned unchanged.

    Obstacles are added to the world. A :class:`ConfigError` says that the model is compiled already
    and cannot be given any, or that MuJoCo cannot compile or read the file; further errors as
    :func:`model_path`.
    """
    if obstacles and is_compiled(spec):
        raise ConfigError(
            "a compiled arm model cannot be given obstacles: add them to it, or give its .xml."
        )
    if isinstance(spec, mujoco.MjModel):
        return spec
    path = model_path(spec)
    with mujoco_errors(f"load {str(path)!r}"):
        if path.suffix.lower() == ".mjb":
            return mujoco.MjModel.from_binary_path(str(path))
        return _compiled(mujoco.MjSpec.from_file(str(path)), obstacles)


def _compiled(arm: mujoco.MjSpec, obstacles: Sequence[Obstacle]) -> mujoco.MjModel:
    for box in obstacles:
        arm.worldbody.add_geom(
            name=box.name,
            type=mujoco.mjtGeom.mjGEOM_BOX,
            size=np.array(box.size_m) / 2,
            pos=box.center_m,
            quat=quaternion_about(2, box.yaw_rad),
            **MEETS_ALL,
        )
    return arm.compile()


def quaternion_about(axis: int, angle_rad: float) -> F64:
    """Return the quaternion [4], wxyz, of a turn about an axis, by its index."""
    quat = np.zeros(4)
    quat[0] = np.cos(angle_rad / 2)
    quat[1 + axis] = np.sin(angle_rad / 2)
    return quat


def load_with_obstacles(
    spec: str | Path | mujoco.MjModel | None, robot: RobotSpec, obstacles: Sequence[Obstacle]
) -> mujoco.MjModel:
    """Load a robot's model, which may consist of several files, with obstacles; arguments and
    errors as :func:`load_model`.
    """
    if isinstance(spec, mujoco.MjModel):
        return load_model(spec, obstacles)
    with robot.named_in_errors():
        arm = load_spec(spec, robot)
        with mujoco_errors(f"compile the model of robot {robot.name!r}"):
            model = _compiled(arm, obstacles)
        for limb in robot.limbs if spec is None else ():
            narrow_ranges(model, limb)
    return model


def is_compiled(spec: object) -> bool:
    """Whether an arm's model is compiled, in memory or as an ``.mjb`` file."""
    return isinstance(spec, mujoco.MjModel) or (
        isinstance(spec, str | Path) and Path(spec).suffix.lower() == ".mjb"
    )


def load_spec(spec: str | Path | None = None, robot: RobotSpec = PANDA) -> mujoco.MjSpec:
    """Load an arm's specification, around which a scene can be built. The file must be an ``.xml``;
    None is the robot's own.

    Raises:
        ConfigError: MuJoCo cannot read the file, it is compiled, or it lacks the robot's names;
            others as :func:`model_path`.
    """
    path = None if spec is None or spec == robot.name else model_path(spec)
    if path is not None and path.suffix.lower() != ".xml":
        raise ConfigError(
            f"a scene needs the arm as an .xml file; {str(path)!r} is already compiled."
        )
    arm = _with_servos(robot, path)
    _require_names(arm, robot, "its model" if path is None else str(path))
    return arm


def _set_options(spec: mujoco.MjSpec, impratio: float) -> None:
    """Set a scene's options: those of MuJoCo, but 600 Hz with ``implicitfast``, and contacts with
    elliptic friction cones, without which grasps creep.
    """
    spec.option.timestep = 1.0 / PHYSICS_HZ
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.option.impratio = impratio


def compensate_weight(arm: mujoco.MjSpec) -> None:
    """Let the arm compensate its own weight in a simulation, as real ones do."""
    for body in arm.bodies[1:]:
        body.gravcomp = 1.0


def load_robot(
    robot: RobotSpec, simulated: bool = False, arm: str | Path | None = None
) -> mujoco.MjModel:
    """Compile a robot's model. Its base, or the parts' common origin, is the world's origin.

    It has a scene's options. ``simulated`` compensates its weight as well, as a scene does. ``arm``
    is another model of it, as for :func:`load_spec`.

    Raises:
        ResourceNotFoundError: A model file does not exist.
        ConfigError: MuJoCo cannot read or compile it, or it lacks something that the robot names,
            or a limb's joints are not those between the world and its frame, or an actuator drives
            something else.
    """
    with robot.named_in_errors():
        files = ", ".join(part.file for part in robot.model)
        with mujoco_errors(f"compile {files} of robot {robot.name!r}"):
            spec = load_spec(arm, robot)
            if simulated:
                compensate_weight(spec)
            model = spec.compile()
        require_drives(model, robot)
        for limb in robot.limbs:
            _require_chain(model, limb)
            if arm is None:
                narrow_ranges(model, limb)
            _require_home(model, limb)
        return model


def _with_servos(robot: RobotSpec, first: Path | None = None) -> mujoco.MjSpec:
    arm = assembled(robot.model, first, robot.impratio)
    for limb in robot.limbs:
        _set_servos(arm, limb)
        _complete(arm, limb)
    return arm


def assembled(
    parts: tuple[ModelPart, ...], first: Path | None = None, impratio: float = IMPRATIO
) -> mujoco.MjSpec:
    """Return the specification of a robot's parts; ``first`` is another file for the first one.

    It has a scene's options. What the files state of a whole simulation is left out.

    Raises:
        ConfigError: MuJoCo cannot read or join the files, or one lacks a body that a part names.
        ResourceNotFoundError: A file is missing.
    """
    paths = [first or model_file(parts[0]), *map(model_file, parts[1:])]
    with mujoco_errors(f"load {', '.join(repr(str(path)) for path in paths)}"):
        specs = [mujoco.MjSpec.from_file(str(path)) for path in paths]
        for part, spec in zip(parts, specs, strict=True):
            leave_settings_out(spec)
            for name in part.without:
                spec.delete(_body(spec, name, part))
            for pair in part.exclude:
                body1, body2 = (_body(spec, name, part).name for name in pair)
                spec.add_exclude(bodyname1=body1, bodyname2=body2)
        whole = _joined(parts, specs)
    _set_options(whole, impratio)
    return whole


def left_out(robot: RobotSpec) -> list[str]:
    """Return what the files of a robot's model state of a simulation, such as ``"iterations 5"``,
    and a scene does not take over. The files must be readable.
    """
    of_scene = mujoco.MjSpec()
    _set_options(of_scene, robot.impratio)
    specs = (mujoco.MjSpec.from_file(str(model_file(part))) for part in robot.model)
    stated = (setting for spec in specs for setting in settings_left_out(spec, of_scene.option))
    return list(dict.fromkeys(stated))


def _body(spec: mujoco.MjSpec, name: str, part: ModelPart) -> Any:
    if (body := spec.body(name)) is None:
        names = ", ".join(body.name for body in spec.bodies if body.name)
        raise ConfigError(
            f"the part {part.file!r} names the body {name!r}, which the model does not have; it "
            f"has: {names}."
        )
    return body


def _joined(parts: tuple[ModelPart, ...], specs: list[mujoco.MjSpec]) -> mujoco.MjSpec:
    if parts[0].prefix or parts[0].yaw_deg:
        whole = mujoco.MjSpec()
    else:  # attaching without a prefix makes MuJoCo warn
        whole = specs[0]
        world = specs[0].worldbody
        for child in (*world.bodies, *world.geoms, *world.sites, *world.cameras):
            child.pos = np.add(child.pos, parts[0].position_m)
        specs, parts = specs[1:], parts[1:]
    for part, spec in zip(parts, specs, strict=True):
        parent = whole.worldbody if part.mount is None else _body(whole, part.mount, part)
        frame = parent.add_frame(
            pos=part.position_m, quat=quaternion_about(2, np.deg2rad(part.yaw_deg))
        )
        for key in list(spec.keys):  # a key of one part says nothing of the others
            spec.delete(key)
        whole.attach(spec, prefix=part.prefix, frame=frame)
    return whole


def _set_servos(spec: mujoco.MjSpec, limb: Limb) -> None:
    """Make position servos of a limb's actuators, with its gains if it has any; one that the
    model lacks is added.
    """
    if limb.gains is None:
        return
    for name, joint, kp, kd in zip(
        limb.actuators, limb.joints, limb.gains.kp.values, limb.gains.kd.values, strict=True
    ):
        actuator = spec.actuator(name)
        if actuator is None:
            actuator = spec.add_actuator(name=name, target=joint, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        gear = actuator.gear[0]
        actuator.set_to_position(kp=kp / gear**2, kv=kd / gear**2)
        actuator.ctrllimited = actuator.actlimited = 0  # a motor's range is of torques


def _complete(spec: mujoco.MjSpec, limb: Limb) -> None:
    """Add what a model lacks: the site of the limb's tool centre point, and that its first link
    cannot collide with its base.

    MuJoCo ignores contacts between neighbours, but not with one that is fixed to the world.
    """
    joint = spec.joint(limb.joints[0])
    if joint is not None and joint.parent.parent.name not in ("", "world"):
        pair = {joint.parent.name, joint.parent.parent.name}
        if not any({exclude.bodyname1, exclude.bodyname2} == pair for exclude in spec.excludes):
            spec.add_exclude(bodyname1=joint.parent.parent.name, bodyname2=joint.parent.name)
    if limb.tool is not None and spec.site(limb.tool) is None and spec.body(limb.frame) is not None:
        quat = quaternion_about(0, np.deg2rad(limb.tool_roll_deg))
        body = spec.body(limb.frame)  # its class may have defaults for sites
        body.add_site(default=spec.default, name=limb.tool, pos=limb.tool_m, quat=quat)


def _require_names(model: mujoco.MjSpec, robot: RobotSpec, source: str) -> None:
    """Raise ConfigError unless a model's specification has all that the robot names."""
    names: dict[str, list[str]] = {
        "joint": list(robot.joints),
        "actuator": [],
        "body": [camera.body for camera in robot.cameras],
        "site": [],
    }
    for limb in robot.limbs:
        names["actuator"] += limb.actuators
        names["body"].append(limb.base)
        names[limb.frame_type].append(limb.frame)
        names["site"] += [] if limb.tool is None else [limb.tool]
        if limb.gripper is not None:
            names["joint"] += limb.gripper.joints
            names["actuator"].append(limb.gripper.actuator)
            names["body"] += limb.gripper.fingers
    parts = (model.joints, model.actuators, model.bodies, model.sites)
    for (kind, of_robot), of_model in zip(names.items(), parts, strict=True):
        has = [part.name for part in of_model]
        if missing := [name for name in of_robot if name not in has]:
            raise ConfigError(
                f"robot {robot.name!r} names the {kind} {', '.join(missing)}, which {source} does "
                f"not have; it has: {', '.join(filter(None, has)) or 'none'}."
                f"{_ADDED if kind == 'actuator' else ''}"
            )


def _require_chain(model: mujoco.MjModel, limb: Limb) -> None:
    joints = joint_names(model, joints_to(model, frame_body(model, limb)))
    if joints != limb.joints:
        raise ConfigError(
            f"the joints of limb {limb.name!r} must be all those between the world and "
            f"{limb.frame!r}, base first: {', '.join(joints) or 'none'}; got "
            f"{', '.join(limb.joints)}. Remove a joint that is to stay still from the model."
        )
    bodies = model.jnt_bodyid[joint_ids(model, limb.joints)].tolist()
    carriers = bodies_up_from(model, bodies[0])[1:]
    if model.body(limb.base).id not in carriers:
        names = ", ".join(filter(None, (model.body(body).name for body in carriers)))
        raise ConfigError(
            f"the base {limb.base!r} of limb {limb.name!r} must be a body that is fixed to the "
            f"world and carries the joint {limb.joints[0]!r}: {names}."
        )
    tool = bodies[-1] if limb.tool is None else int(model.site(limb.tool).bodyid[0])
    if bodies[-1] not in bodies_up_from(model, tool):
        raise ConfigError(
            f"the tool {limb.tool!r} of limb {limb.name!r} is a site that its joint "
            f"{limb.joints[-1]!r} does not move; each limb needs one of its own, "
            "beyond its last joint."
        )


def _require_home(model: mujoco.MjModel, limb: Limb) -> None:
    for name, angle in zip(limb.joints, limb.home, strict=True):
        joint = model.joint(name).id
        low, high = model.jnt_range[joint].tolist()
        if model.jnt_limited[joint] and not low <= angle <= high:
            raise ConfigError(
                f"home of limb {limb.name!r} has {name!r} at {angle:g}, outside its range {low:g} "
                f"to {high:g}; give an angle within the model's range and the limb's own limits."
            )


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
        j = model.joint(joint).id
        a = model.actuator(actuator).id
        if model.jnt_limited[j]:
            low = max(low, model.jnt_range[j, 0])
            high = min(high, model.jnt_range[j, 1])
        if low >= high:
            raise ConfigError(
                f"the limits of limb {limb.name!r} leave nothing of the range that the model "
                f"gives {joint!r}."
            )
        model.jnt_range[j] = (low, high)
        model.jnt_limited[j] = 1
        if servo_faults(model, [a]):
            continue
        servo = position_servos(model, [a])
        if not servo.filtered.any():  # a filter is led by controls beyond the joint's range
            ends = servo.ctrl(np.clip([[low], [high]], *servo.reach()))
            model.actuator_ctrlrange[servo.address] = np.sort(ends[:, 0])
            model.actuator_ctrllimited[servo.address] = 1


def joint_ids(model: mujoco.MjModel, joints: Iterable[str]) -> list[int]:
    """Return the ids of joints by name."""
    return [model.joint(name).id for name in joints]


def joint_names(model: mujoco.MjModel, joints: Iterable[int]) -> tuple[str, ...]:
    """Return the names of joints by id."""
    return tuple(model.joint(joint).name for joint in joints)


def data_at(
    model: mujoco.MjModel, joints: Sequence[int] = (), q_rad: F64 | float = 0.0
) -> mujoco.MjData:
    """Return the kinematics of a model with joints, by id, at angles [n]; the others are where the
    model has them.
    """
    data = mujoco.MjData(model)
    data.qpos[model.jnt_qposadr[list(joints)]] = q_rad
    mujoco.mj_kinematics(model, data)
    return data


def bodies_up_from(model: mujoco.MjModel, body: int) -> list[int]:
    """Return a body's id, its parent's and so on, up to the world's."""
    bodies = [body]
    while body > 0:
        body = int(model.body_parentid[body])
        bodies.append(body)
    return bodies


def joints_to(model: mujoco.MjModel, body: int) -> list[int]:
    """Return the ids of the joints between the world and a body, base first."""
    links = bodies_up_from(model, body)
    return [joint for joint, link in enumerate(model.jnt_bodyid.tolist()) if link in links]


def frame_body(model: mujoco.MjModel, limb: Limb) -> int:
    """Id of the body that carries a limb's frame."""
    if limb.frame_type == "site":
        return int(model.site(limb.frame).bodyid[0])
    return model.body(limb.frame).id


def has_frame(model: mujoco.MjModel, name: str) -> bool:
    """Whether the model has a body or a site of this name."""
    kinds = (mujoco.mjtObj.mjOBJ_BODY, mujoco.mjtObj.mjOBJ_SITE)
    return any(mujoco.mj_name2id(model, kind, name) >= 0 for kind in kinds)


def frame_gap(model: mujoco.MjModel, limb: Limb, name: str) -> str | None:
    """Return what a limb lacks, with the line of its file that adds it, if the model has no frame
    that an embodiment calls ``name``; else None.
    """
    if has_frame(model, limb.frame_called(name)):
        return None
    return (
        f"limb {limb.name!r} has no frame {name!r}, whose motion the rows are: "
        f'frames = {{{name} = "{limb.frame}"}}, or another body or site of the model'
    )


def tool_in_body(model: mujoco.MjModel, limb: Limb) -> F64:
    """Position [3] of a limb's tool centre point in the frame of :func:`frame_body`."""
    if limb.frame_type == "body":
        return limb.T_frame_tool[:3, 3]
    site = model.site(limb.frame)
    turned = np.zeros(3)
    mujoco.mju_rotVecQuat(turned, limb.T_frame_tool[:3, 3], site.quat)
    return site.pos + turned


def base_pose(model: mujoco.MjModel, limb: Limb) -> F64:
    """Return the pose [4, 4] ``T_world_base`` of a limb's base, which does not move."""
    base = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, limb.base)
    if base < 0 or model.body_weldid[base] != 0:
        raise ConfigError(
            f"the base {limb.base!r} of limb {limb.name!r} must be a body that "
            "is fixed to the world."
        )
    return pose_of(data_at(model).body(base))


def pose_of(frame: Any) -> F64:
    """Return the pose [4, 4] in the world of a body or site of MuJoCo's data."""
    T = np.eye(4)
    T[:3, :3] = frame.xmat.reshape(3, 3)
    T[:3, 3] = frame.xpos
    return T


def require_drives(model: mujoco.MjModel, robot: RobotSpec) -> None:
    """Compare a robot's actuators and gripper values with its model, which must have every name.

    Raises:
        ConfigError: An actuator drives another joint, or has two tasks; or a gripper's value lies
            outside its range.
    """
    tasks: dict[str, str] = {}
    for limb in robot.limbs:
        for joint, actuator in zip(limb.joints, limb.actuators, strict=True):
            _claim(tasks, actuator, f"joint {joint!r}")
            names = joint_names(model, driven_joints(model, model.actuator(actuator).id))
            if names != (joint,):
                raise ConfigError(
                    f"limb {limb.name!r} names the actuator {actuator!r} for joint {joint!r}, but "
                    f"in the model it drives {' and '.join(map(repr, names)) or 'no joint'}. Name "
                    "the actuators in the order of the joints."
                )
        if limb.gripper is not None:
            _claim(tasks, limb.gripper.actuator, f"the gripper of {limb.name!r}")
            _require_gripper(model, robot, limb, limb.gripper)


def require_servos(model: mujoco.MjModel, robot: RobotSpec) -> None:
    """Raise ConfigError unless each joint's actuator is a position servo that can hold home, as a
    simulation needs.
    """
    for limb in robot.limbs:
        actuators = [model.actuator(name).id for name in limb.actuators]
        if reasons := servo_faults(model, actuators):
            gains = "" if limb.gains else "give the limb gains (kp, kd), and they become such, or "
            raise ConfigError(
                f"the actuators {', '.join(reasons)} of limb {limb.name!r} are not position "
                f"servos; {gains}name others that act on the joints directly; what else pulls at "
                "them has to leave the model."
            )
        low, high = position_servos(model, actuators).reach()
        for joint, home, least, most in zip(limb.joints, limb.home, low, high, strict=True):
            if not least <= home <= most:
                raise ConfigError(
                    f"the controls of limb {limb.name!r} take {joint!r} from {least:g} to {most:g} "
                    f"only, and home is at {home:g}; widen the actuator's ctrlrange."
                )


def _claim(tasks: dict[str, str], actuator: str, task: str) -> None:
    if tasks.setdefault(actuator, task) != task:  # limbs may share a joint
        raise ConfigError(
            f"the actuator {actuator!r} is named for {tasks[actuator]} and for {task}; each needs "
            "its own."
        )


def _require_gripper(
    model: mujoco.MjModel, robot: RobotSpec, limb: Limb, gripper: GripperSpec
) -> None:
    actuator = model.actuator(gripper.actuator).id
    driven = joint_names(model, driven_joints(model, actuator))
    if of_arm := sorted({*driven} & {*robot.joints}):
        raise ConfigError(
            f"the gripper of limb {limb.name!r} names the actuator {gripper.actuator!r}, which "
            f"drives the arm's joint {', '.join(map(repr, of_arm))}."
        )
    (address,) = control_address(model, [actuator])
    if model.actuator_ctrllimited[address]:
        ctrl_range = model.actuator_ctrlrange[address]
        _require_in_range(gripper.command, ctrl_range, f"command of {gripper.actuator!r}", limb)
    for name, joint in zip(gripper.joints, joint_ids(model, gripper.joints), strict=True):
        if model.jnt_limited[joint]:
            _require_in_range(gripper.opening, model.jnt_range[joint], f"opening of {name!r}", limb)


def _require_in_range(values: GripperConvention, ends: F64, quantity: str, limb: Limb) -> None:
    low, high = ends.tolist()
    slack = _ROUNDING * (high - low)
    for name, value in (("open_value", values.open_value), ("closed_value", values.closed_value)):
        if not low - slack <= value <= high + slack:
            raise ConfigError(
                f"the gripper of limb {limb.name!r}: {name} {value:g} of the {quantity} is outside "
                f"the model's range {low:g} to {high:g}. Give it in the model's own unit."
            )


def chain_to_body(
    model: mujoco.MjModel, body: str | int, joints: Sequence[str | int]
) -> SerialChain:
    """Return the chain of hinges and slides, by name or id from the base on, that moves a body's
    origin in a model.
    """
    ids = [model.joint(joint).id for joint in joints]
    at_zero = data_at(model, ids)
    frames = [np.eye(4), *(_joint_frame(at_zero.xanchor[j], at_zero.xaxis[j]) for j in ids)]
    T_parent_joint = np.stack([np.linalg.inv(parent) @ child for parent, child in pairwise(frames)])
    point = np.linalg.inv(frames[-1]) @ np.append(at_zero.body(body).xpos, 1.0)
    slides = model.jnt_type[ids] == mujoco.mjtJoint.mjJNT_SLIDE
    return SerialChain(T_parent_joint, point[:3], slides)


def _joint_frame(anchor_m: F64, axis: F64) -> F64:
    """A frame at a joint whose z axis is the joint's."""
    other_axis = np.eye(3)[int(np.argmin(np.abs(axis)))]
    x = np.cross(other_axis, axis)
    x /= np.linalg.norm(x)
    T = np.eye(4)
    T[:3, :3] = np.column_stack((x, np.cross(axis, x), axis))
    T[:3, 3] = anchor_m
    return T


@dataclass(frozen=True, eq=False)
class LimbKinematics:
    """The pose of a limb's frame in its base: a chain of joints, and fixed transforms [4, 4]
    beyond the last one.
    """

    chain: SerialChain
    beyond: tuple[F64, ...]

    def forward(self, q_rad: F64) -> F64:
        """Return ``T_base_frame`` [..., 4, 4] at joint angles [..., n]."""
        T = self.chain.frames(q_rad)
        for fixed in self.beyond:
            T = T @ fixed
        return T


_FRANKA = LimbKinematics(FRANKA_CHAIN, (T_link7_flange, T_flange_hand))
"""The Franka's published kinematics. A model of it rounds them, in the last digit of a double."""


def kinematics_of(model: mujoco.MjModel, limb: Limb) -> LimbKinematics:
    """Return a limb's kinematics by its model; published figures stand for a model that agrees with
    them to 1e-9.
    """
    chain = chain_to_body(model, frame_body(model, limb), limb.joints)
    data = data_at(model, joint_ids(model, limb.joints))
    frame = data.site(limb.frame) if limb.frame_type == "site" else data.body(limb.frame)
    at_zero = np.linalg.inv(chain.frames(np.zeros(len(limb.joints)))) @ pose_of(frame)
    first = np.linalg.inv(base_pose(model, limb)) @ chain.T_parent_joint[0]
    from_base = SerialChain(
        np.stack((first, *chain.T_parent_joint[1:])), chain.point_m, chain.slides
    )
    kinematics = LimbKinematics(from_base, (at_zero,))
    if len(limb.joints) == len(HOME_Q):
        probes = HOME_Q + np.array((-_PROBE_RAD, 0.0, _PROBE_RAD))[:, None]
        if np.abs(kinematics.forward(probes) - _FRANKA.forward(probes)).max() < _SAME:
            return _FRANKA
    return kinematics
