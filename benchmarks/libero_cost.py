"""What an episode on LIBERO costs, against the bare environment: ``make libero`` first, then

    .venv-libero/bin/python benchmarks/libero_cost.py [--task 0] [--rounds 3]

Each round runs, one after the other, the same actions of the expert in (a) LIBERO's own environment
without cameras, (b) that plus one pair of pictures for each chunk of 16 rows, and (c) an
evaluation's episode of a policy that looks once a chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import closing
from typing import Any

import numpy as np

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from strands_cosmos3.worlds.libero.expert import LiberoExpert  # noqa: E402
from strands_cosmos3.worlds.libero.protocol import OPEN, LiberoConfig  # noqa: E402
from strands_cosmos3.worlds.libero.simulation import LiberoSimulation, privileged  # noqa: E402
from strands_cosmos3.worlds.libero.suites import load_init_states, load_tasks  # noqa: E402
from strands_cosmos3.worlds.libero.world import ACTION_KEYS  # noqa: E402

ROWS = 16
SUITE = "libero_object"


class Replay:
    """A policy that looks and answers the recorded actions, 16 at a time."""

    actions: np.ndarray = np.zeros((0, 7))

    def reset(self, seed: int | None = None) -> None:
        self._at = 0

    def get_actions_sync(
        self, observation: dict[str, Any], instruction: str
    ) -> list[dict[str, float]]:
        assert observation["image"].shape[2] == 3
        rows = Replay.actions[self._at : self._at + ROWS]
        self._at += ROWS
        return [dict(zip(ACTION_KEYS, map(float, row), strict=True)) for row in rows]


def record(task: Any) -> np.ndarray:
    """Return the actions [T, 7] of one of the expert's episodes."""
    expert, actions = LiberoExpert(), []
    with closing(LiberoSimulation(task, pictures=False)) as world:
        world.reset(0)
        while not world.time_is_up:
            actions.append(expert.act(privileged(world), task.instruction))
            if world.step(actions[-1]):
                break
    return np.array(actions)


def bare(env: Any, task: Any, actions: np.ndarray) -> float:
    """CPU seconds of an episode by hand: reset, initial state, waiting steps, actions."""
    started = time.process_time()
    env.seed(0)
    env.reset()
    env.set_init_state(load_init_states(SUITE, task.number)[0])
    for action in [*[[0, 0, 0, 0, 0, 0, OPEN]] * LiberoConfig().wait_steps, *actions]:
        env.step(action)
    return time.process_time() - started


def pictures(world: LiberoSimulation, pairs: int) -> float:
    """CPU seconds of pairs of pictures."""
    started = time.process_time()
    for _ in range(pairs):
        world.rendered()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    from libero.libero.envs.env_wrapper import ControlEnv

    from strands_cosmos3.evaluation.runner import AssignmentRunner
    from strands_cosmos3.evaluation.settings import make_settings

    task = load_tasks(SUITE)[args.task]
    Replay.actions = record(task)
    pairs = -(-len(Replay.actions) // ROWS)
    options = {
        "backend": "python",
        "policy": f"{__name__}:Replay",
        "tasks": str(args.task),
        "seeds": 1,
    }
    settings = make_settings({"world": f"libero/{SUITE}", **options})
    runner, (assignment,) = AssignmentRunner(settings), settings.plan()
    env = ControlEnv(
        bddl_file_name=str(task.problem), has_offscreen_renderer=False, use_camera_obs=False
    )
    runner.run(assignment)  # makes the world, and warms both up
    bare(env, task, Replay.actions)
    rounds = []
    with closing(runner), closing(env):
        for _ in range(args.rounds):
            bare_s = bare(env, task, Replay.actions)
            pairs_s = pictures(runner.session._ready(True), pairs)
            episode = runner.run(assignment)
            rounds.append(
                {"bare_s": bare_s, "pairs_s": pairs_s, "episode_s": episode["times"]["cpu_s"]}
            )
            rounds[-1]["ratio"] = rounds[-1]["episode_s"] / (bare_s + pairs_s)
            assert episode["success"], "the same actions, the same result"
    middle = float(np.median([one["ratio"] for one in rounds]))
    print(
        json.dumps(
            {
                "steps": len(Replay.actions),
                "pairs": pairs,
                "rounds": rounds,
                "median_ratio": middle,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
