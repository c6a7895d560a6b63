"""Check of planned rows against the arm's own links and the static bodies of its model.

Which pairs of geometries are checked follows from the model. A chain joint must lie between the
two, so that fingers are not checked against the hand, and more than one if both belong to the arm:
neighbouring links touch by design. What MuJoCo itself excludes (``contype`` and ``conaffinity``,
``<exclude>``) is left out, as are links that overlap wherever the arm is. Bodies with joints of
their own, such as cubes, are there to be touched and not checked.

Legend: R rows, P pairs, nq the model's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import mink
import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64
from strands_cosmos3.collision import CollisionOutcome, CollisionReport
from strands_cosmos3.robots.model import data_at, joints_to

CLEARANCE_M = 0.001  # a row collides if two bodies come closer
_KEPT_M = 0.005  # distance that a solution around a collision keeps
# bounding spheres that are farther apart settle a pair; also the step between points checked
# between rows
_NEAR_M = 0.03
_CONFIGURATIONS = 32  # in which links must overlap to be left out
_FAR_M = 0.15  # exact distances are not needed beyond
_MAX_PARTS = 8  # into which the way to a row is divided
_TOUCH_M = 1e-4  # how much closer two bodies may come that are within the clearance at the start
_CONTACT_M = 1e-5  # about the accuracy of a distance
# share of a row by which the executor's spline overshoots a sudden hold, and a margin (0.085 in
# theory)
_COAST = 0.15


class CollisionCheck:
    """Distances between the geometries of a model along rows of configurations.

    Args:
        model: The model.
        joints: Ids of the chain's joints, from the base on; of several chains, one after the other.

    Attributes:
        pairs: [P, 2] ids of the geometries that are checked; empty if the model has none.
    """

    def __init__(self, model: mujoco.MjModel, joints: list[int]):
        self.model = model
        self._data = mujoco.MjData(model)
        self.pairs = self._ever_apart(_pairs(model, joints), joints)
        # 0: no bounding sphere, as of a plane
        radius = np.where(model.geom_rbound > 0, model.geom_rbound, np.inf)
        self._radii_m = radius[self.pairs].sum(axis=1)
        self._geoms, indices = np.unique(self.pairs, return_inverse=True)
        self._first, self._second = indices.reshape(-1, 2).T  # of each pair, in ``_geoms``
        standing = (model.body_weldid[model.geom_bodyid] == 0) & (
            model.geom_type == mujoco.mjtGeom.mjGEOM_BOX
        )
        self._boxes = [
            (geom, *self._met_by(geom, radius)) for geom in np.flatnonzero(standing).tolist()
        ]

    @classmethod
    def of(cls, model: mujoco.MjModel, joints: list[int]) -> CollisionCheck | None:
        """Return the check of a chain; None if no geometries are to be checked."""
        check = cls(model, joints)
        return check if len(check.pairs) else None

    def _met_by(self, geom: int, radius: F64) -> tuple[NDArray[np.intp], NDArray[np.intp], F64]:
        """The pairs that a geometry is in, the partners' places in ``_geoms``, and their radii."""
        pairs, column = np.nonzero(self.pairs == geom)
        partners = self.pairs[pairs, 1 - column]
        return pairs, np.searchsorted(self._geoms, partners), radius[partners]

    def _ever_apart(self, pairs: NDArray[np.intp], joints: list[int]) -> NDArray[np.intp]:
        """The pairs without links that overlap wherever the arm is: coarse shapes do, about a
        joint.
        """
        roots = self.model.body_rootid[self.model.geom_bodyid[pairs]]
        overlap = roots[:, 0] == roots[:, 1]
        for data in anywhere(self.model, joints):
            self._data = data
            overlap[overlap] = [self._distance(a, b) < 0 for a, b in pairs[overlap]]
        return pairs[~overlap]

    def _distance(self, first: int, second: int) -> float:
        return mujoco.mj_geomDistance(self.model, self._data, int(first), int(second), _FAR_M, None)

    def distances(self, q_rad: F64) -> F64:
        """[R, P] distances at configurations [R, nq]: exact below 30 mm, else lower bounds;
        below zero, minus the depth.
        """
        return self._distances(q_rad)[0]

    def _distances(self, q_rad: F64) -> tuple[F64, F64]:
        """As :meth:`distances`, and [R, geometries, 3] their centres. Bounding spheres rule out
        most pairs.

        What stands still may be as large as a table, so that its box is taken as it is.
        """
        centres = np.empty((len(q_rad), len(self._geoms), 3))
        for row, q in enumerate(q_rad):
            self._data.qpos[:] = q
            mujoco.mj_kinematics(self.model, self._data)
            centres[row] = self._data.geom_xpos[self._geoms]
        across = centres[:, self._second] - centres[:, self._first]
        distance = np.sqrt(np.einsum("rpx,rpx->rp", across, across)) - self._radii_m
        for geom, pairs, partners, radii in self._boxes:
            offset = (centres[:, partners] - self._data.geom_xpos[geom]) @ self._data.geom_xmat[
                geom
            ].reshape(3, 3)
            beyond = np.maximum(np.abs(offset) - self.model.geom_size[geom], 0.0)
            distance[:, pairs] = np.linalg.norm(beyond, axis=2) - radii
        near = distance < _NEAR_M
        for row in np.flatnonzero(near.any(axis=1)):
            self._data.qpos[:] = q_rad[row]
            mujoco.mj_kinematics(self.model, self._data)
            for pair in np.flatnonzero(near[row]):
                distance[row, pair] = self._distance(*self.pairs[pair])
        return distance, centres

    @cached_property
    def limit(self) -> mink.CollisionAvoidanceLimit:
        """mink's limit for the same pairs."""
        pairs = [([int(a)], [int(b)]) for a, b in self.pairs]
        return mink.CollisionAvoidanceLimit(
            self.model,
            pairs,
            minimum_distance_from_collisions=_KEPT_M,
            collision_detection_distance=_FAR_M,
        )

    def examine(self, q_start: F64, q_rad: F64) -> CollisionReport:
        """Find the first of the rows [R, nq] that comes too close from a start [nq], there or on
        the way from the row before.

        Two bodies that are too close at the start may move apart.
        """
        q = np.vstack((q_start, q_rad))
        distance, centres = self._distances(q)
        least = _least(distance[0])
        closest = distance[1:]
        moved = np.linalg.norm(centres[1:] - centres[:-1], axis=2)  # [R, geometries]
        approach = moved[:, self._first] + moved[:, self._second]  # [R, P] at most
        may_meet = (distance[:-1] + closest < approach + _NEAR_M) | (closest < least)
        for row in np.flatnonzero(may_meet.any(axis=1)):
            parts = int(np.clip(np.ceil(approach[row].max() / _NEAR_M), 2, _MAX_PARTS))
            between = q[row] + (q[row + 1] - q[row]) * (np.arange(1, parts) / parts)[:, None]
            nearest = np.minimum(closest[row], self.distances(between).min(axis=0))
            if (nearest < least).any():
                return self._report(
                    CollisionOutcome.STOPPED, int(row), np.where(nearest < least, nearest, np.inf)
                )
        if (distance[0] <= 0).any():
            return self._report(CollisionOutcome.TOUCHING, None, distance[0])
        return CollisionReport(CollisionOutcome.CLEAR)

    def hold(self, q_start: F64, q_rad: F64, n_rows: int) -> tuple[F64, int]:
        """Return ``n_rows`` rows that follow the rows [R, nq] and then hold the arm, and the first
        that does.

        It is held earlier if it would collide while it comes to rest.
        """
        least = _least(self.distances(q_start[None])[0])
        q = np.vstack((q_start, q_rad))
        row = len(q_rad)
        while row > 0:
            coasting = q[row] + _COAST * (q[row] - q[row - 1])
            if (self.distances(coasting[None])[0] >= least).all():
                break
            row -= 1
        return np.vstack((q[1 : row + 1], np.repeat(q[row][None], n_rows - row, axis=0))), row

    def held_before(self, q_start: F64, q_rad: F64) -> tuple[F64, CollisionReport]:
        """Return the rows [R, nq] from a start [nq], held ahead of the first in collision, and the
        report.
        """
        report = self.examine(q_start, q_rad)
        if report.row is None:
            return q_rad, report
        rows, held_from_row = self.hold(q_start, q_rad[: report.row], len(q_rad))
        return rows, replace(report, held_from_row=held_from_row)

    def _report(self, outcome: CollisionOutcome, row: int | None, distance: F64) -> CollisionReport:
        worst = int(np.argmin(distance))
        first, second = (self._name(geom) for geom in self.pairs[worst])
        return CollisionReport(outcome, row, (first, second), -float(distance[worst]))

    def _name(self, geom: int) -> str:
        body = int(self.model.geom_bodyid[geom])
        name = self.model.body(body).name if body else self.model.geom(geom).name
        return name or (f"body {body}" if body else f"geom {geom}")


def anywhere(model: mujoco.MjModel, joints: list[int]) -> Iterator[mujoco.MjData]:
    """Yield the kinematics of a model with joints (ids) at random angles of their ranges, each in
    the same memory.
    """
    low, high = np.where(
        model.jnt_limited[joints, None] > 0, model.jnt_range[joints], (-np.pi, np.pi)
    ).T
    data = data_at(model)
    for angles in np.random.default_rng(0).uniform(low, high, (_CONFIGURATIONS, len(joints))):
        data.qpos[model.jnt_qposadr[joints]] = angles
        mujoco.mj_kinematics(model, data)
        yield data


def _least(at_start: F64) -> F64:
    """[P] least distance of each pair, given that at the start."""
    apart = np.minimum(CLEARANCE_M, np.maximum(at_start - _TOUCH_M, _CONTACT_M))
    return np.where(at_start > 0, apart, at_start - _TOUCH_M)


def _pairs(model: mujoco.MjModel, joints: list[int]) -> NDArray[np.intp]:
    """[P, 2] geometries between which chain joints lie, by the rules of this module but for
    overlaps.
    """
    number_in_chain = {joint: number for number, joint in enumerate(joints, 1)}
    # chain joints between the base and each body
    joints_below = np.array(
        [
            max((number_in_chain.get(joint, 0) for joint in joints_to(model, body)), default=0)
            for body in range(model.nbody)
        ]
    )
    solid = np.flatnonzero(model.geom_contype | model.geom_conaffinity)
    candidates = solid[np.stack(np.triu_indices(len(solid), 1), axis=1)]
    contype = model.geom_contype[candidates]
    conaffinity = model.geom_conaffinity[candidates]
    masks = (contype & conaffinity[:, ::-1]).any(axis=1)
    bodies = model.geom_bodyid[candidates]
    signatures = (bodies << 16) + bodies[:, ::-1]  # of a pair in either order
    excluded = np.isin(signatures, model.exclude_signature).any(axis=1)
    explicit = np.sort(np.stack((model.pair_geom1, model.pair_geom2), axis=1), axis=1)
    pairs = np.unique(np.vstack((explicit, candidates[masks & ~excluded])), axis=0)
    bodies = model.geom_bodyid[pairs]
    root = model.body_rootid[bodies]
    between = joints_below[bodies]
    gap = np.abs(between[:, 0] - between[:, 1])
    movable = ((between == 0) & (model.body_weldid[bodies] != 0)).any(axis=1)
    of_an_arm = np.isin(root[:, 0], model.body_rootid[model.jnt_bodyid[joints]])
    neighbours = (gap == 1) & (root[:, 0] == root[:, 1]) & of_an_arm
    return pairs[(gap > 0) & ~movable & ~neighbours].astype(np.intp)
