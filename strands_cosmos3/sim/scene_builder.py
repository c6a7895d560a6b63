"""Builder of the scene: table, cubes, bin, lights and cameras, added to the arm's specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, positive, typed, typed_fields
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import PHYSICS_HZ, load_spec
from strands_cosmos3.robots.spec import Limb, RobotSpec
from strands_cosmos3.sim.appearance import NOMINAL, Appearance, Surface
from strands_cosmos3.worlds.table.instruction import Verb

_BOX = mujoco.mjtGeom.mjGEOM_BOX
_PLANE = mujoco.mjtGeom.mjGEOM_PLANE
_CYLINDER = mujoco.mjtGeom.mjGEOM_CYLINDER
TABLE_X_M = (-0.32, 0.98)
TABLE_Y_M = (-0.68, 0.68)
TABLE_THICKNESS_M = 0.04
FLOOR_Z_M = -0.74
SURFACE = "surface"
"""Name of the table's texture and material."""
_CONTACT = {
    "friction": [0.5, 0.01, 0.0001],
    "solref": [0.01, 1.0],
    "solimp": [0.95, 0.99, 0.001, 0.5, 2.0],
}
"""Stiffer than MuJoCo's default: a resting cube sinks in by some 10 micrometres. The sliding
friction times that of the finger pads (1.5) stays below 1, so a finger that presses a cube down
while pushing it aside cannot jam it.
"""


@dataclass(frozen=True)
class Cube:
    """A free cube; InputError if its edge or mass is not above zero."""

    name: str  # of its body, joint and geom
    rgb: tuple[float, float, float]  # in 0..1
    edge_m: float = 0.040
    mass_kg: float = 0.060

    def __post_init__(self) -> None:
        typed_fields(self)
        positive(self.edge_m, "edge_m")
        positive(self.mass_kg, "mass_kg")


@dataclass(frozen=True)
class Bar:
    """A free bar for two hands: a box whose long axis is its own y; InputError if a size or the
    mass is not above zero.

    ``verb`` is what it is for: to lift, or to hand over.
    """

    size_m: tuple[float, float, float] = (0.04, 0.60, 0.04)
    mass_kg: float = 0.5
    grasp_m: float = 0.22  # of each hand from its centre, along the long axis
    rgb: tuple[float, float, float] = (0.85, 0.42, 0.12)
    verb: Verb = Verb.LIFT

    def __post_init__(self) -> None:
        typed_fields(self)
        for value in (*self.size_m, self.mass_kg, self.grasp_m):
            positive(value, "a bar's sizes and mass")


LIGHT_BAR = Bar((0.04, 0.30, 0.04), 0.05, 0.10, (0.10, 0.45, 0.62), Verb.HAND_OVER)
"""One hand can hold it by an end."""
BAR = "bar"
"""Name of the bar's body, joint and geom."""


@dataclass(frozen=True)
class Bin:
    """An open box on the table, with its sides along x and y."""

    center_m: tuple[float, float] = (0.42, 0.41)
    inner_m: tuple[float, float] = (0.22, 0.16)  # extent along x and y
    height_m: float = 0.07  # of the rim over the table
    wall_m: float = 0.006  # thickness of walls and floor

    def surrounds(self, position_m: F64) -> bool:
        """Whether a world position [3] lies inside the walls or above that space."""
        inside = np.abs(position_m[:2] - np.array(self.center_m)) < np.array(self.inner_m) / 2
        return bool(inside.all() and position_m[2] > 0.0)

    def contains(self, position_m: F64) -> bool:
        """Whether a world position [3] lies inside the walls and below the rim."""
        return self.surrounds(position_m) and bool(position_m[2] < self.height_m)


@dataclass(frozen=True)
class View:
    """A camera; positions and directions are in its parent's frame."""

    position_m: tuple[float, float, float]
    target_m: tuple[float, float, float]  # a point it looks at
    fovy_deg: float  # vertical field of view
    up: tuple[float, float, float] = (0.0, 0.0, 1.0)  # up in the picture
    parent: str = "world"  # the body that it is fixed to


@typed()
def bin_of(robot: RobotSpec) -> Bin:
    """Return the bin where the robot's workspace has it."""
    return Bin(robot.workspace.bin_m)


def _on(robot: RobotSpec) -> dict[str, View]:
    """A robot's own cameras."""
    return {
        one.name: View(one.position_m, one.target_m, one.fovy_deg, one.up, one.body)
        for one in robot.cameras
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
_AROUND: Mapping[str, View] = {
    **VIEWS,
    "front": View((1.65, 0.0, 0.85), (0.30, 0.0, 0.30), 52.0),
    "left": VIEWS["exterior_1"],
    "right": VIEWS["exterior_2"],
    # in front of the arm, which would hide the cubes
    "camera_top": View((1.02, 0.0, 0.78), (0.49, 0.0, 0.03), 24.0),
}
"""Cameras beside the robot that a rig may have."""
_NEAR: Mapping[str, View] = {
    "exterior_1": View((1.08, 0.88, 0.72), (0.47, 0.03, 0.13), 28.0),
    "exterior_2": View((1.08, -0.88, 0.72), (0.47, 0.03, 0.13), 28.0),
}
BIN = Bin()


def nominal(robot: RobotSpec) -> Appearance:
    """Return the appearance of a robot's scene where none is given: with the DROID rig's views
    that of the bundled policy.
    """
    return Appearance("parquet", "near") if set(_NEAR) <= set(view_names_of(robot)) else NOMINAL


@typed()
def cameras(appearance: Appearance, robot: RobotSpec = PANDA) -> dict[str, View]:
    """Return the cameras of an appearance by name, those on the robot first; ConfigError if it
    lacks one of the rig's.
    """
    around = {**_AROUND, **(_NEAR if appearance.rig == "near" else {})}
    own, found = _on(robot), dict[str, View]()
    for name, view in own.items():
        x_m, y_m, z_m = np.add(view.position_m, appearance.wrist_offset_m).tolist()
        found[name] = replace(view, position_m=(x_m, y_m, z_m))
    for name in (*view_names_of(robot), "beauty"):
        if name not in own and (name not in around or around[name].parent != "world"):
            raise ConfigError(
                f"robot {robot.name!r} needs a camera {name!r} for the scene's views; add one to "
                "its cameras."
            )
        found.setdefault(name, around[name])
    return found


@typed()
def view_names_of(robot: RobotSpec) -> tuple[str, ...]:
    """Return the names of the views of a robot's embodiment; DROID's if it states none."""
    return get_embodiment(robot.embodiment or "droid").view_names


@typed()
def build(
    cubes: tuple[Cube, ...],
    arm: str | Path | None = None,
    appearance: Appearance | None = None,
    robot: RobotSpec = PANDA,
    bar: Bar | None = None,
) -> mujoco.MjSpec:
    """Return an arm's specification with the scene added, ready to compile; ``arm`` and errors as
    for ``load_spec``.

    A bar stands in the place of the bin.
    """
    spec = load_spec(arm, robot)
    spec.modelname = "tabletop"
    appearance = appearance or nominal(robot)
    _set_physics(spec, robot)
    for limb in robot.limbs:
        _stiffen_gripper(spec, limb)
    _add_lights(spec, appearance.light)
    _add_table(spec, appearance.surface)
    if bar is None:
        _add_bin(spec, bin_of(robot))
    else:
        _add_free_box(spec, BAR, bar.size_m, bar.mass_kg, bar.rgb)
    for cube in cubes:
        _add_free_box(
            spec, cube.name, (cube.edge_m, cube.edge_m, cube.edge_m), cube.mass_kg, cube.rgb
        )
    for name, view in cameras(appearance, robot).items():
        _add_camera(spec, name, view)
    return spec


def _set_physics(spec: mujoco.MjSpec, robot: RobotSpec) -> None:
    """Set what the control loop relies on: physics rate, gravity compensation, a tool centre
    point.
    """
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


def _add_lights(spec: mujoco.MjSpec, factor: float) -> None:
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


def _add_table(spec: mujoco.MjSpec, surface: Surface) -> None:
    picture = surface.texture()
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
        **_CONTACT,
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


def _add_bin(spec: mujoco.MjSpec, box: Bin) -> None:
    spec.add_material(name="bin", rgba=[0.33, 0.36, 0.40, 1], specular=0.25, shininess=0.3)
    body = spec.worldbody.add_body(name="bin", pos=[*box.center_m, 0.0])
    (ix, iy), w, h = box.inner_m, box.wall_m, box.height_m
    walls = {
        "bin_floor": ([0, 0, w / 2], [ix / 2, iy / 2, w / 2]),
        "bin_front": ([ix / 2 + w / 2, 0, h / 2], [w / 2, iy / 2 + w, h / 2]),
        "bin_back": ([-ix / 2 - w / 2, 0, h / 2], [w / 2, iy / 2 + w, h / 2]),
        "bin_left": ([0, iy / 2 + w / 2, h / 2], [ix / 2, w / 2, h / 2]),
        "bin_right": ([0, -iy / 2 - w / 2, h / 2], [ix / 2, w / 2, h / 2]),
    }
    for name, (pos, size) in walls.items():
        body.add_geom(name=name, type=_BOX, pos=pos, size=size, material="bin", **_CONTACT)


def _add_free_box(
    spec: mujoco.MjSpec,
    name: str,
    size_m: tuple[float, float, float],
    mass_kg: float,
    rgb: tuple[float, float, float],
) -> None:
    spec.add_material(name=name, rgba=[*rgb, 1], specular=0.25, shininess=0.35, emission=0.12)
    x, y, z = (edge * edge for edge in size_m)
    inertia = [mass_kg * two / 12 for two in (y + z, x + z, x + y)]
    body = spec.worldbody.add_body(
        name=name, pos=[0, 0, size_m[2] / 2], mass=mass_kg, inertia=inertia, explicitinertial=True
    )
    body.add_freejoint(name=name)
    body.add_geom(
        name=name, type=_BOX, size=[edge / 2 for edge in size_m], material=name, **_CONTACT
    )


def _add_camera(spec: mujoco.MjSpec, name: str, view: View) -> None:
    back = np.subtract(view.position_m, view.target_m)
    back /= np.linalg.norm(back)
    right = np.cross(view.up, back)
    right /= np.linalg.norm(right)
    quat = np.zeros(4)
    mujoco.mju_mat2Quat(quat, np.column_stack([right, np.cross(back, right), back]).reshape(9))
    spec.body(view.parent).add_camera(name=name, pos=view.position_m, quat=quat, fovy=view.fovy_deg)
