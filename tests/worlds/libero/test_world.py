"""LIBERO as a world, on a stand-in for the benchmark and its simulation: a hand that moves along x,
and two objects that lie in the basket beyond 0.4 and below -0.4.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.actions.controller_rows import normalize_actions
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.errors import (
    ConfigError,
    InputError,
    InstructionError,
    ServiceError,
    UnknownNameError,
)
from strands_cosmos3.evaluation.plan import episode_seed
from strands_cosmos3.observe.prompts import libero_caption
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.types import ActionChunk, Outcome
from strands_cosmos3.worlds import RunOptions, Start, Variation, get_world
from strands_cosmos3.worlds.libero import simulation, suites, world

BDDL = """(define (problem tabletop)
  (:language Put the {word} into the basket)
  (:fixtures main_table - table)
  (:objects
    milk_1 - milk
    butter_1 - butter
    basket_1 - basket)
  (:goal (And (In {thing}_1 basket_1_contain_region))))
"""
MILK, BUTTER = ("put the milk in the basket", "put the butter in the basket")


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """Two tasks of each suite, as LIBERO's benchmark module has them."""
    for word in ("milk", "butter", "far"):
        text = BDDL.format(word=word, thing=word)
        (tmp_path / f"{word}.bddl").write_text(text)
    far = tmp_path / "far.bddl"
    far.write_text(far.read_text().replace("milk_1 - milk", "far_1 - far\n    milk_1 - milk"))

    class Suite:
        n_tasks = 3

        def get_task(self, number):
            word = ("milk", "butter", "far")[number]
            language = f"put the {word} in the basket"
            return SimpleNamespace(language=language, problem_folder="", bddl_file=f"{word}.bddl")

        def get_task_init_states(self, number):
            return np.zeros((50, 3))

    found = SimpleNamespace(get_benchmark_dict=lambda: dict.fromkeys(suites.SUITES, Suite))
    monkeypatch.setattr(suites, "_libero", lambda: (found, lambda name: tmp_path))
    suites.load_tasks.cache_clear()
    yield
    suites.load_tasks.cache_clear()


class Simulated:
    """Stands in for LiberoSimulation."""

    made: ClassVar[list[Simulated]] = []

    def __init__(self, task, config, pictures):
        self.task, self.config, self.can_draw = task, config, pictures
        self.horizon, self.closed, self.looks = config.steps(20), False, 0
        Simulated.made.append(self)

    def reset(self, init_state, seed):
        self.steps, self.x, self.start, self.seed = 0, 0.0, init_state, seed
        self.looked = True

    def step(self, action, look=False):
        self.steps, self.x, self.looked = self.steps + 1, self.x + 0.1 * action[0], look
        self.looks += look
        return self.fulfilled(self.task.goal)

    def fulfilled(self, goal):
        return self.x > 0.4 if "milk_1" in goal[0] else self.x < -0.4

    def views(self):
        assert self.looked, "the last step took no pictures"
        return self.rendered()

    def rendered(self):
        assert self.can_draw
        shade = np.full((16, 16, 3), 100 + self.steps, np.uint8)
        return {"agentview": shade, "wrist": shade // 2}

    @property
    def observed(self):
        joints = {"robot0_joint_pos": np.zeros(7), "robot0_joint_vel": np.zeros(7)}
        return {**joints, "robot0_gripper_qpos": np.array([0.02, -0.02])}

    @property
    def state(self):
        return np.arange(8.0)

    @property
    def time_is_up(self):
        return self.steps >= self.horizon

    def close(self):
        self.closed = True


@pytest.fixture
def libero(benchmark, monkeypatch):
    monkeypatch.setattr(world, "LiberoSimulation", Simulated)
    monkeypatch.setattr(world, "privileged", lambda simulated: {simulation.TCP: np.eye(4)})
    monkeypatch.setattr(Simulated, "made", [])
    return get_world("libero/libero_object")


class Moves(Backend):
    """Three rows along x: right if the instruction names the milk."""

    def __init__(self, look=True, fail_after=None):
        self.info = BackendInfo(name="moves", requires_images=look, model_sha256="abc")
        self.requests, self._fail_after = [], fail_after

    def infer(self, request):
        if len(self.requests) == self._fail_after:
            raise ServiceError("the server is gone")
        self.requests.append(request)
        actions = np.zeros((3, 7))
        actions[:, 0] = 1 if "milk" in request.instruction else -1
        rows = normalize_actions(actions)
        return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)


def policy_of(backend):
    return Cosmos3Policy(embodiment="libero", backend=backend)


def test_a_suites_tasks_are_numbers_with_fifty_starts(libero):
    tasks = libero.tasks()
    assert list(tasks) == ["0", "1", "2"]
    assert (tasks["1"].instruction, tasks["1"].starts, tasks["1"].horizon_s) == (BUTTER, 50, 14.0)
    assert (libero.name, libero.embodiment(), libero.robots) == (
        "libero/libero_object",
        "libero",
        ("panda",),
    )
    with pytest.raises(UnknownNameError, match="panda"):
        libero.tasks("ur5e")
    with pytest.raises(UnknownNameError, match="0, 1, 2"):
        libero.task("reach")


def test_a_variants_instruction_is_the_problems(benchmark):
    assert get_world("libero/libero_object_task").task("0").instruction == (
        "Put the milk into the basket"
    )


def test_a_protocol_is_named_after_the_suite(benchmark):
    nvidia = get_world("libero/libero_object/nvidia")
    assert nvidia.name == "libero/libero_object/nvidia"
    assert nvidia.tasks()["0"].horizon_s == 13.5, "waiting steps count"
    assert nvidia.identity()["protocol"]["wait_counts"] is True
    assert get_world("libero/libero_object/openpi").name == "libero/libero_object"
    for name in ("libero/libero_9", "libero/libero_object/mine"):
        with pytest.raises(UnknownNameError, match=r"libero_10|nvidia"):
            get_world(name)


def test_other_goals_are_those_that_can_be_judged_in_the_scene(libero):
    def drawn(form):
        rngs = (np.random.default_rng(seed) for seed in range(20))
        return {libero.reworded("0", MILK, form, rng) for rng in rngs}

    assert drawn("swapped") == {BUTTER}
    assert drawn("shuffled") == {MILK, BUTTER}
    with pytest.raises(ConfigError, match="libero_object_lan"):
        drawn("paraphrased")
    assert libero.same_goal("0", MILK, MILK)
    assert not libero.same_goal("0", MILK, BUTTER)
    assert libero.instruction("0", 7) == MILK
    assert libero.instruction("0", 0, BUTTER) == BUTTER
    with pytest.raises(InstructionError, match="put the butter in the basket"):
        libero.instruction("0", 0, "put the far in the basket")


def test_the_expert_is_for_libero_object(benchmark):
    assert get_world("libero/libero_object_swap").expert() is not None
    assert get_world("libero/libero_goal").expert() is None


def test_success_ends_an_episode_and_pictures_are_taken_once_a_chunk(libero):
    backend = Moves()
    with libero.open() as session:
        session.reset(Start("0", seed=4, index=7))
        rollout = session.run(policy_of(backend), RunOptions(noise_seed=9))
        (simulated,) = Simulated.made
        assert (simulated.start, simulated.seed) == (7, 4)
        assert simulated.looks == 1, "of five steps the third"
    assert simulated.closed
    assert (rollout.outcome, rollout.success, rollout.followed) == (Outcome.SUCCESS, True, None)
    assert (rollout.seed, rollout.task, rollout.instruction) == (4, "0", MILK)
    assert (rollout.counters, rollout.duration_s) == ({"steps": 5, "chunks": 2}, 0.25)
    assert (rollout.model_sha256, rollout.fault) == ("abc", None)
    assert [request.seed for request in backend.requests] == [9, 10]
    assert json.loads(json.dumps(rollout.to_dict()))["success"] is True


def test_following_another_goal_ends_an_episode_and_is_no_success(libero):
    with libero.open() as session:
        session.reset(Start("0"))
        rollout = session.run(policy_of(Moves()), RunOptions(instruction=BUTTER))
        assert (rollout.outcome, rollout.followed) == (Outcome.FOLLOWED, True)
        assert (rollout.success, rollout.instruction) == (False, BUTTER)
        session.reset(Start("0", instruction=BUTTER))
        assert session.run(policy_of(Moves())).success, "judged by another goal"
        session.reset(Start("0"))
        rollout = session.run(policy_of(Moves()), RunOptions(instruction="qwe rty"))
        assert (rollout.outcome, rollout.followed) == (Outcome.TIMEOUT, None)
        assert rollout.counters["steps"] == 20
        assert len(Simulated.made) == 1, "one simulation serves all episodes of a task"
        session.reset(Start("1"))
        session.run(policy_of(Moves(look=False)), RunOptions(duration_s=0.1))
    assert [(each.closed, each.steps, each.can_draw) for each in Simulated.made] == [
        (True, 20, True),
        (True, 2, False),
    ]


def test_an_error_after_the_first_chunk_is_a_fault(libero):
    with libero.open() as session:
        session.reset(Start("0"))
        rollout = session.run(policy_of(Moves(fail_after=1)))
        assert (rollout.outcome, rollout.counters["chunks"]) == (Outcome.FAULT, 1)
        assert rollout.fault == "ServiceError: the server is gone"
        session.reset(Start("0"))
        with pytest.raises(ServiceError):
            session.run(policy_of(Moves(fail_after=0)))


def test_a_protocols_caption_reaches_the_model(benchmark, monkeypatch):
    monkeypatch.setattr(world, "LiberoSimulation", Simulated)
    for name, expected in (("nvidia", libero_caption(MILK, "nvidia_server")), ("openpi", "")):
        backend = Moves()
        with get_world(f"libero/libero_object/{name}").open() as session:
            session.reset(Start("0"))
            session.run(policy_of(backend))
        assert backend.requests[0].prompt == expected


def test_a_film_shows_every_second_step(libero, tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "film.mp4"
    with libero.open() as session:
        session.reset(Start("0"))
        rollout = session.run(policy_of(Moves(look=False)), RunOptions(video=path))
    assert rollout.video == path
    with av.open(path) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 3
    assert (frames[0].height, frames[0].width) == (16, 32)


def test_a_caller_executes_chunks_and_looks(libero):
    policy = policy_of(Moves(look=False))
    with libero.open() as session:
        session.reset(Start("0"))
        observation = session.observation()
        assert observation.images["image"].shape == (16, 32, 3)
        assert list(observation.privileged) == [simulation.TCP]
        executed = session.execute(policy.plan(observation, MILK), rows=2)
        assert (executed.success, executed.duration_s) == (False, 0.1)
        assert session.draw()["wrist"][0, 0, 0] == 51
        executed = session.execute(policy.plan(session.observation(False), MILK))
        assert (executed.success, executed.ended) == (True, True)
        with pytest.raises(ConfigError, match="libero"):
            session.execute(Cosmos3Policy("droid", backend=Droid()).plan(observation, MILK))


class Droid(Backend):
    info = BackendInfo(requires_images=False)

    def infer(self, request):
        return ActionChunk(np.zeros((16, 10)), request.action_space, request.embodiment)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (RunOptions(latency=0.1), "time stands still"),
        (RunOptions(realtime=True), "time stands still"),
        (RunOptions(on_stall="retreat"), "knows no retreat"),
        (RunOptions(control_frequency_hz=50.0), "20 Hz"),
        (RunOptions(recorder=object()), "cannot be recorded"),
    ],
)
def test_what_libero_cannot_do_is_refused(libero, options, text):
    with libero.open() as session:
        session.reset(Start("0"))
        with pytest.raises(ConfigError, match=text):
            session.run(policy_of(Moves()), options)
        assert not Simulated.made


def test_starts_that_do_not_exist_are_refused(libero):
    with libero.open() as session:
        with pytest.raises(ConfigError, match="reset"):
            session.run(policy_of(Moves()))
        for start in (
            Start(None),
            Start("0", index=50),
            replace(Start("0"), variation=Other(light=2)),
        ):
            with pytest.raises(ConfigError):
                session.reset(start)
    with pytest.raises(ConfigError, match="controller of its own"):
        libero.open(arm=object())


def settings(**options):
    pytest.importorskip("ray")
    from strands_cosmos3.evaluation.settings import make_settings

    return make_settings({"world": "libero/libero_object", **options})


def test_an_evaluation_takes_the_suites_defaults(benchmark):
    made = settings()
    assert (made.tasks, made.seeds) == (("0", "1", "2"), 50)
    assert settings(backend="service").policy.service.dialect == "libero"
    first, *_, last = settings(tasks="0,1", conditions="plain,swapped").plan()
    identity = settings(world="libero/libero_object/nvidia").identity(first)
    assert (identity["world"], identity["control_frequency"]) == (
        "libero/libero_object/nvidia",
        20.0,
    )
    assert identity["protocol"]["wait_counts"] is True
    assert identity["duration"] == 13.5
    assert (last.index, last.goal_instruction, last.policy_instruction) == (49, BUTTER, MILK)
    assert last.goals_differ
    assert first.seed == episode_seed(0, "libero_object/0", 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world": "libero/libero_9"}, "libero_10"),
        ({"tasks": "reach"}, "0, 1"),
        ({"seeds": 51}, "50 initial states"),
        ({"robot": "ur5e"}, "panda"),
        ({"control_frequency": 50.0}, "20 Hz"),
        ({"conditions": "latency=0.2"}, "time stands still"),
        ({"conditions": "paraphrased"}, "no paraphrased"),
        ({"conditions": "plain,cubes=30"}, "cubes=30"),
        ({"conditions": "blank"}, "uses no images"),
        ({"tasks": "0", "instruction": "put the far in the basket"}, "cannot be judged"),
        ({"world": "libero/libero_goal", "backend": "scripted"}, "no scripted expert"),
        ({"backend": "service", "dialect": "openpi"}, "DROID"),
        ({"backend": "python"}, "module:name"),
        ({"world": "libero/libero_object/mine"}, "nvidia"),
    ],
)
def test_what_a_suite_does_not_have_is_refused(benchmark, options, text):
    with pytest.raises((ConfigError, InputError), match=text):
        settings(**options)


def test_episodes_of_libero_become_records(libero):
    """By this package's expert's stand-in: what is asked for is done, and judged by the goal."""
    pytest.importorskip("ray")
    from strands_cosmos3.evaluation.folder import without_times
    from strands_cosmos3.evaluation.runner import AssignmentRunner

    chosen = settings(
        tasks="0", seeds=1, conditions="plain,swapped", backend="python", policy=FOLLOWS
    )
    runner = AssignmentRunner(chosen)
    records = [without_times(runner.run(assignment)) for assignment in chosen.plan()]
    runner.close()
    common = {
        "goal_instruction": MILK,
        "seed": chosen.plan()[0].seed,
        "task": "0",
        "duration_s": 0.25,
        "counters": {"steps": 5, "chunks": 3},
    }
    plain = {"policy_instruction": MILK, "success": True, "outcome": "success"}
    swapped = {"policy_instruction": BUTTER, "success": False, "outcome": "followed"}
    assert (common | plain).items() <= records[0].items()
    assert (common | swapped | {"followed": True}).items() <= records[1].items()


FOLLOWS = f"{__name__}:Follows"


class Follows:
    """A policy of another project: two steps along x, right if the instruction names the milk."""

    def get_actions_sync(self, observation, instruction):
        step = dict.fromkeys(world.ACTION_KEYS, 0.0)
        return [step | {"dx": 1.0 if "milk" in instruction else -1.0}] * 2


class Other(Variation):
    def __init__(self, light):
        object.__setattr__(self, "light", light)
