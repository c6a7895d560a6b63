"""Hosts: registration, the arm that a simulator shows, and our own Robot and address doing the
same as any other.
"""

from __future__ import annotations

import abc
import sys
import threading
import types

import mujoco
import numpy as np
import pytest

import strands_cosmos3
from helpers.spy import Spy, flat
from strands_cosmos3.backends.replay import Recording, ReplayBackend
from strands_cosmos3.embodiments import MODEL_GRIPPER, get_embodiment
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.policy import Cosmos3Policy, create_policy
from strands_cosmos3.robots.hosted import driven_gripper, require_robot, servo_lead_of
from strands_cosmos3.robots.model import load_panda, panda_path
from strands_cosmos3.robots.panda import ARM_JOINTS, FER, HOME_Q, dh_forward
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig

T_HAND_COSMOS = get_embodiment("droid").tool_frame.T_parent_cosmos


def test_without_strands_robots_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "strands_robots", None)
    monkeypatch.setitem(sys.modules, "strands_robots.policies", None)
    with pytest.raises(
        MissingDependencyError, match=r"pip install 'strands-robots>=0\.5\.3'.*3\.12"
    ):
        strands_cosmos3.register()


def test_a_strands_robots_without_a_registry_is_too_old(monkeypatch):
    """0.3.8's module has Policy, MockPolicy and create_policy, and nothing to register with."""
    old = types.ModuleType("strands_robots.policies")
    monkeypatch.setitem(sys.modules, "strands_robots", types.ModuleType("strands_robots"))
    monkeypatch.setitem(sys.modules, "strands_robots.policies", old)
    monkeypatch.setattr("strands_cosmos3.policy.providers.metadata.version", lambda name: "0.3.8")
    with pytest.raises(
        MissingDependencyError, match=r"0\.3\.8 .*too old: pip install 'strands-robots>=0\.5\.3'"
    ):
        strands_cosmos3.register()


@pytest.mark.parametrize("knows_overwrite", [True, False])
def test_registries_with_and_without_overwrite(monkeypatch, knows_overwrite):
    """strands-robots 0.5.0 to 0.5.2 have no such argument."""
    registered = []
    module = types.ModuleType("strands_robots.policies")
    with_it = lambda name, loader, overwrite=False: registered.append((name, overwrite))  # noqa: E731
    module.register_policy = (
        with_it if knows_overwrite else lambda name, loader: registered.append((name, None))
    )
    module.Policy = type("Policy", (abc.ABC,), {})
    monkeypatch.setitem(sys.modules, "strands_robots", types.ModuleType("strands_robots"))
    monkeypatch.setitem(sys.modules, "strands_robots.policies", module)
    assert strands_cosmos3.register(overwrite=True) == ("strands_cosmos3", "cosmos3")
    assert registered == [
        (name, True if knows_overwrite else None) for name in ("strands_cosmos3", "cosmos3")
    ]


def hosted(change=lambda spec: None, prefix="panda/") -> mujoco.MjModel:
    """The embedded arm in another world: shifted, turned, its names prefixed, as strands-robots
    puts it there.
    """
    arm, world = mujoco.MjSpec.from_file(str(panda_path())), mujoco.MjSpec()
    change(arm)
    for name in ("timestep", "impratio", "integrator", "cone"):
        setattr(world.option, name, getattr(arm.option, name))
    frame = world.worldbody.add_frame(pos=[0.3, -0.2, 0.5], quat=[0.9, 0.1, 0.2, 0.3])
    world.attach(arm, prefix=prefix, frame=frame)
    return world.compile()


def test_the_embedded_arm_is_known_wherever_it_stands():
    model = hosted()
    require_robot(model, "panda/", ARM_JOINTS)
    require_robot(load_panda(), "", ARM_JOINTS)
    np.testing.assert_allclose(
        servo_lead_of(model, "panda/", ARM_JOINTS),
        [0.1002] * 2 + [0.1003] * 2 + [0.1005] * 3,
        atol=1e-4,
    )
    for key in ("finger_joint1", "finger_joint2", "actuator8"):
        assert driven_gripper(model, "panda/", key) == MODEL_GRIPPER
    assert driven_gripper(model, "panda/", "joint3") is None
    assert driven_gripper(model, "panda/", "nothing") is None


def test_a_tendon_between_sites_drives_no_joint_of_their_numbers():
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><worldbody><site name="fixed"/><body><joint name="j"/><geom size=".1"/><site name="s" pos=".1 0 0"/></body>
        </worldbody><tendon><spatial name="t"><site site="fixed"/><site site="s"/></spatial></tendon>
        <actuator><position name="m" tendon="t" ctrlrange="0 1" ctrllimited="true"/></actuator></mujoco>"""
    )
    assert driven_gripper(model, "", "m") == MODEL_GRIPPER
    assert driven_gripper(model, "", "j") is None


def yaw_the_hand(spec):
    # 45 degrees: what a model of panda_link8 for a hand looks like
    spec.body("hand").quat = [1, 0, 0, 0]


def raise_the_hand(spec):
    spec.body("hand").pos = [0, 0, 0.110]


def rename_a_joint(spec):
    spec.joint("joint4").name = "elbow"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (yaw_the_hand, "45.0 degrees"),
        (raise_the_hand, "3.0 mm"),
        (rename_a_joint, r"no joint joint4; it has: joint1, .*elbow"),
    ],
)
def test_an_arm_that_is_no_franka_is_refused_now_and_at_the_next_call(change, says):
    """strands-robots drops what set_sim_context raises, so the next call says it again."""
    spy = Spy()
    policy = Cosmos3Policy(robot="panda", backend=spy)
    with pytest.raises(ConfigError, match=says):
        policy.set_sim_context(hosted(change), "panda/")
    with pytest.raises(ConfigError, match=says):
        policy.get_actions_sync(flat(spy.q_start), "go")
    policy.set_sim_context(hosted(), "panda/")
    assert policy.get_actions_sync(flat(spy.q_start), "go")
    # raw columns are not for an arm
    Cosmos3Policy(backend=spy).set_sim_context(hosted(change), "panda/")


def test_the_gripper_is_commanded_in_the_unit_that_the_host_takes_it_in():
    def commanded(policy):
        return policy.get_actions_sync(flat(finger_m=0.008), "go")[0]["finger_joint1"]

    spy = Spy(joints_rad_s=0.0)
    policy = Cosmos3Policy(robot="panda", backend=spy, action_space="joint_pos")
    assert commanded(policy) == pytest.approx(0.2 * 0.04)
    policy.set_sim_context(hosted(), "panda/")
    policy.set_robot_state_keys([f"actuator{i}" for i in range(1, 9)])
    assert commanded(policy) == pytest.approx(0.2)
    # what is observed stays in metres
    assert [request.gripper for request in spy.requests] == [pytest.approx(0.2)] * 2
    told = Cosmos3Policy(
        robot="panda",
        backend=spy,
        action_space="joint_pos",
        options={"commanded_gripper": "tendon"},
    )
    told.set_sim_context(hosted(), "panda/")
    assert commanded(told) == pytest.approx(51)

    def position_servo(spec):
        spec.delete(spec.actuator("actuator8"))
        spec.add_actuator(name="finger", trntype=mujoco.mjtTrn.mjTRN_JOINT, target="finger_joint1")

    policy = Cosmos3Policy(robot="panda", backend=spy, action_space="joint_pos")
    policy.set_sim_context(hosted(position_servo), "panda/")
    assert commanded(policy) == pytest.approx(0.008)


def test_targets_lead_position_servos_and_only_those():
    """A steady motion: the servo that gets ``q + lead qd`` is where the motion is. Torque motors
    have no such lag.
    """
    speed = np.array([0.2, 0.1, -0.1, 0.1, 0.2, 0.1, -0.3])

    def joints(policy, **seen):
        policy.set_control_frequency(50)
        steps = policy.get_actions_sync(
            flat(HOME_Q, **{f"{name}.vel": v for name, v in zip(ARM_JOINTS, speed, strict=True)}),
            "go",
        )
        return np.array([[step[name] for name in ARM_JOINTS] for step in steps])

    def made(model=None, **options):
        policy = Cosmos3Policy(
            robot="panda", backend=Spy(joints_rad_s=speed), action_space="joint_pos", **options
        )
        if model is not None:
            policy.set_sim_context(model, "panda/")
        return policy

    bare, led = joints(made()), joints(made(hosted()))
    lead_s = np.array(
        [451 / 4500, 451 / 4500, 351 / 3500, 351 / 3500, 201 / 2000, 201 / 2000, 201 / 2000]
    )
    np.testing.assert_allclose(
        (led - bare)[5:90], np.tile((lead_s - 0.01) * speed, (85, 1)), atol=2e-5
    )
    np.testing.assert_array_equal(joints(made(hosted(), options={"servo_lead": False})), bare)

    def torque_motor(spec):
        spec.actuator("actuator3").biasprm[:] = 0

    np.testing.assert_array_equal(joints(made(hosted(torque_motor))), bare)
    assert (led >= FER.q_min).all()
    assert (led <= FER.q_max).all()


def recording() -> Recording:
    t_s = np.arange(31) / 15
    q = HOME_Q + 0.3 * (1 - np.cos(np.pi * t_s))[:, None] * np.array(
        [1, 0.3, -0.4, 0.3, 0.3, -0.3, 0.5]
    )
    return Recording(dh_forward(q) @ T_HAND_COSMOS, np.where(t_s < 1, 1.0, 0.25), 15.0, q[0])


@pytest.fixture
def address():
    from strands_cosmos3.commands.serve import _warm_up_message

    backend = ReplayBackend(recording())
    served = ServedPolicy(backend, "droid", "midtrain", warm_up_message=_warm_up_message(backend))
    with PolicyServer(served, ServerConfig(port=0)) as server:
        yield f"cosmos3://127.0.0.1:{server.port}"


def test_an_address_answers_what_the_backend_behind_it_answers(address):
    """The same flat observations to either: the same steps, in the same units, at the same
    times; and nothing is left open.
    """
    views = {
        name: np.zeros((90, 160, 3), np.uint8) for name in ("wrist", "exterior_1", "exterior_2")
    }
    threads = threading.active_count()
    with (
        create_policy(address, robot="panda", action_space="midtrain") as remote,
        create_policy("cosmos3", robot="panda", backend="replay", model=recording()) as local,
    ):
        for policy in (remote, local):
            policy.set_control_frequency(50)
        q = HOME_Q
        for _ in range(2):
            there, here = (
                policy.get_actions_sync(flat(q, **views), "follow") for policy in (remote, local)
            )
            assert len(there) == len(here) > 50
            for a, b in zip(there, here, strict=True):
                assert list(a) == list(b)
                # float32 on the wire
                np.testing.assert_allclose(list(a.values()), list(b.values()), atol=2e-6)
            q = [here[-1][name] for name in ARM_JOINTS]
        assert threading.active_count() > threads
    assert threading.active_count() == threads


def test_our_own_robot_drives_along_either(address):
    robot = strands_cosmos3.Robot("panda")
    asked = {"embodiment": "droid", "robot": "panda"}
    local = robot.run_policy(
        policy_config={**asked, "backend": "replay", "model": recording()}, duration=2.0
    )
    with create_policy(address, **asked, action_space="midtrain") as policy:
        remote = robot.run_policy(policy=policy, duration=2.0)
    intended = recording().at(np.linspace(0, 2, 2000))[0] @ np.linalg.inv(T_HAND_COSMOS)
    for rollout in (local, remote):
        T = rollout.arrays["T_base_hand_achieved"]
        away = np.linalg.norm(T[::10, None, :3, 3] - intended[None, :, :3, 3], axis=2).min(axis=1)
        assert away.max() < 2e-3
        fingers = rollout.arrays["gripper_achieved"]
        assert fingers[: len(fingers) // 3].min() > 0.9
        assert fingers[-1] == pytest.approx(0.25, abs=0.05)
