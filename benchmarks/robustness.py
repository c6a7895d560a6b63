"""Tracking and drift of an arm that differs from its controller's model, with
and without compensation.

Chunks are those of ``tracking.py``. Holding still and closed loops are answered with a
recording's own deltas, wherever the arm is: as by a policy that does not see where the hand is, so
that nothing but the loop itself prevents drift.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import report
from motions import BRISK_DEG, BRISK_M, FPS, SLOW_DEG, SLOW_M
from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.replay import Recording, load_recording
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.robots.servo import NO_COMPENSATION, Compensation
from strands_cosmos3.sim.plant import ALL_ERRORS, PlantErrors
from strands_cosmos3.types import ActionChunk, Request, Rollout
from tracking import recording_of_motion

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
FEED_FORWARD = ("velocity", "computed_torque")
HOLD_S, HOLD_REPLAN_ROWS = 60.0, 4
LOOPS, LOOP_S, LOOP_RADIUS_M = 20, 2.0, 0.04


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
    return _recording(np.zeros((round(duration_s * FPS) + 1, 3)))


def circles(turns: int) -> Recording:
    """Return a recording of circles of 8 cm in 2 s each, parallel to the table, from home and
    back to it.
    """
    angle: F64 = 2 * np.pi * np.arange(round(turns * LOOP_S * FPS) + 1.0) / (LOOP_S * FPS)
    return _recording(
        LOOP_RADIUS_M * np.stack((np.cos(angle) - 1, np.sin(angle), 0 * angle), axis=1)
    )


def _recording(offset_m: F64) -> Recording:
    T_base_cosmos = dh_forward(HOME_Q) @ get_embodiment("droid").tool_frame.T_parent_cosmos
    T = np.repeat(T_base_cosmos[None], len(offset_m), axis=0)
    T[:, :3, 3] += offset_m
    return Recording(T, np.ones(len(T)), FPS, HOME_Q)


def run(chunks: int = 40, seed: int = 0, episode: Path | None = None) -> dict[str, Any]:
    """Measure every plant with both feed-forward modes; those with something to compensate also
    with compensation.

    Args:
        chunks: Random chunks of each speed.
        seed: Seed of the chunks.
        episode: Also a recorded DROID episode (.json).
    """
    out: dict[str, Any] = {
        "chunks": chunks,
        "seed": seed,
        "physics_hz": 600,
        "control_hz": 50,
        "cases": [],
    }
    for name, plant in PLANTS.items():
        for feed_forward in FEED_FORWARD:
            compensations = {False: NO_COMPENSATION, True: plant.compensation()}
            for compensated, compensation in compensations.items():
                if compensated and compensation == NO_COMPENSATION:
                    continue
                case = {"plant": name, "feed_forward": feed_forward, "compensated": compensated}
                report.progress(
                    f"robustness: {name}, {feed_forward}{', compensated' if compensated else ''}"
                )
                out["cases"].append(
                    case | _measure(plant, feed_forward, compensation, chunks, seed, episode)
                )
    return out


def _measure(
    plant: PlantErrors,
    feed_forward: str,
    compensation: Compensation,
    chunks: int,
    seed: int,
    episode: Path | None,
) -> dict[str, Any]:
    from strands_cosmos3.sim.simulated_arm import ControlConfig
    from strands_cosmos3.worlds.arms import Robot

    robot = Robot(
        "panda", ControlConfig(feed_forward=feed_forward, compensation=compensation), plant=plant
    )
    out: dict[str, Any] = {}
    for speed, step_m, step_deg in (("slow", SLOW_M, SLOW_DEG), ("brisk", BRISK_M, BRISK_DEG)):
        rng = np.random.default_rng(seed)
        motions = [recording_of_motion(rng, step_m, step_deg) for _ in range(chunks)]
        out[speed] = _tracking([_play(robot, "replay", motion, 60.0) for motion in motions])
    if episode is not None:
        out["droid_episode"] = _tracking([_play(robot, "replay", load_recording(episode), 60.0)])
    held = _play(robot, DeltaBackend(resting(HOLD_S), HOLD_REPLAN_ROWS), None, HOLD_S)
    away_mm = (
        np.linalg.norm(
            held.arrays["T_base_hand_achieved"][:, :3, 3] - dh_forward(HOME_Q)[:3, 3], axis=1
        )
        * 1e3
    )
    second = round(1.0 / robot.dt_s)
    out["hold"] = {
        "max_mm": float(away_mm.max()),
        "first_second_mm": float(away_mm[second : 2 * second].mean()),
        "last_second_mm": float(away_mm[-second:].mean()),
    }
    turned = _play(robot, DeltaBackend(circles(LOOPS)), None, LOOPS * LOOP_S + 1.0)
    q_end = turned.arrays["q_achieved_rad"][-1]
    out["loops"] = {
        "end_mm": float(np.linalg.norm((dh_forward(q_end) - dh_forward(HOME_Q))[:3, 3]) * 1e3),
        "joint_drift_rad": float(np.abs(q_end - HOME_Q).max()),
    }
    return out


def _play(robot: Any, backend: Any, model: Any, duration: float) -> Rollout:
    return robot.run_policy(
        policy_config={"embodiment": "droid", "backend": backend, "model": model}, duration=duration
    )


def _tracking(rollouts: list[Rollout]) -> dict[str, float]:
    weights = [len(r.arrays["t_s"]) for r in rollouts]
    return {
        "tracking_mean_mm": float(
            np.average([r.tracking.mean_mm for r in rollouts], weights=weights)
        ),
        "tracking_max_mm": float(max(r.tracking.max_mm for r in rollouts)),
    }


if __name__ == "__main__":
    report.run(run)
