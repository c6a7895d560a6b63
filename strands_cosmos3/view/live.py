"""Rollouts on the page while they run, no faster than wall-clock time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.monitors import ScoreLimit
from strands_cosmos3.resources import Closeable
from strands_cosmos3.sim.film import RolloutTrace, ViewCameras, observed_picture
from strands_cosmos3.sim.interrupt import interrupt_requested
from strands_cosmos3.sim.pacing import Pacer
from strands_cosmos3.types import JointTrajectory, Rollout
from strands_cosmos3.view.controls import LiveControls
from strands_cosmos3.view.page import LivePage, Status, limb_gauges
from strands_cosmos3.worlds.arms import Robot

_POSE_S = 1 / 25
_PANEL_S = 1 / 8
_CAMERA_S = 1 / 5
_TRAIL_POINTS = 400
_TOLERANCE_S = 1.0


class LiveView(Closeable):
    """Feeds a :class:`LivePage` from a robot that runs a policy: pass :meth:`on_tick` and the
    object itself as audience.

    Args:
        robot: The robot.
        page: The page.
        source: The policy's source of actions, for the panel.
        cameras: Whether to render the cameras, which takes most of the time.
        controls: What the page's visitors ask for.
        scores: Returns those of the policy's latest chunk, by their limits.
    """

    def __init__(
        self,
        robot: Robot,
        page: LivePage,
        source: str,
        cameras: bool = True,
        controls: LiveControls | None = None,
        scores: Callable[[], Mapping[ScoreLimit, float]] = dict,
    ):
        self.robot = robot
        self.page = page
        self.source = source
        self._scores_now = scores
        self.controls = LiveControls() if controls is None else controls
        self._cameras = ViewCameras(robot.scene) if cameras else None
        self.begin("")

    def begin(self, instruction: str) -> None:
        """Start a new episode: nothing of the last one stays on the page."""
        self.instruction = instruction
        self.inference_ms = None
        self.scores: Mapping[ScoreLimit, float] = {}
        self.page.clear()
        self.trace = RolloutTrace(self.robot.scene, _TRAIL_POINTS)
        self._pose_due = self._panel_due = self._camera_due = -1.0
        self._seen_s = self.robot.now_s()
        self._views: dict[str, NDArray[np.uint8]] = {}
        self._keep_pace()

    def show_plan(self, plan: JointTrajectory, inference_ms: float) -> None:
        """Show the path of an accepted chunk."""
        self._notice_reset()
        self.trace.take_plan(plan)
        self.inference_ms = inference_ms
        self.scores = self._scores_now()

    def show_prediction(self, video: Any, since_s: float) -> None:
        """Show a chunk's predicted video, which begins ``since_s`` seconds ago."""
        self._notice_reset()
        self.trace.predict(video, self.robot.now_s() - since_s)

    def on_tick(self, robot: Robot) -> bool:
        """Update what is due, then wait for wall-clock time and for the end of a pause; return
        whether to end the episode.
        """
        self._notice_reset()
        now_s = robot.now_s()
        controls = self.controls
        self._show(now_s)
        paused = controls.paused
        while controls.paused and not (controls.ends_episode or interrupt_requested()):
            time.sleep(_POSE_S)
        if paused or controls.speed != self._speed:
            self._keep_pace()
        self._pacer.wait(now_s / self._speed)
        return controls.ends_episode

    def _keep_pace(self) -> None:
        """Keep the page's speed from now on."""
        self._speed = self.controls.speed
        self._pacer = Pacer(self.robot.now_s() / self._speed, _TOLERANCE_S)

    def _notice_reset(self) -> None:
        """Start a new episode if the simulated clock went back."""
        now_s = self.robot.now_s()
        if now_s < self._seen_s:
            self.begin(self.instruction)
        self._seen_s = now_s

    def _show(self, now_s: float, outcome: str = "", everything: bool = False) -> None:
        robot = self.robot
        page = self.page
        if everything or now_s >= self._pose_due:
            self._pose_due = now_s + _POSE_S
            page.pose(robot.data)
            page.path(self.trace.commanded, self.trace.extend_trails(robot.data))
        if self._cameras is not None and (everything or now_s >= self._camera_due):
            self._camera_due = now_s + _CAMERA_S
            self._views = self._cameras.render(robot.data)
            page.cameras(self._views)
        if everything or now_s >= self._panel_due:
            self._panel_due = now_s + _PANEL_S
            state = robot.executor.state.name
            figures = outcome, self.inference_ms, robot.counters(), self.scores
            page.status(Status(state, self.instruction, self.source, now_s, *figures))
            predicted = self.trace.predicted(now_s)
            observed = None
            if predicted is not None and self._views:
                observed = observed_picture(self._views, predicted)
            page.world(predicted, observed=observed)
            q_rad, _, gripper = robot.joint_state()
            page.limbs(limb_gauges(robot.scene, q_rad, gripper))

    def end(self, rollout: Rollout) -> None:
        """Show how the episode ended."""
        self._show(
            self.robot.now_s(),
            f"{rollout.outcome}: {rollout.fault or rollout.outcome.message}",
            True,
        )

    def close(self) -> None:
        """Free the renderer."""
        if self._cameras is not None:
            self._cameras.close()
