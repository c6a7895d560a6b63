"""Films: a video file that appears only when it is complete, and the layout of its frames."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from strands_cosmos3.checks import image_array, positive
from strands_cosmos3.errors import ConfigError, MissingDependencyError, ShapeError
from strands_cosmos3.resources import require_creatable

Frame = NDArray[np.uint8]
_SUFFIXES = (".mp4", ".mkv", ".mov")
_PAPER = (24, 25, 28)
_INK = (226, 228, 232)
_FAINT = (150, 154, 162)
_ACCENT = (246, 164, 66)
_GOOD, _BAD = (38, 122, 68), (150, 60, 40)
_GAP_PX = 8


class VideoWriter:
    """Writes frames to a film (H.264, yuv420p). As a context manager it keeps the film only if the
    block succeeded.

    Frames go to a hidden file beside ``path``, which replaces it in :meth:`close`. Missing folders
    are made.

    ``crf`` is x264's constant rate factor: 0 is lossless, 51 worst.

    Raises:
        InputError, ConfigError: fps is not above zero; a suffix not .mp4, .mkv or .mov, or a crf
            outside 0..51.
        MissingDependencyError: PyAV is not installed.
    """

    def __init__(self, path: str | Path, fps: float, crf: int = 20):
        self.path = Path(path).expanduser()
        if self.path.suffix.lower() not in _SUFFIXES:
            raise ConfigError(
                f"a film's name must end in {', '.join(_SUFFIXES)}, got {str(path)!r}."
            )
        if not 0 <= crf <= 51:
            raise ConfigError(f"crf must be 0 (lossless) to 51 (worst), got {crf!r}.")
        self._rate = Fraction(positive(fps, "fps")).limit_denominator(1000)
        require_creatable(self.path, "the film")
        try:
            import av
        except ImportError as error:
            raise MissingDependencyError(
                "films need PyAV: pip install 'strands-cosmos3[sim]'."
            ) from error
        self._hidden = self.path.with_name(
            f".{self.path.stem}.{os.getpid()}.{id(self):x}{self.path.suffix}"
        )
        self._crf = crf
        self._av: Any = av
        self._stream: Any = None
        self._container: Any = av.open(str(self._hidden), "w")
        self.frames = 0

    def write(self, frame: Frame) -> None:
        """Append a frame [H, W, 3] uint8; height and width even, and the same for every frame.

        Raises:
            ShapeError, ConfigError: It is not such an array; the film was closed.
        """
        if self._container is None:
            raise ConfigError(f"{self.path} is closed; no frame can be added.")
        frame = image_array(frame, "a frame")
        if frame.shape[0] % 2 or frame.shape[1] % 2:
            raise ShapeError(f"a frame's height and width must be even, got {list(frame.shape)}.")
        if self._stream is None:
            self._stream = self._container.add_stream(
                "libx264", rate=self._rate, options={"crf": str(self._crf), "preset": "veryfast"}
            )
            self._stream.height, self._stream.width, self._stream.pix_fmt = (
                *frame.shape[:2],
                "yuv420p",
            )
        if (self._stream.height, self._stream.width) != frame.shape[:2]:
            want = (self._stream.height, self._stream.width)
            raise ShapeError(
                f"this film's frames are {want[0]} x {want[1]} (height x width), got "
                f"{list(frame.shape)}."
            )
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        self._container.mux(self._stream.encode(picture))
        self.frames += 1

    def close(self) -> None:
        """Finish the film and move it to ``path``, if it has a frame. Closing twice is harmless."""
        if self._container is None:
            return
        if self._stream is None:
            self.discard()
            return
        try:
            self._container.mux(self._stream.encode(None))
            self._container.close()
            os.replace(self._hidden, self.path)
        finally:
            self._container = None
            self._hidden.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the unfinished film; an older one at ``path`` stays."""
        if self._container is None:
            return
        container, self._container = self._container, None
        try:
            if self._stream is not None:
                container.close()
        finally:
            self._hidden.unlink(missing_ok=True)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


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
    beside = {
        name: picture
        for name, picture in (("predicted", predicted), ("observed", observed))
        if picture is not None
    }
    main = (
        beauty if caption is None and time_s is None else _captioned(beauty, caption or "", time_s)
    )
    main = main if outcome is None else _ended(main, outcome)
    strip = _strip(views, main.shape[1]) if views else np.empty((0, main.shape[1], 3), np.uint8)
    page = np.concatenate([main, strip])
    if predicted is not None:
        page = np.concatenate(
            [page, _side_panel(beside, page.shape[0], main.shape[1] // 2)], axis=1
        )
    height, width = page.shape[0] + page.shape[0] % 2, page.shape[1] + page.shape[1] % 2
    out = np.empty((height, width, 3), np.uint8)
    out[:] = _PAPER
    out[: page.shape[0], : page.shape[1]] = page
    return out


def _fit(picture: Frame, width: int, height: int) -> Frame:
    """Scale a picture into a box in pixels, at its own aspect ratio."""
    scale = min(width / picture.shape[1], height / picture.shape[0])
    size = max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale))
    return np.asarray(
        Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    )


@lru_cache(maxsize=256)
def _text(
    text: str, size_px: int, color: tuple[int, int, int], max_width_px: int
) -> NDArray[np.float32]:
    """Render a line of text as [h, w, 4] (colour 0..255, coverage 0..1), with an ellipsis if it
    is too long.
    """
    font = ImageFont.load_default(size_px)
    shown = text
    while shown and font.getlength(shown) > max_width_px:
        shown = shown[:-2].rstrip() + "…" if len(shown) > 2 else ""
    mask = Image.new("L", (max(1, int(np.ceil(font.getlength(shown)))), round(size_px * 1.35)))
    ImageDraw.Draw(mask).text((0, 0), shown, fill=255, font=font)
    coverage = np.asarray(mask, np.float32)[..., None] / 255.0
    rgb = np.broadcast_to(np.array(color, np.float32), (*mask.size[::-1], 3))
    return np.concatenate([rgb, coverage], axis=2)


def _write(
    page: Frame, text: str, x_px: int, y_px: int, size_px: int, color: tuple[int, int, int] = _INK
) -> None:
    """Write a line of text onto a page, in place."""
    line = _text(text, size_px, color, max(page.shape[1] - x_px - _GAP_PX, 1))
    spot = page[y_px : y_px + line.shape[0], x_px : x_px + line.shape[1]]
    line = line[: spot.shape[0], : spot.shape[1]]
    spot[:] = spot * (1.0 - line[..., 3:]) + line[..., :3] * line[..., 3:] + 0.5


def _captioned(beauty: Frame, caption: str, time_s: float | None) -> Frame:
    """Return the large picture with the caption and the clock in a dark band at the top."""
    page = beauty.copy()
    size_px = max(11, round(beauty.shape[0] * 0.042))
    band = min(round(size_px * 2.1), page.shape[0])
    page[:band] = page[:band] * np.float32(0.42) + np.array(_PAPER, np.float32) * np.float32(0.58)
    y_px, clock = round((band - 1.2 * size_px) / 2), "" if time_s is None else f"{time_s:.1f} s"
    room = page.shape[1] - round((0 if time_s is None else 5) * size_px)
    _write(page[:, :room], caption, 2 * _GAP_PX, y_px, size_px)
    if clock:
        wide = _text(clock, size_px, _INK, page.shape[1]).shape[1]
        _write(page, clock, max(page.shape[1] - wide - 2 * _GAP_PX, 0), y_px, size_px)
    return page


def _ended(main: Frame, outcome: str) -> Frame:
    """Return the large picture with the outcome in a band across its lower part."""
    page = main.copy()
    size_px = max(11, round(page.shape[0] * 0.06))
    top = max(page.shape[0] - 2 * size_px, 0)
    page[top:] = _GOOD if outcome.startswith("success") else _BAD
    _write(page, outcome, 2 * _GAP_PX, top + round(0.4 * size_px), size_px, (255, 255, 255))
    return page


def _strip(views: Mapping[str, Frame], width: int) -> Frame:
    """Return the views side by side, each with its name below."""
    cell = max(1, (width - _GAP_PX * (len(views) + 1)) // len(views))
    size_px = max(10, round(cell * 0.062))
    pictures = {name: _fit(view, cell, view.shape[0] * cell) for name, view in views.items()}
    tallest = max(picture.shape[0] for picture in pictures.values())
    strip = np.empty((tallest + _GAP_PX + round(size_px * 1.35) + _GAP_PX, width, 3), np.uint8)
    strip[:] = _PAPER
    left = (width - cell * len(views) - _GAP_PX * (len(views) - 1)) // 2
    for index, (name, picture) in enumerate(pictures.items()):
        x = left + index * (cell + _GAP_PX)
        shown = picture[:, : width - x]
        strip[_GAP_PX : _GAP_PX + picture.shape[0], x : x + shown.shape[1]] = shown
        _write(strip, name.replace("_", " "), x + 1, tallest + _GAP_PX + 3, size_px, _FAINT)
    return strip


_TITLES = {
    "predicted": ("PREDICTED WORLD", "the model's, not observed", _ACCENT),
    "observed": ("OBSERVED WORLD", "camera pictures of that time", _INK),
}


def _side_panel(beside: Mapping[str, Frame], height: int, widest: int) -> Frame:
    """Return the predicted and the observed picture at one size, with their titles, as high as
    the page and no wider.
    """
    size_px = max(10, round(height * 0.028))
    head, half = round(size_px * 3.6), height // 2
    have = beside["predicted"].shape
    scale = min((half - head - _GAP_PX) / have[0], (widest - 2 * _GAP_PX) / have[1])
    rows, columns = (max(1, round(n * scale)) for n in have[:2])
    panel = np.empty((height, columns + 2 * _GAP_PX, 3), np.uint8)
    panel[:] = _PAPER
    for i, (name, given) in enumerate(beside.items()):
        title, note, color = _TITLES[name]
        picture = np.asarray(
            Image.fromarray(given).resize(
                (columns, rows), Image.Resampling.BILINEAR, reducing_gap=2.0
            )
        )
        top = i * half + max((half - head - rows) // 2, 0)
        _write(panel, title, _GAP_PX, top + round(size_px * 0.3), size_px, color)
        _write(panel, note, _GAP_PX, top + round(size_px * 1.75), size_px, _FAINT)
        spot = panel[top + head : top + head + rows, _GAP_PX : _GAP_PX + columns]
        spot[:] = picture[: spot.shape[0], : spot.shape[1]]
    return panel
