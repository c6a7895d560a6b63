"""Runs inside lerobot's own environment: the plugin, found and asked by LeRobot.

python lerobot_policy.py make FOLDER      # by the factory; compared with Cosmos3Policy, saved, loaded
python lerobot_policy.py ask FOLDER PORT  # by LeRobot's client: one observation to the policy server
python lerobot_policy.py compare FOLDER   # which observations LeRobot's server, and ours, leave out
"""

import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lerobot.robots import Robot, RobotConfig
from lerobot.utils.import_utils import register_third_party_plugins

from strands_cosmos3.errors import ObservationError
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.types import Observation

VIEWS, TASK, SEED = ("wrist", "exterior_1", "exterior_2"), "pick up the red cube", 3
NUMBERS = [*(f"joint_{i}" for i in range(7)), "gripper"]
STATE = np.array([*HOME_Q, 0.75], np.float32) + np.float32([*(0.01 * np.arange(7)), 0])
PICTURES = {
    v: np.random.default_rng(i).integers(0, 256, (180, 320, 3), np.uint8)
    for i, v in enumerate(VIEWS)
}


def frame() -> dict:
    """One item as LeRobotDataset gives it."""
    pictures = {
        f"observation.images.{v}": torch.from_numpy(p).permute(2, 0, 1) / 255
        for v, p in PICTURES.items()
    }
    return {"observation.state": torch.from_numpy(STATE), "task": TASK, **pictures}


def make(folder: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata
    from lerobot.policies import make_policy, make_policy_config, make_pre_post_processors

    from strands_cosmos3 import Cosmos3Policy

    shape = {"dtype": "video", "shape": (180, 320, 3), "names": ["height", "width", "channels"]}
    numbers = {"dtype": "float32", "shape": (8,), "names": NUMBERS}
    features = {
        "observation.state": numbers,
        "action": numbers,
        **{f"observation.images.{v}": shape for v in VIEWS},
    }
    meta = LeRobotDatasetMetadata.create("local/panda", 15, features, root=folder / "set")
    policy = make_policy(make_policy_config("cosmos3", device="cpu", seed=SEED), ds_meta=meta)
    policy.save_pretrained(folder / "policy")

    cfg = make_policy_config("cosmos3", device="cpu")
    cfg = type(cfg).from_pretrained(folder / "policy")
    cfg.pretrained_path = folder / "policy"
    policy = make_policy(cfg, ds_meta=meta)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(folder / "policy"))
    chunks, rows = [], []
    for _ in range(2):  # the second call draws with the next seed
        chunks.append(after(policy.predict_action_chunk(before(frame()))[0]).numpy())
        rows.append(policy.policy.last_rollout["action"])
    policy.reset()
    selected = [after(policy.select_action(before(frame())))[0].numpy() for _ in range(9)]
    policy.reset()
    batch = {
        key: value * 2 if isinstance(value, list) else torch.cat([value] * 2)
        for key, value in observed(before).items()
    }
    both = policy.predict_action_chunk(batch).numpy()

    refused = [
        refusal(policy, {key: batch[key] for key in batch if key != left_out})
        for left_out in batch
        if left_out != "task"
    ]
    at_30_hz = make_policy(
        make_policy_config("cosmos3", device="cpu", seed=SEED, fps=30.0), ds_meta=meta
    )
    fast = at_30_hz.predict_action_chunk(before(frame()))[0].numpy()

    seen = Observation(STATE[:7].astype(float), float(STATE[7]), PICTURES)
    with Cosmos3Policy("droid", robot="panda", seed=SEED, device="cpu") as own:
        plans = [(own.plan(seen, TASK), own.last_rollout["action"]) for _ in range(2)]
        own.reset()
        own.actions_per_step = 1000
        own.set_control_frequency(30)
        finger_m = {"finger_joint1": 0.04 * STATE[7]}  # a Panda's own unit
        steps = own.get_actions_sync(
            {f"joint{i + 1}": STATE[i] for i in range(7)} | finger_m | PICTURES, TASK
        )
    own_fast = [list(step.values()) for step in steps] * np.array([1.0] * 7 + [1 / 0.04])
    joints = [np.column_stack((plan.q_rad, plan.gripper)) for plan, _ in plans]
    arrays = {
        "chunks": chunks,
        "rows": rows,
        "selected": selected,
        "batch": both,
        "fast": fast,
        "own_fast": own_fast,
    }
    np.savez(folder / "made.npz", own_joints=joints, own_rows=[row for _, row in plans], **arrays)
    print(
        json.dumps(
            {
                "class": f"{type(policy).__module__}.{type(policy).__name__}",
                "rows": own.info.replan_rows,
                "refused": refused,
            }
        )
    )


def refusal(policy, batch: dict) -> str:
    """The message with which the policy refuses a batch."""
    try:
        policy.predict_action_chunk(batch)
    except ObservationError as error:
        return str(error)
    raise AssertionError(f"answered without one of its inputs: {sorted(batch)}")


def observed(before) -> dict:
    """The preprocessor's answer, without what LeRobot adds for training."""
    return {
        key: value
        for key, value in before(frame()).items()
        if key == "task" or key.startswith("observation.")
    }


@RobotConfig.register_subclass("still_panda")
@dataclass(kw_only=True)
class StillPandaConfig(RobotConfig):
    pass


class StillPanda(Robot):
    """An arm that stands still, in LeRobot's interface."""

    config_class, name = StillPandaConfig, "still_panda"
    observation_features = {**dict.fromkeys(NUMBERS, float), **dict.fromkeys(VIEWS, (180, 320, 3))}  # noqa: RUF012
    action_features = dict.fromkeys(NUMBERS, float)
    is_connected = is_calibrated = True

    def connect(self, calibrate: bool = True) -> None: ...
    def calibrate(self) -> None: ...
    def configure(self) -> None: ...
    def disconnect(self) -> None: ...

    def get_observation(self) -> dict:
        return {**dict(zip(NUMBERS, STATE.tolist(), strict=True)), **PICTURES}

    def send_action(self, action: dict) -> dict:
        return action


def ask(folder: Path, port: str) -> None:
    from lerobot.async_inference.configs import RobotClientConfig
    from lerobot.async_inference.robot_client import RobotClient

    config = RobotClientConfig(
        policy_type="cosmos3",
        pretrained_name_or_path=str(folder / "policy"),
        robot=StillPandaConfig(calibration_dir=folder / "calibration"),
        actions_per_chunk=50,
        server_address=f"127.0.0.1:{port}",
        fps=15,
    )
    client = RobotClient(config)
    assert client.start()
    threading.Thread(target=client.receive_actions, daemon=True).start()
    client.start_barrier.wait()
    client.control_loop_observation(TASK)
    until_s = time.monotonic() + 120
    while not client.actions_available() and time.monotonic() < until_s:
        time.sleep(0.05)
    timed = list(client.action_queue.queue)
    performed = client.control_loop_action()
    client.stop()
    np.savez(folder / "asked.npz", chunk=[one.get_action().numpy() for one in timed])
    print(json.dumps({"steps": [one.get_timestep() for one in timed], "performed": performed}))


def compare(_: Path) -> None:
    """Whether servers take an observation, after one that was answered: of an arm that moved by
    20 degrees in every joint, by its gripper alone, and not at all.
    """
    from lerobot.async_inference.configs import PolicyServerConfig
    from lerobot.async_inference.helpers import TimedObservation
    from lerobot.async_inference.policy_server import PolicyServer
    from lerobot_policy_cosmos3.policy_server import Cosmos3PolicyServer

    numbers = {"dtype": "float32", "shape": (8,), "names": NUMBERS}

    def seen(timestep: int, by: list[float]) -> TimedObservation:
        values = dict(zip(NUMBERS, (STATE + by).tolist(), strict=True))
        return TimedObservation(timestep / 15, timestep, values | PICTURES)

    moved = {
        "joints": [np.radians(20)] * 7 + [0.0],
        "gripper": [0.0] * 7 + [0.25],
        "nothing": [0.0] * 8,
    }
    taken = {}
    for kind in (PolicyServer, Cosmos3PolicyServer):
        server = kind(PolicyServerConfig(host="127.0.0.1", port=1))
        server.policy_type = "cosmos3"
        server.lerobot_features = {"observation.state": numbers}
        server.last_processed_obs = seen(0, [0.0] * 8)
        taken[kind.__name__] = [
            what
            for i, (what, by) in enumerate(moved.items(), 1)
            if server._enqueue_observation(seen(i, by))
        ]
    print(json.dumps(taken))


if __name__ == "__main__":
    register_third_party_plugins()
    {"make": make, "ask": ask, "compare": compare}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
