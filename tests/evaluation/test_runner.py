"""One worker: what an episode's record holds, and on what it depends."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.errors import BackendError, ServiceUnavailableError
from strands_cosmos3.evaluation.folder import without_times
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.evaluation.statistics import summarise
from strands_cosmos3.types import ActionChunk
from strands_cosmos3.worlds.table.expert import ScriptedBackend

SETTINGS = make_settings(
    {"tasks": "reach", "seeds": 3, "conditions": "plain,swapped,replan=8", "duration": 6.0}
)
PLAN = {a.key: a for a in SETTINGS.plan()}
PLAIN, SWAPPED, REPLAN = (PLAN[name, "reach", 1] for name in ("plain", "swapped", "replan=8"))


@pytest.fixture(scope="module")
def runner():
    runner = AssignmentRunner(SETTINGS)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def plain(runner):
    return runner.run(PLAIN)


@pytest.fixture(scope="module")
def replanned(runner, plain):
    return runner.run(REPLAN)


def test_a_record_holds_the_figures_and_the_times_apart(plain):
    assert plain["success"] is True
    assert "followed" not in plain, "there is no other goal"
    assert (plain["goal_instruction"], plain["policy_instruction"]) == (
        PLAIN.goal_instruction,
        PLAIN.policy_instruction,
    )
    assert plain["tracking"]["max_mm"] < 2
    assert len(plain["times"]["answer_ms"]) == plain["counters"]["chunks"]
    assert {"wall_s", "cpu_s", "inference_ms", "realtime_factor"} <= set(plain["times"])
    assert plain["times"]["inference_ms"]["max"] > 0
    assert plain["latency_ms"]["max"] == 0, "the simulation's clock stood still"
    assert plain["latency_clock"] == "simulated, stopped for each answer"


def test_a_record_does_not_depend_on_what_ran_before(runner, plain, replanned):
    assert without_times(runner.run(PLAIN)) == without_times(plain)
    assert without_times(AssignmentRunner(SETTINGS).run(PLAIN)) == without_times(plain)


def test_following_another_goal_ends_the_episode_and_is_no_success(runner, plain):
    record = runner.run(SWAPPED)
    assert record["success"] is False
    assert record["followed"] is True
    assert record["outcome"] == "followed"
    assert record["duration_s"] < 5, "and the episode ends there"
    assert record["seed"] == plain["seed"]


class Deaf(ScriptedBackend):
    """The expert, achieving the goal whatever it is asked."""

    def infer(self, request):
        return super().infer(replace(request, instruction=PLAIN.goal_instruction))


def test_a_policy_that_ignores_another_instruction_succeeds(runner, plain, monkeypatch):
    monkeypatch.setattr(runner._policies, "_backend", Deaf())
    record = runner.run(SWAPPED)
    assert record["success"] is True
    assert record["followed"] is False
    assert record["outcome"] == "success"
    assert record["duration_s"] == plain["duration_s"]


def test_replanning_asks_more_often(plain, replanned):
    assert len(replanned["times"]["answer_ms"]) > len(plain["times"]["answer_ms"])


class Answers(ScriptedBackend):
    """The expert, until its n-th answer."""

    def __init__(self, n, answer):
        self.n, self.answer = n, answer

    def infer(self, request):
        self.n -= 1
        if self.n > 0:
            return super().infer(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        rows = np.full((request.n_rows, 10), self.answer)
        return ActionChunk(rows, request.action_space, request.embodiment)


@pytest.mark.parametrize("at", [1, 2])
def test_a_wild_answer_is_the_policys_failure(runner, monkeypatch, at):
    monkeypatch.setattr(runner._policies, "_backend", Answers(at, 1e3))
    record = runner.run(PLAIN)
    assert record["success"] is False
    assert record["outcome"] == "fault"
    assert "z| = 10" in record["fault"]


def test_a_first_answer_that_cannot_be_executed_follows_nothing(runner, monkeypatch):
    monkeypatch.setattr(runner._policies, "_backend", Answers(1, 1e3))
    assert runner.run(SWAPPED)["followed"] is False


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    "error", [ServiceUnavailableError("nobody listens"), BackendError("out of memory")]
)
def test_a_server_that_is_gone_is_nobodys_failure(runner, monkeypatch, at, error):
    monkeypatch.setattr(runner._policies, "_backend", Answers(at, error))
    with pytest.raises(type(error), match=str(error)):
        runner.run(PLAIN)


def test_the_film_shows_the_same_episode(runner, plain):
    record, film = runner.film(PLAIN)
    assert without_times(record) == without_times(plain)
    assert film[4:8] == b"ftyp"


def test_the_noise_has_a_seed_of_its_own(runner, monkeypatch):
    seeds = []

    class Seeded(ScriptedBackend):
        def infer(self, request):
            seeds.append(request.seed)
            return super().infer(request)

    short = replace(SETTINGS, duration=0.1)
    for settings in (short, replace(short, noise_seed=7)):
        monkeypatch.setattr(runner, "settings", settings)
        monkeypatch.setattr(runner._policies, "_backend", Seeded())
        runner.run(PLAIN)
    assert seeds == [PLAIN.seed, PLAIN.noise_seed(7)]


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_a_ur5e_is_judged_like_a_panda():
    settings = make_settings(
        {
            "robot": "ur5e",
            "tasks": "reach",
            "seeds": 2,
            "conditions": "plain,swapped,table=dark+light=0.5",
            "duration": 10,
        }
    )
    plan, runner = settings.plan(), AssignmentRunner(settings)
    plain, swapped, dark = plan[0], plan[3], plan[4]
    records = {a.key: runner.run(a) for a in (plain, swapped, dark)}
    assert records[plain.key]["success"] is records[dark.key]["success"] is True
    record = records[swapped.key]
    assert (record["success"], record["followed"], record["outcome"]) == (False, True, "followed")
    assert record["assumed"] is True
    rows = summarise(plan, records)
    assert [row["by_category"] for row in rows] == [
        {"red": rows[0]["success"]},
        {"green": rows[1]["success"]},
        {"red": rows[2]["success"]},
    ]


def test_two_arms_lift_a_bar():
    settings = make_settings(
        {"robot": "dual_panda", "seeds": 1, "conditions": "light=2", "tasks": "lift_bar"}
    )
    (lit,), runner = settings.plan(), AssignmentRunner(settings)
    record = runner.run(lit)
    assert record["success"] is True
    (row,) = summarise([lit], {lit.key: record})
    assert row["instruction"] == lit.goal_instruction
    assert "by_category" not in row
