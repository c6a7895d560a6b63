"""IsaacLab-Arena's DROID adapter and its client, unmodified: arena_calls.py CHECKOUT TORCH PORT.
Prints one JSON line a call.

TORCH is a folder of packages with torch, for what this environment lacks. The adapter's base class
is abstract and lies beside what needs Isaac Lab; `object` stands for it.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

checkout, packages, port = sys.argv[1:]
sys.path.append(packages)  # behind this environment's own numpy

import torch  # noqa: E402

base = ModuleType("isaaclab_arena.policy.remote_policy_base")
base.EmbodimentAdapter = object
for name, module in {
    "isaaclab_arena": None,
    "isaaclab_arena.policy": None,
    base.__name__: base,
}.items():
    sys.modules[name] = module or ModuleType(name)


def load(file):
    """A module by its file's name; it moved from one package to the other."""
    (path,) = (
        path
        for package in ("_cosmos", "")
        for path in Path(checkout).glob(f"isaaclab_arena{package}/policy/{file}.py")
    )
    spec = importlib.util.spec_from_file_location(file, path)
    sys.modules[file] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[file])
    return sys.modules[file]


def camera(value):
    """One colour, with a bright bar at the top left."""
    picture = torch.full((1, 360, 640, 3), value, dtype=torch.uint8)
    picture[:, :90, :80] = 255
    return picture


adapter, client = (
    load("droid_adapter").CosmosDroidAdapter(),
    load("websocket_client").WebsocketClientPolicy("127.0.0.1", int(port)),
)
for step, prompt in enumerate(("pick up the banana", "pick up the banana", "x" * 5000)):
    observation = {
        "camera_obs": {
            "wrist_camera_rgb": camera(30),
            "external_camera_rgb": camera(60),
            "external_camera_2_rgb": camera(90),
        },
        "policy": {
            "joint_pos": torch.arange(7, dtype=torch.float32)[None] / 10 + step,
            "gripper_pos": torch.full((1, 1), 0.25),
        },
    }
    try:
        reply = client.infer(adapter.pack_request(adapter.extract(observation, 0), prompt))
        assert reply["action"].shape[1] == adapter.action_dim
        print(json.dumps({"action": reply["action"].tolist()}), flush=True)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
