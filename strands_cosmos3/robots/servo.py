"""Feed-forward for MuJoCo's position actuators: references to ctrl.

Such an actuator produces ``kp (x - q) - kd qd``; ``actuators.py`` has the control of a target
``x``. To follow without lag, ``x`` must lead the reference by ``(kd + damping) / kp qd`` for the
velocity, and by ``(M qdd + bias - passive) / kp`` for everything else. The velocity mode
approximates M by each joint's own inertia at home, and takes springs and progressive damping at the
reference; the computed torque takes all of these of the present state. A :class:`Compensation` adds
what is known beyond the model: a delay, a payload, friction. An activation filter is inverted step
by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, instance_of, whole_number, within
from strands_cosmos3.errors import ActuatorGuardError, ConfigError
from strands_cosmos3.robots.actuators import position_servos, resists
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.model import data_at, frame_body, joint_ids, tool_in_body
from strands_cosmos3.robots.spec import Limb

__all__ = ["NO_COMPENSATION", "Compensation", "FeedForward", "JointServo", "Payload"]

FRICTION_SPEED_RAD_S = 0.02
"""Speed at which the compensated friction reaches 76 % (tanh): a resting reference has no
direction to push in.
"""
_ROUNDING_NM = 1e-9
_RATE_SLACK, _RANGE_SLACK_RAD = 1.001, 1e-6  # of references that the executor hands out
_LARGEST = {"delay_s": 0.1, "payload_kg": 3.0, "friction_nm": 10.0}


class FeedForward(StrEnum):
    """Feed-forward that is added to the reference."""

    NONE = "none"
    VELOCITY = "velocity"
    COMPUTED_TORQUE = "computed_torque"


@dataclass(frozen=True)
class Compensation:
    """Properties of an arm that its model lacks, to be compensated. The defaults are none.

    Args:
        delay_s: Time from a control to its effect, at most 0.1 s. References lead by it.
        payload_kg: Mass at the tool centre point, at most 3 kg. The servos carry its weight.
        friction_nm: Coulomb friction of each joint, one number or [n], at most 10 N m; added in the
            reference's direction.
        n_joints: Number n of joints; a Panda's by default.

    Raises:
        InputError: A value is not a finite number in its range.
    """

    delay_s: float = 0.0
    payload_kg: float = 0.0
    friction_nm: float | tuple[float, ...] = 0.0
    n_joints: int = len(PANDA.limbs[0].joints)

    def __post_init__(self) -> None:
        whole_number(self.n_joints, "n_joints", 1)
        for name, largest in _LARGEST.items():
            value: Any = getattr(self, name)
            by_joint = name == "friction_nm" and np.ndim(value) == 1
            array = within(value, name, 0.0, largest, (self.n_joints,) if by_joint else ())
            object.__setattr__(self, name, tuple(array.tolist()) if by_joint else float(array))

    def lead(self, q_rad: F64, qd_rad_s: F64, qdd_rad_s2: F64) -> tuple[F64, F64]:
        """Return angles and velocities [..., n] after the delay, by the present acceleration."""
        s = self.delay_s
        return q_rad + s * qd_rad_s + 0.5 * s * s * qdd_rad_s2, qd_rad_s + s * qdd_rad_s2

    def lead_within(
        self, references: tuple[F64, F64, F64], limits: JointLimits, dt_s: float, q_before_rad: F64
    ) -> tuple[F64, F64, NDArray[np.bool_]]:
        """Return :meth:`lead` inside the joints' range and velocity limit, and which of the M rows
        that has changed.

        Args:
            references: Angles, velocities and accelerations [M, n], ``dt_s`` apart.
            q_before_rad: [n] what was sent before the first row; the angles may not leave it faster
                than the limit either.
        """
        led_q, led_qd = self.lead(*references)
        q = np.clip(led_q, limits.q_min, limits.q_max)
        most = limits.velocity * (_RATE_SLACK * dt_s)
        fast = (np.abs(np.diff(q, axis=0, prepend=q_before_rad[None])) > most).any(axis=1)
        for row in range(int(fast.argmax()) if fast.any() else len(q), len(q)):
            before = q[row - 1] if row else q_before_rad
            q[row] = np.clip(q[row], before - most, before + most)
        moved = np.abs(q - led_q) > _RANGE_SLACK_RAD
        rate = np.diff(q, axis=0, prepend=q_before_rad[None]) / dt_s
        qd = np.clip(np.where(moved, rate, led_qd), -limits.velocity, limits.velocity)
        changed = moved | (np.abs(led_qd) > limits.velocity * _RATE_SLACK)
        return q, qd, np.asarray(changed.any(axis=1), dtype=np.bool_)


NO_COMPENSATION = Compensation()


class JointServo:
    """The position servos of a robot's limbs in a MuJoCo model.

    Args:
        model: The controller's model.
        compensation: What is known beyond it.
        limbs: The limbs; by default the Panda's arm.

    Raises:
        ConfigError: An actuator is not a position servo, the friction is of other joints, or
            several limbs have a payload.

    Attributes:
        law: What the actuators' controls mean.
        actuator_ids, q_address: [n] of each joint's actuator and position.
    """

    def __init__(
        self, model: mujoco.MjModel, compensation: Compensation = NO_COMPENSATION, *limbs: Limb
    ):
        self.model = model
        self.compensation = instance_of(compensation, Compensation, "compensation")
        limbs = limbs or PANDA.limbs
        self.n = sum(len(limb.joints) for limb in limbs)
        if np.size(compensation.friction_nm) not in (1, self.n):
            raise ConfigError(
                f"friction_nm must be one number or {self.n}, got "
                f"{np.size(compensation.friction_nm)}."
            )
        joints = joint_ids(model, (name for limb in limbs for name in limb.joints))
        self.actuator_ids = np.array(
            [model.actuator(name).id for limb in limbs for name in limb.actuators]
        )
        self.q_address = model.jnt_qposadr[joints]
        self._dof_address = model.jnt_dofadr[joints]
        self.law = position_servos(model, self.actuator_ids)
        self.kp: F64 = self.law.kp
        self._lead_s: F64 = self.law.lag_s(model.dof_damping[self._dof_address])
        home_rad = np.concatenate([limb.home_rad for limb in limbs])
        self.inertia: F64 = _joint_inertia(model, joints, home_rad)
        self._friction_nm: F64 = (
            model.dof_frictionloss[self._dof_address] + compensation.friction_nm
        )
        self._acceleration = np.zeros(model.nv)
        self._torque = np.zeros(model.nv)
        # MuJoCo counts this weight among the actuators' torques, and not among the passive ones
        self._carried = self._dof_address[model.jnt_actgravcomp[joints] > 0]
        damping = model.dof_damping[self._dof_address] + self.law.passive
        self._resistance = _Resistance(model, joints, damping) if resists(model) else None
        self._payload = None
        if compensation.payload_kg:
            limb, *further = limbs
            if further:
                raise ConfigError(
                    f"a payload is compensated for one limb, and this arm has {len(limbs)}; leave "
                    "payload_kg out."
                )
            self._payload = Payload(model, compensation.payload_kg, limb)

    @property
    def damping(self) -> F64:
        """[n] torque lost per speed, ``kd + damping``, in N m s/rad; the stiffness is ``kp``."""
        return self._lead_s * self.kp

    def hold(self, data: mujoco.MjData, q_rad: F64) -> None:
        """Set controls and activations so that the arm rests at angles [n]."""
        self.law.hold(data, self.no_feed_forward(q_rad))

    def load_torque(self, q_rad: F64, qd_rad_s: F64) -> F64:
        """Return the torques [M, n] along references [M, n] of the compensated payload's weight,
        and of friction: the model's own and the compensated one.
        """
        torque = self._friction_nm * np.tanh(qd_rad_s / FRICTION_SPEED_RAD_S)
        return torque if self._payload is None else torque + self._payload.torque(q_rad)

    def velocity_feed_forward(
        self, q_rad: F64, qd_rad_s: F64, qdd_rad_s2: F64, load_nm: F64 | float = 0.0
    ) -> F64:
        """Return targets [..., n] in rad, ``q + ((kd + damping) qd + inertia qdd + load) / kp``.

        ``inertia`` [n] in kg m2 is what each joint alone feels at home. It needs no state, so a
        block is computed at once. The load is added to that of springs and progressive damping.
        """
        torque = self.inertia * qdd_rad_s2 + load_nm
        if self._resistance is not None:
            torque = torque + self._resistance.torque(q_rad, qd_rad_s)
        return q_rad + self._lead_s * qd_rad_s + torque / self.kp

    def targets(self, q_rad: F64, qd_rad_s: F64, qdd_rad_s2: F64, load_nm: F64) -> F64:
        """Return targets [M, n] of M physics steps for references [M + 1, n], by
        :meth:`velocity_feed_forward`.

        The servo compares its target with the angle at the beginning of the step, so it receives
        that reference angle. The integrator is implicit in velocity, so it receives the reference
        velocity at the end of the step. The acceleration acts during the step. A filter's
        activation acts one step after its control, so its target is of a step later.
        """
        targets = self.velocity_feed_forward(q_rad[:-1], qd_rad_s[1:], qdd_rad_s2[:-1], load_nm)
        late = self.law.filtered & ~self.law.early
        if late.any():
            qd_next = qd_rad_s[1:] + self.model.opt.timestep * qdd_rad_s2[1:]
            later = self.velocity_feed_forward(q_rad[1:], qd_next, qdd_rad_s2[1:], load_nm)
            targets[:, late] = later[:, late]
        return targets

    def no_feed_forward(self, q_rad: F64, load_nm: F64 | float = 0.0) -> F64:
        """Return targets [..., n] in rad, ``q + load / kp``; the load is added to that of
        springs.
        """
        if self._resistance is not None:
            load_nm = load_nm + self._resistance.torque(q_rad, np.zeros_like(q_rad))
        return q_rad + load_nm / self.kp

    def computed_torque(
        self,
        data: mujoco.MjData,
        q_rad: F64,
        qd_rad_s: F64,
        qdd_rad_s2: F64,
        load_nm: F64 | float = 0.0,
    ) -> F64:
        """Return targets [n] in rad for one step. Call it between ``mj_step1`` and ``mj_step2``,
        with the dynamics of the present state.

        ``q_r + kd/kp qd_r + (M qdd_r + qfrc_bias - qfrc_passive + load) / kp``, less the weight
        that an actuator carries by itself (``actuatorgravcomp``).
        """
        dof = self._dof_address
        self._acceleration[dof] = qdd_rad_s2
        mujoco.mj_mulM(self.model, data, self._torque, self._acceleration)
        self._torque[self._carried] -= data.qfrc_gravcomp[self._carried]
        torque = self._torque[dof] + data.qfrc_bias[dof] - data.qfrc_passive[dof] + load_nm
        return q_rad + (self.law.kd * qd_rad_s + torque) / self.kp

    def controls(self, targets_rad: F64, activation: F64) -> tuple[F64, F64, int]:
        """Return ctrl [M, n] of targets [M, n] for M physics steps, inside the actuators' range.

        A filter's control goes beyond its target, so that the activation arrives there in one step.

        Args:
            activation: [n] the filters' activations before the first step.

        Returns:
            The controls, the activations [n] after the last step, and the number of steps in which
            a range clips a control.

        Raises:
            ActuatorGuardError: A target is not finite; MuJoCo would zero every control.
        """
        if not np.isfinite(targets_rad).all():
            raise ActuatorGuardError(
                f"control {targets_rad} is not finite; nothing was written to the actuators."
            )
        law = self.law
        asked = law.ctrl(targets_rad)
        ctrl = np.clip(asked, law.ctrl_min, law.ctrl_max)
        if law.filtered.any():
            for row, target in enumerate(asked):
                asked[row] = activation + (target - activation) / law.step_share
                ctrl[row] = np.clip(asked[row], law.ctrl_min, law.ctrl_max)
                activation = activation + (ctrl[row] - activation) * law.step_share
        clipped = np.abs(ctrl - asked) > _RANGE_SLACK_RAD * np.abs(law.ctrl_per_rad)
        return ctrl, activation, int(clipped.any(axis=1).sum())


@dataclass(eq=False)
class Payload:
    """A point mass at the tool centre point of an arm's model."""

    model: mujoco.MjModel
    mass_kg: float
    limb: Limb = PANDA.limbs[0]
    _data: mujoco.MjData = field(init=False)

    def __post_init__(self) -> None:
        self._data = mujoco.MjData(self.model)
        self._hand = frame_body(self.model, self.limb)
        self._tool_m = tool_in_body(self.model, self.limb)
        joints = joint_ids(self.model, self.limb.joints)
        self._q = self.model.jnt_qposadr[joints]
        self._dof = self.model.jnt_dofadr[joints]

    def torque(self, q_rad: F64, acceleration_m_s2: F64 | float = 0.0) -> F64:
        """Return the torques [M, n] that hold it at angles [M, n], or accelerate it [M, 3]: ``J'
        m (a - g)``.
        """
        force = self.mass_kg * (
            np.zeros((len(q_rad), 3)) + acceleration_m_s2 - self.model.opt.gravity
        )
        return np.stack([self._jacobian(q)[0].T @ f for q, f in zip(q_rad, force, strict=True)])

    def position_m(self, q_rad: F64) -> F64:
        """Return its positions [M, 3] in the world at angles [M, n]."""
        return np.stack([self._jacobian(q)[1] for q in q_rad])

    def _jacobian(self, q_rad: F64) -> tuple[F64, F64]:
        data = self._data
        jacobian = np.empty((3, self.model.nv))
        data.qpos[self._q] = q_rad
        mujoco.mj_kinematics(self.model, data)
        mujoco.mj_comPos(self.model, data)
        point = data.xpos[self._hand] + data.xmat[self._hand].reshape(3, 3) @ self._tool_m
        mujoco.mj_jac(self.model, data, jacobian, None, point, self._hand)
        return jacobian[:, self._dof], point


class _Resistance:
    """What springs, and damping beyond the joints' linear one, take from an arm, by MuJoCo."""

    def __init__(self, model: mujoco.MjModel, joints: list[int], linear: F64):
        self._model = model
        self._data = mujoco.MjData(model)
        self._q = model.jnt_qposadr[joints]
        self._dof = model.jnt_dofadr[joints]
        self._linear = linear  # [n] damping in N m s/rad that is led by velocity

    def torque(self, q_rad: F64, qd_rad_s: F64) -> F64:
        """Return the torques [..., n] against it at angles and velocities [..., n]."""
        states = zip(np.atleast_2d(q_rad), np.atleast_2d(qd_rad_s), strict=True)
        torque = np.stack([self._at(*state) for state in states]).reshape(q_rad.shape)
        return np.where(np.abs(torque) < _ROUNDING_NM, 0.0, torque)

    def _at(self, q_rad: F64, qd_rad_s: F64) -> F64:
        data = self._data
        data.qpos[self._q] = q_rad
        data.qvel[self._dof] = qd_rad_s
        for stage in _PASSIVE_STAGES:
            stage(self._model, data)
        return -(data.qfrc_spring + data.qfrc_damper)[self._dof] - self._linear * qd_rad_s


_PASSIVE_STAGES = (
    mujoco.mj_kinematics,
    mujoco.mj_comPos,
    mujoco.mj_tendon,
    mujoco.mj_transmission,
    mujoco.mj_fwdVelocity,
)
"""What MuJoCo computes for passive torques, without looking for contacts."""


def _joint_inertia(model: mujoco.MjModel, joints: list[int], home_rad: F64) -> F64:
    """Return the diagonal [n] of the mass matrix in kg m2 with the arm at home."""
    data = data_at(model, joints, home_rad)
    dofs = model.jnt_dofadr[joints]
    mujoco.mj_comPos(model, data)
    mujoco.mj_tendon(model, data)
    mujoco.mj_makeM(model, data)  # tendons' armature, too
    column = np.empty(model.nv)
    inertia = np.empty(len(dofs))
    for i, dof in enumerate(dofs):
        mujoco.mj_mulM(model, data, column, np.eye(model.nv)[dof])
        inertia[i] = column[dof]
    return inertia
