"""Limits of mink's quadratic program that keep named geometries apart: every pair is watched, or
refused by name.

mink itself leaves pairs out, without a word: those of a body and its parent, for which the world
counts as the parent of an arm's first moving link, and those whose ``contype`` and ``conaffinity``
do not meet.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product

import mink
import mujoco

from strands_cosmos3.checks import finite_array
from strands_cosmos3.control.collision_check import anywhere
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.model import joints_to

DETECTION_M = 0.15
"""Distance beyond the one to keep from which on a pair counts: about what one joint moves the hand
in a control step, so that no iteration crosses it unnoticed.
"""
_FARTHEST_M = 1e3  # MuJoCo returns the largest distance asked for where it knows none
_UNMEASURED = "MuJoCo has no distance between geoms of such types"


def avoidance_limits(
    model: mujoco.MjModel,
    joints: list[int],
    groups: Sequence[tuple[Sequence[int], Sequence[int]]],
    distance_m: float,
) -> list[mink.Limit]:
    """Return limits that keep every geom of a group ``distance_m`` from every geom of its partner.

    Args:
        model: The model.
        joints: Ids of the joints that move; all others keep still.
        groups: Pairs of groups of geoms, by id. A group that is paired with itself means its links
            among each other; those that touch wherever the arm is, as neighbours do, are left out.
        distance_m: The distance to keep.

    Raises:
        NonFiniteError, ShapeError: The distance is not a finite number.
        ConfigError: Two groups have no two geoms, or a pair cannot be kept apart: no joint moves
            one against the other, MuJoCo has no distance between such shapes, or they are closer
            wherever the arm is.
    """
    least_m = float(finite_array(distance_m, "min_distance_m", ()))
    probes = list(map(copy.copy, anywhere(model, joints)))
    watched: set[tuple[int, int]] = set()
    for first, second in groups:
        pairs = [(a, b) for a, b in product(first, second) if a != b]
        faults = [_fault(model, joints, probes, pair, least_m) for pair in pairs]
        for pair, fault in zip(pairs, faults, strict=True):
            if fault == _UNMEASURED or (fault is not None and {*first} != {*second}):
                names = " and ".join(repr(model.geom(geom).name or geom) for geom in pair)
                raise ConfigError(
                    f"avoid_collisions cannot keep the geoms {names} {least_m:g} m apart: {fault}. "
                    "Leave this pair out, or name other geoms."
                )
            if fault is None and not _fixed(model, pair):
                watched.add((min(pair), max(pair)))
        if not pairs:
            raise ConfigError(
                f"avoid_collisions pairs geoms {list(first)} with geoms {list(second)}, by id, and "
                "there are no two geoms among them; name two that are to be kept apart."
            )
    by_mink = _limit(model, sorted(watched), least_m)
    added = _limit(model, [], least_m)
    added.broadphase = False  # it was prepared without pairs
    added.geom_id_pairs = sorted(watched.difference(by_mink.geom_id_pairs))  # pyright: ignore
    added.max_num_contacts = len(added.geom_id_pairs)
    return [by_mink, added]


def _limit(
    model: mujoco.MjModel, pairs: list[tuple[int, int]], least_m: float
) -> mink.CollisionAvoidanceLimit:
    return mink.CollisionAvoidanceLimit(
        model,
        [([first], [second]) for first, second in pairs],
        minimum_distance_from_collisions=least_m,
        collision_detection_distance=least_m + DETECTION_M,
    )


def _fixed(model: mujoco.MjModel, pair: tuple[int, int]) -> bool:
    """Whether nothing moves one of two geoms against the other."""
    first, second = model.body_weldid[model.geom_bodyid[list(pair)]].tolist()
    return first == second


def _fault(
    model: mujoco.MjModel,
    joints: list[int],
    probes: list[mujoco.MjData],
    pair: tuple[int, int],
    least_m: float,
) -> str | None:
    """Why joints cannot keep two geoms apart; None if they can, or the two always are."""
    first, second = model.geom_bodyid[list(pair)].tolist()
    apart_m = max(mujoco.mj_geomDistance(model, at, *pair, _FARTHEST_M, None) for at in probes)
    if apart_m == _FARTHEST_M:
        return _UNMEASURED
    between = {*joints_to(model, first)} ^ {*joints_to(model, second)}
    if not between.intersection(joints) and not _fixed(model, pair):
        return "none of the arm's joints moves one against the other"
    return None if apart_m >= least_m else "they are closer wherever the arm is"
