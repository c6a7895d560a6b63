"""Parts of a scene, added to a robot's specification: lights, a table, boxes and cameras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import PHYSICS_HZ, load_spec
from strands_cosmos3.robots.spec import Limb, RobotSpec

_BOX = mujoco.mjtGeom.mjGEOM_BOX
_PLANE = mujoco.mjtGeom.mjGEOM_PLANE
_CYLINDER = mujoco.mjtGeom.mjGEOM_CYLINDER
TABLE_X_M = (-0.32, 0.98)
TABLE_Y_M = (-0.68, 0.68)
TABLE_THICKNESS_M = 0.04
FLOOR_Z_M = -0.74
_PLAIN_RGB = (204, 186, 160)
SURFACE = "surface"
"""Name of the table's texture and material."""
CONTACT = {
    "friction": [0.5, 0.01, 0.0001],
    "solref": [0.01, 1.0],
    "solimp": [0.95, 0.99, 0.001, 0.5, 2.0],
}
"""Contacts of a geom, stiffer than MuJoCo's default: a resting body sinks in by some 10
micrometres. The sliding friction times that of the finger pads (1.5) stays below 1, so a finger
that presses a body down while pushing it aside cannot jam it.
"""


@dataclass(frozen=True)
class View:
    """A camera; positions and directions are in its parent's frame."""

    position_m: tuple[float, float, float]
    target_m: tuple[float, float, float]  # a point it looks at
    fovy_deg: float  # vertical field of view
    up: tuple[float, float, float] = (0.0, 0.0, 1.0)  # up in the picture
    parent: str = "world"  # the body that it is fixed to


def _on(robot: RobotSpec) -> dict[str, View]:
    """A robot's own cameras."""
    return {
        camera.name: View(
            camera.position_m, camera.target_m, camera.fovy_deg, camera.up, camera.body
        )
        for camera in robot.cameras
    }


VIEWS: Mapping[str, View] = MappingProxyType(
    {
        **_on(PANDA),
        "exterior_1": View((1.08, 0.88, 0.72), (0.34, 0.06, 0.22), 48.0),
        "exterior_2": View((1.08, -0.88, 0.72), (0.34, 0.06, 0.22), 48.0),
        "beauty": View((1.42, -0.98, 0.78), (0.27, 0.06, 0.27), 36.0),
    }
)
"""The cameras by name with the Panda: the views of the DROID rig, and one for the film."""
AROUND: Mapping[str, View] = {
    **VIEWS,
    "front": View((1.65, 0.0, 0.85), (0.30, 0.0, 0.30), 52.0),
    "left": VIEWS["exterior_1"],
    "right": VIEWS["exterior_2"],
    # in front of the arm, which would hide what lies there
    "camera_top": View((1.02, 0.0, 0.78), (0.49, 0.0, 0.03), 24.0),
}
"""Cameras beside the robot that a rig may have."""


def cameras(
    robot: RobotSpec,
    around: Mapping[str, View] = MappingProxyType({}),
    offset_m: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> dict[str, View]:
    """Return the cameras of a robot's rig and of the film by name, those on the robot first.

    Args:
        around: Cameras beside the robot, in place of those of :data:`AROUND`.
        offset_m: Displacement of those on the robot, in their parent's frame.

    Raises:
        ConfigError: There is no camera for one of the rig's views.
    """
    around, mounted = {**AROUND, **around}, _on(robot)
    views: dict[str, View] = {}
    for name, view in mounted.items():
        x_m, y_m, z_m = np.add(view.position_m, offset_m).tolist()
        views[name] = replace(view, position_m=(x_m, y_m, z_m))
    for name in (*view_names_of(robot), "beauty"):
        if name not in mounted and (name not in around or around[name].parent != "world"):
            raise ConfigError(
                f"robot {robot.name!r} needs a camera {name!r} for the scene's views; add one to "
                "its cameras."
            )
        views.setdefault(name, around[name])
    return views


def view_names_of(robot: RobotSpec) -> tuple[str, ...]:
    """Return the names of the views of a robot's embodiment; DROID's if it states none."""
    return get_embodiment(robot.embodiment or "droid").view_names


def robot_spec(robot: RobotSpec, arm: str | Path | None = None) -> mujoco.MjSpec:
    """Return a robot's specification, ready to be furnished: physics rate, gravity compensation and
    the servos of its grippers are set. ``arm`` and errors as for
    :func:`~strands_cosmos3.robots.model.load_spec`.
    """
    spec = load_spec(arm, robot)
    spec.modelname = "tabletop"
    _set_physics(spec)
    for limb in robot.limbs:
        _stiffen_gripper(spec, limb)
    return spec


def _set_physics(spec: mujoco.MjSpec) -> None:
    """Set what the control loop relies on: physics rate and gravity compensation."""
    spec.option.timestep = 1.0 / PHYSICS_HZ
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    for body in spec.bodies[1:]:  # the real arm compensates its own weight
        body.gravcomp = 1.0


def _stiffen_gripper(spec: mujoco.MjSpec, limb: Limb) -> None:
    """Stiffen the gripper's servo: a Panda's stock gains grip a cube with 1 N per finger, the
    real hand with 30 N.
    """
    if limb.gripper is None:
        return
    gripper = spec.actuator(limb.gripper.actuator)
    gripper.gainprm = np.multiply(gripper.gainprm, limb.gripper.grip_gain)
    gripper.biasprm = np.multiply(gripper.biasprm, limb.gripper.grip_gain)


def add_lights(spec: mujoco.MjSpec, factor: float = 1.0) -> None:
    """Add the lights and the sky, all of them times ``factor``."""
    spec.visual.headlight.ambient = np.multiply(factor, [0.36, 0.36, 0.36])
    spec.visual.headlight.diffuse = np.multiply(factor, [0.22, 0.22, 0.22])
    spec.visual.headlight.specular = np.multiply(factor, [0.05, 0.05, 0.05])
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
        rgb1=[0.93, 0.92, 0.90],
        rgb2=[0.50, 0.47, 0.44],
        width=64,
        height=384,
    )
    world = spec.worldbody
    world.add_light(
        name="key",
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        pos=[0.9, -0.8, 2.2],
        dir=[-0.28, 0.38, -0.88],
        diffuse=np.multiply(factor, [0.48, 0.46, 0.43]),
        specular=np.multiply(factor, [0.22, 0.22, 0.22]),
        castshadow=True,
    )
    world.add_light(
        name="fill",
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        pos=[0.6, 1.2, 1.6],
        dir=[-0.2, -0.7, -0.6],
        diffuse=np.multiply(factor, [0.16, 0.17, 0.19]),
        specular=np.multiply(factor, [0.05, 0.05, 0.05]),
        castshadow=False,
    )


def add_tabletop(spec: mujoco.MjSpec, picture: NDArray[np.uint8] | None = None) -> None:
    """Add the table. ``picture`` [H, W, 3] covers it; None is a plain surface."""
    picture = np.full((2, 2, 3), _PLAIN_RGB, np.uint8) if picture is None else picture
    texture = spec.add_texture(name=SURFACE, type=mujoco.mjtTexture.mjTEXTURE_2D, nchannel=3)
    texture.width, texture.height, texture.data = (
        picture.shape[1],
        picture.shape[0],
        picture.tobytes(),
    )
    material = spec.add_material(name=SURFACE, specular=0.12, shininess=0.15, texuniform=False)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = SURFACE
    spec.add_material(name="edge", rgba=[0.60, 0.49, 0.37, 1], specular=0.1, shininess=0.1)
    spec.add_material(name="leg", rgba=[0.25, 0.25, 0.27, 1], specular=0.3, shininess=0.3)
    world = spec.worldbody
    x_m, y_m = np.array(TABLE_X_M), np.array(TABLE_Y_M)
    center, half = np.array([x_m.mean(), y_m.mean()]), np.array([np.ptp(x_m), np.ptp(y_m)]) / 2
    world.add_geom(
        name="table",
        type=_BOX,
        pos=[*center, -TABLE_THICKNESS_M / 2],
        size=[*half, TABLE_THICKNESS_M / 2],
        group=3,
        **CONTACT,
    )
    ghost = {"contype": 0, "conaffinity": 0, "group": 2}
    world.add_geom(type=_PLANE, pos=[*center, 0], size=[*half, 1], material=SURFACE, **ghost)
    # below the boards; at the same height it would flicker through
    lower = TABLE_THICKNESS_M / 2 - 0.002
    world.add_geom(
        type=_BOX, pos=[*center, -lower - 0.004], size=[*half, lower], material="edge", **ghost
    )
    for sx in (-1, 1):
        for sy in (-1, 1):
            leg = center + np.array([sx, sy]) * (half - 0.05)
            height = -TABLE_THICKNESS_M - FLOOR_Z_M
            world.add_geom(
                type=_CYLINDER,
                pos=[*leg, FLOOR_Z_M + height / 2],
                size=[0.025, height / 2, 0],
                material="leg",
                **ghost,
            )


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
    half = [edge / 2 for edge in size_m]
    _add_free_body(spec, name, _BOX, half, size_m[2], mass_kg, inertia, rgb)


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
    _add_free_body(spec, name, _CYLINDER, size, height_m, mass_kg, inertia, rgb)


def _add_free_body(
    spec: mujoco.MjSpec,
    name: str,
    shape: mujoco.mjtGeom,
    size: list[float],
    height_m: float,
    mass_kg: float,
    inertia: list[float],
    rgb: tuple[float, float, float],
) -> None:
    spec.add_material(name=name, rgba=[*rgb, 1], specular=0.25, shininess=0.35, emission=0.12)
    body = spec.worldbody.add_body(
        name=name, pos=[0, 0, height_m / 2], mass=mass_kg, inertia=inertia, explicitinertial=True
    )
    body.add_freejoint(name=name)
    body.add_geom(name=name, type=shape, size=size, material=name, **CONTACT)


def add_camera(spec: mujoco.MjSpec, name: str, view: View) -> None:
    """Add a camera to its parent body."""
    back = np.subtract(view.position_m, view.target_m)
    back /= np.linalg.norm(back)
    right = np.cross(view.up, back)
    right /= np.linalg.norm(right)
    quat = np.zeros(4)
    mujoco.mju_mat2Quat(quat, np.column_stack([right, np.cross(back, right), back]).reshape(9))
    spec.body(view.parent).add_camera(name=name, pos=view.position_m, quat=quat, fovy=view.fovy_deg)
