"""Our table as a world: its tasks, its sentences, what can be varied, and its scenes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strands_cosmos3.actions.rotations import se3, so3_exp
from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ConfigError, InstructionError
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.sim.scene_builder import camera_quat, view_names_of
from strands_cosmos3.worlds.arms import ArmWorld, Robot
from strands_cosmos3.worlds.table.appearance import LARGEST_LIGHT, TABLES
from strands_cosmos3.worlds.table.grammar import (
    BAR_VERBS,
    COLOURS,
    PARAPHRASES,
    TEMPLATES,
    Verb,
    parse_instruction,
    sentences,
    worded,
)
from strands_cosmos3.worlds.table.hands import direction
from strands_cosmos3.worlds.table.potential import POTENTIAL_VERBS, cube_potential
from strands_cosmos3.worlds.table.scene import (
    Cube,
    TableScene,
    bring_close,
    contents,
    cubes_of,
    nominal,
)
from strands_cosmos3.worlds.table.tasks import (
    TASKS,
    TableJudge,
    TableTask,
    bar_for,
    get_task,
)
from strands_cosmos3.worlds.world import NOT_VARIED, Rewording, Start, Variation, varied

if TYPE_CHECKING:
    from strands_cosmos3.backends.base import Backend
    from strands_cosmos3.language import Language

_WRIST = "wrist"
_OFFSET_STREAM = 17  # of the seed, for the direction of the wrist camera's displacement
_MOUNT_STREAM = 18  # of the mount's seed
_MOUNT_M = (0.03, 0.04)
_MOUNT_DEG = (2.0, 5.0)
"""Ranges of a mount's displacement and rotation."""


@dataclass(frozen=True)
class TableVariation(Variation):
    """What can be varied on the table.

    Args:
        light, table: Factor on all lights, and one of
            :data:`~strands_cosmos3.worlds.table.appearance.TABLES`.
        camera_cm: Displacement of the wrist camera in a random direction, another one in each
            episode.
        mount: Seed of the wrist camera's mount: one displacement by 3 to 4 cm and rotation by 2 to
            5 degrees for all episodes.
        cubes_mm: Edge of the cubes, 40 by default.
        close: Whether another cube stands 6.5 cm from the goal's, centre to centre.
        crowded: Whether there are two more cubes, of other colours.
    """

    light: float | None = varied(0.05, LARGEST_LIGHT)
    table: str | None = field(default=None, metadata={"names": tuple(TABLES)})
    camera_cm: float | None = varied(0, 20, "camera")
    mount: int | None = varied(0, 2**31 - 1, whole=True)
    cubes_mm: float | None = varied(20, 60, "cubes")
    close: bool = False
    crowded: bool = False


class TableWorld(ArmWorld):
    """Cubes and a bin before one arm, or a bar before two."""

    name = "table"
    variation = TableVariation
    rewordings = ("swapped", "shuffled", "paraphrased")
    breakdown = "colour of the goal's cube"

    def tasks(self, robot: str | None = None) -> Mapping[str, TableTask]:
        """Return the tasks of a robot: with cubes for one arm, with a bar for two."""
        of_bar = len(get_robot(robot or self.robots[0]).limbs) > 1
        return {name: task for name, task in TASKS.items() if (task.bar is not None) == of_bar}

    def task(self, name: str, robot: str | None = None) -> TableTask:
        """Return a task of any robot; the judge refuses one that does not fit the scene."""
        return get_task(name)

    def instruction(self, task: str, index: int = 0, template: str = "") -> str:
        """Return the instruction of an episode. The colours, and for stacking all pairs, rotate
        with the index; a bar has none. ``{a}`` and ``{b}`` stand for colours in a template.
        """
        if get_task(task).bar is not None:
            return template or get_task(task).instruction
        a = index % 3
        b = (a + 1 + (index // 3) % 2) % 3
        try:
            return (template or TEMPLATES[Verb(task)]).format(a=COLOURS[a], b=COLOURS[b])
        except (KeyError, IndexError, ValueError) as error:
            raise InstructionError(
                f"instruction {template!r} cannot be filled in ({error}); write e.g. 'pick up the "
                "{a} cube', where {a} and {b} are colours."
            ) from None

    def reworded(
        self, task: str, instruction: str, form: Rewording, rng: np.random.Generator
    ) -> str:
        """Return an instruction that names another colour, or is worded otherwise."""
        goal = parse_instruction(instruction)
        if goal.verb in BAR_VERBS:
            raise ConfigError(f"there is one bar, and no {form} form of {instruction!r}.")
        if form == "paraphrased":
            return worded(goal, str(rng.choice(PARAPHRASES[goal.verb])))
        free = [colour for colour in COLOURS if f"cube_{colour}" != goal.onto]
        if form == "swapped":
            free.remove(goal.cube.removeprefix("cube_"))
        return worded(replace(goal, cube=f"cube_{rng.choice(free)}"))

    def same_goal(self, task: str, a: str, b: str) -> bool:
        """Whether two instructions have the same goal; one without a goal asks for no other."""
        try:
            return parse_instruction(a) == parse_instruction(b)
        except InstructionError:
            return True

    def check_instruction(self, task: str, instruction: str) -> None:
        """Raise InstructionError for an instruction that names no verb, or nothing to act on."""
        of_task = get_task(task)
        if (of_task.bar is None) == (parse_instruction(instruction).verb in BAR_VERBS):
            raise InstructionError(
                f"instruction {instruction!r:.200} does not ask for task {task!r}; "
                f"try {of_task.instruction!r}."
            )

    def task_of(self, instruction: str, robot: str | None = None) -> str:
        """Return the task whose verb an instruction names."""
        verb = parse_instruction(instruction).verb
        name = "lift_bar" if verb is Verb.LIFT else str(verb)
        tasks = self.tasks(robot)
        if name not in tasks:
            first = next(iter(tasks.values()))
            has = contents(first.bar)
            raise InstructionError(f"the scene has {has}; try {first.instruction!r}.")
        return name

    def suggestions(
        self, robot: str | None = None, language: Language | None = None
    ) -> Sequence[str]:
        """Return one sentence for each goal."""
        return sentences(language) if "pick" in self.tasks(robot) else super().suggestions(robot)

    def category(self, task: str, instruction: str) -> str | None:
        """Return the colour of the cube that is to be moved or reached; None for a bar."""
        if get_task(task).bar is not None:
            return None
        return parse_instruction(instruction).cube.removeprefix("cube_")

    def check_variation(self, variation: Variation, robot: str | None = None) -> None:
        """Raise ConfigError for a variation that changes nothing of what a policy sees or does."""
        spec = get_robot(robot or self.robots[0])
        change = _of_table(variation)
        views = view_names_of(spec)
        if (change.camera_cm, change.mount) != (None, None) and _WRIST not in views:
            raise ConfigError(
                f"camera and mount move the wrist camera, but the pictures of {spec.name!r} are "
                f"{', '.join(views)}; leave it out, or use light=F or table=NAME."
            )
        if len(spec.limbs) > 1 and (change.cubes_mm is not None or change.close or change.crowded):
            raise ConfigError(
                f"cubes, close and crowded change cubes, and {spec.name!r} has a bar; leave it out."
            )

    def expert(self, robot: str | None = None) -> Backend:
        """Return the scripted expert."""
        from strands_cosmos3.worlds.table.expert import ScriptedBackend

        return ScriptedBackend()

    def scene_key(self, robot: RobotSpec, task: str | None, variation: Variation) -> Hashable:
        """Return the variation and the bar; :meth:`arrange` applies ``camera_cm``, ``mount`` and
        ``close`` within one scene.
        """
        within = replace(_of_table(variation), camera_cm=None, mount=None, close=False)
        return within, bar_for(task, robot)

    def scene(
        self,
        robot: RobotSpec,
        task: str | None = None,
        variation: Variation = NOT_VARIED,
        arm: str | Path | None = None,
    ) -> TableScene:
        """Return a new scene."""
        change = _of_table(variation)
        look = nominal(robot)
        look = replace(look, table=change.table or look.table, light=change.light or look.light)
        cubes = None
        if len(robot.limbs) == 1:
            cubes = cubes_of((change.cubes_mm or 1e3 * Cube.edge_m) / 1e3, change.crowded)
        return TableScene(cubes, arm, look, robot, bar_for(task, robot))

    def judge(self, task: str, scene: Scene, instruction: str) -> TableJudge:
        """Return the judge of an episode."""
        assert isinstance(scene, TableScene)
        return TableJudge(get_task(task), scene, parse_instruction(instruction))

    def potential(self, robot: Robot, start: Start) -> float | None:
        """Return how far an episode has come; None with a bar, or a verb that has no potential."""
        scene = robot.scene
        task = get_task(start.task or "pick")
        goal = parse_instruction(start.instruction or task.instruction)
        if goal.verb not in POTENTIAL_VERBS:
            return None
        assert isinstance(scene, TableScene)
        return cube_potential(scene, robot.data, goal, self.arrange(robot, start))

    def arrange(self, robot: Robot, start: Start) -> Layout:
        """Displace the wrist camera, and bring a cube close to the goal's."""
        change = _of_table(start.variation)
        scene = robot.scene
        rng = np.random.default_rng([start.seed, _OFFSET_STREAM])
        offset_m = direction(rng) * (change.camera_cm or 0.0) / 100
        mount = _mount(change.mount)
        # where it is when nothing displaces it
        wrist = scene.cameras().get(_WRIST)
        if wrist is not None:
            back = mount[:3, :3] @ np.subtract(wrist.position_m, wrist.target_m)
            up = mount[:3, :3] @ np.array(wrist.up)
            for plant in (scene.model, robot.model):
                camera = plant.cam(_WRIST).id
                plant.cam_pos[camera] = np.array(wrist.position_m) + offset_m + mount[:3, 3]
                plant.cam_quat[camera] = camera_quat(back, up)
        layout = scene.sample_layout(np.random.default_rng(start.seed))
        if not change.close:
            return layout
        goal = parse_instruction(start.instruction or get_task(start.task or "pick").instruction)
        return bring_close(layout, goal.cube, rng, scene.robot.workspace)


def _mount(seed: int | None) -> F64:
    """Return the displacement [4, 4] of a mount's camera in the hand's axes; None is none."""
    if seed is None:
        return np.eye(4)
    rng = np.random.default_rng([seed, _MOUNT_STREAM])
    shift = direction(rng)
    turn = direction(rng)
    shift[0] = abs(shift[0])  # away from the hand, which would hide the fingers
    return se3(so3_exp(turn * np.deg2rad(rng.uniform(*_MOUNT_DEG))), shift * rng.uniform(*_MOUNT_M))


def _of_table(variation: Variation) -> TableVariation:
    return variation if isinstance(variation, TableVariation) else TableVariation()
