"""cosmos-framework's RoboLab server, with a function for its model: framework_serves.py CHECKOUT
TORCH PORT joint_pos|midtrain.

Its own code reads the observation and makes the reply, and openpi-server sends it. What only its
model needs (data loaders, inference, logging) is replaced, as in its own unit tests, since it wants
CUDA and hundreds of packages.
"""

import sys
import threading
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np

checkout, packages, port, space = sys.argv[1:]
sys.path.insert(0, checkout)
sys.path.append(packages)  # behind this environment's own numpy

import torch  # noqa: E402

for name in (
    *(
        "inference.common.init",
        "inference.common.args",
        "inference.common.config",
        "inference.args",
        "inference.inference",
    ),
    *(
        "data.generator.action.utils.transforms",
        "data.generator.joint_dataloader",
        "scripts.action_policy_server_utils",
    ),
    *("utils", "utils.checkpoint_db", "utils.lazy_config"),
):
    sys.modules[f"cosmos_framework.{name}"] = MagicMock()
sys.modules[
    "cosmos_framework.data.generator.joint_dataloader"
].IterativeJointDataLoader._MULTI_ITEM_KEYS = ("video", "action")
sys.modules[
    "cosmos_framework.scripts.action_policy_server_utils"
].DEFAULT_FALLBACK_OUTPUT_DIR = Path("/unused")
sys.modules["cosmos_framework.inference.args"].GuidanceInterval = tuple[float, float]

from cosmos_framework.scripts import action_policy_server_robolab as theirs  # noqa: E402

WIDTH = {"joint_pos": 8, "midtrain": 10}[space]


class Model:
    """Rows from what the server hands to its model: the state row moved on, or small deltas."""

    def generate_samples_from_batch(self, batch, **options):
        assert batch["video"][0][0].shape == (3, 33, 540, 640)
        if batch["ai_caption"][0] == "fail":
            raise ValueError("no such luck")
        state = batch["action"][0][0][0]
        rows = state + 0.01 * torch.arange(33)[:, None]
        if space == "midtrain":
            delta = torch.cat((torch.full((3,), 0.01), torch.eye(3)[:2].reshape(6), state[9:]))
            rows = delta.expand(33, 10).clone()
        return {
            "action": [rows],
            "vision": [batch["video"][0][0][None, :, :2, ::60, ::64] / 127.5 - 1],
        }

    def decode(self, latent):
        return latent


service = object.__new__(theirs.RobolabPolicyService)
service.cfg = theirs.RobolabPolicyConfig(
    checkpoint_path="/unused",
    domain_name="droid_lerobot",
    decode_video=True,
    seed=0,
    deterministic_seed=True,
    guidance=3.0,
    guidance_interval=None,
    num_steps=4,
    shift=5.0,
    conditioning_fps=15.0,
    resolution="480",
    action_chunk_size=32,
    action_dim=WIDTH,
    action_space=space,
)
service.model, service._lock, service._rng = Model(), threading.Lock(), np.random.default_rng(0)
service._transform = lambda sample, resolution: sample
server = theirs._load_openpi_websocket_policy_server()
server(policy=service, host="127.0.0.1", port=int(port), metadata={}).serve_forever()
