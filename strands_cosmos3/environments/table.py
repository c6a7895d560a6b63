"""Our table as a Gymnasium environment: joint targets in, joint angles and pictures out, judged
as in an evaluation.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray

from strands_cosmos3.errors import ConfigError, ControlError
from strands_cosmos3.sim.episode import physics_steps_per_tick
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.worlds.table.instruction import parse_instruction
from strands_cosmos3.worlds.table.tasks import Judge, get_task

Observation = dict[str, Any]
"""Arrays by name."""


class TableEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """A Panda before three cubes and a bin, as ``strands_cosmos3/Table-v0``.

    An action [8] is the angle that each joint should have after the step [rad], and the gripper's
    open fraction. Targets that are too far for one step are approached within the limits of joints
    and hand. An observation has ``joint_pos`` [7] in rad, ``joint_vel`` [7] in rad/s, ``gripper``
    [1], and the three views ``wrist``, ``exterior_left`` and ``exterior_right`` [180, 320, 3]
    unless ``pictures`` is False. Success ends an episode with reward 1; ``duration`` truncates it.

    Args:
        task: ``reach``, ``pick``, ``place`` or ``stack``.
        instruction: Another instruction than the task's own; also an option of :meth:`reset`.
        control_frequency: Steps per second; it must divide 600.
        duration: Longest episode in simulated seconds.
        robot: A robot of your own: other limits, another scene.

    Raises:
        UnknownNameError, InputError, ConfigError: An argument is invalid.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        task: str = "pick",
        instruction: str = "",
        control_frequency: float = 15.0,
        duration: float = 20.0,
        pictures: bool = True,
        render_mode: str | None = None,
        robot: Robot | None = None,
    ):
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(
                f"render_mode {render_mode!r} does not exist; valid: rgb_array, or None."
            )
        self.render_mode, self.pictures = render_mode, pictures
        self.task, self.hz = get_task(task), control_frequency
        self._steps_a_tick = physics_steps_per_tick(control_frequency)
        self._horizon = round(duration * control_frequency)
        self.robot = robot or Robot("panda")
        self._given = instruction
        self._renderer: Renderer | None = None
        self._begin(instruction)
        limits, scene = self.robot.limits, self.robot.scene
        low, high = np.append(limits.q_min, 0.0), np.append(limits.q_max, 1.0)
        self.action_space = self._box = Box(low.astype(np.float32), high.astype(np.float32))
        views = (
            {name: Box(0, 255, (*VIEW_HW, 3), np.uint8) for name in scene.view_names}
            if pictures
            else {}
        )
        numbers = {name: Box(-np.inf, np.inf, (size,), np.float64) for name, size in _STATE.items()}
        self.observation_space = Dict({**numbers, **views})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode with the scene of a seed. ``options``: ``instruction``."""
        super().reset(seed=seed)
        scene = int(self.np_random.integers(2**31)) if seed is None else seed
        self._begin((options or {}).get("instruction", self._given))
        self.robot.reset(scene)
        return self._observation(), self._info(False)

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Drive towards joint targets [7] and an opening for one step. A fault of the arm ends
        the episode without success.
        """
        robot, fault = self.robot, None
        before = robot.executor.reference
        target = np.clip(np.asarray(action, np.float64), self._box.low, self._box.high)
        # float32's bounds may round outwards
        target[:7] = np.clip(target[:7], robot.limits.q_min, robot.limits.q_max)
        try:
            robot.executor.accept(
                JointTrajectory(target[None, :7], np.array([1 / self.hz]), target[7:])
            )
            robot.execute(robot.executor.advance(self._steps_a_tick), before)
        except ControlError as error:
            fault = str(error)
        self._steps += 1
        success = fault is None and self._judge.succeeded(robot.data)
        info = self._info(success) | ({} if fault is None else {"fault": fault})
        return (
            self._observation(),
            float(success),
            success or fault is not None,
            self._steps >= self._horizon,
            info,
        )

    def render(self) -> NDArray[np.uint8] | None:
        """Return the three views side by side [180, 960, 3]."""
        return (
            None
            if self.render_mode is None
            else np.concatenate(list(self._views().values()), axis=1)
        )

    def close(self) -> None:
        """Free OpenGL."""
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = None

    def _begin(self, instruction: str) -> None:
        self.instruction = instruction or self.task.instruction
        self._judge = Judge(self.task, self.robot.scene, parse_instruction(self.instruction))
        self._steps = 0

    def _observation(self) -> Observation:
        q, qd, gripper = self.robot.joint_state()
        state = {"joint_pos": q, "joint_vel": qd, "gripper": np.array([gripper])}
        return state | (self._views() if self.pictures else {})

    def _views(self) -> Observation:
        if self._renderer is None:
            self._renderer = Renderer(self.robot.scene.model, *VIEW_HW)
        return {
            name: self._renderer.render(self.robot.data, name)
            for name in self.robot.scene.view_names
        }

    def _info(self, success: bool) -> dict[str, Any]:
        return {"success": success, "instruction": self.instruction}


_STATE = {"joint_pos": 7, "joint_vel": 7, "gripper": 1}
