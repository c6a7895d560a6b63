"""Post-training for another robot: what is recorded of a UR5e, what training reads of it, and
what does not fit together.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from recipes.table_policy.record import LabelCollector, LabelConfig
from strands_cosmos3.actions.decode import decode_pose_trajectory
from strands_cosmos3.actions.rotations import geodesic_angle
from strands_cosmos3.actions.stats import denormalize_chunk, normalize_chunk
from strands_cosmos3.cli import main
from strands_cosmos3.commands.demos import Demos
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, Dataset, DatasetSpec, DatasetWriter
from strands_cosmos3.datasets.arm_rows import poses_of
from strands_cosmos3.datasets.spec import EXPERT, LABELLED
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.loading import load_action_head
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.errors import ConfigError, Cosmos3Error
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.post import PostTraining
from strands_cosmos3.types import ActionChunk, Rollout
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.demo_config import DemoConfig
from strands_cosmos3.worlds.table.demo_dataset import VIDEO, add_record, demo_spec
from strands_cosmos3.worlds.table.demonstrations import DemoCollector
from strands_cosmos3.worlds.table.phrases import plain

UR5E = get_robot("ur5e")

pytestmark = pytest.mark.filterwarnings(
    "ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning"
)
TOP = "observation.images.camera_top"
UR = get_embodiment("robomind-ur")
UR5E_DEMOS = DemoConfig(robot="ur5e", tasks=("reach",), ticks=9, edges_m=(0.04,))
TABLE_POLICY = Path(str(resource("assets/table_policy")))


@dataclass
class Recorded:
    root: Path
    rollout: Rollout
    robot: Robot
    start: np.ndarray  # [180, 320, 3] the top camera's picture of the start


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    """The beginning of a pick from a start near the cubes, so that the gripper closes."""
    root = tmp_path_factory.mktemp("recorded") / "set"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        robot = Robot("ur5e")
    with DatasetWriter(root, rollout_spec("robomind-ur", UR5E)) as writer:
        rollout = robot.run_policy(
            instruction="pick up the red cube",
            policy_config={"backend": "scripted"},
            task="pick",
            seed=1,
            control_frequency=20.0,
            recorder=RolloutRecorder(writer, "robomind-ur"),
        )
    assert rollout.success
    robot.reset(1)
    with Renderer(robot.scene.model, 180, 320) as renderer:
        start = renderer.render(robot.data, "camera_top")
    return Recorded(root, rollout, robot, start)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    """Two episodes with the expert's answers for three colours."""
    root = tmp_path_factory.mktemp("demos") / "set"
    with warnings.catch_warnings(), DemoCollector(UR5E_DEMOS) as collector:
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        records = [
            record for episode in (0, 1) if (record := collector.record(0, episode)) is not None
        ]
    assert len(records) == 2
    with DatasetWriter(root, demo_spec(records[0], UR5E_DEMOS), video=VIDEO) as writer:
        for episode, record in enumerate(records):
            add_record(writer, record, 0, episode)
    return root


def site_poses(robot: Robot, q_rad: np.ndarray) -> np.ndarray:
    """Poses of the site that Cosmos' rows of a UR move, in the base, by the model: the scene's
    world is the base.
    """
    data, T = mujoco.MjData(robot.scene.model), np.tile(np.eye(4), (len(q_rad), 1, 1))
    for pose, q in zip(T, q_rad, strict=True):
        data.qpos[robot.scene.arm_qpos] = q
        mujoco.mj_kinematics(robot.scene.model, data)
        site = data.site("attachment_site")
        pose[:3, :3], pose[:3, 3] = site.xmat.reshape(3, 3), site.xpos
    return T


KEPT_YAW = replace(UR5E_DEMOS, hand_yaw="home", ticks=5, distractors=0.0)


@pytest.fixture(scope="module")
def kept_yaw():
    """Episodes of one collector, and so of one scene, whose hand keeps home's yaw."""
    with warnings.catch_warnings(), DemoCollector(KEPT_YAW) as collector:
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        assert not collector.expert.expert.turns
        return [collector.record(0, episode) for episode in range(3)]


def test_an_episode_does_not_depend_on_those_before_it(kept_yaw):
    """A worker process records all its parts with one collector."""
    with DemoCollector(KEPT_YAW) as fresh:
        again = fresh.record(0, 2)
    for name, values in vars(kept_yaw[2]).items():
        np.testing.assert_array_equal(values, getattr(again, name), err_msg=name)


def test_a_hand_that_keeps_its_yaw_has_homes_in_starts_and_answers(kept_yaw):
    """An expert that turned to 45 degrees instead turned an UR5e by 135."""
    robot = Robot("ur5e")
    robot.reset()
    home_yaw = np.arctan2(*(robot.observation().privileged or {})["tcp"][[1, 0], 0])
    for record in kept_yaw:
        rows = [denormalize_chunk(answer, UR)[:, :9] for answer in record.labels[0]]
        chunks = [decode_pose_trajectory(one, record.T_base_cosmos[0]) for one in rows]
        start, ends = record.T_base_cosmos[0], np.stack([chunk[-1] for chunk in chunks])
        # X = I: the frame's yaw is the hand's
        assert abs(np.arctan2(start[1, 0], start[0, 0]) - home_yaw) < np.deg2rad(15)
        np.testing.assert_allclose(
            np.arctan2(ends[:, 1, 0], ends[:, 0, 0]), home_yaw, atol=np.deg2rad(2)
        )


@pytest.mark.parametrize("robot", ["ur5e", "panda"])
def test_answers_for_pictures_alone_do_not_depend_on_the_arms_speed(robot):
    """One picture shows none: they are those of an arm at rest, or in the bundled policy's
    recipe of one that cruises.
    """
    recipes = (DemoCollector, True), (LabelCollector, False)
    for kind, rests in recipes[: 2 if robot == "panda" else 1]:
        with kind(DemoConfig(robot=robot) if rests else LabelConfig()) as collector:
            stage = collector._scene(False, 0.04)
            stage.robot.reset(0)
            request = collector.request(stage.robot.observation())
            state = dict(request.privileged or {})
            still, moving = (
                replace(request, privileged=state | {"tcp_twist": np.full(6, twist)})
                for twist in (0.0, 0.1)
            )
            recorder = collector.recorder(collector, stage, np.random.default_rng(0))
            answers = [recorder._label(stage.robot, one)["labels"][0] for one in (still, moving)]
            np.testing.assert_array_equal(*answers)
            expert = collector.expert
            resting = expert.expert.infer(expert.asked(still, 0)).action.astype(np.float32)
            assert np.array_equal(answers[0], resting) == rests


def test_a_recorded_rollout_follows_the_domains_conventions(recorded):
    with Dataset(recorded.root) as data:
        episode = data[0]
        assert data.spec.fps == 10
        assert list(data.spec.cameras) == [TOP]
        assert data.spec.robot_type == "ur5e"
        assert data.spec.features[ACTION].info["embodiment"] == "robomind-ur"
        state, pose, rows = (
            np.asarray(episode[key], np.float64) for key in (STATE, EE_POSE, ACTION)
        )
        off = np.abs(episode.frames(TOP, [0])[0].astype(int) - recorded.start).mean()
    assert off < 4  # video's loss; the picture of the wrist differs by 40
    steps = 60 * np.arange(1, len(state)) - 1
    log = recorded.rollout.arrays
    np.testing.assert_allclose(state[1:, :6], log["q_achieved_rad"][steps], atol=1e-6)
    T = site_poses(recorded.robot, log["q_achieved_rad"][steps])
    np.testing.assert_allclose(poses_of(pose)[1:], T, atol=2e-6)  # X is the identity
    commanded = site_poses(recorded.robot, log["q_commanded_rad"][steps])
    path = decode_pose_trajectory(rows[:-1, :9], poses_of(pose)[0])[1:]
    np.testing.assert_allclose(path, commanded, atol=2e-5)  # row i moves from frame i to i + 1
    assert (state[0, 6], rows[0, 9]) == (pytest.approx(1, abs=0.01), 1)  # open, 1 = open
    assert state[-1, 6] < 0.6
    assert rows[-1, 9] == 0
    # the command within the row
    np.testing.assert_allclose(rows[:-1, 9], log["gripper_commanded"][steps], atol=1e-6)
    opened, told = np.flatnonzero(state[:, 6] < 0.95)[0], np.flatnonzero(rows[:, 9] < 0.5)[0]
    assert told <= opened  # the row's command precedes what is measured


def test_recorded_rows_drive_the_arm_along_the_recorded_motion(recorded):
    """Dataset -> normalised chunk -> decode -> IK -> executor -> dynamics."""
    with Dataset(recorded.root) as data:
        state, rows = (np.asarray(data[0][key], np.float64) for key in (STATE, ACTION))
    robot, ik, n = recorded.robot, LimbIK("ur5e"), UR.chunk_rows()
    robot.reset(1)
    qpos = ik.home.copy()
    qpos[:6] = state[0, :6]
    chunk = ActionChunk(normalize_chunk(rows[:n], UR), UR.action_space(), UR)
    plan = ik.plan(chunk, qpos)
    assert plan.trajectory.t_s[-1] == pytest.approx(n / 10)
    robot.executor.accept(plan.trajectory)
    reached = []
    for _ in range(n):
        before = robot.executor.reference
        reached.append(robot.execute(robot.executor.advance(60), before)[0][-1])
    T, seen = site_poses(robot, np.array(reached)), site_poses(robot, state[1 : n + 1, :6])
    assert np.linalg.norm(seen[-1, :3, 3] - seen[0, :3, 3]) > 0.1
    assert np.linalg.norm((T - seen)[:, :3, 3], axis=1).max() < 0.004
    assert np.degrees(geodesic_angle(T[:, :3, :3], seen[:, :3, :3])).max() < 0.7


def windows_of(demos: Path, folder: Path, **options: Any) -> PostTraining:
    how: dict[str, Any] = {
        "train": ("*",),
        "steps": 1,
        "batch": 4,
        "policy_frames": 1,
        "validation_fraction": 0.5,
        **options,
    }
    config = PostConfig(embodiment="robomind-ur", **how)
    return PostTraining(TABLE_POLICY, demos, folder, config)


@pytest.fixture(scope="module")
def post(demos, tmp_path_factory) -> PostTraining:
    return windows_of(demos, tmp_path_factory.mktemp("post"))


def test_each_picture_has_a_window_for_each_goal(post, demos):
    with Dataset(demos) as data:
        ticks = [np.flatnonzero(episode[LABELLED]) for episode in data]
        answers = np.concatenate(
            [np.asarray(e[EXPERT], np.float64)[t] for e, t in zip(data, ticks, strict=True)]
        )
        poses = poses_of(np.concatenate([e[EE_POSE][t] for e, t in zip(data, ticks, strict=True)]))
    windows, goals = post.windows, 3
    assert len(windows) == goals * len(answers)
    batch = windows._pick(np.arange(goals), np.zeros(goals, bool))
    assert torch.equal(batch.latents[0], batch.latents[2])
    assert torch.equal(batch.state[0], batch.state[2])
    assert len(set(batch.prompt.tolist())) == goals
    assert batch.latents.shape[2] == 1
    assert batch.fps == 10
    scale = post.stats.normalizer("quantile")
    raw = denormalize_chunk(answers[0].reshape(goals * 16, 10), UR).reshape(goals, 16, 10)
    np.testing.assert_allclose(batch.rows, [scale(one, True) for one in raw], atol=1e-4)
    centre = Checkpoint.open(TABLE_POLICY).metadata["state"]
    centred = (poses[0, :3, 3] - centre["mean"][:3]) / centre["std"][:3]
    np.testing.assert_allclose(batch.state[0, :3], centred, atol=1e-4)
    assert windows._trained == goals * len(ticks[0])  # whole episodes are validated
    raw = {
        "images": np.zeros((180, 320, 3), np.uint8),
        "task": "x",
        "state": [0, 0, 0, 1, 0, 0, 0, 1, 0, 1],
    }
    for colour, ids in zip(("red", "green", "blue"), windows._prompts[:goals], strict=True):
        asked = windows._processor.preprocess({**raw, "task": f"reach the {colour} cube"})
        assert ids == tuple(asked.text_ids[0].tolist())
    prompt = windows._processor.preprocess(raw).prompt
    assert "third-person perspective looking towards the agent" in prompt
    assert "wrist" not in prompt


def test_each_window_shows_its_own_picture(post, demos):
    """Windows are made with black pictures, and the recorded ones are decoded only when they are
    encoded.
    """
    with Dataset(demos) as data:
        shown = [
            episode.frames(TOP, np.flatnonzero(episode[LABELLED]).tolist()) for episode in data
        ]
    pictures, of_episode = (
        np.concatenate(shown),
        np.repeat(np.arange(len(shown)), [len(frames) for frames in shown]),
    )
    firsts = np.arange(len(pictures)) * 3  # each has a window for each of three goals
    latents = post.windows._pick(firsts, np.zeros(len(firsts), bool)).latents
    config, weights = post.checkpoint.vae_config, post.checkpoint.vae_weights
    decoded = WanVae(config, weights, torch.device("cpu"), torch.float32, decoder=True).decode(
        latents
    )[:, :, 0]
    recorded = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    recorded = torch.nn.functional.interpolate(recorded, decoded.shape[-2:], mode="area")
    apart = (decoded[:, None] - recorded[None]).abs().mean((2, 3, 4))
    assert np.array_equal(of_episode[apart.argmin(1)], of_episode)
    assert apart.diagonal().max() < 0.3  # a black picture is 0.9 from these
    assert len(latents.flatten(1).unique(dim=0)) == len(pictures)


def test_answers_lead_to_the_cube_that_the_sentence_names():
    with DemoCollector(UR5E_DEMOS) as collector:
        robot = collector._scene(False, 0.04).robot
        robot.reset(4)
        request = collector.request(robot.observation())
        assert request.q_rad is not None
        assert request.T_base_cosmos is not None
        np.testing.assert_allclose(
            request.T_base_cosmos, site_poses(robot, request.q_rad[None])[0], atol=1e-9
        )
        tcp, site = robot.data.site("tcp").xpos, request.T_base_cosmos
        offset = site[:3, :3].T @ (tcp - site[:3, 3])
        for goal, cube in enumerate(("cube_red", "cube_green", "cube_blue")):
            chunk = collector.expert.expert.infer(replace(request, instruction=plain(goal)))
            end = decode_pose_trajectory(denormalize_chunk(chunk.action, UR)[:, :9], site)[-1]
            way = (robot.data.body(cube).xpos - tcp) * [1, 1, 0]
            moved = end[:3, 3] + end[:3, :3] @ offset - tcp
            assert moved @ way > 0.9 * np.linalg.norm(moved[:2]) * np.linalg.norm(way), cube


def test_heads_that_no_training_filled_begin_as_those_of_the_checkpoints_domain(post):
    source, how = Checkpoint.open(TABLE_POLICY), (torch.device("cpu"), torch.float32)
    assert not load_action_head(source, UR.domain_id, *how).w_in.any()
    head = load_action_head(source, get_embodiment("droid").domain_id, *how)
    assert torch.equal(post.policy.w_in, head.w_in)
    assert torch.equal(post.policy.w_out, head.w_out)


def test_the_exported_checkpoint_says_what_it_is(post):
    made, source = Checkpoint.open(post.export(post.policy)), Checkpoint.open(TABLE_POLICY)
    assert made.metadata["domain"] == "robomind-ur"
    assert made.policy_frames == (1,)
    assert source.language is not None
    assert made.language is None  # those were the words of another training
    assert made.novelty_rmse is None
    assert "label" not in made.metadata
    card = (made.root / "README.md").read_text()
    assert "Post-trained for robomind-ur" in card
    assert "2 episodes, 18 frames" in card
    assert re.search(r"\| cost \| .* of training, without encoding the pictures: .* cores", card)
    assert (made.root / "SOURCE.md").read_text() == (source.root / "README.md").read_text()
    assert load_action_head(made, UR.domain_id, torch.device("cpu"), torch.float32).w_in.any()


def test_a_dataset_that_states_no_embodiment_is_known_by_its_robot(tmp_path):
    """A UR5e's poses are not of the frame that droid's rows move; who says that they are is only
    warned.
    """
    root = still_arm(tmp_path / "foreign", 15)
    info = root / "meta/info.json"
    told = json.loads(info.read_text())
    del told["features"][ACTION]["info"]
    info.write_text(json.dumps(told | {"robot_type": "ur5e"}))
    said = (
        r"dataset is of robot 'ur5e', whose rows are those of 'robomind-ur' and not of "
        r"'droid_lerobot'"
    )
    with pytest.raises(
        ConfigError, match=said + r"; give --embodiment robomind-ur, or droid_lerobot if"
    ):
        PostTraining(TABLE_POLICY, root, tmp_path / "default", PostConfig(policy_frames=1))
    with pytest.warns(UserWarning, match=said):
        PostTraining(
            TABLE_POLICY, root, tmp_path / "told", PostConfig(embodiment="droid", policy_frames=1)
        )
    for kind in ("panda", "somebody's"):
        info.write_text(json.dumps(told | {"robot_type": kind}))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the dataset is of robot")
            PostTraining(TABLE_POLICY, root, tmp_path / kind, PostConfig(policy_frames=1))


def test_what_does_not_fit_is_refused_with_its_remedy(demos, post, tmp_path, capsys):
    said = (
        "recorded for embodiment 'robomind-ur' and not for 'droid_lerobot'.*--embodiment "
        "robomind-ur"
    )
    with pytest.raises(ConfigError, match=said):
        PostTraining(TABLE_POLICY, demos, tmp_path / "no", PostConfig(policy_frames=1))
    for frames in (6, 21):
        with pytest.raises(
            ConfigError, match=rf"policy_frames {frames}: .* at most rows \+ 1 = 17"
        ):
            windows_of(demos, tmp_path / f"frames-{frames}", policy_frames=frames)
    with pytest.raises(ConfigError, match="has 15 frames a second, and 'robomind-ur' 10 rows"):
        windows_of(still_arm(tmp_path / "fast", 15), tmp_path / "rate")
    tuned = str(post.export(post.policy))
    for arguments, said in (
        (["--robot", "ur5e"], "not 'robomind-ur'.*docs/post_training.md"),
        (
            ["--robot", "ur5e", "--model", str(TABLE_POLICY)],
            "its domain is 'droid_lerobot', not 'robomind-ur'; pass "
            "embodiment='droid_lerobot'.*docs",
        ),
        (
            ["--robot", "panda", "--model", tuned],
            "its domain is 'robomind-ur', not 'droid_lerobot'",
        ),
    ):
        assert main(["rollout", "--task", "reach", "--duration", "1", *arguments]) > 0
        assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_evaluate_runs_the_new_checkpoint_with_its_controls(post):
    """A picture of the top camera, rows of its domain, and blank pictures; the source's
    checkpoint ends the evaluation.
    """
    options = {
        "robot": "ur5e",
        "tasks": "reach",
        "seeds": 1,
        "conditions": "plain,blank,swapped,shuffled",
        "duration": 0.2,
    }
    settings = make_settings({**options, "model": str(post.export(post.policy)), "num_steps": 1})
    simulator = AssignmentRunner(settings)
    records = [simulator.run(assignment) for assignment in settings.plan()]
    assert {(record["success"], record["counters"]["chunks"] > 0) for record in records} == {
        (False, True)
    }
    assert all("borrowed_domain" not in record for record in records)
    plain, blank = (record["path"] for record in records[:2])
    assert plain != blank  # it looks at the picture
    simulator.close()
    other = AssignmentRunner(make_settings({**options, "model": str(TABLE_POLICY)}))
    with pytest.raises(Cosmos3Error, match="its domain is 'droid_lerobot', not 'robomind-ur'"):
        other.run(settings.plan()[0])


def still_arm(root: Path, fps: int) -> Path:
    """An arm that does not move, at a rate of one's choice."""
    spec = rollout_spec("robomind-ur", UR5E)
    spec = DatasetSpec(fps, spec.features, spec.robot_type)
    columns = {
        key: np.zeros((18, *feature.shape), feature.dtype).squeeze()
        for key, feature in spec.columns.items()
    }
    columns[EE_POSE][:, 6] = 1
    with DatasetWriter(root, spec) as writer:
        writer.add_episode(columns, {TOP: np.zeros((18, 180, 320, 3), np.uint8)}, "wait")
    return root


def test_demos_of_another_robot_are_checked_before_anything_is_recorded(tmp_path):
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"robot": "dual_panda"}, "demonstrations are of one arm, and robot 'dual_panda' has 2"),
        ({"ticks": 1}, "--ticks"),
        ({"robot": "ur6"}, "ur6"),
    )
    for options, said in wrong:
        with pytest.raises(Cosmos3Error, match=said):
            Demos(tmp_path / "set", episodes=1, table=DemoConfig(**options)).run()
    assert list(tmp_path.iterdir()) == []
    assert DemoConfig(robot="ur5e", tasks=("reach",)).goals == (0, 1, 2)


@pytest.mark.slow
def test_the_page_in_a_tiny_form(tmp_path, monkeypatch):
    """docs/post_training.md with two episodes and three steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/table_policy").symlink_to(TABLE_POLICY)
    page = (Path(__file__).parents[2] / "docs/post_training.md").read_text()
    lines = [line for line in page.split("```sh\n")[1].split("```")[0].splitlines() if line]
    assert len(lines) == 4
    tiny = {
        "--episodes": "2",
        "--ticks": "9",
        "--workers": "1",
        "--steps": "3",
        "--batch": "2",
        "--validation-fraction": "0.5",
    }
    for line in lines:
        _, *words = shlex.split(line)
        words = [tiny.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        words += ["--duration", "1"] if words[0] == "rollout" else []
        assert main(words) == (1 if words[0] == "rollout" else 0)  # which reaches nothing
    assert len(json.loads((tmp_path / "green.json").read_text())["episodes"]) == 2
    assert (tmp_path / "tuned/validation.jsonl").exists()
