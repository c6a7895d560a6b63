"""The robot in its scene: it observes, asks a policy, executes with real dynamics, and reports what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, positive
from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.loop import LoopConfig
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.embodiments import PANDA_FINGER, PANDA_TENDON
from strands_cosmos3.errors import ActuatorGuardError, ConfigError, ControlError, UnknownNameError
from strands_cosmos3.instruction import parse_instruction
from strands_cosmos3.policy import Cosmos3Policy, Policy, create_policy
from strands_cosmos3.robots.panda import ARM_JOINTS, FINGER_JOINTS, HOME_Q, LIMITS, JointLimits
from strands_cosmos3.robots.servo import FeedForward, JointServo
from strands_cosmos3.sim.episode import Episode, physics_steps_per_tick, recording_of
from strands_cosmos3.sim.film import RolloutListener, VideoRecorder
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.sim.tasks import Judge, get_task
from strands_cosmos3.types import Observation, Rollout

if TYPE_CHECKING:
    from strands_cosmos3.sim.dataset import RolloutRecorder  # pyarrow is needed where something is recorded, not here

ROBOTS = ("panda", "franka")
Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class ControlConfig:
    """How references are followed.

    Args:
        limits: ``"fer"`` (Panda) or ``"fr3"``: velocity, acceleration and jerk. Angles are those of the Panda's model.
        derating: Factor in (0, 1] on velocity, acceleration and jerk.
        feed_forward: ``"velocity"``, ``"computed_torque"`` or ``"none"``.
    """

    limits: str = "fer"
    derating: float = 1.0
    feed_forward: str = "velocity"

    def joint_limits(self) -> JointLimits:
        """The limits in force.

        Raises:
            UnknownNameError: No such table.
        """
        if self.limits not in LIMITS:
            raise UnknownNameError("limits", self.limits, LIMITS)
        table, arm = LIMITS[self.limits], LIMITS["fer"]
        return JointLimits(
            np.maximum(table.q_min, arm.q_min),
            np.minimum(table.q_max, arm.q_max),
            table.velocity,
            table.acceleration,
            table.jerk,
            table.torque,
        ).derated(self.derating)


class Robot:
    """A simulated Panda on its table.

    Args:
        name: ``"panda"`` (``"franka"`` is the same arm).
        control: How references are followed.
        scene: The scene; None is three cubes and a bin around the arm.
        arm_model: The arm's model: None for the embedded one, the path of an ``.xml`` with the Franka's names, or
            ``"menagerie"`` (fetched over the network). A scene brings its own.

    Raises:
        UnknownNameError: No such robot or arm model.
        ConfigError, EnvironmentalError: The model cannot be used, or not be fetched.
    """

    def __init__(
        self,
        name: str = "panda",
        control: ControlConfig | None = None,
        scene: Scene | None = None,
        arm_model: str | Path | None = None,
    ):
        if name not in ROBOTS:
            raise UnknownNameError("robot", name, ROBOTS)
        self.name = name
        self.scene = Scene(arm=arm_model) if scene is None else scene
        self.data = mujoco.MjData(self.scene.model)
        self.control = ControlConfig() if control is None else control
        self.limits = self.control.joint_limits()
        self.servo = JointServo(self.scene.model)
        try:
            self._feed_forward = FeedForward(self.control.feed_forward)
        except ValueError:
            raise UnknownNameError("feed-forward", self.control.feed_forward, tuple(FeedForward)) from None
        self.dt_s = float(self.scene.model.opt.timestep)
        self.executor = Executor(self.limits, self.dt_s, HOME_Q)
        self._loop_counters: Mapping[str, int] = {}
        self.on_step: Callable[[F64, float], None] | None = None
        """Called after every physics step with the references at its end: angles [7] and open fraction."""
        self.reset(0)

    def reset(self, seed: int = 0, q_rad: F64 | None = None, layout: Layout | None = None) -> None:
        """Put the arm (at rest, at home or ``q_rad`` [7]) and the cubes (drawn with ``seed``, or ``layout``) in place."""
        layout = self.scene.sample_layout(np.random.default_rng(seed)) if layout is None else layout
        start = HOME_Q if q_rad is None else q_rad
        self.executor = Executor(self.limits, self.dt_s, start)
        self._loop_counters = {}
        self.scene.reset(self.data, layout, start)

    def counters(self) -> dict[str, int]:
        """Events of the present episode by name: the executor's and the loop's."""
        return {**self.executor.counters, **self._loop_counters}

    def now_s(self) -> float:
        """Simulated time."""
        return float(self.data.time)

    def joint_state(self) -> tuple[F64, F64, float]:
        """Measured angles [7], velocities [7] and the gripper's open fraction."""
        data, scene = self.data, self.scene
        fingers = float(np.mean(data.qpos[scene.finger_qpos]))
        return (
            data.qpos[scene.arm_qpos].copy(),
            data.qvel[scene.arm_dof].copy(),
            float(PANDA_FINGER.to_fraction(fingers)),
        )

    def observe(self, images: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The flat observation that strands-robots gives: joint names, ``<joint>.vel``, and camera frames (uint8)."""
        data, scene = self.data, self.scene
        names = (*ARM_JOINTS, *FINGER_JOINTS)
        q = np.concatenate((data.qpos[scene.arm_qpos], data.qpos[scene.finger_qpos]))
        qd = np.concatenate((data.qvel[scene.arm_dof], data.qvel[scene.finger_dof]))
        flat: dict[str, Any] = {name: float(value) for name, value in zip(names, q, strict=True)}
        flat |= {f"{name}.vel": float(value) for name, value in zip(names, qd, strict=True)}
        return flat | dict(images or {})

    def observation(self, images: Mapping[str, Any] | None = None) -> Observation:
        """The same, typed and with what only a simulator knows."""
        q, qd, gripper = self.joint_state()
        now_s, motion_s = float(self.data.time), self.executor.motion_s
        return Observation(q, gripper, images or {}, qd, now_s, motion_s, self._privileged())

    def _privileged(self) -> dict[str, F64]:
        scene, data = self.scene, self.data
        tcp, twist = np.eye(4), np.zeros(6)
        tcp[:3, :3], tcp[:3, 3] = data.site_xmat[scene.tcp_site].reshape(3, 3), data.site_xpos[scene.tcp_site]
        mujoco.mj_objectVelocity(scene.model, data, mujoco.mjtObj.mjOBJ_SITE, scene.tcp_site, twist, 0)
        cubes = {name: scene.T_world_body(data, name) for name in scene.cubes}
        edge = next(iter(scene.cubes.values())).edge_m
        return {
            **cubes,
            "tcp": tcp,
            "tcp_twist": np.concatenate((twist[3:], twist[:3])),  # MuJoCo puts rotation first
            "edge_m": np.array(edge),
            "bin": np.array([*scene.bin.center_m, scene.bin.height_m]),
        }

    def run_policy(
        self,
        robot_name: str = "panda",
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
        layout: Layout | None = None,
        latency: float = 0.0,
        realtime: bool = False,
        progress: Progress | None = None,
        on_tick: Callable[[Robot], bool | None] | None = None,
        recorder: RolloutRecorder | None = None,
        audience: RolloutListener | None = None,
    ) -> Rollout:
        """Run one episode in the closed loop.

        Args:
            robot_name: This robot's name.
            instruction: What the policy is told; empty takes the task's own.
            policy_provider: ``"cosmos3"``.
            policy_config: Arguments of :class:`Cosmos3Policy`, e.g. ``{"embodiment": "droid", "backend": "scripted"}``.
            duration: Longest duration in simulated seconds; a task ends when it succeeds, a replay with its recording.
            control_frequency: Rate of observation, state machine and counters [Hz]; it must divide 600. ctrl is written
                at every physics step.
            video: A film to write (.mp4).
            film_layout: ``"full"`` or ``"views"``, see :data:`strands_cosmos3.sim.film.LAYOUTS`.
            policy: A policy object instead of provider and config; it is not closed. Foreign ones are adapted.
            task: ``"reach"``, ``"pick"``, ``"place"``, ``"stack"``, or None for nothing to judge.
            seed: Of the scene and of the policy.
            layout: Where the cubes lie, instead of a drawn layout.
            latency: What inference takes in simulated seconds: the arm goes on with the present chunk meanwhile, and the next
                one is joined that much later. 0 lets the simulation wait for each inference.
            realtime: Run no faster than the clock on the wall, and take up each chunk when it is there: as a real arm would.
            progress: Called with simulated and total seconds.
            on_tick: Called after every tick with this robot, e.g. by a viewer; True ends the episode (``interrupted``).
            recorder: Puts the episode into a dataset.
            audience: Is shown each chunk's plan, and the world that was predicted with it.

        Returns:
            What was commanded, what was achieved, how it ended. Ctrl-C brings the arm to rest first (outcome
            ``interrupted``); a second one stops at once.

        Raises:
            ConfigError, UnknownNameError, InputError: Bad arguments; nothing moved and no file was made.
        """
        if robot_name not in ROBOTS:
            raise UnknownNameError("robot", robot_name, ROBOTS)
        chosen = None if task is None else get_task(task)
        instruction = instruction or ("" if chosen is None else chosen.instruction)
        judge = None if chosen is None else Judge(chosen, self.scene, parse_instruction(instruction))
        physics_steps_per_tick(control_frequency)
        if realtime and latency:
            raise ConfigError(f"latency={latency:g} is simulated, and realtime=True takes inference's own; leave one out.")
        n_ticks = max(1, round(positive(duration, "duration") * control_frequency))
        config = {"robot": robot_name, "limits": self.limits, **(policy_config or {})}
        owned = policy is None
        policy = create_policy(policy_provider, **config) if policy is None else policy
        try:
            recording = recording_of(policy)
            self.reset(seed, None if recording is None else recording.q_start_rad, layout)
            policy.reset(seed)
            if not isinstance(policy, Cosmos3Policy):
                policy.set_robot_state_keys([*ARM_JOINTS, FINGER_JOINTS[0]])
                policy.set_control_frequency(control_frequency)
            with VideoRecorder(self.scene, video, control_frequency, instruction, film_layout, audience=audience) as film:
                rows = policy.replan_rows if isinstance(policy, Cosmos3Policy) else policy.actions_per_step
                loop = LoopConfig(control_frequency, rows, None if realtime else latency)
                episode = Episode(self, policy, instruction, judge, film, loop, realtime, on_tick)
                self._loop_counters = episode.loop.counters
                if recorder is None:
                    return episode.run(n_ticks, seed, task, recording, progress)
                with recorder.recording(self, film.observe, instruction) as keep:
                    return keep(episode.run(n_ticks, seed, task, recording, progress))
        finally:
            if owned:
                policy.close()

    def execute(self, block: ReferenceBlock, before: JointState) -> tuple[F64, F64]:
        """Follow references for as many physics steps, writing ctrl at each.

        Args:
            block: The references at the ends of the steps.
            before: The reference at the beginning of the first.

        Returns:
            Measured angles [M, 7] and open fractions [M] after each step.

        Raises:
            ActuatorGuardError: A reference is not finite; none of the block was written.
            ControlError: The physics diverged.
        """
        scene, data, model = self.scene, self.data, self.scene.model
        references = (*(before.q_rad, before.qd_rad_s, before.qdd_rad_s2), block.q_rad, block.qd_rad_s, block.qdd_rad_s2)
        if not all(np.isfinite(values).all() for values in (*references, block.gripper)):
            raise ActuatorGuardError("a reference is not finite; nothing was written to the actuators.")
        fingers = PANDA_TENDON.from_fraction(block.gripper)
        until_s = data.time + len(block) * self.dt_s
        arm_ctrl = self._arm_ctrl(block, before)
        q, finger_q = np.empty((len(block), 7)), np.empty(len(block))
        for k in range(len(block)):
            if arm_ctrl is None:
                mujoco.mj_step1(model, data)
                arm = self.servo.computed_torque(data, before.q_rad, before.qd_rad_s, before.qdd_rad_s2)
                data.ctrl[scene.arm_actuators], data.ctrl[scene.gripper_actuator] = arm, fingers[k]
                mujoco.mj_step2(model, data)
                before = JointState(block.q_rad[k], block.qd_rad_s[k], block.qdd_rad_s2[k])
            else:
                data.ctrl[scene.arm_actuators], data.ctrl[scene.gripper_actuator] = arm_ctrl[k], fingers[k]
                mujoco.mj_step(model, data)
            q[k] = data.qpos[scene.arm_qpos]
            finger_q[k] = data.qpos[scene.finger_qpos[0]]
            if self.on_step is not None:
                self.on_step(block.q_rad[k], float(block.gripper[k]))
        if abs(data.time - until_s) > self.dt_s / 2:  # MuJoCo resets a state that is no longer finite, and its clock
            raise ControlError("the physics diverged and was reset by MuJoCo; reset the robot before it moves again.")
        return q, PANDA_FINGER.to_fraction(finger_q)

    def _arm_ctrl(self, block: ReferenceBlock, before: JointState) -> F64 | None:
        """[M, 7] controls known in advance, or None where they depend on the state at each step.

        A servo compares ctrl with the angle at the step's beginning, so it is given the angle of that moment; the
        integrator is implicit in velocity, so it is given the velocity at the step's end.
        """
        if self._feed_forward is FeedForward.COMPUTED_TORQUE:
            return None
        q_rad = np.concatenate((before.q_rad[None], block.q_rad[:-1]))
        if self._feed_forward is FeedForward.NONE:
            return self.servo.no_feed_forward(q_rad)
        return self.servo.velocity_feed_forward(q_rad, block.qd_rad_s)
