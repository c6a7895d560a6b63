"""Fit a policy's projections of vision tokens to the latents of another VAE, from which training then goes on."""

from __future__ import annotations

import torch

from strands_cosmos3.training.flow import TrainedPolicy


@torch.no_grad()
def refit_projections(policy: TrainedPolicy, known: torch.Tensor, latents: torch.Tensor) -> None:
    """Let a policy read ``latents`` as it read ``known`` ones of the same pictures, as far as a linear map tells them apart.

    Predicted videos begin at velocities of zero, which repeat the given frame (``dynamics_from_frame``).

    Args:
        known, latents: [n, C, F, H, W] normalised latents of the same pictures through the policy's own VAE and the other one.
    """
    read, written = policy.transformer.proj_in, policy.transformer.proj_out
    own, other = (tensor.float().movedim(1, -1).flatten(0, -2) for tensor in (known, latents))
    channels = own.shape[1]
    fitted = torch.linalg.lstsq(torch.cat([other, torch.ones(len(other), 1)], dim=1), own).solution
    by_latent = read.weight.unflatten(1, (-1, channels))
    read.bias.add_(by_latent.sum(1) @ fitted[-1])
    read.weight.copy_((by_latent @ fitted[:-1].T).flatten(1))
    written.weight.zero_()
    written.bias.zero_()
