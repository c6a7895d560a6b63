"""The page's controls: what they let through, what a refusal leaves alone, and what the running
command makes of them.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from strands_cosmos3.commands.rollout import FileFlags
from strands_cosmos3.commands.view import ViewCommand
from strands_cosmos3.errors import InstructionError
from strands_cosmos3.language import Language
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.sim.film import composite
from strands_cosmos3.view.controls import (
    LATENCIES_S,
    ControlPanel,
    LiveControls,
)
from strands_cosmos3.view.live import LiveView
from strands_cosmos3.view.page import MEANINGS, LivePage, Status
from strands_cosmos3.worlds import get_world
from strands_cosmos3.worlds.arms import Robot

PICKS = Language(
    ("reach", "pick"),
    ("red", "blue"),
    frozenset(["reach", "pick", "up", "the", "red", "blue", "cube"]),
)


def test_suggestions_are_understood():
    world = get_world("table")
    assert world.suggestions(language=PICKS) == [
        "pick up the red cube",
        "pick up the blue cube",
        "reach the red cube",
        "reach the blue cube",
    ]
    for sentence in world.suggestions(language=PICKS):
        PICKS.understand(sentence)
    assert len(world.suggestions()) == 12
    for sentence in world.suggestions():
        assert world.task_of(sentence) in world.tasks()


@pytest.mark.parametrize(
    "text",
    ["", "dance", "pick up the yellow cube", "stack the red cube on the blue cube", "red " * 90],
)
def test_a_refused_instruction_changes_nothing_but_the_message(text):
    controls = LiveControls()
    controls.check = PICKS.understand
    controls.ask(text)
    assert controls.message
    assert not controls.ends_episode
    assert controls.instruction == ""
    controls.ask("Pick up the blue cube.")
    assert (controls.message, controls.instruction, controls.ends_episode) == (
        "",
        "Pick up the blue cube.",
        True,
    )
    assert controls.next_scene(5) == 5  # the same scene
    assert controls.next_scene(5) is None
    controls.start_over()
    assert controls.next_scene(5) == 6


def test_an_instruction_that_only_the_policy_refuses_gives_way_to_the_one_before():
    controls = LiveControls()
    controls.ask("reach the red cube")
    controls.ask("place the red cube in the bin")
    assert controls.fall_back(InstructionError("not understood"))
    assert (controls.instruction, controls.message) == ("", "not understood")
    assert not controls.fall_back(InstructionError("again"))


def test_speeds_and_latencies_beyond_those_of_the_page_are_ignored():
    controls = LiveControls()
    for name in ("2 x", "1000 x", ""):
        controls.set_speed(name)
    for seconds in (0.2, -1.0, float("nan"), float("inf"), LATENCIES_S[-1] + 0.1):
        controls.set_latency(seconds)
    assert (controls.speed, controls.latency_s) == (2.0, 0.2)


def test_the_panel_shows_refusals_and_the_tally_as_text():
    robot, controls = Robot(), LiveControls()
    with LivePage(robot.scene.model, port=0) as page:
        panel = ControlPanel(
            page.server.gui, controls, get_world("table").suggestions(), "<b>go</b>"
        )
        assert "no episode has ended" in panel._tally.content
        controls.check = PICKS.understand
        controls.ask("<script>alert(1)</script>")
        controls.outcomes += [
            (True, 'pick, "seed" 0'),
            (False, "pick, seed 1"),
            (True, "pick, seed 2"),
        ]
        panel.update()
        assert "&lt;script&gt;" in panel._message.content
        assert "<script" not in panel._message.content
        assert "2 of 3 episodes succeeded" in panel._tally.content
        assert "&quot;seed&quot; 0" in panel._tally.content
        panel.close()
        assert not panel._asking.visible


def test_counters_have_tooltips():
    robot = Robot()
    rollout = robot.run_policy(
        policy_config={"backend": "scripted"}, instruction="reach the red cube", duration=0.5
    )
    counters = robot.counters()
    assert {"chunks", "requested", "deadline_misses"} <= counters.keys()
    assert counters.keys() <= MEANINGS.keys()
    html = Status("HOLD", "go", "scripted", 1.0, counters=counters).to_html()
    assert f'title="{MEANINGS["chunks"]}"' in html
    assert "deadline misses" not in html  # zero
    assert rollout.counters["chunks"]


def test_a_new_episode_starts_with_nothing_of_the_last(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    robot = Robot()
    with LivePage(robot.scene.model, port=0) as page, LiveView(robot, page, "scripted") as live:
        arguments = {
            "policy_config": {"backend": "scripted"},
            "instruction": "reach the red cube",
            "duration": 0.4,
        }
        robot.run_policy(**arguments, on_tick=live.on_tick, audience=live)
        live.show_prediction(np.full((3, 270, 320, 3), 9, np.uint8), 0.0)
        live._show(float(robot.data.time), everything=True)
        assert set(page._lines) == {"commanded", "achieved"}
        pair = page._prediction.image
        assert pair.shape == (270, 644, 3)  # real and predicted, of one size
        views = [live._views[name] for name in robot.scene.view_names]
        np.testing.assert_array_equal(pair[:, :320], composite(views))
        assert (pair[:, 324:] == 9).all()
        live.begin("reach the blue cube")
        assert not page._lines
        assert not page._prediction.visible
        assert np.ptp(page._camera_image.image) == 0


class Watched(LiveControls):
    """Controls that tell when an episode has begun: each of its ticks asks whether it is to end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    @property
    def ends_episode(self) -> bool:
        self.begun.set()
        return super().ends_episode


def run_view(script, tmp_path: Path, **options) -> tuple[ViewCommand, list[dict]]:
    """Run `view` with the scripted expert while ``script(controls)`` runs in another thread; the
    episodes of its report.
    """
    view = ViewCommand(
        policy=PolicyOptions(backend="scripted"),
        page_port=0,
        no_cameras=True,
        leave=True,
        files=FileFlags(json=tmp_path / "report.json"),
        **options,
    )
    object.__setattr__(view, "controls", Watched())
    view.controls.speed = 4.0
    visitor = threading.Thread(target=script, args=(view.controls,))
    visitor.start()
    try:
        assert view.run() == 0
    finally:
        visitor.join(30)
    return view, json.loads((tmp_path / "report.json").read_text())["episodes"]


def test_an_instruction_of_the_page_is_carried_out(tmp_path):
    """The old episode goes on through a refusal; then the new one begins on the same scene, and
    is judged by its own task.
    """

    def visit(controls):
        assert controls.begun.wait(60)
        controls.ask("dance")
        assert "'dance'" in controls.message
        time.sleep(0.3)
        assert not controls.ends_episode
        controls.ask("reach the blue cube")

    view, (first, second) = run_view(visit, tmp_path, task="pick", episodes=1, seed=3)
    assert (first["outcome"], first["instruction"]) == ("interrupted", "pick up the red cube")
    assert (second["outcome"], second["instruction"]) == ("success", "reach the blue cube")
    assert (second["task"], second["seed"], first["seed"]) == ("reach", 3, 3)
    assert view.controls.tally() == "1 of 1 episodes succeeded"


def test_pause_reset_and_latency(tmp_path):
    def visit(controls):
        assert controls.begun.wait(60)
        controls.set_latency(0.2)
        controls.paused = True
        time.sleep(0.5)
        controls.start_over()  # ends a pause too

    _, (first, second) = run_view(visit, tmp_path, task="reach", episodes=1, seed=3)
    assert (first["outcome"], second["outcome"]) == ("interrupted", "success")
    assert (first["seed"], second["seed"]) == (3, 4)
    assert second["latency_ms"]["p50"] == pytest.approx(200, abs=25)
