"""The VAE stage: an encoder that computes linear codes, a decoder that draws pixels from them,
and a check of colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.muon import muon_and_adamw
from recipes.random_checkpoint import latent_scale
from recipes.table_policy.block_codes import BlockCodes
from recipes.table_policy.colour_gate import colour_gate
from recipes.table_policy.config import RunConfig
from recipes.table_policy.demos import Demos, spread
from recipes.vae_training import (
    VaeLoss,
    convolve_flat,
    latent_moments,
    make_vae,
    picture_psnr,
    plain_state,
    train_only,
    weighted_error,
)
from strands_cosmos3.engine.latents import frame_scale
from strands_cosmos3.engine.wan import WanAutoencoder
from strands_cosmos3.engine.wan_config import WanConfig
from strands_cosmos3.resources import load_json, write_json, write_whole
from strands_cosmos3.training.loop import Loop, LossMetrics, Metrics, TrainLoopConfig
from strands_cosmos3.training.precision import lower_precision
from strands_cosmos3.training.windows import ROWS, to_pixels

OnStep = Callable[[str, int, int, Metrics], None]
"""Called with stage, steps done, steps in total and metrics."""
_LOSS = VaeLoss(chroma=1.0, saturated=3.0, dark=1.0, changing=1.0, edges=0.0, magnitudes=0.0)
"""Squares: with magnitudes the decoder answers medians, and pictures had 26 instead of 28 dB."""
_GATE_PICTURES = 160
_STATISTICS_CLIPS = 192


@dataclass(frozen=True, eq=False)
class VaeTrainer:
    """Trains the VAE of a run, and what else draws its latents."""

    folder: Path  # of the run
    demos: Demos
    config: RunConfig
    device: torch.device
    on_step: OnStep
    loop_options: Mapping[str, Any]  # options of its loops

    def train(self) -> Any:
        """Train the VAE, or load the finished one. Raises TrainingError if colours do not
        survive.
        """
        final = self.folder / "vae/final.pt"
        config = self.config
        vae: Any = make_vae(
            config.latent_channels, config.vae_base, config.vae_decoder_base, config.vae_patch
        )
        convolve_flat(vae)  # single frames, and clips on CPUs, as the engine does
        vae.to(self.device)
        if final.exists():
            vae.load_state_dict(torch.load(final, map_location=self.device, weights_only=True))
        else:
            self._fit_encoder(vae)
            self._fit_decoder(vae)
            self.check_colours(vae, self.folder / "vae/gate.json")
            write_whole(final, partial(torch.save, vae.state_dict()))
        vae.eval().requires_grad_(False)
        return self._with_latent_statistics(vae)

    def check_colours(self, vae: Any, path: Path) -> None:
        """Write how a VAE preserves colours, and raise TrainingError if it loses them."""
        gate = colour_gate(vae, self.demos.frames[spread(len(self.demos), _GATE_PICTURES)])
        write_json(path, asdict(gate))
        if self.config.gate:
            gate.require()

    def _codes(self) -> BlockCodes:
        """Return the linear codes that latents are."""
        path = self.folder / "vae/codes.pt"
        if not path.exists():
            width = 16 * self.demos.columns
            clips = (clip[..., :width].to(self.device) for clip in self._spread_clips())
            made = BlockCodes.fit(clips, self.config.latent_channels)
            write_whole(
                path,
                partial(torch.save, {name: tensor.cpu() for name, tensor in vars(made).items()}),
            )
        return BlockCodes(**torch.load(path, weights_only=True))

    def _fit_encoder(self, vae: Any) -> None:
        """Train the encoder until its latents are the linear codes."""
        codes = self._codes()
        train_only(vae, "quant_conv", "encoder")

        def loss(pixels: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
            apart = codes.error(vae.encode(pixels).latent_dist.mean, pixels)
            return apart, {"loss": apart.detach()}

        self._fit_vae(vae, "vae", loss, self.config.vae_steps, ema=0.995, decay=0.6)

    def _fit_decoder(self, vae: Any) -> None:
        """Train the decoder on the encoder's latents."""
        train_only(vae, "post_quant_conv", "decoder")

        def loss(pixels: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
            with torch.no_grad():
                latents = vae.encode(pixels).latent_dist.mean
            drawn = vae.decode(latents).sample
            error = weighted_error(drawn, pixels, _LOSS)
            return error, {"loss": error.item(), "psnr": picture_psnr(drawn, pixels)}

        self._fit_vae(vae, "vae_decoder", loss, self.config.vae_decoder_steps, ema=0.99, decay=0.7)

    def _pixels(self, stage: str, step: int) -> torch.Tensor:
        """Draw pictures, half of them second ones, or clips of 5 or 17 frames, in turn: [n, 3, F,
        H, W].

        With 9 frames at most latents drifted in longer clips: the last of 17 was off by 0.5 of a
        code's deviation.
        """
        frames = (1, 5, ROWS + 1)[step % 3]
        starts = self.demos.clips(ROWS)
        rng = np.random.default_rng([self.config.seed, len(stage), step])
        count = max(1, self.config.vae_batch // frames)
        if frames > 1:
            chosen = starts[rng.integers(len(starts), size=count)]
            return to_pixels(self.demos.frames[chosen[:, None] + np.arange(frames)], self.device)
        looks = self.demos.looks[rng.integers(len(self.demos.label_ticks), size=count // 2)]
        own = self.demos.frames[rng.integers(len(self.demos), size=count - count // 2)]
        return to_pixels(np.stack([*own, *looks]), self.device)

    def _fit_vae(
        self,
        vae: Any,
        stage: str,
        error: Callable[[torch.Tensor], tuple[torch.Tensor, LossMetrics]],
        steps: int,
        **options: float,
    ) -> None:
        """Train on pixels that each step draws."""
        width = 16 * self.demos.columns

        def loss(step: int) -> tuple[torch.Tensor, LossMetrics]:
            pixels = self._pixels(stage, step)[..., :width]
            with lower_precision(self.device, cpu=True):
                return error(pixels)

        self.fit(vae, stage, loss, steps, self.config.vae_lr, **options)

    def fit(
        self,
        model: torch.nn.Module,
        stage: str,
        loss: Callable[[int], tuple[torch.Tensor, LossMetrics]],
        steps: int,
        lr: float,
        **options: float,
    ) -> None:
        """Train a model by the loss of a step, matrices at ten times the rate; its averaged weights
        remain.
        """
        how = TrainLoopConfig(steps, lr, weight_decay=0.0, **{**self.loop_options, **options})
        loop = Loop(model, loss, how, self.folder / stage, muon_and_adamw(10 * lr))
        loop.run(on_step=lambda step, metrics: self.on_step(stage, step, steps, metrics))
        loop.adopt_average()

    def _with_latent_statistics(self, vae: Any) -> Any:
        """Record mean and standard deviation of the latents in the VAE's config, as a file keeps
        them.
        """
        path = self.folder / "vae/latent_stats.json"
        if not path.exists():
            ticks = spread(len(self.demos), 256)
            with torch.no_grad():
                raw = [
                    vae.encode(to_pixels(self.demos.frames[part], self.device))
                    .latent_dist.mode()
                    .cpu()
                    for part in np.array_split(ticks, 8)
                    if len(part)
                ]
            scale = latent_scale(torch.cat(raw)[..., : self.demos.columns])
            vae.register_to_config(**scale)
            frames = self._frame_statistics(encoder_of(vae))
            write_json(path, {**scale, "latent_frames": frames})
        vae.register_to_config(**load_json(path))
        return vae

    def _spread_clips(self) -> Iterator[torch.Tensor]:
        """Yield the pixels [1, 3, ROWS + 1, H, W] of some clips, spread over the demonstrations."""
        starts = self.demos.clips(ROWS)
        for tick in starts[spread(len(starts), _STATISTICS_CLIPS)].tolist():
            yield to_pixels(self.demos.frames[range(tick, tick + ROWS + 1)][None])

    def _frame_statistics(
        self, encode: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[dict[str, list[float]]]:
        """Return mean and deviation of the normalised latents of each frame of a clip; frame 0
        keeps its own.
        """
        with torch.no_grad():
            clips = map(encode, self._spread_clips())
            latents = torch.cat([clip[..., : self.demos.columns] for clip in clips])
        mean, std = latents.mean((0, 3, 4)), latents.std((0, 3, 4))  # [C, F]
        mean[:, 0] = 0.0
        std[:, 0] = 1.0
        return [
            {"mean": mean[:, f].tolist(), "std": std[:, f].tolist()} for f in range(mean.shape[1])
        ]


def encoder_of(vae: Any, scaled: bool = True) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from pixels to latents, normalised by the VAE's recorded statistics,
    through the engine's VAE.

    ``scaled``: Whether those of a clip's frames have the scale of frames, too.
    """
    mean, std = latent_moments(vae)
    device = next(vae.parameters()).device
    config = WanConfig.from_dict(vae.config)
    of_frames = frame_scale(config)
    engine = WanAutoencoder(config).to(device).eval()
    engine.load_state_dict(plain_state(vae))

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            raw = engine.encode(pixels.to(device)).cpu()
        latents = (raw - mean) / std
        frame_mean, frame_std = of_frames(latents) if scaled else (0.0, 1.0)
        return (latents - frame_mean) / frame_std

    return encode


def step_noise(seed: int, step: int) -> torch.Generator:
    """Return the noise generator of a step."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 7919 + 3)
