"""A scripted expert: it reads the simulator's state and answers normalised ``midtrain`` chunks.

It takes a model's place with the same kind of rows, so that everything after inference can be tested without weights. It
keeps no memory: each chunk is planned from the measured state by simulating a small idealised world (:class:`_World`), so
it recovers after a miss and can label any state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.actions.rotations import se3_inverse
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import PANDA_FINGER
from strands_cosmos3.errors import BackendError
from strands_cosmos3.instruction import Goal, Verb, parse_instruction
from strands_cosmos3.types import ActionChunk, Request

# Motion, per row at 15 Hz: inside DROID's quantiles (q99 is about 1.4 cm and 2.7 degrees a row).
_SPEED_M = 0.0125
_SPEED_GAIN_M = 0.0032
_TURN_RAD = float(np.deg2rad(2.5))
_TURN_GAIN_RAD = float(np.deg2rad(0.7))
_FINGER_GAIN = 0.30  # how much of its travel a finger covers in a row

_HOVER_M = 0.09  # above a cube's centre before going down
_CARRY_M = 0.20  # height of the tool centre point while carrying
_ABOVE_M = 0.012  # within this of the line above a target, go down
_AT_M = 0.005  # within this of a target, act
_SLACK_M = 0.03  # this far below a safe height, or beside a line, is near enough to go on
_IN_BIN_M = 0.05  # a cube within this of the bin's centre, sideways, is in
_OVER_BIN_M, _OVER_CUBE_M = 0.015, 0.004  # within this of the line above the place, go down
_BELOW_RIM_M = 0.01  # let go with the cube's centre this far below the bin's rim
_STACK_GAP = 1.02  # edges between two cubes' centres when the upper one is let go
_STACKED_ASIDE, _STACKED_HEIGHT = 0.25, 0.08  # edges off that still count as stacked
_YAW_RAD = float(np.deg2rad(4.0))
_SQUEEZE_ROWS = 3
_LET_GO = 0.75  # fingers this far open have let go

STATE_KEYS = ("tcp", "tcp_twist", "edge_m", "bin")
"""Keys that the expert reads from ``Observation.privileged`` beside the cubes' poses [4, 4]: the tool centre point's pose
[4, 4] and twist [6] (m/s and rad/s, world axes), a cube's edge [m], the bin's centre and rim height [3]."""


@dataclass
class _World:
    """The expert's predicted world, row by row: perfect tracking, and fingers that either hold a cube or do not."""

    p: F64
    R_tcp: F64
    v: F64  # metres a row
    w: F64  # radians a row
    opening: float  # open fraction
    cubes: dict[str, F64]  # centres [3] by name
    yaw: dict[str, float]
    edge_m: float
    bin: F64
    held_rows: int = 0

    @property
    def width_m(self) -> float:
        """Gap between the fingers."""
        return 2 * float(PANDA_FINGER.from_fraction(self.opening))

    def holds(self, cube: str) -> bool:
        """Whether the fingers are around a cube and as far apart as its edge."""
        off = self.p - self.cubes[cube]
        near = np.linalg.norm(off[:2]) < 0.4 * self.edge_m and abs(off[2]) < 0.5 * self.edge_m
        return bool(near and 0.8 * self.edge_m < self.width_m < 1.12 * self.edge_m)

    def move(self, to: F64, R_to: F64) -> None:
        """One row towards a pose, with bounded speed and acceleration, slowing down to arrive at rest."""
        self.v = _approach(self.v, to - self.p, _SPEED_M, _SPEED_GAIN_M)
        self.w = _approach(self.w, _turn(self.R_tcp, R_to), _TURN_RAD, _TURN_GAIN_RAD)
        self.p = self.p + self.v
        self.R_tcp = _turned(self.R_tcp, self.w)

    def command(self, opening: float, cube: str) -> None:
        """One row of the fingers moving towards an opening; a cube between them stops them and is then held."""
        closing = opening < self.opening
        blocked = self.edge_m / (2 * PANDA_FINGER.open_value)
        around = np.linalg.norm((self.p - self.cubes[cube])[:2]) < 0.4 * self.edge_m
        low = blocked if closing and around and self.opening >= blocked else 0.0
        self.opening = float(np.clip(opening, self.opening - _FINGER_GAIN, self.opening + _FINGER_GAIN))
        self.opening = max(self.opening, low)


def _approach(rate: F64, remaining: F64, fastest: float, gain: float) -> F64:
    """The next rate towards ``remaining``: along it, below ``fastest``, changed by at most ``gain``, able to stop in time."""
    distance = float(np.linalg.norm(remaining))
    stoppable = np.sqrt(gain * gain / 4 + 2 * gain * distance) - gain / 2  # rows of equal deceleration
    wanted = remaining * (min(fastest, 0.8 * stoppable, distance) / max(distance, 1e-12))
    change = wanted - rate
    size = float(np.linalg.norm(change))
    return rate + change * min(1.0, gain / max(size, 1e-12))


def _gripper_down(yaw_rad: float) -> F64:
    """[3, 3] the hand pointing down, its fingers opening along the direction ``yaw + 90 degrees``."""
    c, s = np.cos(yaw_rad), np.sin(yaw_rad)
    return np.array([[c, s, 0.0], [s, -c, 0.0], [0.0, 0.0, -1.0]])


def _hand_yaw(R: F64) -> float:
    return float(np.arctan2(R[1, 0], R[0, 0]))


class ScriptedBackend(Backend):
    """The scripted expert as a backend: it reaches, picks, places in the bin and stacks the cubes that are named."""

    name = "scripted"
    needs_privileged = True
    requires_images = False

    def infer(self, request: Request) -> ActionChunk:
        """Return rows from the measured state towards the instruction's goal.

        Raises:
            BackendError: The request lacks simulator state or a measured pose, or is for another action space.
            InputError: The instruction names no verb or no colour.
        """
        goal = parse_instruction(request.instruction)
        state = self._state(request, goal)
        world = _believe(state, request)
        assert request.T_base_cosmos is not None  # _state checked it
        T_tcp_cosmos = se3_inverse(state["tcp"]) @ request.T_base_cosmos
        poses = [request.T_base_cosmos]
        gripper: list[float] = []
        for _ in range(request.n_rows):
            gripper.append(_act(world, goal))
            T_base_tcp = np.eye(4)
            T_base_tcp[:3, :3], T_base_tcp[:3, 3] = world.R_tcp, world.p
            poses.append(T_base_tcp @ T_tcp_cosmos)
        rows = encode_chunk(np.stack(poses), np.array(gripper), request.embodiment)
        return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)

    def _state(self, request: Request, goal: Goal) -> Mapping[str, F64]:
        state = request.privileged
        wanted = [*STATE_KEYS, goal.cube, *([goal.onto] if goal.onto else [])]
        missing = [key for key in wanted if state is None or key not in state]
        if missing or state is None:
            raise BackendError(
                f"the scripted expert needs the simulator's state, and {', '.join(missing)} is missing. It works inside "
                "our Robot, or through plan() with Observation.privileged; for a real arm choose a model backend."
            )
        if request.T_base_cosmos is None or request.action_space.name != "midtrain":
            raise BackendError("the scripted expert answers 'midtrain' rows from a measured pose; use robot='panda'.")
        return state


def _believe(state: Mapping[str, F64], request: Request) -> _World:
    fps = request.embodiment.fps or 15.0
    cubes = {name: T for name, T in state.items() if name.startswith("cube_")}
    return _World(
        p=state["tcp"][:3, 3].copy(),
        R_tcp=state["tcp"][:3, :3].copy(),
        v=state["tcp_twist"][:3] / fps,
        w=state["tcp_twist"][3:] / fps,
        opening=request.gripper,
        cubes={name: T[:3, 3].copy() for name, T in cubes.items()},
        yaw={name: _flat_yaw(T[:3, :3]) for name, T in cubes.items()},
        edge_m=float(state["edge_m"]),
        bin=state["bin"],
    )


def _flat_yaw(R: F64) -> float:
    """Yaw of a cube about the vertical, from whichever of its axes lies flattest."""
    axis = R[:, int(np.argmin(np.abs(R[2])))]
    return float(np.arctan2(axis[1], axis[0]))


def _grasp_yaw(world: _World, cube: str) -> float:
    """The hand's yaw that squares the fingers with the cube: of the four, the one nearest to DROID's home (+45 degrees)."""
    quarter = np.pi / 2
    home = np.pi / 4
    return home + (world.yaw[cube] - home + quarter / 2) % quarter - quarter / 2


def _act(world: _World, goal: Goal) -> float:
    """Advance the believed world by one row; returns the commanded open fraction."""
    cube = world.cubes[goal.cube]
    R = _gripper_down(_grasp_yaw(world, goal.cube))
    if goal.verb is Verb.REACH:
        _go_down_on(world, cube, R)
        world.command(1.0, goal.cube)
        return 1.0
    done = _delivered(world, goal)
    if world.holds(goal.cube) and not done:
        world.held_rows += 1
        if world.held_rows <= _SQUEEZE_ROWS and world.p[2] < world.edge_m:
            world.move(world.p, world.R_tcp)
            return 0.0
        return _carry(world, goal)
    if done:
        away = np.array([world.p[0], world.p[1], _CARRY_M + _SLACK_M])
        world.move(away if world.opening > _LET_GO else world.p, world.R_tcp)
        world.command(1.0, goal.cube)
        return 1.0
    at = np.linalg.norm(world.p - cube) < _AT_M and _angle(world.R_tcp, R) < _YAW_RAD
    closing = np.linalg.norm(world.p - cube) < 2 * _AT_M and world.opening < 0.95
    if at or closing:
        world.move(world.p, world.R_tcp)
        world.command(0.0, goal.cube)
        return 0.0 if world.opening > 0.3 else 1.0  # closed on nothing: open again
    _go_down_on(world, cube, R)
    world.command(1.0, goal.cube)
    return 1.0


def _angle(R_a: F64, R_b: F64) -> float:
    return float(np.linalg.norm(_turn(R_a, R_b)))


# Unchecked and unvectorised, for a few hundred calls a chunk; actions.rotations has the general ones.
def _turn(R_from: F64, R_to: F64) -> F64:
    """[3] rotation vector, world axes, that turns one orientation into another; half turns go about the vertical."""
    R = R_to @ R_from.T
    axis = np.array([R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1]]) / 2
    sine, cosine = float(np.linalg.norm(axis)), float(np.trace(R) - 1) / 2
    if sine < 1e-9:
        return np.array([0.0, 0.0, 0.0 if cosine > 0 else np.pi])
    return axis * (np.arctan2(sine, cosine) / sine)


def _turned(R: F64, w: F64) -> F64:
    """[3, 3] an orientation turned by a rotation vector, world axes (Rodrigues)."""
    angle = float(np.linalg.norm(w))
    if angle < 1e-12:
        return R
    x, y, z = w / angle
    K = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return R + np.sin(angle) * (K @ R) + (1 - np.cos(angle)) * (K @ K @ R)


def _go_down_on(world: _World, target: F64, R: F64) -> None:
    """Over the target at a safe height first, then straight down."""
    aside = float(np.linalg.norm((target - world.p)[:2]))
    hover = target[2] + _HOVER_M
    square = _angle(world.R_tcp, R) < 2 * _YAW_RAD
    if aside < _ABOVE_M and square:
        world.move(target, R)
    elif world.p[2] < hover - _SLACK_M and aside > _ABOVE_M:
        world.move(np.array([world.p[0], world.p[1], hover]), world.R_tcp)
    else:
        world.move(np.array([target[0], target[1], hover]), R)


def _delivered(world: _World, goal: Goal) -> bool:
    """Whether the cube is where the instruction wants it, so that only letting go is left."""
    cube = world.cubes[goal.cube]
    if goal.verb is Verb.PLACE:
        return bool(np.linalg.norm((cube - world.bin)[:2]) < _IN_BIN_M and cube[2] < world.bin[2])
    if goal.verb is Verb.STACK and goal.onto is not None:
        off = cube - world.cubes[goal.onto]
        aside, above = np.linalg.norm(off[:2]) / world.edge_m, off[2] / world.edge_m
        return bool(aside < _STACKED_ASIDE and abs(above - 1) < _STACKED_HEIGHT)
    return False


def _carry(world: _World, goal: Goal) -> float:
    """One row with the cube in hand: up, across, down. The cube goes along."""
    before = world.p
    if goal.verb is Verb.PICK:
        target = np.array([world.p[0], world.p[1], _CARRY_M])
    else:
        place = world.bin.copy() if goal.verb is Verb.PLACE else world.cubes[goal.onto or goal.cube].copy()
        place[2] = world.bin[2] - _BELOW_RIM_M if goal.verb is Verb.PLACE else place[2] + _STACK_GAP * world.edge_m
        offset = world.p - world.cubes[goal.cube]  # the cube goes to the place, wherever the fingers hold it
        place = place + offset
        aside = float(np.linalg.norm((place - world.p)[:2]))
        if aside < (_OVER_BIN_M if goal.verb is Verb.PLACE else _OVER_CUBE_M):
            target = place
        elif world.p[2] < _CARRY_M - _SLACK_M and aside > _SLACK_M:
            target = np.array([before[0], before[1], _CARRY_M])
        else:
            target = np.array([place[0], place[1], _CARRY_M])
    world.move(target, _gripper_down(_hand_yaw(world.R_tcp)))
    world.cubes[goal.cube] = world.cubes[goal.cube] + (world.p - before)
    return 0.0
