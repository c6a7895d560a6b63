"""Malformed calls of the public functions and flags: an error of this package each, and no
other.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from enum import Enum
from pathlib import Path

import mujoco
import numpy as np
import pytest

import strands_cosmos3
from helpers.malformed import JUNK, Call
from strands_cosmos3 import embodiments
from strands_cosmos3.actions import decode, stats
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.control.executor import ReferenceBlock
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.control.loop import LoopConfig
from strands_cosmos3.control.targets import (
    decode_cosmos_chunk_to_targets,
)
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.datasets import DatasetWriter
from strands_cosmos3.embodiments import get_embodiment, raw_embodiment
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.options import options_of
from strands_cosmos3.policy import Cosmos3Policy, create_policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.policy.resample import resample, resample_rows
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import ARM_JOINTS, FER, HOME_Q
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
from strands_cosmos3.sim.film import VideoRecorder
from strands_cosmos3.sim.plant import PlantErrors
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.grammar import parse_instruction
from strands_cosmos3.worlds.table.scene import TableScene

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
DROID = get_embodiment("droid")
MODEL = load_panda()
BRIDGE = MinkIKBridge(MODEL)
FULL = np.r_[HOME_Q, 0.04, 0.04]
POSES = np.tile(BRIDGE.ee_pose(FULL), (3, 1, 1))
STAY = np.array([-0.0110, 0.0762, 0.0231, 1, 0.0007, 0.0016, -0.0005, 1, -0.0448, 0])
ROWS = np.tile(STAY, (4, 1))
TIMES = np.arange(1, 5) / 15


class Stays(Backend):
    """Holds the pose."""

    info = BackendInfo(name="stays", requires_images=False)

    def infer(self, request):
        return ActionChunk(
            np.tile(STAY, (request.n_rows, 1)), request.action_space, request.embodiment
        )


STATS = stats.load_action_stats("droid")
JOINTS = ActionChunk(np.tile(np.r_[HOME_Q, 1.0], (4, 1)), DROID.action_space("joint_pos"), DROID)
PLAN = JointTrajectory(np.tile(HOME_Q, (4, 1)), TIMES, np.ones(4))
SEEN = Observation(HOME_Q, 1.0)
FLAT = {
    **{name: float(q) for name, q in zip(ARM_JOINTS, HOME_Q, strict=True)},
    "finger_joint1": 0.04,
    "finger_joint2": 0.04,
}
SCENE = TableScene()
DATA = mujoco.MjData(SCENE.model)
LAYOUT = SCENE.sample_layout(np.random.default_rng(0))
ROBOT = Robot(scene=SCENE)
POLICY = Cosmos3Policy(robot="panda", backend=Stays())
PICTURE = np.zeros((8, 8, 3), np.uint8)
SCRIPTED = {"embodiment": "droid", "backend": "scripted"}


REST = JointState.at_rest(HOME_Q)
STATES = np.tile(HOME_Q, (3, 1))
FILM = VideoRecorder(SCENE, None, 50.0)
ROLLOUT = ROBOT.run_policy(policy_config=SCRIPTED, task="pick", duration=0.06)


def record(writer, embodiment):
    with DatasetWriter("dataset", rollout_spec()) as good:
        return RolloutRecorder(
            good if isinstance(writer, str) and writer == "good" else writer, embodiment
        )


def execute(before=REST, **block):
    return ROBOT.execute(ReferenceBlock(**block, nominal_s=np.full(3, np.nan)), before)


ACTIONS = [
    Call(stats.load_action_stats, {"source": "droid", "domain": None}),
    Call(stats.normalize_quantile, {"a": ROWS, "q01": STATS.q01, "q99": STATS.q99, "clip": True}),
    Call(stats.denormalize_quantile, {"z": ROWS, "q01": STATS.q01, "q99": STATS.q99}),
    Call(decode.decode_pose_delta, {"rows": ROWS[:, :9]}),
    Call(
        decode.decode_pose_trajectory,
        {"deltas": ROWS[:, :9], "T_0": np.eye(4), "convention": "framewise"},
    ),
]
ROBOTS = [Call(get_robot, {"robot": "panda"})]
CONTROL = [
    Call(
        MinkIKBridge,
        {
            "ee_frame_name": "hand",
            "ee_frame_type": "body",
            "limits": FER,
            "method": "auto",
            "avoid_collisions": (),
            "min_distance_m": 0.01,
            "model": MODEL,
        },
    ),
    Call(BRIDGE.ee_pose, {"qpos": FULL}),
    Call(BRIDGE.configuration, {"value": FULL, "name": "q"}),
    Call(BRIDGE.frame_in_ee, {"body_name": "hand", "qpos": FULL}),
    Call(BRIDGE.solve, {"T_world_ee": POSES, "q_init": FULL, "dt_s": 0.1, "method": "auto"}),
    Call(BRIDGE.solve_trajectory, {"poses": POSES, "q_init": FULL}),
    Call(BRIDGE.residuals, {"poses": POSES, "qpos_traj": np.tile(FULL, (len(POSES), 1))}),
    Call(BRIDGE.tracking_error, {"poses": POSES, "qpos_traj": np.tile(FULL, (len(POSES), 1))}),
    Call(
        decode_cosmos_chunk_to_targets,
        {
            "action_chunk": ROWS,
            "embodiment": "droid",
            "ik_bridge": BRIDGE,
            "q_init": FULL,
            "stats": None,
            "action_space": "midtrain",
            "fps": 15.0,
            "stats_domain": "droid_lerobot",
            "reanchor": False,
        },
    ),
    Call(BRIDGE.stop_before_collision, {"q": FULL, "q_rad": np.tile(FULL, (2, 1))}),
    Call(LoopConfig, {"hz": 50.0, "replan_rows": 8, "latency_s": 0.0, "patience_s": 1.0}),
]
POLICIES = [
    Call(create_policy, {"provider": "cosmos3", "robot": "panda"}, {"backend": "scripted"}),
    Call(
        Cosmos3Policy,
        {
            "embodiment": "droid",
            "robot": "panda",
            "mode": "policy",
            "action_space": "midtrain",
            "observation_mapping": None,
            "action_mapping": None,
            "prompt": "",
            "seed": 0,
            "actions_per_step": 8,
            "transport": "raw",
            "decode_video": False,
            "options": {},
        },
        {"backend": "scripted"},
    ),
    Call(
        Cosmos3Policy,
        {
            "backend": "scripted",
            "model": None,
            "num_steps": None,
            "guidance_scale": None,
            "guidance_interval": None,
            "device": None,
            "dtype": None,
            "host": None,
            "port": None,
            "api_key": None,
            "client": None,
        },
        {"robot": "panda"},
        name="Cosmos3Policy of a backend",
    ),
    *(
        Call(
            lambda **options: Cosmos3Policy("droid", "panda", "scripted", options=options),
            {name: option.default},
            name=f"Cosmos3Policy with the option {name}",
        )
        for name, option in options_of(PolicyOptions).items()
        if name != "client"  # whatever answers as one
    ),
    Call(
        Cosmos3Policy.preflight,
        {
            "observation_keys": set(FLAT),
            "embodiment": "droid",
            "robot": "panda",
            "backend": "replay",
            "mode": "policy",
        },
    ),
    Call(POLICY.set_robot_state_keys, {"robot_state_keys": [*ARM_JOINTS, "finger_joint1"]}),
    Call(POLICY.set_sim_context, {"model": MODEL, "namespace": ""}),
    Call(POLICY.set_control_frequency, {"hz": 50.0}),
    Call(POLICY.set_rtc_observed_delay, {"steps": 1}),
    Call(POLICY.reset, {"seed": 0}),
    Call(
        POLICY.plan,
        {
            "observation": FLAT,
            "instruction": "pick up the red cube",
            "raw_actions": None,
            "video": None,
        },
    ),
    Call(
        POLICY.plan,
        {"observation": SEEN, "instruction": "pick up the red cube", "action_prefix": None},
    ),
    Call(
        POLICY.get_actions_batch,
        {"observations": [FLAT, FLAT], "instructions": "pick up the red cube"},
    ),
    Call(
        POLICY.get_actions_sync, {"observation_dict": FLAT, "instruction": "pick up the red cube"}
    ),
    Call(
        resample,
        {"plan": PLAN, "observation": SEEN, "hz": 50.0, "limits": FER, "lead_s": np.zeros(7)},
    ),
    Call(resample_rows, {"chunk": JOINTS, "hz": 50.0}),
]
SIM = [
    Call(ControlConfig, {"limits": "fer", "derating": 1.0, "feed_forward": "velocity"}),
    Call(
        Robot,
        {
            "name": "panda",
            "control": ControlConfig(),
            "scene": SCENE,
            "arm_model": None,
            "plant": None,
        },
    ),
    Call(ROBOT.reset, {"seed": 0, "q_rad": HOME_Q, "layout": LAYOUT}),
    Call(
        ROBOT.run_policy,
        {
            "robot_name": "panda",
            "instruction": "pick up the red cube",
            "policy_provider": "cosmos3",
            "policy_config": SCRIPTED,
            "control_frequency": 50.0,
            "video": None,
            "film_layout": "full",
            "policy": None,
            "task": "pick",
            "seed": 0,
            "layout": LAYOUT,
            "latency": 0.0,
            "realtime": False,
            "progress": None,
            "on_tick": None,
            "recorder": None,
            "audience": None,
        },
        {"duration": 0.06},
    ),
    Call(
        ROBOT.run_policy,
        {"duration": 0.06},
        {"policy_config": SCRIPTED, "task": "pick", "on_tick": lambda _: True},
    ),
    Call(
        PlantErrors,
        {
            "link_mass_scale": 1.0,
            "payload_kg": 0.0,
            "joint_friction_nm": 0.0,
            "actuation_delay_s": 0.0,
        },
    ),
    Call(PlantErrors, {"sensor_noise_rad": 0.0, "seed": 0}),
]
DATA_ONLY = [
    Call(parse_instruction, {"text": "stack the red cube on the blue cube"}),
    Call(get_embodiment, {"name": "droid"}),
    Call(raw_embodiment, {"domain_id": 8, "width": 10}),
    Call(
        embodiments.Sampling,
        {
            "num_steps": 4,
            "guidance_scale": 1.0,
            "flow_shift": 5.0,
            "guidance_interval": (960.0, 1001.0),
        },
    ),
]
CALLS = {
    "actions": ACTIONS,
    "robots": ROBOTS,
    "control": CONTROL,
    "policy": POLICIES,
    "sim": SIM,
    "data": DATA_ONLY,
}


def untyped(call, rng):
    """Run a malformed call; return what it raised that is not of this package, or None."""
    label, arguments = call.spoiled(rng)
    try:
        call.function(**arguments)
    except Cosmos3Error as error:
        return None if str(error) else f"{label}: no message"
    except Exception as error:
        return f"{label}: {type(error).__name__}: {error!s:.120}"
    return None


def run(calls, n):
    rngs = map(np.random.default_rng, itertools.count())
    return [
        found
        for call, rng in zip(itertools.islice(itertools.cycle(calls), n), rngs, strict=False)
        if (found := untyped(call, rng))
    ]


def public_names():
    """Public functions and classes of two packages that take an argument, by the rule of
    docs/architecture.md.
    """
    page = (Path(strands_cosmos3.__file__).parents[1] / "docs/architecture.md").read_text()
    (trusting,) = re.findall(r"as do the whole\s+modules (.*?)\.\n", page, re.DOTALL)
    internal = {f"strands_cosmos3.{name}" for name in re.findall(r"`([\w.]+)`", trusting)}
    found = {}
    for package in ("policy",):
        path = [str(Path(strands_cosmos3.__file__).parent / package)]
        for module in (
            importlib.import_module(f"strands_cosmos3.{package}.{one.name}")
            for one in pkgutil.iter_modules(path)
        ):
            if module.__name__ in internal:
                internal.remove(module.__name__)
                continue
            own = [
                name
                for name, made in vars(module).items()
                if getattr(made, "__module__", None) == module.__name__
            ]
            for name in getattr(module, "__all__", [name for name in own if name[0] != "_"]):
                if callable(made := getattr(module, name)) and (
                    inspect.isfunction(made) or is_made(made)
                ):
                    found[f"{module.__name__}.{name}"] = made
    assert not internal, f"the page names modules that do not exist: {internal}"
    return found


def is_made(kind):
    """Whether a class can be constructed by a caller."""
    other = isinstance(kind, type) and (
        issubclass(kind, Enum | BaseException) or getattr(kind, "_is_protocol", False)
    )
    return isinstance(kind, type) and not other and not inspect.isabstract(kind)


@pytest.mark.filterwarnings("ignore")
def test_every_public_name_refuses_junk():
    rng, found, n = np.random.default_rng(0), [], 0
    for name, function in public_names().items():
        needed = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind not in VARIADIC
        ]
        for _ in range(5 if needed else 0):
            given = {p.name: JUNK[int(rng.integers(len(JUNK)))] for p in needed}
            n += 1
            try:
                function(**given)
            except Cosmos3Error:
                continue
            except Exception as error:
                found.append(f"{name}({given!r:.100}): {type(error).__name__}: {error!s:.100}")
    assert n >= 20
    assert not found, "\n".join(found)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_the_calls_are_good_before_they_are_spoiled():
    for call in itertools.chain(*CALLS.values()):
        call.function(**call.good, **call.fixed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", CALLS)
def test_malformed_calls(package):
    assert not run(CALLS[package], 4 * len(CALLS[package]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", CALLS)
def test_two_thousand_malformed_calls(package):
    n = -(-2000 * len(CALLS[package]) // sum(map(len, CALLS.values())))
    assert not run(CALLS[package], n)
