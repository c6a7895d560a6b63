"""What training leaves is what the engine runs: one layout, one state row, one answer."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.options import backend_options
from helpers.training_data import CANVAS
from recipes.random_checkpoint import FactorySizes, transformer_config
from recipes.table_policy.captions import caption
from recipes.table_policy.predictions import predict_rows
from recipes.table_policy.release import export, released_weights
from recipes.table_policy.vae_trainer import encoder_of
from recipes.table_policy.windows import PictureWindows, state_row_of
from strands_cosmos3.actions.rotations import matrix_to_rot6d
from strands_cosmos3.backends.model_input import ModelInput
from strands_cosmos3.datasets.arm_rows import state_columns
from strands_cosmos3.embodiments import Sampling, get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.metadata import StateRow
from strands_cosmos3.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    LayoutError,
    VariantError,
)
from strands_cosmos3.resources import write_folder
from strands_cosmos3.training.adapters import released_key
from strands_cosmos3.training.windows import to_pixels
from strands_cosmos3.types import Request
from strands_cosmos3.worlds.table.phrases import TRAINED


def ask(folder, request: Request, frame) -> torch.Tensor:
    """The engine's answer in one step from pure noise, through the very processor that serves a
    robot.
    """
    with Cosmos3Engine.from_pretrained(folder, dtype=torch.float32) as engine:
        (made,) = ModelInput(engine.checkpoint, backend_options())([request], "native")
        assert tuple(made.cond_video_pixels.shape) == (1, 3, 1, *CANVAS)
        # the demonstration's own canvas, not one composed anew
        pixels = to_pixels(frame[None]).contiguous()
        asked = {"seed": 5, "use_karras_sigmas": False, "cond_video_pixels": pixels}
        result = engine.step(made.sampled(Sampling(1, 1.0, 5.0), **asked))
    return result["action"][0]


def request_at(demos, tick: int, instruction: str) -> Request:
    droid = get_embodiment("droid")
    return Request(
        embodiment=droid,
        action_space=droid.action_space("midtrain"),
        instruction=instruction,
        n_rows=16,
        q_rad=None,
        gripper=float(np.clip(demos.gripper_opening[tick], 0, 1)),
        limb_poses={"arm": demos.T_base_cosmos[tick]},
        composite=np.zeros((540, 640, 3), np.uint8),
    )


def test_the_engine_answers_what_training_computed(released, policy, vae, demos, captions):
    """Picture, caption, state row, clock, head, order of rows: all of it, from the demonstration
    to the engine's answer.
    """
    label, goal, sentence = 4, 4, 1
    tick = int(demos.label_ticks[label])
    latents = encoder_of(vae)(to_pixels(demos.frames[demos.label_ticks]))[:, :, 0, :, :9].numpy()
    windows = PictureWindows(demos, latents, state_row_of(demos), captions)
    prompts = tuple(sentences[sentence] for sentences in captions.by_goal)
    batch = windows.pick(np.array([label]), np.array([goal]), prompts, np.array([goal]))
    noise = torch.from_numpy(np.random.RandomState(5).standard_normal((17, 64)).astype(np.float32))[
        1:, :10
    ]
    trained = predict_rows(policy, batch, noise[None])[0]
    answered = ask(released, request_at(demos, tick, "pick the green cube up"), demos.frames[tick])
    # the sampler starts at 0.9998, training at 1
    torch.testing.assert_close(answered, trained, rtol=0, atol=2e-3)
    other = ask(released, request_at(demos, tick, "pick the blue cube up"), demos.frames[tick])
    assert (other - answered).abs().max() > 0.02  # and it reads


def test_the_state_row_is_the_measured_pose_and_opening(released, demos):
    found = Checkpoint.open(released)
    assert found.state_row == state_row_of(demos)
    (made,) = ModelInput(found, backend_options())(
        [request_at(demos, 7, "reach the red cube")], "native"
    )
    assert made.action_prefix is not None
    pose = demos.T_base_cosmos[7]
    raw = np.array(
        [*pose[:3, 3], *matrix_to_rot6d(pose[:3, :3]), np.clip(demos.gripper_opening[7], 0, 1)]
    )
    mean, std = np.array(found.state_row.mean), np.array(found.state_row.std)
    np.testing.assert_allclose(made.action_prefix[0, :10], (raw - mean) / std, atol=1e-6)
    np.testing.assert_allclose(state_columns(pose[None], np.array([raw[9]]))[0], raw)
    assert made.video_shape == (1, 8, 9)


def test_an_engine_without_a_state_is_refused(released, demos):
    with Cosmos3Engine.from_pretrained(released, dtype=torch.float32) as engine:
        (made,) = ModelInput(engine.checkpoint, backend_options())(
            [request_at(demos, 0, "reach the red cube")], "native"
        )
        with pytest.raises(InputError, match="state row"):
            engine.step(replace(made, action_prefix=None))


def test_diffusers_classes_load_the_folder_with_every_trained_weight(released, policy):
    """Their velocities with a state row are held to the engine's in tests/engine; here it is
    what they loaded.
    """
    from diffusers import AutoencoderKLWan, Cosmos3OmniTransformer

    stock = Cosmos3OmniTransformer.from_pretrained(released, subfolder="transformer").state_dict()
    for name, weight in policy.named_parameters():
        loaded = stock[released_key(name)]
        loaded = (
            loaded[8].view_as(weight) if released_key(name).startswith("action_proj") else loaded
        )
        assert torch.equal(loaded, weight), name
    vae = AutoencoderKLWan.from_pretrained(released, subfolder="vae")
    assert vae.config["latents_std"][0] == pytest.approx(0.7)


def test_what_is_exported_loads_in_half_precision(
    policy, vae, tokenizer, config_json, demos, tmp_path
):
    args = (
        tmp_path / "half",
        config_json,
        dict(policy.named_parameters()),
        vae,
        tokenizer,
        state_row_of(demos),
        128,
    )
    folder = export(*args, frames=(17, 1), label="x")
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 6e6
    metadata = json.loads((folder / "checkpoint.json").read_text())["strands_cosmos3"]
    assert metadata["policy_frames"] == [17, 1]
    found = Checkpoint.open(folder)
    assert found.policy_frames == (17, 1)
    assert found.replan_rows == 8
    assert (found.sampling.num_steps, found.sampling.flow_shift) == (3, 5.0)
    found.verify()


def test_a_clip_is_as_long_as_the_checkpoint_was_trained_with(
    policy, vae, tokenizer, config_json, demos, tmp_path
):
    args = (
        tmp_path / "both",
        config_json,
        dict(policy.named_parameters()),
        vae,
        tokenizer,
        state_row_of(demos),
        128,
    )
    found = Checkpoint.open(export(*args, frames=(17, 1), label="x"))
    request = request_at(demos, 0, "reach the red cube")
    for asked, latent_frames in ((None, 5), (17, 5), (1, 1)):
        (made,) = ModelInput(found, backend_options(policy_frames=asked))([request], "native")
        assert made.video_shape[0] == latent_frames
    with pytest.raises(ConfigError, match=r"policy_frames 9: .* 17 or 1"):
        ModelInput(found, backend_options(policy_frames=9))([request], "native")
    metadata = tmp_path / "both/checkpoint.json"
    metadata.write_text(re.sub(r"17,(?=\s+1\s)", "true,", metadata.read_text()))
    with pytest.raises(LayoutError, match=r"policy_frames must be 1 \+ a multiple of 4"):
        Checkpoint.open(tmp_path / "both")
    metadata.write_text(
        metadata.read_text().replace("true,", "17,").replace('"replan_rows": 8', '"replan_rows": 0')
    )
    with pytest.raises(LayoutError, match="replan_rows must be a whole number"):
        Checkpoint.open(tmp_path / "both")


def test_diffusers_backend_refuses_a_state_row(released):
    from strands_cosmos3.backends.diffusers import DiffusersBackend

    with pytest.raises(VariantError, match="state row"):
        DiffusersBackend(released)


@pytest.mark.parametrize(
    "state",
    [
        {"columns": "joints"},
        {"columns": "pose9_opening", "mean": [0.0] * 9, "std": [1.0] * 10},
        "pose",
        {"columns": "pose9_opening"},
    ],
)
def test_a_state_that_is_not_understood_is_refused(state):
    with pytest.raises(LayoutError, match="state"):
        StateRow.from_metadata({"state": state})


def test_a_folder_is_replaced_whole_and_found_again_after_a_kill(tmp_path):
    folder, old = tmp_path / "checkpoint", tmp_path / ".checkpoint.old"
    write_folder(folder, lambda hidden: (hidden / "a").write_text("first"))
    folder.rename(old)  # killed between the two renamings

    def stop(hidden):
        assert (folder / "a").read_text() == "first"
        (hidden / "a").write_text("torn")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(folder, stop)
    assert (folder / "a").read_text() == "first"
    write_folder(folder, lambda hidden: (hidden / "b").write_text("second"))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "checkpoint",
        "checkpoint/b",
    ]


def test_an_export_that_is_interrupted_leaves_the_checkpoint_before(
    released, policy, vae, tokenizer, config_json, demos
):
    before = {path: path.read_bytes() for path in released.rglob("*") if path.is_file()}
    # fails after the transformer is written
    torn = type(
        "Torn",
        (),
        {"config": vae.config, "state_dict": lambda _: {}, "named_modules": lambda _: ()},
    )()
    args = (
        released,
        config_json,
        dict(policy.named_parameters()),
        torn,
        tokenizer,
        state_row_of(demos),
        128,
    )
    with pytest.raises(RuntimeError, match="Missing key"):
        export(*args, frames=(17, 1), label="other")
    assert {path: path.read_bytes() for path in released.rglob("*") if path.is_file()} == before


def test_captions_are_short_and_keep_their_words(tokenizer, captions):
    assert max(len(ids) for sentences in captions.by_goal for ids in sentences) < 40
    sentences = [ids for sentences in captions.by_goal for ids in sentences]
    assert len(set(sentences)) == len(sentences) == sum(3 * len(TRAINED[verb]) for verb in TRAINED)
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(tokenizer)
    assert caption("pick up the red cube", CANVAS) in known.decode(captions.by_goal[3][0])


def test_a_trained_tensor_without_a_place_in_the_layout_is_not_dropped():
    config = TransformerConfig.from_dict(
        transformer_config(FactorySizes(32, 2, 2, 1, 16, 48, 8), "silu", 32)
    )
    with pytest.raises(CheckpointError, match="new_gate"):
        released_weights({"transformer.generation.new_gate.weight": torch.zeros(1)}, config, 8)
