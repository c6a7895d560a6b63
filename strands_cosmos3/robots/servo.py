"""Feed-forward for MuJoCo's position actuators: references to ctrl.

Such an actuator produces ``kp (ctrl - q) - kd qd``. To follow without lag, ctrl must lead the reference by
``(kd + damping) / kp qd`` for the velocity, and by ``(M qdd + bias - passive) / kp`` for everything else.
"""

from __future__ import annotations

from enum import StrEnum

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, instance_of
from strands_cosmos3.errors import ActuatorGuardError, ConfigError, ShapeError
from strands_cosmos3.robots.panda import ARM_ACTUATORS, ARM_JOINTS


class FeedForward(StrEnum):
    """Feed-forward that is added to the reference."""

    NONE = "none"
    VELOCITY = "velocity"
    COMPUTED_TORQUE = "computed_torque"


class JointServo:
    """The seven position servos of an arm in a MuJoCo model with the Franka's joint and actuator names.

    Raises:
        ConfigError: A joint or actuator is missing, or an actuator is not a position servo.
    """

    def __init__(self, model: mujoco.MjModel):
        self.model = instance_of(model, mujoco.MjModel, "model")
        joints = [_id(model, mujoco.mjtObj.mjOBJ_JOINT, name) for name in ARM_JOINTS]
        actuators = [_id(model, mujoco.mjtObj.mjOBJ_ACTUATOR, name) for name in ARM_ACTUATORS]
        self.actuator_ids: NDArray[np.intp] = np.array(actuators, dtype=np.intp)
        self.q_address: NDArray[np.intp] = model.jnt_qposadr[joints].astype(np.intp)
        self.dof_address: NDArray[np.intp] = model.jnt_dofadr[joints].astype(np.intp)
        self.kp: F64 = model.actuator_gainprm[actuators, 0].copy()
        lead_s = servo_lead_s(model, self.actuator_ids, self.dof_address)
        if lead_s is None:
            raise ConfigError("the arm's actuators must be position servos (gain kp, bias -kp q - kd qd).")
        self._lead_s: F64 = lead_s
        self._kd: F64 = -model.actuator_biasprm[actuators, 2]
        self.ctrl_min, self.ctrl_max = model.actuator_ctrlrange[actuators].T.copy()
        self._acceleration, self._torque = np.zeros(model.nv), np.zeros(model.nv)

    def velocity_feed_forward(self, q_rad: F64, qd_rad_s: F64) -> F64:
        """Return ctrl [..., 7] = ``q + (kd + damping) / kp qd``, clipped to the actuators' range."""
        _require_rows(q_rad, qd_rad_s)
        return self._in_range(q_rad + self._lead_s * qd_rad_s)

    def no_feed_forward(self, q_rad: F64) -> F64:
        """Return ctrl [..., 7] = q, clipped to the actuators' range."""
        _require_rows(q_rad)
        return self._in_range(q_rad)

    def computed_torque(self, data: mujoco.MjData, q_rad: F64, qd_rad_s: F64, qdd_rad_s2: F64) -> F64:
        """Return ctrl [7] for one step. Call it between ``mj_step1`` and ``mj_step2``, with the dynamics of the present state.

        ``q_r + kd/kp qd_r + (M qdd_r + qfrc_bias - qfrc_passive) / kp``, clipped to the actuators' range.
        """
        _require_rows(q_rad, qd_rad_s, qdd_rad_s2)
        self._acceleration[self.dof_address] = qdd_rad_s2
        mujoco.mj_mulM(self.model, data, self._torque, self._acceleration)
        dof = self.dof_address
        torque = self._torque[dof] + data.qfrc_bias[dof] - data.qfrc_passive[dof]
        return self._in_range(q_rad + (self._kd * qd_rad_s + torque) / self.kp)

    def _in_range(self, ctrl: F64) -> F64:
        """Clip to the actuators' range. A value that is not finite is an error, because MuJoCo would zero every control."""
        if not np.isfinite(ctrl).all():
            raise ActuatorGuardError(f"control {ctrl} is not finite; nothing was written to the actuators.")
        return np.clip(ctrl, self.ctrl_min, self.ctrl_max)


def servo_lead_s(model: mujoco.MjModel, actuators: NDArray[np.intp], dofs: NDArray[np.intp]) -> F64 | None:
    """Return the lag [n] in s of position servos behind a moving target, ``(kd + damping) / kp``; None for other actuators."""
    kp, bias = model.actuator_gainprm[actuators, 0], model.actuator_biasprm[actuators]
    if not (kp > 0).all() or not np.allclose(bias[:, 1], -kp):
        return None
    return (model.dof_damping[dofs] - bias[:, 2]) / kp


def _require_rows(*values: F64) -> None:
    """Check shapes and types only, as this runs at every physics step; the result is checked for finiteness."""
    for value in values:
        if not isinstance(value, np.ndarray) or value.dtype != np.float64 or value.shape[-1:] != (len(ARM_JOINTS),):
            raise ShapeError(f"a reference must be a float64 array [..., {len(ARM_JOINTS)}], got {type(value).__name__}.")
        if value.shape != values[0].shape:
            raise ShapeError(f"references must share one shape, got {values[0].shape} and {value.shape}.")


def _id(model: mujoco.MjModel, kind: mujoco.mjtObj, name: str) -> int:
    found = mujoco.mj_name2id(model, kind, name)
    if found < 0:
        raise ConfigError(f"the model has no {name!r}; the arm needs joint1..joint7 and actuator1..actuator8.")
    return found
