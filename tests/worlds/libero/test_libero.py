"""LIBERO itself: each convention of the protocol, and what happens when it is turned round.
``make test-libero`` runs this.
"""

import io
import math
import warnings
from contextlib import closing, redirect_stdout

import numpy as np
import pytest

pytest.importorskip("libero", reason="LIBERO has an environment of its own: make test-libero")

import gymnasium
from gymnasium.utils.env_checker import check_env

import strands_cosmos3.environments  # noqa: F401 - registers
from strands_cosmos3.actions.controller_rows import controller_rows, decode_rows
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.worlds.libero.expert import LiberoExpert
from strands_cosmos3.worlds.libero.protocol import CLOSE, OPEN, LiberoConfig
from strands_cosmos3.worlds.libero.simulation import (
    CAMERAS,
    TCP,
    LiberoSimulation,
    as_seen,
    as_trained,
    privileged,
)
from strands_cosmos3.worlds.libero.suites import SUITES, load_init_states, load_tasks
from strands_cosmos3.worlds.libero.world import next_actions

pytestmark = pytest.mark.libero
STILL = [0, 0, 0, 0, 0, 0, OPEN]


@pytest.fixture(scope="module")
def world():
    """Task 0 of libero_object, with pictures."""
    with closing(
        LiberoSimulation(load_tasks("libero_object")[0], LiberoConfig(picture_px=128))
    ) as world:
        yield world


def physics(world):
    return world.robosuite.sim.get_state().flatten()


def play(world, n=12, seed=0):
    """Play random actions; return every state."""
    rng = np.random.default_rng(seed)
    states = [physics(world)]
    for _ in range(n):
        world.step(rng.uniform(-1, 1, 7))
        states.append(physics(world))
    return np.array(states)


def test_every_suite_has_ten_tasks_with_fifty_initial_states_and_a_goal():
    for suite in SUITES:
        tasks = load_tasks(suite)
        assert [task.number for task in tasks] == list(range(10))
        assert all(
            task.goal and task.can_judge(task.goal) and task.instruction for task in tasks
        ), suite
        assert len(load_init_states(suite, 3)) == 50


def test_a_variant_with_other_goals_asks_for_them():
    """Its files' names, which LIBERO calls its language, still ask for the base suite's."""
    base, other, words = (load_tasks(f"libero_object{end}")[0] for end in ("", "_task", "_lan"))
    assert base.instruction == "pick up the alphabet soup and place it in the basket"
    assert other.goal == (("in", "cream_cheese_1", "basket_1_contain_region"),)
    assert other.instruction == "Pick the cream cheese and place it in the basket"
    assert words.instruction == "grab alphabet soup and put it into basket"


def test_nothing_is_printed():
    with redirect_stdout(io.StringIO()) as said:
        load_tasks.cache_clear()
        load_tasks("libero_goal")
        load_init_states.__wrapped__("libero_goal", 0)
    assert not said.getvalue()


def test_an_episode_does_not_depend_on_what_was_before(world):
    """The controller's goal and the gripper's ramp outlive a state that is only set."""
    world.reset(7)
    first = play(world)
    world.reset(7)
    assert (play(world) == first).all()
    world._env.set_init_state(load_init_states("libero_object", 0)[7])
    world.observed = world._env.regenerate_obs_from_state(load_init_states("libero_object", 0)[7])
    for _ in range(10):
        world.step(STILL)
    assert np.abs(play(world) - first).max() > 1e-3, "without the reset it is another episode"


def test_a_fresh_world_plays_the_same_episode_with_pictures_and_without(world):
    world.reset(3)
    first = play(world)
    with closing(LiberoSimulation(world.task, pictures=False)) as other:
        other.reset(3)
        assert (play(other) == first).all()
        with pytest.raises(ConfigError, match="pictures=True"):
            other.step(STILL, look=True)


def test_fixtures_stand_where_the_seed_puts_them_and_nobody_elses_numbers_change():
    with closing(LiberoSimulation(load_tasks("libero_goal")[0], pictures=False)) as world:

        def fixtures(seed):
            np.random.seed(1)  # noqa: NPY002
            world.reset(0, seed)
            after = np.random.uniform()  # noqa: NPY002
            return world.robosuite.sim.model.body_pos.copy(), after

        (one, after), (same, again), (other, _) = fixtures(5), fixtures(5), fixtures(6)
        np.random.seed(1)  # noqa: NPY002
        assert after == again == np.random.uniform()  # noqa: NPY002
    assert (one == same).all()
    assert np.abs(one - other).max() > 1e-3


def test_objects_have_fallen_when_the_policy_begins(world):
    world.reset(0)
    assert np.abs(play_still(world)).max() < 5e-4
    with closing(LiberoSimulation(world.task, LiberoConfig(wait_steps=0), pictures=False)) as hasty:
        hasty.reset(0)
        assert np.abs(play_still(hasty)).max() > 2e-3
        assert hasty.horizon == 280


def play_still(world):
    """Return how far each object moves in ten steps without motion."""

    def centres():
        return np.array(
            [extent.mean(0) for name, extent in privileged(world).items() if name != TCP]
        )

    before = centres()
    for _ in range(10):
        world.step(STILL)
    return centres() - before


def test_minus_one_opens_and_one_closes(world):
    widths = {}
    for command in (OPEN, CLOSE, 0.0):
        world.reset(0)
        for _ in range(15):
            world.step([0, 0, 0, 0, 0, 0, command])
        widths[command] = np.abs(world.observed["robot0_gripper_qpos"]).mean()
    assert widths[OPEN] > 0.035
    assert widths[CLOSE] < 0.003
    assert widths[0.0] == pytest.approx(widths[OPEN], abs=0.005), "0 holds"


def test_an_action_is_a_goals_offset_and_not_a_displacement(world):
    """2.5 cm asked, a tenth of it done in the first step and a quarter a step later: integrated
    rows would overshoot.
    """
    world.reset(0)
    x = [world.state[0]]
    for _ in range(14):
        world.step([0.5, 0, 0, 0, 0, 0, OPEN])
        x.append(world.state[0])
    moved = np.diff(x) * 1e3
    assert moved[0] == pytest.approx(2.2, abs=0.4)
    assert moved[-1] == pytest.approx(6.4, abs=0.8)


def test_a_unit_of_rotation_is_half_a_radian_about_the_worlds_axes(world):
    world.reset(0)
    R = [privileged(world)[TCP][:3, :3]]
    for _ in range(14):
        world.step([0, 0, 0, 0, 0, 0.5, OPEN])
        R.append(privileged(world)[TCP][:3, :3])
    turned = R[-1] @ R[-2].T
    assert math.atan2(turned[1, 0], turned[0, 0]) == pytest.approx(0.049, abs=0.008)


def test_the_state_is_robosuites(world):
    from robosuite.utils.transform_utils import quat2axisangle

    world.reset(0)
    world.step([0, 0, 0, 0.4, -0.3, 0.2, OPEN])
    seen = world.observed
    own = np.concatenate(
        (
            seen["robot0_eef_pos"],
            quat2axisangle(seen["robot0_eef_quat"].copy()),
            seen["robot0_gripper_qpos"],
        )
    )
    assert world.state == pytest.approx(own, abs=1e-12)


def test_pictures_are_those_of_a_fresh_environment_to_the_bit(world):
    """However often this world was reset, and although its cameras are on for single steps only."""
    from libero.libero.envs import OffScreenRenderEnv

    bare = OffScreenRenderEnv(
        bddl_file_name=str(world.task.problem_file), camera_heights=128, camera_widths=128
    )
    with closing(bare):
        bare.seed(4)
        bare.reset()
        bare.set_init_state(load_init_states("libero_object", 0)[2])
        for _ in range(10):
            observed = bare.step(STILL)[0]
        world.reset(2, seed=4)
        for step in range(17):
            if step in (0, 16):
                assert all(
                    (world.views()[view] == observed[f"{camera}_image"]).all()
                    for view, camera in CAMERAS.items()
                )
            assert (world.observed["robot0_eef_pos"] == observed["robot0_eef_pos"]).all()
            action = [0.5, 0.2, -0.3, 0, 0, 0.1, OPEN]
            world.step(action, look=step == 15)
            observed = bare.step(action)[0]
    assert (world.rendered()["wrist"] != world.rendered()["agentview"]).any()
    with pytest.raises(ConfigError, match="look=True"):
        world.views()


def test_what_people_see_is_true_and_what_policies_see_is_its_mirror_image(world):
    """The basket disappears; where the picture changes is where the camera must see it."""
    world.reset(0)
    sim = world.robosuite.sim
    basket = privileged(world)["basket_1"].mean(0)
    camera = sim.model.camera_name2id("agentview")
    seen_from = sim.data.cam_xmat[camera].reshape(3, 3).T @ (basket - sim.data.cam_xpos[camera])
    focal = 64 / math.tan(math.radians(sim.model.cam_fovy[camera]) / 2)
    right = 64 + focal * seen_from[0] / -seen_from[2]  # column in an upright picture
    before = world.rendered()["agentview"]
    sim.data.set_joint_qpos("basket_1_joint0", [0, 0, -5, 1, 0, 0, 0])
    sim.forward()
    changed = np.abs(before.astype(int) - world.rendered()["agentview"]).sum(-1) > 30
    assert changed.sum() > 100
    column = {
        turn.__name__: np.argwhere(turn(np.repeat(changed[..., None], 3, -1)))[:, 1].mean()
        for turn in (as_seen, as_trained)
    }
    assert abs(right - 64) > 20, "the test can tell left from right"
    assert column["as_seen"] == pytest.approx(right, abs=4)
    assert column["as_trained"] == pytest.approx(127 - right, abs=4)


def test_the_expert_succeeds_through_normalised_rows_and_by_its_actions(world):
    policy = Cosmos3Policy(embodiment="libero", backend=LiberoExpert())
    expert = LiberoExpert()
    taken = {}
    for name in ("rows", "actions"):
        world.reset(0)
        policy.reset()
        expert.reset()
        fulfilled = False
        while not (fulfilled or world.time_is_up):
            own = expert.act(privileged(world), world.task.instruction)
            actions = (
                next_actions(policy, world, world.task.instruction) if name == "rows" else own[None]
            )
            assert actions == pytest.approx(own[None], abs=1e-9)
            fulfilled = world.step(actions[0])
        taken[name] = fulfilled, world.steps
    assert taken["rows"] == taken["actions"]
    assert taken["rows"][0] is True
    assert taken["rows"][1] < 150


def test_rows_with_the_gripper_turned_round_do_not_succeed(world):
    """That the round trip above can fail."""
    policy = Cosmos3Policy(embodiment="libero", backend=LiberoExpert())
    world.reset(0)
    fulfilled = False
    while not (fulfilled or world.time_is_up):
        rows = controller_rows(policy.plan(_seen(world), world.task.instruction))
        rows[:, 9] = 1 - rows[:, 9]
        fulfilled = world.step(decode_rows(rows)[0])
    assert not fulfilled


def _seen(world):
    from strands_cosmos3.worlds.libero.world import _observation

    return _observation(world, {}, True)


class Reaches:
    """A policy of another project: it looks, and closes its hand."""

    def get_actions_sync(self, observation, instruction):
        assert observation["image"].shape == (128, 256, 3)
        assert (observation["image"][:, :128] == observation["agentview"]).all()
        assert not [
            key for key in observation if key not in ("image", "agentview", "wrist", "state")
        ], "nothing privileged"
        return [dict.fromkeys(("dx", "dy", "dz", "rx", "ry", "rz"), 0.0) | {"gripper": 1.0}] * 3


def test_another_projects_policy_is_shown_what_it_may_see(world):
    from strands_cosmos3.evaluation.plan import Condition
    from strands_cosmos3.evaluation.policies import ConditionedPolicy

    world.reset(0)
    policy = ConditionedPolicy(Reaches(), Condition(), None)
    assert next_actions(policy, world, "close").tolist() == [[0, 0, 0, 0, 0, 0, 1]] * 3
    blind = ConditionedPolicy(Reaches(), Condition.parse("blank"), 2)
    assert next_actions(blind, world, "close").shape == (2, 7)


def test_gymnasiums_check_passes_and_the_horizon_truncates():
    made = gymnasium.make(
        "strands_cosmos3/Libero-v0",
        suite="libero_object",
        task=3,
        pictures=False,
        config=LiberoConfig(wait_steps=2),
    )
    with closing(made.unwrapped) as env, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Box.*")
        check_env(env, skip_render_check=True)
        observation, info = env.reset(seed=1, options={"init_state": 4})
        assert (info["init_state"], info["success"], observation["state"].shape) == (4, False, (8,))
        env.world.steps = env.world.horizon - 2
        assert [env.step(np.zeros(7))[2:4] for _ in range(2)] == [(False, False), (False, True)]
    with pytest.raises(ConfigError, match="0 to 9"):
        gymnasium.make("strands_cosmos3/Libero-v0", task=10)
