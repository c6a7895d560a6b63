"""What a checkpoint says of weights that it stores in 8 bits: their scales, and in which precision
each denoising step runs.

Source of the step policy: NVIDIA's FP8 revisions of Cosmos 3, ``quantization_config.runtime.
diffusion_step_policy`` in ``transformer/config.json``, as diffusers 0.42.1
``pipelines/cosmos/mixed_precision.py`` reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import shown

if TYPE_CHECKING:
    import torch

Family = Literal["int8", "fp8"]
STORED_DTYPES: Mapping[Family, str] = {"fp8": "F8_E4M3", "int8": "I8"}
MODES = ("a16", "native")


@dataclass(frozen=True)
class StoredScale:
    """Scales of one linear layer.

    Args:
        weight: [1] or [rows], float32; None if the weight was changed since, e.g. by an adapter.
        activation: Fixed scale of the layer's input; None is measured at each call.
    """

    weight: torch.Tensor | None = None
    activation: float | None = None

    def part(self, index: Any) -> torch.Tensor | None:
        """The weight's scales for a part of the weight: a row, or slices."""
        if self.weight is None or len(self.weight) == 1 or index == ():
            return self.weight
        return self.weight[index if isinstance(index, int) else index[0]]


_VALID: Mapping[str, tuple[Any, ...]] = {
    "schema_version": (1,),
    "type": ("first_last_n",),
    "index_space": ("denoising_loop_iteration",),
    "scope": (["transformer"],),
    "default_mode": ("native",),
    "overlap": MODES,
    "reasoner": MODES,
}
_WINDOWS = ("first_steps", "last_steps")


@dataclass(frozen=True)
class StepPolicy:
    """Which denoising steps compute with activations as they are (W8A16, ``a16``); the others round
    them to 8 bits (W8A8, ``native``).

    Args:
        first_steps, last_steps: Steps in ``a16`` at the beginning and at the end.
        overlap: Mode of steps that are both among the first and among the last.
        reasoner: Mode of the text tower.
    """

    first_steps: int
    last_steps: int
    overlap: str
    reasoner: str

    @classmethod
    def parse(cls, policy: Any, where: str) -> StepPolicy:
        """Read ``diffusion_step_policy``; raises LayoutError for a field, value or version that is
        unknown.
        """
        names = (*_VALID, *_WINDOWS)
        if not isinstance(policy, Mapping) or set(policy) != set(names):
            raise LayoutError(
                f"{where}: diffusion_step_policy must have exactly {', '.join(names)}, got "
                f"{shown(policy)}; the checkpoint needs a newer version of this package."
            )
        for name, valid in _VALID.items():
            _require(policy[name], valid, name, where)
        first, last = (_count(policy[name], name, where) for name in _WINDOWS)
        return cls(first, last, policy["overlap"], policy["reasoner"])

    def is_a16(self, step: int, steps: int) -> bool:
        """Whether a step of so many is computed in ``a16``; a single step never is."""
        if steps == 1:
            return False
        is_first, is_last = step < self.first_steps, step >= steps - self.last_steps
        return self.overlap == "a16" if is_first and is_last else is_first or is_last


def _require(value: Any, valid: tuple[Any, ...], name: str, where: str) -> None:
    if value not in valid or isinstance(value, bool):
        raise LayoutError(
            f"{where}: diffusion_step_policy.{name} is {shown(value)}; "
            f"valid: {', '.join(map(str, valid))}."
        )


def _count(window: Any, name: str, where: str) -> int:
    """Steps of a window in ``a16``."""
    sound = isinstance(window, Mapping) and set(window) == {"count", "mode"}
    if not sound or type(window["count"]) is not int or window["count"] < 0:
        raise LayoutError(
            f"{where}: diffusion_step_policy.{name} must be a count of at least 0 and a "
            f"mode, got {shown(window)}."
        )
    _require(window["mode"], MODES, f"{name}.mode", where)
    return window["count"] if window["mode"] == "a16" else 0


@dataclass(frozen=True)
class EightBit:
    """How a checkpoint stores some of its weights.

    Args:
        family: Their type. scales: By the name of a weight. policy: None is the same at every step.
        weights_only: Whether activations are never rounded (W8A16).
        excluded: Patterns of layers that it states are not in 8 bits, as :mod:`fnmatch` reads them.
    """

    family: Family
    scales: Mapping[str, StoredScale] = field(repr=False)
    policy: StepPolicy | None = None
    weights_only: bool = False
    excluded: Collection[str] = ()

    @property
    def dtype(self) -> str:
        """Their type as safetensors calls it."""
        return STORED_DTYPES[self.family]

    def excludes(self, name: str) -> bool:
        """Whether a weight's layer is stated not to be in 8 bits, by any whole part of its name."""
        return any(fnmatchcase(f".{name}", f"*.{pattern}.*") for pattern in self.excluded)

    def renamed(self, names: Mapping[str, str]) -> EightBit:
        """The same under other names, new -> old; the others are left out."""
        scales = {new: self.scales[old] for new, old in names.items() if old in self.scales}
        return replace(self, scales=scales)

    def changed(self, names: Mapping[str, object]) -> EightBit:
        """The same with other numbers in some weights: these get new scales when they are
        loaded.
        """
        scales = {
            name: StoredScale(None, scale.activation) if name in names else scale
            for name, scale in self.scales.items()
        }
        return replace(self, scales=scales)
