"""Run the forward pass of a denoising step directly, compiled, or as a CUDA graph for each shape.

Graphs and compiled code are for fixed shapes. The prompts of all branches are therefore padded to
one length, a multiple of :data:`BUCKET`, and a mask hides the padding: one graph serves all prompts
up to that length. A graph also fixes the addresses of its tensors. Each owns copies of its inputs:
a replay copies the new values into those that change and reads the fixed outputs, without host
synchronisation. All graphs of an engine share one memory pool. Shape suffixes as in
:mod:`.transformer`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from strands_cosmos3.engine.parallel_context import Velocities
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer, Rope, TextKV
from strands_cosmos3.errors import ConfigError

BUCKET = 256
_WARM_UP_RUNS = 3
_KEPT = 8  # graphs, and places for prompts
_SHAPES = 64  # that may be compiled
_CAPTURING = threading.Lock()  # torch allows one capture at a time in a process
_Texts = tuple[TextKV, ...]
_Groups = tuple[slice, slice]
_K = TypeVar("_K")


class _PromptBuffer:
    """Memory of fixed address for the prompts of all branches."""

    def __init__(self, texts: _Texts, tokens: int):
        self.padded = TextKV.padded(texts, tokens)
        self._loaded: _Texts = ()  # alive here, so that comparing identities is safe

    def load(self, texts: _Texts) -> TextKV:
        """Copy prompts there unless they are there already."""
        if len(texts) != len(self._loaded) or any(
            a is not b for a, b in zip(texts, self._loaded, strict=True)
        ):
            self.padded.fill(texts)
            self._loaded = texts
        return self.padded


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]  # that a replay overwrites
    prompts: _PromptBuffer
    head: ActionHead  # a copy, for all domains
    run: Callable[[], Velocities]  # what was captured; holds all that the graph reads
    outputs: Velocities


class VelocityRunner:
    """Runs :meth:`Cosmos3Transformer.velocity`.

    Args:
        device: The model's; a capture and a replay select it, since worker threads start with the
            first GPU.
        capture: Whether to capture and replay CUDA graphs.
        compiler: Backend of ``torch.compile``, e.g. ``inductor``; None does not compile.
        padded: Whether prompts are padded without graphs and compilation as well.
    """

    def __init__(
        self,
        transformer: Cosmos3Transformer,
        device: torch.device,
        *,
        capture: bool = False,
        compiler: str | None = None,
        padded: bool = False,
    ):
        self._device = device
        self._capture = capture
        self._padded = padded or capture or compiler is not None
        self._transformer = transformer
        self._compiled: Callable[..., Velocities] | None = None
        if compiler is not None:
            self._compiled = torch.compile(
                transformer.velocity, fullgraph=True, dynamic=False, backend=compiler
            )
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._prompts: OrderedDict[Hashable, _PromptBuffer] = OrderedDict()
        self._pool: Any = None

    def __call__(
        self,
        vision_VP: torch.Tensor,
        action_TA: torch.Tensor,
        time_D: torch.Tensor,
        noisy_N1: torch.Tensor,
        rope: Rope,
        texts: _Texts,
        head: ActionHead,
        vision_group: slice,
        action_group: slice,
        is_a16: bool = False,
    ) -> Velocities:
        """As :meth:`Cosmos3Transformer.velocity`; ``is_a16`` tells graphs of quantised layers
        apart. Raises ConfigError if the forward pass cannot be compiled.
        """
        inputs = (vision_VP, action_TA, time_D, noisy_N1, *rope)
        groups = (vision_group, action_group)
        if not self._padded:
            return self._run(inputs, texts, head, groups)
        tokens = -(-max(text.tokens for text in texts) // BUCKET) * BUCKET
        prompts = _kept(self._prompts, (len(texts), tokens), lambda: _PromptBuffer(texts, tokens))
        if not self._capture:
            return self._run(inputs, prompts.load(texts), head, groups)
        with torch.cuda.device(self._device):
            return self._replay(inputs, texts, prompts, head, groups, is_a16)

    def clear(self) -> None:
        """Drop all graphs and prompts."""
        self._graphs.clear()
        self._prompts.clear()
        self._pool = None

    def _run(
        self,
        inputs: tuple[torch.Tensor, ...],
        texts: _Texts | TextKV,
        head: ActionHead,
        groups: _Groups,
    ) -> Velocities:
        vision_VP, action_TA, time_D, noisy_N1, cos, sin = inputs
        arguments = vision_VP, action_TA, time_D, noisy_N1, (cos, sin), texts, head, *groups
        return (
            self._transformer.velocity(*arguments)
            if self._compiled is None
            else _call_compiled(self._compiled, *arguments)
        )

    def _replay(
        self,
        inputs: tuple[torch.Tensor, ...],
        texts: _Texts,
        prompts: _PromptBuffer,
        head: ActionHead,
        groups: _Groups,
        is_a16: bool,
    ) -> Velocities:
        bounds = tuple((group.start, group.stop) for group in groups)
        key = (*(tensor.shape for tensor in (*inputs, head.b_in)), prompts.padded.tokens, bounds)
        key = (*key, is_a16)
        captured = _kept(
            self._graphs, key, lambda: self._captured(inputs, texts, prompts, head, groups)
        )
        captured.prompts.load(texts)
        places = (*captured.inputs, *vars(captured.head).values())
        for place, fresh in zip(places, (*inputs, *vars(head).values()), strict=True):
            place.copy_(fresh)
        captured.graph.replay()
        return captured.outputs[0].clone(), captured.outputs[1].clone()

    def _captured(
        self,
        changing: tuple[torch.Tensor, ...],
        texts: _Texts,
        prompts: _PromptBuffer,
        head: ActionHead,
        groups: _Groups,
    ) -> _Captured:
        inputs = tuple(tensor.clone() for tensor in changing)
        head = ActionHead(**{name: tensor.clone() for name, tensor in vars(head).items()})
        run = partial(self._run, inputs, prompts.load(texts), head, groups)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _CAPTURING,
            torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            outputs = run()
        return _Captured(graph, inputs, prompts, head, run, outputs)


def _kept(cache: OrderedDict[Hashable, _K], key: Hashable, make: Callable[[], _K]) -> _K:
    """The value of a key, made if it is missing; the least recently used of more than
    :data:`_KEPT` is dropped.
    """
    if key not in cache:
        cache[key] = make()
        if len(cache) > _KEPT:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def _call_compiled(velocity: Callable[..., Velocities], *args: Any) -> Velocities:
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    try:
        with config.patch(recompile_limit=_SHAPES):
            return velocity(*args)
    except TorchDynamoException as error:
        reason = " ".join(str(error).split("\n")[:2])
        raise ConfigError(
            f"compile failed: {reason}. Leave compile out; on a CPU it needs a C++ compiler (CXX)."
        ) from error
