"""The scripted expert's rows for handing a bar from one hand to the other, from the simulator's
state.

One hand takes the bar at its end and brings it to the middle. There the other hand comes down onto
the free end and closes; only when both hold it does the first one open, and goes up and aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.worlds.table.bar_expert import (
    CLOSING,
    GRASP_WITHIN_M,
    HOVER_M,
    LIFT_CHANGE_M,
    LIFT_M,
    NOTHING_BETWEEN,
    SQUEEZE_ROWS,
    BarHands,
    Hand,
)
from strands_cosmos3.worlds.table.steps import approach

_MEETING_M = np.array([0.48, 0.0, 0.30])  # of the bar's centre
_MET_WITHIN_M = 0.006
_FREE = 1.5  # gap between fingers that may leave the bar, in its widths
# the giver's way out: up so far before it goes aside; and where to
_CLEAR_M, _UP_M, _ASIDE_M = 0.10, 0.18, 0.12


@dataclass
class HandOver(BarHands):
    """One hand gives the bar to the other, ``taker``."""

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
        given = self._bring(self.hands[giver]) if gives else self._grasp(self.hands[giver])
        met = gives and np.linalg.norm(_MEETING_M - self.bar[:3, 3]) < _MET_WITHIN_M
        return {giver: given, self.taker: self._grasp(taker) if met else self._wait(taker)}

    def _grasp(self, hand: Hand) -> float:
        """Close a hand on its end of the bar, or approach it from above."""
        if (self.near(hand, 4.0) and hand.opening < CLOSING) or self.near(hand):
            opening = 1.0 if hand.opening < NOTHING_BETWEEN else 0.0
            hand.stay(opening, self.width_m)
            return opening
        at, R = self.target(hand)
        hand.move(at if self.over(hand) else at + [0.0, 0.0, HOVER_M], R)
        hand.move_fingers(1.0, 0.0)
        return 1.0

    def _bring(self, hand: Hand) -> float:
        """Bring the bar to where the hands meet."""
        self.held_rows += 1
        waits = (
            self.held_rows <= SQUEEZE_ROWS and self.bar[2, 3] < self.rest_m + 0.5 * GRASP_WITHIN_M
        )
        left = np.zeros(3) if waits else _MEETING_M - self.bar[:3, 3]
        hand.rise(approach(hand.v, left, LIFT_M, LIFT_CHANGE_M))
        self.bar[:3, 3] += hand.v
        return 0.0

    def _wait(self, hand: Hand) -> float:
        """Wait over the place where the bar's free end will be."""
        at, R = self.target(hand)
        hand.move(at + _MEETING_M - self.bar[:3, 3] + [0.0, 0.0, HOVER_M], R)
        hand.move_fingers(1.0, 0.0)
        return 1.0

    def _let_go(self, hand: Hand, holds: bool) -> float:
        """Open once the other hand holds the bar too, and go up, then aside."""
        self.both_rows += holds
        if holds and self.both_rows <= SQUEEZE_ROWS:
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
        return at + [0.0, 0.0, _UP_M] + (_ASIDE_M * aside if hand.p[2] - at[2] > _CLEAR_M else 0.0)
