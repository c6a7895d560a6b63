"""Linear layers whose weights stay in 8 bits: which of a model's layers they are, how they
compute, and what they weigh.

``int8``: one scale a row of the weight and one a token, so that each result is the same alone and
in a batch; by fbgemm on a CPU and by ``torch._int_mm`` on a GPU. The GPU rounds activations to 8
bits (W8A8). The CPU multiplies them as two terms of 8 bits: rounding them to one took the bundled
policy's actions off by 2.9 % of the variance between seeds (2.0 % with rotated columns, 1.4 % in
groups of 32), rounding weights by 1.3 %. ``torch._int_mm`` overflows and is slow on CPUs without
VNNI, and ``torch._weight_int8pack_mm`` is slower than float32. ``int8-weights`` computes with
activations as they are (W8A16): it saves memory, not time. ``fp8`` is E4M3 by ``torch._scaled_mm``,
with the scales of the checkpoint or one a row and a token.

Embeddings, norms, projections of tokens and action heads are never quantised.

Shape suffixes: N rows of the weight, K its columns, M tokens.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.options import EngineOptions, Quantize
from strands_cosmos3.engine.precision import EightBit, StepPolicy, StoredScale
from strands_cosmos3.engine.weight_files import Slices
from strands_cosmos3.engine.weights import TEXT, checkpoint_key, parameter_shapes
from strands_cosmos3.errors import ConfigError

E4M3 = torch.float8_e4m3fn
_KERNELS: Any = torch.ops.aten
_LARGEST: Mapping[torch.dtype, float] = {torch.int8: 127.0, E4M3: 448.0}
_SMALLEST_SCALE = 1e-12
_BLOCK_ROWS = 32  # of a weight that are rounded at once
_LEAST_ROWS = 32  # that torch._int_mm multiplies on a GPU
_MULTIPLE: Mapping[str, int] = {"int8": 8, "fp8": 16}  # of a weight's sizes, on a GPU


@dataclass(frozen=True)
class Quantization:
    """How the weights of a loaded model are kept.

    Args:
        scheme: See :class:`~strands_cosmos3.engine.options.EngineOptions`.
        names: Released names of the weights that are kept in 8 bits.
        stored: What the checkpoint says of those that it stores so.
    """

    scheme: Quantize
    names: frozenset[str]
    stored: EightBit | None = None

    @property
    def policy(self) -> StepPolicy | None:
        """The precision of each step, if the checkpoint states it."""
        return self.stored.policy if self.stored is not None else None

    @classmethod
    def of(
        cls, config: TransformerConfig, stored: EightBit | None, options: EngineOptions
    ) -> Quantization | None:
        """What options ask for, else as the checkpoint stores its weights; None if nothing is
        quantised.
        """
        scheme = options.quantize or (None if stored is None else stored.family)
        if scheme is None:
            return None
        kept = stored if stored is not None and scheme.startswith(stored.family) else None
        names = linears(config, options.quantize_text) if options.quantize else frozenset[str]()
        if kept is not None:
            names |= linears(config, True) & kept.scales.keys()
        return cls(scheme, names, kept)

    def bytes_of(self, shape: tuple[int, ...], device: torch.device) -> int:
        """Bytes of a weight [N, K] and its scales."""
        return math.prod(shape) + shape[0] * (12 if self._packs(device) else 4)

    def _packs(self, device: torch.device) -> bool:
        return self.scheme == "int8" and device.type == "cpu"

    def layer(
        self, bias: nn.Parameter | None, device: torch.device, name: str = ""
    ) -> QuantizedLinear:
        """An empty layer for a device; ``name`` is its weight's."""
        stored = StoredScale() if self.stored is None else self.stored.scales.get(name)
        if self._packs(device):
            return PackedInt8Linear(bias, stored)
        layer = (Fp8Linear if self.scheme == "fp8" else Int8Linear)(bias, stored)
        layer.a16 = self.scheme == "int8-weights" or bool(self.stored and self.stored.weights_only)
        return layer

    def require_kernels(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raise ConfigError if a device cannot compute layers of these shapes in 8 bits."""
        multiple = _MULTIPLE.get(self.scheme, 1) if device.type == "cuda" else 1
        odd = [name for name, shape in shapes.items() if any(n % multiple for n in shape)]
        remedy = "use quantize='int8-weights', or leave it out"
        if odd:
            raise ConfigError(
                f"quantize {self.scheme!r}: {odd[0]} is {list(shapes[odd[0]])}, and a GPU needs "
                f"multiples of {multiple}; {remedy}."
            )
        layer = self.layer(None, device)
        try:
            layer.place((32, 32), device)
            layer.copy_(torch.ones(32, 32))
            with torch.inference_mode():
                layer(torch.ones(1, 4, 32, device=device, dtype=dtype))
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).split("\n")[0][:120]
            raise ConfigError(
                f"quantize {self.scheme!r}: {device} multiplies no such numbers as {dtype} "
                f"({reason}); {remedy}."
            ) from None


def linears(config: TransformerConfig, text: bool) -> frozenset[str]:
    """Released names of the weights of the generation tower's linear layers, with or without the
    text tower's.
    """
    return frozenset(
        checkpoint_key(name)
        for name, shape in parameter_shapes(config).items()
        if ".layers." in name and len(shape) == 2 and (text or not name.startswith(TEXT))
    )


class QuantizedLinear(nn.Module, ABC):
    """A linear layer with a weight in 8 bits, into which one is read.

    Args:
        stored: What the checkpoint says of the whole weight; None is nothing.

    Attributes:
        dtype: The weight's.
        shape: [N, K] of the weight.
        packed_bytes: Bytes of the weight if it is no parameter.
        a16: Whether activations are not rounded (W8A16).
    """

    dtype = torch.int8
    packed_bytes = 0
    bias: nn.Parameter | None

    def __init__(self, bias: nn.Parameter | None, stored: StoredScale | None = None):
        super().__init__()
        self.a16 = False
        self.shape: tuple[int, ...] = ()
        self.stored = stored or StoredScale()
        self.register_parameter("bias", bias)

    def place(self, shape: tuple[int, ...], device: torch.device, slices: Slices = ()) -> None:
        """Say where a weight [N, K] will be, ``slices`` of the whole one."""
        self.shape, self._device = shape, device
        self.stored = replace(self.stored, weight=self.stored.part(slices))

    def copy_(self, weight_NK: torch.Tensor) -> None:
        """Round a weight and keep it; one that was stored in 8 bits is the same again."""
        scale = self._scale(weight_NK).to(weight_NK.device)
        scale_N = scale.expand(len(weight_NK)).contiguous()
        self._keep(rounded(weight_NK, scale_N, self.dtype), scale_N)

    def _keep(self, weight_NK: torch.Tensor, scale_N: torch.Tensor) -> None:
        self.weight = _frozen(weight_NK.to(self._device))
        self.scale_N = _frozen(scale_N.to(self._device))

    def _scale(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """[N], or [1] for all rows."""
        if self.stored.weight is not None:
            return self.stored.weight
        scale_N = row_scales(weight_NK, self.dtype)
        return scale_N if self.stored.activation is None else scale_N.amax(0, keepdim=True)

    @abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The layer without its bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.product(x), self.bias
        return y if bias is None else y + bias


class Int8Linear(QuantizedLinear):
    """Weights in int8 with one scale a row, activations with one a token."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.a16:
            return F.linear(x, self.weight.to(x.dtype)) * self.scale_N.to(x.dtype)
        rows_MK, scale_M1 = _by_token(x, torch.int8)
        padded = F.pad(rows_MK, (0, 0, 0, max(0, _LEAST_ROWS - len(rows_MK))))
        y_MN = _KERNELS._int_mm(padded, self.weight.t())[: len(rows_MK)]
        return (y_MN * (scale_M1 * self.scale_N)).to(x.dtype).unflatten(0, x.shape[:-1])


class Fp8Linear(QuantizedLinear):
    """Weights and activations in E4M3: with the checkpoint's two numbers, or one scale a row and a
    token.
    """

    dtype = E4M3

    def _keep(self, weight_NK: torch.Tensor, scale_N: torch.Tensor) -> None:
        super()._keep(weight_NK, scale_N)
        fixed = self.stored.activation
        self.activation_scale = (
            None if fixed is None else _frozen(torch.tensor(fixed, device=self._device))
        )

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.a16:
            return F.linear(x, self.weight.to(x.dtype) * self.scale_N.to(x.dtype)[:, None])
        fixed = self.activation_scale
        if fixed is None:
            rows_MK, scale_M1 = _by_token(x, E4M3)
            scales = scale_M1, self.scale_N[None]
        else:
            rows_MK = _in_range(x.flatten(0, -2).float() / fixed, E4M3).to(E4M3)
            scales = fixed, self.scale_N[0]
        y_MN = _KERNELS._scaled_mm(
            rows_MK,
            self.weight.t(),
            *scales,
            # scales of rows have kernels for bfloat16 alone on a GPU
            out_dtype=torch.bfloat16 if fixed is None and x.is_cuda else x.dtype,
        )
        return y_MN.to(x.dtype).unflatten(0, x.shape[:-1])


class PackedInt8Linear(QuantizedLinear):
    """Weights as :class:`Int8Linear` has them, as fbgemm packs them for a CPU, and activations as
    the sum of two numbers of 8 bits: the second is what the first leaves, on a finer scale.
    """

    def __init__(self, bias: nn.Parameter | None, stored: StoredScale | None = None):
        super().__init__(bias, stored)
        self.packed: Any = None
        # without VNNI pairs of products of full range overflow 16 bits
        self._most = 127 if torch.cpu._is_vnni_supported() else 63
        # a tensor, since compiled code is of one number and of any tensor
        self._number = torch.tensor(id(self), device="cpu")
        _PACKED[id(self)] = self

    def _keep(self, weight_NK: torch.Tensor, scale_N: torch.Tensor) -> None:
        zeros = torch.zeros(len(scale_N), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            whole = _KERNELS._make_per_channel_quantized_tensor(
                weight_NK, scale_N.double(), zeros, 0
            )
        del weight_NK  # before it is packed
        engines: Any = torch.backends.quantized
        before = engines.engine
        engines.engine = "fbgemm"  # whose packed weights are the only copy that it keeps
        try:
            self.packed = torch.ops.quantized.linear_prepack(whole, None)
        finally:
            engines.engine = before
        self.packed_bytes = self.shape[0] * (self.shape[1] + 12)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedInt8Linear:
        if fn(torch.empty(0)).is_meta:
            self.packed, self.packed_bytes = None, 0
        return super()._apply(fn, recurse)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return packed_product(x, self._number, self.shape[0])
        wide = x.float()
        largest = wide.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST_SCALE)
        tokens = wide * (self._most / largest)
        coarse = tokens.round()
        finer = 2 * self._most  # which brings what rounding leaves to the same range
        terms = torch.stack([coarse, (tokens - coarse).mul_(finer)])
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y, y_of_rest = multiply(terms, 1.0, self._most + 1, self.packed)
        y.add_(y_of_rest, alpha=1 / finer).mul_(largest / self._most)
        return y.to(x.dtype)


_PACKED: WeakValueDictionary[int, PackedInt8Linear] = WeakValueDictionary()


@torch.library.custom_op("strands_cosmos3::packed_product", mutates_args=())
def packed_product(x: torch.Tensor, layer: torch.Tensor, rows: int) -> torch.Tensor:
    """The product of a :class:`PackedInt8Linear`, whose packed weight compiled code cannot
    hold.
    """
    return _PACKED[int(layer)].product(x)


@packed_product.register_fake
def _(x: torch.Tensor, layer: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def row_scales(weight_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N] float32 scales with which each row just fits a type of 8 bits."""
    most = [block.float().abs().amax(1) for block in weight_NK.split(_BLOCK_ROWS)]
    return (torch.cat(most) / _LARGEST[dtype]).clamp_(min=_SMALLEST_SCALE)


def rounded(weight_NK: torch.Tensor, scale_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight in a type of 8 bits."""
    result_NK = torch.empty(weight_NK.shape, dtype=dtype, device=weight_NK.device)
    blocks = [tensor.split(_BLOCK_ROWS) for tensor in (weight_NK, scale_N, result_NK)]
    for block, scale_of_block, place in zip(*blocks, strict=True):
        place.copy_(_in_range(block.float() / scale_of_block[:, None], dtype))
    return result_NK


def _in_range(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = _LARGEST[dtype]
    numbers = numbers.clamp(-most, most)
    return numbers.round() if dtype is torch.int8 else numbers


def _by_token(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, K] in a type of 8 bits, and their scales [M, 1]."""
    rows = x.flatten(0, -2).float()
    scale_M1 = (rows.abs().amax(1, keepdim=True) / _LARGEST[dtype]).clamp(min=_SMALLEST_SCALE)
    return _in_range(rows / scale_M1, dtype).to(dtype), scale_M1


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def install(
    model: nn.Module, quantization: Quantization, device: torch.device
) -> dict[str, QuantizedLinear]:
    """Replace layers of a model by empty quantised ones; return them by the parameter's name."""
    layers: dict[str, QuantizedLinear] = {}
    for name, module in [*model.named_modules()]:
        parameter = f"{name}.weight"
        key = checkpoint_key(parameter)
        if isinstance(module, nn.Linear) and key in quantization.names:
            owner, _, last = name.rpartition(".")
            layers[parameter] = quantization.layer(module.bias, device, key)
            setattr(model.get_submodule(owner), last, layers[parameter])
    return layers


def packed_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights that are no parameters."""
    return sum(layer.packed_bytes for layer in _layers(model))


class StepPrecision:
    """Switches a model's layers between W8A16 and W8A8 as a checkpoint's policy says.

    Args:
        model: With towers ``text`` and ``generation``.
        policy: None leaves the layers as they are.
    """

    def __init__(self, model: Any, policy: StepPolicy | None):
        self._policy = policy
        if policy is not None:
            self._layers = _layers(model.generation)
            for layer in _layers(model.text):
                layer.a16 = policy.reasoner == "a16"

    def select(self, step: int, steps: int) -> None:
        """Prepare the generation tower for a step."""
        if self._policy is not None:
            is_a16 = self._policy.is_a16(step, steps)
            for layer in self._layers:
                layer.a16 = is_a16


def _layers(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]
