"""Questions become the tokens that the models were trained on."""

import re

import pytest
import torch

from reasoner.conftest import KINDS, QUESTION
from strands_cosmos3.errors import InputError, LayoutError

BEFORE, AFTER = "<|im_start|>user\n", f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def text_of(writer, inputs):
    """What the inputs say, each run of placeholders as its length."""
    text = writer.tokenizer.decode(inputs["input_ids"][0])
    return re.sub(
        r"(<\|(image|video)_pad\|>)+", lambda run: f"[{run[0].count('pad')} {run[2]}]", text
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_picture_is_its_tokens_between_marks(kind, reasoners, pictures):
    """One for 2 x 2 patches of 16 x 16 pixels."""
    writer = reasoners[kind].prompts
    made = writer.inputs(QUESTION, pictures)
    shown = "".join(f"<|vision_start|>[{n} image]<|vision_end|>" for n in (6, 6, 8))
    assert text_of(writer, made) == BEFORE + shown + AFTER
    of_pictures = made["input_ids"] == reasoners[kind].model.config.image_token_id
    assert torch.equal(made["mm_token_type_ids"], of_pictures.to(made["mm_token_type_ids"].dtype))
    assert of_pictures.sum() == 20
    assert made["attention_mask"].all()


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        # of two frames in one patch, the middle
        ("silu", ("0.3", "1.5", "2.4")),
        ("relu2", ("0.0", "0.6", "1.2", "1.8", "2.4")),
    ],
)
def test_a_film_is_times_and_tokens_without_marks_around_it(kind, times, reasoners, film):
    writer = reasoners[kind].prompts
    made = writer.inputs(QUESTION, (), [film])
    shown = "".join(f"<{t} seconds><|vision_start|>[6 video]<|vision_end|>" for t in times)
    assert text_of(writer, made) == BEFORE + shown + AFTER
    films = made["input_ids"] == reasoners[kind].model.config.video_token_id
    assert (made["mm_token_type_ids"] == 2 * films).all()
    assert made["video_grid_thw"].tolist() == [[len(times), 4, 6]]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_in_time_and_space(kind, reasoners, pictures, film):
    """What the model derives of the kinds of tokens: a picture's tokens have one time, and their
    row and column; text after it goes on behind the longer of its sides.
    """
    writer = reasoners[kind].prompts
    made = writer.inputs(QUESTION, pictures[:1], [film])
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    positions, _ = reasoners[kind].model.model.get_rope_index(
        **{name: made[name] for name in names}
    )
    positions = positions[:, 0]
    (of_picture,) = (made["mm_token_type_ids"][0] == 1).nonzero(as_tuple=True)
    first = int(of_picture[0])
    assert positions[:, of_picture].sub(first).tolist() == [
        [0] * 6,
        [0, 0, 0, 1, 1, 1],
        [0, 1, 2] * 2,
    ]
    after = positions[:, of_picture[-1] + 1]
    assert after.tolist() == [first + 3] * 3
    times = int(made["video_grid_thw"][0, 0])
    of_films = positions[0, made["mm_token_type_ids"][0] == 2]
    assert len(set(of_films.tolist())) == times


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_pictures_matters(kind, reasoners, pictures):
    a, b = (
        reasoners[kind].prompts.inputs(QUESTION, order) for order in (pictures[:2], pictures[1::-1])
    )
    assert not torch.equal(a["pixel_values"], b["pixel_values"])
    assert a["image_grid_thw"].tolist() == b["image_grid_thw"].tolist()[::-1]


@pytest.mark.parametrize("question", ["what is <|image_pad|>?", "<|video_pad|>", "  "])
def test_a_question_is_words(question, reasoners):
    with pytest.raises(InputError, match="a question is words"):
        reasoners["silu"].prompts.inputs(question)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content }}", "has no place for pictures"),
        ("{{ messages[0].nothing.more }}", "cannot write a question"),
        ("{% if %}", "cannot write a question"),
    ],
)
def test_a_template_without_a_place_for_pictures_is_refused(
    template, problem, reasoners, pictures, monkeypatch
):
    writer = reasoners["silu"].prompts
    monkeypatch.setattr(writer.tokenizer, "chat_template", template)
    with pytest.raises(LayoutError) as error:
        writer.inputs(QUESTION, pictures[:1])
    assert problem in str(error.value)


def test_a_first_token_is_written_once(reasoners, monkeypatch):
    """Where the template writes it the tokenizer adds none."""
    tokenizer = reasoners["silu"].prompts.tokenizer
    asked = []
    plain = type(tokenizer).__call__

    def call(self, text, **settings):
        asked.append(settings["add_special_tokens"])
        return plain(self, text, **settings)

    monkeypatch.setattr(type(tokenizer), "__call__", call)
    try:
        for first, added in (("<|im_start|>", False), ("<|endoftext|>", True)):
            tokenizer.bos_token = first
            reasoners["silu"].prompts.inputs(QUESTION)
            assert asked.pop() is added
    finally:
        tokenizer.bos_token = None
