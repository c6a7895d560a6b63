"""What makes the denoising loop fast on a GPU: its layers compiled, and the loop as CUDA graphs.

A graph fixes the shapes and the addresses of its tensors. Each owns copies of its inputs: a replay
copies new values into them and clones the outputs, without host synchronisation. All graphs of an
engine share one memory pool.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from strands_cosmos3.engine.transformer import GenerationTower
from strands_cosmos3.errors import ConfigError

_WARM_UP_RUNS = 2
_KEPT = 8  # graphs
_SHAPES = 64  # that may be compiled: kinds of layers, batches of one and of more
_CAPTURING = threading.Lock()  # torch allows one capture at a time in a process


def compile_layers(tower: GenerationTower, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the layers of a tower, which share one graph for any number of tokens. The last one
    computes some groups of tokens only, and stays as it is.
    """
    for layer in tower.layers[:-1]:
        layer.compile(fullgraph=True, dynamic=True, backend=backend)


@contextmanager
def compiling() -> Iterator[None]:
    """Where compiled layers run; raises ConfigError if they cannot be compiled."""
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    try:
        with config.patch(recompile_limit=_SHAPES):
            yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).split("\n")[:2])
        raise ConfigError(
            f"compile failed: {reason}. Leave compile out; on a CPU it needs a C++ compiler (CXX)."
        ) from error


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]  # that a replay overwrites
    run: Callable[[], tuple[torch.Tensor, ...]]  # what was captured; holds all that the graph reads
    outputs: tuple[torch.Tensor, ...]


class Graphs:
    """Runs a function as a CUDA graph, one for each structure of its arguments.

    Args:
        device: Of the tensors; a capture and a replay select it, since worker threads start with
            the first GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._graphs: OrderedDict[Any, _Captured] = OrderedDict()
        self._pool: Any = None

    def __call__(
        self, function: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the function's tensors. Arguments are tuples and frozen dataclasses of tensors
        and of hashable values; the values tell graphs apart, as do shapes.
        """
        tensors: dict[int, torch.Tensor] = {}
        numbers: dict[int, int] = {}

        def described(tensor: torch.Tensor) -> tuple[Any, ...]:
            tensors[id(tensor)] = tensor
            return numbers.setdefault(id(tensor), len(numbers)), tensor.shape

        key = _mapped(arguments, described)
        with torch.cuda.device(self._device):
            if key not in self._graphs:
                inputs = {number: tensor.clone() for number, tensor in tensors.items()}
                held = _mapped(arguments, lambda tensor: inputs[id(tensor)])
                captured = self._captured([*inputs.values()], partial(function, *held))
                self._graphs[key] = captured
                if len(self._graphs) > _KEPT:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            captured = self._graphs[key]
            for place, tensor in zip(captured.inputs, tensors.values(), strict=True):
                place.copy_(tensor)
            captured.graph.replay()
            return tuple(output.clone() for output in captured.outputs)

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self._pool = None

    def _captured(
        self, inputs: list[torch.Tensor], run: Callable[[], tuple[torch.Tensor, ...]]
    ) -> _Captured:
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
        return _Captured(graph, inputs, run, outputs)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same tuples and dataclasses with changed tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {name: _mapped(part, change) for name, part in vars(value).items()}
        return replace(value, **parts)
    return value
