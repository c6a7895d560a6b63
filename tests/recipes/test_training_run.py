"""A whole run on a handful of pictures: stages, gate, going on, and that the averaged weights
are what is released.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import TextColumn
from safetensors.torch import load_file

from helpers.parity import agree
from recipes.table_policy import predictions as decoder_stage
from recipes.table_policy import run as run_module
from recipes.table_policy import vae_trainer
from recipes.table_policy.block_codes import BlockCodes
from recipes.table_policy.colour_gate import ColourGate
from recipes.table_policy.config import RunConfig, tier_of
from recipes.table_policy.demos import Demos, write_demos
from recipes.table_policy.record import main as record_main
from recipes.table_policy.run import TrainingRun
from recipes.table_policy.train import STAGES
from recipes.table_policy.train import main as train_main
from recipes.table_policy.windows import executed_rows
from recipes.vae_training import load_vae
from strands_cosmos3.cli import main
from strands_cosmos3.commands.progress import progress_bar
from strands_cosmos3.commands.train import plot_curves
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.sequence import patchify
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.errors import ConfigError, MissingDependencyError, TrainingError
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.training import closed_loop, dynamics
from strands_cosmos3.training.adapters import load_policy
from strands_cosmos3.training.closed_loop import ClosedLoop, measure, measure_apart
from strands_cosmos3.training.loop import Loop
from strands_cosmos3.training.matching import FlowConfig, add_noise
from strands_cosmos3.training.post import PostTraining
from strands_cosmos3.training.state import read_state
from strands_cosmos3.training.windows import FORWARD, Batch, to_pixels

TINY = RunConfig(
    hidden=64,
    layers=2,
    latent_channels=16,
    vae_base=8,
    vae_steps=1,
    vae_decoder_steps=1,
    policy_steps=4,
    joint_steps=2,
    decoder_steps=2,
    preview_steps=2,
    vae_batch=1,
    policy_batch=8,
    joint_batch=2,
    clip_every=2,
)


@pytest.fixture(scope="module")
def shards(records, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_demos(folder, [*records, *records])
    return folder


@pytest.fixture(autouse=True, scope="module")
def few_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vae_trainer, "_GATE_PICTURES", 8)
        patch.setattr(run_module, "_VALIDATION_WINDOWS", 16)
        patch.setattr(run_module, "_RECORDED_CLIPS", 1)
        yield


def let_the_gate_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        vae_trainer,
        "colour_gate",
        lambda *_: ColourGate(1.0, {"red": 1.0, "green": 1.0, "blue": 1.0}, 30.0),
    )


@pytest.fixture
def passing_gate(monkeypatch):
    let_the_gate_pass(monkeypatch)


@dataclass(frozen=True)
class Trained:
    """A run after its policy stage, run again after an interrupted export, and after its joint
    stage.
    """

    folder: Path
    stages: list[tuple[str, int, int]]
    checkpoint: Path
    weights: dict[str, torch.Tensor]
    metadata: dict[str, Any]
    errors: list[dict[str, Any]]
    vae: bytes
    again: Path
    again_weights: dict[str, torch.Tensor]
    joint: Path


def vae_of(finished: Path, run: TrainingRun) -> Any:
    """The finished VAE of another run, in a run that may have it already."""
    shutil.copytree(finished / "vae", run.folder / "vae", dirs_exist_ok=True)
    return run.vae_trainer.train()


def plotted(folder: Path) -> Path:
    plot_curves(folder, {stage: stage for stage in STAGES})
    return folder / "curves.png"


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "transformer/diffusion_pytorch_model.safetensors")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory) -> Trained:
    folder, stages = tmp_path_factory.mktemp("run"), []
    with pytest.MonkeyPatch.context() as patch:
        let_the_gate_pass(patch)
        run = TrainingRun(
            folder,
            shards,
            TINY,
            lambda stage, done, total, metrics: stages.append((stage, done, total)),
        )
        checkpoint = run.train_policy(run.vae_trainer.train())
    weights, path = weights_of(checkpoint), checkpoint / "checkpoint.json"
    metadata, vae = (
        json.loads(path.read_text())["strands_cosmos3"],
        (folder / "vae/final.pt").read_bytes(),
    )
    errors = lines_of(folder / "policy/validation.jsonl")
    # Ctrl-C interrupted the last export
    path.write_text(path.read_text().replace('"steps": 4', '"steps": 2'))
    run = TrainingRun(folder, shards, TINY)
    finished = run.vae_trainer.train()
    again = run.train_policy(finished)
    again_weights = weights_of(again)
    joint = run.train_joint(finished)
    return Trained(
        folder, stages, checkpoint, weights, metadata, errors, vae, again, again_weights, joint
    )


KEY, NAME = (
    "layers.1.mlp_moe_gen.up_proj.weight",
    "transformer.generation.layers.1.mlp_moe_gen.up_proj.weight",
)


def test_no_policy_is_trained_on_latents_that_lose_colours(shards, tmp_path):
    with pytest.raises(TrainingError, match="does not keep colours apart"):
        TrainingRun(tmp_path, shards, TINY).vae_trainer.train()
    assert json.loads((tmp_path / "vae/gate.json").read_text())["psnr"] < 25
    assert not (tmp_path / "vae/final.pt").exists()
    assert not (tmp_path / "policy").exists()


def test_the_command_trains_and_a_second_policy_takes_the_first_ones_vae(
    shards, tmp_path, passing_gate, capsys
):
    small = ["--demos", str(shards), "--until", "policy", "--hidden", "64", "--layers", "2"]
    small += [
        "--vae-steps",
        "1",
        "--vae-decoder-steps",
        "1",
        "--policy-steps",
        "2",
        "--policy-batch",
        "4",
    ]
    assert train_main(["--out", str(tmp_path / "one"), *small]) == 0
    assert "one/policy/checkpoint" in capsys.readouterr().out.replace("\n", "")
    second = [
        "--out",
        str(tmp_path / "two"),
        *small,
        "--seed",
        "1",
    ]
    shutil.copytree(tmp_path / "one/vae", tmp_path / "two/vae")
    assert train_main(second) == 0
    vae = "vae/diffusion_pytorch_model.safetensors"
    transformer = "transformer/diffusion_pytorch_model.safetensors"
    one, two = (tmp_path / name / "policy/checkpoint" for name in ("one", "two"))
    assert (one / vae).read_bytes() == (two / vae).read_bytes()
    assert (one / transformer).read_bytes() != (two / transformer).read_bytes()
    first, copied = (tmp_path / name / "vae/curve.jsonl" for name in ("one", "two"))
    assert first.read_bytes() == copied.read_bytes()
    assert not (tmp_path / "two/vae_decoder").exists()  # nothing of it was trained


def test_a_policy_is_released_with_its_averaged_weights(trained):
    assert ("policy", 4, 4) in trained.stages
    state = torch.load(trained.folder / "policy/state.pt", weights_only=True)
    assert torch.equal(trained.weights[KEY], state["ema"][NAME].half())
    assert not torch.equal(trained.weights[KEY], state["model"][NAME].half())
    assert trained.metadata["steps"] == 4


def test_held_out_errors_are_recorded(trained):
    assert (trained.errors[-1]["step"], trained.errors[-1]["windows"]) == (4, 32)
    assert trained.errors[-1]["end_mm"] > 0


def test_an_interrupted_export_is_repeated_and_nothing_is_trained_again(trained):
    assert trained.again == trained.checkpoint
    assert (trained.folder / "vae/final.pt").read_bytes() == trained.vae
    assert (
        json.loads((trained.again / "checkpoint.json").read_text())["strands_cosmos3"]["steps"] == 4
    )
    Checkpoint.open(trained.again).verify()
    assert all(
        torch.equal(tensor, trained.weights[name]) for name, tensor in trained.again_weights.items()
    )
    assert len(lines_of(trained.folder / "policy/validation.jsonl")) == 1


def test_the_joint_checkpoint_predicts_video(trained):
    with Cosmos3Engine.from_pretrained(
        trained.joint, dtype=torch.float32, decode_video=True
    ) as engine:
        assert engine.checkpoint.policy_frames == (1, 17)
        assert "joint" in engine.checkpoint.metadata["label"]
        assert "prefix_rows" not in engine.checkpoint.metadata, "none were trained"
        assert 0 < engine.checkpoint.novelty_rmse < 1
        assert engine.checkpoint.preview is not None


def test_dynamics_of_an_untrained_model_are_bad(trained):
    dynamics = json.loads((trained.folder / "joint/dynamics.json").read_text())
    assert dynamics["clips"] >= 1
    assert dynamics["copy_frame_psnr"] > dynamics["forward_db"]
    assert dynamics["inverse_mm"] > 10
    assert dynamics["steps"] == Checkpoint.open(trained.joint).dynamics_steps == 1
    assert Checkpoint.open(trained.joint).future_from_actions
    assert not Checkpoint.open(trained.folder / "policy/checkpoint").future_from_actions, (
        "it has no future"
    )


def test_the_curve_has_the_parts_of_the_loss(trained):
    last = lines_of(trained.folder / "joint/curve.jsonl")[-1]
    assert {"loss", "action", "ends", "alone"} <= set(last)
    assert {"video", "forward"} & set(last)  # so few windows may all be of one kind
    assert plotted(trained.folder).stat().st_size > 5_000


def test_a_steps_loss_is_the_weighted_sum_of_its_parts(trained, shards):
    run, vae = TrainingRun(trained.folder, shards, TINY), load_vae(Checkpoint.open(trained.joint))
    clips, (pictures, _) = (
        run._clip_windows(run._latents(vae).clips(), TINY.joint_batch),
        run._pictures(vae, 2),
    )
    loss = run._loss(run._first_policy(), 1, 1, (clips, pictures), None)
    draws = [loss(step)[1] for step in range(8)]
    weights = {
        "action": 1.0,
        "alone": 1.0,
        "ends": TINY.end_points,
        "video": TINY.video,
        "forward": TINY.joint_forward_weight,
    }
    assert set().union(*draws) == {*weights, "auxiliary", "loss"}
    for seen in draws:
        seen = {name: float(value) for name, value in seen.items()}
        assert seen["loss"] == pytest.approx(
            sum(weight * seen.get(name, 0) for name, weight in weights.items()), abs=1e-5
        )


def test_a_step_is_the_mean_of_its_parts(trained, shards, monkeypatch):
    run, vae = TrainingRun(trained.folder, shards, TINY), load_vae(Checkpoint.open(trained.joint))
    clips, (pictures, _) = (
        run._clip_windows(run._latents(vae).clips(), TINY.joint_batch),
        run._pictures(vae, 4),
    )
    policy, gradients = run._first_policy(), []
    assert run._parts((clips, pictures)) == 1
    monkeypatch.setattr(run_module, "lower_precision", lambda *_, **__: nullcontext())
    monkeypatch.setattr(run_module, "_CPU_TOKENS", 40)
    assert run._parts((clips, pictures)) > 1
    for parts in (1, 2):
        loss = run._loss(policy, 1, parts, (clips, pictures), None)
        policy.zero_grad()
        for part in range(parts):
            (loss(3 * parts + part)[0] / parts).backward()
        gradients.append(
            {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        )
    assert len(gradients[0]) > 20
    for name, gradient in gradients[0].items():
        assert agree(gradients[1][name], gradient), name


def test_a_run_keeps_its_sizes(trained, shards):
    with pytest.raises(ConfigError, match="hidden 64 "):
        TrainingRun(trained.folder, shards, RunConfig(**{**vars(TINY), "hidden": 96}))


def test_a_run_with_action_prefixes_declares_them_and_needs_their_labels(trained, shards, tmp_path):
    short = RunConfig(**{**vars(TINY), "policy_steps": 1, "prefix_rows": 8})
    run = TrainingRun(tmp_path / "run", shards, short)
    checkpoint = run.train_policy(vae_of(trained.folder, run))
    assert Checkpoint.open(checkpoint).metadata["prefix_rows"] == 8
    with pytest.raises(
        ConfigError,
        match="prefix-rows is 9, and the longest action prefix of these demonstrations has 8",
    ):
        TrainingRun(tmp_path / "longer", shards, RunConfig(**{**vars(TINY), "prefix_rows": 9}))
    assert not (tmp_path / "longer").exists(), "a shorter one may be given for the same folder"


EPISODE = ClosedLoop(every=4, tasks=("reach",), episodes=1, limit_s=0.3)


def test_episodes_in_simulation_change_no_weight(trained, shards, tmp_path):
    """The same weights, to the bit, as without them."""
    run = TrainingRun(tmp_path / "run", shards, TINY, closed_loop=EPISODE)
    checkpoint = run.train_policy(vae_of(trained.folder, run))
    weights = weights_of(checkpoint)
    assert all(torch.equal(tensor, trained.weights[name]) for name, tensor in weights.items())
    assert lines_of(tmp_path / "run/policy/closed_loop.jsonl") == [{"step": 4, "reach": 0.0}]
    assert plotted(tmp_path / "run").stat().st_size > 5_000


def test_an_evaluation_that_was_interrupted_is_made_up_for(trained, shards, tmp_path, monkeypatch):
    seen = []

    def interrupted(checkpoint, how):
        seen.append(
            json.loads((checkpoint / "checkpoint.json").read_text())["strands_cosmos3"]["steps"]
        )
        if len(seen) == 1:
            raise KeyboardInterrupt
        return {"reach": 0.25, "reach_s": 3.0}

    monkeypatch.setattr(run_module, "measure_apart", interrupted)
    for _ in range(2):
        run = TrainingRun(tmp_path / "run", shards, TINY, closed_loop=replace(EPISODE, every=2))
        vae = vae_of(trained.folder, run)
        if not seen:
            with pytest.raises(KeyboardInterrupt):
                run.train_policy(vae)
        else:
            run.train_policy(vae)
    assert seen == [2, 2, 4]
    figures = lines_of(tmp_path / "run/policy/closed_loop.jsonl")
    assert figures == [{"step": step, "reach": 0.25, "reach_s": 3.0} for step in (2, 4)]
    run.train_policy(vae)
    assert seen == [2, 2, 4]  # nothing is due


@pytest.mark.parametrize(
    ("script", "said"),
    [("echo why >&2; exit 3", "failed: why"), ("exec sleep 600", "took more than 1 s")],
)
def test_an_evaluation_that_fails_does_not_end_training(tmp_path, monkeypatch, script, said):
    """It fails at once, or never ends; the latter process is killed."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(closed_loop.sys, "executable", str(program))
    monkeypatch.setattr(closed_loop, "_MOST_S", 600 if "exit" in script else 1)
    with pytest.warns(
        UserWarning, match=f"closed-loop evaluation of .*nowhere {said}.*Training goes on"
    ):
        assert measure_apart(tmp_path / "nowhere", EPISODE) is None


def test_successes_and_their_times_are_counted_by_task(monkeypatch):
    class Episodes(AssignmentRunner):
        def __init__(self, settings):
            self.settings = settings

        def run(self, assignment):
            good = assignment.task == "pick" and assignment.index != 1
            return {"task": assignment.task, "success": good, "duration_s": 2.0 + assignment.index}

        def close(self):
            pass

    monkeypatch.setattr(closed_loop, "AssignmentRunner", Episodes)
    how = ClosedLoop(every=1, episodes=4, tasks=("pick", "reach"))
    assert measure(Path("checkpoint"), how) == {"pick": 0.75, "pick_s": 11 / 3, "reach": 0.0}
    assert (how.due(7, 9), replace(how, every=0).due(9, 9), replace(how, every=4).due(9, 9)) == (
        True,
        False,
        True,
    )


@pytest.fixture(scope="module")
def with_decoder(trained, shards) -> Path:
    """The checkpoint of the decoder's stage."""
    with pytest.MonkeyPatch.context() as patch:
        let_the_gate_pass(patch)
        run = TrainingRun(trained.folder, shards, TINY)
        return run.train_decoder(run.vae_trainer.train(), trained.joint)


def test_the_decoders_stage_changes_nothing_but_the_vaes_decoder(trained, with_decoder):
    def weights(folder: Path, part: str) -> dict[str, torch.Tensor]:
        return load_file(folder / part / "diffusion_pytorch_model.safetensors")

    before, after = weights(trained.joint, "vae"), weights(with_decoder, "vae")
    changed = {
        name.split(".")[0]
        for name, tensor in after.items()
        if not torch.equal(tensor, before[name])
    }
    assert changed == {"decoder", "post_quant_conv"}
    for part in ("transformer", "preview_decoder"):
        assert (with_decoder / part / "diffusion_pytorch_model.safetensors").read_bytes() == (
            trained.joint / part / "diffusion_pytorch_model.safetensors"
        ).read_bytes()
    assert (with_decoder / "vae/config.json").read_bytes() == (
        trained.joint / "vae/config.json"
    ).read_bytes()
    Checkpoint.open(with_decoder).verify()


def test_the_decoders_stage_shows_every_labelled_clips_prediction_and_is_judged(
    trained, shards, with_decoder
):
    folder = with_decoder.parent
    demos = Demos.open(shards)
    labelled = np.isin(demos.clips(16)[:: TINY.clip_every], demos.label_ticks).sum()
    assert np.load(folder / "predicted.npy").shape == (
        labelled,
        *np.load(trained.folder / "latents/clips.npy").shape[1:],
    )
    assert json.loads((folder / "gate.json").read_text())["psnr"] == 30
    before, after = (
        json.loads((trained.folder / name / "dynamics.json").read_text())
        for name in ("joint", "decoder")
    )
    assert after["forward_db"] != before["forward_db"]
    assert (after["inverse_mm"], after["controls"]) == (before["inverse_mm"], before["controls"])


def test_a_decoder_belongs_to_one_joint_checkpoint(trained, shards, with_decoder):
    run = TrainingRun(trained.folder, shards, TINY)
    with pytest.raises(ConfigError, match="checkpoint"):
        run.train_decoder(None, trained.checkpoint)


def test_predicted_clips_are_the_start_less_the_velocity(shards, tmp_path, monkeypatch):
    """A model that knows the future predicts it: the sign, the order of patches and the given
    frame hold.
    """
    latents = torch.randn(2, 16, 5, 3, 5)
    batch = Batch(
        latents,
        torch.zeros(2, 10),
        torch.zeros(2, 16, 10),
        ((1, 2),),
        torch.zeros(2, dtype=torch.long),
        FORWARDS,
    )

    def knowing(policy, vision, action, timestep, noisy, rope, prompts, first):
        assert torch.equal(noisy[:, :first], torch.zeros_like(noisy[:, :first]))
        assert (timestep == 999).all()
        torch.testing.assert_close(
            vision.unflatten(1, (5, -1)), vision[:, None, :first].expand(-1, 5, -1, -1)
        )
        return vision[:, first:] - torch.stack([patchify(one, 2) for one in latents])[
            :, first:
        ], action

    monkeypatch.setattr(decoder_stage, "velocity", knowing)
    policy = TrainingRun(tmp_path / "run", shards, replace(TINY, latent_patch=2))._first_policy()
    made = decoder_stage.predict_clips(policy, batch, True, torch.Generator())
    torch.testing.assert_close(made, latents, atol=1e-5, rtol=0)


def test_the_engine_answers_forward_dynamics_as_training_does(trained, shards):
    """From the given frame, whatever the seed; a checkpoint that starts with noise depends on
    it.
    """
    run = TrainingRun(trained.folder, shards, TINY)
    opened = Checkpoint.open(trained.joint)
    latents = run._latents(load_vae(opened)).clips()
    ticks, windows = latents.ticks, run._clip_windows(latents)
    policy = load_policy(opened, get_embodiment("droid_lerobot").domain_id)
    expected = decoder_stage.predict_clips(
        policy, windows.forward_dynamics(np.arange(1)), True, torch.Generator()
    )
    with Cosmos3Engine.from_pretrained(trained.joint, dtype=torch.float32) as engine:
        judge = dynamics._ClipJudge(engine, PromptTokenizer(trained.joint / "text_tokenizer"), 1)
        (clip,) = run.demos.arm_clips(ticks[:1])
        common = judge._common(clip, to_pixels(clip.frames[None]))
        rows = torch.from_numpy(executed_rows(run.demos, ticks[:1]))[0]
        asked = Cosmos3ActionRequest(mode="forward_dynamics", cond_action=rows, **common)
        made, again = (engine.step(replace(asked, seed=seed))["video"] for seed in (0, 1))
        torch.testing.assert_close(made, expected, atol=0.02, rtol=0)
        torch.testing.assert_close(again, made)
        policy_request = Cosmos3ActionRequest(mode="policy", **common)
        by_seed = [engine.step(replace(policy_request, seed=seed))["video"] for seed in (0, 1)]
        assert not torch.allclose(*by_seed, atol=0.05)  # a policy starts at noise all the same
        noise = torch.randn(made.shape, generator=torch.Generator().manual_seed(0))
        assert not torch.allclose(
            engine.step(replace(asked, video_noise=noise))["video"], made, atol=0.05
        )
        engine.checkpoint = replace(opened, metadata={**opened.metadata, "dynamics_start": "noise"})
        of_noise = [engine.step(replace(asked, seed=seed))["video"] for seed in (0, 1)]
        assert not torch.allclose(*of_noise, atol=0.05)


def test_rates_of_each_stage_and_the_weights_that_it_begins_with(trained, shards, monkeypatch):
    rates, first = {}, {}

    class Captured(Exception):
        pass

    def capture(model, loss, how, folder, optimizers):
        muon = optimizers(dict(model.named_parameters()), how)[1]
        rates[folder.name] = (how.decay, muon.param_groups[0]["lr"] / TINY.joint_matrix_lr)
        first[folder.name] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if folder.name in ("policy", "joint"):
            raise Captured
        return Loop(model, loss, how, folder, optimizers)

    run = TrainingRun(trained.folder, shards, TINY)
    vae = load_vae(Checkpoint.open(trained.joint))
    monkeypatch.setattr(run_module, "Loop", capture)
    for stage in (run.train_policy, run.train_joint):
        with pytest.raises(Captured):
            stage(vae)
    assert [rates[stage] for stage in ("policy", "joint")] == [(0.4, 1), (0.8, 1)]
    averaged = read_state(trained.folder / "policy")[0]["ema"]
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in first["joint"].items())


def test_raw_latents_undo_the_encoders_scale(with_decoder, shards):
    opened = Checkpoint.open(with_decoder)
    vae, pixels = load_vae(opened), torch.rand(1, 3, 17, 32, 32) * 2 - 1
    with torch.no_grad():
        normalised = vae_trainer.encoder_of(vae)(pixels)
        raw = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(
        decoder_stage.raw_latents(vae)(normalised), raw, atol=1e-3, rtol=1e-3
    )


def test_the_decoder_stage_minds_an_error_of_a_strong_colour_three_times():
    blue, grey = torch.full((1, 3, 1, 1, 2), -0.5), torch.zeros(1, 3, 1, 1, 2)
    blue[:, 2] = 1.0
    pixels = torch.cat([blue[..., :1], grey[..., :1]], dim=-1)

    def loss(off):  # of the blue pixel, of the grey one
        drawn = pixels + torch.tensor(off).view(1, 1, 1, 1, 2)
        vae = SimpleNamespace(decode=lambda _: SimpleNamespace(sample=drawn))
        return decoder_stage.decoder_loss(vae, pixels, pixels)

    (of_blue, seen), (of_grey, _) = loss([0.1, 0.0]), loss([0.0, 0.1])
    assert of_blue / of_grey == pytest.approx(3.0)
    assert of_blue + of_grey == pytest.approx(0.01), "weights have a mean of one"
    assert seen["psnr"] == pytest.approx(10 * np.log10(4 / 0.005)), "a figure without weights"


def test_tokens_of_one_latent_are_trained_and_answered(trained, shards, tmp_path):
    config = replace(TINY, latent_patch=1, policy_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        let_the_gate_pass(patch)
        run = TrainingRun(tmp_path / "run", shards, config)
        vae = run.vae_trainer.train()
    checkpoint = run.train_policy(vae)
    assert weights_of(checkpoint)["proj_in.weight"].shape == (64, 16)
    latents = np.load(run.folder / "latents/pictures.npy")[:1]
    windows, _ = run._pictures(vae, 1)
    noised = add_noise(
        windows.batch(0), run.transformer_config, FlowConfig(), torch.Generator().manual_seed(0)
    )
    # and not a fourth of them
    assert noised.layout.vision_tokens == latents.shape[-1] * latents.shape[-2]
    assert Checkpoint.open(checkpoint).config.latent_patch_size == 1


FORWARDS = torch.full((2,), FORWARD)


def test_a_vae_from_nothing_is_an_encoder_of_codes_and_then_a_decoder(trained):
    def learnt(stage: str) -> set[str]:
        return {name.split(".")[0] for name in read_state(trained.folder / stage)[0]["model"]}

    assert learnt("vae") == {"encoder", "quant_conv"}
    assert learnt("vae_decoder") == {"decoder", "post_quant_conv"}
    codes = BlockCodes(**torch.load(trained.folder / "vae/codes.pt", weights_only=True))
    assert codes.components.shape == (3 * 4 * 16 * 16, TINY.latent_channels)


def test_a_fresh_model_has_its_own_rotary_base(trained):
    exported = json.loads((trained.checkpoint / "transformer/config.json").read_text())
    assert (
        exported["rope_theta"]
        == Checkpoint.open(trained.checkpoint).config.rope_theta
        == TINY.rope_theta
        == 100
    )


def test_a_released_checkpoint_names_no_path_of_this_machine(trained):
    assert "_name_or_path" not in json.loads((trained.joint / "vae/config.json").read_text())
    assert Checkpoint.open(trained.joint).policy_frames == (1, 17)


def test_without_steps_there_is_no_preview_decoder(shards, tmp_path):
    config = RunConfig(**{**vars(TINY), "preview_steps": 0})
    assert TrainingRun(tmp_path / "run", shards, config).train_preview(None) is None


def test_diffusers_does_not_complain_of_a_scale_for_each_latent_frame(trained, caplog):
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        vae = load_vae(Checkpoint.open(trained.joint))
    finally:
        logger.removeHandler(caplog.handler)
    assert len(vae.config["latent_frames"]) == 5
    assert caplog.records == []


def test_a_run_keeps_its_settings_and_demonstrations(shards, records, tmp_path):
    TrainingRun(tmp_path / "run", shards, TINY)
    TrainingRun(tmp_path / "run", shards, replace(TINY, joint_steps=9))
    with pytest.raises(ConfigError, match=r"joint_batch 2 \(now 3\)"):
        TrainingRun(tmp_path / "run", shards, replace(TINY, joint_batch=3))
    (tmp_path / "other").mkdir()
    write_demos(tmp_path / "other", records)
    with pytest.raises(ConfigError, match=r"ticks .*now"):
        TrainingRun(tmp_path / "run", tmp_path / "other", TINY)


def test_the_tier_is_that_of_the_pictures():
    assert [tier_of(*hw) for hw in ((128, 160), (256, 320))] == [128, 256]
    with pytest.raises(ConfigError, match=r"not a canvas of any tier.*128, 256"):
        tier_of(100, 100)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--out", "x", "--model", "m", "--dataset", "d", "--batch", "0"], "--batch"),
        (
            [
                "train",
                "--out",
                "x",
                "--model",
                "m",
                "--dataset",
                "d",
                "--evaluate-every",
                "5",
                "--evaluate-tasks",
                "fly",
            ],
            "unknown task 'fly'",
        ),
        (["demos", "--out", "x", "--episodes", "0"], "--episodes"),
        (["demos", "--out", "x", "--perturbed", "2"], "--perturbed must be from 0 to 1"),
    ],
)
def test_bad_usage_is_said_before_anything_is_made(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_commands_from_end_to_end(tmp_path, passing_gate, capsys):
    demos, out = tmp_path / "demos", tmp_path / "run"
    assert record_main(["--out", str(demos), "--episodes", "24", "--workers", "2"]) == 0
    few = [
        "--vae-steps",
        "1",
        "--vae-decoder-steps",
        "1",
        "--policy-steps",
        "2",
        "--joint-steps",
        "2",
        "--hidden",
        "64",
    ]
    few += ["--preview-steps", "2", "--decoder-steps", "2"]
    assert train_main(["--out", str(out), "--demos", str(demos), *few, "--layers", "2"]) == 0
    made = [
        Checkpoint.open(out / stage / "checkpoint").metadata["label"]
        for stage in ("joint", "decoder")
    ]
    assert [label.split("stage ")[1].split()[0] for label in made] == ["joint,", "joint,"]
    assert (out / "curves.png").exists()


def test_without_tensorboard_nothing_begins(shards, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingDependencyError, match="--no-tensorboard"):
        TrainingRun(tmp_path / "run", shards, TINY, tensorboard=True)
    with pytest.raises(MissingDependencyError, match="--no-tensorboard"):
        PostTraining(
            tmp_path / "checkpoint", tmp_path / "dataset", tmp_path / "run", tensorboard=True
        )
    assert not (tmp_path / "run").exists()


def test_progress_in_a_file_is_a_line_a_minute(monkeypatch):
    """Bars are for terminals: a log of hours would be empty without lines."""
    clock = [0.0]
    monkeypatch.setattr("strands_cosmos3.commands.progress.time.monotonic", lambda: clock[0])
    lines = {}
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with progress_bar(console, TextColumn("{task.fields[metrics]}")) as bar:
            task = bar.add_task("policy", total=600, metrics="")
            for clock[0] in range(0, 200, 10):
                bar.update(task, completed=clock[0], metrics="loss 0.5")
        text = console.file.getvalue()
        lines[terminal] = [
            line for line in text.splitlines() if line.startswith("policy") and "━" not in line
        ]
    assert [line.split()[1] for line in lines[False]] == ["0/600", "60/600", "120/600", "180/600"]
    assert all(line.endswith("loss 0.5") for line in lines[False])
    assert lines[True] == []
