"""The engine against diffusers' pipeline, number by number, on small random checkpoints."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
    get_3d_mrope_ids_text_tokens,
    get_3d_mrope_ids_vae_tokens,
)

from helpers.cosmos3_oracle import (
    CHUNK,
    HW,
    PROMPT_IDS,
    Case,
    engine,
    oracle,
    pipeline,
    request,
)
from helpers.parity import case_share, sequence_of, share
from helpers.stock_loop import stock_loop
from strands_cosmos3.engine.denoising import combine
from strands_cosmos3.engine.sequence import (
    SequenceLayout,
    generation_positions,
    patchify,
)
from strands_cosmos3.engine.text_cache import TextKV, side_by_side
from strands_cosmos3.engine.transformer import rope_tables

DTYPES = (torch.float32, torch.bfloat16)
MODES = ("policy", "forward_dynamics", "inverse_dynamics")
STEPS_AND_GUIDANCE = tuple(product((2, 4, 8), (1.0, 3.0)))
ALL = tuple(product(("silu", "relu2"), MODES, STEPS_AND_GUIDANCE, DTYPES))
# in float32 every kind meets every mode, and every number of steps with either guidance; in
# bfloat16 every mode
PAIRWISE = tuple(
    (kind, mode, STEPS_AND_GUIDANCE[(2 * m + 2 * k + i) % 6], dtype)
    for k, kind in enumerate(("silu", "relu2"))
    for m, mode in enumerate(MODES)
    for i, dtype in ((0, torch.float32), (1, torch.float32), (3, torch.bfloat16))
)


def _id(value):
    return str(value).removeprefix("torch.").replace(" ", "")


def assert_parity(case):
    """As near to float64 as helpers/parity.py says, in either type: the peer is stock diffusers in
    the same.
    """
    assert case_share(case) <= 1


@pytest.mark.parametrize(("kind", "mode", "steps", "dtype"), PAIRWISE, ids=_id)
def test_pipeline_parity(checkpoints, kind, mode, steps, dtype):
    assert_parity(Case(checkpoints[kind], mode, *steps, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode", "steps", "dtype"), ALL, ids=_id)
def test_pipeline_parity_everywhere(checkpoints, kind, mode, steps, dtype):
    assert_parity(Case(checkpoints[kind], mode, *steps, dtype))


def test_pairs_cover_what_they_claim():
    kinds = ("silu", "relu2")
    for dtype in DTYPES:
        assert {c[:2] for c in PAIRWISE if c[3] is dtype} == set(product(kinds, MODES))
    single = {(kind, steps) for kind, _, steps, dtype in PAIRWISE if dtype is torch.float32}
    assert single == set(product(kinds, STEPS_AND_GUIDANCE))


@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_parity_at_another_rate_with_guidance_below_one(checkpoints, kind):
    assert case_share(Case(checkpoints[kind], steps=2, fps=7.5, guidance=0.5)) <= 1


@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_what_stays_in_float32_in_a_bfloat16_model(checkpoints, kind):
    """Statistics of a norm (Edge's weight too), the time embedding, rotations and guidance:
    equal to the bit everywhere.
    """
    ours, stock = (
        made(checkpoints[kind], torch.bfloat16).transformer for made in (engine, pipeline)
    )
    x = (100 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    with torch.no_grad():
        assert torch.equal(ours.generation.norm_moe_gen(x), stock.norm_moe_gen(x))
        t = torch.tensor([3, 937])
        single = engine(checkpoints[kind], torch.float32).transformer.time_embedder(t)
        assert torch.equal(ours.time_embedder(t), single)
    positions, config = torch.linspace(15000, 15100, 30).expand(3, -1), ours.config
    single, half = (
        rope_tables(positions, config, torch.device("cpu"), dtype)[1] for dtype in DTYPES
    )
    assert torch.equal(single.bfloat16(), half)
    guided = combine(*x[:2, None].float().chunk(2), torch.full((1, 1, 1), 3.0))
    assert torch.equal(guided[0, 0], x[1].float() + 3 * (x[0].float() - x[1].float()))


def test_native_flow_schedule(checkpoints, monkeypatch):
    """The policies' schedule: karras off, shift 5 and the native flow sigmas."""
    from diffusers import UniPCMultistepScheduler

    case = Case(checkpoints["silu"], steps=4, seed=6)
    pipe = pipeline(case.folder, case.dtype)
    config = {**pipe.scheduler.config, "use_karras_sigmas": False, "flow_shift": 5.0}
    monkeypatch.setattr(pipe, "scheduler", UniPCMultistepScheduler.from_config(config))
    pipe.register_to_config(use_native_flow_schedule=True)
    try:
        native = {"use_karras_sigmas": False, "flow_shift": 5.0}
        asked = replace(request(case), **native)
        exact = stock_loop(case.folder, sequence_of(case.folder, asked), torch.float64)
        found = engine(case.folder, case.dtype).step(asked)
        assert share(found["video"], exact[0], oracle(case)[0]) <= 1
        assert share(found["action"][0], exact[1], oracle(case)[1]) <= 1
    finally:
        pipe.register_to_config(use_native_flow_schedule=False)


@pytest.mark.parametrize("given", [1, 4], ids=["state", "state_and_committed_rows"])
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_state_row_against_the_stock_transformer(checkpoints, kind, given):
    """joint_pos: row 0 is the clean state, temporal offset 0; the pipeline cannot do it, its
    transformer can.

    Rows that the arm is bound to execute are clean likewise.
    """
    folder, t = checkpoints[kind], 800
    ours = engine(folder, torch.float32)
    rng, frames, (rows, columns) = np.random.RandomState(2), 3, (3, 4)
    latents = torch.from_numpy(rng.randn(1, 16, frames, 5, 7)).float()
    actions = torch.from_numpy(rng.randn(CHUNK + 1, 64)).float()
    count, tokens, text = CHUNK + 1, frames * rows * columns, len(PROMPT_IDS)
    offset = get_3d_mrope_ids_text_tokens(text, 0, True)[1] + 15000
    rates = {"fps": 15, "base_fps": 24.0, "temporal_offset": offset}
    positions = [
        get_3d_mrope_ids_text_tokens(text, 0, True)[0],
        get_3d_mrope_ids_vae_tokens(frames, rows, columns, **rates, temporal_compression_factor=4)[
            0
        ],
        get_3d_mrope_ids_vae_tokens(
            count,
            1,
            1,
            **rates,
            temporal_compression_factor=1,
            base_temporal_compression_factor=4,
            start_frame_offset=0,
        )[0],
    ]
    noisy = torch.arange(text + rows * columns, text + tokens)

    def stock(dtype):
        vision, _, action = pipeline(folder, dtype).transformer(
            input_ids=torch.tensor(PROMPT_IDS),
            text_indexes=torch.arange(text),
            position_ids=torch.cat(positions, dim=1),
            und_len=text,
            sequence_length=text + tokens + count,
            vision_tokens=[latents.to(dtype)],
            vision_token_shapes=[(frames, rows, columns)],
            vision_sequence_indexes=torch.arange(text, text + tokens),
            vision_mse_loss_indexes=noisy,
            vision_timesteps=torch.full((len(noisy),), t),
            vision_noisy_frame_indexes=[torch.tensor([1, 2])],
            action_tokens=[actions.to(dtype)],
            action_token_shapes=[(count, 1, 1)],
            action_sequence_indexes=torch.arange(text + tokens, text + tokens + count),
            action_mse_loss_indexes=torch.arange(text + tokens + given, text + tokens + count),
            action_timesteps=torch.full((count - given,), t),
            action_noisy_frame_indexes=[torch.arange(given, count)],
            action_domain_ids=[torch.tensor([8])],
            return_dict=False,
        )
        tokens_of_frames = patchify(vision[0][0], 2)[rows * columns :]
        return tokens_of_frames[inside], action[0][given:]

    inside = patchify(torch.ones(16, frames, 5, 7), 2)[rows * columns :] > 0
    with torch.no_grad():
        exact, peer = stock(torch.float64), stock(torch.float32)
        layout = SequenceLayout((frames, 5, 7), 2, count, (0,), given, 8, 15, 0)
        rope = rope_tables(
            generation_positions(layout, ours.config, text),
            ours.config,
            torch.device("cpu"),
            torch.float32,
        )
        prompt: TextKV = ours.text_cache.get(PROMPT_IDS)
        told = torch.ones(layout.tokens, 1)
        told[: rows * columns] = 0
        told[tokens : tokens + given] = 0
        of_vision, of_action = ours.transformer.velocity(
            (patchify(latents[0], 2), actions),
            ours.transformer.time_embedder(torch.tensor([t]))[0],
            told,
            (rope[0][None], rope[1][None]),
            side_by_side([prompt]),
            ours.action_head(8),
            layout.noisy,
        )
    assert share(of_vision[0][inside], exact[0], peer[0]) <= 1
    assert share(of_action[0], exact[1], peer[1]) <= 1


def test_the_case_has_odd_edges(checkpoints):
    assert (
        request(Case(checkpoints["silu"])).video_shape == (3, HW[0] // 16, HW[1] // 16) == (3, 5, 7)
    )
