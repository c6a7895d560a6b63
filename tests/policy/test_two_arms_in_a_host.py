"""Two arms in a host's MuJoCo simulator: both are known, bound and driven; and models that do
not hold them.
"""

import mujoco
import numpy as np
import pytest

from helpers.spy import Spy
from strands_cosmos3.backends.replay import LimbRecording, Recording
from strands_cosmos3.embodiments import MODEL_GRIPPER, PANDA_FINGER, get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.mapping import resolve_mapping
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.model import assembled
from strands_cosmos3.robots.panda import ARM_JOINTS, HOME_Q, dh_forward

DUAL_PANDA = get_robot("dual_panda")

DUAL = get_embodiment("robomind-franka-dual")
T_HAND_COSMOS = DUAL.tool_frame.T_parent_cosmos
HZ, SIDES = 50, ("left", "right")


def hosted(change=lambda spec: None, prefix="cell/"):
    """A host's model: a pillar and both arms on a turned pedestal, their names prefixed."""
    pair, whole = assembled(DUAL_PANDA.model), mujoco.MjSpec()
    change(pair)
    for name in ("timestep", "impratio", "integrator", "cone"):
        setattr(whole.option, name, getattr(pair.option, name))
    pillar = whole.worldbody.add_body(name="pillar", pos=[-1, 0, 0])
    pillar.add_joint(name="lid")
    pillar.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.1, 0.1, 0.3])
    whole.attach(
        pair,
        prefix=prefix,
        frame=whole.worldbody.add_frame(pos=[0.3, -0.2, 0.5], quat=[0.6, 0, 0, 0.8]),
    )
    return whole.compile()


def one_by_one(*prefixes):
    """A host's model of single Pandas, each under its own prefix."""
    whole = mujoco.MjSpec()
    for i, prefix in enumerate(prefixes):
        arm = mujoco.MjSpec.from_file(str(resource("assets/panda.xml")))
        for key in list(arm.keys):
            arm.delete(key)
        whole.attach(arm, prefix=prefix, frame=whole.worldbody.add_frame(pos=[0, 0.3 - 0.6 * i, 0]))
    return whole.compile()


def sway(side, t_s):
    """Angles [..., 7] of an arm's own motion, from home and at rest."""
    t_s, amount = np.asarray(t_s)[..., None], {"left": 0.15, "right": -0.1}[side]
    return HOME_Q + amount * (1 - np.cos(np.pi * t_s)) / 2 * np.array([1, 0.5, 0, -1, 0, 0.5, 1])


def recording(duration_s=2.0):
    t_s = np.arange(0, duration_s + 1e-9, 0.1)
    motions = {
        side: Recording(
            dh_forward(sway(side, t_s)) @ T_HAND_COSMOS, np.full(len(t_s), opening), 10.0, HOME_Q
        )
        for side, opening in zip(SIDES, (1.0, 0.25), strict=True)
    }
    return LimbRecording(motions, DUAL.name)


def seen(model, data, prefix="cell/"):
    """What a host shows: every joint by its short name, with its speed."""
    names = [model.joint(i).name for i in range(model.njnt)]
    flat = {name.removeprefix(prefix): float(data.joint(name).qpos[0]) for name in names}
    return flat | {
        f"{name.removeprefix(prefix)}.vel": float(data.joint(name).qvel[0]) for name in names
    }


def at_home():
    """A flat observation of both arms at home, with open grippers."""
    home = {
        f"{side}_{joint}": angle
        for side in SIDES
        for joint, angle in zip(ARM_JOINTS, HOME_Q, strict=True)
    }
    return home | dict.fromkeys(("left_finger_joint1", "right_finger_joint1"), 0.04)


def told(model, data, step, prefix="cell/"):
    """Write a step as strands-robots does: a joint's servo its angle, a tendon's actuator its
    range by the fraction.
    """
    for key, value in step.items():
        side, _, name = key.partition("_")
        number = 8 if name.startswith("finger") else int(name.removeprefix("joint"))
        actuator = model.actuator(f"{prefix}{side}_actuator{number}")
        low, high = actuator.ctrlrange
        data.ctrl[actuator.id] = low + value * (high - low) if number == 8 else value


def test_both_arms_of_a_host_follow_their_own_motion():
    model = hosted()
    data, steps_of = mujoco.MjData(model), round(1 / HZ / model.opt.timestep)
    for side in SIDES:
        for i, joint in enumerate(ARM_JOINTS):
            data.joint(f"cell/{side}_{joint}").qpos = data.ctrl[
                model.actuator(f"cell/{side}_actuator{i + 1}").id
            ] = HOME_Q[i]
        data.joint(f"cell/{side}_finger_joint1").qpos = data.joint(
            f"cell/{side}_finger_joint2"
        ).qpos = 0.04
    policy = Cosmos3Policy(DUAL, robot="dual_panda", backend="replay", model=recording())
    policy.set_sim_context(model, "cell/")
    policy.set_control_frequency(HZ)
    off_mm, executed = {side: [] for side in SIDES}, 0
    while executed < 2 * HZ:
        for step in policy.get_actions_sync(seen(model, data), "")[: policy.execution_horizon]:
            told(model, data, step)
            mujoco.mj_step(model, data, steps_of)
            executed += 1
            for side in SIDES:
                q = np.array([data.joint(f"cell/{side}_{joint}").qpos[0] for joint in ARM_JOINTS])
                here, wanted = (
                    dh_forward(one)[:3, 3] for one in (q, sway(side, min(executed / HZ, 2.0)))
                )
                off_mm[side].append(1e3 * np.linalg.norm(here - wanted))
    assert max(off_mm["left"]) < 1
    assert max(off_mm["right"]) < 1
    assert data.joint("cell/left_finger_joint1").qpos[0] > 0.035
    # a quarter of its range
    assert data.joint("cell/right_finger_joint1").qpos[0] == pytest.approx(0.01, abs=3e-3)
    moved = [
        np.linalg.norm(dh_forward(sway(side, 1.0))[:3, 3] - dh_forward(HOME_Q)[:3, 3])
        for side in SIDES
    ]
    assert min(moved) > 0.03


def test_each_gripper_and_servo_of_a_host_is_its_own():
    """The right gripper is a position servo in metres here, and the right arm is slower."""

    def change(spec):
        spec.delete(spec.actuator("right_actuator8"))
        spec.add_actuator(
            name="right_finger", trntype=mujoco.mjtTrn.mjTRN_JOINT, target="right_finger_joint1"
        )
        spec.actuator("right_actuator1").set_to_position(kp=4500.0, kv=900.0)

    policy = Cosmos3Policy(DUAL, robot="dual_panda", backend="replay", model=recording())
    policy.set_sim_context(hosted(change), "cell/")
    step = policy.get_actions_sync(at_home(), "")[0]
    assert step["left_finger_joint1"] == pytest.approx(1.0)  # of its tendon's range
    assert step["right_finger_joint1"] == pytest.approx(0.25 * 0.04)  # in metres
    policy.set_robot_state_keys(list(policy.mapping.observed.values()))
    assert policy.mapping.commanded_units == {
        "left_gripper": MODEL_GRIPPER,
        "right_gripper": PANDA_FINGER,
    }
    bound = policy._arm._lead_s
    np.testing.assert_allclose(bound[[0, 7]], [451 / 4500, 901 / 4500], rtol=1e-6)


def raise_the_right_hand(spec):
    spec.body("right_hand").pos = [0, 0, 0.110]


def move_the_right_base(spec):
    spec.body("right_link0").pos = [0, -0.05, 0]


def rename_a_joint(spec):
    spec.joint("right_joint4").name = "right_elbow"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (raise_the_right_hand, r"right hand is 3.0 mm and 0.0 degrees from where"),
        (
            move_the_right_base,
            r"base of the simulated robot's right arm stands 50.0 mm .* seen from the left one",
        ),
        (rename_a_joint, r"no joint right_joint4; it has: .*right_elbow"),
    ],
)
def test_a_host_s_other_arms_are_refused_now_and_at_the_next_call(change, says):
    policy = Cosmos3Policy(DUAL, "dual_panda", Spy())
    with pytest.raises(ConfigError, match=says):
        policy.set_sim_context(hosted(change), "cell/")
    with pytest.raises(ConfigError, match=says):
        policy.get_actions_sync(at_home(), "go")
    policy.set_sim_context(hosted(), "cell/")
    policy._arm.require_known()


def without_a_gripper(spec):
    spec.delete(spec.actuator("right_actuator8"))


def exchanged(*names):
    """An action mapping that exchanges the arms' keys of some canonical names."""
    other = {"left": "right", "right": "left"}
    return {f"{side}_{name}": f"{other[side]}_{called}" for side in SIDES for name, called in names}


def test_a_gripper_that_nothing_drives_is_refused_before_anything_moves():
    policy = Cosmos3Policy(DUAL, "dual_panda", spy := Spy())
    says = (
        r"no actuator 'right_finger_joint1'.*'right'.*'right_actuator8'.*Its actuators: "
        r"left_actuator1, .*action_mapping"
    )
    for call in (
        lambda: policy.set_sim_context(hosted(without_a_gripper), "cell/"),
        lambda: policy.get_actions_sync(at_home(), "go"),
    ):
        with pytest.raises(ConfigError, match=says):
            call()
    assert not spy.requests


ALL = [(f"joint_{i}", f"joint{i + 1}") for i in range(7)]


@pytest.mark.parametrize(
    "names", [ALL, ALL[2:3], [("gripper", "finger_joint1")]], ids=["arms", "a joint", "grippers"]
)
def test_a_mapping_that_exchanges_the_arms_is_refused(names):
    """By the keys alone, as on hardware: what is observed as one arm's joint is commanded as the
    other's.
    """
    with pytest.raises(
        ConfigError, match=r"'left_.*' is observed as 'left_.*' and commanded as 'right_.*exchanged"
    ):
        resolve_mapping("dual_panda", None, None, exchanged(*names))
    with pytest.raises(ConfigError, match="exchanged"):
        resolve_mapping("dual_panda", None, exchanged(*names))
    actuators = [(name, f"actuator{i + 1}") for i, (name, _) in enumerate(ALL)]
    with pytest.raises(
        ConfigError,
        match=r"'left_joint_0' is observed as 'left_joint1' and commanded as 'right_actuator1'",
    ):
        resolve_mapping("dual_panda", None, None, exchanged(*actuators))
    own = {f"{side}_{name}": f"{side[0]}/{called}" for side in SIDES for name, called in names}
    other = {
        name: own[name.replace("left", "tmp").replace("right", "left").replace("tmp", "right")]
        for name in own
    }
    assert resolve_mapping("dual_panda", None, own, own).commanded["left_joint_2"]
    with pytest.raises(ConfigError, match=r"is observed as 'l/.* and commanded as 'r/.*exchanged"):
        resolve_mapping("dual_panda", None, own, other)
    both = exchanged(*names)
    # a host may call them the other way round
    assert resolve_mapping("dual_panda", None, both, both).observed["left_joint_2"]


@pytest.mark.parametrize(
    ("crossed", "says"),
    [
        ({}, None),
        (
            {"left_joint_0": "b_1", "right_joint_0": "a_1"},
            r"'b_1' is commanded where 'left_joint1' is.*moves 'right_joint1'",
        ),
        (
            {"left_gripper": "b_8", "right_gripper": "a_8"},
            r"'b_8', .* for the gripper of 'left', is on the right arm",
        ),
    ],
)
def test_the_host_s_model_tells_what_an_actuator_moves(crossed, says):
    """Actuators whose names do not say which arm they are of: only the model does."""

    def change(spec):
        for actuator in spec.actuators:
            side, _, number = actuator.name.partition("_actuator")
            actuator.name = f"{'a' if side == 'left' else 'b'}_{number}"

    names = [*(name for name, _ in ALL), "gripper"]
    mapped = {
        f"{side}_{name}": f"{short}_{i + 1}"
        for side, short in zip(SIDES, "ab", strict=True)
        for i, name in enumerate(names)
    }
    policy = Cosmos3Policy(DUAL, "dual_panda", Spy(), action_mapping=mapped | crossed)
    if says is None:
        policy.set_sim_context(hosted(change), "cell/")
        return
    with pytest.raises(ConfigError, match=says):
        policy.set_sim_context(hosted(change), "cell/")


def test_a_namespace_that_does_not_tell_which_is_refused():
    both = mujoco.MjSpec()
    for i, prefix in enumerate(("a/", "b/")):
        both.attach(
            assembled(DUAL_PANDA.model),
            prefix=prefix,
            frame=both.worldbody.add_frame(pos=[2 * i, 0, 0]),
        )
    policy = Cosmos3Policy(DUAL, "dual_panda", Spy())
    says = r"'left_joint1' is ambiguous: a/left_joint1 or b/left_joint1"
    with pytest.raises(ConfigError, match=says):
        policy.set_sim_context(both.compile(), "")
    with pytest.raises(
        ConfigError, match=r"no joint left_joint1, .*right_joint7; it has: arm/joint1"
    ):
        policy.set_sim_context(one_by_one("arm/"), "")


def test_single_arms_of_a_host_are_mapped_to_limbs():
    """Two Pandas that a host calls otherwise, by name of the limb: the arms' names are the
    host's own.
    """
    model, names = one_by_one("l/", "r/"), (*(f"joint_{i}" for i in range(7)), "gripper")
    joints = (*ARM_JOINTS, "finger_joint1")
    mapped = {
        f"{side}_{name}": f"{side[0]}/{joint}"
        for side in SIDES
        for name, joint in zip(names, joints, strict=True)
    }
    policy = Cosmos3Policy(
        DUAL, "dual_panda", Spy(), observation_mapping=mapped, action_mapping=mapped
    )
    policy.set_sim_context(model, "")
    assert policy.mapping.commanded_units == {
        "left_gripper": MODEL_GRIPPER,
        "right_gripper": MODEL_GRIPPER,
    }
    assert policy.mapping.joint_keys[7:9] == ["r/joint1", "r/joint2"]
    twice = mapped | {"right_joint_0": "joint1"}
    policy = Cosmos3Policy(DUAL, "dual_panda", Spy(), observation_mapping=twice)
    with pytest.raises(ConfigError, match=r"l/joint1 and joint1 are one joint"):
        policy.set_sim_context(model, "l/")
    with pytest.raises(ConfigError, match=r"up_joint_0.*left_joint_0"):
        resolve_mapping("dual_panda", None, {"up_joint_0": "j"})
