"""The exact captions that Cosmos 3 action models were trained on: plain and JSON text around an
instruction.

Sources: cosmos-framework (``viewpoint_utils``, the DROID policy server) and diffusers 0.42.1
(``_build_action_json_prompt``). A caption states the length of the clip (chunk + 1 frames) and the
size of the padded canvas, not of the picture on it. A blank instruction is a valid caption: an
empty description in JSON, as diffusers writes it; empty text in the plain format, as
cosmos-framework leaves it. The robot policy refuses it
(:mod:`strands_cosmos3.backends.model_input`).

For LIBERO, NVIDIA's client appends two sentences about the views to the instruction, and the server
puts all of that into ``description``. In training the sentence about the layout is part of
``framing``. Sources: cosmos-framework @5eee9ed5 ``closed_loop_eval.py`` 75-106,
``action_policy_server_libero.py`` 844-864, ``libero_lerobot_dataset.py`` 291-296.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from strands_cosmos3.checks import known_name, positive
from strands_cosmos3.embodiments import ViewPoint
from strands_cosmos3.errors import UnknownNameError

PromptFormat = Literal["plain", "json"]

VIEW_SENTENCES: Mapping[ViewPoint, str] = MappingProxyType(
    {
        "ego": "This video is captured from a first-person perspective looking at the scene.",
        "third_person": (
            "This video is captured from a third-person perspective looking towards the agent "
            "from the front."
        ),
        "wrist": "This video is captured from a wrist-mounted camera.",
        "concat": "This video contains concatenated views from multiple camera perspectives.",
        "top_down_2d": "This video is captured from a top-down view of a flat 2D scene.",
        "video_game": "This video is captured from an in-game camera perspective in a virtual "
        "environment.",
    }
)
"""View point -> the sentence that names it."""

_ASPECTS = ("1,1", "4,3", "3,4", "16,9", "9,16")


def view_point(name: str) -> ViewPoint:
    """The view point of that name; ``ego_view`` and ``ego`` are the same.

    Raises:
        UnknownNameError: No such view point.
    """
    key = cast("ViewPoint", name.removesuffix("_view"))
    if key not in VIEW_SENTENCES:
        raise UnknownNameError("view point", name, VIEW_SENTENCES)
    return key


def compose_prompt(
    instruction: str,
    *,
    prompt_format: str,
    view: str,
    num_frames: int,
    fps: float,
    canvas_hw: tuple[int, int],
    layout: str = "",
) -> str:
    """The caption for an instruction.

    Args:
        instruction: What is to be done, or blank; a full stop is added unless it ends in one (in
            JSON also in "!" or "?").
        prompt_format: ``plain`` or ``json``.
        view: View point, e.g. ``concat``.
        num_frames: Frames of the clip, the given one included: chunk + 1.
        fps: Their rate.
        canvas_hw: Height and width of the padded canvas.
        layout: Sentence that describes the composite (``CameraRig.layout``), if the picture is one.

    Raises:
        UnknownNameError: No such format or view point.
        InputError: A number is not above zero.
    """
    text = instruction.strip()
    framing = VIEW_SENTENCES[view_point(view)] + (f" {layout}" if layout else "")
    fps = positive(fps, "fps")
    seconds = positive(num_frames, "num_frames") / fps
    height, width = canvas_hw
    if prompt_format == "plain":
        if not text:
            return ""
        return (
            f"{text.removesuffix('.')}. {framing} The video is {float(int(seconds)):.1f} seconds "
            f"long and is of {fps:.0f} FPS. "
            f"This video is of {height}x{width} resolution."
        )
    known_name(prompt_format, "prompt format", ("plain", "json"))
    description = text if not text or text.endswith((".", "!", "?")) else f"{text}."
    return _json_caption({"description": description}, framing, seconds, fps, canvas_hw)


def _json_caption(
    action: Mapping[str, str], framing: str, seconds: float, fps: float, canvas_hw: tuple[int, int]
) -> str:
    height, width = canvas_hw
    minutes, rest = divmod(round(seconds), 60)
    caption: dict[str, Any] = {
        "cinematography": {"framing": framing},
        "actions": [{"time": f"0:00-{minutes}:{rest:02d}", **action}],
        "duration": f"{int(seconds)}s",
        "fps": fps,
        "resolution": {"H": int(height), "W": int(width)},
        "aspect_ratio": min(_ASPECTS, key=lambda aspect: abs(_ratio(aspect) - width / height)),
    }
    return json.dumps(caption)


def _ratio(aspect: str) -> float:
    width, height = aspect.split(",")
    return int(width) / int(height)


LiberoCaption = Literal["checkpoint", "nvidia_server", "nvidia_training"]
LIBERO_CAPTIONS = get_args(LiberoCaption)
_LIBERO_VIEWS = VIEW_SENTENCES["concat"]
_LIBERO_LAYOUT = (
    "The left half shows the third-person view; the right half shows the wrist-mounted camera."
)


def libero_client_prompt(instruction: str) -> str:
    """Return a LIBERO instruction with the sentences about the views, as NVIDIA's client does."""
    text = instruction.strip()
    return f"{text}{' ' if text.endswith('.') else '. '}{_LIBERO_VIEWS} {_LIBERO_LAYOUT}"


def libero_caption(instruction: str, style: LiberoCaption) -> str | None:
    """Return the whole caption of a chunk of 16 rows of LIBERO on the canvas of 192 x 320; None
    leaves it to the checkpoint.
    """
    if style == "checkpoint":
        return None
    trained = style == "nvidia_training"
    framing = f"{_LIBERO_VIEWS} {_LIBERO_LAYOUT}" if trained else _LIBERO_VIEWS
    description = (
        instruction.strip().removesuffix(".") + "."
        if trained
        else libero_client_prompt(instruction)
    )
    action = {"description": description, "idle_frame": "0 out of 16."}
    return _json_caption(action, framing, 17 / 20, 20.0, (192, 320))
