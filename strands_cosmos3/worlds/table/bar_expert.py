"""The scripted experts of the tasks with a bar, and the simplified two-hand dynamics that they plan
their rows in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.actions.decode import encode_limbs
from strands_cosmos3.actions.rotations import se3_inverse
from strands_cosmos3.checks import F64
from strands_cosmos3.errors import BackendError
from strands_cosmos3.types import ActionChunk, Request
from strands_cosmos3.worlds.table.steps import approach, rotate, rotation_vector

# Motion limits per row at 10 Hz.
_STEP_M, _STEP_CHANGE_M = 0.020, 0.005
_LIFT_M, _LIFT_CHANGE_M = 0.012, 0.002  # with the bar: at most 0.12 m/s and 0.2 m/s^2
_TURN_RAD, _TURN_CHANGE_RAD = float(np.deg2rad(4.5)), float(np.deg2rad(1.2))
_OPENING_CHANGE = 0.45

_HOVER_M = 0.10  # over the bar
_DESCEND_WITHIN_M, _GRASP_WITHIN_M = 0.012, 0.004
_GRASP_WITHIN_RAD = float(np.deg2rad(2.0))
_SQUEEZE_ROWS = 4
_CLOSING = 0.95  # hands whose fingers are further closed than that are about to grasp
_HOLDS = 0.85, 1.12  # gap between the fingers that hold the bar, in its widths
_NOTHING_BETWEEN = 0.3
_LIFT_HEIGHT_M = 0.20  # of the bar's centre above where it lies
_MEETING_M = np.array([0.48, 0.0, 0.30])  # of the bar's centre, where it is handed over
_MET_WITHIN_M = 0.006
_FREE = 1.5  # gap between fingers that may leave the bar, in its widths
# the giver's way out: up so far before it goes aside; and where to
_GIVER_CLEAR_M, _GIVER_UP_M, _GIVER_ASIDE_M = 0.10, 0.18, 0.12
# opens across a bar along y
_HAND_DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])


@dataclass
class Hand:
    """One hand in a simplified simulation: tracking is perfect, and the bar stops the fingers."""

    p: F64
    turn: F64
    v: F64
    w: F64
    opening: float
    gap_m: float
    T_world_base: F64
    T_tcp_cosmos: F64
    side: float  # of the bar that it grasps: +1 is the far end of the bar's y axis

    @property
    def T_base_cosmos(self) -> F64:
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = self.turn, self.p
        return se3_inverse(self.T_world_base) @ T @ self.T_tcp_cosmos

    def move(self, to: F64, R_to: F64) -> None:
        self.v = approach(self.v, to - self.p, _STEP_M, _STEP_CHANGE_M)
        self.w = approach(self.w, rotation_vector(self.turn, R_to), _TURN_RAD, _TURN_CHANGE_RAD)
        self.p, self.turn = self.p + self.v, rotate(self.turn, self.w)

    def rise(self, v: F64) -> None:
        self.v, self.w, self.p = v, np.zeros(3), self.p + v

    def stay(self, opening: float, width_m: float) -> None:
        """Stand still and move the fingers, with something of that width between them."""
        self.rise(np.zeros(3))
        self.move_fingers(opening, width_m / self.gap_m)

    def move_fingers(self, opening: float, least: float) -> None:
        self.opening = max(
            float(np.clip(opening, self.opening - _OPENING_CHANGE, self.opening + _OPENING_CHANGE)),
            least,
        )


@dataclass
class BarHands(ABC):
    """Both hands and the bar, row by row."""

    hands: dict[str, Hand]
    bar: F64  # [4, 4]
    width_m: float
    grasp_m: float
    rest_m: float  # height of its centre on the table
    held_rows: int = 0

    def target(self, hand: Hand) -> tuple[F64, F64]:
        """Where a hand is to grasp the bar: position [3] and orientation [3, 3]."""
        x, y = self.bar[:2, 1] / max(float(np.linalg.norm(self.bar[:2, 1])), 1e-9)
        turn = np.array([[y, x, 0.0], [-x, y, 0.0], [0.0, 0.0, 1.0]])
        return self.bar[:3, 3] + hand.side * self.grasp_m * self.bar[:3, 1], turn @ _HAND_DOWN

    def near(self, hand: Hand, within: float = 1.0) -> bool:
        at, R = self.target(hand)
        turned = float(np.linalg.norm(rotation_vector(hand.turn, R)))
        return bool(
            np.linalg.norm(hand.p - at) < within * _GRASP_WITHIN_M
            and turned < within * _GRASP_WITHIN_RAD
        )

    def over(self, hand: Hand) -> bool:
        """Whether a hand is where it may descend onto the bar, or below."""
        at, R = self.target(hand)
        turned = float(np.linalg.norm(rotation_vector(hand.turn, R)))
        return bool(
            np.linalg.norm((hand.p - at)[:2]) < _DESCEND_WITHIN_M and turned < 2 * _GRASP_WITHIN_RAD
        )

    def holds(self, hand: Hand) -> bool:
        """Whether the bar is between a hand's fingers."""
        low, high = _HOLDS
        return (
            self.near(hand, 4.0)
            and low * self.width_m < hand.opening * hand.gap_m < high * self.width_m
        )

    @abstractmethod
    def advance(self) -> Mapping[str, float]:
        """Advance by one row; return the open fraction that each hand is commanded."""


MakeHands = Callable[[dict[str, Hand], F64, float, float, float], BarHands]


@dataclass
class Lift(BarHands):
    """Both hands lift the bar.

    They hover over their ends of the bar, descend, close together and rise together: while they
    hold it, they share one translation, so that their relative pose stays what it is.
    """

    def advance(self) -> Mapping[str, float]:
        """Advance by one row; both hands are commanded the same open fraction."""
        return dict.fromkeys(self.hands, self._advance())

    def _advance(self) -> float:
        hands = self.hands.values()
        at = all(self.near(hand, 4.0) for hand in hands)
        if all(self.holds(hand) for hand in hands):
            self._carry()
            return 0.0
        closing = at and any(hand.opening < _CLOSING for hand in hands)
        if closing or all(self.near(hand) for hand in hands):
            empty = any(hand.opening < _NOTHING_BETWEEN for hand in hands)
            for hand in hands:
                hand.stay(1.0 if empty else 0.0, self.width_m)
            return 1.0 if empty else 0.0
        self._approach()
        return 1.0

    def _carry(self) -> None:
        self.held_rows += 1
        hands = list(self.hands.values())
        waits = (
            self.held_rows <= _SQUEEZE_ROWS and self.bar[2, 3] < self.rest_m + 0.5 * _GRASP_WITHIN_M
        )
        left = np.array([0.0, 0.0, 0.0 if waits else self.rest_m + _LIFT_HEIGHT_M - self.bar[2, 3]])
        v = np.array([0.0, 0.0, float(np.mean([hand.v[2] for hand in hands]))])
        v = approach(v, left, _LIFT_M, _LIFT_CHANGE_M)
        for hand in hands:
            hand.rise(v)
        self.bar[:3, 3] += v

    def _approach(self) -> None:
        """Move every hand over its end of the bar, and down onto it once all of them are there."""
        places = {name: self.target(hand) for name, hand in self.hands.items()}
        over = all(self.over(hand) for hand in self.hands.values())
        for name, hand in self.hands.items():
            at, R = places[name]
            hand.move(at if over else at + [0.0, 0.0, _HOVER_M], R)
            hand.move_fingers(1.0, 0.0)


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
        taker, (giver,) = (
            self.hands[self.taker],
            (name for name in self.hands if name != self.taker),
        )
        gives, takes = self.holds(self.hands[giver]), self.holds(taker)
        if takes:
            taker.stay(0.0, self.width_m)
            return {self.taker: 0.0, giver: self._let_go(self.hands[giver], gives)}
        opening = self._bring(self.hands[giver]) if gives else self._grasp(self.hands[giver])
        met = gives and np.linalg.norm(_MEETING_M - self.bar[:3, 3]) < _MET_WITHIN_M
        return {giver: opening, self.taker: self._grasp(taker) if met else self._wait(taker)}

    def _grasp(self, hand: Hand) -> float:
        """Close a hand on its end of the bar, or approach it from above."""
        if (self.near(hand, 4.0) and hand.opening < _CLOSING) or self.near(hand):
            opening = 1.0 if hand.opening < _NOTHING_BETWEEN else 0.0
            hand.stay(opening, self.width_m)
            return opening
        at, R = self.target(hand)
        hand.move(at if self.over(hand) else at + [0.0, 0.0, _HOVER_M], R)
        hand.move_fingers(1.0, 0.0)
        return 1.0

    def _bring(self, hand: Hand) -> float:
        """Bring the bar to where the hands meet."""
        self.held_rows += 1
        waits = (
            self.held_rows <= _SQUEEZE_ROWS and self.bar[2, 3] < self.rest_m + 0.5 * _GRASP_WITHIN_M
        )
        left = np.zeros(3) if waits else _MEETING_M - self.bar[:3, 3]
        hand.rise(approach(hand.v, left, _LIFT_M, _LIFT_CHANGE_M))
        self.bar[:3, 3] += hand.v
        return 0.0

    def _wait(self, hand: Hand) -> float:
        """Wait over the place where the bar's free end will be."""
        at, R = self.target(hand)
        hand.move(at + _MEETING_M - self.bar[:3, 3] + [0.0, 0.0, _HOVER_M], R)
        hand.move_fingers(1.0, 0.0)
        return 1.0

    def _let_go(self, hand: Hand, holds: bool) -> float:
        """Open once the other hand holds the bar too, and go up, then aside."""
        self.both_rows += holds
        if holds and self.both_rows <= _SQUEEZE_ROWS:
            hand.stay(0.0, self.width_m)
            return 0.0
        if hand.opening * hand.gap_m < _FREE * self.width_m and self.near(hand, 4.0):
            hand.stay(1.0, 0.0)
            return 1.0
        hand.move_fingers(1.0, 0.0)
        hand.move(self._way_out(hand), hand.turn)
        return 1.0

    def _way_out(self, hand: Hand) -> F64:
        at, _ = self.target(hand)
        aside = hand.side * self.bar[:3, 1] * [1.0, 1.0, 0.0]
        return (
            at
            + [0.0, 0.0, _GIVER_UP_M]
            + (_GIVER_ASIDE_M * aside if hand.p[2] - at[2] > _GIVER_CLEAR_M else 0.0)
        )


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
    stacked = {name: np.stack(path) for name, path in poses.items()}
    rows = encode_limbs(
        stacked, {name: np.array(opening) for name, opening in openings.items()}, request.embodiment
    )
    return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)


def _world_of(request: Request, kind: MakeHands) -> BarHands:
    """The hands where the rows depart, and the bar where it is."""
    state: Mapping[str, F64] = request.privileged or {}
    names = list(request.limb_poses)
    wanted = [
        "bar",
        "bar_m",
        *(f"{name}_{key}" for name in names for key in ("tcp", "tcp_twist", "base", "gap_m")),
    ]
    missing = [key for key in wanted if key not in state]
    if missing or len(names) != 2 or request.action_space.name != "midtrain":
        raise BackendError(
            "a bar needs two arms and the simulator's state; missing: "
            f"{', '.join(missing) or 'two arms'}. Use it "
            "with Robot('dual_panda')."
        )
    fps, bar = request.embodiment.fps or 10.0, state["bar"].copy()
    width_m, _, height_m, grasp_m = state["bar_m"].tolist()
    order = [limb.name for limb in request.embodiment.limbs if limb.name in names]
    opening = dict(zip(order, request.grippers.tolist(), strict=True))
    hands: dict[str, Hand] = {}
    for name in names:
        T_tcp_cosmos = (
            se3_inverse(state[f"{name}_tcp"]) @ state[f"{name}_base"] @ request.limb_poses[name]
        )
        tcp = state[f"{name}_base"] @ request.departures[name] @ se3_inverse(T_tcp_cosmos)
        twist = state[f"{name}_tcp_twist"] / fps
        gap_m = float(state[f"{name}_gap_m"])
        base = state[f"{name}_base"]
        side = float(np.sign((base[:3, 3] - bar[:3, 3]) @ bar[:3, 1]) or 1.0)
        hands[name] = Hand(
            tcp[:3, 3].copy(),
            tcp[:3, :3].copy(),
            twist[:3],
            twist[3:],
            opening[name],
            gap_m,
            base,
            T_tcp_cosmos,
            side,
        )
    return kind(hands, bar, width_m, grasp_m, height_m / 2)
