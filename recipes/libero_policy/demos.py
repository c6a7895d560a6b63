"""``python -m recipes.libero_policy.demos``: demonstrations of the scripted expert on LIBERO as a
LeRobot v3 dataset, with labels as NVIDIA's checkpoints emit them.

Frames are 20 a second: both views as policies are trained on them, and the row [10] of the action
that follows, in the controller's units and not normalised. There is no state, because the
``libero`` domain has none. Pictures cost ten times the step, so only every :data:`LOOK_EVERY`-th
frame has its own; the others repeat it. Scenes are drawn from the suite's problem files and never
its official initial states, on which policies are tested; and each layout is asked for several of
its objects in turn from the same start, so that only the sentence tells which. They begin where a
random motion ends, and noise is added to what is executed but not to what is recorded (DART, arXiv
1703.09327), so that the expert is seen to correct itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from recipes.pipeline import record_main
from strands_cosmos3.actions.controller_rows import encode_actions
from strands_cosmos3.commands.demos import Recording
from strands_cosmos3.datasets import ACTION, DatasetWriter
from strands_cosmos3.datasets.spec import DONE, SUCCESS, VIDEO, DatasetSpec, Feature, camera_key
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.worlds.libero.expert import LiberoExpert
from strands_cosmos3.worlds.libero.protocol import CONTROL_HZ, OPEN, LiberoConfig
from strands_cosmos3.worlds.libero.simulation import (
    CAMERAS,
    LiberoSimulation,
    as_trained,
    privileged,
)
from strands_cosmos3.worlds.libero.suites import LiberoTask, get_suite, load_tasks

LOOK_EVERY = 6
"""Frames between pictures; training must begin its windows at multiples of it, which the dataset
states.
"""
TARGETS_A_LAYOUT = 3
"""Consecutive episodes that share a layout and differ in what is asked, the task's own object
first.
"""
_LAYOUTS_A_SCENE = 2  # consecutive ones, because a scene takes seconds to load
_WANDER_STEPS = 20  # at most, before the first frame
# deviation of the translation's noise, in the controller's units, and its decay a step
_NOISE = 0.25
_NOISE_KEPT = 0.8


@dataclass(frozen=True)
class LiberoRecording(Recording):
    """Record demonstrations of the scripted expert on LIBERO (docs/libero.md)."""

    suite: str = "libero_object"
    """libero_object or a variant of it, such as libero_object_swap."""

    def check(self) -> None:
        """Raise ConfigError for a suite that the expert cannot solve."""
        demo_of(self.suite, self.seed, 0)

    def settings(self) -> dict[str, Any]:
        """Return the options that determine an episode."""
        return {"seed": self.seed, "suite": self.suite}

    def record(self, root: Path, episodes: range) -> None:
        """Record episodes as a new dataset."""
        record_libero(root, self.suite, self.seed, episodes)


def libero_spec(config: LiberoConfig) -> DatasetSpec:
    """Return the schema: two cameras, rows, ``next.done`` and ``next.success``."""
    space = get_embodiment("libero").action_space()
    meaning = {
        "embodiment": "libero",
        "action_space": space.name,
        "normalized": False,
        "unit": "controller",
        "pictures_every": LOOK_EVERY,
    }
    px = config.picture_px
    cameras = {camera_key(view): Feature(VIDEO, (px, px, 3)) for view in CAMERAS}
    columns = {ACTION: Feature("float32", (space.width,), space.columns, meaning)}
    return DatasetSpec(
        CONTROL_HZ,
        columns | dict.fromkeys((DONE, SUCCESS), Feature("bool", (1,))) | cameras,
        "panda",
    )


def demo_of(suite: str, seed: int, episode: int) -> tuple[LiberoTask, LiberoTask, int]:
    """Return an episode's scene, what is asked in it (a task of the same suite), and the layout's
    seed.

    The first episode of a layout is the scene's own task.

    Raises:
        ConfigError: The expert cannot solve the suite.
    """
    if not get_suite(suite).name.startswith("libero_object"):
        raise ConfigError(
            f"the scripted expert solves libero_object and its variants, not {suite}."
        )
    tasks = load_tasks(suite)
    layout, turn = divmod(episode, TARGETS_A_LAYOUT)
    scene = tasks[layout // _LAYOUTS_A_SCENE % len(tasks)]
    rng = np.random.default_rng([seed, layout])
    others = [task for task in tasks if task is not scene and scene.can_judge(task.goal)]
    asked = [scene, *(others[i] for i in rng.permutation(len(others)))]
    return scene, asked[turn % len(asked)], int(rng.integers(2**31))


def record_libero(
    root: Path, suite: str, seed: int, episodes: Iterable[int], config: LiberoConfig | None = None
) -> None:
    """Record episodes as a new dataset; those in which the expert fails are left out. Errors: as
    :func:`demo_of`.
    """
    config = config or LiberoConfig()
    demos = ((episode, *demo_of(suite, seed, episode)) for episode in episodes)
    with DatasetWriter(root, libero_spec(config)) as writer:
        for scene, of_scene in groupby(demos, key=itemgetter(1)):
            with closing(LiberoSimulation(scene, config)) as world:
                # loading the scene anew takes seconds and changes nothing
                world.robosuite.hard_reset = False
                for episode, _, asked, layout in of_scene:
                    note = {"seed": seed, "episode": episode, "scene": scene.number}
                    _record(writer, world, asked, layout, note)


def _record(
    writer: DatasetWriter,
    world: LiberoSimulation,
    asked: LiberoTask,
    layout: int,
    note: dict[str, int],
) -> None:
    expert = LiberoExpert()
    rng = np.random.default_rng([note["seed"], note["episode"]])
    world.reset(None, layout)
    # of the layout's, or the first picture would tell what is asked
    _wander(world, np.random.default_rng(layout))
    noise = np.zeros(3)
    with writer.episode(asked.instruction) as episode:
        for step in range(world.horizon):
            if step % LOOK_EVERY == 0:
                views = {
                    camera_key(view): as_trained(picture) for view, picture in world.views().items()
                }
            action = np.clip(expert.act(privileged(world), asked.instruction), -1, 1)
            episode.add(
                {ACTION: encode_actions(action[None])[0], DONE: False, SUCCESS: False, **views}
            )
            noise = _NOISE_KEPT * noise + _NOISE * np.sqrt(
                1 - _NOISE_KEPT**2
            ) * rng.standard_normal(3)
            world.step(action + [*noise, 0, 0, 0, 0], look=step % LOOK_EVERY == LOOK_EVERY - 1)
            if world.fulfilled(asked.goal):
                episode.replace_last(DONE, True)
                episode.replace_last(SUCCESS, True)
                episode.save({**note, "asked": asked.number})
                return
        episode.discard()


def _wander(world: LiberoSimulation, rng: np.random.Generator) -> None:
    """Move in a random direction for some steps, hardly down, and look at the end."""
    direction = rng.uniform((-1, -1, -0.3), 1)
    steps = int(rng.integers(1, _WANDER_STEPS + 1))
    for step in range(steps):
        world.step([*direction, 0, 0, 0, OPEN], look=step == steps - 1)


def main() -> int:
    """Record demonstrations by the command line; return an exit status."""
    return record_main(LiberoRecording, None)


if __name__ == "__main__":
    sys.exit(main())
