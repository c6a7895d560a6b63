"""One worker: what an episode's record holds, and on what it depends."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import BackendError, ServiceUnavailableError
from strands_cosmos3.evaluation import perturbed_backend
from strands_cosmos3.evaluation.folder import without_times
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.perturbed_backend import PerturbedBackend
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.evaluation.simulator import AS_TOLD, Simulator
from strands_cosmos3.types import ActionChunk, Request
from strands_cosmos3.worlds.table.expert import ScriptedBackend

SETTINGS = make_settings(
    {"tasks": "reach", "seeds": 3, "conditions": "plain,swapped,replan=8", "duration": 6.0}
)
PLAN = {a.key: a for a in SETTINGS.plan()}
PLAIN, SWAPPED, REPLAN = (PLAN[name, "reach", 1] for name in ("plain", "swapped", "replan=8"))


@pytest.fixture(scope="module")
def simulator():
    return Simulator(SETTINGS)


@pytest.fixture(scope="module")
def plain(simulator):
    return simulator.run(PLAIN)


def test_a_record_holds_the_figures_and_the_times_apart(plain):
    assert plain["success"] is plain["success_told"] is True
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


def test_a_record_does_not_depend_on_what_ran_before(simulator, plain):
    simulator.run(REPLAN)
    assert without_times(simulator.run(PLAIN)) == without_times(plain)
    assert without_times(Simulator(SETTINGS).run(PLAIN)) == without_times(plain)


def test_told_another_colour_it_does_that_and_it_does_not_count(simulator, plain):
    record = simulator.run(SWAPPED)
    assert record["success"] is False
    assert record["success_told"] is True
    assert record["outcome"] == AS_TOLD
    assert record["duration_s"] < 5, "and the episode ends there"
    assert record["seed"] == plain["seed"]


class Deaf(ScriptedBackend):
    """The expert, doing what is asked whatever it is told."""

    def infer(self, request):
        return super().infer(replace(request, instruction=PLAIN.goal_instruction))


def test_told_another_colour_but_deaf_to_it_the_asked_one_counts(simulator, plain, monkeypatch):
    monkeypatch.setattr(simulator.source, "_backend", Deaf())
    record = simulator.run(SWAPPED)
    assert record["success"] is True
    assert record["success_told"] is False
    assert record["outcome"] == "success"
    assert record["duration_s"] == plain["duration_s"]


def test_replanning_asks_more_often(simulator, plain):
    assert len(simulator.run(REPLAN)["times"]["answer_ms"]) > len(plain["times"]["answer_ms"])


class Answers(ScriptedBackend):
    """The expert, until its n-th answer."""

    def __init__(self, n, what):
        self.n, self.what = n, what

    def infer(self, request):
        self.n -= 1
        if self.n > 0:
            return super().infer(request)
        if isinstance(self.what, Exception):
            raise self.what
        return ActionChunk(
            np.full((request.n_rows, 10), self.what), request.action_space, request.embodiment
        )


@pytest.mark.parametrize("at", [1, 2])
def test_a_wild_answer_is_the_policys_failure(simulator, monkeypatch, at):
    monkeypatch.setattr(simulator.source, "_backend", Answers(at, 1e3))
    record = simulator.run(PLAIN)
    assert record["success"] is False
    assert record["outcome"] == "fault"
    assert "z| = 10" in record["fault"]


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    "error", [ServiceUnavailableError("nobody listens"), BackendError("out of memory")]
)
def test_a_server_that_is_gone_is_nobodys_failure(simulator, monkeypatch, at, error):
    monkeypatch.setattr(simulator.source, "_backend", Answers(at, error))
    with pytest.raises(type(error), match=str(error)):
        simulator.run(PLAIN)


def test_the_film_shows_the_same_episode(simulator, plain):
    record, film = simulator.film(PLAIN)
    assert without_times(record) == without_times(plain)
    assert film[4:8] == b"ftyp"


def request(**values):
    droid = get_embodiment("droid")
    space = droid.action_space(None)
    grey = np.full((8, 8, 3), 99, np.uint8)
    return Request(
        droid,
        space,
        "reach the red cube",
        4,
        np.zeros(7),
        1.0,
        composite=grey,
        images={"left": grey},
        **values,
    )


def test_blank_pictures_are_black_and_nothing_else_changes():
    seen = PerturbedBackend(ScriptedBackend(), Perturbation(), "reach the red cube").shown(
        request(seed=3)
    )
    blank = PerturbedBackend(
        ScriptedBackend(), Perturbation("b", images="blank"), "reach the red cube"
    ).shown(request(seed=3))
    assert seen.composite.min() == 99
    assert seen.images["left"].min() == 99
    assert blank.composite.shape == seen.composite.shape
    assert blank.composite.max() == blank.images["left"].max() == 0
    for name in ("instruction", "seed", "n_rows", "gripper"):
        assert getattr(blank, name) == getattr(seen, name)


def test_what_is_told_is_what_the_backend_reads():
    told = PerturbedBackend(ScriptedBackend(), Perturbation(), "reach the blue cube").shown(
        request()
    )
    assert told.instruction == "reach the blue cube"


class Takes(ScriptedBackend):
    """Answers after some seconds of a clock that stands still otherwise."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, iter(seconds)

    def infer(self, request):
        self.clock[0] += next(self.seconds)


def test_answers_are_timed_in_milliseconds(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(perturbed_backend, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    timed = PerturbedBackend(Takes(clock, (0.25, 0.5)), Perturbation(), "reach the red cube")
    timed.infer(request())
    timed.infer(request())
    assert timed.answer_ms == [250.0, 500.0]
