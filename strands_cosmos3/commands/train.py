"""``strands-cosmos3 train``: a small policy from demonstrations, or a released checkpoint post-trained on an arm's episodes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strands_cosmos3.checks import whole_number
from strands_cosmos3.errors import ConfigError, MissingDependencyError

_STAGES = ("vae", "vae_clips", "policy", "joint")


@dataclass(frozen=True)
class Train:
    """Train a small policy of the genuine architecture from demonstrations, or post-train a released checkpoint.

    From demonstrations (--demos): the VAE and its gate, every picture and clip encoded once, flow matching on frame 0 and
    actions, then jointly with the future and both dynamics. Each stage writes a state every two minutes and goes on from it
    when the command is given again; checkpoints in the released layout lie in <out>/policy/checkpoint and
    <out>/joint/checkpoint.

    Post-training (--checkpoint and --dataset): everything is frozen but the weights that --train names; the checkpoint lies in
    <out>/checkpoint, with the dataset's own statistics beside it.

    On several processes, once VAE and latents are made: torchrun --nproc-per-node N -m strands_cosmos3 train ...
    """

    out: Path
    """Folder of the run."""
    demos: Path | None = None
    """Demonstrations: the dataset that `strands-cosmos3 demos` wrote."""
    vae: Path | None = None
    """Another run whose VAE is taken instead of training one: a second policy, or one on more demonstrations."""
    start: Path | None = None
    """A checkpoint that this command made, to go on from with other demonstrations or with the next stage: its VAE on
    pictures (but for what --vae brings), its words, its weights. --policy-steps 0 goes straight to the joint stage."""
    until: Literal["vae", "policy", "joint"] = "joint"
    """The last stage."""
    hidden: int = 128
    """Width of both towers."""
    layers: int = 4
    """Layers of both towers."""
    vae_steps: int = 4000
    """Steps of the VAE on pictures."""
    vae_clip_steps: int = 1500
    """Steps of the VAE on clips; what a first frame passes through stays as it is."""
    policy_steps: int = 16000
    """Steps on frame 0 and actions."""
    joint_steps: int = 12000
    """Steps with the future."""
    policy_batch: int = 64
    """Windows in a step on frame 0 and actions."""
    joint_batch: int = 32
    """Windows in a step with the future."""
    seed: int = 0
    """Of weights, order and noise."""
    checkpoint: str | None = None
    """Post-training: folder in the released layout, or hub repository."""
    dataset: Path | None = None
    """Post-training: a LeRobot v3 dataset with end-effector poses of the Cosmos frame."""
    train: tuple[str, ...] = ("action_proj_*", "action_modality_embed")
    """Post-training: shell patterns of the weights that are trained, by their names in the released layout."""
    lora_rank: int = 0
    """Post-training: rank of adapters beside the generation tower's projections; 0 is none."""
    lora_targets: tuple[str, ...] = ("q", "k", "v", "out")
    """Post-training: which projections get adapters."""
    stats: Literal["dataset", "packaged"] = "dataset"
    """Post-training: statistics of the rows: the dataset's own, or the embodiment's."""
    embodiment: str | None = None
    """Post-training: whose rows. The default is the checkpoint's, else droid."""
    pose_key: str = "observation.ee_pose"
    """Post-training: feature with the pose of the Cosmos frame: position and quaternion xyzw."""
    camera_keys: tuple[str, ...] = ()
    """Post-training: one camera, or the rig's three in order. The default is what the dataset has."""
    steps: int = 1000
    """Post-training: steps."""
    batch: int = 8
    """Post-training: windows in a step."""
    lr: float = 1e-4
    """Post-training: learning rate."""

    def run(self) -> int:
        """Train, and say where the checkpoint lies."""
        if (self.demos is None) == (self.checkpoint is None):
            raise ConfigError("give --demos for a new small policy, or --checkpoint and --dataset for post-training.")
        if (self.checkpoint is None) != (self.dataset is None):
            raise ConfigError("--checkpoint and --dataset belong together.")
        if self.checkpoint is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("post-training (--checkpoint) runs in one process; start it without torchrun.")
        for name in ("policy_batch", "joint_batch", "batch", "policy_steps", "joint_steps", "vae_steps", "steps"):
            least = 0 if name == "policy_steps" and self.start is not None else 1
            whole_number(getattr(self, name), f"--{name.replace('_', '-')}", least)
        console = Console()
        try:
            checkpoint = self._post_train(console) if self.demos is None else self._from_demos(self.demos, console)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"training needs {error.name}: pip install 'strands-cosmos3[train]'.") from None
        if int(os.environ.get("RANK", "0")) == 0:
            plot(self.out)
            console.print(f"checkpoint: {checkpoint}" if checkpoint else f"VAE: {self.out / 'vae/final.pt'}")
        return 0

    def _from_demos(self, demos: Path, console: Console) -> Path | None:
        from strands_cosmos3.training.lerobot import unpack
        from strands_cosmos3.training.run import SmallRun
        from strands_cosmos3.training.run_config import RunConfig, tier_of
        from strands_cosmos3.training.sharding import processes
        from strands_cosmos3.training.shards import Demos

        sizes = ("hidden", "layers", "policy_batch", "joint_batch", "seed")
        steps = ("vae_steps", "vae_clip_steps", "policy_steps", "joint_steps")
        given = {name: getattr(self, name) for name in (*sizes, *steps)}
        shards = demos if any(demos.glob("shard-*.npz")) else self.out / "unpacked"
        with processes() as share, _shown(console, share.rank == 0) as show:
            if shards is not demos:
                unpack(demos, shards, lambda done, of: show("unpacking", done, of, {}))
            first = Demos.open(
                shards, [int(path.stem.removeprefix("shard-")) for path in sorted(shards.glob("shard-*.npz"))[:1]]
            )
            config = RunConfig(**given, tier=tier_of(*first.frame(0).shape[:2]))
            run = SmallRun(self.out, shards, config, show, share, self.start)
            vae = run.train_vae() if self.vae is None else run.take_vae(self.vae)
            if self.until == "vae":
                return None
            checkpoint = run.train_policy(vae) if self.policy_steps else None
            return checkpoint if self.until == "policy" else run.train_joint(vae)

    def _post_train(self, console: Console) -> Path:
        from strands_cosmos3.training.arm_windows import ArmKeys
        from strands_cosmos3.training.post import PostConfig, PostTraining

        assert self.checkpoint is not None
        assert self.dataset is not None
        config = PostConfig(
            train=self.train,
            lora_rank=self.lora_rank,
            lora_targets=self.lora_targets,
            stats=self.stats,
            embodiment=self.embodiment,
            steps=self.steps,
            batch=self.batch,
            lr=self.lr,
            seed=self.seed,
        )
        keys = ArmKeys(pose=self.pose_key, cameras=self.camera_keys)
        with _shown(console, True) as show:
            post = PostTraining(self.checkpoint, self.dataset, self.out, config, keys, show)
            console.print(
                f"{len(post.windows)} windows; trained: {', '.join(post.trained[:6])}{' ...' * (len(post.trained) > 6)}"
            )
            return post.run()


def plot(folder: Path) -> Path | None:
    """Draw the learning curves of a run's stages into ``<folder>/curves.png``; None where there are none yet."""
    from strands_cosmos3.sim.plot import plot_learning

    curves: dict[str, Any] = {}
    for stage in (*_STAGES, "."):
        for name in ("curve", "held_out"):
            path = folder / stage / f"{name}.jsonl"
            if path.exists():
                lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                curves[f"{'post-training' if stage == '.' else stage}: {name.replace('_', ' ')}"] = lines
    if not curves:
        return None
    plot_learning(curves, folder / "curves.png")
    return folder / "curves.png"


@contextmanager
def _shown(console: Console, speaks: bool) -> Iterator[Callable[[str, int, int, Mapping[str, float]], None]]:
    """A row for each stage with its progress and its last loss."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[parts]}"),
    )
    rows: dict[str, Any] = {}
    with Progress(*columns, console=console, disable=not speaks) as bar:

        def show(stage: str, done: int, of: int, parts: Mapping[str, float]) -> None:
            if stage not in rows:
                rows[stage] = bar.add_task(stage, total=of, parts="")
            said = "  ".join(f"{name} {value:.4g}" for name, value in parts.items())
            bar.update(rows[stage], completed=done, parts=said)

        yield show
