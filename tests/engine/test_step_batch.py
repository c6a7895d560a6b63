"""Several requests in one pass: each result is what the request gives alone, whatever it shares
the pass with.
"""

from dataclasses import replace

import pytest
import torch

from helpers.cosmos3_oracle import CHUNK, Case, engine, given_actions, request
from helpers.parity import reference
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.errors import InputError, ShapeError


@pytest.fixture(scope="module", params=["silu", "relu2"])
def folder(checkpoints, request):
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def model(folder):
    return engine(folder, torch.float32)


@pytest.fixture(scope="module")
def asked(checkpoints):
    """A request without noise of its own: each seed draws another."""
    return replace(
        request(Case(checkpoints["silu"], steps=2)), video_noise=None, action_noise=None, seed=1
    )


@pytest.fixture(scope="module")
def mixed(asked, checkpoints):
    """Several prompts, pictures, states, modes, domains, rates and widths; guidance at all
    steps, at some, at none.
    """
    prefix = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    clip = request(Case(checkpoints["silu"], "inverse_dynamics")).cond_video_pixels
    other = {"text_ids": torch.arange(90, 101), "cond_video_pixels": clip[:, :, 3:4]}
    return [
        replace(
            asked, seed=3, neg_text_ids=asked.text_ids, guidance_scale=1.7, action_prefix=prefix
        ),
        asked,
        replace(asked, seed=2, guidance_scale=1.0, **other),
        replace(asked, seed=4, guidance_interval=(900, 1001), text_ids=asked.text_ids + 1, fps=7.5),
        replace(asked, seed=5, mode="inverse_dynamics", cond_video_pixels=clip),
        replace(
            asked, seed=6, mode="forward_dynamics", cond_action=given_actions(), guidance_scale=1.0
        ),
        replace(asked, seed=7, domain_id=6, raw_action_dim=7, **other),
        replace(
            asked,
            seed=8,
            return_video=False,
            cond_frame_indexes=(0, 1),
            cond_video_pixels=clip,
            text_ids=asked.text_ids[:9],
        ),
    ]


@pytest.fixture(scope="module")
def known(folder, mixed):
    """What each of them is in float64 and in diffusers' float32."""
    return [reference(folder, one) for one in mixed]


@pytest.fixture(scope="module")
def together(model, mixed):
    """The answers to all of them in one pass."""
    return model.step_batch(mixed)


def test_a_batch_of_all_kinds_equals_single_requests(model, mixed, together, known):
    """In a batch as alone: both as near to float64 as helpers/parity.py says."""
    alone = [model.step(one) for one in mixed]
    for i, (one, expected) in enumerate(zip(together, alone, strict=True)):
        assert set(one) == set(expected)
        assert known[i].share(one) <= 1, i
        assert known[i].share(expected) <= 1, i
        assert (one["seed"], one["action_space"]) == (mixed[i].seed, "midtrain")
    actions = [expected["action"] for expected in alone]
    assert all(
        a.shape != b.shape or float((a - b).abs().max()) > 1e-2
        for a in actions
        for b in actions
        if a is not b
    )


def test_the_order_is_that_of_the_requests(model, mixed, known):
    backward = model.step_batch(mixed[::-1])
    for asked, one, expected in zip(mixed, backward[::-1], known, strict=True):
        assert one["seed"] == asked.seed
        assert expected.share(one) <= 1


def test_candidates_share_encoding_and_prefill(checkpoints, asked):
    model = Cosmos3Engine.from_pretrained(checkpoints["silu"])
    candidates = [replace(asked, seed=seed) for seed in range(4)]
    encoded, encode = [], model.vae.encode
    model.vae.encode = lambda pixels: encoded.append(len(pixels)) or encode(pixels)
    seen = []
    found = model.step_batch(candidates, on_step=lambda *at: seen.append(at))
    assert (encoded, model.text_cache.prefills, model.text_cache.hits) == ([1], 2, 0)
    assert seen == [(1, 2), (2, 2)], "the steps of the batch"
    for one, candidate in zip(found, candidates, strict=True):
        assert reference(checkpoints["silu"], candidate).share(one) <= 1
    assert set(found[0]["timing"]) == {"encode", "text", "denoise", "total"}


def test_the_video_of_an_answer_reads_its_picture_no_second_time(checkpoints):
    """Nor does a picture that was written over the latest one pass for it."""
    folder = checkpoints["silu"]
    policy = request(Case(folder, steps=1))
    pixels = policy.cond_video_pixels.clone()
    policy = replace(policy, cond_video_pixels=pixels)
    video = request(Case(folder, mode="forward_dynamics", steps=1))
    video = replace(video, cond_video_pixels=pixels.clone())
    model = Cosmos3Engine.from_pretrained(folder)
    expected = Cosmos3Engine.from_pretrained(folder).step(video)
    encoded, encode = [], model.vae.encode
    model.vae.encode = lambda pixels: encoded.append(len(pixels)) or encode(pixels)
    model.step(policy)
    found = model.step(video)
    assert all(torch.equal(found[name], expected[name]) for name in ("action", "video"))
    assert encoded == [1]
    model.step(policy)
    assert encoded == [1, 1], "a policy's picture is always read"
    pixels.mul_(0.5)
    model.step(replace(video, cond_video_pixels=pixels))
    assert encoded == [1, 1, 1]


def test_different_pictures_are_encoded_together(checkpoints, asked):
    model = Cosmos3Engine.from_pretrained(checkpoints["silu"])
    encoded, encode = [], model.vae.encode
    model.vae.encode = lambda pixels: encoded.append(tuple(pixels.shape[:3:2])) or encode(pixels)
    pictures = [asked.cond_video_pixels * share for share in (1.0, 0.5, -1.0)]
    model.step_batch(
        [replace(asked, cond_video_pixels=one, num_inference_steps=1) for one in pictures]
    )
    assert encoded == [(3, 1)]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (
            {"video_shape": (1, 5, 7)},
            ShapeError,
            r"request 1 has latents \(1, 5, 7\) and 8 action rows.*equal shapes",
        ),
        ({"action_chunk": CHUNK - 1}, ShapeError, "7 action rows, request 0 has"),
        (
            {"num_inference_steps": 3},
            InputError,
            "request 1 has 3 steps.*request 0 has 2.*num_inference_steps",
        ),
        ({"flow_shift": 3.0}, InputError, "flow_shift and use_karras_sigmas"),
        ({"use_karras_sigmas": None}, InputError, "flow_shift and use_karras_sigmas"),
    ],
)
def test_requests_that_cannot_share_a_pass_are_refused(model, asked, changes, error, says):
    first = replace(asked, flow_shift=5.0, use_karras_sigmas=False)
    other = replace(first, **changes)
    assert other.batch_key != first.batch_key == replace(first, seed=9).batch_key
    with pytest.raises(error, match=says):
        model.step_batch([first, other])


def test_no_requests(model):
    with pytest.raises(InputError, match="at least one"):
        model.step_batch([])
