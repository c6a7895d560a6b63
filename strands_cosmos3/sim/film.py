"""The pictures of a rollout: camera frames for the policy, and the film."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from strands_cosmos3.checks import known_name
from strands_cosmos3.films import Sound, VideoWriter
from strands_cosmos3.sim.record import compose_film
from strands_cosmos3.sim.render import BEAUTY, Polyline, Renderer
from strands_cosmos3.sim.scene import Scene, SceneLimb
from strands_cosmos3.types import JointTrajectory

BEAUTY_HW = (360, 640)
VIEW_HW = (180, 320)
LAYOUTS = {"full": 20.0, "views": 15.0}
"""Layout of a film -> frames per second. ``full``: the scene, the commanded path and the three
views. ``views``: the three views side by side, ten times faster to render.
"""
PREDICTION_FPS = 15.0
"""Frame rate of predicted videos."""
_TRAIL_POINTS = 240
_TRAIL_RGBA = (0.15, 0.65, 0.95, 0.55)
_OUTCOME_S = 1.5


def frames_shown(rows: int | None, latency_s: float) -> int | None:
    """Frames of a predicted video that are shown before the next one: the given one, one a row, and
    those of the latency.

    None, all of them, where whole chunks are executed (``rows`` is None).
    """
    return None if rows is None else rows + 1 + math.ceil(latency_s * PREDICTION_FPS)


class ViewCameras:
    """Renders the views of a scene's rig; makes an OpenGL context only when one is needed."""

    def __init__(self, scene: Scene):
        self._scene = scene
        self._renderer: Renderer | None = None

    def render(self, data: mujoco.MjData) -> dict[str, NDArray[np.uint8]]:
        """Return the views by name, [180, 320, 3] uint8 each."""
        if self._renderer is None:
            self._renderer = Renderer(self._scene.model, *VIEW_HW)
        return {name: self._renderer.render(data, name) for name in self._scene.view_names}

    def close(self) -> None:
        """Free OpenGL; the next picture makes a new context."""
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = None


class RolloutTrace:
    """What a picture of a rollout adds to the scene: each limb's commanded path and achieved trail,
    and the predicted video. ``points`` is the length of a trail.
    """

    def __init__(self, scene: Scene, points: int):
        self._limbs = scene.limbs
        self.commanded: list[NDArray[np.float64]] = []
        self.trails = {name: deque[NDArray[np.float64]](maxlen=points) for name in scene.limbs}
        self._video: NDArray[np.uint8] | None = None
        self._video_from_s = 0.0

    def take_plan(self, plan: JointTrajectory) -> None:
        """Take the commanded paths [T, 3] of a chunk."""
        self.commanded = [tool_path(plan, limb) for limb in self._limbs.values()]

    def extend_trails(self, data: mujoco.MjData) -> list[NDArray[np.float64]]:
        """Add where the limbs are now; return their trails, [N, 3] each."""
        for name, trail in self.trails.items():
            trail.append(data.site_xpos[self._limbs[name].tcp_site].copy())
        return [np.array(trail) for trail in self.trails.values()]

    def predict(self, video: Any, from_s: float) -> None:
        """Take a predicted video [F, H, W, 3] uint8 that begins at a time, or None."""
        self._video = None if video is None else np.asarray(video)
        self._video_from_s = from_s

    def predicted(self, now_s: float) -> NDArray[np.uint8] | None:
        """Return the frame that is predicted for now."""
        if self._video is None:
            return None
        frame = int((now_s - self._video_from_s) * PREDICTION_FPS)
        return self._video[min(frame, len(self._video) - 1)]


class RolloutListener(Protocol):
    """Receives what a policy plans and predicts, e.g. a live view."""

    def show_plan(self, plan: JointTrajectory, inference_ms: float) -> None:
        """Called with an accepted chunk and the wall-clock time that its inference and planning
        took.
        """
        ...

    def show_prediction(self, video: Any, since_s: float) -> None:
        """Called with the chunk's predicted video [F, H, W, 3] uint8, or None; it begins
        ``since_s`` ago in motion time.
        """
        ...


class VideoRecorder:
    """Renders a film and the policy's views; it makes an OpenGL context only when one of them is
    needed.

    Args:
        path: The film, or None for no film.
        control_frequency: Rate of calls of :meth:`film_tick` [Hz].
        layout: One of :data:`LAYOUTS`, else UnknownNameError.
        audience: Also receives plans and predictions.
    """

    def __init__(
        self,
        scene: Scene,
        path: str | Path | None,
        control_frequency: float,
        caption: str = "",
        layout: str = "full",
        audience: RolloutListener | None = None,
    ):
        known_name(layout, "film layout", LAYOUTS)
        self.scene = scene
        self.caption = caption
        self.layout = layout
        self._tick_s = 1.0 / control_frequency
        self._fps = min(LAYOUTS[layout], control_frequency)
        self._audience = audience
        self._writer = None if path is None else VideoWriter(path, self._fps)
        self._views = ViewCameras(scene)
        self._beauty: Renderer | None = None
        self._ticks = self._early = 0
        self._begun = False
        self._trace = RolloutTrace(scene, _TRAIL_POINTS)

    @property
    def film(self) -> Path | None:
        """The finished film, once the block has ended; None if there is none."""
        return None if self._writer is None else self._writer.kept

    def observe(self, data: mujoco.MjData) -> dict[str, NDArray[np.uint8]]:
        """Render the policy's views, [180, 320, 3] uint8 each."""
        return self._views.render(data)

    def show_plan(self, plan: JointTrajectory, inference_ms: float) -> None:
        """Draw a chunk's commanded path of the tool centre point from now on; ``inference_ms``
        is for the audience.
        """
        if self._audience is not None:
            self._audience.show_plan(plan, inference_ms)
        if self._writer is not None:
            self._trace.take_plan(plan)

    def show_prediction(self, video: Any, since_s: float, sound: Sound | None = None) -> None:
        """Show a predicted video [F, H, W, 3] uint8, if any, beside the scene, from ``since_s``
        seconds on, with its sound.
        """
        if self._audience is not None:
            self._audience.show_prediction(video, since_s)
        self._begun = True
        if self._writer is not None and sound is not None:
            self._writer.hear(sound, self._ticks * self._tick_s, since_s)
        if video is not None:
            self._trace.predict(video, self._ticks * self._tick_s - since_s)

    def film_tick(self, data: mujoco.MjData) -> None:
        """Render a frame if one is due; call it at every control tick."""
        self._ticks += 1
        if (
            self._writer is None
            or self._writer.frames + self._early
            > (self._ticks - 1) * self._tick_s * self._fps + 1e-9
        ):
            return
        self._early += 1
        # until the first chunk nothing moves, and the size of its prediction is not known
        if not self._begun:
            return
        page = self._page(data)
        for _ in range(self._early):
            self._writer.write(page)
        self._early = 0

    def finish(self, data: mujoco.MjData, outcome: str) -> None:
        """Show how the episode ended for a second and a half, with the last picture, in a full
        film.
        """
        if self._writer is None or self._writer.frames == 0 or self.layout != "full":
            return
        last = self._page(data, outcome)
        for _ in range(round(_OUTCOME_S * self._fps)):
            self._writer.write(last)

    def _page(self, data: mujoco.MjData, outcome: str | None = None) -> NDArray[np.uint8]:
        views = self.observe(data)
        if self.layout == "views":
            return np.concatenate(list(views.values()), axis=1)
        if self._beauty is None:
            self._beauty = Renderer(self.scene.model, *BEAUTY_HW, quality=BEAUTY)
        trails = self._trace.extend_trails(data)
        paths = [Polyline(path) for path in self._trace.commanded if len(path) > 1]
        paths += [Polyline(trail, _TRAIL_RGBA, 0.0015) for trail in trails if len(trail) > 1]
        beauty = self._beauty.render(data, "beauty", paths)
        predicted = self._trace.predicted(self._ticks * self._tick_s)
        observed = None if predicted is None else observed_picture(views, predicted)
        return compose_film(
            beauty, views, predicted, self.caption or None, observed, float(data.time), outcome
        )

    def __enter__(self) -> VideoRecorder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._views.close()
        if self._beauty is not None:
            self._beauty.close()
        self._beauty = None
        if self._writer is not None:
            # of an interrupted episode, the film up to then is worth keeping
            self._writer.close(keep=error is None or isinstance(error, KeyboardInterrupt))


def observed_picture(
    views: Mapping[str, NDArray[np.uint8]], predicted: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Return what a rig of one or three cameras sees as one picture, or the part of it that a
    predicted frame [H, W, 3] shows.

    A model's frames end where its grid of 16 pixels does, so they may lack the right or lower edge.
    """
    pictures = list(views.values())
    picture = pictures[0] if len(pictures) == 1 else composite(pictures)
    if predicted is None:
        return picture
    height, width = picture.shape[:2]
    rows, columns = predicted.shape[:2]
    return picture[
        : min(height, round(width * rows / columns)), : min(width, round(height * columns / rows))
    ]


def tool_path(plan: JointTrajectory, limb: SceneLimb) -> NDArray[np.float64]:
    """Return the commanded path [T, 3] of a limb's tool centre point in the world."""
    poses = plan.limb_poses.get(limb.limb.name)
    q_rad = plan.q_rad[:, limb.columns]
    T_hand = limb.kinematics.forward(q_rad) if poses is None else poses.T_base_frame
    return (limb.T_world_base @ T_hand @ limb.limb.T_frame_tool)[:, :3, 3]


def composite(views: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Stack the wrist's view above the two halved outer ones, as :func:`..observe.views.compose`
    does, but faster; all three have one size with even sides.
    """
    wrist, *outer = views
    halves = [np.asarray(Image.fromarray(view).reduce(2)) for view in outer]
    return np.concatenate([wrist, np.concatenate(halves, axis=1)])
