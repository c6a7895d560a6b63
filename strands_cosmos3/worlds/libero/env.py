"""A LIBERO task as a Gymnasium environment, with the published protocol."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray

from strands_cosmos3.checks import finite_array, whole_number
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.worlds.libero.protocol import CONTROL_HZ, LiberoConfig
from strands_cosmos3.worlds.libero.simulation import (
    CAMERAS,
    LiberoSimulation,
    as_seen,
    as_trained,
    side_by_side,
)
from strands_cosmos3.worlds.libero.suites import INIT_STATES, load_tasks

Observation = dict[str, Any]
"""Arrays by name."""


class LiberoEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """A task of a LIBERO suite, as ``strands_cosmos3/Libero-v0``.

    An action [7] is OSC_POSE's, in -1 .. 1: translation, rotation vector, gripper (-1 opens). An
    observation has the views ``agentview`` and ``wrist`` [256, 256, 3] as policies are trained on
    them (upright and mirrored; none if ``pictures`` is False), and ``state`` [8]: position in the
    world, rotation vector, fingers. Success ends an episode with reward 1; the suite's horizon
    truncates it.

    Args:
        suite: One of :data:`.suites.SUITES`.
        task: Number of the task, 0 to 9.
        config: The protocol.

    Raises:
        UnknownNameError, ConfigError, MissingDependencyError: An argument is invalid; LIBERO is not
            installed.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}

    def __init__(
        self,
        suite: str = "libero_object",
        task: int = 0,
        config: LiberoConfig | None = None,
        pictures: bool = True,
        render_mode: str | None = None,
    ):
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(
                f"render_mode {render_mode!r} does not exist; valid: rgb_array, or None."
            )
        tasks = load_tasks(suite)
        if task not in range(len(tasks)):
            raise ConfigError(f"{suite} has tasks 0 to {len(tasks) - 1}, got {task!r}.")
        self.render_mode = render_mode
        self.pictures = pictures
        self.task = tasks[task]
        self.world = LiberoSimulation(self.task, config, pictures or render_mode is not None)
        px = self.world.config.picture_px
        names = CAMERAS if pictures else ()
        views = {name: Box(0, 255, (px, px, 3), np.uint8) for name in names}
        self.observation_space = Dict({**views, "state": Box(-np.inf, np.inf, (8,), np.float64)})
        self.action_space = Box(-1.0, 1.0, (7,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode. ``options``: ``init_state``, the number of an official one; the
        default is drawn.
        """
        super().reset(seed=seed)
        drawn, fixtures = (int(n) for n in self.np_random.integers((INIT_STATES, 2**31)))
        number = (options or {}).get("init_state", drawn)
        whole_number(number, "init_state", 0, INIT_STATES - 1)
        self.world.reset(number, fixtures if seed is None else seed)
        return self._observation(), self._info(False) | {"init_state": number}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Apply an action [7] for a twentieth of a second."""
        success = self.world.step(finite_array(action, "action", (7,)), look=self.pictures)
        truncated = self.world.time_is_up
        info = self._info(success)
        return self._observation(), float(success), success, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        """Return both views side by side, upright and not mirrored [256, 512, 3]."""
        if self.render_mode is None:
            return None
        return side_by_side({name: as_seen(view) for name, view in self.world.rendered().items()})

    def close(self) -> None:
        """Free the simulation and OpenGL."""
        self.world.close()

    def _observation(self) -> Observation:
        views = self.world.views().items() if self.pictures else ()
        return {**{name: as_trained(view) for name, view in views}, "state": self.world.state}

    def _info(self, success: bool) -> dict[str, Any]:
        return {"success": success, "instruction": self.task.instruction}
