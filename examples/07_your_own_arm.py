"""The loop that never stalls, on an arm of your own: where a libfranka or ROS 2 bridge sits.

    python examples/07_your_own_arm.py

An arm is four things to the loop: the time between two references, a clock, its joints now, and a
way to follow references. Here it is a stand-in that follows perfectly in wall-clock time. The
comments say what a real one does in its place. The policy replays a short circle; with
`backend="service"` or `"native"` nothing else changes.
"""

import time

try:
    import mink  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[sim]'") from None
import numpy as np

from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends.replay import Recording
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.loop import ControlLoop, LoopConfig
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.types import Observation


class MyArm:
    """A bridge to a robot. libfranka runs at 1 kHz, ros2_control at what its configuration says."""

    dt_s = 1e-3

    def __init__(self):
        self.q, self.qd, self.gripper = HOME_Q.copy(), np.zeros(7), 1.0
        self._next_s = time.monotonic()

    def now_s(self):
        return time.monotonic()

    def joint_state(self):
        # libfranka: franka::RobotState's q and dq, and franka::GripperState's width / max_width.
        # ROS 2: the latest sensor_msgs/JointState, stamped; refuse one that is older than a tick.
        return self.q.copy(), self.qd.copy(), self.gripper

    def execute(self, block, before):
        # libfranka: hand block.q_rad (M x 7 at 1 kHz) to the thread inside robot.control(), which
        # takes one row a cycle and
        # keeps the last one if none is left; it has left its limits nowhere, so no reflex is
        # triggered.
        # ROS 2: publish the rows as a trajectory_msgs/JointTrajectory with their times, velocities
        # and accelerations.
        # Either way return what was measured after each row, and raise ActuatorGuardError rather
        # than send what is unfit.
        self._next_s = max(self._next_s + len(block) * self.dt_s, time.monotonic() - 0.1)
        time.sleep(max(self._next_s - time.monotonic(), 0.0))
        self.q, self.qd, self.gripper = (
            block.q_rad[-1],
            block.qd_rad_s[-1],
            float(block.gripper[-1]),
        )
        return block.q_rad, block.gripper


class Eyes:
    """What the policy is shown, and what it answers. `observe` runs between two ticks, `plan`
    beside the motion.
    """

    def __init__(self, policy, arm, instruction):
        self.policy, self.arm, self.instruction = policy, arm, instruction
        self.started_s = arm.now_s()

    def observe(self, action_prefix):
        q, qd, gripper = self.arm.joint_state()
        # {"wrist": [H, W, 3] uint8, "exterior_1": ..., "exterior_2": ...} from your cameras
        frames = {}
        return Observation(q, gripper, frames, qd, t_capture_s=self.arm.now_s() - self.started_s)

    def plan(self, observation):
        return self.policy.plan(observation, self.instruction)


# A circle of 8 cm in the plane of the tool, twice in four seconds: a stand-in for a model.
t_s = np.arange(61) / 15
T = np.repeat(
    (dh_forward(HOME_Q) @ get_embodiment("droid").tool_frame.T_parent_cosmos)[None],
    len(t_s),
    axis=0,
)
T[:, 0, 3] += 0.04 * (np.cos(np.pi * t_s) - 1)
T[:, 1, 3] += 0.04 * np.sin(np.pi * t_s)
circle = Recording(T, np.ones(len(t_s)), 15.0, HOME_Q)

arm = MyArm()
with Cosmos3Policy("droid", robot="panda", backend="replay", model=circle) as policy:
    executor = Executor(FER, arm.dt_s, arm.joint_state()[0])
    loop = ControlLoop(
        arm, Eyes(policy, arm, "draw a circle"), executor, LoopConfig(hz=50, latency_s=None)
    )
    path = []
    try:
        for _ in range(250):
            tick = loop.tick()
            path.append(dh_forward(tick.q_rad[-1])[:3, 3])
        executor.stop()  # brake within the limits
        while executor.reference.qd_rad_s.any():
            loop.advance()
    finally:
        loop.close(cancel=policy.cancel)

print("state            ", executor.state, f"after {len(path) / 50:.1f} s")
print("the hand moved in", np.round(np.ptp(path, axis=0) * 1e3, 1), "mm along x, y, z")
print("counters         ", {**executor.counters, **loop.counters})
