"""``infer --self-test``: does a checkpoint get the inputs that it was trained on, and does it
answer with plausible motion?

The inputs are compared with golden values: the caption, the composite of three views and the number
of tokens. The answer to a simulated picture is checked for its size and its direction. This is no
measure of skill: `evaluate` is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.robots.panda import FER, HOME_Q, T_hand_tcp, dh_forward
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.worlds.arms import Robot

TASK = "pick up the red cube"
_LAYOUT = (
    "This video contains concatenated views from multiple camera perspectives. The top row is "
    "from the wrist-mounted camera. "
    "The bottom row contains two horizontally concatenated third-person perspective views of the "
    "scene from opposite sides, "
    "with the robot visible."
)
GOLDEN_PROMPTS = {
    "plain": f"{TASK}. {_LAYOUT} The video is 2.0 seconds long and is of 15 FPS. This video is of "
    "544x736 resolution.",
    "json": f'{{"cinematography": {{"framing": "{_LAYOUT}"}}, "actions": [{{"time": "0:00-0:02", '
    f'"description": "{TASK}."}}], '
    '"duration": "2s", "fps": 15.0, "resolution": {"H": 544, "W": 736}, "aspect_ratio": "4,3"}',
}
"""Captions of the released DROID policies: 33 frames at 15 Hz on the canvas of the 480 tier."""
GOLDEN_TOKENS = 3093
_COLOURS = {"wrist": (200, 30, 30), "exterior_1": (30, 200, 30), "exterior_2": (30, 30, 200)}
_STILL_M = 2e-3
_LARGEST_Z = 3.0


@dataclass(frozen=True)
class Check:
    """One result: ``state`` is ok, failed or note."""

    what: str
    state: str
    detail: str


def run(
    model: str | Path, options: PolicyOptions = PolicyOptions()
) -> tuple[list[Check], dict[str, Any]]:
    """Run all checks; return them with what was measured.

    Raises:
        CheckpointError: The checkpoint cannot be loaded.
    """
    checkpoint = Checkpoint.open(locate(model), None, options.action_space)
    checks = list(_check_inputs(checkpoint))
    robot = Robot()
    robot.reset(0)
    with Cosmos3Policy("droid", "panda", model=model, seed=0, options=options) as policy:
        with Renderer(robot.scene.model) as renderer:
            views = {name: renderer.render(robot.data, name) for name in DROID_RIG.views}
        observation = robot.observation(views)
        trajectory = policy.plan(observation, TASK)
        first_ms = policy.last_rollout["timing"]["total_ms"]
        policy.plan(observation, TASK)
        rows = np.asarray(policy.last_rollout["action"])
        about: dict[str, Any] = {
            "variant": checkpoint.variant.name,
            "action_space": checkpoint.action_space,
        }
        about |= {
            "first_ms": first_ms,
            "second": policy.last_rollout["timing"],
            "rows": list(rows.shape),
        }
    if torch.cuda.is_available():
        about["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    assert isinstance(trajectory, JointTrajectory)
    cube = robot.scene.T_world_body(robot.data, "cube_red")[:3, 3]
    if about["action_space"] == "joint_pos":  # as the model gave them; the plan keeps to limits
        checks += _check_answer(rows, rows[:, :7], trajectory.gripper, cube)
    else:
        checks += [
            _check_scale(rows),
            *_check_answer(rows, trajectory.q_rad, trajectory.gripper, cube),
        ]
    return checks, about


def _check_inputs(checkpoint: Checkpoint) -> Iterator[Check]:
    """Check the caption, the composite and the number of tokens."""
    embodiment = get_embodiment("droid")
    processor = Cosmos3PolicyProcessor.for_checkpoint(checkpoint, domain_name="droid")
    views = {name: np.full((360, 640, 3), colour, np.uint8) for name, colour in _COLOURS.items()}
    T = dh_forward(HOME_Q) @ embodiment.tool_frame.T_parent_cosmos
    state: list[float] | None = [*HOME_Q, 1.0] if checkpoint.action_space == "joint_pos" else None
    if checkpoint.state_row is not None:
        state = [*T[:3, 3], *T[:3, 0], *T[:3, 1], 1.0]
    asked = processor.preprocess({"images": views, "task": TASK, "state": state})
    canvas_hw = tuple(asked.pixel_values.shape[-2:])
    released = (canvas_hw, asked.action_chunk, asked.fps) == ((544, 736), 32, 15.0)
    if released:
        same = asked.prompt in GOLDEN_PROMPTS.values()
        yield Check(
            "caption",
            "ok" if same else "failed",
            f"{asked.prompt!r}" if not same else "as the released policies'",
        )
    else:
        yield Check(
            "caption",
            "note",
            f"not the released policies' setting, so not compared: {asked.prompt!r}",
        )
    yield _check_composite(asked.pixel_values[0, :, 0], asked.video_shape)
    frames, height, width = asked.video_shape
    patches = -(-height // 32) * -(-width // 32)  # 16 pixels a latent, 2 latents a patch
    tokens = (
        (1 + (frames - 1) // 4) * patches
        + asked.action_chunk
        + (0 if asked.action_prefix is None else len(asked.action_prefix))
    )
    right = not released or tokens == GOLDEN_TOKENS
    yield Check(
        "generation tokens",
        "ok" if right else "failed",
        f"{tokens}" + ("" if right else f", not {GOLDEN_TOKENS}"),
    )


def _check_composite(pixels: torch.Tensor, video_shape: tuple[int, int, int]) -> Check:
    """Check that the wrist is on top and the outer cameras below, left and right, within [-1,
    1].
    """
    _, height, width = video_shape
    places = {"wrist": (1 / 3, 0.5), "exterior_1": (5 / 6, 0.25), "exterior_2": (5 / 6, 0.75)}
    found = {
        n: pixels[:, int(y * height), int(x * width)].float().add(1).mul(127.5).tolist()
        for n, (y, x) in places.items()
    }
    wrong = [
        name
        for name, colour in found.items()
        if max(abs(a - b) for a, b in zip(colour, _COLOURS[name], strict=True)) > 3
    ]
    detail = (
        f"{height} x {width} on {pixels.shape[1]} x {pixels.shape[2]}: wrist on top, exterior 1 "
        "and 2 below"
    )
    return Check(
        "composite",
        "failed" if wrong else "ok",
        f"{', '.join(wrong)} not in place" if wrong else detail,
    )


def _check_scale(rows: np.ndarray) -> Check:
    """Check that normalised rows are where training had them: nominally within -1 and 1."""
    largest = float(np.abs(rows).max())
    return Check(
        "normalised rows",
        "ok" if largest < _LARGEST_Z else "failed",
        f"{largest:.2f} at most (below {_LARGEST_Z})",
    )


def _check_answer(
    rows: np.ndarray, q_rad: F64, gripper: F64 | None, cube_m: F64
) -> Iterator[Check]:
    """Check that a chunk is finite, starts at the arm, keeps to plausible speeds, and which way
    the hand moves.
    """
    finite = bool(np.isfinite(rows).all() and np.isfinite(q_rad).all())
    yield Check(
        "finite", "ok" if finite else "failed", f"{len(rows)} rows of {rows.shape[-1]} columns"
    )
    if not finite:
        return
    q = np.vstack([HOME_Q, q_rad])
    jump = float(np.abs(q[1] - q[0]).max())
    yield Check(
        "first row",
        "ok" if jump < 0.35 else "failed",
        f"{jump:.3f} rad from the measured angles (below 0.35)",
    )
    speed = float((np.abs(np.diff(q[1:], axis=0)) * 15 / FER.velocity).max()) if len(q) > 2 else 0.0
    yield Check(
        "speed",
        "ok" if speed <= 1.01 else "failed",
        f"{100 * speed:.0f} % of a joint's limit at most",
    )
    if gripper is not None:
        opening = float(gripper[0])
        yield Check(
            "gripper",
            "ok" if opening > 0.5 else "note",
            f"starts {opening:.2f} open (1 = open, the hand is empty)",
        )
    tcp = (dh_forward(q) @ T_hand_tcp)[:, :3, 3]
    moved, wanted = tcp[-1] - tcp[0], cube_m - tcp[0]
    distance = float(np.linalg.norm(moved))
    cosine = float(moved @ wanted / (max(distance, 1e-9) * np.linalg.norm(wanted)))
    toward = (
        f"{100 * distance:.1f} cm, {np.degrees(np.arccos(np.clip(cosine, -1, 1))):.0f} degrees off "
        "the direction to the cube"
    )
    yield Check("direction", "ok" if distance > _STILL_M and cosine > 0.5 else "note", toward)
