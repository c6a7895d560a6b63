"""Real-time factor of an episode, with and without pictures."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

import report
from strands_cosmos3.robots.panda import HOME_Q


def run(episodes: int = 5, seed: int = 0) -> dict[str, Any]:
    """Measure the real-time factor of whole episodes: loop, planning, physics, metrics, and
    rendering where named.

    Args:
        episodes: Episodes of each kind.
        seed: First seed.
    """
    from strands_cosmos3.worlds.arms import Robot

    robot = Robot("panda")
    report.progress("sim: bare physics")
    bare = _bare(robot)
    report.progress("sim: no pictures")
    factor = _factor(robot, episodes, seed, None, "views")
    with tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.mp4"
        report.progress("sim: three 320x180 cameras and mp4")
        with_cameras = _factor(robot, episodes, seed, film, "views")
        report.progress("sim: full film")
        with_film = _factor(robot, 1, seed, film, "full")
    return {
        "task": "place",
        "episodes": episodes,
        "seed": seed,
        "physics_hz": 600,
        "control_hz": 50,
        "bare_mj_step_realtime_factor": bare,
        "no_pictures_realtime_factor": factor,
        "share_of_bare_physics": factor / bare,
        "three_cameras_and_mp4_realtime_factor": with_cameras,
        "full_film_realtime_factor": with_film,
    }


def _factor(robot: Any, episodes: int, seed: int, film: Path | None, layout: str) -> float:
    rollouts = [
        robot.run_policy(
            task="place",
            policy_config={"backend": "scripted"},
            seed=seed + i,
            duration=20.0,
            video=film,
            film_layout=layout,
        )
        for i in range(episodes + 1)
    ][1:]  # the first is a warm-up
    wall_s = sum(r.duration_s / r.realtime_factor for r in rollouts)
    return sum(r.duration_s for r in rollouts) / wall_s


def _bare(robot: Any, seconds: float = 4.0) -> float:
    """Real-time factor of the same scene's physics alone, with a slowly swaying arm: the upper
    bound.
    """
    robot.reset(0)
    model = robot.scene.model
    data = robot.data
    n = round(seconds / robot.dt_s)
    ctrl = HOME_Q + 0.2 * np.sin(np.arange(n)[:, None] * robot.dt_s * 2.0)
    started = time.perf_counter()
    for row in ctrl:
        data.ctrl[robot.scene.arm_actuators] = row
        mujoco.mj_step(model, data)
    return seconds / (time.perf_counter() - started)


if __name__ == "__main__":
    report.run(run)
