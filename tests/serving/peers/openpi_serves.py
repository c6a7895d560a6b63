"""The unmodified openpi-server 0.1.0, in its own environment: openpi_serves.py PORT. It answers
what the prompt asks for.
"""

import sys
import time

import numpy as np
from openpi_client.base_policy import BasePolicy
from openpi_server import WebsocketPolicyServer


class Policy(BasePolicy):
    def infer(self, obs):
        prompt = obs["prompt"]
        if prompt == "fail":
            raise ValueError("no such luck")
        if prompt == "slow":
            time.sleep(3)  # it blocks its event loop, as released servers do
        rows = np.zeros((8, 8), np.float32)
        rows[:, :7] = obs["observation/joint_position"]
        rows[:, 7] = obs["observation/gripper_position"][-1]
        if prompt == "nan":
            rows[3, 3] = np.nan
        assert obs["observation/exterior_image_2_left"].shape[-1] == 3
        return {"action": rows[:, :7] if prompt == "narrow" else rows}

    def reset(self):
        pass


WebsocketPolicyServer(Policy(), "127.0.0.1", int(sys.argv[1]), metadata={}).serve_forever()
