"""A live window on the simulation, where a display exists."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from strands_cosmos3.errors import RenderError
from strands_cosmos3.sim.pacing import Pacer

if TYPE_CHECKING:
    from strands_cosmos3.sim.simulated_arm import SimulatedArm

_CLOSE_S = 5.0
_TOLERANCE_S = 1.0


@contextmanager
def live_viewer(arm: SimulatedArm) -> Iterator[Callable[[SimulatedArm], bool]]:
    """MuJoCo's passive viewer; yields a callback for each tick, which keeps real time.
    RenderError without a display.
    """
    if sys.platform == "linux" and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise RenderError(
            "a live view needs a display and there is none; write a film instead: --video out.mp4"
        )
    import mujoco.viewer

    before = set(threading.enumerate())
    try:
        viewer = mujoco.viewer.launch_passive(arm.scene.model, arm.data)
    except RuntimeError as error:
        raise RenderError(
            f"the live viewer does not start ({error}); write a film instead: --video out.mp4"
        ) from error
    drawing = set(threading.enumerate()) - before
    with viewer:
        pacer = Pacer(arm.now_s(), _TOLERANCE_S)

        def on_tick(arm: SimulatedArm) -> bool:
            if not viewer.is_running():
                return True
            pacer.wait(arm.now_s())
            viewer.sync()
            return False

        try:
            yield on_tick
        finally:
            viewer.close()
            for thread in drawing:  # it still draws from our model; to go on without it would crash
                thread.join(_CLOSE_S)
