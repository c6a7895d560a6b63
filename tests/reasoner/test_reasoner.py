"""Questions are answered greedily or by chance, streamed, and up to a limit."""

import json

import pytest
import torch

from reasoner.conftest import KINDS, QUESTION
from strands_cosmos3 import Reasoner as PublicReasoner
from strands_cosmos3.errors import InputError
from strands_cosmos3.reasoner.options import AskOptions
from strands_cosmos3.reasoner.reasoner import Reasoner

SHORT = AskOptions(max_tokens=16)


def likeliest(reasoner, count, *question):
    """The likeliest tokens, one after the other, each from the whole sequence before it."""
    inputs = dict(reasoner.prompts.inputs(*question))
    prompt = inputs["input_ids"].shape[1]
    for _ in range(count):
        with torch.no_grad():
            token = reasoner.model(**inputs).logits[0, -1].argmax()
        grown = {"input_ids": token, "attention_mask": 1, "mm_token_type_ids": 0}
        for name, value in grown.items():
            new = torch.as_tensor([[int(value)]], dtype=inputs[name].dtype)
            inputs[name] = torch.cat([inputs[name], new], 1)
    return inputs["input_ids"][0, prompt:].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["none", "three pictures", "both"])
def test_the_likeliest_tokens_are_written(kind, case, reasoners, cases):
    """With keys, values and positions kept, as without."""
    reasoner = reasoners[kind]
    answer = reasoner.ask(QUESTION, *cases[case], options=SHORT)
    ids = likeliest(reasoner, 16, QUESTION, *cases[case])
    end = reasoner.prompts.tokenizer.eos_token_id
    ids = ids[: ids.index(end)] if end in ids else ids
    assert answer.text == reasoner.prompts.tokenizer.decode(ids, skip_special_tokens=True)


def test_the_parts_of_a_stream_are_the_answer(reasoners, pictures):
    parts = []
    answer = reasoners["relu2"].ask(QUESTION, pictures, options=SHORT, on_text=parts.append)
    assert len(parts) > 1
    assert "".join(parts) == answer.text
    assert (answer.tokens, answer.finished) == (16, False)
    assert answer.prompt_tokens > 30


def test_a_seed_decides_what_is_drawn(reasoners):
    def asked(**options):
        options = AskOptions(max_tokens=16, **options)
        return reasoners["silu"].ask(QUESTION, options=options).text

    drawn = [asked(temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert asked(temperature=1.0, top_p=1e-6, seed=1) == asked() == asked(seed=5)
    assert asked(temperature=1e-4, seed=1) == asked()


def test_the_caller_s_own_chance_is_left_alone(reasoners):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    reasoners["silu"].ask(QUESTION, options=AskOptions(max_tokens=4, temperature=1.0, seed=1))
    assert torch.equal(torch.rand(3), expected)


def test_an_end_token_ends_the_answer(reasoners):
    """Random weights hardly ever write it: the scores of another are swapped with its."""
    reasoner = reasoners["silu"]
    second = likeliest(reasoner, 2, QUESTION)[1]
    end = reasoner.prompts.tokenizer.eos_token_id
    rows = reasoner.model.lm_head.weight
    swapped = rows[[second, end]].clone()
    try:
        rows[[end, second]] = swapped
        answer = reasoner.ask(QUESTION, options=SHORT)
    finally:
        rows[[second, end]] = swapped
    assert (answer.tokens, answer.finished) == (2, True)
    assert "<|im_end|>" not in answer.text


def test_end_tokens_are_the_folder_s(reasoners, seeing):
    path = seeing["silu"] / "generation_config.json"
    stated = json.loads(path.read_text())
    first = likeliest(reasoners["silu"], 1, QUESTION)[0]
    try:
        ends = {"eos_token_id": [stated["eos_token_id"], first], "temperature": 0.7, "top_k": 20}
        path.write_text(json.dumps(ends | {"do_sample": True}))
        answer = Reasoner.from_pretrained(seeing["silu"]).ask(QUESTION, options=SHORT)
    finally:
        path.write_text(json.dumps(stated))
    assert (answer.tokens, answer.finished) == (1, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"seed": -1},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        AskOptions(**wrong)


def test_the_public_name():
    assert PublicReasoner is Reasoner


def test_pictures_are_a_list(reasoners, pictures):
    with pytest.raises(InputError, match="images"):
        reasoners["silu"].ask(QUESTION, pictures[0])
