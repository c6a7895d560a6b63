"""The part of franky-control 2.0.0 that examples/10_real_franka.py uses, with its signatures and an
arm that follows ideally.

`test_the_fake_has_frankys_signatures` compares it with the package where that is installed.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np

from strands_cosmos3.robots.panda import HOME_Q, T_hand_flange, T_hand_tcp, dh_forward

T_flange_ee = np.linalg.inv(T_hand_flange) @ T_hand_tcp


class ControlException(Exception):
    pass


class Affine:
    def __init__(self, transformation_matrix=None):
        self.matrix = np.asarray(transformation_matrix)


class BoolFuture:
    def __init__(self, ready_s):
        self._ready_s = ready_s

    def wait(self, timeout=None):
        return time.monotonic() >= self._ready_s

    def get(self):
        return True


class FrictionCompensationParams:
    def __init__(
        self, coulomb=(0.0,) * 7, viscous=(0.0,) * 7, max_torque=(1.0,) * 7, velocity_epsilon=0.03
    ):
        self.coulomb, self.viscous, self.max_torque, self.velocity_epsilon = (
            coulomb,
            viscous,
            max_torque,
            velocity_epsilon,
        )


class Gripper:
    def __init__(self, fci_hostname):
        self.max_width, self.width, self.commands = 0.08, 0.08, []

    def grasp_async(self, width, speed, force, epsilon_inner=0.005, epsilon_outer=0.005):
        # else the fingers open again around an object that is wider than `width`
        assert epsilon_outer >= 0.08
        return self._do("grasp", width)

    def move_async(self, width, speed):
        return self._do("move", width)

    def _do(self, command, width):
        self.commands.append((command, width))
        self.width = width
        return BoolFuture(time.monotonic() + 0.05)


class Robot:
    """Starts at `START_Q`; its end effector is Franka's hand, as set in Desk."""

    START_Q = HOME_Q
    T_base_offset = np.eye(4)

    def __init__(
        self,
        fci_hostname,
        relative_dynamics_factor=1.0,
        default_torque_threshold=20.0,
        default_force_threshold=30.0,
    ):
        self.q, self.dq = np.array(self.START_Q), np.zeros(7)
        self.tracker = None
        self.calls, self.errors = [], []

    @property
    def current_joint_positions(self):
        return self.q.copy()

    @property
    def current_joint_state(self):
        return SimpleNamespace(position=self.q.copy(), velocity=self.dq.copy())

    @property
    def state(self):
        O_T_EE = self.T_base_offset @ dh_forward(self.q) @ T_hand_tcp
        return SimpleNamespace(q=self.q.copy(), O_T_EE=Affine(O_T_EE), F_T_EE=Affine(T_flange_ee))

    def set_collision_behavior(self, torque_thresholds, force_thresholds):
        self.calls.append(("set_collision_behavior", torque_thresholds, force_thresholds))

    def set_load(self, load_mass, F_x_Cload, load_inertia):
        assert self.tracker is None, "the load cannot change while the robot is in control"
        self.calls.append(("set_load", load_mass, F_x_Cload, load_inertia))

    def poll_motion(self):
        if self.errors:
            raise self.errors[-1]
        return self.tracker is not None and self.tracker.is_running

    def reflex(self, message):
        """Stop as a contact stops a robot."""
        self.errors.append(ControlException(message))
        self.tracker.is_running = False


class JointImpedanceTracker:
    def __init__(
        self,
        robot,
        *,
        stiffness=None,
        damping=None,
        cartesian_stiffness=None,
        cartesian_damping=None,
        constant_torque_offset=None,
        compensate_coriolis=True,
        friction=None,
        max_delta_tau=1.0,
        lower_joint_limits=None,
        upper_joint_limits=None,
        joint_limit_activation_distance=0.1,
        joint_limit_stiffness=4.0,
        joint_limit_damping=1.0,
        joint_limit_max_torque=5.0,
        gains_time_constant=0.1,
        period=None,
    ):
        assert np.shape(stiffness) == np.shape(damping) == (7,)
        self.robot, self.friction, self.is_running = robot, friction, True
        self.sent, self.stopped = [], threading.Event()
        robot.tracker = self

    def set_target(self, q, dq=None, tau_ff=None):
        assert np.shape(q) == np.shape(dq) == (7,)
        self.sent.append((time.monotonic(), np.array(q), np.array(dq)))
        self.robot.q, self.robot.dq = np.array(q), np.array(dq)

    def stop(self, stop_motion=None):
        self.is_running, self.robot.dq = False, np.zeros(7)
        self.stopped.set()
