"""The robot and the table of an episode under a perturbation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.robots.catalogue import PANDA, get_robot
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.scene import (
    DEFAULT_CUBES,
    DISTRACTORS,
    TableScene,
    bring_close,
    nominal,
)
from strands_cosmos3.worlds.table.tasks import bar_for


class Stages:
    """A robot in the scenes that an evaluation needs, built when they are first asked for; a
    name, or a .toml file.
    """

    def __init__(self, robot: str = PANDA.name) -> None:
        self._name, self._spec = robot, get_robot(robot)
        self._robots: dict[tuple[object, ...], Robot] = {}

    def prepare(self, assignment: Assignment) -> tuple[Robot, Layout | None]:
        """Return an episode's robot, and its layout where that is not the scene's own for the
        seed.
        """
        perturbation, rng = assignment.perturbation, np.random.default_rng([assignment.seed, 17])
        robot = self._robot(perturbation, assignment.task)
        direction = rng.normal(0, 1, 3)
        offset_m = direction / np.linalg.norm(direction) * (perturbation.camera_cm or 0.0) / 100
        # where it is when nothing displaces it
        wrist = robot.scene.cameras().get("wrist")
        if wrist is not None:
            for plant in (robot.scene.model, robot.model):
                plant.cam_pos[plant.cam("wrist").id] = np.array(wrist.position_m) + offset_m
        if not perturbation.close:
            return robot, None
        layout = robot.scene.sample_layout(np.random.default_rng(assignment.seed))
        return robot, bring_close(layout, assignment.goals[0].cube, rng, self._spec.workspace)

    def _robot(self, perturbation: Perturbation, task: str) -> Robot:
        bar = bar_for(task, self._spec)
        key = (
            perturbation.table,
            perturbation.light,
            perturbation.cubes_mm,
            perturbation.crowded,
            bar,
        )
        if key not in self._robots:
            given = {"table": perturbation.table, "light": perturbation.light}
            appearance = replace(
                nominal(self._spec),
                **{name: value for name, value in given.items() if value is not None},
            )
            edge_m = (perturbation.cubes_mm or 1e3 * DEFAULT_CUBES[0].edge_m) / 1e3
            cubes = tuple(replace(cube, edge_m=edge_m) for cube in DEFAULT_CUBES)
            cubes = (
                None
                if len(self._spec.limbs) > 1
                else (*cubes, *DISTRACTORS)
                if perturbation.crowded
                else cubes
            )
            scene = TableScene(cubes, appearance=appearance, robot=self._spec, bar=bar)
            self._robots[key] = Robot(self._name, scene=scene)
        return self._robots[key]
