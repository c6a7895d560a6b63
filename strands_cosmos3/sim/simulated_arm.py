"""The simulated arm: its state, its observations, and references followed with real dynamics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, known_name, of_grippers, seed_number, typed_fields
from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.loop import LoopConfig
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.errors import (
    ActuatorGuardError,
    ConfigError,
    ControlError,
)
from strands_cosmos3.robots.drive_check import require_following
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import all_limits, is_franka
from strands_cosmos3.robots.model import chain_to_body
from strands_cosmos3.robots.panda import LIMITS
from strands_cosmos3.robots.servo import NO_COMPENSATION, Compensation, FeedForward, JointServo
from strands_cosmos3.sim.plant import PlantErrors
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import Observation

_PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION


@dataclass(frozen=True)
class ControlConfig:
    """How references are followed."""

    # the robot's own; or "fer" (Panda) or "fr3" for a Franka's kinematics, within a Panda's ranges
    limits: str | None = None
    derating: float = 1.0  # factor in (0, 1] on velocity, acceleration and jerk
    feed_forward: str = "velocity"  # or "computed_torque" or "none"
    compensation: Compensation = NO_COMPENSATION  # of a known delay, payload and friction
    strict: bool = False  # refuse limits that are assumed
    # how far the hand may be behind, see LoopConfig
    following_m: float = LoopConfig.following_m
    following_rad: float = LoopConfig.following_rad

    def __post_init__(self) -> None:
        typed_fields(self)

    def joint_limits(self) -> JointLimits:
        """Return a Panda's limits in force; UnknownNameError if there is no such table."""
        name = "fer" if self.limits is None else self.limits
        table = LIMITS[known_name(name, "limits", LIMITS)]
        arm = LIMITS["fer"]
        q_min = np.maximum(table.q_min, arm.q_min)
        q_max = np.minimum(table.q_max, arm.q_max)
        return replace(table, q_min=q_min, q_max=q_max).derated(self.derating)


@dataclass(frozen=True)
class SimulatedArmOptions:
    """How the simulated arm of a session is built and controlled.

    Args:
        plant: Errors of the arm that its controller does not know of.
        model: Another model of the arm, as for :class:`SimulatedArm`.
        compensate: Whether the delay, payload and friction of ``plant`` are compensated by their
            true values (``known``), or by those ``identified`` from a motion of 6 s.
    """

    control: ControlConfig = field(default_factory=ControlConfig)
    plant: PlantErrors | None = None
    model: str | Path | None = None
    compensate: Literal["none", "known", "identified"] = "none"


class SimulatedArm(Restorable):
    """A simulated arm in its scene (a :class:`~strands_cosmos3.control.loop.Arm`).

    Args:
        plant: Errors of the simulated arm that its controller does not know of; None is the scene's
            model itself.

    Attributes:
        model: The model that is stepped; the controller's is the scene's.

    Raises:
        UnknownNameError: No such limits or feed-forward.
        ConfigError: The limits are another arm's, or assumed where ``strict`` refuses that; or a
            robot that is not of this package does not move as commanded.
    """

    STATE = ("_seed", "_ctrl_under_way", "_led_q_rad", "_before_step", "_activation")
    PARTS = ("executor",)

    def __init__(
        self,
        scene: Scene,
        control: ControlConfig | None = None,
        plant: PlantErrors | None = None,
    ):
        require_following(scene.robot, scene.arm)
        self.scene = scene
        self.plant = plant
        limbs = scene.robot.limbs
        self.model = scene.model if plant is None else plant.apply(scene.model, *limbs)
        self.data = mujoco.MjData(self.model)
        # the controller's view of it
        self._nominal = self.data if plant is None else mujoco.MjData(scene.model)
        self._seed = 0
        self._ctrl_under_way: deque[F64] = deque()
        self._led_q_rad: F64 | None = None  # angles sent last, if a delay is led
        self._activation: F64  # of the actuators' filters, by the controls sent so far
        self._before_step: F64 | None = None  # physics before the last step; None after a reset
        self.control = ControlConfig() if control is None else control
        self.limits = self._joint_limits()
        if self.control.strict and self.limits.assumed:
            raise ConfigError(
                f"some limits of {scene.robot.name!r} are assumed, which strict refuses; "
                "state all of them in the robot's "
                "limits, with their source, or leave strict out."
            )
        self.servo = JointServo(scene.model, self.control.compensation, *limbs)
        self._feed_forward = FeedForward(
            known_name(self.control.feed_forward, "feed-forward", tuple(FeedForward))
        )
        self.dt_s = float(scene.model.opt.timestep)
        self.on_step: Callable[[F64, Any], None] | None = None
        """Called after every physics step with the references at its end: angles [n] and open
        fraction, or [G].
        """
        self.reset(0)

    def _joint_limits(self) -> JointLimits:
        """The robot's own limits, or the table that the control names."""
        model = self.scene.model
        table = self.control.joint_limits()
        if self.control.limits is None:
            return all_limits(model, self.scene.robot).derated(self.control.derating)
        limb = self.scene.only.limb
        if not is_franka(model, [model.joint(name).id for name in limb.joints]):
            raise ConfigError(
                f"limits {self.control.limits!r} are a Franka's, and {self.scene.robot.name!r} is "
                "none; leave them out."
            )
        chain = chain_to_body(model, limb.frame, limb.joints)
        return replace(table, hands=tuple(replace(hand, chain=chain) for hand in table.hands))

    def reset(self, seed: int = 0, q_rad: F64 | None = None, layout: Layout | None = None) -> None:
        """Place the arm at rest (at ``q_rad`` [n], by default at home) and the resting
        bodies (at ``layout``, by default random).
        """
        if layout is None:
            layout = self.scene.sample_layout(np.random.default_rng(seed_number(seed)))
        start = self.scene.robot.home_rad if q_rad is None else q_rad
        grippers_open = of_grippers(np.ones(len(self.scene.limbs)))
        self.executor = Executor(self.limits, self.dt_s, start, grippers_open)
        self.scene.reset(self.data, layout, start)
        self._seed = seed
        steps = 0 if self.plant is None else self.plant.delay_steps(self.dt_s)
        self._ctrl_under_way = deque([self.data.ctrl.copy() for _ in range(steps)])
        self._led_q_rad = self._before_step = None
        self._activation = self.data.ctrl[self.scene.arm_actuators].copy()

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state: physics, delayed controls and executor."""
        return super().snapshot() | {"physics": self._physics()}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot of this arm, exact to the bit.

        What MuJoCo derives from a state, such as poses and contact forces, is that of the beginning
        of the last physics step; so this step is repeated.
        """
        super().restore(state)
        before = self._before_step
        now = state["physics"]
        if before is None:
            mujoco.mj_setState(self.scene.model, self.data, now, _PHYSICS)
            self.data.qacc_warmstart[:] = 0.0
            mujoco.mj_forward(self.scene.model, self.data)
        else:
            mujoco.mj_setState(self.model, self.data, before, _PHYSICS)
            mujoco.mj_step(self.model, self.data)
        mujoco.mj_setState(self.model, self.data, now, _PHYSICS)

    def _physics(self) -> F64:
        state = np.empty(mujoco.mj_stateSize(self.model, _PHYSICS))
        mujoco.mj_getState(self.model, self.data, state, _PHYSICS)
        return state

    def counters(self) -> dict[str, int]:
        """Events of the current episode by name."""
        return dict(self.executor.counters)

    def now_s(self) -> float:
        """Simulated time in seconds."""
        return float(self.data.time)

    def joint_state(self) -> tuple[F64, F64, float | F64]:
        """Measured angles [n], velocities [n] and the gripper's open fraction, or those [G] of
        several.
        """
        data = self.data
        scene = self.scene
        opening = [
            limb.gripper.opening.to_fraction(float(np.mean(data.qpos[limb.finger_qpos])))
            for limb in scene.limbs.values()
        ]
        return self._measured_q(), data.qvel[scene.arm_dof].copy(), of_grippers(np.array(opening))

    def _measured_q(self) -> F64:
        q_rad = self.data.qpos[self.scene.arm_qpos].copy()
        if self.plant is not None:
            q_rad += self.plant.noise_rad(self._seed, round(self.data.time / self.dt_s), len(q_rad))
        return q_rad

    def observe(self, images: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Flat observation as in strands-robots: joint names, ``<joint>.vel``, and camera frames
        (uint8).
        """
        data = self.data
        scene = self.scene
        fingers = (joint for limb in scene.limbs.values() for joint in limb.gripper.joints)
        names = (*scene.robot.joints, *fingers)
        q = np.concatenate((self._measured_q(), data.qpos[scene.finger_qpos]))
        qd = np.concatenate((data.qvel[scene.arm_dof], data.qvel[scene.finger_dof]))
        speeds = zip((f"{name}.vel" for name in names), qd.tolist(), strict=True)
        return {**dict(zip(names, q.tolist(), strict=True)), **dict(speeds), **(images or {})}

    def observation(self, images: Mapping[str, Any] | None = None) -> Observation:
        """Typed observation, with the simulator's ground truth as ``privileged``."""
        q, qd, gripper = self.joint_state()
        now_s = self.now_s()
        motion_s = self.executor.motion_s
        return Observation(
            q, gripper, images or {}, qd, now_s, motion_s, self.scene.privileged(self.data)
        )

    def execute(self, block: ReferenceBlock, before: JointState) -> tuple[F64, F64]:
        """Follow references at the end of each of M physics steps; ``before`` is the one at the
        beginning of the first.

        Returns the true angles [M, n] and open fractions [M] (or [M, G]) after each step.

        Raises:
            ActuatorGuardError, ControlError: A reference is not finite (nothing was written); the
                physics diverged.
        """
        scene = self.scene
        data = self.data
        model = self.model
        references = (
            np.concatenate((before.q_rad[None], block.q_rad)),
            np.concatenate((before.qd_rad_s[None], block.qd_rad_s)),
            np.concatenate((before.qdd_rad_s2[None], block.qdd_rad_s2)),
        )
        if not all(np.isfinite(values).all() for values in (*references, block.gripper)):
            raise ActuatorGuardError(
                "a reference is not finite; nothing was written to the actuators."
            )
        limbs = list(scene.limbs.values())
        n = len(block)
        openings = block.gripper.reshape(n, len(limbs))
        fingers = np.empty_like(openings)
        for i, limb in enumerate(limbs):
            fingers[:, i] = limb.gripper.command.from_fraction(openings[:, i])
        first_finger = [limb.finger_qpos[0] for limb in limbs]
        until_s = data.time + n * self.dt_s
        q_rad, qd_rad_s = self._led(references)
        qdd_rad_s2 = references[2]
        load_nm = self.servo.load_torque(q_rad[:-1], qd_rad_s[1:])
        arm_targets = self._arm_targets(q_rad, qd_rad_s, qdd_rad_s2, load_nm)
        arm_ctrl = None if arm_targets is None else self._controls(arm_targets)
        ctrl = np.repeat(data.ctrl[None], n, axis=0)
        ctrl[:, scene.gripper_actuators] = fingers
        if arm_ctrl is not None:
            ctrl[:, scene.arm_actuators] = arm_ctrl
        step = mujoco.mj_step if arm_ctrl is not None else mujoco.mj_step2
        qpos = np.empty((n, model.nq))
        # of MuJoCo's memory, which stays where it is
        applied, measured = data.ctrl, data.qpos
        for k in range(n):
            if arm_ctrl is None:
                mujoco.mj_step1(model, data)
                target = self.servo.computed_torque(
                    self._nominal_dynamics(), q_rad[k], qd_rad_s[k], qdd_rad_s2[k], load_nm[k]
                )
                ctrl[k, scene.arm_actuators] = self._controls(target[None])[0]
            self._ctrl_under_way.append(ctrl[k])
            applied[:] = self._ctrl_under_way.popleft()  # of a delay ago
            if k == n - 1:
                self._before_step = self._physics()
            step(model, data)
            qpos[k] = measured
            if self.on_step is not None:
                self.on_step(block.q_rad[k], block.gripper[k])
        # MuJoCo resets a state that is not finite, and its clock
        if abs(data.time - until_s) > self.dt_s / 2:
            raise ControlError(
                "the physics diverged and was reset by MuJoCo; reset the robot "
                "before it moves again."
            )
        finger_q = qpos[:, first_finger]
        for i, limb in enumerate(limbs):
            finger_q[:, i] = limb.gripper.opening.to_fraction(finger_q[:, i])
        return qpos[:, scene.arm_qpos], of_grippers(finger_q)

    def _led(self, references: tuple[F64, F64, F64]) -> tuple[F64, F64]:
        """Lead references [M, n] by the known delay, inside range and velocity limit, and count
        the rows that this changes.
        """
        compensation = self.servo.compensation
        if compensation.delay_s == 0:
            return references[:2]
        before = (
            compensation.lead(*references)[0][0] if self._led_q_rad is None else self._led_q_rad
        )
        led_q, led_qd, clipped = compensation.lead_within(
            references, self.limits, self.dt_s, before
        )
        self._led_q_rad = led_q[-2]  # the next block begins with the last one
        if clipped[1:].any():
            self.executor.counters["lead_clipped"] += int(clipped[1:].sum())
        return led_q, led_qd

    def _nominal_dynamics(self) -> mujoco.MjData:
        """Return the dynamics of the present state by the controller's model."""
        if self._nominal is not self.data:
            self._nominal.qpos[:] = self.data.qpos
            self._nominal.qvel[:] = self.data.qvel
            mujoco.mj_step1(self.scene.model, self._nominal)
        return self._nominal

    def _controls(self, targets_rad: F64) -> F64:
        """Return the controls [M, n] of the servos' targets [M, n], and count those clipped."""
        ctrl, self._activation, n_clipped = self.servo.controls(targets_rad, self._activation)
        if n_clipped:
            self.executor.counters["ctrl_clipped"] += n_clipped
        return ctrl

    def _arm_targets(self, q_rad: F64, qd_rad_s: F64, qdd_rad_s2: F64, load_nm: F64) -> F64 | None:
        """Return the servos' targets [M, n] for references [M + 1, n], or None if they depend on
        the state at each step.
        """
        if self._feed_forward is FeedForward.COMPUTED_TORQUE:
            return None
        if self._feed_forward is FeedForward.NONE:
            return self.servo.no_feed_forward(q_rad[:-1], load_nm)
        return self.servo.targets(q_rad, qd_rad_s, qdd_rad_s2, load_nm)
