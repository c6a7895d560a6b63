"""The bundled checkpoint's eyes: what is packaged answers about the table, a black picture tells it
nothing, and the policy's weights are what they were before it could see.

How often answers are right stands in its card; a handful of pictures show that what is packaged is
what was measured.
"""

import hashlib

import numpy as np
import pytest

pytest.importorskip("mujoco")

from recipes.own_eyes.figures import answered, posed
from recipes.own_eyes.folder import EMBEDDING, POLICY_WORDS
from strands_cosmos3 import Reasoner
from strands_cosmos3.cli import main
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.weights import checkpoint_key, parameter_shapes
from strands_cosmos3.evaluation.judging import said_of
from strands_cosmos3.reasoner.pixels import Film

POLICY = "33ca7199c14211ddb706f3a964fa23819c797b8c8d979dfd7956ffbea495e33f"
"""SHA-256 of the names and weights that the policy reads of ``transformer/``, as they were before
the eyes were trained."""


@pytest.fixture(scope="module")
def eyes():
    return Reasoner.from_pretrained(embedded_checkpoint())


@pytest.fixture(scope="module")
def tables():
    return posed("plain", 12)


def test_the_policy_s_weights_are_those_from_before():
    checkpoint = Checkpoint.open(embedded_checkpoint())
    weights = checkpoint.weights
    read = {checkpoint_key(name) for name in parameter_shapes(checkpoint.config)}
    found = hashlib.sha256()
    for key in sorted(read & set(weights.shapes)):
        ((_, tensor),) = weights.parts({key: (key, ())})
        rows = POLICY_WORDS if key == EMBEDDING else len(tensor)
        found.update(key.encode() + tensor[:rows].contiguous().numpy().tobytes())
    assert found.hexdigest() == POLICY


def test_answers_about_tables_are_right(eyes, tables):
    for question, pairs in answered(eyes, tables, blank=False).items():
        right = sum(given == answer for given, answer in pairs)
        assert right >= len(pairs) - 1, f"{question}: {pairs}"


def test_a_black_picture_tells_nothing(eyes, tables):
    """Every black picture gets one answer, whatever the table was."""
    for question, pairs in answered(eyes, tables, blank=True).items():
        assert len({given for given, _ in pairs}) == 1, question


def test_a_film_without_motion_is_no_success(eyes, tables):
    """Nothing is lifted in a film whose last picture is its first."""
    empty = [facts for facts in tables if facts["held"] < 0]
    assert len(empty) > 3
    for facts in empty:
        film = Film(np.stack([facts["picture"]] * 2), 1.0)
        said = eyes.ask(
            "Task: pick up the red cube. Did the robot succeed? Answer yes or no.", videos=[film]
        ).text
        assert said_of(said) == "no"


def test_ask_takes_the_bundled_eyes_by_default(tables, tmp_path, capsys):
    from PIL import Image

    facts = tables[0]
    Image.fromarray(facts["picture"]).save(tmp_path / "table.png")
    assert main(["ask", "--image", str(tmp_path / "table.png"), "Which colours are there?"]) == 0
    said = capsys.readouterr()
    assert set(said.out.replace(",", "").replace(" and ", " ").split()) == {
        colour
        for colour, there in zip(("red", "green", "blue"), facts["present"], strict=True)
        if there
    }
    assert "four questions" in said.err
