"""The batched forward is the engine's, and the loss means what the sampler does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.parity import agree, in_float64, share
from helpers.training_data import latents_like, random_policy
from recipes.random_checkpoint import FactorySizes, transformer_config
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.sampler import SchedulerConfig, UniPC, unipc_coefficients
from strands_cosmos3.engine.sequence import (
    ACTION,
    SequenceLayout,
    generation_positions,
    patchify,
    text_positions,
)
from strands_cosmos3.engine.text_cache import side_by_side
from strands_cosmos3.engine.transformer import rope_tables
from strands_cosmos3.training import matching
from strands_cosmos3.training.flow import read_prompts, velocity
from strands_cosmos3.training.matching import (
    SINGLE_PROCESS,
    DataShard,
    FlowConfig,
    add_noise,
    discretize_timestep,
    end_point_error,
    flow_loss,
    sample_sigma,
)
from strands_cosmos3.training.windows import FORWARD, INVERSE, POLICY, Batch

PROMPTS = ((5, 9, 2), (7, 1, 4, 30, 8, 2, 11), (3,))


def batch_of(n: int = 6, frames: int = 2, mode: torch.Tensor | None = None) -> Batch:
    rng = torch.Generator().manual_seed(4)
    prompt = torch.arange(n) % len(PROMPTS)
    state, rows = torch.randn(n, 10, generator=rng), torch.randn(n, 16, 10, generator=rng)
    return Batch(latents_like(n, frames), state, rows, PROMPTS, prompt, mode)


@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_the_batched_velocity_is_the_engines(kind):
    """As near to the engine's in float64 as helpers/parity.py says."""
    config = TransformerConfig.from_dict(
        transformer_config(FactorySizes(64, 3, 4, 2, 32, 96, 16), kind, 64)
    )
    policy = random_policy(config, seed=3)
    with torch.no_grad():
        policy.w_out.normal_()
        policy.transformer.proj_out.weight.normal_()
    layout = SequenceLayout((2, 8, 9), 2, 17, (0,), 1, 10, 15.0, 0)
    V, N, first = layout.vision_tokens, layout.tokens, 20
    generator = torch.Generator().manual_seed(0)
    vision, action = (
        torch.randn(4, V, config.patch_dim, generator=generator),
        torch.randn(4, 17, 64, generator=generator),
    )
    noisy, told = (
        (torch.rand(4, N, 1, generator=generator) > 0.4).float(),
        torch.tensor([999.0, 3.0, 500.0, 0.0]),
    )
    which = torch.tensor([1, 0, 2, 1])
    memory = read_prompts(policy.transformer, PROMPTS).select(which)
    of_vision, of_action = velocity(policy, (vision, action), told, noisy, layout, memory, first)
    exact = in_float64(policy)
    with torch.inference_mode():
        for i, prompt in enumerate(which.tolist()):
            ids = torch.tensor(PROMPTS[prompt])
            tables = [
                rope_tables(positions, config, ids.device, torch.float32)
                for positions in (
                    text_positions(len(ids)),
                    generation_positions(layout, config, len(ids)),
                )
            ]

            def velocities(of, dtype, i=i, ids=ids, tables=tables):
                of_text, of_rest = ([part.to(dtype) for part in table] for table in tables)
                return of.transformer.velocity(
                    (vision[i].to(dtype), action[i].to(dtype)),
                    of.transformer.time_embedder(told[i : i + 1])[0].to(dtype),
                    noisy[i].to(dtype),
                    tuple(part[None] for part in of_rest),
                    side_by_side([of.transformer.text(ids, tuple(of_text))]),
                    of.head,
                    (slice(first, V), slice(0, N - V)),
                )

            expected = velocities(exact, torch.float64), velocities(policy, torch.float32)
            for found, wanted, peer in zip((of_vision, of_action), *expected, strict=True):
                assert share(found[i], wanted[0], peer[0]) <= 1


def test_a_gradient_reaches_every_module_of_the_engine(policy):
    loss, _ = flow_loss(policy, batch_of(), FlowConfig(), torch.Generator().manual_seed(0))
    loss.backward()
    silent = [
        name
        for name, p in policy.named_parameters()
        if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert not silent


def test_the_target_takes_the_engines_sampler_to_the_clean_rows(policy):
    """A model that answers the target exactly is sampled, with the engine's own coefficients, to
    what was clean.
    """
    batch = batch_of(frames=1)
    steps = unipc_coefficients(SchedulerConfig(False).schedule(4, 5.0, False), torch)
    noised = add_noise(
        batch,
        policy.transformer.config,
        FlowConfig(pure_noise_fraction=1.0),
        torch.Generator().manual_seed(1),
    )
    rows = noised.streams[ACTION]
    state = UniPC(rows.tokens.clone(), steps)
    for _ in steps:
        state.step(rows.target)
    # the schedule starts at 0.9998
    torch.testing.assert_close(state.sample[:, 1:, :10], batch.rows, rtol=0, atol=5e-3)


def test_what_is_told_is_what_the_sampler_tells():
    schedule = SchedulerConfig(False).schedule(4, 5.0, False)
    assert discretize_timestep(torch.tensor(schedule.sigmas[:-1])).int().tolist() == list(
        schedule.timesteps
    )
    assert discretize_timestep(torch.ones(1)).item() == 999


def test_noise_levels_are_shifted_and_half_of_them_pure():
    sigma = sample_sigma(20_000, FlowConfig(), torch.Generator().manual_seed(0))
    assert abs((sigma == 1).float().mean().item() - 0.5) < 0.02
    rest = sigma[sigma < 1]
    assert abs(rest.median().item() - 5 / 6) < 0.02  # shift 5 sends one half to five sixths
    assert 0 < rest.min().item() < 0.02


def test_inverse_dynamics_cost_less_and_learn_the_same(policy, monkeypatch):
    """The last layer computes no frames for them, of whose video nothing is asked."""
    batch = batch_of(
        frames=3, mode=torch.tensor([POLICY, INVERSE, FORWARD, POLICY, FORWARD, INVERSE])
    )
    asked = []

    def counting(*args):
        asked.append((len(args[2]), args[-1]))
        return velocity(*args)

    def gradients(together: bool) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(matching, "velocity", counting)
            if together:
                patch.setattr(
                    matching,
                    "_by_first_token",
                    lambda batch, share, first, rows: [(torch.arange(6), first)],
                )
            loss, _ = flow_loss(
                policy, batch, FlowConfig(end_points=0.5), torch.Generator().manual_seed(0)
            )
        return [loss, *torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)]

    for apart, together in zip(gradients(together=False), gradients(together=True), strict=True):
        assert (apart is None) == (together is None)
        assert agree(apart, together)
    V = 3 * 4 * 5
    assert asked == [(4, V // 3), (2, V), (6, V // 3)]


def test_each_mode_is_given_what_the_engine_gives_it(policy):
    mode = torch.tensor([POLICY, FORWARD, INVERSE, POLICY, FORWARD, INVERSE])
    batch = batch_of(frames=3, mode=mode)
    noised = add_noise(
        batch, policy.transformer.config, FlowConfig(), torch.Generator().manual_seed(0)
    )
    V, per_frame = noised.layout.vision_tokens, noised.layout.vision_tokens // 3
    told = noised.noisy[..., 0]
    assert not told[:, :per_frame].any()  # frame 0
    assert not told[:, V].any()  # the state
    assert told[mode == POLICY][:, per_frame:V].all()
    assert told[mode == POLICY][:, V + 1 :].all()
    assert not told[mode == FORWARD][:, V:].any()
    assert told[mode == FORWARD][:, per_frame:V].all()
    assert not told[mode == INVERSE][:, :V].any()
    assert told[mode == INVERSE][:, V + 1 :].all()
    action = noised.streams[ACTION].tokens
    chunk = action[:, 1:, :10]
    torch.testing.assert_close(chunk[mode == FORWARD], batch.rows[mode == FORWARD])
    assert not torch.isclose(chunk[mode == POLICY], batch.rows[mode == POLICY]).all()
    assert not action[..., 10:].any()


def test_dynamics_start_at_the_frame_and_a_policy_at_noise(policy):
    mode = torch.tensor([POLICY, FORWARD, INVERSE, POLICY, FORWARD, INVERSE])
    batch, config = batch_of(frames=3, mode=mode), policy.transformer.config
    how = FlowConfig(dynamics_from_frame=False), FlowConfig(dynamics_from_frame=True)
    of_noise, noised = (
        add_noise(batch, config, one, torch.Generator().manual_seed(0)) for one in how
    )
    pairs = [(noised.sigma, of_noise.sigma)]
    for one, other in zip(noised.streams, of_noise.streams, strict=True):
        pairs += [(one.tokens, other.tokens), (one.target, other.target)]
    assert all(torch.equal(one[mode == POLICY], other[mode == POLICY]) for one, other in pairs)
    vision, action = noised.streams
    assert (noised.sigma[mode != POLICY] == 1).all()
    clean = torch.stack([patchify(latent, 2) for latent in batch.latents])
    V = noised.layout.vision_tokens
    first = clean[:, : V // 3].repeat(1, 3, 1)
    torch.testing.assert_close(vision.tokens[mode == FORWARD], first[mode == FORWARD])
    torch.testing.assert_close(vision.target[mode == FORWARD], (first - clean)[mode == FORWARD])
    torch.testing.assert_close(vision.tokens[mode == INVERSE], clean[mode == INVERSE])
    assert not action.tokens[mode == INVERSE][:, 1:].any()
    torch.testing.assert_close(
        action.target[mode == INVERSE][:, 1:, :10], -batch.rows[mode == INVERSE]
    )


def test_a_drift_weighs_more_than_errors_that_cancel():
    """Of where rows end: the sum of their translations' errors, of which nothing else counts."""
    drift, cancels, turned = torch.zeros(3, 1, 16, 10)
    drift[..., 0], turned[..., 3:] = 0.3, 5.0
    cancels[:, ::2, 1], cancels[:, 1::2, 1] = 0.3, -0.3
    assert end_point_error(drift).item() == pytest.approx((16 * 0.3) ** 2 / 3 / 16)
    assert end_point_error(cancels).item() == pytest.approx(0)
    assert end_point_error(turned).item() == 0


def test_where_inverse_dynamics_end_is_in_the_loss_and_shared_by_processes(policy):
    batch = batch_of(
        frames=3, mode=torch.tensor([POLICY, FORWARD, INVERSE, POLICY, INVERSE, INVERSE])
    )
    how = FlowConfig(dynamics_from_frame=True, end_points=2.0)

    def loss(config, share=SINGLE_PROCESS):
        return flow_loss(policy, batch, config, torch.Generator().manual_seed(0), share)

    (whole, metrics), (without, _) = loss(how), loss(replace(how, end_points=0.0))
    assert metrics["ends"] > 0
    assert whole.item() - without.item() == pytest.approx(2 * metrics["ends"].item(), rel=1e-4)
    halves = [loss(how, DataShard(rank, 2))[0].item() for rank in (0, 1)]
    assert np.mean(halves) == pytest.approx(whole.item(), rel=1e-5)


def test_a_policys_video_and_forward_dynamics_have_weights_of_their_own_and_are_shared_by_processes(
    policy,
):
    batch = batch_of(
        frames=3, mode=torch.tensor([POLICY, FORWARD, INVERSE, POLICY, FORWARD, FORWARD])
    )
    how = FlowConfig(dynamics_from_frame=True, video=0.0, forward=0.0)

    def loss(config, batch=batch, share=SINGLE_PROCESS):
        return flow_loss(policy, batch, config, torch.Generator().manual_seed(0), share)

    (without, _), (whole, metrics) = loss(how), loss(replace(how, video=2.0, forward=5.0))
    assert whole.item() - without.item() == pytest.approx(
        (2 * metrics["video"] + 5 * metrics["forward"]).item(), rel=1e-4
    )
    # windows of the other kind do not change an error
    for name, mode in (("forward", POLICY), ("video", FORWARD)):
        others = (
            batch.latents * torch.where(batch.mode == mode, 3.0, 1.0)[:, None, None, None, None]
        )
        _, changed = loss(how, replace(batch, latents=others))
        assert changed[name].item() == pytest.approx(metrics[name].item(), rel=1e-5)
        other = "video" if name == "forward" else "forward"
        assert changed[other] > 1.5 * metrics[other]
    shares = [
        loss(replace(how, video=2.0, forward=5.0), share=DataShard(rank, 2))[0].item()
        for rank in (0, 1)
    ]
    assert np.mean(shares) == pytest.approx(whole.item(), rel=1e-5)
    _, plain = loss(how, batch_of(frames=3))
    assert "video" in plain
    assert "forward" not in plain


@pytest.mark.parametrize("patch", [1, 2])
def test_errors_of_the_video_are_multiplied_channel_by_channel(patch):
    """A matrix that keeps one channel leaves the squared error of that channel alone, wherever a
    token has it.
    """
    sizes = FactorySizes(64, 2, 4, 2, 32, 96, 16, latent_patch=patch)
    policy = random_policy(TransformerConfig.from_dict(transformer_config(sizes, "silu", 64)))
    with torch.no_grad():
        policy.transformer.proj_out.weight.zero_()
        policy.transformer.proj_out.bias.zero_()  # it answers no change, so the error is the change
    batch = batch_of(frames=3, mode=torch.full((6,), FORWARD))
    kept = torch.zeros(16, 16)
    kept[5, 2] = 3.0
    how = FlowConfig(dynamics_from_frame=True, channels=kept)
    _, metrics = flow_loss(policy, batch, how, torch.Generator().manual_seed(0))
    change = batch.latents[:, 5, 1:] - batch.latents[:, 5, :1]
    layout = add_noise(batch, policy.transformer.config, how, torch.Generator()).layout
    numbers = 6 * layout.vision_tokens * 2 / 3 * patch * patch * 16
    assert metrics["forward"] == pytest.approx(float(9 * change.square().sum()) / numbers, rel=1e-4)


def test_an_action_prefix_is_given_and_the_rest_predicted(policy):
    """Training-time real-time chunking: rows before ``prefix`` are clean and in no loss."""
    batch = replace(batch_of(frames=2), prefix=torch.tensor([0, 1, 8, 15, 0, 3]))
    noised = add_noise(
        batch, policy.transformer.config, FlowConfig(), torch.Generator().manual_seed(0)
    )
    rows = noised.noisy[:, noised.layout.vision_tokens + 1 :, 0]
    assert rows.sum(1).tolist() == [16, 15, 8, 1, 16, 13]
    assert not rows[2, :8].any()
    action = noised.streams[ACTION].tokens
    torch.testing.assert_close(action[2, 1:9, :10], batch.rows[2, :8])
    plain = add_noise(
        replace(batch, prefix=None),
        policy.transformer.config,
        FlowConfig(),
        torch.Generator().manual_seed(0),
    )
    torch.testing.assert_close(
        plain.streams[ACTION].tokens[0], action[0]
    )  # the same noise as without


def test_video_and_actions_of_a_window_share_one_noise_level(policy):
    """Their noise levels must not be mixed up among windows: the sampler takes both through the
    same steps.
    """
    batch = batch_of(frames=2)
    zero = Batch(batch.latents * 0, batch.state, batch.rows * 0, batch.prompts, batch.prompt)
    noised = add_noise(
        zero,
        policy.transformer.config,
        FlowConfig(pure_noise_fraction=0.0),
        torch.Generator().manual_seed(3),
    )
    V = noised.layout.vision_tokens
    vision, action = noised.streams
    of_vision = (
        vision.tokens[:, V // 2 :].std((1, 2)) / vision.target[:, V // 2 :].std((1, 2))
    ).numpy()
    of_action = (
        action.tokens[:, 1:, :10].std((1, 2)) / action.target[:, 1:, :10].std((1, 2))
    ).numpy()
    np.testing.assert_allclose(of_vision, noised.sigma, rtol=1e-5)
    np.testing.assert_allclose(of_action, noised.sigma, rtol=1e-5)


def test_shares_of_several_processes_add_up(policy):
    mode = torch.tensor([POLICY, FORWARD, INVERSE, POLICY, POLICY, INVERSE])
    batch = batch_of(frames=2, mode=mode)

    def grads(share: DataShard):
        policy.zero_grad()
        loss, _ = flow_loss(policy, batch, FlowConfig(), torch.Generator().manual_seed(0), share)
        loss.backward()
        return loss.item(), policy.w_in.grad.clone()

    whole, parts = grads(DataShard()), [grads(DataShard(rank, 2)) for rank in (0, 1)]
    assert np.mean([loss for loss, _ in parts]) == pytest.approx(whole[0], rel=1e-5)
    assert agree((parts[0][1] + parts[1][1]) / 2, whole[1])
