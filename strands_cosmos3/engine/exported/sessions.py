"""Graphs in ONNX Runtime. Their weights are those of the checkpoint's own files, mapped and handed
in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    NotImplemented,
    RuntimeException,
)

from strands_cosmos3.engine.exported.folder import GraphRecord
from strands_cosmos3.engine.mapped_file import MappedFile
from strands_cosmos3.engine.weight_files import WeightSource
from strands_cosmos3.errors import ConfigError, LayoutError

PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
"""Names of ONNX Runtime's execution providers."""
_ONNX_TYPES = {"F32": 1, "F16": 10, "BF16": 16}
_BITS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # NumPy has no bfloat16


class Weights:
    """Weights of one part of a checkpoint by their stored names, as values of ONNX Runtime that
    share memory with the mapped files.
    """

    def __init__(self, source: WeightSource):
        files = [MappedFile(path) for path in source.files]
        self._file_of = {name: file for file in files for name in list(file.keys())}

    def value(self, name: str) -> Any:
        """A weight's value."""
        tensor = self._file_of[name].get_slice(name)
        bits: NDArray[Any] = tensor.data.view(_BITS[tensor.dtype]).reshape(tensor.shape)
        onnx_type = _ONNX_TYPES[tensor.dtype]
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx_type)


class Graph:
    """One graph, ready to run.

    Args:
        folder: Of the graphs.
        record: What the export says of it.
        weights: What it is given.
        provider: The execution provider; what that lacks runs on the CPU.
        threads: Threads of an operator; 0 is one for each core.

    Raises:
        ConfigError: The installed ONNX Runtime lacks the provider.
        LayoutError: It cannot run the graph.
    """

    def __init__(
        self,
        folder: Path,
        record: GraphRecord,
        weights: Weights,
        provider: str | None,
        threads: int,
    ):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # a thread that waits for work shall not take the time of one that has some
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = folder / record.file
        values = [weights.value(name) for name in record.weights]
        options.add_external_initializers(list(record.weights), values)
        try:
            self._session = ort.InferenceSession(path, options, self._providers(provider))
        except (Fail, InvalidArgument, InvalidGraph, NotImplemented, RuntimeException) as error:
            raise LayoutError(
                f"ONNX Runtime {ort.__version__} cannot run {path}: {error}"
            ) from None
        self.inputs = [each.name for each in self._session.get_inputs()]

    @staticmethod
    def _providers(provider: str | None) -> list[str]:
        wanted = PROVIDERS[provider or "cpu"]
        if wanted not in (available := ort.get_available_providers()):
            names = [name for name, full in PROVIDERS.items() if full in available]
            raise ConfigError(
                f"execution provider {provider!r} is not in the installed ONNX Runtime "
                f"{ort.__version__}, which has {', '.join(names)}; install onnxruntime-gpu in its "
                "place."
            )
        return [wanted, *([PROVIDERS["cpu"]] if wanted != PROVIDERS["cpu"] else [])]

    def __call__(self, *arrays: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """Run it on arrays in the order of its inputs."""
        answer: Any = self._session.run(None, dict(zip(self.inputs, arrays, strict=True)))
        return answer
