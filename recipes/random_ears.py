"""The ears of a small random checkpoint, for tests and benchmarks: the heads of sound in its
transformer, and a sound tokenizer with random weights.

The tokenizer is as small as one of 25 latents a second can be heard: 8 kHz, 320 samples a latent.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from strands_cosmos3.errors import CheckpointError
from strands_cosmos3.resources import read_json, write_json

SOUND: dict[str, Any] = {"sound_gen": True, "sound_dim": 6, "sound_latent_fps": 25.0}
"""What ``transformer/config.json`` says of sound."""
_TOKENIZER: dict[str, Any] = {
    "sampling_rate": 8000,
    "vocoder_input_dim": SOUND["sound_dim"],
    "dec_dim": 4,
    "dec_c_mults": [1, 2, 4],
    "dec_strides": [5, 8, 8],
    "enc_dim": 4,
    "enc_c_mults": [1, 2],
    "enc_strides": [4, 5],
    "enc_latent_dim": 2 * SOUND["sound_dim"],
}


def write_ears(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Give a random checkpoint, whose transformer has the heads of sound, a sound tokenizer.

    ``config`` replaces options of the small tokenizer.
    """
    from diffusers import (
        Cosmos3AVAEAudioTokenizer,  # pyright: ignore[reportPrivateImportUsage]
    )

    kind: Any = Cosmos3AVAEAudioTokenizer
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's weight_norm has a successor
        torch.manual_seed(seed)
        tokenizer = kind(**{**_TOKENIZER, **config})
        for name, parameter in tokenizer.named_parameters():
            if "snake" in name:  # zeros hide which is which
                torch.nn.init.normal_(parameter, std=0.3)
    tokenizer.save_pretrained(folder / "sound_tokenizer")
    index = read_json(folder / "model_index.json", CheckpointError, "")
    index["sound_tokenizer"] = ["diffusers", "Cosmos3AVAEAudioTokenizer"]
    write_json(folder / "model_index.json", index)
    return folder
