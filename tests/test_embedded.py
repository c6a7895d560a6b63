"""The checkpoint that comes with this package: whole, small, used by default, and refused where it
knows nothing.

How often it succeeds stands in its card, from ``strands-cosmos3 evaluate``; a handful of episodes
show that what is packaged is what was judged.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from helpers.without_torch import WITHOUT_TORCH
from strands_cosmos3 import Cosmos3Policy, PolicyOptions, Robot
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.cli import main
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.engine.request import pixel_to_latent_shape
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import EXTRAS, Extra
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.sim.render import Renderer

COLOURS = ("red", "green", "blue")
FEW = pytest.param((7001,), COLOURS[:2], id="few")
MORE = pytest.param((7001, 7002), COLOURS, id="more", marks=pytest.mark.slow)


class Blind(NativeBackend):
    """The same with black pictures."""

    def infer(self, request):
        return super().infer(
            dataclasses.replace(request, composite=np.zeros_like(request.composite))
        )


@pytest.fixture(scope="module")
def robot() -> Robot:
    return Robot()


def share_reached(robot, backend, seeds, colours) -> float:
    """Of episodes with each colour and seed."""
    successes = []
    with Cosmos3Policy(embodiment="droid", robot="panda", backend=backend) as policy:
        for seed in seeds:
            for colour in colours:
                asked = {
                    "instruction": f"reach the {colour} cube",
                    "policy": policy,
                    "task": "reach",
                    "seed": seed,
                }
                successes.append(robot.run_policy(**asked, duration=4.5).success)
    return sum(successes) / len(successes)


def test_it_is_whole_and_small():
    folder = embedded_checkpoint()
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 20e6
    Checkpoint.open(folder).verify()
    assert (
        "simulated table"
        in json.loads((folder / "checkpoint.json").read_text())["strands_cosmos3"]["label"]
    )


def test_diffusers_classes_load_it():
    from diffusers import AutoencoderKLWan, Cosmos3OmniTransformer

    folder = embedded_checkpoint()
    assert (
        Cosmos3OmniTransformer.from_pretrained(folder, subfolder="transformer").config[
            "hidden_size"
        ]
        == 192
    )
    assert (
        len(AutoencoderKLWan.from_pretrained(folder, subfolder="vae").config["latents_mean"]) == 48
    )


def test_it_is_what_runs_where_nothing_else_is_named():
    with Cosmos3Policy(embodiment="droid", robot="panda") as policy:
        assert policy.info.name == PolicyOptions().bundled_backend
        assert policy.info.requires_images
        assert not policy.info.needs_privileged
        with closing(NativeBackend(embedded_checkpoint())) as named:
            assert policy.model_sha256 == policy.model_sha256 == named.model_sha256
            served = ServedPolicy(named, "droid", named.info.action_space)
            served.warm_up()  # it refuses what it does not understand
        assert policy.prefix_rows == 0, "it declares none: it succeeds more often without"
        assert policy.prefix_rows == 0


def test_onnx_runs_it_where_it_heeds_every_option(monkeypatch):
    """Graphs come with it; what they do not heed, torch's engine does."""
    monkeypatch.setattr(Extra, "absent", ())
    assert PolicyOptions().bundled_backend == "onnx"
    assert PolicyOptions.of({"num_steps": 2, "replan_rows": 4}).bundled_backend == "onnx"
    for option in ({"quantize": "int8"}, {"dtype": "bfloat16"}, {"device": "cpu"}, {"sound": True}):
        assert PolicyOptions.of(option).bundled_backend == "native", option
    monkeypatch.setattr(Extra, "absent", ("onnxruntime",))
    assert PolicyOptions().bundled_backend == "native"


def test_a_copy_of_it_runs_as_graphs_where_torch_is_absent(monkeypatch, tmp_path):
    """Its message would ask for PyTorch, although all that it needs is there."""
    folder = embedded_checkpoint()
    (tmp_path / "bare").mkdir()
    names = {extra: name for name, extra in EXTRAS.items()}
    missing = {"engine": ("torch",), "onnx": ()}
    monkeypatch.setattr(Extra, "absent", property(lambda extra: missing[names[extra]]))
    assert PolicyOptions().backend_with(folder) == "onnx"
    assert PolicyOptions().backend_with(str(folder)) == "onnx"
    assert PolicyOptions().backend_with(tmp_path / "bare") == "native"
    assert PolicyOptions.of({"quantize": "int8"}).backend_with(folder) == "native"
    assert PolicyOptions.of({"backend": "native"}).backend_with(folder) == "native"
    missing["engine"] = ()
    assert PolicyOptions().backend_with(folder) == "native"


_COMMAND = (
    WITHOUT_TORCH
    + """
from strands_cosmos3.cli import main
status = main(sys.argv[1:])
assert not {"scipy.stats", "scipy.signal"} & sys.modules.keys()
sys.exit(status)
"""
)


def test_the_first_command_needs_neither_torch_nor_scipy_s_slow_parts(tmp_path):
    """With a film and a plot, of which the film shows what the policy predicts."""
    pytest.importorskip("onnxruntime")
    outputs = {
        f"--{name}": tmp_path / f"r.{end}" for name, end in (("video", "mp4"), ("json", "json"))
    }
    command = [sys.executable, "-c", _COMMAND, "rollout", "--duration", "2"]
    command += [str(part) for pair in outputs.items() for part in pair]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stderr  # two seconds need not be enough
    episode = json.loads(outputs["--json"].read_text())["episodes"][0]
    assert episode["steps"]["total"] > 8
    assert outputs["--video"].stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "clip_frames", "frames"),
    [
        ({}, 1, None),
        ({"decode_video": "preview"}, 17, 17),
        ({"decode_video": "preview", "policy_frames": 1}, 1, 1),
        ({"policy_frames": 17}, 17, None),
    ],
)
def test_it_predicts_a_video_where_one_is_wanted(robot, options, clip_frames, frames, monkeypatch):
    """Actions alone are the default; a named length wins."""
    asked, request = [], Cosmos3PolicyProcessor.request

    def spy(self, *given, **rows):
        asked.append(request(self, *given, **rows))
        return asked[-1]

    monkeypatch.setattr(Cosmos3PolicyProcessor, "request", spy)
    with Cosmos3Policy(embodiment="droid", robot="panda", options=options) as policy:
        robot.run_policy(instruction="reach the red cube", policy=policy, duration=0.1)
        video = policy.last_rollout["video"]
    assert (None if video is None else len(video)) == frames
    assert asked[-1].video_shape[0] == pixel_to_latent_shape(clip_frames, 128, 144)[0]


@pytest.mark.parametrize(("seeds", "colours"), [FEW, MORE])
def test_it_reaches_the_cube_that_it_is_told(robot, seeds, colours):
    assert share_reached(robot, "native", seeds, colours) >= 4 / 6


@pytest.mark.parametrize(("seeds", "colours"), [FEW, MORE])
def test_without_pictures_it_does_not(robot, seeds, colours, monkeypatch):
    monkeypatch.setattr(Renderer, "render", lambda renderer, *_: np.zeros_like(renderer._frame))
    assert share_reached(robot, Blind(embedded_checkpoint()), seeds, colours) <= 1 / 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"embodiment": "umi", "robot": "panda"},
            "embodiment 'droid' or 'droid_lerobot' on its own simulated table",
        ),
        ({"embodiment": "droid"}, "robot 'panda' or 'franka'"),
    ],
)
def test_it_is_not_offered_for_anything_else(options, says):
    with pytest.raises(ConfigError, match=says):
        Cosmos3Policy(**options)


def test_the_command_rolls_it_out(tmp_path: Path):
    out = tmp_path / "r.json"
    status = main(
        [
            "rollout",
            "--task",
            "reach",
            "--instruction",
            "reach the red cube",
            "--seed",
            "7001",
            "--duration",
            "0.5",
            "--json",
            str(out),
        ]
    )
    (episode,) = json.loads(out.read_text())["episodes"]
    assert status == (not episode["success"])
    with closing(NativeBackend(embedded_checkpoint())) as named:
        assert episode["model_sha256"] == named.model_sha256
