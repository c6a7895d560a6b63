"""A real Franka through franky (`pip install franky-control`): an `Arm` for the loop, and the
checks before its first motion.

    # without a robot: the frames that will be compared
    python examples/10_real_franka.py
    # compare frames, hold, then turn joint 7 by 3 degrees
    python examples/10_real_franka.py --host 172.16.0.2 --payload-kg 0.2

Read docs/real_franka.md first: it is the checklist. The classes used of franky 2.0 are `Robot`,
`Gripper`, `JointImpedanceTracker` and `FrictionCompensationParams`; tests/test_real_franka.py runs
this file against a fake with the same signatures. It has not moved a real robot where it was
written.
"""

import argparse
import threading
import time
from dataclasses import replace

try:
    import mink  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[sim]'") from None
import numpy as np

from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.identification import identify
from strands_cosmos3.control.trajectory import JointState, plan_stop
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ActuatorGuardError, ConfigError, ControlError
from strands_cosmos3.robots.panda import HOME_Q, T_hand_flange, T_hand_tcp, dh_forward
from strands_cosmos3.robots.servo import NO_COMPENSATION, Compensation
from strands_cosmos3.sim import load_panda
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import JointTrajectory

# N m/rad, of libfranka's joint impedance example
STIFFNESS = np.array([600.0, 600.0, 600.0, 600.0, 250.0, 150.0, 50.0])
DAMPING = np.array([50.0, 50.0, 50.0, 50.0, 30.0, 25.0, 15.0])  # N m s/rad
STREAM_S = 1e-3  # between two references to franky
# references are sent this long after the loop hands them out: so late may the next ones be
BUFFER_S = 0.04
LATE_S = 0.2  # longest wait for the last reference of a stop to be sent
JOIN_S = 1.0  # a thread that has not ended by then is left to itself
JUMP_RAD = 0.1  # a reference this far from the measured angle is not followed
FRAME_MM, FRAME_DEG = 1.0, 0.2
GRIPPER_STEP, GRIPPER_M_S, GRASP_N = 0.1, 0.1, 20.0


class FrankaArm:
    """`control.loop.Arm` on franky's joint impedance tracker. Use it as a context manager; leaving
    it brings the arm to rest.

    `franky` is the module. Its controller takes references at 1 kHz from a thread here, `BUFFER_S`
    after the loop has handed them out, and behind the last one always stands the stop within the
    limits. The robot itself compensates its own weight, the load that `set_load` names and, by
    `coulomb`, friction; the delay is led here. `clipped` counts the references that the lead would
    have taken beyond the joints' range or velocity limit.
    """

    dt_s = STREAM_S  # between two references of the loop

    def __init__(self, franky, host, limits, compensation=NO_COMPENSATION):
        if self.dt_s > STREAM_S:
            raise ConfigError(
                f"dt_s={self.dt_s:g}: Franka takes a reference each {STREAM_S:g} s, and longer "
                "steps, interpolated, exceed the limits of acceleration and jerk, at which its "
                f"joint-position interface stops; use dt_s={STREAM_S:g}."
            )
        self.franky, self.limits, self.compensation, self.clipped = franky, limits, compensation, 0
        self.robot, self.gripper = franky.Robot(host), franky.Gripper(host)
        self.max_width_m = self.gripper.max_width
        if not self.max_width_m > 0:
            raise ConfigError(
                "the gripper does not know its width; run Gripper.homing() with empty fingers."
            )
        require_frames(self.robot)
        # N m, N: a contact beyond these stops the arm
        self.robot.set_collision_behavior(20.0, 30.0)
        load_kg = compensation.payload_kg  # 0 kg as well: the robot keeps what it was told last
        inertia = 0.4 * load_kg * 0.03**2 * np.eye(3)  # a ball of 3 cm at the tool centre point
        tcp_in_flange = np.linalg.inv(T_hand_flange) @ T_hand_tcp
        self.robot.set_load(
            load_kg, tcp_in_flange[:3, 3].tolist(), inertia.ravel(order="F").tolist()
        )
        coulomb = np.broadcast_to(compensation.friction_nm, 7)
        friction = franky.FrictionCompensationParams(
            coulomb=coulomb.tolist(), max_torque=np.maximum(coulomb, 1.0).tolist()
        )
        self._width_m, self._wanted, self._closed = self.gripper.width, None, threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._stream, self._grip)
        ]
        q = np.asarray(self.robot.current_joint_positions, dtype=float)[None]
        # angles, velocities, time of row 0
        self.rows, self._end_s = (q, np.zeros((1, 7)), time.monotonic()), time.monotonic()
        self._references = q, np.zeros((1, 7)), np.zeros((1, 7))  # the rows before they were led
        self._sent_s = 0.0  # time of the last reference sent
        self.tracker = franky.JointImpedanceTracker(
            self.robot,
            stiffness=STIFFNESS,
            damping=DAMPING,
            friction=friction,
            lower_joint_limits=limits.q_min,
            upper_joint_limits=limits.q_max,
        )
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._closed.set()
            self.tracker.stop()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Brake within the limits and stop the controller; only then wait for the threads, the
        gripper's last.
        """
        try:
            self._brake()
        finally:
            self._closed.set()
            self.tracker.stop()
        for thread in self._threads:
            thread.join(JOIN_S)

    def now_s(self):
        return time.monotonic()

    def joint_state(self):
        state = self.robot.current_joint_state
        opening = float(np.clip(self._width_m / self.max_width_m, 0.0, 1.0))
        return np.array(state.position, dtype=float), np.array(state.velocity, dtype=float), opening

    def execute(self, block, before):
        q, qd, qdd = (
            np.concatenate((getattr(before, name)[None], getattr(block, name)))
            for name in ("q_rad", "qd_rad_s", "qdd_rad_s2")
        )
        self._require_running()
        if not all(np.isfinite(values).all() for values in (q, qd, qdd, block.gripper)):
            raise ActuatorGuardError("a reference is not finite; nothing was sent.")
        keep, start_s = self._until_the_next_block(qd[0])
        to_come = self._references[0][keep.stop] - self._references[0][keep.start]
        off = np.abs(q[0] - to_come - self.joint_state()[0])
        if off.max() > JUMP_RAD:
            raise ActuatorGuardError(
                f"joint {off.argmax() + 1} is {off.max():.3f} rad from its reference (at most "
                f"{JUMP_RAD:g}); nothing was sent."
            )
        self._follow(keep, (q, qd, qdd), start_s)
        self._wanted = float(block.gripper[-1])
        measured, opening = [], []
        for row in range(len(block)):
            time.sleep(max(start_s - BUFFER_S + (row + 1) * self.dt_s - time.monotonic(), 0.0))
            self._require_running()
            at, _, open_fraction = self.joint_state()
            measured.append(at)
            opening.append(open_fraction)
        return np.stack(measured), np.array(opening)

    def reference_at(self, now_s):
        """Angles and velocities [7] to be sent at a time."""
        q, qd, from_s = self.rows
        row = np.clip((now_s - from_s) / self.dt_s, 0.0, len(q) - 1.0)
        k, part = int(row), row - int(row)
        after = min(k + 1, len(q) - 1)
        return (1 - part) * q[k] + part * q[after], (1 - part) * qd[k] + part * qd[after]

    def _until_the_next_block(self, qd):
        """The rows that are to be sent before a block that begins with velocities [7], and the
        time of its first row.
        """
        now_s, from_s, last = time.monotonic(), self.rows[2], len(self.rows[0]) - 1
        if now_s <= self._end_s:
            first, end = (
                int((now_s - from_s) / self.dt_s),
                round((self._end_s - from_s) / self.dt_s),
            )
            return slice(max(min(first, end), 0), end), self._end_s
        if np.abs(qd).max() > 1e-3:
            late_ms = (now_s - self._end_s + BUFFER_S) * 1e3
            raise ControlError(
                f"the loop was {late_ms:.0f} ms late, and the arm is braking; "
                "start again from rest."
            )
        return slice(last, last), now_s + BUFFER_S

    def _follow(self, keep, block, start_s):
        """Send the rows `keep` of the present ones, then a block's, from `start_s` on, then the
        stop from the last of them.
        """
        kept, sent = (
            [values[keep] for values in self._references],
            [values[keep] for values in self.rows[:2]],
        )
        last = JointState(*(np.concatenate(both)[-1] for both in zip(kept, block, strict=True)))
        stop = plan_stop(last, self.limits)
        tail = stop.sample(self.dt_s * np.arange(1.0, np.ceil(stop.end_s / self.dt_s) + 2))
        new = tuple(np.concatenate(both) for both in zip(block, tail, strict=True))
        before = self.rows[0][keep.stop - 1]
        *led, clipped = self.compensation.lead_within(new, self.limits, self.dt_s, before)
        self.clipped += int(clipped[: len(block[0])].sum())
        rows = (
            *(np.concatenate(both) for both in zip(sent, led, strict=True)),
            start_s - len(kept[0]) * self.dt_s,
        )
        references = tuple(np.concatenate(both) for both in zip(kept, new, strict=True))
        end_s = start_s + (len(block[0]) - 1) * self.dt_s
        # a Ctrl-C is heard before or after
        self.rows, self._references, self._end_s = rows, references, end_s

    def _brake(self):
        """Send the stop from the row that is due next, if the arm does not brake already, and
        wait for its end.
        """
        from_s, nothing = self.rows[2], np.zeros((0, 7))
        due = max(int((time.monotonic() - from_s) / self.dt_s) + 2, 1)
        if from_s + due * self.dt_s < self._end_s:
            self._follow(slice(0, due), (nothing, nothing, nothing), from_s + due * self.dt_s)
        rest_s = self.rows[2] + len(self.rows[0]) * self.dt_s
        while self._sent_s < rest_s and self.tracker.is_running and self._threads[0].is_alive():
            if time.monotonic() > rest_s + LATE_S:
                return
            time.sleep(STREAM_S)

    def _stream(self):
        try:
            while not self._closed.wait(STREAM_S) and self.tracker.is_running:
                now_s = time.monotonic()
                self.tracker.set_target(*self.reference_at(now_s))
                self._sent_s = now_s
        finally:  # whatever ends the stream, the arm comes to rest
            if not self._closed.is_set() and self.tracker.is_running:
                self.tracker.stop()

    def _grip(self):
        """Command the gripper when the wanted opening has changed by a tenth, one command at a
        time.
        """
        under_way, sent = None, self.joint_state()[2]
        while not self._closed.wait(0.02):
            self._width_m = self.gripper.width
            wanted = self._wanted
            busy = under_way is not None and not under_way.wait(0.0)
            if wanted is None or busy or abs(wanted - sent) < GRIPPER_STEP:
                continue
            if wanted < 0.5 and wanted < sent:  # closing: hold whatever is there
                under_way = self.gripper.grasp_async(
                    0.0, GRIPPER_M_S, GRASP_N, epsilon_outer=self.max_width_m
                )
            else:
                under_way = self.gripper.move_async(wanted * self.max_width_m, GRIPPER_M_S)
            sent = wanted

    def _require_running(self):
        if self.tracker.is_running:
            if not self._threads[1].is_alive():
                raise ControlError("the gripper's connection has ended; the arm brakes.")
            return
        try:
            self.robot.poll_motion()
            why = "it is no longer in control"
        except self.franky.ControlException as error:
            why = str(error)
        raise ControlError(
            f"the robot has stopped: {why}. Clear the cause, then Robot.recover_from_errors()."
        )


def frame_error(robot):
    """Distance in mm and angle in degrees between the flange by the robot and by our kinematics,
    at its present joints.
    """
    state = robot.state
    by_robot = state.O_T_EE.matrix @ np.linalg.inv(state.F_T_EE.matrix)
    error = np.linalg.inv(dh_forward(np.asarray(state.q)) @ T_hand_flange) @ by_robot
    turned = np.arccos(np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1))
    return float(np.linalg.norm(error[:3, 3]) * 1e3), float(np.rad2deg(turned))


def require_frames(robot):
    """Raise a ConfigError unless the robot's kinematics and angles are those that targets are
    solved for.
    """
    mm, deg = frame_error(robot)
    if mm > FRAME_MM or deg > FRAME_DEG:
        raise ConfigError(
            f"the robot's flange is {mm:.2f} mm and {deg:.2f} degrees from where its joint angles "
            "put it."
        )


def hand_eye(T_base_hand, T_camera_board):
    """Pose of a camera in the hand, from N >= 3 hand poses [N, 4, 4] and the board's poses in the
    camera [N, 4, 4].

    For a camera that stands still, fix the board to the hand and pass the inverses of the hand
    poses: the result is the camera's pose in the base. Rotations from `a X = X b` (Park and Martin,
    1994), the position by least squares.

    Returns the pose, and the largest distance in m by which the board's computed positions
    disagree.
    """
    A, B = (
        np.linalg.inv(T_base_hand[1:]) @ T_base_hand[:-1],
        T_camera_board[1:] @ np.linalg.inv(T_camera_board[:-1]),
    )
    if len(A) < 2 or np.linalg.svd(_axes(A), compute_uv=False)[1] < 0.1:
        raise ConfigError(
            "hand-eye calibration needs three poses or more that turn the hand about two axes."
        )
    U, _, Vt = np.linalg.svd(_axes(A).T @ _axes(B))
    R = U @ np.diag([1, 1, np.linalg.det(U @ Vt)]) @ Vt
    left = (A[:, :3, :3] - np.eye(3)).reshape(-1, 3)
    right = (np.einsum("ij,nj->ni", R, B[:, :3, 3]) - A[:, :3, 3]).ravel()
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = R, np.linalg.lstsq(left, right, rcond=None)[0]
    board_m = (T_base_hand @ T @ T_camera_board)[:, :3, 3]
    return T, float(np.linalg.norm(board_m - board_m.mean(axis=0), axis=1).max())


def _axes(T):
    """Rotation vectors [N, 3] of transforms [N, 4, 4]."""
    from scipy.spatial.transform import Rotation

    return Rotation.from_matrix(T[:, :3, :3]).as_rotvec()


def pixel(point_base_m, T_base_camera, K):
    """Pixel (u, v) at which a camera with intrinsics K [3, 3] sees a point: draw the tool there
    to check its calibration.
    """
    seen = np.linalg.inv(T_base_camera) @ np.append(point_base_m, 1.0)
    return (K @ seen[:3])[:2] / seen[2]


def first_motion(arm, limits):
    """Hold for a second, then turn joint 7 by 3 degrees and back; return the greatest distance
    from the references, in rad.
    """
    q, _, opening = arm.joint_state()
    executor = Executor(limits, arm.dt_s, q, opening)  # the fingers stay as they are
    steps, off_rad = round(0.02 / arm.dt_s), 0.0
    t_s = np.arange(1, 61) / 15
    there_and_back = q + np.deg2rad(3) * np.sin(np.pi * t_s / 4)[:, None] ** 2 * np.eye(7)[6]
    for tick in range(260):
        if tick == 50:
            executor.accept(JointTrajectory(there_and_back, t_s))
        before = executor.reference
        block = executor.advance(steps)
        off_rad = max(off_rad, float(np.abs(arm.execute(block, before)[0] - block.q_rad).max()))
    return off_rad


def main(argv=None, franky=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", help="address of the robot")
    parser.add_argument(
        "--limits", choices=("fer", "fr3"), default="fr3", help="Panda (fer) or Research 3"
    )
    parser.add_argument(
        "--derating", type=float, default=0.1, help="factor on speed, acceleration and jerk"
    )
    parser.add_argument(
        "--payload-kg",
        type=float,
        default=0.0,
        help="load in the fingers, beyond the hand set in Desk",
    )
    parser.add_argument(
        "--delay-s", type=float, default=0.0, help="time from a reference to its effect"
    )
    parser.add_argument(
        "--friction-nm", type=float, default=0.0, help="friction left of each joint"
    )
    parser.add_argument(
        "--identify", action="store_true", help="sway for 6 s by 0.2 rad and print the three"
    )
    args = parser.parse_args(argv)
    limits = ControlConfig(args.limits, args.derating).joint_limits()
    compensation = Compensation(args.delay_s, args.payload_kg, args.friction_nm)
    if args.identify and compensation != NO_COMPENSATION:
        parser.error(
            "--identify needs an arm without compensation; leave --delay-s, --payload-kg and "
            "--friction-nm out."
        )
    with np.printoptions(precision=4, suppress=True):
        print(
            "at q =",
            HOME_Q,
            "the flange must be at, in the base's frame:",
            dh_forward(HOME_Q)[:3, 3],
            "m",
        )
        cosmos = get_embodiment("droid").tool_frame.T_parent_cosmos
        print(
            "the hand's x axis points along",
            dh_forward(HOME_Q)[:3, 0],
            "and the Cosmos frame's, 135 degrees further, along",
        )
        print(
            (dh_forward(HOME_Q) @ cosmos)[:3, 0],
            "; the fingers open along the hand's y axis,",
            dh_forward(HOME_Q)[:3, 1],
        )
    if args.host is None:
        print(
            "no --host: nothing was connected. docs/real_franka.md has the checklist for the "
            "first motion."
        )
        return
    if franky is None:
        try:
            import franky
        except ModuleNotFoundError:
            raise SystemExit("franky is not installed: pip install franky-control") from None
    with FrankaArm(franky, args.host, limits, compensation) as arm:
        print(
            "the robot's flange and ours are {:.2f} mm and {:.3f} degrees apart".format(
                *frame_error(arm.robot)
            )
        )
        off_rad = first_motion(arm, limits)
        print(
            f"held, and turned joint 7 by 3 degrees and back: within {off_rad:.4f} "
            "rad of every reference"
        )
        if args.identify:
            q, _, opening = arm.joint_state()
            executor = Executor(limits, arm.dt_s, q, opening)
            found = identify(arm, executor, load_panda(), STIFFNESS, DAMPING)
            print("identified", replace(found, delay_s=max(found.delay_s - BUFFER_S, 0.0)))


if __name__ == "__main__":
    main()
