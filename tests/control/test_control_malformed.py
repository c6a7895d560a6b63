"""A thousand malformed calls over every public function of control: one of our own errors each,
and nothing moves.
"""

import mujoco
import numpy as np
import pytest

from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.control.targets import decode_cosmos_chunk_to_targets
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.robots.servo import JointServo
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.types import JointTrajectory

CALLS = 1000
DT = 1 / 600
DROID = get_embodiment("droid")
MODEL = load_panda()
BRIDGE = MinkIKBridge(MODEL)
SERVO = JointServo(MODEL)
FULL = np.r_[HOME_Q, 0.04, 0.04]
POSES = np.repeat(BRIDGE.ee_pose(FULL)[None], 3, axis=0)
ROWS = np.repeat([[-0.0110, 0.0762, 0.0231, 1, 0.0007, 0.0016, -0.0005, 1, -0.0448, 0]], 4, axis=0)
ROBOT = Robot()
NOTHING = [None, object(), "x", [], {}, 1j]


def spoil(rng, good):
    """A malformed stand-in for an array of numbers."""
    bad = np.array(good, dtype=np.float64)
    where = tuple(rng.integers(n) for n in bad.shape)
    kind = rng.choice(
        [
            "nan",
            "inf",
            "huge",
            "empty",
            "wide",
            "narrow",
            "rank",
            "text",
            "complex",
            "ragged",
            "other",
        ]
    )
    if kind in ("nan", "inf", "huge"):
        bad[where] = {
            "nan": np.nan,
            "inf": rng.choice([-1, 1]) * np.inf,
            "huge": rng.choice([-1, 1]) * 10 ** rng.uniform(12, 300),
        }[kind]
        return bad
    return {
        "empty": np.zeros((0, *bad.shape[1:])),
        "wide": np.concatenate([bad, bad], axis=-1),
        "narrow": bad[..., :-1],
        "rank": bad[None],
        "text": np.full(bad.shape, "x"),
        "complex": bad + 1j,
        "ragged": [[0.0], [0.0, 1.0]],
        "other": NOTHING[rng.integers(len(NOTHING))],
    }[kind]


def pick(rng, *values):
    return values[rng.integers(len(values))]


def bridge_constructor(rng):
    limits = tuple(
        getattr(FER, name)
        for name in ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque")
    )
    arguments = pick(
        rng,
        {"model": pick(rng, *NOTHING)},
        {"ee_frame_name": pick(rng, "", "nothing", None, 3, [], np.nan)},
        {"ee_frame_type": pick(rng, "", "joint", None, 3, [], {})},
        {"method": pick(rng, "", "lm", None, 3, [])},
        {"limits": pick(rng, "panda", 3, limits, {})},
        {
            "avoid_collisions": pick(
                rng,
                [3],
                [("a", "b")],
                [(["hand_collision"], ["x"])],
                [([1.5], [2])],
                [([-1], [9999])],
                5,
            )
        },
        {
            "avoid_collisions": [(["hand_collision"], ["link0_collision"])],
            "min_distance_m": pick(rng, np.nan, np.inf, "x", [1.0, 2.0]),
        },
    )
    return lambda: MinkIKBridge(**{"model": MODEL, **arguments})


def bridge_solve(rng):
    if (which := rng.integers(5)) == 0:
        return lambda: BRIDGE.solve(POSES, spoil(rng, FULL), DT)
    if which == 1:
        return lambda: BRIDGE.solve(
            POSES, FULL, pick(rng, 0.0, -1.0, np.nan, np.inf, "x", [], object())
        )
    if which == 2:
        return lambda: BRIDGE.solve(POSES, FULL, DT, pick(rng, "newton", 3, [], {}))
    if which == 3:
        skewed = POSES.copy()
        skewed[rng.integers(3), :3, rng.integers(3)] *= rng.choice([-1.0, 1.01, 0.0])
        return lambda: BRIDGE.solve(skewed, FULL, DT)
    bad = spoil(rng, POSES)
    return lambda: BRIDGE.solve(bad, FULL, DT)


def bridge_kinematics(rng):
    bad = spoil(rng, FULL)
    if rng.random() < 0.5:
        return lambda: BRIDGE.ee_pose(bad)
    name = pick(rng, "nothing", "left_finger", "world", "link3", None, 3, [])
    return pick(
        rng, lambda: BRIDGE.frame_in_ee("hand", bad), lambda: BRIDGE.frame_in_ee(name, FULL)
    )


def chunk_to_targets(rng):
    good = {"action_chunk": ROWS, "embodiment": DROID, "ik_bridge": BRIDGE, "q_init": FULL}
    wrong = pick(
        rng,
        {"action_chunk": spoil(rng, ROWS)},
        {"action_chunk": ROWS * rng.uniform(11, 1e6)},
        {
            "action_chunk": np.concatenate([ROWS[:, :3], np.zeros((4, 6)), ROWS[:, 9:]], axis=1)
            * np.nan
        },
        {"q_init": spoil(rng, FULL)},
        {"embodiment": pick(rng, "nothing", 3, None, "umi", "bridge", "robotwin", "libero", "av")},
        {"ik_bridge": pick(rng, *NOTHING)},
        {"action_space": pick(rng, "joint_pos", "pose_abs", "midtrained", 3)},
        {"fps": pick(rng, 0, -1, np.nan, "x", [])},
        {"stats": pick(rng, "umi", "nothing", "/nowhere.json", 3, object())},
    )
    return lambda: decode_cosmos_chunk_to_targets(**{**good, **wrong})


def executor_constructor(rng):
    good = {"limits": FER, "dt_s": DT, "q_rad": HOME_Q, "gripper": 1.0}
    wrong = pick(
        rng,
        {"limits": pick(rng, *NOTHING)},
        {"dt_s": pick(rng, 0, -DT, np.nan, np.inf, "x", None, [])},
        {"q_rad": spoil(rng, HOME_Q)},
        {"q_rad": HOME_Q + rng.choice([-1, 1]) * rng.uniform(4, 1e6)},
        {"gripper": pick(rng, np.nan, -0.1, 1.1, "open", None, [1.0])},
    )
    return lambda: Executor(**{**good, **wrong})


def executor_accept(rng, executor):
    q, t_s = np.repeat(HOME_Q[None], 4, axis=0), np.arange(1, 5) / 15
    which = rng.integers(6)
    if which == 0:
        return lambda: executor.accept(pick(rng, *NOTHING, q))
    if which == 1:
        return lambda: executor.accept(JointTrajectory(spoil(rng, q), t_s))
    if which == 2:
        bad_t = pick(rng, spoil(rng, t_s), t_s[::-1], t_s * 0, t_s - 1)
        return lambda: executor.accept(JointTrajectory(q, bad_t))
    if which == 3:
        return lambda: executor.accept(
            JointTrajectory(
                q, t_s, pick(rng, spoil(rng, np.ones(4)), np.full(4, 1.1), np.full(4, -1))
            )
        )
    if which == 4:
        far = q.copy()
        far[rng.integers(4), rng.integers(7)] = rng.choice([-1, 1]) * rng.uniform(4, 1e6)
        return lambda: executor.accept(JointTrajectory(far, t_s))
    return lambda: executor.advance(pick(rng, 0, -3, 1.5, np.nan, "x", None, []))


def limits_constructor(rng):
    names = ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque")
    fields = {name: getattr(FER, name) for name in names}
    name = pick(rng, *names)
    bad = pick(
        rng,
        spoil(rng, fields[name] + 0.0),
        -np.abs(fields[name]) - 1 if name not in ("q_min", "q_max") else np.full(7, np.nan),
    )
    if (
        isinstance(bad, np.ndarray)
        and bad.shape == (7,)
        and bad.dtype == float
        and np.isfinite(bad).all()
        and (bad > -1e9).all()
    ):
        bad = bad * np.nan  # a huge but finite limit is odd and harmless
    return pick(
        rng,
        lambda: JointLimits(**{**fields, name: bad}),
        lambda: FER.derated(pick(rng, 0.0, -1.0, 1.5, np.nan)),
    )


def servo(rng):
    data = mujoco.MjData(MODEL)
    qd = spoil(rng, np.zeros(7))
    if (
        isinstance(qd, np.ndarray)
        and qd.size
        and qd.shape[-1] == 7
        and qd.dtype == float
        and np.isfinite(qd).all()
    ):
        # huge speeds are led by no more than the actuator's range, and leading axes are free
        qd = qd * np.nan
    return pick(
        rng,
        lambda: JointServo(pick(rng, *NOTHING)),
        lambda: SERVO.velocity_feed_forward(HOME_Q, qd, np.zeros(7)),
        lambda: SERVO.no_feed_forward(qd),
        lambda: SERVO.computed_torque(data, HOME_Q, qd, np.zeros(7)),
        lambda: SERVO.computed_torque(data, HOME_Q, np.zeros(7), qd),
    )


def robot_execute(rng):
    n = 4
    fields = {
        "q_rad": np.repeat(HOME_Q[None], n, 0),
        "qd_rad_s": np.zeros((n, 7)),
        "qdd_rad_s2": np.zeros((n, 7)),
        "gripper": np.ones(n),
        "nominal_s": np.zeros(n),
    }
    name = pick(rng, *list(fields)[:4])
    bad = fields[name].copy()
    bad[tuple(rng.integers(k) for k in bad.shape)] = pick(rng, np.nan, np.inf, -np.inf)
    return lambda: ROBOT.execute(
        ReferenceBlock(**{**fields, name: bad}), JointState.at_rest(HOME_Q)
    )


SORTS = (
    bridge_constructor,
    bridge_solve,
    bridge_kinematics,
    chunk_to_targets,
    executor_constructor,
    executor_accept,
    limits_constructor,
    servo,
    robot_execute,
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sort", SORTS, ids=lambda sort: sort.__name__)
def test_malformed_calls(sort):
    rng = np.random.default_rng(11)
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(
        JointTrajectory(HOME_Q + np.linspace(0, 0.1, 17)[1:, None], np.arange(1, 17) / 15)
    )
    executor.advance(100)
    ROBOT.reset(0)
    before = (executor.reference, executor.state, dict(executor.counters), executor.motion_s)
    qpos, ctrl = ROBOT.data.qpos.copy(), ROBOT.data.ctrl.copy()
    for call in range(-(-CALLS // len(SORTS))):
        thunk = sort(rng, executor) if sort is executor_accept else sort(rng)
        try:
            answer = thunk()
        except Cosmos3Error:
            continue
        except BaseException as error:
            raise AssertionError(
                f"{sort.__name__} call {call}: {error!r} is none of ours"
            ) from error
        raise AssertionError(f"{sort.__name__} call {call} was answered: {answer!r}")
    assert np.array_equal(executor.reference.q_rad, before[0].q_rad)
    assert np.array_equal(executor.reference.qd_rad_s, before[0].qd_rad_s)
    assert (executor.state, dict(executor.counters), executor.motion_s) == before[1:]
    assert np.array_equal(ROBOT.data.qpos, qpos)
    assert np.array_equal(ROBOT.data.ctrl, ctrl)
    assert np.array_equal(
        BRIDGE.solve(POSES, FULL, 1 / 15).q_rad,
        MinkIKBridge(MODEL).solve(POSES, FULL, 1 / 15).q_rad,
    )
