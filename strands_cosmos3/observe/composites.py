"""Composites at the size of a model's canvas, in one step: the letterboxed composite as six
matrices.

Letterboxing views, halving two of them and shrinking the composite onto the canvas are linear apart
from three roundings. The products of these maps take a twentieth of the time and differ by less
than 1.5 grey levels. The bundled policy was trained on such pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import image_array
from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.observe.views import (
    F32,
    Image,
    Kernel,
    canvas_hw,
    compose,
    content_hw,
    letterbox_hw,
    resize,
    rig_views,
)

Size = tuple[int, int]
_BANDS = 8


def compose_for_tier(views: Mapping[str, Image], rig: CameraRig, tier: int) -> Image:
    """What :func:`~.views.to_canvas` keeps, on a tier's canvas, of the composite of
    :func:`~.views.compose`; errors as there.

    Where the canvas is no smaller than the composite, that is the composite itself.
    """
    height, width = rig.view_hw[0] + rig.view_hw[0] // 2, rig.view_hw[1]
    if content_hw(height, width, canvas_hw(height, width, tier)) == (height, width):
        return compose(views, rig)
    pictures = [
        image_array(np.asarray(view), f"view {name!r}")
        for name, view in rig_views(views, rig).items()
    ]
    sizes = tuple((picture.shape[0], picture.shape[1]) for picture in pictures)
    return canvas_composite(rig, sizes, tier)(pictures)


@lru_cache(maxsize=16)
def canvas_composite(rig: CameraRig, sizes: tuple[Size, ...], tier: int) -> CanvasComposite:
    """The maps of a rig's three views of these sizes (height, width) onto a tier's canvas, kept
    for the next call.
    """
    return CanvasComposite(rig, sizes, tier)


class CanvasComposite:
    """Compose a rig's three views of the given sizes (height, width) on a tier's canvas.

    Attributes:
        canvas_hw, content_hw: Height and width of the canvas, and of the picture at its top left.
    """

    def __init__(self, rig: CameraRig, sizes: tuple[Size, ...], tier: int):
        full_h, full_w = rig.view_hw
        half_h, half_w = full_h // 2, full_w // 2
        rows, columns = full_h + half_h, full_w
        self.canvas_hw = canvas_hw(rows, columns, tier)
        self.content_hw = content_hw(rows, columns, self.canvas_hw)
        down_h, down_w = (
            _matrix(rows, self.content_hw[0], "bicubic"),
            _matrix(columns, self.content_hw[1], "bicubic"),
        )
        halve_h, halve_w = (_matrix(n, n // 2, "bilinear", False) for n in (full_h, full_w))
        shrink = (
            (down_h[:, :full_h], down_w),
            (down_h[:, full_h:] @ halve_h, down_w[:, :half_w] @ halve_w),
            (down_h[:, full_h:] @ halve_h, down_w[:, half_w : 2 * half_w] @ halve_w),
        )
        self._maps = []
        for size, maps in zip(sizes, shrink, strict=True):
            fitted = zip(maps, size, letterbox_hw(*size, rig.view_hw), rig.view_hw, strict=True)
            self._maps.append(
                [
                    _Resampling.of(onto @ _letterbox(n, inner, full))
                    for onto, n, inner, full in fitted
                ]
            )

    def __call__(self, views: list[Image]) -> Image:
        """Return the content of the canvas [h, w, 3]."""
        content = np.zeros((*self.content_hw, 3), np.float32)
        for given, (tall, wide) in zip(views, self._maps, strict=True):
            low = tall(given.reshape(len(given), -1)).reshape(-1, *given.shape[1:])  # [h, W, 3]
            # [w, 3 h]
            narrow = wide(np.ascontiguousarray(low.swapaxes(0, 1)).reshape(given.shape[1], -1))
            content[tall.span, wide.span] += narrow.reshape(-1, len(low), 3).swapaxes(0, 1)
        return np.clip(content + 0.5, 0, 255).astype(np.uint8)

    def padded(self, views: list[Image]) -> Image:
        """Return the whole canvas [H, W, 3]."""
        bottom, right = (
            self.canvas_hw[0] - self.content_hw[0],
            self.canvas_hw[1] - self.content_hw[1],
        )
        return np.pad(self(views), ((0, bottom), (0, right), (0, 0)), mode="reflect")


@dataclass(frozen=True, eq=False)
class _Resampling:
    """The rows of a resampling matrix that are not zero, and where they are on the canvas.

    ``bands`` are these rows in groups: the pixels that a group reads, and its weights of these.
    """

    span: slice
    bands: tuple[tuple[slice, F32], ...]

    @classmethod
    def of(cls, matrix: F32) -> _Resampling:
        span = _used(matrix.T)
        rows = matrix[span]
        groups = [(_used(group), group) for group in np.array_split(rows, min(_BANDS, len(rows)))]
        return cls(
            span, tuple((used, np.ascontiguousarray(group[:, used])) for used, group in groups)
        )

    def __call__(self, lines: NDArray[np.generic]) -> F32:
        """Resample the first axis of [pixels, n]."""
        return np.concatenate(
            [weights @ lines[used].astype(np.float32, copy=False) for used, weights in self.bands]
        )


def _used(matrix: F32) -> slice:
    """The columns from the first to the last that is not zero."""
    seen = np.flatnonzero(np.abs(matrix).max(0))
    return slice(int(seen[0]), int(seen[-1]) + 1)


def _letterbox(size: int, inner: int, full: int) -> F32:
    """[full, size]: resampled to ``inner`` pixels, centred among ``full``, black around them."""
    first = (full - inner) // 2
    placed = np.zeros((full, size), np.float32)
    placed[first : first + inner] = _matrix(size, inner, "bilinear")
    return placed


def _matrix(size: int, wanted: int, kernel: Kernel, antialias: bool = True) -> F32:
    """[wanted, size]: resamples one axis as :func:`~.views.resize` does."""
    unit = np.eye(size, dtype=np.float32)[:, None, :]  # resampling unit vectors gives the weights
    return resize(unit, (wanted, 1), kernel, antialias)[:, 0, :]
