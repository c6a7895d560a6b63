"""The scene: its layouts, its contacts, and that fingers hold a cube by friction alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest

from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.errors import (
    ConfigError,
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
)
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import (
    PHYSICS_HZ,
    load_robot,
    load_with_obstacles,
    panda_path,
)
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.robots.spec import ModelPart
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.sim.scene_builder import cameras
from strands_cosmos3.worlds.table.scene import SEPARATION_M, Bin, Cube, TableScene

CUBES = ("cube_red", "cube_green", "cube_blue")
ROW = Layout(CUBES, [[0.5, 0.0], [0.5, -0.15], [0.5, 0.15]], [0.0, 0.0, 0.0])


@pytest.fixture(scope="module")
def scene() -> TableScene:
    return TableScene()


@pytest.fixture
def data(scene: TableScene) -> mujoco.MjData:
    return mujoco.MjData(scene.model)


def touching(scene: TableScene, data: mujoco.MjData) -> set[frozenset[str]]:
    """The pairs of bodies that press on each other."""
    bodies = [scene.model.body(i).name for i in range(scene.model.nbody)]
    force, pairs = np.zeros(6), set()
    for i, contact in enumerate(data.contact):
        mujoco.mj_contactForce(scene.model, data, i, force)
        if force[0] > 1e-6:
            pairs.add(frozenset(bodies[scene.model.geom_bodyid[geom]] for geom in contact.geom))
    return pairs


def reach(scene: TableScene, q_rad: np.ndarray, tcp_m: np.ndarray, yaw_rad: float) -> np.ndarray:
    """Joint angles with the fingers pointing down at a place, opening along ``yaw_rad``: damped
    least squares.
    """
    data = mujoco.MjData(scene.model)
    opening = np.array([np.cos(yaw_rad), np.sin(yaw_rad), 0.0])
    down = np.array([0.0, 0.0, -1.0])
    R_want = np.column_stack([np.cross(opening, down), opening, down])
    q, jacobian, error, quat = q_rad.copy(), np.zeros((6, scene.model.nv)), np.zeros(6), np.zeros(4)
    for _ in range(100):
        data.qpos[scene.arm_qpos] = q
        mujoco.mj_kinematics(scene.model, data)
        mujoco.mj_comPos(scene.model, data)
        mujoco.mj_jacSite(scene.model, data, jacobian[:3], jacobian[3:], scene.only.tcp_site)
        R_now = data.site_xmat[scene.only.tcp_site].reshape(3, 3)
        mujoco.mju_mat2Quat(quat, (R_want @ R_now.T).ravel())
        mujoco.mju_quat2Vel(error[3:], quat, 1.0)
        error[:3] = tcp_m - data.site_xpos[scene.only.tcp_site]
        J = jacobian[:, scene.arm_dof]
        q = np.clip(
            q + J.T @ np.linalg.solve(J @ J.T + 1e-6 * np.eye(6), error), FER.q_min, FER.q_max
        )
    assert np.abs(error).max() < 1e-5, "the test's own inverse kinematics failed"
    return q


def move(
    scene: TableScene,
    data: mujoco.MjData,
    q_from: np.ndarray,
    q_to: np.ndarray,
    duration_s: float,
    gripper: float,
) -> None:
    steps = round(duration_s * PHYSICS_HZ)
    for i in range(1, steps + 1):
        x = i / steps
        data.ctrl[scene.arm_actuators] = q_from + (q_to - q_from) * x**3 * (10 - 15 * x + 6 * x**2)
        data.ctrl[scene.only.gripper_actuator] = gripper
        mujoco.mj_step(scene.model, data)


def test_bookkeeping(scene, data):
    scene.reset(data, ROW)
    np.testing.assert_array_equal(data.qpos[scene.arm_qpos], HOME_Q)
    q = HOME_Q + 0.1
    scene.reset(data, ROW, q)
    np.testing.assert_array_equal(data.ctrl[scene.arm_actuators], q)
    np.testing.assert_array_equal(data.qpos[scene.finger_qpos], 0.04)
    assert data.ctrl[scene.only.gripper_actuator] == 255.0
    for name, (x, y) in zip(ROW.names, ROW.xy_m, strict=True):
        np.testing.assert_allclose(scene.T_world_body(data, name)[:3, 3], [x, y, 0.02], atol=1e-12)
        np.testing.assert_allclose(data.xpos[scene.bodies[name].id], [x, y, 0.02], atol=1e-12)
        assert scene.model.body_mass[scene.bodies[name].id] == pytest.approx(0.06)
    scene.reset(data, Layout(CUBES, ROW.xy_m, [0.3, -1.2, 3.0]))
    for name, yaw in zip(CUBES, (0.3, -1.2, 3.0), strict=True):
        np.testing.assert_allclose(
            scene.T_world_body(data, name)[:2, 0], [np.cos(yaw), np.sin(yaw)], atol=1e-12
        )
    cameras = {scene.model.camera(i).name for i in range(scene.model.ncam)}
    assert cameras == {*DROID_RIG.views, "beauty"}
    assert scene.view_names == DROID_RIG.views
    assert scene.model.opt.timestep == pytest.approx(1 / PHYSICS_HZ, abs=1e-18)
    assert scene.model.opt.integrator == mujoco.mjtIntegrator.mjINT_IMPLICITFAST


def test_reset_forgets_everything(scene, data):
    scene.reset(data, ROW)
    fresh = data.qpos.copy()
    data.qvel[:] = 1.0
    mujoco.mj_step(scene.model, data, 100)
    scene.reset(data, ROW)
    np.testing.assert_array_equal(data.qpos, fresh)
    np.testing.assert_array_equal(data.qvel, 0.0)
    assert data.time == 0.0


def test_layouts_are_apart_in_the_region_and_repeatable(scene):
    rng = np.random.default_rng(1)
    layouts = [scene.sample_layout(rng) for _ in range(300)]
    xy = np.array([layout.xy_m for layout in layouts])
    assert (xy.min(axis=(0, 1)) >= [PANDA.workspace.x_m[0], PANDA.workspace.y_m[0]]).all()
    assert (xy.max(axis=(0, 1)) <= [PANDA.workspace.x_m[1], PANDA.workspace.y_m[1]]).all()
    assert (np.ptp(xy, axis=(0, 1)) > [0.29, 0.39]).all()
    gaps = [np.linalg.norm(xy[:, i] - xy[:, j], axis=-1).min() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert min(gaps) >= SEPARATION_M
    assert np.ptp([layout.yaw_rad for layout in layouts]) > 6.0
    again = scene.sample_layout(np.random.default_rng(1))
    np.testing.assert_array_equal(again.xy_m, layouts[0].xy_m)
    np.testing.assert_array_equal(again.yaw_rad, layouts[0].yaw_rad)


def test_cubes_rest(scene, data):
    rng = np.random.default_rng(2)
    for _ in range(20):
        scene.reset(data, scene.sample_layout(rng))
        before = {name: scene.T_world_body(data, name) for name in CUBES}
        mujoco.mj_step(scene.model, data, PHYSICS_HZ)
        for name in CUBES:
            after = scene.T_world_body(data, name)
            assert np.linalg.norm(after[:3, 3] - before[name][:3, 3]) < 5e-5
            assert np.abs(after[:3, :3] - before[name][:3, :3]).max() < 1e-3
        assert touching(scene, data) == {frozenset({name, "world"}) for name in CUBES}


def test_cube_falls_onto_the_table_and_into_the_bin(scene, data):
    scene.reset(data, ROW)
    red, green = (scene.bodies[name].qpos for name in CUBES[:2])
    data.qpos[red : red + 3] = [0.6, -0.1, 0.2]
    data.qpos[green : green + 3] = [*scene.bin.center_m, 0.2]
    mujoco.mj_step(scene.model, data, PHYSICS_HZ)
    assert data.xpos[scene.bodies["cube_red"].id][2] == pytest.approx(0.02, abs=1e-3)
    assert scene.bin.contains(data.xpos[scene.bodies["cube_green"].id])
    assert not scene.bin.contains(data.xpos[scene.bodies["cube_red"].id])
    assert frozenset({"cube_green", "bin"}) in touching(scene, data)


def test_in_bin_knows_walls_and_rim(scene):
    x, y = scene.bin.center_m
    assert scene.bin.contains(np.array([x, y, 0.03]))
    assert not scene.bin.contains(np.array([x, y, scene.bin.height_m + 0.01]))
    assert not scene.bin.contains(np.array([x + scene.bin.inner_m[0] / 2 + 0.001, y, 0.03]))
    assert not scene.bin.contains(np.array([x, y - scene.bin.inner_m[1] / 2 - 0.001, 0.03]))


def test_bin_is_clear_of_the_spawn_region_and_within_reach(scene):
    near = scene.bin.center_m[1] - scene.bin.inner_m[1] / 2 - scene.bin.wall_m
    assert near - PANDA.workspace.y_m[1] > 0.04 * np.sqrt(2) / 2, (
        "a cube at the region's edge would touch the bin"
    )
    reach(scene, HOME_Q, np.array([*scene.bin.center_m, 0.15]), -np.pi / 2)


def test_arm_and_table_touch(scene, data):
    q = reach(scene, HOME_Q, np.array([0.5, 0.0, 0.10]), -np.pi / 2)
    low = reach(scene, q, np.array([0.5, 0.0, -0.03]), -np.pi / 2)
    scene.reset(data, Layout(CUBES, [[0.35, 0.2], [0.45, 0.2], [0.6, 0.2]], [0, 0, 0]), q)
    move(scene, data, q, low, 1.5, 255)
    pairs = touching(scene, data)
    assert {frozenset({"left_finger", "world"}), frozenset({"right_finger", "world"})} & pairs
    tip_m = data.site_xpos[scene.only.tcp_site][2] - 0.0114
    assert tip_m > -0.004, "the fingers went through the table"


@pytest.mark.parametrize(("offset_mm", "yaw_deg"), [((0, 0), 0), ((8, 5), 10), ((-5, -8), -10)])
def test_friction_holds_a_cube_lifted_off_center(scene, data, offset_mm, yaw_deg):
    over = np.array([0.5, 0.0, 0.0]) + np.array([*offset_mm, 0.0]) / 1000
    yaw = -np.pi / 2 + np.deg2rad(yaw_deg)
    q_up = reach(scene, HOME_Q, over + np.array([0, 0, 0.18]), yaw)
    q_down = reach(scene, q_up, over + np.array([0, 0, 0.018]), yaw)
    scene.reset(data, ROW, q_up)
    move(scene, data, q_up, q_down, 1.2, 255)
    move(scene, data, q_down, q_down, 0.7, 0)
    assert {
        frozenset({"left_finger", "cube_red"}),
        frozenset({"right_finger", "cube_red"}),
    } <= touching(scene, data)
    grasped = np.linalg.inv(scene.T_world_body(data, "hand")) @ scene.T_world_body(data, "cube_red")
    move(scene, data, q_down, q_up, 0.8, 0)
    move(scene, data, q_up, q_up, 2.0, 0)
    assert data.xpos[scene.bodies["cube_red"].id][2] > 0.14
    held = np.linalg.inv(scene.T_world_body(data, "hand")) @ scene.T_world_body(data, "cube_red")
    assert np.linalg.norm(held[:3, 3] - grasped[:3, 3]) < 1.5e-3
    for i in range(PHYSICS_HZ):
        data.ctrl[scene.arm_actuators] = q_up + 0.03 * np.sin(2 * np.pi * 3 * i / PHYSICS_HZ)
        mujoco.mj_step(scene.model, data)
    shaken = np.linalg.inv(scene.T_world_body(data, "hand")) @ scene.T_world_body(data, "cube_red")
    assert np.linalg.norm(shaken[:3, 3] - held[:3, 3]) < 3e-3


def test_other_cubes():
    scene = TableScene(
        (Cube("tiny", (1, 1, 0), edge_m=0.03), Cube("heavy", (0, 1, 1), mass_kg=0.2))
    )
    data = mujoco.MjData(scene.model)
    scene.reset(data, scene.sample_layout(np.random.default_rng(0)))
    assert scene.T_world_body(data, "tiny")[2, 3] == pytest.approx(0.015)
    assert scene.model.body_mass[scene.bodies["heavy"].id] == pytest.approx(0.2)
    inertia = scene.model.body_inertia[scene.bodies["heavy"].id]
    np.testing.assert_allclose(inertia, 0.2 * 0.04**2 / 6)  # of a solid cube


def test_errors(scene, data):
    with pytest.raises(UnknownNameError, match="cube_red"):
        scene.reset(data, Layout(("cube_rad", *CUBES[1:]), ROW.xy_m, ROW.yaw_rad))
    with pytest.raises(ConfigError, match="cube_blue"):
        scene.reset(data, Layout(CUBES[:2], ROW.xy_m[:2], ROW.yaw_rad[:2]))
    with pytest.raises(ShapeError):
        scene.reset(data, ROW, np.zeros(6))
    with pytest.raises(ShapeError):
        Layout(CUBES, np.zeros((2, 2)), np.zeros(3))
    with pytest.raises(NonFiniteError):
        Layout(CUBES, np.full((3, 2), np.nan), np.zeros(3))
    with pytest.raises(InputError):
        Cube("flat", (1, 1, 1), edge_m=0.0)
    with pytest.raises(ConfigError, match="own name"):
        TableScene((Cube("a", (1, 1, 1)), Cube("a", (1, 1, 1))))
    with pytest.raises(ConfigError, match="do not fit"):
        TableScene(tuple(Cube(f"c{i}", (1, 1, 1)) for i in range(40))).sample_layout(
            np.random.default_rng(0)
        )


def test_a_scene_is_built_around_another_arm_by_path(tmp_path):
    stripped = re.sub(r' gravcomp="1"|<site name="tcp"[^>]*/>', "", panda_path().read_text())
    own = tmp_path / "own.xml"
    own.write_text(stripped)
    scene = TableScene(arm=own)
    assert scene.model.opt.timestep == pytest.approx(1 / 600)
    assert scene.model.body_gravcomp[scene.only.frame_body] == 1.0
    np.testing.assert_allclose(scene.model.site_pos[scene.only.tcp_site], [0, 0, 0.1034])


def test_an_arm_without_the_names_is_refused(tmp_path):
    bare = tmp_path / "bare.xml"
    bare.write_text(
        "<mujoco><worldbody><body name='hand'><geom size='.1'/></body></worldbody></mujoco>"
    )
    with pytest.raises(ConfigError, match=r"bare\.xml does not have"):
        TableScene(arm=bare)
    with pytest.raises(UnknownNameError, match="menagerie"):
        TableScene(arm="pandda")


def test_the_cameras_page_says_what_the_scene_has():
    page = (Path(__file__).resolve().parents[2] / "docs/scene.md").read_text()
    for name, view in cameras(PANDA).items():
        figures = [
            f"({', '.join(f'{x:g}' for x in point)})" for point in (view.position_m, view.target_m)
        ]
        assert (
            f"| {name} | {view.body} | {figures[0]} | {figures[1]} | {view.fovy_deg:g} deg |"
            in page
        )


def test_the_open_hand_fits_between_the_spawn_region_and_the_bin():
    half_hand_m = 0.105  # the hand is 0.21 m wide along the direction in which its fingers open
    wall_y_m = Bin().center_m[1] - Bin().inner_m[1] / 2 - Bin().wall_m
    assert wall_y_m - PANDA.workspace.y_m[1] > half_hand_m + 0.01


STANDING = {
    "in the world": '<geom name="post" type="box" size=".05 .05 .1" pos="-.6 .5 .1"/>{base}',
    "tilted, in a body": '<body name="rack" euler=".3 0 .2" pos="-.6 .5 .1">'
    '<geom name="shelf" type="box" size=".1 .05 .02"/></body>{base}',
    "under the arm": '<body name="stand"><geom name="foot" type="box" size=".1 .1 .02" '
    'pos="-.6 0 0"/>{base}',
}


@pytest.mark.parametrize("where", STANDING)
def test_a_box_of_the_robots_own_model_is_no_obstacle_to_add_to_it(tmp_path, where):
    text = panda_path().read_text()
    whole = text.index("<worldbody>") + len("<worldbody>"), text.index("</worldbody>")
    added = STANDING[where].format(base=text[slice(*whole)])
    added += "</body>" if where == "under the arm" else ""
    own = tmp_path / "own.xml"
    own.write_text(f"{text[: whole[0]]}{added}{text[whole[1] :]}")
    robot = replace(PANDA, name="own", model=(ModelPart(str(own)),))
    obstacles = TableScene(robot=robot).obstacles
    assert [box.name for box in obstacles] == [box.name for box in TableScene().obstacles]
    model = load_with_obstacles(None, robot, obstacles)
    assert model.ngeom == load_robot(robot).ngeom + len(obstacles)


@pytest.mark.parametrize("masks", [(2, 2), (0, 4), (8, 0)])
def test_fingers_meet_the_scene_whatever_their_contact_bits(tmp_path, masks):
    own = tmp_path / "own.xml"
    bits = 'contype="{}" conaffinity="{}"'.format(*masks)
    text, solid = re.subn(
        '<geom class="(pad|collision)"', rf"\g<0> {bits}", panda_path().read_text()
    )
    assert solid >= 4
    own.write_text(text)
    scene = TableScene(arm=own)
    data = mujoco.MjData(scene.model)
    scene.reset(data, ROW)
    fingers = set(scene.only.finger_bodies)
    T_world_tcp = scene.privileged(data)["tcp"]
    cube = scene.bodies["cube_red"]
    data.qpos[cube.qpos : cube.qpos + 3] = T_world_tcp[:3, 3]
    data.qpos[scene.finger_qpos] = 0.0
    mujoco.mj_forward(scene.model, data)
    assert fingers <= set(scene.forces_on(data, cube.id))
    robot = replace(PANDA, name="own", model=(ModelPart(str(own)),))
    model = load_with_obstacles(None, robot, scene.obstacles)
    pad, table = (
        np.array((model.geom_contype[i], model.geom_conaffinity[i]))
        for i in (
            np.flatnonzero(model.geom_bodyid == model.body("left_finger").id)[-1],
            model.geom("table").id,
        )
    )
    assert (pad & table[::-1]).any()
