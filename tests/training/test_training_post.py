"""Post-training: only what was named changes, the dataset's figures travel along, and the engine
loads what comes out.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.options import backend_options
from helpers.post_training import SMALL, SMALL_CANVAS, made_up_arm
from helpers.training_data import write_preview
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.actions.decode import decode_chunk, decode_pose_trajectory
from strands_cosmos3.actions.stats import load_action_stats
from strands_cosmos3.backends.model_input import ModelInput
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.datasets import ACTION, EE_POSE, Dataset, DatasetSpec, DatasetWriter, Feature
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training import post as post_module
from strands_cosmos3.training.adapters import (
    add_lora,
    merged_state,
    released_key,
    train_only,
)
from strands_cosmos3.training.arm_columns import ArmKeys
from strands_cosmos3.training.flow import read_prompts
from strands_cosmos3.training.matching import DataShard
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.post import STATISTICS, PostTraining
from strands_cosmos3.training.windows import cached_latents
from strands_cosmos3.types import ActionChunk, Request


@pytest.fixture(scope="module", params=["midtrain", "joint_pos"])
def space(request):
    return request.param


ONE_SPACE = pytest.mark.parametrize("space", ["joint_pos"], indirect=True)
"""Of what is alike in both; with joint angles there are no poses, and a fifth of the latents."""


@pytest.fixture(scope="module")
def source(tmp_path_factory, space):
    return write_checkpoint(
        tmp_path_factory.mktemp("post") / "source", action_space=space, sizes=SMALL, seed=4
    )


@pytest.fixture(scope="module")
def arm_set(tmp_path_factory):
    return made_up_arm(
        tmp_path_factory.mktemp("arm") / "set", ("open the drawer", "close the drawer")
    )


@pytest.fixture(autouse=True)
def small_canvas(monkeypatch):
    """A canvas as small as the pictures; the released tiers would take minutes here."""
    from strands_cosmos3.observe import views

    monkeypatch.setattr(views, "TIERS", SMALL_CANVAS)


def released(folder):
    found = {}
    for file in sorted((folder / "transformer").glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_only_the_heads_of_the_domain_change(source, arm_set, tmp_path, space):
    source = shutil.copytree(source, tmp_path / "in")
    write_preview(source)
    post = PostTraining(
        source, arm_set, tmp_path / "out", PostConfig(steps=1, batch=2, lr=1e-2, every=8)
    )
    out = post.run()
    before, after = released(source), released(out)
    same = [
        f"{folder}/diffusion_pytorch_model.safetensors" for folder in ("vae", "preview_decoder")
    ]
    assert all((source / name).read_bytes() == (out / name).read_bytes() for name in same)
    assert set(before) == set(after)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert (
        {"action_proj_in.fc.weight", "action_proj_out.fc.weight"}
        <= changed
        <= {
            *(f"action_proj_{n}.weight" for n in ("in.fc", "in.bias", "out.fc", "out.bias")),
            "action_modality_embed",
        }
    )
    rows = (before["action_proj_in.fc.weight"] != after["action_proj_in.fc.weight"]).any(1)
    assert rows.nonzero().flatten().tolist() == [8]  # droid's slot and no other's
    described = json.loads((out / "checkpoint.json").read_text())["strands_cosmos3"]
    assert described["action_space"] == space
    assert "proj_out.weight" not in described["post_training"]["trained"]
    # digests are compared on the way
    with Cosmos3Engine.from_pretrained(out, dtype=torch.float32) as engine:
        assert engine.action_space == space
    assert (out / STATISTICS).exists() == (space == "midtrain")


def test_the_statistics_are_the_datasets(source, arm_set, tmp_path, space):
    if space == "joint_pos":
        post = PostTraining(
            source, arm_set, tmp_path / "out", PostConfig(steps=1, batch=2, every=8)
        )
        assert post.stats is None
        batch = post.windows.batch(0)
        assert batch.rows.shape[1:] == (32, 8)
        torch.testing.assert_close(batch.state, batch.rows[:, 0])  # row 0 is the command for now
        return
    post = PostTraining(source, arm_set, tmp_path / "out", PostConfig(steps=1, batch=2, every=8))
    with Dataset(arm_set) as data:
        raw = np.concatenate([episode[ACTION][:-1] for episode in data])
    np.testing.assert_allclose(post.stats.q99, np.quantile(raw, 0.99, axis=0), atol=1e-4)
    batch = post.windows.batch(0)
    assert batch.state is None
    assert batch.rows.abs().max() <= 1  # clamped, as the released checkpoints were trained
    assert batch.latents.shape[2] == 5
    folder = post.export(post.policy)
    assert load_action_stats(folder / STATISTICS).q01[0] == pytest.approx(float(post.stats.q01[0]))
    own = quantiles_of(folder)
    with Dataset(arm_set) as data:
        raw = np.asarray(data[0][ACTION][:5], np.float64)
    rows = post.stats.normalizer("quantile")(raw)  # what the checkpoint was taught
    droid = get_embodiment("droid")
    decoded = decode_chunk(
        ActionChunk(rows, droid.action_space("midtrain"), droid, quantiles=own), np.eye(4)
    )
    unnormalised = decode_pose_trajectory(raw[:, :9], np.eye(4))[1:]
    np.testing.assert_allclose(decoded.T_base_frame, unnormalised, atol=1e-7)
    np.testing.assert_allclose(decoded.gripper, raw[:, 9], atol=1e-7)


@pytest.mark.parametrize("space", ["midtrain", "joint_pos"], indirect=True)
def test_a_shorter_future_is_trained_recorded_and_run(source, arm_set, tmp_path, space):
    """The source declares no number; what comes out declares the one that it was trained with."""
    assert Checkpoint.open(source).policy_frames == ()
    config = PostConfig(steps=1, batch=2, every=8, policy_frames=5)
    post = PostTraining(source, arm_set, tmp_path / "out", config)
    batch, rows = post.windows.batch(0), {"midtrain": 16, "joint_pos": 32}[space]
    assert (batch.latents.shape[2], batch.rows.shape[1]) == (2, rows)
    whole = PostTraining(source, arm_set, tmp_path / "whole", replace(config, policy_frames=None))
    # the encoder is causal: the frames that are kept are the first of the whole clip's
    torch.testing.assert_close(batch.latents, whole.windows.batch(0).latents[:, :, :2])
    torch.testing.assert_close(batch.rows, whole.windows.batch(0).rows)
    made = Checkpoint.open(post.run())
    assert made.policy_frames == (5,)
    domain = get_embodiment("droid")
    picture = np.zeros((32, 48, 3), np.uint8)
    request = Request(
        domain, domain.action_space(space), "open", rows, np.zeros(7), 1.0, composite=picture
    )
    backend = NativeBackend(made.root, backend_options(device="cpu", num_steps=1))
    assert backend.engine_requests([request])[0].video_shape[0] == 2
    assert backend.infer(request).action.shape[0] == rows


def quantiles_of(folder):
    droid = get_embodiment("droid")
    request = Request(droid, droid.action_space("midtrain"), "open the drawer", 16, None, 1.0)
    return ModelInput(Checkpoint.open(folder), backend_options()).quantiles(request)


@pytest.mark.parametrize("space", ["midtrain"], indirect=True)
def test_packaged_statistics_leave_no_others_beside_the_weights(source, arm_set, tmp_path):
    config = PostConfig(steps=1, batch=2, every=8)
    own = PostTraining(source, arm_set, tmp_path / "own", config)
    first = own.export(own.policy)
    assert quantiles_of(first) is not None
    again = PostTraining(first, arm_set, tmp_path / "packaged", replace(config, stats="packaged"))
    assert quantiles_of(again.export(again.policy)) is None


@ONE_SPACE
def test_adapters_start_as_nothing_and_are_folded_in(source, arm_set, tmp_path):
    config = PostConfig(
        train=("action_modality_embed",),
        lora_rank=2,
        lora_targets=("q", "v"),
        steps=3,
        batch=2,
        lr=3e-2,
        every=4,
    )
    post = PostTraining(source, arm_set, tmp_path / "out", config)
    trained = {name for name, p in post.policy.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.endswith("action_modality_embed") for name in trained)
    assert any("lora_A" in name for name in trained)
    before = released(source)
    untouched = merged_state(post.policy)
    torch.testing.assert_close(
        untouched["transformer.generation.layers.0.self_attn.add_q_proj.weight"],
        before["layers.0.self_attn.add_q_proj.weight"],
    )
    after = released(post.run())
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    adapted = {f"layers.{i}.self_attn.add_{n}_proj.weight" for i in (0, 1) for n in ("q", "v")}
    assert changed <= adapted | {"action_modality_embed"}
    assert adapted & changed
    adapters = load_file(tmp_path / "out/adapter/pytorch_lora_weights.safetensors")
    about = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert (about["r"], about["target_modules"]) == (2, ["add_q_proj", "add_v_proj"])
    assert len(adapters) == 2 * len(adapted)
    for key in adapted:
        down, up = (
            adapters[f"transformer.{key.removesuffix('.weight')}.lora_{side}.weight"].float()
            for side in "AB"
        )
        added = about["lora_alpha"] / about["r"] * up @ down
        torch.testing.assert_close(
            after[key].float(), before[key].float() + added, rtol=1e-2, atol=1e-3
        )


CHANGES = (
    ({"every": 1}, r"every 8 \(now 1\)"),
    ({"stats": "packaged"}, "stats dataset"),
    ({"lora_rank": 2}, r"lora_rank 0 \(now 2\)"),
    ({}, "dataset .*'episodes': 2.*now .*'episodes': 1"),
)


@ONE_SPACE
def test_a_folder_goes_on_with_what_it_was_begun_with(source, arm_set, tmp_path):
    config = PostConfig(steps=2, batch=2, every=8)
    PostTraining(source, arm_set, tmp_path / "out", config).run(until=1)
    # longer and slower may follow
    PostTraining(source, arm_set, tmp_path / "out", replace(config, steps=3, lr=1e-5))
    other = made_up_arm(tmp_path / "other", ("open the drawer",))
    for change, said in CHANGES:
        with pytest.raises(ConfigError, match=said):
            PostTraining(
                source,
                arm_set if change else other,
                tmp_path / "out",
                replace(config, **change),
            )


def test_latents_of_other_windows_are_refused(tmp_path):
    ticks = np.arange(5)
    cached_latents(lambda some: torch.zeros(len(some), 4, 1, 2, 2), ticks, tmp_path / "made.npy", 2)
    with pytest.raises(ConfigError, match="latents of 5 windows, and there are 4"):
        cached_latents(
            lambda some: torch.zeros(len(some), 4, 1, 2, 2), ticks[:4], tmp_path / "made.npy", 2
        )


@ONE_SPACE
@pytest.mark.parametrize(
    ("where", "out"), [("checkpoint", "."), ("checkpoint/inner", "."), (".", "."), (".", "deep/er")]
)
def test_a_checkpoint_is_never_replaced_by_what_comes_from_it(
    source, arm_set, tmp_path, where, out
):
    """It would lie in the same folder, around it, or within it."""
    mine = tmp_path / "tuned" / where
    shutil.copytree(source, mine)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="choose another --out"):
        PostTraining(mine, arm_set, tmp_path / "tuned" / out, PostConfig(steps=1, batch=2, every=8))
    assert sorted(tmp_path.rglob("*")) == before


@ONE_SPACE
def test_an_export_that_is_interrupted_leaves_the_one_before(
    source, arm_set, tmp_path, monkeypatch
):
    post = PostTraining(source, arm_set, tmp_path / "out", PostConfig(steps=1, batch=2, every=8))
    before = released(post.export(post.policy))

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(post_module, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        post.export(post.policy)
    after = released(tmp_path / "out/checkpoint")
    assert set(after) == set(before)
    Checkpoint.open(tmp_path / "out/checkpoint").verify()
    assert sorted(path.name for path in (tmp_path / "out").glob(".*")) == []


def test_patterns_speak_the_released_layout(policy):
    assert train_only(policy, PostConfig.train)
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == {
        *("w_in", "b_in", "w_out", "b_out"),
        "transformer.action_modality_embed",
    }
    assert train_only(policy, ("layers.*.mlp_moe_gen.*",)) == [
        released_key(n) for n, _ in policy.named_parameters() if ".mlp_moe_gen." in n
    ]
    with pytest.raises(ConfigError, match=r"nothing\.\*.*it has, for example"):
        train_only(policy, ("nothing.*",))
    with pytest.raises(ConfigError, match="projections are"):
        add_lora(policy, 2, ("nope",), 0)
    assert read_prompts(policy.transformer, ((1, 2),)).lengths == (2,)


@ONE_SPACE
def test_a_dataset_without_poses_is_refused(source, tmp_path):
    spec = DatasetSpec(15, {"observation.state": Feature("float32", (8,))}, "panda")
    with DatasetWriter(tmp_path / "bare", spec) as writer:
        writer.add_episode({"observation.state": np.zeros((3, 8), np.float32)}, {}, "wait")
    with pytest.raises(ConfigError, match=r"the dataset has observation\.state"):
        PostTraining(source, tmp_path / "bare", tmp_path / "out")
    assert ArmKeys().pose == EE_POSE


@ONE_SPACE
def test_held_out_episodes_validate_and_are_not_trained_on(source, arm_set, tmp_path):
    config = PostConfig(steps=4, batch=3, every=2, validation_fraction=0.5, validate_every=2)
    post = PostTraining(source, arm_set, tmp_path / "out", config)
    half = len(post.windows) // 2  # of two equal episodes
    rows = post.windows._chunks
    drawn = torch.cat([post.windows.batch(step).rows for step in range(40)])
    assert all((rows[:half] == window.numpy()).all((1, 2)).any() for window in drawn)
    held = torch.cat([batch.rows for batch in post.windows.validation()])
    assert all((rows[half:] == window.numpy()).all((1, 2)).any() for window in held)
    assert len(held) % config.batch == 0
    post.run()
    figures = lines_of(tmp_path / "out/validation.jsonl")
    assert [line["step"] for line in figures] == [2, 4]
    assert figures[0]["action"] > 0
    assert figures[0]["loss"] != figures[1]["loss"]
    with pytest.raises(ConfigError, match="--validation-fraction must be a fraction"):
        PostTraining(source, arm_set, tmp_path / "no", replace(config, validation_fraction=1.0))


@ONE_SPACE
def test_a_validation_that_was_interrupted_is_made_up_for_and_changes_no_weight(
    source, arm_set, tmp_path
):
    config = PostConfig(
        steps=3, batch=2, every=8, validation_fraction=0.5, validate_every=1, lr=1e-2
    )
    PostTraining(source, arm_set, tmp_path / "out", config).run()
    whole = (tmp_path / "out/validation.jsonl").read_text()
    (tmp_path / "out/validation.jsonl").write_text("".join(whole.splitlines(keepends=True)[:2]))
    PostTraining(source, arm_set, tmp_path / "out", config).run()
    assert (tmp_path / "out/validation.jsonl").read_text() == whole
    PostTraining(source, arm_set, tmp_path / "rarely", replace(config, validate_every=3)).run()
    one, other = (released(tmp_path / name / "checkpoint") for name in ("out", "rarely"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@ONE_SPACE
def test_every_process_has_a_window(source, arm_set, tmp_path):
    with pytest.raises(ConfigError, match="no window for some of 3 processes"):
        PostTraining(source, arm_set, tmp_path / "out", PostConfig(batch=2), shard=DataShard(0, 3))
    assert not (tmp_path / "out").exists()
