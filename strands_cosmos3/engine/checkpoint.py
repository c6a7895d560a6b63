"""Find, read and check a checkpoint on disk.

The layout is the released one: ``transformer/`` and ``vae/`` (config and safetensors),
``scheduler/``, ``text_tokenizer/``, ``model_index.json``. Ours may have a ``preview_decoder/`` (see
:mod:`.vae`). A ``checkpoint.json`` may hold a ``strands_cosmos3`` object with ``variant``,
``action_space``, ``prompt_format``, ``composition`` (see :mod:`.frames`), ``resolution_tier``,
``domain``, ``state`` (see :mod:`.metadata`), ``sampling`` (default ``num_steps``,
``guidance_scale`` and ``flow_shift``), ``policy_frames`` (frames that a policy's clip may have, 1 +
4 for each future latent frame, the default first; 1 predicts actions without a video),
``replan_rows`` (rows to execute before requesting the next chunk), ``prefix_rows`` (longest action
prefix seen in training),
``dynamics_prompt`` (``"empty"``: both dynamics read the empty caption), ``dynamics_steps``
(denoising steps of both dynamics, if not as in ``sampling``), ``dynamics_start`` (``"frame"``: they
start at the given frame and at rows of zeros instead of noise, as in training, which showed one
step), ``future_mode`` (``"forward_dynamics"``: where a video is wanted and ``policy_frames`` is not
named, the policy answers actions alone, and forward dynamics predict the video of its rows),
``novelty_rmse`` (see :class:`.novelty.Novelty`), ``language`` (see
:mod:`~strands_cosmos3.language`) and ``sha256`` (file -> digest, checked before loading).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from strands_cosmos3.actions.stats import FIGURES, ActionStats, load_action_stats
from strands_cosmos3.digests import file_sha256
from strands_cosmos3.embodiments import MODEL_SPACES, Embodiment, Sampling, get_embodiment
from strands_cosmos3.engine.computed import require_computed
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.formats.contract import lengths_of, missing, require_complete
from strands_cosmos3.engine.formats.detect import open_layout
from strands_cosmos3.engine.formats.layout import Layout, OnBase
from strands_cosmos3.engine.metadata import StateRow
from strands_cosmos3.engine.sampler import SchedulerConfig
from strands_cosmos3.engine.variants import (
    Variant,
    get_variant,
    locate,
    repository_of,
    variant_of_repo,
    variant_of_sizes,
)
from strands_cosmos3.engine.wan_config import WanConfig
from strands_cosmos3.engine.weight_files import WeightSource
from strands_cosmos3.errors import (
    CheckpointError,
    ContractError,
    DigestError,
    LayoutError,
    PreflightError,
    StatisticsError,
    VariantError,
    WeightsError,
)
from strands_cosmos3.language import Language
from strands_cosmos3.observe.views import Composition
from strands_cosmos3.types import Mode

__all__ = ["STATISTICS", "Checkpoint", "locate"]
_READERS = 4  # threads that compute digests of files
STATISTICS = "action_stats.json"
"""File in a checkpoint's folder with the statistics that its rows are normalised with, instead
of the packaged ones.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers fit its config; no weight has been read. The module lists what its
    metadata may hold.

    Args:
        config, scheduler, vae_config: Contents of the config files. weights, vae_weights: By
            released name.
        preview: Config and weights of its preview decoder; None if it has none.
        layout: Its folder's format.
        action_space: None if the checkpoint does not state it. state_row, sampling: None if it
            records none.
        use_system_prompt: Whether ``model_index.json`` states ``default_use_system_prompt``; it
            does not count for NVIDIA's checkpoints, whose framework has none in training and
            serving.
        novelty_rmse: None if it cannot tell how novel a picture is; otherwise it has a preview
            decoder.
        policy_frames: Empty means as many frames as the chunk needs.
        replan_rows: None is the whole chunk. prefix_rows: 0 is none. language: None takes any
            sentence.
        dynamics_steps: None is as for a policy.
    """

    root: Path
    config: TransformerConfig
    scheduler: SchedulerConfig
    vae_config: WanConfig
    weights: WeightSource
    vae_weights: WeightSource
    variant: Variant
    action_space: str | None
    metadata: Mapping[str, Any]
    state_row: StateRow | None = None
    sampling: Sampling | None = None
    policy_frames: tuple[int, ...] = ()
    replan_rows: int | None = None
    prefix_rows: int = 0
    dynamics_steps: int | None = None
    use_system_prompt: bool = False
    language: Language | None = None
    preview: tuple[Mapping[str, Any], WeightSource] | None = None
    novelty_rmse: float | None = None
    layout: Layout = field(kw_only=True)

    @classmethod
    def open(
        cls,
        root: str | Path | Layout,
        variant: str | None = None,
        action_space: str | None = None,
        *,
        exported: bool = False,
    ) -> Checkpoint:
        """Read every config and header. ``variant`` is the expected one; ``action_space`` counts if
        none is stated. ``exported``: the weights' names and shapes were compared with the config
        when it was exported, and the digest will be compared with that one's; this needs no torch.

        Raises LayoutError, WeightsError, ContractError or VariantError for one fault,
        PreflightError with the list of several.
        """
        layout = root if isinstance(root, Layout) else open_layout(Path(root))
        root = layout.root
        _require_folder(root)
        step = _Collected()
        index = step.of(_model_index, layout) or {}
        metadata = step.of(layout.metadata)
        config = step.of(lambda: TransformerConfig.from_dict(layout.config("transformer")))
        native = bool(index.get("use_native_flow_schedule", False))
        parts: dict[str, Any] = {
            "config": config,
            "vae_config": step.of(lambda: WanConfig.from_dict(layout.config("vae"))),
            "scheduler": step.of(
                lambda: SchedulerConfig.from_dict(layout.config("scheduler"), native)
            ),
            "weights": step.of(_transformer_weights, layout, None if exported else config),
            "vae_weights": step.of(_vae_weights, layout),
            "preview": step.of(layout.preview),
        }
        if config is not None and metadata is not None:
            checked_variant = step.of(_variant, layout, config, metadata, variant)
            parts |= {
                "variant": checked_variant,
                "metadata": metadata,
                "state_row": step.of(StateRow.from_metadata, metadata),
                "sampling": _sampling(metadata),
                "policy_frames": lengths_of(metadata.get("policy_frames") or []),
                "prefix_rows": metadata.get("prefix_rows") or 0,
                **{
                    name: metadata.get(name)
                    for name in ("replan_rows", "dynamics_steps", "novelty_rmse")
                },
                "language": step.of(Language.from_metadata, metadata),
                "use_system_prompt": index.get("default_use_system_prompt") is True
                and not (checked_variant and checked_variant.repo_id),
                "action_space": None,
            }
            if checked_variant is not None and (
                space := step.of(_space, layout, checked_variant, metadata, action_space)
            ):
                parts |= {"action_space": space, "metadata": {**metadata, "action_space": space}}
        step.raise_if_any(root)
        return cls(root, **parts, layout=layout)

    @property
    def chunk_rows(self) -> int | None:
        """Rows of an answer, if its contract states them."""
        return self.metadata.get("chunk")

    @property
    def needs_contract(self) -> bool:
        """Whether it must state every field of the contract to act; a released one may rely on
        its variant.
        """
        return self.layout.needs_contract or "converted_from" in self.metadata

    def action_stats(self) -> ActionStats | None:
        """The statistics of its own rows: its contract's, else those of ``action_stats.json``; None
        if it has neither.

        Raises:
            StatisticsError: They cannot be read, are not the domain's, or lack what the
                normalisation needs.
            ContractError: The contract's differ from those of ``action_stats.json``.
        """
        recorded = self.metadata.get("statistics")
        method = self.metadata.get("normalization")
        path = self.root / STATISTICS
        beside = load_action_stats(path) if path.exists() else None
        stats = beside if recorded is None else self._stated_stats(recorded)
        if stats is None or method == "none":
            return None
        if beside is not None and any(
            not np.array_equal(getattr(stats, name), getattr(beside, name)) for name in FIGURES[:2]
        ):
            raise ContractError(
                f"the statistics of {path} differ from those of the contract; remove the ones "
                "that are wrong."
            )
        if method == "quantile_rot" and stats.raw is None:
            raise StatisticsError(
                f"the statistics of {self.root} have no raw figures (raw or global_raw), which "
                "quantile_rot needs."
            )
        if method is not None:
            stats.normalizer(method)
        return stats

    def _stated_stats(self, recorded: str | Mapping[str, Any]) -> ActionStats | None:
        if isinstance(recorded, str):
            return load_action_stats(recorded)
        lacking = {"domain", "statistics"} & set(missing(self.metadata))
        if lacking and self.needs_contract:
            return None  # and it cannot act
        if lacking:
            raise StatisticsError(
                f"{self.root} states incomplete statistics: "
                f"{' and '.join(sorted(lacking))} lacking."
            )
        embodiment = get_embodiment(self.metadata["domain"])
        columns = embodiment.action_space("midtrain").columns
        return ActionStats.of_figures(embodiment.stats or embodiment.name, columns, recorded)

    def require_space(self) -> str:
        """Its action space; raises ContractError if nobody stated it."""
        if self.action_space is None:
            self.require_contract()
            raise ContractError(
                f"{self.root} does not state its action space, and neither does its name: pass "
                "action_space= (--action-space) 'midtrain' (normalised pose deltas) or "
                "'joint_pos' (raw joint angles with a state row), or record it in checkpoint.json."
            )
        return self.action_space

    def require_contract(self, stated_fields: Iterable[str] = ()) -> None:
        """Raise ContractError, with the file to fill in, if the meaning of its actions is
        neither stated nor among ``stated_fields``.
        """
        if self.needs_contract:
            require_complete(self.metadata, stated_fields, self.root)

    def require_released(self, reader: str) -> None:
        """Raise LayoutError if it is in another format, which ``reader`` does not read."""
        if self.layout.format != "released":
            raise LayoutError(
                f"{self.root} is a {self.layout.format}, and {reader} reads the released layout; "
                "convert it first: "
                f"strands-cosmos3 checkpoint convert {self.root} --out FOLDER"
            )

    @property
    def composition(self) -> Composition:
        """Composition of views: its metadata's, else its variant's."""
        return self.metadata.get("composition", self.variant.composition)

    @property
    def dynamics_without_text(self) -> bool:
        """Whether it was trained on dynamics with the empty caption, whatever the instruction."""
        return self.metadata.get("dynamics_prompt") == "empty"

    @property
    def dynamics_from_frame(self) -> bool:
        """Whether both dynamics start at the given frame and at rows of zeros instead of noise."""
        return self.metadata.get("dynamics_start") == "frame"

    @property
    def future_from_actions(self) -> bool:
        """Whether forward dynamics predict the video of a policy's answer from its rows, instead
        of the policy with them.
        """
        return self.metadata.get("future_mode") == "forward_dynamics"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the folder states, of the weights' names and shapes, and of every byte of
        its weights, configs and tokenizer, and of its base's.

        It does not depend on where the folder lies. Large files are read once, as
        :func:`~strands_cosmos3.digests.file_sha256` remembers them. Raises DigestError.
        """
        sources = (self.weights, self.vae_weights)
        headers = [sorted((k, list(v)) for k, v in files.shapes.items()) for files in sources]
        stated = dict(self.layout.metadata()), self.metadata.get("sha256")
        contents = [stated, headers, self._file_digests(anew=False)]
        text = json.dumps(contents, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def read_anew(self) -> None:
        """Read every byte that :attr:`digest` covers, whatever is remembered of it, before it is
        first asked for. Raises DigestError.
        """
        self._file_digests(anew=True)

    def _file_digests(self, anew: bool) -> list[tuple[str, str, str]]:
        """Folder, name and digest of each file; the folder of one at the top has no name."""
        preview = () if self.preview is None else self.preview[1].files
        paths = list({*self.weights.files, *self.vae_weights.files, *preview, *self.layout.files()})
        roots = self.layout.roots
        with ThreadPoolExecutor(_READERS) as pool:
            digests = pool.map(partial(file_sha256, anew=anew), paths)
            return sorted(
                ("" if path.parent in roots else path.parent.name, path.name, digest)
                for path, digest in zip(paths, digests, strict=True)
            )

    def resolve_sampling(
        self, embodiment: Embodiment, action_space: str, options: Sampling, mode: Mode = Mode.POLICY
    ) -> Sampling:
        """Fill what is not given from the checkpoint's record, else from its variant's or the
        embodiment's preset.
        """
        of_variant = self.variant.action_space == action_space
        preset = self.sampling or (
            self.variant.preset if of_variant else embodiment.preset(action_space)
        )
        if mode is not Mode.POLICY and self.dynamics_steps is not None:
            preset = replace(preset, num_steps=self.dynamics_steps)
        return options.over(preset)

    def verify(self, anew: bool = True) -> None:
        """Compare every file whose digest is recorded; raise DigestError if its bytes differ.
        Without ``anew`` a digest that is remembered counts.
        """
        for name, recorded in (self.metadata.get("sha256") or {}).items():
            path = self.root / name
            if (digest := file_sha256(path, anew)) != recorded:
                raise DigestError(
                    f"{path} has SHA-256 {digest}, recorded is {recorded}; download it again."
                )


def _model_index(layout: Layout) -> dict[str, Any]:
    """``model_index.json``, if its parts are of the classes that the engine implements."""
    index = layout.model_index()
    classes = {name: part[-1] for name, part in index.items() if isinstance(part, list) and part}
    require_computed("model_index.json", index | classes)
    return index


class _Collected:
    """Runs steps that may fail and collects their errors."""

    def __init__(self) -> None:
        self.failures: list[CheckpointError] = []

    def of(self, step: Callable[..., Any], *arguments: object) -> Any:
        try:
            return step(*arguments)
        except CheckpointError as error:
            if str(error) not in map(str, self.failures):
                self.failures.append(error)
            return None

    def raise_if_any(self, root: Path) -> None:
        if len(self.failures) == 1:
            raise self.failures[0]
        if self.failures:
            listed = "".join(f"\n  - {type(e).__name__}: {e}" for e in self.failures)
            raise PreflightError(
                f"{root} cannot be loaded, for {len(self.failures)} reasons:{listed}"
            )


def _require_folder(root: Path) -> None:
    try:
        empty = not root.is_dir() or not any(root.iterdir())
    except OSError as error:
        raise LayoutError(
            f"{root} cannot be read ({error.strerror}); check its permissions."
        ) from None
    if empty:
        raise LayoutError(
            f"{root} is {'empty' if root.is_dir() else 'not a folder'}; a Cosmos 3 checkpoint has "
            "transformer/, vae/, "
            "scheduler/, text_tokenizer/ and model_index.json."
        )


def _transformer_weights(layout: Layout, config: TransformerConfig | None) -> WeightSource:
    weights = layout.weights()
    if config is not None:
        from strands_cosmos3.engine.formats.eight_bit import require_stated
        from strands_cosmos3.engine.weights import OPTIONAL, expected_shapes

        # before anything is built of so many layers
        if config.num_hidden_layers > len(weights.shapes):
            layers = f"transformer/config.json: num_hidden_layers is {config.num_hidden_layers}"
            raise WeightsError(
                f"{layers}, but {weights.folder} holds {len(weights.shapes)} "
                "tensors; download it again."
            )
        weights.check(expected_shapes(config), OPTIONAL)
        require_stated(weights, config)
    return weights


def _vae_weights(layout: Layout) -> WeightSource:
    weights = layout.vae_weights()
    weights.check(weights.shapes)  # their dtypes; the VAE that is built checks the shapes
    return weights


def _sampling(metadata: Mapping[str, Any]) -> Sampling | None:
    """The recorded preset, or None."""
    recorded = metadata.get("sampling")
    return None if recorded is None else Sampling(**recorded)


def _variant(
    layout: Layout, config: TransformerConfig, metadata: Mapping[str, Any], expected: str | None
) -> Variant:
    root = layout.root
    recorded = metadata.get("variant")
    by_name = None if isinstance(layout, OnBase) else variant_of_repo(repository_of(root))
    name = expected or recorded
    variant = get_variant(name) if name else by_name or variant_of_sizes(config)
    if expected and recorded and expected != recorded:
        raise VariantError(f"variant {expected!r} was requested, but {root} records {recorded!r}.")
    variant.check(config)
    return variant


def _space(
    layout: Layout, variant: Variant, metadata: Mapping[str, Any], expected: str | None
) -> str | None:
    """The action space that the name, the metadata with the contract, and the caller agree on; None
    if none of them states it.
    """
    if expected not in (None, *MODEL_SPACES):
        raise VariantError(
            f"action space {expected!r} is unknown; valid: {', '.join(MODEL_SPACES)}."
        )
    said = {
        f"the name {variant.name!r}": variant.action_space,
        "its metadata": metadata.get("action_space"),
        "the caller": expected,
    }
    stated = {source: space for source, space in said.items() if space}
    if len(set(stated.values())) > 1:
        listed = " and ".join(f"{space!r} by {source}" for source, space in stated.items())
        raise VariantError(
            f"{layout.root}: the action space is {listed}: midtrain rows are normalised pose "
            "deltas, joint_pos rows raw joint angles; one cannot be read as the other. Correct "
            "the one that is wrong."
        )
    return next(iter(stated.values()), None)
