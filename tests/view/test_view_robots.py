"""The page with other robots than a Panda: every limb, joint and gripper by name, live and
played back.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import mujoco
import numpy as np
import pytest

from strands_cosmos3.cli import main
from strands_cosmos3.commands.view import ViewCommand
from strands_cosmos3.datasets import DatasetWriter
from strands_cosmos3.errors import ConfigError, InstructionError
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
from strands_cosmos3.sim.scene import SceneLimb
from strands_cosmos3.types import Rollout
from strands_cosmos3.view.live import LiveView
from strands_cosmos3.view.page import LivePage, limb_gauges, limbs_html
from strands_cosmos3.view.playback import Recorded, play, recorded_episodes, robot_of
from strands_cosmos3.worlds import get_world
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.grammar import TEMPLATES, Verb

LIFT_THE_BAR = TEMPLATES[Verb.LIFT]
HAND_OVER_THE_BAR = TEMPLATES[Verb.HAND_OVER]

pytestmark = pytest.mark.filterwarnings(
    "ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning"
)


@pytest.fixture(scope="module")
def dual() -> Robot:
    return Robot("dual_panda")


@dataclass
class Watched:
    """A rollout that a page has shown and that was recorded, and the robot as it was at its end.

    ``root``: A folder with ``a.npz`` and the dataset ``set``. ``q_rad``: Joint angles.
    ``tips_m``: The tools' positions in the world.
    """

    robot: Robot
    rollout: Rollout
    page: LivePage
    root: Path
    q_rad: np.ndarray
    tips_m: np.ndarray


@pytest.fixture(
    scope="module",
    params=[("ur5e", "robomind-ur"), ("dual_panda", "robomind-franka-dual")],
    ids=lambda case: case[0],
)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    name, rows = request.param
    root, robot = tmp_path_factory.mktemp(name), Robot(name)
    prediction = np.full((3, 180, 320, 3), 9, np.uint8)
    run = {"policy_config": {"backend": "scripted"}, "duration": 0.6}
    run["instruction"] = "reach the red cube" if name == "ur5e" else LIFT_THE_BAR
    with LivePage(robot.scene.model, port=0, robot=name) as page:
        with (
            pytest.MonkeyPatch.context() as patch,
            LiveView(robot, page, "scripted", True) as live,
            DatasetWriter(root / "set", rollout_spec(rows, robot.scene.robot)) as writer,
        ):
            patch.setattr(time, "sleep", lambda seconds: None)
            live.show_prediction(prediction, 0.0)
            recorder = RolloutRecorder(writer, rows)
            rollout = robot.run_policy(
                **run, on_tick=live.on_tick, audience=live, recorder=recorder
            )
            live.show_prediction(prediction, 0.0)
            live.end(rollout)
        rollout.save_npz(str(root / "a.npz"))
        limbs = robot.scene.limbs.values()
        tips_m = np.array([robot.data.site_xpos[limb.tcp_site] for limb in limbs])
        yield Watched(robot, rollout, page, root, robot.joint_state()[0].copy(), tips_m)


def test_a_rollout_shows_every_limb_by_name(watched: Watched):
    robot, page = watched.robot, watched.page
    shown, ends = page._limbs.content, page._lines["achieved"].points[:, 1]
    for limb in robot.scene.robot.limbs:
        assert f">{limb.name}</div>" in shown
    for joint, q in zip(robot.scene.robot.joints, watched.q_rad, strict=True):
        degrees = re.search(rf'title="{joint}">.*?>(-?[\d.]+)°<', shown)
        assert degrees is not None
        assert float(degrees[1]) == pytest.approx(np.rad2deg(q), abs=0.06)
    assert len(re.findall(r'title="gripper"', shown)) == len(robot.scene.limbs)
    for tip in watched.tips_m:  # a trail of each limb leads to its tool
        assert np.linalg.norm(ends - tip, axis=1).min() < 1e-6
        commanded = page._lines["commanded"].points.reshape(-1, 3)
        assert np.linalg.norm(commanded - tip, axis=1).min() < 0.03
    pair = page._prediction.image  # what is observed now, beside the prediction
    assert pair.shape == (180, 644, 3)
    assert np.ptp(pair[:, :320]) > 100
    height = page._camera_image.image.shape[0]
    assert height == (180 if robot.name == "ur5e" else 270)  # one view, three views


def test_figures_lie_in_their_ranges(dual: Robot):
    """Against the model's ranges: the second limb's joints and gripper are its own."""
    dual.reset(0)
    model, q = dual.scene.model, dual.joint_state()[0].copy()
    q[10] = model.jnt_range[model.joint("right_joint4").id, 0]
    gauges = limb_gauges(dual.scene, q, np.array([0.25, 1.0]))
    assert list(gauges) == ["left", "right"]
    left, right = gauges["left"], gauges["right"]
    assert [gauge.name for gauge in right] == [
        *(f"right_joint{i}" for i in range(1, 8)),
        "gripper",
    ]
    assert right[3].filled == 0.0
    assert (left[-1].value, right[-1].value) == ("25 % open", "100 % open")
    assert "left:calc(25.0% - 3px)" in limbs_html({"left": left})


def tcp_commanded_m(rollout: Rollout, limb: SceneLimb) -> np.ndarray:
    """Positions of a limb's tool in the world [T, 3]."""
    T_base_hand = rollout.arrays[f"T_base_hand_commanded_{limb.prefix}".rstrip("_")]
    return (limb.T_world_base @ T_base_hand @ limb.limb.T_frame_tool)[:, :3, 3]


def test_its_recordings_are_played(watched: Watched, monkeypatch: pytest.MonkeyPatch):
    """Against the poses that the rollout itself recorded, in the world."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    scene, npz = watched.robot.scene, watched.root / "a.npz"
    with LivePage(scene.model, port=0) as page:
        (recorded,) = recorded_episodes(npz, scene)
        play(page, scene, recorded)
        for limb_name, limb in scene.limbs.items():
            tcp_m = tcp_commanded_m(watched.rollout, limb)
            off = np.linalg.norm(recorded.tcp_commanded_m[limb_name][:, None] - tcp_m, axis=2).min(
                axis=1
            )
            assert off.max() < 1e-9
        data = mujoco.MjData(scene.model)
        data.qpos[scene.arm_qpos] = recorded.q_rad[-1]
        mujoco.mj_kinematics(scene.model, data)
        ends = page._lines["achieved"].points[:, 1]
        for limb in scene.limbs.values():
            assert np.linalg.norm(ends - data.site_xpos[limb.tcp_site], axis=1).min() < 1e-6
        hidden = [body.id for body in scene.bodies.values()]
        assert not any(page._bodies[body].visible for body in hidden)
        assert "gripper" in page._limbs.content
    short = ["--page-port", "0", "--leave"]
    assert main(["view", "--play", str(npz), "--robot", scene.robot.name, *short]) == 0
    assert main(["view", "--play", str(npz), *short]) == 2  # of a Panda's


def test_each_gripper_is_played_on_its_own_limb(dual: Robot, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    scene = dual.scene
    home = np.repeat(scene.robot.home_rad[None], 2, axis=0)
    recorded = Recorded(home, np.array([[0.0, 1.0]] * 2), {}, 15.0, "left closed, right open")
    with LivePage(scene.model, port=0) as page:
        play(page, scene, recorded)
        for (name, limb), gap_m in zip(scene.limbs.items(), (0.0, 0.08), strict=True):
            first, second = (page._bodies[body].position for body in limb.finger_bodies)
            assert np.linalg.norm(np.subtract(first, second)) == pytest.approx(gap_m, abs=1e-9), (
                name
            )


def test_a_dataset_names_its_robot(watched: Watched, monkeypatch: pytest.MonkeyPatch):
    """Against the poses of the rollout that was recorded."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    scene, rollout, root = watched.robot.scene, watched.rollout, watched.root
    panda = Robot()
    assert robot_of(root / "set", panda.scene.robot).name == scene.robot.name
    assert robot_of(root / "a.npz", panda.scene.robot).name == "panda"
    (recorded,) = recorded_episodes(root / "set", scene)
    for limb in scene.limbs.values():
        tcp_m = tcp_commanded_m(rollout, limb)
        assert (
            np.linalg.norm(recorded.tcp_commanded_m[limb.limb.name][3] - tcp_m, axis=1).min() < 1e-4
        )
        angles = np.abs(
            recorded.q_rad[3, limb.columns] - rollout.arrays["q_achieved_rad"][:, limb.columns]
        ).max(axis=1)
        assert angles.min() < 1e-4
    assert main(["view", "--play", str(root / "set"), "--page-port", "0", "--leave"]) == 0
    with pytest.raises(
        ConfigError,
        match=r"moves .* joints\).*the robot has .*\(7 joints\); name the robot .*--robot",
    ):
        list(recorded_episodes(root / "set", panda.scene))


def test_a_dataset_s_robot_is_no_file_of_this_machine(tmp_path: Path):
    panda, mine = Robot().scene.robot, tmp_path / "mine.toml"
    mine.write_text("not a robot")
    for i, kind in enumerate((str(mine), "unheard of", None, "franka")):
        with DatasetWriter(
            tmp_path / f"set{i}", replace(rollout_spec(), robot_type=kind)
        ) as writer:
            pass
        assert robot_of(writer.root, panda) == panda


def test_what_can_be_asked_of_a_bar(dual):
    world, scene = get_world("table"), dual.scene
    assert world.suggestions("dual_panda") == [LIFT_THE_BAR, HAND_OVER_THE_BAR]
    assert world.task_of("give the bar to the left hand", "dual_panda") == "hand_over"
    world.judge("lift_bar", scene, "raise the bar")
    with pytest.raises(ConfigError, match=r"a bar to lift, do not go together"):
        world.judge("hand_over", scene, HAND_OVER_THE_BAR)
    with pytest.raises(InstructionError, match=r"has a bar to lift; try 'lift the bar"):
        world.task_of("pick up the red cube", "dual_panda")
    with pytest.raises(InstructionError, match="has cubes; try 'pick up"):
        world.task_of("raise the bar", "panda")


def test_an_instruction_of_the_page_names_the_bar_s_task():
    view = ViewCommand(robot="dual_panda", policy=PolicyOptions(backend="scripted"))
    assert view._task == "lift_bar"
    view.controls.ask("raise the bar")
    assert (view._task, view._policy_instruction) == ("lift_bar", "raise the bar")


def test_without_a_model_another_robot_is_refused_as_by_rollout(capsys: pytest.CaptureFixture[str]):
    said = []
    for command in ("view", "rollout"):
        assert main([command, "--robot", "ur5e", "--episodes", "1"]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "--model" in said[0]
