"""The layout of a film's frames."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Frame = NDArray[np.uint8]
_PAPER = (24, 25, 28)
_INK = (226, 228, 232)
_FAINT = (150, 154, 162)
_ACCENT = (246, 164, 66)
_WHITE = (255, 255, 255)
_GOOD = (38, 122, 68)
_BAD = (150, 60, 40)
_GAP_PX = 8
_SHADE = 0.58  # of the paper's colour in the caption's band


def compose_film(
    beauty: Frame,
    views: Mapping[str, Frame],
    predicted: Frame | None = None,
    caption: str | None = None,
    observed: Frame | None = None,
    time_s: float | None = None,
    outcome: str | None = None,
) -> Frame:
    """Compose a frame of the film: the scene, the policy's views below it, the predicted world
    beside it.

    Args:
        beauty: The large picture, at its own size; all pictures are [H, W, 3] uint8.
        views: Observation pictures by name, left to right.
        predicted: A frame of the predicted video; it is labelled as a prediction.
        observed: The observation at the time of ``predicted``, shown below it at the same size.
        time_s: Simulated time, shown at the right of the caption's band.
        outcome: How the episode ended, in a band across the scene.

    Returns:
        [H', W', 3] uint8 with even sides, which depend on the shapes of the given pictures only.
    """
    scene = Image.fromarray(beauty)
    if caption is not None or time_s is not None:
        _write_caption(scene, caption or "", time_s)
    if outcome is not None:
        _write_outcome(scene, outcome)
    parts = [(scene, (0, 0))]
    width, height = scene.size
    if views:
        strip = _strip(views, width)
        parts.append((strip, (0, height)))
        height += strip.height
    if predicted is not None:
        panel = _side_panel(predicted, observed, height, width // 2)
        parts.append((panel, (width, 0)))
        width += panel.width
    page = _page(width + width % 2, height + height % 2)
    for part, place in parts:
        page.paste(part, place)
    return np.array(page)


def _page(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), _PAPER)


def _scaled(picture: Frame, width: int, height: int) -> Image.Image:
    return Image.fromarray(picture).resize(
        (width, height), Image.Resampling.BILINEAR, reducing_gap=2.0
    )


@lru_cache
def _font(size_px: int) -> Any:
    return ImageFont.load_default(size_px)


def _write(
    page: Image.Image,
    text: str,
    x_px: int,
    y_px: int,
    size_px: int,
    color: tuple[int, int, int] = _INK,
    right_px: int = 0,
) -> None:
    """Write a line of text onto a page, with an ellipsis if it would come within ``right_px`` and a
    gap of its right edge.
    """
    font = _font(size_px)
    room_px = page.width - right_px - x_px - _GAP_PX
    while text and font.getlength(text) > room_px:
        text = text[:-2].rstrip() + "…" if len(text) > 2 else ""
    ImageDraw.Draw(page).text((x_px, y_px), text, fill=color, font=font)


def _write_caption(scene: Image.Image, caption: str, time_s: float | None) -> None:
    """Write the caption, and the clock at the right, into a dark band at the top."""
    size_px = max(11, round(scene.height * 0.042))
    band_px = min(round(size_px * 2.1), scene.height)
    band = (0, 0, scene.width, band_px)
    y_px = round((band_px - 1.2 * size_px) / 2)
    scene.paste(Image.blend(scene.crop(band), _page(scene.width, band_px), _SHADE), band)
    clock = "" if time_s is None else f"{time_s:.1f} s"
    clock_px = round(_font(size_px).getlength(clock)) + 2 * _GAP_PX
    _write(scene, clock, max(scene.width - clock_px, 0), y_px, size_px)
    right_px = 0 if time_s is None else 5 * size_px
    _write(scene, caption, 2 * _GAP_PX, y_px, size_px, right_px=right_px)


def _write_outcome(scene: Image.Image, outcome: str) -> None:
    """Write the outcome into a band across the lower part."""
    size_px = max(11, round(scene.height * 0.06))
    top = max(scene.height - 2 * size_px, 0)
    scene.paste(_GOOD if outcome.startswith("success") else _BAD, (0, top, *scene.size))
    _write(scene, outcome, 2 * _GAP_PX, top + round(0.4 * size_px), size_px, _WHITE)


def _strip(views: Mapping[str, Frame], width: int) -> Image.Image:
    """Return the views side by side, each with its name below."""
    cell = max(1, (width - _GAP_PX * (len(views) + 1)) // len(views))
    size_px = max(10, round(cell * 0.062))
    pictures = [
        _scaled(view, cell, max(1, round(view.shape[0] * cell / view.shape[1])))
        for view in views.values()
    ]
    tallest = max(picture.height for picture in pictures)
    strip = _page(width, tallest + 2 * _GAP_PX + round(size_px * 1.35))
    left = (width - cell * len(views) - _GAP_PX * (len(views) - 1)) // 2
    for index, (name, picture) in enumerate(zip(views, pictures, strict=True)):
        x = left + index * (cell + _GAP_PX)
        strip.paste(picture, (x, _GAP_PX))
        _write(strip, name.replace("_", " "), x + 1, tallest + _GAP_PX + 3, size_px, _FAINT)
    return strip


def _side_panel(predicted: Frame, observed: Frame | None, height: int, widest: int) -> Image.Image:
    """Return the predicted and the observed picture at one size, with their titles, as high as
    the page and no wider than ``widest``.
    """
    size_px = max(10, round(height * 0.028))
    head = round(size_px * 3.6)
    half = height // 2
    have = predicted.shape
    scale = min((half - head - _GAP_PX) / have[0], (widest - 2 * _GAP_PX) / have[1])
    rows, columns = (max(1, round(n * scale)) for n in have[:2])
    panel = _page(columns + 2 * _GAP_PX, height)
    for picture, middle, title, note, color in (
        (predicted, 0, "PREDICTED WORLD", "the model's, not observed", _ACCENT),
        (observed, half, "OBSERVED WORLD", "camera pictures of that time", _INK),
    ):
        if picture is not None:
            top = middle + max((half - head - rows) // 2, 0)
            _write(panel, title, _GAP_PX, top + round(size_px * 0.3), size_px, color)
            _write(panel, note, _GAP_PX, top + round(size_px * 1.75), size_px, _FAINT)
            panel.paste(_scaled(picture, columns, rows), (_GAP_PX, top + head))
    return panel
