"""The level lift of a bar by two hands: what holds the bar, and the task's success condition.

A height alone is fooled: one hand lifts an end, or the bar lies on the back of a hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.sim.scene import Scene, SceneLimb
from strands_cosmos3.worlds.table.handling import forces_on

__all__ = ["BarMonitor", "BarState", "bar_state", "jumped"]

LIFT_M = 0.10
TILT_RAD, TURN_RAD = float(np.deg2rad(5.0)), float(np.deg2rad(15.0))
PRESS_N = 0.3  # of each finger
SPEED_M_S = 0.05
REST_M_S, REST_RAD_S = 0.010, 0.05
SLIP_S = 0.1  # a grip may be interrupted for this long
CLEAR_M = 0.02  # the bar is off the table
TAKEN_WITHIN_M = 0.05  # hands may move the bar this far before all fingers hold it
# further in a tick than its speed explains: the bar was moved by hand
_JUMP_M_S, _JUMP_M = 1.0, 0.002
_CORNERS = np.array(np.meshgrid((-0.5, 0.5), (-0.5, 0.5), (-0.5, 0.5))).reshape(3, 8).T


@dataclass(frozen=True)
class BarState:
    """A bar now.

    Args:
        position_m, axis: Its centre and its long axis, [3] each in the world.
        lowest_m: Height of its lowest corner above the table.
        speed_m_s, turning_rad_s: Its speeds.
        gripped_by: Names of the limbs that hold it with all of their fingers.
        touched: Whether a finger touches it; touched_by_others: whether anything but a finger does.
    """

    time_s: float
    position_m: F64
    axis: F64
    lowest_m: float
    speed_m_s: float
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

    def turned_rad(self, before: BarState) -> float:
        """Angle about the vertical since another state; an end is not taken for the other."""
        (x, y), (u, v) = self.axis[:2], before.axis[:2]
        return float(abs(np.arctan2(u * y - v * x, u * x + v * y)))


def bar_state(scene: Scene, data: mujoco.MjData) -> BarState:
    """Return the bar's state, as of the last physics step; ConfigError if the scene has none."""
    bar = instance_of(scene, Scene, "scene").bar
    if bar is None:
        raise ConfigError(
            "this scene has no bar; use a robot of two arms, e.g. Robot('dual_panda'), or "
            "Scene(bar=Bar())."
        )
    R, position = data.xmat[scene.bar_body].reshape(3, 3), data.xpos[scene.bar_body].copy()
    forces = forces_on(scene, data, scene.bar_body)
    fingers = {body for limb in scene.limbs.values() for body in limb.finger_bodies}
    velocity = data.qvel[scene.bar_dof : scene.bar_dof + 6]
    return BarState(
        time_s=float(data.time),
        position_m=position,
        axis=R[:, 1].copy(),
        lowest_m=float((position + (_CORNERS * bar.size_m) @ R.T)[:, 2].min()),
        speed_m_s=float(np.linalg.norm(velocity[:3])),
        turning_rad_s=float(np.linalg.norm(velocity[3:])),
        gripped_by=frozenset(
            name for name, limb in scene.limbs.items() if _grips(data, limb, forces)
        ),
        touched=bool(fingers & set(forces)),
        touched_by_others=bool(set(forces) - fingers),
    )


def _grips(data: mujoco.MjData, limb: SceneLimb, forces: dict[int, F64]) -> bool:
    """Whether each finger presses on the bar against its opening direction."""
    fingers = enumerate(limb.finger_bodies)
    return all(
        -limb.opening_direction(data, i) @ forces.get(body, np.zeros(3)) > PRESS_N
        for i, body in fingers
    )


@dataclass
class BarMonitor:
    """What happened to the bar so far, and whether it is lifted level by all hands now.

    It is, while its lowest corner is more than 100 mm above the table, it is tilted by less than 5
    and turned by less than 15 degrees from where it lay, every hand's fingers press on it from
    opposite sides with more than 0.3 N each, nothing else touches it, and it is slower than 50
    mm/s. The hands must have taken it from where it lay. Once it has been dropped, it never counts
    as lifted again.
    """

    scene: Scene
    dropped: bool = False
    lay: BarState | None = None  # where it last lay at rest with no finger on it
    taken: bool = False  # held by every hand since, with short interruptions at most
    now: BarState | None = field(default=None)
    _held: BarState | None = None

    def update(self, data: mujoco.MjData) -> bool:
        """Add the present state; return whether the condition holds."""
        return self.add(bar_state(self.scene, data))

    def add(self, now: BarState) -> bool:
        """As :meth:`update`, of a state."""
        before, self.now = self.now, instance_of(now, BarState, "now")
        if before is not None and jumped(before, now):
            self.lay, self.taken, self._held = None, False, None
        if now.lies:
            self.lay = now
        held = now.gripped_by == set(self.scene.limbs)
        if held:
            self._held = now
            if (
                self.lay is not None
                and np.linalg.norm(now.position_m - self.lay.position_m) < TAKEN_WITHIN_M
            ):
                self.taken = True
        elif self._held is not None and now.time_s - self._held.time_s > SLIP_S:
            self.dropped |= self.taken and self._held.lowest_m > CLEAR_M
            self.taken, self._held = False, None
        level = (
            self.lay is not None and now.tilt_rad < TILT_RAD and now.turned_rad(self.lay) < TURN_RAD
        )
        lifted = now.lowest_m > LIFT_M and now.speed_m_s < SPEED_M_S
        return (
            level
            and lifted
            and held
            and self.taken
            and not now.touched_by_others
            and not self.dropped
        )


@typed()
def jumped(before: BarState, now: BarState) -> bool:
    """Whether the bar moved further than its speed explains."""
    explained = max(before.speed_m_s, now.speed_m_s) + _JUMP_M_S
    return bool(
        np.linalg.norm(now.position_m - before.position_m)
        > explained * (now.time_s - before.time_s) + _JUMP_M
    )
