"""Obstacles of an arm, and collision reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from strands_cosmos3.checks import finite_array, positive, typed_fields


@dataclass(frozen=True)
class Obstacle:
    """A box that stands still, such as a table; InputError if a value is malformed or an edge is
    not above zero.

    Args:
        name: By which reports name it.
        center_m: Its centre in the robot's base frame.
        size_m: Lengths of its edges.
        yaw_rad: Its rotation about z.
    """

    name: str
    center_m: tuple[float, float, float]
    size_m: tuple[float, float, float]
    yaw_rad: float = 0.0

    def __post_init__(self) -> None:
        typed_fields(self)
        finite_array([*self.center_m, self.yaw_rad], "center_m and yaw_rad", (4,))
        for edge_m in self.size_m:
            positive(edge_m, "size_m")


class CollisionOutcome(StrEnum):
    """Outcome of the check of a chunk. All but ``clear`` are counted as ``collision_<outcome>``."""

    UNCHECKED = "unchecked"  # no model, or one without a pair of collision geometries
    CLEAR = "clear"
    TOUCHING = "touching"  # two bodies touch at the start; no row brings them closer
    AVOIDED = "avoided"  # the rows were solved again, around a collision
    STOPPED = "stopped"  # the rows from ``held_from_row`` on hold the arm before a collision


@dataclass(frozen=True)
class CollisionReport:
    """Outcome of a chunk's check.

    Args:
        outcome: What was done.
        row: First row that would collide; None if none would.
        bodies: Names of the two bodies; a geometry of the world goes by its own name.
        depth_m: How deep they would lie in each other at that row or on the way to it; below zero,
            their distance.
        held_from_row: First row that holds the arm; None if none does.
    """

    outcome: CollisionOutcome = CollisionOutcome.UNCHECKED
    row: int | None = None
    bodies: tuple[str, str] | None = None
    depth_m: float = 0.0
    held_from_row: int | None = None

    def __str__(self) -> str:
        if self.bodies is None:
            return f"collisions: {self.outcome}"
        first, second = self.bodies
        where = "at the start" if self.row is None else f"at row {self.row}"
        near = f"{abs(self.depth_m) * 1e3:.1f} mm {'deep' if self.depth_m >= 0 else 'apart'}"
        done = {
            "avoided": "; avoided",
            "stopped": f"; the arm holds from row {self.held_from_row} on",
        }.get(self.outcome, "")
        return f"{first!r} and {second!r} would be {near} {where}{done}"

    def later(self, rows: int) -> CollisionReport:
        """The same report, its rows counted from ``rows`` rows earlier."""
        row, held_from_row = (
            None if n is None else n + rows for n in (self.row, self.held_from_row)
        )
        return replace(self, row=row, held_from_row=held_from_row)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        bodies = None if self.bodies is None else list(self.bodies)
        depth_mm = None if bodies is None else self.depth_m * 1e3
        return {
            "outcome": str(self.outcome),
            "row": self.row,
            "bodies": bodies,
            "depth_mm": depth_mm,
            "held_from": self.held_from_row,
        }
