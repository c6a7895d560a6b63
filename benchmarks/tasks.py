"""Success rate of the scripted expert over random scenes and colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import report
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.types import Rollout
from strands_cosmos3.worlds.table.grammar import COLOURS, TEMPLATES, Verb


def run(
    episodes: int = 100,
    seed: int = 0,
    plant_errors: bool = False,
    robot: str = "panda",
    tasks: Sequence[str] = tuple(map(str, TEMPLATES)),
) -> dict[str, Any]:
    """Count a robot's successes by task, with all plant errors if asked for. The colours change
    with the seed.

    Args:
        episodes: Episodes of each task.
        seed: First seed.
        plant_errors: Whether the arm has heavier links, a payload, friction, delay and noise that
            its controller does not know of.
        robot: A name, or the .toml file of a robot with one arm.
        tasks: Tasks to count.
    """
    from strands_cosmos3.robots.catalogue import get_robot
    from strands_cosmos3.sim.plant import ALL_ERRORS
    from strands_cosmos3.worlds.arms import Robot

    if len(get_robot(robot).limbs) > 1:
        raise ConfigError(
            f"the tasks of one arm are counted, and robot {robot!r} has several; use "
            "evaluate --backend scripted --robot."
        )
    simulated = Robot(robot, plant=ALL_ERRORS if plant_errors else None)
    out: dict[str, Any] = {
        "backend": "scripted",
        "robot": robot,
        "episodes": episodes,
        "seed": seed,
        "plant_errors": plant_errors,
    }
    for task in tasks:
        template, rollouts = TEMPLATES[Verb(task)], list[Rollout]()
        for i in range(seed, seed + episodes):
            report.progress(f"tasks: {task}, seed {i}")
            instruction = template.format(a=COLOURS[i % 3], b=COLOURS[(i + 1) % 3])
            config = {"backend": "scripted"}
            rollouts.append(
                simulated.run_policy(
                    instruction=instruction, policy_config=config, task=task, seed=i, duration=20.0
                )
            )
        out[task] = {
            "successes": sum(bool(rollout.success) for rollout in rollouts),
            "of": episodes,
            "failed_seeds": [seed + i for i, rollout in enumerate(rollouts) if not rollout.success],
            "seconds_mean": float(np.mean([rollout.duration_s for rollout in rollouts])),
            "tracking_mean_mm": float(np.mean([rollout.tracking.mean_mm for rollout in rollouts])),
            "tracking_max_mm": float(max(rollout.tracking.max_mm for rollout in rollouts)),
        }
    return out


if __name__ == "__main__":
    report.run(run)
