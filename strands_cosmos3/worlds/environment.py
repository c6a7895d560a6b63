"""A world of simulated arms as a Gymnasium environment: joint targets in, joint angles and pictures
out, judged as in an evaluation.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray

from strands_cosmos3.checks import of_grippers
from strands_cosmos3.errors import ConfigError, ControlError
from strands_cosmos3.sim.episode import physics_steps_per_tick
from strands_cosmos3.sim.film import VIEW_HW, ViewCameras
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.worlds.arms import Robot, arm_world
from strands_cosmos3.worlds.world import World

Observation = dict[str, Any]
"""Arrays by name."""


class WorldEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """An arm before what a world has for it; ``strands_cosmos3/Table-v0`` is a Panda at our table.

    An action [n + 1] is the angle that each of n joints should have after the step [rad], and the
    gripper's open fraction. Targets that are too far for one step are approached within the limits
    of joints and hand. An observation has ``joint_pos`` [n] in rad, ``joint_vel`` [n] in rad/s,
    ``gripper`` [1], and the views of the robot's rig, [180, 320, 3] each, unless ``pictures`` is
    False. Success ends an episode with reward 1; ``duration`` truncates it. A robot of several
    limbs has all of their joints, and an open fraction for each gripper.

    Args:
        task: One of the world's tasks; empty is the robot's first.
        instruction: Another instruction than the task's own; also an option of :meth:`reset`.
        control_frequency: Steps per second; it must divide 600.
        duration: Longest episode in simulated seconds.
        robot: A name, or a robot of your own: other limits, another scene.
        world: A name as for :func:`~strands_cosmos3.worlds.get_world`, or a World of simulated
            arms.

    Raises:
        UnknownNameError, InputError, ConfigError: An argument is invalid.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        task: str = "",
        instruction: str = "",
        control_frequency: float = 15.0,
        duration: float = 20.0,
        pictures: bool = True,
        render_mode: str | None = None,
        robot: Robot | str | None = None,
        world: str | World = "table",
    ):
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(
                f"render_mode {render_mode!r} does not exist; valid: rgb_array, or None."
            )
        self.render_mode = render_mode
        self.pictures = pictures
        is_robot = isinstance(robot, Robot)
        self.world = robot.world if is_robot else arm_world(world)
        name = robot.name if is_robot else robot or self.world.robots[0]
        self.task = self.world.task(task or next(iter(self.world.tasks(name))), name)
        self.hz = control_frequency
        self._steps_a_tick = physics_steps_per_tick(control_frequency)
        self._horizon = round(duration * control_frequency)
        self.robot = robot if is_robot else Robot(name, task=self.task.name, world=self.world)
        self._instruction = instruction
        self._begin(instruction)
        limits = self.robot.limits
        scene = self.robot.scene
        self._cameras = ViewCameras(scene)
        self._n = len(limits.q_min)
        grippers = len(scene.limbs)
        self._low = np.append(limits.q_min, np.zeros(grippers))
        self._high = np.append(limits.q_max, np.ones(grippers))
        self.action_space = Box(self._low.astype(np.float32), self._high.astype(np.float32))
        sizes = {"joint_pos": self._n, "joint_vel": self._n, "gripper": grippers}
        numbers = {key: Box(-np.inf, np.inf, (size,), np.float64) for key, size in sizes.items()}
        names = scene.view_names if pictures else ()
        views = {view: Box(0, 255, (*VIEW_HW, 3), np.uint8) for view in names}
        self.observation_space = Dict({**numbers, **views})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode with the scene of a seed. ``options``: ``instruction``."""
        super().reset(seed=seed)
        scene = int(self.np_random.integers(2**31)) if seed is None else seed
        self._begin((options or {}).get("instruction", self._instruction))
        self.robot.reset(scene)
        return self._observation(), self._info(False)

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Drive towards joint targets [n] and openings for one step. A fault of the arm ends the
        episode without success.
        """
        robot = self.robot
        fault = None
        n = self._n
        reference = robot.executor.reference  # where the step begins
        # not to the space's own bounds: those of float32 may round outwards
        row = np.clip(np.asarray(action, np.float64), self._low, self._high)[None]
        gripper = of_grippers(row[:, n:])
        try:
            robot.executor.accept(JointTrajectory(row[:, :n], np.array([1 / self.hz]), gripper))
            robot.execute(robot.executor.advance(self._steps_a_tick), reference)
        except ControlError as error:
            fault = str(error)
        self._steps += 1
        success = fault is None and self._judge.succeeded(robot.data)
        info = self._info(success) | ({} if fault is None else {"fault": fault})
        ended = success or fault is not None
        return self._observation(), float(success), ended, self._steps >= self._horizon, info

    def render(self) -> NDArray[np.uint8] | None:
        """Return the views side by side, e.g. [180, 960, 3] of three."""
        if self.render_mode is None:
            return None
        return np.concatenate(list(self._cameras.render(self.robot.data).values()), axis=1)

    def close(self) -> None:
        """Free OpenGL."""
        self._cameras.close()

    def _begin(self, instruction: str) -> None:
        self.instruction = instruction or self.task.instruction
        self._judge = self.world.judge(self.task.name, self.robot.scene, self.instruction)
        self._steps = 0

    def _observation(self) -> Observation:
        q, qd, gripper = self.robot.joint_state()
        state = {"joint_pos": q, "joint_vel": qd, "gripper": np.atleast_1d(gripper)}
        return state | (self._cameras.render(self.robot.data) if self.pictures else {})

    def _info(self, success: bool) -> dict[str, Any]:
        return {"success": success, "instruction": self.instruction}
