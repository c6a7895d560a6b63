"""Answers of a form follow their schema, whatever the model would rather write."""

import json

import pytest

from reasoner.conftest import KINDS, QUESTION
from strands_cosmos3.errors import AnswerError, InputError
from strands_cosmos3.reasoner.options import AskOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "closed": {"type": "boolean"},
        "colour": {"enum": ["red", "green", "blue"]},
        "cubes": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["closed", "colour", "cubes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_an_answer_follows_its_schema(kind, temperature, reasoners, pictures):
    options = AskOptions(max_tokens=80, temperature=temperature, top_p=0.9, seed=3)
    parts = []
    answer = reasoners[kind].ask(
        QUESTION, pictures[:1], options=options, schema=SCHEMA, on_text=parts.append
    )
    assert answer.finished
    assert answer.value == json.loads(answer.text)
    assert "".join(parts) == answer.text
    assert answer.value.keys() == SCHEMA["properties"].keys()
    assert answer.value["closed"] in (True, False)
    assert answer.value["colour"] in ("red", "green", "blue")
    assert answer.value["cubes"] in range(10)
    assert " " not in answer.text


def test_without_a_schema_it_writes_something_else(reasoners, pictures):
    answer = reasoners["silu"].ask(QUESTION, pictures[:1], options=AskOptions(max_tokens=20))
    assert answer.value is None
    with pytest.raises(ValueError):
        json.loads(answer.text)


def test_an_answer_that_is_cut_off_is_refused(reasoners):
    with pytest.raises(AnswerError, match=r"cut off by the limit of tokens.*'{"):
        reasoners["silu"].ask(QUESTION, options=AskOptions(max_tokens=3), schema=SCHEMA)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "shape"}, "cannot be enforced"),
        ({"type": "string", "contentEncoding": 3, "$ref": "#/nowhere"}, "cannot be enforced"),
        ({"enum": [{1, 2}]}, "cannot be enforced"),
    ],
)
def test_what_is_no_schema_is_refused(schema, problem, reasoners):
    with pytest.raises(InputError, match=problem):
        reasoners["silu"].ask(QUESTION, schema=schema)
