"""transformers' own model of a reasoner, with weights read from the released layout in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import rename_source_key
from transformers.initialization import no_init_weights

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.preflight import available_bytes, gib, working_bytes
from strands_cosmos3.engine.senses import HEAD, reasoner_bytes, require_eyes, text_keys
from strands_cosmos3.engine.weight_files import require_finite
from strands_cosmos3.errors import LayoutError, PreflightError, WeightsError

_EMBEDDING = "model.language_model.embed_tokens.weight"
_OF_GENERATION = ".k_norm_und_for_gen.weight"  # which Edge stores with the text tower


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    held: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """transformers' model with a checkpoint's text tower, head and eyes.

    Args:
        device, dtype: Of all weights.
        held: Weights of the text tower that are in memory already, by their released names; the
            model shares them.

    Raises:
        LayoutError: Eyes, head or configs are missing.
        WeightsError: Weights do not fit the config, or are not finite.
        PreflightError: The device cannot hold them; nothing has been read.
    """
    weights = dict(held or {})
    eyes = require_eyes(checkpoint)
    needed = reasoner_bytes(checkpoint, dtype) + working_bytes(checkpoint.config, dtype)
    needed -= sum(tensor.nbytes for tensor in weights.values())
    if needed > (free := available_bytes(device)):
        raise PreflightError(
            f"{checkpoint.root}: {device} has {gib(free)} left, {gib(needed)} are needed to answer "
            f"questions as {dtype}; use dtype='bfloat16', or another device."
        )
    model = _empty_model(checkpoint, dtype)
    for source, keys in ((checkpoint.weights, text_keys(checkpoint)), (eyes, eyes.shapes)):
        for key, part in source.parts({k: (k, ()) for k in keys if k not in weights}):
            require_finite(part, key)
            weights[key] = part.to(device, dtype, copy=True)
    renamings = get_checkpoint_conversion_mapping(model.config.model_type) or []
    renamed = {
        rename_source_key(key, renamings, [])[0]: tensor.detach()
        for key, tensor in weights.items()
        if not key.endswith(_OF_GENERATION)
    }
    renamed.setdefault(HEAD, renamed[_EMBEDDING])  # where the config says that they are one
    try:
        model.load_state_dict(renamed, assign=True)
    except RuntimeError as error:
        raise WeightsError(
            f"the weights of {checkpoint.root} do not fit its config.json; take both from one "
            f"release. {str(error)[:400]}"
        ) from None
    for module in model.modules():  # buffers are in no file: their modules are made anew
        for name, _ in list(module.named_buffers(recurse=False)):
            setattr(module, name, getattr(type(module)(module.config), name).to(device))
    model.generation_config = GenerationConfig()  # what is not asked for has no default of its own
    return model.requires_grad_(False).eval()


def _empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    root = checkpoint.layout.reasoner.root
    try:
        config = AutoConfig.from_pretrained(root)
        with torch.device("meta"), no_init_weights():
            return AutoModelForImageTextToText.from_config(config, dtype=dtype)
    except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"{root / 'config.json'} describes no model that transformers can build ({error}); "
            "download it again."
        ) from None
