"""Compare a request with a checkpoint's contract (:mod:`strands_cosmos3.engine.formats.contract`) before it is answered."""

from __future__ import annotations

from strands_cosmos3.backends.options import InferenceOptions
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.errors import ContractError
from strands_cosmos3.types import Request


def require_contract(checkpoint: Checkpoint, request: Request, options: InferenceOptions) -> None:
    """Raise ContractError if the meaning of the checkpoint's actions is unknown, not supported, or not the request's."""
    if not checkpoint.needs_contract:
        return
    sampled = None not in (options.num_steps, options.guidance_scale, options.flow_shift)
    given = {"prompt_format": options.prompt_format, "resolution_tier": options.image_size, "sampling": sampled or None}
    checkpoint.require_contract(name for name, value in given.items() if value is not None)
    known, space, asked = checkpoint.metadata, request.action_space, request.embodiment
    domain, views = get_embodiment(known["domain"]), known["views"]
    wrong: list[str] = []
    if (domain.domain_id, domain.stats) != (asked.domain_id, asked.stats):
        wrong.append(f"its domain is {domain.name!r}, asked for {asked.name!r}; pass embodiment={domain.name!r}")
    if known["action_space"] != space.name:
        wrong.append(f"its action space is {known['action_space']!r}, asked for {space.name!r}")
    elif known["width"] != space.width:
        wrong.append(f"its rows have {known['width']} columns, {space.name!r} rows of {asked.name!r} {space.width}")
    if known["normalization"] != "none" and not space.normalized:
        wrong.append(f"its {space.name!r} rows are normalised ({known['normalization']}), which is not supported")
    if known["gripper"] == "1=closed":
        wrong.append("its gripper column counts 1 as closed, which is not supported")
    if asked.rig is not None and len(views) != len(asked.rig.views):
        wrong.append(f"it has {len(views)} views, {asked.name!r} has {len(asked.rig.views)}: {', '.join(asked.rig.views)}")
    if wrong:
        raise ContractError(f"{checkpoint.root} cannot act here: {'; '.join(wrong)}.")
