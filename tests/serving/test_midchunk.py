"""Faults of a service while an arm is driven: in mid-chunk it brakes, holds, and goes on if it
can; before that it stays at rest.

test_faults.py shows that every fault is declared as one of five errors. Here one of each is
driven through: what an arm does depends on the error alone.
"""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from helpers.fault_table import HANDSHAKE, cells
from helpers.faulty_server import HTTP
from helpers.faulty_service import ENDS_THE_SERVER, backend, held, named, patience, start
from helpers.serving import until
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.errors import BackendError, ServiceError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.types import ActionChunk, Outcome, Request
from strands_cosmos3.worlds.arms import Robot

pytestmark = pytest.mark.usefixtures("few_collected")
FOR_GOOD = ("kill", *HTTP)
"""No later dial is answered any better."""


@pytest.fixture(scope="module")
def robot() -> Robot:
    return Robot("panda")


@pytest.fixture(scope="module")
def shared():
    process, port = start()
    yield port
    process.kill()
    process.communicate()


def policy(service: ServiceBackend) -> Cosmos3Policy:
    return Cosmos3Policy(robot="panda", backend=service)


def assert_lawful(rollout) -> None:
    """Limits at every physics step of what was commanded, and rest at the end, from the recorded
    angles alone.
    """
    q = rollout.arrays["q_commanded_rad"]
    assert np.isfinite(q).all()
    assert ((q >= FER.q_min) & (q <= FER.q_max)).all()
    v = np.diff(q, axis=0) * 600
    a = np.diff(v, axis=0) * 600
    assert (np.abs(v) <= FER.velocity * 1.01).all()
    assert (np.abs(a) <= FER.acceleration * 1.05).all()
    assert np.abs(v[-1]).max() < 1e-9


BEFORE = ("garbage", "unauthorized", "wrong_dtype", "nan", "cut")
DURING = ("kill", "hang", "cut", "wrong_dtype", "traceback", "nan", "unauthorized")


def test_the_faults_that_are_driven_through_are_of_every_kind():
    kinds = {error for _, _, error in cells("midchunk")}
    assert len(kinds) == 5
    assert {error for _, fault, error in cells("midchunk") if fault in DURING} == kinds


@pytest.mark.parametrize(
    ("phase", "fault", "error"),
    [cell for cell in cells(*HANDSHAKE, "inference") if cell[1] in BEFORE],
    ids=named,
)
def test_a_fault_before_the_first_chunk_leaves_the_arm_at_rest(
    robot: Robot, shared: int, phase: str, fault: str, error: type[Exception]
):
    """Declared as in test_faults.py, raised to the caller; the reference stays where it was,
    IDLE.
    """
    service = backend(shared, f"{phase}/{fault}", patience(phase, fault, error))
    with policy(service) as asking, pytest.raises(ServiceError) as caught:
        robot.run_policy(policy=asking, instruction="sway", duration=1.0)
    assert type(caught.value).__name__ == (
        "ServiceClosedError" if phase == "inference" and fault in HTTP else error.__name__
    )
    assert robot.executor.state is ExecutorState.IDLE
    assert np.array_equal(robot.executor.reference.q_rad, HOME_Q)
    assert not robot.executor.reference.qd_rad_s.any()


@pytest.mark.parametrize(
    ("phase", "fault", "error"), [c for c in cells("midchunk") if c[1] in DURING], ids=named
)
def test_a_fault_in_mid_chunk_is_held_out(
    robot: Robot,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    fault: str,
    error: type[Exception],
):
    """``restart`` has its own test below: somebody has to start the server again."""
    process, port = start() if fault in ENDS_THE_SERVER else (None, shared)
    before = held()
    service = backend(port, f"{phase}/{fault}", patience(phase, fault, error))
    declared, infer = [], service.infer

    def noted(request: Request) -> ActionChunk:
        try:
            return infer(request)
        except ServiceError as failure:
            declared.append(type(failure))
            raise

    monkeypatch.setattr(service, "infer", noted)
    with policy(service) as asking:
        rollout = robot.run_policy(policy=asking, instruction="sway", duration=4.9, latency=0.5)
    assert error in declared
    # one that was broken off when the episode ended is not counted
    assert 1 <= rollout.counters["failed"] <= len(declared)
    assert_lawful(rollout)
    if fault in FOR_GOOD:
        assert rollout.outcome is Outcome.FAULT
        assert rollout.final_state == "hold"
        assert ("no policy server" if fault == "kill" else f"{port}/midchunk/{fault}") in str(
            rollout.fault
        )
    else:
        assert rollout.outcome is Outcome.COMPLETED
        assert rollout.counters["chunks"] >= 2  # it moved, something failed, it moved again
        assert rollout.counters["reconnects"] >= 1
    assert rollout.arrays["q_commanded_rad"][-1, 0] - rollout.arrays["q_commanded_rad"][0, 0] > 0.1
    assert len((rollout.fault or "").splitlines()) <= 1
    until(lambda: held() == before)
    if process is not None:
        process.communicate()


def test_a_server_that_comes_back_is_taken_up_from_the_hold(robot: Robot):
    """It dies in the second exchange, while the arm moves, and is started again when the arm has
    held for half a second.
    """
    before = held()
    process, port = start()
    config = ClientConfig(
        f"ws://127.0.0.1:{port}/midchunk/restart/somebody", attempts=1, connect_s=0.5
    )
    running, held_s, resumed_s = [process], [], []

    def trouble(robot: Robot) -> None:
        now_s, state = robot.now_s(), robot.executor.state
        if state is ExecutorState.HOLD and not held_s:
            assert process.wait() == 1  # by itself
            held_s.append(now_s)
        elif held_s and now_s > held_s[0] + 0.5 and len(running) == 1:
            running.append(start(port, "well")[0])
        elif len(running) == 2 and state is ExecutorState.RUNNING and not resumed_s:
            resumed_s.append(now_s)

    with policy(ServiceBackend(PolicyClient(config), requires_images=False)) as asking:
        rollout = robot.run_policy(
            policy=asking, instruction="sway", duration=7.0, latency=0.3, on_tick=trouble
        )
    assert held_s[0] + 0.5 < resumed_s[0] < held_s[0] + 3.0
    assert rollout.counters["deadline_misses"] >= 1
    assert rollout.counters["reconnects"] >= 1
    assert rollout.counters["idle_ticks"] > 20
    q, t = rollout.arrays["q_commanded_rad"][:, 0], rollout.arrays["t_s"]
    assert np.ptp(q[(t > held_s[0] + 0.4) & (t < resumed_s[0] - 0.02)]) == 0.0
    assert q[t > resumed_s[0] + 1.0][0] > q[t < resumed_s[0] - 0.02][-1] + 0.02  # it moves again
    assert_lawful(rollout)
    running[1].kill()
    for each in running:
        each.communicate()
    until(lambda: held() == before)


def test_a_hung_server_does_not_keep_the_episode_from_ending(robot: Robot, shared: int):
    service = backend(shared, "midchunk/hang", read_s=60.0)
    started = time.monotonic()
    with policy(service) as asking:
        rollout = robot.run_policy(policy=asking, instruction="sway", duration=3.5, realtime=True)
    # the exchange was broken off; it would have waited for a minute
    assert time.monotonic() - started < 15.0
    assert rollout.counters["deadline_misses"] == 1
    assert rollout.counters["abandoned_inferences"] == 0
    assert rollout.outcome is Outcome.COMPLETED  # shorter than the loop's patience, but it is said:
    assert rollout.final_state == "hold"
    assert re.fullmatch(
        r"the arm has held for 1\.\d+ s; the policy has not answered for \d+\.\d+ s\.",
        str(rollout.held),
    )
    assert rollout.to_dict()["held"] == rollout.held
    assert_lawful(rollout)


def test_a_hold_longer_than_patience_at_an_episodes_end_is_a_fault(robot: Robot, shared: int):
    """Nothing has failed so far, for the server's deadline is a minute; but most of the episode
    was spent on waiting.
    """
    service = backend(shared, "midchunk/hang", read_s=60.0)
    with policy(service) as asking:
        rollout = robot.run_policy(policy=asking, instruction="sway", duration=8.0, realtime=True)
    assert rollout.outcome is Outcome.FAULT
    assert "the policy has not answered for" in str(rollout.fault)
    assert rollout.final_state == "hold"
    assert rollout.counters["failed"] == 0
    assert_lawful(rollout)


@pytest.mark.parametrize("task", [None, "reach"])
def test_an_episode_in_which_nothing_was_answered_is_no_episode(
    robot: Robot, shared: int, task: str | None
):
    """Not "completed", nor one more failure of a policy that was never heard."""
    before = held()
    service = backend(shared, "inference/hang", read_s=60.0)
    with policy(service) as asking, pytest.raises(BackendError, match="returned no chunk"):
        robot.run_policy(
            policy=asking, instruction="reach the red cube", task=task, duration=0.5, realtime=True
        )
    until(lambda: held() == before)
