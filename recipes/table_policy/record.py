"""``python -m recipes.table_policy.record``: demonstrations with the labels of the bundled policy's
recipe.

Beside the demonstrations of ``strands-cosmos3 demos``, every labelled picture has another one with
other looks and places of cubes, and each of both has the expert's rows and, if asked for, those
after an action prefix.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mujoco
import numpy as np
from numpy.typing import NDArray

from recipes.pipeline import record_main
from strands_cosmos3.checks import F64
from strands_cosmos3.commands.demos import Demos
from strands_cosmos3.datasets.spec import EXPERT
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.options import section
from strands_cosmos3.robots.spec import Workspace
from strands_cosmos3.types import Request
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.demo_config import DemoConfig
from strands_cosmos3.worlds.table.demonstrations import (
    DemoCollector,
    EpisodeRecord,
    EpisodeRecorder,
)
from strands_cosmos3.worlds.table.randomized_scene import RandomizedScene

CONTINUED, PREFIX_ROWS = "expert.continued", "expert.prefix_rows"
LOOKS_EXPERT, LOOKS_CONTINUED = "expert.looks_rows", "expert.looks_continued"
_PREFIX_DRIFT = (0.0, 0.2, 0.5)  # of a prefix's rows, in the units below
# of a row: about half of what DROID's fastest rows move and turn
_DRIFT_M, _DRIFT_RAD = 0.007, 0.012
AT_HAND_M = 0.06
"""A cube whose centre is closer to the hand's TCP stays there."""
_LOW_M, _CLEAR_M = 0.13, 0.09  # below this height of the TCP no other cube is put closer to it
_AROUND_M = 0.05  # deviation from the hand's place, of one cube of some layouts
_AROUND = 0.4  # fraction of them
_DRAWS = 100


@dataclass(frozen=True)
class LabelConfig(DemoConfig):
    """How to record demonstrations with the recipe's labels."""

    looks_randomization: float = 1.0
    """The highest scale for the second picture of each labelled frame."""
    prefix_rows: int = 0
    """Longest action prefix that has labels of its own (docs/bundled_policy.md); 0: none."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """The composite, and the latest labelled one with other looks."""
        return ("composite", "composite_looks")


@dataclass
class LabelledRecord(EpisodeRecord):
    """An episode with the recipe's labels."""

    # [L, H, W, 3] pictures of labelled ticks with another table, light, cameras and places of cubes
    looks: NDArray[np.uint8]
    # [L, goals, rows, 10] as labels, after an action prefix, or the same
    continued: NDArray[np.float32]
    prefix_rows: NDArray[np.int8]  # [L, goals] number of rows of that prefix; 0: none
    # as labels, where the pictures have other looks, and the cubes other places
    looks_labels: NDArray[np.float32]
    looks_continued: NDArray[np.float32]  # as continued there

    def pictures(self) -> tuple[NDArray[np.uint8], ...]:
        """Return [T, H, W, 3] of each camera of the dataset."""
        ticks = np.arange(len(self.frames))
        latest = np.searchsorted(self.label_ticks, ticks, side="right") - 1
        return self.frames, self.looks[np.maximum(latest, 0)]

    def label_columns(self) -> dict[str, NDArray[Any]]:
        """Return the dataset's columns [L, numbers] of the labelled ticks."""
        columns: dict[str, NDArray[Any]] = {EXPERT: self.labels, LOOKS_EXPERT: self.looks_labels}
        if self.prefix_rows.any():
            columns |= {CONTINUED: self.continued, PREFIX_ROWS: self.prefix_rows.astype(np.int64)}
            columns[LOOKS_CONTINUED] = self.looks_continued
        return {name: values.reshape(len(values), -1) for name, values in columns.items()}


class LabelRecorder(EpisodeRecorder):
    """Record one episode with the recipe's labels."""

    record_type = LabelledRecord

    def _label(self, robot: Robot, request: Request) -> dict[str, NDArray[Any]]:
        collector, rng, config = self._collector, self._rng, self._collector.config
        assert isinstance(config, LabelConfig)
        longest = config.prefix_rows
        length = rng.integers(min(longest, 1), longest, endpoint=True, size=len(config.goals))
        labels, continued = self._answers(request, length)
        present = self._scene.looks()
        self._scene.randomize(rng, rng.uniform(0, config.looks_randomization))
        moved = other_layout(self._scene, rng, collector.separation_m(rng))
        looks = self._picture(robot, moved)
        self._scene.restore(present)
        cubes = {name: robot.scene.T_world_body(moved, name) for name in robot.scene.bodies}
        elsewhere = replace(request, privileged={**(request.privileged or {}), **cubes})
        looks_labels, looks_continued = self._answers(elsewhere, length)
        return {
            "looks": looks,
            "labels": labels,
            "continued": continued,
            "prefix_rows": length.astype(np.int8),
            "looks_labels": looks_labels,
            "looks_continued": looks_continued,
        }

    def _answers(
        self, request: Request, length: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the expert's rows for each goal [goals, rows, width], and after prefixes of
        some lengths [goals], if any.
        """
        goals = self._collector.config.goals
        rows = np.stack([self.answer(request, goal) for goal in goals]).astype(np.float32)
        if not length.any():
            return rows, rows
        after = [
            self.continuation(request, goal, int(n)) for goal, n in zip(goals, length, strict=True)
        ]
        return rows, np.stack(after).astype(np.float32)

    def answer(self, request: Request, goal: int) -> F64:
        """Return the undisturbed expert's rows [rows, width] for a goal.

        One picture does not show the arm's speed, nor, from above, the yaw of a cube. The expert
        therefore answers as if the arm had the speed that it would reach, and takes cubes without
        turning to them.
        """
        expert = self._collector.expert
        asked = expert.asked(request, goal)
        return expert.expert.plan(asked, starts_cruising=True, askew=True).action

    def continuation(self, request: Request, goal: int, rows: int) -> F64:
        """Return the expert's rows [rows, width] from the measured speed, which drift at first; a
        prefix shows both.

        A prefix that led straight to the goal would give it away: the policy would go on with it
        and forget the picture.
        """
        expert, rng = self._collector.expert, self._rng
        size = rng.choice(_PREFIX_DRIFT)
        drift = np.concatenate(
            [rng.normal(0, size * _DRIFT_M, 3), rng.normal(0, size * _DRIFT_RAD, 3)]
        )
        ramp = np.minimum(np.arange(1, rows + 1) / 3, 1.0)[:, None]
        asked = expert.asked(request, goal)
        return expert.expert.plan(asked, drift=ramp * drift, askew=True).action


class LabelCollector(DemoCollector):
    """Record episodes with the recipe's labels."""

    recorder = LabelRecorder


def other_layout(
    scene: RandomizedScene, rng: np.random.Generator, separation_m: float
) -> mujoco.MjData:
    """Return a copy of the simulation's state with the cubes elsewhere, apart from those at the
    hand.

    In some layouts a cube is around the hand.
    """
    table, data = scene.robot.scene, scene.robot.data
    hand = np.array(data.site_xpos[table.only.tcp_site])
    here = data.xpos[[body.id for body in table.bodies.values()]]
    kept = np.linalg.norm(here - hand, axis=1) < AT_HAND_M
    moved = copy.copy(data)
    for _ in range(_DRAWS):
        layout = table.sample_layout(rng, separation_m)
        xy = np.where(kept[:, None], here[:, :2], layout.xy_m)
        if rng.random() < _AROUND:
            cube = int(rng.integers(len(xy)))
            xy[cube] = here[cube, :2] if kept[cube] else hand[:2] + rng.normal(0, _AROUND_M, 2)
        if _is_free(table.robot.workspace, xy, kept, hand, separation_m):
            for name, at, yaw, stays in zip(layout.names, xy, layout.yaw_rad, kept, strict=True):
                if not stays:
                    table.lay(moved, name, at, yaw)
            break
    mujoco.mj_forward(table.model, moved)
    return moved


def _is_free(
    workspace: Workspace, xy_m: F64, kept: NDArray[np.bool_], hand_m: F64, separation_m: float
) -> bool:
    free = xy_m[~kept]
    low, high = np.array([workspace.x_m, workspace.y_m]).T
    apart = np.linalg.norm(xy_m[:, None] - xy_m[None], axis=2) + 10 * np.eye(len(xy_m))
    apart[np.ix_(kept, kept)] = 10
    clear = (np.linalg.norm(free - hand_m[:2], axis=1) > _CLEAR_M) | (hand_m[2] > _LOW_M)
    inside = (free >= low) & (free <= high)
    return bool((apart >= separation_m).all() and inside.all() and clear.all())


@dataclass(frozen=True)
class TableRecording(Demos):
    """Record demonstrations with the labels of the bundled policy's recipe."""

    table: LabelConfig = section(LabelConfig)

    LARGEST: ClassVar[Mapping[str, int]] = {
        **Demos.LARGEST,
        "looks_randomization": 10,
        "prefix_rows": 15,
    }  # of 16 rows

    def check(self) -> None:
        """Raise ConfigError for values that the recipe does not take."""
        super().check()
        if self.table.robot != "panda" or self.table.tasks != DemoConfig.tasks:
            raise ConfigError("the recipe has a Panda and all tasks; omit --robot and --tasks.")

    def collector(self) -> LabelCollector:
        """Return what records episodes with these labels."""
        return LabelCollector(self.table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record demonstrations by the command line; return an exit status."""
    return record_main(TableRecording, arguments)


if __name__ == "__main__":
    sys.exit(main())
