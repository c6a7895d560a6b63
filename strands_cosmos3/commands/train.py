"""``strands-cosmos3 train``: post-train a released checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from strands_cosmos3.checks import positive, seed_number, whole_number
from strands_cosmos3.commands.fetch import locate_dataset
from strands_cosmos3.commands.files import require_writable_folder
from strands_cosmos3.commands.progress import terminated_as_interrupted, training_progress
from strands_cosmos3.commands.push import push_folder, require_repository
from strands_cosmos3.extras import needed_by
from strands_cosmos3.options import section
from strands_cosmos3.resources import locked
from strands_cosmos3.training.options import PostConfig

if TYPE_CHECKING:
    from strands_cosmos3.training.closed_loop import ClosedLoop
    from strands_cosmos3.training.matching import DataShard


@dataclass(frozen=True)
class Train:
    """Post-train a released checkpoint on a dataset.

    Only the weights that --train names are trained. Writes <out>/checkpoint. The state is saved
    every two minutes, on Ctrl-C and on SIGTERM; run the command again to resume.

    On several processes: torchrun --nproc-per-node N -m strands_cosmos3 train ... Several machines
    (docs/scaling.md) share the folder of the run.
    """

    out: Path
    """Folder of the run."""
    model: str
    """Checkpoint to begin from: a folder in the released layout, or owner/name[@revision] on the
    Hugging Face hub.
    """
    dataset: str
    """LeRobot v3 dataset with end-effector poses of the Cosmos frame: a folder, or
    owner/name[@revision] on the Hugging Face hub.
    """
    pose_key: str = "observation.ee_pose"
    """Feature with the pose of the Cosmos frame: position and quaternion xyzw."""
    camera_keys: tuple[str, ...] = ()
    """One camera, or the rig's three in order. The default is what the dataset has."""
    tensorboard: bool = True
    """Write the curves for TensorBoard, too: tensorboard --logdir OUT."""
    evaluate_every: int = 0
    """Every so many steps, and at the end, run a few episodes in simulation; success and time to
    success join the curves.
    """
    evaluate_world: str = "table"
    """World of these episodes: table, libero/SUITE, or module:name of your own."""
    evaluate_tasks: tuple[str, ...] = ("reach", "pick")
    """Tasks of these episodes."""
    evaluate_episodes: int = 4
    """Episodes of each task, in the same scenes each time."""
    verify: bool = False
    """Read every byte of the checkpoint for its SHA-256, which tells whether a run is of it,
    whatever is remembered of files of the same size, inode and times.
    """
    training: PostConfig = section(PostConfig)
    push: str | None = None
    """Upload the checkpoint to this repository of the Hugging Face hub, e.g. me/policy; a new
    one is private.
    """

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        training = ("train",) if self.tensorboard or self.training.lora_rank else ()
        return ("sim", "engine", "data", *training)

    def run(self) -> int:
        """Train, and print the path of the checkpoint."""
        from strands_cosmos3.training.closed_loop import ClosedLoop

        training = self.training
        whole_number(self.evaluate_episodes, "--evaluate-episodes", 1)
        whole_number(self.evaluate_every, "--evaluate-every", 0)
        whole_number(training.lora_rank, "--lora-rank", 0)
        for name in ("batch", "steps", "accumulate", "validate_every"):
            whole_number(getattr(training, name), f"--{name.replace('_', '-')}", 1)
        seed_number(training.seed, "--seed")
        positive(training.lr, "--lr")
        closed_loop = ClosedLoop(
            self.evaluate_every,
            self.evaluate_tasks,
            self.evaluate_episodes,
            world=self.evaluate_world,
        )
        require_writable_folder(self.out, "--out")
        require_repository(self.push)
        console = Console()
        with needed_by("train"), terminated_as_interrupted():
            checkpoint = self._post_train(console, closed_loop)
        if int(os.environ.get("RANK", "0")) == 0:
            plot_curves(self.out, {"post-training": "."})
            console.print(f"checkpoint: {checkpoint}")
            if self.push is not None:
                console.print(f"pushed to {push_folder(checkpoint, self.push, 'model')}")
        return 0

    def _post_train(self, console: Console, closed_loop: ClosedLoop) -> Path:
        from strands_cosmos3.engine.checkpoint import Checkpoint, locate
        from strands_cosmos3.training.arm_columns import ArmKeys
        from strands_cosmos3.training.post import PostTraining
        from strands_cosmos3.training.sharding import (
            processes,
            rank_0_first,
            require_one_folder,
        )

        keys = ArmKeys(pose=self.pose_key, cameras=self.camera_keys)
        with ExitStack() as stack:
            shard = stack.enter_context(processes())
            with rank_0_first(shard):
                dataset = locate_dataset(self.dataset, "--dataset")  # before a folder is made
            stack.enter_context(locked_run(self.out, shard))
            require_one_folder(self.out, shard)
            show = stack.enter_context(training_progress(console, shard.rank == 0))
            if self.verify and not shard.rank:
                Checkpoint.open(locate(self.model)).read_anew()
            with rank_0_first(shard):
                post = PostTraining(
                    self.model,
                    dataset,
                    self.out,
                    self.training,
                    keys,
                    show,
                    self.tensorboard,
                    shard,
                    closed_loop,
                )
            each = post.windows.frames_per_row
            console.print(
                f"{len(post.windows)} windows{f' of every {each}. frame' * (each > 1)}; trained: "
                f"{', '.join(post.trained[:6])}{' ...' * (len(post.trained) > 6)}"
            )
            return post.run()


@contextmanager
def locked_run(folder: Path, shard: DataShard) -> Iterator[None]:
    """Make and lock the folder of a run; its first process does both."""
    if shard.rank:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "--out"):
        yield


def plot_curves(folder: Path, loops: Mapping[str, str]) -> None:
    """Draw the learning curves of a run to ``<folder>/curves.png``, if there are any.

    ``loops``: Title -> folder of a loop in the run's.
    """
    from strands_cosmos3.sim.plot import plot_learning
    from strands_cosmos3.training.loop import read_curve

    curves: dict[str, Any] = {}
    for title, name in loops.items():
        for kind in ("curve", "validation", "closed_loop"):
            if points := read_curve(folder / name / f"{kind}.jsonl"):
                curves[f"{title}: {kind.replace('_', ' ')}"] = points
    if curves:
        plot_learning(curves, folder / "curves.png")
