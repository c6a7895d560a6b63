"""``strands-cosmos3 train``: train a small policy on demonstrations, or post-train a released
checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from strands_cosmos3.checks import positive, seed_number, whole_number
from strands_cosmos3.commands.fetch import locate_dataset
from strands_cosmos3.commands.files import require_writable_folder
from strands_cosmos3.commands.push import push_folder, require_repository
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.resources import locked

if TYPE_CHECKING:
    from strands_cosmos3.training.closed_loop import ClosedLoop
    from strands_cosmos3.training.matching import DataShard

_STAGES = ("vae", "vae_decoder", "policy", "preview", "joint", "decoder")


@dataclass(frozen=True)
class Train:
    """Train a small policy, or post-train a released checkpoint.

    From demonstrations (--demos): train the VAE, check that it preserves colours, encode every
    picture and clip, train on frame 0 and actions (<out>/policy/checkpoint), jointly with the
    future and both dynamics (<out>/joint/checkpoint), and then the VAE's decoder on what that
    predicts (<out>/decoder/checkpoint). The state is saved every two minutes, on Ctrl-C and on
    SIGTERM; run the command again to resume.

    Post-training (--checkpoint and --dataset): train only the weights that --train names, and write
    <out>/checkpoint.

    On several processes: torchrun --nproc-per-node N -m strands_cosmos3 train ... (from
    demonstrations, after the VAE and the latents are made).
    """

    out: Path
    """Folder of the run."""
    demos: str | None = None
    """Dataset that `strands-cosmos3 demos` wrote: a folder, or owner/name or owner/name@revision
    on the Hugging Face hub.
    """
    vae: Path | None = None
    """Use the VAE of another run, for a second policy or for more demonstrations."""
    start: Path | None = None
    """Continue from a checkpoint that this command made (--vae replaces its VAE). --policy-steps
    0 skips to the joint stage.
    """
    until: Literal["vae", "policy", "preview", "joint", "decoder"] = "decoder"
    """Last stage to run."""
    hidden: int = 192
    """Width of both towers."""
    layers: int = 4
    """Number of layers of both towers."""
    latent_patch: Literal[1, 2] = 1
    """Side of a vision token, in latents of 16 pixels. 2 makes a fourth as many: faster
    training, but worse dynamics.
    """
    vae_steps: int = 1000
    """Steps of the VAE's encoder, on pictures and clips."""
    gate: bool = True
    """Stop if the VAE loses colours; without, the stages can be tried out in a few steps."""
    vae_decoder_steps: int = 800
    """Then steps of its decoder; --start brings a finished VAE."""
    policy_steps: int = 600
    """Steps on frame 0 and actions."""
    joint_steps: int = 3200
    """Steps with the future."""
    preview_steps: int = 3000
    """Steps of the decoder of films; 0 leaves it out, or keeps that of --start."""
    decoder_steps: int = 400
    """Steps of the VAE's decoder on predicted clips, which changes no action; 0 leaves it as it
    is.
    """
    policy_batch: int = 160
    """Windows per step on frame 0 and actions."""
    joint_batch: int = 40
    """Windows per step with the future."""
    looks_from: int = 0
    """First step on frame 0 at which half of the pictures have other looks: table, light,
    colours and cameras.
    """
    prefix_rows: int = 0
    """Longest action prefix, which half of a policy's windows then have, and for which the
    checkpoint asks. Needs the labels of `demos --prefix-rows`.
    """
    accumulate: int = 1
    """Average the gradients of so many draws of windows per step: larger batches in the same
    memory (not for the VAE).
    """
    seed: int = 0
    """Seed of weights, order and noise."""
    tensorboard: bool = True
    """Write the curves for TensorBoard, too: tensorboard --logdir OUT."""
    evaluate_every: int = 0
    """Every so many steps, and at the end, run a few episodes in simulation; success and time to
    success join the curves.
    """
    evaluate_tasks: tuple[str, ...] = ("reach", "pick")
    """Tasks of these episodes."""
    evaluate_episodes: int = 4
    """Episodes of each task, in the same scenes each time."""
    push: str | None = None
    """Upload the checkpoint to this repository of the Hugging Face hub, e.g. me/policy; a new
    one is private.
    """
    checkpoint: str | None = None
    """Folder in the released layout, or hub repository."""
    dataset: str | None = None
    """LeRobot v3 dataset with end-effector poses of the Cosmos frame: a folder, or
    owner/name[@revision] on the hub.
    """
    train: tuple[str, ...] = ("action_proj_*", "action_modality_embed")
    """Shell patterns of the weights to train, by their names in the released layout."""
    lora_rank: int = 0
    """Rank of adapters of the generation tower's projections; 0 means no adapters."""
    lora_targets: tuple[str, ...] = ("q", "k", "v", "out")
    """Projections that get adapters."""
    stats: Literal["dataset", "packaged"] = "dataset"
    """Normalise rows with the dataset's own statistics or with the embodiment's."""
    embodiment: str | None = None
    """Embodiment of the rows. The default is the checkpoint's, else droid."""
    pose_key: str = "observation.ee_pose"
    """Feature with the pose of the Cosmos frame: position and quaternion xyzw."""
    camera_keys: tuple[str, ...] = ()
    """One camera, or the rig's three in order. The default is what the dataset has."""
    validation_fraction: float = 0.1
    """Fraction of the episodes, at the end, that only validate; rounded down."""
    validate_every: int = 100
    """Steps between validations: the loss of the averaged weights on held-out windows."""
    policy_frames: int | None = None
    """Frames of the clip that the policy denoises, one of the checkpoint's, which is the
    default. 1 trains actions alone, with the expert's answers if the dataset has them (`demos
    --robot`).
    """
    steps: int = 1000
    """Number of steps."""
    batch: int = 8
    """Windows per step."""
    lr: float = 1e-4
    """Learning rate."""

    RENAMED_FLAGS: ClassVar[Mapping[str, str]] = {"--held-out": "--validation-fraction"}
    GROUPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Run": ("out", "seed", "accumulate", "tensorboard", "push"),
        "Episodes in simulation during training": (
            "evaluate_every",
            "evaluate_tasks",
            "evaluate_episodes",
        ),
        "A small policy from demonstrations": (
            *(
                "demos",
                "until",
                "vae",
                "start",
                "hidden",
                "layers",
                "latent_patch",
                "vae_steps",
                "gate",
            ),
            *("vae_decoder_steps", "preview_steps", "policy_steps", "joint_steps", "decoder_steps"),
            *("policy_batch", "joint_batch", "looks_from", "prefix_rows"),
        ),
        "Post-training of a checkpoint": (
            *(
                "checkpoint",
                "dataset",
                "train",
                "lora_rank",
                "lora_targets",
                "stats",
                "embodiment",
                "pose_key",
                "camera_keys",
            ),
            *("validation_fraction", "validate_every", "policy_frames", "steps", "batch", "lr"),
        ),
    }

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        return ("sim", "engine", "data", *(("train",) if self.lora_rank else ()))

    def run(self) -> int:
        """Train, and print the path of the checkpoint."""
        if (self.demos is None) == (self.checkpoint is None):
            raise ConfigError(
                "give --demos for a new small policy, or --checkpoint and --dataset for "
                "post-training."
            )
        if (self.checkpoint is None) != (self.dataset is None):
            raise ConfigError("--checkpoint and --dataset must be given together.")
        for name in (
            *(
                "policy_batch",
                "joint_batch",
                "batch",
                "policy_steps",
                "joint_steps",
                "vae_steps",
                "steps",
                "accumulate",
            ),
            *("vae_decoder_steps", "evaluate_episodes", "validate_every"),
        ):
            least = 0 if name == "policy_steps" and self.start is not None else 1
            whole_number(getattr(self, name), f"--{name.replace('_', '-')}", least)
        for name in (
            *("hidden", "layers", "preview_steps", "decoder_steps", "prefix_rows", "lora_rank"),
            "evaluate_every",
        ):
            whole_number(
                getattr(self, name),
                f"--{name.replace('_', '-')}",
                int(name in ("hidden", "layers")),
            )
        seed_number(self.seed, "--seed")
        positive(self.lr, "--lr")
        closed_loop = self._closed_loop()
        require_writable_folder(self.out, "--out")
        require_repository(self.push)
        console = Console()
        with needed_by("train"), terminated_as_interrupted():
            checkpoint = (
                self._post_train(console, closed_loop)
                if self.demos is None
                else self._from_demos(locate_dataset(self.demos, "--demos"), console, closed_loop)
            )
        if int(os.environ.get("RANK", "0")) == 0:
            plot(self.out)
            console.print(
                f"checkpoint: {checkpoint}" if checkpoint else f"VAE: {self.out / 'vae/final.pt'}"
            )
            if self.push is not None and checkpoint is not None:
                console.print(f"pushed to {push_folder(checkpoint, self.push, 'model')}")
        return 0

    def _from_demos(self, demos: Path, console: Console, closed_loop: ClosedLoop) -> Path | None:
        from strands_cosmos3.training.bundled.lerobot import unpack
        from strands_cosmos3.training.bundled.run import TrainingRun
        from strands_cosmos3.training.bundled.run_config import RunConfig, tier_of
        from strands_cosmos3.training.bundled.shards import Demos, shard_indices
        from strands_cosmos3.training.sharding import processes

        names = (
            "hidden",
            "layers",
            "latent_patch",
            "policy_batch",
            "joint_batch",
            "looks_from",
            "accumulate",
            "seed",
            "gate",
        )
        names += (
            "vae_steps",
            "vae_decoder_steps",
            "policy_steps",
            "joint_steps",
            "preview_steps",
            "decoder_steps",
        )
        names += ("prefix_rows",)
        unpacked = bool(shard_indices(demos))
        shards = demos if unpacked else self.out / "unpacked"
        with (
            processes() as shard,
            _alone(self.out, shard),
            _progress(console, shard.rank == 0) as show,
        ):
            if not unpacked:
                unpack(demos, shards, lambda done, total: show("unpacking", done, total, {}))
            tier = tier_of(*Demos.open(shards, shard_indices(shards)[:1]).canvas_hw)
            config = RunConfig(**{name: getattr(self, name) for name in names}, tier=tier)
            run = TrainingRun(
                self.out, shards, config, show, shard, self.start, self.tensorboard, closed_loop
            )
            vae = run.vae_stage.train() if self.vae is None else run.vae_stage.copy_from(self.vae)
            if self.until == "vae":
                return None
            checkpoint = run.train_policy(vae) if self.policy_steps else None
            if self.until == "preview":
                run.train_preview(vae)
            if self.until not in ("joint", "decoder"):
                return checkpoint
            last = run.train_joint(vae)
            return (
                run.train_decoder(vae, last)
                if self.until == "decoder" and self.decoder_steps
                else last
            )

    def _post_train(self, console: Console, closed_loop: ClosedLoop) -> Path:
        from strands_cosmos3.training.arm_windows import ArmKeys
        from strands_cosmos3.training.post import PostConfig, PostTraining
        from strands_cosmos3.training.sharding import processes, rank_0_first

        assert self.checkpoint is not None
        assert self.dataset is not None
        names = (
            "train",
            "lora_rank",
            "lora_targets",
            "stats",
            "embodiment",
            "steps",
            "batch",
            "lr",
            "accumulate",
            "seed",
        )
        names += ("validation_fraction", "validate_every", "policy_frames")
        config = PostConfig(**{name: getattr(self, name) for name in names})
        keys = ArmKeys(pose=self.pose_key, cameras=self.camera_keys)
        with (
            processes() as shard,
            _alone(self.out, shard),
            _progress(console, shard.rank == 0) as show,
        ):
            more = (self.tensorboard, shard, closed_loop)
            with rank_0_first(shard):
                dataset = locate_dataset(self.dataset, "--dataset")
                post = PostTraining(self.checkpoint, dataset, self.out, config, keys, show, *more)
            console.print(
                f"{len(post.windows)} windows; trained: "
                f"{', '.join(post.trained[:6])}{' ...' * (len(post.trained) > 6)}"
            )
            return post.run()

    def _closed_loop(self) -> ClosedLoop:
        from strands_cosmos3.training.closed_loop import ClosedLoop

        return ClosedLoop(self.evaluate_every, self.evaluate_tasks, self.evaluate_episodes)


@contextmanager
def _alone(folder: Path, shard: DataShard) -> Iterator[None]:
    """Make and lock the folder of a run; its first process does both."""
    if shard.rank:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "--out"):
        yield


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, which schedulers send, end a run as Ctrl-C does: the state is saved first."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def plot(folder: Path) -> Path | None:
    """Draw the learning curves of a run to ``<folder>/curves.png`` and return its path, or None
    if there are no curves yet.
    """
    from strands_cosmos3.sim.plot import plot_learning

    curves: dict[str, Any] = {}
    for stage in (*_STAGES, "."):
        for name in ("curve", "validation", "held_out", "closed_loop"):
            path = folder / stage / f"{name}.jsonl"
            if path.exists():
                lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                curves[
                    f"{'post-training' if stage == '.' else stage}: {name.replace('_', ' ')}"
                ] = lines
    if not curves:
        return None
    plot_learning(curves, folder / "curves.png")
    return folder / "curves.png"


class LoggedProgress(Progress):
    """Progress bars on a terminal; in a file or a pipe, a line every minute."""

    _last_s = -math.inf

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task as ``Progress.update`` does."""
        super().update(task_id, **changes)
        task, now_s = self._tasks[task_id], time.monotonic()
        if self.disable or self.console.is_terminal or now_s - self._last_s < 60:
            return
        self._last_s = now_s
        left = "" if task.time_remaining is None else f"  {task.time_remaining / 60:.0f} min left"
        metrics = task.fields.get("metrics", "")
        self.console.print(
            f"{task.description} {task.completed:.0f}/{task.total:.0f}{left}  {metrics}".rstrip(),
            soft_wrap=True,
        )


def progress_bar(console: Console, *columns: ProgressColumn, disable: bool = False) -> Progress:
    """Return a progress bar with counts and remaining time, and further columns on the right."""
    left = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return LoggedProgress(*left, *columns, console=console, transient=not columns, disable=disable)


@contextmanager
def _progress(
    console: Console, enabled: bool
) -> Iterator[Callable[[str, int, int, Mapping[str, float]], None]]:
    """Show a row for each stage with its progress and its last metrics."""
    tasks: dict[str, Any] = {}
    with progress_bar(console, TextColumn("{task.fields[metrics]}"), disable=not enabled) as bar:

        def show(stage: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, metrics="")
            text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            bar.update(tasks[stage], completed=done, metrics=text)

        yield show
