"""A world without a simulator, in a file of its own as a user's: an episode takes a fifth of a
second, and its index alone says how it ends.
"""

from __future__ import annotations

import time

import numpy as np

from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.types import ActionChunk, Observation, Outcome, Rollout
from strands_cosmos3.worlds import Executed, Session, Task, World

EPISODE_S = 0.2


class Still(Backend):
    """An expert that does nothing."""

    info = BackendInfo(name="still", requires_images=False)

    def infer(self, request):
        rows = np.zeros((request.n_rows, 10))
        return ActionChunk(rows, request.action_space, request.embodiment)


class SmallWorld(World):
    name = "small"
    robots = ("panda",)
    rewordings = ("swapped",)
    breakdown = "parity"

    def tasks(self, robot=None):
        return {"wait": Task("wait", "wait", 2.0), "look": Task("look", "look", 2.0)}

    def embodiment(self, robot=None):
        return "droid"

    def reworded(self, task, instruction, form, rng):
        return f"do not {instruction}"

    def expert(self, robot=None):
        return Still()

    def open(self, robot=None, *, task=None, arm=None):
        return SmallSession()


class SmallSession(Session):
    def reset(self, start):
        self.start = start

    def policy_arguments(self, instruction=""):
        return {"embodiment": "droid"}

    def run(self, policy, options=None):
        time.sleep(EPISODE_S)
        if options.on_tick is not None:
            options.on_tick(self)
        start, differs = self.start, options.instruction != self.start.instruction
        good = start.index % 2 == 0 and not differs
        return Rollout(
            seed=start.seed,
            task=start.task,
            instruction=options.instruction,
            outcome=Outcome.SUCCESS if good else Outcome.TIMEOUT,
            steps={},
            latency_ms={},
            counters={"index": start.index},
            duration_s=options.duration_s or 2.0,
            realtime_factor=1.0,
            followed=True if differs else None,
        )

    def observation(self, images=True):
        return Observation(np.zeros(7), 1.0)

    def execute(self, plan, rows=None, ticks=1):
        return Executed(False, 0.0)

    def draw(self):
        """Pictures as bright as the episode's index."""
        views = get_embodiment("droid").view_names
        return {name: np.full((18, 32, 3), self.start.index, np.uint8) for name in views}
