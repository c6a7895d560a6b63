"""Training that goes on from a checkpoint: its sizes, and its policy's projections fitted to the
latents of another VAE.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recipes.table_policy.config import RunConfig
from recipes.table_policy.demos import Demos
from recipes.table_policy.vae_trainer import encoder_of
from recipes.vae_training import load_vae, plain_state
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.windows import latent_columns, to_pixels

_PICTURES = 400


def require_sizes(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise ConfigError unless the checkpoint's network has the run's sizes."""
    theirs = checkpoint.config
    sizes = {
        "hidden": (theirs.hidden_size, config.hidden),
        "layers": (theirs.num_hidden_layers, config.layers),
        "latent_channels": (theirs.latent_channel, config.latent_channels),
        "latent_patch": (theirs.latent_patch_size, config.latent_patch),
    }
    if other := [
        f"{name} {there} (here {here})" for name, (there, here) in sizes.items() if there != here
    ]:
        raise ConfigError(
            f"the checkpoint {checkpoint.root} has {', '.join(other)}; give its sizes with --start."
        )


def fit_to_vae(policy: TrainedPolicy, checkpoint: Checkpoint, vae: Any, demos: Demos) -> None:
    """Fit the projections of a checkpoint's policy to the latents of ``vae``, unless its encoder
    is the checkpoint's own.
    """
    known, state = load_vae(checkpoint), plain_state(vae)
    encoder = {
        name: tensor
        for name, tensor in known.state_dict().items()
        if name.startswith(("encoder", "quant_conv"))
    }
    if all(torch.equal(tensor, state[name].cpu()) for name, tensor in encoder.items()):
        return
    ticks, columns = demos.label_ticks, latent_columns(demos.canvas_hw)
    chosen = np.unique(np.linspace(0, len(ticks) - 1, _PICTURES).astype(int))
    pixels = to_pixels(demos.frames[ticks[chosen]]).split(32)
    own, other = (
        torch.cat([encode(some)[..., :columns] for some in pixels])
        for encode in map(encoder_of, (known, vae))
    )
    refit_projections(policy, own, other)


@torch.no_grad()
def refit_projections(policy: TrainedPolicy, known: torch.Tensor, latents: torch.Tensor) -> None:
    """Let a policy read ``latents`` as it read ``known`` ones of the same pictures, as far as a
    linear map tells them apart.

    Predicted videos begin at velocities of zero, which repeat the given frame
    (``dynamics_from_frame``).

    Args:
        known, latents: [n, C, F, H, W] normalised latents of the same pictures through the policy's
            own VAE and the other one.
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
