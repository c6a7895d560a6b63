"""RoboLab's own clients, unmodified: robolab_calls.py CHECKOUT TORCH PORT cosmos3|dreamzero. Prints
one JSON line a call.

TORCH is a folder of packages with torch, for what this environment lacks.
"""

import json
import sys

import numpy as np

checkout, packages, port, which = sys.argv[1:]
sys.path.insert(0, checkout)
sys.path.append(packages)  # behind this environment's own numpy

import torch  # noqa: E402

HW = {"cosmos3": (360, 640), "dreamzero": (180, 320)}[which]


def camera(value):
    """One colour, with a bright bar at the top left."""
    picture = torch.full((1, *HW, 3), value, dtype=torch.uint8)
    picture[:, : HW[0] // 4, : HW[1] // 8] = 255
    return picture


def observation(step):
    return {
        "image_obs": {
            "over_shoulder_left_camera": camera(60),
            "over_shoulder_right_camera": camera(90),
            "wrist_cam": camera(30),
        },
        "proprio_obs": {
            "arm_joint_pos": torch.arange(7, dtype=torch.float32)[None] / 10 + step,
            "gripper_pos": torch.full((1, 1), 0.25),
        },
    }


if which == "cosmos3":
    from policies.cosmos3.client import Cosmos3Client

    client = Cosmos3Client("127.0.0.1", int(port))
else:
    from policies.dreamzero.client import DreamZeroClient

    client = DreamZeroClient("127.0.0.1", int(port), resize="pad", cam2_source="right")
for step in range(2):
    for _ in range(4):  # rows of one chunk
        action = client.infer(observation(step), "pick up the banana")["action"]
        assert isinstance(action, np.ndarray)
        print(json.dumps({"action": action.tolist()}), flush=True)
    client.reset()
try:
    client.infer(observation(0), "x" * 5000)
except RuntimeError as error:
    print(json.dumps({"error": str(error)}), flush=True)
