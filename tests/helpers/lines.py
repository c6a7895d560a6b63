"""Chunks of DROID that move the hand in a straight line, turn it, or both."""

import numpy as np

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.types import ActionChunk

DROID = get_embodiment("droid")
FPS = 15.0


def line(velocity_m_s=(0.0, 0.0, 0.0), turn_rad_s=(0.0, 0.0, 0.0), rows=16):
    """A chunk at constant velocity in the Cosmos frame, whose z axis points out of the hand."""
    T = np.repeat(np.eye(4)[None], rows + 1, axis=0)
    t_s = np.arange(rows + 1) / FPS
    T[:, :3, 3] = t_s[:, None] * velocity_m_s
    T[:, :3, :3] = so3_exp(t_s[:, None] * turn_rad_s)
    return ActionChunk(
        encode_chunk(T, np.ones(rows), DROID), DROID.action_space("midtrain"), DROID, FPS
    )


class Lines(Backend):
    """Answers with one line after the other, each a function of the number of the call."""

    def __init__(self, chunk_of_call):
        self.info = BackendInfo(name="lines", requires_images=False, action_space="midtrain")
        self.chunk_of_call, self.calls = chunk_of_call, 0

    def infer(self, request):
        self.calls += 1
        return self.chunk_of_call(self.calls - 1)
