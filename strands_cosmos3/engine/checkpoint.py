"""Find, read and check a checkpoint on disk.

The layout is the released one: ``transformer/`` and ``vae/`` (config and safetensors), ``scheduler/``,
``text_tokenizer/``, ``model_index.json``. Ours may have a ``preview_decoder/`` (see :mod:`.preview`).
A ``checkpoint.json`` may hold a ``strands_cosmos3`` object with ``variant``, ``action_space``, ``prompt_format``,
``composition`` (see :mod:`.frames`), ``resolution_tier``, ``domain``,
``state`` (see :mod:`.state`), ``sampling`` (default ``num_steps``, ``guidance_scale`` and ``flow_shift``), ``policy_frames``
(frames that a policy's clip may have, the default first; 1 predicts actions without a video), ``replan_rows`` (rows to execute
before requesting the next chunk), ``prefix_rows`` (longest action prefix seen in training), ``dynamics_prompt`` (``"empty"``:
both dynamics read the empty caption), ``novelty_rmse`` (see :class:`.preview.Novelty`), ``language`` (see
:mod:`~strands_cosmos3.language`) and ``sha256`` (file -> digest, checked before loading).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strands_cosmos3.embodiments import Embodiment, Sampling
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.metadata import read_metadata, read_novelty, read_policy_frames, read_rows, read_sampling
from strands_cosmos3.engine.preview import PreviewDecoder
from strands_cosmos3.engine.sampler import SchedulerConfig
from strands_cosmos3.engine.state import StateRow
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer
from strands_cosmos3.engine.vae import materialise
from strands_cosmos3.engine.variants import Variant, get_variant, variant_of_repo, variant_of_sizes
from strands_cosmos3.engine.wan import empty_weight
from strands_cosmos3.engine.weight_files import Shard, Slices, WeightFiles, read_config, sliced_shape, unsharded, verify
from strands_cosmos3.engine.weights import HEAD_KEYS, OPTIONAL, TEXT, checkpoint_key, expected_shapes, head_shapes, kept_dtype
from strands_cosmos3.errors import CheckpointError, ConfigError, LayoutError, PreflightError, VariantError, WeightsError
from strands_cosmos3.language import Language
from strands_cosmos3.observe.views import Composition

_PATTERNS = ("*.json", "transformer/*", "vae/*", "preview_decoder/*", "scheduler/*", "text_tokenizer/*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers fit its config; no weight has been read. The module lists what its metadata may hold.

    Args:
        config, scheduler, vae_config: Contents of the config files. weights, vae_weights: Safetensors files.
        preview: Config and safetensors file of its preview decoder; None if it has none.
        action_space: None if the checkpoint does not state it. state_row, sampling: None if it records none.
        use_system_prompt: Whether ``model_index.json`` states ``default_use_system_prompt``; it does not count for NVIDIA's
            checkpoints, whose framework has none in training and serving.
        novelty_rmse: None if it cannot tell how novel a picture is; otherwise it has a preview decoder.
        policy_frames: Empty means as many frames as the chunk needs.
        replan_rows: None is the whole chunk. prefix_rows: 0 is none. language: None takes any sentence.
    """

    root: Path
    config: TransformerConfig
    scheduler: SchedulerConfig
    vae_config: Mapping[str, Any]
    weights: WeightFiles
    vae_weights: WeightFiles
    variant: Variant
    action_space: str | None
    metadata: Mapping[str, Any]
    state_row: StateRow | None = None
    sampling: Sampling | None = None
    policy_frames: tuple[int, ...] = ()
    replan_rows: int | None = None
    prefix_rows: int = 0
    use_system_prompt: bool = False
    language: Language | None = None
    preview: tuple[Mapping[str, Any], WeightFiles] | None = None
    novelty_rmse: float | None = None

    @classmethod
    def open(cls, root: Path, variant: str | None = None, action_space: str | None = None) -> Checkpoint:
        """Read every config and header. ``variant`` is the expected one; ``action_space`` counts if none is stated.

        Raises LayoutError, WeightsError or VariantError for one fault, PreflightError with the list of several.
        """
        _require_folder(root)
        step = _Collected()

        def read(name: str) -> dict[str, Any]:
            return read_config(root / name, root)

        index = step.of(lambda: read("model_index.json") if os.path.lexists(root / "model_index.json") else {})
        metadata = step.of(lambda: read_metadata(root))
        config = step.of(lambda: TransformerConfig.from_dict(read("transformer/config.json")))
        native = bool((index or {}).get("use_native_flow_schedule", False))
        found: dict[str, Any] = {
            "config": config,
            "vae_config": step.of(lambda: read("vae/config.json")),
            "scheduler": step.of(lambda: SchedulerConfig.from_dict(read("scheduler/scheduler_config.json"), native)),
            "weights": step.of(lambda: _transformer_weights(root, config)),
            "vae_weights": step.of(lambda: WeightFiles(root / "vae", root)),
        }
        if os.path.lexists(root / "preview_decoder"):
            found["preview"] = step.of(
                lambda: (read("preview_decoder/config.json"), WeightFiles(root / "preview_decoder", root))
            )
        if config is not None and metadata is not None:
            named = step.of(lambda: _variant(root, config, metadata, variant))
            found |= {
                "variant": named,
                "metadata": metadata,
                "state_row": step.of(lambda: StateRow.from_metadata(metadata)),
                "sampling": step.of(lambda: read_sampling(metadata)),
                "policy_frames": step.of(lambda: read_policy_frames(metadata)),
                "replan_rows": step.of(lambda: read_rows(metadata, "replan_rows")),
                "prefix_rows": step.of(lambda: read_rows(metadata, "prefix_rows")) or 0,
                "novelty_rmse": step.of(lambda: read_novelty(metadata)) if "preview" in found else None,
                "language": step.of(lambda: Language.from_metadata(metadata)),
                "use_system_prompt": (index or {}).get("default_use_system_prompt") is True and not (named and named.repo_id),
                "action_space": step.of(lambda: _space(named, metadata, action_space)) if named else None,
            }
        step.raise_if_any(root)
        return cls(root, **found)

    @property
    def composition(self) -> Composition:
        """How views are composed for it: as its metadata says, else as its variant's are."""
        return self.metadata.get("composition", self.variant.composition)

    @property
    def dynamics_without_text(self) -> bool:
        """Whether it was trained on dynamics with the empty caption, whatever the instruction."""
        return self.metadata.get("dynamics_prompt") == "empty"

    @property
    def digest(self) -> str:
        """SHA-256 of the recorded digests and of the weights' names and shapes."""
        recorded = self.metadata.get("sha256") or {}
        headers = [sorted((k, list(v)) for k, v in files.shapes.items()) for files in (self.weights, self.vae_weights)]
        return hashlib.sha256(json.dumps([recorded, headers], sort_keys=True).encode()).hexdigest()

    def resolve_sampling(self, embodiment: Embodiment, action_space: str, given: Sampling) -> Sampling:
        """Fill what is not given from the checkpoint's record, else from its variant's or the embodiment's preset."""
        if self.sampling is not None:
            return given.over(self.sampling)
        of_variant = self.variant.action_space == action_space
        return given.over(self.variant.preset if of_variant else embodiment.preset(action_space))

    def verify(self) -> None:
        """Compare every file whose digest is recorded; raise DigestError if its bytes differ."""
        for name, digest in (self.metadata.get("sha256") or {}).items():
            verify(self.root / name, digest)

    def load_transformer(
        self, device: torch.device, dtype: torch.dtype, text_device: torch.device | None = None, shard: Shard = unsharded
    ) -> Cosmos3Transformer:
        """The transformer with its weights, without action heads and weights that inference does not use.

        The time embedder stays in float32. ``text_device`` keeps the text tower; None is ``device``. Raises WeightsError if
        a weight is not finite.
        """
        with torch.device("meta"):
            model = Cosmos3Transformer(self.config)
        slices: dict[str, Slices] = {}

        def empty(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            key = checkpoint_key(name)
            slices[key] = shard(key, shape)
            where = text_device if text_device is not None and name.startswith(TEXT) else device
            return torch.empty(sliced_shape(shape, slices[key]), device=where, dtype=kept_dtype(name, dtype))

        targets = materialise(model, empty)
        self.weights.read_into({checkpoint_key(name): tensor for name, tensor in targets.items()}, slices)
        return model.eval()

    def load_preview(self, device: torch.device, dtype: torch.dtype) -> PreviewDecoder | None:
        """Its preview decoder with its weights, or None. Raises LayoutError or WeightsError if it is damaged."""
        if self.preview is None:
            return None
        config, files = self.preview
        with torch.device("meta"):
            model = PreviewDecoder.from_config(config, self.config.latent_channel)
        files.check({name: tuple(p.shape) for name, p in model.named_parameters()})
        files.read_into(materialise(model, lambda _, shape: empty_weight(shape, device, dtype)))
        return model.eval()

    def load_action_head(self, domain: int, device: torch.device, dtype: torch.dtype) -> ActionHead:
        """The action head of one domain; raises WeightsError if a weight is not finite."""
        made = {field: torch.empty(s, device=device, dtype=dtype) for field, s in head_shapes(self.config).items()}
        self.weights.read_into({f"{HEAD_KEYS[field]}#{domain}": tensor for field, tensor in made.items()})
        return ActionHead(**made)


class _Collected:
    """Runs steps that may fail and collects their errors."""

    def __init__(self) -> None:
        self.failures: list[CheckpointError] = []

    def of(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except CheckpointError as error:
            self.failures.append(error)
            return None

    def raise_if_any(self, root: Path) -> None:
        if len(self.failures) == 1:
            raise self.failures[0]
        if self.failures:
            listed = "".join(f"\n  - {type(e).__name__}: {e}" for e in self.failures)
            raise PreflightError(f"{root} cannot be loaded, for {len(self.failures)} reasons:{listed}")


def _require_folder(root: Path) -> None:
    try:
        empty = not root.is_dir() or not any(root.iterdir())
    except OSError as error:
        raise LayoutError(f"{root} cannot be read ({error.strerror}); check its permissions.") from None
    if empty:
        raise LayoutError(
            f"{root} is {'empty' if root.is_dir() else 'not a folder'}; a Cosmos 3 checkpoint has transformer/, vae/, "
            "scheduler/, text_tokenizer/ and model_index.json."
        )


def _transformer_weights(root: Path, config: TransformerConfig | None) -> WeightFiles:
    files = WeightFiles(root / "transformer", root)
    if config is not None:
        if config.num_hidden_layers > len(files.shapes):  # before anything is built of so many layers
            layers = f"transformer/config.json: num_hidden_layers is {config.num_hidden_layers}"
            raise WeightsError(f"{layers}, but {files.folder} holds {len(files.shapes)} tensors; download it again.")
        files.check(expected_shapes(config), OPTIONAL)
    return files


def _variant(root: Path, config: TransformerConfig, metadata: Mapping[str, Any], asked: str | None) -> Variant:
    recorded = metadata.get("variant")
    cached = root.parent.parent.name.removeprefix("models--") if root.parent.name == "snapshots" else root.name
    by_name = variant_of_repo(cached.replace("--", "/"))
    named = asked or recorded
    found = get_variant(named) if named else by_name or variant_of_sizes(config)
    if asked and recorded and asked != recorded:
        raise VariantError(f"variant {asked!r} was requested, but {root} records {recorded!r}.")
    found.check(config)
    return found


def _space(variant: Variant, metadata: Mapping[str, Any], asked: str | None) -> str | None:
    known = metadata.get("action_space") or variant.action_space
    if known not in (None, "midtrain", "joint_pos") or asked not in (None, "midtrain", "joint_pos"):
        raise VariantError(f"action space {asked or known!r} is unknown; valid: joint_pos, midtrain.")
    if asked and known and asked != known:
        raise VariantError(
            f"{asked!r} actions were requested, but this checkpoint emits {known!r}: midtrain rows are normalised pose "
            "deltas, joint_pos rows raw joint angles; one cannot be read as the other."
        )
    return known or asked


def locate(path_or_repo_id: str | Path, revision: str | None = None, local_files_only: bool = False) -> Path:
    """The folder of a checkpoint: a local one, or the snapshot of the hub repository ``owner/name``, downloaded if needed.

    ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` are honoured. Raises LayoutError if it does not exist or cannot be
    fetched, ConfigError if a ``revision`` was given for a local folder.
    """
    path = Path(path_or_repo_id).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError(f"{path} is a local folder; `revision` belongs to a hub repository.")
        return path
    name = str(path_or_repo_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LayoutError(f"{name!r} is neither a folder nor a hub repository (owner/name).")
    from huggingface_hub import snapshot_download  # needs the network, so imported for repositories only
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, revision=revision, local_files_only=local_files_only, allow_patterns=list(_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LayoutError(
            f"{name!r} is not a local folder and could not be fetched from the hub: {type(error).__name__}: {error}. "
            "Pass a local folder, log in with `hf auth login`, or accept the model's licence."
        ) from None
    return Path(folder)
