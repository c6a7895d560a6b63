"""Malformed calls of the public interface: each ends in an error of this package, or is accepted.

Public are the names in ``__all__`` of the package and of its subpackages, and the methods of the
classes on docs/api.md. What is behind them trusts its callers.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import strands_cosmos3 as package
from helpers.malformed import Call
from helpers.small_episodes import VIEWS, columns, pictures, spec
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3 import datasets, policy, sim, worlds
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.embodiments import DROID_RIG, Sampling
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.films import VideoWriter
from strands_cosmos3.options import options_of
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.reasoner.options import AskOptions
from strands_cosmos3.reasoner.pixels import Film
from strands_cosmos3.robots.panda import ARM_JOINTS, FER, HOME_Q
from strands_cosmos3.types import ActionChunk, Observation

ROOT = Path(package.__file__).parents[1]
GROUPS = ("actions", "control", "policy", "sim", "datasets", "engine", "worlds")
STAY = np.array([-0.0110, 0.0762, 0.0231, 1, 0.0007, 0.0016, -0.0005, 1, -0.0448, 0])
ROWS = np.tile(STAY, (4, 1))
FULL = np.r_[HOME_Q, 0.04, 0.04]
FLAT = {
    **{name: float(q) for name, q in zip(ARM_JOINTS, HOME_Q, strict=True)},
    "finger_joint1": 0.04,
    "finger_joint2": 0.04,
}
SCRIPTED = {"embodiment": "droid", "backend": "scripted"}
PICK = "pick up the red cube"


class Stays(Backend):
    """Holds the pose."""

    info = BackendInfo(name="stays", requires_images=False)

    def infer(self, request):
        return ActionChunk(
            np.tile(STAY, (request.n_rows, 1)), request.action_space, request.embodiment
        )


def actions() -> Iterator[Call]:
    stats = package.load_action_stats("droid")
    yield Call(package.get_embodiment, {"name": "droid"})
    yield Call(package.load_action_stats, {"source": "droid", "domain": None})
    yield Call(
        package.normalize_quantile, {"a": ROWS, "q01": stats.q01, "q99": stats.q99, "clip": True}
    )
    yield Call(package.denormalize_quantile, {"z": ROWS, "q01": stats.q01, "q99": stats.q99})
    yield Call(package.decode_pose_delta, {"rows": ROWS[:, :9]})
    yield Call(
        package.decode_pose_trajectory,
        {"deltas": ROWS[:, :9], "T_0": np.eye(4), "convention": "framewise"},
    )


def control() -> Iterator[Call]:
    model = sim.load_panda()
    bridge = package.MinkIKBridge(model)
    poses, q = np.tile(bridge.ee_pose(FULL), (3, 1, 1)), np.tile(FULL, (3, 1))
    yield Call(
        package.MinkIKBridge,
        {
            "ee_frame_name": "hand",
            "ee_frame_type": "body",
            "limits": FER,
            "method": "auto",
            "avoid_collisions": (),
            "min_distance_m": 0.01,
            "model": model,
        },
    )
    yield Call(bridge.ee_pose, {"qpos": FULL})
    yield Call(bridge.configuration, {"value": FULL, "name": "q"})
    yield Call(bridge.frame_in_ee, {"body_name": "hand", "qpos": FULL})
    yield Call(bridge.solve, {"T_world_ee": poses, "q_init": FULL, "dt_s": 0.1, "method": "auto"})
    yield Call(bridge.solve_trajectory, {"poses": poses, "q_init": FULL})
    yield Call(bridge.residuals, {"poses": poses, "qpos_traj": q})
    yield Call(bridge.tracking_error, {"poses": poses, "qpos_traj": q})
    yield Call(
        package.decode_cosmos_chunk_to_targets,
        {
            "action_chunk": ROWS,
            "embodiment": "droid",
            "ik_bridge": bridge,
            "q_init": FULL,
            "stats": None,
            "action_space": "midtrain",
            "fps": 15.0,
            "stats_domain": "droid_lerobot",
            "reanchor": False,
        },
    )


def policies() -> Iterator[Call]:
    stays = policy.Cosmos3Policy(robot="panda", backend=Stays())
    yield Call(policy.PolicyOptions, {"chunk_rows": 16, "replan_rows": 8, "borrow_domain": False})
    yield Call(policy.PolicyOptions.of, {"options": {"num_steps": 2}})
    yield Call(
        policy.create_policy, {"provider": "cosmos3", "robot": "panda"}, {"backend": "scripted"}
    )
    yield Call(
        policy.Cosmos3Policy,
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
    )
    for name, option in options_of(PolicyOptions).items():
        if name != "client":  # whatever answers as one
            yield Call(
                lambda **options: policy.Cosmos3Policy(
                    "droid", "panda", "scripted", options=options
                ),
                {name: option.default},
                name=f"Cosmos3Policy with the option {name}",
            )
    yield Call(
        policy.Cosmos3Policy,
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
    )
    yield Call(
        policy.Cosmos3Policy.preflight,
        {
            "observation_keys": set(FLAT),
            "embodiment": "droid",
            "robot": "panda",
            "backend": "replay",
            "mode": "policy",
        },
    )
    yield Call(stays.set_robot_state_keys, {"robot_state_keys": [*ARM_JOINTS, "finger_joint1"]})
    yield Call(stays.set_sim_context, {"model": sim.load_panda(), "namespace": ""})
    yield Call(stays.set_obstacles, {"obstacles": ()})
    yield Call(stays.set_control_frequency, {"hz": 50.0})
    yield Call(stays.set_rtc_observed_delay, {"steps": 1})
    yield Call(stays.reset, {"seed": 0})
    flat = {"observation": FLAT, "instruction": PICK, "raw_actions": None, "video": None}
    yield Call(stays.plan, flat)
    seen = {"observation": Observation(HOME_Q, 1.0), "instruction": PICK, "action_prefix": None}
    yield Call(stays.plan, seen)
    yield Call(stays.get_actions_batch, {"observations": [FLAT, FLAT], "instructions": PICK})
    yield Call(stays.get_actions_sync, {"observation_dict": FLAT, "instruction": PICK})
    yield Call(
        lambda **given: asyncio.run(stays.get_actions(**given)),
        {"observation_dict": FLAT, "instruction": PICK},
        name="Cosmos3Policy.get_actions",
    )


def simulation() -> Iterator[Call]:
    robot = package.Robot()
    layout = robot.scene.sample_layout(np.random.default_rng(0))
    yield Call(
        package.Robot,
        {
            "name": "panda",
            "control": robot.control,
            "scene": robot.scene,
            "arm_model": None,
            "plant": None,
            "task": None,
        },
    )
    yield Call(
        robot.run_policy,
        {
            "robot_name": "panda",
            "instruction": PICK,
            "policy_provider": "cosmos3",
            "policy_config": SCRIPTED,
            "control_frequency": 50.0,
            "video": None,
            "film_layout": "full",
            "policy": None,
            "task": "pick",
            "seed": 0,
            "noise_seed": None,
            "layout": layout,
            "latency": 0.0,
            "realtime": False,
            "progress": None,
            "on_tick": None,
            "recorder": None,
            "audience": None,
        },
        {"duration": 0.06},
    )
    yield Call(robot.reset, {"seed": 0, "q_rad": HOME_Q, "layout": layout})
    yield Call(
        robot.run_policy,
        {"duration": 0.06},
        {"policy_config": SCRIPTED, "task": "pick", "on_tick": lambda _: True},
    )


def recordings() -> Iterator[Call]:
    root = Path.cwd() / "recorded"
    with datasets.DatasetWriter(root, spec()) as writer:
        writer.add_episode(columns(3), pictures(0, 3), task=PICK)
    recorded = datasets.Dataset(root)
    episode = recorded[0]
    kept = datasets.DatasetWriter(root.parent / "kept", spec())
    number = itertools.count()
    yield Call(datasets.Dataset, {"root": root})
    yield Call(recorded.column, {"key": datasets.STATE})
    yield Call(episode.frames, {"camera": datasets.camera_key(VIEWS[0]), "rows": [0]})
    yield Call(episode.frame, {"row": 0, "keys": [datasets.STATE]})
    yield Call(datasets.recorded_limbs, {"episode": episode})
    yield Call(datasets.camera_key, {"view": "wrist"})
    yield Call(datasets.Feature, {"dtype": "float32", "shape": (2,), "names": None})
    yield Call(
        datasets.DatasetSpec, {"fps": 15, "features": spec().features, "robot_type": "panda"}
    )
    yield Call(
        datasets.VideoConfig, {"crf": 18, "gop": 15, "pixel_format": "yuv420p", "preset": "fast"}
    )
    yield Call(
        datasets.arm_spec,
        {
            "cameras": {"wrist": (48, 64)},
            "embodiment": "droid",
            "fps": 15,
            "n_joints": 7,
            "robot_type": "panda",
            "extra": None,
        },
    )
    yield Call(
        lambda **given: datasets.DatasetWriter(**given).close(),
        {"root": "new", "spec": spec(), "commit_every": 1, "video": None},
        name="DatasetWriter",
    )
    yield Call(
        kept.add_episode,
        {"columns": columns(2), "videos": pictures(0, 2), "task": PICK, "note": None},
    )
    frame = {key: values[0] for key, values in {**columns(1), **pictures(0, 1)}.items()}
    yield Call(kept.episode("held").add, {"frame": frame}, name="EpisodeWriter")
    yield Call(
        lambda sources: datasets.merge_datasets(sources, f"merged{next(number)}"),
        {"sources": [root, root]},
        name="merge_datasets",
    )


def engines() -> Iterator[Call]:
    folder = write_checkpoint(Path.cwd() / "checkpoint", eyes=True)
    engine = package.Cosmos3Engine.from_pretrained(folder)
    processor = package.Cosmos3PolicyProcessor(
        folder / "text_tokenizer", domain_name="droid_lerobot", image_size=256
    )
    raw = {"images": np.zeros((96, 128, 3), np.uint8), "task": PICK}
    asked = processor.preprocess(raw)
    request = asked.request(num_inference_steps=1)
    fields = {name: value for name, value in vars(request).items() if value is not None}
    yield Call(
        package.Cosmos3Engine.from_pretrained,
        {
            "path_or_repo_id": folder,
            "device": "cpu",
            "dtype": torch.float32,
            "parallel": None,
            "decode_video": False,
            "variant": None,
            "action_space": None,
            "options": None,
        },
        {"local_files_only": True},
    )
    yield Call(
        package.Reasoner.from_pretrained,
        {"path_or_repo_id": folder, "device": "cpu", "dtype": torch.float32},
        {"local_files_only": True},
    )
    yield Call(package.Reasoner.beside, {"engine": engine})
    pixels = np.zeros((64, 64, 3), np.uint8)
    yield Call(
        package.Reasoner.beside(engine).ask,
        {
            "question": PICK,
            "images": [pixels],
            "videos": [Film(pixels[None], 2.0)],
            "options": AskOptions(max_tokens=1),
        },
    )
    yield Call(engine.step, {"request": request})
    yield Call(engine.action_head, {"domain": 0})
    yield Call(engine.take_weights, {"weights": {}, "domain": 0})
    yield Call(
        package.Cosmos3PolicyProcessor.for_checkpoint,
        {"checkpoint": engine.checkpoint, "action_space": None, "policy_frames": None},
    )
    yield Call(request.sampled, {"sampling": Sampling(num_steps=2), "seed": 3})
    alone = package.ParallelConfig()
    yield Call(alone.coordinates, {"rank": 0})
    yield Call(alone.check_world, {"world_size": 1})
    yield Call(engine.step_batch, {"requests": [request]})
    yield Call(package.Cosmos3ActionRequest, fields)
    yield Call(
        package.ParallelConfig,
        {"tp_size": 1, "cfg_size": 1, "sp_size": 1, "vae_split": "exact", "timeout_s": 1.0},
    )
    yield Call(package.pixel_to_latent_shape, {"frames": 5, "height": 32, "width": 32})
    yield Call(
        package.Cosmos3PolicyProcessor,
        {
            "mode": "policy",
            "domain_name": "droid_lerobot",
            "image_size": 256,
            "device": "cpu",
            "prompt_format": "json",
            "history_length": 1,
            "action_space": None,
            "policy_frames": None,
        },
        {"tokenizer_name_or_path": folder / "text_tokenizer"},
    )
    yield Call(processor.preprocess, {"raw_input": raw})
    settings = processor.settings()
    clip = processor.clip(settings, raw["images"])
    yield Call(processor.settings, {"mode": "policy", "domain": "droid"})
    yield Call(processor.clip, {"call": settings, "images": raw["images"]})
    yield Call(processor.caption, {"call": settings, "clip": clip, "task": PICK})
    yield Call(
        processor.request,
        {"call": settings, "clip": clip, "caption": PICK, "state": None, "action_prefix": None},
        {"cond_action": None},
    )
    yield Call(
        lambda **given: processor.preprocess({**raw, **given}),
        {"images": raw["images"], "task": PICK},
        name="Cosmos3PolicyProcessor.preprocess",
    )
    yield Call(processor.postprocess, {"result": engine.step(request), "processed": asked})
    views = {view: np.zeros((36, 64, 3), np.uint8) for view in DROID_RIG.views}
    yield Call(processor.compose, {"views": views, "rig": DROID_RIG})
    recorded = Path.cwd() / "film.mp4"
    with VideoWriter(recorded, 15) as film:
        for _ in range(17):
            film.write(np.zeros((96, 128, 3), np.uint8))
    yield Call(processor.read_film, {"path": recorded, "mode": "policy"})


def the_worlds() -> Iterator[Call]:
    yield Call(worlds.get_world, {"name": "libero"})
    yield Call(worlds.Variation, {})
    yield Call(worlds.Task, {"name": "sweep", "instruction": PICK, "horizon_s": 1.0, "starts": 3})
    yield Call(worlds.varied, {"least": 0.0, "largest": 1.0, "short": "n", "whole": True})


BUILDERS = dict(
    zip(
        GROUPS,
        (actions, control, policies, simulation, recordings, engines, the_worlds),
        strict=True,
    )
)
NEEDS_MORE = {
    "Cosmos3Engine",  # the parts of a checkpoint
    "Cosmos3Policy.restore",  # what snapshot() returned
    "Reasoner",
    "PolicyOptions.backend_with",  # called by Cosmos3Policy, with its arguments
    "PolicyOptions.once",
    "PolicyOptions.with_arguments",
    "ParallelConfig.check_transformer",  # a checkpoint's config
    "ParallelConfig.join",  # other processes
    "Robot.judge_of",  # called by a session, with what it has checked
    "Robot.run_episode",
    "register",  # strands-robots
}
ANSWERS = {
    "Executed",
    "RecordedEpisode",
    "RecordedLimb",
    "Rollout",
    "RunOptions",
    "SessionState",
    "Start",
}
"""Values that the package makes itself, or hands on to a method that checks them."""
FOR_HEIRS = {"Policy", "Session", "World"}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    """The good calls of each group, made in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("calls"))
        yield {group: list(build()) for group, build in BUILDERS.items()}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)


def public_callables() -> set[str]:
    """``name`` of public functions and classes that take an argument, and ``Class.method`` of the
    classes on docs/api.md.
    """
    inits = [Path(package.__file__), *sorted(Path(package.__file__).parent.glob("*/__init__.py"))]
    modules = [
        importlib.import_module(".".join(init.parent.relative_to(ROOT).parts)) for init in inits
    ]
    public = {
        name: getattr(module, name) for module in modules for name in getattr(module, "__all__", ())
    }
    page = re.findall(r"^::: (\S+)\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    names = {
        name
        for name, value in public.items()
        if (inspect.isfunction(value) or isinstance(value, type)) and takes_arguments(value)
    }
    for module, name in page:
        cls = getattr(importlib.import_module(module), name)
        if isinstance(cls, type) and name not in ANSWERS | FOR_HEIRS:
            names |= {
                f"{name}.{method}"
                for method, value in vars(cls).items()
                if method[0] != "_" and takes_arguments(getattr(value, "__func__", value))
            }
    return names


def takes_arguments(value: Any) -> bool:
    return callable(value) and bool(set(inspect.signature(value).parameters) - {"self", "cls"})


def test_every_public_callable_has_a_good_call(calls):
    covered = {call.label for group in calls.values() for call in group}
    assert public_callables() - covered - ANSWERS - FOR_HEIRS - NEEDS_MORE == set()
    for call in itertools.chain(*calls.values()):
        call.function(**call.good, **call.fixed)


def untyped(call: Call, rng: np.random.Generator) -> str | None:
    """Run a malformed call; return what it raised that is not of this package, or None."""
    label, arguments = call.spoiled(rng)
    try:
        call.function(**arguments)
    except Cosmos3Error as error:
        return None if str(error) else f"{label}: no message"
    except Exception as error:
        return f"{label}: {type(error).__name__}: {error!s:.120}"
    return None


def failures(calls: list[Call], times: int) -> list[str]:
    found = [
        untyped(call, np.random.default_rng([number, place]))
        for place, call in enumerate(calls)
        for number in range(times)
    ]
    return [failure for failure in found if failure]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_malformed_calls(calls, group: str):
    assert not failures(calls[group], 12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_thousands_of_malformed_calls(calls, group: str):
    assert not failures(calls[group], 100)
