"""``python -m recipes.table_policy.train``: train the table policy on demonstrations, stage by
stage.

Train the VAE, check that it preserves colours, encode every picture and clip, train on frame 0 and
actions (<out>/policy/checkpoint), jointly with the future and both dynamics
(<out>/joint/checkpoint), and then the VAE's decoder on what that predicts
(<out>/decoder/checkpoint). The state is saved every two minutes, on Ctrl-C and on SIGTERM; run the
command again to resume.

On several processes, after the VAE and the latents are made:
torchrun --nproc-per-node N -m recipes.table_policy.train ...
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from recipes.table_policy.config import RunConfig
from recipes.table_policy.demos import is_unpacked, unpack
from recipes.table_policy.run import TrainingRun
from strands_cosmos3.cli import program, status_of
from strands_cosmos3.commands.fetch import locate_dataset
from strands_cosmos3.commands.progress import terminated_as_interrupted, training_progress
from strands_cosmos3.commands.train import locked_run, plot_curves
from strands_cosmos3.training.closed_loop import ClosedLoop
from strands_cosmos3.training.sharding import processes

STAGES = ("vae", "vae_decoder", "policy", "preview", "joint", "decoder")


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command."""

    out: Path  # folder of the run
    # dataset that recipes.table_policy.record wrote: a folder, or owner/name[@revision] on the hub
    demos: str
    until: Literal["vae", "policy", "preview", "joint", "decoder"] = "decoder"  # last stage
    tensorboard: bool = True  # write the curves for TensorBoard, too
    evaluate_every: int = 0  # steps between episodes in simulation, which join the curves; 0: none
    evaluate_tasks: tuple[str, ...] = ("reach", "pick")  # tasks of these episodes
    evaluate_episodes: int = 4  # episodes of each task
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=RunConfig)


def train(options: TrainOptions, console: Console) -> Path | None:
    """Train the stages up to the last one; return the checkpoint, None after the VAE."""
    closed_loop = ClosedLoop(
        options.evaluate_every, options.evaluate_tasks, options.evaluate_episodes
    )
    source = locate_dataset(options.demos, "--demos")
    demos = source if is_unpacked(source) else options.out / "unpacked"
    config = options.run
    with (
        terminated_as_interrupted(),
        processes() as shard,
        locked_run(options.out, shard),
        training_progress(console, shard.rank == 0) as show,
    ):
        if demos != source:
            unpack(source, demos, lambda done, total: show("unpacking", done, total, {}))
        run = TrainingRun(options.out, demos, config, show, shard, options.tensorboard, closed_loop)
        vae = run.vae_trainer.train()
        if options.until == "vae":
            return None
        checkpoint = run.train_policy(vae)
        if options.until == "preview":
            run.train_preview(vae)
        if options.until not in ("joint", "decoder"):
            return checkpoint
        checkpoint = run.train_joint(vae)
        if options.until == "decoder" and config.decoder_steps:
            checkpoint = run.train_decoder(vae, checkpoint)
        return checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the path of the checkpoint; return an exit status."""
    options = tyro.cli(TrainOptions, args=arguments, description=__doc__)
    console = Console()

    def work() -> None:
        checkpoint = train(options, console)
        if int(os.environ.get("RANK", "0")) == 0:
            plot_curves(options.out, {stage: stage for stage in STAGES})
            console.print(f"checkpoint: {checkpoint}" if checkpoint else "the VAE is trained")

    return status_of("table policy", work)


if __name__ == "__main__":
    program(main)
