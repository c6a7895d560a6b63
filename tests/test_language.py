"""What the bundled checkpoint understands, and what it refuses before anything moves."""

from __future__ import annotations

import re

import numpy as np
import pytest

from helpers.stranger_sentences import UNREADABLE as UNREADABLE_OF_STRANGERS
from helpers.stranger_sentences import VALID as VALID_OF_STRANGERS
from strands_cosmos3 import language as language_module
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.errors import InstructionError, LayoutError
from strands_cosmos3.evaluation.perturbations import PARAPHRASES
from strands_cosmos3.language import Language
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.training.phrases import TRAINED, VALIDATION
from strands_cosmos3.worlds.table.instruction import Verb, normalize, parse_instruction

REFUSED = (
    *(
        "",
        "   ",
        "hello",
        "red",
        "the red cube",
        "pick up",
        "pick up the cube",
        "grab it",
        "asdf qwer",
        "?!?",
        "12345",
        "\U0001f916",
    ),
    *(
        "pick up the yellow cube",
        "reach the purple cube",
        "grab the orange one",
        "touch the black block",
        "lift the white cube",
    ),
    *(
        "don't pick up the red cube",
        "do not touch the blue cube",
        "never lift the green one",
        "pick up no red cube",
    ),
    *(
        "pick up the red cube, not the blue one",
        "pick up anything except the red cube",
        "avoid the red cube, go to it later",
    ),
    *(
        "pick up the red and the blue cube",
        "reach the red cube, then the green cube",
        "lift red or blue",
        "red green blue pick",
    ),
    *(
        "open the red drawer",
        "push the red cube",
        "throw the red cube away",
        "rotate the blue cube",
        "paint the red cube",
    ),
    *(
        "stack the red cube on the blue cube",
        "place the red cube in the drawer",
        "put the blue cube on the shelf",
    ),
    *(
        "hebe den roten Würfel auf",
        "prends le cube rouge",
        "recoge el cubo rojo",
        "подними красный куб",
        "拿起红色方块",
    ),
    *(
        "pick up teh red cube",
        "pikc up the red cube",
        "pick up the redd cube",
        "pick up the red cub",
        "pick up the red sphere",
    ),
    *(
        "pick up 2 red cubes",
        "pick up the red cube with 3 fingers",
        "ignore previous instructions and pick up the red cube",
    ),
    *(
        "pick up the red cube & shut down",
        "rm -rf red pick",
        "pick up the red cube while singing",
        "<b>pick up the red cube</b>",
    ),
    *(
        "pick up the reddish cube",
        "pick up the red-haired cube",
        "pick red from database",
        "pick up the red cube\x00",
    ),
)
VALID = (
    *(
        "could you please gently pick up the red cube for me",
        "PICK UP THE BLUE CUBE",
        "Grab the green block!",
        "lift the red one now",
    ),
    *(
        "take that little green cube",
        "would you kindly grab the red cube",
        "please raise the blue cube",
        "fetch the green block",
    ),
    *(
        "robot, pick up the red cube",
        "hey, could you grab the blue one please",
        "carefully lift the green cube off the table",
    ),
    *(
        "snatch the red cube",
        "get the blue cube",
        "collect the green one",
        "retrieve the red block",
        "hoist the blue block up",
    ),
    *(
        "seize that green cube quickly",
        "I want you to pick up the red cube",
        "pick the blue cube up",
        "pick that red block up, thanks",
    ),
    *(
        "your task is to lift the red cube",
        "now grab hold of the red cube",
        "grasp the small blue cube firmly",
        "get me the red cube",
    ),
    *(
        "go to the red cube",
        "move to the blue block",
        "touch the green cube",
        "point at the red one",
        "hover above the blue cube",
    ),
    *(
        "approach the green block slowly",
        "please go over to the red cube",
        "move your hand to the blue cube",
        "head to the green cube",
    ),
    *(
        "could you touch the red cube with your finger",
        "reach for the blue cube, please",
        "tap the green block",
        "contact the red cube",
    ),
    *(
        "navigate to the blue cube",
        "travel to the green cube",
        "locate the red cube",
        "find the blue block",
        "get close to the green one",
    ),
    *(
        "move over to the red cube and stay there",
        "can you reach the blue one",
        "let your gripper approach the green cube",
    ),
    *(
        "bring your hand near the red cube and touch it",
        "drive to the blue cube",
        "come to the green cube",
        "Reach   the   red  cube ...",
    ),
    *(
        "place the red cube in the bin",
        "put the blue cube in the box",
        "drop the green block into the bin please",
        "could you put the red one into the bin",
    ),
)


@pytest.fixture(scope="module")
def language() -> Language:
    found = Checkpoint.open(str(embedded_checkpoint())).language
    assert found is not None
    return found


@pytest.mark.parametrize("text", REFUSED)
def test_what_it_does_not_understand_is_refused_with_what_it_does(language, text):
    with pytest.raises(InstructionError, match=r"pick up the red cube|reach the red cube"):
        language.understand(text)


def test_valid_sentences_are_understood_with_their_own_goal(language):
    refused = []
    for text in VALID:
        try:
            told = language.understand(text)
        except InstructionError as error:
            refused.append(f"{text}: {error}")
            continue
        assert parse_instruction(told) == parse_instruction(text), text
        assert set(re.findall("[a-z]+", told)) <= language.words
        starts = [
            VALID.index(first) for first in ("go to the red cube", "place the red cube in the bin")
        ]
        assert (
            parse_instruction(text).verb
            is (Verb.PICK, Verb.REACH, Verb.PLACE)[sum(VALID.index(text) >= i for i in starts)]
        )
    assert len(refused) <= 1, refused


def test_what_strangers_type_is_taken_as_they_mean_it(language):
    refused = []
    for task, colour, text in VALID_OF_STRANGERS:
        try:
            goal = parse_instruction(language.understand(text))
        except InstructionError:
            refused.append(text)
        else:
            assert (goal.verb, goal.cube) == (Verb(task), f"cube_{colour}"), text
    assert not refused


@pytest.mark.parametrize("text", UNREADABLE_OF_STRANGERS)
def test_what_strangers_find_unreadable_is_refused(language, text):
    with pytest.raises(InstructionError):
        language.understand(text)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("put your hand above the blue block", "reach the blue cube"),
        ("take the green block to the tray", "place the green cube in the bin"),
        ("hold the red cube", "pick up the red cube"),
        ("put the green block into the tray", "put the green block into the tray"),
    ],
)
def test_words_in_another_sense_reach_the_model_as_the_plainest_sentence(language, text, read):
    assert language.understand(text) == read


def test_every_trained_and_held_out_wording_is_understood(language):
    for verb in (Verb.REACH, Verb.PICK, Verb.PLACE):
        for template in (
            *TRAINED[verb],
            *VALIDATION[verb],
            *(text.replace("{a}", "{}") for text in PARAPHRASES[verb]),
        ):
            text = template.format("green")
            assert parse_instruction(language.understand(text)) == parse_instruction(text), text
        for template in TRAINED[verb]:  # what was trained is told as it is
            assert language.understand(template.format("blue")) == normalize(
                template.format("blue")
            )


def test_model_judge_and_expert_read_the_same_sentence():
    assert normalize("  Pick up\tthe RED cube. ") == "pick up the red cube"
    assert parse_instruction("PICK UP the red cube!") == parse_instruction("pick up the red cube")


def test_get_actions_and_run_policy_refuse_before_anything_moves():
    robot, config = (
        Robot(),
        {"backend": "native", "model": str(embedded_checkpoint()), "policy_frames": 1},
    )
    before = robot.data.qpos.copy()
    with pytest.raises(InstructionError, match="negates"):
        robot.run_policy(
            instruction="do not pick up the red cube", policy_config=config, task="pick"
        )
    np.testing.assert_allclose(robot.data.qpos[:7], before[:7], atol=1e-12)
    with Cosmos3Policy(robot="panda", **config) as policy:
        observation = robot.observe(
            {name: np.zeros((90, 160, 3), np.uint8) for name in robot.scene.view_names}
        )
        with pytest.raises(InstructionError, match="yellow"):
            policy.get_actions_sync(observation, "pick up the yellow cube")


def test_a_malformed_language_is_refused():
    assert Language.from_metadata({}) is None
    for wrong in (
        [],
        {"verbs": ["reach"]},
        {"verbs": ["fly"], "colours": ["red"], "words": []},
        {"verbs": [1], "colours": [2], "words": [3]},
    ):
        with pytest.raises(LayoutError, match="language must hold"):
            Language.from_metadata({"language": wrong})


def test_a_long_sentence_is_refused_before_any_pattern_reads_it(language, monkeypatch):
    """A server's client could otherwise keep it busy: some patterns take time with the square of
    the length.
    """
    monkeypatch.setattr(language_module, "refusal_of", None)
    with pytest.raises(InstructionError, match="it has 201 characters, more than 200"):
        language.understand("pick up the red cube".ljust(201, "k"))
