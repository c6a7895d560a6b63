"""Two hands and a bar between them, simplified: what the scripted experts of tasks with a bar
plan their rows in.
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
LIFT_M, LIFT_CHANGE_M = 0.012, 0.002  # with the bar: at most 0.12 m/s and 0.2 m/s^2
_TURN_RAD, _TURN_CHANGE_RAD = float(np.deg2rad(4.5)), float(np.deg2rad(1.2))
_OPENING_CHANGE = 0.45

HOVER_M = 0.10  # over the bar
DESCEND_WITHIN_M, GRASP_WITHIN_M = 0.012, 0.004
GRASP_WITHIN_RAD = float(np.deg2rad(2.0))
SQUEEZE_ROWS = 4
CLOSING = 0.95  # hands whose fingers are further closed than that are about to grasp
_HOLDS = 0.85, 1.12  # gap between the fingers that hold the bar, in its widths
NOTHING_BETWEEN = 0.3
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
            np.linalg.norm(hand.p - at) < within * GRASP_WITHIN_M
            and turned < within * GRASP_WITHIN_RAD
        )

    def over(self, hand: Hand) -> bool:
        """Whether a hand is where it may descend onto the bar, or below."""
        at, R = self.target(hand)
        turned = float(np.linalg.norm(rotation_vector(hand.turn, R)))
        return bool(
            np.linalg.norm((hand.p - at)[:2]) < DESCEND_WITHIN_M and turned < 2 * GRASP_WITHIN_RAD
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
