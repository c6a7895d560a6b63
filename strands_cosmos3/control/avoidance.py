"""Limits of mink's quadratic program that keep named geometries apart: every pair is watched, or
refused by name.

mink itself leaves pairs out, without a word: those of a body and its parent, for which the world
counts as the parent of an arm's first moving link, and those whose ``contype`` and ``conaffinity``
do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NoReturn

import mink
import mujoco
import numpy as np

from strands_cosmos3.checks import finite_array
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.model import data_at, joints_to

DETECTION_M = 0.15
"""Distance beyond the one to keep from which on a pair counts: about what one joint moves the hand
in a control step, so that no iteration crosses it unnoticed.
"""
_PROBE_M = 1e3  # MuJoCo returns the largest distance asked for where it knows none
_CONFIGURATIONS = 32  # in which two links must be too close to be so wherever the arm is

_Pair = tuple[int, int]


def avoidance_limits(
    model: mujoco.MjModel,
    joints: Sequence[int],
    groups: Sequence[tuple[Sequence[int], Sequence[int]]],
    distance_m: float,
) -> list[mink.Limit]:
    """Return limits that keep every geom of a group ``distance_m`` from every geom of its partner.

    Args:
        model: The model.
        joints: Ids of the joints that move; all others keep still.
        groups: Pairs of groups of geoms, by id. A group that is paired with itself means its links
            among each other; links that touch wherever the arm is, as neighbours do, are then left
            out.
        distance_m: The distance to keep.

    Raises:
        NonFiniteError, ShapeError: The distance is not a finite number.
        ConfigError: Two groups have no two geoms, or a pair cannot be kept apart: no joint moves
            one against the other, MuJoCo has no distance between such shapes, or they are closer
            wherever the arm is.
    """
    least_m = float(finite_array(distance_m, "min_distance_m", ()))
    pairs = _Pairs(model, joints, least_m)
    watched = sorted({pair for first, second in groups for pair in pairs.between(first, second)})
    by_mink = _limit(model, watched, least_m)
    taken: list[_Pair] = by_mink.geom_id_pairs  # pyright: ignore
    left_out = sorted({*watched} - {*taken})
    if not left_out:
        return [by_mink]
    added = _limit(model, [], least_m, broadphase=False)
    added.geom_id_pairs = left_out
    added.max_num_contacts = len(left_out)
    return [by_mink, added]


def _limit(
    model: mujoco.MjModel, pairs: list[_Pair], least_m: float, broadphase: bool = True
) -> mink.CollisionAvoidanceLimit:
    return mink.CollisionAvoidanceLimit(
        model,
        [([first], [second]) for first, second in pairs],
        minimum_distance_from_collisions=least_m,
        collision_detection_distance=least_m + DETECTION_M,
        broadphase=broadphase,
    )


class _Pairs:
    """Which pairs of a model's geometries can be kept apart by its joints."""

    def __init__(self, model: mujoco.MjModel, joints: Sequence[int], least_m: float):
        self._model = model
        self._least_m = least_m
        self._moved_by: list[set[int]] = [
            {*joints} & {*joints_to(model, body)} for body in range(model.nbody)
        ]
        ids = list(joints)
        limited = model.jnt_limited[ids, None] > 0
        low, high = np.where(limited, model.jnt_range[ids], (-np.pi, np.pi)).T
        angles = np.random.default_rng(0).uniform(low, high, (_CONFIGURATIONS, len(ids)))
        self._configurations = [data_at(model, ids, q_rad) for q_rad in angles]

    def between(self, first: Sequence[int], second: Sequence[int]) -> list[_Pair]:
        """Return the pairs of two groups that are to be watched; ConfigError as
        :func:`avoidance_limits`.
        """
        pairs = [pair for pair in product(first, second) if pair[0] != pair[1]]
        if not pairs:
            raise ConfigError(
                f"avoid_collisions pairs {self._names(first)} with {self._names(second)}, and "
                "there are no two geoms among them; name two that are to be kept apart."
            )
        among_itself = {*first} == {*second}
        watched: list[_Pair] = []
        for pair in pairs:
            if not self._has_distance(*pair):
                self._refuse(pair, "MuJoCo has no distance between geoms of such types")
            elif fault := self._fault(*pair):
                if not among_itself:
                    self._refuse(pair, fault)
            elif not self._fixed(*pair):
                watched.append((min(pair), max(pair)))
        return watched

    def _refuse(self, pair: _Pair, reason: str) -> NoReturn:
        first, second = ([geom] for geom in pair)
        raise ConfigError(
            f"avoid_collisions cannot keep {self._names(first)} {self._least_m:g} m from "
            f"{self._names(second)}: {reason}. Leave this pair out, or name other geoms."
        )

    def _fault(self, first: int, second: int) -> str | None:
        """Why the joints cannot keep two geoms apart; None if they can, or they always are."""
        if not self._fixed(first, second) and self._moved_alike(first, second):
            return "none of the arm's joints moves one against the other"
        if any(
            self._distance(data, first, second) >= self._least_m for data in self._configurations
        ):
            return None
        return "they are closer wherever the arm is"

    def _fixed(self, first: int, second: int) -> bool:
        """Whether nothing moves one of two geoms against the other."""
        welds = self._model.body_weldid[self._model.geom_bodyid[[first, second]]]
        return bool(welds[0] == welds[1])

    def _moved_alike(self, first: int, second: int) -> bool:
        bodies: list[int] = self._model.geom_bodyid[[first, second]].tolist()
        return self._moved_by[bodies[0]] == self._moved_by[bodies[1]]

    def _has_distance(self, first: int, second: int) -> bool:
        return self._distance(self._configurations[0], first, second) < _PROBE_M

    def _distance(self, data: mujoco.MjData, first: int, second: int) -> float:
        return mujoco.mj_geomDistance(self._model, data, first, second, _PROBE_M, None)

    def _names(self, geoms: Sequence[int]) -> str:
        return ", ".join(
            f"geom {geom}" if not (name := self._model.geom(geom).name) else f"geom {name!r}"
            for geom in geoms
        )
