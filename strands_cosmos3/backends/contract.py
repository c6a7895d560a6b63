"""Compare a request with a checkpoint's contract
(:mod:`strands_cosmos3.engine.formats.contract`) before it is answered.
"""

from __future__ import annotations

from strands_cosmos3.backends.options import InferenceOptions
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.acting import require_acting
from strands_cosmos3.types import Request


def require_contract(checkpoint: Checkpoint, request: Request, options: InferenceOptions) -> None:
    """Raise ContractError if the meaning of the checkpoint's actions is unknown, not supported,
    or not the request's.
    """
    sampled = None not in (options.num_steps, options.guidance_scale, options.flow_shift)
    given = {
        "prompt_format": options.prompt_format,
        "resolution_tier": options.image_size,
        "sampling": sampled or None,
    }
    stated = [name for name, value in given.items() if value is not None]
    require_acting(checkpoint, request.embodiment, request.action_space, stated)
