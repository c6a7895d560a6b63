"""Chains of joints against MuJoCo's Jacobian; limits from the model, a table, the caller or the
named default.
"""

import warnings
from dataclasses import replace

import mujoco
import numpy as np
import pytest

from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.robots import limits as table
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import LimitsAssumedWarning, is_franka
from strands_cosmos3.robots.model import chain_to_body, load_panda
from strands_cosmos3.robots.panda import ARM_JOINTS, FER, FR3, HOME_Q

# Seven hinges called joint1 to joint7, as an xArm7's and an iiwa14's are, in ranges that are not a
# Franka's.
RANGES = [
    (-6.28, 6.28),
    (-2.06, 2.09),
    (-6.28, 6.28),
    (-0.19, 3.93),
    (-6.28, 6.28),
    (-1.69, 3.14),
    (-6.28, 6.28),
]
Q_OTHER = np.array([3.3, 0.4, -3.2, 1.2, 0.2, 0.9, -4.0])


def other_arm(limited=True):
    opening, closing = "", ""
    for i, (low, high) in enumerate(RANGES):
        span = f'limited="true" range="{low} {high}"' if limited or i else ""
        axis, at = ("0 0 1", "0 0 .2") if i % 2 == 0 else ("0 1 0", "0.05 0 .1")
        name = "hand" if i == 6 else f"link{i + 1}"
        opening += f'<body name="{name}" pos="{at}"><joint name="joint{i + 1}" axis="{axis}" {span}/><geom size=".02"/>'
        closing += "</body>"
    return mujoco.MjModel.from_xml_string(
        f'<mujoco><compiler angle="radian"/><worldbody>{opening}{closing}</worldbody></mujoco>'
    )


SLIDER = """<mujoco><worldbody><body pos=".1 .2 .3" euler="20 30 40"><joint name="rail" type="slide" axis="1 2 3"/>
<geom size=".1"/><body pos=".3 0 .1"><joint name="turn" axis="1 0 1" pos=".05 0 0"/><geom size=".1"/>
<body name="hand" pos="0 .2 .1"><joint name="bend" axis="0 1 0"/><geom size=".1"/></body></body></body></worldbody></mujoco>"""


@pytest.mark.parametrize(
    ("model", "joints"),
    [
        (load_panda(), ARM_JOINTS),
        (mujoco.MjModel.from_xml_string(SLIDER), ("rail", "turn", "bend")),
        (other_arm(), ARM_JOINTS),
    ],
    ids=["panda", "slider", "other"],
)
def test_a_chain_moves_its_point_as_mujocos_jacobian_does(model, joints):
    rng, chain = np.random.default_rng(0), chain_to_body(model, "hand", joints)
    data, jacobian, n = mujoco.MjData(model), np.zeros((3, model.nv)), len(joints)
    ids = [model.joint(name).id for name in joints]
    for _ in range(30):
        q, qd, qdd = rng.normal(size=(3, n))

        def at(t, q=q, qd=qd, qdd=qdd):
            data.qpos[model.jnt_qposadr[ids]] = q + t * (qd + t * qdd / 2)
            mujoco.mj_kinematics(model, data)
            return data.body("hand").xpos.copy()

        p, v, a = (x[0] for x in chain.motion(q[None], qd[None], qdd[None]))
        e = 1e-4
        np.testing.assert_allclose((at(e) - 2 * at(0) + at(-e)) / e**2, a, atol=1e-5)
        np.testing.assert_allclose(at(0), p, atol=1e-12)
        np.testing.assert_allclose(chain.position(q[None])[0], p, atol=1e-15)
        T = chain.frames(q[None])[0]
        np.testing.assert_allclose(T[:3, :3] @ chain.point_m + T[:3, 3], p, atol=1e-12)
        mujoco.mj_comPos(model, data)
        mujoco.mj_jacBody(model, data, jacobian, None, model.body("hand").id)
        np.testing.assert_allclose(jacobian[:, model.jnt_dofadr[ids]] @ qd, v, atol=1e-12)
        assert (
            np.linalg.norm(jacobian[:, model.jnt_dofadr[ids]], axis=0) <= chain.reach_m + 1e-12
        ).all()


def test_the_tables_limit_the_hand_that_the_model_has():
    chain = chain_to_body(load_panda(), "hand", ARM_JOINTS)
    q = np.random.default_rng(1).uniform(FER.q_min, FER.q_max, (50, 7))
    for limits, most in ((FER, 13.0), (FR3, 9.0)):
        np.testing.assert_allclose(limits.hands[0].chain.position(q), chain.position(q), atol=1e-12)
        assert (limits.hands[0].velocity, limits.hands[0].acceleration) == (1.7, most)
    assert FER.derated(0.5).hands[0].velocity == 0.85
    assert FER.derated(0.5).hands[0].acceleration == 6.5


def test_a_franka_is_known_by_its_axes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limits = MinkIKBridge(load_panda()).limits
    for name in ("velocity", "acceleration", "jerk", "q_min", "q_max"):
        np.testing.assert_array_equal(getattr(limits, name), getattr(FER, name))
    assert limits.hands[0] is FER.hands[0]
    model = load_panda()
    assert is_franka(model, range(7))
    model.body_pos[model.body("link4").id] += 0.01
    assert not is_franka(model, range(7))
    assert not is_franka(load_panda(), range(6))


def test_joint_names_say_nothing_about_limits():
    """Ranges are the model's, and rates are assumed with one warning that names joints, figures
    and remedy.
    """
    with pytest.warns(LimitsAssumedWarning) as told:
        limits = MinkIKBridge(other_arm()).limits
    assert len(told) == 1
    assert all(
        word in str(told[0].message) for word in ("joint1", "joint7", "1.3", "3.14", "limits=")
    )
    np.testing.assert_allclose(np.column_stack((limits.q_min, limits.q_max)), RANGES)
    np.testing.assert_array_equal(limits.velocity, np.full(7, table.ASSUMED_VELOCITY[0]))
    np.testing.assert_array_equal(limits.acceleration, np.full(7, table.ASSUMED_ACCELERATION[0]))
    np.testing.assert_allclose(limits.jerk, 500 * limits.acceleration)
    assert not limits.hands
    with pytest.warns(LimitsAssumedWarning, match=r"range \+-6.28 of joint1\b"):
        limits = MinkIKBridge(other_arm(limited=False)).limits
    assert (limits.q_min[0], limits.q_max[0]) == (-2 * np.pi, 2 * np.pi)


def test_rates_come_from_the_caller_or_a_table_and_ranges_from_the_model():
    model, low, high = other_arm(), *np.array(RANGES).T
    ones = np.ones(7)
    own = JointLimits(np.full(7, -1.0), np.full(7, 9.0), 2 * ones, 3 * ones, 4 * ones, ones)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given, fr3 = (
            MinkIKBridge(model, limits=own).limits,
            MinkIKBridge(load_panda(), limits="fr3").limits,
        )
    np.testing.assert_allclose(given.q_min, np.maximum(low, -1.0))
    np.testing.assert_allclose(given.q_max, high)
    np.testing.assert_array_equal(given.velocity, own.velocity)
    np.testing.assert_array_equal(fr3.velocity, FR3.velocity)
    np.testing.assert_array_equal(fr3.q_min, FER.q_min)
    with pytest.raises(UnknownNameError, match="fer"):
        MinkIKBridge(model, limits="fer2")
    with pytest.raises(ConfigError, match="joint4"):
        MinkIKBridge(model, limits=replace(own, q_min=np.where(np.arange(7) == 3, 4.0, -1.0)))
    with pytest.raises(ConfigError, match="6 joints"):
        MinkIKBridge(model, limits=own.only(np.arange(7) < 6))


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_a_table_limits_the_hand_that_another_arm_has():
    model = other_arm()
    hand = MinkIKBridge(model, limits="fr3").limits.hands[0]
    assert (hand.velocity, hand.acceleration) == (1.7, 9.0)
    np.testing.assert_allclose(
        hand.chain.position(Q_OTHER[None])[0],
        MinkIKBridge(model).ee_pose(Q_OTHER)[:3, 3],
        atol=1e-12,
    )


def test_an_arm_that_is_no_franka_is_solved_in_its_own_ranges():
    """With a Franka's ranges, taken for its joints' names, nothing here could be reached."""
    rng = np.random.default_rng(0)
    with pytest.warns(LimitsAssumedWarning):
        bridge = MinkIKBridge(other_arm())
    q = Q_OTHER + np.cumsum(rng.uniform(-0.02, 0.02, (100, 7)), axis=0)
    poses = np.stack([bridge.ee_pose(row) for row in q])
    assert bridge.solve(poses, Q_OTHER, 1 / 15).converged.all()


def test_a_reset_to_the_home_keyframe_is_droids_home():
    model = load_panda()
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, model.key("home").id)
    np.testing.assert_allclose(data.qpos[:7], HOME_Q, atol=1e-9)
    np.testing.assert_allclose(data.ctrl[:7], HOME_Q, atol=1e-9)
    assert FER.outside(data.qpos[:7]) is None
    assert (data.qpos[7:] == 0.04).all()
    assert data.ctrl[7] == 255
    for _ in range(600):
        mujoco.mj_step(model, data)
    assert np.abs(data.qpos[:7] - HOME_Q).max() < 0.01  # and it stays there
