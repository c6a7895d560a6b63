"""Identify an arm's delay, payload and friction from a short motion, for
:class:`~strands_cosmos3.robots.servo.Compensation`.

Stiff servos follow ``K (q_r(t - delay) - q) + D (qd_r(t - delay) - qd)`` as torque. What the
controller's model does not explain of it is fitted by the payload's weight and inertia and by
friction; heavier links and rotors are fitted too, so that they are not taken for these. Both sides
pass the same low-pass filter; the delay is the one that leaves the smallest residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from scipy import interpolate  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.checks import F64
from strands_cosmos3.control.executor import Executor, ExecutorState
from strands_cosmos3.control.loop import Arm
from strands_cosmos3.errors import ControlError, InputError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.model import joint_ids
from strands_cosmos3.robots.servo import FRICTION_SPEED_RAD_S, Compensation, Payload
from strands_cosmos3.robots.spec import Limb
from strands_cosmos3.types import JointTrajectory

_PANDA = PANDA.limbs[0]
SECONDS = 6.0
SWAY_RAD = 0.2
_ROW_S = 1 / 15
_SAMPLE_HZ, _FIT_HZ = 500.0, 50.0
_CUTOFF_HZ = 3.0
_DELAYS_S = np.arange(0.0, 0.1001, 0.005)
_REFINE_S = (0.005, 0.001)
_MARGIN_S = 0.3  # at both ends, where the filter starts and no delayed reference exists


def sway(q_start_rad: F64, limits: JointLimits) -> JointTrajectory:
    """Return the motion [rows, n] that :func:`identify` makes: each joint sways by up to 0.2 rad at
    its own rate, for 6 s.

    Where a joint's range leaves less room, it sways less.
    """
    t_s: F64 = _ROW_S * np.arange(1.0, round(SECONDS / _ROW_S) + 1)
    fade = np.minimum(1.0, np.minimum(t_s, SECONDS - t_s))
    room = np.clip(
        np.minimum(limits.q_max - q_start_rad, q_start_rad - limits.q_min) * 0.9, 0.0, SWAY_RAD
    )
    rate_hz = np.linspace(0.45, 0.75, len(q_start_rad))
    return JointTrajectory(
        q_start_rad + room * fade[:, None] * np.sin(2 * np.pi * rate_hz * t_s[:, None]), t_s
    )


def identify(
    arm: Arm,
    executor: Executor,
    model: mujoco.MjModel,
    stiffness: F64,
    damping: F64,
    limb: Limb = _PANDA,
) -> Compensation:
    """Move an arm from where it rests, and identify what its controller should compensate.

    It moves by up to 0.2 rad for 6 s, longer within tight limits. It must follow references with
    velocity feed-forward and without compensation; nothing may touch it.

    Args:
        arm, executor: The arm, at rest, and its executor.
        model: The controller's model.
        stiffness, damping: [n] torque per error of the arm's servos, in N m/rad and N m s/rad; for
            MuJoCo's servos ``JointServo.kp`` and ``JointServo.damping``.
        limb: The arm's limb; by default a Panda's.

    Raises:
        ControlError: The arm moved too little to tell, or as :meth:`Executor.accept` and
            :meth:`Arm.execute`.
    """
    executor.accept(sway(executor.reference.q_rad, executor.limits))
    steps = max(1, round(1.0 / (_SAMPLE_HZ * arm.dt_s)))
    rows: list[tuple[F64, F64]] = []
    while executor.state is ExecutorState.RUNNING or executor.reference.qd_rad_s.any():
        before = executor.reference
        block = executor.advance(steps)
        arm.execute(block, before)
        rows.append((block.q_rad[-1], arm.joint_state()[0]))
    q_ref, q = (np.stack(column) for column in zip(*rows, strict=True))
    return fit(q_ref, q, steps * arm.dt_s, model, stiffness, damping, limb)


def fit(
    q_ref_rad: F64,
    q_rad: F64,
    dt_s: float,
    model: mujoco.MjModel,
    stiffness: F64,
    damping: F64,
    limb: Limb = _PANDA,
) -> Compensation:
    """Fit a :class:`Compensation` to the angles [N, n] of references and measurements, ``dt_s``
    apart; as :func:`identify`.

    Raises:
        ControlError: The joints hardly moved, the record is shorter than a second, or the fit is
            beyond a Compensation's range.
    """
    K, D, each = stiffness, damping, np.eye(q_rad.shape[1])
    unit = Payload(model, 1.0, limb)
    if len(q_rad) * dt_s < 1.0 or np.ptp(q_ref_rad, axis=0).max() < SWAY_RAD / 4:
        raise ControlError(
            "the arm moved too little to identify anything; record a second "
            "or more of a moving arm."
        )
    all_s: F64 = np.arange(float(len(q_rad))) * dt_s
    t_s = np.arange(_MARGIN_S, all_s[-1] - _MARGIN_S, 1.0 / _FIT_HZ)
    reference, measured = (_spline(all_s, _smooth(values, dt_s)) for values in (q_ref_rad, q_rad))
    q, qd, qdd = (measured(t_s, order) for order in range(3))
    nominal, heavier = _dynamics(model, limb, q, qd, qdd)
    acceleration = _spline(t_s, unit.position_m(q))(t_s, 2)
    friction = _smooth(np.tanh(qd / FRICTION_SPEED_RAD_S), 1.0 / _FIT_HZ)[..., None] * each
    rotors = qdd[..., None] * each
    columns = np.concatenate(
        (unit.torque(q, acceleration)[..., None], friction, heavier[..., None], rotors), axis=2
    )
    A = (columns / K[:, None]).reshape(-1, columns.shape[2])

    def solve(delay_s: float) -> tuple[float, F64]:
        late_s = t_s - delay_s
        b = ((K * (reference(late_s) - q) + D * (reference(late_s, 1) - qd) - nominal) / K).ravel()
        x = np.linalg.lstsq(A, b, rcond=None)[0].astype(np.float64)
        return float(np.sum((A @ x - b) ** 2)), x

    delay_s = float(min(_DELAYS_S, key=lambda delay_s: solve(float(delay_s))[0]))
    for step_s in _REFINE_S:  # the residual is nearly a parabola
        before, at, after = (solve(delay_s + k * step_s)[0] for k in (-1, 0, 1))
        delay_s += step_s * (before - after) / (2 * (before - 2 * at + after))
    delay_s = float(np.clip(delay_s, 0.0, _DELAYS_S[-1]))
    payload_kg, *friction_nm = np.maximum(solve(delay_s)[1][: 1 + q.shape[1]], 0.0)
    try:
        return Compensation(delay_s, float(payload_kg), tuple(map(float, friction_nm)), q.shape[1])
    except InputError as error:
        raise ControlError(
            f"the motion fits a payload of {payload_kg:.3g} kg and friction of at most "
            f"{max(friction_nm):.3g} N m, which is "
            f"beyond what is compensated ({error}) The arm may have touched something, the "
            "model's masses may be wrong, or the "
            "payload cannot be told from them; move it in free space, or state what is known, "
            "Compensation(payload_kg=...) or "
            "--compensate known, or compensate nothing."
        ) from None


def _smooth(values: F64, dt_s: float) -> F64:
    # a second to import, which only an identification needs
    from scipy import signal  # pyright: ignore[reportMissingTypeStubs]

    scipy_signal: Any = signal
    return scipy_signal.filtfilt(*scipy_signal.butter(2, _CUTOFF_HZ, fs=1.0 / dt_s), values, axis=0)


def _spline(t_s: F64, values: F64) -> Callable[..., F64]:
    """Return a function of time and of the derivative's order."""
    spline: Any = interpolate.CubicSpline(t_s, values)
    return spline


def _dynamics(
    model: mujoco.MjModel, limb: Limb, q_rad: F64, qd_rad_s: F64, qdd_rad_s2: F64
) -> tuple[F64, F64]:
    """Torques [N, n] of the model's motion without damping and with its weight carried, and what
    the links alone add.
    """
    data = mujoco.MjData(model)
    joints = joint_ids(model, limb.joints)
    addresses = model.jnt_qposadr[joints]
    dof = model.jnt_dofadr[joints]
    torque = np.zeros(model.nv)
    links = np.empty((2, *q_rad.shape))  # in motion, and at rest
    for k, (q, *motion) in enumerate(zip(q_rad, qd_rad_s, qdd_rad_s2, strict=True)):
        data.qpos[addresses] = q
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        for row, (qd, qdd) in zip(links[:, k], (motion, (0.0, 0.0)), strict=True):
            data.qvel[dof] = qd
            data.qacc[dof] = qdd
            mujoco.mj_comVel(model, data)
            mujoco.mj_rne(model, data, 1, torque)
            row[:] = torque[dof]
    return links[0] - links[1] + model.dof_armature[dof] * qdd_rad_s2, links[0]
