"""A small policy from demonstrations, stage by stage; each stage's results lie in the run's folder and are gone on from.

::

    vae/        pictures, then clips; the gate           final.pt, latent_stats.json, gate.json
    latents/    every picture and clip, encoded once     frame0.npy, clips.npy
    policy/     frame 0 and actions                      state.pt, held_out.jsonl, checkpoint/
    joint/      with the future, and both dynamics       state.pt, held_out.jsonl, checkpoint/

What a run was started with is kept in ``settings.json``; going on with other settings is refused, but for the numbers of steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.factory import transformer_config
from strands_cosmos3.engine.state import StateRow
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import TIERS
from strands_cosmos3.resources import write_json, write_whole
from strands_cosmos3.training.dynamics import judge_dynamics
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import STATE, Loop, LoopConfig, LossMetrics, drop_from, whole
from strands_cosmos3.training.matching import SINGLE_PROCESS, DataShard, FlowConfig, flow_loss
from strands_cosmos3.training.phrases import GOALS
from strands_cosmos3.training.release import (
    DOMAIN,
    export,
    fresh_policy,
    fresh_tokenizer,
    load_policy,
    load_vae,
    policy_sizes,
    read_captions,
    released_steps,
    with_statistics,
)
from strands_cosmos3.training.run_config import RunConfig, tier_of
from strands_cosmos3.training.run_manifest import keep, keep_settings
from strands_cosmos3.training.sharding import averaged, spread
from strands_cosmos3.training.shards import Demos
from strands_cosmos3.training.vae import (
    VaeLoss,
    VaeSizes,
    clip_batch,
    colour_gate,
    flat_first_frames,
    keep_first_frames,
    make_vae,
    picture_batch,
    reconstruction_loss,
    to_pixels,
)
from strands_cosmos3.training.validation import chunk_errors, predict_rows
from strands_cosmos3.training.windows import (
    ROWS,
    Batch,
    Captions,
    ClipWindows,
    PictureWindows,
    cached_latents,
    latent_columns,
    state_row_of,
)

OnStep = Callable[[str, int, int, LossMetrics], None]
LossOf = Callable[[int], tuple[torch.Tensor, LossMetrics]]
_VAE_FILES = ("gate.json", "latent_stats.json", "final.pt")
_RELEASE_EVERY = 500
_JUDGED_CLIPS = 64
_GATE_PICTURES = 160
_HELD_OUT_WINDOWS = 384
_HELD_OUT_SHARE = 0.04


class SmallRun:
    """One run.

    Args:
        folder: Where everything of it lies.
        demos: Folder of the demonstrations, unpacked.
        config: What is trained.
        on_step: Called with the stage, its steps done and in all, and the loss's parts.
        share: Of several processes; the VAE and the latents must be there before there are several.
        start: A checkpoint of this trainer's to go on from: its VAE on pictures, its tokenizer, state row and weights.

    Raises:
        ConfigError: The folder holds a run with other settings or demonstrations, or there are none.
        CheckpointError: The checkpoint cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        demos: Path,
        config: RunConfig | None = None,
        on_step: OnStep | None = None,
        share: DataShard = SINGLE_PROCESS,
        start: Path | None = None,
    ):
        self.folder, self.config, self.share = folder, config or RunConfig(), share
        self._on_step = on_step or (lambda *_: None)
        self._start = None if start is None else Checkpoint.open(start)
        self._require_its_sizes()
        folder.mkdir(parents=True, exist_ok=True)
        keep_settings(folder / "start.json", {"checkpoint": self._start and self._start.digest})
        begun = (folder / "joint" / STATE).exists()
        keep_settings(folder / "settings.json", self.config.fixed, [] if begun else RunConfig.of_joint())
        there = sorted(int(path.stem.removeprefix("shard-")) for path in demos.glob("shard-*.npz"))
        shards = keep(folder / "shards.json", there)  # what is recorded later belongs to a later run
        self.demos = Demos.open(demos, shards)
        where = "unpacked" if demos.resolve().parent == folder.resolve() else str(demos.resolve())
        keep_settings(folder / "demos.json", {"demos": where, "ticks": len(self.demos)})
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _require_its_sizes(self) -> None:
        if self._start is None:
            return
        theirs, ours = self._start.config, self.config
        sizes = {
            "hidden": (theirs.hidden_size, ours.hidden),
            "layers": (theirs.num_hidden_layers, ours.layers),
            "latent_channels": (theirs.latent_channel, ours.latent_channels),
        }
        other = [f"{name} {of_start} (here {asked})" for name, (of_start, asked) in sizes.items() if of_start != asked]
        if other:
            raise ConfigError(f"the checkpoint {self._start.root} has {', '.join(other)}; give its sizes with --start.")

    @property
    def canvas_hw(self) -> tuple[int, int]:
        """The pictures' height and width."""
        height, width = self.demos.frame(0).shape[:2]
        if (height, width) not in TIERS.get(self.config.tier, ()):
            raise ConfigError(
                f"demonstrations are {height} x {width}, which is no canvas of tier {self.config.tier}; their own is "
                f"{tier_of(height, width)}."
            )
        return height, width

    @cached_property
    def columns(self) -> int:
        """Latent columns that the picture's content reaches."""
        return latent_columns(self.canvas_hw)

    @property
    def seen_width(self) -> int:
        """Pixel columns that the VAE is trained on: the content and one latent column of the padding that touches it."""
        return 16 * (self.columns + 1)

    def train_vae(self) -> Any:
        """The VAE: pictures, the gate, then clips with everything frozen that frame 0 depends on.

        Raises:
            TrainingError: Colours do not survive.
        """
        final = self.folder / "vae/final.pt"
        sizes = VaeSizes(self.config.latent_channels, self.config.vae_base, self.config.vae_base)
        vae: Any = flat_first_frames(make_vae(sizes) if self._start is None else load_vae(self._start))
        vae.to(self.device)
        if final.exists():
            vae.load_state_dict(torch.load(final, map_location=self.device, weights_only=True))
        else:
            if self._start is None:
                self._fit_vae(vae)
            self._open_gate(vae)
            if self.config.vae_clip_steps:
                self._fit_motion(vae)
            write_whole(final, partial(torch.save, vae.state_dict()))
        vae.eval().requires_grad_(False)
        return self._normalised(vae)

    def take_vae(self, run: Path) -> Any:
        """The VAE of another run, with the figures of its latents; nothing is trained.

        Raises:
            ConfigError: There is no finished VAE, or it has other sizes.
        """
        if not (run / "vae/final.pt").exists():
            raise ConfigError(f"{run} has no finished VAE (vae/final.pt); train it: strands-cosmos3 train --until vae.")
        theirs = json.loads((run / "settings.json").read_text(encoding="utf-8"))
        sizes = {name: getattr(self.config, name) for name in ("latent_channels", "vae_base", "tier")}
        other = [f"{name} {theirs.get(name)} (here {value})" for name, value in sizes.items() if theirs.get(name) != value]
        if other:
            raise ConfigError(f"the VAE of {run} has {', '.join(other)}.")
        for name in _VAE_FILES:
            taken, content = self.folder / "vae" / name, (run / "vae" / name).read_bytes()
            taken.parent.mkdir(exist_ok=True)
            if taken.exists() and taken.read_bytes() != content:
                raise ConfigError(f"{taken} is not that of {run}; choose another folder.")
            write_whole(taken, partial(Path.write_bytes, data=content))
        return self.train_vae()

    def _fit_vae(self, vae: Any) -> None:
        config, how = self.config, VaeLoss()

        def pictures(step: int) -> tuple[torch.Tensor, LossMetrics]:
            pixels = picture_batch(self.demos, config.vae_batch, config.seed, step)[..., : self.seen_width].to(self.device)
            with lower_precision(self.device):
                return reconstruction_loss(vae, pixels, _noise(config.seed, step), how)

        loop = self._loop(vae, pictures, config.vae_steps, config.vae_lr, "vae", ema=0.995, weight_decay=0.0, decay=0.5)
        loop.run(on_step=self._said("vae", config.vae_steps))
        loop.take_average()

    def _open_gate(self, vae: Any) -> None:
        gate = colour_gate(vae, self.demos.frames(np.linspace(0, len(self.demos) - 1, _GATE_PICTURES).astype(int)))
        write_json(self.folder / "vae/gate.json", asdict(gate))
        gate.require()

    def _fit_motion(self, vae: Any) -> None:
        config, starts, how = self.config, self.demos.clips(ROWS), VaeLoss()
        keep_first_frames(vae)

        def clips(step: int) -> tuple[torch.Tensor, LossMetrics]:
            frames = (5, 9, 17)[step % 3]
            pixels = clip_batch(self.demos, starts, frames, config.vae_clip_batch, config.seed + 1, step)
            pixels = pixels[..., : self.seen_width].to(self.device)
            with lower_precision(self.device):
                return reconstruction_loss(vae, pixels, _noise(config.seed + 1, step), how)

        loop = self._loop(vae, clips, config.vae_clip_steps, config.vae_lr / 2, "vae_clips", ema=0.99, weight_decay=0.0)
        loop.run(on_step=self._said("vae_clips", config.vae_clip_steps))
        loop.take_average()

    def _normalised(self, vae: Any) -> Any:
        """The VAE with the mean and spread of its own latents recorded."""
        path = self.folder / "vae/latent_stats.json"
        if self._start is not None and not path.exists():  # the weights to go on from know these figures
            known = self._start.vae_config
            write_json(path, {"mean": list(known["latents_mean"]), "std": list(known["latents_std"])})
        if not path.exists():
            ticks = np.linspace(0, len(self.demos) - 1, min(256, len(self.demos))).astype(int)
            with torch.no_grad():
                parts = (to_pixels(self.demos.frames(part)).to(self.device) for part in np.array_split(ticks, 8) if len(part))
                raw = [vae.encode(pixels).latent_dist.mode().cpu() for pixels in parts]
            latents = torch.cat(raw)[..., : self.columns]
            write_json(path, {"mean": latents.mean((0, 2, 3, 4)).tolist(), "std": latents.std((0, 2, 3, 4)).tolist()})
        figures = json.loads(path.read_text())
        return with_statistics(vae, figures["mean"], figures["std"])

    def train_policy(self, vae: Any) -> Path:
        """Frame 0 and actions; returns the checkpoint."""
        config = self.config
        windows, held_out = self._pictures(vae, config.policy_batch)
        policy = spread(self._first_policy().to(self.device), self.share)
        loss = self._flow(policy, config.seed, windows)

        loop = self._loop(policy, loss, config.policy_steps, config.policy_lr, "policy")
        return self._fit_policy(loop, vae, "policy", config.policy_steps, (1,), held_out)

    def _pictures(self, vae: Any, batch: int) -> tuple[PictureWindows, Batch]:
        """Windows of frame 0 to train on, and some that are held out."""
        encode = encoder_of(vae)
        latents = cached_latents(
            lambda ticks: encode(to_pixels(self.demos.frames(ticks))),
            self.demos.label_ticks,
            self.folder / "latents/frame0.npy",
            self.columns,
            lambda done, of: self._on_step("latents", done, of, {}),
        )
        n_train, seed = self._trained_on(self.demos.label_ticks), self.config.seed
        windows = PictureWindows(
            self.demos, latents[:, :, 0], self.state, self.captions, batch, seed=seed, among=range(n_train)
        )
        return windows, self._held_out(windows, n_train)

    def _first_policy(self) -> TrainedPolicy:
        """What training begins with."""
        if self._start is None:
            return fresh_policy(self.transformer_config, self.config.seed)
        return load_policy(self._start, get_embodiment(DOMAIN).domain_id).requires_grad_(True)

    def train_joint(self, vae: Any) -> Path:
        """On from the policy, with the future and both dynamics; returns the checkpoint."""
        config, encode = self.config, encoder_of(vae)
        ticks = self.demos.clips(ROWS)[:: config.clip_every]
        latents = cached_latents(
            lambda some: encode(to_pixels(np.stack([self.demos.frames(range(t, t + ROWS + 1)) for t in some]))),
            ticks,
            self.folder / "latents/clips.npy",
            self.columns,
            lambda done, of: self._on_step("latents", done, of, {}),
            batch=4,
        )
        n_train = self._trained_on(ticks)
        windows = ClipWindows(
            *(self.demos, ticks[:n_train], latents[:n_train], self.state, self.captions, config.joint_batch),
            forward=config.joint_forward,
            inverse=config.joint_inverse,
            seed=config.seed,
        )
        pictures, seen_alone = self._pictures(vae, config.joint_pictures)
        policy = self._first_policy()
        if (self.folder / "policy/state.pt").exists():
            policy.load_state_dict(torch.load(self.folder / "policy/state.pt", weights_only=True)["ema"])
        policy = spread(policy.to(self.device), self.share)
        loss = self._flow(policy, config.seed + 1, windows, pictures)

        loop = self._loop(policy, loss, config.joint_steps, config.joint_lr, "joint")
        checkpoint = self._fit_policy(loop, vae, "joint", config.joint_steps, (1 + ROWS, 1), seen_alone)
        if not self.share.rank:
            held_out = ticks[n_train:][:: max(1, (len(ticks) - n_train) // _JUDGED_CLIPS)]
            report = judge_dynamics(
                checkpoint, self.demos, held_out, on_clip=lambda done, of: self._on_step("dynamics", done, of, {})
            )
            write_json(self.folder / "joint/dynamics.json", asdict(report))
        return checkpoint

    def _trained_on(self, ticks: NDArray[np.int64]) -> int:
        """How many of the windows, which begin at these ticks, are trained on; the last episodes are held out, whole."""
        ends = self.demos.last[ticks]
        n = int(len(ticks) * (1 - _HELD_OUT_SHARE))
        while n > 0 and ends[n] == ends[n - 1]:
            n -= 1
        if n == 0:
            raise ConfigError("too few demonstrations to hold an episode out; record more.")
        return n

    def _flow(self, policy: TrainedPolicy, seed: int, windows: PictureWindows | ClipWindows, *beside: PictureWindows) -> LossOf:
        """The loss of a step's windows, and of windows of frame 0 beside clips."""

        def loss(step: int) -> tuple[torch.Tensor, LossMetrics]:
            noise = _noise(seed, step)

            def job(whole_policy: TrainedPolicy) -> tuple[torch.Tensor, LossMetrics]:
                value, parts = flow_loss(whole_policy, windows.batch(step), FlowConfig(), noise, self.share)
                for pictures in beside:
                    more, seen = flow_loss(whole_policy, pictures.batch(step), FlowConfig(), noise, self.share)
                    total = parts["loss"] + seen["loss"]
                    value, parts = value + more, {**parts, "loss": total, "alone": seen["action"]}
                return value, parts

            with lower_precision(self.device):
                value, parts = policy(job)
            return value, averaged(parts, self.share)

        return loss

    def _fit_policy(self, loop: Loop, vae: Any, stage: str, steps: int, frames: Sequence[int], held_out: Batch) -> Path:
        windows = self.config.policy_batch if stage == "policy" else self.config.joint_batch

        def release(average: dict[str, torch.Tensor]) -> Path:
            label = f"trained by strands_cosmos3, stage {stage}, {loop.step * windows} windows; it knows one simulated table"
            return export(
                self.folder / stage / "checkpoint",
                self.config_json,
                average,
                vae,
                self.tokenizer,
                self.state,
                self.config.tier,
                frames=frames,
                label=label,
                steps=loop.step,
            )

        def judge() -> None:
            step, lines = loop.step, self.folder / stage / "held_out.jsonl"
            average = {name: whole(tensor).cpu() for name, tensor in loop.ema.items()}
            if self.share.rank:
                return
            judged = fresh_policy(self.transformer_config)
            judged.load_state_dict(average)
            errors = chunk_errors(predict_rows(judged, held_out), held_out.rows)
            drop_from(lines, step)
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "windows": step * windows, **asdict(errors)}) + "\n")
            release(average)

        def said(step: int, parts: LossMetrics) -> None:
            self._on_step(stage, step, steps, parts)
            if step % _RELEASE_EVERY == 0 or step == steps:
                judge()

        checkpoint = self.folder / stage / "checkpoint"
        if loop.step >= steps and released_steps(checkpoint) != loop.step:  # stopped in its last release
            judge()
        loop.run(on_step=said)
        return checkpoint

    def _held_out(self, windows: PictureWindows, first: int) -> Batch:
        rng = np.random.default_rng(5)
        chosen = rng.integers(first, len(windows), size=_HELD_OUT_WINDOWS)
        goal = np.where(
            np.arange(_HELD_OUT_WINDOWS) % 2 == 0, windows.pursued[chosen], rng.integers(len(GOALS), size=len(chosen))
        )
        prompts = tuple(sentences[0] for sentences in self.captions.by_goal)
        return windows.pick(chosen, goal, prompts, goal)

    @cached_property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            if self._start is None:
                fresh_tokenizer(folder, self.canvas_hw)
            else:
                shutil.copytree(self._start.root / "text_tokenizer", folder, dirs_exist_ok=True)
        return folder

    @cached_property
    def captions(self) -> Captions:
        """Token ids of what is said."""
        return read_captions(self.tokenizer, self.canvas_hw)

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """``transformer/config.json``."""
        if self._start is not None:
            return json.loads((self._start.root / "transformer/config.json").read_text(encoding="utf-8"))
        vocabulary = len(json.loads((self.tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
        added = json.loads((self.tokenizer / "tokenizer.json").read_text())["added_tokens"]
        size = max(vocabulary, 1 + max(int(token["id"]) for token in added))
        return transformer_config(
            policy_sizes(self.config.hidden, self.config.layers, self.config.latent_channels), "silu", size
        )

    @property
    def transformer_config(self) -> TransformerConfig:
        """The same, typed."""
        return TransformerConfig.from_dict(self.config_json)

    @cached_property
    def state(self) -> StateRow:
        """How state rows are scaled."""
        if self._start is not None and self._start.state_row is not None:
            return self._start.state_row
        path = self.folder / "state_row.json"
        if not path.exists():
            write_json(path, state_row_of(self.demos).to_metadata())
        figures = StateRow.from_metadata({"state": json.loads(path.read_text())})
        assert figures is not None
        return figures

    def _loop(self, model: torch.nn.Module, loss: Any, steps: int, lr: float, stage: str, **how: Any) -> Loop:
        return Loop(model, loss, LoopConfig(steps=steps, lr=lr, seed=self.config.seed, **how), self.folder / stage)

    def _said(self, stage: str, steps: int) -> Callable[[int, LossMetrics], None]:
        return lambda step, parts: self._on_step(stage, step, steps, parts)


def encoder_of(vae: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Pixels -> latents, normalised by the figures that the VAE records."""
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    device = next(vae.parameters()).device
    return lambda pixels: (vae.encode(pixels.to(device)).latent_dist.mode().cpu() - mean) / std


def lower_precision(device: torch.device) -> torch.autocast:
    """bfloat16 for what tolerates it on a GPU; on a CPU nothing changes (bfloat16 gains nothing there)."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _noise(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 7919 + 3)
