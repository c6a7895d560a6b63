"""Tasks and their success conditions, judged from the physics.

The instruction selects the cube: "pick up the blue cube" succeeds only with the blue one. A condition must hold without a
break for ``hold_s``.

===== ====================================================================================================
reach the tool centre point within 30 mm of the cube's centre
pick  the cube's centre at least 100 mm above where it lay, both fingers touching it
place the cube inside the bin's walls, slower than 10 mm/s, touched by no finger
stack the cube's centre within 15 mm (sideways) of the other's and one edge above it within 5 mm, slower than
      10 mm/s, touched by no finger
===== ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import mujoco
import numpy as np

from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.instruction import Goal
from strands_cosmos3.sim.scene import Scene

REACH_M = 0.030
LIFT_M = 0.100
REST_M_S = 0.010
STACK_ASIDE_M = 0.015
STACK_HEIGHT_M = 0.005

Condition = Callable[[Scene, mujoco.MjData, Goal], bool]


@dataclass(frozen=True)
class Task:
    """A task."""

    name: str
    instruction: str  # by default
    hold_s: float  # time for which the condition must hold
    holds: Condition  # whether the condition holds now


def _reach(scene: Scene, data: mujoco.MjData, goal: Goal) -> bool:
    return bool(np.linalg.norm(data.site_xpos[scene.tcp_site] - _centre(scene, data, goal.cube)) < REACH_M)


def _pick(scene: Scene, data: mujoco.MjData, goal: Goal) -> bool:
    lifted = _centre(scene, data, goal.cube)[2] - scene.cubes[goal.cube].edge_m / 2
    return bool(lifted >= LIFT_M and fingers_touching(scene, data, goal.cube) == 2)


def _place(scene: Scene, data: mujoco.MjData, goal: Goal) -> bool:
    inside = scene.in_bin(_centre(scene, data, goal.cube))
    return inside and _left_at_rest(scene, data, goal.cube)


def _stack(scene: Scene, data: mujoco.MjData, goal: Goal) -> bool:
    if goal.onto is None:
        return False
    off = _centre(scene, data, goal.cube) - _centre(scene, data, goal.onto)
    edge = (scene.cubes[goal.cube].edge_m + scene.cubes[goal.onto].edge_m) / 2
    on_top = np.linalg.norm(off[:2]) < STACK_ASIDE_M and abs(off[2] - edge) < STACK_HEIGHT_M
    return bool(on_top) and _left_at_rest(scene, data, goal.cube)


def _left_at_rest(scene: Scene, data: mujoco.MjData, cube: str) -> bool:
    at = scene.cube_dof[cube]
    return bool(np.linalg.norm(data.qvel[at : at + 3]) < REST_M_S) and fingers_touching(scene, data, cube) == 0


def _centre(scene: Scene, data: mujoco.MjData, cube: str) -> np.ndarray:
    return data.xpos[scene.cube_body[cube]]


def fingers_touching(scene: Scene, data: mujoco.MjData, cube: str) -> int:
    """Return the number of fingers (0, 1 or 2) in contact with a cube."""
    model = scene.model
    fingers = {int(model.body(name).id) for name in ("left_finger", "right_finger")}
    touching = set()
    for contact in data.contact[: data.ncon]:
        bodies = {int(model.geom_bodyid[contact.geom1]), int(model.geom_bodyid[contact.geom2])}
        if scene.cube_body[cube] in bodies:
            touching |= bodies & fingers
    return len(touching)


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "reach": Task("reach", "reach the red cube", 0.2, _reach),
        "pick": Task("pick", "pick up the red cube", 0.5, _pick),
        "place": Task("place", "place the red cube in the bin", 0.3, _place),
        "stack": Task("stack", "stack the red cube on the blue cube", 0.5, _stack),
    }
)
"""The tasks by name."""


def get_task(name: str) -> Task:
    """Return the task of that name; UnknownNameError lists the tasks."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    return TASKS[name]


class Judge:
    """Judges one episode of a task; ``goal`` is the parsed instruction, with the cube to judge."""

    def __init__(self, task: Task, scene: Scene, goal: Goal):
        self.task, self._scene, self._goal = task, scene, goal
        self._since_s: float | None = None

    def succeeded(self, data: mujoco.MjData) -> bool:
        """Return whether the condition has held for long enough; call it at every tick."""
        if not self.task.holds(self._scene, data, self._goal):
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = float(data.time)
        return data.time - self._since_s >= self.task.hold_s - 1e-9
