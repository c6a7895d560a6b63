"""Whether a checkpoint can act: whether its contract is complete, supported here, and what is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strands_cosmos3.actions.stats import ActionStats, stats_for
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import ActionSpace, Embodiment, Sampling, get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.errors import ContractError

_DOMAIN = "droid_lerobot"
_REMEDY = "choose its robot, or post-train it (docs/post_training.md)"
_STILL = (0, 0, 0, 1, 0, 0, 0, 1, 0, 0.5)  # a state row: the identity, and a half open gripper


def require_acting(
    checkpoint: Checkpoint,
    embodiment: Embodiment,
    space: ActionSpace,
    stated_fields: Iterable[str] = (),
) -> None:
    """Raise ContractError if the meaning of the checkpoint's actions is unknown, not supported, or
    not what is needed.

    Args:
        stated_fields: Fields of the contract that the caller states.
    """
    checkpoint.require_contract(stated_fields)
    metadata = checkpoint.metadata
    wrong: list[str] = []
    if other := _other_domain(checkpoint, embodiment):
        wrong.append(f"{other}; pass embodiment={metadata['domain']!r}, {_REMEDY}")
    if checkpoint.needs_contract and metadata["action_space"] != space.name:
        wrong.append(f"its action space is {metadata['action_space']!r}, not {space.name!r}")
    elif metadata.get("width", space.width) != space.width:
        wrong.append(
            f"its rows have {metadata['width']} columns, {space.name!r} rows of "
            f"{embodiment.name!r} {space.width}"
        )
    if metadata.get("normalization", "none") != "none" and not space.normalized:
        wrong.append(
            f"its {space.name!r} rows are normalised ({metadata['normalization']}), "
            "which is not supported"
        )
    if metadata.get("gripper") == "1=closed":
        wrong.append("its gripper column counts 1 as closed, which is not supported")
    if (
        embodiment.rig is not None
        and tuple(metadata.get("views", embodiment.rig.views)) != embodiment.rig.views
    ):
        wrong.append(
            f"its views are {', '.join(metadata['views'])}, those of {embodiment.name!r} "
            f"{', '.join(embodiment.rig.views)}"
        )
    if wrong:
        raise ContractError(f"{checkpoint.root} cannot act here: {'; '.join(wrong)}.")


def require_domain(checkpoint: Checkpoint, embodiment: Embodiment) -> None:
    """Raise ContractError if the checkpoint states another domain than the embodiment's."""
    if other := _other_domain(checkpoint, embodiment):
        raise ContractError(f"{checkpoint.root} cannot act here: {other}; {_REMEDY}.")


def _other_domain(checkpoint: Checkpoint, embodiment: Embodiment) -> str | None:
    domain = get_embodiment(checkpoint.metadata.get("domain") or embodiment)
    if (domain.domain_id, domain.stats) == (embodiment.domain_id, embodiment.stats):
        return None
    return f"its domain is {domain.name!r}, not {embodiment.name!r}"


def row_quantiles(
    checkpoint: Checkpoint, stats: ActionStats | None, embodiment: Embodiment, space: ActionSpace
) -> tuple[F64, F64] | None:
    """The checkpoint's own q01 and q99 of such rows, or what its normalisation maps to -1 and 1;
    None if it states none.

    Args:
        stats: Its :meth:`Checkpoint.action_stats`.

    Raises StatisticsError if they are of another domain, or lack the normalisation's figures.
    """
    method = checkpoint.metadata.get("normalization")
    if not space.normalized or (method is None and stats is None):
        return None
    if method == "none":
        return -np.ones(space.width), np.ones(space.width)
    if method is None:
        stats = stats_for(embodiment, stats)
    affine = (stats or stats_for(embodiment)).normalizer(method or "quantile")
    return affine.offset - affine.scale, affine.offset + affine.scale


def rehearse(checkpoint: Checkpoint) -> None:
    """Do what acting does before the model runs, on a black picture, for the domain that the
    checkpoint states, else DROID's.

    Raises what acting would raise.
    """
    domain = get_embodiment(checkpoint.metadata.get("domain") or _DOMAIN)
    space = domain.action_space(checkpoint.action_space)
    require_acting(checkpoint, domain, space)
    row_quantiles(checkpoint, checkpoint.action_stats(), domain, space)
    checkpoint.resolve_sampling(domain, space.name, Sampling())
    rows = checkpoint.chunk_rows or domain.chunk_rows(space.name)
    processor = Cosmos3PolicyProcessor.for_checkpoint(
        checkpoint, domain_name=domain.name, action_space=space.name, action_chunk_size=rows
    )
    raw_input = {"task": "act", "images": np.zeros((48, 64, 3), np.uint8)}
    if space.state_row or checkpoint.state_row is not None:
        raw_input["state"] = np.zeros(space.width) if space.state_row else _STILL
    processor.preprocess(raw_input)
