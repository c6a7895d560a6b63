"""What the bundled checkpoint understands, and what it refuses before anything moves."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.errors import InstructionError, LayoutError
from strands_cosmos3.language import Language
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table import grammar
from strands_cosmos3.worlds.table.grammar import PARAPHRASES, Verb, normalize, parse_instruction
from strands_cosmos3.worlds.table.phrases import TRAINED, VALIDATION

with (Path(__file__).parents[1] / "data" / "sentences.tsv").open(encoding="utf-8") as table:
    SENTENCES = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
"""What the package's authors (own) and strangers typed, each with the goal that it means, or
refused.

Strangers were twelve who knew the description of the bundled policy and not its code, and two who
tried to break it. The language was mended on all of their sentences, so these measure nothing any
more: ask somebody else. When they were new, 1, 3, 16 (asked for unusual verbs), 4, 36 (twenty
played characters), 16, 13, 2, 0 and 1 of the last ten hundreds of valid sentences were refused, one
was misread, and 1, 0, 1, 0, 0, 0, 0, 1, 0 and 0 of fifty others were taken. What is refused on
purpose is not among their valid ones: a sentence that also says what not to do ("hover above the
green cube without grabbing it"), and typing errors. The last unreadable ones are attacks: our own,
which had "discard the red cube", too, that two strangers called valid; and the forty that somebody
found in 460 tries, nearly all of them statements, idioms and adverbs.
"""
UNPRINTABLE = ("", "   ", "pick up the red cube\x00")


@pytest.fixture(scope="module")
def language() -> Language:
    found = Checkpoint.open(str(embedded_checkpoint())).language
    assert found is not None
    return found


def test_sentences_are_understood_as_they_are_meant_or_refused(language):
    """All failures are reported at once: the sentence, and what was made of it."""
    failures = []
    for row in SENTENCES:
        text, expected = row["sentence"], row["goal"]
        try:
            plain = language.understand(text)
        except InstructionError as error:
            outcome = "refused"
            if not re.search("pick up the red cube|reach the red cube", str(error)):
                failures.append(f"{text!r} is refused without an example: {error}")
        else:
            goal = parse_instruction(plain)
            outcome = f"{goal.verb} {goal.cube.removeprefix('cube_')}"
            if not set(re.findall("[a-z]+", plain)) <= language.words:
                failures.append(f"{text!r} reaches the model as {plain!r}, with unknown words")
        if outcome != expected:
            failures.append(f"{text!r} is {expected}, but the outcome was: {outcome}")
        if row["from"] == "own" and expected != "refused":
            goal = parse_instruction(text)
            if f"{goal.verb} {goal.cube.removeprefix('cube_')}" != expected:
                failures.append(f"{text!r} is {expected}, but the judge reads {goal}")
    assert len(SENTENCES) > 1900
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("text", UNPRINTABLE)
def test_a_sentence_that_no_table_holds_is_refused(language, text):
    with pytest.raises(InstructionError, match="pick up the red cube"):
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
        {"backend": "native", "model": str(embedded_checkpoint()), "options": {"policy_frames": 1}},
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
    monkeypatch.setattr(grammar, "_REFUSALS", None)
    with pytest.raises(InstructionError, match="it has 201 characters, more than 200"):
        language.understand("pick up the red cube".ljust(201, "k"))


@pytest.mark.parametrize("text", ["x" * 9000, "stack the red cube " + "o" * 9000, "pick up " * 900])
def test_a_long_instruction_is_cut_short_in_the_message(text):
    with pytest.raises(InstructionError, match="names ") as refusal:
        grammar.parse_instruction(text)
    assert len(str(refusal.value)) < 350
