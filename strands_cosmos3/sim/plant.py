"""Errors of the simulated plant: how the arm differs from the model that its controller has.

The scene's model is the controller's, and a perturbed copy is stepped. The controller's gravity
compensation, feed-forward and kinematics therefore know nothing of a payload, heavier links or
friction.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, positive, whole_number, within
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import data_at, frame_body, joint_ids, tool_in_body
from strands_cosmos3.robots.servo import Compensation
from strands_cosmos3.robots.spec import Limb

_MAX_DELAY_S = 0.5
_STICTION = 0.9999  # impedance of the friction constraint, the highest that MuJoCo takes


@dataclass(frozen=True)
class PlantErrors:
    """Differences between the simulated arm and its controller's model. The defaults are none.

    Args:
        link_mass_scale: Factor on the masses and inertias of the arm, hand and fingers.
        payload_kg: Point mass fixed at the tool centre point.
        joint_friction_nm: Coulomb friction of each arm joint, on top of the model's.
        actuation_delay_s: Time from writing ctrl to its effect, to a whole physics step.
        sensor_noise_rad: Standard deviation of the measured joint angles; the servos and every
            metric see the true ones.
        seed: Seed of the noise, together with the episode's.

    Raises:
        InputError: A value is not a finite number in its range.
    """

    link_mass_scale: float = 1.0
    payload_kg: float = 0.0
    joint_friction_nm: float = 0.0
    actuation_delay_s: float = 0.0
    sensor_noise_rad: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number(self.seed, "seed", 0)
        positive(self.link_mass_scale, "link_mass_scale")
        for name in ("payload_kg", "joint_friction_nm", "sensor_noise_rad"):
            within(getattr(self, name), name, 0.0, np.inf, ())
        within(self.actuation_delay_s, "actuation_delay_s", 0.0, _MAX_DELAY_S, ())

    def apply(self, model: mujoco.MjModel, *limbs: Limb) -> mujoco.MjModel:
        """Return a copy of a model with these masses and friction; gravity is compensated for the
        original masses only.

        Args:
            model: The controller's model.
            limbs: The limbs, each with the payload; by default the Panda's arm.

        Raises:
            ConfigError: No body for the payload is fixed to a limb's last link.
        """
        plant = copy.copy(model)
        limbs = limbs or PANDA.limbs
        frames = [frame_body(plant, limb) for limb in limbs]
        joints = joint_ids(plant, (name for limb in limbs for name in limb.joints))
        arm = np.isin(plant.body_rootid, plant.body_rootid[frames])
        plant.body_mass[arm] *= self.link_mass_scale
        plant.body_inertia[arm] *= self.link_mass_scale
        plant.body_gravcomp[arm] /= self.link_mass_scale
        for limb, frame in zip(limbs, frames, strict=True) if self.payload_kg else ():
            _add_payload(plant, limb, frame, self.payload_kg)
        if self.joint_friction_nm:
            dofs = plant.jnt_dofadr[joints]
            plant.dof_frictionloss[dofs] += self.joint_friction_nm
            # at MuJoCo's default a loaded joint creeps by a milliradian per second
            plant.dof_solimp[dofs, :2] = _STICTION
        mujoco.mj_setConst(plant, mujoco.MjData(plant))
        return plant

    def compensation(self) -> Compensation:
        """Return what compensates the delay, payload and friction; heavier links and noise
        remain.
        """
        return Compensation(self.actuation_delay_s, self.payload_kg, self.joint_friction_nm)

    def delay_steps(self, dt_s: float) -> int:
        """Return the delay in physics steps."""
        return round(self.actuation_delay_s / dt_s)

    def noise_rad(self, episode_seed: int, step: int, n: int) -> F64:
        """Return the error [n] of the angles measured at a physics step; reading twice gives the
        same value.
        """
        if not self.sensor_noise_rad:
            return np.zeros(n)
        return np.random.default_rng((self.seed, episode_seed, step)).normal(
            0.0, self.sensor_noise_rad, n
        )


ALL_ERRORS = PlantErrors(
    link_mass_scale=1.1,
    payload_kg=0.5,
    joint_friction_nm=0.5,
    actuation_delay_s=0.010,
    sensor_noise_rad=0.0005,
)
"""Links 10 % heavier, 0.5 kg in the hand, friction, 10 ms of delay, 0.5 mrad of noise."""


def _add_payload(model: mujoco.MjModel, limb: Limb, frame: int, payload_kg: float) -> None:
    """Fix a point mass at the tool centre point, without compensation of its weight.

    MuJoCo compensates a body's weight at its centre of mass, which the payload would move. The mass
    of the hand, or of another body that is fixed to the last link, therefore moves to the link, and
    that body carries the payload alone.
    """
    hand = _fixed_body(model, limb, frame)
    link = int(model.body_parentid[hand])
    tool_m = tool_in_body(model, limb)
    if hand != frame:
        data = data_at(model)
        tool_m = data.xpos[frame] + data.xmat[frame].reshape(3, 3) @ tool_m
        tool_m = data.xmat[hand].reshape(3, 3).T @ (tool_m - data.xpos[hand])
    if not np.isclose(model.body_gravcomp[hand], model.body_gravcomp[link]):
        name = model.body(hand).name
        raise ConfigError(
            f"a payload needs equal gravity compensation of {name!r} and the link it is fixed to."
        )
    R_link_hand = _matrix(model.body_quat[hand])
    mass = np.array([model.body_mass[link], model.body_mass[hand]])
    center = np.stack(
        (model.body_ipos[link], model.body_pos[hand] + R_link_hand @ model.body_ipos[hand])
    )
    rotation = (_matrix(model.body_iquat[link]), R_link_hand @ _matrix(model.body_iquat[hand]))
    mean = mass @ center / mass.sum()
    inertia = np.zeros((3, 3))
    for m, c, R, principal in zip(
        mass, center - mean, rotation, model.body_inertia[[link, hand]], strict=True
    ):
        inertia += R @ np.diag(principal) @ R.T + m * (c @ c * np.eye(3) - np.outer(c, c))
    principal, axes = np.linalg.eigh(inertia)
    axes[:, 0] *= np.linalg.det(axes)
    mujoco.mju_mat2Quat(model.body_iquat[link], axes.ravel())
    model.body_mass[link] = mass.sum()
    model.body_ipos[link] = mean
    model.body_inertia[link] = principal
    model.body_mass[hand] = payload_kg
    model.body_ipos[hand] = tool_m
    model.body_inertia[hand] = 0.0
    model.body_iquat[hand] = (1.0, 0.0, 0.0, 0.0)
    model.body_gravcomp[hand] = 0.0
    model.body_sameframe[[link, hand]] = int(mujoco.mjtSameFrame.mjSAMEFRAME_NONE)


def _fixed_body(model: mujoco.MjModel, limb: Limb, frame: int) -> int:
    """The body of the limb's frame if it is fixed to a link, else one that is fixed to it."""
    link = int(model.body_weldid[frame])
    # the link first: parents precede their children
    fixed = np.flatnonzero(model.body_weldid == link)
    if len(fixed) < 2 or link == 0:
        raise ConfigError(
            f"a payload needs a body that is fixed to the last link of limb {limb.name!r}, such "
            "as its hand."
        )
    return frame if frame != link else int(fixed[1])


def _matrix(quat_wxyz: F64) -> F64:
    R = np.zeros(9)
    mujoco.mju_quat2Mat(R, quat_wxyz)
    return R.reshape(3, 3)
