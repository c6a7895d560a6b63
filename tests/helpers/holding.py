"""Policies that want the arm to stay, and the distance it moved all the same."""

import numpy as np

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.policy import Policy
from strands_cosmos3.robots.panda import ARM_JOINTS, dh_forward
from strands_cosmos3.types import ActionChunk


class Stays(Backend):
    """Every row of a chunk is the identity; ``seen`` holds the requests."""

    info = BackendInfo(name="stays", requires_images=False)

    def __init__(self):
        self.seen = []

    def infer(self, request):
        self.seen.append(request)
        poses = np.repeat(request.T_base_cosmos[None], request.n_rows + 1, axis=0)
        return ActionChunk(
            encode_chunk(poses, np.ones(request.n_rows), request.embodiment),
            request.action_space,
            request.embodiment,
        )


class StaysByAngles(Policy):
    """A policy of another make: it answers the angles that it is shown."""

    requires_images = False

    def __init__(self, steps, names=ARM_JOINTS):
        self.actions_per_step, self.names = steps, names

    @property
    def provider_name(self):
        return "stays"

    async def get_actions(self, observation_dict, instruction, **kwargs):
        return [{name: observation_dict[name] for name in self.names}] * (2 * self.actions_per_step)

    def set_robot_state_keys(self, robot_state_keys):
        pass


def sunk_mm(q_rad, q_start_rad):
    """[N] distance of the hand from where it started, at angles [N, 7]."""
    return (
        np.linalg.norm(dh_forward(q_rad)[..., :3, 3] - dh_forward(q_start_rad)[:3, 3], axis=-1)
        * 1e3
    )
