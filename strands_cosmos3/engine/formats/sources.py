"""Weights made of other weights, part by part: renamed, laid over a base, dequantised, or with
an adapter merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from strands_cosmos3.engine.weight_files import Index, WeightSource, readable, require_finite
from strands_cosmos3.errors import WeightsError

Wanted = Mapping[str, tuple[str, Index]]


class Renamed(WeightSource):
    """Some weights of a source under other names, ``names``: released -> stored."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]):
        self.source = source
        self.sources = (source,)
        self.names = dict(names)
        self.folder = source.folder
        self.shapes = {name: source.shapes[stored] for name, stored in names.items()}
        self.dtypes = {name: source.dtypes[stored] for name, stored in names.items()}
        if source.eight_bit is not None:
            self.eight_bit = source.eight_bit.renamed(names)

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        return self.source.parts(
            {key: (self.names[name], index) for key, (name, index) in requests.items()}
        )


class Overlay(WeightSource):
    """The weights of ``over``, and those of ``base`` that it lacks. Raises WeightsError for a
    weight that does not fit.
    """

    def __init__(self, base: WeightSource, over: WeightSource):
        self.sources = (base, over)
        self.folder = over.folder
        over.check({name: base.shapes.get(name, ()) for name in over.shapes if name in base.shapes})
        self.shapes = base.shapes | over.shapes
        self.dtypes = base.dtypes | over.dtypes
        if base.eight_bit is not None:
            self.eight_bit = base.eight_bit.changed(over.shapes)

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        _, over = self.sources
        for source in self.sources:
            mine = {
                key: request
                for key, request in requests.items()
                if (request[0] in over.shapes) == (source is over)
            }
            yield from source.parts(mine)


class WithLora(WeightSource):
    """Weights with low-rank adapters merged: ``W + scale * B @ A``, in float32.

    Args:
        base: The weights W [out, in].
        adapter: The factors. factors: Name of W -> names of A [rank, in] and B [out, rank].
        scales: Name of W -> scale.

    Raises WeightsError if an adapter has no weight to change, or another shape.
    """

    def __init__(
        self,
        base: WeightSource,
        adapter: WeightSource,
        factors: Mapping[str, tuple[str, str]],
        scales: Mapping[str, float],
    ):
        self.base = base
        self.adapter = adapter
        self.sources = (base, adapter)
        self.factors = dict(factors)
        self.scales = scales
        self.folder = adapter.folder
        self.shapes = base.shapes
        self.dtypes = base.dtypes
        if base.eight_bit is not None:
            self.eight_bit = base.eight_bit.changed(factors)
        for name, (a, b) in self.factors.items():
            shape = base.shapes.get(name)
            A = adapter.shapes[a]
            B = adapter.shapes[b]
            if shape is None or len(A) != 2 or len(B) != 2 or A[0] != B[1] or (B[0], A[1]) != shape:
                raise WeightsError(
                    f"the adapter of {readable(name)} has shapes {list(B)} x {list(A)}, the base "
                    f"{list(shape or ())}: it belongs to another base."
                )

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        for key, part in self.base.parts(requests):
            name, index = requests[key]
            yield key, part if name not in self.factors else self._merged(name, index, part)

    def _merged(self, name: str, index: Index, part: torch.Tensor) -> torch.Tensor:
        a, b = self.factors[name]
        rows, columns = (
            (index, ()) if isinstance(index, int) else (index[:1], (slice(None), *index[1:2]))
        )
        factors = dict(self.adapter.parts({"A": (a, columns), "B": (b, rows)}))
        for factor, stored in (("A", a), ("B", b)):
            require_finite(factors[factor], stored)
        # ``part`` may be the file itself
        return (factors["B"].float() @ factors["A"].float()).mul_(self.scales[name]).add_(part)
