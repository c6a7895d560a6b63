"""The scripted expert's rows for the level lift of a bar by two hands, from the simulator's state.

Both hands hover over their ends of the bar, descend, close together and rise together: while they hold it, they share one
translation, so that their relative pose stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.actions.decode import encode_limbs
from strands_cosmos3.actions.rotations import se3_inverse
from strands_cosmos3.backends.kinematic_steps import approach, rotate, rotation_vector
from strands_cosmos3.checks import F64
from strands_cosmos3.errors import BackendError
from strands_cosmos3.types import ActionChunk, Request

# Motion limits per row at 10 Hz.
_STEP_M, _STEP_CHANGE_M = 0.020, 0.005
_LIFT_M, _LIFT_CHANGE_M = 0.012, 0.002  # with the bar: at most 0.12 m/s and 0.2 m/s^2
_TURN_RAD, _TURN_CHANGE_RAD = float(np.deg2rad(4.5)), float(np.deg2rad(1.2))
_OPENING_CHANGE = 0.45

_HOVER_M = 0.10  # over the bar
_HEIGHT_M = 0.20  # of the bar's centre above where it lies
_DESCEND_WITHIN_M, _GRASP_WITHIN_M = 0.012, 0.004
_GRASP_WITHIN_RAD = float(np.deg2rad(2.0))
_SQUEEZE_ROWS = 4
_CLOSING = 0.95  # hands whose fingers are further closed than that are about to grasp
_HOLDS = 0.85, 1.12  # gap between the fingers that hold the bar, in its widths
_NOTHING_BETWEEN = 0.3
_HAND_DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])  # opens across a bar along y


@dataclass
class _Hand:
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

    def move_fingers(self, opening: float, least: float) -> None:
        self.opening = max(float(np.clip(opening, self.opening - _OPENING_CHANGE, self.opening + _OPENING_CHANGE)), least)


@dataclass
class _Lift:
    """Both hands and the bar, row by row."""

    hands: dict[str, _Hand]
    bar: F64  # [4, 4]
    width_m: float
    grasp_m: float
    rest_m: float  # height of its centre on the table
    held_rows: int = 0

    def target(self, hand: _Hand) -> tuple[F64, F64]:
        """Where a hand is to grasp the bar: position [3] and orientation [3, 3]."""
        x, y = self.bar[:2, 1] / max(float(np.linalg.norm(self.bar[:2, 1])), 1e-9)
        turn = np.array([[y, x, 0.0], [-x, y, 0.0], [0.0, 0.0, 1.0]])
        return self.bar[:3, 3] + hand.side * self.grasp_m * self.bar[:3, 1], turn @ _HAND_DOWN

    def near(self, hand: _Hand, within: float = 1.0) -> bool:
        at, R = self.target(hand)
        turned = float(np.linalg.norm(rotation_vector(hand.turn, R)))
        return bool(np.linalg.norm(hand.p - at) < within * _GRASP_WITHIN_M and turned < within * _GRASP_WITHIN_RAD)

    def advance(self) -> float:
        """Advance by one row; return the open fraction that both hands are commanded."""
        hands = self.hands.values()
        low, high = _HOLDS
        at = all(self.near(hand, 4.0) for hand in hands)
        if at and all(low * self.width_m < hand.opening * hand.gap_m < high * self.width_m for hand in hands):
            self._carry()
            return 0.0
        closing = at and any(hand.opening < _CLOSING for hand in hands)
        if closing or all(self.near(hand) for hand in hands):
            empty = any(hand.opening < _NOTHING_BETWEEN for hand in hands)
            for hand in hands:
                hand.rise(np.zeros(3))
                hand.move_fingers(1.0 if empty else 0.0, self.width_m / hand.gap_m)
            return 1.0 if empty else 0.0
        self._approach()
        return 1.0

    def _carry(self) -> None:
        self.held_rows += 1
        hands = list(self.hands.values())
        waits = self.held_rows <= _SQUEEZE_ROWS and self.bar[2, 3] < self.rest_m + 0.5 * _GRASP_WITHIN_M
        left = np.array([0.0, 0.0, 0.0 if waits else self.rest_m + _HEIGHT_M - self.bar[2, 3]])
        v = np.array([0.0, 0.0, float(np.mean([hand.v[2] for hand in hands]))])
        v = approach(v, left, _LIFT_M, _LIFT_CHANGE_M)
        for hand in hands:
            hand.rise(v)
        self.bar[:3, 3] += v

    def _approach(self) -> None:
        """Move every hand over its end of the bar, and down onto it once all of them are there."""
        places = {name: self.target(hand) for name, hand in self.hands.items()}
        over = all(
            np.linalg.norm((hand.p - places[name][0])[:2]) < _DESCEND_WITHIN_M
            and np.linalg.norm(rotation_vector(hand.turn, places[name][1])) < 2 * _GRASP_WITHIN_RAD
            for name, hand in self.hands.items()
        )
        for name, hand in self.hands.items():
            at, R = places[name]
            hand.move(at if over else at + [0.0, 0.0, _HOVER_M], R)
            hand.move_fingers(1.0, 0.0)


def lift_chunk(request: Request) -> ActionChunk:
    """Return rows that lift the bar with two hands.

    Raises:
        BackendError: The request lacks simulator state or the limbs' poses, or is for another action space.
    """
    lift = _lift_of(request)
    poses = {name: [hand.T_base_cosmos] for name, hand in lift.hands.items()}
    grippers: list[float] = []
    for _ in range(request.n_rows):
        grippers.append(lift.advance())
        for name, hand in lift.hands.items():
            poses[name].append(hand.T_base_cosmos)
    opening = np.array(grippers)
    stacked = {name: np.stack(path) for name, path in poses.items()}
    rows = encode_limbs(stacked, dict.fromkeys(lift.hands, opening), request.embodiment)
    return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)


def _lift_of(request: Request) -> _Lift:
    """The hands where the rows depart, and the bar where it is."""
    state: Mapping[str, F64] = request.privileged or {}
    names = list(request.limb_poses)
    wanted = ["bar", "bar_m", *(f"{name}_{key}" for name in names for key in ("tcp", "tcp_twist", "base", "gap_m"))]
    missing = [key for key in wanted if key not in state]
    if missing or len(names) != 2 or request.action_space.name != "midtrain":
        raise BackendError(
            f"lifting the bar needs two arms and the simulator's state; missing: {', '.join(missing) or 'two arms'}. Use it "
            "with Robot('dual_panda')."
        )
    fps, bar = request.embodiment.fps or 10.0, state["bar"].copy()
    width_m, _, height_m, grasp_m = state["bar_m"].tolist()
    order = [limb.name for limb in request.embodiment.limbs if limb.name in names]
    opening = dict(zip(order, np.atleast_1d(request.gripper).tolist(), strict=True))
    hands: dict[str, _Hand] = {}
    for name in names:
        T_tcp_cosmos = se3_inverse(state[f"{name}_tcp"]) @ state[f"{name}_base"] @ request.limb_poses[name]
        departure = request.limb_anchors.get(name, request.limb_poses[name])
        tcp = state[f"{name}_base"] @ departure @ se3_inverse(T_tcp_cosmos)
        twist = state[f"{name}_tcp_twist"] / fps
        gap_m = float(state[f"{name}_gap_m"])
        base = state[f"{name}_base"]
        side = float(np.sign((base[:3, 3] - bar[:3, 3]) @ bar[:3, 1]) or 1.0)
        hands[name] = _Hand(
            tcp[:3, 3].copy(), tcp[:3, :3].copy(), twist[:3], twist[3:], opening[name], gap_m, base, T_tcp_cosmos, side
        )
    return _Lift(hands, bar, width_m, grasp_m, height_m / 2)
