"""Train a preview decoder on a VAE's latents of clips, and write it beside a checkpoint's VAE."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from recipes.random_checkpoint import STEM
from recipes.vae_training import psnr
from strands_cosmos3.engine.vae import PreviewDecoder
from strands_cosmos3.resources import write_json
from strands_cosmos3.training.loop import LossMetrics

WIDTHS = (64, 64, 32)
FOLDER = "preview_decoder"


def fresh_preview(latent_channels: int, seed: int = 0) -> PreviewDecoder:
    """An untrained preview decoder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PreviewDecoder(latent_channels, WIDTHS)


def preview_loss(
    decoder: PreviewDecoder, latents: torch.Tensor, pixels: torch.Tensor
) -> tuple[torch.Tensor, LossMetrics]:
    """Return the error of decoded latents [B, C, F, H, W] against pixels [B, 3, frames, 16 H, 16 W]
    in [-1, 1], and metrics.

    Squares and magnitudes, and more weight on pixels that differ from the clip's first frame: films
    show motion.
    """
    error = decoder(latents) - pixels
    weight = 1 + 4 * (pixels - pixels[:, :, :1]).abs().amax(1, keepdim=True).div(0.3).clamp(max=1)
    loss = ((error.abs() + error.square()) * weight).mean() / weight.mean()
    return loss, {"loss": loss.item(), "psnr": psnr(error.square().mean())}


def novelty_rmse(decoder: PreviewDecoder, latents: torch.Tensor, pixels: torch.Tensor) -> float:
    """Return the 99.9 % quantile of the RMS errors, of a range 0..1, of validation pictures: a
    checkpoint's ``novelty_rmse``.

    Args:
        latents: Latents [n, C, 1, H, W] of the pictures.
        pixels: The pictures [n, 3, 1, 16 H, 16 W] in [-1, 1].
    """
    with torch.no_grad():
        made = torch.cat([decoder(part).clamp(-1, 1) for part in latents.split(32)])
    errors = (made - pixels).square().mean((1, 2, 3, 4)).sqrt() / 2
    return float(torch.quantile(errors.cpu(), 0.999))


def save_preview(decoder: PreviewDecoder, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write ``preview_decoder/`` into a checkpoint's folder."""
    home = folder / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    write_json(home / "config.json", {"widths": list(WIDTHS)})
    weights = {
        name: p.detach().to("cpu", dtype).contiguous() for name, p in decoder.named_parameters()
    }
    save_file(weights, home / f"{STEM}.safetensors", metadata={"format": "pt"})
