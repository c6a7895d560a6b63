"""How far a run in float32 may be from what it computes: the rule of every comparison of the engine
with diffusers, and with itself in another arrangement.

Two correct runs in float32 differ, since kernels of another processor, and for other shapes, sum in
another order, and a model amplifies that: on the small random checkpoints of the tests a root mean
square of up to 37 roundings of the largest number. A bound on the difference of two runs that one
processor keeps is therefore a fact about that processor. Each is compared with a run in float64 of
the same weights instead, in which no rounding shows:

    rms(ours - exact) <= 2 rms(diffusers - exact) + 8 roundings of the largest number

Root mean squares, since the largest of a thousand errors is a draw of their tail. Measured over 480
comparisons (two kinds, three modes, 2 to 8 steps, 8 seeds) under each of the five settings of
helpers/instructions.py on an AMD EPYC: our error is 0.5 to 2.3 times that of diffusers, the median
is 1.01, and it exceeds twice that of diffusers by at most 2.9 roundings. What is allowed is itself
bounded, at 264 roundings (1.6e-5 of the largest number), however diffusers errs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from helpers.cosmos3_oracle import Case, engine, oracle, pipeline, request, without_float32
from helpers.stock_loop import Sequence, stock_loop
from strands_cosmos3.engine.quantised import PackedInt8Linear, QuantizedLinear

ROUNDING = 2.0**-24
"""The largest relative error of one rounding to float32."""
FEW = 8
MOST = 128
"""Roundings of the largest number that diffusers' own error may be. More says that the two runs are
not of the same thing, and would allow ours anything."""


def rms(error: Any) -> float:
    return float(torch.as_tensor(error).double().square().mean().sqrt())


def allowed(exact: Any, peer: Any, most: float = MOST) -> float:
    """The root mean square error that is allowed, given the answer in float64 and a peer's."""
    exact, peer = torch.as_tensor(exact), torch.as_tensor(peer)
    assert exact.dtype is torch.float64
    rounding, error = ROUNDING * float(exact.abs().max()), rms(peer - exact)
    assert error <= most * rounding, "the peer computes something else"
    return 2 * error + FEW * rounding


def share(found: Any, exact: Any, peer: Any, most: float = MOST) -> float:
    """The error of ``found`` as a share of what is allowed; infinite where it is not finite."""
    exact, found = torch.as_tensor(exact), torch.as_tensor(found)
    assert found.shape == exact.shape
    value = rms(found - exact) / allowed(exact, peer, most)
    return value if math.isfinite(value) else math.inf


def agree(one: Any, other: Any) -> bool:
    """Whether two arrangements of the same sums in float32 agree where no run in float64 is at hand:
    each may err by MOST roundings of the largest number, as a peer may.
    """
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return rms(one - other) <= 2 * MOST * ROUNDING * float(other.abs().max())


@dataclass(frozen=True)
class Reference:
    """What a request's answer is in float64, and by a peer: name -> numbers."""

    exact: Mapping[str, torch.Tensor]
    peer: Mapping[str, torch.Tensor]
    most: float = MOST

    def share(self, found: Mapping[str, Any]) -> float:
        """The largest share over all that both have, of which there is something."""
        return max(
            share(torch.as_tensor(found[name]).reshape(exact.shape), exact, peer, self.most)
            for name, exact, peer in self._pairs()
            if name in found
        )

    def allowed(self, name: str) -> float:
        return allowed(self.exact[name], self.peer[name], self.most)

    def in_bfloat16(self, peer: Mapping[str, Any]) -> Reference:
        """The same with a peer's answer in bfloat16, whose roundings are no few of float32."""
        found = {name: torch.as_tensor(peer[name]) for name in self.peer if name in peer}
        shaped = {name: each.reshape(self.exact[name].shape) for name, each in found.items()}
        return Reference(self.exact, shaped, math.inf)

    def _pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return [(name, self.exact[name], peer) for name, peer in self.peer.items()]


def reference(folder: Any, asked: Any, state_rows: int = 0) -> Reference:
    """The reference of any request, by the plain loop over diffusers' transformer."""
    sequence = sequence_of(folder, asked, state_rows)
    exact, peer = (
        _named(stock_loop(folder, sequence, dtype)) for dtype in (torch.float64, torch.float32)
    )
    return Reference(exact, peer)


def _named(found: Any) -> dict[str, torch.Tensor]:
    """What there is of an answer, by name."""
    named = zip(("video", "action", "sound"), found, strict=True)
    return {name: each for name, each in named if each is not None}


@cache
def reference_of(case: Case) -> Reference:
    """The reference of a case; the peer is the pipeline, in the case's type."""
    peer = _named(oracle(case))
    if case.dtype is torch.bfloat16:
        return reference_of(replace(case, dtype=torch.float32)).in_bfloat16(peer)
    sequence = sequence_of(case.folder, request(case))
    return Reference(_named(stock_loop(case.folder, sequence, torch.float64)), peer)


def in_float64(model: torch.nn.Module) -> Any:
    """A copy that computes in float64 throughout."""
    exact = copy.deepcopy(model).double()
    without_float32(exact)
    return exact


def of_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The most [.., N] by which two sums of the same products ``x @ weight.T`` differ in float32,
    whatever their order: K additions and a few scales round each of them.
    """
    return 2 * (x.shape[-1] + FEW) * ROUNDING * (x.abs() @ weight.abs().T)


def of_neighbours(model: Any, asked: Any) -> dict[str, float]:
    """How far an engine's answer moves (root mean square of actions and video) where last bits of
    float32 round numbers that enter layers in 8 bits to their neighbours.

    Int8's second term has steps of ``largest of the token / (most * 2 * most)``, of the size of last
    bits: all numbers are moved by one, up or down. E4M3's neighbours are a sixteenth apart or more;
    an error of MOST roundings moves so many numbers that the answer moves by the root of their share.
    """
    drawing = torch.Generator().manual_seed(0)

    def changed(layer: Any, inputs: Any) -> Any:
        x = inputs[0]
        signs = 2 * torch.randint(0, 2, x.shape, generator=drawing) - 1
        if isinstance(layer, PackedInt8Linear):
            return (x + signs * x.abs().amax(-1, keepdim=True) / (2 * layer._most**2),)
        return None if layer.a16 else (x * (1 + signs / 16),)

    expected = model.step(asked)
    layers = [m for m in model.transformer.modules() if isinstance(m, QuantizedLinear)]
    hooks = [layer.register_forward_pre_hook(changed) for layer in layers]
    moved = model.step(asked)
    for hook in hooks:
        hook.remove()
    int8 = any(isinstance(layer, PackedInt8Linear) for layer in layers)
    factor = 1.0 if int8 else math.sqrt(2 * MOST * ROUNDING * 16)
    names = [name for name in ("action", "video") if name in expected]
    return {name: factor * rms(moved[name] - expected[name]) for name in names}


def asked_of(engine: Any, patch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that an engine, or every engine of a class, gets from now on."""
    asked: list[Any] = []
    original = engine.step_batch

    def step_batch(*arguments: Any, **options: Any) -> Any:
        asked.extend(arguments[isinstance(engine, type)])
        return original(*arguments, **options)

    patch.setattr(engine, "step_batch", step_batch)
    return asked


def case_share(case: Case, **changes: Any) -> float:
    """The share of the engine's answer to a case; ``changes`` replace fields of its request."""
    asked = replace(request(case), **changes)
    return reference_of(case).share(engine(case.folder, case.dtype, case.sound).step(asked))


def sequence_of(folder: Any, asked: Any, state_rows: int = 0) -> Sequence:
    """What a request asks for, as the loop is told; its noise is the seed's where it has none."""
    config = pipeline(folder, torch.float32).transformer.config
    rows = asked.action_chunk + state_rows + asked.history_rows
    shapes = {
        "video_noise": (1, config.latent_channel, *asked.video_shape),
        "action_noise": (rows, config.action_dim),
    }
    if asked.sound:
        duration_s = ((asked.video_shape[0] - 1) * 4 + 1) / asked.fps
        shapes["sound_noise"] = config.sound_dim, math.ceil(duration_s * config.sound_latent_fps)
    noise = {
        name: torch.from_numpy(
            np.random.RandomState(asked.seed).standard_normal(shape).astype(np.float32)
        )
        for name, shape in shapes.items()
        if getattr(asked, name) is None
    }
    given = torch.zeros(0, 1) if asked.action_prefix is None else asked.action_prefix
    if asked.mode == "forward_dynamics":
        known = asked.cond_action
        before = given[: state_rows + asked.history_rows].reshape(-1, known.shape[1])
        given = torch.cat([before, known, known[-1:].expand(asked.action_chunk - len(known), -1)])
    clean = range(asked.video_shape[0]) if asked.mode == "inverse_dynamics" else (0,)
    if asked.cond_frame_indexes is not None:
        clean = asked.cond_frame_indexes
    prompts = {
        "text_ids": _seen(asked.text_ids, asked.text_mask),
        "neg_text_ids": _seen(asked.neg_text_ids, asked.neg_text_mask),
        "text_mask": None,
        "neg_text_mask": None,
    }
    return Sequence(replace(asked, **prompts, **noise), state_rows, tuple(clean), given)


def _seen(ids: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The ids of a prompt that count, [n]."""
    if ids is None:
        return None
    return ids.flatten() if mask is None else ids.flatten()[mask.flatten() > 0]
