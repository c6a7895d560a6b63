"""Flat observations in, flat actions out, in the robot's own names and units."""

import numpy as np
import pytest

from strands_cosmos3.arm.panda import HOME_Q
from strands_cosmos3.errors import ConfigError, Cosmos3Error, InputError, ObservationError
from strands_cosmos3.observe.mapping import CANONICAL, resolve_mapping

FLAT = {f"joint{i + 1}": float(q) for i, q in enumerate(HOME_Q)} | {"finger_joint1": 0.008, "finger_joint2": 0.008}


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
    "keys", [[], "joint1", ["a"] * 8, ["a", ""], [1, 2], None.__class__, 5, [f"j{i}" for i in range(7)], {"a": 1}]
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


def test_cameras():
    picture = np.zeros((4, 6, 3), np.uint8)
    mapping = resolve_mapping("panda", None, {"wrist": "cam0"})
    assert mapping.read(FLAT | {"cam0": picture}, 0.0, ["wrist"]).images["wrist"].shape == (4, 6, 3)
    with pytest.raises(ObservationError, match=r"lacks camera 'exterior_1'; it has: cam0"):
        mapping.read(FLAT | {"cam0": picture}, 0.0, ["wrist", "exterior_1"])
    with pytest.raises(Cosmos3Error):
        mapping.read(FLAT | {"cam0": picture.astype(float)}, 0.0, ["wrist"])


@pytest.mark.parametrize("value", [np.nan, np.inf, "0.1", None, [0.1, 0.2], [], 1j, object(), b"1"])
@pytest.mark.parametrize("key", ["joint2", "finger_joint1", "joint5.vel"])
def test_malformed_numbers_are_refused(key, value):
    with pytest.raises(Cosmos3Error):
        resolve_mapping("panda").read(FLAT | {key: value}, 0.0)


@pytest.mark.parametrize("flat", [None, 3, "joint1", [1, 2]])
def test_an_observation_is_a_mapping(flat):
    with pytest.raises(ObservationError):
        resolve_mapping("panda").read(flat, 0.0)
