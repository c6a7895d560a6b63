"""Tracking error of the simulated arm in closed-loop episodes, at every physics step; with
``--plants`` also of arms that differ from their controller's model, and how they hold still.

Chunks are ``midtrain`` rows of random smooth motions from the replay backend. Holding still is
answered with a recording's own deltas, wherever the arm is: as by a policy that does not see where
the hand is, so that nothing but the loop itself prevents drift.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import report
from motions import BRISK_DEG, BRISK_M, FPS, SLOW_DEG, SLOW_M, recording_of_motion
from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.replay import Recording, load_recording
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.robots.servo import NO_COMPENSATION, FeedForward
from strands_cosmos3.sim.plant import ALL_ERRORS, PlantErrors
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import ActionChunk, Request, Rollout
from strands_cosmos3.worlds.arms import Robot

PLANTS = {
    "none": PlantErrors(),
    "links 10 % heavier": PlantErrors(link_mass_scale=1.1),
    "payload 0.5 kg": PlantErrors(payload_kg=0.5),
    "payload 1 kg": PlantErrors(payload_kg=1.0),
    "friction 0.5 N m": PlantErrors(joint_friction_nm=0.5),
    "delay 10 ms": PlantErrors(actuation_delay_s=0.010),
    "delay 20 ms": PlantErrors(actuation_delay_s=0.020),
    "noise 0.5 mrad": PlantErrors(sensor_noise_rad=0.0005),
    "all": ALL_ERRORS,
}
SPEEDS = {"slow": (SLOW_M, SLOW_DEG), "brisk": (BRISK_M, BRISK_DEG)}
HOLD_S = 60.0
HOLD_REPLAN_ROWS = 4


class DeltaBackend(Backend):
    """Answers with the deltas of a recording at the motion's time, wherever the arm is.

    Args:
        recording: The recording.
        replan_rows: Rows to execute before the next request; None for whole chunks.
    """

    def __init__(self, recording: Recording, replan_rows: int | None = None):
        self.recording = recording
        self.info = BackendInfo(
            name="deltas",
            requires_images=False,
            replan_rows=replan_rows,
            instruction_free_actions="a recorded motion",
        )

    def infer(self, request: Request) -> ActionChunk:
        """Return ``midtrain`` rows."""
        row_s = request.action_space.row_times_s(request.n_rows, self.recording.fps)
        poses, gripper = self.recording.at(request.t_motion_s + np.concatenate(([0.0], row_s)))
        rows = encode_chunk(poses, gripper[1:], request.embodiment)
        return ActionChunk(
            rows, request.action_space, get_embodiment(request.embodiment), self.recording.fps
        )


def resting(duration_s: float) -> Recording:
    """Return a recording of the arm at home that does not move."""
    T_base_cosmos = dh_forward(HOME_Q) @ get_embodiment("droid").tool_frame.T_parent_cosmos
    T = np.repeat(T_base_cosmos[None], round(duration_s * FPS) + 1, axis=0)
    return Recording(T, np.ones(len(T)), FPS, HOME_Q)


def run(
    chunks: int = 40, seed: int = 0, episode: Path | None = None, plants: bool = False
) -> dict[str, Any]:
    """Measure the tracking error by speed and feed-forward, and of a DROID episode if one is
    given.

    Args:
        chunks: Random chunks of each speed.
        seed: Seed of the chunks.
        episode: Also a recorded DROID episode (.json).
        plants: Every plant error, with and without compensation where there is something to
            compensate.
    """
    recording = None if episode is None else load_recording(episode)
    out: dict[str, Any] = {"chunks": chunks, "seed": seed, "physics_hz": 600, "control_hz": 50}
    out["cases"] = []
    for name, config in cases(plants):
        case = {
            "plant": name,
            "feed_forward": str(config.feed_forward),
            "compensated": config.compensation != NO_COMPENSATION,
        }
        report.progress(f"tracking: {case}")
        robot = Robot("panda", config, plant=PLANTS[name])
        for speed, (step_m, step_deg) in SPEEDS.items():
            rng = np.random.default_rng(seed)
            motions = [recording_of_motion(rng, step_m, step_deg) for _ in range(chunks)]
            case[speed] = _summary([_play(robot, "replay", motion, 60.0) for motion in motions])
        if recording is not None:
            case["droid_episode"] = _summary([_play(robot, "replay", recording, 60.0)])
        if plants:
            case["hold"] = _hold(robot)
        out["cases"].append(case)
    return out


def cases(plants: bool) -> Iterator[tuple[str, ControlConfig]]:
    """Yield plants by name, and how they are controlled."""
    for name, plant in PLANTS.items() if plants else (("none", PLANTS["none"]),):
        for feed_forward in FeedForward:
            if plants and feed_forward == FeedForward.NONE:
                continue
            yield name, ControlConfig(feed_forward=feed_forward)
            if (known := plant.compensation()) != NO_COMPENSATION:
                yield name, ControlConfig(feed_forward=feed_forward, compensation=known)


def _play(robot: Robot, backend: Backend | str, model: Any, duration_s: float) -> Rollout:
    config = {"embodiment": "droid", "backend": backend, "model": model}
    return robot.run_policy(policy_config=config, duration=duration_s)


def _hold(robot: Robot) -> dict[str, float]:
    """Distances of the hand from home while it holds still."""
    held = _play(robot, DeltaBackend(resting(HOLD_S), HOLD_REPLAN_ROWS), None, HOLD_S)
    away_m = held.arrays["T_base_hand_achieved"][:, :3, 3] - dh_forward(HOME_Q)[:3, 3]
    away_mm = np.linalg.norm(away_m, axis=1) * 1e3
    second = round(1.0 / robot.dt_s)
    return {
        "max_mm": float(away_mm.max()),
        "first_second_mm": float(away_mm[second : 2 * second].mean()),
        "last_second_mm": float(away_mm[-second:].mean()),
    }


def _summary(rollouts: list[Rollout]) -> dict[str, float]:
    weights = [len(r.arrays["t_s"]) for r in rollouts]
    drift = [r.drift.mean_mm for r in rollouts if r.drift]
    tracking = [r.tracking for r in rollouts if r.tracking]
    mean_mm = np.average([errors.mean_mm for errors in tracking], weights=weights)
    return {
        "tracking_mean_mm": float(mean_mm),
        "tracking_max_mm": max(errors.max_mm for errors in tracking),
        "tracking_max_deg": max(errors.max_deg for errors in tracking),
        "ik_max_mm": max(r.ik.max_mm for r in rollouts if r.ik),
        "stretched_rows": sum(r.steps["stretched"] for r in rollouts),
        "rows": sum(r.steps["total"] for r in rollouts),
        **({"drift_mean_mm": float(np.mean(drift))} if drift else {}),
    }


if __name__ == "__main__":
    report.run(run)
