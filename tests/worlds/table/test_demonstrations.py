"""Demonstrations: what is seen, what is done and what is labelled agree, and follow from seed
and episode alone.
"""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch

from helpers.training_data import DEMOS, EPISODES, recorded_episodes
from strands_cosmos3.actions.decode import decode_pose_trajectory, encode_chunk
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.actions.stats import denormalize_chunk
from strands_cosmos3.commands.demos import Demos as DemosCommand
from strands_cosmos3.commands.demos import record_part
from strands_cosmos3.datasets import Dataset
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, MotionBoundsError, ResourceNotFoundError
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.panda import dh_forward
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.training.dynamics import chunk_errors, control_rows
from strands_cosmos3.worlds.table import demonstrations as demos_module
from strands_cosmos3.worlds.table.appearance import Appearance
from strands_cosmos3.worlds.table.demo_dataset import add_record
from strands_cosmos3.worlds.table.demonstrations import DemoCollector, DemoConfig, clip_of
from strands_cosmos3.worlds.table.grammar import PARAPHRASES, Verb, parse_instruction
from strands_cosmos3.worlds.table.phrases import (
    GOALS,
    TRAINED,
    VALIDATION,
    plain,
    sentence,
)
from strands_cosmos3.worlds.table.randomized_scene import WRIST_JITTER_M, RandomizedScene


@pytest.fixture(scope="module")
def records():
    return recorded_episodes()


@pytest.fixture
def unseen(monkeypatch):
    """Nothing is drawn: for tests that look at no picture."""

    def render(renderer, data, camera, paths=()):
        return np.zeros_like(renderer._frame)

    monkeypatch.setattr(Renderer, "render", render)


def test_an_episode_follows_from_seed_and_number(records):
    with DemoCollector(DEMOS) as collector:
        again = collector.record(3, EPISODES[1])  # without having recorded the other before it
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
    with DemoCollector(DemoConfig(robot=named, turns=turns, home=0.0)) as collector:
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


@pytest.mark.usefixtures("unseen")
def test_undisturbed_rows_are_the_experts_labels():
    """What was measured and ordered after a tick is what the expert said there, in the model's
    scale.

    Only where the arm has the speed that it would reach: labels begin with that one.
    """
    with DemoCollector(
        DemoConfig(ticks=40, perturbed=0.0, wandering=0.0, label_every=2)
    ) as collector:
        record = collector.record(3, 1)
    rows = [
        (index, clip_of(record, int(tick), 16))
        for index, tick in enumerate(record.label_ticks)
        if tick + 16 < len(record.goal)
        and (record.goal[tick : tick + 16] == record.goal[tick]).all()
    ]
    labels = np.stack([record.labels[i, record.goal[record.label_ticks[i]]] for i, _ in rows])
    done = control_rows([clip for _, clip in rows])["true"]
    cruising = np.abs(done[:, 0, :9] - labels[:, 0, :9]).max(1) < 0.1
    assert cruising.sum() >= 4
    labels, done = labels[cruising], done[cruising]
    errors = chunk_errors(torch.from_numpy(done), torch.from_numpy(labels))
    assert errors.moved_mm > 20
    assert errors.end_mm < 4
    assert errors.grasp > 0.9


@pytest.mark.usefixtures("unseen")
def test_continued_rows_begin_with_the_measured_speed(monkeypatch):
    """Without drift they are what the arm does, also from rest, where labels are ahead."""
    monkeypatch.setattr(demos_module, "_PREFIX_DRIFT", (0.0,))
    with DemoCollector(
        DemoConfig(ticks=20, perturbed=0.0, wandering=0.0, prefix_rows=8)
    ) as collector:
        record = collector.record(3, 1)
    goal, T = record.goal[0], record.T_base_cosmos
    done = encode_chunk(T[:17], record.gripper_command[:16], "droid")[None]
    errors = [
        chunk_errors(torch.from_numpy(done), torch.from_numpy(np.float64(rows[:1, goal])))
        for rows in (record.continued, record.labels)
    ]
    assert errors[0].end_mm < 4
    assert errors[1].end_mm > 12


@pytest.mark.usefixtures("unseen")
def test_labels_take_a_cube_askew_and_the_expert_that_acts_does_so_in_most_episodes():
    """A hand 5 cm above the cube, turned by 30 degrees against it: labels and most drivers come
    down at once.
    """
    with DemoCollector(DemoConfig(ticks=2, turning=0.3)) as collector:
        drivers = [collector.record(0, episode) and collector.expert.askew for episode in range(30)]
    assert 15 <= drivers.count(True) <= 26
    for turning in (0.0, 1.0):
        _require_labels_that_take_a_cube_askew(turning)


def _require_labels_that_take_a_cube_askew(turning):
    with DemoCollector(DemoConfig(ticks=2, turning=turning)) as collector:
        assert collector.record(0, 0) is not None
        (stage,) = collector._scenes.values()
        request, expert, goal = (
            collector.request(stage.robot.observation()),
            collector.expert,
            GOALS.index((Verb.PICK, "red")),
        )
        state = dict(request.privileged or {})
        tcp, yaw_rad = np.eye(4), state["grasp_yaw_rad"]
        tcp[:3, :3] = so3_exp(np.array([0.0, 0.0, yaw_rad + np.deg2rad(30)])) @ np.diag(
            [1.0, -1.0, -1.0]
        )
        tcp[:3, 3] = state["cube_red"][:3, 3] + [0.0, 0.0, 0.05]
        cube = np.array(state["cube_red"])
        cube[:3, :3] = so3_exp(np.array([0.0, 0.0, yaw_rad]))
        request = replace(
            request,
            gripper=1.0,
            privileged=state | {"tcp": tcp, "tcp_twist": np.zeros(6), "cube_red": cube},
        )
        expert.goal, expert.share, expert.wandering = goal, 0.0, False
        strict, askew = (
            expert.answer(request, goal, askew=askew).action for askew in (False, True)
        )
        assert not np.array_equal(strict, askew)
        np.testing.assert_array_equal(expert.infer(request).action, strict if turning else askew)
        np.testing.assert_array_equal(
            collector.continuation(request, goal, 0, np.random.default_rng(0)), askew
        )
        answer = expert.answer(request, goal, starts_cruising=True, askew=True).action
        np.testing.assert_array_equal(collector.answer(request, goal), answer)
        assert not np.array_equal(answer, expert.answer(request, goal, starts_cruising=True).action)


def test_a_prefix_drifts_and_the_rows_after_it_correct_it(records):
    """Of each length from 1 to 8, and of any goal."""
    record = records[0]
    assert record.prefix_rows.shape == record.labels.shape[:2]
    assert set(np.unique(record.prefix_rows)) == set(range(1, 9))
    assert record.continued.shape == record.labels.shape
    assert np.abs(record.continued - record.labels).max() > 0.5


@pytest.mark.usefixtures("unseen")
def test_without_prefixes_there_are_no_labels_after_them():
    with DemoCollector(DemoConfig(ticks=4, wandering=0.0)) as collector:
        record = collector.record(3, 0)
    np.testing.assert_array_equal(record.continued, record.labels)
    np.testing.assert_array_equal(record.looks_continued, record.looks_labels)
    assert not record.prefix_rows.any()


def test_looks_are_drawn_anew_and_do_not_change_the_next_frame(records):
    record = records[0]
    assert record.looks.shape == (len(record.label_ticks), *record.frames.shape[1:])
    same = record.frames[record.label_ticks].astype(float)
    differences = np.abs(record.looks - same).mean((1, 2, 3))
    assert (differences > 3).mean() > 0.7
    frames = record.frames.astype(float)
    assert np.abs(np.diff(frames, axis=0)).mean((1, 2, 3)).max() < np.median(differences)


@pytest.mark.usefixtures("unseen")
def test_labels_of_other_looks_are_for_the_cubes_that_they_show(monkeypatch):
    """Reaching for a cube ends closer to where it is in that picture; only the cube at the hand
    stays.
    """
    shown, original = [], RandomizedScene.other_layout

    def other_layout(stage, *args):
        moved = original(stage, *args)
        scene = stage.robot.scene
        shown.append(
            np.array(
                [scene.T_world_body(moved, f"cube_{colour}")[:2, 3] for _, colour in GOALS[:3]]
            )
        )
        return moved

    monkeypatch.setattr(RandomizedScene, "other_layout", other_layout)
    with DemoCollector(DemoConfig(ticks=12, wandering=0.0, close=0.0)) as collector:
        record = collector.record(3, 1)
    distances = []
    for tick, cubes, *rows in zip(
        record.label_ticks, shown, record.labels, record.looks_labels, strict=False
    ):
        for goal in range(3):
            ends = [_decoded(chunk[goal], record.T_base_cosmos[tick])[-1, :2, 3] for chunk in rows]
            distances.append([np.linalg.norm(end - cubes[goal]) for end in ends])
    own, other = np.array(distances).T
    assert len(own) >= 9
    assert (other < own).mean() > 0.8
    assert np.median(own - other) > 0.05


def _decoded(rows, T):
    metres = denormalize_chunk(rows.astype(float), "droid_lerobot")
    return decode_pose_trajectory(metres[:, :9], T)


def test_pictures_are_taken_from_where_the_cameras_are(monkeypatch):
    """A state that was computed before its cameras and lights were drawn anew shows them where
    they were.
    """
    offsets, original = [], Renderer.render

    def render(renderer, data, name, *rest):
        model = renderer._model
        camera, light = model.camera(name), model.light(0)
        body = data.xmat[camera.bodyid[0]].reshape(3, 3)
        place = data.xpos[camera.bodyid[0]] + body @ model.cam_pos[camera.id]
        np.testing.assert_allclose(data.cam_xpos[camera.id], place, atol=1e-9)
        shines = model.light_dir[light.id] / np.linalg.norm(model.light_dir[light.id])
        np.testing.assert_allclose(data.light_xdir[light.id], shines, atol=1e-9)
        if name == "wrist":
            offsets.append(np.array(model.cam_pos[camera.id]))
        return original(renderer, data, name, *rest)

    monkeypatch.setattr(Renderer, "render", render)
    with DemoCollector(
        DemoConfig(ticks=20, label_every=2, visual_randomization=0.2, wandering=0.0)
    ) as collector:
        collector.record(3, 1)
    # most are those of the episode
    moved_m = np.linalg.norm(np.array(offsets) - np.median(offsets, axis=0), axis=1)
    assert 0.01 < moved_m.max() <= 1.2 * WRIST_JITTER_M
    assert (moved_m > 1e-3).sum() >= 8


@pytest.mark.parametrize("height_m", [0.05, 0.3])
def test_other_layouts_leave_what_is_at_the_hand(height_m):
    stage = RandomizedScene.make(Appearance("parquet", "near"), 0.04, crowded=True)
    scene, data = stage.robot.scene, stage.robot.data
    hand = np.array([0.5, 0.0, height_m])
    stage.robot.reset(layout=scene.sample_layout(np.random.default_rng(100), 0.12))
    scene.lay(data, "cube_red", hand[:2] + [0.01, 0], 0.3)
    data.qpos[scene.bodies["cube_red"].qpos + 2] = height_m
    mujoco.mj_forward(scene.model, data)
    data.site_xpos[scene.only.tcp_site] = hand
    before, nearest = np.array(data.qpos), []
    for seed in range(30):
        moved = stage.other_layout(np.random.default_rng(seed), 0.06)
        red, arm = scene.bodies["cube_red"].qpos, scene.arm_qpos
        np.testing.assert_array_equal(
            moved.qpos[[*arm, *range(red, red + 7)]], before[[*arm, *range(red, red + 7)]]
        )
        others = {
            name: moved.xpos[scene.bodies[name].id] for name in scene.cubes if name != "cube_red"
        }
        for name, place in others.items():
            assert (place[:2] != data.xpos[scene.bodies[name].id][:2]).all()
            assert place[2] == pytest.approx(scene.cubes[name].edge_m / 2)
        xy = np.array([hand[:2] + [0.01, 0], *(place[:2] for place in others.values())])
        apart = np.linalg.norm(xy[:, None] - xy[None], axis=2)[np.triu_indices(len(xy), 1)]
        assert apart.min() >= 0.06
        nearest.append(np.linalg.norm(xy[1:] - hand[:2], axis=1).min())
    np.testing.assert_array_equal(data.qpos, before)
    assert (min(nearest) >= 0.09) == (height_m < 0.1)


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
            DemosCommand(tmp_path / "demos", episodes=episodes, perturbed=0.1).run()
    assert merged == [["000000-000001", "000002-000002"], ["000000-000001", "000002-000003"]]
    with Dataset(tmp_path / ".demos.parts-seed0/000002-000003") as dataset:
        assert len(dataset) == 2
    with pytest.raises(ConfigError, match=r"perturbed 0\.1 \(now 0\.5\)"):
        DemosCommand(tmp_path / "demos", episodes=4, perturbed=0.5).run()
    with pytest.raises(
        ConfigError, match=r"holds a run with ticks 60 \(now 5\); choose another folder"
    ):
        DemosCommand(tmp_path / "demos", episodes=4, perturbed=0.1, ticks=5).run()


def test_a_tier_is_refused_where_there_is_no_composite(tmp_path):
    with pytest.raises(
        ConfigError, match="--tier 256 is of composites, and 'ur5e' is recorded by one camera"
    ):
        DemosCommand(tmp_path / "demos", robot="ur5e", tier=256).run()
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
        DemosCommand(tmp_path / "demos", tasks=()).run()
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
