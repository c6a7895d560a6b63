"""What a runner may read and call: each member of the contract, and that it is honest.
strands-robots' own word on the members is in test_strands_robots.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.spy import DROID, KEYS, Spy, flat
from strands_cosmos3.backends.replay import Recording
from strands_cosmos3.errors import ConfigError, InputError, ObservationError, UnknownNameError
from strands_cosmos3.policy import Cosmos3Policy, Policy
from strands_cosmos3.robots.panda import FER, HOME_Q

VIEWS = {
    name: np.full((90, 160, 3), 60 + 60 * i, np.uint8) for i, name in enumerate(DROID.rig.views)
}


def test_what_it_says_of_itself(policy):
    assert policy.provider_name == "cosmos3"
    assert policy.reads_instruction
    assert not policy.supports_rtc  # chunks are not blended into their predecessors here
    assert policy.required_bodies == policy.children == ()
    assert policy.requires_action_controller is None
    assert Policy.requires_images
    recording = Recording(np.tile(np.eye(4), (3, 1, 1)), np.ones(3), 15.0, np.zeros(7))
    replay = Cosmos3Policy(robot="panda", backend="replay", model=recording)
    assert not replay.reads_instruction
    assert replay.instruction_free_actions == "a recorded motion"
    assert Cosmos3Policy.reads_instruction


def test_the_horizon_is_the_chunk_in_the_caller_s_steps(policy, spy):
    assert (policy.execution_horizon, policy.is_chunk_emitting()) == (16, True)
    policy.set_control_frequency(50)
    assert policy.execution_horizon == 54  # 16 rows of 15 Hz
    # this one had 32
    assert len(policy.get_actions_sync(flat(spy.q_start), "go")) == policy.execution_horizon == 107
    policy.reset()
    assert policy.execution_horizon == 54
    few = Cosmos3Policy(robot="panda", backend=spy, actions_per_step=10)
    few.set_control_frequency(50)
    assert few.execution_horizon == len(few.get_actions_sync(flat(spy.q_start), "go")) == 10
    spy.info = replace(spy.info, replan_rows=8)  # as a checkpoint may say of itself
    half = Cosmos3Policy(robot="panda", backend=spy)
    assert (half.replan_rows, half.execution_horizon) == (8, 8)
    half.set_control_frequency(50)
    # 8 rows of 15 Hz
    assert half.execution_horizon == len(half.get_actions_sync(flat(spy.q_start), "go")) == 27
    assert few.replan_rows == few.execution_horizon == 10  # who says otherwise wins
    single = Cosmos3Policy(robot="panda", backend=spy, actions_per_step=1)
    assert not single.is_chunk_emitting()


def test_the_horizon_of_joint_angles_is_told_before_they_are(spy):
    """Rows of 15 Hz, the first for now: 32 end after 31 / 15 s, and the ninth is due after 8 /
    15 s. Raw ones likewise.
    """
    joints = Spy(joints_rad_s=np.zeros(7))
    observation = flat() | {f"joint_{i}": 0.5 for i in range(7)} | {"gripper": 0.2}
    for robot in ("panda", None):
        for own, rows, steps in (
            (None, None, 104),
            (None, 32, 104),
            (8, None, 27),
            (40, None, 104),
        ):
            # as a checkpoint may say of itself
            joints.info = replace(joints.info, replan_rows=own)
            policy = Cosmos3Policy(
                robot=robot, backend=joints, action_space="joint_pos", options={"chunk_rows": rows}
            )
            policy.set_control_frequency(50)
            assert policy.execution_horizon == steps
            assert (
                len(policy.get_actions_sync(observation, "go")) == policy.execution_horizon == steps
            )
    spy.info = replace(spy.info, replan_rows=8)
    deltas = Cosmos3Policy(backend=spy, options={"chunk_rows": 24})
    deltas.set_control_frequency(50)
    assert deltas.execution_horizon == len(deltas.get_actions_sync(observation, "go")) == 8
    assert Cosmos3Policy(backend=Spy(), options={"chunk_rows": 24}).execution_horizon == 24


def test_the_motion_goes_on_where_the_answered_steps_end(spy):
    """A flat observation tells no time; a replay, or a server that replays, goes by what was
    handed out.
    """
    policy = Cosmos3Policy(robot="panda", backend=spy)
    policy.set_control_frequency(50)
    for _ in range(3):
        policy.get_actions_sync(flat(spy.q_start), "go")
    np.testing.assert_allclose(
        [request.t_motion_s for request in spy.requests], [0, 32 / 15, 64 / 15], atol=1e-9
    )
    policy.actions_per_step = 10
    policy.reset()
    for _ in range(3):
        policy.get_actions_sync(flat(spy.q_start), "go")
    np.testing.assert_allclose(
        [request.t_motion_s for request in spy.requests[3:]], [0, 0.2, 0.4], atol=1e-9
    )


def test_stretched_time_is_not_motion():
    brisk = Spy(joints_rad_s=np.array([0.9, 0, 0, 0, 0, 0, 0]))
    policy = Cosmos3Policy(
        robot="panda", backend=brisk, action_space="joint_pos", options={"limits": FER.derated(0.3)}
    )
    policy.set_control_frequency(50)
    steps = policy.get_actions_sync(flat(), "go")
    assert len(steps) == policy.execution_horizon > 130  # 104 at the chunk's own rate
    policy.get_actions_sync(flat(), "go")
    assert brisk.requests[1].t_motion_s == pytest.approx(31 / 15)


def test_an_observed_delay_leaves_out_what_is_over(policy, spy):
    policy.set_control_frequency(50)
    whole = policy.get_actions_sync(flat(spy.q_start), "go")
    policy.set_rtc_observed_delay(20)  # observed 20 steps before the last chunk's end
    late = policy.get_actions_sync(flat(spy.q_start), "go")
    assert late == whole[20:]
    assert spy.requests[1].t_motion_s == pytest.approx(87 / 50)
    policy.set_rtc_observed_delay(0)
    policy.get_actions_sync(flat(spy.q_start), "go")
    assert spy.requests[2].t_motion_s == pytest.approx(spy.requests[1].t_motion_s + 32 / 15)
    policy.set_rtc_observed_delay(1000)
    assert policy.get_actions_sync(flat(spy.q_start), "go") == whole[-1:]  # something is left to do
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(InputError):
            policy.set_rtc_observed_delay(wrong)
    policy.set_rtc_observed_delay(None)
    assert len(policy.get_actions_sync(flat(spy.q_start), "go")) == 107


TURN_RAD_S = np.array([0.0, 0.3, 0.0, 0.45, 0.0, 0.0, -0.6])
PERIOD_S = 1 / 40


def turning(robot="panda", **options):
    """A policy whose rows turn joints 2, 4 and 7 evenly from where they are, 40 steps a second."""
    backend = Spy(joints_rad_s=TURN_RAD_S)
    policy = Cosmos3Policy(robot=robot, backend=backend, action_space="joint_pos", **options)
    policy.set_control_frequency(1 / PERIOD_S)
    return policy, backend


def seen(policy, q_rad):
    keys = KEYS if policy.robot else [*(f"joint_{i}" for i in range(7)), "gripper"]
    return dict(zip(keys, [*map(float, q_rad), 0.04], strict=True))


def angles(step):
    return np.array(list(step.values()))[:7]


def require_departure(steps, q_rad):
    """The first step is no farther from where the arm is than it goes in a period; a chunk may end
    within one.
    """
    assert np.abs(angles(steps[0]) - q_rad).max() <= 1.5 * np.abs(TURN_RAD_S).max() * PERIOD_S


@pytest.mark.parametrize("robot", ["panda", None])
@pytest.mark.parametrize("end", ["beginning", "reset", "reseeded", "batch"])
def test_the_first_answer_of_an_episode_departs_from_the_arm_whatever_the_delay(robot, end):
    policy, _ = turning(robot)
    policy.set_rtc_observed_delay(17)
    if end != "beginning":
        policy.get_actions_sync(seen(policy, HOME_Q), "go")
        policy.set_rtc_observed_delay(17)
        if end == "batch":
            policy.get_actions_batch([seen(policy, HOME_Q)], "go")
        else:
            policy.reset(*([4] if end == "reseeded" else []))
        assert policy.rtc_observed_delay_steps is None
    require_departure(policy.get_actions_sync(seen(policy, HOME_Q), "go"), HOME_Q)


@pytest.mark.parametrize("robot", ["panda", None])
@pytest.mark.parametrize(
    ("steps", "played", "delay", "left_out"),
    [
        (None, None, 23, 23),  # asked ahead, and 23 steps remain, as the host says
        (12, 12, 1, 0),  # all are played: the arm waits at the end
        (12, 12, 7, 0),
        (12, 12, 300, 0),
        (12, 8, 300, 4),  # asked ahead, and the answer came much later
        (12, 8, 4, 4),
        (12, 8, 3, 3),
    ],
)
def test_steps_that_nobody_played_are_not_left_out(robot, steps, played, delay, left_out):
    policy, backend = turning(robot, actions_per_step=steps)
    answered = policy.get_actions_sync(seen(policy, HOME_Q), "go")
    played = len(answered) - (left_out if steps is None else steps - played)
    q_rad = angles(answered[played - 1])
    policy.set_rtc_observed_delay(delay)
    late = policy.get_actions_sync(seen(policy, q_rad), "go")
    there = angles(answered[played + left_out - 1])  # the arm, once the answer is in
    require_departure(late, there)
    if robot is None:  # an arm takes time to get going
        motion_s = (len(answered) - left_out) * PERIOD_S
        assert backend.requests[1].t_motion_s == pytest.approx(motion_s)
    whole = turning(robot)[0].get_actions_sync(seen(policy, q_rad), "go")
    assert late == whole[left_out:][:steps]


def test_an_arm_that_only_held_departs_from_where_it_stands():
    policy, backend = turning()
    backend.joints_rad_s = np.zeros(7)
    policy.get_actions_sync(seen(policy, HOME_Q), "wait")
    backend.joints_rad_s = TURN_RAD_S
    policy.set_rtc_observed_delay(30)
    require_departure(policy.get_actions_sync(seen(policy, HOME_Q), "go"), HOME_Q)


def test_a_restored_policy_leaves_out_the_same_steps():
    policy, _ = turning(actions_per_step=12)
    answered = policy.get_actions_sync(seen(policy, HOME_Q), "go")
    policy.set_rtc_observed_delay(5)
    state = policy.snapshot()
    observation = seen(policy, angles(answered[6]))
    late = policy.get_actions_sync(observation, "go")
    policy.reset()
    policy.restore(state)
    assert policy.get_actions_sync(observation, "go") == late


def test_plan_of_a_flat_observation_goes_by_the_clock_on_the_wall(policy, spy, monkeypatch):
    now = [1e6]
    monkeypatch.setattr("strands_cosmos3.policy.cosmos3.time.monotonic", lambda: now[0])
    policy.plan(flat(spy.q_start), "go")
    now[0] += 0.75
    policy.plan(flat(spy.q_start), "go")
    assert [request.t_motion_s for request in spy.requests] == [0.0, 0.75]


def test_raw_joint_angles_come_at_the_control_frequency_and_deltas_do_not():
    speed = np.array([0.1, 0, 0.3, 0, 0, -0.2, 0])
    raw = Cosmos3Policy(
        backend=Spy(joints_rad_s=speed),
        action_space="joint_pos",
        action_mapping={"joint_0": "base"},
    )
    observation = {f"joint_{i}": 0.5 for i in range(7)} | {"gripper": 0.2}
    assert len(raw.get_actions_sync(observation, "go")) == 32
    raw.set_control_frequency(50)
    steps = raw.get_actions_sync(observation, "go")
    assert list(steps[0]) == ["base", *(f"joint_{i}" for i in range(1, 7)), "gripper"]
    assert len(steps) == 104  # row 31 is due after 31 / 15 s
    rows = np.array([list(step.values()) for step in steps])
    inside = np.arange(1, 104) / 50
    np.testing.assert_allclose(rows[:-1, :7], 0.5 + inside[:, None] * speed, atol=1e-12)
    np.testing.assert_allclose(rows[:, 7], 0.2)
    deltas = Cosmos3Policy(backend=Spy())
    deltas.set_control_frequency(50)
    assert len(deltas.get_actions_sync(observation, "go")) == 32


def test_the_instruction_may_change_from_call_to_call(policy, spy):
    for words in ("pick up the red cube", "put it down", "pick up the red cube"):
        policy.get_actions_sync(flat(spy.q_start), words)
    assert [request.instruction for request in spy.requests] == [
        "pick up the red cube",
        "put it down",
        "pick up the red cube",
    ]


def test_cameras_by_name_or_mapped_are_letterboxed_and_composed():
    spy = Spy(requires_images=True)
    own = {"front": VIEWS["exterior_1"], "left": VIEWS["exterior_2"], "hand": VIEWS["wrist"]}
    mapped = {"wrist": "hand", "exterior_1": "front", "exterior_2": "left"}
    Cosmos3Policy(robot="panda", backend=spy).get_actions_sync(flat(spy.q_start, **VIEWS), "go")
    Cosmos3Policy(robot="panda", backend=spy, observation_mapping=mapped).get_actions_sync(
        flat(spy.q_start, **own), "go"
    )
    by_name, by_mapping = (request.composite for request in spy.requests)
    assert by_name.shape == (540, 640, 3)
    assert np.array_equal(by_name, by_mapping)
    assert [int(by_name[at][0]) for at in ((180, 320), (450, 160), (450, 480))] == [60, 120, 180]
    wide = flat(spy.q_start, **{**VIEWS, "wrist": np.full((100, 100, 3), 200, np.uint8)})
    Cosmos3Policy(robot="panda", backend=spy).get_actions_sync(wide, "go")
    boxed = spy.requests[2].composite
    # black at the sides: its shape is kept
    assert [int(boxed[180, x, 0]) for x in (100, 320, 540)] == [0, 200, 0]


def test_a_missing_camera_is_named_before_construction_ends():
    spy = Spy(requires_images=True)
    with pytest.raises(
        ConfigError, match=r"none for 'exterior_1', 'exterior_2'.*'exterior_1': '<its camera>'"
    ):
        Cosmos3Policy(robot="panda", backend=spy, observation_mapping={"wrist": "hand"})
    with pytest.raises(
        ObservationError, match=r"lacks camera 'exterior_2'; it has: wrist, exterior_1, overview"
    ):
        Cosmos3Policy(
            robot="panda", backend=spy, options={"cameras": ["wrist", "exterior_1", "overview"]}
        )
    mapped = {"wrist": "hand", "exterior_1": "front", "exterior_2": "left"}
    with pytest.raises(ObservationError, match=r"'left' \(view 'exterior_2'\)"):
        Cosmos3Policy(
            robot="panda",
            backend=spy,
            observation_mapping=mapped,
            options={"cameras": ["hand", "front"]},
        )
    assert spy.closed == 3  # a policy that was not made keeps nothing open
    with pytest.raises(InputError, match="cameras must be"):
        Cosmos3Policy(robot="panda", backend=spy, options={"cameras": "wrist"})
    Cosmos3Policy(
        robot="panda",
        backend=spy,
        observation_mapping=mapped,
        options={"cameras": ["hand", "front", "left"]},
    )
    # it looks at none
    Cosmos3Policy(robot="panda", backend=Spy(), observation_mapping={"wrist": "hand"})


MAPPED = {"wrist": "hand", "exterior_1": "front", "exterior_2": "left"}
KNOWN = {*KEYS, *VIEWS, "joint1.vel"}


@pytest.mark.parametrize(
    ("keys", "config", "says"),
    [
        (KNOWN - {"exterior_2"}, {}, r"'exterior_2'.*wrist"),
        (KNOWN - {"joint4", "finger_joint1"}, {}, r"lacks 'joint4', 'finger_joint1'"),
        (KNOWN, {"observation_mapping": {"wrist": "hand"}}, "'exterior_1'"),
        (
            KNOWN,
            {"observation_mapping": {"wrist_cam": "hand"}},
            "is not a canonical name or a view",
        ),
        (KNOWN, {"action_mapping": {"tx": "x"}}, "not a column"),
        (KNOWN, {"backend": "scripted"}, "strands_cosmos3.Robot"),
        (KNOWN, {"robot": "spot"}, "panda"),
        (KNOWN, {"backend": "bogus"}, r"unknown backend 'bogus'.*native"),
        (KNOWN, {"nonsense": 1}, r"unknown policy option 'nonsense'; valid: embodiment"),
        (KNOWN, {"num_steps": -1}, "num_steps must be at least 1"),
        (KNOWN, {"dtype": "float8"}, "float8"),
        (KNOWN, {"mode": "dream"}, "dream"),
        (KNOWN, {"options": {"chunk_rows": 0}}, "chunk_rows"),
        (KNOWN, {"action_space": "velocity"}, "midtrain"),
        (KNOWN, {"embodiment": "toaster"}, "toaster"),
        (KNOWN, {"robot": None}, r"joint_0.*gripper.*robot='panda'"),
        (KNOWN, {"robot": None, "backend": "native"}, r"tx.*robot='panda'"),
    ],
)
def test_preflight_refuses_before_anything_is_made(keys, config, says):
    with pytest.raises(ValueError, match=says):
        Cosmos3Policy.preflight(
            keys, **{"robot": "panda", "model": "/no/such/checkpoint", **config}
        )


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        (KNOWN, {}),
        (KNOWN, {"port": 8000, "prompt": "go"}),
        (set(KEYS), {"backend": "replay"}),
        (set(KEYS), {"backend": Spy()}),
        (
            {*KEYS, "hand", "front", "left"},
            {"observation_mapping": {"wrist": "hand", "exterior_1": "front", "exterior_2": "left"}},
        ),
        (
            {*KEYS, *VIEWS},
            {"robot": None, "action_mapping": {f"joint_{i}": f"actuator{i + 1}" for i in range(7)}},
        ),
        ({"joint_0", *VIEWS}, {"robot": None}),
        # its one picture has no name of its own
        ({*KEYS, "any"}, {"embodiment": "bridge", "backend": "native"}),
    ],
)
def test_preflight_lets_pass_what_can_run(keys, config):
    Cosmos3Policy.preflight(keys, **{"robot": "panda", **config})


def test_a_closed_policy_answers_no_more(spy):
    with Cosmos3Policy(robot="panda", backend=spy) as policy:
        policy.get_actions_sync(flat(spy.q_start), "go")
    policy.close()
    assert spy.closed == 2
    with pytest.raises(ConfigError, match="closed"):
        policy.get_actions_sync(flat(spy.q_start), "go")


def test_mappings_are_checked_when_the_policy_is_made():
    with pytest.raises(ConfigError, match=r"'joint_9' is not a column.*joint_6, gripper"):
        Cosmos3Policy(robot="panda", backend=Spy(), action_mapping={"joint_9": "x"})
    with pytest.raises(ConfigError, match=r"'joint_0' is not a column.*tx"):
        Cosmos3Policy(backend=Spy(), action_mapping={"joint_0": "x"})
    with pytest.raises(UnknownNameError, match="tendon"):
        Cosmos3Policy(robot="panda", backend=Spy(), options={"commanded_gripper": "teeth"})
    with pytest.raises(ConfigError, match="have the same key 'joint2'"):
        Cosmos3Policy(robot="panda", backend=Spy(), observation_mapping={"joint_0": "joint2"})
