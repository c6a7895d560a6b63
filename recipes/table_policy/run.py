"""Train a small policy from table demonstrations, stage by stage.

A stage resumes from what the run's folder holds::

    vae/        pictures, then clips; the gate           final.pt, latent_stats.json, gate.json
    latents/    pictures and clips, encoded once         pictures.npy, looks.npy, clips.npy
    preview/    the preview decoder                      state.pt, checkpoint/
    policy/     frame 0 and actions                      state.pt, validation.jsonl, checkpoint/
    joint/      with the future, and both dynamics       state.pt, validation.jsonl, checkpoint/
    decoder/    the VAE's decoder, on predicted clips    predicted.npy, dynamics.json, checkpoint/

``settings.json`` holds its options; apart from numbers of steps, they cannot change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from recipes.muon import muon_and_adamw
from recipes.random_checkpoint import transformer_config
from recipes.table_policy.auxiliary_head import (
    LabelledBatch,
    PolicyWithAuxiliaryHead,
    without_auxiliary_head,
)
from recipes.table_policy.captions import LANGUAGE, Captions, fresh_tokenizer, read_captions
from recipes.table_policy.clip_latents import ClipLatents, LatentCache, clip_pixels
from recipes.table_policy.config import RunConfig, tier_of
from recipes.table_policy.demos import Demos, spread
from recipes.table_policy.pixel_metric import pixel_metric
from recipes.table_policy.predictions import (
    RATE,
    TRUE,
    decoder_loss,
    predict_rows,
    predicted_latents,
    raw_latents,
)
from recipes.table_policy.prefetch import Prefetcher
from recipes.table_policy.preview import fresh_preview, novelty_rmse, preview_loss
from recipes.table_policy.release import (
    export,
    fresh_policy,
    released_steps,
    with_vae,
)
from recipes.table_policy.vae_trainer import OnStep, VaeTrainer, step_noise
from recipes.table_policy.windows import ClipWindows, PictureWindows, state_row_of
from recipes.vae_training import train_only
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.metadata import StateRow
from strands_cosmos3.engine.vae import PreviewDecoder
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json, write_whole
from strands_cosmos3.training.adapters import load_policy
from strands_cosmos3.training.closed_loop import CLOSED_LOOP, ClosedLoop, measure_apart
from strands_cosmos3.training.dynamics import DOMAIN, chunk_errors, judge_dynamics
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import (
    Loop,
    LossMetrics,
    Metrics,
    TrainLoopConfig,
    require_tensorboard,
)
from strands_cosmos3.training.matching import DataShard, FlowConfig, Noised, add_noise, noised_loss
from strands_cosmos3.training.precision import lower_precision
from strands_cosmos3.training.run_manifest import keep_settings
from strands_cosmos3.training.sharding import mean_over_ranks, rank_0_first, shard_policy
from strands_cosmos3.training.state import read_state
from strands_cosmos3.training.windows import ROWS, Batch, to_pixels
from strands_cosmos3.worlds.table.phrases import GOALS

Preview = PreviewDecoder | None
Sources = tuple[PictureWindows | ClipWindows, *tuple[PictureWindows, ...]]
"""Windows of a stage's steps: those that it is about, and pictures beside them."""
_CHECKPOINT_STEPS = 500
_RECORDED_CLIPS = 64
_METRIC_CLIPS = 192
_CPU_TOKENS = 12_000  # of a part
_VALIDATION_WINDOWS = 384
_VALIDATION_FRACTION = 0.04


class TrainingRun:
    """A run of the bundled policy's recipe.

    Args:
        folder, demos: Folders of the run and of the unpacked demonstrations.
        shard: This process's share of the data. Train the VAE and encode the latents with one
            process first.
        tensorboard: Whether curves are written for TensorBoard, too.
        closed_loop: Episodes in simulation that judge the policy during its stages.

    Raises:
        ConfigError: There are no demonstrations, or the folder holds a run with other options or
            demonstrations.
        MissingDependencyError: TensorBoard is not installed.
    """

    def __init__(
        self,
        folder: Path,
        demos: Path,
        config: RunConfig | None = None,
        on_step: OnStep | None = None,
        shard: DataShard | None = None,
        tensorboard: bool = False,
        closed_loop: ClosedLoop | None = None,
    ):
        if tensorboard:
            require_tensorboard()
        self.folder = folder
        self.config = config or RunConfig()
        self.shard = shard or DataShard()
        self._closed_loop = closed_loop or ClosedLoop()
        self._loop_options: dict[str, Any] = {"tensorboard": tensorboard}
        self._on_step = on_step or (lambda *_: None)
        self.demos = Demos.open(demos)
        self.tier = tier_of(*self.demos.canvas_hw)
        longest = int(self.demos.prefix_rows.max())
        if self.config.prefix_rows > longest:
            raise ConfigError(
                f"--prefix-rows is {self.config.prefix_rows}, and the longest action prefix of "
                f"these demonstrations has {longest} rows; record them with `--prefix-rows "
                f"{self.config.prefix_rows}`, or give {longest}."
            )
        folder.mkdir(parents=True, exist_ok=True)
        keep_settings(folder / "settings.json", {**self.config.fixed, "ticks": len(self.demos)})
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def vae_trainer(self) -> VaeTrainer:
        """The first stage."""
        return VaeTrainer(
            self.folder,
            self.demos,
            self.config,
            self.device,
            self._on_step,
            self._loop_options,
        )

    def train_policy(self, vae: Any) -> Path:
        """Train on frame 0 and actions; return the checkpoint."""
        config = self.config
        windows, validation = self._pictures(vae, config.policy_batch)
        policy = self._first_policy()
        return self._fit("policy", policy, (windows,), config.seed, vae, (1,), validation)

    def train_joint(self, vae: Any) -> Path:
        """Continue from the policy stage's averaged weights with the future and both dynamics;
        return the checkpoint.
        """
        config = self.config
        seed = self.config.seed
        latents = self._latents(vae).clips(config.clip_every)
        ticks = latents.ticks
        n_train = self._training_windows(ticks)
        windows = self._clip_windows(latents.among(slice(n_train)), config.joint_batch, seed)
        preview = self.train_preview(vae)
        pictures, validation = self._pictures(vae, config.joint_pictures)
        policy = self._first_policy()
        policy.load_state_dict(read_state(self.folder / "policy")[0]["ema"])
        checkpoint = self._fit(
            "joint",
            policy,
            (windows, pictures),
            seed + 1,
            vae,
            (1, 1 + ROWS),
            validation,
            preview,
            self._pixel_metric(latents.among(slice(n_train))),
            decay=config.joint_decay,
        )
        if not self.shard.rank:
            self._record_dynamics(checkpoint, ticks[n_train:])
        return checkpoint

    def train_decoder(self, vae: Any, last: Path) -> Path:
        """Train the VAE's decoder on, on clips that the last stage's checkpoint predicts; return
        the new checkpoint.
        """
        steps = self.config.decoder_steps
        folder = self.folder / "decoder"
        with rank_0_first(self.shard):  # which also exports the last stage's checkpoint
            opened = Checkpoint.open(last)
            keep_settings(folder / "joint.json", {"checkpoint": opened.digest})
            latents = self._latents(vae).clips(self.config.clip_every)
            latents = latents.among(np.isin(latents.ticks, self.demos.label_ticks))
            predicted = self._predicted(opened, self._clip_windows(latents))
        ticks = latents.ticks
        n_train = self._training_windows(ticks)
        train_only(vae, "post_quant_conv", "decoder")
        to_raw = raw_latents(vae)

        def loss(step: int) -> tuple[torch.Tensor, LossMetrics]:
            rng = np.random.default_rng([self.config.seed, 8, step])
            source = latents if rng.random() < TRUE else predicted
            chosen = rng.integers(n_train, size=self.config.decoder_batch)
            pixels = clip_pixels(self.demos, ticks[chosen], self.device)
            return decoder_loss(vae, to_raw(self._tensor(source[chosen])), pixels)

        self.vae_trainer.fit(vae, "decoder", loss, steps, RATE, decay=1.0, ema=0.99)
        vae.requires_grad_(False)
        checkpoint = folder / "checkpoint"
        if not self.shard.rank:
            self.vae_trainer.check_colours(vae, folder / "gate.json")
            with_vae(opened, vae, checkpoint)
            self._record_dynamics(checkpoint, ticks[n_train:])
        return checkpoint

    def _record_dynamics(self, checkpoint: Path, held_out: NDArray[np.int64]) -> None:
        """Write the figures of a checkpoint on every n-th of the held-out clips to
        ``dynamics.json`` beside it.
        """
        clips = self.demos.arm_clips(held_out[:: max(1, len(held_out) // _RECORDED_CLIPS)])
        report = judge_dynamics(checkpoint, clips, on_clip=self._progress("dynamics"))
        write_json(checkpoint.parent / "dynamics.json", asdict(report))

    def _predicted(self, last: Checkpoint, windows: ClipWindows) -> NDArray[np.float16]:
        """Return the latents that a checkpoint predicts for the windows' clips."""

        def predict() -> NDArray[np.float16]:
            policy = load_policy(last, get_embodiment(DOMAIN).domain_id).to(self.device)
            return predicted_latents(
                policy, windows, last.dynamics_from_frame, self._progress("predictions")
            )

        return _kept(self.folder / "decoder/predicted.npy", predict)

    def train_preview(self, vae: Any) -> Preview:
        """Train the decoder of films on the clips' latents; without steps there is none."""
        config = self.config
        if not config.preview_steps:
            return None
        latents = self._latents(vae).clips(config.clip_every)
        n_train = self._training_windows(latents.ticks)
        decoder = fresh_preview(config.latent_channels, config.seed).to(self.device)

        def loss(step: int) -> tuple[torch.Tensor, LossMetrics]:
            rng = np.random.default_rng([config.seed, 7, step])
            chosen = rng.integers(n_train, size=config.preview_batch)
            return preview_loss(decoder, *self._clips(latents, chosen))

        steps = config.preview_steps
        self.vae_trainer.fit(decoder, "preview", loss, steps, config.preview_lr, ema=0.995)
        return decoder

    def _novelty(self, vae: Any, preview: PreviewDecoder) -> float:
        """Return the quantile of the reconstruction's errors on held-out pictures."""
        ticks = self.demos.label_ticks
        latents = self._latents(vae).pictures()[ticks]
        unseen = np.arange(self._training_windows(ticks), len(ticks))
        pixels = to_pixels(self.demos.frames[ticks[unseen]])[..., : 16 * latents.shape[-1]]
        chosen = torch.from_numpy(latents[unseen].astype(np.float32))
        return novelty_rmse(preview, chosen.to(self.device), pixels.to(self.device))

    def _latents(self, vae: Any) -> LatentCache:
        return LatentCache(
            self.folder / "latents", self.demos, vae, self.device, self._progress("latents")
        )

    def _clip_windows(self, latents: ClipLatents, batch: int = 1, seed: int = 0) -> ClipWindows:
        config = self.config
        return ClipWindows(
            *(self.demos, latents, self.state, self.captions, batch),
            ticks=latents.ticks,
            forward=config.joint_forward,
            inverse=config.joint_inverse,
            seed=seed,
            prefix_rows=config.prefix_rows,
        )

    def _tensor(self, latents: NDArray[np.float16]) -> torch.Tensor:
        return torch.from_numpy(latents).to(self.device).float()

    def _clips(
        self, latents: ClipLatents, chosen: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents of chosen clips, and their pixels."""
        ticks = latents.ticks[chosen]
        return self._tensor(latents[chosen]), clip_pixels(self.demos, ticks, self.device)

    def _pixel_metric(self, latents: ClipLatents) -> torch.Tensor:
        """Return what the channels' errors in the video are multiplied by."""

        def measure() -> NDArray[np.float32]:
            chosen = spread(len(latents), _METRIC_CLIPS)
            parts = np.array_split(chosen, -(-len(chosen) // 8))
            return pixel_metric(self._clips(latents, part) for part in parts).cpu().numpy()

        metric = _kept(self.folder / "latents/pixel_metric.npy", measure)
        return torch.tensor(metric, device=self.device)

    def _first_policy(self) -> PolicyWithAuxiliaryHead:
        """Return the policy that training starts with."""
        policy = fresh_policy(self.transformer_config, self.config.seed)
        return PolicyWithAuxiliaryHead(policy, len(GOALS), self.config.seed)

    def _pictures(self, vae: Any, batch: int) -> tuple[PictureWindows, Batch]:
        """Return windows of frame 0 to train on, and held-out ones."""
        ticks = self.demos.label_ticks
        latents = self._latents(vae)
        n_train = self._training_windows(ticks)
        windows = PictureWindows(
            *(self.demos, latents.pictures()[ticks][:, :, 0], self.state, self.captions, batch),
            seed=self.config.seed,
            among=range(n_train),
            prefix_rows=self.config.prefix_rows,
            looks=latents.looks()[:, :, 0],
        )
        return windows, windows.held_out(n_train, _VALIDATION_WINDOWS)

    def _progress(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self._on_step(stage, done, total, {})

    def _training_windows(self, ticks: NDArray[np.int64]) -> int:
        """Return the number of windows to train on, given their first ticks; whole episodes at
        the end are held out.
        """
        ends = self.demos.last[ticks]
        n = int(len(ticks) * (1 - _VALIDATION_FRACTION))
        while n > 0 and ends[n] == ends[n - 1]:
            n -= 1
        if n == 0:
            raise ConfigError("too few demonstrations to hold an episode out; record more.")
        return n

    def _parts(self, sources: Sources) -> int:
        """Return in how many parts a step's windows are computed: on a CPU, so many that a
        process takes 2 GB.
        """
        tokens = (
            sum(source.batch(0).latents[:, 0].numel() for source in sources)
            / self.config.latent_patch**2
        )
        return 1 if self.device.type == "cuda" else ceil(tokens / _CPU_TOKENS)

    def _loss(
        self,
        policy: TrainedPolicy,
        seed: int,
        parts: int,
        sources: Sources,
        channels: torch.Tensor | None,
    ) -> Callable[[int], tuple[torch.Tensor, LossMetrics]]:
        """Return the loss of a step's windows, or by turns of its parts, of which it is the
        mean; for clips, plus pictures'.
        """
        config = self.config
        flow = FlowConfig(
            dynamics_from_frame=config.dynamics_from_frame,
            video=config.video,
            forward=config.joint_forward_weight,
            end_points=config.end_points,
            channels=channels,
        )

        def draw(step: int) -> list[tuple[Batch, Noised]]:
            noise = step_noise(seed, step)
            batches = [source.batch(step) for source in sources]
            return [
                (batch, add_noise(batch, self.transformer_config, flow, noise)) for batch in batches
            ]

        def loss_of(
            policy: TrainedPolicy, batch: Batch, noised: Noised, share: DataShard
        ) -> tuple[torch.Tensor, LossMetrics]:
            value, metrics = noised_loss(policy, batch, noised, flow, share)
            if not isinstance(batch, LabelledBatch):
                return value, metrics
            assert isinstance(policy, PolicyWithAuxiliaryHead)
            error = policy.auxiliary_error(batch, share.rank, share.ranks)
            return value + config.auxiliary * error, {**metrics, "auxiliary": error.detach()}

        drawn = Prefetcher(draw) if self.device.type == "cuda" else lru_cache(1)(draw)

        def loss(turn: int) -> tuple[torch.Tensor, LossMetrics]:
            step, part = divmod(turn, parts)
            share = DataShard(self.shard.rank + self.shard.ranks * part, self.shard.ranks * parts)

            def job(gathered: TrainedPolicy) -> tuple[torch.Tensor, LossMetrics]:
                (value, metrics), *others = (loss_of(gathered, *one, share) for one in drawn(step))
                for other, of_pictures in others:
                    total = metrics["loss"] + of_pictures["loss"]
                    alone = {"loss": total, "alone": of_pictures["action"]}
                    value = value + other
                    metrics = {**of_pictures, **metrics, **alone}
                return value, metrics

            with lower_precision(self.device, cpu=True):
                value, metrics = policy(job)
            return value, mean_over_ranks(metrics, self.shard.ranks)

        return loss

    def _fit(
        self,
        stage: str,
        policy: TrainedPolicy,
        sources: Sources,
        seed: int,
        vae: Any,
        frames: tuple[int, ...],
        validation: Batch,
        preview: Preview = None,
        channels: torch.Tensor | None = None,
        **options: float,
    ) -> Path:
        """Train a policy in a stage, with a validation and a checkpoint every now and then; return
        the checkpoint. ``options`` are of the loop.
        """
        config = self.config
        steps, windows, lr, matrix_lr = (
            getattr(config, f"{stage}_{name}") for name in ("steps", "batch", "lr", "matrix_lr")
        )
        policy = shard_policy(policy.to(self.device), self.shard.ranks)
        parts = self._parts(sources)
        how = TrainLoopConfig(
            steps, lr, accumulate=config.accumulate * parts, **{**self._loop_options, **options}
        )
        loss = self._loss(policy, seed, parts, sources, channels)
        muon = muon_and_adamw(matrix_lr, config.matrix_decay)
        loop = Loop(policy, loss, how, self.folder / stage, muon)
        checkpoint = loop.folder / "checkpoint"

        def validate() -> None:
            average = without_auxiliary_head(loop.average())
            if self.shard.rank:
                return
            self._validate(average, loop, windows, validation)
            export(
                checkpoint,
                self.config_json,
                average,
                vae,
                self.tokenizer,
                self.state,
                self.tier,
                frames=frames,
                label=f"trained by strands_cosmos3, stage {stage}, {loop.step * windows} windows; "
                "it knows one simulated table",
                steps=loop.step,
                dynamics_from_frame=config.dynamics_from_frame,
                prefix_rows=config.prefix_rows,
                language=LANGUAGE,
                preview=preview,
                novelty=None if preview is None else self._novelty(vae, preview),
            )

        def judge(again: bool = True) -> None:
            """Validate and evaluate where it is time to; what is there already, only ``again``."""
            step, closed_loop = loop.step, self._closed_loop
            evaluates = closed_loop.due(step, steps) and (again or loop.lacks(CLOSED_LOOP))
            exports = evaluates or step % _CHECKPOINT_STEPS == 0 or step >= steps
            if exports and (again or released_steps(checkpoint) != step):
                validate()
            if not evaluates or self.shard.rank:
                return
            if successes := measure_apart(checkpoint, closed_loop):
                loop.record(CLOSED_LOOP, successes)

        def on_step(step: int, metrics: Metrics) -> None:
            self._on_step(stage, step, steps, metrics)
            judge()

        if loop.step:  # it may have been interrupted there
            judge(again=False)
        loop.run(on_step=on_step)
        return checkpoint

    def _validate(
        self, average: dict[str, torch.Tensor], loop: Loop, windows: int, validation: Batch
    ) -> None:
        """Append the errors of averaged weights on held-out windows to the stage's
        ``validation.jsonl``.
        """
        policy = fresh_policy(self.transformer_config)
        policy.load_state_dict(average)
        errors = asdict(chunk_errors(predict_rows(policy, validation), validation.rows))
        loop.record("validation", {"windows": loop.step * windows, **errors})

    @cached_property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            fresh_tokenizer(folder, self.demos.canvas_hw)
        return folder

    @cached_property
    def captions(self) -> Captions:
        """Token ids of every caption."""
        return read_captions(self.tokenizer, self.demos.canvas_hw)

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """Content of ``transformer/config.json``."""
        tokenizer = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        return transformer_config(self.config.sizes, "silu", tokenizer.get_vocab_size())

    @property
    def transformer_config(self) -> TransformerConfig:
        """The same, typed."""
        return TransformerConfig.from_dict(self.config_json)

    @cached_property
    def state(self) -> StateRow:
        """Scale of the state row."""
        return state_row_of(self.demos)


def _kept(path: Path, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """Return an array that a file keeps; it is made when it is first asked for."""
    if not path.exists():
        made = make()
        write_whole(path, lambda unfinished: np.save(unfinished, made))
    return np.load(path, mmap_mode="r")
