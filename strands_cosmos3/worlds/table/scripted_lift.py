"""The scripted expert's rows for the level lift of a bar by two hands, from the simulator's state.

Both hands hover over their ends of the bar, descend, close together and rise together: while they
hold it, they share one translation, so that their relative pose stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strands_cosmos3.worlds.table.bar_expert import (
    CLOSING,
    GRASP_WITHIN_M,
    HOVER_M,
    LIFT_CHANGE_M,
    LIFT_M,
    NOTHING_BETWEEN,
    SQUEEZE_ROWS,
    BarHands,
)
from strands_cosmos3.worlds.table.steps import approach

_HEIGHT_M = 0.20  # of the bar's centre above where it lies


class Lift(BarHands):
    """Both hands lift the bar."""

    def advance(self) -> Mapping[str, float]:
        """Advance by one row; both hands are commanded the same open fraction."""
        return dict.fromkeys(self.hands, self._advance())

    def _advance(self) -> float:
        hands = self.hands.values()
        at = all(self.near(hand, 4.0) for hand in hands)
        if all(self.holds(hand) for hand in hands):
            self._carry()
            return 0.0
        closing = at and any(hand.opening < CLOSING for hand in hands)
        if closing or all(self.near(hand) for hand in hands):
            empty = any(hand.opening < NOTHING_BETWEEN for hand in hands)
            for hand in hands:
                hand.stay(1.0 if empty else 0.0, self.width_m)
            return 1.0 if empty else 0.0
        self._approach()
        return 1.0

    def _carry(self) -> None:
        self.held_rows += 1
        hands = list(self.hands.values())
        waits = (
            self.held_rows <= SQUEEZE_ROWS and self.bar[2, 3] < self.rest_m + 0.5 * GRASP_WITHIN_M
        )
        left = np.array([0.0, 0.0, 0.0 if waits else self.rest_m + _HEIGHT_M - self.bar[2, 3]])
        v = np.array([0.0, 0.0, float(np.mean([hand.v[2] for hand in hands]))])
        v = approach(v, left, LIFT_M, LIFT_CHANGE_M)
        for hand in hands:
            hand.rise(v)
        self.bar[:3, 3] += v

    def _approach(self) -> None:
        """Move every hand over its end of the bar, and down onto it once all of them are there."""
        places = {name: self.target(hand) for name, hand in self.hands.items()}
        over = all(self.over(hand) for hand in self.hands.values())
        for name, hand in self.hands.items():
            at, R = places[name]
            hand.move(at if over else at + [0.0, 0.0, HOVER_M], R)
            hand.move_fingers(1.0, 0.0)
