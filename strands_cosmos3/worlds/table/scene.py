"""The table's scenes: three cubes and an open bin, or for two hands a bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, positive
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.spec import Camera, RobotSpec, Workspace
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.sim.scene_builder import (
    AROUND,
    CONTACT,
    add_free_box,
    add_lights,
    add_tabletop,
    cameras,
    view_names_of,
)
from strands_cosmos3.worlds.table.appearance import NOMINAL, Appearance
from strands_cosmos3.worlds.table.grammar import Verb
from strands_cosmos3.worlds.table.hands import length

BAR_X_M = (0.44, 0.54)
BAR_Y_M = (-0.04, 0.04)
BAR_YAW_RAD = (-0.15, 0.15)
"""Where a bar may lie, so that two arms reach both of its ends."""
SEPARATION_M = 0.10
"""Least distance between the centres of two cubes: an open finger fits beside a cube at any yaw
of both.
"""
CLOSE_M = 0.065
"""Distance of the centres of two close cubes."""
_MAX_DRAWS = 1000
_NEAR: Mapping[str, Camera] = MappingProxyType(
    {
        name: replace(AROUND[name], target_m=(0.47, 0.03, 0.13), fovy_deg=28.0)
        for name in ("exterior_1", "exterior_2")
    }
)
"""Outer cameras that show the hand and the cubes."""


@dataclass(frozen=True)
class Cube:
    """A free cube; InputError if its edge or mass is not above zero."""

    name: str  # of its body, joint and geom
    rgb: tuple[float, float, float]  # in 0..1
    edge_m: float = 0.040
    mass_kg: float = 0.060

    def __post_init__(self) -> None:
        positive(self.edge_m, "edge_m")
        positive(self.mass_kg, "mass_kg")


DEFAULT_CUBES = (
    Cube("cube_red", (0.83, 0.12, 0.11)),
    Cube("cube_green", (0.13, 0.58, 0.22)),
    Cube("cube_blue", (0.10, 0.32, 0.82)),
)
DISTRACTORS = (
    Cube("other_yellow", (0.90, 0.78, 0.12), 0.032, 0.03),
    Cube("other_violet", (0.50, 0.18, 0.62), 0.048, 0.09),
)
"""Cubes that no instruction names."""


def cubes_of(edge_m: float, crowded: bool) -> tuple[Cube, ...]:
    """Return the cubes at another size, and the others where it is crowded."""
    cubes = tuple(replace(cube, edge_m=edge_m) for cube in DEFAULT_CUBES)
    return cubes + DISTRACTORS if crowded else cubes


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
        for value in (*self.size_m, self.mass_kg, self.grasp_m):
            positive(value, "a bar's sizes and mass")


LIGHT_BAR = Bar((0.04, 0.30, 0.04), 0.05, 0.10, (0.10, 0.45, 0.62), Verb.HAND_OVER)
"""One hand can hold it by an end."""
BAR = "bar"
"""Name of the bar's body, joint and geom."""


def contents(bar: Bar | None) -> str:
    """Return what messages say of a scene with this bar, or with cubes."""
    return "cubes" if bar is None else f"a bar to {bar.verb.replace('_', ' ')}"


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

    def add_to(self, spec: mujoco.MjSpec) -> None:
        """Add the floor and the walls."""
        spec.add_material(name="bin", rgba=[0.33, 0.36, 0.40, 1], specular=0.25, shininess=0.3)
        body = spec.worldbody.add_body(name="bin", pos=[*self.center_m, 0.0])
        ix, iy = self.inner_m
        w = self.wall_m
        h = self.height_m
        x, y, half_wall, half_height = ix / 2, iy / 2, w / 2, h / 2  # halves, as MuJoCo has them
        walls = {
            "bin_floor": ([0, 0, half_wall], [x, y, half_wall]),
            "bin_front": ([x + half_wall, 0, half_height], [half_wall, y + w, half_height]),
            "bin_back": ([-x - half_wall, 0, half_height], [half_wall, y + w, half_height]),
            "bin_left": ([0, y + half_wall, half_height], [x, half_wall, half_height]),
            "bin_right": ([0, -y - half_wall, half_height], [x, half_wall, half_height]),
        }
        box = mujoco.mjtGeom.mjGEOM_BOX
        for name, (pos, size) in walls.items():
            body.add_geom(name=name, type=box, pos=pos, size=size, material="bin", **CONTACT)


def nominal(robot: RobotSpec) -> Appearance:
    """Return the appearance of a robot's scene where none is given: with the DROID rig's views
    that of the bundled policy.
    """
    return Appearance("parquet", "near") if set(_NEAR) <= set(view_names_of(robot)) else NOMINAL


class TableScene(Scene):
    """A robot before cubes and a bin, or a bar, which stands in the place of the bin.

    Attributes:
        cubes, bin: The cubes by name, and the bin, also where a bar is in its place.
        bar: The bar, or None.
        appearance: How it looks.
    """

    def __init__(
        self,
        cubes: tuple[Cube, ...] | None = None,
        arm: str | Path | None = None,
        appearance: Appearance | None = None,
        robot: RobotSpec = PANDA,
        bar: Bar | None = None,
    ):
        """Compile the scene; ConfigError if two cubes share a name, or a limb has no gripper.

        Without cubes and a bar, it has three cubes for one limb, and a bar for several. ``arm``:
        see :class:`~strands_cosmos3.sim.scene.Scene`.
        """
        self.bar = Bar() if bar is None and cubes is None and len(robot.limbs) > 1 else bar
        cubes = (DEFAULT_CUBES if self.bar is None else ()) if cubes is None else cubes
        if len({cube.name for cube in cubes}) != len(cubes):
            raise ConfigError(
                f"every cube needs its own name, got {[cube.name for cube in cubes]}."
            )
        self.cubes: dict[str, Cube] = {cube.name: cube for cube in cubes}
        self.bin = Bin(robot.workspace.bin_m)
        self.appearance = appearance or nominal(robot)
        heights = {name: cube.edge_m for name, cube in self.cubes.items()}
        if self.bar is not None:
            heights[BAR] = self.bar.size_m[2]
        super().__init__(robot, arm, heights)

    def furnish(self, spec: mujoco.MjSpec) -> None:
        """Add lights, table, bin or bar, and cubes."""
        add_lights(spec, self.appearance.light)
        add_tabletop(spec, self.appearance.surface.texture())
        if self.bar is None:
            self.bin.add_to(spec)
        else:
            add_free_box(spec, BAR, self.bar.size_m, self.bar.mass_kg, self.bar.rgb)
        for cube in self.cubes.values():
            size_m = (cube.edge_m, cube.edge_m, cube.edge_m)
            add_free_box(spec, cube.name, size_m, cube.mass_kg, cube.rgb)

    def cameras(self) -> dict[str, Camera]:
        """Return the cameras of the appearance."""
        look = self.appearance
        return cameras(self.robot, _NEAR if look.rig == "near" else {}, look.wrist_offset_m)

    def sample_layout(self, rng: np.random.Generator, separation_m: float = SEPARATION_M) -> Layout:
        """Return a layout of the cubes, or of a bar where both of its ends can be reached; no cubes
        lie beside it.
        """
        if self.bar is None:
            return super().sample_layout(rng, separation_m)
        xy = np.array([[rng.uniform(*BAR_X_M), rng.uniform(*BAR_Y_M)]])
        return Layout((BAR,), xy, np.array([rng.uniform(*BAR_YAW_RAD)]))

    def privileged(self, data: mujoco.MjData) -> dict[str, F64]:
        """Return what only the simulation knows; of a bar ``bar_m`` [4], its sizes and grasp; of
        cubes ``edge_m``, the ``bin``'s centre and rim height [3], and the robot's ``carry_m`` and
        ``grasp_yaw_rad``.
        """
        state = super().privileged(data)
        if self.bar is not None:
            return state | {"bar_m": np.array([*self.bar.size_m, self.bar.grasp_m])}
        return state | {
            "edge_m": np.array(next(iter(self.cubes.values())).edge_m),
            "bin": np.array([*self.bin.center_m, self.bin.height_m]),
            "carry_m": np.array(self.robot.workspace.carry_m),
            "grasp_yaw_rad": np.deg2rad(self.robot.workspace.grasp_yaw_deg),
        }


def bring_close(
    layout: Layout, cube: str, rng: np.random.Generator, workspace: Workspace = PANDA.workspace
) -> Layout:
    """Move the next cube to ``CLOSE_M`` from a cube, inside the workspace and clear of the
    others.
    """
    at = layout.names.index(cube)
    n = len(layout.names)
    other = (at + 1) % n
    rest = [i for i in range(n) if i not in (at, other)]
    for _ in range(_MAX_DRAWS):
        angle = rng.uniform(0, 2 * np.pi)
        xy = layout.xy_m[at] + CLOSE_M * np.array([np.cos(angle), np.sin(angle)])
        low, high = np.array([workspace.x_m, workspace.y_m]).T
        inside = ((low <= xy) & (xy <= high)).all()
        if inside and all(length(xy - layout.xy_m[i]) >= SEPARATION_M for i in rest):
            moved = layout.xy_m.copy()
            moved[other] = xy
            return replace(layout, xy_m=moved)
    raise ConfigError(f"no place {CLOSE_M:g} m from {cube} is free.")
