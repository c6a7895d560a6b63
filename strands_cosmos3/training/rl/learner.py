"""The gradient of an iteration: velocities of the policy that is trained against those of the
policy that sampled, and of the policy that it began as.

Velocities are compared at the sampler's own noise levels. ``v - v_old = (x0_old - x0) / sigma``
grows where sigma is small, where the sampler never asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import Embodiment, Sampling
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.sequence import ACTION, TEMPORAL_COMPRESSION, VISION
from strands_cosmos3.training.adapters import add_lora, load_policy, train_only
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import LossMetrics
from strands_cosmos3.training.matching import (
    SINGLE_PROCESS,
    DataShard,
    FlowConfig,
    Noised,
    add_noise,
    first_noisy,
    predicted,
)
from strands_cosmos3.training.rl.groups import Group, rated
from strands_cosmos3.training.rl.objectives import errors, weights_of
from strands_cosmos3.training.rl.options import RLConfig
from strands_cosmos3.training.rl.value import Value
from strands_cosmos3.training.sharding import mean_over_ranks, shard_policy
from strands_cosmos3.training.windows import FORWARD, Batch

_KEPT = 6, 12  # chunks of a step for each window of the start policy's answers, and predictions


class Learner:
    """The policies of a run, and the windows of its present iteration.

    Args:
        values: Folder of what the value knows.
        share: The part of each step's windows that this process computes; each has a shard of
            the policy that is trained, and the two that it is compared with whole.

    Attributes:
        policy: The one that is trained, in float32.
        kept, dropped: Groups of the iteration that tell chunks apart, and those that do not.
        figures: How far advantages spread and, of whole episodes, the part of the returns' variance
            that the value explains.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        embodiment: Embodiment,
        config: RLConfig,
        values: Path,
        share: DataShard = SINGLE_PROCESS,
    ):
        self.config, self._checkpoint, self._share = config, checkpoint, share
        policy = load_policy(checkpoint, embodiment.domain_id)
        train_only(policy, config.trained)
        if config.lora_rank:
            add_lora(policy, config.lora_rank, config.lora_targets, config.seed)
        if share.ranks > 1 and torch.cuda.is_available():  # where shards are
            policy.to("cuda")
        self._start, self._old = _frozen(policy), _frozen(policy)
        self.policy = shard_policy(policy, share.ranks)
        space = checkpoint.require_space()
        sampling = checkpoint.resolve_sampling(embodiment, space, Sampling())
        assert sampling.num_steps is not None  # a preset names it
        schedule = checkpoint.scheduler.schedule(sampling.num_steps, sampling.flow_shift, False)
        self.sigmas = torch.tensor(schedule.sigmas[:-1])
        self._fps = embodiment.fps or 15.0
        self._order = np.empty(0, np.int64)
        self._value = Value(self._start, values, writes=share.rank == 0)
        self.kept = self.dropped = 0
        self.figures: dict[str, float] = {}

    def policy_of(self, weights: Mapping[str, torch.Tensor]) -> TrainedPolicy:
        """Return the policy of a version of the weights, whole; the next call changes it."""
        self._old.load_state_dict(weights, strict=False)
        return self._old

    def take(
        self, groups: Sequence[Group], sampled_with: Mapping[str, torch.Tensor], iteration: int
    ) -> None:
        """Make an iteration's windows of groups, and take the weights that sampled them."""
        config = self.config
        self.policy_of(sampled_with)
        self.kept, self.dropped, self.figures = 0, len(groups), {}
        if not groups:
            return
        self._set_groups(groups)
        worth = np.array([group.rewards for group in groups])
        whole = worth.shape[1] == 1
        if whole:  # chunks of different states are one group, without what states are worth
            returns = worth.T
            worth = self._value.advantages(self._features(), returns[0], iteration)[None]
            self.figures["value_explains"] = 1 - float(worth.var() / max(returns.var(), 1e-9))
        rating, tells = rated(worth)
        self.figures["advantage_spread"] = float(worth.std(1).mean())
        if not tells.any():
            return
        weight = weights_of(config.algorithm, rating[tells])
        if whole:
            weight = weight.T
        else:
            self._set_groups([group for group, kept in zip(groups, tells, strict=True) if kept])
        self.kept, self.dropped = len(self._groups), len(groups) - len(self._groups)
        used = np.ones_like(weight, bool) if config.algorithm == "nft" else weight > 0
        self._members = np.argwhere(used)
        self._weight = torch.from_numpy(weight[used]).float()
        rng = np.random.default_rng([config.seed, iteration])
        rounds = -(-config.steps * config.batch // len(self._members))
        shuffled = [rng.permutation(len(self._members)) for _ in range(rounds)]
        self._order = np.concatenate(shuffled)

    def _set_groups(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._rows = torch.from_numpy(np.stack([group.rows for group in groups]))
        self._executed = torch.tensor(np.array([group.executed for group in groups]))

    def _features(self) -> F64:
        """Return what the value reads of each group's state [G, D + 1]."""
        count, size = len(self._groups), self.config.batch
        parts: list[F64] = []
        for chosen in np.array_split(np.arange(count), -(-count // size)):
            batch = self._batch(chosen, np.zeros_like(chosen), plain=False)
            sigma = self.sigmas[:1].expand(len(chosen))
            config, noise = self.policy.transformer.config, torch.Generator()
            noised = add_noise(batch, config, FlowConfig(), noise, sigma)
            parts.append(self._value.features(batch, noised))
        return np.concatenate(parts)

    def loss(self, step: int) -> tuple[torch.Tensor, LossMetrics]:
        """Return the loss of an optimiser's step, and its metrics: ``old_deviation``, the squared
        distance to the velocities of the policy that sampled, and ``kept_deviation``, to those
        of the start policy without the condition. There must be groups that tell chunks apart.
        """
        value, metrics = self.policy(lambda gathered: self._loss(gathered, step))
        return value, mean_over_ranks(metrics, self._share.ranks)

    def _loss(self, policy: TrainedPolicy, step: int) -> tuple[torch.Tensor, LossMetrics]:
        """Return the loss of this process's share of the windows, scaled so that the mean over
        processes is the loss of one.
        """
        config, share, device = self.config, self._share, policy.w_in.device
        noise = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        first = step % config.steps * config.batch
        chosen = self._order[first : first + config.batch]
        groups, members = self._members[chosen].T
        batch = self._batch(groups, members, plain=False)
        noised = self._noised(batch, noise)
        v_old = self._rows_of(self._old, batch, noised, share)
        v_theta = self._rows_of(policy, batch, noised, share)
        of_batch = (
            noised.streams[ACTION].target[:, -v_old.shape[1] :, : v_old.shape[2]],
            self._weight[torch.from_numpy(chosen)],
            self._executed[groups, members],
        )
        v, weight, executed = (share.of(tensor).to(device) for tensor in of_batch)
        part = share.ranks / len(chosen)
        of_each = errors(config.algorithm, v_theta, v_old, v, weight, config.nft_beta, executed)
        loss = part * of_each.sum()
        old_deviation = part * len(v) * _apart(v_theta.detach(), v_old)
        metrics = {"policy": loss.detach(), "old_deviation": old_deviation}
        if config.kl_beta:
            v_start = self._rows_of(self._start, batch, noised, share)
            loss = loss + config.kl_beta * part * len(v) * _apart(v_theta, v_start)
        kept = np.array([i for i in groups if self._groups[i].plain.size], np.int64)
        if config.keep and len(kept):
            apart = self._kept_deviation(policy, kept, noise)
            metrics["kept_deviation"], loss = apart.detach(), loss + config.keep * apart
        return loss, {"loss": loss.detach(), **metrics}

    def _kept_deviation(
        self, policy: TrainedPolicy, groups: np.ndarray, noise: torch.Generator
    ) -> torch.Tensor:
        """Return the squared distance to the start policy's answers, and to its predictions of
        pictures if it makes them from actions, in states without the condition. They are too few
        to share: every process computes all of them.
        """
        answers, predictions = (max(1, len(groups) // share) for share in _KEPT)
        batch = self._batch(groups[:answers], np.zeros(answers, np.int64), plain=True)
        noised = self._noised(batch, noise)
        v_start = self._rows_of(self._start, batch, noised)
        apart = _apart(self._rows_of(policy, batch, noised), v_start)
        if self._checkpoint.dynamics_from_frame:
            batch = self._batch(groups[-predictions:], np.zeros(predictions, np.int64), plain=True)
            frames = batch.rows.shape[1] // TEMPORAL_COMPRESSION + 1
            clip = batch.latents.expand(-1, -1, frames, -1, -1)
            mode = torch.full((predictions,), FORWARD)
            batch = replace(batch, latents=clip, mode=mode)
            if self._checkpoint.dynamics_without_text:
                prompts = (self._groups[0].empty,)
                batch = replace(batch, prompts=prompts, prompt=torch.zeros_like(batch.prompt))
            how = FlowConfig(dynamics_from_frame=True)
            noised = add_noise(batch, self.policy.transformer.config, how, noise)
            apart = apart + self._predictions_apart(policy, batch, noised)
        return apart

    def _predictions_apart(
        self, policy: TrainedPolicy, batch: Batch, noised: Noised
    ) -> torch.Tensor:
        """Return the squared distance to the start policy of the velocities of pictures."""
        v_start = predicted(self._start, batch, noised)[VISION]
        real = noised.streams[VISION].real[first_noisy(noised.layout) :].to(v_start)
        off = (predicted(policy, batch, noised)[VISION] - v_start) * real
        return off.square().sum() / (len(off) * real.sum())

    def _batch(self, groups: np.ndarray, members: np.ndarray, plain: bool) -> Batch:
        states = [self._groups[i] for i in groups]
        prompts = list(dict.fromkeys(group.prompt for group in states))
        latents = [group.plain if plain else group.latents for group in states]
        with_state = states[0].state.size > 0
        return Batch(
            torch.from_numpy(np.stack(latents)),
            torch.from_numpy(np.stack([group.state for group in states])) if with_state else None,
            self._rows[torch.from_numpy(groups), torch.from_numpy(members)],
            tuple(prompts),
            torch.tensor([prompts.index(group.prompt) for group in states]),
            fps=self._fps,
        )

    def _noised(self, batch: Batch, noise: torch.Generator) -> Noised:
        levels = torch.randint(len(self.sigmas), (len(batch.rows),), generator=noise)
        config = self.policy.transformer.config
        return add_noise(batch, config, FlowConfig(), noise, self.sigmas[levels])

    def _rows_of(
        self,
        policy: TrainedPolicy,
        batch: Batch,
        noised: Noised,
        share: DataShard = SINGLE_PROCESS,
    ) -> torch.Tensor:
        """Return the velocities [B, T, D] of the rows of a share's chunks."""
        _, rows, width = batch.rows.shape
        return predicted(policy, batch, noised, share)[ACTION][:, -rows:, :width]


def _frozen(policy: TrainedPolicy) -> TrainedPolicy:
    """Return a copy that is not trained, so that its velocities have no gradient; weights that
    never are belong to both.
    """
    shared = {id(p): p for p in policy.parameters() if not p.requires_grad}
    return deepcopy(policy, shared).requires_grad_(False)


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).square().mean()
