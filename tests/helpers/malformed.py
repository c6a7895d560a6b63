"""A generator of malformed calls: arguments of good calls, one or two of them replaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

HUGE = 10**30
JUNK = (
    *(
        None,
        object(),
        "x",
        "",
        "\0",
        "5",
        b"x",
        1j,
        np.nan,
        np.inf,
        -np.inf,
        -1,
        0,
        0.5,
        HUGE,
        -HUGE,
        1e300,
        True,
    ),
    *([], {}, (), set(), [None], ["x"], {"x": 1}, {1: 2}, [[0.0], [0.0, 1.0]], [[[1]]], range(3)),
    *(
        np.zeros(0),
        np.zeros((2, 0)),
        np.zeros((2, 3, 4)),
        np.float32(np.nan),
        np.array("x"),
        np.array([None, "x"]),
        np.ones(7),
    ),
    *(float, lambda: None, Path("/nowhere/x"), Path("x.mp4"), Exception("x")),
)


@dataclass(frozen=True)
class Call:
    """A public function and good arguments; ``fixed`` ones are never replaced."""

    function: Any
    good: dict[str, Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def label(self) -> str:
        """``name``, or that of the function, as ``Class.method`` of a bound method."""
        if self.name:
            return self.name
        owner = getattr(self.function, "__self__", None)
        cls = owner if isinstance(owner, type) else type(owner)
        name = self.function.__name__
        return name if owner is None else f"{cls.__name__}.{name}"

    def spoiled(self, rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
        """Return a description and the arguments with one or two of them malformed."""
        names = list(self.good)
        chosen = rng.choice(names, size=min(len(names), 1 + int(rng.random() < 0.2)), replace=False)
        wrong = {str(name): _malformed(rng, self.good[str(name)]) for name in chosen}
        return (
            f"{self.label}({', '.join(f'{name}={value!r:.60}' for name, value in wrong.items())})",
            {
                **self.good,
                **self.fixed,
                **wrong,
            },
        )


def _malformed(rng: np.random.Generator, good: Any) -> Any:
    if isinstance(good, np.ndarray) and good.dtype.kind == "f" and good.size and rng.random() < 0.6:
        return _spoiled_array(rng, good)
    if isinstance(good, torch.Tensor) and rng.random() < 0.6:
        return _spoiled_tensor(rng, good)
    return JUNK[int(rng.integers(len(JUNK)))]


def _spoiled_array(rng: np.random.Generator, good: np.ndarray) -> Any:
    bad = good.copy()
    where = tuple(int(rng.integers(n)) for n in bad.shape)
    kind = int(rng.integers(9))
    if kind < 3:
        bad[where] = (np.nan, -np.inf, 10.0 ** rng.uniform(3, 300))[kind]
        return bad
    return (
        bad[..., :-1] if bad.ndim else [],
        np.concatenate([bad, bad], axis=-1) if bad.ndim else [bad, bad],
        bad[None],
        bad + 1j,
        bad.astype(str),
        bad.astype(object),
    )[kind - 3]


def _spoiled_tensor(rng: np.random.Generator, good: torch.Tensor) -> torch.Tensor:
    bad = good.clone()
    if good.is_floating_point() and good.numel() and rng.random() < 0.4:
        bad.view(-1)[int(rng.integers(bad.numel()))] = (np.nan, -np.inf)[int(rng.integers(2))]
        return bad
    return (
        bad[..., :-1] if bad.ndim else bad[None],
        bad[None],
        bad[:0],
        bad.to(torch.complex64),
        -bad.to(torch.int64) - 10**6,
    )[int(rng.integers(5))]
