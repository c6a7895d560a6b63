"""Tell which format a checkpoint has, from the files that only one format has."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strands_cosmos3.engine.formats.contract import CONTRACT, Stated, fields_of, read_contract
from strands_cosmos3.engine.formats.layout import Layout, OnBase, stated_blocks
from strands_cosmos3.engine.variants import VARIANTS, existing, locate, repository_of
from strands_cosmos3.engine.weight_files import read_config
from strands_cosmos3.errors import ConfigError, ContractError, LayoutError
from strands_cosmos3.resources import shown

_DEPTH = 3  # a base may have a base; a circle has no end
_ADAPTED = re.compile(r"(adapter|lora).*\.(safetensors|bin)$")
"""The file of an adapter's weights."""


def open_layout(
    path: Path, base: str | Path | None = None, contract: Path | None = None, depth: int = _DEPTH
) -> Layout:
    """The layout of a folder, or of the folder that a contract file names as its ``checkpoint``.

    Args:
        path: A folder, or a contract file (``*.toml``). The ``checkpoint`` and ``base`` that the
            caller's own file names may be anywhere; those of a ``contract.toml`` in a downloaded
            folder may not.
        base: Folder or hub repository of what the folder lacks; None is what the contract names.
        contract: A contract file, beside ``contract.toml`` in the folder, if there is one.

    Raises LayoutError or ContractError.
    """
    if depth < 1:
        raise LayoutError(
            f"{path}: base checkpoints are nested too deeply (at most {_DEPTH}); name a checkpoint "
            "in the released layout as the base."
        )
    root = path
    file = contract
    if path.suffix == ".toml" and not os.path.isdir(path):
        if contract is not None:
            raise ConfigError(
                f"{path} is a contract already; pass the folder beside another "
                f"contract, {contract}."
            )
        file = path
    contracts: list[Stated] = []
    if file is not None:
        fields = read_contract(file, file.parent)
        contracts.append((str(file), fields_of(fields)))
        if file is path:
            if "checkpoint" not in fields:
                raise ContractError(
                    f'{path} does not name the folder it describes; add checkpoint = "FOLDER".'
                )
            root = _place(fields["checkpoint"], file.parent)
        elif "checkpoint" in fields and not _names(fields["checkpoint"], file.parent, root):
            raise ContractError(
                f"{file} is the contract of {shown(fields['checkpoint'])}, not of {root}; pass "
                "that folder's own."
            )
        if base is None and "base" in fields:
            base = _place(fields["base"], file.parent)
    if os.path.lexists(root / CONTRACT) and root / CONTRACT != file:
        fields = read_contract(root / CONTRACT, root)
        contracts.append((str(root / CONTRACT), fields_of(fields)))
        base = _public_base(fields, root) if base is None else base
    return _layout(root, contracts, base, depth)


def kind_of(root: Path) -> type[Layout]:
    """The format of a folder; raises LayoutError for one that only looks like Cosmos 3's. Those
    that are read with torch are imported when a folder has them.
    """
    has = lambda name: os.path.lexists(root / name)  # noqa: E731
    if has("transformer"):
        if not stated_blocks(root):
            return Layout
        from strands_cosmos3.engine.formats.eight_bit import EightBitLayout

        return EightBitLayout
    return _foreign_kind(root, has)


def _foreign_kind(root: Path, has: Callable[[str], bool]) -> type[Layout]:
    from strands_cosmos3.engine.formats import dcp
    from strands_cosmos3.engine.formats.adapters import CONFIGS, Adapter
    from strands_cosmos3.engine.formats.framework import MODEL_TYPE, FrameworkExport
    from strands_cosmos3.engine.formats.lerobot import TYPES, LeRobotPolicy

    if has("config.json"):
        config: Mapping[str, Any] = read_config(root / "config.json", root)
        if config.get("model_type") == MODEL_TYPE:
            return FrameworkExport
        if "type" in config:
            if config["type"] not in TYPES:
                raise LayoutError(
                    f"{root} is a LeRobot policy of type {shown(config['type'])}; "
                    f"not {', '.join(TYPES)}."
                )
            return LeRobotPolicy
    if any(map(has, (dcp.LATEST, dcp.METADATA, f"model/{dcp.METADATA}"))) or any(
        root.glob(dcp.STEPS)
    ):
        return dcp.DcpRun
    if any(map(has, CONFIGS)) or (not has("model_index.json") and any(root.glob("*.safetensors"))):
        return Adapter
    return Layout


def _layout(root: Path, contracts: Sequence[Stated], base: str | Path | None, depth: int) -> Layout:
    kind = kind_of(root) if os.path.isdir(root) else Layout
    names = os.listdir(root) if os.path.isdir(root) and kind.format != "adapter" else []
    if adapters := sorted(filter(_ADAPTED.search, names)):
        raise LayoutError(
            f"{root} holds {shown(adapters[0])} beside a whole checkpoint ({kind.format}), which "
            "is loaded without it: move the adapter into a folder of its own, and name this one "
            "as its base."
        )
    if base is None or (kind is Layout and not os.path.lexists(root / "transformer")):
        return kind(root, contracts)  # a folder of no format says so itself
    if not issubclass(kind, OnBase):
        raise ConfigError(
            f"base {str(base)!r}: {root} is taken for a whole checkpoint ({kind.format}); leave "
            "the base out."
        )
    return kind(root, contracts, open_layout(locate(base), depth=depth - 1))


def _place(name: str, folder: Path) -> Path:
    """The folder that the caller's own contract names: beside the file, anywhere, or on the hub."""
    return existing(name, folder) or locate(name)


def _names(name: str, folder: Path, root: Path) -> bool:
    """Whether a contract's ``checkpoint`` is this folder, or the repository that it is a
    snapshot of.
    """
    beside = existing(name, folder)
    return name == repository_of(root) if beside is None else beside.resolve() == root.resolve()


def _public_base(fields: Mapping[str, Any], root: Path) -> str | None:
    """The base that a folder's own contract names: one of NVIDIA's, since a stranger's file may
    not lead anywhere else.
    """
    base = fields.get("base")
    public = [variant.repo_id for variant in VARIANTS.values() if variant.repo_id]
    if base is not None and base not in public:
        raise ContractError(
            f"{root / CONTRACT} names the base {shown(base)}; a contract inside a folder may name "
            f"only {', '.join(public)}. "
            "Write a contract file of your own, with checkpoint and base, and pass that file."
        )
    return base
