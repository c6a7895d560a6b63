"""Run the forward pass of a denoising step directly, or as a CUDA graph captured for each shape and set of prompts.

A graph fixes the addresses of its tensors. Each owns copies of its inputs: a replay copies the new values into those that
change and reads the fixed outputs, without host synchronisation. Shape suffixes as in :mod:`.transformer`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer, Rope, TextKV

_WARM_UP_RUNS = 3
_KEPT_GRAPHS = 8
Velocities = tuple[torch.Tensor, torch.Tensor]
_Fixed = tuple[tuple[TextKV, ...], ActionHead, slice, slice]  # prompts, head and groups: keys of a graph


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]  # that a replay overwrites
    run: Callable[[], Velocities]  # what was captured; holds all that the graph reads
    outputs: Velocities


class VelocityRunner:
    """Runs :meth:`Cosmos3Transformer.velocity` directly, or with ``capture`` through CUDA graphs."""

    def __init__(self, transformer: Cosmos3Transformer, capture: bool):
        self._transformer = transformer
        self._capture = capture
        self._graphs: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()

    def __call__(
        self,
        vision_VP: torch.Tensor,
        action_TA: torch.Tensor,
        time_D: torch.Tensor,
        noisy_N1: torch.Tensor,
        rope: Rope,
        texts: tuple[TextKV, ...],
        head: ActionHead,
        vision_group: slice,
        action_group: slice,
    ) -> Velocities:
        """As :meth:`Cosmos3Transformer.velocity`."""
        inputs, fixed = (vision_VP, action_TA, time_D, noisy_N1, *rope), (texts, head, vision_group, action_group)
        if not self._capture:
            return self._velocity(inputs, fixed)
        # Prompts and heads are keyed by identity: a graph keeps its own alive, so an id is never reused.
        bounds = vision_group.start, vision_group.stop, action_group.start, action_group.stop
        key = (vision_VP.shape, action_TA.shape, tuple(map(id, texts)), id(head), bounds)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._captured(inputs, fixed)
            if len(self._graphs) > _KEPT_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        for held, fresh in zip(captured.inputs, inputs, strict=True):
            held.copy_(fresh)
        captured.graph.replay()
        return captured.outputs[0].clone(), captured.outputs[1].clone()

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def _velocity(self, inputs: tuple[torch.Tensor, ...], fixed: _Fixed) -> Velocities:
        vision_VP, action_TA, time_D, noisy_N1, cos, sin = inputs
        return self._transformer.velocity(vision_VP, action_TA, time_D, noisy_N1, (cos, sin), *fixed)

    def _captured(self, changing: tuple[torch.Tensor, ...], fixed: _Fixed) -> _Captured:
        inputs = tuple(tensor.clone() for tensor in changing)
        run = partial(self._velocity, inputs, fixed)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        return _Captured(graph, inputs, run, outputs)
