"""Argument checks of the package ``actions``: finite numbers of a known trailing shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from strands_cosmos3.checks import F64, finite_array, require_rigid
from strands_cosmos3.errors import InputError

LARGEST = 1e9  # m, rad, or columns of rotations; products of larger values could overflow


def trailing(
    value: Any,
    name: str,
    shape: tuple[int | None, ...],
    largest: float = LARGEST,
    leading: int | None = None,
) -> F64:
    """Return a read-only float64 copy of ``value`` with shape [..., *shape]; None frees an axis,
    and no axis may be empty.

    Args:
        largest: Bound on the magnitudes.
        leading: Number of axes before ``shape``; None allows any.

    Raises:
        InputError: It is not numeric, or a magnitude exceeds ``largest``.
        ShapeError, NonFiniteError: It has another shape or an empty axis, or holds NaN or infinity.
    """
    if leading is None:
        try:
            leading = max(np.ndim(value) - len(shape), 0)
        except ValueError:  # ragged; finite_array raises the error
            leading = 0
    array = finite_array(value, name, (None,) * leading + shape)
    if (reach := np.abs(array).max()) > largest:
        raise InputError(f"{name} reaches {reach:.3g}; values beyond {largest:g} are not physical.")
    return array


def rigid(value: Any, name: str, leading: int | None = None) -> F64:
    """Return a read-only float64 copy of rigid transforms [..., 4, 4].

    Raises:
        InputError: A rotation block is not orthonormal and right-handed, or a last row is not (0,
            0, 0, 1).
        ShapeError, NonFiniteError: As :func:`trailing`.
    """
    T = trailing(value, name, (4, 4), leading=leading)
    require_rigid(T, name)
    return T
