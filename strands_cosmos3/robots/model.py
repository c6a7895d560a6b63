"""MuJoCo models of the arm: the bundled one, or another by path or name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed, whole_number
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.errors import (
    ConfigError,
    EnvironmentalError,
    InputError,
    MissingDependencyError,
    ResourceNotFoundError,
    UnknownNameError,
)
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.assembly import assembled, complete, narrow_ranges, set_servos
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.chain import SerialChain
from strands_cosmos3.robots.spec import RobotSpec

PHYSICS_HZ = 600  # 40 steps per row of a 15 Hz chunk


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
    try:
        from git.exc import GitError
        from robot_descriptions import loaders  # noqa: F401 - checks that it is installed before using the network
    except ImportError as error:
        raise MissingDependencyError(
            "the 'menagerie' arm needs robot_descriptions: pip install 'strands-cosmos3[sim]'; or "
            "use the bundled arm, 'panda'."
        ) from error
    try:
        return Path(import_module("robot_descriptions.panda_mj_description").MJCF_PATH)
    except (GitError, OSError, RuntimeError, ValueError) as error:  # no git, no network, no space
        why = " ".join(str(error).split())
        raise EnvironmentalError(
            f"MuJoCo Menagerie's panda could not be fetched or read ({type(error).__name__}: "
            f"{why}); it is cloned "
            "from GitHub at its first use. Use the bundled arm, 'panda', or the path of an .xml "
            "or .mjb file."
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


@typed()
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
    try:
        if path.suffix.lower() == ".mjb":
            return mujoco.MjModel.from_binary_path(str(path))
        if not obstacles:
            return mujoco.MjModel.from_xml_path(str(path))
        arm = mujoco.MjSpec.from_file(str(path))
        _add_obstacles(arm, obstacles)
        return arm.compile()
    except (ValueError, mujoco.FatalError) as error:
        raise ConfigError(f"MuJoCo cannot load {str(path)!r}: {error}") from error


def _add_obstacles(arm: mujoco.MjSpec, obstacles: Sequence[Obstacle]) -> None:
    for box in obstacles:
        size, turned = (
            np.array(box.size_m) / 2,
            [np.cos(box.yaw_rad / 2), 0.0, 0.0, np.sin(box.yaw_rad / 2)],
        )
        arm.worldbody.add_geom(
            name=box.name, type=mujoco.mjtGeom.mjGEOM_BOX, size=size, pos=box.center_m, quat=turned
        )


@typed()
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
        _add_obstacles(arm, obstacles)
        try:
            model = arm.compile()
        except (ValueError, mujoco.FatalError) as error:
            raise ConfigError(
                f"MuJoCo cannot compile the model of robot {robot.name!r}: {error}"
            ) from error
        for limb in robot.limbs if spec is None else ():
            narrow_ranges(model, limb)
    return model


def is_compiled(spec: object) -> bool:
    """Whether an arm's model is compiled, in memory or as an ``.mjb`` file."""
    return isinstance(spec, mujoco.MjModel) or (
        isinstance(spec, str | Path) and Path(spec).suffix.lower() == ".mjb"
    )


@typed()
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
    arm = assembled(robot.model, path)
    missing: list[str] = []
    for limb in robot.limbs:
        set_servos(arm, limb)
        complete(arm, limb)
        fingers, grippers = (
            ((), ()) if limb.gripper is None else (limb.gripper.joints, (limb.gripper.actuator,))
        )
        wanted = {
            limb.frame_type: (limb.frame,),
            "joint": (*limb.joints, *fingers),
            "actuator": (*limb.actuators, *grippers),
        }
        missing += [
            f"{kind} {name!r}"
            for kind, names in wanted.items()
            for name in names
            if getattr(arm, kind)(name) is None
        ]
    if missing:
        file = str(path or robot.model[0].file)
        raise ConfigError(
            f"{file!r} is not a {robot.title} that this package can drive: it lacks "
            f"{', '.join(missing)}."
        )
    return arm


def joint_ids(model: mujoco.MjModel, joints: Sequence[int]) -> list[int]:
    """Return the ids of one or more joints of a model as a list; InputError if they are none."""
    last = instance_of(model, mujoco.MjModel, "model").njnt - 1
    try:
        ids = [whole_number(joint, "a joint's id", 0, last) for joint in joints]
    except TypeError:
        raise InputError(
            f"joints must be ids of the model's joints, got {type(joints).__name__}."
        ) from None
    if not ids:
        raise InputError("joints must be the ids of at least one joint, got none.")
    return ids


@typed()
def chain_to_body(
    model: mujoco.MjModel, body: str | int, joints: Sequence[str | int]
) -> SerialChain:
    """Return the chain of hinges and slides, by name or id from the base on, that moves a body's
    origin in a model.

    An UnknownNameError says that the model has no such body or joint.
    """
    at_zero = mujoco.MjData(model)
    ids = joint_ids(model, [_id(model, mujoco.mjtObj.mjOBJ_JOINT, name) for name in joints])
    body_id = _id(model, mujoco.mjtObj.mjOBJ_BODY, body)
    for j in ids:
        at_zero.qpos[model.jnt_qposadr[j]] = 0.0
    mujoco.mj_kinematics(model, at_zero)
    frames = [np.eye(4), *(_joint_frame(at_zero.xanchor[j], at_zero.xaxis[j]) for j in ids)]
    T_parent_joint = np.stack([np.linalg.inv(parent) @ child for parent, child in pairwise(frames)])
    point = np.linalg.inv(frames[-1]) @ np.append(at_zero.xpos[body_id], 1.0)
    slides = model.jnt_type[ids] == int(mujoco.mjtJoint.mjJNT_SLIDE)
    return SerialChain(T_parent_joint, point[:3], slides)


def _id(model: mujoco.MjModel, kind: mujoco.mjtObj, name: str | int) -> int:
    what, count = (
        ("body", model.nbody) if kind == mujoco.mjtObj.mjOBJ_BODY else ("joint", model.njnt)
    )
    if not isinstance(name, str):
        return whole_number(name, f"a {what}'s id", 0, count - 1)
    found = mujoco.mj_name2id(model, kind, name)
    if found < 0:
        raise UnknownNameError(
            what, name, filter(None, (mujoco.mj_id2name(model, kind, i) for i in range(count)))
        )
    return found


def _joint_frame(anchor_m: F64, axis: F64) -> F64:
    """A frame at a joint whose z axis is the joint's."""
    aside = np.eye(3)[int(np.argmin(np.abs(axis)))]
    x = np.cross(aside, axis)
    x /= np.linalg.norm(x)
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = np.column_stack((x, np.cross(axis, x), axis)), anchor_m
    return T
