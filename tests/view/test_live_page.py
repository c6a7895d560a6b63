"""The page's server side: it serves HTTP on loopback, its nodes follow the robot, and nothing of
it stays.
"""

from __future__ import annotations

import io
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from strands_cosmos3.backends.engine_backend import NOVELTY
from strands_cosmos3.cli import main
from strands_cosmos3.datasets import DatasetWriter
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.panda import HOME_Q, T_hand_tcp
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.view.geometry import body_meshes
from strands_cosmos3.view.live import LiveView
from strands_cosmos3.view.page import _STATE_RGB, MEANINGS, LivePage, Status
from strands_cosmos3.view.playback import play, recorded_episodes
from strands_cosmos3.worlds.arms import Robot


@pytest.fixture(scope="module")
def robot() -> Robot:
    return Robot()


@pytest.fixture
def page(robot: Robot) -> Iterator[LivePage]:
    with LivePage(robot.scene.model, port=0) as page:
        yield page


def free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_meshes_lie_where_the_renderer_s_geoms_are(robot: Robot):
    """Against MuJoCo's own bounding boxes, body by body."""
    model, seen = robot.scene.model, set()
    for (body, rgb), mesh in body_meshes(model).items():
        seen.add(model.body(body).name)
        for geom in range(model.ngeom):
            if (
                model.geom_bodyid[geom] != body
                or model.geom_group[geom] == 3
                or model.geom_type[geom] == 0
            ):
                continue
            R = np.zeros(9)
            mujoco.mju_quat2Mat(R, model.geom_quat[geom])
            local = (mesh.vertices - model.geom_pos[geom]) @ R.reshape(3, 3)
            center, half = model.geom_aabb[geom][:3], model.geom_aabb[geom][3:]
            inside = local[(np.abs(local - center) <= half + 1e-6).all(axis=1)]
            if (
                len(inside) > 20
                and model.geom_matid[geom] >= 0
                and rgb
                == tuple(int(v) for v in np.round(model.mat_rgba[model.geom_matid[geom]][:3] * 255))
            ):
                np.testing.assert_allclose(inside.min(axis=0), center - half, atol=2e-3)
                np.testing.assert_allclose(inside.max(axis=0), center + half, atol=2e-3)
    links = {f"link{k}" for k in range(8)}
    assert (
        links
        | {
            "hand",
            "left_finger",
            "right_finger",
            "cube_red",
            "cube_green",
            "cube_blue",
            "bin",
            "world",
        }
        <= seen
    )


def test_it_serves_loopback_and_leaves_nothing(robot: Robot):
    before = set(threading.enumerate())
    with LivePage(robot.scene.model, port=0) as page:
        port = int(page.url.rsplit(":", 1)[1])
        with urllib.request.urlopen(page.url, timeout=30) as answer:
            assert answer.status == 200
            assert b"<html" in answer.read().lower()
        assert page.server.get_host() == "127.0.0.1"
        with pytest.raises(ConfigError, match="page-port"):
            LivePage(robot.scene.model, port=port)
    assert free(port)
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    page.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.7", "::", "::1", "example.org", ""])
def test_other_interfaces_must_be_asked_for(robot: Robot, address: str):
    with pytest.raises(ConfigError, match=r"--expose"):
        LivePage(robot.scene.model, address, port=0)


def test_the_command_must_be_asked_for_other_interfaces():
    assert main(["view", "--page-address", "0.0.0.0", "--episodes", "1"]) == 2


def test_bodies_and_paths_follow(robot: Robot, page: LivePage):
    robot.reset(1)
    page.pose(robot.data)
    hand, cube = (page._bodies[robot.scene.model.body(name).id] for name in ("hand", "cube_red"))
    np.testing.assert_allclose(hand.position, robot.data.body("hand").xpos)
    np.testing.assert_allclose(np.abs(hand.wxyz @ robot.data.body("hand").xquat), 1.0)
    before = np.array(cube.position)
    robot.reset(2)
    page.pose(robot.data)
    assert np.linalg.norm(cube.position - before) > 0.01
    line = np.array([[0.3, 0, 0.3], [0.4, 0, 0.3], [0.4, 0.1, 0.3]])
    page.path([line], [line[:2]])
    assert page._lines["commanded"].points.shape == (2, 2, 3)
    page.path([], [line])
    assert set(page._lines) == {"achieved"}


def test_the_panel_says_what_is(page: LivePage):
    status = Status("HOLD", "pick <b>up</b>", "native", 1.234, "", 12.5, {"deadline_misses": 3})
    page.status(status)
    text = page._status.content
    assert "HOLD" in text
    assert "pick &lt;b&gt;up&lt;/b&gt;" in text  # the instruction is text, not markup
    assert "1.23 s" in text
    assert "12.5 ms" in text
    assert "deadline misses" in text
    assert page._world_note.content == "this backend predicts no video"
    page.world(np.zeros((4, 6, 3), np.uint8))
    assert "predicted by the model" in page._world_note.content
    page.world(None)
    assert page._world_note.content == "this backend predicts no video"
    assert not page._prediction.visible


def test_a_rollout_is_shown_as_it_runs(
    robot: Robot, page: LivePage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    states: list[str] = []
    hands: list[Any] = []
    with LiveView(robot, page, "scripted", cameras=False) as live:
        live.begin("reach the red cube")

        def on_tick(robot: Robot) -> None:
            live.on_tick(robot)
            states.append(page._status.content)
            hands.append(np.array(page._bodies[robot.scene.only.frame_body].position))

        rollout = robot.run_policy(
            policy_config={"backend": "scripted"},
            instruction="reach the red cube",
            duration=1.0,
            on_tick=on_tick,
            audience=live,
        )
        live.end(rollout)
    assert live.inference_ms is not None
    assert live.inference_ms > 0
    assert "RUNNING" in states[-1]
    assert len(set(states)) > 5  # the clock goes
    assert np.linalg.norm(hands[-1] - hands[0]) > 0.02
    commanded, trail = page._lines["commanded"].points, page._lines["achieved"].points
    assert len(trail) > 10
    off = np.linalg.norm(commanded[:, None, 0] - trail[None, -1, 1], axis=2).min()
    assert off < 0.03  # the arm is on the path that it is given
    assert "completed" in page._status.content


def test_a_second_episode_keeps_its_first_chunk(
    robot: Robot, page: LivePage, monkeypatch: pytest.MonkeyPatch
):
    """Its clock goes back when its chunk is there already: the path is the new one, and the
    trail begins anew.
    """
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    pathless: list[bool] = []
    with LiveView(robot, page, "scripted", cameras=False) as live:

        def on_tick(robot: Robot) -> None:
            live.on_tick(robot)
            pathless.append(not live.trace.commanded or live.inference_ms is None)

        for _ in range(2):
            robot.run_policy(
                policy_config={"backend": "scripted"},
                instruction="reach the red cube",
                duration=0.6,
                on_tick=on_tick,
                audience=live,
            )
            assert len(live.trace.trails["arm"]) < 20  # of this episode alone, 25 a second
    assert not any(pathless)


def test_ipv6_is_refused_by_name(robot: Robot):
    with pytest.raises(ConfigError, match=r"::1 is an IPv6 address.*127\.0\.0\.1"):
        LivePage(robot.scene.model, "::1", port=0)


def test_the_prediction_runs_with_the_clock(robot: Robot, page: LivePage):
    robot.reset(0)
    with LiveView(robot, page, "native", cameras=False) as live:
        video = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
        live.show_prediction(video, 0.0)
        assert live.trace.predicted(0.0)[0, 0, 0] == 0  # type: ignore[index]
        assert live.trace.predicted(0.21)[0, 0, 0] == 3  # type: ignore[index]
        assert live.trace.predicted(9.0)[0, 0, 0] == 4  # type: ignore[index]
        live.show_prediction(video, 0.21)  # of what was observed that long ago
        assert live.trace.predicted(0.0)[0, 0, 0] == 3  # type: ignore[index]
        live.show_plan(JointTrajectory(HOME_Q[None], np.array([0.1])), 3.0)
        assert live.inference_ms == 3.0


def test_the_novelty_of_the_latest_chunk_is_shown_with_its_limit(robot: Robot, page: LivePage):
    robot.reset(0)
    found = iter([{NOVELTY: 0.4}, {NOVELTY: 1.25}, {}])
    with LiveView(robot, page, "native", cameras=False, scores=lambda: next(found)) as live:
        shown = []
        for _ in range(3):
            live.show_plan(JointTrajectory(HOME_Q[None], np.array([0.1])), 3.0)
            live._show(0.0, everything=True)
            shown.append(page._status.content)
        live.begin("again")
        assert not live.scores  # nothing of the last episode
    usual, unusual, unknown = shown
    assert "0.40 (limit 1)" in usual
    assert "1.25 (limit 1)" in unusual
    assert escape(MEANINGS["novelty"]) in usual
    red = _STATE_RGB["FAULT"]
    assert (red in usual, red in unusual) == (False, True)
    assert "novelty" not in unknown


def test_the_command_runs_and_ends(capsys: pytest.CaptureFixture[str]):
    arguments = [
        "view",
        "--task",
        "reach",
        "--episodes",
        "1",
        "--duration",
        "0.3",
        "--page-port",
        "0",
        "--no-cameras",
        "--leave",
    ]
    assert main(arguments) == 0
    assert "open http://127.0.0.1:" in capsys.readouterr().out
    assert main(["view", "--episodes", "-1"]) == 2


def test_a_recorded_episode_is_played(
    robot: Robot, page: LivePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with DatasetWriter(tmp_path / "set", rollout_spec()) as writer:
        rollout = robot.run_policy(
            policy_config={"backend": "scripted"},
            instruction="reach the red cube",
            duration=0.5,
            recorder=RolloutRecorder(writer),
        )
    rollout.save_npz(str(tmp_path / "a.npz"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    shown: list[Any] = []
    monkeypatch.setattr(page, "cameras", lambda views: shown.append(set(views)))
    tcp = rollout.arrays["T_base_hand_commanded"] @ T_hand_tcp
    for path in (tmp_path / "set", tmp_path / "a.npz"):
        (recorded,) = recorded_episodes(path, robot.scene)
        play(page, robot.scene, recorded)
        assert page._lines["achieved"].points.shape[0] == len(recorded.q_rad) - 1
        off = np.linalg.norm(recorded.tcp_commanded_m["arm"][3] - tcp[:, :3, 3], axis=1).min()
        assert off < 1e-4
        assert "PLAYBACK" in page._status.content
        assert "recording" in page._world_note.content
        assert not page._bodies[robot.scene.bodies["cube_red"].id].visible
    assert len(shown) >= 7
    assert shown[0] == {"wrist", "exterior_1", "exterior_2"}
    short = ["--page-port", "0", "--leave"]
    assert main(["view", "--play", str(tmp_path / "set"), *short]) == 0
    assert main(["view", "--play", str(tmp_path / "set"), "--episode", "3", *short]) == 2
    assert main(["view", "--play", str(tmp_path / "nothing.npz"), *short]) == 2
    assert main(["view", "--play", str(tmp_path), *short]) == 1


def test_a_recording_is_shown_to_its_last_row(robot: Robot, tmp_path: Path):
    for n in (1, 2, 100):
        q = HOME_Q + np.linspace(0, 0.1, n)[:, None]
        arrays = {
            "t_s": np.arange(n) / 600,
            "q_achieved_rad": q,
            "gripper_achieved": np.ones(n),
            "q_commanded_rad": q,
        }
        np.savez(tmp_path / "a.npz", **arrays)
        (recorded,) = recorded_episodes(tmp_path / "a.npz", robot.scene)
        np.testing.assert_allclose(recorded.q_rad[-1], q[-1])


def test_a_file_that_is_no_recording_is_refused(robot: Robot, tmp_path: Path):
    path = tmp_path / "a.npz"
    whole = {name: np.ones((3, 7)) for name in ("q_achieved_rad", "q_commanded_rad")}
    np.savez(path, **whole, t_s=np.arange(3.0), gripper_achieved=np.ones(3))
    saved = path.read_bytes()
    array = io.BytesIO()
    np.save(array, np.ones(3))
    for content in (b"", b"text", saved[: len(saved) // 2], array.getvalue()):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"a\.npz"):
            list(recorded_episodes(path, robot.scene))
