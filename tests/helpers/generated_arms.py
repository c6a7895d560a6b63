"""Arms that nobody here built: six hinges and a gripper of two slides, with what strangers' models
have, drawn by a seed; and what becomes of each in `robot inspect` and in rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import mujoco
import numpy as np

from strands_cosmos3 import Robot
from strands_cosmos3.cli import main
from strands_cosmos3.embodiments import GripperConvention
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.catalogue import write_robot
from strands_cosmos3.robots.spec import (
    Camera,
    Figures,
    GripperSpec,
    Limb,
    LimbLimits,
    ModelPart,
    RobotSpec,
    ServoGains,
    Workspace,
)
from strands_cosmos3.worlds.arms import ControlConfig

JOINTS = ("turn", "raise", "fold", "tilt", "lean", "spin")
ACTUATORS = tuple(f"drive_{joint}" for joint in JOINTS)
AXES = ("0 0 1", "0 1 0", "0 1 0", "0 1 0", "1 0 0", "0 0 1")
RANGES = ((-3.0, 3.0), (-2.2, 2.2), (-2.8, 2.8), (-2.8, 2.8), (-2.0, 2.0), (-3.1, 3.1))
KP = np.array((3000.0, 3000.0, 2000.0, 800.0, 400.0, 200.0))
KD = KP / 10
TORQUE = np.array((220.0, 220.0, 160.0, 60.0, 40.0, 25.0))
FEED_FORWARDS = ("velocity", "computed_torque")
LARGEST_MM = 1.0
_HOME_XZ_M = (0.42, 0.26)  # of the tool centre point at home, which points down


@dataclass
class Draft:
    """An arm while features are added to it: attributes of joints, bodies and actuators, and
    elements of the file.
    """

    rng: np.random.Generator
    of_joints: list[dict[str, str]] = field(default_factory=lambda: [{} for _ in JOINTS])
    of_bodies: list[dict[str, str]] = field(default_factory=lambda: [{} for _ in JOINTS])
    kp: np.ndarray = field(default_factory=KP.copy)
    kd: np.ndarray = field(default_factory=KD.copy)
    torque: np.ndarray = field(default_factory=TORQUE.copy)
    gear: np.ndarray = field(default_factory=lambda: np.ones(len(JOINTS)))
    actuators: dict[int, str] = field(default_factory=dict)  # instead of a position servo
    of_actuators: list[str] = field(default_factory=lambda: ["" for _ in JOINTS])
    sections: list[str] = field(default_factory=list)
    worldbody: str = ""
    gains: bool = False
    home: np.ndarray = field(default_factory=lambda: np.zeros(len(JOINTS)))

    def some(self, most: int) -> list[int]:
        """Numbers of one to ``most`` joints."""
        n = int(self.rng.integers(1, most + 1))
        return self.rng.choice(len(JOINTS), n, replace=False).tolist()

    def between(self, low: float, high: float) -> float:
        """A number between two, uniform in its logarithm."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def pick(self, *options: Callable[[], None]) -> None:
        options[int(self.rng.integers(len(options)))]()


def _springs(arm: Draft) -> None:
    def linear() -> None:
        for i in arm.some(3):
            k = arm.torque[i] * arm.between(0.01, 0.3)
            reference = arm.home[i] + arm.rng.uniform(-1, 1)
            arm.of_joints[i] |= {"stiffness": f"{k}", "springref": f"{reference}"}

    def progressive() -> None:
        for i in arm.some(3):
            k = arm.torque[i] * arm.rng.uniform(0, 0.08, 3)
            arm.of_joints[i] |= {"stiffness": f"{k[0]} {k[1]} {k[2]}"}

    def cable() -> None:
        i, j = arm.rng.choice(len(JOINTS), 2, replace=False)
        k = min(arm.torque[i], arm.torque[j]) * arm.between(0.01, 0.1)
        arm.sections.append(
            f'<tendon><fixed name="cable" stiffness="{k}" springlength="-0.2 0.3" '
            f'damping="{k / 20}"><joint joint="{JOINTS[i]}" coef="1"/>'
            f'<joint joint="{JOINTS[j]}" coef="{arm.rng.choice([-0.5, 0.7])}"/></fixed></tendon>'
        )

    def strong() -> None:
        i = 1
        k = arm.torque[i] * arm.between(0.8, 2)
        arm.of_joints[i] |= {"stiffness": f"{k}", "springref": f"{arm.home[i] + 1.5}"}

    def rope() -> None:
        k = arm.between(5, 60)
        arm.worldbody += '<site name="ceiling" pos="0.3 0.1 1.2"/>'
        arm.sections.append(
            f'<tendon><spatial name="rope" stiffness="{k}" springlength="0 0.4" damping="1">'
            '<site site="ceiling"/><site site="tcp"/></spatial></tendon>'
        )

    arm.pick(linear, linear, progressive, progressive, cable, cable, rope, strong)


def _damping(arm: Draft) -> None:
    def linear() -> None:
        for i in arm.some(6):
            arm.of_joints[i]["damping"] = f"{arm.kd[i] * arm.between(0.02, 0.8)}"

    def progressive() -> None:
        for i in arm.some(3):
            d = arm.kd[i] * arm.rng.uniform(0, 0.5, 3)
            arm.of_joints[i]["damping"] = f"{d[0]} {d[1]} {d[2]}"

    def of_actuators() -> None:
        for i in arm.some(3):
            d = arm.kd[i] * arm.between(0.05, 0.5)
            arm.of_actuators[i] += f' damping="{d} 0 {d / 4}"'

    def brake() -> None:
        i = int(arm.rng.integers(len(JOINTS)))
        arm.sections.append(
            f'<actuator><motor name="brake" joint="{JOINTS[i]}" damping="{arm.kd[i] / 9}"/>'
            "</actuator>"
        )

    def friction() -> None:
        for i in arm.some(3):
            arm.of_joints[i]["frictionloss"] = f"{arm.torque[i] * arm.between(1e-3, 0.05)}"

    arm.pick(linear, progressive, of_actuators, brake, friction)


def _gravity_compensation(arm: Draft) -> None:
    def by_actuators() -> None:
        for i in arm.some(6):
            arm.of_joints[i]["actuatorgravcomp"] = "true"

    def by_bodies() -> None:
        for i in arm.some(6):
            arm.of_bodies[i]["gravcomp"] = f"{arm.rng.choice([0.0, 0.5, 1.0, 1.3])}"

    def too_weak() -> None:
        by_actuators()
        arm.of_joints[1] |= {"actuatorgravcomp": "true", "actuatorfrcrange": "-6 6"}

    arm.pick(*[by_actuators] * 4, by_bodies, by_bodies, too_weak)


def _options(arm: Draft) -> None:
    rng = arm.rng
    option = {
        "gravity": rng.choice(["0 0 -9.81", "0 0 0", "0 -3 -9", "0 0 -3.7"]),
        "timestep": rng.choice(["0.001", "0.002", "0.005"]),
        "integrator": rng.choice(["Euler", "RK4", "implicit", "implicitfast"]),
        "solver": rng.choice(["Newton", "CG", "PGS"]),
        "iterations": rng.choice(["1", "5", "100"]),
        "impratio": rng.choice(["1", "10"]),
        "cone": rng.choice(["pyramidal", "elliptic"]),
        "density": rng.choice(["0", "1.2", "1000"]),
        "wind": rng.choice(["0 0 0", "5 0 0"]),
        "o_margin": rng.choice(["0", "0.01"]),
    }
    kept = rng.choice(list(option), int(rng.integers(1, 6)), replace=False)
    flag = rng.choice(["contact", "gravity", "spring", "damper", "actuation", "limit"])
    flags = f'<flag {flag}="disable"/>' if rng.random() < 0.3 else ""
    text = " ".join(f'{name}="{option[name]}"' for name in kept)
    arm.sections.append(f"<option {text}>{flags}</option>")


def _defaults(arm: Draft) -> None:
    rng = arm.rng
    geom = {
        "rgba": "0.1 0.2 0.9 1",
        "condim": rng.choice(["1", "4", "6"]),
        "friction": rng.choice(["0.1 0.005 0.0001", "2 0.1 0.1"]),
        "group": "4",
        "margin": "0.002",
        "solref": "0.01 1",
    }
    if rng.random() < 0.3:
        geom |= {"contype": "0", "conaffinity": "0"}
    joint = {
        "armature": f"{arm.between(0.01, 1)}",
        "damping": f"{arm.between(0.1, 5)}",
        "frictionloss": f"{arm.between(0.01, 0.2)}",
        "solreflimit": "0.01 1",
    }
    parts = []
    for name, table in (("geom", geom), ("joint", joint)):
        kept = rng.choice(list(table), int(rng.integers(1, len(table))), replace=False)
        parts.append(f"<{name}{_attributes({key: table[key] for key in kept})}/>")
    if rng.random() < 0.3:
        parts.append('<site rgba="1 0 0 1" group="2"/><tendon width="0.01"/>')
    if rng.random() < 0.3:
        parts.append('<camera fovy="20"/><light castshadow="false"/>')
    arm.sections.append(f"<default>{''.join(parts)}</default>")


def _several_controls(arm: Draft) -> None:
    i = int(arm.rng.integers(len(JOINTS)))
    dial = (
        '<body pos="-0.6 0.6 0.2"><joint name="dial"/>'
        '<geom name="dial" size="0.03" mass="0.1"/></body>'
    )

    def beside() -> None:
        arm.worldbody += dial
        arm.actuators[-1] = '<pid name="of_dial" joint="dial" kp="10" kv="1"/>'

    def of_an_arms_joint() -> None:
        arm.actuators[i] = (
            f'<pid name="{ACTUATORS[i]}" joint="{JOINTS[i]}" kp="{arm.kp[i]}" kv="{arm.kd[i]}"/>'
        )

    def turning() -> None:
        arm.worldbody += (
            '<body name="globe" pos="-0.6 0.6 0.2"><joint name="globe" type="ball"/>'
            '<geom name="globe" size="0.03" mass="0.1"/></body>'
        )
        arm.actuators[-1] = '<orientation name="of_globe" joint="globe" kp="1"/>'

    arm.pick(beside, beside, turning, of_an_arms_joint)


def _gears(arm: Draft) -> None:
    for i in arm.some(6):
        arm.gear[i] = arm.rng.choice([-1.0, 1.0]) * arm.between(0.1, 120)


def _gains(arm: Draft) -> None:
    def scaled() -> None:
        factor = arm.between(0.25, 4)
        arm.kp *= factor
        arm.kd *= factor * arm.rng.uniform(0.5, 1.5)

    def of_motors() -> None:
        arm.gains = True
        for i in arm.some(6):
            arm.actuators[i] = (
                f'<motor name="{ACTUATORS[i]}" joint="{JOINTS[i]}" gear="{arm.gear[i]}" '
                f'ctrlrange="-1 1" forcerange="-{arm.torque[i]} {arm.torque[i]}"/>'
            )

    def motor() -> None:
        i = int(arm.rng.integers(len(JOINTS)))
        arm.actuators[i] = f'<motor name="{ACTUATORS[i]}" joint="{JOINTS[i]}"/>'

    def feeble() -> None:
        arm.kp *= 0.02
        arm.kd *= 0.02

    arm.pick(scaled, scaled, scaled, of_motors, of_motors, of_motors, motor, feeble)


def _drives(arm: Draft) -> None:
    """Filters, delays, force ranges, armature and rivals."""
    i = int(arm.rng.integers(len(JOINTS)))

    def filtered() -> None:
        tau = arm.between(5e-4, 0.3)
        kind = arm.rng.choice(["filter", "filterexact"])
        g = arm.gear[i]
        arm.actuators[i] = (
            f'<general name="{ACTUATORS[i]}" joint="{JOINTS[i]}" gear="{g}" dyntype="{kind}" '
            f'dynprm="{tau}" biastype="affine" gainprm="{arm.kp[i] / g**2}" '
            f'biasprm="0 {-arm.kp[i] / g**2} {-arm.kd[i] / g**2}" '
            f'actearly="{arm.rng.choice(["true", "false"])}"/>'
        )

    def delayed() -> None:
        arm.of_actuators[i] += ' delay="0.02" nsample="20"'

    def recorded() -> None:
        arm.of_actuators[i] += ' nsample="5"'

    def inertia() -> None:
        for k in arm.some(4):
            arm.of_joints[k]["armature"] = f"{arm.between(0.02, 3)}"
        arm.of_actuators[i] += f' armature="{arm.between(1e-4, 0.05) / arm.gear[i] ** 2}"'

    def weak() -> None:
        arm.torque *= arm.between(0.02, 0.6)

    def rival() -> None:
        arm.sections.append(
            f'<actuator><position name="rival" joint="{JOINTS[i]}" kp="{arm.kp[i] / 50}"/>'
            "</actuator>"
        )

    def hidden_rival() -> None:
        arm.sections.append(
            f'<tendon><fixed name="belt"><joint joint="{JOINTS[i]}" coef="1"/></fixed></tendon>'
            f'<actuator><position name="rival" tendon="belt" kp="{arm.kp[i] / 50}"/></actuator>'
        )

    def bound() -> None:
        arm.sections.append(
            '<tendon><fixed name="belt"><joint joint="raise" coef="1"/><joint joint="fold" '
            'coef="1"/></fixed></tendon><equality><tendon tendon1="belt"/></equality>'
        )

    def held() -> None:
        arm.sections.append('<equality><connect body1="palm" anchor="0 0 0"/></equality>')

    def rubbing() -> None:
        arm.sections.append(
            f'<tendon><fixed name="belt" frictionloss="{arm.torque[i] / 20}">'
            f'<joint joint="{JOINTS[i]}" coef="1"/></fixed></tendon>'
        )

    arm.pick(
        filtered, filtered, recorded, inertia, inertia, inertia, weak,
        delayed, rival, hidden_rival, bound, held, rubbing,
    )  # fmt: skip


FEATURES: dict[str, tuple[float, Callable[[Draft], None]]] = {
    "gears": (0.25, _gears),
    "gains": (0.25, _gains),
    "springs": (0.25, _springs),
    "damping": (0.3, _damping),
    "gravity compensation": (0.3, _gravity_compensation),
    "options": (0.3, _options),
    "defaults": (0.3, _defaults),
    "several controls": (0.2, _several_controls),
    "drives": (0.2, _drives),
}
"""Share of the arms that have each, and how it is added."""


def _actuator(arm: Draft, i: int) -> str:
    if i in arm.actuators:
        return arm.actuators[i]
    g, force = arm.gear[i], arm.torque[i] / abs(arm.gear[i])
    low, high = sorted(g * x for x in RANGES[i])
    return (
        f'<position name="{ACTUATORS[i]}" joint="{JOINTS[i]}" gear="{g}" '
        f'kp="{arm.kp[i] / g**2}" kv="{arm.kd[i] / g**2}" ctrlrange="{low} {high}" '
        f'forcerange="-{force} {force}"{arm.of_actuators[i]}/>'
    )


def _attributes(table: dict[str, str]) -> str:
    return "".join(f' {name}="{value}"' for name, value in table.items())


def _links(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [4] in m (shoulder's height, upper arm, forearm, wrist to tool), and home [6] with
    the tool centre point in front, pointing down.
    """
    lengths = np.array((0.3, 0.36, 0.32, 0.21)) * rng.uniform(0.9, 1.15, 4)
    height, upper, fore, tool = lengths
    x, z = _HOME_XZ_M
    z += tool - height  # of the wrist, seen from the shoulder
    across = x * x + z * z
    fold = np.arccos((across - upper**2 - fore**2) / (2 * upper * fore))
    raised = np.arctan2(x, z) - np.arctan2(fore * np.sin(fold), upper + fore * np.cos(fold))
    return lengths, np.array((0.0, raised, fold, np.pi - raised - fold, 0.0, 0.0))


def _xml(arm: Draft, lengths: np.ndarray) -> str:
    height, upper, fore, tool = lengths
    mass = arm.between(0.5, 2)
    shapes = (
        f'<geom name="of_turn" type="cylinder" size="0.05 0.05" mass="{3 * mass}"/>',
        f'<geom name="of_raise" type="capsule" fromto="0 0 0.03 0 0 {upper - 0.05}" size="0.035" '
        f'mass="{3 * mass}"/>',
        f'<geom name="of_fold" type="capsule" fromto="0 0 0.03 0 0 {fore - 0.05}" size="0.03" '
        f'mass="{2 * mass}"/>',
        f'<geom name="of_tilt" size="0.025" mass="{0.6 * mass}"/>',
        f'<geom name="of_lean" type="capsule" fromto="0 0 0 0 0 0.02" size="0.02" mass="{mass / 2}"/>',
        '<geom name="of_spin" type="box" size="0.02 0.05 0.015" pos="0 0 0.015" mass="0.3"/>'
        f'<site name="tcp" pos="0 0 {tool - 0.1}"/>',
    )
    offsets = (0.12, height - 0.12, upper, fore, 0.05, 0.05)
    bodies = ("turret", "upper", "fore", "wrist", "cuff", "palm")
    opening = closing = ""
    for i, body in enumerate(bodies):
        low, high = RANGES[i]
        opening += (
            f'<body name="{body}" pos="0 0 {offsets[i]}"{_attributes(arm.of_bodies[i])}>'
            f'<joint name="{JOINTS[i]}" axis="{AXES[i]}" range="{low} {high}"'
            f"{_attributes(arm.of_joints[i])}/>{shapes[i]}"
        )
        closing += "</body>"
    fingers = "".join(
        f'<body name="{side}" pos="0 0 {tool - 0.17}"><joint name="{side}" type="slide" '
        f'axis="0 {sign} 0" range="0 0.04" damping="4" armature="0" frictionloss="0"/>'
        f'<geom name="{side}" type="box" size="0.01 0.005 0.03" pos="0 {0.005 * sign} 0.035" '
        'mass="0.03" friction="1.5 0.01 0.001" condim="4"/></body>'
        for side, sign in (("finger_a", 1), ("finger_b", -1))
    )
    # drives in the order of the joints, after those of what stands beside
    drives = "".join(_actuator(arm, i) for i in sorted({-1} & {*arm.actuators}) + [*range(6)])
    grip = (
        '<position name="grip" joint="finger_a" kp="600" kv="20" ctrlrange="0 0.04" '
        'forcerange="-40 40"/>'
    )
    return (
        '<mujoco model="generated"><compiler angle="radian"/>'
        f"<worldbody>{arm.worldbody}"
        '<body name="stand"><geom name="stand" type="cylinder" size="0.06 0.03" pos="0 0 0.032"/>'
        f"{opening}{fingers}{closing}</body></worldbody>"
        '<equality><joint joint1="finger_b" joint2="finger_a"/></equality>'
        f"<actuator>{drives}{grip}</actuator>{''.join(arm.sections)}</mujoco>"
    )


def _robot(arm: Draft, path: Path, tool_m: float) -> RobotSpec:
    def figures(values: object) -> Figures:
        return Figures(tuple(np.broadcast_to(np.asarray(values, float), 6).tolist()), "drawn")

    slide = GripperConvention(0.04, 0.0, "m")
    limb = Limb(
        "arm",
        JOINTS,
        ACTUATORS,
        frame="palm",
        base="stand",
        home=tuple(arm.home.tolist()),
        frames={"hand": "palm"},
        tool="tcp",
        tool_m=(0.0, 0.0, tool_m),
        limits=LimbLimits(
            velocity=figures(2.0),
            acceleration=figures(8.0),
            jerk=figures(4000.0),
            torque=figures(TORQUE),
        ),
        gains=ServoGains(figures(arm.kp), figures(arm.kd)) if arm.gains else None,
        gripper=GripperSpec(
            ("finger_a", "finger_b"), "grip", slide, GripperConvention(0.04, 0.0, "ctrl")
        ),
    )
    camera = Camera("wrist", "palm", (0.08, 0.0, 0.02), (0.03, 0.0, 0.2), 68.0, (1.0, 0.0, 0.0))
    workspace = Workspace(
        x_m=(0.36, 0.48), y_m=(-0.14, 0.14), bin_m=(0.42, 0.3), grasp_yaw_deg=0.0, carry_m=0.2
    )
    return RobotSpec(
        path.stem,
        "generated arm",
        (ModelPart(str(path)),),
        (limb,),
        cameras=(camera,),
        workspace=workspace,
    )


@dataclass(frozen=True)
class GeneratedArm:
    """A robot's file, its model's file, and the features drawn."""

    file: Path
    model: Path
    features: tuple[str, ...]


def generated_arm(folder: Path, seed: int) -> GeneratedArm:
    """Write the arm of a seed."""
    rng = np.random.default_rng(seed)
    arm = Draft(rng)
    lengths, home = _links(rng)
    arm.home = home
    features = tuple(name for name, (share, _) in FEATURES.items() if rng.random() < share)
    for name in features:
        FEATURES[name][1](arm)
    model = folder / f"generated_{seed}.xml"
    model.write_text(_xml(arm, lengths))
    file = model.with_suffix(".toml")
    file.write_text(write_robot(_robot(arm, model, float(lengths[3]) - 0.1)))
    return GeneratedArm(file, model, features)


@dataclass(frozen=True)
class Verdict:
    """What became of an arm.

    Args:
        approved: Whether ``robot inspect`` takes it.
        reason: What it says otherwise.
        rollouts: By feed-forward, the refusal, or the hand's mean error in mm of a reach.
        outcomes: By feed-forward, how the reach ended.
        names: What the model names: a refusal has to have one of these.
    """

    approved: bool
    reason: str
    rollouts: dict[str, str | float]
    outcomes: dict[str, str]
    names: tuple[str, ...]

    def silent(self) -> str | None:
        """What is wrong with it: an approved arm that does not follow, or a refusal that is not
        shared or names nothing of the model; None if nothing is.
        """
        for feed_forward, rollout in self.rollouts.items():
            if self.approved and not (isinstance(rollout, float) and rollout < LARGEST_MM):
                return f"approved, but {feed_forward}: {rollout}"
            if self.approved and self.outcomes[feed_forward] != "success":
                return f"approved, but {feed_forward}: {self.outcomes[feed_forward]}"
            if not self.approved and isinstance(rollout, float):
                return f"refused ({self.reason}), but {feed_forward}: {rollout:.3f} mm"
        for text in [] if self.approved else [self.reason, *map(str, self.rollouts.values())]:
            if not any(name in text for name in self.names):
                return f"refused without a name: {text}"
        return None


def judged(arm: GeneratedArm) -> Verdict:
    """Inspect an arm, and let it reach for a cube with either feed-forward."""
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main(["robot", "inspect", str(arm.file)])
    reason = "" if status == 0 else " ".join(printed.getvalue().split())
    rollouts: dict[str, str | float] = {}
    outcomes: dict[str, str] = {}
    for feed_forward in FEED_FORWARDS:
        try:
            robot = Robot(str(arm.file), ControlConfig(feed_forward=feed_forward))
        except (ConfigError, InputError) as error:
            rollouts[feed_forward] = str(error)
            continue
        rollouts[feed_forward], outcomes[feed_forward] = _reach(robot, arm)
    spec = mujoco.MjSpec.from_file(str(arm.model))
    names = tuple(
        part.name
        for parts in (spec.joints, spec.actuators, spec.tendons, spec.bodies)
        for part in parts
        if part.name and part.name not in ("arm", "stand")
    )
    return Verdict(status == 0, reason, rollouts, outcomes, names)


def _reach(robot: Robot, arm: GeneratedArm) -> tuple[float, str]:
    """The hand's mean error in mm by the arm's own model, and how the reach ended."""
    model = mujoco.MjModel.from_xml_path(str(arm.model))
    data = mujoco.MjData(model)
    q = [model.joint(name).qposadr[0] for name in JOINTS]
    errors_m: list[float] = []

    def palm_at(angles: np.ndarray) -> np.ndarray:
        data.qpos[q] = angles
        mujoco.mj_kinematics(model, data)
        return data.body("palm").xpos.copy()

    def measure(q_rad: np.ndarray, gripper: object) -> None:
        measured = robot.data.qpos[robot.scene.arm_qpos]
        errors_m.append(float(np.linalg.norm(palm_at(q_rad) - palm_at(measured))))

    robot.on_step = measure
    rollout = robot.run_policy(
        policy_config={"backend": "scripted"}, task="reach", duration=10.0, seed=0
    )
    return 1e3 * float(np.mean(errors_m)), str(rollout.outcome)
