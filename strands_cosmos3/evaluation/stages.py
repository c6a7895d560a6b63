"""The robot and the table of an episode under a perturbation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.sim.appearance import NOMINAL
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.sim.scene import DEFAULT_CUBES, DISTRACTORS, SEPARATION_M, SPAWN_X_M, SPAWN_Y_M, Layout, Scene
from strands_cosmos3.sim.scene_builder import cameras

CLOSE_M = 0.065
"""Distance of the centres of two close cubes."""
_MAX_DRAWS = 1000


class Stages:
    """Robots in the scenes that an evaluation needs, built when they are first asked for."""

    def __init__(self) -> None:
        self._robots: dict[tuple[object, ...], Robot] = {}

    def prepare(self, assignment: Assignment) -> tuple[Robot, Layout | None]:
        """Return an episode's robot, and its layout where that is not the scene's own for the seed."""
        perturbation, rng = assignment.perturbation, np.random.default_rng([assignment.seed, 17])
        robot = self._robot(perturbation)
        model = robot.scene.model
        wrist = model.cam("wrist").id
        direction = rng.normal(0, 1, 3)
        offset_m = direction / np.linalg.norm(direction) * (perturbation.camera_cm or 0.0) / 100
        for plant in (model, robot.model):
            plant.cam_pos[wrist] = self._wrist_m(robot) + offset_m
        if not perturbation.close:
            return robot, None
        layout = robot.scene.sample_layout(np.random.default_rng(assignment.seed))
        return robot, bring_close(layout, assignment.goals[0].cube, rng)

    def _robot(self, perturbation: Perturbation) -> Robot:
        key = (perturbation.table, perturbation.light, perturbation.cubes_mm, perturbation.crowded)
        if key not in self._robots:
            given = {"table": perturbation.table, "light": perturbation.light}
            appearance = replace(NOMINAL, **{name: value for name, value in given.items() if value is not None})
            edge_m = (perturbation.cubes_mm or 1e3 * DEFAULT_CUBES[0].edge_m) / 1e3
            cubes = tuple(replace(cube, edge_m=edge_m) for cube in DEFAULT_CUBES)
            scene = Scene((*cubes, *DISTRACTORS) if perturbation.crowded else cubes, appearance=appearance)
            self._robots[key] = Robot("panda", scene=scene)
        return self._robots[key]

    def _wrist_m(self, robot: Robot) -> F64:
        """Return where a scene's wrist camera is when nothing displaces it."""
        return np.array(cameras(robot.scene.appearance)["wrist"].position_m)


def bring_close(layout: Layout, cube: str, rng: np.random.Generator) -> Layout:
    """Move the next cube to ``CLOSE_M`` from a cube, inside the spawn region and clear of the others."""
    at, other = layout.names.index(cube), (layout.names.index(cube) + 1) % len(layout.names)
    rest = [i for i in range(len(layout.names)) if i not in (at, other)]
    for _ in range(_MAX_DRAWS):
        angle = rng.uniform(0, 2 * np.pi)
        xy = layout.xy_m[at] + CLOSE_M * np.array([np.cos(angle), np.sin(angle)])
        inside = SPAWN_X_M[0] <= xy[0] <= SPAWN_X_M[1] and SPAWN_Y_M[0] <= xy[1] <= SPAWN_Y_M[1]
        if inside and all(np.linalg.norm(xy - layout.xy_m[i]) >= SEPARATION_M for i in rest):
            moved = layout.xy_m.copy()
            moved[other] = xy
            return replace(layout, xy_m=moved)
    raise ConfigError(f"no place {CLOSE_M:g} m from {cube} is free.")
