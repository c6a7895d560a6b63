"""What surrounds the network, on arrays of NumPy and on tensors, and without torch."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_cosmos3.engine.denoising import (
    Stream,
    combine,
    joined,
    noisy_tokens,
    starting_noise,
    starting_streams,
)
from strands_cosmos3.engine.sampler import SchedulerConfig, UniPC, unipc_coefficients
from strands_cosmos3.engine.sequence import SequenceLayout, patchify, unpatchify
from strands_cosmos3.engine.tokens import token_ids
from strands_cosmos3.types import Mode

KINDS = (np.asarray, torch.asarray)


def on_both(function, *arrays):
    """The answer for arrays of NumPy, after that for tensors was found to equal it to the bit."""
    ours, theirs = (function(*map(kind, arrays)) for kind in KINDS)
    assert isinstance(ours, np.ndarray)
    assert isinstance(theirs, torch.Tensor)
    assert ours.dtype == theirs.numpy().dtype
    np.testing.assert_array_equal(ours, theirs.numpy(), strict=True)
    return ours


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(1, 3)
)
def test_patches_and_back(channels, frames, height, width, patch):
    latents = normal(channels, frames, height, width)
    tokens = on_both(lambda x: patchify(x, patch), latents)
    back = on_both(lambda x: unpatchify(x, (frames, height, width), patch), tokens)
    np.testing.assert_array_equal(back, latents)


def test_a_patch_is_row_column_channel():
    latents = np.arange(2 * 2 * 2, dtype=np.float32).reshape(2, 1, 2, 2)
    assert patchify(latents, 2).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


def test_noise_is_that_of_the_seed_or_the_given_one():
    like = np.zeros((3, 4), np.float32)
    seeded = on_both(lambda x: starting_noise(None, 5, x, "noise"), like)
    expected = np.random.RandomState(5).standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_array_equal(seeded, expected)
    noise = normal(1, 3, 4)
    given = on_both(lambda x: starting_noise(noise, 5, x, "noise", x), like)
    np.testing.assert_array_equal(given, noise[0])
    assert not on_both(lambda x: starting_noise(None, 5, x, "noise", x), like).any()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("from_frame", [False, True])
def test_streams_start_alike(mode, from_frame):
    layout = SequenceLayout((3, 5, 4), 2, 6, (0,), 2, 7, 15.0, 0)
    latents, prefix, actions = normal(2, 3, 5, 4), normal(2, 7, seed=1), normal(5, 7, seed=2)

    def streams(latents, prefix, actions):
        request = SimpleNamespace(
            mode=mode,
            seed=3,
            video_noise=None,
            action_noise=None,
            action_chunk=5,
            action_prefix=prefix,
            cond_action=actions if mode is Mode.FORWARD_DYNAMICS else None,
        )
        return starting_streams([request], from_frame, [layout], [latents], 3, 9)

    of_streams = [
        on_both(lambda *given, i=i: streams(*given)[i].start_RnP, latents, prefix, actions)
        for i in (0, 1)
    ]
    free = [
        on_both(lambda *given, i=i: streams(*given)[i].free_RnP, latents, prefix, actions)
        for i in (0, 1)
    ]
    assert free[0][0, :6].max() == 0  # the first frame is given
    assert free[1][0, :2].max() == 0  # and so are two rows
    assert free[1][0, 2:, :7].min() == 1
    np.testing.assert_array_equal(of_streams[1][0, 0, :7], prefix[0])
    flags = on_both(lambda *x: noisy_tokens(streams(*x)), latents, prefix, actions)
    assert flags[0, :, 0].tolist() == [0] * 6 + [1] * 12 + [0] * 2 + [1] * 4


def test_guidance():
    c, u = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    scale = np.array([3.0, 0.5], np.float32)[:, None, None]
    guided = on_both(combine, c, u, scale)
    np.testing.assert_array_equal(guided, u + scale * (c - u))


def test_parts_of_passes_are_joined_in_the_order_of_the_requests():
    first, second = normal(2, 3, 4), normal(1, 3, 4, seed=1)
    whole = on_both(lambda a, b: joined([(0, 2), (1,)], [[a], [b]])[0], first, second)
    np.testing.assert_array_equal(whole, np.stack([first[0], second[0], first[1]]))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_sampler_steps_with_the_same_coefficients(steps):
    schedule = SchedulerConfig(False, 5.0, native_flow=True).schedule(steps)
    coefficients = unipc_coefficients(schedule, torch)
    start, free = normal(1, 6, 4), np.ones((1, 6, 4), np.float32)
    free[:, :2] = 0

    def sampled(start, free):
        stream, sampler = Stream(start, free, (2, 6), 6), UniPC(start, coefficients)
        for _ in range(steps):
            stream.advance(sampler, sampler.sample[:, 2:] / 3, slice(2, 6))
        return sampler.sample

    final = on_both(sampled, start, free)
    np.testing.assert_array_equal(final[:, :2], start[:, :2])
    assert (final[:, 2:] != start[:, 2:]).all()


@pytest.mark.parametrize("steps", [1, 2, 4, 30])
@pytest.mark.parametrize("karras", [False, True])
def test_coefficients_of_either_kind_are_those_of_the_oracle_up_to_rounding(steps, karras):
    schedule = SchedulerConfig(karras, 5.0, 0.147, 200.0).schedule(steps)
    for ours, theirs in zip(*(unipc_coefficients(schedule, xp) for xp in (np, torch)), strict=True):
        for a, b in ((ours.predictor, theirs.predictor), (ours.corrector, theirs.corrector)):
            assert (a is None) == (b is None)
            if a is not None:
                values = [[v or 0.0 for v in vars(update).values()] for update in (a, b)]
                np.testing.assert_allclose(*values, rtol=2e-4, atol=1e-6)


def test_ids_of_a_prompt():
    ids, mask = np.array([[5, 6, 7]]), np.array([[1, 0, 1]])
    for kind in KINDS:
        assert token_ids(kind(ids), kind(mask), "text_ids", 10) == (5, 7)


ALONE = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("this test has no torch")

sys.meta_path.insert(0, NoTorch())
from types import SimpleNamespace
import numpy as np
from strands_cosmos3.engine.denoising import combine, starting_streams
from strands_cosmos3.engine.frames import read_frames
from strands_cosmos3.engine.sampler import SchedulerConfig, UniPC, unipc_coefficients
from strands_cosmos3.engine.sequence import SequenceLayout, generation_positions, unpatchify
from strands_cosmos3.engine.tokens import token_ids
from strands_cosmos3.observe.prompts import compose_prompt
from strands_cosmos3.observe.views import to_canvas
from strands_cosmos3.types import Mode

canvas = to_canvas(read_frames(np.full((40, 60, 3), 128, np.uint8)), (64, 64))
text = compose_prompt("pick up the cube", prompt_format="json", view="ego", num_frames=5,
                      fps=15.0, canvas_hw=(64, 64), layout="")
ids = token_ids(np.frombuffer(text.encode(), np.uint8), None, "text_ids", 256)
layout = SequenceLayout((2, 4, 4), 2, 4, (0,), 0, 7, 15.0, 1)
clean = np.zeros((3, 2, 4, 4), np.float32)
clean[:, 0] = canvas.frames[0, :64:16, :64:16].transpose(2, 0, 1)
request = SimpleNamespace(mode=Mode.POLICY, seed=0, video_noise=None, action_noise=None,
                          action_chunk=4, action_prefix=None, cond_action=None)
streams = starting_streams([request], False, [layout], [clean], 2, 8)
steps = unipc_coefficients(SchedulerConfig(False, 5.0).schedule(3), np)
samplers = [UniPC(stream.start_RnP, steps) for stream in streams]
for i in range(3):
    for stream, sampler in zip(streams, samplers):
        group = stream.group(last=i == 2)
        x = sampler.sample[:, group]
        stream.advance(sampler, combine(x, x / 2, np.float32(3)), group)
video = unpatchify(samplers[0].sample[0], layout.latent_shape, 2)
assert (video[:, 0] == clean[:, 0]).all() and np.isfinite(video).all()
rows = samplers[1].sample[0]
assert rows.shape == (4, 8) and rows[:, :7].all() and not rows[:, 7].any()
assert (rows[:, :7] != streams[1].start_RnP[0, :, :7]).all()
assert len(ids) > 20
print("done")
"""


def test_from_a_picture_to_rows_without_torch():
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert run.stdout == "done\n", run.stderr
