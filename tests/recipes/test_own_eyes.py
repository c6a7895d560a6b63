"""Eyes for the bundled checkpoint: the policy keeps its bits, batches compute what transformers does,
pictures have the right answers, and training resumes.
"""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

pytest.importorskip("mujoco")

from recipes.own_eyes.folder import EMBEDDING, HEAD, HW, POLICY_WORDS, read_by_policy, write_sight
from recipes.own_eyes.pictures import NOTHING, played_shard, posed_shard
from recipes.own_eyes.questions import SUCCEEDED, WHICH_COLOURS, colours_said, nearest_said
from recipes.own_eyes.sight import Sight, Written, signed
from recipes.own_eyes.train import Training, TrainOptions, fresh_folder
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.weights import checkpoint_key, parameter_shapes
from strands_cosmos3.errors import CheckpointError
from strands_cosmos3.evaluation.settings import INSTRUCTION, QUESTION
from strands_cosmos3.reasoner.pixels import Film
from strands_cosmos3.reasoner.reasoner import Reasoner
from strands_cosmos3.worlds.table.grammar import Verb
from strands_cosmos3.worlds.table.phrases import GOALS, plain


@pytest.fixture(scope="module")
def bundled():
    return embedded_checkpoint("droid", "panda", "pick", "table")


@pytest.fixture(scope="module")
def untrained(bundled, tmp_path_factory):
    return fresh_folder(tmp_path_factory.mktemp("eyes") / "untrained", bundled, 0)


@pytest.fixture(scope="module")
def sight(untrained):
    return Sight(Reasoner.from_pretrained(untrained), POLICY_WORDS)


def test_the_policy_s_tensors_keep_their_bits(bundled, untrained):
    before, after = Checkpoint.open(bundled), Checkpoint.open(untrained)
    read = {checkpoint_key(name) for name in parameter_shapes(before.config)}
    assert all(read_by_policy(key, 4) for key in read & before.weights.shapes.keys())
    changed = []
    for key in before.weights.shapes:
        ((_, old),) = before.weights.parts({key: (key, ())})
        ((_, new),) = after.weights.parts({key: (key, ())})
        rows = POLICY_WORDS if key == EMBEDDING else len(old)
        if not torch.equal(old[:rows], new[:rows]) or old.shape[1:] != new.shape[1:]:
            changed.append(key)
    assert HEAD in changed
    assert not any(read_by_policy(key, 4) for key in changed)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        stored = [
            (folder / "text_tokenizer" / name).read_bytes() for folder in (bundled, untrained)
        ]
        assert stored[0] == stored[1]


def test_the_policy_s_tensors_cannot_be_replaced(bundled, untrained, tmp_path):
    key = "layers.3.self_attn.to_k.weight"  # next to to_q, which may be
    with pytest.raises(CheckpointError, match="is the policy's"):
        write_sight(bundled, tmp_path / "out", {}, {key: torch.zeros(64, 192)}, "")
    assert not (tmp_path / "out").exists()


def test_the_policy_s_words_keep_their_tokens(bundled, untrained):
    theirs = Tokenizer.from_file(str(bundled / "text_tokenizer/tokenizer.json"))
    ours = Tokenizer.from_file(str(untrained / "tokenizer.json"))
    for text in (*map(plain, range(9)), "<|im_start|>user\nhover over it<|im_end|>\n"):
        assert ours.encode(text).ids == theirs.encode(text).ids
    for answer in ("red", "green", "blue", "yes", "no"):
        assert len(ours.encode(answer).ids) == 1
        assert ours.decode(ours.encode(answer).ids) == answer
    assert ours.get_vocab_size() == POLICY_WORDS + 21


def test_eyes_are_small_enough_for_the_wheel(untrained):
    files = sum(file.stat().st_size for file in untrained.rglob("*.safetensors"))
    assert (untrained / "vision_encoder/model.safetensors").stat().st_size < 4.3e6
    assert files < 20e6


def test_batches_compute_what_transformers_does(sight, untrained):
    """A picture, and a film of two, in one batch; a film's time is part of its question."""
    reasoner = sight._reasoner[0]
    theirs = AutoModelForImageTextToText.from_pretrained(untrained, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 256, (2, 2, *HW, 3), dtype=np.uint8)
    pairs[0, 1] = pairs[0, 0]
    task = SUCCEEDED.format(plain(0))
    prompts = [
        reasoner.prompts.inputs(WHICH_COLOURS, [pairs[0, 0]]),
        reasoner.prompts.inputs(task, videos=[Film(pairs[1], 1 / 7.0)]),
    ]
    written = [
        sight.write(WHICH_COLOURS, "red, green and blue"),
        sight.write(task, "yes", 7.0),
    ]
    with torch.no_grad():
        seen = sight.see(signed(torch.from_numpy(pairs)))
        logits, targets = sight(seen, torch.arange(2), Written.stacked(written))
        expected = [theirs(**inputs).logits[0, -1] for inputs in prompts]
    words = reasoner.prompts.tokenizer
    assert words.decode(targets[:6]) == "red, green and blue<|im_end|>"
    assert words.decode(targets[6:]) == "yes<|im_end|>"
    assert expected[0].std() > 0.1
    torch.testing.assert_close(logits[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[6], expected[1], rtol=0, atol=1e-5)


def test_the_judge_s_question_is_the_trained_one():
    assert QUESTION.replace(INSTRUCTION, "{}") == SUCCEEDED


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ((1, 1, 1), "red, green and blue"),
        ((1, 0, 1), "red and blue"),
        ((0, 1, 0), "green"),
        ((0, 0, 0), "no cube"),
    ],
)
def test_colours_are_listed(present, said):
    assert colours_said(present) == said


def test_the_nearest_cube_is_named():
    assert nearest_said(2) == "the blue cube"
    assert nearest_said(NOTHING) == "no cube"


@pytest.fixture(scope="module")
def posed():
    return posed_shard(6, 48, 0.5)


@pytest.fixture(scope="module")
def played():
    return played_shard(5, 2, 0.2)


def test_posed_cubes_are_where_they_are_said_to_be(posed):
    """A held cube is nearest to the hand, at the fingertips; one that is not there is no answer."""
    held = np.flatnonzero(posed["held"] != NOTHING)
    assert 2 < len(held) < 40
    assert (posed["nearest"][held] == posed["held"][held]).all()
    away = np.linalg.norm(posed["cubes_m"], axis=2)
    assert away[held, posed["held"][held]].max() < 0.03
    assert (posed["opening"][held] > 0.3).all()
    there = posed["present"]
    assert there[held, posed["held"][held]].all()
    missing = np.flatnonzero(~there.all(axis=1))
    assert len(missing) > 2
    assert (posed["cubes_m"][missing][~there[missing]] == 0).all()


def test_a_missing_cube_is_not_drawn(posed):
    """Blue is nothing else's colour on the table's pictures with three cubes."""
    pixels = posed["picture"].astype(int)
    blue = ((pixels[..., 2] - pixels[..., :2].max(axis=-1)) > 60).sum(axis=(1, 2))
    has = posed["present"][:, 2]
    assert 2 < has.sum() < 46
    assert np.median(blue[has]) > 4 * max(np.median(blue[~has]), 1)


def test_episodes_say_which_goals_are_achieved(played):
    starts = np.unique(played["start"])
    assert len(starts) == 2
    assert played["achieved"].shape[1] == len(GOALS)
    assert not played["achieved"][starts].any()
    pick = [verb is Verb.PICK for verb, _ in GOALS]
    picks = played["achieved"][:, pick].any(axis=1)
    assert (played["held"][picks] != NOTHING).all(), "a cube that is lifted is held"


def test_training_goes_on_where_it_was(posed, played, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, arrays in (("posed", posed), ("played", played)):
        for shard in (0, 1):
            np.savez(pictures / f"{name}-0-{shard:04d}.npz", **arrays)
    options = TrainOptions(tmp_path / "run", pictures, steps=2, batch=4, films=3)
    first = Training(options)
    first.run()
    assert (tmp_path / "run/checkpoint-2/vision_encoder").is_dir()
    again = Training(TrainOptions(tmp_path / "run", pictures, steps=3, batch=4, films=3))
    assert again.step == 2
    assert again.cpu_s > 0
    for mine, theirs in zip(again.sight.parameters(), first.sight.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    again.run()
    assert again.judged(8).startswith("held out: ")
    answer = Reasoner.from_pretrained(tmp_path / "run/checkpoint-3").ask(
        WHICH_COLOURS, [posed["picture"][0]]
    )
    assert answer.prompt_tokens == 34
