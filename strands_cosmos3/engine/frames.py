"""Read pictures and clips into one array. Ambiguous input raises an error.

``framework`` composition is that of cosmos-framework's policy server
(``action_policy_server_robolab``): the first view as it is, the others stretched to their boxes
beside it, the result stretched to the rig's composite, both bilinear, without antialiasing and with
fractions of grey levels cut off. It uses torch's own kernel, whose rounding decides which level is
cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray
from PIL import Image, ImageOps

from strands_cosmos3.checks import image_array, known_name
from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.errors import (
    InputError,
    NonFiniteError,
    ObservationError,
    ResourceNotFoundError,
    ShapeError,
)
from strands_cosmos3.observe.views import (
    Composition,
    as_uint8,
    compose,
    compose_for_tier,
    rig_views,
)
from strands_cosmos3.resources import require_file

Frames = NDArray[np.uint8] | NDArray[np.float32]
_NO_TIMESTAMPS = 0x80  # FFmpeg's AVFMT_NOTIMESTAMPS: it would count frames at 25 a second
# of a period, how far a frame may be from its time: 29.97 a second are 30 for 80 rows
_OFF_TIME = 0.08


def read_frames(
    images: Any,
    rig: CameraRig | None = None,
    composition: Composition = "letterbox",
    tier: int | None = None,
) -> Frames:
    """Frames [F, H, W, 3], uint8 or float32 in [0, 1].

    Args:
        images: A path, a PIL image, an array or tensor ([H, W, 3], [3, H, W], or either with a
            leading frame axis, or [1, 3, F, H, W]; uint8, or floating in [0, 1]), a list of those
            with equal sizes, or a mapping from view names to uint8 pictures.
        rig: Composition of views.
        composition: ``framework`` also stretches pictures to a rig's composite, and takes numbers
            in 0..255 of any type.
        tier: See :func:`compose_views`.

    Raises:
        ShapeError, InputError, NonFiniteError, ResourceNotFoundError: A picture cannot be used, or
            frames differ in size.
        ObservationError: Views are given without a rig, or a view is missing.
    """
    if isinstance(images, Mapping):
        if rig is None:
            raise ObservationError(
                "several views were given, but this embodiment composes none; pass one picture."
            )
        frames: Frames = compose_views(images, rig, composition, tier)[None]
    else:
        frames = _sequence(images, composition)
    return (
        _stretched(frames, rig.composite_hw)
        if composition == "framework" and rig is not None
        else frames
    )


def compose_views(
    views: Mapping[str, Any], rig: CameraRig, composition: Composition, tier: int | None = None
) -> NDArray[np.uint8]:
    """One picture of a rig's views, uint8 [H, W, 3], which ``letterbox`` makes at the size of a
    tier's canvas, if one is given; errors as :func:`~strands_cosmos3.observe.views.compose`, and

    Raises:
        UnknownNameError: No such composition.
        ShapeError: ``framework`` with a first view beside which the others' boxes do not fit.
    """
    known_name(composition, "composition", get_args(Composition))
    if composition == "letterbox":
        return compose(views, rig) if tier is None else compose_for_tier(views, rig, tier)
    pictures = [
        image_array(as_uint8(view), f"view {name!r}")
        for name, view in rig_views(views, rig).items()
    ]
    boxes = _boxes_beside(pictures[0], rig)
    composite = np.zeros((*(boxes[:, :2] + boxes[:, 2:]).max(axis=0), 3), np.uint8)
    for picture, (top, left, height, width) in zip(pictures, boxes.tolist(), strict=True):
        place = slice(top, top + height), slice(left, left + width)
        composite[place] = _stretched(picture[None], (height, width))[0]
    return composite


def _boxes_beside(first: NDArray[np.uint8], rig: CameraRig) -> NDArray[np.int64]:
    """The rig's boxes [views, 4], scaled so that the first view keeps its size."""
    _, _, box_height, box_width = rig.boxes[0]
    numerators = np.array(rig.boxes) * (first.shape[:2] * 2)
    denominators = np.array([box_height, box_width] * 2)
    if (numerators % denominators)[:, 1::2].any():
        raise ShapeError(
            f"view {rig.views[0]!r} is {first.shape[1]} pixels wide, of which the boxes beside it "
            f"are no whole numbers of pixels; resize it to {box_width}, or to another even width."
        )
    return numerators // denominators


def _stretched(frames: Frames, hw: tuple[int, int]) -> Frames:
    """Frames at another size, of the same type; torch's bilinear kernel on [1, 3, H, W] in the
    memory format of a picture.
    """
    if frames.shape[1:3] == hw:
        return frames
    import torch
    import torch.nn.functional as F

    resized: list[Any] = []
    for frame in np.array(frames, np.float32):
        small = F.interpolate(torch.from_numpy(frame).permute(2, 0, 1)[None], hw, mode="bilinear")
        resized.append(small[0].permute(1, 2, 0).numpy().astype(frames.dtype))
    return np.stack(resized)


def _sequence(images: Any, composition: Composition) -> Frames:
    if isinstance(images, Sequence) and not isinstance(images, str | bytes):
        if not images:
            raise InputError("images is an empty list; at least one frame is needed.")
        parts = [_one(image, composition) for image in images]
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            kinds = ", ".join(sorted({f"{part.dtype} {list(part.shape[1:])}" for part in parts}))
            raise ShapeError(f"frames must share size and type, got {kinds}.")
        joined: Any = np.concatenate(parts)
        return joined
    return _one(images, composition)


def _one(image: Any, composition: Composition) -> Frames:
    if isinstance(image, str | Path):
        image = _opened(Path(image))
    if isinstance(image, Image.Image):
        if image.mode[0] in "IF":  # Pillow would cut such values off at 255
            raise InputError(
                f"an image of mode {image.mode!r} has more than 8 bits a pixel; scale it to 8 bits."
            )
        return np.asarray(image.convert("RGB"))[None]
    if is_torch_array(image):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    if not isinstance(image, np.ndarray):
        raise InputError(
            "an image is a path, a PIL image, a numpy array or a torch tensor, or a list of "
            f"those; got {type(image).__name__}."
        )
    array = _channels_last(image)
    return _in_range(as_uint8(array) if composition == "framework" else array)


def _opened(path: Path) -> Image.Image:
    require_file(path, ResourceNotFoundError, hint="Name the file of an image.")
    try:
        return ImageOps.exif_transpose(Image.open(path))  # upright, as viewers show it
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{str(path)!r} is not a readable image ({error}); for a clip use read_clip or --video."
        ) from None


def _channels_last(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim == 5 and array.shape[:2] == (1, 3):
        array = np.moveaxis(array[0], 0, 1)
    if array.ndim not in (3, 4) or 0 in array.shape:
        raise ShapeError(
            "an image is [H, W, 3] or [3, H, W], with or without a frame axis, or a clip [1, 3, F, "
            f"H, W]; got {list(array.shape)}."
        )
    array = array if array.ndim == 4 else array[None]
    last = array.shape[-1] == 3
    if last == (array.shape[1] == 3):
        problem = (
            "could be channels first or last; give a picture wider than 3 pixels"
            if last
            else "has no axis of three colours; convert grey or transparent pictures to RGB"
        )
        raise ShapeError(f"{list(array.shape)} {problem}.")
    return array if last else np.ascontiguousarray(np.moveaxis(array, 1, -1))


def _in_range(array: NDArray[Any]) -> Frames:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise InputError(
            f"an image has dtype {array.dtype}; use uint8, or floating values in [0, 1]."
        )
    if not np.isfinite(array).all():
        raise NonFiniteError("an image holds NaN or infinity.")
    low = float(array.min())
    high = float(array.max())
    if low < 0 or high > 1:
        raise InputError(
            f"a floating image has values {low:g}..{high:g}; they must lie in [0, 1]. For 0..255 "
            "use uint8; for -1..1 "
            "pass (x + 1) / 2."
        )
    return array.astype(np.float32)


def read_clip(path: str | Path, max_frames: int, fps: float) -> NDArray[np.uint8]:
    """The first frames of a video at a rate, [F, H, W, 3] uint8: those that were taken ``k / fps``
    seconds after its first one, whatever rate it has itself.

    Raises:
        ResourceNotFoundError: There is no such file.
        InputError: It is not readable, does not say when its frames were taken, or has none of one
            of these times.
    """
    film = str(path)
    with _opened_film(Path(path), timed=max_frames > 1) as container:
        kept = _at_rate(container.decode(video=0), max_frames, fps, film)
        frames = [_upright(frame, film) for frame in kept]
    if not frames:
        raise InputError(f"{film!r} holds no frames.")
    return np.stack(frames)


def read_chosen(
    path: str | Path, choose: Callable[[int, float], Sequence[int]]
) -> tuple[NDArray[np.uint8], float, list[int]]:
    """Frames [F, H, W, 3] uint8 of a video, its frames a second, and their indices in it.

    ``choose`` returns the indices, ascending, from the number of all frames and their rate. Only
    the chosen ones are kept in memory; the film is decoded twice.

    Raises:
        ResourceNotFoundError: There is no such file.
        InputError: It is not readable, or does not say when its frames were taken.
    """
    path = Path(path)
    with _opened_film(path, timed=True) as container:
        fps = float(container.streams.video[0].average_rate or 0)
        count = sum(1 for _ in container.decode(video=0))
    if not count * fps:
        raise InputError(f"{str(path)!r} holds no frames, or does not say how many a second.")
    indices = list(choose(count, fps))
    with _opened_film(path, timed=True) as container:
        decoded = enumerate(container.decode(video=0))
        frames = [_upright(frame, str(path)) for index, frame in decoded if index in indices]
    return np.stack(frames), fps, indices


@contextmanager
def _opened_film(path: Path, timed: bool) -> Iterator[Any]:
    """A film that has pictures, and times of its frames where ``timed`` asks for them."""
    import av

    require_file(path, ResourceNotFoundError, hint="Name the file of a video.")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise InputError(f"{str(path)!r} holds no pictures, only sound or text.")
            if container.format.flags & _NO_TIMESTAMPS and timed:
                raise InputError(
                    f"{str(path)!r} does not say when its frames were taken. Put it into a "
                    "container that does, with the rate at which it was filmed: ffmpeg -r RATE -i "
                    "FILM OUT.mp4."
                )
            yield container
    except (av.FFmpegError, OSError) as error:  # pyright: ignore
        raise InputError(f"{str(path)!r} is not a readable video ({error}).") from None


def _upright(frame: Any, film: str) -> NDArray[np.uint8]:
    """A frame [H, W, 3] uint8, turned as the film says that it is to be shown."""
    quarters, rest = divmod(frame.rotation, 90)  # counterclockwise, as rot90
    if rest:
        raise InputError(
            f"{film!r} is to be shown turned by {frame.rotation} degrees; only whole quarters are "
            "read. ffmpeg -i FILM OUT.mp4 makes an upright one."
        )
    return np.rot90(frame.to_ndarray(format="rgb24"), quarters).astype(np.uint8)


def _at_rate(decoded: Iterable[Any], max_frames: int, fps: float, film: str) -> Iterator[Any]:
    """Of a film's frames, those nearest to ``k / fps`` seconds after the first, as far as it
    goes.
    """
    first_s = before_s = due_s = 0.0
    kept = 0
    for frame in decoded:
        at_s = (frame.time or 0.0) - first_s
        if not kept:
            first_s, at_s = at_s, 0.0
        off_s = _OFF_TIME / fps
        if at_s > due_s + off_s:
            raise InputError(
                f"{film!r} has frames {before_s:.3f} s and {at_s:.3f} s after its first, and "
                f"{fps:g} a second are needed: none is at {due_s:.3f} s. Give a film of {fps:g} "
                "frames a second, or of a whole multiple; ffmpeg -i FILM -vf "
                f"minterpolate=fps={fps:g} OUT.mp4 makes one."
            )
        # a frame is the nearest if the next one, as far ahead as the last one lies behind, is not
        if at_s >= due_s - min(off_s, (at_s - before_s) / 2):
            yield frame
            kept += 1
            due_s = kept / fps
        if kept == max_frames:
            return
        before_s = at_s
