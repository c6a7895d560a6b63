"""The scripted experts of the tasks with a bar, and the simplified two-hand dynamics that they plan
their rows in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import radians

import numpy as np

from strands_cosmos3.actions.decode import encode_limbs
from strands_cosmos3.actions.rotations import se3_inverse
from strands_cosmos3.checks import F64
from strands_cosmos3.errors import BackendError
from strands_cosmos3.types import ActionChunk, Request
from strands_cosmos3.worlds.table.hands import (
    Hand,
    HandLimits,
    approach,
    down_along,
    length,
    rotation_vector,
)

# Motion limits per row at 10 Hz.
_LIFT_M = 0.012  # with the bar: at most 0.12 m/s
_LIFT_CHANGE_M = 0.002  # and 0.2 m/s^2
_LIMITS = HandLimits(0.020, 0.005, radians(4.5), radians(1.2), 0.45)

_HOVER_M = 0.10  # over the bar
_DESCEND_WITHIN_M = 0.012
_GRASP_WITHIN_M = 0.004
_GRASP_WITHIN_RAD = radians(2.0)
_SQUEEZE_ROWS = 4
_CLOSING = 0.95  # hands whose fingers are further closed than that are about to grasp
_HOLDS = 0.85, 1.12  # gap between the fingers that hold the bar, in its widths
_NOTHING_BETWEEN = 0.3
_LIFT_HEIGHT_M = 0.20  # of the bar's centre above where it lies
_MEETING_M = np.array([0.48, 0.0, 0.30])  # of the bar's centre, where it is handed over
_MET_WITHIN_M = 0.006
_FREE = 1.5  # gap between fingers that may leave the bar, in its widths
# the giver's way out: up so far before it goes aside; and where to
_GIVER_CLEAR_M = 0.10
_GIVER_UP_M = 0.18
_GIVER_ASIDE_M = 0.12


@dataclass(kw_only=True)
class BarHand(Hand):
    """One of the hands. The bar stops its fingers."""

    gap_m: float
    T_world_base: F64
    T_tcp_cosmos: F64
    side: float  # of the bar that it grasps: +1 is the far end of the bar's y axis

    @property
    def T_base_cosmos(self) -> F64:
        return se3_inverse(self.T_world_base) @ self.T_world_tcp @ self.T_tcp_cosmos

    def move_by(self, step_m: F64) -> None:
        """Move by [3] in one row, without turning."""
        self.v = step_m
        self.w = np.zeros(3)
        self.p = self.p + step_m

    def stay(self, opening: float, width_m: float) -> None:
        """Stand still and move the fingers, with something of that width between them."""
        self.move_by(np.zeros(3))
        self.move_fingers(opening, width_m / self.gap_m)


@dataclass
class BarHands(ABC):
    """Both hands and the bar, row by row."""

    hands: dict[str, BarHand]
    bar: F64  # [4, 4]
    width_m: float
    grasp_m: float
    rest_m: float  # height of its centre on the table
    held_rows: int = 0

    def target(self, hand: BarHand) -> tuple[F64, F64]:
        """Where a hand is to grasp the bar: position [3] and orientation [3, 3]."""
        axis = self.bar[:3, 1]
        R = down_along(*axis[:2] / max(length(axis[:2]), 1e-9))
        return self.bar[:3, 3] + hand.side * self.grasp_m * axis, R

    def error(self, hand: BarHand) -> tuple[F64, float]:
        """Offset [3] from where a hand is to grasp the bar, and the angle that it has to turn."""
        at, R = self.target(hand)
        return hand.p - at, length(rotation_vector(hand.R, R))

    def near(self, hand: BarHand, within: float = 1.0) -> bool:
        off_m, turned_rad = self.error(hand)
        near_m = within * _GRASP_WITHIN_M
        near_rad = within * _GRASP_WITHIN_RAD
        return length(off_m) < near_m and turned_rad < near_rad

    def over(self, hand: BarHand) -> bool:
        """Whether a hand is where it may descend onto the bar, or below."""
        off_m, turned_rad = self.error(hand)
        aligned = turned_rad < 2 * _GRASP_WITHIN_RAD
        return length(off_m[:2]) < _DESCEND_WITHIN_M and aligned

    def holds(self, hand: BarHand) -> bool:
        """Whether the bar is between a hand's fingers."""
        low, high = _HOLDS
        return (
            self.near(hand, 4.0)
            and low * self.width_m < hand.opening * hand.gap_m < high * self.width_m
        )

    def squeezes(self) -> bool:
        """Count a row in which the bar is held; return whether the fingers only press in it."""
        self.held_rows += 1
        rests = self.bar[2, 3] < self.rest_m + 0.5 * _GRASP_WITHIN_M
        return bool(self.held_rows <= _SQUEEZE_ROWS and rests)

    def grasp(self, *hands: BarHand) -> float:
        """Close hands on their ends of the bar together, or approach it from above; return the open
        fraction that they are commanded.
        """
        at = all(self.near(hand, 4.0) for hand in hands)
        closing = at and any(hand.opening < _CLOSING for hand in hands)
        if closing or all(self.near(hand) for hand in hands):
            empty = any(hand.opening < _NOTHING_BETWEEN for hand in hands)
            for hand in hands:
                hand.stay(float(empty), self.width_m)
            return float(empty)
        descend = all(self.over(hand) for hand in hands)
        for hand in hands:
            end, R = self.target(hand)
            hand.move(end if descend else end + [0.0, 0.0, _HOVER_M], R)
            hand.move_fingers(1.0)
        return 1.0

    @abstractmethod
    def advance(self) -> Mapping[str, float]:
        """Advance by one row; return the open fraction that each hand is commanded."""


MakeHands = Callable[[dict[str, BarHand], F64, float, float, float], BarHands]


@dataclass
class Lift(BarHands):
    """Both hands lift the bar.

    They hover over their ends of the bar, descend, close together and rise together: while they
    hold it, they share one translation, so that their relative pose stays what it is.
    """

    def advance(self) -> Mapping[str, float]:
        """Advance by one row; both hands are commanded the same open fraction."""
        hands = self.hands.values()
        if not all(self.holds(hand) for hand in hands):
            return dict.fromkeys(self.hands, self.grasp(*hands))
        self._carry()
        return dict.fromkeys(self.hands, 0.0)

    def _carry(self) -> None:
        hands = list(self.hands.values())
        height_m = self.rest_m + _LIFT_HEIGHT_M - self.bar[2, 3]
        left = np.array([0.0, 0.0, 0.0 if self.squeezes() else height_m])
        v = np.array([0.0, 0.0, float(np.mean([hand.v[2] for hand in hands]))])
        v = approach(v, left, _LIFT_M, _LIFT_CHANGE_M)
        for hand in hands:
            hand.move_by(v)
        self.bar[:3, 3] += v


@dataclass
class HandOver(BarHands):
    """One hand gives the bar to the other, ``taker``.

    The giver takes the bar at its end and brings it to the middle. There the other hand comes down
    onto the free end and closes; only when both hold it does the giver open, and go up and aside.
    """

    taker: str = "right"
    both_rows: int = 0

    def advance(self) -> Mapping[str, float]:
        """Advance by one row; return the open fraction that each hand is commanded."""
        taker = self.hands[self.taker]
        ((name, giver),) = (item for item in self.hands.items() if item[0] != self.taker)
        gives = self.holds(giver)
        if self.holds(taker):
            taker.stay(0.0, self.width_m)
            return {self.taker: 0.0, name: self._let_go(giver, gives)}
        opening = self._bring(giver) if gives else self.grasp(giver)
        met = gives and length(_MEETING_M - self.bar[:3, 3]) < _MET_WITHIN_M
        return {name: opening, self.taker: self.grasp(taker) if met else self._wait(taker)}

    def _bring(self, hand: BarHand) -> float:
        """Bring the bar to where the hands meet."""
        left = np.zeros(3) if self.squeezes() else _MEETING_M - self.bar[:3, 3]
        hand.move_by(approach(hand.v, left, _LIFT_M, _LIFT_CHANGE_M))
        self.bar[:3, 3] += hand.v
        return 0.0

    def _wait(self, hand: BarHand) -> float:
        """Wait over the place where the bar's free end will be."""
        at, R = self.target(hand)
        hand.move(at + _MEETING_M - self.bar[:3, 3] + [0.0, 0.0, _HOVER_M], R)
        hand.move_fingers(1.0)
        return 1.0

    def _let_go(self, hand: BarHand, holds: bool) -> float:
        """Open once the other hand holds the bar too, and go up, then aside."""
        self.both_rows += holds
        if holds and self.both_rows <= _SQUEEZE_ROWS:
            hand.stay(0.0, self.width_m)
            return 0.0
        if hand.opening * hand.gap_m < _FREE * self.width_m and self.near(hand, 4.0):
            hand.stay(1.0, 0.0)
            return 1.0
        hand.move_fingers(1.0)
        hand.move(self._way_out(hand), hand.R)
        return 1.0

    def _way_out(self, hand: BarHand) -> F64:
        at, _ = self.target(hand)
        aside = hand.side * self.bar[:3, 1] * [1.0, 1.0, 0.0]
        way = at + [0.0, 0.0, _GIVER_UP_M]
        return way + _GIVER_ASIDE_M * aside if hand.p[2] - at[2] > _GIVER_CLEAR_M else way


def bar_chunk(request: Request, kind: MakeHands) -> ActionChunk:
    """Return the rows that an expert of this kind makes from the measured state.

    Raises:
        BackendError: The request lacks simulator state or the limbs' poses, or is for another
            action space.
    """
    world = _world_of(request, kind)
    poses = {name: [hand.T_base_cosmos] for name, hand in world.hands.items()}
    openings: dict[str, list[float]] = {name: [] for name in world.hands}
    for _ in range(request.n_rows):
        commanded = world.advance()
        for name, hand in world.hands.items():
            openings[name].append(commanded[name])
            poses[name].append(hand.T_base_cosmos)
    rows = encode_limbs(
        {name: np.stack(path) for name, path in poses.items()},
        {name: np.array(opening) for name, opening in openings.items()},
        request.embodiment,
    )
    return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)


def _world_of(request: Request, kind: MakeHands) -> BarHands:
    """The hands where the rows depart, and the bar where it is."""
    state: Mapping[str, F64] = request.privileged or {}
    names = list(request.limb_poses)
    of_limb = ("tcp", "tcp_twist", "base", "gap_m")
    keys = ("bar", "bar_m", *(f"{name}_{key}" for name in names for key in of_limb))
    missing = [key for key in keys if key not in state]
    if missing or len(names) != 2 or request.action_space.name != "midtrain":
        raise BackendError(
            "a bar needs two arms and the simulator's state; missing: "
            f"{', '.join(missing) or 'two arms'}. Use it with Robot('dual_panda')."
        )
    fps = request.embodiment.fps or 10.0
    bar = state["bar"].copy()
    width_m, _, height_m, grasp_m = state["bar_m"].tolist()
    order = [limb.name for limb in request.embodiment.limbs if limb.name in names]
    opening = dict(zip(order, request.grippers.tolist(), strict=True))
    hands: dict[str, BarHand] = {}
    for name in names:
        twist = state[f"{name}_tcp_twist"] / fps
        base = state[f"{name}_base"]
        T_tcp_cosmos = se3_inverse(state[f"{name}_tcp"]) @ base @ request.limb_poses[name]
        tcp = base @ request.departures[name] @ se3_inverse(T_tcp_cosmos)
        side = float(np.sign((base[:3, 3] - bar[:3, 3]) @ bar[:3, 1]) or 1.0)
        hands[name] = BarHand(
            limits=_LIMITS,
            p=tcp[:3, 3],
            R=tcp[:3, :3],
            v=twist[:3],
            w=twist[3:],
            opening=opening[name],
            gap_m=float(state[f"{name}_gap_m"]),
            T_world_base=base,
            T_tcp_cosmos=T_tcp_cosmos,
            side=side,
        )
    return kind(hands, bar, width_m, grasp_m, height_m / 2)
