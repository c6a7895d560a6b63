"""Checks of values that enter the package: arrays, pictures, transforms, numbers."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cache, wraps
from numbers import Integral, Real
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.errors import InputError, NonFiniteError, ShapeError, UnknownNameError

F64 = NDArray[np.float64]
_K = TypeVar("_K")
_P = ParamSpec("_P")
_NOUNS = {str: "a string", int: "a whole number", float: "a number", bool: "True or False"}
LARGEST = 1e9  # m, rad, or columns of rotations; products of larger values could overflow
_SO3_TOLERANCE = 1e-6
MAX_IMAGE_SIDE = 4096


def finite_array(value: Any, name: str, shape: tuple[int | None, ...] | None) -> F64:
    """Return a read-only float64 copy of ``value``.

    None in ``shape`` leaves an axis free, None instead of it all of them, but no axis may be empty.
    ``name`` is for the error message.

    Raises:
        InputError: It is not numeric; True and False are no numbers.
        ShapeError: It has another shape, or an empty axis.
        NonFiniteError: It contains NaN or infinity; the message gives the first index.
    """
    try:
        raw = np.asarray(value)
        if raw.dtype.kind not in "fiu":
            raise TypeError(f"dtype {raw.dtype}")
        # a list of numbers and truth values is an array of numbers
        if isinstance(value, list | tuple) and any(
            isinstance(entry, bool | np.bool_) for entry in np.asarray(value, object).flat
        ):
            raise TypeError("it holds True or False")
        array = np.array(raw, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} must be an array of real numbers, got {type(value).__name__} ({error})."
        ) from None
    shape = (None,) * array.ndim if shape is None else shape
    if not _has_shape(array, shape):
        required = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise ShapeError(
            f"{name} must have shape {required} and not be empty, got {list(array.shape)}."
        )
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        place = f"[{', '.join(map(str, where))}]" if where else ""
        raise NonFiniteError(f"{name}{place} is {array[where]}; every value must be finite.")
    array.setflags(write=False)
    return array


def _has_shape(array: NDArray[Any], shape: tuple[int | None, ...]) -> bool:
    """Whether an array has a shape, in which None leaves an axis free, and is not empty."""
    return (
        array.ndim == len(shape)
        and all(n in (None, have) for n, have in zip(shape, array.shape, strict=True))
        and array.size > 0
    )


def image_array(
    value: Any, name: str, shape: tuple[int | None, ...] = (None, None, 3)
) -> NDArray[np.uint8]:
    """Return an image as uint8 [H, W, 3], or of another ``shape``, not copied.

    Anything else raises ShapeError, a side of more than 4096 pixels included: what is computed of
    it grows with each side.
    """
    array = _array_of(value, f"{name} must be an array of pixels")
    if array.dtype != np.uint8 or not _has_shape(array, shape):
        required = ", ".join(
            letter if n is None else str(n)
            for letter, n in zip("NHWC"[-len(shape) :], shape, strict=True)
        )
        got = f"{array.dtype} {list(array.shape)}{_picture_remedy(array, shape)}"
        raise ShapeError(f"{name} must be uint8 of shape [{required}] and not be empty, got {got}.")
    if max(array.shape[-3:-1]) > MAX_IMAGE_SIDE:
        got = f"{array.shape[-3]} x {array.shape[-2]}"
        raise ShapeError(
            f"{name} is {got} pixels; at most {MAX_IMAGE_SIDE} x {MAX_IMAGE_SIDE} are accepted."
        )
    return array


def _array_of(value: Any, requirement: str) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError as error:  # a ragged list
        raise ShapeError(f"{requirement}, got {type(value).__name__} ({error}).") from None


def _picture_remedy(array: NDArray[Any], shape: tuple[int | None, ...]) -> str:
    """The line of code that makes a picture's pixels uint8 and its channels the last axis."""
    turned = array.ndim == len(shape) >= 3 and array.shape[-3] == 3 != array.shape[-1]
    line = "np.moveaxis(picture, -3, -1)" if turned else "picture"
    if array.dtype.kind == "f":
        scaled = "" if array.size and np.abs(array).max() > 1 else " * 255"
        line = f"({line}{scaled}).round().astype(np.uint8)"
    return "" if line == "picture" else f"; convert it: {line}"


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


def rigid(value: Any, name: str, leading: int = 0) -> F64:
    """Return a read-only float64 copy of rigid transforms [4, 4], or with leading axes.

    Raises:
        InputError: A rotation block is not orthonormal and right-handed, or a last row is not (0,
            0, 0, 1).
        ShapeError, NonFiniteError: As :func:`trailing`.
    """
    T = trailing(value, name, (4, 4), leading=leading)
    R = T[..., :3, :3]
    off = np.abs(np.swapaxes(R, -1, -2) @ R - np.eye(3)).max()
    if not off <= _SO3_TOLERANCE or not (np.linalg.det(R) > 0).all():  # written so that NaN fails
        raise InputError(
            f"{name} is not a rigid transform: R^T R differs from the identity by {off:.3g} (det "
            "> 0)."
        )
    if not np.abs(T[..., 3, :] - np.array([0.0, 0.0, 0.0, 1.0])).max() <= _SO3_TOLERANCE:
        raise InputError(f"{name}: the last row of a rigid transform is (0, 0, 0, 1).")
    return T


def constant_array(n: int, value: float | bool) -> NDArray[Any]:
    """Return a read-only array [n] of one value."""
    array = np.full(n, value)
    array.setflags(write=False)
    return array


def mask_array(value: Any, name: str, n: int) -> NDArray[np.bool_]:
    """Return a read-only copy of booleans [n]; anything else raises ShapeError."""
    requirement = f"{name} must be booleans of shape [{n}]"
    mask = _array_of(value, requirement).copy()
    if mask.dtype != np.bool_ or mask.shape != (n,):
        raise ShapeError(f"{requirement}, got {mask.dtype} {list(mask.shape)}.")
    mask.setflags(write=False)
    return mask


def increasing_times(value: Any, n: int) -> F64:
    """Return row times [n] that start at zero or later and increase strictly; InputError
    otherwise.
    """
    t = finite_array(value, "t_s", (n,))
    if t[0] < 0 or (np.diff(t) <= 0).any():
        raise InputError("t_s must start at zero or later and increase strictly.")
    return t


def open_fractions(value: Any, *leading: int) -> F64:
    """Return open fractions in [0, 1]: of one gripper [*leading], of any other number G of them
    [*leading, G].

    InputError otherwise.
    """
    if isinstance(value, np.ndarray) and value.shape == (*leading, 0):
        return np.empty((*leading, 0))
    gripper = finite_array(value, "gripper", None)
    if gripper.shape != leading and (gripper.shape[:-1] != leading or gripper.shape[-1] == 1):
        gripper = finite_array(value, "gripper", leading)
    if (gripper < 0).any() or (gripper > 1).any():
        raise InputError("gripper holds open fractions in [0, 1] (1 = open).")
    return gripper


def of_grippers(values: F64) -> Any:
    """Return values [..., G] of G grippers in their usual shape: [...], or a number, if there is
    one; else unchanged.
    """
    return values[..., 0] if values.shape[-1] == 1 else values


def positive(value: Any, name: str) -> float:
    """Return ``value`` as a finite number above zero; anything else raises InputError."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not (np.isfinite(number) and number > 0):
        raise InputError(f"{name} must be a finite number above zero, got {value!r}.")
    return number


def within(
    value: Any,
    name: str,
    lowest: float,
    highest: float,
    shape: tuple[int | None, ...] | None = None,
) -> F64:
    """Return numbers from ``lowest`` to ``highest``, both included, as :func:`finite_array`;
    others raise InputError.
    """
    array = finite_array(value, name, shape)
    if ((array < lowest) | (array > highest)).any():
        raise InputError(f"{name} must lie between {lowest:g} and {highest:g}, got {value!r}.")
    return array


def whole_number(value: object, name: str, lowest: int, highest: int | None = None) -> int:
    """Return a whole number from ``lowest`` to ``highest``, both included; anything else raises
    InputError.
    """
    number = (
        int(value) if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else None
    )
    if number is None or number < lowest or (highest is not None and number > highest):
        span = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise InputError(f"{name} must be a whole number {span}, got {value!r}.")
    return number


def seed_number(value: object, name: str = "seed") -> int:
    """Return a seed, a whole number from 0 to 2**32 - 1; anything else raises InputError."""
    return whole_number(value, name, 0, 2**32 - 1)


def instance_of(value: object, kind: type[_K], name: str) -> _K:
    """Return ``value`` if it has the type ``kind``; otherwise raise InputError."""
    if not isinstance(value, kind):
        raise InputError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}.")
    return value


def known_name(name: _K, kind: str, valid: Collection[str]) -> _K:
    """Return a name that is one of those that are valid; otherwise raise UnknownNameError."""
    if not isinstance(name, str) or name not in valid:
        raise UnknownNameError(kind, name, valid)
    return name


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], form: str, absent: Any = None
) -> list[str]:
    """Describe what differs between two mappings: ``form`` is filled with a name and its two
    values.
    """
    return [
        form.format(name, a.get(name, absent), b.get(name, absent))
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]


def typed(*but: str) -> Callable[[Callable[_P, _K]], Callable[_P, _K]]:
    """Decorator that checks a function's arguments against its annotations; InputError names the
    one that does not fit.

    Arrays are left to the function, and so are the values of literals, which have better messages
    there, and the arguments named in ``but``.
    """

    def decorate(function: Callable[_P, _K]) -> Callable[_P, _K]:
        names = tuple(inspect.signature(function).parameters)

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _K:
            kinds = _annotations(function)
            # a wrong number of them fails below
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if name in kinds and name not in but:
                    require_type(value, kinds[name], name)
            return function(*args, **kwargs)

        return checked

    return decorate


def typed_fields(instance: Any) -> None:
    """Check a dataclass's fields against their annotations, likewise; call it in
    ``__post_init__``.
    """
    for field in fields(instance):
        require_type(
            getattr(instance, field.name),
            _annotations(type(instance)).get(field.name, Any),
            field.name,
        )


def require_type(value: object, kind: Any, name: str) -> None:
    """Raise InputError unless a value has an annotation's type."""
    exact, classes = _at_once(kind)
    if type(value) in exact or isinstance(value, classes):
        return
    # most imports of this package check nothing, and it takes a tenth of a second
    from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

    scalar = value
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "fiub":
        scalar = value.item()
    try:
        check_type(
            scalar, _accepted(kind), collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS
        )
    except TypeCheckError:
        noun = _NOUNS.get(kind) or (
            kind.__name__ if isinstance(kind, type) else re.sub(r"[\w.]+\.", "", str(kind))
        )
        raise InputError(
            f"{name} must be {noun}, got {type(value).__name__} ({value!r:.80})."
        ) from None


class ArrayKind(type):
    """Metaclass of a type of arrays, which knows its instances without a look at their elements."""


class _NumberType(type):
    """Metaclass of types of numbers, which booleans do not have."""

    kind: Any

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.kind) and not isinstance(value, bool)


class _Whole(metaclass=_NumberType):
    kind = Integral


class _Real(metaclass=_NumberType):
    kind = Real


@cache
def _at_once(kind: Any) -> tuple[tuple[Any, ...], tuple[type, ...]]:
    """Types that an annotation accepts without a look at their elements: those that a value's type
    must be, and those that it may derive from.
    """
    kinds = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    plain = (each for each in kinds if isinstance(each, ArrayKind) or type(each) is type)
    return kinds, tuple(each for each in plain if each not in (int, float, bool))


@cache
def _accepted(kind: Any) -> Any:
    """The type that is checked for an annotation: numbers and booleans of numpy count; arrays and
    the values of literals are left to the function.
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        return _accepted(arguments[0])
    if origin is Literal:
        return Union[tuple(map(type, arguments))]  # noqa: UP007 - of a tuple
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_accepted, arguments))]  # noqa: UP007
    # numpy's NDArray is an alias of an alias on Python 3.12
    if origin is np.ndarray or not (origin is None or isinstance(origin, type)):
        return Any
    if origin not in (None, Callable):
        elements = tuple(element if element is ... else _accepted(element) for element in arguments)
        return types.GenericAlias(origin, elements)
    return {int: _Whole, float: _Real, bool: bool | np.bool_}.get(kind, kind)


@cache
def _annotations(owner: Any) -> dict[str, Any]:
    """Annotations of a function or dataclass, without those that only a type checker can
    resolve.
    """
    annotations: dict[str, Any] = {}
    for part in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        names = vars(inspect.getmodule(part))
        for name, text in getattr(part, "__annotations__", {}).items():
            try:
                # this package's own source
                annotations[name] = eval(text, names) if isinstance(text, str) else text
            except NameError:
                continue
    return annotations
