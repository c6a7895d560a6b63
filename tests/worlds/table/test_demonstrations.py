"""Demonstrations: what is seen, what is done and what is labelled agree, and follow from seed
and episode alone.
"""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from recipes.table_policy.record import LabelCollector, LabelConfig
from strands_cosmos3.commands.demos import Demos as DemosCommand
from strands_cosmos3.commands.demos import record_part
from strands_cosmos3.datasets import Dataset
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, MotionBoundsError, ResourceNotFoundError
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.panda import dh_forward
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.worlds.table.demo_config import DemoConfig
from strands_cosmos3.worlds.table.demo_dataset import add_record
from strands_cosmos3.worlds.table.demonstrations import DemoCollector
from strands_cosmos3.worlds.table.grammar import PARAPHRASES, parse_instruction
from strands_cosmos3.worlds.table.phrases import (
    GOALS,
    TRAINED,
    VALIDATION,
    plain,
    sentence,
)

DEMOS = LabelConfig(ticks=26, perturbed=0.15, wandering=0.0, label_every=13, prefix_rows=8)
SEED, EPISODES = 3, (14, 16)  # in the first, a cube is grasped


@pytest.fixture(scope="module")
def records():
    with LabelCollector(DEMOS) as collector:
        return [collector.record(SEED, episode) for episode in EPISODES]


@pytest.fixture
def unseen(monkeypatch):
    """Nothing is drawn: for tests that look at no picture."""

    def render(renderer, data, camera, paths=()):
        return np.zeros_like(renderer._frame)

    monkeypatch.setattr(Renderer, "render", render)


def test_an_episode_follows_from_seed_and_number(records):
    with LabelCollector(DEMOS) as collector:
        again = collector.record(SEED, EPISODES[1])  # without having recorded the other before it
    for name, value in vars(records[1]).items():
        np.testing.assert_array_equal(getattr(again, name), value, err_msg=name)
    assert not np.array_equal(records[0].frames[0], records[1].frames[0])


STARTS = [
    [0.3971, -0.2203, 0.0364, 1.431],
    [0.5134, 0.0839, 0.1018, 0.863],
    [0.5033, 0.0834, 0.0291, 0.077],
]
KEPT_YAW_STARTS = [
    [0.3971, -0.2203, 0.0364, -1.429],
    [0.5134, 0.0839, 0.1018, -1.553],
    [0.5033, 0.0834, 0.0291, -1.73],
]


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
@pytest.mark.parametrize(
    ("robot", "turns", "grasp_yaw_deg", "x_m", "starts"),
    [
        ("panda", True, 45.0, 0.35, STARTS),
        ("ur5e", True, -80.0, 0.35, STARTS),
        ("ur5e", True, 45.0, 0.41, [[STARTS[0][0] + 0.03, *STARTS[0][1:]], *STARTS[1:]]),
        ("ur5e", False, 45.0, 0.35, KEPT_YAW_STARTS),
    ],
)
def test_starts_are_those_of_the_recipe(robot, turns, grasp_yaw_deg, x_m, starts, tmp_path):
    """Place and yaw of the tool in the world; near a cube also beside it."""
    named, spec = robot, get_robot(robot)
    workspace = replace(spec.workspace, grasp_yaw_deg=grasp_yaw_deg, x_m=(x_m, 0.65))
    if workspace != spec.workspace:
        (tmp_path / "mine.toml").write_text(
            write_robot(replace(spec, name="mine", workspace=workspace))
        )
        named = str(tmp_path / "mine.toml")
    layout, drawn = Layout(("cube_red",), np.array([[0.5, 0.1]]), np.zeros(1)), []
    with DemoCollector(
        DemoConfig(robot=named, hand_yaw="cube" if turns else "home", home=0.0)
    ) as collector:
        for seed in (0, 1, 5):  # over the table, and twice near the cube
            q = collector._configuration(collector._start(np.random.default_rng(seed), layout))
            T = collector._bridge.ee_pose(q) @ spec.limb().T_frame_tool
            drawn.append([*T[:3, 3], np.arctan2(T[1, 0], T[0, 0])])
    turned = [0.0, 0.0, 0.0, np.deg2rad(grasp_yaw_deg - 45.0)]
    np.testing.assert_allclose(drawn, np.add(starts, turned), atol=0.004)


def test_poses_are_of_the_cosmos_frame(records):
    record = records[0]
    expected = dh_forward(record.q_rad) @ get_embodiment("droid").tool_frame.T_parent_cosmos
    np.testing.assert_allclose(record.T_base_cosmos, expected, atol=1e-6)


def test_fingers_move_after_they_are_told(records):
    """The order beside a tick is for the row that follows it, not for the one that led there."""
    commands = [
        record.gripper_command[:-1][np.diff(record.gripper_opening) < -0.05] for record in records
    ]
    assert len(np.concatenate(commands)) >= 2
    assert (np.concatenate(commands) < 0.5).all()


def test_goals_differ_in_their_labels(records):
    """From one picture, three colours: the language must matter. (Reach and pick part only
    beside the cube.)
    """
    labels = records[0].labels
    apart = np.abs(labels[:, :, None] - labels[:, None]).max((0, 3, 4))
    colours = np.array([colour for _, colour in GOALS])
    assert (apart[colours[:, None] != colours] > 0.1).all()


def test_every_sentence_is_understood_and_none_is_both_trained_and_held_out():
    rng = np.random.default_rng(0)
    for templates in (TRAINED, VALIDATION):
        for i, (verb, colour) in enumerate(GOALS):
            for template in templates[verb]:
                goal = parse_instruction(template.format(colour))
                assert (goal.verb, goal.cube) == (verb, f"cube_{colour}"), template
            assert colour in sentence(i, rng, templates)
    for verb in TRAINED:
        assert not set(TRAINED[verb]) & set(VALIDATION[verb])
        assert len(TRAINED[verb]) > 300
    assert plain(3) == "pick up the red cube"


def test_no_demonstration_is_told_what_the_evaluation_holds_out():
    for verb in TRAINED:
        untrained = {template.format(a="{}", b="{}") for template in PARAPHRASES[verb]}
        assert not [way for way in TRAINED[verb] if any(text in way for text in untrained)]


def test_every_word_of_a_held_out_wording_is_trained_in_other_sentences():
    """A word that no sentence trains says nothing but its random weights: "fetch me ..." failed
    by one of them.
    """

    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z]+", re.sub(r"\{.\}|\{\}", "", text)))

    for verb in TRAINED:
        trained = set().union(*map(words, TRAINED[verb]))
        for wording in (*PARAPHRASES[verb], *VALIDATION[verb]):
            assert words(wording) <= trained, wording


@pytest.fixture
def takes(records, monkeypatch):
    """A collector that repeats two episodes, and whether it takes a start."""
    taken = {"start": True}

    class FakeCollector:
        config = DEMOS

        def __init__(self, config):
            pass

        def record(self, seed, episode):
            return records[episode % len(records)] if taken["start"] else None

    monkeypatch.setattr("strands_cosmos3.commands.demos._collector", FakeCollector)
    return taken


@pytest.fixture
def in_this_process(monkeypatch):
    """The command's workers run here, where the collector is the test's own."""

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers, mp_context):
            super().__init__(1)

    monkeypatch.setattr("strands_cosmos3.commands.demos.ProcessPoolExecutor", Pool)


@pytest.mark.usefixtures("in_this_process")
def test_a_collection_goes_on_with_its_own_options_and_has_every_episode(
    takes, tmp_path, monkeypatch
):
    monkeypatch.setattr("strands_cosmos3.commands.demos._BATCH", 2)
    merged = []

    def killed(parts, out):
        merged.append([part.name for part in parts])
        raise KeyboardInterrupt

    monkeypatch.setattr("strands_cosmos3.datasets.merge_datasets", killed)
    for episodes in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            DemosCommand(
                tmp_path / "demos", episodes=episodes, table=DemoConfig(perturbed=0.1)
            ).run()
    assert merged == [["000000-000001", "000002-000002"], ["000000-000001", "000002-000003"]]
    with Dataset(tmp_path / ".demos.parts-seed0/000002-000003") as dataset:
        assert len(dataset) == 2
    with pytest.raises(ConfigError, match=r"perturbed 0\.1 \(now 0\.5\)"):
        DemosCommand(tmp_path / "demos", episodes=4, table=DemoConfig(perturbed=0.5)).run()
    with pytest.raises(
        ConfigError, match=r"holds a run with ticks 60 \(now 5\); choose another folder"
    ):
        DemosCommand(tmp_path / "demos", episodes=4, table=DemoConfig(perturbed=0.1, ticks=5)).run()


def test_a_tier_is_refused_where_there_is_no_composite(tmp_path):
    with pytest.raises(
        ConfigError, match="--tier 256 is of composites, and 'ur5e' is recorded by one camera"
    ):
        DemosCommand(tmp_path / "demos", table=DemoConfig(robot="ur5e", tier=256)).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unseen")
def test_only_a_start_that_cannot_be_reached_leaves_an_episode_out(tmp_path, monkeypatch):
    """A resource that is missing is no such start."""
    errors = iter([MotionBoundsError("too far"), ResourceNotFoundError("no statistics")])

    def failing(*_: object) -> None:
        raise next(errors)

    with DemoCollector(DemoConfig(robot="ur5e", ticks=2)) as collector:
        monkeypatch.setattr(collector, "_play", failing)
        assert collector.record(0, 0) is None
        with pytest.raises(ResourceNotFoundError, match="no statistics"):
            collector.record(0, 1)


def test_demonstrations_of_no_task_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="--tasks needs at least one of reach, pick and place"):
        DemosCommand(tmp_path / "demos", table=DemoConfig(tasks=())).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_this_process")
def test_sigterm_ends_the_workers_as_ctrl_c_does(tmp_path, monkeypatch):
    """Without its command, a worker waits for ever."""
    monkeypatch.setattr("strands_cosmos3.commands.demos._BATCH", 1)
    started = []

    def terminated(options, root, first):
        started.append(first)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("strands_cosmos3.commands.demos.record_part", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        DemosCommand(tmp_path / "demos", episodes=50).run()
    assert len(started) < 50
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_part_in_which_no_start_is_taken_says_so(takes, tmp_path):
    takes["start"] = False
    with pytest.raises(
        ConfigError, match=r"episodes 0 to 1 of seed 0 have no reachable start.*--seed"
    ):
        record_part(DemosCommand(tmp_path / "demos", episodes=2), tmp_path / "part", 0)


@pytest.mark.usefixtures("takes")
def test_a_part_that_was_interrupted_is_recorded_again(tmp_path, monkeypatch):
    def killed(writer, record, seed, episode):
        if episode == 1:
            raise KeyboardInterrupt
        add_record(writer, record, seed, episode)

    monkeypatch.setattr("strands_cosmos3.worlds.table.demo_dataset.add_record", killed)
    options = DemosCommand(tmp_path / "demos", episodes=2)
    with pytest.raises(KeyboardInterrupt):
        record_part(options, tmp_path / "000000", 0)
    assert not (tmp_path / "000000").exists()
    monkeypatch.setattr("strands_cosmos3.worlds.table.demo_dataset.add_record", add_record)
    for _ in range(2):  # the second time it is there
        record_part(options, tmp_path / "000000", 0)
    with Dataset(tmp_path / "000000") as dataset:
        assert len(dataset) == 2


@pytest.mark.slow
def test_wide_starts_are_taken(tmp_path):
    with DemoCollector(DemoConfig(ticks=6, home=0.0)) as collector:
        taken = [collector.record(11, episode) for episode in range(40)]
    assert sum(record is not None for record in taken) >= 36
