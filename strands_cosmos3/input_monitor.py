"""What is wrong with the inputs of a policy: its camera views and the measured state, followed from
one inference of an episode to the next, in the policy and on a server alike.

Pictures are compared as the means of 18 x 32 blocks, of which JPEG changes most by less than a grey
level. Shape suffixes: V views, R and C rows and columns of blocks, L limbs, n joints or
coordinates, T rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import Request

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Event = tuple[str, str]
"""The name of what is noticed, and a sentence about it."""

_BLOCKS = 18, 32
_MOST_VIEWS = 4  # whose exchanges are tried
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # Rec. 601, JPEG's
# grey levels, of blocks
_CONSTANT = 3.0  # standard deviation of a picture of one colour, with a sensor's noise
_COPY = 3.0  # mean difference of two pictures of the same view
_STILL = 9.0  # largest difference of a block that compression makes
_ROUNDING = 0.5  # mean difference that means nothing
# from which a picture is rather another one: logarithms of how many times nearer that is
_SWAPPED, _TURNED, _EXCHANGED = 0.2, 0.15, 0.1
_LIKE = 0.1  # correlation of two pictures of the same scene
_MOVED_M, _MOVED_RAD = 0.02, 0.04  # of the hand, or of all joints where no pose is known


@dataclass(frozen=True)
class _Tolerances:
    """Of a measured state: up to where it rests, what it must follow, and where it jumps."""

    rest: float
    commanded: float
    jump: float


_OF_JOINTS = _Tolerances(rest=0.002, commanded=0.1, jump=0.35)  # rad
_OF_POSITION = _Tolerances(rest=0.001, commanded=0.04, jump=0.15)  # m


@dataclass(frozen=True, eq=False)
class _Shown:
    """What a view showed: blocks [R, C, 3] of the last inference, and their luma's mean [R, C] over
    ``looks`` inferences; luma [R, C] of when it last changed, where the arm was then, and whether
    that has moved since.
    """

    blocks: F32
    usual: F32
    looks: int
    luma: F32
    place: F64 | None
    frozen: bool = False


@dataclass(frozen=True, eq=False)
class _Motion:
    """A measured state [n], its time on the motion's clock, and the rows [T, n] that were answered,
    with their times [T] after it.
    """

    state: F64
    t_s: float
    rows: F64 | None = None
    row_times_s: F64 | None = None


class InputMonitor(Restorable):
    """Follows the inputs of one episode.

    Args:
        warned: Names that nobody is to be warned of any more; names are added to it.
    """

    counters: ClassVar[tuple[str, ...]] = (
        "camera_constant",
        "camera_copied",
        "camera_frozen",
        "camera_swapped",
        "camera_upside_down",
        "camera_channels",
        "state_stuck",
        "state_jumped",
    )
    STATE: ClassVar[tuple[str, ...]] = ("warned", "_shown", "_motion", "_unfollowed")

    def __init__(self, warned: set[str] | None = None):
        self.warned: set[str] = set() if warned is None else warned
        self._shown: dict[str, _Shown] = {}
        self._motion: _Motion | None = None
        self._unfollowed = 0.0  # commanded since the state last moved

    def look(
        self, request: Request, views: Mapping[str, NDArray[np.uint8]] | None = None
    ) -> list[Event]:
        """Return what is wrong with the inputs of an inference.

        Args:
            request: The inference.
            views: Its views by name, [H, W, 3] each; by default those of the request, else the
                parts of its composite.
        """
        events = list(self._look_at_state(request))
        views = _views_of(request) if views is None else views
        if views:
            events += self._look_at_views(views, _place(request))
        return events

    def follow(self, rows: NDArray[Any], row_times_s: F64) -> None:
        """Take notice of the rows [T, >= n], joint angles or positions as the state is, that answer
        the last inference, due at times [T] after its observation.
        """
        motion = self._motion
        if motion is not None and rows.shape[1] >= len(motion.state):
            rows = np.asarray(rows[:, : len(motion.state)], np.float64)
            self._motion = _Motion(motion.state, motion.t_s, rows, row_times_s)

    def _look_at_views(
        self, views: Mapping[str, NDArray[np.uint8]], place: F64 | None
    ) -> Iterator[Event]:
        names = tuple(views)
        now = np.stack([block_means(view) for view in views.values()])  # [V, R, C, 3]
        luma = now @ _LUMA
        plain = luma.reshape(len(now), -1).std(axis=1) < _CONSTANT
        if plain.any():  # colours of equal brightness are a picture
            plain &= now.std(axis=(1, 2)).max(axis=-1) < _CONSTANT
        for i in np.flatnonzero(plain):
            yield "camera_constant", f"view {names[i]!r} is of one colour: is its camera dead?"
        yield from _copies(names, luma, plain)
        known = tuple(self._shown) == names
        before = [self._shown[name] for name in names] if known else []
        turned = np.zeros(len(names), np.bool_)
        if known:
            was, usual = (
                np.stack(of)
                for of in zip(*((one.blocks, one.usual) for one in before), strict=True)
            )
            for name, text, which in _turned(names, now, was, usual):
                turned |= which
                yield name, text
        shown: dict[str, _Shown] = {}
        for i, name in enumerate(names):
            last = before[i] if known else _Shown(now[i], luma[i], 0, luma[i], place)
            if not turned[i]:  # else it is compared with what it was until it is right again
                usual = last.usual + (luma[i] - last.usual) / (last.looks + 1)
                last = replace(last, blocks=now[i], usual=usual, looks=last.looks + 1)
            shown[name] = _compared(last, luma[i], place)
            if shown[name].frozen and not plain[i]:
                text = f"view {name!r} does not change while the hand moves: is its camera frozen?"
                yield "camera_frozen", text
        self._shown = shown

    def _look_at_state(self, request: Request) -> Iterator[Event]:
        last, self._motion = self._motion, None
        state = _state(request)
        if state is None:
            return
        self._motion = _Motion(state, request.t_motion_s)
        if last is None or last.rows is None or last.row_times_s is None:
            return
        tolerances = _OF_POSITION if request.q_rad is None else _OF_JOINTS
        elapsed_s = request.t_motion_s - last.t_s
        due = int(np.searchsorted(last.row_times_s, elapsed_s + 1e-9, "right"))
        moved = float(np.abs(state - last.state).max())
        commanded = float(np.abs(last.rows[due - 1] - last.state).max()) if due else 0.0
        if moved > tolerances.rest:
            self._unfollowed = 0.0
        elif commanded > 10 * tolerances.rest:
            self._unfollowed += commanded
        if self._unfollowed > tolerances.commanded:
            yield (
                "state_stuck",
                "the measured state has not moved although it was told to: does the arm "
                "follow, and is the state measured anew?",
            )
        off = float(np.abs(np.vstack((last.state, last.rows)) - state).max(axis=1).min())
        if off > tolerances.jump and elapsed_s < last.row_times_s[-1] + 1:
            unit = "m" if request.q_rad is None else "rad"
            yield (
                "state_jumped",
                f"the measured state is {off:.2f} {unit} from the path that it was told to follow.",
            )


def block_means(picture: NDArray[np.uint8]) -> F32:
    """Return the means [R, C, 3] of the blocks of a picture [H, W, 3], from at least 60 of its rows
    if it has as many.
    """
    sample = picture[:: max(1, picture.shape[0] // 60)]
    height, width = sample.shape[:2]
    tall: F32 = _averages(height, _BLOCKS[0]) @ sample.reshape(height, -1).astype(np.float32)
    means: F32 = _averages(width, _BLOCKS[1]) @ tall.reshape(-1, width, 3)
    return means


@lru_cache(maxsize=32)
def _averages(size: int, blocks: int) -> F32:
    """Return the matrix [blocks, size] of means over equal parts of an axis."""
    ends = np.linspace(0, size, blocks + 1)[:, None]
    pixel = np.arange(size)
    part = np.minimum(ends[1:], pixel + 1) - np.maximum(ends[:-1], pixel)
    return np.asarray(part.clip(0) * blocks / size, np.float32)


def _copies(names: tuple[str, ...], luma: F32, plain: NDArray[np.bool_]) -> Iterator[Event]:
    for i, name in enumerate(names):
        for j in range(i):
            if not (plain[i] or plain[j]) and np.abs(luma[i] - luma[j]).mean() < _COPY:
                yield "camera_copied", f"views {names[j]!r} and {name!r} show the same picture."


def _turned(
    names: tuple[str, ...], now: F32, was: F32, usual: F32
) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Yield how views differ from themselves before, the last time and the luma's mean: the event,
    a sentence, and which [V].
    """
    luma, luma_was = now @ _LUMA, was @ _LUMA
    swapped = _swapped(luma, luma_was)
    # a camera on the hand may see quite another scene
    flipped = _flipped(luma, luma_was)
    if flipped.any():
        flipped &= _flipped(luma, usual)
    exchanged = _exchanged(now, was)
    if exchanged.any():
        exchanged &= (_likeness(luma, np.stack((luma_was, usual))) > _LIKE).any(axis=0)
    for event, which, how in (
        ("camera_swapped", swapped, "have changed places"),
        ("camera_upside_down", ~swapped & flipped.any(axis=0), "are upside down by now"),
        ("camera_channels", ~swapped & exchanged, "have exchanged red and blue"),
    ):
        if which.any():
            views = ", ".join(repr(names[i]) for i in np.flatnonzero(which))
            yield event, f"views {views} {how}.", which


def _apart(a: F32, b: F32) -> F32:
    """Return the mean distance [...] of blocks [..., R, C]."""
    return np.abs(a - b).mean(axis=(-2, -1)) + _ROUNDING


def _likeness(a: F32, b: F32) -> F32:
    """Return the correlation [...] of blocks [..., R, C]; that of a picture without any contrast is
    0.
    """
    a, b = (x - x.mean(axis=(-2, -1), keepdims=True) for x in (a, b))
    power = (a**2).mean(axis=(-2, -1)) * (b**2).mean(axis=(-2, -1))
    return (a * b).mean(axis=(-2, -1)) / np.sqrt(power + 1)


def _swapped(luma: F32, was: F32) -> NDArray[np.bool_]:
    """Return which views [V] have changed places: the most likely exchange of some."""
    apart = _apart(luma[:, None], was)  # [V, V]
    views = np.arange(len(luma))
    nearest, moved = -_SWAPPED, views < 0
    if len(views) > _MOST_VIEWS or (apart.argmin(axis=1) == views).all():
        return moved
    for order in permutations(views):
        elsewhere = views != order
        if elsewhere.any():
            there = apart[views, order][elsewhere].sum()
            nearer = float(np.log(there / np.diagonal(apart)[elsewhere].sum()))
            nearest, moved = min((nearest, moved), (nearer, elsewhere), key=itemgetter(0))
    return moved


def _flipped(luma: F32, was: F32) -> NDArray[np.bool_]:
    """Return which views [V] are rather mirrored vertically, and which turned [2, V], by distance
    and correlation.
    """
    flips = np.stack((was, was[:, ::-1], was[:, ::-1, ::-1]))  # [3, V, R, C]
    like = _likeness(luma, flips)
    apart = np.log(_apart(luma, flips))
    score = apart[1:] - apart[0] + like[0] - like[1:]
    return (score < -_TURNED) & (like[1:] > _LIKE)


def _exchanged(now: F32, was: F32) -> NDArray[np.bool_]:
    """Return in which views [V] red minus blue has rather changed its sign."""
    tint, tint_was = now[..., 0] - now[..., 2], was[..., 0] - was[..., 2]
    ratio = (_apart(tint, -tint_was) + _ROUNDING) / (_apart(tint, tint_was) + _ROUNDING)
    return np.log(ratio) < -_EXCHANGED


def _compared(last: _Shown, luma: F32, place: F64 | None) -> _Shown:
    """Return what a view shows, compared with when it last changed."""
    if np.abs(luma - last.luma).max() > _STILL:
        return replace(last, luma=luma, place=place, frozen=False)
    return replace(last, frozen=last.frozen or _moved(last.place, place))


def _moved(place_was: F64 | None, place: F64 | None) -> bool:
    """Whether the arm, every limb of it, is elsewhere."""
    if place is None or place_was is None or place.shape != place_was.shape:
        return False
    moved = np.linalg.norm(place - place_was, axis=-1)
    return bool(np.min(moved) > (_MOVED_M if place.ndim == 2 else _MOVED_RAD))


def _place(request: Request) -> F64 | None:
    """Return where the hands are [L, 3], else the joint angles [n]; None if neither is known."""
    if request.limb_poses:
        return np.stack([T[:3, 3] for T in request.limb_poses.values()])
    return request.q_rad


def _state(request: Request) -> F64 | None:
    """Return the joint angles [n], else the position [3] of the only hand; None if unknown."""
    if request.q_rad is not None or request.T_base_cosmos is None:
        return request.q_rad
    return request.T_base_cosmos[:3, 3]


def _views_of(request: Request) -> Mapping[str, NDArray[np.uint8]]:
    """Return a request's views, else the parts of its composite, at whatever size that is."""
    rig, composite = request.embodiment.rig, request.composite
    if request.images or composite is None:
        return request.images
    if rig is None:
        return {"camera": composite}
    scale = np.divide(composite.shape[:2], rig.composite_hw)
    views: dict[str, NDArray[np.uint8]] = {}
    for name, box in zip(rig.views, rig.boxes, strict=True):
        top, left = (np.array(box[:2]) * scale).round().astype(int)
        bottom, right = ((np.array(box[:2]) + box[2:]) * scale).round().astype(int)
        views[name] = composite[top:bottom, left:right]
    return views
