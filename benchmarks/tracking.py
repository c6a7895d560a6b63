"""Tracking error of the simulated arm in closed-loop episodes, at every physics
step.

Chunks are ``midtrain`` rows of random smooth motions from the replay backend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import report
from motions import BRISK_DEG, BRISK_M, FPS, SLOW_DEG, SLOW_M, feasible_chunk
from strands_cosmos3.actions.decode import decode_chunk, encode_chunk
from strands_cosmos3.backends.replay import Recording, load_recording
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import dh_forward
from strands_cosmos3.types import ActionChunk, Rollout

_SPEEDS = {"slow": (SLOW_M, SLOW_DEG), "brisk": (BRISK_M, BRISK_DEG)}
_FEED_FORWARD = {
    "velocity": ("slow", "brisk"),
    "computed_torque": ("slow", "brisk"),
    "none": ("slow",),
}


def recording_of_motion(
    rng: np.random.Generator, step_m: tuple[float, float], step_deg: tuple[float, float]
) -> Recording:
    """Draw a random smooth motion of 32 rows as a recording."""
    q, T_base_hand = feasible_chunk(rng, 32, step_m, step_deg)
    T_hand_cosmos = get_embodiment("droid").tool_frame.T_parent_cosmos
    T = np.concatenate((dh_forward(q)[None], T_base_hand)) @ T_hand_cosmos
    return Recording(T, np.ones(len(T)), FPS, q, "random smooth motion")


def run(chunks: int = 40, seed: int = 0, episode: Path | None = None) -> dict[str, Any]:
    """Measure the tracking error by speed and feed-forward, and of a DROID episode if one is
    given.

    Args:
        chunks: Random chunks of each speed.
        seed: Seed of the chunks.
        episode: Also a recorded DROID episode (.json).
    """
    from strands_cosmos3.sim.simulated_arm import ControlConfig
    from strands_cosmos3.worlds.arms import Robot

    out: dict[str, Any] = {"chunks": chunks, "seed": seed, "physics_hz": 600, "control_hz": 50}
    if episode is not None:
        out["droid_episode_decoded"] = _decoded(load_recording(episode))
    for feed_forward, speeds in _FEED_FORWARD.items():
        robot = Robot("panda", ControlConfig(feed_forward=feed_forward))
        for speed in speeds:
            step_m, step_deg = _SPEEDS[speed]
            report.progress(f"tracking: {feed_forward}, {speed} chunks")
            rng = np.random.default_rng(seed)
            recordings = (recording_of_motion(rng, step_m, step_deg) for _ in range(chunks))
            out[f"{feed_forward}/{speed}"] = _summary(
                [_replay(robot, recording) for recording in recordings]
            )
        if episode is not None:
            report.progress(f"tracking: {feed_forward}, {episode.name}")
            out[f"{feed_forward}/droid_episode"] = _summary(
                [_replay(robot, load_recording(episode))]
            )
    return out


def _decoded(recording: Recording) -> dict[str, float]:
    """Errors of the last pose after encoding and decoding: with the tool frame, and with deltas
    composed on the hand.
    """
    droid = get_embodiment("droid")
    rows = encode_chunk(recording.T_base_cosmos, recording.gripper[1:], droid)
    chunk = ActionChunk(rows, droid.action_space("midtrain"), droid)
    cosmos = decode_chunk(chunk, recording.T_base_cosmos[0]).T_base_frame
    T_hand_cosmos = droid.tool_frame.T_parent_cosmos
    on_hand = (
        decode_chunk(chunk, recording.T_base_cosmos[0] @ np.linalg.inv(T_hand_cosmos)).T_base_frame
        @ T_hand_cosmos
    )
    end = recording.T_base_cosmos[-1, :3, 3]
    return {
        "rows": len(rows),
        "end_error_mm": float(np.linalg.norm(cosmos[-1, :3, 3] - end) * 1e3),
        "end_error_without_tool_frame_mm": float(np.linalg.norm(on_hand[-1, :3, 3] - end) * 1e3),
    }


def _replay(robot: Any, recording: Recording) -> Rollout:
    return robot.run_policy(
        policy_config={"embodiment": "droid", "backend": "replay", "model": recording},
        duration=60.0,
    )


def _summary(rollouts: list[Rollout]) -> dict[str, float]:
    samples = np.array([len(r.arrays["t_s"]) for r in rollouts])
    weights = samples / samples.sum()
    drift = [r.drift.mean_mm for r in rollouts if r.drift]
    return {
        "tracking_mean_mm": float(weights @ [r.tracking.mean_mm for r in rollouts]),
        "tracking_max_mm": float(max(r.tracking.max_mm for r in rollouts)),
        "tracking_max_deg": float(max(r.tracking.max_deg for r in rollouts)),
        "path_mean_mm": float(weights @ [r.path.mean_mm for r in rollouts]),
        "path_max_mm": float(max(r.path.max_mm for r in rollouts)),
        "ik_max_mm": float(max(r.ik.max_mm for r in rollouts)),
        "stretched_rows": int(sum(r.steps["stretched"] for r in rollouts)),
        "rows": int(sum(r.steps["total"] for r in rollouts)),
    } | ({"drift_mean_mm": float(np.mean(drift))} if drift else {})


if __name__ == "__main__":
    report.run(run)
