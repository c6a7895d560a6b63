"""Post-train a released checkpoint on an arm's episodes and write a checkpoint in the same
layout.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from strands_cosmos3.actions.stats import ActionStats
from strands_cosmos3.datasets import Dataset
from strands_cosmos3.datasets.reader import action_info
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.engine.checkpoint import STATISTICS, Checkpoint, locate
from strands_cosmos3.engine.metadata import write_metadata
from strands_cosmos3.engine.weight_files import weight_digests
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_folder, write_json
from strands_cosmos3.robots.catalogue import recorded_robot
from strands_cosmos3.training.adapters import (
    ALPHA,
    adapter_state,
    add_lora,
    load_policy,
    merged_state,
    replace_weights,
    train_only,
)
from strands_cosmos3.training.arm_columns import ArmKeys
from strands_cosmos3.training.arm_windows import (
    LATENTS,
    ArmWindows,
    row_statistics,
    write_statistics,
)
from strands_cosmos3.training.closed_loop import CLOSED_LOOP, ClosedLoop, measure_apart
from strands_cosmos3.training.cost import duration, machine, seconds_of
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import (
    CURVE,
    Loop,
    LossMetrics,
    Metrics,
    TrainLoopConfig,
    mean_metrics,
    read_curve,
    require_tensorboard,
)
from strands_cosmos3.training.matching import DataShard, FlowConfig, flow_loss
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.precision import lower_precision
from strands_cosmos3.training.run_manifest import identity_of, keep_settings
from strands_cosmos3.training.sharding import mean_over_ranks, reshard, shard_policy
from strands_cosmos3.training.state import has_state
from strands_cosmos3.training.windows import Batch

SETTINGS = "settings.json"
_FREE = ("steps", "lr", "validate_every")  # options that may change during a run
VALIDATION = "validation"
"""Name of the curve."""
_VALIDATION_SEED = 11
_CARD = Template("""\
# Post-trained for $embodiment

Made by `strands-cosmos3 train --model`.

| | |
|---|---|
| source | $source |
| dataset | $episodes episodes, $frames frames, $windows windows |
| training | $steps steps of $accumulate x $batch windows, learning rate $lr |
| weights | $trained; adapters of rank $lora_rank |
| validation loss | $losses |
| cost | $cost |

Training measures no success: `rollout` and `evaluate` do (docs/post_training.md).
""")


class PostTraining:
    """A post-training run.

    Args:
        checkpoint: Folder or hub repository. dataset: Folder in LeRobot v3 format.
        folder: Folder of state, curve and the new checkpoint.
        tensorboard: Whether the curve is written for TensorBoard, too.
        shard: This process's share of the windows. Rank 0 must be made first
            (:func:`.sharding.rank_0_first`).
        closed_loop: Episodes in simulation that judge the policy during training.

    Raises:
        CheckpointError, DatasetError: One of the two cannot be used.
        ConfigError: They do not fit each other, or the new checkpoint would overwrite its source.
        MissingDependencyError: TensorBoard is not installed.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        dataset: Path,
        folder: Path,
        config: PostConfig | None = None,
        keys: ArmKeys | None = None,
        on_step: Callable[[str, int, int, Metrics], None] | None = None,
        tensorboard: bool = False,
        shard: DataShard | None = None,
        closed_loop: ClosedLoop | None = None,
    ):
        if tensorboard:
            require_tensorboard()
        self.config = config or PostConfig()
        self.folder = folder
        self._tensorboard = tensorboard
        self.shard = shard or DataShard()
        self._closed_loop = closed_loop or ClosedLoop()
        self._require_numbers()
        self._on_step = on_step or (lambda *_: None)
        self.checkpoint = Checkpoint.open(locate(checkpoint))
        self.checkpoint.require_released("post-training")
        self.checkpoint.require_space()
        self._require_apart()
        named = self.config.embodiment or self.checkpoint.metadata.get("domain") or "droid_lerobot"
        self.embodiment: Embodiment = get_embodiment(named)
        folder.mkdir(parents=True, exist_ok=True)
        self.policy, self.trained = self._load()
        with Dataset(dataset) as data:
            self._require_robot(data)
            keys = (keys or ArmKeys()).resolved(data, self.embodiment)
            self._dataset = identity_of(data)
            self._keep_settings(keys)
            self.stats = self._statistics(data, keys)
            self.windows = ArmWindows(
                data,
                self.checkpoint,
                self.embodiment,
                keys,
                self.config,
                self.stats,
                folder,
                lambda done, total: self._on_step("latents", done, total, {}),
            )

    def _require_robot(self, data: Dataset) -> None:
        """Refuse a dataset of a robot of another domain, unless the dataset or the caller says
        whose rows they are.
        """
        robot = recorded_robot(data.spec.robot_type)
        if "embodiment" in action_info(data) or robot is None or robot.embodiment is None:
            return
        own = get_embodiment(robot.embodiment)
        if own.domain_id == self.embodiment.domain_id:
            return
        named = self.embodiment.name
        said = (
            f"the dataset is of robot {robot.name!r}, whose rows are those of {own.name!r} and not "
            f"of {named!r}"
        )
        if self.config.embodiment is None:
            raise ConfigError(
                f"{said}; give --embodiment {own.name}, or {named} if its poses are of that frame."
            )
        warnings.warn(f"{said}; its poses must be of that frame.", stacklevel=3)

    def _require_numbers(self) -> None:
        config = self.config
        if not 0 <= config.validation_fraction < 1:
            raise ConfigError(
                "--validation-fraction must be a fraction in 0..1, below 1, got "
                f"{config.validation_fraction!r}."
            )
        if config.batch < self.shard.ranks:
            raise ConfigError(
                f"--batch {config.batch} has no window for some of {self.shard.ranks} processes; "
                "raise it."
            )

    def _load(self) -> tuple[TrainedPolicy, list[str]]:
        """Return the checkpoint's policy, with fresh adapters if any, and the released names of
        what is trained beside them.
        """
        config = self.config
        named = self.checkpoint.metadata.get("domain")
        policy = load_policy(self.checkpoint, self.embodiment.domain_id)
        # no training filled this domain's heads
        if named and not policy.w_in.any() and not policy.w_out.any():
            policy = load_policy(self.checkpoint, get_embodiment(named).domain_id)
        trained = train_only(policy, config.train)
        if config.lora_rank:
            add_lora(policy, config.lora_rank, config.lora_targets, config.seed)
        return policy, trained

    def _require_apart(self) -> None:
        target = (self.folder / "checkpoint").resolve()
        source = self.checkpoint.root.resolve()
        if source.is_relative_to(target) or target.is_relative_to(source):
            raise ConfigError(
                f"the new checkpoint in {target} would overwrite its source {source}; choose "
                "another --out."
            )

    def _keep_settings(self, keys: ArmKeys) -> None:
        """Require that latents and state were made with the same settings; steps and learning
        rate may change.
        """
        path = self.folder / SETTINGS
        settings = {
            **{name: value for name, value in asdict(self.config).items() if name not in _FREE},
            "embodiment": self.embodiment.name,
            "checkpoint": self.checkpoint.digest,
            "dataset": self._dataset,
            "keys": asdict(keys),
        }
        if not (self.folder / LATENTS).exists() and not has_state(self.folder):
            write_json(path, settings)  # nothing depends on older settings
        keep_settings(path, settings)

    def _statistics(self, data: Dataset, keys: ArmKeys) -> ActionStats | None:
        if self.checkpoint.action_space == "joint_pos" or self.config.stats == "packaged":
            return None
        return row_statistics(data, self.embodiment, keys)

    def run(self, until: int | None = None) -> Path:
        """Train, or resume training, and write the checkpoint."""
        config = self.config
        policy = shard_policy(
            self.policy.to("cuda" if torch.cuda.is_available() else "cpu"), self.shard.ranks
        )

        def loss(step: int) -> tuple[torch.Tensor, LossMetrics]:
            noise = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            return self._loss(policy, self.windows.batch(step), noise)

        how = TrainLoopConfig(
            config.steps,
            config.lr,
            warmup=min(100, max(1, config.steps // 10)),
            ema=0.99,
            accumulate=config.accumulate,
            tensorboard=self._tensorboard,
        )
        loop = Loop(policy, loss, how, self.folder)

        def on_step(step: int, metrics: Metrics) -> None:
            self._on_step("post-training", step, config.steps, metrics)
            self._judge(loop, policy)

        if loop.step:  # it may have been interrupted there
            self._judge(loop, policy, again=False)
        loop.run(until, on_step)
        self._export_average(loop)
        return self.folder / "checkpoint"

    def _loss(
        self, policy: TrainedPolicy, batch: Batch, noise: torch.Generator
    ) -> tuple[torch.Tensor, LossMetrics]:
        with lower_precision(policy.w_in.device):
            value, metrics = policy(
                lambda gathered: flow_loss(gathered, batch, FlowConfig(), noise, self.shard)
            )
        return value, mean_over_ranks(metrics, self.shard.ranks)

    def _judge(self, loop: Loop, policy: TrainedPolicy, again: bool = True) -> None:
        """Validate and evaluate the averaged weights where it is time to; what is recorded
        already, only ``again``.
        """
        step = loop.step
        steps = self.config.steps
        if (step % self.config.validate_every == 0 or step == steps) and (
            again or loop.lacks(VALIDATION)
        ):
            self._validate(loop, policy)
        if self._closed_loop.due(step, steps) and (again or loop.lacks(CLOSED_LOOP)):
            self._export_average(loop)
            if not self.shard.rank and (
                found := measure_apart(self.folder / "checkpoint", self._closed_loop)
            ):
                loop.record(CLOSED_LOOP, found)

    def _validate(self, loop: Loop, policy: TrainedPolicy) -> None:
        """Record the loss on held-out windows, at noise that is the same each time and for any
        number of processes.
        """
        noise = torch.Generator().manual_seed(_VALIDATION_SEED)
        with torch.no_grad(), loop.averaged():
            seen = [self._loss(policy, batch, noise)[1] for batch in self.windows.validation()]
            # else the next step would compute with averaged weights that are still gathered
            reshard(policy)
        if seen:
            loop.record(VALIDATION, mean_metrics(seen))

    def _export_average(self, loop: Loop) -> None:
        average = loop.average()
        if not self.shard.rank:
            policy, _ = self._load()
            policy.load_state_dict(average, strict=False)
            self.export(policy)

    def export(self, policy: TrainedPolicy) -> Path:
        """Write the source checkpoint with the trained weights to ``checkpoint/``, and adapters
        alone to ``adapter/``.

        Data types stay the same.
        """
        if adapters := adapter_state(policy):
            write_folder(
                self.folder / "adapter", lambda unfinished: self._fill_adapter(unfinished, adapters)
            )
        target = self.folder / "checkpoint"
        write_folder(target, lambda unfinished: self._fill(unfinished, policy))
        return target

    def _fill_adapter(self, target: Path, adapters: dict[str, torch.Tensor]) -> None:
        """Write the adapters for a base that is kept elsewhere; what else was trained is in
        ``checkpoint/`` only.
        """
        about = {
            "peft_type": "LORA",
            "r": self.config.lora_rank,
            "lora_alpha": ALPHA * self.config.lora_rank,
            "base_model_name_or_path": str(self.checkpoint.root),
            "target_modules": sorted({key.split(".")[-3] for key in adapters}),
            "digest": self.checkpoint.digest,
        }
        write_json(target / "adapter_config.json", about)
        save_file(adapters, target / "pytorch_lora_weights.safetensors", metadata={"format": "pt"})

    def _fill(self, target: Path, policy: TrainedPolicy) -> None:
        write_trained(self.checkpoint, policy, self.embodiment.domain_id, target)
        (target / STATISTICS).unlink(missing_ok=True)  # the source's do not describe the new rows
        if self.stats is not None:
            write_statistics(self.stats, target / STATISTICS)
        self._describe(target)
        self._write_card(target)

    def _write_card(self, target: Path) -> None:
        """Write how the checkpoint was made to ``README.md``; the source's card becomes
        ``SOURCE.md``.
        """
        config = self.config
        curve = self.folder / f"{VALIDATION}.jsonl"
        losses = (f"{line['loss']:.4f} (step {line['step']})" for line in read_curve(curve)[-3:])
        facts = {
            "embodiment": self.embodiment.name,
            "source": f"{self.checkpoint.root.name}, digest {self.checkpoint.digest[:16]}",
            "windows": len(self.windows),
            "losses": ", ".join(losses) or "none",
            "trained": ", ".join(config.train),
            "cost": f"{duration(seconds_of(self.folder / CURVE))} of training, without encoding "
            f"the pictures: {machine()}",
        }
        card = _CARD.substitute({**vars(config), **self._dataset, **facts})
        (target / "README.md").write_text(card, encoding="utf-8")

    def _describe(self, target: Path) -> None:
        fields: dict[str, Any] = {
            "variant": self.checkpoint.variant.name,
            "action_space": self.checkpoint.action_space,
            "domain": self.embodiment.name,
            "post_training": {**asdict(self.config), "trained": self.trained},
            "sha256": weight_digests(target),
            **dict.fromkeys(("label", "language", "novelty_rmse")),  # they are of the source
        }
        if self.config.policy_frames is not None:
            fields["policy_frames"] = [self.config.policy_frames]
        write_metadata(target, fields)


def write_trained(source: Checkpoint, policy: TrainedPolicy, domain: int, target: Path) -> None:
    """Write a checkpoint's files with a policy's weights, adapters merged, to a folder; the card of
    the source becomes ``SOURCE.md``.
    """
    shutil.copytree(source.root, target, ignore=_transformer_weights, dirs_exist_ok=True)
    state = merged_state(policy)
    for file in source.weights.files:
        weights = replace_weights(load_file(file), state, domain)
        save_file(weights, target / "transformer" / file.name, metadata={"format": "pt"})
    if (target / "README.md").exists():
        (target / "README.md").replace(target / "SOURCE.md")


def _transformer_weights(folder: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if Path(folder).name == "transformer" and name.endswith(".safetensors")
    ]
