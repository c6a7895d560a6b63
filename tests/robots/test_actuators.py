"""Arms that nobody here built: actuators that are accepted move as commanded, others are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from strands_cosmos3 import Robot
from strands_cosmos3.cli import main
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.actuators import actuators_of, position_servos, servo_fault
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.drive_check import (
    LARGEST_ERROR,
    LARGEST_HAND_ERROR_M,
    drive_joints,
    gripper_faults,
)
from strands_cosmos3.robots.inspection import inspect_model
from strands_cosmos3.robots.model import load_robot
from strands_cosmos3.robots.spec import Figures, ModelPart, RobotSpec, ServoGains
from strands_cosmos3.worlds.arms import ControlConfig
from strands_cosmos3.worlds.table.scene import TableScene

UR5E = get_robot("ur5e")
ARM = UR5E.limbs[0]
KP, KD = (2000.0,) * 3 + (500.0,) * 3, (400.0,) * 3 + (100.0,) * 3
REACH_RAD = 6.3

ACCEPTED = ("position", "gear", "offset", "filter", "early", "scaled", "damped")
REFUSED = {
    "motor": "motor",
    "velocity": "velocity servo",
    "intvelocity": "integrates",
    "muscle": "MUSCLE",
    "pair": "pulls at the same joint",
    "runaway": "positive",
    "bent": "gain is not a constant",
    "bounded": "actrange",
    "delayed": "delayed by 0.02 s",
    "cable": "does not act on a joint directly",
}


def actuator(kind: str, joint: str, name: str, i: int, rng: np.random.Generator) -> str:
    """An actuator of one kind, with random figures; its law at the joint is KP and KD."""
    kp, kd, gear = KP[i], KD[i], 1.0
    if kind in ("gear", "filter", "early") or (kind == "offset" and rng.random() < 0.5):
        gear = float(rng.choice([-1.0, 1.0]) * 10 ** rng.uniform(-1, 2))
    stiffness, damping = kp / gear**2, kd / gear**2
    gain = stiffness * (10 ** rng.uniform(-1, 1) if kind in ("offset", "scaled") else 1.0)
    gain *= float(rng.choice([-1.0, 1.0])) if kind == "offset" else 1.0
    offset = float(rng.uniform(-0.3, 0.3)) * stiffness if kind == "offset" else 0.0
    force = 150.0 / abs(gear)
    common = f'name="{name}" joint="{joint}" gear="{gear}" forcerange="-{force} {force}"'
    law = f'biastype="affine" gainprm="{gain}" biasprm="{offset} {-stiffness} {-damping}"'
    ends = [(gear * x * stiffness - offset) / gain for x in (-REACH_RAD, REACH_RAD)]
    ctrl_range = f'ctrlrange="{min(ends)} {max(ends)}"'
    limited = ctrl_range if rng.random() < 0.5 and kind not in ("filter", "early") else ""
    time_constant = f'dynprm="{10 ** rng.uniform(-2, -0.3)}"'
    return {
        "position": f'<position {common} kp="{kp}" kv="{kd}" {limited}/>',
        "gear": f"<general {common} {law} {limited}/>",
        "offset": f"<general {common} {law} {limited}/>",
        "scaled": f"<general {common} {law} {limited}/>",
        "damped": f'<position {common} kp="{kp}" kv="{kd / 2}" damping="{kd / 2}" {limited}/>',
        "filter": f'<general {common} {law} dyntype="{rng.choice(["filter", "filterexact"])}" '
        f"{time_constant}/>",
        "early": f'<general {common} {law} dyntype="filterexact" actearly="true" {time_constant}/>',
        "motor": f'<motor name="{name}" joint="{joint}" ctrlrange="-150 150"/>',
        "velocity": f'<velocity name="{name}" joint="{joint}" kv="{kd}"/>',
        "intvelocity": f'<intvelocity name="{name}" joint="{joint}" kp="{kp}" kv="{kd}" '
        'actrange="-6.3 6.3"/>',
        "muscle": f'<muscle name="{name}" joint="{joint}" lengthrange="-1 1"/>',
        "pair": f'<position {common} kp="{kp}"/><velocity name="{name}_2" joint="{joint}" kv="9"/>',
        "runaway": f'<general {common} biastype="affine" gainprm="{kp}" biasprm="0 {kp} 0"/>',
        "bent": f'<general {common} gaintype="affine" biastype="affine" gainprm="{kp} 5 0" '
        f'biasprm="0 {-kp} {-kd}"/>',
        "bounded": f'<general {common} {law} dyntype="filter" {time_constant} actrange="-1 1"/>',
        "delayed": f'<position {common} kp="{kp}" kv="{kd}" delay="0.02" nsample="11"/>',
        "cable": f'<position name="{name}" tendon="{joint}_cable" kp="{kp}" kv="{kd}"/>',
    }[kind]


def arm(folder: Path, kinds: Mapping[str, Any], rng: np.random.Generator) -> RobotSpec:
    """A UR5e whose joints have actuators of these kinds."""
    text, blocks = resource("assets/ur5e.xml").read_text(), []
    for i, (joint, name) in enumerate(zip(ARM.joints, ARM.actuators, strict=True)):
        text = re.sub(rf'<(position|general)[^>]*joint="{joint}"[^>]*/>', "", text)
        blocks.append(actuator(kinds[joint], joint, name, i, rng))
    cables = "".join(
        f'<fixed name="{joint}_cable"><joint joint="{joint}" coef="1"/></fixed>'
        for joint in ARM.joints
    )
    path = folder / "arm.xml"
    blocks.append(f"</actuator><tendon>{cables}</tendon><actuator>")
    path.write_text(text.replace("<actuator>", "<actuator>" + "".join(blocks), 1))
    return replace(UR5E, name="odd_arm", model=(ModelPart(str(path)),))


def random_arm(folder: Path, seed: int) -> tuple[RobotSpec, list[str]]:
    """An arm of random accepted actuators, some with one of a refused kind; and the refused."""
    rng = np.random.default_rng(seed)
    kinds = {joint: str(rng.choice(ACCEPTED)) for joint in ARM.joints}
    refused: list[str] = []
    if rng.random() < 0.35:
        refused = [str(rng.choice(list(REFUSED)))]
        kinds[str(rng.choice(ARM.joints))] = refused[0]
    return arm(folder, kinds, rng), refused


def reach_error_mm(robot: RobotSpec, folder: Path, seed: int, feed_forward: str) -> float:
    """Mean tracking error of a scripted reach."""
    path = folder / "arm.toml"
    path.write_text(write_robot(robot))
    rollout = Robot(str(path), ControlConfig(feed_forward=feed_forward)).run_policy(
        instruction="reach the red cube",
        policy_config={"backend": "scripted", "embodiment": "robomind-ur"},
        task="reach",
        duration=8.0,
        seed=seed,
    )
    assert rollout.outcome == "success"
    assert rollout.tracking is not None
    return rollout.tracking.mean_mm


def check(folder: Path, seed: int) -> bool:
    """Whether an arm is accepted; an accepted one follows, a refused one is refused by name."""
    robot, refused = random_arm(folder, seed)
    if refused:
        with pytest.raises(ConfigError, match=REFUSED[refused[0]]):
            drive_joints(robot)
        with pytest.raises(ConfigError, match=REFUSED[refused[0]]):
            reach_error_mm(robot, folder, seed, "velocity")
        return False
    assert all(drive.follows for drive in drive_joints(robot)), seed
    assert reach_error_mm(robot, folder, seed, "velocity") < 1.0, seed
    return True


def test_two_random_arms_follow_or_are_refused(tmp_path):
    """The first has every accepted kind but one, which has a test of its own."""
    accepted = [check(tmp_path, seed) for seed in (22, 2)]
    assert accepted == [True, False]


@pytest.mark.slow
def test_two_hundred_random_arms_follow_or_are_refused(tmp_path):
    """About eight minutes."""
    accepted = sum(check(tmp_path, seed) for seed in range(200))
    assert accepted >= 120


def altered_arm(folder: Path, of_joints: Mapping[str, str], more: str = "") -> RobotSpec:
    """An arm with position servos whose joints have further attributes, and more elements."""
    robot = arm(folder, dict.fromkeys(ARM.joints, "position"), np.random.default_rng(0))
    path = Path(robot.model[0].file)
    text = path.read_text().replace("</mujoco>", f"{more}</mujoco>")
    for joint, attributes in of_joints.items():
        place = f'<joint name="{joint}"'
        assert text.count(place) == 1
        text = text.replace(place, f"{place} {attributes}")
    path.write_text(text)
    return robot


def test_what_is_small_near_home_is_measured_farther_away(tmp_path):
    """A tendon that ends 1 rad above home."""
    cable = (
        '<tendon><fixed name="cable" limited="true" range="-6 -0.6">'
        '<joint joint="wrist_1_joint" coef="1"/></fixed></tendon>'
    )
    drives = drive_joints(altered_arm(tmp_path, {}, cable))
    assert max(drive.largest_error / abs(drive.commanded) for drive in drives) < LARGEST_ERROR
    assert [drive.joint for drive in drives if not drive.follows] == ["wrist_1_joint"]


def test_a_joint_needs_the_torque_of_a_tasks_accelerations(tmp_path):
    weak = {"shoulder_lift_joint": 'actuatorfrcrange="-2 2"'}
    drives = drive_joints(altered_arm(tmp_path, weak))
    failing = {drive.joint for drive in drives if not drive.follows}
    assert "shoulder_lift_joint" in failing
    assert failing <= set(ARM.joints[:3])


def test_errors_of_several_joints_add_up(tmp_path):
    """Each of these dials, which turn with a joint and have a spring, alone leaves the hand less
    than half a millimetre off.
    """
    home = dict(zip(ARM.joints, ARM.home, strict=True))
    turned = ("shoulder_pan_joint", "shoulder_lift_joint", "elbow_joint")
    mass = '<inertial pos="0 0 0" mass="0.1" diaginertia="0.01 0.01 0.01"/>'
    dials = "".join(
        f'<body pos="{i} 2 2"><joint name="dial_{joint}" stiffness="0.7" '
        f'springref="{home[joint]}"/>{mass}</body>'
        for i, joint in enumerate(turned)
    )
    bound = "".join(f'<joint joint1="dial_{joint}" joint2="{joint}"/>' for joint in turned)
    more = f"<worldbody>{dials}</worldbody><equality>{bound}</equality>"
    drives = drive_joints(altered_arm(tmp_path, {}, more))
    errors_m = [drive.hand_error_m for drive in drives]
    assert max(errors_m) < LARGEST_HAND_ERROR_M < sum(errors_m)
    assert {*turned} <= {drive.joint for drive in drives if not drive.follows}


def carrying(torque_nm: float) -> str:
    """Attributes of a joint that carries its weight with a limited torque."""
    return f'actuatorgravcomp="true" actuatorfrcrange="-{torque_nm} {torque_nm}"'


def test_an_arm_that_holds_its_weight_needs_the_torque_for_it(tmp_path, capsys):
    """A reach of such an arm was 148 mm off."""
    robot = altered_arm(tmp_path, {"shoulder_lift_joint": carrying(5)})
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    assert main(["robot", "inspect", str(tmp_path / "arm.toml")]) == 1
    assert "shoulder_lift_joint does not follow: " in capsys.readouterr().out


def bound_arm(
    folder: Path, equalities: str, of_joints: Mapping[str, str] | None = None
) -> RobotSpec:
    """An arm with position servos, a dial that nothing drives, and equalities."""
    mass = '<inertial pos="0 0 0" mass="0.1" diaginertia="0.01 0.01 0.01"/>'
    dial = f'<body pos="2 2 2"><joint name="dial"/>{mass}</body>'
    more = f"<worldbody>{dial}</worldbody><equality>{equalities}</equality>"
    return altered_arm(folder, of_joints or {}, more)


@pytest.mark.parametrize(
    ("joints", "says"),
    [
        ('joint1="elbow_joint" joint2="wrist_2_joint"', "couples .*wrist_2_joint"),
        ('joint1="wrist_2_joint" joint2="elbow_joint"', "couples .*wrist_2_joint"),
        ('joint1="elbow_joint"', "fixes"),
    ],
)
def test_a_joint_that_an_equality_binds_is_refused(tmp_path, joints, says):
    """However soft it is."""
    robot = bound_arm(tmp_path, f'<joint {joints} solref="-1 -1"/>')
    with pytest.raises(ConfigError, match=f"elbow .*equality {says}"):
        drive_joints(robot)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            '<equality><joint joint1="wrist_3_joint" joint2="wrist_1_joint"/></equality>',
            "wrist_1 .*couples.*wrist_3 .*couples",
        ),
        ('<equality><joint joint1="shoulder_pan_joint"/></equality>', "shoulder_pan .*fixes"),
        (
            '<actuator><position name="more" joint="wrist_2_joint" kp="3"/></actuator>',
            "wrist_2 .*'more' pulls",
        ),
    ],
)
def test_gains_are_no_remedy_where_they_are_given(tmp_path, more, says):
    robot = altered_arm(tmp_path, {}, more)
    with pytest.raises(ConfigError, match=f"{says}.*; give the limb gains .* or name others"):
        TableScene(robot=robot)
    gains = ServoGains(Figures(KP, "tuned"), Figures(KD, "tuned"))
    robot = replace(robot, limbs=(replace(robot.limb(), gains=gains),))
    with pytest.raises(ConfigError, match=f"{says}.* are not position servos; name others"):
        TableScene(robot=robot)


def test_equalities_that_bind_nothing_and_torques_that_suffice_are_accepted(tmp_path):
    equalities = (
        '<joint joint1="elbow_joint" active="false"/><joint joint1="dial" joint2="elbow_joint"/>'
    )
    torques = {
        "shoulder_lift_joint": carrying(150),
        "shoulder_pan_joint": 'actuatorfrcrange="-30 30"',
    }
    drives = drive_joints(bound_arm(tmp_path, equalities, torques))
    assert all(drive.follows for drive in drives)


@pytest.mark.parametrize("kind", REFUSED)
def test_each_refusal_names_the_actuator_and_its_reason(tmp_path, kind):
    kinds = dict.fromkeys(ARM.joints, "position") | {"elbow_joint": kind}
    robot = arm(tmp_path, kinds, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=f"elbow .*{REFUSED[kind]}.*gains"):
        drive_joints(robot)


def test_gains_make_a_position_servo_of_any_actuator(tmp_path):
    """They are stiffness and damping at the joint, whatever the actuator's gear."""
    kinds = ("motor", "velocity", "intvelocity", "filter", "gear", "runaway")
    robot = arm(tmp_path, dict(zip(ARM.joints, kinds, strict=True)), np.random.default_rng(1))
    gains = ServoGains(Figures(KP, "tuned"), Figures(KD, "tuned"))
    robot = replace(robot, limbs=(replace(ARM, gains=gains),))
    model = load_robot(robot)
    law = position_servos(model, [model.actuator(name).id for name in ARM.actuators])
    np.testing.assert_allclose(law.kp, KP)
    np.testing.assert_allclose(law.kd, KD)
    assert all(drive.follows for drive in drive_joints(robot))


@pytest.mark.parametrize("kind", ACCEPTED)
def test_a_law_is_the_torque_that_mujoco_computes(tmp_path, kind):
    """A target off by 0.1 rad, at a speed of 0.2 rad/s, against ``qfrc_actuator``."""
    robot = arm(tmp_path, dict.fromkeys(ARM.joints, kind), np.random.default_rng(3))
    model = load_robot(robot)
    ids = np.array([model.actuator(name).id for name in ARM.actuators])
    law, data = position_servos(model, ids), mujoco.MjData(model)
    q, target = ARM.home_rad, ARM.home_rad + 0.01
    data.qpos[:6], data.qvel[:6] = q, 0.2
    law.hold(data, target)
    if law.early.any():  # the force has the activation at the step's end
        data.ctrl[ids] = law.ctrl(target)
    mujoco.mj_forward(model, data)
    torque = law.kp * (target - q) - law.kd * 0.2
    np.testing.assert_allclose(data.qfrc_actuator[:6], torque, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["filter", "early", "gear", "offset"])
def test_an_arm_rests_at_home_after_a_reset(tmp_path, kind):
    """A filter that began at zero would let the hand jump by 66 mm."""
    robot = arm(tmp_path, dict.fromkeys(ARM.joints, kind), np.random.default_rng(5))
    path = tmp_path / "arm.toml"
    path.write_text(write_robot(robot))
    simulated = Robot(str(path))
    simulated.reset(0)
    start = simulated.data.qpos[simulated.scene.arm_qpos].copy()
    for _ in range(200):
        mujoco.mj_step(simulated.model, simulated.data)
    np.testing.assert_allclose(simulated.data.qpos[simulated.scene.arm_qpos], start, atol=2e-4)


@pytest.mark.parametrize("feed_forward", ["computed_torque", "velocity"])
def test_filters_are_led_in_both_feed_forwards(tmp_path, feed_forward):
    robot = arm(tmp_path, dict.fromkeys(ARM.joints, "filter"), np.random.default_rng(7))
    assert reach_error_mm(robot, tmp_path, 0, feed_forward) < 1.0


def test_a_range_that_clips_narrows_the_joint_and_is_counted(tmp_path):
    """Targets beyond the range of the controls are never commanded; a lead beyond it is counted."""
    kinds = dict.fromkeys(ARM.joints, "position")
    robot = arm(tmp_path, kinds, np.random.default_rng(9))
    text = Path(robot.model[0].file).read_text()
    home = ARM.home[2]
    narrow = re.sub(
        r'(name="elbow" [^/]*?)(ctrlrange="[^"]*")?/>',
        rf'\1 ctrlrange="{home - 0.4} {home + 0.4}"/>',
        text,
    )
    Path(robot.model[0].file).write_text(narrow)
    path = tmp_path / "arm.toml"
    path.write_text(write_robot(robot))
    simulated = Robot(str(path))
    assert simulated.limits.q_max[2] == pytest.approx(home + 0.4)
    assert simulated.limits.q_min[2] == pytest.approx(home - 0.4)
    targets = np.tile(ARM.home_rad, (3, 1))
    targets[1, 2] += 0.5
    ctrl, _, n_clipped = simulated.servo.controls(targets, ARM.home_rad)
    assert n_clipped == 1
    assert ctrl[1, 2] == pytest.approx(home + 0.4)


GRIPPER = re.search('<position name="gripper".*/>', resource("assets/ur5e.xml").read_text())
OTHER_GRIPPERS = {
    "as it is": ("", {}, None),
    "a slow one": ('<position name="gripper" tendon="split" kp="900" timeconst="0.3"/>', {}, None),
    "a negative gear": ('<position name="gripper" tendon="split" gear="-1" kp="2000"/>', {}, "0%"),
    "a motor": ('<motor name="gripper" tendon="split" ctrlrange="-60 60"/>', {}, "100%"),
    "a velocity servo": ('<velocity name="gripper" tendon="split" kv="2000"/>', {}, "100%"),
    "exchanged commands": ("", {"open_value": 0.0, "closed_value": 0.0425}, "100%"),
}


def arm_with_gripper(folder: Path, name: str) -> RobotSpec:
    """A UR5e with another gripper, or another command of its own."""
    actuator, command, _ = OTHER_GRIPPERS[name]
    gripper = replace(ARM.gripper, command=replace(ARM.gripper.command, **command))
    text = resource("assets/ur5e.xml").read_text()
    path = folder / "arm.xml"
    path.write_text(text.replace(GRIPPER.group(), actuator or GRIPPER.group()))
    limbs = (replace(ARM, gripper=gripper),)
    return replace(UR5E, name="odd_arm", model=(ModelPart(str(path)),), limbs=limbs)


@pytest.mark.parametrize("name", OTHER_GRIPPERS)
def test_a_gripper_opens_and_closes_or_is_named(tmp_path, name):
    _, _, closed = OTHER_GRIPPERS[name]
    faults = gripper_faults(arm_with_gripper(tmp_path, name))
    assert len(faults) == (closed is not None)
    for fault in faults:
        assert fault.startswith("the gripper of limb 'arm' does not follow")
        assert f"and {closed} open" in fault


def test_inspect_opens_and_closes_the_gripper(tmp_path, capsys):
    robot = arm_with_gripper(tmp_path, "exchanged commands")
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    assert main(["robot", "inspect", str(tmp_path / "arm.toml")]) == 1
    assert "the gripper of limb 'arm' does not follow" in capsys.readouterr().out


@pytest.mark.parametrize("clamped", [True, False])
@pytest.mark.parametrize("ends", ["-0.1 0.1", "1.6 3", "-6 1.5"])
def test_controls_that_leave_home_out_are_refused(tmp_path, capsys, ends, clamped):
    """The elbow's home is at 1.571 rad."""
    path = tmp_path / "arm.xml"
    text = resource("assets/ur5e.xml").read_text()
    elbow = re.search('<position name="elbow".*/>', text)
    assert elbow is not None
    text = text.replace(
        elbow.group(), elbow.group().replace('inheritrange="1"', f'ctrlrange="{ends}"')
    )
    flag = "" if clamped else '<option><flag clampctrl="disable"/></option>'
    path.write_text(text.replace("<worldbody>", f"{flag}<worldbody>", 1))
    robot = replace(UR5E, name="odd_arm", model=(ModelPart(str(path)),))
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    assert main(["robot", "inspect", str(tmp_path / "arm.toml")]) == 1
    assert "take 'elbow_joint' from" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"home is at 1\.5708; widen"):
        Robot(str(tmp_path / "arm.toml"))


def test_inspect_says_what_it_measured_and_what_is_missing(tmp_path, capsys):
    good = arm(tmp_path, dict.fromkeys(ARM.joints, "gear"), np.random.default_rng(11))
    (tmp_path / "good.toml").write_text(write_robot(good))
    assert main(["robot", "inspect", str(tmp_path / "good.toml")]) == 0
    printed = capsys.readouterr().out
    assert "elbow_joint: commanded" in printed
    assert "LimbIK and the simulation take it." in printed
    bare = replace(
        good,
        embodiment=None,
        cameras=(),
        limbs=(replace(ARM, gripper=None, tool=None, tool_m=(0.0, 0.0, 0.0)),),
    )
    (tmp_path / "bare.toml").write_text(write_robot(bare))
    assert main(["robot", "inspect", str(tmp_path / "bare.toml")]) == 1
    printed = capsys.readouterr().out
    for lack in ('tool = "tcp"', "[limbs.gripper]", "suction", "frames = {hand", "[[cameras]]"):
        assert lack in printed


def test_a_packaged_arm_has_no_fault():
    model = load_robot(UR5E)
    for name in ARM.actuators:
        assert servo_fault(model, model.actuator(name).id) is None


PID = '<pid name="{name}" joint="{joint}" kp="2000" kv="200" {more}/>'


def with_controls(folder, *edits):
    """The UR5e with other actuators: regular expressions of the old ones, and the new ones."""
    text = resource("assets/ur5e.xml").read_text()
    for old, new in edits:
        text, found = re.subn(old, new, text, count=1)
        assert found, old
    (folder / "arm.xml").write_text(text)
    return replace(UR5E, model=(ModelPart(str(folder / "arm.xml")),))


FIRST = r'<position [^>]*joint="shoulder_pan_joint"[^>]*>'
ELSEWHERE = (
    (
        r"<actuator>",
        '<actuator><orientation name="ball" joint="eye" kp="1"/>',
    ),
    (
        r"</worldbody>",
        '<body name="eye" pos="0 0 3"><joint name="eye" type="ball"/>'
        '<inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/></body></worldbody>',
    ),
)


@pytest.mark.parametrize(
    "edits",
    [
        [(FIRST, PID.format(name="shoulder_pan", joint="shoulder_pan_joint", more=""))],
        [
            (
                FIRST,
                PID.format(
                    name="shoulder_pan", joint="shoulder_pan_joint", more='input="pos vel ff"'
                ),
            ),
            (
                r'<position [^>]*joint="wrist_2_joint"[^>]*>',
                PID.format(
                    name="wrist_2", joint="wrist_2_joint", more='gear="-1" kp="500"'
                ).replace('kp="2000"', ""),
            ),
        ],
        ELSEWHERE,
    ],
    ids=["pid", "two", "before the arm's"],
)
def test_controls_are_not_counted_as_actuators(tmp_path, edits):
    robot = with_controls(tmp_path, *edits)
    arm = Robot("ur5e", scene=TableScene(robot=robot))
    model = arm.scene.model
    assert model.nu > len(model.actuator_trntype) == len(actuators_of(model))
    names = [*robot.limbs[0].actuators, robot.limbs[0].gripper.actuator]
    firsts = [model.actuator_ctrladr[model.actuator(name).id] for name in names]
    assert [*arm.scene.arm_actuators, arm.scene.only.gripper_actuator] == firsts
    rollout = arm.run_policy(policy_config={"backend": "scripted"}, task="reach", duration=2.0)
    usual = Robot("ur5e").run_policy(
        policy_config={"backend": "scripted"}, task="reach", duration=2.0
    )
    assert rollout.tracking.max_mm == pytest.approx(usual.tracking.max_mm, rel=0.5)
    assert [drive for drive in drive_joints(robot) if not drive.follows] == []
    assert gripper_faults(robot) == []
    (derived,) = inspect_model(robot.model[0].file)[0].limbs
    assert (*derived.actuators, derived.gripper.actuator) == tuple(names)


def test_a_pid_that_is_no_servo_is_refused_by_name(tmp_path):
    for more, reason in (
        ('input="vel"', "it takes no position"),
        ('ki="3"', "its dynamics are of type PID"),
        ('input="ff"', "it takes no position"),
    ):
        new = PID.format(name="shoulder_pan", joint="shoulder_pan_joint", more=more)
        robot = with_controls(tmp_path, (FIRST, new))
        with pytest.raises(ConfigError, match=rf"shoulder_pan.*\({reason}\)"):
            TableScene(robot=robot)
