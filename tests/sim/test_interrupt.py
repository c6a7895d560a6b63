"""Ctrl-C between ticks: the first is noted, the second raises, and the handler that was there
comes back.
"""

import signal
import threading
import time

import pytest

from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.sim.interrupt import deferred_interrupt
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend


def test_the_first_is_noted_and_the_second_raises():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        assert not interrupt.forced
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupt.forced
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with deferred_interrupt() as interrupt:
            seen.append((interrupt.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


class Hangs(ScriptedBackend):
    """Answers once and then not until it is let go."""

    def __init__(self):
        super().__init__()
        self.calls, self.hung, self.gate = 0, threading.Event(), threading.Event()

    def infer(self, request):
        self.calls += 1
        if self.calls > 1:
            self.hung.set()
            self.gate.wait()
        return super().infer(request)


@pytest.mark.parametrize("config", [{"latency": 0.3}, {"realtime": True}])
def test_a_second_one_moves_the_arm_no_further_and_waits_for_nothing(config):
    """Both between the same two ticks, while an inference hangs: neither braking nor the
    inference is waited for.
    """
    robot, backend, ticks, steps = Robot("panda"), Hangs(), [], []

    def insist(robot):
        ticks.append(robot.now_s())
        if not backend.hung.is_set():
            return
        robot.on_step = lambda q, gripper: steps.append(q)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    policy = Cosmos3Policy(robot="panda", backend=backend)
    with pytest.raises(KeyboardInterrupt):
        robot.run_policy(
            policy=policy, instruction="reach the red cube", duration=5.0, on_tick=insist, **config
        )
    assert not steps
    # it hangs still: nobody waited for it
    assert any(thread.name == "planner" for thread in threading.enumerate())
    backend.gate.set()
    until = time.monotonic() + 10.0
    while (
        any(thread.name == "planner" for thread in threading.enumerate())
        and time.monotonic() < until
    ):
        time.sleep(0.01)
    assert not any(thread.name == "planner" for thread in threading.enumerate())
    policy.close()
