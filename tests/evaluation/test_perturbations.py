"""What a condition shows and tells, and that the judge knows nothing of it."""

from collections import Counter

import numpy as np
import pytest

from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.evaluation.perturbations import Perturbation, parse_conditions
from strands_cosmos3.evaluation.plan import episode_seed, goal_instruction, make_plan
from strands_cosmos3.worlds.table.grammar import (
    COLOURS,
    PARAPHRASES,
    TEMPLATES,
    Verb,
    parse_instruction,
)

TASKS = ("reach", "pick", "place", "stack")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", Perturbation("plain")),
        ("blank", Perturbation("blank", images="blank")),
        ("swapped", Perturbation("swapped", text="swapped")),
        ("steps=4", Perturbation("steps=4", num_steps=4)),
        (
            "blank+paraphrased+replan=8",
            Perturbation("blank+paraphrased+replan=8", "blank", "paraphrased", None, 8),
        ),
    ],
)
def test_short_forms(text, wanted):
    assert Perturbation.parse(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "blind",
        "steps=x",
        "steps=",
        "horizon=8",
        "swapped+shuffled",
        "steps=1+steps=2",
        "steps=0",
    ],
)
def test_short_forms_that_mean_nothing(text):
    with pytest.raises((UnknownNameError, ConfigError)):
        Perturbation.parse(text)


def test_rows_have_names_of_their_own():
    with pytest.raises(ConfigError, match="its own name"):
        parse_conditions(["plain", "plain"])


def test_tables_of_toml():
    assert Perturbation.from_dict({"name": "dark", "images": "blank"}) == Perturbation(
        "dark", images="blank"
    )
    with pytest.raises(UnknownNameError, match="picture"):
        Perturbation.from_dict({"name": "dark", "picture": "blank"})
    with pytest.raises(UnknownNameError, match="black"):
        Perturbation.from_dict({"name": "dark", "images": "black"})
    with pytest.raises(ConfigError, match="folder"):
        Perturbation(name="../escape")


def plan(condition, task, seeds=300):
    return make_plan([task], seeds, 0, [Perturbation.parse(condition)])


@pytest.mark.parametrize("task", TASKS)
def test_swapped_tells_another_colour_and_leaves_what_is_asked(task):
    colours = Counter()
    for told, plain in zip(plan("swapped", task), plan("plain", task), strict=True):
        assert told.goal_instruction == plain.goal_instruction == plain.policy_instruction
        asked, other = told.goals
        assert (asked.verb, asked.onto) == (other.verb, other.onto)
        assert asked.cube != other.cube != asked.onto
        colours[asked.cube, other.cube] += 1
    assert len(colours) == 6, "every pair of colours comes up"


@pytest.mark.parametrize(("task", "chance"), [("reach", 1 / 3), ("stack", 1 / 2)])
def test_shuffled_tells_every_colour_alike(task, chance):
    same = [asked == told for asked, told in (a.goals for a in plan("shuffled", task))]
    assert abs(np.mean(same) - chance) < 4 * np.sqrt(chance * (1 - chance) / len(same))


@pytest.mark.parametrize("task", TASKS)
def test_paraphrases_mean_the_same_in_other_words(task):
    words = set()
    for assignment in plan("paraphrased", task):
        asked, told = assignment.goals
        assert asked == told
        assert assignment.policy_instruction != assignment.goal_instruction
        words.add(assignment.policy_instruction)
    assert len(words) >= 3 * len(PARAPHRASES[Verb(task)]), "every wording, with every colour"


def test_paraphrases_are_no_templates():
    assert not {text for texts in PARAPHRASES.values() for text in texts} & set(TEMPLATES.values())


@pytest.mark.parametrize("task", TASKS)
def test_what_is_asked_goes_round_the_colours(task):
    goals = Counter(parse_instruction(goal_instruction(task, index)) for index in range(60))
    assert len(goals) == (6 if task == "stack" else 3)
    assert len(set(goals.values())) == 1
    assert {goal.verb for goal in goals} == {Verb(task)}


def test_seeds_follow_from_task_and_index_alone():
    seeds = {(task, index): episode_seed(0, task, index) for task in TASKS for index in range(250)}
    assert len(set(seeds.values())) == len(seeds)
    assert max(seeds.values()) < 2**31
    assert episode_seed(1, "pick", 0) != seeds["pick", 0]
    assert episode_seed(0, "reach", 0) == 1584577109, (
        "recorded: another numpy, another machine, the same scenes"
    )
    for condition in ("plain", "swapped", "blank"):
        assert [a.seed for a in plan(condition, "pick", 5)] == [seeds["pick", i] for i in range(5)]
    longer, shorter = plan("shuffled", "pick", 9), plan("shuffled", "pick", 5)
    assert longer[:5] == shorter, "more seeds leave the first ones as they are"


def test_a_wording_of_ones_own():
    assert goal_instruction("pick", 1, "grab the {a} cube") == f"grab the {COLOURS[1]} cube"
