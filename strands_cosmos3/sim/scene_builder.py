"""Parts of a scene, added to a robot's specification: lights, a table, boxes and cameras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.model import MEETS_ALL, compensate_weight, load_spec
from strands_cosmos3.robots.spec import Camera, RobotSpec
from strands_cosmos3.tables import from_table, read_toml

_SHAPES = {
    "plane": mujoco.mjtGeom.mjGEOM_PLANE,
    "box": mujoco.mjtGeom.mjGEOM_BOX,
    "cylinder": mujoco.mjtGeom.mjGEOM_CYLINDER,
}
_TABLETOP = read_toml(Path(__file__).with_name("tabletop.toml"))
_TABLE_X_M = (-0.32, 0.98)
_TABLE_Y_M = (-0.68, 0.68)
_TABLE_THICKNESS_M = 0.04
_PLAIN_RGB = (204, 186, 160)
SURFACE = "surface"
"""Name of the table's texture and material."""
CONTACT = _TABLETOP["contact"] | MEETS_ALL
"""Contacts of a geom, stiffer than MuJoCo's default: a resting body sinks in by some 10
micrometres. The sliding friction times that of the finger pads (1.5) stays below 1, so a finger
that presses a body down while pushing it aside cannot jam it.
"""


AROUND: Mapping[str, Camera] = {
    table["name"]: from_table(Camera, table, "a scene's camera") for table in _TABLETOP["cameras"]
}
"""Cameras beside the robot that a rig may have, by name."""


def cameras(
    robot: RobotSpec,
    around: Mapping[str, Camera] = MappingProxyType({}),
    offset_m: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> dict[str, Camera]:
    """Return the cameras of a robot's rig and of the film by name, those on the robot first.

    Args:
        around: Cameras beside the robot, in place of those of :data:`AROUND`.
        offset_m: Displacement of those on the robot, in their body's frame.

    Raises:
        ConfigError: There is no camera for one of the rig's views.
    """
    known = {**AROUND, **around}
    for camera in robot.cameras:
        position_m = tuple(np.add(camera.position_m, offset_m).tolist())
        known[camera.name] = replace(camera, position_m=position_m)
    shown = (*(camera.name for camera in robot.cameras), *view_names_of(robot), "beauty")
    if missing := [name for name in shown if name not in known]:
        raise ConfigError(
            f"robot {robot.name!r} needs a camera {missing[0]!r} for the scene's views; add one to "
            "its cameras."
        )
    return {name: known[name] for name in shown}


def scene_gaps(robot: RobotSpec) -> list[str]:
    """Return what a robot lacks for a scene, each with the lines of its file that add it."""
    gaps: list[str] = []
    for limb in robot.limbs:
        gripper = limb.gripper
        if limb.tool is None:
            gaps.append(
                f"limb {limb.name!r} has no tool centre point: "
                'tool = "tcp" and tool_m = [x, y, z], in metres in its frame'
            )
        if gripper is None:
            gaps.append(
                f"limb {limb.name!r} has no gripper: a table [limbs.gripper] with joints, "
                "actuator, opening and command; suction is not supported"
            )
        elif (gripper.opening.unit == "rad" and not (gripper.gap_m and gripper.fingers)) or (
            not gripper.gap_m and gripper.opening.open_value <= gripper.opening.closed_value
        ):
            gaps.append(
                f"the gripper of limb {limb.name!r} opens from {gripper.opening.closed_value:g} "
                f"to {gripper.opening.open_value:g}: gap_m = [0.0, ...], the gap between its "
                'fingers from closed to open, and fingers = ["...", "..."], the bodies that hold, '
                "unless they are slides that open upwards"
            )
    known = {*AROUND, *(camera.name for camera in robot.cameras)}
    return gaps + [
        f'there is no camera {name!r} for the views: a table [[cameras]] with name = "{name}", '
        "body, position_m, target_m and fovy_deg"
        for name in view_names_of(robot)
        if name not in known
    ]


def view_names_of(robot: RobotSpec) -> tuple[str, ...]:
    """Return the names of the views of a robot's embodiment; DROID's if it states none."""
    return get_embodiment(robot.embodiment or "droid").view_names


def robot_spec(robot: RobotSpec, arm: str | Path | None = None) -> mujoco.MjSpec:
    """Return a robot's specification, ready to be furnished: a scene's options, gravity
    compensation and the servos of its grippers are set. ``arm`` and errors as for
    :func:`~strands_cosmos3.robots.model.load_spec`.
    """
    spec = load_spec(arm, robot)
    spec.modelname = "tabletop"
    compensate_weight(spec)
    # a Panda's stock gains grip a cube with 1 N per finger, the real hand with 30 N
    for gripper in filter(None, (limb.gripper for limb in robot.limbs)):
        servo = spec.actuator(gripper.actuator)
        servo.gainprm = np.multiply(servo.gainprm, gripper.grip_gain)
        servo.biasprm = np.multiply(servo.biasprm, gripper.grip_gain)
    return spec


def add_lights(spec: mujoco.MjSpec, factor: float = 1.0) -> None:
    """Add the lights and the sky, all of them times ``factor``."""
    for name, rgb in _TABLETOP["headlight"].items():
        setattr(spec.visual.headlight, name, np.multiply(factor, rgb))
    spec.visual.global_.offwidth = 1920
    spec.visual.global_.offheight = 1080
    spec.visual.map.znear = 0.01
    spec.visual.map.zfar = 30.0
    spec.stat.extent = 1.0
    spec.stat.center = [0.4, 0.0, 0.2]
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        **_TABLETOP["sky"],
    )
    for light in _TABLETOP["lights"]:
        colors = {name: np.multiply(factor, light[name]) for name in ("diffuse", "specular")}
        directional = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
        spec.worldbody.add_light(type=directional, **{**light, **colors})


def add_tabletop(spec: mujoco.MjSpec, picture: NDArray[np.uint8] | None = None) -> None:
    """Add the table. ``picture`` [H, W, 3] covers it; None is a plain surface."""
    picture = np.full((2, 2, 3), _PLAIN_RGB, np.uint8) if picture is None else picture
    texture = spec.add_texture(name=SURFACE, type=mujoco.mjtTexture.mjTEXTURE_2D, nchannel=3)
    texture.height, texture.width, _ = picture.shape
    texture.data = picture.tobytes()
    for name, look in _TABLETOP["materials"].items():
        spec.add_material(name=name, **look)
    spec.material(SURFACE).textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = SURFACE
    low, high = np.transpose((_TABLE_X_M, _TABLE_Y_M))
    depth_m = _TABLE_THICKNESS_M / 2
    spec.worldbody.add_geom(
        name="table",
        type=_SHAPES["box"],
        pos=[*(low + high) / 2, -depth_m],
        size=[*(high - low) / 2, depth_m],
        group=3,
        **CONTACT,
    )
    for part in _TABLETOP["shown"]:
        look = {name: value for name, value in part.items() if name != "shape"}
        shape = _SHAPES[part["shape"]]
        spec.worldbody.add_geom(type=shape, contype=0, conaffinity=0, group=2, **look)


def add_free_box(
    spec: mujoco.MjSpec,
    name: str,
    size_m: tuple[float, float, float],
    mass_kg: float,
    rgb: tuple[float, float, float],
) -> None:
    """Add a free body, a box of uniform density; body, joint, geom and material have its name."""
    x, y, z = (edge * edge for edge in size_m)
    inertia = [mass_kg * sides / 12 for sides in (y + z, x + z, x + y)]
    size = [edge / 2 for edge in size_m]
    _add_free(spec, name, "box", size, size_m[2], rgb, mass=mass_kg, inertia=inertia)


def add_free_cylinder(
    spec: mujoco.MjSpec,
    name: str,
    radius_m: float,
    height_m: float,
    mass_kg: float,
    rgb: tuple[float, float, float],
) -> None:
    """Add a free body, an upright cylinder of uniform density; as :func:`add_free_box`."""
    across = mass_kg * (3 * radius_m**2 + height_m**2) / 12
    inertia = [across, across, mass_kg * radius_m**2 / 2]
    size = [radius_m, height_m / 2, 0]
    _add_free(spec, name, "cylinder", size, height_m, rgb, mass=mass_kg, inertia=inertia)


def _add_free(
    spec: mujoco.MjSpec,
    name: str,
    shape: str,
    size: list[float],
    height_m: float,
    rgb: tuple[float, float, float],
    **inertial: Any,
) -> None:
    spec.add_material(name=name, rgba=[*rgb, 1], specular=0.25, shininess=0.35, emission=0.12)
    pos = [0, 0, height_m / 2]
    body = spec.worldbody.add_body(name=name, pos=pos, explicitinertial=True, **inertial)
    body.add_freejoint().name = name  # as an argument, a name that there is already gets lost
    body.add_geom(name=name, type=_SHAPES[shape], size=size, material=name, **CONTACT)


def add_camera(spec: mujoco.MjSpec, camera: Camera) -> None:
    """Add a camera to its body. It replaces one of that name that the robot's model has."""
    if (of_model := spec.camera(camera.name)) is not None:
        spec.delete(of_model)
    spec.body(camera.body).add_camera(
        default=spec.default,
        name=camera.name,
        pos=camera.position_m,
        quat=camera_quat(np.subtract(camera.position_m, camera.target_m), camera.up),
        fovy=camera.fovy_deg,
    )


def camera_quat(back: ArrayLike, up: ArrayLike) -> F64:
    """Return the quaternion wxyz of a camera that looks against ``back`` [3], with ``up`` [3] up in
    the picture.
    """
    back = np.asarray(back) / np.linalg.norm(back)
    right = np.cross(np.asarray(up), back)
    right /= np.linalg.norm(right)
    quat = np.zeros(4)
    mujoco.mju_mat2Quat(quat, np.column_stack([right, np.cross(back, right), back]).reshape(9))
    return quat
