"""The exact texts that Cosmos 3 action models were trained on: plain and JSON captions around an
instruction.

Sources: cosmos-framework (``viewpoint_utils``, the DROID policy server) and diffusers 0.42.1
(``_build_action_json_prompt``). A caption tells the length of the clip (chunk + 1 frames) and the
size of the padded canvas, not of the picture on it. A blank instruction is a valid caption: an
empty description in JSON, as diffusers writes it; empty text in the plain format, as
cosmos-framework leaves it. The robot policy refuses it
(:mod:`strands_cosmos3.backends.model_input`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from strands_cosmos3.checks import positive
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

DROID_LAYOUT = (
    "The top row is from the wrist-mounted camera. The bottom row contains two horizontally "
    "concatenated third-person "
    "perspective views of the scene from opposite sides, with the robot visible."
)
"""What follows the view sentence where the picture is DROID's composite."""

_ASPECTS = ("1,1", "4,3", "3,4", "16,9", "9,16")


def view_point(name: str) -> ViewPoint:
    """The view point of that name; ``ego_view`` and ``ego`` are the same.

    Raises:
        UnknownNameError: No such view point.
    """
    key = name.removesuffix("_view")
    for known in VIEW_SENTENCES:
        if key == known:
            return known
    raise UnknownNameError("view point", name, VIEW_SENTENCES)


def compose_prompt(
    instruction: str,
    *,
    prompt_format: str,
    view: str,
    num_frames: int,
    fps: float,
    canvas_hw: tuple[int, int],
    droid_layout: bool = False,
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
        droid_layout: Whether the picture is DROID's composite, whose layout is then told.

    Raises:
        UnknownNameError: No such format or view point.
        InputError: A number is not above zero.
    """
    text = instruction.strip()
    framing = VIEW_SENTENCES[view_point(view)] + (f" {DROID_LAYOUT}" if droid_layout else "")
    fps, seconds = positive(fps, "fps"), positive(num_frames, "num_frames") / positive(fps, "fps")
    height, width = canvas_hw
    if prompt_format == "plain":
        if not text:
            return ""
        return (
            f"{text.removesuffix('.')}. {framing} The video is {float(int(seconds)):.1f} seconds "
            f"long and is of {fps:.0f} FPS. "
            f"This video is of {height}x{width} resolution."
        )
    if prompt_format != "json":
        raise UnknownNameError("prompt format", prompt_format, ("plain", "json"))
    description = text if not text or text.endswith((".", "!", "?")) else f"{text}."
    return _json_caption(description, framing, seconds, fps, height, width)


def _json_caption(
    description: str, framing: str, seconds: float, fps: float, height: int, width: int
) -> str:
    minutes, rest = divmod(round(seconds), 60)
    caption: dict[str, Any] = {
        "cinematography": {"framing": framing},
        "actions": [{"time": f"0:00-{minutes}:{rest:02d}", "description": description}],
        "duration": f"{int(seconds)}s",
        "fps": fps,
        "resolution": {"H": int(height), "W": int(width)},
        "aspect_ratio": min(_ASPECTS, key=lambda aspect: abs(_ratio(aspect) - width / height)),
    }
    return json.dumps(caption)


def _ratio(aspect: str) -> float:
    width, height = aspect.split(",")
    return int(width) / int(height)
