"""Pictures for the model: letterboxed views, composites, resolution tiers, and the padded canvas.
numpy and scipy only.

Shape suffixes: H W height and width in pixels, C = 3. Pictures are uint8 [H, W, 3]; canvases are
float32 in [-1, 1]. Which views a composite has, and where, is data of the embodiment's
:class:`~strands_cosmos3.embodiments.CameraRig`.

Sources: cosmos-framework's DROID server and its client (views letterboxed to 360 x 640, wrist on
top, exteriors below at half size, composite 540 x 640); diffusers 0.42.1 ``Cosmos3OmniPipeline``
(tiers, nearest aspect, no upscaling, bicubic antialiased downscaling, reflect padding at the right
and the bottom).

A composite can be made at the size of a model's canvas in one step, by two matrices a view
(:class:`CanvasComposite`): letterboxing views, resizing them to their boxes and shrinking the
composite onto the canvas are linear apart from three roundings. The products of these maps take a
twentieth of the time and differ by less than 1.5 grey levels. The bundled policy was trained on
such pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.checks import image_array
from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.errors import ConfigError, ObservationError, ShapeError
from strands_cosmos3.tables import as_tuples, read_toml

Image = NDArray[np.uint8]
F32 = NDArray[np.float32]

TIERS: Mapping[int, tuple[tuple[int, int], ...]] = MappingProxyType(
    {
        int(tier): as_tuples(sizes)
        for tier, sizes in read_toml(Path(__file__).with_name("tiers.toml")).items()
    }
)
"""Canvases (height, width) by resolution tier."""

Composition = Literal["letterbox", "framework"]
"""Ways to make one picture of views: ``letterbox`` keeps their aspect (:func:`compose`);
``framework`` is cosmos-framework's policy server (:mod:`strands_cosmos3.engine.frames`), for
which the released DROID policies were made.
"""

Kernel = Literal["bilinear", "bicubic"]
_REACH = {"bilinear": 1.0, "bicubic": 2.0}


@dataclass(frozen=True, eq=False)
class Canvas:
    """Frames as the VAE takes them.

    Args:
        frames: [F, H, W, 3] float32 in [-1, 1] (bicubic resampling overshoots a little), H and W
            multiples of 16.
        content_hw: Height and width of the picture at its top left; the rest is padding.
    """

    frames: F32
    content_hw: tuple[int, int]


def resize(
    picture: NDArray[np.generic], hw: tuple[int, int], kernel: Kernel, antialias: bool = True
) -> F32:
    """A picture at another size, in float32 and unrounded.

    Args:
        picture: [..., H, W, C].
        hw: Wanted (height, width).
        kernel: ``bilinear``, or ``bicubic`` with a = -0.5 (PIL's and torch's antialiased one).
        antialias: Whether the kernel widens when the picture shrinks.
    """
    height, width, channels = picture.shape[-3:]
    rows = _weights(height, hw[0], kernel, antialias)
    columns = _weights(width, hw[1], kernel, antialias)
    out = np.empty((*picture.shape[:-3], *hw, channels), np.float32)
    for i in np.ndindex(picture.shape[:-3]):
        tall = rows @ picture[i].astype(np.float32).reshape(height, -1)
        columns_first = tall.reshape(hw[0], width, channels).swapaxes(0, 1).reshape(width, -1)
        out[i] = (columns @ columns_first).reshape(hw[1], hw[0], channels).swapaxes(0, 1)
    return out


@lru_cache(maxsize=8)
def _weights(size: int, target: int, kernel: Kernel, antialias: bool) -> csr_array:
    """[target, size] contribution of each pixel, pixel centres at half integers, edges
    renormalised.
    """
    scale = size / target
    stretch = max(scale, 1.0) if antialias else 1.0
    centre = (np.arange(target) + 0.5) * scale
    if antialias:
        distance = (np.arange(size)[None, :] + 0.5 - centre[:, None]) / stretch
        weights = _profile(distance, kernel)
    else:  # beyond an edge the edge's pixel counts on
        reach = int(np.ceil(_REACH[kernel])) + 1
        around = np.floor(centre).astype(int)[:, None] + np.arange(-reach, reach + 1)
        share = _profile(around + 0.5 - centre[:, None], kernel)
        weights = np.zeros((target, size))
        np.add.at(weights, (np.arange(target)[:, None], around.clip(0, size - 1)), share)
    return csr_array((weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))


def _profile(x: NDArray[np.float64], kernel: Kernel) -> NDArray[np.float64]:
    x = np.abs(x)
    if kernel == "bilinear":
        return np.clip(1 - x, 0, None)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _rounded(picture: F32) -> Image:
    return np.clip(np.floor(picture + 0.5), 0, 255).astype(np.uint8)


def _halved(picture: Image) -> Image:
    """What bilinear resampling without antialiasing makes of a picture at half its size: the mean
    of each four pixels.
    """
    rows = np.add(picture[::2], picture[1::2], dtype=np.uint16)
    return ((rows[:, ::2] + rows[:, 1::2] + 2) >> 2).astype(np.uint8)


def _doubled(picture: Image) -> Image:
    """What bilinear resampling makes of a picture at twice its size: along each axis three parts of
    a pixel, and one of its neighbour.
    """
    height, width, channels = picture.shape
    near = np.pad(picture, ((1, 1), (1, 1), (0, 0)), "edge").astype(np.uint16)
    thrice = 3 * near[:, 1:-1]
    wide = np.stack((thrice + near[:, :-2], thrice + near[:, 2:]), axis=2).reshape(height + 2, -1)
    thrice = 3 * wide[1:-1] + 8
    tall = np.stack((thrice + wide[:-2], thrice + wide[2:]), axis=1)
    return (tall >> 4).astype(np.uint8).reshape(2 * height, 2 * width, channels)


def as_uint8(picture: object) -> NDArray[np.generic]:
    """A picture of numbers in 0..255 as cosmos-framework's server reads it: clipped, fractions cut
    off, uint8.

    One within [0, 1] is returned as it is, since its scale could be either, and so is anything that
    is not finite numbers.
    """
    array = np.asarray(picture)
    if (
        array.dtype == np.uint8
        or array.dtype.kind not in "fiu"
        or not array.size
        or not np.isfinite(array).all()
    ):
        return array
    return np.clip(array, 0, 255).astype(np.uint8) if array.max() > 1 else array


def letterbox(picture: Image, hw: tuple[int, int]) -> Image:
    """A picture scaled to fit, on black, centred; its aspect is kept.

    Raises:
        ShapeError: It is not uint8 [H, W, 3].
    """
    picture = image_array(picture, "picture")
    height, width = picture.shape[:2]
    if (height, width) == hw:
        return picture
    inner = letterbox_hw(height, width, hw)
    top = (hw[0] - inner[0]) // 2
    left = (hw[1] - inner[1]) // 2
    out = np.zeros((*hw, 3), dtype=np.uint8)
    out[top : top + inner[0], left : left + inner[1]] = (
        _doubled(picture)
        if inner == (2 * height, 2 * width)
        else _rounded(resize(picture, inner, "bilinear"))
    )
    return out


def letterbox_hw(height: int, width: int, hw: tuple[int, int]) -> tuple[int, int]:
    """Size to which a picture is scaled to fit into another one: one side fills it, the other is
    cut to whole pixels.
    """
    if hw[0] * width <= hw[1] * height:
        return hw[0], max(1, width * hw[0] // height)
    return max(1, height * hw[1] // width), hw[1]


def rig_views(views: Mapping[str, Image], rig: CameraRig) -> dict[str, Image]:
    """A rig's views in its order; ObservationError if one is missing."""
    missing = [name for name in rig.views if name not in views]
    if missing:
        raise ObservationError(
            f"views {', '.join(missing)} are missing; the rig has {', '.join(rig.views)}, given: "
            f"{', '.join(map(str, views)) or 'none'}."
        )
    return {name: views[name] for name in rig.views}


def compose(views: Mapping[str, Image], rig: CameraRig) -> Image:
    """The composite of a rig's views: each letterboxed, then resized to its box.

    Args:
        views: Pictures by view name; others than the rig's are ignored.
        rig: Its views in order, the size to which each is letterboxed, and their boxes.

    Returns:
        [H, W, 3] of the rig's composite, 540 x 640 for DROID's.

    Raises:
        ObservationError: A view is missing; the message lists what there is.
        ShapeError: A view is not uint8 [H, W, 3].
    """
    composite = np.zeros((*rig.composite_hw, 3), np.uint8)
    for view, (top, left, height, width) in zip(
        rig_views(views, rig).values(), rig.boxes, strict=True
    ):
        picture = letterbox(view, rig.view_hw)
        if (2 * height, 2 * width) == rig.view_hw:
            picture = _halved(picture)
        elif (height, width) != rig.view_hw:
            picture = _rounded(resize(picture, (height, width), "bilinear", antialias=False))
        composite[top : top + height, left : left + width] = picture
    return composite


def canvas_hw(height: int, width: int, tier: int) -> tuple[int, int]:
    """The tier's canvas (height, width) whose aspect is nearest to a picture's.

    Raises:
        ConfigError: No such tier; the message lists them.
    """
    if tier not in TIERS:
        raise ConfigError(
            f"resolution tier {tier} does not exist; valid: {', '.join(map(str, TIERS))}."
        )
    return min(TIERS[tier], key=lambda hw: abs(hw[0] / hw[1] - height / width))


def content_hw(height: int, width: int, hw: tuple[int, int]) -> tuple[int, int]:
    """Height and width at which a picture lies on a canvas: shrunk to fit, never enlarged."""
    scale = min(hw[1] / width, hw[0] / height, 1.0)
    return max(1, int(scale * height + 0.5)), max(1, int(scale * width + 0.5))


def to_canvas(frames: NDArray[np.generic], hw: tuple[int, int]) -> Canvas:
    """Frames shrunk to fit a canvas (never enlarged), at its top left, the rest padded by
    reflection.

    Where the padding is not smaller than the content, the edge is repeated instead.

    Args:
        frames: [F, H, W, 3] uint8, or float32 in [0, 1].
        hw: The canvas, multiples of 16.

    Raises:
        ShapeError: The canvas is not a multiple of 16.
    """
    if hw[0] % 16 or hw[1] % 16 or min(hw) < 16:
        raise ShapeError(
            f"a canvas is a multiple of 16 on both sides, got {hw[0]} x {hw[1]} (height x width)."
        )
    height, width = frames.shape[1:3]
    content = content_hw(height, width, hw)
    shrunk = (
        frames.astype(np.float32)
        if content == (height, width)
        else resize(frames, content, "bicubic")
    )
    signed: F32 = (shrunk / np.float32(255) if frames.dtype == np.uint8 else shrunk) * np.float32(
        2
    ) - np.float32(1)
    bottom = hw[0] - content[0]
    right = hw[1] - content[1]
    mode = "edge" if right >= content[1] or bottom >= content[0] else "reflect"
    padded = np.pad(signed, ((0, 0), (0, bottom), (0, right), (0, 0)), mode=mode)
    return Canvas(padded, content)


Size = tuple[int, int]
_BANDS = 8


def compose_for_tier(views: Mapping[str, Image], rig: CameraRig, tier: int) -> Image:
    """Return the content of a tier's canvas (:func:`to_canvas`) that holds the composite of
    :func:`compose`; errors as there.

    Where the canvas is no smaller than the composite, that is the composite itself.
    """
    height, width = rig.composite_hw
    if content_hw(height, width, canvas_hw(height, width, tier)) == (height, width):
        return compose(views, rig)
    pictures = [image_array(view, f"view {name!r}") for name, view in rig_views(views, rig).items()]
    sizes = tuple((picture.shape[0], picture.shape[1]) for picture in pictures)
    return canvas_composite(rig, sizes, tier)(pictures)


class CanvasComposite:
    """Compose a rig's views of given sizes (height, width) on a tier's canvas.

    Attributes:
        canvas_hw, content_hw: Height and width of the canvas, and of the picture at its top left.
    """

    def __init__(self, rig: CameraRig, sizes: tuple[Size, ...], tier: int):
        rows, columns = rig.composite_hw
        self.canvas_hw = canvas_hw(rows, columns, tier)
        self.content_hw = content_hw(rows, columns, self.canvas_hw)
        shrink = [
            _matrix(n, content, "bicubic")
            for n, content in zip(rig.composite_hw, self.content_hw, strict=True)
        ]
        self._maps: list[list[_Resampling]] = []
        for size, box in zip(sizes, rig.boxes, strict=True):
            inner = letterbox_hw(*size, rig.view_hw)
            self._maps.append(
                [
                    _Resampling.of(
                        _from_box(shrink[axis], box[axis], box[2 + axis], rig.view_hw[axis])
                        @ _letterbox(size[axis], inner[axis], rig.view_hw[axis])
                    )
                    for axis in (0, 1)
                ]
            )

    def __call__(self, views: list[Image]) -> Image:
        """Return the content of the canvas [h, w, 3]."""
        content = np.zeros((*self.content_hw, 3), np.float32)
        for view, (tall, wide) in zip(views, self._maps, strict=True):
            low = tall(view.reshape(len(view), -1)).reshape(-1, *view.shape[1:])  # [h, W, 3]
            # [w, 3 h]
            narrow = wide(np.ascontiguousarray(low.swapaxes(0, 1)).reshape(view.shape[1], -1))
            content[tall.span, wide.span] += narrow.reshape(-1, len(low), 3).swapaxes(0, 1)
        return np.clip(content + 0.5, 0, 255).astype(np.uint8)

    def padded(self, views: list[Image]) -> Image:
        """Return the whole canvas [H, W, 3]."""
        bottom = self.canvas_hw[0] - self.content_hw[0]
        right = self.canvas_hw[1] - self.content_hw[1]
        return np.pad(self(views), ((0, bottom), (0, right), (0, 0)), mode="reflect")


canvas_composite = lru_cache(maxsize=16)(CanvasComposite)
"""The maps of a rig's views of some sizes onto a tier's canvas, kept for the next call."""


@dataclass(frozen=True, eq=False)
class _Resampling:
    """The rows of a resampling matrix that are not zero, and where they are on the canvas.

    ``bands`` are these rows in groups: the pixels that a group reads, and its weights of these.
    """

    span: slice
    bands: tuple[tuple[slice, F32], ...]

    @classmethod
    def of(cls, matrix: F32) -> _Resampling:
        span = _nonzero_columns(matrix.T)
        rows = matrix[span]
        bands = np.array_split(rows, min(_BANDS, len(rows)))
        pixels = [_nonzero_columns(band) for band in bands]
        return cls(
            span,
            tuple(
                (columns, np.ascontiguousarray(band[:, columns]))
                for columns, band in zip(pixels, bands, strict=True)
            ),
        )

    def __call__(self, lines: NDArray[np.generic]) -> F32:
        """Resample the first axis of [pixels, n]."""
        return np.concatenate(
            [
                weights @ lines[pixels].astype(np.float32, copy=False)
                for pixels, weights in self.bands
            ]
        )


def _nonzero_columns(matrix: F32) -> slice:
    """The columns from the first to the last that is not zero."""
    columns = np.flatnonzero(np.abs(matrix).max(0))
    return slice(int(columns[0]), int(columns[-1]) + 1)


def _from_box(shrink: F32, start: int, length: int, full: int) -> F32:
    """[content, full]: maps one axis of a letterboxed view through its box of the composite."""
    of_box = shrink[:, start : start + length]
    return of_box if length == full else of_box @ _matrix(full, length, "bilinear", False)


def _letterbox(size: int, inner: int, full: int) -> F32:
    """[full, size]: resampled to ``inner`` pixels, centred among ``full``, black around them."""
    first = (full - inner) // 2
    placed = np.zeros((full, size), np.float32)
    placed[first : first + inner] = _matrix(size, inner, "bilinear")
    return placed


def _matrix(size: int, target: int, kernel: Kernel, antialias: bool = True) -> F32:
    """[target, size]: resamples one axis as :func:`resize` does."""
    return _weights(size, target, kernel, antialias).toarray()
