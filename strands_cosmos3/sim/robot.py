"""The simulated robot and its closed loop: observe, run a policy, execute with real dynamics,
report.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from strands_cosmos3.backends.replay import LimbRecording
from strands_cosmos3.checks import F64, positive, seed_number, typed
from strands_cosmos3.control.identification import identify
from strands_cosmos3.control.loop import LoopConfig
from strands_cosmos3.errors import ConfigError, InputError, UnknownNameError
from strands_cosmos3.options import with_options
from strands_cosmos3.policy import Policy, create_policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.robots.catalogue import aliases, get_robot, packaged_robots, source_of
from strands_cosmos3.robots.model import frame_body
from strands_cosmos3.robots.servo import NO_COMPENSATION, Compensation
from strands_cosmos3.robots.spec import Limb
from strands_cosmos3.sim.episode import Episode, physics_steps_per_tick
from strands_cosmos3.sim.film import RolloutListener, VideoRecorder
from strands_cosmos3.sim.plant import ALL_ERRORS, PlantErrors
from strands_cosmos3.sim.policy_planner import planner_for, recording_of
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.sim.simulated_arm import ControlConfig, SimulatedArm
from strands_cosmos3.types import Rollout
from strands_cosmos3.worlds.table.instruction import parse_instruction
from strands_cosmos3.worlds.table.tasks import Judge, bar_for, get_task

if TYPE_CHECKING:
    # needs pyarrow, which other rollouts do not
    from strands_cosmos3.sim.dataset import RolloutRecorder

ROBOTS = (
    "franka",
    *(
        name
        for name, robot in packaged_robots().items()
        if source_of(robot) is None or len(robot.limbs) == 1
    ),
)
"""Names of the robots that can be simulated."""
Progress = Callable[[float, float], None]
_START_M, _START_RAD = 0.02, 0.1


class Robot(SimulatedArm):
    """A simulated arm that policies can drive.

    ``"franka"`` is the same arm as ``"panda"``; a ``.toml`` file describes another one. ``task``
    says what two arms' scene is for: ``"lift_bar"`` (the default) or ``"hand_over"``, whose bar one
    hand can hold. Other arguments and errors: :class:`SimulatedArm`.
    """

    @typed()
    def __init__(
        self,
        name: str = "panda",
        control: ControlConfig | None = None,
        scene: Scene | None = None,
        arm_model: str | Path | None = None,
        plant: PlantErrors | None = None,
        task: str | None = None,
    ):
        self.name, spec = name, get_robot(_known_robot(name))
        scene = (
            Scene(arm=arm_model, robot=spec, bar=bar_for(task, spec)) if scene is None else scene
        )
        if scene.robot.name != spec.name:
            raise ConfigError(
                f"the scene was built around robot {scene.robot.name!r}, not {name!r}; give "
                "Scene(robot=...)."
            )
        super().__init__(control, scene, None, plant)

    def identify(self) -> Compensation:
        """Identify this robot's delay, payload and friction from a motion of 6 s from home; the
        robot itself stays as it is.

        The arm moves in free space: it passes through the table and the cubes, which a low hand
        would hit.

        ConfigError: It has several limbs.
        """
        limb, control = (
            self.scene.limb,
            replace(self.control, feed_forward="velocity", compensation=NO_COMPENSATION),
        )
        twin = SimulatedArm(control, self.scene, plant=self.plant)
        twin.model = _in_free_space(twin.model, limb)
        return identify(
            twin, twin.executor, self.scene.model, twin.servo.kp, twin.servo.damping, limb
        )

    @typed("policy", "duration", "control_frequency")
    def run_policy(
        self,
        robot_name: str | None = None,
        instruction: str = "",
        policy_provider: str = "cosmos3",
        policy_config: Mapping[str, Any] | None = None,
        duration: float = 15.0,
        control_frequency: float = 50.0,
        video: str | Path | None = None,
        *,
        film_layout: str = "full",
        policy: Policy | None = None,
        task: str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        layout: Layout | None = None,
        latency: float | Callable[[], float] = 0.0,
        realtime: bool = False,
        progress: Progress | None = None,
        on_tick: Callable[[Robot], bool | None] | None = None,
        recorder: RolloutRecorder | None = None,
        audience: RolloutListener | None = None,
    ) -> Rollout:
        """Run one episode in the closed loop.

        Args:
            robot_name: The policy's robot; None is this one.
            instruction: The policy's instruction; empty is the task's default.
            policy_config: Arguments of :class:`Cosmos3Policy`, e.g. ``{"embodiment": "droid",
                "backend": "scripted"}``.
            duration: Longest duration in simulated seconds; an episode ends when its task succeeds,
                or a replay's recording ends.
            control_frequency: Rate of the control loop [Hz]; it must divide the physics' 600 Hz, at
                which motor commands (MuJoCo's ``ctrl``) are written in any case.
            video: A film to write (.mp4).
            film_layout: ``"full"`` or ``"views"``, see :data:`strands_cosmos3.sim.film.LAYOUTS`.
            policy: A policy object instead of provider and config; the caller closes it. Other
                packages' policies are wrapped.
            task: ``"reach"``, ``"pick"``, ``"place"``, ``"stack"``, for two arms ``"lift_bar"`` or
                ``"hand_over"``, or None for no success criterion.
            seed: Seed of the scene, and of the policy's noise unless ``noise_seed`` is given.
            layout: Positions of the cubes, instead of random ones.
            latency: Simulated duration of an inference [s], or a callable that returns the next
                one's: the arm follows its current chunk meanwhile. 0 pauses the simulation for each
                inference. Not together with ``realtime``.
            realtime: Run no faster than wall-clock time, and accept each chunk when it arrives.
            progress: Called with simulated and total seconds.
            on_tick: Called after every tick with this robot, e.g. by a viewer; True ends the
                episode (``interrupted``).
            audience: Receives each chunk's plan and predicted video.

        Returns:
            The commanded and the achieved motion, and the outcome. Ctrl-C brings the arm to rest
            first (outcome ``interrupted``); a second one stops at once.

        Raises:
            ConfigError, UnknownNameError, InputError: Bad arguments; nothing moved and no file was
                made.
        """
        robot_name = self.name if robot_name is None else _known_robot(robot_name)
        if get_robot(robot_name).name != self.scene.robot.name:
            raise ConfigError(
                f"robot_name {robot_name!r} is another robot than this one, {self.name!r}; leave "
                "it out."
            )
        _require_arguments(on_tick, "on_tick", 1)
        _require_arguments(progress, "progress", 2)
        _require_members(policy, "policy", "get_actions_sync", "reset")
        _require_members(recorder, "recorder", "recording")
        _require_members(audience, "audience", "show_plan", "show_prediction")
        instruction, judge = self._judge(task, instruction)
        physics_steps_per_tick(control_frequency)
        if realtime and latency:
            raise ConfigError(
                f"latency={latency!r} is simulated, and realtime=True measures the real one; "
                "leave one out."
            )
        n_ticks = max(1, round(positive(duration, "duration") * control_frequency))
        owned = policy is None
        if policy is None:
            own = (
                {}
                if self.scene.robot.embodiment is None
                else {"embodiment": self.scene.robot.embodiment}
            )
            config = {"robot": robot_name, **own, **(policy_config or {})}
            options = PolicyOptions.of(config.get("options", {}))
            if options.arm.limits is None:
                options = with_options(options, {"limits": self.limits})
            policy = create_policy(policy_provider, **{**config, "options": options})
        try:
            recording = recording_of(policy)
            self.reset(seed, None if recording is None else self._start_of(recording), layout)
            if recording is not None:
                self._require_start(recording)
            policy.reset(seed if noise_seed is None else seed_number(noise_seed, "noise_seed"))
            with VideoRecorder(
                self.scene, video, control_frequency, instruction, film_layout, audience=audience
            ) as film:
                planner = planner_for(self, policy, instruction, film, control_frequency)
                loop = LoopConfig(
                    control_frequency, planner.replan_rows, None if realtime else latency
                )
                tick = None if on_tick is None else lambda: on_tick(self)
                episode = Episode(self, planner, judge, film, loop, realtime, tick)
                self._loop_counters = episode.loop.counters
                if recorder is None:
                    rollout = episode.run(n_ticks, seed, task, recording, progress)
                else:
                    with recorder.recording(self, film.observe, instruction) as keep:
                        rollout = keep(episode.run(n_ticks, seed, task, recording, progress))
            return (
                rollout
                if video is None
                else replace(rollout, video=Path(video).expanduser().absolute())
            )
        finally:
            if owned:
                policy.close()

    def _start_of(self, recording: LimbRecording) -> F64:
        """Angles [n] at which a recording begins, joined with the robot's limbs by name."""
        by_limb = recording.of_limbs(
            {limb.name: len(limb.joints) for limb in self.scene.robot.limbs}
        )
        return np.concatenate([one.q_start_rad for one in by_limb.values()])

    def _require_start(self, recording: LimbRecording) -> None:
        """Raise ConfigError unless the hands stand where a recording says; else it is another
        robot's, or damaged.
        """
        by_limb = recording.of_limbs(
            {limb.name: len(limb.joints) for limb in self.scene.robot.limbs}
        )
        for name, limb in self.scene.limbs.items():
            tool = recording.tool_frame(name)
            model, data, frame = self.scene.model, self.data, limb.limb.frame_called(tool.parent)
            site = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, frame)
            found, T = data.body(frame) if site < 0 else data.site(frame), np.eye(4)
            T[:3, :3], T[:3, 3] = found.xmat.reshape(3, 3), found.xpos
            error = (
                np.linalg.inv(by_limb[name].T_base_cosmos[0])
                @ np.linalg.inv(limb.T_world_base)
                @ T
                @ tool.T_parent_cosmos
            )
            away_m, turned = (
                np.linalg.norm(error[:3, 3]),
                np.arccos(np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1)),
            )
            if away_m > _START_M or turned > _START_RAD:
                raise ConfigError(
                    f"at the recording's first joint angles the {name} of "
                    f"{self.scene.robot.name!r} is {away_m * 1e3:.0f} mm "
                    f"and {np.rad2deg(turned):.0f} degrees from the recorded pose; replay it on "
                    "the robot that it is of."
                )

    def _judge(self, task: str | None, instruction: str) -> tuple[str, Judge | None]:
        """Return the instruction, by default the task's, and the task's judge."""
        if task is None:
            return instruction, None
        chosen = get_task(task)
        instruction = instruction or chosen.instruction
        return instruction, Judge(chosen, self.scene, parse_instruction(instruction))


def _in_free_space(model: mujoco.MjModel, limb: Limb) -> mujoco.MjModel:
    """A copy of a scene's model in which the arm passes through everything."""
    free = copy.copy(model)
    arm = free.body_rootid[free.geom_bodyid] == free.body_rootid[frame_body(free, limb)]
    free.geom_contype[arm] = free.geom_conaffinity[arm] = 0
    return free


def _known_robot(name: str) -> str:
    if not isinstance(name, str) or (
        aliases().get(name, name) not in ROBOTS and not name.lower().endswith(".toml")
    ):
        raise UnknownNameError("simulated robot", name, ROBOTS)
    return name


def _require_arguments(callback: Callable[..., Any] | None, name: str, n: int) -> None:
    """Refuse a callback that cannot be called with ``n`` arguments; of some built-in functions
    that is not known.
    """
    if callback is None:
        return
    try:
        inspect.signature(callback).bind(*range(n))
    except TypeError as error:
        raise InputError(
            f"{name} is called with {n} argument{'s'[: n > 1]}, which it does not take: {error}."
        ) from None
    except ValueError:
        pass


def _require_members(value: object, name: str, *members: str) -> None:
    """Check an object that other packages may make."""
    if missing := [
        member
        for member in members
        if value is not None and not callable(getattr(value, member, None))
    ]:
        raise InputError(f"{name} must have {', '.join(missing)}(), got {type(value).__name__}.")


__all__ = ["ALL_ERRORS", "ROBOTS", "Compensation", "ControlConfig", "PlantErrors", "Robot"]
