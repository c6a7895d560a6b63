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
from mujoco import mjtBias, mjtDyn, mjtGain, mjtTrn
from numpy.typing import NDArray

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ConfigError

JOINT_DRIVES = (mjtTrn.mjTRN_JOINT, mjtTrn.mjTRN_JOINTINPARENT)
"""Transmissions of actuators that act on a joint directly."""
_FILTERS = (mjtDyn.mjDYN_FILTER, mjtDyn.mjDYN_FILTEREXACT)
_POSITION_INPUT = 1  # of a PID's inputs, as bits
_RESISTING = (
    *("jnt_stiffness", "jnt_stiffnesspoly", "tendon_stiffness", "tendon_stiffnesspoly"),
    *("dof_dampingpoly", "tendon_damping", "tendon_dampingpoly"),
    *("actuator_damping", "actuator_dampingpoly"),
)
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
        address: Index [n] of the control in MuJoCo's ``ctrl`` (:func:`control_address`).
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
    address: NDArray[np.intp]
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

    def hold(self, data: mujoco.MjData, q_rad: F64) -> None:
        """Set controls and activations so that the servos hold the angles [n]."""
        ctrl = self.ctrl(q_rad)
        data.ctrl[self.address] = ctrl
        data.act[self.activation[self.filtered]] = ctrl[self.filtered]


def position_servos(
    model: mujoco.MjModel, actuators: Sequence[int] | NDArray[np.intp]
) -> PositionServos:
    """Return the law of actuators (ids), each of one joint.

    Raises:
        ConfigError: One is no position servo; the message names each and its reason.
    """
    if faults := servo_faults(model, actuators):
        raise ConfigError(f"no position servos: the actuators {', '.join(faults)}.")
    ids = np.asarray(actuators, dtype=np.intp)
    gear = model.actuator_gear[ids, 0]
    address = control_address(model, ids)
    offset, stiffness, damping = model.actuator_biasprm[ids, :3].T
    gain = np.where(_is_pid(model, ids), -stiffness, model.actuator_gainprm[ids, 0])
    kp = -stiffness * gear * gear
    limited = model.actuator_ctrllimited[address] > 0
    low, high = model.actuator_ctrlrange[address].T
    dynamics = model.actuator_dyntype[ids]
    filtered = dynamics != mjtDyn.mjDYN_NONE
    time_constant_s = np.maximum(model.actuator_dynprm[ids, 0], mujoco.mjMINVAL)
    euler_share = model.opt.timestep / time_constant_s
    exact_share = -np.expm1(-euler_share)
    share = np.where(dynamics == mjtDyn.mjDYN_FILTEREXACT, exact_share, euler_share)
    # MuJoCo before 4.0 has no damping of actuators
    passive = getattr(model, "actuator_damping", np.zeros(model.nu))[ids]
    return PositionServos(
        kp,
        -damping * gear * gear,
        passive * gear * gear,
        kp / (gear * gain),
        -offset / gain,
        np.where(limited, low, -np.inf),
        np.where(limited, high, np.inf),
        address,
        np.where(filtered, model.actuator_actadr[ids], -1),
        np.where(filtered, share, 1.0),
        np.asarray(model.actuator_actearly[ids] > 0, dtype=np.bool_),
    )


def actuators_of(model: mujoco.MjModel) -> range:
    """Return the ids of a model's actuators; MuJoCo's ``nu`` is the number of their controls."""
    return range(len(model.actuator_trntype))


def control_address(
    model: mujoco.MjModel, actuators: Sequence[int] | NDArray[np.intp]
) -> NDArray[np.intp]:
    """Return the index [n] in MuJoCo's ``ctrl`` of the first control of actuators (ids).

    An actuator may have several: a PID's are a position, a velocity and a force. Those beyond the
    first stay at zero. A :class:`ConfigError` names an actuator that has none.
    """
    ids = np.asarray(actuators, dtype=np.intp)
    # MuJoCo before 4.0 has one control of each actuator
    numbers = getattr(model, "actuator_ctrlnum", np.ones(model.nu))[ids]
    if (numbers == 0).any():
        names = ", ".join(model.actuator(int(actuator)).name for actuator in ids[numbers == 0])
        raise ConfigError(f"the model gives no control (input) to {names}; it needs one.")
    first = getattr(model, "actuator_ctrladr", np.arange(model.nu))
    return np.asarray(first[ids], dtype=np.intp)


def _is_pid(model: mujoco.MjModel, actuators: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which actuators (ids) take a position and scale it by their stiffness, as MuJoCo 4's do."""
    pid = getattr(mjtGain, "mjGAIN_PID", None)
    kinds = model.actuator_gaintype[actuators]
    return np.zeros(len(kinds), dtype=np.bool_) if pid is None else kinds == pid


def direct_actuators(model: mujoco.MjModel, joint: int) -> list[int]:
    """Return the ids of the actuators that drive a joint without a tendon."""
    direct = np.isin(model.actuator_trntype, JOINT_DRIVES)
    return np.flatnonzero(direct & (model.actuator_trnid[:, 0] == joint)).tolist()


def servo_faults(model: mujoco.MjModel, actuators: Sequence[int] | NDArray[np.intp]) -> list[str]:
    """Return the names of the actuators (ids) that are no position servos, each with the reason."""
    return [
        f"{model.actuator(int(actuator)).name} ({fault})"
        for actuator in actuators
        if (fault := servo_fault(model, int(actuator)))
    ]


def servo_fault(model: mujoco.MjModel, actuator: int) -> str | None:
    """Return why an actuator cannot hold its joint at an angle; None for a position servo."""
    dynamics = mjtDyn(model.actuator_dyntype[actuator])
    bias = mjtBias(model.actuator_biastype[actuator])
    gain = model.actuator_gainprm[actuator]
    gear = model.actuator_gear[actuator]
    stiffness, damping = model.actuator_biasprm[actuator, 1:3]
    # MuJoCo before 3.6 has no delays
    delay_s = float(getattr(model, "actuator_delay", np.zeros(model.nu))[actuator])
    if mjtTrn(model.actuator_trntype[actuator]) not in JOINT_DRIVES:
        return "it does not act on a joint directly"
    if model.actuator_plugin[actuator] >= 0:
        return "it is a plugin's"
    if dynamics == mjtDyn.mjDYN_INTEGRATOR:
        return "it integrates its control, which is a velocity"
    if dynamics not in (mjtDyn.mjDYN_NONE, *_FILTERS):
        return f"its dynamics are of type {dynamics.name.removeprefix('mjDYN_')}"
    if model.actuator_actlimited[actuator] and dynamics in _FILTERS:
        return "its activation is limited (actrange)"
    if delay_s > 0:
        return f"its control is delayed by {delay_s:g} s, which the model must not state"
    pid = bool(_is_pid(model, np.array([actuator]))[0])
    if pid and not model.actuator_ctrlspec[actuator] & _POSITION_INPUT:
        return "it takes no position"
    fixed = pid or model.actuator_gaintype[actuator] == mjtGain.mjGAIN_FIXED
    affine = model.actuator_gaintype[actuator] == mjtGain.mjGAIN_AFFINE
    if not (fixed or (affine and not gain[1:3].any())):
        return "its gain is not a constant"
    if bias == mjtBias.mjBIAS_NONE:
        return "it is a motor: its control is a torque"
    if bias != mjtBias.mjBIAS_AFFINE:
        return f"its bias is of type {bias.name.removeprefix('mjBIAS_')}"
    if abs(stiffness) < _LEAST:
        return "it is a velocity servo, without stiffness"
    if stiffness > 0 or damping > 0:
        return "its feedback is positive"
    if abs(gear[0]) < _LEAST or (abs(gain[0]) < _LEAST and not pid):
        return "its control has no effect"
    joint = int(model.actuator_trnid[actuator, 0])
    for rival in actuators_of(model):
        # it may pull at the joint even at a control of zero
        pulls = rival != actuator and model.actuator_biastype[rival] != mjtBias.mjBIAS_NONE
        if pulls and joint in driven_joints(model, rival):
            return f"the actuator {model.actuator(rival).name!r} pulls at the same joint"
    return _coupling(model, joint)


def _coupling(model: mujoco.MjModel, joint: int) -> str | None:
    """How an equality binds a joint, to nothing or to a joint that is driven as well; a soft one
    pulls at it like a spring.
    """
    ends = np.column_stack((model.eq_obj1id, model.eq_obj2id))
    binds = (model.eq_type == mujoco.mjtEq.mjEQ_JOINT) & (model.eq_active0 > 0)
    driven = model.actuator_trnid[np.isin(model.actuator_trntype, JOINT_DRIVES), 0]
    for pair in ends[binds & (ends == joint).any(axis=1)].tolist():
        other = pair[pair[0] == joint]
        if other < 0:
            return "an equality fixes its joint"
        if other in driven:
            return f"an equality couples its joint to {model.joint(other).name!r}"
    return None


def resists(model: mujoco.MjModel) -> bool:
    """Whether there are springs, or damping other than the joints' linear one."""
    # MuJoCo before 4.0 has no polynomials, and no damping of actuators
    return any(np.any(getattr(model, name, 0.0)) for name in _RESISTING)


def driven_joints(model: mujoco.MjModel, actuator: int) -> list[int]:
    """Return the ids of the joints that an actuator drives, directly or through a tendon."""
    kind = int(model.actuator_trntype[actuator])
    target = int(model.actuator_trnid[actuator, 0])
    if kind in JOINT_DRIVES:
        return [target]
    if kind != mujoco.mjtTrn.mjTRN_TENDON:
        return []
    path = slice(model.tendon_adr[target], model.tendon_adr[target] + model.tendon_num[target])
    of_joints = model.wrap_type[path] == mujoco.mjtWrap.mjWRAP_JOINT  # sites and geoms have ids too
    return model.wrap_objid[path][of_joints].tolist()
