"""The policy's contract: strands-robots' on one side, a backend's on the other."""

import asyncio

import numpy as np
import pytest

from helpers.spy import DROID, KEYS, T_HAND_COSMOS, Spy, flat
from strands_cosmos3.errors import (
    ActionSpaceError,
    BackendError,
    ConfigError,
    Cosmos3Error,
    InputError,
    ObservationError,
)
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.policy import Cosmos3Policy, create_policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.policy.providers import HostedCosmos3Policy
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation


def test_steps_are_python_floats_under_the_robots_names(policy, spy):
    steps = policy.get_actions_sync(flat(spy.q_start), "go", unknown=1, also_unknown=None)
    assert len(steps) == 32
    for step in steps:
        assert list(step) == KEYS
        assert all(type(value) is float for value in step.values())
        assert step["finger_joint1"] == pytest.approx(0.2 * 0.04)
    q = np.array([[step[key] for key in KEYS[:7]] for step in steps])
    assert np.abs(dh_forward(q) - spy.T_hand).max() < 3e-6


@pytest.mark.parametrize(("rows", "steps"), [(32, 107), (16, 54)])
def test_chunks_are_resampled_by_time(rows, steps):
    spy = Spy(rows)
    policy = Cosmos3Policy(robot="panda", backend=spy)
    policy.set_control_frequency(50)
    actions = policy.get_actions_sync(flat(spy.q_start), "go")
    assert len(actions) == steps
    q = np.array([[step[key] for key in KEYS[:7]] for step in actions])
    at_s = np.arange(1, steps + 1) / 50
    # Row i is due at (i + 1) / 15 s, and 15 Hz and 50 Hz meet at every 0.2 s.
    shared = np.flatnonzero(
        np.isclose((at_s * 15) % 1, 0, atol=1e-9) | np.isclose((at_s * 15) % 1, 1, atol=1e-9)
    )
    rows_there = np.round(at_s[shared] * 15).astype(int) - 1
    assert len(shared) > 4
    assert np.abs(dh_forward(q[shared]) - spy.T_hand[rows_there]).max() < 3e-6
    assert (np.abs(np.diff(np.vstack([spy.q_start, q]), axis=0)) * 50 <= FER.velocity * 1.01).all()


def test_resampling_survives_a_measured_speed_beyond_the_limit(policy, spy):
    policy.set_control_frequency(50)
    fast = {f"{key}.vel": 1.02 * v for key, v in zip(KEYS, FER.velocity, strict=False)}
    assert len(policy.get_actions_sync(flat(spy.q_start) | fast, "go")) > 100


def test_actions_per_step_counts_returned_steps(spy):
    policy = Cosmos3Policy(robot="panda", backend=spy, actions_per_step=10)
    assert len(policy.get_actions_sync(flat(spy.q_start), "go")) == 10
    policy.set_control_frequency(50)
    assert len(policy.get_actions_sync(flat(spy.q_start), "go")) == 10
    for wrong in (0, -1, 1.5, "3"):
        with pytest.raises(Cosmos3Error):
            Cosmos3Policy(robot="panda", backend=spy, actions_per_step=wrong)


def test_get_actions_does_not_block_the_loop():
    spy = Spy(delay_s=0.3)
    policy = Cosmos3Policy(robot="panda", backend=spy)

    async def main():
        task = asyncio.create_task(policy.get_actions(flat(spy.q_start), "go", whatever=True))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        # the synchronous call works inside a loop too
        inside = policy.get_actions_sync(flat(spy.q_start), "go")
        both = await asyncio.gather(
            *(policy.get_actions(flat(spy.q_start), "go") for _ in range(3))
        )
        return ticks, await task, inside, both

    ticks, steps, inside, both = asyncio.run(main())
    assert ticks > 10
    # concurrent calls share a solver and take turns
    assert steps == inside == both[0] == both[1] == both[2]
    assert [request.seed for request in spy.requests] == [0, 1, 2, 3, 4]


def test_without_a_robot_the_raw_columns():
    class Raw(Spy):
        def infer(self, request):
            self.requests.append(request)
            return ActionChunk(
                np.arange(20.0).reshape(2, 10) / 10, request.action_space, request.embodiment
            )

    raw = Raw()
    policy = Cosmos3Policy(backend=raw)
    policy.set_robot_state_keys([f"joint_{i}" for i in range(7)] + ["gripper"])
    observation = {f"joint_{i}": 0.0 for i in range(7)} | {"gripper": 0.2}
    steps = policy.get_actions_sync(observation, "go")
    assert list(steps[0]) == list(DROID.raw_action_layout)
    assert list(steps[1].values()) == pytest.approx(np.arange(10, 20) / 10)
    assert raw.requests[0].gripper == 0.2
    assert raw.requests[0].T_base_cosmos is None
    assert isinstance(policy.plan(observation, "go"), ActionChunk)


def test_the_request_says_what_was_measured(policy, spy):
    policy.reset(seed=7)
    q = HOME_Q + 0.1
    seen = Observation(q, 0.2, t_capture_s=4.0, privileged={"cube_red": np.eye(4)})
    plan = policy.plan(seen, "go")
    assert isinstance(plan, JointTrajectory)
    assert plan.t_capture_s == 4.0
    (request,) = spy.requests
    assert np.abs(request.T_base_cosmos - dh_forward(q) @ T_HAND_COSMOS).max() < 1e-12
    assert (request.seed, request.gripper, request.instruction, request.n_rows) == (
        7,
        0.2,
        "go",
        16,
    )
    policy.plan(seen, "go")
    assert spy.requests[1].seed == 8
    assert spy.resets == [7]


def test_privileged_state_goes_only_where_it_is_declared():
    seen = Observation(HOME_Q, 1.0, privileged={"cube_red": np.eye(4)})
    blind, sighted = Spy(), Spy(privileged=True)
    for backend in (blind, sighted):
        Cosmos3Policy(robot="panda", backend=backend).plan(seen, "go")
    assert blind.requests[0].privileged is None
    assert "cube_red" in sighted.requests[0].privileged


def test_last_rollout(policy, spy):
    assert policy.last_rollout == {}
    policy.reset(seed=3)
    policy.get_actions_sync(flat(spy.q_start), "go")
    last = policy.last_rollout
    assert set(last) == {
        "action",
        "video",
        "sound",
        "seed",
        "timing",
        "action_space",
        "collision",
        "off_pose_mm",
        "off_pose_held",
    }
    assert last["collision"]["outcome"] == "clear"
    assert last["off_pose_mm"] == {}
    assert last["action"].shape == (32, 10)
    assert last["seed"] == 3
    assert last["action_space"] == "midtrain"
    assert last["timing"]["own_ms"] == 1.0
    assert last["timing"]["infer_ms"] > 0
    assert last["video"] is None
    policy.reset()
    assert policy.last_rollout == {}


def test_the_prompt_stands_in_for_an_empty_instruction(spy):
    policy = Cosmos3Policy(robot="panda", backend=spy, prompt="tidy up")
    policy.get_actions_sync(flat(spy.q_start), "")
    policy.get_actions_sync(flat(spy.q_start), "pick")
    assert [request.instruction for request in spy.requests] == ["tidy up", "pick"]
    with pytest.raises(InputError, match="string"):
        policy.get_actions_sync(flat(spy.q_start), 5)


def test_what_is_wrong_is_said(policy, spy):
    observation = flat(spy.q_start)
    del observation["joint3"]
    with pytest.raises(ObservationError, match=r"'joint3'.*joint1, joint2, joint4"):
        policy.get_actions_sync(observation, "go")
    with pytest.raises(InputError, match="6 joint angles"):
        policy.plan(Observation(HOME_Q[:6], 1.0), "go")
    for keys in ([], "abc", ["a", "a"], [""], [3]):
        with pytest.raises(InputError):
            policy.set_robot_state_keys(keys)
    for hz in (0, -5, np.nan, "fast", None):
        with pytest.raises(InputError):
            policy.set_control_frequency(hz)
    assert not spy.requests


def test_choices_are_named():
    with pytest.raises(
        ConfigError, match=r"bundled policy.*'panda'.*scripted .*, replay or service"
    ):
        Cosmos3Policy()
    with pytest.raises(Cosmos3Error, match=r"scripted"):
        Cosmos3Policy(robot="panda", backend="oracle")
    with pytest.raises(ConfigError, match="infer"):
        Cosmos3Policy(robot="panda", backend=object())
    with pytest.raises(ConfigError, match="recording"):
        Cosmos3Policy(robot="panda", backend="replay")
    with pytest.raises(ConfigError, match="panda"):
        Cosmos3Policy(robot="spot", backend="scripted")
    with pytest.raises(ActionSpaceError, match="midtrain"):
        Cosmos3Policy(action_space="velocity", backend="scripted")
    with pytest.raises(ConfigError, match="backend='native'"):
        Cosmos3Policy(mode="forward_dynamics", backend="scripted")
    with pytest.raises(ConfigError, match=r"'portt'.*embodiment"):
        create_policy("cosmos3", backend="scripted", portt=1)
    with pytest.raises(ConfigError, match="cosmos3"):
        create_policy("openvla")


def test_create_policy_and_close(spy):
    with create_policy("cosmos3", embodiment="droid", robot="panda", backend=spy) as policy:
        assert policy.provider_name == "cosmos3"
        assert not policy.requires_images
    assert spy.closed == 1


def test_a_model_that_is_given_is_run_or_refused(spy):
    # it is looked for: no server is meant
    with pytest.raises(Cosmos3Error, match="/no/such/checkpoint"):
        create_policy("cosmos3", robot="panda", model="/no/such/checkpoint")
    with pytest.raises(ConfigError, match="host belongs to backend service"):
        create_policy("cosmos3://gpu-box:8000", robot="panda", model="/no/such/checkpoint")
    for backend in ("service", "scripted"):
        with pytest.raises(
            ConfigError, match=f"{backend}.*/no/such/checkpoint.*leave one of them out"
        ):
            Cosmos3Policy(robot="panda", backend=backend, model="/no/such/checkpoint")
    for make in (lambda **config: create_policy("cosmos3", **config), HostedCosmos3Policy):
        with pytest.raises(ConfigError, match="bundled policy"):  # for distributed, and for a Panda
            make(options=PolicyOptions(parallel=ParallelConfig(2)))


def test_the_expert_needs_the_simulator():
    policy = Cosmos3Policy(robot="panda", backend="scripted")
    with pytest.raises(BackendError, match="simulator"):
        policy.get_actions_sync(flat(), "pick up the red cube")
