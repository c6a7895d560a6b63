"""Instructions: the verb, the cube, and the other cube."""

import pytest

from strands_cosmos3.errors import InputError
from strands_cosmos3.worlds.table.grammar import Goal, Verb, parse_instruction

GOALS = {
    "pick up the red cube": Goal(Verb.PICK, "cube_red"),
    "Grasp the GREEN block.": Goal(Verb.PICK, "cube_green"),
    "lift the blue one": Goal(Verb.PICK, "cube_blue"),
    "reach the red cube": Goal(Verb.REACH, "cube_red"),
    "move to the green cube": Goal(Verb.REACH, "cube_green"),
    "place the red cube in the bin": Goal(Verb.PLACE, "cube_red"),
    "pick up the blue cube and put it in the bin": Goal(Verb.PLACE, "cube_blue"),
    "stack the red cube on the blue cube": Goal(Verb.STACK, "cube_red", "cube_blue"),
    "put the green cube on the red cube": Goal(Verb.STACK, "cube_green", "cube_red"),
    "pick up the green cube and put it on top of the blue one": Goal(
        Verb.STACK, "cube_green", "cube_blue"
    ),
}
UNCLEAR = (
    "",
    "hello",
    "the red cube",
    "pick up the cube",
    "pick up the purple cube",
    "stack the red cube",
)


def test_goals():
    assert {text: parse_instruction(text) for text in GOALS} == GOALS


@pytest.mark.parametrize("text", UNCLEAR)
def test_what_is_missing_is_named(text):
    with pytest.raises(InputError, match="try '"):
        parse_instruction(text)
