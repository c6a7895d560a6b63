"""A domain's statistics, and the affine map of each normalisation method: ``a = z * scale +
offset`` in each column.

Source: NVIDIA cosmos-framework, ``action_processing``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np

from strands_cosmos3.actions.arrays import trailing
from strands_cosmos3.checks import F64, finite_array, instance_of, typed
from strands_cosmos3.errors import ActionOutOfRangeError, StatisticsError, UnknownNameError
from strands_cosmos3.types import WILD_Z

__all__ = ["FIGURES", "ActionStats", "Affine", "Method"]

Method = Literal["quantile", "quantile_rot", "meanstd", "minmax"]
FIGURES = ("q01", "q99", "mean", "std", "min", "max")  # the first two are always present
_SMALLEST_SPREAD = 1e-12  # the narrowest in real data, AgiBot's still head, is 1e-6


@dataclass(frozen=True, eq=False)
class Affine:
    """A normalisation ``(a - offset) / scale`` by column, or its inverse ``z * scale + offset``
    (``denormalizes``).

    ``offset`` [D] maps to zero, ``scale`` [D] is positive; ``columns`` are names for messages.
    """

    offset: F64
    scale: F64
    columns: tuple[str, ...]
    denormalizes: bool = False

    @property
    def inverse(self) -> Affine:
        """The map in the other direction."""
        return replace(self, denormalizes=not self.denormalizes)

    def __call__(self, rows: Any, clip: bool = False) -> F64:
        """Map [..., D] rows; ``clip`` clamps normalised rows to [-1, 1], as training did.
        De-normalising never clamps.

        Raises:
            ActionOutOfRangeError: A value to de-normalise lies beyond |z| = 10.
            ShapeError, NonFiniteError, InputError: The rows are malformed.
        """
        if self.denormalizes:
            z = trailing(rows, "normalised action", (len(self.columns),), largest=np.inf)
            require_in_range(z, self.columns)
            return z * self.scale + self.offset
        z = (trailing(rows, "action", (len(self.columns),)) - self.offset) / self.scale
        return np.clip(z, -1.0, 1.0) if clip else z


@dataclass(frozen=True, eq=False)
class ActionStats:
    """Statistics of one domain's actions; arrays are [D] float64 and read-only.

    Args:
        domain, columns: Name of the domain, as in ``Embodiment.stats``, and of its [D] columns.
        q01, q99: First and ninety-ninth percentiles.
        mean, std, min, max: Further figures, if the source has them.
        raw: The same figures over the unprocessed data, if the source has both.
        skip_rotation_dims: Columns whose figures outside ``raw`` are +-1, so that normalisation
            leaves them unchanged.

    Raises:
        StatisticsError: A width differs from the columns', or q99 <= q01, max <= min or std <= 0 in
            some column.
        ShapeError, NonFiniteError, InputError: A figure is malformed.
    """

    domain: str
    columns: tuple[str, ...]
    q01: F64
    q99: F64
    mean: F64 | None = None
    std: F64 | None = None
    min: F64 | None = None
    max: F64 | None = None
    raw: ActionStats | None = None
    skip_rotation_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = (
            self.domain,
            *cast("tuple[object, ...]", instance_of(self.columns, tuple, "columns")),
        )
        if not all(isinstance(name, str) for name in names):
            raise StatisticsError(
                f"domain {self.domain!r} and columns {self.columns!r} must be names."
            )
        for name in FIGURES:
            if (value := getattr(self, name)) is not None or name in FIGURES[:2]:
                object.__setattr__(
                    self, name, _figure(value, name, self.columns, repr(self.domain))
                )
        _require_spread(self.q01, self.q99, ("q01", "q99"), self.columns, repr(self.domain))
        if self.min is not None and self.max is not None:
            _require_spread(self.min, self.max, ("min", "max"), self.columns, repr(self.domain))
        if self.std is not None:
            _require_spread(
                np.zeros_like(self.std), self.std, ("0", "std"), self.columns, repr(self.domain)
            )

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.columns)

    @typed()
    def first(self, width: int) -> ActionStats:
        """Return the statistics of the first ``width`` columns: one arm of a file that describes
        two.

        Raises:
            StatisticsError: There are fewer columns.
        """
        if not 1 <= width <= self.width:
            raise StatisticsError(
                f"statistics of {self.domain!r} have {self.width} columns, not {width}."
            )
        cut = {
            name: None if (value := getattr(self, name)) is None else value[:width]
            for name in FIGURES
        }
        raw = None if self.raw is None else self.raw.first(width)
        skipped = tuple(i for i in self.skip_rotation_dims if i < width)
        return replace(
            self, columns=self.columns[:width], **cut, raw=raw, skip_rotation_dims=skipped
        )

    def normalizer(self, method: Method = "quantile") -> Affine:
        """Return the map from actions to normalised rows.

        ``quantile`` maps q01..q99 to -1..1, ``quantile_rot`` does so with the raw figures if there
        are any, ``minmax`` maps min..max to -1..1, ``meanstd`` maps mean, std to 0, 1.

        Raises:
            UnknownNameError, StatisticsError: No such method, or these statistics lack its figures.
        """
        if str(method) not in get_args(Method):
            raise UnknownNameError("normalisation method", method, get_args(Method))
        if method == "quantile_rot":
            return (self.raw or self).normalizer("quantile")
        low, high = {
            "quantile": ("q01", "q99"),
            "minmax": ("min", "max"),
            "meanstd": ("mean", "std"),
        }[method]
        a, b = cast("F64 | None", getattr(self, low)), cast("F64 | None", getattr(self, high))
        if a is None or b is None:
            raise StatisticsError(
                f"statistics of {self.domain!r} have no {low}/{high} for {method!r}; use "
                "'quantile'."
            )
        offset, scale = (a, b) if method == "meanstd" else ((b + a) / 2, (b - a) / 2)
        return Affine(offset, scale, self.columns)


def _figure(value: Any, name: str, columns: tuple[str, ...], owner: str) -> F64:
    array = trailing(finite_array(value, name, (None,)), name, (None,))
    if len(array) != len(columns):
        raise StatisticsError(
            f"{name} of {owner} has {len(array)} columns, but there are {len(columns)}."
        )
    return array


def _require_spread(
    low: F64, high: F64, names: tuple[str, str], columns: tuple[str, ...], owner: str
) -> None:
    """Raise a :class:`StatisticsError` that names the first column in which ``high`` does not
    exceed ``low``.
    """
    if (bad := np.flatnonzero(high - low < _SMALLEST_SPREAD)).size:
        i = int(bad[0])
        raise StatisticsError(
            f"statistics of {owner}: {names[1]} must exceed {names[0]}, but column {i} "
            f"({columns[i]}) has "
            f"{names[0]} = {low[i]:g} and {names[1]} = {high[i]:g}; the normalisation could not "
            "be inverted."
        )


def require_in_range(z: F64, columns: tuple[str, ...]) -> None:
    """Raise an :class:`ActionOutOfRangeError` that names the first of the normalised [..., D]
    values beyond |z| = 10.
    """
    if (wild := np.argwhere(np.abs(z) > WILD_Z)).size:
        where = tuple(int(i) for i in wild[0])
        raise ActionOutOfRangeError(
            f"normalised action {list(where)} ({columns[where[-1]]}) is {z[where]:.4g}; beyond "
            f"|z| = {WILD_Z:g} it "
            "is a fault, not motion. Is it already de-normalised, or of another action space?"
        )
