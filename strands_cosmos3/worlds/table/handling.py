"""How a cube came to be where it is: the forces on it now, and where it lay, was gripped and was
released.

The judges of :mod:`.tasks` need it: a cube that was thrown or put there by hand looks the same at
the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.sim.scene import Scene

__all__ = ["CubeHistory", "CubeState", "cube_state", "forces_on"]

REACH_M = 0.030
REST_M_S = 0.010
NUDGE_M = 0.030
"""Distance that closing fingers may push a cube from where it lay before both of them hold it."""
_PRESS_N = 0.1  # of each finger
_SUPPORT = 0.5  # share of its weight from which a cube is supported
_SLOW_M_S = 0.05
_SLIP_S = 0.1  # a grip may be interrupted for this long
# further in a tick than its speed explains: a cube was moved by hand
_JUMP_M_S, _JUMP_M = 1.0, 0.002

_UP = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True)
class CubeState:
    """A cube now; ``force_n`` is the force [3] on it, in the world, by the body that touches it."""

    time_s: float
    position_m: F64
    speed_m_s: float
    force_n: dict[int, F64]
    support_n: float  # upward force of everything but the robot
    supported: bool
    gripped: bool  # both fingers press on it from opposite sides
    robot_touches: bool


def cube_state(scene: Scene, data: mujoco.MjData, cube: str) -> CubeState:
    """Return a cube's state, as of the last physics step; UnknownNameError if the scene has no
    such cube.
    """
    instance_of(data, mujoco.MjData, "data")
    if instance_of(cube, str, "cube") not in instance_of(scene, Scene, "scene").cubes:
        raise UnknownNameError("cube", cube, scene.cubes)
    model, body, dof = scene.model, scene.cube_body[cube], scene.cube_dof[cube]
    forces = forces_on(scene, data, body)
    robot = {other for other in forces if int(model.body_rootid[other]) in scene.robot_roots}
    support_n = float(sum(forces[other] @ _UP for other in forces if other not in robot))
    weight_n = model.body_mass[body] * float(np.linalg.norm(model.opt.gravity))
    return CubeState(
        time_s=float(data.time),
        position_m=data.xpos[body].copy(),
        speed_m_s=float(np.linalg.norm(data.qvel[dof : dof + 3])),
        force_n=forces,
        support_n=support_n,
        supported=support_n >= _SUPPORT * weight_n,
        gripped=all(
            _presses(scene, data, finger, forces) for finger in range(len(scene.finger_bodies))
        ),
        robot_touches=bool(robot),
    )


@typed()
def forces_on(scene: Scene, data: mujoco.MjData, body: int) -> dict[int, F64]:
    """Return the force [3] on a body, in the world, by each body that touches it."""
    bodies = scene.model.geom_bodyid[data.contact.geom]  # [contacts, 2]
    forces: dict[int, F64] = {}
    wrench = np.zeros(6)
    for i in np.flatnonzero((bodies == body).any(axis=1)):
        mujoco.mj_contactForce(scene.model, data, int(i), wrench)
        # MuJoCo's normal points from the first geom to the second
        on_second = wrench[:3] @ data.contact.frame[i].reshape(3, 3)
        first, second = bodies[i].tolist()
        other, force = (first, on_second) if second == body else (second, -on_second)
        forces[other] = forces.get(other, np.zeros(3)) + force
    return forces


def _presses(scene: Scene, data: mujoco.MjData, finger: int, forces: dict[int, F64]) -> bool:
    """Whether a finger presses on the cube against its opening direction."""
    force = forces.get(scene.finger_bodies[finger])
    return force is not None and bool(
        -scene.only.opening_direction(data, finger) @ force > _PRESS_N
    )


def touched_only_by(state: CubeState, bodies: Iterable[int]) -> bool:
    """Whether nothing else touches the cube."""
    return set(state.force_n) <= set(bodies)


@dataclass
class CubeHistory:
    """What happened to a cube in an episode so far; call :meth:`update` at every tick."""

    now: CubeState | None = None
    lay_m: F64 | None = None  # where it last lay on something, not gripped
    alone_m: F64 | None = None  # where it last lay at rest with the hand out of reach
    taken_m: F64 | None = None  # where it lay when both fingers took it
    base_m: F64 | None = None  # where the cube to stack it on was then
    held: bool = False  # gripped since, with short interruptions at most
    released: CubeState | None = field(default=None)  # the last moment of the latest grip
    _gripped: CubeState | None = None

    def update(self, now: CubeState, tcp_m: F64, base_m: F64 | None = None) -> None:
        """Add the present state; ``tcp_m`` and ``base_m`` [3] are where the tool centre point
        and the other cube are.
        """
        before, self.now = self.now, now
        if before is not None and _jumped(before, now):
            self.lay_m = self.alone_m = self.taken_m = self.base_m = self.released = (
                self._gripped
            ) = None
            self.held = False
        if now.gripped:
            if (
                not self.held
                and self.lay_m is not None
                and np.linalg.norm(now.position_m - self.lay_m) < NUDGE_M
            ):
                self.held, self.taken_m, self.base_m, self.released = True, self.lay_m, base_m, None
            self._gripped = now
        elif (
            self.held and self._gripped is not None and now.time_s - self._gripped.time_s > _SLIP_S
        ):
            self.held, self.released = False, self._gripped
        if now.supported and not now.gripped and now.speed_m_s < _SLOW_M_S:
            self.lay_m = now.position_m
            if now.speed_m_s < REST_M_S and np.linalg.norm(tcp_m - now.position_m) >= REACH_M:
                self.alone_m = now.position_m


def _jumped(before: CubeState, now: CubeState) -> bool:
    dt_s = now.time_s - before.time_s
    explained = max(before.speed_m_s, now.speed_m_s) + _JUMP_M_S
    return bool(np.linalg.norm(now.position_m - before.position_m) > explained * dt_s + _JUMP_M)
