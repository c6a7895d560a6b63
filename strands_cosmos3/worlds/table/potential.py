"""How far a task with cubes has come: a potential, whose differences reward a policy.

Before the grasp it falls with the hand's way to the goal's cube, and with every push that moves a
cube; so neither a distance that closes because the cube is shoved nor a detour pays. A grasp adds
1, lifting up to 1 more, and carrying to the target up to 2; over the target, lowering costs
nothing. What was delivered and let go of has the highest value.
"""

from __future__ import annotations

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.worlds.table.grammar import Goal, Verb
from strands_cosmos3.worlds.table.hands import length
from strands_cosmos3.worlds.table.scene import TableScene
from strands_cosmos3.worlds.table.tasks import LIFT_M, CubeState, cube_state

_WAY_M = 0.10  # of the hand to the cube that counts 1
_ASIDE = 2.0  # what a horizontal metre counts in terms of a vertical one: align, then descend
_PUSH_M = 0.05  # of a cube that counts 1
_CARRY_M = 0.6  # longest way to a target
_DELIVERED = 5.0
POTENTIAL_VERBS = (Verb.REACH, Verb.PICK, Verb.PLACE, Verb.STACK)
"""What :func:`cube_potential` knows; another verb needs a target of its own in ``_way_m``."""


def cube_potential(scene: TableScene, data: mujoco.MjData, goal: Goal, lay: Layout) -> float:
    """Return the potential of a goal; ``lay`` is where the cubes lay when the episode began."""
    cube = cube_state(scene, data, goal.cube)
    pushed_m = {
        name: length(data.xpos[scene.bodies[name].id][:2] - xy_m)
        for name, xy_m in zip(lay.names, lay.xy_m, strict=True)
    }
    own_m = pushed_m.pop(goal.cube)
    others = -sum(pushed_m.values()) / _PUSH_M
    if _delivered(scene, data, goal, cube):
        return _DELIVERED + others
    if cube.gripped and goal.verb is not Verb.REACH:
        half_m = scene.cubes[goal.cube].edge_m / 2
        lifted = float(np.clip((cube.position_m[2] - half_m) / LIFT_M, 0, 1))
        way_m = _way_m(scene, data, goal, cube)
        arrived = goal.verb is Verb.PLACE and scene.bin.surrounds(cube.position_m)
        if arrived or way_m < half_m:
            lifted = 1.0
        return 1.0 + lifted + 2.0 * (1.0 - min(way_m / _CARRY_M, 1.0)) + others
    off = data.site_xpos[scene.only.tcp_site] - cube.position_m
    way_m = length(off * (_ASIDE, _ASIDE, 1.0))
    return others - way_m / _WAY_M - own_m / _PUSH_M


def _delivered(scene: TableScene, data: mujoco.MjData, goal: Goal, cube: CubeState) -> bool:
    """Return whether the cube lies where it was to be brought, and the hand has let go."""
    if cube.robot_touches:
        return False
    if goal.verb is Verb.PLACE:
        return scene.bin.contains(cube.position_m)
    if goal.onto is None:
        return False
    base = scene.bodies[goal.onto].id
    higher_m = cube.position_m[2] - data.xpos[base][2]
    lies_above = higher_m > scene.cubes[goal.cube].edge_m / 2  # one pushed against it is level
    return base in cube.force_n and bool(lies_above)


def _way_m(scene: TableScene, data: mujoco.MjData, goal: Goal, cube: CubeState) -> float:
    """Return the horizontal way of a held cube to its target; infinite where there is none."""
    if goal.verb is Verb.PICK:
        return np.inf
    onto = goal.onto
    target_m: F64 = (
        np.array(scene.bin.center_m) if onto is None else data.xpos[scene.bodies[onto].id][:2]
    )
    return length(cube.position_m[:2] - target_m)
