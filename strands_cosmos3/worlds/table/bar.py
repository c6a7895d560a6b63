"""Success conditions of the tasks with a bar: its level lift by two hands, and its hand-over.

Heights alone are fooled: one hand lifts an end, or the bar lies on the back of a hand; it may have
been put down, thrown, or put there by hand before the other hand held it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import radians

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.worlds.table.hands import length
from strands_cosmos3.worlds.table.scene import BAR, TableScene

LIFT_M = 0.10
TILT_RAD = radians(5.0)
TURN_RAD = radians(15.0)
PRESS_N = 0.3  # of each finger
SPEED_M_S = 0.05
REST_M_S = 0.010
REST_RAD_S = 0.05
SLIP_S = 0.1  # a grip may be interrupted for this long
CLEAR_M = 0.02  # the bar is off the table
TAKEN_WITHIN_M = 0.05  # hands may move the bar this far before all fingers hold it
# further in a tick than its speed explains: the bar was moved by hand
_JUMP_M_S = 1.0
_JUMP_M = 0.002
AWAY_M = 0.10
OPEN = 0.75  # of the giver's fingers
BOTH_S = 0.2
_CORNERS = np.array(list(product((-0.5, 0.5), repeat=3)))


@dataclass(frozen=True)
class BodyState:
    """Position [3] and speed of a body now."""

    time_s: float
    position_m: F64
    speed_m_s: float

    def jumped_from(self, before: BodyState) -> bool:
        """Whether it moved further than its speed explains: then it was moved by hand."""
        explained = max(before.speed_m_s, self.speed_m_s) + _JUMP_M_S
        moved_m = length(self.position_m - before.position_m)
        return bool(moved_m > explained * (self.time_s - before.time_s) + _JUMP_M)


@dataclass(frozen=True, kw_only=True)
class BarState(BodyState):
    """A bar now.

    Args:
        axis: Its long axis [3] in the world.
        lowest_m: Height of its lowest corner above the table.
        turning_rad_s: Its angular speed.
        gripped_by: Names of the limbs that hold it with all of their fingers.
        touched: Whether a finger touches it; touched_by_others: whether anything but a finger does.
    """

    axis: F64
    lowest_m: float
    turning_rad_s: float
    gripped_by: frozenset[str]
    touched: bool
    touched_by_others: bool

    @property
    def tilt_rad(self) -> float:
        """Angle between the bar and the table."""
        return float(np.arcsin(np.clip(abs(self.axis[2]), 0.0, 1.0)))

    @property
    def lies(self) -> bool:
        """Whether it lies at rest, and no finger touches it."""
        resting = (
            self.speed_m_s < REST_M_S
            and self.turning_rad_s < REST_RAD_S
            and self.tilt_rad < TILT_RAD
        )
        return resting and self.touched_by_others and not self.touched

    @property
    def is_up(self) -> bool:
        """Whether it is held high and still."""
        return self.lowest_m > LIFT_M and self.speed_m_s < SPEED_M_S

    def turned_rad(self, before: BarState) -> float:
        """Angle about the vertical since another state; an end is not taken for the other."""
        x, y = self.axis[:2]
        u, v = before.axis[:2]
        return float(abs(np.arctan2(u * y - v * x, u * x + v * y)))


def bar_state(scene: TableScene, data: mujoco.MjData) -> BarState:
    """Return the state of a scene's bar, as of the last physics step."""
    assert scene.bar is not None  # the judge refuses a scene without one
    body = scene.bodies[BAR].id
    dof = scene.bodies[BAR].dof
    R = data.xmat[body].reshape(3, 3)
    position = data.xpos[body].copy()
    forces = scene.forces_on(data, body)
    fingers = {body for limb in scene.limbs.values() for body in limb.finger_bodies}
    velocity = data.qvel[dof : dof + 6]
    return BarState(
        time_s=float(data.time),
        position_m=position,
        axis=R[:, 1].copy(),
        lowest_m=float((position + (_CORNERS * scene.bar.size_m) @ R.T)[:, 2].min()),
        speed_m_s=length(velocity[:3]),
        turning_rad_s=length(velocity[3:]),
        gripped_by=frozenset(
            name for name, limb in scene.limbs.items() if limb.grips(data, forces, PRESS_N)
        ),
        touched=bool(fingers & set(forces)),
        touched_by_others=bool(set(forces) - fingers),
    )


class _BarHistory:
    """What happened to a bar so far.

    Attributes:
        dropped: Whether it has been dropped; then it never counts again.
        lay: Where it last lay at rest with no finger on it.
        taken: Whether the right hands took it from there, and it was held since, with short
            interruptions at most.
        now: Its state now.
    """

    def __init__(self, scene: TableScene):
        self.scene = scene
        self.dropped = self.taken = False
        self.lay: BarState | None = None
        self.now: BarState | None = None

    def note(self, now: BarState) -> bool:
        """Add a state; return whether the bar was moved by hand, so that its history starts
        again.
        """
        jumped = self.now is not None and now.jumped_from(self.now)
        self.now = now
        if jumped:
            self.lay = None
            self.taken = False
        if now.lies:
            self.lay = now
        return jumped

    def is_near_lay(self, now: BarState) -> bool:
        """Whether it is about where it lay."""
        if self.lay is None:
            return False
        return length(now.position_m - self.lay.position_m) < TAKEN_WITHIN_M


class BarMonitor(_BarHistory):
    """Whether a bar is lifted level by all hands now.

    It is, while its lowest corner is more than 100 mm above the table, it is tilted by less than 5
    and turned by less than 15 degrees from where it lay, every hand's fingers press on it from
    opposite sides with more than 0.3 N each, nothing else touches it, and it is slower than 50
    mm/s. The hands must have taken it from where it lay. Once it has been dropped, it never counts
    as lifted again.
    """

    _held: BarState | None = None

    def update(self, data: mujoco.MjData) -> bool:
        """Add the present state; return whether the condition holds."""
        return self.add(bar_state(self.scene, data))

    def add(self, now: BarState) -> bool:
        """As :meth:`update`, of a state."""
        if self.note(now):
            self._held = None
        held = now.gripped_by == set(self.scene.limbs)
        if held:
            self._held = now
            self.taken |= self.is_near_lay(now)
        elif self._held is not None and now.time_s - self._held.time_s > SLIP_S:
            self.dropped |= self.taken and self._held.lowest_m > CLEAR_M
            self.taken = False
            self._held = None
        level = (
            self.lay is not None and now.tilt_rad < TILT_RAD and now.turned_rad(self.lay) < TURN_RAD
        )
        counts = held and self.taken and not now.touched_by_others and not self.dropped
        return level and now.is_up and counts


def withdrawn(scene: TableScene, data: mujoco.MjData, name: str) -> bool:
    """Whether a limb's fingers are open, and its tool centre point is more than 100 mm away from
    the bar.
    """
    assert scene.bar is not None  # the judge refuses a scene without one
    limb = scene.limbs[name]
    body = scene.bodies[BAR].id
    R = data.xmat[body].reshape(3, 3)
    position = data.xpos[body]
    beyond = np.abs((data.site_xpos[limb.tcp_site] - position) @ R) - np.array(scene.bar.size_m) / 2
    opening = np.asarray(limb.gripper.opening.to_fraction(data.qpos[limb.finger_qpos]))
    return length(np.maximum(beyond, 0.0)) > AWAY_M and bool(opening.min() > OPEN)


class HandOverMonitor(_BarHistory):
    """Whether the hand ``taker`` has been given a bar by the other, and holds it alone now.

    It has, if the other hand alone took the bar from where it lay, and both held it for 0.2 s
    without a break more than 100 mm above the table, with nothing else touching it. From then on
    the taker must hold it, with interruptions of 0.1 s at most. It holds it alone, while only its
    fingers press on the bar, its lowest corner is more than 100 mm above the table, nothing else
    touches it, it is slower than 50 mm/s, and the giver's fingers are open and 100 mm away. Once
    the bar has been dropped, it never counts again.
    """

    def __init__(self, scene: TableScene, taker: str):
        super().__init__(scene)
        if taker not in scene.limbs or len(scene.limbs) != 2:
            raise ConfigError(
                f"handing over needs two arms, one of them {taker!r}; the scene "
                f"has {sorted(scene.limbs)}."
            )
        self.taker = taker
        (self.giver,) = (name for name in scene.limbs if name != taker)
        self.handed = False  # both held it in mid-air, and the taker holds it since
        self._held_s = self._taker_held_s = -np.inf
        self._both_since_s: float | None = None
        self._cleared = False  # the bar was off the table when it was last held

    def update(self, data: mujoco.MjData) -> bool:
        """Add the present state; return whether the condition holds."""
        return self.add(bar_state(self.scene, data), withdrawn(self.scene, data, self.giver))

    def add(self, now: BarState, withdrawn: bool) -> bool:
        """As :meth:`update`, of a state; ``withdrawn`` as :func:`withdrawn` says of the giver."""
        self.note(now)
        self._follow_grips(now)
        self._follow_both(now)
        alone = now.gripped_by == {self.taker} and not now.touched_by_others
        return self.handed and alone and now.is_up and withdrawn and not self.dropped

    def _follow_grips(self, now: BarState) -> None:
        if now.gripped_by:
            self._held_s = now.time_s
            self._cleared = now.lowest_m > CLEAR_M
        elif now.time_s - self._held_s > SLIP_S:
            self.dropped |= self.taken and self._cleared
            self.taken = False
        self.taken |= self.is_near_lay(now) and now.gripped_by == {self.giver}

    def _follow_both(self, now: BarState) -> None:
        both = (
            self.taken
            and len(now.gripped_by) == 2
            and now.lowest_m > LIFT_M
            and not now.touched_by_others
        )
        since = now.time_s if self._both_since_s is None else self._both_since_s
        self._both_since_s = since if both else None
        if self.taker in now.gripped_by:
            self._taker_held_s = now.time_s
        held = self.taken and now.time_s - self._taker_held_s <= SLIP_S
        self.handed = held and (self.handed or (both and now.time_s - since >= BOTH_S - 1e-9))
