"""Read pictures and clips into one array. Ambiguous input raises an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.errors import InputError, NonFiniteError, ObservationError, ResourceNotFoundError, ShapeError
from strands_cosmos3.observe.views import compose

Frames = NDArray[np.uint8] | NDArray[np.float32]


def read_frames(images: Any, rig: CameraRig | None = None) -> Frames:
    """Frames [F, H, W, 3], uint8 or float32 in [0, 1].

    Args:
        images: A path, a PIL image, an array or tensor ([H, W, 3], [3, H, W], or either with a leading frame axis; uint8,
            or floating in [0, 1]), a list of those with equal sizes, or a mapping from view names to uint8 pictures.
        rig: Composition of views.

    Raises:
        ShapeError, InputError, NonFiniteError, ResourceNotFoundError: A picture cannot be used, or frames differ in size.
        ObservationError: Views are given without a rig, or a view is missing.
    """
    if isinstance(images, Mapping):
        if rig is None:
            raise ObservationError("several views were given, but this embodiment composes none; pass one picture.")
        return compose(images, rig)[None]
    if isinstance(images, Sequence) and not isinstance(images, str | bytes):
        if not images:
            raise InputError("images is an empty list; at least one frame is needed.")
        parts = [_one(image) for image in images]
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            kinds = ", ".join(sorted({f"{part.dtype} {list(part.shape[1:])}" for part in parts}))
            raise ShapeError(f"frames must share size and type, got {kinds}.")
        joined: Any = np.concatenate(parts)
        return joined
    return _one(images)


def _one(image: Any) -> Frames:
    if isinstance(image, str | Path):
        image = _opened(Path(image))
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))[None]
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    if not isinstance(image, np.ndarray):
        raise InputError(
            f"an image is a path, a PIL image, a numpy array or a torch tensor, or a list of those; got {type(image).__name__}."
        )
    return _in_range(_channels_last(image))


def _opened(path: Path) -> Image.Image:
    if not path.is_file():
        raise ResourceNotFoundError(f"image {str(path)!r} does not exist or is not a file.")
    try:
        return Image.open(path).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InputError(f"{str(path)!r} is not a readable image ({error}); for a clip use read_clip or --video.") from None


def _channels_last(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim not in (3, 4) or 0 in array.shape:
        raise ShapeError(f"an image is [H, W, 3] or [3, H, W], with or without a frame axis; got {list(array.shape)}.")
    array = array if array.ndim == 4 else array[None]
    last, first = array.shape[-1] == 3, array.shape[1] == 3
    if last and first:
        raise ShapeError(f"{list(array.shape)} could be channels first or last; give a picture wider than 3 pixels.")
    if not last and not first:
        raise ShapeError(f"{list(array.shape)} has no axis of three colours; convert grey or transparent pictures to RGB.")
    return array if last else np.ascontiguousarray(np.moveaxis(array, 1, -1))


def _in_range(array: NDArray[Any]) -> Frames:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise InputError(f"an image has dtype {array.dtype}; use uint8, or floating values in [0, 1].")
    if not np.isfinite(array).all():
        raise NonFiniteError("an image holds NaN or infinity.")
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 1:
        raise InputError(
            f"a floating image has values {low:g}..{high:g}; they must lie in [0, 1]. For 0..255 use uint8; for -1..1 "
            "pass (x + 1) / 2."
        )
    return array.astype(np.float32)


def read_clip(path: str | Path, max_frames: int) -> NDArray[np.uint8]:
    """The first frames of a video, [F, H, W, 3] uint8; raises ResourceNotFoundError, or InputError if it is not readable."""
    import av

    path = Path(path)
    if not path.is_file():
        raise ResourceNotFoundError(f"video {str(path)!r} does not exist or is not a file.")
    try:
        with av.open(str(path)) as container:
            decoded = islice(container.decode(video=0), max_frames)
            frames = [frame.to_ndarray(format="rgb24").astype(np.uint8) for frame in decoded]
    except (av.FFmpegError, IndexError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise InputError(f"{str(path)!r} is not a readable video ({error}).") from None
    if not frames:
        raise InputError(f"{str(path)!r} holds no frames.")
    return np.stack(frames)
