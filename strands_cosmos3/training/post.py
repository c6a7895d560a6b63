"""Post-train a released checkpoint on an arm's episodes and write a checkpoint in the same layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from strands_cosmos3.actions.normalization import ActionStats
from strands_cosmos3.datasets import Dataset
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.engine.checkpoint import STATISTICS, Checkpoint, locate
from strands_cosmos3.engine.metadata import METADATA
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.engine.weight_files import sha256
from strands_cosmos3.errors import ConfigError, VariantError
from strands_cosmos3.resources import write_folder, write_json
from strands_cosmos3.training.adapters import ALPHA, HEADS, adapter_state, add_lora, merged_state, train_only
from strands_cosmos3.training.arm_windows import LATENTS, ArmKeys, ArmWindows, WindowConfig, row_statistics, write_statistics
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import Loop, LossMetrics, TrainLoopConfig
from strands_cosmos3.training.matching import FlowConfig, flow_loss
from strands_cosmos3.training.release import load_policy, replace_weights
from strands_cosmos3.training.run_manifest import identity_of, keep_settings
from strands_cosmos3.training.state import has_state

SETTINGS = "settings.json"


@dataclass(frozen=True)
class PostConfig:
    """Options of post-training."""

    train: tuple[str, ...] = HEADS  # patterns of the weights to train, by released names; everything else is frozen
    lora_rank: int = 0  # of adapters of the generation tower's projections; 0 means no adapters
    lora_targets: tuple[str, ...] = ("q", "k", "v", "out")
    stats: str = "dataset"  # computed from its rows; "packaged" keeps the embodiment's
    embodiment: str | None = None  # of the rows; None means the checkpoint's, else droid
    steps: int = 1000
    batch: int = 8  # windows per step
    lr: float = 1e-4
    accumulate: int = 1  # draws of windows per step, whose gradients are averaged
    every: int = 4  # frames between windows
    seed: int = 0


class PostTraining:
    """A post-training run.

    Args:
        checkpoint: Folder or hub repository. dataset: Folder in LeRobot v3 format.
        folder: Folder of state, curve and the new checkpoint.
        tensorboard: Whether the curve is written for TensorBoard, too.

    Raises:
        CheckpointError, DatasetError: One of the two cannot be used.
        ConfigError: They do not fit each other, or the new checkpoint would overwrite its source.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        dataset: Path,
        folder: Path,
        config: PostConfig | None = None,
        keys: ArmKeys | None = None,
        on_step: Callable[[str, int, int, LossMetrics], None] | None = None,
        tensorboard: bool = False,
    ):
        self.config, self.folder, self._tensorboard = config or PostConfig(), folder, tensorboard
        self._on_step = on_step or (lambda *_: None)
        self.checkpoint = Checkpoint.open(locate(checkpoint))
        self.checkpoint.require_released("post-training")
        if self.checkpoint.action_space is None:
            raise VariantError("the checkpoint does not state its action space; record it in checkpoint.json.")
        self._require_apart()
        named = self.config.embodiment or self.checkpoint.metadata.get("domain") or "droid_lerobot"
        self.embodiment: Embodiment = get_embodiment(named)
        folder.mkdir(parents=True, exist_ok=True)
        self.policy = load_policy(self.checkpoint, self.embodiment.domain_id)
        self.trained = train_only(self.policy, self.config.train)
        if self.config.lora_rank:
            add_lora(self.policy, self.config.lora_rank, self.config.lora_targets)
        with Dataset(dataset) as data:
            keys = (keys or ArmKeys()).resolved(data, self.embodiment)
            self._keep_settings(data, keys)
            self.stats = self._statistics(data, keys)
            self.windows = self._windows(data, keys)

    def _require_apart(self) -> None:
        target, source = (self.folder / "checkpoint").resolve(), self.checkpoint.root.resolve()
        if target == source or target in source.parents or source in target.parents:
            raise ConfigError(f"the new checkpoint in {target} would overwrite its source {source}; choose another --out.")

    def _keep_settings(self, data: Dataset, keys: ArmKeys) -> None:
        """Require that latents and state were made with the same settings; steps and learning rate may change."""
        path = self.folder / SETTINGS
        how = {name: value for name, value in asdict(self.config).items() if name not in ("steps", "lr")}
        named = {"embodiment": self.embodiment.name, "checkpoint": self.checkpoint.digest, "dataset": identity_of(data)}
        settings = {**how, **named, "keys": asdict(keys)}
        if not (self.folder / LATENTS).exists() and not has_state(self.folder):
            write_json(path, settings)  # nothing depends on older settings
        elif not path.exists():
            write_json(path, {})
        keep_settings(path, settings)

    def _statistics(self, data: Dataset, keys: ArmKeys) -> ActionStats | None:
        if self.checkpoint.action_space == "joint_pos" or self.config.stats == "packaged":
            return None
        if self.config.stats != "dataset":
            raise ConfigError(f"--stats must be 'dataset' or 'packaged', got {self.config.stats!r}.")
        return row_statistics(data, self.embodiment, keys)

    def _windows(self, data: Dataset, keys: ArmKeys) -> ArmWindows:
        found, space = self.checkpoint, self.checkpoint.action_space
        assert space is not None
        vae = WanVae(found.vae_config, found.vae_weights, torch.device("cpu"), torch.float32, decoder=False)
        rows = self.embodiment.chunk_rows(space)
        processor = Cosmos3PolicyProcessor.for_checkpoint(found, domain_name=self.embodiment.name, action_chunk_size=rows)
        policy_frames, how = next(iter(found.policy_frames), None), self.config
        config = WindowConfig(space, found.state_row is not None, policy_frames, rows, how.every, how.batch, seed=how.seed)
        report = lambda done, total: self._on_step("latents", done, total, {})  # noqa: E731
        return ArmWindows(data, processor, vae.encode, self.embodiment, keys, config, self.stats, self.folder, report)

    def run(self, until: int | None = None) -> Path:
        """Train, or resume training, and write the checkpoint."""
        config = self.config

        def loss(step: int) -> tuple[torch.Tensor, LossMetrics]:
            noise = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            return flow_loss(self.policy, self.windows.batch(step), FlowConfig(), noise)

        warmup = min(100, max(1, config.steps // 10))
        more: dict[str, Any] = {"accumulate": config.accumulate, "tensorboard": self._tensorboard}
        how = TrainLoopConfig(config.steps, config.lr, warmup, ema=0.99, seed=config.seed, **more)
        loop = Loop(self.policy, loss, how, self.folder)
        loop.run(until, lambda step, parts: self._on_step("post-training", step, config.steps, parts))
        return self.export(loop.averaged(self.policy))

    def export(self, policy: TrainedPolicy) -> Path:
        """Write the source checkpoint with the trained weights to ``checkpoint/``, and adapters alone to ``adapter/``.

        Data types stay the same.
        """
        if adapters := adapter_state(policy):
            write_folder(self.folder / "adapter", lambda hidden: self._fill_adapter(hidden, adapters))
        target = self.folder / "checkpoint"
        write_folder(target, lambda hidden: self._fill(hidden, policy))
        return target

    def _fill_adapter(self, target: Path, adapters: dict[str, torch.Tensor]) -> None:
        """Write the adapters for a base that is kept elsewhere; what else was trained is in ``checkpoint/`` only."""
        rank, base = self.config.lora_rank, str(self.checkpoint.root)
        about = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA * rank, "base_model_name_or_path": base}
        modules = sorted({key.split(".")[-3] for key in adapters})
        write_json(target / "adapter_config.json", {**about, "target_modules": modules, "digest": self.checkpoint.digest})
        save_file(adapters, target / "pytorch_lora_weights.safetensors", metadata={"format": "pt"})

    def _fill(self, target: Path, policy: TrainedPolicy) -> None:
        source = self.checkpoint.root
        shutil.copytree(source, target, ignore=_transformer_weights, dirs_exist_ok=True)
        state = merged_state(policy)
        for file in self.checkpoint.weights.files:
            weights = replace_weights(load_file(file), state, self.embodiment.domain_id)
            save_file(weights, target / "transformer" / file.name, metadata={"format": "pt"})
        (target / STATISTICS).unlink(missing_ok=True)  # the source's do not describe the new rows
        if self.stats is not None:
            write_statistics(self.stats, target / STATISTICS, "computed from the post-training dataset")
        self._describe(target)

    def _describe(self, target: Path) -> None:
        path = target / METADATA
        data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        ours = dict(data.get("strands_cosmos3", {}))
        ours |= {"variant": self.checkpoint.variant.name, "action_space": self.checkpoint.action_space}
        ours |= {"domain": self.embodiment.name, "post_training": {**asdict(self.config), "trained": self.trained}}
        files = sorted(target.glob("*/*.safetensors"))
        ours["sha256"] = {str(file.relative_to(target)): sha256(file) for file in files}
        write_json(path, {**data, "strands_cosmos3": ours})


def _transformer_weights(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder).name == "transformer" and name.endswith(".safetensors")]
