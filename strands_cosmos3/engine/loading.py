"""Load the weights of a checkpoint into torch's modules."""

from __future__ import annotations

import torch

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.quantised import Quantization, install
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer
from strands_cosmos3.engine.vae import PreviewDecoder, materialise
from strands_cosmos3.engine.wan import empty_weight
from strands_cosmos3.engine.weight_files import Shard, Slices, Target, sliced_shape, unsharded
from strands_cosmos3.engine.weights import (
    HEAD_KEYS,
    TEXT,
    checkpoint_key,
    head_shapes,
    kept_dtype,
    parameter_shapes,
)


def load_transformer(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    text_device: torch.device | None = None,
    shard: Shard = unsharded,
    quantization: Quantization | None = None,
) -> Cosmos3Transformer:
    """The transformer with its weights, without action heads and weights that inference does
    not use.

    The time embedder stays in float32. ``text_device`` keeps the text tower; None is
    ``device``. ``quantization`` keeps some layers in 8 bits; None keeps none, whatever the
    files hold. Raises WeightsError if a weight is not finite.
    """
    with torch.device("meta"):
        model = Cosmos3Transformer(checkpoint.config)
    shapes = parameter_shapes(checkpoint.config)
    slices: dict[str, Slices] = {}

    def kept(name: str) -> tuple[tuple[int, ...], torch.device]:
        key = checkpoint_key(name)
        slices[key] = shard(key, shapes[name])
        where = text_device if text_device is not None and name.startswith(TEXT) else device
        return sliced_shape(shapes[name], slices[key]), where

    def empty(name: str, _: tuple[int, ...]) -> torch.Tensor:
        shape, where = kept(name)
        return torch.empty(shape, device=where, dtype=kept_dtype(name, dtype))

    layers = {} if quantization is None else install(model, quantization, device)
    targets: dict[str, Target] = {
        checkpoint_key(name): tensor for name, tensor in materialise(model, empty).items()
    }
    for name, layer in layers.items():
        key = checkpoint_key(name)
        targets[key] = layer
        layer.place(*kept(name), slices[key])
    checkpoint.weights.read_into(targets, slices)
    return model.eval()


def load_preview(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> PreviewDecoder | None:
    """A checkpoint's preview decoder with its weights, or None. Raises LayoutError or WeightsError
    if it is damaged.
    """
    if checkpoint.preview is None:
        return None
    config, files = checkpoint.preview
    with torch.device("meta"):
        model = PreviewDecoder.from_config(config, checkpoint.config.latent_channel)
    files.check({name: tuple(p.shape) for name, p in model.named_parameters()})
    files.read_into(materialise(model, lambda _, shape: empty_weight(shape, device, dtype)))
    return model.eval()


def load_action_head(
    checkpoint: Checkpoint, domain: int, device: torch.device, dtype: torch.dtype
) -> ActionHead:
    """The action head of one domain; raises WeightsError if a weight is not finite."""
    tensors = {
        field: torch.empty(s, device=device, dtype=dtype)
        for field, s in head_shapes(checkpoint.config).items()
    }
    checkpoint.weights.read_into(
        {f"{HEAD_KEYS[field]}#{domain}": tensor for field, tensor in tensors.items()}
    )
    return ActionHead(**tensors)
