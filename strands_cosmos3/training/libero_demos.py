"""Demonstrations of the scripted expert on LIBERO as a LeRobot v3 dataset, with labels as NVIDIA's checkpoints emit them.

Frames are 20 a second: both views as policies are trained on them, and the row [10] of the action that follows, in the
controller's units and not normalised. There is no state, because the ``libero`` domain has none. Scenes are drawn from the
suite's problem files and never its official initial states, on which policies are tested; and each layout is asked for several
of its objects in turn, so that only the sentence tells which.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from strands_cosmos3.actions.controller_rows import encode_actions
from strands_cosmos3.datasets import ACTION, DatasetWriter
from strands_cosmos3.datasets.spec import DONE, SUCCESS, VIDEO, DatasetSpec, Feature, camera_key
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.environments.libero_config import CONTROL_HZ, LiberoConfig
from strands_cosmos3.environments.libero_expert import LiberoExpert
from strands_cosmos3.environments.libero_objects import privileged
from strands_cosmos3.environments.libero_views import CAMERAS, as_trained
from strands_cosmos3.environments.libero_world import LiberoWorld
from strands_cosmos3.environments.suites import LiberoTask, get_suite, load_tasks
from strands_cosmos3.errors import ConfigError

TARGETS_A_LAYOUT = 3
"""Consecutive episodes that share a layout and differ in what is asked."""


def libero_spec(config: LiberoConfig) -> DatasetSpec:
    """Return the schema: two cameras, rows, ``next.done`` and ``next.success``."""
    space = get_embodiment("libero").action_space()
    meaning = {"embodiment": "libero", "action_space": space.name, "normalized": False, "unit": "controller"}
    px = config.picture_px
    cameras = {camera_key(view): Feature(VIDEO, (px, px, 3)) for view in CAMERAS}
    columns = {ACTION: Feature("float32", (space.width,), space.columns, meaning)}
    return DatasetSpec(CONTROL_HZ, columns | dict.fromkeys((DONE, SUCCESS), Feature("bool", (1,))) | cameras, "panda")


def demo_of(suite: str, seed: int, episode: int) -> tuple[LiberoTask, LiberoTask, int]:
    """Return an episode's scene, what is asked in it (a task of the same suite), and the layout's seed.

    Raises:
        ConfigError: The expert cannot solve the suite.
    """
    if not get_suite(suite).name.startswith("libero_object"):
        raise ConfigError(f"the scripted expert solves libero_object and its variants, not {suite}.")
    tasks = load_tasks(suite)
    layout, turn = divmod(episode, TARGETS_A_LAYOUT)
    scene = tasks[layout % len(tasks)]
    rng = np.random.default_rng([seed, layout])
    asked = [task for task in tasks if scene.can_judge(task.goal)]
    order = rng.permutation(len(asked))
    return scene, asked[order[turn % len(asked)]], int(rng.integers(2**31))


def record_libero(root: Path, suite: str, seed: int, episodes: Iterable[int], config: LiberoConfig | None = None) -> None:
    """Record episodes as a new dataset; those in which the expert fails are left out. Errors: as :func:`demo_of`."""
    config, world = config or LiberoConfig(), None
    with DatasetWriter(root, libero_spec(config)) as writer:
        for episode in episodes:
            scene, asked, layout = demo_of(suite, seed, episode)
            if world is None or world.task != scene:
                if world is not None:
                    world.close()
                world = LiberoWorld(scene, config)
            _record(writer, world, asked, layout, {"seed": seed, "episode": episode, "scene": scene.number})
    if world is not None:
        world.close()


def _record(writer: DatasetWriter, world: LiberoWorld, asked: LiberoTask, layout: int, note: dict[str, int]) -> None:
    expert = LiberoExpert()
    world.reset(None, layout)
    with writer.episode(asked.instruction) as episode:
        while not world.time_is_up:
            action = np.clip(expert.act(privileged(world), asked.instruction), -1, 1)
            views = {camera_key(view): as_trained(picture) for view, picture in world.views().items()}
            episode.add({ACTION: encode_actions(action[None])[0], DONE: False, SUCCESS: False, **views})
            world.step(action, look=True)
            if world.fulfilled(asked.goal):
                episode.replace_last(DONE, True)
                episode.replace_last(SUCCESS, True)
                episode.save({**note, "asked": asked.number})
                return
        episode.discard()
