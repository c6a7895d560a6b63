"""A live window on the simulation, where a display exists."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from strands_cosmos3.errors import RenderError

if TYPE_CHECKING:
    from strands_cosmos3.sim.robot import Robot

_CLOSE_S = 5.0


@contextmanager
def live_viewer(robot: Robot) -> Iterator[Callable[[Robot], bool]]:
    """MuJoCo's passive viewer; yields what to call after each tick, which also waits for the clock on the wall.

    Raises:
        RenderError: There is no display.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise RenderError("a live view needs a display and there is none; write a film instead: --video out.mp4")
    import mujoco.viewer

    before = set(threading.enumerate())
    try:
        viewer = mujoco.viewer.launch_passive(robot.scene.model, robot.data)
    except RuntimeError as error:
        raise RenderError(f"the live viewer does not start ({error}); write a film instead: --video out.mp4") from error
    drawing = set(threading.enumerate()) - before
    with viewer:
        offset_s = time.monotonic() - robot.data.time

        def on_tick(robot: Robot) -> bool:
            nonlocal offset_s
            if not viewer.is_running():
                return True
            wait_s = robot.data.time + offset_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            elif wait_s < -1.0:  # an episode began anew, or planning took long
                offset_s = time.monotonic() - robot.data.time
            viewer.sync()
            return False

        try:
            yield on_tick
        finally:
            viewer.close()
            for thread in drawing:  # it still draws from our model; leaving without it would crash
                thread.join(_CLOSE_S)
