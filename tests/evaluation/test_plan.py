"""Conditions and assignments: what a condition changes, and that the judge knows nothing of it."""

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.evaluation.plan import (
    Condition,
    PolicyVariation,
    episode_seed,
    make_plan,
    require_distinct,
)
from strands_cosmos3.worlds import get_world
from strands_cosmos3.worlds.table.grammar import PARAPHRASES, TEMPLATES, Verb, parse_instruction
from strands_cosmos3.worlds.table.world import TableVariation

TASKS = ("reach", "pick", "place", "stack")
TABLE = get_world("table")


def parse(text):
    return Condition.parse(text, TableVariation)


@pytest.mark.parametrize(
    ("text", "policy", "world"),
    [
        ("plain", {}, {}),
        ("blank", {"images": "blank"}, {}),
        ("swapped", {"text": "swapped"}, {}),
        ("steps=4", {"num_steps": 4}, {}),
        (
            "blank+paraphrased+replan=8",
            {"images": "blank", "text": "paraphrased", "replan_rows": 8},
            {},
        ),
        ("latency=0.4+limit=7", {"latency_s": 0.4, "limit_s": 7.0}, {}),
        ("light=0.5", {}, {"light": 0.5}),
        ("swapped+table=white+crowded", {"text": "swapped"}, {"table": "white", "crowded": True}),
        ("camera=2+cubes=32+close", {}, {"camera_cm": 2.0, "cubes_mm": 32.0, "close": True}),
    ],
)
def test_short_forms(text, policy, world):
    condition = parse(text)
    assert condition == Condition(text, PolicyVariation(**policy), TableVariation(**world))
    assert condition.identity() == {"name": text, **policy, **world}
    assert condition == Condition.from_dict({"name": text, **policy, **world}, TableVariation)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "blind",
        "steps=x",
        "steps=",
        "steps=1.5",
        "horizon=8",
        "swapped+shuffled",
        "steps=1+steps=2",
        "steps=0",
        "text=swapped",
        "images=blank",
        "light=",
        "light=x",
        "light=0",
        "light=nan",
        "table=glass",
        "cubes=200",
        "latency=-1",
        "close=1",
        "close+close",
        "limit=0",
        "near",
    ],
)
def test_short_forms_without_a_meaning(text):
    with pytest.raises((UnknownNameError, ConfigError)):
        parse(text)


def test_a_world_without_variations_has_the_policys_conditions_only():
    assert Condition.parse("swapped+replan=2").policy.replan_rows == 2
    with pytest.raises(UnknownNameError, match=r"latency=N.*swapped"):
        Condition.parse("light=0.5")


def test_rows_have_names_of_their_own():
    for conditions in ([], [Condition(), Condition()]):
        with pytest.raises(ConfigError, match="its own name"):
            require_distinct(conditions)


def test_tables_of_toml():
    def table(**values):
        return Condition.from_dict(values, TableVariation)

    assert table(name="dark", images="blank", light=0.5) == Condition(
        "dark", PolicyVariation(images="blank"), TableVariation(light=0.5)
    )
    with pytest.raises(UnknownNameError, match="picture"):
        table(name="dark", picture="blank")
    with pytest.raises(UnknownNameError, match="black"):
        table(name="dark", images="black")
    with pytest.raises(ConfigError, match="needs a name"):
        table(images="blank")
    with pytest.raises(ConfigError, match="folder"):
        table(name="../escape")


def plan(condition, task, seeds=300):
    return make_plan(TABLE, [task], seeds, 0, [parse(condition)])


def goals(assignment):
    instructions = assignment.goal_instruction, assignment.policy_instruction
    return tuple(parse_instruction(text) for text in instructions)


@pytest.mark.parametrize("task", TASKS)
def test_swapped_asks_for_another_colour_and_leaves_the_goal(task):
    colours = Counter()
    for swapped, plain in zip(plan("swapped", task, 100), plan("plain", task, 100), strict=True):
        assert swapped.goal_instruction == plain.goal_instruction == plain.policy_instruction
        goal, other = goals(swapped)
        assert (goal.verb, goal.onto) == (other.verb, other.onto)
        assert goal.cube != other.cube != goal.onto
        assert (swapped.goals_differ, plain.goals_differ) == (True, False)
        assert swapped.category == goal.cube.removeprefix("cube_")
        colours[goal.cube, other.cube] += 1
    assert len(colours) == 6, "every pair of colours comes up"


@pytest.mark.parametrize(("task", "chance"), [("reach", 1 / 3), ("stack", 1 / 2)])
def test_shuffled_asks_for_every_colour_alike(task, chance):
    shuffled = plan("shuffled", task)
    same = [goal == other for goal, other in map(goals, shuffled)]
    assert same == [not assignment.goals_differ for assignment in shuffled]
    assert abs(np.mean(same) - chance) < 4 * np.sqrt(chance * (1 - chance) / len(same))


@pytest.mark.parametrize("task", TASKS)
def test_paraphrases_mean_the_same_in_other_words(task):
    words = set()
    for assignment in plan("paraphrased", task):
        goal, other = goals(assignment)
        assert goal == other
        assert not assignment.goals_differ
        assert assignment.policy_instruction != assignment.goal_instruction
        words.add(assignment.policy_instruction)
    assert len(words) >= 3 * len(PARAPHRASES[Verb(task)]), "every wording, with every colour"


def test_paraphrases_are_no_templates():
    assert not {text for texts in PARAPHRASES.values() for text in texts} & set(TEMPLATES.values())


def test_random_text_has_no_other_goal():
    first, second = plan("random", "reach", 2)
    assert first.policy_instruction != second.policy_instruction
    assert not first.goals_differ
    assert set(first.policy_instruction) <= set("abcdefghijklmnopqrstuvwxyz ")


@pytest.mark.parametrize("task", TASKS)
def test_goals_rotate_among_the_colours(task):
    asked = Counter(goals(assignment)[0] for assignment in plan("plain", task, 60))
    assert len(asked) == (6 if task == "stack" else 3)
    assert len(set(asked.values())) == 1
    assert {goal.verb for goal in asked} == {Verb(task)}


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


def test_scene_and_noise_have_seeds_of_their_own():
    (assignment,) = plan("plain", "pick", 1)
    assert assignment.noise_seed(None) == assignment.seed
    assert len({assignment.seed, assignment.noise_seed(0), assignment.noise_seed(1)}) == 3


def test_another_wording_and_what_an_episode_begins_from():
    _, second = make_plan(TABLE, ["pick"], 2, 0, [parse("swapped+close")], "grab the {a} cube")
    assert second.goal_instruction == "grab the green cube"
    start = second.start
    assert (start.task, start.seed, start.index) == ("pick", second.seed, 1)
    assert start.instruction == "grab the green cube"
    assert start.variation == TableVariation(close=True)
