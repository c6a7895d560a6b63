"""``engine.step`` with a state row, as both released DROID policies have it, against a plain
loop over the stock model.
"""

import json
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from helpers.cosmos3_oracle import CHUNK, Case, engine, request
from helpers.parity import reference, share
from helpers.stock_loop import stock_pixels
from strands_cosmos3.engine import inference as inference_module
from strands_cosmos3.engine import sequence, transformer
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.errors import InputError

SCALE = {"columns": "pose9_opening", "mean": [0.1] * 10, "std": [0.5] * 10}
POLICY = {"num_inference_steps": 4, "guidance_scale": 3.0}
SAMPLING = {
    "guided": POLICY,
    "unguided": {"num_inference_steps": 3, "guidance_scale": 1.0},
    "guided on the first step": {**POLICY, "guidance_interval": (960.0, 1001.0)},
    "guided inside": {
        **POLICY,
        "num_inference_steps": 5,
        "guidance_scale": 1.7,
        "guidance_interval": (700.0, 960.0),
    },
}


@pytest.fixture(scope="module")
def folders(joint_checkpoint, checkpoints, tmp_path_factory):
    """Checkpoints whose sequence starts with a state row, by action space."""
    posed = tmp_path_factory.mktemp("posed") / "c"
    shutil.copytree(checkpoints["relu2"], posed)
    known = json.loads((posed / "checkpoint.json").read_text())
    known["strands_cosmos3"]["state"] = SCALE
    (posed / "checkpoint.json").write_text(json.dumps(known))
    return {"joint_pos": joint_checkpoint, "midtrain": posed}


def asked(folders, space, known_rows=1, history=0, **changes):
    """A request with seeded rows before the chunk: history, the state, and rows that are bound
    to be executed.
    """
    width = 8 if space == "joint_pos" else 10
    rng = np.random.RandomState(21)
    rows = CHUNK + 1 + history
    return replace(
        request(Case(folders[space])),
        raw_action_dim=width,
        action_prefix=torch.from_numpy(rng.randn(known_rows + history, width)).float(),
        action_noise=torch.from_numpy(rng.randn(rows, 64)).float(),
        history_rows=history,
        flow_shift=5.0,
        use_karras_sigmas=False,
        **changes,
    )


def share_of(folder, question, expected=None, state_rows=1):
    """The engine's error as a share of what is allowed; ``expected`` is the reference, if it is
    known.
    """
    found = engine(folder, torch.float32).step(question)
    return (expected or reference(folder, question, state_rows)).share(found)


@pytest.fixture(scope="module")
def expected(folders):
    """A function to the reference for one of the two action spaces and one way to sample."""

    @cache
    def answer(space, sampling):
        return reference(folders[space], asked(folders, space, **SAMPLING[sampling]), 1)

    return answer


@pytest.mark.parametrize("space", ["joint_pos", "midtrain"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_step_with_a_state_row(folders, expected, space, sampling):
    question = asked(folders, space, **SAMPLING[sampling])
    assert share_of(folders[space], question, expected(space, sampling)) <= 1


@pytest.mark.parametrize(
    ("known_rows", "history"), [(4, 0), (1, 2), (3, 1)], ids=["prefix", "history", "both"]
)
def test_rows_before_and_after_the_state(folders, known_rows, history):
    """The framework's ``history_length`` of three is two past rows, at positions -2 and -1, and
    the state at 0.
    """
    question = asked(folders, "joint_pos", known_rows, history, **POLICY)
    assert share_of(folders["joint_pos"], question) <= 1


def test_history_without_a_state_row(checkpoints):
    folder = checkpoints["silu"]
    question = asked({"midtrain": folder}, "midtrain", 0, 2, **POLICY)
    question = replace(question, action_noise=question.action_noise[1:])
    assert share_of(folder, question, state_rows=0) <= 1


@pytest.mark.parametrize(
    ("known_rows", "history"),
    [(1, 0), (3, 0), (1, 2), (4, 1)],
    ids=["state", "prefix", "history", "both"],
)
def test_a_state_before_known_actions(folders, known_rows, history):
    """Forward dynamics: every row is given, history and state included. Known actions count
    instead of a prefix's rows in the chunk, and the last one repeats.
    """
    known = torch.from_numpy(np.random.RandomState(3).randn(CHUNK - 2, 8)).float()
    actions = {"mode": "forward_dynamics", "cond_action": known}
    question = asked(folders, "joint_pos", known_rows, history, **actions, **POLICY)
    assert share_of(folders["joint_pos"], question) <= 1


def test_history_must_be_given(folders):
    question = asked(folders, "joint_pos", 1, 2, **POLICY)
    model = engine(folders["joint_pos"], torch.float32)
    with pytest.raises(
        InputError, match="action_prefix has 2 rows; it must be 2 rows of history, the state"
    ):
        model.step(replace(question, action_prefix=question.action_prefix[:2]))
    with pytest.raises(InputError, match="it must be 4 rows of history"):
        model.step(replace(question, history_rows=4))


def _with_time_on_the_state(patch):
    original = transformer.Cosmos3Transformer.velocity

    def velocity(self, tokens, time, noisy, *rest):
        noisy = noisy.clone()
        noisy[..., tokens[0].shape[-2], :] = 1
        return original(self, tokens, time, noisy, *rest)

    patch.setattr(transformer.Cosmos3Transformer, "velocity", velocity)


def _layout(patch, **changes):
    original = sequence.SequenceLayout
    patch.setattr(
        inference_module, "SequenceLayout", lambda **fields: original(**{**fields, **changes})
    )


WRONG = {
    "time embedding on the state row": _with_time_on_the_state,
    "mRoPE offset 1": lambda patch: _layout(patch, action_offset=1),
    "state row not held": lambda patch: _layout(patch, clean_rows=0),
    "one channel too many": lambda patch: _layout(patch, raw_action_dim=9),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("sampling", ["guided", "unguided"])
def test_a_wrong_engine_is_seen(folders, expected, monkeypatch, name, sampling):
    question = asked(folders, "joint_pos", **SAMPLING[sampling])
    WRONG[name](monkeypatch)
    assert share_of(folders["joint_pos"], question, expected("joint_pos", sampling)) >= 10


def test_decoded_pixels(checkpoints):
    """With the latents' mean and deviation, which no other test of latents sees."""
    folder = checkpoints["silu"]
    latents = torch.randn(1, 16, 2, 3, 4, generator=torch.Generator().manual_seed(5))

    def share_of_pixels(found, latents):
        exact, peer = (stock_pixels(folder, latents, t) for t in (torch.float64, torch.float32))
        assert exact.std() > 0.05
        return share(found, exact, peer)

    decoding = Cosmos3Engine.from_pretrained(folder, decode_video=True)
    decoded = (decoding.vae.decode(latents).clamp(-1, 1) + 1) / 2
    assert share_of_pixels(decoded, latents) <= 1
    question = request(Case(folder, steps=1, guidance=1.0))
    result = decoding.step(
        replace(
            question, video_shape=(2, 3, 4), action_chunk=4, video_noise=None, action_noise=None
        )
    )
    assert share_of_pixels(result["pixels"], result["video"]) <= 1
    assert share_of_pixels(result["pixels"], result["video"] * 1.001) > 10
