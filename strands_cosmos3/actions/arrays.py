"""What every function of ``actions`` asks of its arguments: finite numbers of a known trailing shape."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from strands_cosmos3.checks import F64, finite_array, rigid_transform
from strands_cosmos3.errors import InputError

LARGEST = 1e9
"""No length in metres, angle in radians or column of a rotation is larger; beyond it, products overflow."""

_K = TypeVar("_K")


def trailing(value: Any, name: str, shape: tuple[int | None, ...], largest: float = LARGEST) -> F64:
    """A read-only float64 copy of ``value`` with shape [..., *shape]; leading axes are free, none may be empty.

    Raises:
        InputError: It is not numeric, or a magnitude exceeds ``largest``.
        ShapeError: Its last axes have another shape, or an axis is empty.
        NonFiniteError: It holds NaN or infinity.
    """
    try:
        lead = max(np.ndim(value) - len(shape), 0)
    except ValueError:  # ragged; finite_array words the refusal
        lead = 0
    array = finite_array(value, name, (None,) * lead + shape)
    if (reach := np.abs(array).max()) > largest:
        raise InputError(f"{name} reaches {reach:.3g}; beyond {largest:g} it is a fault, not a measurement.")
    return array


def rigid(value: Any, name: str) -> F64:
    """A read-only float64 copy of rigid transforms [..., 4, 4].

    Raises:
        InputError: A rotation block is not orthonormal and right-handed, or a last row is not (0, 0, 0, 1).
        ShapeError, NonFiniteError: As :func:`trailing`.
    """
    T = trailing(value, name, (4, 4))
    rigid_transform(T.reshape(-1, 4, 4), name, batch=True)
    return T
