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
from strands_cosmos3.embedded import WORLD
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.robots.panda import FER, HOME_Q, T_hand_tcp, dh_forward
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.worlds.world import Start, get_world

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


def _judged(what: str, passed: bool, detail: str, otherwise: str = "failed") -> Check:
    return Check(what, "ok" if passed else otherwise, detail)


def run(
    model: str | Path, options: PolicyOptions = PolicyOptions()
) -> tuple[list[Check], dict[str, Any]]:
    """Run all checks; return them with what was measured.

    Raises:
        CheckpointError: The checkpoint cannot be loaded.
    """
    checkpoint = Checkpoint.open(locate(model), None, options.action_space)
    checks = list(_check_inputs(checkpoint))
    world = get_world(WORLD)
    task = next(iter(world.tasks().values()))
    with world.open(task=task.name) as session:
        session.reset(Start(task.name))
        observation = session.observation()
        arguments = session.policy_arguments()
        with Cosmos3Policy(backend=world.required_expert(), **arguments) as expert:
            expected = expert.plan(observation, task.instruction)
        with Cosmos3Policy(model=model, seed=0, options=options, **arguments) as policy:
            trajectory = policy.plan(observation, task.instruction)
            first_ms = policy.last_rollout["timing"]["total_ms"]
            policy.plan(observation, task.instruction)
            rows = np.asarray(policy.last_rollout["action"])
            measured: dict[str, Any] = {
                "variant": checkpoint.variant.name,
                "action_space": checkpoint.action_space,
                "first_ms": first_ms,
                "second": policy.last_rollout["timing"],
                "rows": list(rows.shape),
            }
    if torch.cuda.is_available():
        measured["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    assert isinstance(trajectory, JointTrajectory)
    assert isinstance(expected, JointTrajectory)
    q_rad = trajectory.q_rad
    if checkpoint.action_space == "joint_pos":
        q_rad = rows[:, :7]  # as the model gave them; the plan keeps to limits
    else:
        largest = float(np.abs(rows).max())  # in training nominally within -1 and 1
        detail = f"{largest:.2f} at most (below {_LARGEST_Z})"
        checks.append(_judged("normalised rows", largest < _LARGEST_Z, detail))
    return [*checks, *_check_answer(rows, q_rad, trajectory.gripper, expected.q_rad)], measured


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
        yield _judged("caption", asked.prompt in GOLDEN_PROMPTS.values(), repr(asked.prompt))
    else:
        reason = "not the released policies' setting, so not compared"
        yield Check("caption", "note", f"{reason}: {asked.prompt!r}")
    yield _check_composite(asked.pixel_values[0, :, 0], asked.video_shape)
    frames, height, width = asked.video_shape
    patches = -(-height // 32) * -(-width // 32)  # 16 pixels a latent, 2 latents a patch
    prefix_rows = 0 if asked.action_prefix is None else len(asked.action_prefix)
    tokens = (1 + (frames - 1) // 4) * patches + asked.action_chunk + prefix_rows
    detail = f"{tokens}, of released policies {GOLDEN_TOKENS}"
    yield _judged("generation tokens", not released or tokens == GOLDEN_TOKENS, detail)


def _check_composite(pixels: torch.Tensor, video_shape: tuple[int, int, int]) -> Check:
    """Check that the wrist is on top and the outer cameras below, left and right, within [-1,
    1].
    """
    _, height, width = video_shape
    places = {"wrist": (1 / 3, 0.5), "exterior_1": (5 / 6, 0.25), "exterior_2": (5 / 6, 0.75)}
    wrong = []
    for name, (y, x) in places.items():
        colour = (pixels[:, int(y * height), int(x * width)].float() + 1) * 127.5
        if np.abs(colour.numpy() - _COLOURS[name]).max() > 3:
            wrong.append(name)
    detail = f"{height} x {width}: wrist on top, exterior 1 and 2 below"
    return _judged("composite", not wrong, f"{', '.join(wrong)} not in place" if wrong else detail)


def _check_answer(
    rows: np.ndarray, q_rad: F64, gripper: F64 | None, expected_q_rad: F64
) -> Iterator[Check]:
    """Check that a chunk is finite, starts at the arm, keeps to plausible speeds, and whether the
    hand moves as the expert's.
    """
    finite = bool(np.isfinite(rows).all() and np.isfinite(q_rad).all())
    yield _judged("finite", finite, f"{len(rows)} rows of {rows.shape[-1]} columns")
    if not finite:
        return
    jump = float(np.abs(q_rad[0] - HOME_Q).max())
    detail = f"{jump:.3f} rad from the measured angles (below 0.35)"
    yield _judged("first row", jump < 0.35, detail)
    shares = np.abs(np.diff(q_rad, axis=0)) * 15 / FER.velocity
    speed = float(shares.max(initial=0.0))
    yield _judged("speed", speed <= 1.01, f"{100 * speed:.0f} % of a joint's limit at most")
    if gripper is not None:
        detail = f"starts {gripper[0]:.2f} open (1 = open, the hand is empty)"
        yield _judged("gripper", gripper[0] > 0.5, detail, "note")
    start = _tcp(HOME_Q)
    end = _tcp(q_rad[-1])
    expected = _tcp(expected_q_rad[-1])
    moved = end - start
    wanted = expected - start
    distance = float(np.linalg.norm(moved))
    cosine = float(moved @ wanted / max(distance * np.linalg.norm(wanted), 1e-9))
    degrees = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
    detail = f"{100 * distance:.1f} cm, {degrees:.0f} degrees off the scripted expert's direction"
    yield _judged("direction", distance > _STILL_M and cosine > 0.5, detail, "note")


def _tcp(q_rad: F64) -> F64:
    return (dh_forward(q_rad) @ T_hand_tcp)[:3, 3]
