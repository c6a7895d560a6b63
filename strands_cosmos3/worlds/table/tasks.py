"""Tasks and their success conditions, judged from the physics.

The instruction selects the cube: "pick up the blue cube" succeeds only with the blue one. A
condition must hold without a break for ``hold_s``.

reach: The cube lies at rest where it lay before the hand came (within 20 mm). The tool centre point
    is within 30 mm of its centre and of that place.
pick: Two fingers took the cube from where it lay, and hold it at least 100 mm higher. Nothing else
    touches it.
place: Two fingers took the cube from outside the bin and released it in the bin or above, from any
    height but no faster than 0.3 m/s, so that it may be dropped but not thrown. It lies inside the
    bin's walls, slower than 10 mm/s, and no part of the robot touches it.
stack: Two fingers took the cube from elsewhere and released it within 20 mm (sideways) of the
    other, no faster than 0.3 m/s. It lies on the other, their centres within 15 mm (sideways) and
    one edge (+-5 mm) apart in height. Both are slower than 10 mm/s, the other lies on something,
    within 20 mm of where it lay when the cube was taken, and no part of the robot touches either.

``lift_bar``, the level lift of a bar by two hands, is judged in ``bar.py``, and ``hand_over`` in
``hand_over.py``. Two fingers hold a cube while both press on it from opposite sides. A cube that
moves further than its speed explains was moved by hand: its history starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.sim.scene import BAR, LIGHT_BAR, Bar, Scene
from strands_cosmos3.worlds.table.bar import BarMonitor
from strands_cosmos3.worlds.table.hand_over import HandOverMonitor
from strands_cosmos3.worlds.table.handling import (
    REACH_M,
    REST_M_S,
    CubeHistory,
    CubeState,
    cube_state,
    touched_only_by,
)
from strands_cosmos3.worlds.table.instruction import HAND_OVER_THE_BAR, LIFT_THE_BAR, Goal, Verb

LIFT_M = 0.100
DISTURBED_M = 0.020
RELEASE_M_S = 0.3
RELEASE_ASIDE_M = 0.020
STACK_ASIDE_M = 0.015
STACK_HEIGHT_M = 0.005


@dataclass(frozen=True)
class Situation:
    """What a condition judges: the scene now, and the history of the goal's cube."""

    scene: Scene
    goal: Goal
    data: mujoco.MjData
    now: CubeState
    history: CubeHistory


Condition = Callable[[Situation], bool]


@dataclass(frozen=True)
class Task:
    """A task."""

    name: str
    instruction: str  # by default
    hold_s: float  # time for which the condition must hold
    holds: Condition | None = None  # whether the condition holds now, of a cube; None is a bar's
    bar: Bar | None = None  # that it is about, instead of cubes


def _reach(at: Situation) -> bool:
    lay, now = at.history.alone_m, at.now
    if (
        lay is None
        or not now.supported
        or now.speed_m_s >= REST_M_S
        or _apart(now.position_m, lay) >= DISTURBED_M
    ):
        return False
    tcp = at.data.site_xpos[at.scene.tcp_site]
    return _apart(tcp, now.position_m) < REACH_M and _apart(tcp, lay) < REACH_M


def _pick(at: Situation) -> bool:
    taken, fingers = at.history.taken_m, at.scene.finger_bodies
    if taken is None or not (
        at.history.held and at.now.gripped and touched_only_by(at.now, fingers)
    ):
        return False
    return bool(at.now.position_m[2] - taken[2] >= LIFT_M)


def _place(at: Situation) -> bool:
    box, released = at.scene.bin, at.history.released
    if released is None or at.history.taken_m is None or not _left_at_rest(at.now):
        return False
    brought = box.surrounds(released.position_m) and not box.surrounds(at.history.taken_m)
    return brought and released.speed_m_s < RELEASE_M_S and box.contains(at.now.position_m)


def _stack(at: Situation) -> bool:
    released, onto, base_m = at.history.released, at.goal.onto, at.history.base_m
    if (
        onto is None
        or released is None
        or base_m is None
        or at.history.taken_m is None
        or not _left_at_rest(at.now)
    ):
        return False
    base = cube_state(at.scene, at.data, onto)
    edge = (at.scene.cubes[at.goal.cube].edge_m + at.scene.cubes[onto].edge_m) / 2
    off, taken, let_go = (
        p - base.position_m for p in (at.now.position_m, at.history.taken_m, released.position_m)
    )
    on_top = (
        _aside(off) < STACK_ASIDE_M
        and abs(off[2] - edge) < STACK_HEIGHT_M
        and at.scene.cube_body[onto] in at.now.force_n
    )
    brought = _aside(let_go) < RELEASE_ASIDE_M and not (
        _aside(taken) < edge and taken[2] > edge / 2
    )
    stayed = _apart(base.position_m, base_m) < DISTURBED_M
    return (
        on_top and brought and stayed and released.speed_m_s < RELEASE_M_S and _left_at_rest(base)
    )


def _left_at_rest(cube: CubeState) -> bool:
    return cube.supported and cube.speed_m_s < REST_M_S and not cube.robot_touches


def _apart(a: F64, b: F64) -> float:
    return float(np.linalg.norm(a - b))


def _aside(offset: F64) -> float:
    """Horizontal length of an offset [3]."""
    return float(np.linalg.norm(offset[:2]))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "reach": Task("reach", "reach the red cube", 0.2, _reach),
        "pick": Task("pick", "pick up the red cube", 0.5, _pick),
        "place": Task("place", "place the red cube in the bin", 0.3, _place),
        "stack": Task("stack", "stack the red cube on the blue cube", 0.5, _stack),
        "lift_bar": Task("lift_bar", LIFT_THE_BAR, 1.0, bar=Bar()),
        "hand_over": Task("hand_over", HAND_OVER_THE_BAR, 1.0, bar=LIGHT_BAR),
    }
)
"""The tasks by name."""
CUBE_TASKS = tuple(name for name, task in TASKS.items() if task.bar is None)


def get_task(name: str) -> Task:
    """Return the task of that name; UnknownNameError lists the tasks."""
    if not isinstance(name, str) or name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    return TASKS[name]


def task_of(goal: Goal) -> Task:
    """Return the task that judges an instruction's goal."""
    verb = instance_of(goal, Goal, "goal").verb
    return TASKS["lift_bar" if verb is Verb.LIFT else str(verb)]


@typed()
def bar_for(task: str | None, robot: RobotSpec) -> Bar | None:
    """Return the bar that a task of two arms is about; None is the scene's default.
    UnknownNameError: no such task.
    """
    bar = None if task is None else get_task(task).bar
    return bar if len(robot.limbs) > 1 else None


class _CubeMonitor:
    """Whether a condition of a cube holds now."""

    def __init__(self, scene: Scene, goal: Goal, holds: Condition):
        self._scene, self._goal, self._holds, self._history = scene, goal, holds, CubeHistory()

    def update(self, data: mujoco.MjData) -> bool:
        """Add the present state; return whether the condition holds."""
        now, onto = cube_state(self._scene, data, self._goal.cube), self._goal.onto
        base_m = None if onto is None else data.xpos[self._scene.cube_body[onto]].copy()
        self._history.update(now, data.site_xpos[self._scene.tcp_site], base_m)
        return self._holds(Situation(self._scene, self._goal, data, now, self._history))


class Judge:
    """Judges one episode of a task; ``goal`` is the parsed instruction, with the cube to judge.

    Raises:
        ConfigError: The scene does not have what the task or the instruction is about.
    """

    @typed()
    def __init__(self, task: Task, scene: Scene, goal: Goal):
        verbs = [None if bar is None else bar.verb for bar in (task.bar, scene.bar)]
        if {*verbs, goal.verb if goal.cube == BAR else None} != {verbs[0]}:
            has = (
                "cubes"
                if scene.bar is None
                else f"a bar to {str(scene.bar.verb).replace('_', ' ')}"
            )
            raise ConfigError(
                f"task {task.name!r}, the instruction's {goal.cube!r} and the scene of "
                f"{scene.robot.name!r}, which has {has}, "
                "do not go together; choose another task, instruction or robot, or build it for "
                "the task: "
                f"Robot('dual_panda', task='hand_over')."
            )
        self.task, self._scene, self._goal = task, scene, goal
        self._monitor = self._start()
        self._at_s = -float("inf")
        self._since_s: float | None = None

    def _start(self) -> BarMonitor | HandOverMonitor | _CubeMonitor:
        holds, taker = self.task.holds, self._goal.to
        if taker is not None:
            return HandOverMonitor(self._scene, taker)
        return (
            BarMonitor(self._scene)
            if holds is None
            else _CubeMonitor(self._scene, self._goal, holds)
        )

    def succeeded(self, data: mujoco.MjData) -> bool:
        """Return whether the condition has held for long enough; call it at every tick.

        A clock that goes back starts a new episode.
        """
        now_s = float(instance_of(data, mujoco.MjData, "data").time)
        if now_s < self._at_s:
            self._monitor, self._since_s = self._start(), None
        self._at_s = now_s
        if not self._monitor.update(data):
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= self.task.hold_s - 1e-9
