"""Sound of a checkpoint: its head in the transformer, and the decoder of its tokenizer, which is
diffusers' own class. The tokenizer's encoder is not read.

Shape suffixes: C latent channels, S sound latents.
Source: diffusers 0.42.1 ``Cosmos3AVAEAudioTokenizer``, and ``prepare_latents`` of its
``Cosmos3OmniPipeline`` for the number of latents.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from strands_cosmos3.checks import instance_of, whole_number
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.senses import lacking_senses
from strands_cosmos3.engine.transformer import SoundHead
from strands_cosmos3.engine.vae import materialise
from strands_cosmos3.engine.weight_files import WeightSource, read_config
from strands_cosmos3.engine.weights import sound_shapes
from strands_cosmos3.errors import InputError, LayoutError, VariantError
from strands_cosmos3.extras import needed_by

_CONFIG = "sound_tokenizer/config.json"
_DEFAULTS: Mapping[str, Any] = {  # diffusers'
    "sampling_rate": 48_000,
    "vocoder_input_dim": 64,
    "dec_dim": 320,
    "dec_out_channels": 2,
    "dec_c_mults": [1, 2, 4, 8, 16],
    "dec_strides": [2, 4, 5, 6, 8],
}
_MOST: Mapping[str, int] = {  # nothing is built of larger ones
    "sampling_rate": 768_000,
    "vocoder_input_dim": 65_536,
    "dec_dim": 65_536,
    "dec_out_channels": 2,
}
_MOST_STAGES, _LARGEST_STAGE = 32, 65_536


@dataclass(frozen=True)
class SoundDecoder:
    """A checkpoint's decoder of sound latents, and how many a clip has.

    Attributes:
        rate_hz: Samples a second.
        hop: Samples a latent.
        model: The decoder; None on a rank that does not decode.
    """

    rate_hz: int
    hop: int
    model: Any

    def samples(self, frames: int, fps: float) -> int:
        """Samples of a clip's sound."""
        return int(frames / fps * self.rate_hz)

    def latents(self, frames: int, fps: float) -> int:
        """S, the latents that hold them."""
        return -(-self.samples(frames, fps) // self.hop)

    def decode(self, latents_1CS: torch.Tensor, frames: int, fps: float) -> torch.Tensor:
        """Waveform [1, channels, samples] in [-1, 1], float32 on the CPU, as long as the clip."""
        weight = next(self.model.parameters())
        waveform = self.model.decode(latents_1CS.to(weight))
        return waveform[..., : self.samples(frames, fps)].float().cpu()


def require_ears(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], WeightSource]:
    """Return the config and weights of a checkpoint's sound tokenizer.

    Raises:
        LayoutError: The checkpoint cannot predict sound; the message says what it lacks. Or the
            tokenizer's config is invalid.
        VariantError: Tokenizer and transformer do not belong together.
    """
    files = checkpoint.layout.optional_weights("sound_tokenizer")
    lacking = lacking_senses(checkpoint)["ears"]
    if lacking or files is None:
        raise LayoutError(
            f"{checkpoint.root} cannot predict sound. It lacks {', '.join(lacking)}. Leave sound "
            "out; `strands-cosmos3 checkpoint inspect FOLDER` says what a folder has."
        )
    config = {**_DEFAULTS, **read_config(files.folder / "config.json", files.folder.parent)}
    try:
        for name, most in _MOST.items():
            whole_number(config.get(name), name, 1, most)
        for name in ("dec_strides", "dec_c_mults"):
            stages = instance_of(config.get(name), list, name)
            whole_number(len(stages), f"the number of {name}", 1, _MOST_STAGES)
            for value in stages:
                whole_number(value, name, 1, _LARGEST_STAGE)
        hop = math.prod(config["dec_strides"])
        if (stated := config.get("hop_size")) is not None:
            whole_number(stated, "hop_size, the product of dec_strides,", hop, hop)
    except InputError as error:
        raise LayoutError(f"{_CONFIG} is invalid: {error} Download it again.") from None
    width, rate = checkpoint.config.sound_dim, checkpoint.config.sound_latent_fps
    if config["vocoder_input_dim"] != width or config["sampling_rate"] != rate * hop:
        raise VariantError(
            f"the sound tokenizer has {config['vocoder_input_dim']} channels and "
            f"{config['sampling_rate'] / hop:g} latents a second, the transformer {width} and "
            f"{rate:g}: they do not belong together."
        )
    return config, files


def sound_bytes(checkpoint: Checkpoint, dtype: torch.dtype, decoder: bool = True) -> int:
    """Bytes of the head of sound and, on a rank that decodes, the tokenizer's decoder."""
    numbers = sum(map(math.prod, sound_shapes(checkpoint.config).values()))
    _, files = require_ears(checkpoint)
    if decoder:  # a norm's scale is multiplied into its weight
        numbers += sum(
            math.prod(shape)
            for key, shape in files.shapes.items()
            if key.startswith("decoder.") and not key.endswith(".weight_g")
        )
    return numbers * dtype.itemsize


def load_head(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> SoundHead:
    """Return the head of sound with its weights. Raises WeightsError if one is not finite."""
    with torch.device("meta"):
        head = SoundHead(checkpoint.config)
    empty = partial(torch.empty, device=device, dtype=dtype)
    checkpoint.weights.read_into(materialise(head, lambda _, shape: empty(shape)))
    return head.eval()


def load_decoder(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, decodes: bool = True
) -> SoundDecoder:
    """Return the decoder of a checkpoint's sound tokenizer; with ``decodes`` off without weights.

    Raises:
        LayoutError, VariantError: As :func:`require_ears`, or diffusers' class does not implement
            the config.
        WeightsError: A weight is missing, misshapen or not finite.
        MissingDependencyError: diffusers is not installed.
    """
    config, files = require_ears(checkpoint)
    hop = math.prod(config["dec_strides"])
    model = _model(config, files, device, dtype) if decodes else None
    return SoundDecoder(config["sampling_rate"], hop, model)


def _model(
    config: Mapping[str, Any], files: WeightSource, device: torch.device, dtype: torch.dtype
) -> Any:
    with needed_by("sound"):
        from diffusers import (
            Cosmos3AVAEAudioTokenizer,  # pyright: ignore[reportPrivateImportUsage]
        )
    kind: Any = Cosmos3AVAEAudioTokenizer
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's weight_norm has a successor
            model = kind.from_config({**config, "encoder_enabled": False})
    except (IndexError, NotImplementedError, TypeError, ValueError) as error:
        raise LayoutError(f"{_CONFIG} cannot be used: {error}") from None
    files.check({name: tuple(p.shape) for name, p in model.named_parameters()}, ("encoder.",))
    empty = partial(torch.empty, device=device, dtype=dtype)
    files.read_into(materialise(model, lambda _, shape: empty(shape)))
    for module in model.modules():
        if hasattr(module, "weight_g"):
            torch.nn.utils.remove_weight_norm(module)
    return model.requires_grad_(False).eval()
