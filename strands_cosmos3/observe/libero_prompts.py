"""NVIDIA's captions for LIBERO, to the character, where its server and its training differ.

Its client appends two sentences about the views to the instruction, and the server puts all of that
into ``description``. In training the sentence about the layout is part of ``framing``. Sources:
cosmos-framework @5eee9ed5 ``closed_loop_eval.py`` 75-106, ``action_policy_server_libero.py``
844-864, ``libero_lerobot_dataset.py`` 291-296.
"""

from __future__ import annotations

import json
from typing import Literal

from strands_cosmos3.observe.prompts import VIEW_SENTENCES

Caption = Literal["checkpoint", "nvidia_server", "nvidia_training"]
CAPTIONS = ("checkpoint", "nvidia_server", "nvidia_training")
_VIEWS = VIEW_SENTENCES["concat"]
_LAYOUT = (
    "The left half shows the third-person view; the right half shows the wrist-mounted camera."
)


def client_prompt(instruction: str) -> str:
    """Return an instruction with the sentences about the views, as NVIDIA's client sends it."""
    text = instruction.strip()
    return f"{text}{' ' if text.endswith('.') else '. '}{_VIEWS} {_LAYOUT}"


def caption(instruction: str, style: Caption) -> str | None:
    """Return the whole caption of a chunk of 16 rows on the canvas of 192 x 320; None leaves it
    to the checkpoint.
    """
    if style == "checkpoint":
        return None
    trained = style == "nvidia_training"
    text = instruction.strip().removesuffix(".") + "."
    said = {
        "cinematography": {"framing": f"{_VIEWS} {_LAYOUT}" if trained else _VIEWS},
        "actions": [
            {
                "time": "0:00-0:01",
                "description": text if trained else client_prompt(instruction),
                "idle_frame": "0 out of 16.",
            }
        ],
        "duration": "0s",  # 17 frames at 20 Hz, truncated
        "fps": 20.0,
        "resolution": {"H": 192, "W": 320},
        "aspect_ratio": "16,9",
    }
    return json.dumps(said)
