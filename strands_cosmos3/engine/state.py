"""The state row before the action rows of a ``midtrain`` checkpoint. Released ones have none.

A checkpoint of this project may record ``"state": {"columns": "pose9_opening", "mean": [10], "std":
[10]}``. Its action sequence then starts, at temporal offset 0, with the measured pose of the Cosmos
frame in the robot's base (translation [m], rot6d) and the gripper's open fraction, centred and
scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.errors import LayoutError, ShapeError
from strands_cosmos3.resources import shown

COLUMNS = "pose9_opening"
STATE_COLUMNS = ("x_m", "y_m", "z_m", *(f"r{i}" for i in range(6)), "gripper (1 = open)")
WIDTH = len(STATE_COLUMNS)


@dataclass(frozen=True)
class StateRow:
    """Scale of the state row, (state - mean) / std; raises LayoutError unless both are ten
    finite numbers, std above zero.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        figures = (
            np.array([self.mean, self.std], dtype=np.float64)
            if len(self.mean) == len(self.std) == WIDTH
            else None
        )
        if figures is None or not np.isfinite(figures).all() or (figures[1] <= 0).any():
            raise LayoutError(
                f"state: mean and std must be {WIDTH} finite numbers each, std above zero; got "
                f"{shown(self)}."
            )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> StateRow | None:
        """The state row that a checkpoint records, or None; raises LayoutError if the record is
        not valid.
        """
        found = metadata.get("state")
        if found is None:
            return None
        if not isinstance(found, Mapping) or found.get("columns") != COLUMNS:
            raise LayoutError(
                f"checkpoint.json: state must have columns {COLUMNS!r} with mean and std, got "
                f"{shown(found)}."
            )
        try:
            return cls(tuple(map(float, found["mean"])), tuple(map(float, found["std"])))
        except (KeyError, TypeError, ValueError):
            raise LayoutError(
                "checkpoint.json: state must have mean and std, ten numbers each."
            ) from None

    def to_metadata(self) -> dict[str, Any]:
        """The record for ``checkpoint.json``."""
        return {"columns": COLUMNS, "mean": list(self.mean), "std": list(self.std)}

    def scaled(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows in the model's scale from states [..., 10]: metres, rot6d, open fraction. Raises
        ShapeError for other widths.
        """
        state = np.asarray(state, dtype=np.float64)
        if state.shape[-1:] != (WIDTH,):
            raise ShapeError(
                f"a state has {WIDTH} columns (translation, rot6d, open fraction), got "
                f"{list(state.shape)}."
            )
        return (state - np.array(self.mean)) / np.array(self.std)
