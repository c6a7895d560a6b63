"""What a control means for a MuJoCo actuator of a joint, and which actuators are position servos.

An actuator of gear ``g`` turns its control ``u`` (or, behind a filter, its activation) into the
joint torque ``g (k u + b0 + b1 g q + b2 g qd)``. With ``b1 < 0`` that is a position servo: ``kp (x
- q) - kd qd`` with ``kp = -g^2 b1``, ``kd = -g^2 b2`` and the target angle ``x = (g k u + g b0) /
kp``. So any gear, sign and unit of ``u`` has its angle; MJCF's ``position`` has ``g = 1, k = kp, b0
= 0`` and ``u = x``. Anything else has none, and is named with the reason.

Source: MuJoCo's documentation, chapter Computation, section "Actuation model".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ConfigError

_JOINT = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT))
_FILTERS = (int(mujoco.mjtDyn.mjDYN_FILTER), int(mujoco.mjtDyn.mjDYN_FILTEREXACT))
_LEAST = 1e-10  # of stiffness, gear and gain


@dataclass(frozen=True, eq=False)
class PositionServos:
    """The law of n position servos: torque ``kp (x - q) - kd qd`` of a target angle ``x``.

    Args:
        kp, kd: Stiffness [n] in N m/rad and damping [n] in N m s/rad at the joint (N/m, N s/m of a
            slide).
        passive: [n] damping in N m s/rad that the actuator adds to its joint's own.
        ctrl_per_rad, ctrl_at_zero: ``u = ctrl_per_rad * x + ctrl_at_zero``, each [n].
        ctrl_min, ctrl_max: Range [n] of ``u``, infinite where the model does not limit it.
        activation: Index [n] of the activation in MuJoCo's ``act``; -1 without a filter.
        step_share: Share [n] of the way to ``u`` that a filter's activation goes in a physics step;
            1 without a filter.
        early: [n] whether a step's force has the activation of its end (``actearly``).
    """

    kp: F64
    kd: F64
    passive: F64
    ctrl_per_rad: F64
    ctrl_at_zero: F64
    ctrl_min: F64
    ctrl_max: F64
    activation: NDArray[np.intp]
    step_share: F64
    early: NDArray[np.bool_]

    @property
    def filtered(self) -> NDArray[np.bool_]:
        """[n] whether a filter lies between the control and the force."""
        return self.activation >= 0

    def lag_s(self, damping: F64) -> F64:
        """Return the lag [n] in s behind a moving target, of joints with ``damping`` [n] of their
        own: ``(kd + damping) / kp``.
        """
        return (damping + self.passive + self.kd) / self.kp

    def ctrl(self, target_rad: F64) -> F64:
        """Return the control [..., n] of target angles [..., n], not yet clipped to its range."""
        return target_rad * self.ctrl_per_rad + self.ctrl_at_zero

    def reach(self) -> tuple[F64, F64]:
        """Return the lowest and highest targets [n] in rad that the controls' ranges allow."""
        ends = (np.stack((self.ctrl_min, self.ctrl_max)) - self.ctrl_at_zero) / self.ctrl_per_rad
        return ends.min(axis=0), ends.max(axis=0)

    def hold(self, data: mujoco.MjData, actuators: NDArray[np.intp], q_rad: F64) -> None:
        """Set controls and activations so that the servos hold the angles [n]."""
        ctrl = self.ctrl(q_rad)
        data.ctrl[actuators] = ctrl
        data.act[self.activation[self.filtered]] = ctrl[self.filtered]


def position_servos(
    model: mujoco.MjModel, actuators: Sequence[int] | NDArray[np.intp]
) -> PositionServos:
    """Return the law of actuators (ids), each of one joint.

    Raises:
        ConfigError: One is no position servo; the message names each and its reason.
    """
    if not np.array_equal(getattr(model, "actuator_ctrladr", np.arange(model.nu)), range(model.nu)):
        raise ConfigError(
            "an actuator of the model has several controls (SO3 or PID); remove it from the model."
        )
    if faults := servo_faults(model, actuators):
        raise ConfigError(f"no position servos: the actuators {', '.join(faults)}.")
    ids = np.asarray(actuators, dtype=np.intp)
    gear, gain = model.actuator_gear[ids, 0], model.actuator_gainprm[ids, 0]
    offset, stiffness, damping = model.actuator_biasprm[ids, :3].T
    kp = -stiffness * gear * gear
    limited = model.actuator_ctrllimited[ids] > 0
    low, high = model.actuator_ctrlrange[ids].T
    filtered = model.actuator_dyntype[ids] != int(mujoco.mjtDyn.mjDYN_NONE)
    return PositionServos(
        kp,
        -damping * gear * gear,
        _passive_damping(model, ids) * gear * gear,
        kp / (gear * gain),
        -offset / gain,
        np.where(limited, low, -np.inf),
        np.where(limited, high, np.inf),
        np.where(filtered, model.actuator_actadr[ids], -1),
        np.array([_step_share(model, int(a)) for a in ids]),
        np.asarray(model.actuator_actearly[ids] > 0, dtype=np.bool_),
    )


def servo_faults(model: mujoco.MjModel, actuators: Sequence[int] | NDArray[np.intp]) -> list[str]:
    """Return the names of the actuators (ids) that are no position servos, each with the reason."""
    faults = {model.actuator(int(a)).name: servo_fault(model, int(a)) for a in actuators}
    return [f"{name} ({fault})" for name, fault in faults.items() if fault]


def servo_fault(model: mujoco.MjModel, actuator: int) -> str | None:
    """Return why an actuator cannot hold its joint at an angle; None for a position servo."""
    dynamics, bias = int(model.actuator_dyntype[actuator]), int(model.actuator_biastype[actuator])
    gain, gear = model.actuator_gainprm[actuator], model.actuator_gear[actuator]
    if int(model.actuator_trntype[actuator]) not in _JOINT:
        return "it does not act on a joint directly"
    if model.actuator_plugin[actuator] >= 0:
        return "it is a plugin's"
    if dynamics == int(mujoco.mjtDyn.mjDYN_INTEGRATOR):
        return "it integrates its control, which is a velocity"
    if dynamics != int(mujoco.mjtDyn.mjDYN_NONE) and dynamics not in _FILTERS:
        return f"its dynamics are of type {mujoco.mjtDyn(dynamics).name.removeprefix('mjDYN_')}"
    if model.actuator_actlimited[actuator] and dynamics in _FILTERS:
        return "its activation is limited (actrange)"
    if _delay_s(model, actuator) > 0:
        return f"its control is delayed by {_delay_s(model, actuator):g} s"
    affine = int(mujoco.mjtGain.mjGAIN_AFFINE)
    constant = int(model.actuator_gaintype[actuator]) == int(mujoco.mjtGain.mjGAIN_FIXED) or (
        int(model.actuator_gaintype[actuator]) == affine and not gain[1:3].any()
    )
    if not constant:
        return "its gain is not a constant"
    if bias == int(mujoco.mjtBias.mjBIAS_NONE):
        return "it is a motor: its control is a torque"
    if bias != int(mujoco.mjtBias.mjBIAS_AFFINE):
        return f"its bias is of type {mujoco.mjtBias(bias).name.removeprefix('mjBIAS_')}"
    stiffness, damping = model.actuator_biasprm[actuator, 1:3]
    if abs(stiffness) < _LEAST:
        return "it is a velocity servo, without stiffness"
    if stiffness > 0 or damping > 0:
        return "its feedback is positive"
    if abs(gear[0]) < _LEAST or abs(gain[0]) < _LEAST:
        return "its control has no effect"
    return _rival(model, actuator)


def _rival(model: mujoco.MjModel, actuator: int) -> str | None:
    """Name another actuator that pulls at the joint at a control of zero; None if none does."""
    same = (model.actuator_trnid[:, 0] == model.actuator_trnid[actuator, 0]) & np.isin(
        model.actuator_trntype, _JOINT
    )
    same[actuator] = False
    pulls = model.actuator_biastype != int(mujoco.mjtBias.mjBIAS_NONE)
    rivals = [model.actuator(int(a)).name for a in np.flatnonzero(same & pulls)]
    return f"the actuator {rivals[0]!r} pulls at the same joint" if rivals else None


def _delay_s(model: mujoco.MjModel, actuator: int) -> float:
    """The delay of its control; MuJoCo before 3.6 has none."""
    delays = getattr(model, "actuator_delay", None)
    return 0.0 if delays is None else float(delays[actuator])


def _passive_damping(model: mujoco.MjModel, ids: NDArray[np.intp]) -> F64:
    """Damping [n] of actuators themselves; MuJoCo before 4.0 has none."""
    damping = getattr(model, "actuator_damping", None)
    return np.zeros(len(ids)) if damping is None else damping[ids]


def _step_share(model: mujoco.MjModel, actuator: int) -> float:
    """Share of the way to the control that a filter's activation goes in a physics step."""
    kind, step_s = int(model.actuator_dyntype[actuator]), float(model.opt.timestep)
    if kind not in _FILTERS:
        return 1.0
    time_constant_s = max(float(model.actuator_dynprm[actuator, 0]), mujoco.mjMINVAL)
    if kind == int(mujoco.mjtDyn.mjDYN_FILTEREXACT):
        return -float(np.expm1(-step_s / time_constant_s))
    return step_s / time_constant_s
