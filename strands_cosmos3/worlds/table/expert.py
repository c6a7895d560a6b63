"""A scripted expert that plans normalised ``midtrain`` chunks from the simulator's state.

It replaces a model, so that everything after inference can be tested without weights. It is
stateless: each chunk is planned from the measured state in a simplified simulation
(:class:`_World`), so it recovers after a failed grasp and can label any state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import radians

import numpy as np

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.actions.rotations import se3_inverse
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import PANDA_FINGER
from strands_cosmos3.errors import BackendError
from strands_cosmos3.types import ActionChunk, Request
from strands_cosmos3.worlds.table.bar_expert import HandOver, Lift, bar_chunk
from strands_cosmos3.worlds.table.grammar import Goal, Verb, parse_instruction
from strands_cosmos3.worlds.table.hands import (
    Hand,
    HandLimits,
    gripper_down,
    length,
    rotate,
    rotation_vector,
    yaw_of,
)

# Motion limits per row at 15 Hz, within DROID's quantiles (q99 is about 1.4 cm and 2.7 degrees per
# row).
_LIMITS = HandLimits(0.0125, 0.0032, radians(2.5), radians(0.7), 0.30)

_HOVER_M = 0.09  # height above the target before descending
_CARRY_M = 0.20  # height of the tool centre point while carrying
_DESCEND_WITHIN_M = 0.012  # horizontal distance to a target within which to descend
# height above the target per distance aside; fingers beside a cube need more
_FUNNEL_SLOPE = 1.5
_FUNNEL_SLOPE_TURNING = 3.0
# horizontal distance to the target within which a hand in a funnel turns to it
_TURN_WITHIN_M = 0.12
# height above a cube per distance that a finger is closer than this to its side
_CLEAR_SLOPE = 4.0
_CLEAR_M = 0.008
_TOP_M = 0.01  # height above a cube's top at which an open finger passes it
# height per row with which a hand that cannot be sure comes down, from this height on
_SLOW_M = 0.005
_SLOW_BELOW_M = 0.05
# the same over a bin, and the distance aside within which it is zero
_INTO_BIN_SLOPE = 3.0
_INTO_BIN_WITHIN_M = 0.03
_FUNNEL_M_PER_RAD = 0.25  # height above the target per angle that the hand still has to turn
_GRASP_WITHIN_M = 0.005  # distance to a cube within which to close the fingers
_GRASP_ASIDE_M = 0.008  # the horizontal one for a hand that takes a cube askew
# tolerance on the hover and carry heights, and on the horizontal distance to a place
_SLACK_M = 0.03
_IN_BIN_M = 0.05  # horizontal distance to the bin's centre within which a cube is in the bin
# horizontal distance within which to lower the held cube
_LOWER_INTO_BIN_M = 0.015
_LOWER_ONTO_CUBE_M = 0.004
_BELOW_RIM_M = 0.01  # depth of the cube's centre below the bin's rim at release
_STACK_GAP = 1.02  # distance between the cubes' centres at release, in edge lengths
# tolerances of a stacked cube, in edge lengths
_STACKED_ASIDE = 0.25
_STACKED_HEIGHT = 0.08
_GRASP_WITHIN_RAD = radians(4.0)  # rotation error within which to close the fingers
_GRASP_ASKEW_WITHIN_RAD = radians(16.0)  # the same if the hand may take a cube askew
# widest gap of fingers that hold a cube, in its edges; its diagonal is 1.41
_HELD_GAP = 1.12
_HELD_GAP_ASKEW = 1.45
_MEAN_WIDTH = 4 / np.pi  # of a square seen from all sides, in its edges
_NEIGHBOUR_M = 0.095  # distance within which another cube can be in a finger's way
# free space aside of the line on which the fingers open: half of a finger, and a margin
_BESIDE_FINGER_M = 0.015
# the least first
_TURNS_RAD = np.deg2rad([0, *(sign * size for size in range(5, 95, 5) for sign in (-1, 1))])
_ROOM_MARGIN_M = 0.01
_SQUEEZE_ROWS = 3  # rows to wait with closed fingers before lifting
_RELEASE_OPENING = 0.75  # open fraction from which a cube is released

STATE_KEYS = ("tcp", "tcp_twist", "edge_m", "bin")
"""Keys that the expert reads from ``Observation.privileged`` besides the cubes' poses [4, 4]:
the tool centre point's pose [4, 4] and twist [6] (m/s and rad/s, world axes), a cube's edge [m],
the bin's centre and rim height [3]. A Panda's are ``gap_m``, the gap between the open fingers
(or [K], at evenly spaced open fractions), ``carry_m``, the height at which to carry, and
``grasp_yaw_rad``, the yaw of the tool frame from which to turn least, if they are not there.
"""


@dataclass(kw_only=True)
class _World(Hand):
    """Simplified simulation of the hand and the cubes, row by row: a cube between the fingers
    stops them.
    """

    cubes: dict[str, F64]  # centres [3] by name
    yaw: dict[str, float]
    edge_m: float
    bin: F64
    gap_m: F64  # between the open fingers; or [K] at evenly spaced open fractions
    grasp_yaw_rad: float
    carry_m: float
    turns: bool
    funnel: bool
    grasp_yaw: dict[str, float] = field(default_factory=dict[str, float])  # of the hand, by cube
    askew: bool = False  # whether the hand takes cubes without turning to their yaw
    held_rows: int = 0

    @property
    def width_m(self) -> float:
        """Gap between the fingers."""
        if not self.gap_m.ndim:
            return float(self.gap_m) * self.opening
        return float(np.interp(self.opening, np.linspace(0.0, 1.0, len(self.gap_m)), self.gap_m))

    @property
    def blocked(self) -> float:
        """Open fraction at which a cube stops the fingers."""
        if not self.gap_m.ndim:
            return self.edge_m / float(self.gap_m)
        return float(np.interp(self.edge_m, self.gap_m, np.linspace(0.0, 1.0, len(self.gap_m))))

    def holds(self, cube: str) -> bool:
        """Whether a cube is between the fingers and their gap is about its edge length."""
        off = self.p - self.cubes[cube]
        near = length(off[:2]) < 0.4 * self.edge_m and abs(off[2]) < 0.5 * self.edge_m
        widest = _HELD_GAP_ASKEW if self.askew else _HELD_GAP
        return bool(near and 0.8 * self.edge_m < self.width_m < widest * self.edge_m)

    def drift(self, drift: F64, held: str | None) -> None:
        """Add a row's drift [6], metres and radians in world axes, to the motion; a held cube
        follows.
        """
        self.v = self.v + drift[:3]
        self.w = self.w + drift[3:]
        self.p = self.p + drift[:3]
        self.R = rotate(self.R, drift[3:])
        if held is not None:
            self.cubes[held] = self.cubes[held] + drift[:3]

    def open_at(self, cube: str, opening: float = 1.0) -> None:
        """Move the fingers one row towards an opening; a cube between them stops them."""
        blocked = self.blocked
        between = length((self.p - self.cubes[cube])[:2]) < 0.4 * self.edge_m
        stops = opening < self.opening and between and self.opening >= blocked
        self.move_fingers(opening, blocked if stops else 0.0)


class ScriptedBackend(Backend):
    """Scripted expert that reaches for, picks, places or stacks the instruction's cube, or lifts or
    hands over a bar.

    Args:
        turns: Whether the hand turns to the cube's yaw. If not, it keeps the yaw from which it
            would turn least, which is enough for reaching.
        funnel: Whether it descends the lower the closer it is, to a cube and into the bin, not once
            it is above them, and turns near a cube only; None: if it does not turn.
    """

    info = BackendInfo(name="scripted", needs_privileged=True, requires_images=False)
    turns = True
    funnel = False

    def __init__(self, turns: bool = True, funnel: bool | None = None):
        self.turns = turns
        self.funnel = not turns if funnel is None else funnel

    def infer(self, request: Request) -> ActionChunk:
        """Return rows from the measured state towards the instruction's goal.

        Raises:
            BackendError: The request lacks simulator state or a measured pose, or is for another
                action space.
            InputError: The instruction names no verb or no colour.
        """
        return self.plan(request)

    def plan(
        self,
        request: Request,
        starts_cruising: bool = False,
        drift: F64 | None = None,
        askew: bool = False,
    ) -> ActionChunk:
        """Return :meth:`infer`'s rows under other conditions.

        Args:
            starts_cruising: Whether the first row has the full speed of the approach, as if the
                hand had reached it already, whatever the measured speed.
            drift: [n, 6] added to the first n rows, in metres and radians in world axes; the rows
                after them correct it.
            askew: Whether the hand takes cubes without turning to their yaw, which a small picture
                does not show. It keeps the robot's yaw and turns only where another cube is in a
                finger's way. In a funnel it comes down slowly, and only as far as its fingers clear
                the cube.
        """
        goal = parse_instruction(request.instruction)
        if goal.verb is Verb.LIFT:
            return bar_chunk(request, Lift)
        if goal.verb is Verb.HAND_OVER:
            return bar_chunk(request, partial(HandOver, taker=goal.to or "right"))
        state = self._state(request, goal)
        world = _world_from_state(state, request, self.turns, self.funnel)
        world.starts_cruising = starts_cruising
        world.askew = askew
        assert request.T_base_cosmos is not None  # _state checked it
        T_world_cosmos = state.get("base", np.eye(4)) @ request.T_base_cosmos
        T_tcp_cosmos = se3_inverse(state["tcp"]) @ T_world_cosmos
        poses = [T_world_cosmos]
        gripper: list[float] = []
        for row in range(request.n_rows):
            holds = world.holds(goal.cube)
            gripper.append(_act(world, goal))
            if drift is not None and row < len(drift):
                world.drift(drift[row], goal.cube if holds else None)
            poses.append(world.T_world_tcp @ T_tcp_cosmos)
        rows = encode_chunk(np.stack(poses), np.array(gripper), request.embodiment)
        return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)

    def _state(self, request: Request, goal: Goal) -> Mapping[str, F64]:
        state = request.privileged
        keys = (*STATE_KEYS, goal.cube, *filter(None, [goal.onto]))
        missing = [key for key in keys if state is None or key not in state]
        if missing or state is None:
            raise BackendError(
                f"the scripted expert needs the simulator's state; missing: {', '.join(missing)}. "
                "Use it with the simulated Robot, or pass Observation.privileged to plan(); for a "
                "real arm, choose a model backend."
            )
        if request.T_base_cosmos is None or request.action_space.name != "midtrain":
            raise BackendError(
                "the scripted expert returns 'midtrain' rows and needs the measured pose; name "
                "the robot, e.g. robot='panda'."
            )
        return state


def _world_from_state(
    state: Mapping[str, F64], request: Request, turns: bool, funnel: bool
) -> _World:
    fps = request.embodiment.fps or 15.0
    cubes = {name: T for name, T in state.items() if name.startswith(("cube_", "other_"))}
    return _World(
        limits=_LIMITS,
        p=state["tcp"][:3, 3],
        R=state["tcp"][:3, :3],
        v=state["tcp_twist"][:3] / fps,
        w=state["tcp_twist"][3:] / fps,
        opening=float(request.gripper),
        cubes={name: T[:3, 3] for name, T in cubes.items()},
        yaw={name: _flat_yaw(T[:3, :3]) for name, T in cubes.items()},
        edge_m=float(state["edge_m"]),
        bin=state["bin"],
        gap_m=np.asarray(state.get("gap_m", 2 * PANDA_FINGER.open_value)),
        carry_m=float(state.get("carry_m", _CARRY_M)),
        grasp_yaw_rad=float(state.get("grasp_yaw_rad", np.pi / 4)),
        turns=turns,
        funnel=funnel,
    )


def _flat_yaw(R: F64) -> float:
    """Return a cube's yaw about the vertical, from its most horizontal axis."""
    axis = R[:, int(np.argmin(np.abs(R[2])))]
    return float(np.arctan2(axis[1], axis[0]))


def _grasp_yaw(world: _World, cube: str) -> float:
    """Return the hand's yaw that aligns the fingers with the cube: of four, the one nearest to the
    robot's (45 degrees).

    If another cube stands where a finger would descend, the hand turns by 90 degrees. A hand that
    takes cubes askew keeps the robot's yaw, and turns only as far as another cube needs.
    """
    quarter = np.pi / 2
    home = world.grasp_yaw_rad
    if world.askew:
        yaws = home + _TURNS_RAD
        needed_m = _BESIDE_FINGER_M + world.edge_m * _MEAN_WIDTH / 2
        return float(yaws[np.argmax(np.minimum(_finger_rooms_m(world, cube, yaws), needed_m))])
    if not world.turns:
        return home
    nearest = home + (world.yaw[cube] - home + quarter / 2) % quarter - quarter / 2
    turned = nearest - quarter if nearest > home else nearest + quarter
    room_m, turned_room_m = _finger_rooms_m(world, cube, np.array([nearest, turned]))
    return turned if turned_room_m > room_m + _ROOM_MARGIN_M else nearest


def _finger_rooms_m(world: _World, cube: str, yaw_rad: F64) -> F64:
    """Return how far the closest neighbour stands aside of the line on which the fingers open,
    for hands of these yaws [n].
    """
    across = np.stack([np.cos(yaw_rad), np.sin(yaw_rad)])
    offsets = [(p - world.cubes[cube])[:2] for name, p in world.cubes.items() if name != cube]
    close = [abs(off @ across) for off in offsets if length(off) < _NEIGHBOUR_M]
    return np.min([*close, np.full(len(yaw_rad), _NEIGHBOUR_M)], axis=0)


def _act(world: _World, goal: Goal) -> float:
    """Advance the simplified simulation by one row; return the commanded open fraction."""
    cube = world.cubes[goal.cube]
    if goal.cube not in world.grasp_yaw:  # a cube that moves is held
        world.grasp_yaw[goal.cube] = _grasp_yaw(world, goal.cube)
    R = gripper_down(world.grasp_yaw[goal.cube])
    if goal.verb is Verb.REACH:
        _descend_onto(world, cube, R)
        world.open_at(goal.cube)
        return 1.0
    done = _delivered(world, goal)
    if world.holds(goal.cube) and not done:
        world.held_rows += 1
        if world.held_rows <= _SQUEEZE_ROWS and world.p[2] < world.edge_m:
            world.move(world.p, world.R)
            return 0.0
        return _carry(world, goal)
    if done:
        away = _at_height(world.p, world.carry_m + _SLACK_M)
        world.move(away if world.opening > _RELEASE_OPENING else world.p, world.R)
        world.open_at(goal.cube)
        return 1.0
    within_rad = _GRASP_ASKEW_WITHIN_RAD if world.askew else _GRASP_WITHIN_RAD
    at = _around(world, cube, 1) and _angle(world.R, R) < within_rad
    closing = _around(world, cube, 2) and world.opening < 0.95
    if at or closing:
        world.move(world.p, world.R)
        world.open_at(goal.cube, 0.0)
        return 0.0 if world.opening > 0.3 else 1.0  # no cube between the fingers: open again
    _descend_onto(world, cube, R)
    world.open_at(goal.cube)
    return 1.0


def _around(world: _World, cube: F64, times: int) -> bool:
    """Return whether the hand is within so many times the distance at which to close the
    fingers.
    """
    off = world.p - cube
    if world.askew:
        return length(off[:2]) < times * _GRASP_ASIDE_M and bool(
            abs(off[2]) < times * _GRASP_WITHIN_M
        )
    return length(off) < times * _GRASP_WITHIN_M


def _at_height(position_m: F64, height_m: float) -> F64:
    """Return a position [3] with another height."""
    return np.array([*position_m[:2], height_m])


def _angle(R_a: F64, R_b: F64) -> float:
    return length(rotation_vector(R_a, R_b))


def _descend_onto(world: _World, target: F64, R: F64) -> None:
    """Move one row: first to a safe height above the target, then straight down to it."""
    aside = length((target - world.p)[:2])
    hover = target[2] + _HOVER_M
    if world.funnel:  # without a gate that only a close look can judge
        turns = world.turns and not world.askew
        slope = _FUNNEL_SLOPE_TURNING if turns else _FUNNEL_SLOPE
        turn = _angle(world.R, R) - 2 * _GRASP_WITHIN_RAD if turns else 0.0
        room = _room_m(world, target) if world.askew else _CLEAR_M
        above = max(
            slope * (aside - _DESCEND_WITHIN_M),
            _FUNNEL_M_PER_RAD * turn,
            _CLEAR_SLOPE * (_CLEAR_M - room),
            0.0,
        )
        above = min(_HOVER_M, above)
        rises = above == _HOVER_M and world.p[2] < hover - _SLACK_M
        # a finger would push the cube
        rises |= room < 0 and world.p[2] < target[2] + world.edge_m / 2 + _TOP_M
        shown = aside < _TURN_WITHIN_M  # no camera shows the yaw from further away
        R_now = R if shown else gripper_down(world.grasp_yaw_rad)
        height = target[2] + above
        if world.askew and height < world.p[2] < target[2] + _SLOW_BELOW_M:
            height = max(height, world.p[2] - _SLOW_M)
        world.move(_at_height(world.p if rises else target, height), R_now)
        return
    aligned = _angle(world.R, R) < 2 * _GRASP_WITHIN_RAD
    if aside < _DESCEND_WITHIN_M and aligned:
        world.move(target, R)
    elif world.p[2] < hover - _SLACK_M and aside > _DESCEND_WITHIN_M:
        world.move(_at_height(world.p, hover), world.R)
    else:
        world.move(_at_height(target, hover), R)


def _room_m(world: _World, cube: F64) -> float:
    """Return the distance between a cube of any yaw and the nearer open finger; negative if they
    overlap from above.
    """
    beside = abs(float((cube - world.p) @ world.R[:, 1]))
    return (float(np.max(world.gap_m)) - _MEAN_WIDTH * world.edge_m) / 2 - beside


def _delivered(world: _World, goal: Goal) -> bool:
    """Return whether the cube is where the instruction wants it and only needs to be released."""
    cube = world.cubes[goal.cube]
    if goal.verb is Verb.PLACE:
        return bool(length((cube - world.bin)[:2]) < _IN_BIN_M and cube[2] < world.bin[2])
    if goal.verb is Verb.STACK and goal.onto is not None:
        off = cube - world.cubes[goal.onto]
        aside = length(off[:2]) / world.edge_m
        above = off[2] / world.edge_m
        return bool(aside < _STACKED_ASIDE and abs(above - 1) < _STACKED_HEIGHT)
    return False


def _carry(world: _World, goal: Goal) -> float:
    """Move the held cube one row on its way up, across and down; return the commanded open
    fraction.
    """
    before = world.p
    if goal.verb is Verb.PICK:
        target = _at_height(world.p, world.carry_m)
    else:
        if goal.verb is Verb.PLACE:
            below = world.bin
            above_m = -_BELOW_RIM_M
            lower_m = _LOWER_INTO_BIN_M
        elif goal.verb is Verb.STACK and goal.onto is not None:
            below = world.cubes[goal.onto]
            lower_m = _LOWER_ONTO_CUBE_M
            above_m = _STACK_GAP * world.edge_m
        else:
            raise BackendError(
                f"the scripted expert cannot carry a cube to {goal.verb}; write how in _carry."
            )
        # from the cube to the hand, since the grasp may be off centre
        offset = world.p - world.cubes[goal.cube]
        place = _at_height(below, below[2] + above_m) + offset
        aside = length((place - world.p)[:2])
        height = place[2] if aside < lower_m else world.carry_m
        if world.funnel and goal.verb is Verb.PLACE:
            height = min(
                world.carry_m, place[2] + _INTO_BIN_SLOPE * max(aside - _INTO_BIN_WITHIN_M, 0.0)
            )
        rises = (
            height == world.carry_m and world.p[2] < world.carry_m - _SLACK_M and aside > _SLACK_M
        )
        target = _at_height(before if rises else place, height)
    world.move(target, gripper_down(yaw_of(world.R)))
    world.cubes[goal.cube] = world.cubes[goal.cube] + (world.p - before)
    return 0.0
