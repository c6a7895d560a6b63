"""Fast composites: ``observe``'s composite and canvas as six matrices.

Resizing views, halving two of them and shrinking the composite onto the canvas are linear apart from two roundings. The
product of these maps takes a tenth of the time and differs by less than 1.5 grey levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.errors import ShapeError
from strands_cosmos3.observe.views import canvas_hw, resize

F32 = NDArray[np.float32]


class FastComposite:
    """Compose a rig's three rendered views of size ``view_hw`` (ShapeError if not of the rig's aspect ratio) on a canvas."""

    def __init__(self, rig: CameraRig, view_hw: tuple[int, int], tier: int):
        full_h, full_w = rig.view_hw
        if view_hw[0] * full_w != view_hw[1] * full_h:
            raise ShapeError(f"views of {view_hw} must have the aspect ratio of {rig.view_hw}; render them with that ratio.")
        self._names = rig.views
        half_h, half_w = full_h // 2, full_w // 2
        rows, columns = full_h + half_h, full_w
        self.canvas_hw = canvas_hw(rows, columns, tier)
        scale = min(self.canvas_hw[1] / columns, self.canvas_hw[0] / rows, 1.0)
        self.content_hw = int(scale * rows + 0.5), int(scale * columns + 0.5)
        down_h, down_w = _matrix(rows, self.content_hw[0], "bicubic"), _matrix(columns, self.content_hw[1], "bicubic")
        up_h, up_w = _matrix(view_hw[0], full_h, "bilinear"), _matrix(view_hw[1], full_w, "bilinear")
        halve_h, halve_w = (_matrix(2 * n, n, "bilinear", False) for n in (half_h, half_w))
        maps = (
            (down_h[:, :full_h] @ up_h, down_w @ up_w),
            (down_h[:, full_h:] @ halve_h @ up_h, down_w[:, :half_w] @ halve_w @ up_w),
            (down_h[:, full_h:] @ halve_h @ up_h, down_w[:, half_w:] @ halve_w @ up_w),
        )
        self._maps = tuple((_Resampling.of(tall), _Resampling.of(wide)) for tall, wide in maps)

    def __call__(self, views: Mapping[str, NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """Return the canvas [H, W, 3] uint8 of the views, padding included."""
        content = np.zeros((*self.content_hw, 3), np.float32)
        for name, (tall, wide) in zip(self._names, self._maps, strict=True):
            view = views[name].astype(np.float32)
            low = (tall.weights @ view.reshape(len(view), -1)).reshape(-1, *view.shape[1:])  # [h, W, 3]
            flat = np.ascontiguousarray(low.swapaxes(1, 2)).reshape(-1, low.shape[1])  # one product is faster than h
            content[tall.span, wide.span] += (flat @ wide.weights.T).reshape(len(low), 3, -1).swapaxes(1, 2)
        bottom, right = self.canvas_hw[0] - self.content_hw[0], self.canvas_hw[1] - self.content_hw[1]
        padded = np.pad(content, ((0, bottom), (0, right), (0, 0)), mode="reflect")
        return np.clip(padded + 0.5, 0, 255).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class _Resampling:
    """The rows of a resampling matrix that are not zero, and where they are on the canvas."""

    span: slice
    weights: F32

    @classmethod
    def of(cls, matrix: F32) -> _Resampling:
        seen = np.flatnonzero(np.abs(matrix).max(1))
        span = slice(int(seen[0]), int(seen[-1]) + 1)
        return cls(span, np.ascontiguousarray(matrix[span]))


def _matrix(size: int, wanted: int, kernel: str, antialias: bool = True) -> F32:
    """Return the matrix [wanted, size] that resamples one axis as ``observe`` does."""
    unit = np.eye(size, dtype=np.float32)[:, None, :]  # resampling unit vectors gives the weights
    return resize(unit, (wanted, 1), "bicubic" if kernel == "bicubic" else "bilinear", antialias)[:, 0, :]
