"""What a step promises beyond parity: exact caches, contracts of the action spaces, seeds,
refusals.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.cosmos3_oracle import CHUNK, HW, Case, engine, request
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.request import pixel_to_latent_shape
from strands_cosmos3.engine.transformer import on_device
from strands_cosmos3.errors import (
    ActionSpaceError,
    ConfigError,
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    VariantError,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def seeded(checkpoints):
    return replace(
        request(Case(checkpoints["silu"], steps=2)), video_noise=None, action_noise=None, seed=11
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_text_cache_changes_no_bit(checkpoints, kind, dtype):
    asked = request(Case(checkpoints[kind], steps=2))
    cached = engine(checkpoints[kind], dtype)
    bare = Cosmos3Engine.from_pretrained(
        checkpoints[kind], dtype=dtype, options=EngineOptions(text_cache_bytes=0)
    )
    expected = bare.step(asked)
    for _ in range(2):
        found = cached.step(asked)
        assert torch.equal(found["action"], expected["action"])
        assert torch.equal(found["video"], expected["video"])
    bare.step(asked)
    assert bare.text_cache.prefills == 4
    assert bare.text_cache.nbytes == 0


def test_a_second_call_runs_no_text_tower(checkpoints, monkeypatch):
    asked = request(Case(checkpoints["silu"], steps=2))
    fresh = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32)
    fresh.step(asked)
    monkeypatch.setattr(fresh.transformer.text, "forward", None)
    fresh.step(asked)
    assert (fresh.text_cache.prefills, fresh.text_cache.hits) == (2, 2)


def test_the_text_cache_tells_prompts_apart(checkpoints):
    """Prompts that share their beginning, their end, or their length are different ones."""
    folder = checkpoints["silu"]
    asked = request(Case(folder, steps=1, guidance=1.0))
    cached = Cosmos3Engine.from_pretrained(folder)
    bare = Cosmos3Engine.from_pretrained(folder, options=EngineOptions(text_cache_bytes=0))
    ids = asked.text_ids
    others = [
        torch.cat([ids[:i], ids[i : i + 1] + 100, ids[i + 1 :]]) for i in (0, 8, 17, len(ids) - 1)
    ]
    for prompt in (ids, *others, ids[:-1], ids[1:], ids.flip(0), ids):
        question = replace(asked, text_ids=prompt)
        assert torch.equal(cached.step(question)["action"], bare.step(question)["action"])
    assert (cached.text_cache.prefills, cached.text_cache.hits) == (8, 1)


def test_the_default_type_of_weights(checkpoints):
    """float32 on a CPU; bfloat16 is for CUDA, or on request."""
    assert Cosmos3Engine.from_pretrained(checkpoints["silu"], device="cpu").dtype is torch.float32
    assert (
        Cosmos3Engine.from_pretrained(checkpoints["silu"], device="cpu", dtype=torch.bfloat16).dtype
        is torch.bfloat16
    )


def test_the_text_cache_is_bounded(checkpoints):
    asked = request(Case(checkpoints["silu"], steps=1, guidance=1.0))
    probe = engine(checkpoints["silu"], torch.float32).text_cache.get(tuple(range(40, 75))).nbytes
    small = Cosmos3Engine.from_pretrained(
        checkpoints["silu"], dtype=torch.float32, options=EngineOptions(text_cache_bytes=2 * probe)
    )
    for first in (40, 41, 42, 40):
        small.step(replace(asked, text_ids=torch.arange(first, first + 35)))
        assert small.text_cache.nbytes <= 2 * probe
    assert small.text_cache.prefills == 4, "the least recently used prompt went"
    for first in (42, 41, 42):
        small.step(replace(asked, text_ids=torch.arange(first, first + 35)))
    assert (small.text_cache.prefills, small.text_cache.hits) == (5, 2), (
        "42 was used again before 41 came, 40 was not"
    )
    small.text_cache.clear()
    assert small.text_cache.nbytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_frame_or_all_frames_encoded(checkpoints, dtype):
    asked = request(Case(checkpoints["silu"], steps=2))
    model = engine(checkpoints["silu"], dtype)
    clip = asked.cond_video_pixels
    one, every = model.vae.encode(clip[:, :, :1]), model.vae.encode(clip)
    assert torch.equal(one[:, :, :1], every[:, :, :1])
    assert every.shape[2] == 3
    single = replace(asked, cond_video_pixels=clip[:, :, :1])
    assert torch.equal(model.step(single)["action"], model.step(asked)["action"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoder_loaded_or_not(checkpoints, dtype):
    asked = request(Case(checkpoints["silu"], steps=2))
    decoding = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=dtype, decode_video=True)
    plain = engine(checkpoints["silu"], dtype)
    with_pixels, without = decoding.step(asked), plain.step(replace(asked, return_video=False))
    assert torch.equal(with_pixels["action"], without["action"])
    assert torch.equal(plain.step(asked)["action"], without["action"])
    assert "video" not in without
    assert plain.vae.model.decoder is None
    pixels = with_pixels["pixels"]
    assert pixels.shape == (1, 3, 9, *HW)
    assert 0 <= pixels.min() <= pixels.max() <= 1


def test_frames_that_are_wanted_are_the_first_of_all(checkpoints):
    """Bit-equal, whatever is left out; only the latents that they need are decoded."""
    decoding = Cosmos3Engine.from_pretrained(checkpoints["silu"], decode_video=True)
    asked = request(Case(checkpoints["silu"], steps=1, guidance=1.0))
    every = decoding.step(asked)
    assert every["pixels"].shape[2] == CHUNK + 1
    decoded, decode = [], decoding.vae.decode
    decoding.vae.decode = lambda x, first: decoded.append(x.shape[2]) or decode(x, first)
    for frames in (1, 2, 5, 6, 9, 99):
        found = decoding.step(replace(asked, decode_frames=frames, return_video=False))
        assert torch.equal(found["pixels"], every["pixels"][:, :, :frames])
        assert torch.equal(found["action"], every["action"])
    assert decoded == [1, 2, 2, 3, 3, 3]
    none = decoding.step(replace(asked, decode_frames=0, return_video=False))
    assert not {"pixels", "video", "decode"} & {*none, *none["timing"]}
    batch = decoding.step_batch([replace(asked, decode_frames=n) for n in (5, 0, None)])
    assert [one["pixels"].shape[2] if "pixels" in one else 0 for one in batch] == [5, 0, 9]


@pytest.mark.parametrize(("frames", "latents"), [(0, 1), (1, 1), (5, 2), (9, 3)])
def test_the_last_step_computes_the_tokens_that_are_wanted_and_no_others(
    checkpoints, seeded, monkeypatch, frames, latents
):
    decoding = Cosmos3Engine.from_pretrained(checkpoints["silu"], decode_video=True)
    computed, velocity = [], decoding.transformer.velocity
    monkeypatch.setattr(
        decoding.transformer,
        "velocity",
        lambda *arguments: computed.append(arguments[-1]) or velocity(*arguments),
    )
    decoding.step(replace(seeded, decode_frames=frames, return_video=False))
    of_frame = 3 * 4
    rows = slice(0, CHUNK)
    assert computed == [
        [slice(of_frame, 3 * of_frame), rows],
        [slice(of_frame, latents * of_frame), rows],
    ]


def test_pixels_need_the_decoder(checkpoints, seeded):
    with pytest.raises(InputError, match=r"decode_frames is 5.*decode_video=True"):
        engine(checkpoints["silu"], torch.float32).step(replace(seeded, decode_frames=5))


def test_offloading_the_text_tower_changes_no_bit(checkpoints):
    asked = request(Case(checkpoints["relu2"], steps=2))
    moved = Cosmos3Engine.from_pretrained(
        checkpoints["relu2"], dtype=torch.float32, options=EngineOptions(offload_text=True)
    )
    assert torch.equal(
        moved.step(asked)["action"],
        engine(checkpoints["relu2"], torch.float32).step(asked)["action"],
    )


def test_an_offloaded_layer_visits_the_device_and_stays_where_it_is():
    layer, device = torch.nn.Linear(3, 2), torch.device("meta")
    kept = dict(layer.named_parameters())
    with on_device(layer, device):
        assert {parameter.device for parameter in layer.parameters()} == {device}
    assert all(kept[name] is parameter for name, parameter in layer.named_parameters())


def test_seeds(checkpoints, seeded):
    model = engine(checkpoints["silu"], torch.float32)
    first, again = model.step(seeded)["action"], model.step(seeded)["action"]
    assert torch.equal(first, again)
    assert not torch.equal(first, model.step(replace(seeded, seed=12))["action"])
    noise = np.random.RandomState(11).standard_normal((CHUNK, 64)).astype(np.float32)
    assert torch.equal(
        first, model.step(replace(seeded, action_noise=torch.from_numpy(noise)))["action"]
    )


def test_guidance_interval(checkpoints, seeded):
    model = engine(checkpoints["silu"], torch.float32)
    everywhere = model.step(seeded)["action"]
    assert torch.equal(
        model.step(replace(seeded, guidance_interval=(0, 1001)))["action"], everywhere
    )
    nowhere = model.step(replace(seeded, guidance_interval=(0, 1)))["action"]
    assert torch.equal(nowhere, model.step(replace(seeded, guidance_scale=1.0))["action"])
    # the first timestep is 995: the bound is open
    at_the_edge = replace(seeded, guidance_interval=(995, 1001))
    assert torch.equal(model.step(at_the_edge)["action"], nowhere)
    below = replace(seeded, num_inference_steps=1, guidance_interval=(0, 995))
    assert torch.equal(
        model.step(below)["action"], model.step(replace(below, guidance_scale=1.0))["action"]
    )


def test_forward_dynamics_echoes_its_actions(checkpoints):
    asked = request(Case(checkpoints["silu"], "forward_dynamics", 1, 1.0))
    result = engine(checkpoints["silu"], torch.float32).step(asked)
    assert torch.equal(result["action"][0], asked.cond_action)
    short = engine(checkpoints["silu"], torch.float32).step(
        replace(asked, cond_action=asked.cond_action[:3])
    )
    assert torch.equal(short["action"][0, 3:], asked.cond_action[2:3].expand(5, -1))


def test_inverse_dynamics_keeps_its_frames(checkpoints):
    asked = request(Case(checkpoints["silu"], "inverse_dynamics", 2, 1.0))
    model = engine(checkpoints["silu"], torch.float32)
    _, H, W = asked.video_shape
    clip, video = model.vae.encode(asked.cond_video_pixels)[..., :H, :W], model.step(asked)["video"]
    assert torch.equal(video, clip)
    fewer = model.step(replace(asked, cond_frame_indexes=(0, 1)))["video"]
    assert torch.equal(fewer[:, :, :2], clip[:, :, :2])
    assert not torch.equal(fewer[:, :, 2], clip[:, :, 2])


def test_a_clean_prefix_of_any_length(checkpoints, seeded):
    model = engine(checkpoints["silu"], torch.float32)
    for rows in (1, 3, CHUNK):
        prefix = torch.from_numpy(np.random.RandomState(4).randn(rows, 10)).float()
        found = model.step(replace(seeded, action_prefix=prefix))["action"][0]
        assert found.shape == (CHUNK, 10)
        assert torch.equal(found[:rows], prefix)
    with pytest.raises(ShapeError, match="action_prefix has 9 rows"):
        model.step(replace(seeded, action_prefix=torch.zeros(9, 10)))


def test_joint_pos_takes_a_state_row(joint_checkpoint, seeded):
    model = engine(joint_checkpoint, torch.float32)
    assert model.action_space == "joint_pos"
    asked = replace(seeded, raw_action_dim=8)
    state = torch.tensor([[0.1, -0.2, 0.3, -2.0, 0.0, 1.5, 0.7, 0.2]])
    with pytest.raises(InputError, match="state"):
        model.step(asked)
    result = model.step(replace(asked, action_prefix=state))
    assert result["action"].shape == (1, CHUNK, 8)
    assert result["action_space"] == "joint_pos"
    other = model.step(replace(asked, action_prefix=state + 0.1))
    assert not torch.allclose(result["action"], other["action"], atol=1e-3), "the state matters"


def test_action_spaces_are_not_mixed(checkpoints, joint_checkpoint, seeded):
    with pytest.raises(ActionSpaceError, match=r"'joint_pos'.*'midtrain'"):
        engine(checkpoints["silu"], torch.float32).step(replace(seeded, action_space="joint_pos"))
    with pytest.raises(ActionSpaceError, match=r"'midtrain'.*'joint_pos'"):
        engine(joint_checkpoint, torch.float32).step(replace(seeded, action_space="midtrain"))
    with pytest.raises(VariantError, match=r"midtrain.*joint_pos"):
        Cosmos3Engine.from_pretrained(joint_checkpoint, action_space="midtrain")


def test_progress_and_timing(checkpoints, seeded):
    seen = []
    result = engine(checkpoints["silu"], torch.float32).step(
        seeded, on_step=lambda *a: seen.append(a)
    )
    assert seen == [(1, 2), (2, 2)]
    assert set(result["timing"]) == {"encode", "text", "denoise", "total"}
    assert result["seed"] == 11


def test_closed_engines_say_so(checkpoints, seeded):
    with Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32) as model:
        model.step(seeded)
    with pytest.raises(ConfigError, match="closed"):
        model.step(seeded)


def test_pixel_to_latent_shape():
    assert pixel_to_latent_shape(33, 540, 640) == (9, 33, 40)
    assert pixel_to_latent_shape(17, 480, 832) == (5, 30, 52)
    assert pixel_to_latent_shape(1, 5, 5) == (1, 1, 1)
    with pytest.raises(InputError):
        pixel_to_latent_shape(0, 16, 16)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"mode": "dream"}, UnknownNameError),
        ({"action_chunk": 0}, InputError),
        ({"domain_id": 32}, InputError),
        ({"fps": float("nan")}, InputError),
        ({"raw_action_dim": 65}, ShapeError),
        ({"action_space": "pose_abs"}, ActionSpaceError),
        ({"cond_video_pixels": torch.zeros(1, 1, 1, 32, 32)}, ShapeError),
        ({"cond_video_pixels": torch.full((1, 3, 1, 160, 176), float("nan"))}, NonFiniteError),
        ({"cond_video_pixels": torch.full((1, 3, 1, 160, 176), 255.0)}, InputError),
        ({"cond_video_pixels": torch.zeros(1, 3, 1, 100, 176)}, ShapeError),
        ({"video_shape": (3, 90, 7)}, ShapeError),
        ({"cond_frame_indexes": (0, 3)}, InputError),
        ({"cond_frame_indexes": (-1,)}, InputError),
        ({"cond_action": torch.zeros(8, 10)}, InputError),
        ({"mode": "forward_dynamics"}, InputError),
        (
            {"mode": "forward_dynamics", "cond_action": torch.full((8, 10), float("inf"))},
            NonFiniteError,
        ),
        ({"mode": "forward_dynamics", "cond_action": torch.zeros(8, 9)}, ShapeError),
        ({"mode": "forward_dynamics", "cond_action": torch.ones(8, 64)}, ShapeError),
        ({"neg_text_ids": None}, InputError),
        ({"text_ids": torch.tensor([5000])}, InputError),
        ({"text_ids": torch.zeros(0, dtype=torch.long)}, InputError),
        ({"text_ids": torch.zeros(2, 5, dtype=torch.long)}, ShapeError),
        ({"text_mask": torch.ones(3)}, ShapeError),
        ({"video_noise": torch.zeros(1, 16, 3, 5, 8)}, ShapeError),
        ({"num_inference_steps": 0}, InputError),
        ({"decode_frames": -1}, InputError),
        ({"decode_frames": 2.0}, InputError),
    ],
)
def test_refusals(checkpoints, seeded, change, error):
    with pytest.raises(error):
        engine(checkpoints["silu"], torch.float32).step(replace(seeded, **change))


def test_masked_ids_do_not_count(checkpoints, seeded):
    model = engine(checkpoints["silu"], torch.float32)
    ids = seeded.text_ids
    padded = replace(
        seeded,
        text_ids=torch.cat([torch.tensor([7, 7]), ids])[None],
        text_mask=torch.tensor([[0, 0] + [1] * len(ids)]),
    )
    assert torch.equal(model.step(padded)["action"], model.step(seeded)["action"])
    ids = seeded.neg_text_ids
    negative = replace(
        seeded,
        neg_text_ids=torch.cat([ids, torch.tensor([7])]),
        neg_text_mask=torch.tensor([1] * len(ids) + [0]),
    )
    assert torch.equal(model.step(negative)["action"], model.step(seeded)["action"])


def test_prompts_are_read_again_with_new_weights(checkpoints, seeded):
    model = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32)
    first = model.step(seeded)["action"]
    weights = {
        f"transformer.{name}": weight.clone()
        for name, weight in model.transformer.named_parameters()
        if name.startswith("text.")
    }
    model.take_weights({name: 1.1 * weight for name, weight in weights.items()}, 8)
    assert not torch.equal(model.step(seeded)["action"], first)
    model.take_weights(weights, 8)
    assert torch.equal(model.step(seeded)["action"], first)


def test_other_domains_are_read_when_asked_for(checkpoints, seeded):
    lazy = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32, domains=(8,))
    before = lazy.kept_bytes
    umi = lazy.step(replace(seeded, domain_id=6))["action"]
    assert not torch.equal(umi, lazy.step(seeded)["action"])
    assert lazy.kept_bytes - before == 4 * (2 * 64 * 64 + 64 + 64), (
        "one more head, and nothing else"
    )
