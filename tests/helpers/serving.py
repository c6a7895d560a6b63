"""Requests, and backends small enough to read, for the tests of the service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from strands_cosmos3.actions.rotations import se3, so3_exp
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.types import ActionChunk, Request

DROID, LIBERO = get_embodiment("droid"), get_embodiment("libero")


class Echo(Backend):
    """Answers four rows: the joint angles it was shown plus 0.01 a row, and the gripper it was
    shown.
    """

    info = BackendInfo(name="echo", requires_images=False)

    def __init__(self, before: Callable[[Request], None] = lambda request: None):
        self.before = before
        self.requests: list[Request] = []
        self.resets = 0

    def infer(self, request: Request) -> ActionChunk:
        self.before(request)
        self.requests.append(request)
        rows = np.zeros((4, 8))
        assert request.q_rad is not None
        rows[:, :7] = request.q_rad + 0.01 * np.arange(4)[:, None]
        rows[:, 7] = request.gripper
        return ActionChunk(rows, request.action_space, request.embodiment)

    def reset(self, seed: int | None = None) -> None:
        self.resets += 1

    def close(self) -> None:
        pass


class Several(Echo):
    """Answers LIBERO's requests, too: columns from -0.5 to 0.5; the first is how bright the left
    half is, plus 0.01 a row.
    """

    info = BackendInfo(name="echo")

    def infer(self, request: Request) -> ActionChunk:
        if request.embodiment is not LIBERO:
            return super().infer(request)
        self.before(request)
        self.requests.append(request)
        rows = np.tile(np.linspace(-0.5, 0.5, 10), (16, 1))
        rows[:, 0] = request.composite[
            :, : request.composite.shape[1] // 2
        ].mean() / 255 + 0.01 * np.arange(16)
        return ActionChunk(rows, request.action_space, LIBERO)


def libero_request(left: int = 51, **more: Any) -> Request:
    """Third person left, wrist right, each of one colour."""
    picture = np.concatenate(
        [np.full((256, 256, 3), left, np.uint8), np.full((256, 256, 3), 90, np.uint8)], axis=1
    )
    space = LIBERO.action_space()
    return Request(
        LIBERO,
        space,
        "put the soup in the basket",
        16,
        None,
        1.0,
        **{"composite": picture, "seed": 3, **more},
    )


def observation(q: Any = None, gripper: float = 0.0, **more: Any) -> dict[str, Any]:
    """A joint_pos request as a RoboLab client writes it (gripper: 1 = closed)."""
    return {
        "prompt": "pick up the red cube",
        "observation/joint_position": np.linspace(0.1, 0.7, 7) if q is None else np.asarray(q),
        "observation/gripper_position": np.array([gripper]),
        **more,
    }


def picture(height: int = 36, width: int = 64) -> np.ndarray:
    return np.full((height, width, 3), 100, np.uint8)


def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait for something that is bound to happen."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


JOINT_POS, POSE_ABS, MIDTRAIN = (
    DROID.spaces[name] for name in ("joint_pos", "pose_abs", "midtrain")
)
T = se3(so3_exp(np.array([0.3, 2.5, -0.4])), np.array([0.4, -0.1, 0.3]))
VIEWS = {view: picture(360, 640) + i for i, view in enumerate(DROID.rig.views)}


def request(space=JOINT_POS, **more) -> Request:
    fields = {
        "q_rad": np.linspace(-0.5, 0.5, 7),
        "gripper": 0.2,
        "limb_poses": {"arm": T},
        "images": VIEWS,
        "seed": 9,
        "t_motion_s": 2.5,
    }
    return Request(
        DROID, space, "pick up the cube", DROID.chunk_rows(space.name), **{**fields, **more}
    )
