"""Handing a bar from one hand to the other: the task's success condition.

That the other hand holds it at the end is not enough: it may have been put down, thrown, or put
there by hand in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mujoco
import numpy as np

from strands_cosmos3.checks import instance_of, typed
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.sim.scene import Scene
from strands_cosmos3.worlds.table.bar import (
    CLEAR_M,
    LIFT_M,
    SLIP_S,
    SPEED_M_S,
    TAKEN_WITHIN_M,
    BarState,
    bar_state,
    jumped,
)

__all__ = ["HandOverMonitor", "withdrawn"]

AWAY_M = 0.10
OPEN = 0.75  # of the giver's fingers
BOTH_S = 0.2


@typed()
def withdrawn(scene: Scene, data: mujoco.MjData, name: str) -> bool:
    """Whether a limb's fingers are open, and its tool centre point is more than 100 mm away from
    the bar.

    ConfigError if the scene has no bar or no such limb.
    """
    bar, limb = scene.bar, scene.limbs.get(name)
    if bar is None or limb is None:
        raise ConfigError(
            f"handing over needs a bar and the limb {name!r}; the scene has {sorted(scene.limbs)}."
        )
    R, position = data.xmat[scene.bar_body].reshape(3, 3), data.xpos[scene.bar_body]
    beyond = np.abs((data.site_xpos[limb.tcp_site] - position) @ R) - np.array(bar.size_m) / 2
    opening = np.asarray(limb.gripper.opening.to_fraction(data.qpos[limb.finger_qpos]))
    return bool(np.linalg.norm(np.maximum(beyond, 0.0)) > AWAY_M and opening.min() > OPEN)


@dataclass
class HandOverMonitor:
    """What happened to the bar so far, and whether the hand ``taker`` has been given it by the
    other, and holds it alone now.

    It has, if the other hand alone took the bar from where it lay, and both held it for 0.2 s
    without a break more than 100 mm above the table, with nothing else touching it. From then on
    the taker must hold it, with interruptions of 0.1 s at most. It holds it alone, while only its
    fingers press on the bar, its lowest corner is more than 100 mm above the table, nothing else
    touches it, it is slower than 50 mm/s, and the giver's fingers are open and 100 mm away. Once
    the bar has been dropped, it never counts again.
    """

    scene: Scene
    taker: str
    dropped: bool = False
    lay: BarState | None = None  # where it last lay at rest with no finger on it
    taken: bool = False  # by the giver alone, and held by a hand since
    handed: bool = False  # both held it in mid-air, and the taker holds it since
    now: BarState | None = field(default=None)
    _held_s: float = -np.inf
    _taker_held_s: float = -np.inf
    _both_since_s: float | None = None
    _cleared: bool = False  # the bar was off the table when it was last held

    def __post_init__(self) -> None:
        instance_of(self.scene, Scene, "scene")
        instance_of(self.taker, str, "taker")
        if self.taker not in self.scene.limbs or len(self.scene.limbs) != 2:
            raise ConfigError(
                f"handing over needs two arms, one of them {self.taker!r}; the scene has "
                f"{sorted(self.scene.limbs)}."
            )
        (self.giver,) = (name for name in self.scene.limbs if name != self.taker)

    def update(self, data: mujoco.MjData) -> bool:
        """Add the present state; return whether the condition holds."""
        return self.add(bar_state(self.scene, data), withdrawn(self.scene, data, self.giver))

    def add(self, now: BarState, withdrawn: bool) -> bool:
        """As :meth:`update`, of a state; ``withdrawn`` as :func:`withdrawn` says of the giver."""
        before, self.now = self.now, instance_of(now, BarState, "now")
        if before is not None and jumped(before, now):
            self.lay, self.taken = None, False
        if now.lies:
            self.lay = now
        self._follow_grips(now)
        self._follow_both(now)
        lifted = now.lowest_m > LIFT_M and now.speed_m_s < SPEED_M_S
        alone = now.gripped_by == {self.taker} and not now.touched_by_others
        return self.handed and alone and lifted and withdrawn and not self.dropped

    def _follow_grips(self, now: BarState) -> None:
        if now.gripped_by:
            self._held_s, self._cleared = now.time_s, now.lowest_m > CLEAR_M
        elif now.time_s - self._held_s > SLIP_S:
            self.dropped |= self.taken and self._cleared
            self.taken = False
        near = (
            self.lay is not None
            and np.linalg.norm(now.position_m - self.lay.position_m) < TAKEN_WITHIN_M
        )
        self.taken |= bool(near and now.gripped_by == {self.giver})

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
