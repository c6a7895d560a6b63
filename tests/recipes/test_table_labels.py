"""Labels of the table policy's recipe: other looks and places, and rows after action prefixes."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch

from recipes.table_policy import record as record_module
from recipes.table_policy.record import LabelCollector, LabelConfig
from strands_cosmos3.actions.decode import decode_pose_trajectory, encode_chunk
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.actions.stats import denormalize_chunk
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.training.dynamics import chunk_errors, control_rows
from strands_cosmos3.worlds.table.demonstrations import clip_of
from strands_cosmos3.worlds.table.grammar import Verb
from strands_cosmos3.worlds.table.phrases import GOALS
from strands_cosmos3.worlds.table.randomized_scene import WRIST_JITTER_M, RandomizedScene


@pytest.fixture
def unseen(monkeypatch):
    """Nothing is drawn: for tests that look at no picture."""

    def render(renderer, data, camera, paths=()):
        return np.zeros_like(renderer._frame)

    monkeypatch.setattr(Renderer, "render", render)


@pytest.mark.usefixtures("unseen")
def test_undisturbed_rows_are_the_experts_labels():
    """What was measured and ordered after a tick is what the expert said there, in the model's
    scale.

    Only where the arm has the speed that it would reach: labels begin with that one.
    """
    with LabelCollector(
        LabelConfig(ticks=40, perturbed=0.0, wandering=0.0, label_every=2)
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
    monkeypatch.setattr(record_module, "_PREFIX_DRIFT", (0.0,))
    with LabelCollector(
        LabelConfig(ticks=20, perturbed=0.0, wandering=0.0, prefix_rows=8)
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
    with LabelCollector(LabelConfig(ticks=2, turning=0.3)) as collector:
        drivers = [collector.record(0, episode) and collector.expert.askew for episode in range(30)]
    assert 15 <= drivers.count(True) <= 26
    for turning in (0.0, 1.0):
        _require_labels_that_take_a_cube_askew(turning)


def _require_labels_that_take_a_cube_askew(turning):
    with LabelCollector(LabelConfig(ticks=2, turning=turning)) as collector:
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
        asked, plan = expert.asked(request, goal), expert.expert.plan
        strict, askew = (plan(asked, askew=askew).action for askew in (False, True))
        assert not np.array_equal(strict, askew)
        np.testing.assert_array_equal(expert.infer(request).action, strict if turning else askew)
        recorder = collector.recorder(collector, stage, np.random.default_rng(0))
        np.testing.assert_array_equal(recorder.continuation(request, goal, 0), askew)
        answer = plan(asked, starts_cruising=True, askew=True).action
        np.testing.assert_array_equal(recorder.answer(request, goal), answer)
        assert not np.array_equal(answer, plan(asked, starts_cruising=True).action)


def test_a_prefix_drifts_and_the_rows_after_it_correct_it(records):
    """Of each length from 1 to 8, and of any goal."""
    record = records[0]
    assert record.prefix_rows.shape == record.labels.shape[:2]
    assert set(np.unique(record.prefix_rows)) == set(range(1, 9))
    assert record.continued.shape == record.labels.shape
    assert np.abs(record.continued - record.labels).max() > 0.5


@pytest.mark.usefixtures("unseen")
def test_without_prefixes_there_are_no_labels_after_them():
    with LabelCollector(LabelConfig(ticks=4, wandering=0.0)) as collector:
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
    shown, original = [], record_module.other_layout

    def other_layout(stage, *args):
        moved = original(stage, *args)
        scene = stage.robot.scene
        shown.append(
            np.array(
                [scene.T_world_body(moved, f"cube_{colour}")[:2, 3] for _, colour in GOALS[:3]]
            )
        )
        return moved

    monkeypatch.setattr(record_module, "other_layout", other_layout)
    with LabelCollector(LabelConfig(ticks=12, wandering=0.0, close=0.0)) as collector:
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
    with LabelCollector(
        LabelConfig(ticks=20, label_every=2, visual_randomization=0.2, wandering=0.0)
    ) as collector:
        collector.record(3, 1)
    # most are those of the episode
    moved_m = np.linalg.norm(np.array(offsets) - np.median(offsets, axis=0), axis=1)
    assert 0.01 < moved_m.max() <= 1.2 * WRIST_JITTER_M
    assert (moved_m > 1e-3).sum() >= 8


@pytest.mark.parametrize("height_m", [0.05, 0.3])
def test_other_layouts_leave_what_is_at_the_hand(height_m):
    stage = RandomizedScene.make(0.04, crowded=True)
    scene, data = stage.robot.scene, stage.robot.data
    hand = np.array([0.5, 0.0, height_m])
    stage.robot.reset(layout=scene.sample_layout(np.random.default_rng(100), 0.12))
    scene.lay(data, "cube_red", hand[:2] + [0.01, 0], 0.3)
    data.qpos[scene.bodies["cube_red"].qpos + 2] = height_m
    mujoco.mj_forward(scene.model, data)
    data.site_xpos[scene.only.tcp_site] = hand
    before, nearest = np.array(data.qpos), []
    for seed in range(30):
        moved = record_module.other_layout(stage, np.random.default_rng(seed), 0.06)
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
