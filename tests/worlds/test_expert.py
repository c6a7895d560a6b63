"""The expert speaks as a model would, obeys the words, and recovers."""

from dataclasses import replace

import numpy as np
import pytest

from strands_cosmos3.actions.decode import decode_chunk
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.embodiments import PANDA_FINGER, get_embodiment
from strands_cosmos3.errors import BackendError, InputError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.types import ActionChunk, Outcome, Request
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table import expert
from strands_cosmos3.worlds.table.expert import STATE_KEYS, ScriptedBackend
from strands_cosmos3.worlds.table.grammar import Goal, Verb

DROID = get_embodiment("droid")


@pytest.fixture(scope="module")
def robot():
    return Robot()


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]


class Listening(ScriptedBackend):
    """The expert, and what it said."""

    def __init__(self):
        self.said, self.requests = [], []

    def infer(self, request):
        chunk = super().infer(request)
        self.said.append(chunk)
        self.requests.append(request)
        return chunk


def run(robot, task, seed, instruction="", backend=None, **arguments):
    policy = Cosmos3Policy(robot="panda", backend=backend or "scripted")
    return robot.run_policy(
        instruction=instruction, policy=policy, task=task, seed=seed, duration=20.0, **arguments
    )


@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("task", ["reach", "pick", "place", "stack"])
def test_rows_are_a_models(robot, task, seeds):
    for seed in seeds:
        backend = Listening()
        assert run(robot, task, seed, backend=backend).success, (task, seed)
        rows = np.concatenate([chunk.action for chunk in backend.said])
        assert rows.shape[1] == 10
        assert all(len(chunk.action) == 16 for chunk in backend.said)
        assert np.abs(rows).max() < 3.0
        assert (np.abs(rows) < 1.3).mean() > 0.98
        for chunk, request in zip(backend.said, backend.requests, strict=True):
            poses = decode_chunk(chunk, request.T_base_cosmos)
            assert (
                np.linalg.norm(np.diff(poses.T_base_frame[:, :3, 3], axis=0), axis=1).max() < 0.015
            )
            assert set(np.unique(poses.gripper)) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("colour", "seed"),
    [
        pytest.param(colour, seed, marks=() if i == seed else pytest.mark.slow)
        for i, colour in enumerate(("red", "green", "blue"))
        for seed in range(3)
    ],
)
def test_the_words_choose_the_cube(robot, colour, seed):
    rollout = run(robot, "pick", seed, f"pick up the {colour} cube")
    assert rollout.success
    heights = {name: robot.scene.T_world_body(robot.data, name)[2, 3] for name in robot.scene.cubes}
    assert heights.pop(f"cube_{colour}") > 0.1
    assert max(heights.values()) < 0.05


def test_the_same_chunk_for_the_same_state_and_another_for_another_colour(robot):
    robot.reset(0)
    seen, backend = robot.observation(), Listening()
    policy = Cosmos3Policy(robot="panda", backend=backend)
    for colour in ("red", "red", "blue"):
        policy.plan(seen, f"pick up the {colour} cube")
    first, again, other = (chunk.action for chunk in backend.said)
    assert np.array_equal(first, again)  # no memory
    assert np.abs(first - other).max() > 0.2


class Mute(ScriptedBackend):
    """The expert whose first answers close the fingers over nothing."""

    def __init__(self, n):
        self.n = n

    def infer(self, request):
        chunk = super().infer(request)
        self.n -= 1
        if self.n < 0:
            return chunk
        rows = chunk.action.copy()
        rows[:, 9] = -1.0  # z of "closed": q01 is 0, q99 is 1
        return ActionChunk(rows, request.action_space, request.embodiment)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_recovers_from_fingers_closed_over_nothing(robot, seed):
    closed = []
    rollout = run(
        robot, "pick", seed, backend=Mute(2), on_tick=lambda r: closed.append(r.joint_state()[2])
    )
    assert min(closed[:100]) < 0.1
    assert rollout.success


@pytest.mark.parametrize("seed", SEEDS)
def test_it_recovers_when_the_cube_is_pushed_away(robot, seed):
    """Once, before any grasp, by an impulse on the cube; the chunk in force still aims at where
    it was.
    """
    pushed = []

    def push(robot):
        tcp = robot.data.site_xpos[robot.scene.only.tcp_site]
        cube = robot.scene.T_world_body(robot.data, "cube_red")[:3, 3]
        if not pushed and tcp[2] - cube[2] < 0.07:
            towards = np.array([0.5, 0.0]) - cube[:2]
            at = robot.scene.bodies["cube_red"].dof
            robot.data.qvel[at : at + 2] = 0.5 * towards / max(np.linalg.norm(towards), 1e-3)
            pushed.append(cube[:2].copy())

    rollout = run(robot, "pick", seed, on_tick=push)
    assert pushed
    assert rollout.success


def _request(robot, **changed):
    robot.reset(0)
    seen = robot.observation()
    fields = {
        "embodiment": DROID,
        "action_space": DROID.action_space("midtrain"),
        "instruction": "pick up the red cube",
        "n_rows": 16,
        "q_rad": seen.q_rad,
        "gripper": 1.0,
        "limb_poses": {"arm": np.eye(4)},
        "privileged": seen.privileged,
    }
    return Request(**{**fields, **changed})


@pytest.mark.parametrize("turns", [True, False])
def test_the_hand_turns_to_the_cube_or_keeps_its_yaw(robot, turns):
    """Without turning, the hand over a turned cube ends at home's yaw; the cube is still reached
    for.
    """
    request = _request(robot, instruction="reach the red cube")
    assert request.privileged is not None
    state = dict(request.privileged)
    cube, turned = np.array(state["cube_red"]), np.deg2rad(30)
    cube[:3, :3] = so3_exp(np.array([0.0, 0.0, state["grasp_yaw_rad"] + turned]))
    state |= {"cube_red": cube}
    backend, yaws = ScriptedBackend(turns), []
    for _ in range(12):
        request = replace(request, limb_poses={"arm": state["tcp"]}, privileged=state)
        end = decode_chunk(backend.infer(request), state["tcp"]).T_base_frame[-1]
        state |= {"tcp": end, "tcp_twist": np.zeros(6)}
        yaws.append(np.arctan2(end[1, 0], end[0, 0]) - state["grasp_yaw_rad"])
    assert np.linalg.norm(state["tcp"][:3, 3] - cube[:3, 3]) < 0.005
    assert yaws[-1] == pytest.approx(turned if turns else 0.0, abs=0.02)


@pytest.mark.parametrize("aside_m", [0.03, 0.05])
def test_a_hand_that_keeps_its_yaw_descends_in_a_funnel(robot, aside_m):
    """It is 1.5 m higher for each metre aside, beyond 12 mm; on that slope a hand at rest first
    moves level.
    """
    request = _request(robot, instruction="reach the red cube")
    assert request.privileged is not None
    rises = []
    for off_m in (-0.005, 0.0, 0.005):
        tcp = np.eye(4)
        tcp[:3, :3] = so3_exp(np.array([0.0, 0.0, request.privileged["grasp_yaw_rad"]])) @ np.diag(
            [1.0, -1.0, -1.0]
        )
        tcp[:3, 3] = request.privileged["cube_red"][:3, 3] + [
            aside_m,
            0.0,
            1.5 * (aside_m - 0.012) + off_m,
        ]
        state = {**request.privileged, "tcp": tcp, "tcp_twist": np.zeros(6)}
        chunk = ScriptedBackend(turns=False).infer(
            replace(request, limb_poses={"arm": tcp}, privileged=state)
        )
        first = decode_chunk(chunk, tcp).T_base_frame[0, :3, 3] - tcp[:3, 3]
        assert first[0] < -0.001
        rises.append(first[2] / -first[0])
    assert rises[0] > 0.05
    assert abs(rises[1]) < 1e-6
    assert rises[2] < -0.05


def _steps_mm(request, **how):
    """Return the steps [16, 3] of a plan and its poses [17, 4, 4], both in the world."""
    poses = decode_chunk(
        ScriptedBackend(funnel=True).plan(request, **how), request.T_base_cosmos
    ).T_base_frame
    poses = np.concatenate([request.T_base_cosmos[None], poses])
    return 1000 * np.diff(poses[:, :3, 3], axis=0), poses


def _over_the_table(robot, aside_m=0.0, turned_rad=0.0, height_m=0.3):
    """Return a request of a hand at rest that points down above the red cube."""
    request = _request(robot, instruction="reach the red cube")
    state, tcp = request.privileged, np.eye(4)
    cube = np.array(state["cube_red"])
    cube[:3, :3] = so3_exp(np.array([0.0, 0.0, state["grasp_yaw_rad"]]))
    tcp[:3, :3] = so3_exp(np.array([0.0, 0.0, state["grasp_yaw_rad"] + turned_rad])) @ np.diag(
        [1.0, -1.0, -1.0]
    )
    tcp[:3, 3] = cube[:3, 3] + [aside_m, 0.0, height_m]
    privileged = {**state, "tcp": tcp, "tcp_twist": np.zeros(6), "cube_red": cube}
    return replace(request, limb_poses={"arm": tcp}, privileged=privileged)


def test_a_cruising_hand_starts_with_the_speed_that_it_would_reach(robot):
    """One from rest ramps up by 3.2 mm a row; from full speed both answer alike."""
    request = _over_the_table(robot)
    rest, cruise = (_steps_mm(request, starts_cruising=cruises)[0] for cruises in (False, True))
    np.testing.assert_allclose(np.linalg.norm(rest[:4], axis=1), [3.2, 6.4, 9.6, 12.5], atol=0.01)
    np.testing.assert_allclose(np.linalg.norm(cruise[:4], axis=1), 12.5, atol=0.01)
    moving = replace(
        request,
        privileged={**request.privileged, "tcp_twist": np.array([0, 0, -0.0125 * 15, 0, 0, 0])},
    )
    np.testing.assert_allclose(
        _steps_mm(moving)[0], _steps_mm(moving, starts_cruising=True)[0], atol=1e-6
    )


def test_a_hand_that_takes_cubes_askew_comes_down_before_it_has_turned(robot):
    """Another one waits above, 25 cm for each radian beyond 8 degrees, until it has turned."""
    request = replace(
        _over_the_table(robot, turned_rad=np.deg2rad(30), height_m=0.05),
        instruction="pick up the red cube",
    )
    strict, askew = (_steps_mm(request, askew=askew)[0][:4, 2].sum() for askew in (False, True))
    assert strict > 0
    assert -20 < askew < -8  # slowly, 5 mm a row


def _with_cube_turned(request, cube_rad):
    cube = np.array(request.privileged["cube_red"])
    cube[:3, :3] = so3_exp(np.array([0.0, 0.0, cube_rad])) @ cube[:3, :3]
    return replace(request, privileged={**request.privileged, "cube_red": cube})


@pytest.mark.parametrize("height_m", [0.0, 0.02, 0.05, 0.1])
def test_a_hand_that_takes_cubes_askew_does_not_look_at_their_yaw(robot, height_m):
    """Another one turns to it."""
    upright = replace(_over_the_table(robot, height_m=height_m), instruction="pick up the red cube")
    expert, turned = ScriptedBackend(funnel=True), _with_cube_turned(upright, np.deg2rad(30))
    for askew in (False, True):
        rows = [expert.plan(request, askew=askew).action for request in (upright, turned)]
        assert np.array_equal(*rows) == askew


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(("between_deg", "turn_deg"), [(90, 0), (60, 0), (20, 20), (0, 40)])
def test_a_hand_that_takes_cubes_askew_turns_only_where_another_cube_is_in_a_fingers_way(
    robot, between_deg, turn_deg, side
):
    """By the least angle, in steps of 5 degrees, that leaves a finger room beside a cube 6 cm
    from the one to be taken.
    """
    request = _over_the_table(robot, height_m=0.1)
    state, angle = request.privileged, side * np.deg2rad(between_deg)
    fingers = request.T_base_cosmos[:3, 1]
    far, near = np.array(state["cube_blue"]), np.array(state["cube_red"])
    far[:2, 3] += [1.0, 1.0]
    near[:3, 3] += 0.06 * (so3_exp(np.array([0.0, 0.0, angle])) @ fingers)
    request = replace(request, privileged={**state, "cube_blue": far, "cube_green": near})
    _, poses = _steps_mm(request, askew=True)
    turned = poses[-1][:3, :3] @ poses[0][:3, :3].T
    turned_deg = np.rad2deg(np.arctan2(turned[1, 0], turned[0, 0]))
    assert abs(turned_deg) == pytest.approx(min(turn_deg, 34), abs=6)
    if between_deg == 20:
        assert np.sign(turned_deg) == -side  # away from the other cube


@pytest.mark.parametrize("cube_deg", [0, 20, 40])
@pytest.mark.parametrize(("room_m", "descends"), [(-0.001, False), (0.010, True)])
def test_fingers_come_down_where_they_clear_the_cube(robot, cube_deg, room_m, descends):
    """A finger just above the cube's top would push it aside; the cube counts as wide as it is
    on average over all yaws.
    """
    request = _over_the_table(robot)
    edge_m, tcp = float(request.privileged["edge_m"]), np.array(request.privileged["tcp"])
    off_m = PANDA_FINGER.open_value - edge_m * 2 / np.pi - room_m
    tcp[:3, 3] = (
        request.privileged["cube_red"][:3, 3] + off_m * tcp[:3, 1] + [0.0, 0.0, edge_m / 2 + 0.006]
    )
    at = replace(request, limb_poses={"arm": tcp}, privileged={**request.privileged, "tcp": tcp})
    at = _with_cube_turned(at, np.deg2rad(cube_deg))
    assert (_steps_mm(at, askew=True, starts_cruising=True)[0][0, 2] < 0) == descends


def test_a_hand_beside_a_cube_rises_before_a_finger_pushes_it(robot):
    request = _over_the_table(robot, height_m=0.0)
    tcp = np.array(request.privileged["tcp"])
    for off_m, rises in ((0.035, True), (0.010, False)):
        aside = np.array(tcp)
        aside[:3, 3] += off_m * tcp[:3, 1]
        beside = replace(
            request, limb_poses={"arm": aside}, privileged={**request.privileged, "tcp": aside}
        )
        steps, _ = _steps_mm(beside, askew=True)
        assert (steps[0, 2] > 1.0 and np.linalg.norm(steps[0, :2]) < 0.1) == rises


@pytest.mark.parametrize(
    ("turned_deg", "closes"), [(2, (True, True)), (12, (False, True)), (25, (False, False))]
)
def test_the_yaw_within_which_fingers_close(robot, turned_deg, closes):
    """4 degrees, or 16 from the robot's own yaw if the hand takes cubes askew; beyond, it turns
    first.
    """
    request = replace(
        _over_the_table(robot, turned_rad=np.deg2rad(turned_deg), height_m=0.0),
        instruction="pick up the red cube",
        gripper=1.0,
    )
    plans = [
        ScriptedBackend(funnel=True).plan(request, askew=askew).action[0, 9]
        for askew in (False, True)
    ]
    assert tuple(bool(command < 0) for command in plans) == closes


@pytest.mark.parametrize(
    ("gap", "keeps"), [(0.98, (True, True)), (1.35, (False, True)), (1.6, (False, False))]
)
def test_fingers_that_hold_a_cube_askew_keep_it(robot, gap, keeps):
    """A cube held along its diagonal is 1.41 edges wide; more than a centimetre too high,
    another expert lets go of it.
    """
    request = replace(
        _over_the_table(robot, turned_rad=np.deg2rad(40), height_m=0.014),
        instruction="pick up the red cube",
    )
    edge_m, open_m = float(request.privileged["edge_m"]), 2 * PANDA_FINGER.open_value
    held = replace(request, gripper=gap * edge_m / open_m)
    plans = [
        ScriptedBackend(funnel=True).plan(held, askew=askew).action[:, 9] for askew in (False, True)
    ]
    assert tuple(bool((fingers < 0).all()) for fingers in plans) == keeps


@pytest.mark.parametrize(
    ("aside_mm", "above_mm", "closes"),
    [(7, 0, (False, True)), (9, 0, (False, False)), (0, 6, (False, False))],
)
def test_the_distance_within_which_fingers_close(robot, aside_mm, above_mm, closes):
    """5 mm, or 8 mm aside and 5 in height if the hand takes cubes askew: fingers that close
    higher lose the cube.
    """
    request = _over_the_table(robot, aside_mm / 1e3, height_m=above_mm / 1e3)
    request = replace(request, instruction="pick up the red cube", gripper=1.0)
    plans = [
        ScriptedBackend(funnel=True).plan(request, askew=askew).action[0, 9]
        for askew in (False, True)
    ]
    assert tuple(bool(command < 0) for command in plans) == closes


def test_a_drift_is_added_to_the_first_rows_and_corrected_by_the_others(robot):
    request = _over_the_table(robot, height_m=0.05)
    drift = np.tile([0.004, 0.0, 0.0, 0.0, 0.0, 0.01], (4, 1))
    plain, poses = _steps_mm(request)
    drifted, poses_drifted = _steps_mm(request, drift=drift)
    np.testing.assert_allclose(drifted[0] - plain[0], [4, 0, 0], atol=1e-6)
    aside_mm = 1000 * (poses_drifted[:, 0, 3] - poses[:, 0, 3])
    assert aside_mm[4] > 15
    assert abs(aside_mm[-1]) < 5
    turned = [
        np.arctan2(T[1, 0], T[0, 0]) - np.arctan2(T0[1, 0], T0[0, 0])
        for T, T0 in zip(poses_drifted, poses, strict=True)
    ]
    assert turned[4] > 0.02
    assert abs(turned[-1]) < 0.005


@pytest.mark.parametrize(
    ("aside_m", "turned_rad", "height_m"),
    [(0.03, 0.0, 0.054), (0.0, 0.3, 0.25 * (0.3 - np.deg2rad(8)))],
)
def test_a_turning_hand_has_a_funnel_in_distance_and_angle(robot, aside_m, turned_rad, height_m):
    """3 m higher for each metre aside beyond 12 mm, and 0.25 m for each radian beyond 8 degrees;
    above it the hand descends.
    """
    for off_m, sign in ((-0.01, 1.0), (0.01, -1.0)):
        steps, _ = _steps_mm(_over_the_table(robot, aside_m, turned_rad, height_m + off_m))
        assert np.sign(steps[0, 2]) == sign


@pytest.mark.parametrize(
    ("funnel", "aside_m", "height_m", "descends"),
    [
        (True, 0.05, 0.08, True),
        (True, 0.05, 0.04, False),
        (True, 0.02, 0.03, True),
        (False, 0.02, 0.08, False),
    ],
)
def test_a_held_cube_comes_down_into_the_bin_in_a_funnel(
    robot, funnel, aside_m, height_m, descends
):
    """3 m higher for each metre aside beyond 3 cm; without a funnel it is carried at one height
    until 1.5 cm aside.
    """
    request = _over_the_table(robot)
    state, tcp, cube = request.privileged, np.array(request.privileged["tcp"]), np.eye(4)
    tcp[:3, 3] = state["bin"] + [aside_m, 0.0, height_m - 0.01]
    cube[:3, 3] = tcp[:3, 3]
    held = {**state, "tcp": tcp, "cube_red": cube, "edge_m": 0.04}
    asked = replace(
        request,
        instruction="place the red cube in the bin",
        gripper=0.5,
        limb_poses={"arm": tcp},
        privileged=held,
    )
    poses = decode_chunk(ScriptedBackend(funnel=funnel).infer(asked), tcp).T_base_frame
    assert (poses[0, 2, 3] < tcp[2, 3]) == descends


def test_a_hand_in_a_funnel_turns_to_a_cube_within_12_cm_and_to_homes_yaw_elsewhere(robot):
    for aside_m, expected_rad in ((0.16, -0.3), (0.08, 0.2)):
        request = _over_the_table(robot, aside_m=aside_m, turned_rad=0.3)
        cube = np.array(request.privileged["cube_red"])
        cube[:3, :3] = so3_exp(np.array([0.0, 0.0, request.privileged["grasp_yaw_rad"] + 0.5]))
        _, poses = _steps_mm(replace(request, privileged={**request.privileged, "cube_red": cube}))
        turned = np.arctan2(poses[2, 1, 0], poses[2, 0, 0]) - np.arctan2(
            poses[0, 1, 0], poses[0, 0, 0]
        )
        assert np.sign(turned) == np.sign(expected_rad)
        assert abs(turned) > 0.01


def test_what_it_needs_is_said(robot):
    backend = ScriptedBackend()
    with pytest.raises(
        BackendError, match=f"{STATE_KEYS[0]}.*simulator|simulator.*{STATE_KEYS[0]}"
    ):
        backend.infer(_request(robot, privileged=None))
    partial = dict(_request(robot).privileged)
    del partial["cube_red"]
    with pytest.raises(BackendError, match="cube_red"):
        backend.infer(_request(robot, privileged=partial))
    with pytest.raises(BackendError, match="midtrain"):
        backend.infer(_request(robot, action_space=DROID.action_space("joint_pos")))
    with pytest.raises(BackendError, match="pose"):
        backend.infer(_request(robot, limb_poses={}))
    with pytest.raises(InputError, match="cubes red, green, blue"):
        backend.infer(_request(robot, instruction="pick up the cube"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "at_least"), [("reach", 100), ("pick", 98), ("place", 95), ("stack", 80)]
)
def test_a_hundred_seeds(robot, task, at_least):
    outcomes = [run(robot, task, seed).outcome for seed in range(100)]
    assert sum(outcome is Outcome.SUCCESS for outcome in outcomes) >= at_least


@pytest.mark.parametrize(
    "goal",
    [
        Goal(Verb.STACK, "cube_red"),
        Goal(Verb.HAND_OVER, "cube_red", onto="cube_blue"),
        Goal("sweep", "cube_red", onto="cube_blue", to="left"),
    ],
    ids=["stack on nothing", "hand over a cube", "an unknown verb"],
)
def test_a_cube_is_not_carried_where_nobody_said_how(robot, monkeypatch, goal):
    class Holding(ScriptedBackend):
        def infer(self, request):
            monkeypatch.setattr(expert, "_act", lambda world, _: expert._carry(world, goal))
            return super().infer(request)

    with pytest.raises(BackendError, match=f"cannot carry a cube to {goal.verb}; write how"):
        robot.run_policy(policy=Cosmos3Policy("droid", "panda", Holding()), task="pick")
