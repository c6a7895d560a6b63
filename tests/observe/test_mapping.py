"""Flat observations in, flat actions out, in the robot's own names and units."""

import numpy as np
import pytest

from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.errors import (
    ConfigError,
    Cosmos3Error,
    InputError,
    ObservationError,
    UnknownNameError,
)
from strands_cosmos3.observe.mapping import CANONICAL, rename_columns, resolve_mapping
from strands_cosmos3.robots.panda import HOME_Q

FLAT = {f"joint{i + 1}": float(q) for i, q in enumerate(HOME_Q)} | {
    "finger_joint1": 0.008,
    "finger_joint2": 0.008,
}


def test_the_panda_reads_and_writes_its_own_keys():
    mapping = resolve_mapping("panda")
    seen = mapping.read(FLAT | {"joint3.vel": 0.25}, 1.5)
    assert np.array_equal(seen.q_rad, HOME_Q)
    assert seen.gripper == pytest.approx(0.2)  # 8 mm of 40: open fraction, asymmetric on purpose
    assert np.array_equal(seen.qd_rad_s, [0, 0, 0.25, 0, 0, 0, 0])
    assert seen.t_capture_s == 1.5
    assert seen.privileged is None
    step = mapping.write(HOME_Q, 0.2)
    assert list(step) == [f"joint{i + 1}" for i in range(7)] + ["finger_joint1"]
    assert all(type(value) is float for value in step.values())
    assert step["finger_joint1"] == pytest.approx(0.008)
    assert "finger_joint1" not in mapping.write(HOME_Q, None)


def test_state_keys_stand_in_order_where_there_is_no_robot():
    keys = [f"j{i}" for i in range(7)] + ["claw"]
    mapping = resolve_mapping(None, keys)
    seen = mapping.read(dict(zip(keys, [*HOME_Q, 0.2], strict=True)), 0.0)
    assert np.array_equal(seen.q_rad, HOME_Q)
    assert seen.gripper == 0.2
    assert mapping.write(HOME_Q, 0.2)["claw"] == 0.2
    own = resolve_mapping(None, keys, {"joint_0": "base"}, {"gripper": "finger_joint1"})
    assert own.observed["joint_0"] == "base"
    assert own.commanded["joint_0"] == "j0"
    assert own.write(HOME_Q, 0.2)["finger_joint1"] == pytest.approx(0.008)
    assert resolve_mapping(None).observed == dict(zip(CANONICAL, CANONICAL, strict=True))


@pytest.mark.parametrize(
    "keys",
    [
        [],
        "joint1",
        ["a"] * 8,
        ["a", ""],
        [*"abcdefg", " "],
        [1, 2],
        None.__class__,
        5,
        [f"j{i}" for i in range(7)],
        {"a": 1},
    ],
)
def test_malformed_state_keys_are_refused(keys):
    with pytest.raises(InputError):
        resolve_mapping(None, keys)


def test_an_unknown_robot_lists_the_known():
    with pytest.raises(ConfigError, match="panda"):
        resolve_mapping("ur5")


def test_a_missing_key_lists_what_there_is():
    flat = {name: value for name, value in FLAT.items() if name != "joint4"}
    with pytest.raises(ObservationError, match=r"lacks 'joint4'; it has: joint1, joint2"):
        resolve_mapping("panda").read(flat, 0.0)
    with pytest.raises(ObservationError, match="nothing"):
        resolve_mapping("panda").read({}, 0.0)


PICTURE = np.zeros((4, 6, 3), np.uint8)
CAMERAS = {
    "cam0": np.full_like(PICTURE, 1),
    "cam1": np.full_like(PICTURE, 2),
    "cam2": np.full_like(PICTURE, 3),
}


def values(observation):
    return {view: int(picture[0, 0, 0]) for view, picture in observation.images.items()}


@pytest.mark.parametrize(
    "names",
    [
        ("wrist", "exterior_1", "exterior_2"),
        (
            "observation/wrist_image_left",
            "observation/exterior_image_1_left",
            "observation/exterior_image_2_left",
        ),
        ("wrist_image_left", "exterior_image_1_left", "exterior_image_2_left"),
        (
            "observation.images.wrist",
            "observation.images.exterior_1",
            "observation.images.exterior_2",
        ),
    ],
)
def test_cameras_are_found_by_name(names):
    flat = FLAT | dict(zip(reversed(names), reversed(CAMERAS.values()), strict=True))
    seen = resolve_mapping("panda", rig=DROID_RIG).read(flat, 0.0, images=True)
    assert values(seen) == {"wrist": 1, "exterior_1": 2, "exterior_2": 3}
    assert not resolve_mapping("panda", rig=DROID_RIG).read(flat, 0.0).images


@pytest.mark.parametrize("back_to_front", [False, True])
def test_cameras_are_mapped_in_either_direction(back_to_front):
    """strands-robots' own provider maps camera -> server key, we map view -> camera; no name can
    be taken for the other.
    """
    given = dict(zip(("wrist", "exterior_1", "exterior_2"), ("cam2", "cam0", "cam1"), strict=True))
    if back_to_front:
        given = dict(zip(given.values(), DROID_RIG.wire_names, strict=True))
    mapping = resolve_mapping("panda", None, given, rig=DROID_RIG)
    assert values(mapping.read(FLAT | CAMERAS, 0.0, images=True)) == {
        "wrist": 3,
        "exterior_1": 1,
        "exterior_2": 2,
    }
    # who is mapped is not looked for by name
    decoy = FLAT | CAMERAS | {"wrist": np.full_like(PICTURE, 9)}
    assert values(mapping.read(decoy, 0.0, images=True))["wrist"] == 3


def test_a_missing_camera_is_named_with_what_there_is():
    mapping = resolve_mapping("panda", None, {"wrist": "cam0"}, rig=DROID_RIG)
    with pytest.raises(
        ObservationError, match=r"lacks camera 'exterior_1', 'exterior_2'; it has: cam0, cam1"
    ):
        mapping.read(FLAT | {"cam0": PICTURE, "cam1": PICTURE}, 0.0, images=True)
    with pytest.raises(
        ObservationError,
        match=r"lacks camera 'cam0', .*'wrist'.*no camera.*observation_mapping=\{'wrist'",
    ):
        mapping.read(FLAT, 0.0, images=True)
    with pytest.raises(Cosmos3Error):
        mapping.read(
            FLAT | CAMERAS | {"exterior_1": PICTURE, "exterior_2": PICTURE.astype(float)},
            0.0,
            images=True,
        )


def test_without_a_rig_the_one_picture():
    mapping = resolve_mapping("panda")
    assert values(mapping.read(FLAT | {"any": CAMERAS["cam1"]}, 0.0, images=True)) == {"image": 2}
    assert values(mapping.read(FLAT | CAMERAS | {"image": CAMERAS["cam2"]}, 0.0, images=True)) == {
        "image": 3
    }
    assert values(
        resolve_mapping("panda", None, {"image": "cam0"}).read(FLAT | CAMERAS, 0.0, images=True)
    ) == {"image": 1}
    with pytest.raises(ObservationError, match="cam0, cam1, cam2"):
        mapping.read(FLAT | CAMERAS, 0.0, images=True)


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"wrsit": "cam0"}, r"'wrsit' is not a canonical name or a view.*joint_0.*gripper, wrist"),
        ({"joint_7": "j7"}, "joint_7"),
        ({"q": "observation/joint_position"}, "'q' is not a canonical name"),
        (
            {"wrist": "cam0", "exterior_1": "cam0"},
            "'wrist' and 'exterior_1' have the same key 'cam0'",
        ),
        ({"joint_0": "joint2"}, "'joint_0' and 'joint_1' have the same key 'joint2'"),
        ({"wrist": ""}, "maps names to names"),
        ({"wrist": 3}, "maps names to names"),
        ("wrist", "maps names to names"),
    ],
)
def test_a_mapping_that_names_nothing_is_refused(mapping, says):
    with pytest.raises(ConfigError, match=says):
        resolve_mapping("panda", None, mapping, rig=DROID_RIG)


def test_an_action_mapping_is_a_renaming():
    assert rename_columns(("tx", "ty"), {"tx": "x"}) == ("x", "ty")
    with pytest.raises(ConfigError, match=r"'joint_9' is not a column.*tx, ty"):
        rename_columns(("tx", "ty"), {"joint_9": "x"})
    with pytest.raises(ConfigError, match="have the same key 'ty'"):
        rename_columns(("tx", "ty"), {"tx": "ty"})
    with pytest.raises(ConfigError, match="have the same key 'joint2'"):
        resolve_mapping("panda", None, None, {"joint_0": "joint2"})


@pytest.mark.parametrize(
    ("unit", "value"),
    [
        ("fraction", 0.2),
        ("closed_fraction", 0.8),
        ("finger_m", 0.008),
        ("tendon", 51.0),
        (get_embodiment("umi").gripper, 0.2 * 0.0967),
    ],
)
def test_gripper_units(unit, value):
    """0.2 open, in every unit, both ways: asymmetric, so that no flip and no scale is missed."""
    mapping = resolve_mapping("panda", observed_gripper=unit, commanded_gripper=unit)
    assert mapping.read(FLAT | {"finger_joint1": value}, 0.0).gripper == pytest.approx(0.2)
    assert mapping.write(HOME_Q, 0.2)["finger_joint1"] == pytest.approx(value)
    one_sided = resolve_mapping("panda", commanded_gripper=unit)
    # the observation stays in metres
    assert one_sided.read(FLAT, 0.0).gripper == pytest.approx(0.2)
    with pytest.raises(UnknownNameError, match="closed_fraction"):
        resolve_mapping("panda", observed_gripper="furlong")


@pytest.mark.parametrize("value", [np.nan, np.inf, "0.1", None, [0.1, 0.2], [], 1j, object(), b"1"])
@pytest.mark.parametrize("key", ["joint2", "finger_joint1", "joint5.vel"])
def test_malformed_numbers_are_refused(key, value):
    with pytest.raises(Cosmos3Error):
        resolve_mapping("panda").read(FLAT | {key: value}, 0.0)


@pytest.mark.parametrize("flat", [None, 3, "joint1", [1, 2]])
def test_an_observation_is_a_mapping(flat):
    with pytest.raises(ObservationError):
        resolve_mapping("panda").read(flat, 0.0)
