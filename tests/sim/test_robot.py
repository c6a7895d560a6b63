"""The robot's episodes under bad luck: broken backends, Ctrl-C, foreign policies, odd control
rates.
"""

import mujoco
import numpy as np
import pytest

from strands_cosmos3.control.executor import Executor, ExecutorState
from strands_cosmos3.errors import (
    ActuatorGuardError,
    BackendError,
    ConfigError,
    ControlError,
    Cosmos3Error,
    InputError,
    UnknownNameError,
)
from strands_cosmos3.policy import Cosmos3Policy, Policy
from strands_cosmos3.robots.panda import ARM_JOINTS, FER, FINGER_JOINTS, HOME_Q, LIMITS
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import ActionChunk, JointTrajectory, Outcome
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend

REACH = "reach the red cube"


@pytest.fixture(scope="module")
def robot():
    return Robot()


def at_rest(robot):
    return (
        np.isfinite(robot.data.qpos).all()
        and np.isfinite(robot.data.ctrl).all()
        and np.abs(robot.data.qvel[:7]).max() < 0.02
    )


class Breaks(ScriptedBackend):
    """The expert, until its third answer."""

    def __init__(self, how):
        self.how, self.n = how, 0

    def infer(self, request):
        self.n += 1
        chunk = super().infer(request)
        if self.n < 3:
            return chunk
        rows = chunk.action.copy()
        if self.how == "raises":
            raise RuntimeError("CUDA error")
        if self.how == "list":
            return rows.tolist()
        if self.how in ("nan", "inf", "huge"):
            rows[3, 1] = {"nan": np.nan, "inf": np.inf, "huge": 1e6}[self.how]
        elif self.how == "singular":
            rows[:, 3:9] = 9.0
        else:
            rows = rows[:, :8]
        return ActionChunk(rows, request.action_space, request.embodiment)


def counting(counters):
    """A scripted backend with counters of its own."""
    return type("Counting", (ScriptedBackend,), {"counters": counters})()


@pytest.mark.parametrize("how", ["nan", "inf", "huge", "width"])
def test_a_broken_answer_ends_as_a_fault_with_the_arm_at_rest(robot, how):
    policy = Cosmos3Policy(robot="panda", backend=Breaks(how))
    rollout = robot.run_policy(instruction=REACH, policy=policy, task="place", duration=6.0)
    assert rollout.outcome is Outcome.FAULT
    assert rollout.success is False
    assert rollout.fault
    assert rollout.counters["chunks"] == 2
    assert at_rest(robot)
    assert all(np.isfinite(values).all() for values in rollout.arrays.values())
    assert len(rollout.arrays["t_s"]) > 600


@pytest.mark.parametrize("how", ["raises", "list"])
def test_whatever_else_is_raised_the_arm_is_not_left_moving(robot, how):
    policy = Cosmos3Policy(robot="panda", backend=Breaks(how))
    with pytest.raises((RuntimeError, AttributeError, Cosmos3Error)):
        robot.run_policy(instruction=REACH, policy=policy, task="place", duration=6.0)
    assert not robot.executor.reference.qd_rad_s.any()
    assert at_rest(robot)


def test_rows_that_were_executed_before_a_fault_are_counted(robot, monkeypatch):
    """And a connection's troubles of earlier episodes are not this one's."""
    execute, blocks = robot.execute, []

    def refuse_the_fortieth(block, before):
        blocks.append(block)
        if len(blocks) == 40:
            raise ActuatorGuardError("no")
        return execute(block, before)

    monkeypatch.setattr(robot, "execute", refuse_the_fortieth)
    backend = counting({"reconnects": 3})
    with Cosmos3Policy(robot="panda", backend=backend) as policy:
        rollout = robot.run_policy(instruction=REACH, policy=policy, duration=3.0)
    assert rollout.outcome is Outcome.FAULT
    assert rollout.steps["total"] == 12  # 39 ticks of 20 ms at 15 Hz, the row under way included
    assert rollout.counters["reconnects"] == 0


def test_a_backend_counts_what_it_likes(robot):
    backend = counting({"thoughts": 3})
    with Cosmos3Policy(robot="panda", backend=backend) as policy:
        assert (
            robot.run_policy(instruction=REACH, policy=policy, duration=0.3).counters["reconnects"]
            == 0
        )


def test_reset_clears_the_counters_of_the_last_episode(robot):
    with Cosmos3Policy(robot="panda", backend=ScriptedBackend()) as policy:
        robot.run_policy(instruction=REACH, policy=policy, duration=0.3)
    assert robot.counters()["chunks"] == 1
    robot.reset()
    assert not any(robot.counters().values())


def test_ctrl_c_brings_the_arm_to_rest_and_keeps_the_film(robot, tmp_path):
    ticks = []

    def interrupt(robot):
        ticks.append(np.abs(robot.data.qvel[:7]).max())
        if len(ticks) == 25:
            raise KeyboardInterrupt

    video = tmp_path / "film.mp4"
    rollout = robot.run_policy(
        instruction=REACH,
        policy_config={"backend": "scripted"},
        task="reach",
        video=video,
        on_tick=interrupt,
        seed=3,
    )
    assert rollout.outcome is Outcome.INTERRUPTED
    assert rollout.success is False
    assert ticks[-1] > 0.05  # it was moving
    assert at_rest(robot)
    assert not robot.executor.reference.qd_rad_s.any()
    import av

    with av.open(str(video)) as container:
        assert sum(1 for _ in container.decode(video=0)) >= 15


@pytest.mark.parametrize("hz", [37, 0, -50, 601, np.nan, "fast", 7.3])
def test_odd_control_rates_are_refused_and_valid_ones_named(robot, hz, tmp_path):
    qpos = robot.data.qpos.copy()
    with pytest.raises(Cosmos3Error, match=r"50, 60|above zero"):
        robot.run_policy(
            instruction=REACH,
            policy_config={"backend": "scripted"},
            control_frequency=hz,
            video=tmp_path / "no.mp4",
        )
    assert np.array_equal(robot.data.qpos, qpos)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "hz", [15, 600, *(pytest.param(n, marks=pytest.mark.slow) for n in (50, 100))]
)
def test_the_control_rate_does_not_change_the_motion(robot, hz):
    rollout = robot.run_policy(
        instruction=REACH, policy_config={"backend": "scripted"}, control_frequency=hz, duration=1.2
    )
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.counters["ticks"] == pytest.approx(1.2 * hz, abs=1)
    speed = np.abs(np.diff(rollout.arrays["q_commanded_rad"][:720], axis=0)) * 600
    assert 0.1 < speed.max() < 1.5


class Foreign(Policy):
    """A policy of another make: absolute joint targets at the control rate it was told."""

    def __init__(self, spoil=None, spoilt_calls=()):
        self.hz, self.keys, self.calls, self.spoil, self.seen = None, None, 0, spoil, []
        self.spoilt_calls = spoilt_calls

    provider_name = "foreign"
    requires_images = False

    def set_robot_state_keys(self, robot_state_keys):
        self.keys = robot_state_keys

    def set_control_frequency(self, hz):
        self.hz = hz

    async def get_actions(self, observation_dict, instruction, **kwargs):
        self.seen.append(dict(observation_dict))
        t = (self.calls * 25 + np.arange(1, 26)) / self.hz
        self.calls += 1
        q = HOME_Q + 0.25 * (1 - np.cos(1.5 * t))[:, None] * np.array(
            [1, -0.3, 0.5, 0.4, 0.2, 0.3, 1]
        )
        steps = [dict(zip(self.keys, [*map(float, row), 0.008], strict=True)) for row in q]
        if self.spoil is not None and self.calls in self.spoilt_calls:
            self.spoil(steps)
        return steps


def test_a_foreign_policy_is_adapted_and_tracked(robot):
    foreign = Foreign()
    rollout = robot.run_policy(instruction="sway", policy=foreign, duration=3.0)
    assert foreign.hz == 50
    assert foreign.keys == [*ARM_JOINTS, FINGER_JOINTS[0]]
    assert foreign.calls == 6
    q, t = rollout.arrays["q_commanded_rad"], rollout.arrays["t_s"]
    wanted = HOME_Q + 0.25 * (1 - np.cos(1.5 * t))[:, None] * np.array(
        [1, -0.3, 0.5, 0.4, 0.2, 0.3, 1]
    )
    assert np.abs(q - wanted)[t < 2.9].max() < 2e-3
    assert rollout.tracking.mean_mm < 0.5
    assert rollout.tracking.max_mm < 2.0
    assert rollout.path.max_mm < 2.0
    assert np.allclose(rollout.arrays["gripper_commanded"], 0.2)
    for seen in foreign.seen:
        assert all(type(value) is float for value in seen.values())
        assert not any(key.startswith(("cube", "tcp", "bin")) for key in seen)


def _nan(steps):
    steps[4]["joint2"] = float("nan")


def _huge(steps):
    steps[4]["joint2"] = 1e30


def _missing(steps):
    del steps[4]["joint2"]


def _text(steps):
    steps[4]["joint2"] = "left"


SPOILS = pytest.mark.parametrize(
    "spoil", [_nan, _huge, _missing, _text, lambda steps: steps.clear()]
)


def goes_on_breaking(robot, spoil):
    """The rollout of a foreign policy whose answers are spoilt from the third one on."""
    rollout = robot.run_policy(
        instruction="sway", policy=Foreign(spoil, range(3, 1000)), duration=12.0
    )
    assert rollout.outcome is Outcome.FAULT
    assert rollout.fault
    assert at_rest(robot)
    assert 5.0 < rollout.arrays["t_s"][-1] < 8.0  # it moved for a second, and held for five
    assert rollout.counters.get("failed", 0) + rollout.counters.get("rejected", 0) >= 3
    assert rollout.counters["deadline_misses"] == 1
    return rollout


@pytest.mark.parametrize("spoil", [_nan, _huge])
def test_a_foreign_policy_that_goes_on_breaking_ends_as_a_fault(robot, spoil):
    goes_on_breaking(robot, spoil)


def test_a_malformed_step_names_the_policy_that_gave_it(robot):
    rollout = goes_on_breaking(robot, _missing)
    assert "a step of policy 'Foreign' is malformed: KeyError('joint2')" in rollout.fault
    with pytest.raises(BackendError, match="policy 'Foreign' is malformed"):
        robot.run_policy(instruction="sway", policy=Foreign(_text, (1,)), duration=1.0)


@pytest.mark.parametrize("method", ["reset", "set_robot_state_keys"])
def test_a_policy_whose_method_is_no_function_is_refused_before_anything_moves(robot, method):
    foreign = Foreign()
    setattr(foreign, method, 5)
    qpos = robot.data.qpos.copy()
    with pytest.raises(InputError, match=f"policy must have {method}, got Foreign"):
        robot.run_policy(instruction="sway", policy=foreign, duration=1.0)
    np.testing.assert_array_equal(robot.data.qpos, qpos)


@SPOILS
def test_one_broken_answer_is_refused_and_the_motion_goes_on(robot, spoil):
    rollout = robot.run_policy(instruction="sway", policy=Foreign(spoil, (3,)), duration=3.0)
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.counters.get("failed", 0) + rollout.counters.get("rejected", 0) == 1
    assert rollout.counters["idle_ticks"] > 0
    assert np.isfinite(rollout.arrays["q_commanded_rad"]).all()


def test_physics_that_diverged_end_in_a_fault_with_the_arm_told_to_hold(robot):
    """MuJoCo starts its clock and its state anew; the episode's own account goes on from what
    was commanded.
    """

    def spoil(robot):
        if robot.now_s() > 0.7:
            robot.data.qvel[0] = np.inf

    rollout = robot.run_policy(
        instruction=REACH, policy_config={"backend": "scripted"}, duration=5.0, on_tick=spoil
    )
    assert rollout.outcome is Outcome.FAULT
    assert "diverged" in rollout.fault
    assert rollout.final_state == "fault"
    assert rollout.counters["faults"] == 1
    assert robot.executor.state is ExecutorState.FAULT
    assert not robot.executor.reference.qd_rad_s.any()
    q = rollout.arrays["q_commanded_rad"]
    assert np.isfinite(q).all()
    assert np.abs(q[-1] - q[-2]).max() < 1e-9  # at rest
    assert rollout.duration_s == pytest.approx(len(q) / 600)
    assert rollout.duration_s > 0.7
    with pytest.raises(ControlError, match="FAULT"):
        robot.executor.accept(JointTrajectory(np.tile(HOME_Q, (2, 1)), np.array([0.1, 0.2])))
    robot.reset(0)
    assert robot.executor.state is ExecutorState.IDLE


def test_physics_that_diverge_while_the_arm_brakes_are_no_success(robot, monkeypatch):
    """The time was up and the episode would have been complete, had the arm come to rest."""
    stop = Executor.stop

    def stop_and_spoil(executor):
        stop(executor)
        robot.data.qvel[0] = np.inf

    monkeypatch.setattr(Executor, "stop", stop_and_spoil)
    rollout = robot.run_policy(
        instruction=REACH, policy_config={"backend": "scripted"}, duration=0.7
    )
    assert rollout.outcome is Outcome.FAULT
    assert "diverged" in rollout.fault
    assert rollout.final_state == "fault"


def test_observations_are_flat_and_say_nothing_privileged(robot):
    robot.reset(1)
    flat = robot.observe({"wrist": np.zeros((2, 2, 3), np.uint8)})
    assert set(flat) == {
        *ARM_JOINTS,
        *FINGER_JOINTS,
        *(f"{n}.vel" for n in (*ARM_JOINTS, *FINGER_JOINTS)),
        "wrist",
    }
    assert flat["joint4"] == HOME_Q[3]
    assert set(robot.observation().privileged) >= {"cube_red", "tcp", "bin"}


def test_the_privileged_twist_is_the_tools_motion(robot):
    """Metres a second first, then radians a second, both along the world's axes."""
    seen = []
    robot.run_policy(
        instruction=REACH,
        policy_config={"backend": "scripted"},
        duration=1.2,
        control_frequency=600,
        on_tick=_looker(seen),
    )
    for before, now in zip(seen[300:-2:50], seen[302::50], strict=False):
        moved = (now["tcp"][:3, 3] - before["tcp"][:3, 3]) * 300
        turned = (now["tcp"][:3, :3] - before["tcp"][:3, :3]) * 300 @ now["tcp"][:3, :3].T
        spin = np.array([turned[2, 1], turned[0, 2], turned[1, 0]])
        assert np.linalg.norm(moved) > 0.02
        assert np.linalg.norm(moved - now["tcp_twist"][:3]) < 0.1 * np.linalg.norm(moved) + 0.005
        assert np.linalg.norm(spin - now["tcp_twist"][3:]) < 0.02


def _looker(seen):
    return lambda robot: seen.append(dict(robot.observation().privileged))


@pytest.mark.parametrize("limits", ["fer", "fr3"])
def test_limits_in_force_are_kept_in_an_episode(limits):
    control = ControlConfig(limits=limits, derating=0.5)
    robot = Robot(control=control)
    rollout = robot.run_policy(
        policy_config={"backend": "scripted"}, task="pick", duration=4.0, seed=2
    )
    q = rollout.arrays["q_commanded_rad"]
    table = control.joint_limits()
    assert (np.abs(np.diff(q, axis=0)) * 600 <= table.velocity * 1.005).all()
    assert (np.abs(np.diff(q, n=2, axis=0)) * 600**2 <= table.acceleration * 1.02).all()
    assert (
        (q >= np.maximum(table.q_min, FER.q_min)) & (q <= np.minimum(table.q_max, FER.q_max))
    ).all()
    assert rollout.outcome is not Outcome.FAULT


def test_joint_ranges_exceed_neither_the_table_nor_the_panda():
    fr3, both = LIMITS["fr3"], ControlConfig("fr3").joint_limits()
    np.testing.assert_array_equal(both.q_min, np.maximum(fr3.q_min, FER.q_min))
    np.testing.assert_array_equal(both.q_max, np.minimum(fr3.q_max, FER.q_max))
    assert (both.q_min > fr3.q_min).any()
    assert (both.q_min > FER.q_min).any()


def test_bad_arguments_are_refused_before_anything_moves(robot, tmp_path):
    robot.reset(5)
    qpos = robot.data.qpos.copy()
    config = {"backend": "scripted"}
    for arguments, error in [
        ({"robot_name": "spot", "policy_config": config}, UnknownNameError),
        ({"task": "juggle", "policy_config": config}, UnknownNameError),
        ({"task": "pick", "instruction": "sing", "policy_config": config}, InputError),
        ({"duration": -1.0, "policy_config": config}, InputError),
        ({"policy_config": {"backend": "scripted", "port": "x", "colour": 1}}, ConfigError),
        ({"policy_provider": "openvla"}, ConfigError),
    ]:
        with pytest.raises(error):
            robot.run_policy(**arguments, video=tmp_path / "no.mp4")
    assert np.array_equal(robot.data.qpos, qpos)
    assert not list(tmp_path.iterdir())
    for wrong in ({"limits": "ur5"}, {"feed_forward": "psychic"}, {"derating": 0.0}):
        with pytest.raises(Cosmos3Error):
            Robot(control=ControlConfig(**wrong))


@pytest.mark.parametrize(
    "backend", [np.zeros(0), np.ones((2, 2)), np.array(["replay", "scripted"])]
)
def test_a_backend_that_is_an_array_is_refused(robot, backend):
    with pytest.raises(Cosmos3Error, match="backend"):
        robot.run_policy(policy_config={"backend": backend}, task="pick")


@pytest.mark.parametrize(
    "wrong",
    [
        {"feed_forward": np.zeros(3, [("gain", float)])},
        {"feed_forward": np.array(["none", "velocity"])},
        {"limits": np.array(["fer", "fr3"])},
        {"derating": "half"},
        {"compensation": 0.1},
        {"strict": np.zeros(2, bool)},
    ],
)
def test_settings_of_control_are_typed(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        ControlConfig(**wrong)


@pytest.mark.parametrize("unfit", [type, len, float.fromhex, lambda request: 0.1])
@pytest.mark.parametrize("answers", [[], [0.0]], ids=["first", "second"])
def test_a_latency_that_takes_arguments_is_named(robot, unfit, answers):
    """Before the first chunk it is the caller's error, later a fault of the episode."""
    latencies = [*answers]
    arguments = {
        "policy_config": {"backend": "scripted", "options": {"replan_rows": 2}},
        "latency": lambda: latencies.pop() if latencies else unfit(),
        "instruction": REACH,
        "duration": 1.0,
    }
    if not answers:
        with pytest.raises(InputError, match="latency must return seconds without arguments"):
            robot.run_policy(**arguments)
        return
    rollout = robot.run_policy(**arguments)
    assert rollout.outcome is Outcome.FAULT
    assert rollout.fault.startswith("latency must return")
    assert at_rest(robot)


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy_config": {"backend": "scripted"}},
        {"policy": Cosmos3Policy(backend=Breaks("nan"), robot="panda"), "instruction": "sing"},
        {"latency": lambda: -1.0, "policy_config": {"backend": "scripted"}, "instruction": REACH},
    ],
    ids=["no instruction", "another instruction", "latency"],
)
def test_where_nothing_was_followed_no_time_passes(robot, wrong):
    with pytest.raises(Cosmos3Error):
        robot.run_policy(**wrong, duration=0.1)
    assert robot.data.time == 0


def test_a_server_that_is_not_there_is_said_and_leaves_no_film(robot, tmp_path):
    with pytest.raises(BackendError, match="no policy server at"):
        robot.run_policy(policy_config={"port": 1}, instruction=REACH, video=tmp_path / "no.mp4")
    assert robot.data.time == 0
    assert not list(tmp_path.iterdir())


def test_nothing_is_held_by_magic(robot, monkeypatch):
    """No weld, no mocap, no equality but the fingers'; and after the reset nobody writes qpos or
    applies a force.
    """
    model = robot.scene.model
    kinds = [int(kind) for kind in model.eq_type]
    assert kinds == [int(mujoco.mjtEq.mjEQ_JOINT)] * len(kinds)
    assert {model.joint(int(i)).name for i in [*model.eq_obj1id, *model.eq_obj2id]} <= set(
        FINGER_JOINTS
    )
    assert model.nmocap == 0
    last = {}

    def watch(robot):
        """qpos must be what integrating qvel from the last look gives; nobody may have edited it
        between physics steps.
        """
        data = robot.data
        assert not data.qfrc_applied.any()
        assert not data.xfrc_applied.any()
        last["time"] = data.time

    real = robot.execute

    def execute(block, before):
        if "qpos" in last:
            assert np.array_equal(robot.data.qpos, last["qpos"])
            assert np.array_equal(robot.data.qvel, last["qvel"])
        out = real(block, before)
        last["qpos"], last["qvel"] = robot.data.qpos.copy(), robot.data.qvel.copy()
        return out

    steps = []
    real_step = mujoco.mj_step
    monkeypatch.setattr(
        mujoco, "mj_step", lambda model, data: (steps.append(1), real_step(model, data))[1]
    )
    monkeypatch.setattr(robot, "execute", execute)
    rollout = robot.run_policy(
        policy_config={"backend": "scripted"}, task="pick", on_tick=watch, seed=0
    )
    assert rollout.success
    assert len(steps) == len(rollout.arrays["t_s"])
