"""Which senses a checkpoint has beside its policy: eyes, with which it answers questions in words,
and ears. Only configs and headers are read.
"""

from __future__ import annotations

import math

import torch

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.weight_files import WeightSource
from strands_cosmos3.engine.weights import (
    TEXT,
    checkpoint_key,
    parameter_shapes,
    sound_shapes,
)
from strands_cosmos3.errors import LayoutError

REASONERS = ("cosmos3_omni", "cosmos3_edge")
"""Types of model that a reasoner's config may name: Nano's and Super's, and Edge's."""
HEAD = "lm_head.weight"
_TEXT_TOWER = ("layers.", "embed_tokens.", "norm.", HEAD)
"""What names of the text tower begin with, and some of the generation tower."""


def vision_encoder(checkpoint: Checkpoint) -> WeightSource | None:
    """Weights of the vision encoder, or None."""
    return checkpoint.layout.optional_weights("vision_encoder", "model")


def lacking_senses(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """What a checkpoint lacks of its ``eyes``, to answer questions about pictures, and ``ears``, to
    predict sound, in words; an empty list is nothing.

    Raises LayoutError or WeightsError if a part is damaged.
    """
    stored = checkpoint.weights.shapes
    layout = checkpoint.layout
    top = layout.reasoner
    config = top.read("config.json") if top.has("config.json") else {}
    head = HEAD in stored or config.get("tie_word_embeddings") is True
    heads = sound_shapes(checkpoint.config).keys()
    parts = {
        "eyes": {
            "the vision encoder (vision_encoder/)": vision_encoder(checkpoint),
            f"the head that writes words ({HEAD} in transformer/)": head,
            f"a config.json whose model_type is {' or '.join(REASONERS)}": (
                config.get("model_type") in REASONERS
            ),
            "preprocessor_config.json": top.has("preprocessor_config.json"),
        },
        "ears": {
            "the sound tokenizer (sound_tokenizer/)": layout.optional_weights("sound_tokenizer"),
            "the sound heads (audio_proj_in and others in transformer/)": (
                bool(heads) and heads <= stored.keys()
            ),
        },
    }
    return {
        sense: [part for part, present in needed.items() if not present]
        for sense, needed in parts.items()
    }


def require_eyes(checkpoint: Checkpoint) -> WeightSource:
    """Return the weights of a checkpoint's vision encoder; LayoutError if it cannot answer
    questions about pictures.
    """
    eyes = vision_encoder(checkpoint)
    lacking = lacking_senses(checkpoint)["eyes"]
    if lacking or eyes is None:
        raise LayoutError(
            f"{checkpoint.root} cannot answer questions about pictures. It lacks "
            f"{', '.join(lacking)}. The folders of Cosmos3-Nano, -Super and -Edge have them; "
            "`strands-cosmos3 checkpoint inspect FOLDER` says what a folder has."
        )
    return eyes


def text_keys(checkpoint: Checkpoint) -> set[str]:
    """Released names of the text tower's weights, its head included."""
    parameters = parameter_shapes(checkpoint.config)
    generation = {checkpoint_key(name) for name in parameters if not name.startswith(TEXT)}
    return {
        key for key in checkpoint.weights.shapes.keys() - generation if key.startswith(_TEXT_TOWER)
    }


def reasoner_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of a reasoner's weights: text tower, head and eyes."""
    eyes = vision_encoder(checkpoint)
    shapes = [checkpoint.weights.shapes[key] for key in text_keys(checkpoint)]
    shapes += [] if eyes is None else eyes.shapes.values()
    return sum(map(math.prod, shapes)) * dtype.itemsize
