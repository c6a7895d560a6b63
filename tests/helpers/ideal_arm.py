"""An arm that follows perfectly, on a clock of its own: what the loop does without the physics."""

import numpy as np

from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.loop import ControlLoop, LoopConfig
from strands_cosmos3.errors import BackendError
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.types import JointTrajectory

DT = 1 / 600
FPS = 15.0


class IdealArm:
    dt_s = DT

    def __init__(self, q=HOME_Q):
        self.q, self.qd, self.gripper, self.steps = q.copy(), np.zeros(len(q)), 1.0, 0
        self.blocks = []

    def now_s(self):
        return self.steps * DT

    def joint_state(self):
        return self.q.copy(), self.qd.copy(), self.gripper

    def execute(self, block, before):
        self.steps += len(block)
        self.q, self.qd, self.gripper = (
            block.q_rad[-1].copy(),
            block.qd_rad_s[-1].copy(),
            float(block.gripper[-1]),
        )
        self.blocks.append(block)
        return block.q_rad.copy(), block.gripper.copy()


def sway(t_s):
    """[M, 7] where a smooth motion about home is at times [M]."""
    return HOME_Q + 0.2 * np.sin(0.9 * np.asarray(t_s))[:, None] * np.linspace(0.3, 1, 7)


class Swaying:
    """Plans the same motion whoever asks: chunk rows from the arm's own clock at the observation
    on.
    """

    def __init__(self, arm, rows=32, lead=1):
        self.arm, self.rows, self.lead, self.seen, self.fail = (
            arm,
            rows,
            lead,
            [],
            lambda call: None,
        )

    def observe(self, action_prefix):
        self.seen.append((self.arm.now_s(), action_prefix))
        return self.arm.now_s(), len(self.seen)

    def plan(self, observation):
        now_s, call = observation
        self.fail(call)
        t_s = (np.arange(self.rows) + self.lead) / FPS
        return JointTrajectory(sway(now_s + t_s), t_s, np.full(self.rows, 0.5))


def failing(*calls):
    def fail(call):
        if call in calls:
            raise BackendError(f"call {call} has no answer")

    return fail


def make_loop(arm=None, planner=None, **config):
    arm = arm or IdealArm()
    joined = []
    loop = ControlLoop(
        arm,
        planner or Swaying(arm),
        Executor(FER, DT, arm.q),
        LoopConfig(**config),
        lambda what, begun: joined.append((what, begun)),
    )
    return arm, loop, joined
