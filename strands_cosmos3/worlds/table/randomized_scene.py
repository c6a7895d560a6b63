"""The tables of demonstrations: a scene whose surface, light, colours and cameras are drawn anew
for each episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.sim.scene_builder import SURFACE
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.appearance import PATTERNS, Surface
from strands_cosmos3.worlds.table.hands import direction
from strands_cosmos3.worlds.table.scene import TableScene, cubes_of

LIGHT = (0.3, 2.0)
"""Factor on all lights."""
OUTER_JITTER_M = 0.05
WRIST_JITTER_M = 0.03
"""Radius of the ball within which a camera is displaced."""
_OTHER_COLOURS = (
    (0.90, 0.78, 0.12),
    (0.50, 0.18, 0.62),
    (0.92, 0.92, 0.90),
    (0.10, 0.10, 0.10),
    (0.45, 0.45, 0.47),
    (0.36, 0.23, 0.14),
    (0.93, 0.62, 0.72),
)
"""Yellow, violet, white, black, grey, brown and pink: none of them is red, green or blue."""
_NOMINAL_TABLE = 0.25  # fraction of the episodes whose table is the nominal one
_ARRAYS = (
    "mat_rgba",
    "light_diffuse",
    "light_specular",
    "light_dir",
    "cam_pos",
    "cam_quat",
    "cam_fovy",
)


@dataclass
class RandomizedScene:
    """A robot, its renderer and the nominal values of what is randomized."""

    robot: Robot
    renderer: Renderer
    nominal: Mapping[str, NDArray[Any]]

    @classmethod
    def make(cls, edge_m: float, crowded: bool, robot: str = "panda") -> RandomizedScene:
        """Build a scene with cubes of a size, and with cubes of other colours and sizes if it is
        crowded.
        """
        scene = TableScene(cubes_of(edge_m, crowded), robot=get_robot(robot))
        made = cls(Robot(robot, scene=scene), Renderer(scene.model, *VIEW_HW), {})
        made.nominal = made.looks()
        return made

    def randomize(self, rng: np.random.Generator, scale: float) -> None:
        """Draw an episode's looks around the nominal ones; ``scale`` 0 leaves them, 1 is the
        full range.
        """
        self._set(self.nominal)
        self._draw_colours(rng, scale)
        self._draw_light(rng, scale)
        self._draw_cameras(rng, scale)
        surface = draw_surface(rng)
        if rng.random() >= _NOMINAL_TABLE and rng.random() < scale:
            self._present()["texture"][:] = surface.texture()
        self.renderer.upload_texture(SURFACE)

    def looks(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the present looks, for :meth:`restore`."""
        return {name: np.array(view) for name, view in self._present().items()}

    def restore(self, looks: Mapping[str, NDArray[Any]]) -> None:
        """Return to former looks."""
        self._set(looks)
        self.renderer.upload_texture(SURFACE)

    def _present(self) -> dict[str, Any]:
        """Return views of everything in the model that is randomized, by name."""
        model: Any = self.robot.scene.model
        headlight = model.vis.headlight
        looks = {name: getattr(model, name) for name in _ARRAYS}
        looks |= {"ambient": headlight.ambient, "diffuse": headlight.diffuse}
        return looks | {"texture": model.tex(SURFACE).data}

    def _set(self, looks: Mapping[str, NDArray[Any]]) -> None:
        for name, view in self._present().items():
            view[:] = looks[name]

    def _draw_colours(self, rng: np.random.Generator, scale: float) -> None:
        model = self.robot.scene.model
        nominal = self.nominal["mat_rgba"][:, :3]
        tint = rng.normal(0, 0.05 * scale, nominal.shape) + rng.normal(0, 0.03 * scale)
        model.mat_rgba[:, :3] = np.clip(nominal * (1 + tint), 0, 1)
        for cube in self.robot.scene.bodies:
            colour = _OTHER_COLOURS[int(rng.integers(len(_OTHER_COLOURS)))]
            if cube.startswith("other_") and scale > 0:
                model.mat_rgba[model.mat(cube).id, :3] = colour

    def _draw_light(self, rng: np.random.Generator, scale: float) -> None:
        looks = self._present()
        nominal = self.nominal
        factor = np.exp(rng.uniform(*np.log(LIGHT))) ** scale
        warmth = 1 + rng.normal(0, 0.05 * scale, 3)
        for name in ("light_diffuse", "ambient"):
            looks[name][:] = np.maximum(nominal[name] * factor * warmth, 0)
        for name in ("light_specular", "diffuse"):
            looks[name][:] = nominal[name] * factor
        tilt = rng.normal(0, 0.15 * scale, nominal["light_dir"].shape)
        looks["light_dir"][:] = nominal["light_dir"] + tilt

    def _draw_cameras(self, rng: np.random.Generator, scale: float) -> None:
        model: Any = self.robot.scene.model
        for camera in range(model.ncam):
            radius = WRIST_JITTER_M if model.camera(camera).name == "wrist" else OUTER_JITTER_M
            model.cam_pos[camera] = self.nominal["cam_pos"][camera] + scale * _in_ball(rng, radius)
        turn = rng.normal(0, 0.008, self.nominal["cam_quat"].shape)
        quat = self.nominal["cam_quat"] + scale * turn
        model.cam_quat[:] = quat / np.linalg.norm(quat, axis=1, keepdims=True)
        model.cam_fovy[:] = self.nominal["cam_fovy"] + scale * rng.normal(0, 0.8, model.ncam)


def draw_surface(rng: np.random.Generator) -> Surface:
    """Draw a table's surface: any pattern, from nearly black to nearly white, of a pale hue."""
    pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
    lightness = rng.uniform(0.08, 0.95)
    saturation = rng.uniform(0, 0.15)
    hue = rng.uniform(0, 2 * np.pi)
    turned = np.cos(hue + np.array([0.0, 2.0, 4.0]) * np.pi / 3)
    rgb = tuple(np.clip(lightness * (1 + saturation * turned), 0, 1).tolist())
    contrast = rng.uniform(0.5, 2.0) if pattern == "planks" else rng.uniform(0.05, 0.40)
    return Surface(pattern, rgb, float(contrast), int(rng.integers(2**31)))


def _in_ball(rng: np.random.Generator, radius: float) -> F64:
    return direction(rng) * radius * rng.random() ** (1 / 3)
