"""Weights made of other weights, part by part: renamed, laid over a base, dequantised, or with
an adapter merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from strands_cosmos3.engine.weight_files import Index, WeightSource, readable, require_finite
from strands_cosmos3.errors import WeightsError

Wanted = Mapping[str, tuple[str, Index]]


class Renamed(WeightSource):
    """Some weights of a source under other names, ``names``: released -> stored."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]):
        self.source = source
        self.names = dict(names)
        self.folder = source.folder
        self.shapes = {name: source.shapes[stored] for name, stored in names.items()}
        self.dtypes = {name: source.dtypes[stored] for name, stored in names.items()}

    @property
    def files(self) -> tuple[Path, ...]:
        return self.source.files

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        return self.source.parts(
            {key: (self.names[name], index) for key, (name, index) in requests.items()}
        )


class Overlay(WeightSource):
    """The weights of ``over``, and those of ``base`` that it lacks. Raises WeightsError for a
    weight that does not fit.
    """

    def __init__(self, base: WeightSource, over: WeightSource):
        self.base = base
        self.over = over
        self.folder = over.folder
        over.check({name: base.shapes.get(name, ()) for name in over.shapes if name in base.shapes})
        self.shapes = base.shapes | over.shapes
        self.dtypes = base.dtypes | over.dtypes

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.base.files, *self.over.files)

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        for source in (self.base, self.over):
            mine = {
                key: request
                for key, request in requests.items()
                if (request[0] in self.over.shapes) == (source is self.over)
            }
            yield from source.parts(mine)


class Dequantized(WeightSource):
    """Weights of which some are FP8 with one scale a tensor (ModelOpt): ``weight * weight_scale``,
    in float32.

    Raises WeightsError if a scale is missing, has another shape, or is not above zero.
    """

    def __init__(self, source: WeightSource):
        self.source = source
        self.folder = source.folder
        self.quantized = tuple(
            sorted(key for key, dtype in source.dtypes.items() if dtype == "F8_E4M3")
        )
        scales = {key: f"{key}_scale" for key in self.quantized}
        if lost := [name for name in scales.values() if source.shapes.get(name) not in ((), (1,))]:
            raise WeightsError(
                f"{source.folder} has no single number {', '.join(lost[:6])}; FP8 weights need "
                "their scales."
            )
        stored = source.parts({key: (name, ()) for key, name in scales.items()})
        self._scale_of = {key: float(scale.float().item()) for key, scale in stored}
        if wrong := [key for key, scale in self._scale_of.items() if not 0 < scale < float("inf")]:
            raise WeightsError(
                f"the scales of {', '.join(wrong[:6])} are not positive numbers; download it again."
            )
        aside = set(scales.values()) | {
            f"{key.removesuffix('.weight')}.input_scale" for key in self.quantized
        }
        self.shapes = {key: shape for key, shape in source.shapes.items() if key not in aside}
        self.dtypes = {key: "F32" if key in scales else source.dtypes[key] for key in self.shapes}

    @property
    def files(self) -> tuple[Path, ...]:
        return self.source.files

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        for key, part in self.source.parts(requests):
            scale = self._scale_of.get(requests[key][0])
            yield key, part if scale is None else part.float().mul_(scale)


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
        self.factors = dict(factors)
        self.scales = scales
        self.folder = adapter.folder
        self.shapes = base.shapes
        self.dtypes = base.dtypes
        for name, (a, b) in self.factors.items():
            shape = base.shapes.get(name)
            A = adapter.shapes[a]
            B = adapter.shapes[b]
            if shape is None or len(A) != 2 or len(B) != 2 or A[0] != B[1] or (B[0], A[1]) != shape:
                raise WeightsError(
                    f"the adapter of {readable(name)} has shapes {list(B)} x {list(A)}, the base "
                    f"{list(shape or ())}: "
                    "it belongs to another base."
                )

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.base.files, *self.adapter.files)

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
