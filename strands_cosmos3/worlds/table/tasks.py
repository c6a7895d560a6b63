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

``lift_bar``, the level lift of a bar by two hands, and ``hand_over`` are judged in ``bar.py``. Two
fingers hold a cube while both press on it from opposite sides. A cube that moves further than its
speed explains was moved by hand: its history starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import mujoco

from strands_cosmos3.checks import F64, known_name
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.sim.judge import Judge
from strands_cosmos3.worlds.table.bar import (
    REST_M_S,
    SLIP_S,
    BarMonitor,
    BodyState,
    HandOverMonitor,
)
from strands_cosmos3.worlds.table.grammar import TEMPLATES, Goal, Verb
from strands_cosmos3.worlds.table.hands import length
from strands_cosmos3.worlds.table.scene import BAR, LIGHT_BAR, Bar, TableScene, contents
from strands_cosmos3.worlds.world import Task

REACH_M = 0.030
NUDGE_M = 0.030
"""Distance that closing fingers may push a cube from where it lay before both of them hold it."""
_PRESS_N = 0.1  # of each finger
_SUPPORT = 0.5  # share of its weight from which a cube is supported
_SLOW_M_S = 0.05
LIFT_M = 0.100
DISTURBED_M = 0.020
RELEASE_M_S = 0.3
RELEASE_ASIDE_M = 0.020
STACK_ASIDE_M = 0.015
STACK_HEIGHT_M = 0.005


@dataclass(frozen=True, kw_only=True)
class CubeState(BodyState):
    """A cube now; ``force_n`` is the force [3] on it, in the world, by the body that touches it."""

    force_n: dict[int, F64]
    support_n: float  # upward force of everything but the robot
    supported: bool
    gripped: bool  # both fingers press on it from opposite sides
    robot_touches: bool


def cube_state(scene: TableScene, data: mujoco.MjData, cube: str) -> CubeState:
    """Return a cube's state, as of the last physics step; UnknownNameError if the scene has no
    such cube.
    """
    known_name(cube, "cube", scene.cubes)
    model = scene.model
    body = scene.bodies[cube].id
    dof = scene.bodies[cube].dof
    forces = scene.forces_on(data, body)
    robot = {other for other in forces if int(model.body_rootid[other]) in scene.robot_roots}
    support_n = float(sum(force[2] for other, force in forces.items() if other not in robot))
    weight_n = model.body_mass[body] * length(model.opt.gravity)
    return CubeState(
        time_s=float(data.time),
        position_m=data.xpos[body].copy(),
        speed_m_s=length(data.qvel[dof : dof + 3]),
        force_n=forces,
        support_n=support_n,
        supported=support_n >= _SUPPORT * weight_n,
        gripped=scene.only.grips(data, forces, _PRESS_N),
        robot_touches=bool(robot),
    )


@dataclass
class CubeHistory:
    """What happened to a cube in an episode so far; call :meth:`update` at every tick."""

    now: CubeState | None = None
    lay_m: F64 | None = None  # where it last lay on something, not gripped
    alone_m: F64 | None = None  # where it last lay at rest with the hand out of reach
    taken_m: F64 | None = None  # where it lay when both fingers took it
    base_m: F64 | None = None  # where the cube to stack it on was then
    held: bool = False  # gripped since, with short interruptions at most
    released: CubeState | None = None  # the last moment of the latest grip
    _gripped: CubeState | None = None

    def update(self, now: CubeState, tcp_m: F64, base_m: F64 | None = None) -> None:
        """Add the present state; ``tcp_m`` and ``base_m`` [3] are where the tool centre point
        and the other cube are.
        """
        before = self.now
        self.now = now
        if before is not None and now.jumped_from(before):
            self.lay_m = self.alone_m = self.taken_m = self.base_m = self.released = None
            self._gripped = None
            self.held = False
        lay_m = self.lay_m
        if now.gripped:
            if not self.held and lay_m is not None and length(now.position_m - lay_m) < NUDGE_M:
                self.held = True
                self.taken_m = self.lay_m
                self.base_m = base_m
                self.released = None
            self._gripped = now
        elif self.held and self._gripped is not None and now.time_s - self._gripped.time_s > SLIP_S:
            self.held = False
            self.released = self._gripped
        if now.supported and not now.gripped and now.speed_m_s < _SLOW_M_S:
            self.lay_m = now.position_m
            if now.speed_m_s < REST_M_S and length(tcp_m - now.position_m) >= REACH_M:
                self.alone_m = now.position_m


@dataclass(frozen=True)
class Situation:
    """What a condition judges: the scene now, and the history of the goal's cube."""

    scene: TableScene
    goal: Goal
    data: mujoco.MjData
    now: CubeState
    history: CubeHistory


Condition = Callable[[Situation], bool]


@dataclass(frozen=True, kw_only=True)
class TableTask(Task):
    """A task on the table.

    Args:
        hold_s: Time for which the condition must hold.
        holds: Whether the condition holds now, of a cube; None is a bar's.
        bar: The bar that it is about, instead of cubes.
    """

    hold_s: float
    holds: Condition | None = None
    bar: Bar | None = None


def _reach(at: Situation) -> bool:
    lay = at.history.alone_m
    now = at.now
    if (
        lay is None
        or not now.supported
        or now.speed_m_s >= REST_M_S
        or length(now.position_m - lay) >= DISTURBED_M
    ):
        return False
    tcp = at.data.site_xpos[at.scene.only.tcp_site]
    return length(tcp - now.position_m) < REACH_M and length(tcp - lay) < REACH_M


def _pick(at: Situation) -> bool:
    taken = at.history.taken_m
    fingers = at.scene.only.finger_bodies
    if taken is None or not (
        at.history.held and at.now.gripped and set(at.now.force_n) <= set(fingers)
    ):
        return False
    return bool(at.now.position_m[2] - taken[2] >= LIFT_M)


def _place(at: Situation) -> bool:
    box = at.scene.bin
    released = at.history.released
    if released is None or at.history.taken_m is None or not _left_at_rest(at.now):
        return False
    brought = box.surrounds(released.position_m) and not box.surrounds(at.history.taken_m)
    return brought and released.speed_m_s < RELEASE_M_S and box.contains(at.now.position_m)


def _stack(at: Situation) -> bool:
    history = at.history
    onto = at.goal.onto
    cubes = at.scene.cubes
    released = history.released
    base_m = history.base_m
    taken_m = history.taken_m
    if onto is None or released is None or base_m is None or taken_m is None:
        return False
    base = cube_state(at.scene, at.data, onto)
    edge = (cubes[at.goal.cube].edge_m + cubes[onto].edge_m) / 2
    off, taken, let_go = (
        p - base.position_m for p in (at.now.position_m, taken_m, released.position_m)
    )
    level = length(off[:2]) < STACK_ASIDE_M and abs(off[2] - edge) < STACK_HEIGHT_M
    lay_there = length(taken[:2]) < edge and taken[2] > edge / 2
    return (
        level
        and at.scene.bodies[onto].id in at.now.force_n
        and length(let_go[:2]) < RELEASE_ASIDE_M
        and not lay_there
        and length(base.position_m - base_m) < DISTURBED_M
        and released.speed_m_s < RELEASE_M_S
        and _left_at_rest(at.now)
        and _left_at_rest(base)
    )


def _left_at_rest(cube: CubeState) -> bool:
    return cube.supported and cube.speed_m_s < REST_M_S and not cube.robot_touches


TASKS: Mapping[str, TableTask] = MappingProxyType(
    {
        task.name: task
        for task in (
            TableTask("pick", "pick up the red cube", hold_s=0.5, holds=_pick),
            TableTask("reach", "reach the red cube", hold_s=0.2, holds=_reach),
            TableTask("place", "place the red cube in the bin", hold_s=0.3, holds=_place),
            TableTask("stack", "stack the red cube on the blue cube", hold_s=0.5, holds=_stack),
            TableTask("lift_bar", TEMPLATES[Verb.LIFT], hold_s=1.0, bar=Bar()),
            TableTask("hand_over", TEMPLATES[Verb.HAND_OVER], hold_s=1.0, bar=LIGHT_BAR),
        )
    }
)
"""The tasks by name, a robot's default first."""


def get_task(name: str) -> TableTask:
    """Return the task of that name; UnknownNameError lists the tasks."""
    return TASKS[known_name(name, "task", TASKS)]


def bar_for(task: str | None, robot: RobotSpec) -> Bar | None:
    """Return the bar that a task of two arms is about; None is the scene's default.
    UnknownNameError: no such task.
    """
    bar = None if task is None else get_task(task).bar
    return bar if len(robot.limbs) > 1 else None


@dataclass
class _CubeMonitor:
    """Whether a condition of a cube holds now."""

    scene: TableScene
    goal: Goal
    holds: Condition
    history: CubeHistory = field(default_factory=CubeHistory)

    def update(self, data: mujoco.MjData) -> bool:
        """Add the present state; return whether the condition holds."""
        scene = self.scene
        goal = self.goal
        now = cube_state(scene, data, goal.cube)
        base_m = None if goal.onto is None else data.xpos[scene.bodies[goal.onto].id].copy()
        self.history.update(now, data.site_xpos[scene.only.tcp_site], base_m)
        return self.holds(Situation(scene, goal, data, now, self.history))


class TableJudge(Judge):
    """Judges one episode of a task; ``goal`` is the parsed instruction, with the cube to judge.

    Raises:
        ConfigError: The scene does not have what the task or the instruction is about.
    """

    def __init__(self, task: TableTask, scene: TableScene, goal: Goal):
        super().__init__(task.hold_s)
        of_task, of_scene = (bar and bar.verb for bar in (task.bar, scene.bar))
        if {of_task, of_scene, goal.verb if goal.cube == BAR else None} != {of_task}:
            has = contents(scene.bar)
            raise ConfigError(
                f"task {task.name!r}, the instruction's {goal.cube!r} and the scene of "
                f"{scene.robot.name!r}, which has {has}, do not go together; choose another task, "
                "instruction or robot, or build it for the task: "
                "Robot('dual_panda', task='hand_over')."
            )
        self.task = task
        self._scene = scene
        self._goal = goal
        self.restart()

    def restart(self) -> None:
        """Forget what happened so far."""
        scene = self._scene
        goal = self._goal
        condition = self.task.holds
        if goal.to is not None:
            self._monitor = HandOverMonitor(scene, goal.to)
        elif condition is None:
            self._monitor = BarMonitor(scene)
        else:
            self._monitor = _CubeMonitor(scene, goal, condition)

    def holds(self, data: mujoco.MjData) -> bool:
        """Add the present state; return whether the condition holds."""
        return self._monitor.update(data)
