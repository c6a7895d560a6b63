"""A whole run on a handful of pictures: stages, gate, going on, and that the averaged weights are what is released."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from strands_cosmos3.cli import main
from strands_cosmos3.commands.train import plot
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.errors import ConfigError, TrainingError
from strands_cosmos3.training import run as run_module
from strands_cosmos3.training.matching import FlowConfig
from strands_cosmos3.training.phrases import GOALS
from strands_cosmos3.training.release import load_vae
from strands_cosmos3.training.run import SmallRun
from strands_cosmos3.training.run_config import RunConfig, tier_of
from strands_cosmos3.training.shards import pack, shard_path, write_shard
from strands_cosmos3.training.vae import ColourGate, flat_first_frames, to_pixels
from strands_cosmos3.training.windows import PictureWindows

TINY = RunConfig(
    hidden=64,
    layers=2,
    latent_channels=16,
    vae_base=8,
    vae_steps=1,
    vae_clip_steps=1,
    policy_steps=4,
    joint_steps=2,
    vae_batch=1,
    policy_batch=8,
    joint_batch=2,
    clip_every=12,
)


@pytest.fixture(scope="module")
def shards(records, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for i in range(2):
        write_shard(shard_path(folder, i), pack(records))
    return folder


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr(run_module, "_GATE_PICTURES", 8)
    monkeypatch.setattr(run_module, "_HELD_OUT_WINDOWS", 16)
    monkeypatch.setattr(run_module, "_JUDGED_CLIPS", 1)


@pytest.fixture
def passing_gate(monkeypatch):
    monkeypatch.setattr(run_module, "colour_gate", lambda *_: ColourGate(1.0, {"red": 1.0, "green": 1.0, "blue": 1.0}, 30.0))


def test_no_policy_is_trained_on_latents_that_lose_colours(shards, tmp_path):
    with pytest.raises(TrainingError, match="does not keep colours apart"):
        SmallRun(tmp_path, shards, TINY).train_vae()
    assert json.loads((tmp_path / "vae/gate.json").read_text())["psnr"] < 25
    assert not (tmp_path / "vae/final.pt").exists()
    assert not (tmp_path / "policy").exists()


def test_the_command_trains_and_a_second_policy_takes_the_first_ones_vae(shards, tmp_path, passing_gate, capsys):
    small = ["--demos", str(shards), "--until", "policy", "--hidden", "64", "--layers", "2"]
    small += ["--vae-steps", "1", "--vae-clip-steps", "0", "--policy-steps", "2", "--policy-batch", "4"]
    assert main(["train", "--out", str(tmp_path / "one"), *small]) == 0
    assert "one/policy/checkpoint" in capsys.readouterr().out.replace("\n", "")
    second = ["train", "--out", str(tmp_path / "two"), *small, "--vae", str(tmp_path / "one"), "--seed", "1"]
    assert main(second) == 0
    vae = "vae/diffusion_pytorch_model.safetensors"
    transformer = "transformer/diffusion_pytorch_model.safetensors"
    one, two = (tmp_path / name / "policy/checkpoint" for name in ("one", "two"))
    assert (one / vae).read_bytes() == (two / vae).read_bytes()
    assert (one / transformer).read_bytes() != (two / transformer).read_bytes()
    assert not (tmp_path / "two/vae/curve.jsonl").exists()  # nothing of it was trained
    with pytest.raises(ConfigError, match="no finished VAE"):
        SmallRun(tmp_path / "three", shards, TINY).take_vae(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"vae_base 12 \(here 8\)"):
        SmallRun(tmp_path / "three", shards, TINY).take_vae(tmp_path / "one")


def test_a_run_from_demonstrations_to_checkpoints(shards, tmp_path, passing_gate):
    stages = []
    run = SmallRun(tmp_path, shards, TINY, lambda stage, done, of, parts: stages.append((stage, done, of)))
    vae = run.train_vae()
    checkpoint = run.train_policy(vae)
    assert ("policy", 4, 4) in stages
    state = torch.load(tmp_path / "policy/state.pt", weights_only=True)
    released = load_file(checkpoint / "transformer/diffusion_pytorch_model.safetensors")
    key, name = "layers.1.mlp_moe_gen.up_proj.weight", "transformer.generation.layers.1.mlp_moe_gen.up_proj.weight"
    assert torch.equal(released[key], state["ema"][name].half())  # the average, not the last weights
    assert not torch.equal(released[key], state["model"][name].half())
    errors = json.loads((tmp_path / "policy/held_out.jsonl").read_text().splitlines()[-1])
    assert (errors["step"], errors["windows"]) == (4, 32)
    assert errors["end_mm"] > 0

    metadata = checkpoint / "checkpoint.json"
    written = metadata.read_text()
    assert json.loads(written)["strands_cosmos3"]["steps"] == 4
    metadata.write_text(written.replace('"steps": 4', '"steps": 2'))  # Ctrl-C came in the last release

    again = SmallRun(tmp_path, shards, TINY)
    first = (tmp_path / "vae/final.pt").read_bytes()
    assert again.train_policy(again.train_vae()) == checkpoint  # nothing is left to be trained
    assert (tmp_path / "vae/final.pt").read_bytes() == first

    assert json.loads(metadata.read_text())["strands_cosmos3"]["steps"] == 4
    Checkpoint.open(checkpoint).verify()
    again_released = load_file(checkpoint / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(tensor, released[name]) for name, tensor in again_released.items())
    assert len((tmp_path / "policy/held_out.jsonl").read_text().splitlines()) == 1

    joint = again.train_joint(again.train_vae())
    with Cosmos3Engine.from_pretrained(joint, dtype=torch.float32, decode_video=True) as engine:
        assert engine.checkpoint.policy_frames == (17, 1)
        assert "joint" in engine.checkpoint.metadata["label"]
    dynamics = json.loads((tmp_path / "joint/dynamics.json").read_text())
    assert dynamics["clips"] >= 1
    assert dynamics["copy_frame_psnr"] > dynamics["forward_db"]  # nothing was learnt, and the figures say so
    assert dynamics["inverse_mm"] > 10
    curve = [json.loads(line) for line in (tmp_path / "joint/curve.jsonl").read_text().splitlines()]
    assert {"action", "video", "alone"} <= set(curve[-1])
    optimised = curve[-1]["action"] + FlowConfig().video * curve[-1]["video"] + curve[-1]["alone"]
    assert curve[-1]["loss"] == pytest.approx(optimised, abs=1e-5)
    assert plot(tmp_path).stat().st_size > 5_000

    on = RunConfig(**{**vars(TINY), "seed": 3, "joint_steps": 1})
    goes_on = SmallRun(tmp_path / "on", shards, on, start=checkpoint)
    motion = goes_on.train_vae()  # of the checkpoint's VAE nothing changes that a first frame passes through
    assert not (tmp_path / "on/vae/curve.jsonl").exists()
    picture = to_pixels(goes_on.demos.frames([0]))
    assert torch.equal(
        motion.encode(picture).latent_dist.mode(),
        flat_first_frames(load_vae(Checkpoint.open(checkpoint))).encode(picture).latent_dist.mode(),
    )
    assert motion.config["latents_mean"] == json.loads((checkpoint / "vae/config.json").read_text())["latents_mean"]
    begun = goes_on._first_policy().state_dict()
    assert torch.equal(begun["transformer.generation.layers.1.mlp_moe_gen.up_proj.weight"].half(), released[key])
    assert goes_on.state == Checkpoint.open(checkpoint).state_row
    further = goes_on.train_joint(motion)
    assert "_name_or_path" not in json.loads(
        (further / "vae/config.json").read_text()
    )  # whose folder it was is nobody's business
    assert Checkpoint.open(further).policy_frames == (17, 1)
    assert (further / "text_tokenizer/tokenizer.json").read_bytes() == (
        checkpoint / "text_tokenizer/tokenizer.json"
    ).read_bytes()
    with pytest.raises(ConfigError, match="checkpoint"):
        SmallRun(tmp_path / "on", shards, on)

    with pytest.raises(ConfigError, match="hidden 64 "):
        SmallRun(tmp_path, shards, RunConfig(**{**vars(TINY), "hidden": 96}))


def test_a_folder_of_an_older_version_opens_where_nothing_is_decided_by_what_it_lacks(shards, records, tmp_path):
    SmallRun(tmp_path / "run", shards, TINY)
    path = tmp_path / "run/settings.json"
    settings = json.loads(path.read_text())
    older = {name: value for name, value in settings.items() if name not in ("joint_forward", "joint_inverse")}
    path.write_text(json.dumps(older))
    SmallRun(tmp_path / "run", shards, TINY)
    assert json.loads(path.read_text()) == settings
    path.write_text(json.dumps(older))
    (tmp_path / "run/joint").mkdir()
    (tmp_path / "run/joint/state.pt").touch()
    with pytest.raises(ConfigError, match="older version, which did not record joint_forward, joint_inverse"):
        SmallRun(tmp_path / "run", shards, TINY)
    path.write_text(json.dumps({**settings, "speed": 3}))
    with pytest.raises(ConfigError, match="another version, with speed"):
        SmallRun(tmp_path / "run", shards, TINY)
    path.write_text(json.dumps(settings))
    other = tmp_path / "other"
    for i in range(2):
        other.mkdir(exist_ok=True)
        write_shard(shard_path(other, i), pack(records[::-1]))
    with pytest.raises(ConfigError, match=r"demos .*now .*other"):
        SmallRun(tmp_path / "run", other, TINY)


def test_a_start_brings_its_sizes(released, shards, tmp_path):
    other = RunConfig(**{**vars(TINY), "layers": 3})
    with pytest.raises(ConfigError, match=r"has layers 2 \(here 3\)"):
        SmallRun(tmp_path / "on", shards, other, start=released)
    assert not (tmp_path / "on").exists()
    SmallRun(tmp_path / "on", shards, TINY, start=released)


def test_the_tier_is_that_of_the_pictures(records, tmp_path, monkeypatch):
    seen = []

    def begun(self, folder, demos, config, *_):
        seen.append(config.tier)
        raise ConfigError("enough")

    monkeypatch.setattr(SmallRun, "__init__", begun)
    for tier, (height, width) in {128: (128, 160), 256: (256, 320)}.items():
        frames = [np.zeros((len(record.frames), height, width, 3), np.uint8) for record in records]
        grown = [replace(record, frames=pictures) for record, pictures in zip(records, frames, strict=True)]
        (tmp_path / str(tier)).mkdir()
        write_shard(shard_path(tmp_path / str(tier), 0), pack(grown))
        assert main(["train", "--out", str(tmp_path / "run"), "--demos", str(tmp_path / str(tier))]) == 2
    assert seen == [128, 256]
    with pytest.raises(ConfigError, match=r"no tier's canvas.*128, 256"):
        tier_of(100, 100)


def test_windows_drop_prompts_as_often_as_they_should(demos, captions):
    latents = np.zeros((len(demos.label_ticks), 16, 8, 9), np.float16)
    windows = PictureWindows(demos, latents, _state(), captions, batch=4000, dropout=0.08)
    batch = windows.batch(0)
    dropped = batch.prompt == len(GOALS)
    assert dropped.float().mean().item() == pytest.approx(0.08, abs=0.015)
    assert batch.prompts[-1] == captions.empty
    assert torch.equal(windows.batch(0).prompt, batch.prompt)
    assert not torch.equal(windows.batch(1).prompt, batch.prompt)


def test_a_window_is_labelled_for_the_sentence_it_reads(demos, captions):
    latents = np.zeros((len(demos.label_ticks), 16, 8, 9), np.float16)
    windows = PictureWindows(demos, latents, _state(), captions, batch=64, dropout=0.0)
    rng, batch = np.random.default_rng([0, 0]), windows.batch(0)
    chosen = rng.integers(len(windows), size=64)
    for i in range(64):
        label = demos.labels[chosen[i], int(batch.prompt[i])]
        np.testing.assert_allclose(batch.rows[i], np.clip(label, -3, 3), atol=1e-6)
        assert batch.prompts[int(batch.prompt[i])] in captions.by_goal[int(batch.prompt[i])]


def _state():
    from strands_cosmos3.engine.state import StateRow

    return StateRow((0.0,) * 10, (1.0,) * 10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--out", "x"], "give --demos"),
        (["train", "--out", "x", "--demos", "d", "--dataset", "e"], "belong together"),
        (["train", "--out", "x", "--demos", "d", "--policy-batch", "0"], "--policy-batch"),
        (["demos", "--out", "x", "--episodes", "0"], "--episodes"),
        (["demos", "--out", "x", "--bend", "2"], "--bend is a share"),
    ],
)
def test_bad_usage_is_said_before_anything_is_made(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_post_training_in_several_processes_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--out", str(tmp_path / "x"), "--checkpoint", "c", "--dataset", "d"]) == 2
    assert "start it without torchrun" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_commands_from_end_to_end(tmp_path, passing_gate, capsys):
    demos, out = tmp_path / "demos", tmp_path / "run"
    assert main(["demos", "--out", str(demos), "--episodes", "24", "--workers", "2"]) == 0
    few = ["--vae-steps", "1", "--vae-clip-steps", "1", "--policy-steps", "2", "--joint-steps", "2", "--hidden", "64"]
    assert main(["train", "--out", str(out), "--demos", str(demos), *few, "--layers", "2"]) == 0
    assert (out / "joint/checkpoint/checkpoint.json").exists()
    assert (out / "curves.png").exists()
