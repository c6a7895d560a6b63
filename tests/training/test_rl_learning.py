"""What chunks are tried, how they are rated, and what the policy learns from it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mujoco")

import torch

from helpers.reinforcement import InlinePool, config, settings_of
from strands_cosmos3.actions.controller_rows import (
    controller_rows,
    decode_rows,
    encode_actions,
    normalize_actions,
)
from strands_cosmos3.actions.decode import decode_limbs
from strands_cosmos3.actions.stats import normalize_quantile
from strands_cosmos3.backends.engine_backend import EngineBackend
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.denoising import starting_noise
from strands_cosmos3.engine.sampler import UniPC, unipc_coefficients
from strands_cosmos3.engine.weights import HEAD_KEYS
from strands_cosmos3.errors import ConfigError, InputError, NonFiniteError
from strands_cosmos3.evaluation.plan import Condition
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.resources import write_folder
from strands_cosmos3.training.adapters import adapter_numbers
from strands_cosmos3.training.loop import Loop, read_curve
from strands_cosmos3.training.matching import DataShard, FlowConfig, add_noise, predicted
from strands_cosmos3.training.rl import controller
from strands_cosmos3.training.rl.controller import ReinforcementLearning
from strands_cosmos3.training.rl.exploration import Exploration, group_of
from strands_cosmos3.training.rl.groups import rated
from strands_cosmos3.training.rl.learner import Learner
from strands_cosmos3.training.rl.objectives import errors, weights_of
from strands_cosmos3.training.rl.options import RLConfig
from strands_cosmos3.training.rl.rollout import Episode, RolloutWorker
from strands_cosmos3.training.rl.value import returns_of
from strands_cosmos3.types import ActionChunk

DROID = get_embodiment("droid")
SIGMAS = (0.9998, 0.9091, 0.7143)
"""Of the bundled policy's sampler."""
WORLDS = Path(__file__).parents[1] / "helpers/silent_world.py"


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_the_optimum_of_two_gaussians_is_the_old_velocity_and_twice_the_advantage(sigma, beta):
    """DiffusionNFT's closed form, against the minimum over smooth functions of x_t; integrals over
    both modes and the noise are sums (Gauss-Hermite).
    """
    nodes, mass = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(80))
    means, width = torch.tensor([-1.0, 1.0], dtype=torch.float64), 0.3
    x0 = (means[:, None, None] + width * nodes[:, None]).expand(2, 80, 80).reshape(2, -1)
    eps = nodes.expand(2, 80, 80).reshape(2, -1)
    mass = (mass[:, None] * mass).expand(2, 80, 80).reshape(2, -1) / mass.sum() ** 2
    r = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None].expand_as(x0)
    x = (1 - sigma) * x0 + sigma * eps
    of_mode = torch.distributions.Normal(
        (1 - sigma) * means, ((1 - sigma) ** 2 * width**2 + sigma**2) ** 0.5
    )
    posterior = torch.softmax(of_mode.log_prob(x[..., None]), -1)  # of the modes, given x
    gain = (1 - sigma) * width**2 / ((1 - sigma) ** 2 * width**2 + sigma**2)
    x0_of_mode = means + gain * (x[..., None] - (1 - sigma) * means)
    v_of_mode = (x[..., None] - x0_of_mode) / sigma
    v_old = (posterior * v_of_mode).sum(-1)
    delta = posterior[..., 1] * (v_of_mode[..., 1] - v_old)  # E[(r - 1/2) (v - v_old) | x]
    flat = [t.reshape(-1, 1, 1) for t in (x, v_old, eps - x0)]
    whole = torch.ones(x.numel())
    centres = torch.linspace(float(x.min()), float(x.max()), 40, dtype=torch.float64)
    space = float(centres[1] - centres[0])
    features = torch.exp(-0.5 * ((flat[0] - centres) / (1.5 * space)) ** 2)[:, 0]

    def loss(weights):
        v_theta = flat[1] + (features @ weights)[:, None, None]
        of_each = errors("nft", v_theta, flat[1], flat[2], r.reshape(-1), beta, whole)
        return of_each @ mass.reshape(-1)

    zero = torch.zeros(len(centres), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(zero), zero)
    curvature = torch.autograd.functional.hessian(loss, zero.detach())
    weights = -torch.linalg.lstsq(curvature, slope[:, None], driver="gelsd").solution
    learnt = v_old + (features @ weights).detach().reshape(x.shape)
    optimum = v_old + 2 / beta * delta

    def size(values):
        return float((mass * values**2).sum().sqrt())

    assert size(learnt - optimum) / size(optimum) < 1e-2
    assert size(optimum - v_old) / size(v_old) > 0.05, "there is something to learn"


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_a_chunk_of_one_half_pulls_the_old_policy_nowhere(beta):
    v_old, v = torch.randn(2, 4, 16, 10, dtype=torch.float64)
    v_theta = v_old.clone().requires_grad_()
    rows = torch.full((4,), 16)
    errors("nft", v_theta, v_old, v, torch.full((4,), 0.5), beta, rows).sum().backward()
    assert v_theta.grad.abs().max() < 1e-12
    errors("nft", v_theta, v_old, v, torch.ones(4), beta, rows).sum().backward()
    assert v_theta.grad.abs().max() > 1e-3


@pytest.mark.parametrize("algorithm", ["nft", "rft"])
def test_rows_that_were_not_executed_are_not_learnt(algorithm):
    v_old, v = torch.randn(2, 3, 16, 10)
    v_theta = v_old.clone().requires_grad_()
    of_each = errors(algorithm, v_theta, v_old, v, torch.ones(3), 1.0, torch.tensor([16, 5, 0]))
    of_each.sum().backward()
    assert not v_theta.grad[1, 5:].any()
    assert not v_theta.grad[2].any()
    assert (v_theta.grad[0] != 0).all()
    expected = (v_old - v)[1, :5].square().mean() if algorithm == "rft" else None
    if expected is not None:
        torch.testing.assert_close(of_each[1].detach(), expected)


@pytest.mark.parametrize("algorithm", ["nft", "awfm", "rft"])
def test_errors_are_where_the_velocities_are(algorithm):
    """Tensors without data stand for those of a GPU; the CPU's do not mix with them."""
    v_theta, v_old, v = torch.empty(3, 2, 16, 10, device="meta")
    weight, executed = torch.empty(2, 2, device="meta")
    assert errors(algorithm, v_theta, v_old, v, weight, 1.0, executed).device.type == "meta"


def test_ratings_have_a_mean_of_one_half_in_each_group_that_tells_chunks_apart():
    rewards = np.random.default_rng(0).normal(0, [[1.0], [0.01], [0.0]], (3, 9))
    rewards[0, 3] = 50.0
    rating, tells = rated(rewards)
    assert tells.tolist() == [True, True, False]
    np.testing.assert_allclose(rating.mean(1), 0.5)
    assert 0.0 <= rating.min() <= rating.max() <= 1.0
    assert rating[0].argmax() == 3
    np.testing.assert_allclose(weights_of("awfm", rating).mean(1), 1.0)
    best = weights_of("rft", rating)[:2]
    assert (best.sum(1) == 1).all()
    assert (best.max(1) == 1).all(), "a chunk counts as much as with other algorithms"
    assert (best.argmax(1) == rewards[:2].argmax(1)).all()


def chunk(seed: int = 0) -> ActionChunk:
    rows = np.random.default_rng(seed).normal(0, 0.2, (16, 10))
    rows[:, 9] = 0.9
    return ActionChunk(rows, DROID.action_space("midtrain"), DROID)


def test_a_groups_chunks_are_antithetic_around_the_policys_own():
    how = Exploration(pairs=6, shift_m=0.02, turn_rad=0.05, grasp=0.0)
    own, anchors = chunk(), {"arm": np.eye(4)}
    rows = group_of(own, anchors, how, np.random.default_rng(1))
    assert len(rows) == 13
    assert rows[0] is own.action
    poses = [
        decode_limbs(ActionChunk(each, own.action_space, DROID), anchors).by_limb["arm"]
        for each in rows
    ]
    centre = poses[0].T_base_frame[-1]
    ends = np.array([np.linalg.inv(centre) @ each.T_base_frame[-1] for each in poses[1:]])
    turns = ends[:, :3, :3]
    np.testing.assert_allclose(ends[0::2, :3, 3], -ends[1::2, :3, 3], atol=1e-9)
    np.testing.assert_allclose(turns[0::2] @ turns[1::2], np.tile(np.eye(3), (6, 1, 1)), atol=1e-6)
    assert 0.01 < ends[:, :3, 3].std() < 0.035
    first = np.array([each.T_base_frame[0] - poses[0].T_base_frame[0] for each in poses[1:]])
    assert np.abs(first[:, :3, 3]).max() < 0.002, "an offset grows smoothly from the anchor"


def test_some_pairs_close_or_open_the_fingers_at_another_row():
    how = Exploration(pairs=4, shift_m=0.01, turn_rad=0.0, grasp=1.0)
    rows = group_of(chunk(), {"arm": np.eye(4)}, how, np.random.default_rng(2))
    fingers = np.array([each[:, 9] for each in rows[1:]])
    closing, opening = fingers[0::2], fingers[1::2]
    assert (closing[:, -1] == -1).all()
    assert (opening[:, -1] == 1).all()
    assert len({int(row.argmin()) for row in closing}) > 1


def test_fingers_are_the_policys_own_up_to_the_row_that_they_switch_at():
    how = Exploration(pairs=4, shift_m=0.01, turn_rad=0.0, grasp=0.5)
    own = chunk()
    action = np.array(own.action)
    action[:, 9] = 1.1  # beyond open, as a policy answers
    own = replace(own, action=action)
    rows = group_of(own, {"arm": np.eye(4)}, how, np.random.default_rng(2))
    fingers = np.array([each[:, 9] for each in rows[1:]])
    assert (fingers[:, 0] == 1.1).all()
    assert set(np.unique(fingers)) == {-1.0, 1.0, 1.1}


@pytest.fixture(scope="module")
def explored():
    """The settings, a worker and an episode on another mount of the camera."""
    settings = settings_of(str(embedded_checkpoint("droid", "panda", "pick")))
    worker = RolloutWorker(settings)
    yield settings, worker, worker.explore(settings.plan()[0], Exploration(2, 0.02, 0.03, 0.5), 1)
    worker.close()


WHOLE = Exploration(2, 0.02, 0.03, 0.5, whole_episodes=True)


@pytest.fixture(scope="module")
def whole_episode(explored):
    settings, worker, _ = explored
    return worker.explore(settings.plan()[0], WHOLE, 3)


def first_answer(settings, worker) -> np.ndarray:
    """The policy's own rows at the start of an episode."""
    (assignment, *_) = settings.plan()
    policy, branched, _ = worker.begin(assignment)
    policy.plan(worker.session.observation(), assignment.policy_instruction)
    return branched.chunk.action.astype(np.float32)


def without_difference(episode: Episode) -> Episode:
    groups = [replace(g, rewards=np.zeros(len(g.rewards))) for g in episode.groups]
    return replace(episode, groups=groups)


def learner(settings, values: Path = Path("values"), **options) -> Learner:
    checkpoint = Checkpoint.open(locate(settings.policy.model))
    config = RLConfig(**{"pairs": 2, "steps": 2, "batch": 5, **options})
    return Learner(checkpoint, DROID, config, values)


def test_an_episode_is_the_same_again(explored):
    settings, worker, episode = explored
    again = worker.explore(settings.plan()[0], Exploration(2, 0.02, 0.03, 0.5), 1)
    for ours, theirs in zip(again.groups, episode.groups, strict=True):
        np.testing.assert_array_equal(ours.rows, theirs.rows)
        np.testing.assert_array_equal(ours.rewards, theirs.rewards)
        np.testing.assert_array_equal(ours.latents, theirs.latents)
    group = episode.groups[0]
    assert group.rows.shape == (5, 16, 10)
    assert (group.latents != group.plain).any()
    assert np.ptp(group.rewards) > 0
    assert (group.executed == 16).all()


def test_a_run_whose_pictures_are_plain_is_not_held_to_its_start(explored):
    settings, worker, _ = explored
    (assignment, *_) = replace(settings, conditions=(Condition(),)).plan()
    episode = worker.explore(assignment, Exploration(1, 0.02, 0.03, 0.0), 1)
    assert all(group.plain.size == 0 for group in episode.groups)
    learn = learner(settings, pairs=1)
    learn.take(episode.groups, {}, 0)
    assert "kept_deviation" not in learn.loss(0)[1]


def test_windows_are_what_the_engine_read(explored):
    """The sampler on the training's velocities answers the chunk that the engine answered."""
    settings, _, episode = explored
    learn, group = learner(settings), episode.groups[0]
    learn.take(episode.groups, {}, 0)
    batch = learn._batch(np.array([0]), np.array([0]), plain=False)
    schedule = learn._checkpoint.scheduler.schedule(3, 5.0, False)
    seed, config = settings.plan()[0].noise_seed(None), learn.policy.transformer.config
    rows = starting_noise(None, seed, torch.zeros(17, config.action_dim), "noise")[None]
    noised = add_noise(batch, config, FlowConfig(), torch.Generator(), torch.ones(1))
    vision, given = noised.streams
    free = torch.zeros_like(given.tokens)
    free[:, 1:, :10] = 1
    action = UniPC(torch.where(free > 0, rows, given.tokens), unipc_coefficients(schedule, torch))
    with torch.no_grad():
        for sigma in learn.sigmas:
            streams = vision, replace(given, tokens=action.sample)
            state = replace(noised, streams=streams, sigma=sigma[None])
            action.step(predicted(learn.policy, batch, state)[1] * free)
    np.testing.assert_allclose(action.sample[0, 1:, :10], group.rows[0], atol=2e-4)


def test_the_first_step_begins_at_the_policy_that_sampled(explored):
    settings, _, episode = explored
    learn = learner(settings, kl_beta=1e-4)
    learn.take(episode.groups, {}, 0)
    assert learn.kept == len(episode.groups)
    loss, metrics = learn.loss(0)
    assert float(metrics["old_deviation"]) == 0
    assert float(metrics["kept_deviation"]) == 0
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in learn.policy.parameters())


def test_an_iteration_without_a_difference_changes_nothing(explored):
    settings, _, episode = explored
    learn = learner(settings)
    learn.take(without_difference(episode).groups, {}, 0)
    assert (learn.kept, learn.dropped) == (0, len(episode.groups))


def learning(settings, folder, **options) -> ReinforcementLearning:
    return ReinforcementLearning(settings, folder, config(**options))


def test_each_process_needs_a_chunk_of_each_step(explored, tmp_path):
    with pytest.raises(ConfigError, match="--batch 5 has no chunk for some of 6 processes"):
        ReinforcementLearning(explored[0], tmp_path, config(), share=DataShard(0, 6))


def test_an_iteration_without_a_difference_moves_no_weights(explored, tmp_path, monkeypatch):
    """With and without one, a state that is saved has the line of its iteration."""
    settings, _, episode = explored
    run, save, lines = learning(settings, tmp_path), Loop.save, []

    def counted(loop):
        lines.append([line["step"] for line in read_curve(tmp_path / "rollouts.jsonl")])
        save(loop)

    monkeypatch.setattr(Loop, "save", counted)
    run._iterate(InlinePool(episode))
    before = {name: p.detach().clone() for name, p in run.learner.policy.named_parameters()}
    run._iterate(InlinePool(without_difference(episode)))
    assert lines == [[2], [2, 4]]
    assert [line["unusable"] for line in read_curve(tmp_path / "rollouts.jsonl")] == [0, 0]
    assert run.iteration == 2
    assert all(torch.equal(p, before[name]) for name, p in run.learner.policy.named_parameters())
    assert learning(settings, tmp_path).iteration == 2


def test_an_answer_that_cannot_be_used_ends_its_episode_only(explored, tmp_path, monkeypatch):
    settings, worker, episode = explored
    own, answers = EngineBackend.infer, []

    def infer(self, request):
        answers.append(own(self, request))
        if len(answers) > usable:
            raise NonFiniteError("row 3 is not finite")
        return answers[-1]

    monkeypatch.setattr(EngineBackend, "infer", infer)
    for usable in (1, 0):
        answers.clear()
        ended = worker.explore(settings.plan()[0], Exploration(2, 0.02, 0.03, 0.5), 1)
        assert (len(ended.groups), ended.success, ended.unusable) == (usable, False, True)
    run = learning(settings, tmp_path)
    run._iterate(InlinePool(ended))  # without a group
    (line,) = read_curve(tmp_path / "rollouts.jsonl")
    assert (line["unusable"], line["groups"], line["gain"]) == (1, 0, 0)
    run._iterate(InlinePool(without_difference(episode)))
    assert read_curve(tmp_path / "rollouts.jsonl")[-1]["unusable"] == 0


def test_a_run_whose_state_is_damaged_goes_on_from_the_one_before(explored, tmp_path):
    settings, pool = explored[0], InlinePool(without_difference(explored[2]))
    run = learning(settings, tmp_path, staleness=1)
    for _ in range(2):
        run._iterate(pool)
    state = tmp_path / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged"):
        again = learning(settings, tmp_path, staleness=1)
    assert again.iteration == 1
    again._iterate(pool)  # sampled with the weights before
    assert again.iteration == 2


def test_a_run_belongs_to_its_robot_and_its_worlds_source(explored, tmp_path):
    source = tmp_path / "own_world.py"
    source.write_text(WORLDS.read_text())
    own = replace(explored[0], world=f"{source}:SilentTable")
    learning(own, tmp_path / "run")
    with pytest.raises(ConfigError, match="robot"):
        learning(replace(own, robot="fr3"), tmp_path / "run")
    source.write_text(WORLDS.read_text() + "# another")
    with pytest.raises(ConfigError, match="world_sha256"):
        learning(own, tmp_path / "run")


def test_a_checkpoint_that_does_not_fit_into_memory_is_refused(explored, tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "available_bytes", lambda device: 10**6)
    with pytest.raises(ConfigError, match=r"takes .* and 0.00 GiB are free; train --lora-rank"):
        learning(explored[0], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_adapters_take_a_fraction_of_the_memory(explored, tmp_path):
    whole, adapters = (
        learning(explored[0], tmp_path / str(rank), lora_rank=rank) for rank in (0, 4)
    )
    assert adapters.memory_bytes < 0.4 * whole.memory_bytes
    learn = adapters.learner
    counted = sum(p.numel() for name, p in learn.policy.named_parameters() if ".lora_" in name)
    shapes = adapters.checkpoint.weights.shapes
    assert adapter_numbers(shapes, 4, RLConfig().lora_targets) == counted
    frozen = {name: p for name, p in learn.policy.named_parameters() if not p.requires_grad}
    start = dict(learn._start.named_parameters())
    assert len(frozen) > 20
    assert all(start[name] is p for name, p in frozen.items())


def test_adapters_and_action_heads_are_learnt_and_sent(explored, tmp_path):
    """What a worker answers with the adapters that it was sent is what the new checkpoint does."""
    settings, worker, episode = explored
    run = learning(settings, tmp_path, lora_rank=4, lr=1e-2, average=0.0)
    before = {name: p.detach().clone() for name, p in run.learner.policy.named_parameters()}
    run._iterate(InlinePool(episode))
    after = dict(run.learner.policy.named_parameters())
    moved = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert any(".lora_B." in name for name in moved)
    assert "w_out" in moved
    assert all(".lora_" in n or n in HEAD_KEYS or "modality" in n for n in moved)
    sent = {name: tensor.numpy() for name, tensor in run._loop.average().items()}
    assert not any("base_layer" in name for name in sent)
    own = first_answer(settings, worker)
    for _ in range(2):  # added to the checkpoint's weights each time
        worker.take_weights(sent)
    adapted = first_answer(settings, worker)
    assert np.abs(adapted - own).max() > 0.01
    policy = run.learner.policy_of(run._loop.average())
    write_folder(tmp_path / "checkpoint", partial(run._fill, policy))
    of_files = RolloutWorker(settings_of(str(tmp_path / "checkpoint")))
    theirs = first_answer(settings, of_files)
    of_files.close()
    rounded = np.abs(adapted - theirs).max()  # files have fewer digits
    assert rounded < 0.05 * np.abs(adapted - own).max()
    base = {name: p.numpy() for name, p in before.items() if ".lora_" not in name}
    worker.take_weights({name.replace(".base_layer.", "."): w for name, w in base.items()})
    np.testing.assert_array_equal(first_answer(settings, worker), own)


def test_states_without_other_pictures_are_left_out_of_what_is_kept(explored):
    settings, _, episode = explored
    groups = [replace(episode.groups[0], plain=np.empty(0, np.float32)), *episode.groups[1:]]
    learn = learner(settings)
    learn.take(groups, {}, 0)
    assert all("kept_deviation" in learn.loss(step)[1] for step in range(2))


def test_only_numbers_of_the_chunk_are_kept(explored):
    _, _, episode = explored
    learn = learner(explored[0])
    learn.take(episode.groups, {}, 0)
    with torch.no_grad():
        learn.policy.b_out[10:] += 1.0  # columns that pad the rows
    assert float(learn.loss(0)[1]["kept_deviation"]) == 0
    with torch.no_grad():
        learn.policy.b_out[:10] += 1.0
    assert float(learn.loss(0)[1]["kept_deviation"]) == pytest.approx(1.0, abs=1e-3)


def test_new_weights_reach_a_running_engine(explored):
    settings, worker, episode = explored
    learn = learner(settings)
    weights = {name: p.detach().numpy() for name, p in learn.policy.named_parameters()}
    before = first_answer(settings, worker)
    np.testing.assert_array_equal(before, episode.groups[0].rows[0])
    worker.take_weights({**weights, "b_out": weights["b_out"] + 0.1})
    assert np.abs(first_answer(settings, worker) - before).max() > 0.01
    worker.take_weights(weights)
    np.testing.assert_array_equal(first_answer(settings, worker), before)
    for wrong in ({"b_out": weights["b_out"][:-1]}, {"w_up": weights["b_out"]}):
        with pytest.raises(InputError, match="weights of the same checkpoint"):
            worker.take_weights({**weights, **wrong})


@pytest.mark.parametrize(
    ("world", "tasks"), [("SilentTable", "pick"), ("TableOfSilentPlace", "pick,place")]
)
def test_a_world_that_says_not_how_far_a_task_has_come_gets_whole_episodes(world, tasks):
    model = str(embedded_checkpoint("droid", "panda", "pick"))
    options = {"model": model, "tasks": tasks, "seeds": 1, "duration": 1.5}
    settings = make_settings(options | {"world": f"{WORLDS}:{world}"})
    worker = RolloutWorker(settings)
    episode = worker.explore(settings.plan()[0], Exploration(2, 0.02, 0.03, 0.5), 1)
    worker.close()
    assert len(episode.groups) > 1
    assert all(group.rows.shape == (1, 16, 10) for group in episode.groups)
    assert all(group.rewards.shape == group.executed.shape == (1,) for group in episode.groups)


def test_a_whole_episode_is_run_without_returning_to_a_state(explored, whole_episode, monkeypatch):
    settings, worker, _ = explored

    def never(*_):
        raise AssertionError("this session has no states")

    monkeypatch.setattr(type(worker.session), "save", never)
    monkeypatch.setattr(type(worker.session), "restore", never)
    again, groups = worker.explore(settings.plan()[0], WHOLE, 3), whole_episode.groups
    for ours, theirs in zip(groups, again.groups, strict=True):
        np.testing.assert_array_equal(ours.rows, theirs.rows)
        np.testing.assert_array_equal(ours.rewards, theirs.rewards)
    assert len({group.latents.tobytes() for group in groups}) == len(groups)


def test_a_chunk_is_worth_what_follows_it():
    np.testing.assert_allclose(returns_of([1.0, 0.0, 2.0]), [1 + 0.81 * 2, 1.8, 2.0])
    assert returns_of([]) == []


def test_the_value_lowers_the_variance_of_advantages(explored, tmp_path):
    """States differ by more than the two chunks that are tried in them; what a value has learnt of
    other states tells which chunk it was.
    """
    settings, _, episode = explored
    learn, rng = learner(settings, tmp_path, batch=48), np.random.default_rng(0)
    corner = episode.groups[0].latents[..., :2, :2]  # a picture of few tokens
    group, told = replace(episode.groups[0], latents=corner, **ONE_CHUNK), list[float]()
    for iteration in range(8):
        states = group.state + rng.normal(0, 1, (96, 10)).astype(np.float32)
        better = rng.choice([-1.0, 1.0], 96)
        returns = 2 * states[:, 0] + 0.5 * better
        groups = [
            replace(group, rewards=np.array([worth]), state=state)
            for worth, state in zip(returns, states, strict=True)
        ]
        learn.take(groups, {}, iteration)
        told.append(np.corrcoef(learn._weight.numpy(), better)[0, 1])
        if iteration == 0:
            assert learn.figures["value_explains"] == pytest.approx(0, abs=1e-9)
    assert learn.figures["value_explains"] > 0.6
    assert told[-1] > max(2 * told[0], 0.5)
    assert learn._weight.mean() == pytest.approx(0.5)
    assert learn.kept == 96


ONE_CHUNK = {"rows": np.zeros((1, 16, 10), np.float32), "executed": np.array([16])}


def test_whole_episodes_that_are_resumed_learn_the_same(explored, whole_episode, tmp_path):
    one, two = (
        learning(explored[0], tmp_path / name, whole_episodes=True, steps=1, batch=2)
        for name in ("one", "two")
    )
    for iteration in range(3):
        if iteration == 2:  # killed after its values were written
            two.learner.take(whole_episode.groups, {}, iteration)
            two = learning(explored[0], two.folder, whole_episodes=True, steps=1, batch=2)
        for run in (one, two):
            run._iterate(InlinePool(whole_episode))
    ours, theirs = (dict(run.learner.policy.named_parameters()) for run in (one, two))
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())
    assert len(list((tmp_path / "one/values").iterdir())) == 2


def test_whole_episodes_and_a_condition_without_other_pictures_are_announced(explored, tmp_path):
    settings, _, episode = explored
    bare = {"rewards": np.zeros(1), "plain": np.empty(0, np.float32), **ONE_CHUNK}
    groups = [replace(g, **bare) for g in episode.groups]
    run = learning(settings, tmp_path)
    with (
        pytest.warns(UserWarning, match="whole episodes are compared"),
        pytest.warns(UserWarning, match="--keep holds nothing under mount=4"),
    ):
        run._iterate(InlinePool(replace(episode, groups=groups)))


@pytest.mark.parametrize("quantiles", [None, (np.full(10, -2.0), np.full(10, 2.0))])
def test_chunks_in_a_controllers_units_are_displaced_without_an_arm(quantiles):
    libero, rng = get_embodiment("libero"), np.random.default_rng(0)
    actions = np.column_stack([rng.normal(0, 0.2, (16, 6)), np.full(16, -1.0)])
    rows, space = normalize_actions(actions), libero.action_space("midtrain")
    if quantiles is not None:
        rows = normalize_quantile(encode_actions(actions), *quantiles)
    own = ActionChunk(rows, space, libero, quantiles=quantiles)
    how = Exploration(pairs=2, shift_m=0.02, turn_rad=0.03, grasp=0.0)
    tried = group_of(own, {}, how, np.random.default_rng(1))
    assert len(tried) == 5
    assert tried[0] is own.action
    off = [decode_rows(controller_rows(replace(own, action=each))) - actions for each in tried[1:]]
    np.testing.assert_allclose(off[0], -off[1], atol=1e-9)
    assert 0.005 < np.abs(off[0][:, :3].sum(0)).max() * 0.05 < 0.06
    assert 0.005 < np.abs(off[0][:, 3:6].sum(0)).max() * 0.5 < 0.1
    np.testing.assert_allclose([each[:, 6] for each in off], 0, atol=1e-9)
