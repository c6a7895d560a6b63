"""Pairs of geoms that are to be kept apart: each is watched, or refused by its name."""

import mujoco
import numpy as np
import pytest

from strands_cosmos3.control.avoidance import avoidance_limits
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.limits import LimitsAssumedWarning

KEPT_M = 0.02
REST = '<inertial mass="1" pos="0 0 0" diaginertia="1 1 1"/>'


def gantry(world: str, first: str = "", second: str = "", more: str = "") -> mujoco.MjModel:
    """Three slides, then three hinges that carry the hand; geoms of the world and of the first two
    links.
    """
    return mujoco.MjModel.from_xml_string(
        f"""<mujoco><compiler angle="radian"/><asset><hfield name="hills" nrow="2" ncol="2"
        size="1 1 .1 .1"/><mesh name="rock"
        vertex="-.1 -.1 -.1 .1 -.1 -.1 0 .1 -.1 0 0 .1"/></asset><worldbody>{world}
        <body name="stand" pos="0 0 .3"><geom name="foot" size=".02"/>
        <body name="l1"><joint name="x" type="slide" axis="1 0 0" range="-1 1"/>{REST}{first}
        <body name="l2"><joint name="y" type="slide" axis="0 1 0" range="-1 1"/>{REST}{second}
        <body name="l3"><joint name="z" type="slide" axis="0 0 1" range="-1 1"/>{REST}
        <body name="l4"><joint name="a" axis="1 0 0" range="-3 3"/>{REST}
        <body name="l5"><joint name="b" axis="0 1 0" range="-1.5 1.5"/>{REST}
        <body name="hand"><joint name="c" axis="0 0 1" range="-3 3"/>{REST}
        </body></body></body></body></body></body></body></worldbody>{more}</mujoco>"""
    )


@pytest.fixture(autouse=True)
def assumed_limits_are_no_news(recwarn):
    """The gantry states no rates."""
    yield
    assert {warning.category for warning in recwarn} <= {LimitsAssumedWarning}


def least_distance_m(model: mujoco.MjModel, first: str, second: str, axis: int, **options) -> float:
    """Distance of two geoms while the hand is sent 0.8 m along an axis of the world, at least."""
    T = np.tile(np.eye(4), (10, 1, 1))
    T[:, 2, 3] = 0.3
    T[:, axis, 3] += np.linspace(0.05, 0.8, 10)
    bridge = MinkIKBridge(model, "hand", check_collisions=False, **options)
    data, distances = mujoco.MjData(model), []
    for q in bridge.solve(T, np.zeros(6)).q_rad:
        data.qpos[:] = q
        mujoco.mj_kinematics(model, data)
        pair = model.geom(first).id, model.geom(second).id
        distances.append(mujoco.mj_geomDistance(model, data, *pair, 2.0, None))
    return min(distances)


BALL = '<geom name="ball" type="{}" size=".05 .05 .05" {}/>'
WALL = '<geom name="wall" type="box" size=".05 .5 .5" pos=".6 0 .3" {}/>'
WATCHED = {
    "a capsule of the first link and a pillar": (
        gantry(
            '<geom name="wall" type="cylinder" size=".1 1" pos=".6 0 0"/>',
            BALL.format("capsule", ""),
        ),
        0,
    ),
    "the first link and a height field that is turned to face it": (
        gantry(
            '<geom name="wall" type="hfield" hfield="hills" pos=".6 0 .3" euler="0 -1.57 0"/>',
            BALL.format("ellipsoid", ""),
        ),
        0,
    ),
    "geoms whose masks do not meet": (
        gantry(WALL.format('contype="0" conaffinity="2"'), "", BALL.format("box", 'contype="1"')),
        0,
    ),
    "a link and its child": (
        gantry(
            "",
            '<geom name="wall" type="box" size=".3 .02 .3" pos="0 .4 0"/>',
            BALL.format("sphere", ""),
        ),
        1,
    ),
    "bodies that the model excludes": (
        gantry(
            WALL.format(""),
            "",
            BALL.format("sphere", ""),
            '<contact><exclude body1="world" body2="l2"/></contact>',
        ),
        0,
    ),
}


@pytest.mark.parametrize("name", WATCHED)
def test_pairs_that_mink_leaves_out_are_watched(name):
    model, axis = WATCHED[name]
    assert least_distance_m(model, "ball", "wall", axis) < -0.04
    kept_m = least_distance_m(
        model, "ball", "wall", axis, avoid_collisions=[(["ball"], ["wall"])], min_distance_m=KEPT_M
    )
    assert kept_m > KEPT_M - 1e-3


REFUSED = {
    "a signed distance function": (
        gantry(
            '<geom name="wall" type="sdf" mesh="rock" pos=".6 0 .3"/>', BALL.format("sphere", "")
        ),
        "no distance between geoms of such types",
    ),
    "shapes of one link that overlap": (
        gantry("", BALL.format("sphere", "") + '<geom name="wall" size=".1"/>'),
        "closer wherever the arm is",
    ),
    "a link and its own axle": (
        gantry(
            "",
            '<geom name="wall" type="cylinder" size=".02 2" euler="1.57 0 0"/>',
            BALL.format("sphere", ""),
        ),
        "closer wherever the arm is",
    ),
    "what the arm does not move": (
        gantry(
            WALL.format("")
            + f'<body pos="0 1 1"><freejoint/>{REST}{BALL.format("sphere", "")}</body>'
        ),
        "none of the arm's joints moves",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pairs_that_cannot_be_kept_apart_are_refused_by_name(name):
    model, reason = REFUSED[name]
    groups = [(["ball"], ["wall"])]
    with pytest.raises(ConfigError, match=f"'ball' and 'wall'.*{reason}.*Leave") as error:
        MinkIKBridge(model, "hand", avoid_collisions=groups, min_distance_m=KEPT_M)
    assert "0.02 m" in str(error.value)


def test_what_stands_apart_for_good_needs_no_watch():
    """A group of an arm's geoms often has those of its base."""
    model = gantry(WALL.format(""), BALL.format("sphere", ""))
    foot, ball, wall = (model.geom(name).id for name in ("foot", "ball", "wall"))
    limits = avoidance_limits(model, [*range(6)], [([foot], [wall])], 0.1)
    assert not any(limit.geom_id_pairs for limit in limits)
    limits = avoidance_limits(model, [*range(6)], [([foot, ball], [wall])], 0.1)
    assert [pair for limit in limits for pair in limit.geom_id_pairs] == [(wall, ball)]


def test_a_group_with_itself_leaves_out_links_that_touch_by_design():
    model = gantry(
        WALL.format(""),
        BALL.format("sphere", "") + '<geom name="shell" size=".06"/>',
        '<geom name="slider" type="capsule" size=".02 .04" pos="0 .5 0"/>',
    )
    wall, ball, shell, slider = (
        model.geom(name).id for name in ("wall", "ball", "shell", "slider")
    )
    group = [wall, ball, shell, slider]
    limits = avoidance_limits(model, [*range(6)], [(group, group), ([ball], [wall])], KEPT_M)
    pairs = [pair for limit in limits for pair in limit.geom_id_pairs]
    assert sorted(pairs) == sorted(
        {(wall, ball), (wall, shell), (wall, slider), (ball, slider), (shell, slider)}
    )


def test_shapes_without_a_distance_are_refused_in_a_group_too():
    model, reason = REFUSED["a signed distance function"]
    group = ["ball", "wall", "foot"]
    with pytest.raises(ConfigError, match=reason):
        MinkIKBridge(model, "hand", avoid_collisions=[(group, group)])


@pytest.mark.parametrize("groups", [([1], [1]), ([], [1]), ([0], [])])
def test_groups_without_two_geoms_are_refused(groups):
    model = gantry(WALL.format(""), BALL.format("sphere", ""))
    with pytest.raises(ConfigError, match="no two geoms"):
        avoidance_limits(model, [*range(6)], [groups], KEPT_M)
