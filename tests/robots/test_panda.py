"""The embedded arm against its published figures."""

from __future__ import annotations

import sys

import mujoco
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from strands_cosmos3.embodiments import PANDA_FINGER, get_embodiment
from strands_cosmos3.errors import (
    ConfigError,
    EnvironmentalError,
    InputError,
    NonFiniteError,
    ResourceNotFoundError,
    ShapeError,
    UnknownNameError,
)
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.model import PHYSICS_HZ, load_model, load_panda, panda_path
from strands_cosmos3.robots.panda import (
    ARM_JOINTS,
    DH,
    FER,
    FINGER_JOINTS,
    FR3,
    HOME_Q,
    T_flange_hand,
    T_hand_flange,
    T_hand_tcp,
    T_link7_flange,
    dh_forward,
)

GOLDEN_Q = [
    0.04376881942152977,
    -0.40943676233291626,
    0.42356184124946594,
    -2.431333065032959,
    -0.027579963207244873,
    1.97930979728,
    0.6358067,
]
GOLDEN_LINK8_XYZ = [0.372795045375824, 0.19076526165008545, 0.4371693432331085]
GOLDEN_LINK8_EULER = [2.943869113922119, -0.05018207058310509, -0.1891852]


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return load_panda()


def hand_pose(model: mujoco.MjModel, q_rad: np.ndarray) -> np.ndarray:
    data = mujoco.MjData(model)
    data.qpos[:7] = q_rad
    mujoco.mj_kinematics(model, data)
    T = np.eye(4)
    T[:3, :3] = data.body("hand").xmat.reshape(3, 3)
    T[:3, 3] = data.body("hand").xpos
    return T


def angle_deg(R_a: np.ndarray, R_b: np.ndarray) -> float:
    return float(np.rad2deg(Rotation.from_matrix(R_a.T @ R_b).magnitude()))


def home(model: mujoco.MjModel) -> mujoco.MjData:
    data = mujoco.MjData(model)
    data.qpos[:7] = data.ctrl[:7] = HOME_Q
    data.qpos[7:], data.ctrl[7] = PANDA_FINGER.open_value, 255
    mujoco.mj_forward(model, data)
    return data


def test_forward_kinematics_is_the_dh_product(model):
    q = np.random.default_rng(0).uniform(FER.q_min, FER.q_max, (1000, 7))
    expected = dh_forward(q)
    assert expected.shape == (1000, 4, 4)
    worst = max(np.abs(hand_pose(model, row) - T).max() for row, T in zip(q, expected, strict=True))
    assert worst < 1e-12


def craig_product(q):
    """``Rx(alpha) Tx(a) Rz(q) Tz(d)`` of each joint, written out."""
    T = np.broadcast_to(np.eye(4), (*q.shape[:-1], 4, 4))
    for joint, (a_m, d_m, alpha_rad) in enumerate(DH):
        c, s = np.cos(q[..., joint]), np.sin(q[..., joint])
        ca, sa = np.cos(alpha_rad), np.sin(alpha_rad)
        step = np.zeros((*q.shape[:-1], 4, 4))
        step[..., 0, 0], step[..., 0, 1], step[..., 0, 3] = c, -s, a_m
        step[..., 1, 0], step[..., 1, 1], step[..., 1, 2], step[..., 1, 3] = (
            s * ca,
            c * ca,
            -sa,
            -d_m * sa,
        )
        step[..., 2, 0], step[..., 2, 1], step[..., 2, 2], step[..., 2, 3] = (
            s * sa,
            c * sa,
            ca,
            d_m * ca,
        )
        step[..., 3, 3] = 1.0
        T = T @ step
    return T @ T_link7_flange @ T_flange_hand


def test_dh_forward_is_craigs_product_bit_for_bit():
    """Recordings hold these figures."""
    q = np.random.default_rng(1).uniform(FER.q_min, FER.q_max, (200, 7))
    np.testing.assert_array_equal(dh_forward(q), craig_product(q))


def test_dh_forward_keeps_leading_axes_and_refuses_other_widths():
    assert dh_forward(np.zeros((2, 3, 7))).shape == (2, 3, 4, 4)
    np.testing.assert_allclose(
        dh_forward(np.zeros(7))[:3, 3], [0.088, 0, 0.333 + 0.316 + 0.384 - 0.107], atol=1e-15
    )
    with pytest.raises(ShapeError):
        dh_forward(np.zeros(6))


def test_golden_frame_of_a_recorded_episode(model):
    T_link8 = np.eye(4)
    T_link8[:3, :3] = Rotation.from_euler("xyz", GOLDEN_LINK8_EULER).as_matrix()
    T_link8[:3, 3] = GOLDEN_LINK8_XYZ
    Rz90 = np.eye(4)
    Rz90[:3, :3] = Rotation.from_euler("z", 90, degrees=True).as_matrix()
    recorded_cosmos = T_link8 @ Rz90
    T_hand = hand_pose(model, np.array(GOLDEN_Q))
    ours = T_hand @ get_embodiment("droid").tool_frame.T_parent_cosmos
    assert np.linalg.norm(ours[:3, 3] - recorded_cosmos[:3, 3]) < 1e-4
    assert angle_deg(ours[:3, :3], recorded_cosmos[:3, :3]) < 0.01
    assert angle_deg((T_hand @ T_hand_flange)[:3, :3], T_link8[:3, :3]) < 0.01


def test_sites_and_names(model):
    assert [model.joint(i).name for i in range(model.njnt)] == [*ARM_JOINTS, *FINGER_JOINTS]
    assert [model.actuator(i).name for i in range(model.nu)] == [
        f"actuator{i}" for i in range(1, 9)
    ]
    bodies = {model.body(i).name for i in range(model.nbody)}
    assert {*(f"link{i}" for i in range(8)), "hand", "left_finger", "right_finger"} <= bodies
    data = home(model)
    T_hand = hand_pose(model, HOME_Q)
    np.testing.assert_allclose(data.site("tcp").xpos, (T_hand @ T_hand_tcp)[:3, 3], atol=1e-12)
    np.testing.assert_allclose(
        data.site("link8").xmat.reshape(3, 3), (T_hand @ T_hand_flange)[:3, :3], atol=1e-12
    )


def test_mass_is_the_inertials_alone(model):
    links = [0.629769, 4.970684, 0.646926, 3.228604, 3.587895, 1.225946, 1.666555, 0.735522]
    assert model.body_mass.sum() == pytest.approx(sum(links) + 0.73 + 2 * 0.015, abs=1e-12)
    assert model.body("link1").inertia.max() == pytest.approx(0.70661, rel=2e-2)


def test_limits_are_the_table(model):
    for i, (low, high, torque) in enumerate(zip(FER.q_min, FER.q_max, FER.torque, strict=True)):
        np.testing.assert_array_equal(model.joint(ARM_JOINTS[i]).range, [low, high])
        np.testing.assert_array_equal(model.actuator(i).ctrlrange, [low, high])
        np.testing.assert_array_equal(model.actuator(i).forcerange, [-torque, torque])
    for name in FINGER_JOINTS:
        np.testing.assert_array_equal(model.joint(name).range, [0, PANDA_FINGER.open_value])


def test_stock_servo(model):
    kp = np.array([4500, 4500, 3500, 3500, 2000, 2000, 2000])
    np.testing.assert_array_equal(model.actuator_gainprm[:7, 0], kp)
    np.testing.assert_array_equal(model.actuator_biasprm[:7, 1], -kp)
    np.testing.assert_array_equal(model.actuator_biasprm[:7, 2], -kp / 10)
    np.testing.assert_array_equal(model.dof_armature, 0.1)
    np.testing.assert_array_equal(model.dof_damping, 1.0)
    np.testing.assert_allclose(
        model.actuator_gainprm[7, 0] * 255, 100 * PANDA_FINGER.open_value, rtol=1e-8
    )
    assert model.opt.timestep == pytest.approx(1 / PHYSICS_HZ, abs=1e-18)
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_IMPLICITFAST


def test_gravity_compensation_holds_the_arm_still(model):
    data = home(model)
    before = data.body("hand").xpos.copy()
    mujoco.mj_step(model, data, PHYSICS_HZ)
    assert np.linalg.norm(data.body("hand").xpos - before) < 1e-4
    assert model.body_gravcomp[1:].min() == 1.0
    model.body_gravcomp[:] = 0.0
    try:
        sagging = home(model)
        mujoco.mj_step(model, sagging, PHYSICS_HZ)
    finally:
        model.body_gravcomp[1:] = 1.0
    assert np.linalg.norm(sagging.body("hand").xpos - before) > 1e-3


def test_gripper_opens_and_closes(model):
    data = home(model)
    data.ctrl[7] = 0
    mujoco.mj_step(model, data, 2 * PHYSICS_HZ)
    assert np.abs(data.qpos[7:]).max() < 1e-3
    data.ctrl[7] = 255
    mujoco.mj_step(model, data, 2 * PHYSICS_HZ)
    np.testing.assert_allclose(data.qpos[7:], PANDA_FINGER.open_value, atol=1e-3)


def test_the_arm_touches_itself_only_where_it_really_would(model):
    data = home(model)
    assert data.ncon == 0
    data.qpos[:7] = [0, 1.7, 0, -3.0, 0, 3.7, 0]
    mujoco.mj_forward(model, data)
    assert data.ncon > 0, "folded onto itself"
    solid = model.geom_contype != 0
    assert set(model.geom_group[solid]) == {3}
    assert set(model.geom_group[~solid]) == {2}


@pytest.mark.parametrize("limits", [FER, FR3])
def test_derated(limits):
    half = limits.derated(0.5)
    for name in ("velocity", "acceleration", "jerk"):
        np.testing.assert_allclose(getattr(half, name), getattr(limits, name) / 2)
    for name in ("q_min", "q_max", "torque"):
        np.testing.assert_array_equal(getattr(half, name), getattr(limits, name))
    for bad in (0.0, 1.01, -1.0, float("nan")):
        with pytest.raises(InputError):
            limits.derated(bad)


def test_limits_are_checked_and_frozen():
    ones = np.ones(7)
    with pytest.raises(InputError):
        JointLimits(ones, ones, ones, ones, ones, ones)
    with pytest.raises(InputError):
        JointLimits(-ones, ones, 0 * ones, ones, ones, ones)
    with pytest.raises(NonFiniteError):
        JointLimits(-ones, ones, np.nan * ones, ones, ones, ones)
    with pytest.raises(ValueError, match="read-only"):
        FER.velocity[0] = 9
    assert (FER.q_min < HOME_Q).all()
    assert (FER.q_max > HOME_Q).all()


def test_load_model_by_name_and_path(tmp_path, model):
    assert load_model(model) is model
    for spec in (None, "panda", panda_path(), str(panda_path())):
        assert load_model(spec).nq == 9
    binary = tmp_path / "arm.mjb"
    mujoco.mj_saveModel(model, str(binary))
    assert load_model(binary).nq == 9


def test_load_model_errors(tmp_path):
    with pytest.raises(UnknownNameError, match=r"Did you mean 'panda'.*menagerie"):
        load_model("pandda")
    with pytest.raises(ResourceNotFoundError, match=r"nowhere\.xml"):
        load_model("nowhere.xml")
    broken = tmp_path / "broken.xml"
    broken.write_text("<mujoco><nonsense/></mujoco>")
    with pytest.raises(ConfigError, match=r"broken\.xml"):
        load_model(broken)
    junk = tmp_path / "junk.mjb"
    junk.write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"junk\.mjb"):
        load_model(junk)


def test_menagerie_that_cannot_be_fetched_is_a_clear_error(monkeypatch):
    from robot_descriptions import _cache

    def offline(name: str, commit: str | None = None) -> str:
        raise OSError(f"no route to {name}")

    monkeypatch.setattr(_cache, "clone_to_cache", offline)
    monkeypatch.delitem(sys.modules, "robot_descriptions.panda_mj_description", raising=False)
    with pytest.raises(EnvironmentalError, match=r"no route to mujoco_menagerie.*bundled arm"):
        load_model("menagerie")


def test_minks_collision_limit_finds_pairs(model):
    mink = pytest.importorskip("mink")
    hand = mink.get_subtree_geom_ids(model, model.body("hand").id)
    base = mink.get_body_geom_ids(model, model.body("link0").id)
    limit = mink.CollisionAvoidanceLimit(model, [(hand, base)])
    assert len(limit.geom_id_pairs) >= 3
