"""A backend that answers a known motion from the measured pose and remembers what it was asked."""

from __future__ import annotations

import time

import numpy as np

from motions import feasible_chunk
from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.types import ActionChunk

DROID = get_embodiment("droid")
T_HAND_COSMOS = DROID.tool_frame.T_parent_cosmos
KEYS = [f"joint{i + 1}" for i in range(7)] + ["finger_joint1"]


def flat(q=HOME_Q, finger_m=0.04, **more):
    return dict(zip(KEYS, [*map(float, q), finger_m], strict=True)) | more


class Spy(Backend):
    """``midtrain`` rows of one feasible motion, a fifth open; or ``joint_pos`` rows that run on
    evenly from what was seen.
    """

    def __init__(
        self,
        rows=32,
        step_m=(0.002, 0.006),
        requires_images=False,
        joints_rad_s=None,
        privileged=False,
        delay_s=0.0,
    ):
        self.info = BackendInfo(
            name="spy", requires_images=requires_images, needs_privileged=privileged
        )
        self.rows, self.joints_rad_s, self.delay_s = rows, joints_rad_s, delay_s
        self.requests, self.resets, self.closed = [], [], 0
        self.q_start, self.T_hand = feasible_chunk(
            np.random.default_rng(0), rows, step_m, (0.2, 2.0)
        )

    def infer(self, request):
        self.requests.append(request)
        time.sleep(self.delay_s)
        if self.joints_rad_s is not None:
            rows = np.tile([*request.q_rad, 0.2], (self.rows, 1))
            rows[:, :7] += np.arange(self.rows)[:, None] / 15 * self.joints_rad_s
        else:
            T = np.concatenate((dh_forward(self.q_start)[None], self.T_hand)) @ T_HAND_COSMOS
            rows = encode_chunk(T, np.full(self.rows, 0.2), request.embodiment)
        return ActionChunk(
            rows,
            request.action_space,
            request.embodiment,
            seed=request.seed,
            timing={"own_ms": 1.0},
        )

    def reset(self, seed=None):
        self.resets.append(seed)

    def close(self):
        self.closed += 1
