"""Inverse kinematics in a scene: collisions kept at a distance, and joints off the chain left
alone.
"""

import mujoco
import numpy as np
import pytest

from motions import feasible_chunk
from strands_cosmos3.control.ik import METHODS, MinkIKBridge
from strands_cosmos3.errors import FrameError, InputError, NonFiniteError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.worlds.table.scene import TableScene

DT_S = 1 / 15
KEPT_M = 0.02
GRIPPER = ["hand_collision", "left_finger_collision", "right_finger_collision"]


@pytest.fixture(scope="module")
def tabled():
    """The arm over a table top at z = 0.1, in front of it."""
    spec = mujoco.MjSpec.from_file(str(resource("assets/panda.xml")))
    spec.worldbody.add_geom(
        name="slab", type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.3, 0.4, 0.05], pos=[0.6, 0, 0.05]
    )
    return spec.compile()


def least_distance(model, qpos, firsts, seconds):
    """[N] smallest distance between two groups of geoms."""
    data, fromto = mujoco.MjData(model), np.zeros(6)
    out = []
    for q in qpos:
        data.qpos[:] = q
        mujoco.mj_forward(model, data)
        pairs = [(model.geom(a).id, model.geom(b).id) for a in firsts for b in seconds]
        out.append(min(mujoco.mj_geomDistance(model, data, a, b, 1.0, fromto) for a, b in pairs))
    return np.array(out)


def plunge(T, depth_m, rows=32):
    """Straight down by ``depth_m``."""
    poses = np.repeat(T[None], rows, axis=0)
    poses[:, 2, 3] -= np.linspace(0, depth_m, rows + 1)[1:]
    return poses


def test_the_table_is_kept_at_a_distance(tabled):
    q = np.concatenate([HOME_Q, [0.04, 0.04]])
    free = MinkIKBridge(tabled, check_collisions=False)
    careful = MinkIKBridge(tabled, avoid_collisions=[(GRIPPER, ["slab"])], min_distance_m=KEPT_M)
    T = plunge(free.ee_pose(q), 0.40)
    hit, kept = (bridge.solve(T, q, DT_S) for bridge in (free, careful))
    assert hit.converged.all()
    assert least_distance(tabled, hit.q_rad, GRIPPER, ["slab"]).min() < 0
    assert least_distance(tabled, kept.q_rad, GRIPPER, ["slab"]).min() > KEPT_M - 1e-3
    assert not kept.converged.all()
    far = least_distance(tabled, hit.q_rad, GRIPPER, ["slab"]) > 0.1
    assert kept.converged[far].all()  # where nothing is near, it costs nothing


def test_links_are_kept_apart(tabled):
    """The hand is drawn back into the shoulder."""
    q = np.concatenate([HOME_Q, [0.04, 0.04]])
    groups = (["hand_collision"], ["link1_collision", "link2_collision", "link0_collision"])
    free = MinkIKBridge(tabled, check_collisions=False)
    careful = MinkIKBridge(tabled, avoid_collisions=[groups], min_distance_m=KEPT_M)
    T = plunge(free.ee_pose(q), 0.1, 48)
    T[:, 0, 3] -= np.linspace(0, 0.3, 49)[1:]
    hit, kept = (bridge.solve(T, q, DT_S) for bridge in (free, careful))
    assert least_distance(tabled, hit.q_rad, *groups).min() < 0
    assert least_distance(tabled, kept.q_rad, *groups).min() > KEPT_M - 1e-3


def test_a_cube_is_avoided_and_not_moved_out_of_the_way():
    scene = TableScene()
    data = mujoco.MjData(scene.model)
    scene.reset(data, scene.sample_layout(np.random.default_rng(0)))
    q = data.qpos.copy()
    bridge = MinkIKBridge(
        scene.model, avoid_collisions=[(GRIPPER, ["cube_red"])], min_distance_m=KEPT_M
    )
    share = np.linspace(0, 1, 40)[:, None]
    T = np.repeat(bridge.ee_pose(q)[None], 40, axis=0)
    T[:, :3, 3] = T[:, :3, 3] * (1 - share) + share * (
        scene.T_world_body(data, "cube_red")[:3, 3] + [0, 0, 0.06]
    )
    solution = bridge.solve(T, q, DT_S)
    off_chain = np.setdiff1d(np.arange(scene.model.nq), bridge.q_address)
    assert np.abs(solution.q_rad[:, off_chain] - q[off_chain]).max() < 1e-9
    assert (
        least_distance(scene.model, solution.q_rad, GRIPPER, ["cube_red"]).min() > KEPT_M - 5e-3
    )  # mink linearises; a turning box creeps


@pytest.mark.parametrize("method", METHODS)
def test_a_scene_is_a_bridge_too(method):
    scene = TableScene()
    data = mujoco.MjData(scene.model)
    scene.reset(data, scene.sample_layout(np.random.default_rng(1)))
    bridge = MinkIKBridge(scene.model)
    q_start, T = feasible_chunk(np.random.default_rng(2), 16, (0.01, 0.03), (1.0, 5.0))
    q = data.qpos.copy()
    q[scene.arm_qpos] = q_start
    solution = bridge.solve(T, q, DT_S, method)
    off_chain = np.setdiff1d(np.arange(scene.model.nq), scene.arm_qpos)
    assert (bridge.q_address == scene.arm_qpos).all()
    assert (solution.q_rad[:, off_chain] == q[off_chain]).all()
    assert solution.converged.all()
    assert np.abs(dh_forward(solution.q_rad[:, scene.arm_qpos]) - T).max() < 2e-6


def test_malformed_pairs(tabled):
    with pytest.raises(FrameError, match="slab"):
        MinkIKBridge(tabled, avoid_collisions=[(["hand_collision"], ["sofa"])])
    with pytest.raises(FrameError):
        MinkIKBridge(tabled, avoid_collisions=[([10_000], ["slab"])])
    for pairs in ([3], ["hand_collision"], [(1, 2)]):
        with pytest.raises(InputError):
            MinkIKBridge(tabled, avoid_collisions=pairs)
    with pytest.raises(NonFiniteError):
        MinkIKBridge(
            tabled, avoid_collisions=[(["hand_collision"], ["slab"])], min_distance_m=np.nan
        )
