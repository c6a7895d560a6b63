"""Build an ONNX graph node by node. Its weights are those of a checkpoint's safetensors files: the
graph has their names and places, not their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from strands_cosmos3.engine.weight_files import WeightFiles

OPSET = 23  # the first with RMSNormalization, RotaryEmbedding and Attention
_TYPES = {"F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}
Shape = Sequence[int | str]
"""Sizes; those that vary have a name."""


class GraphBuilder:
    """A graph in the making. A value is its name.

    Args:
        source: The weights that it may name.
        root: The checkpoint's folder; places are seen from there.

    Attributes:
        weights: Stored names of the weights that it has.
    """

    def __init__(self, source: WeightFiles, root: Path):
        self._source = source
        self._root = root
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._known: dict[Any, str] = {}
        self._numbers = count()
        self.weights: list[str] = []

    def input(self, name: str, shape: Shape, integers: bool = False) -> str:
        """Declare an input, of float32 or int64."""
        dtype = TensorProto.INT64 if integers else TensorProto.FLOAT
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def has_weight(self, key: str) -> bool:
        """Whether the checkpoint has a weight."""
        return key in self._source.shapes

    def weight(self, key: str) -> str:
        """A weight in float32, by its released name."""
        if key not in self._known:
            path, stored, offset, length = self._source.place_of(key)
            tensor = TensorProto(name=stored, data_location=TensorProto.EXTERNAL)
            tensor.dims.extend(self._source.shapes[key])
            tensor.data_type = _TYPES[self._source.dtypes[key]]
            place = {"location": path.relative_to(self._root).as_posix()}
            for name, value in {**place, "offset": offset, "length": length}.items():
                tensor.external_data.add(key=name, value=str(value))
            self._initializers.append(tensor)
            self.weights.append(stored)
            self._known[key] = stored
            if tensor.data_type != TensorProto.FLOAT:
                # ONNX Runtime folds it once, when it opens the graph
                self._known[key] = self("Cast", stored, to=TensorProto.FLOAT)
        return self._known[key]

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """A constant; equal ones are one."""
        array = np.asarray(value, dtype)
        key = array.tobytes(), array.shape, array.dtype.str
        if key not in self._known:
            self._known[key] = name = f"constant_{next(self._numbers)}"
            self._initializers.append(numpy_helper.from_array(array, name))
        return self._known[key]

    def sizes(self, *values: int) -> str:
        """A constant of int64."""
        return self.constant(values, np.int64)

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output."""
        return self.several(1, op, *inputs, **attributes)[0]

    def several(self, outputs: int, op: str, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        number = next(self._numbers)
        names = [f"{op}_{number}" + (f"_{i}" if i else "") for i in range(outputs)]
        node = helper.make_node(op, inputs, names, name=f"{op}_{number}", **attributes)
        self._nodes.append(node)
        return names

    def reshape(self, x: str, *shape: int) -> str:
        """As :func:`numpy.reshape`; 0 keeps a size."""
        return self("Reshape", x, self.sizes(*shape))

    def part(self, x: str, start: int, stop: int, axis: int) -> str:
        """A slice of an axis."""
        places = ((start,), (min(stop, 2**31 - 1),), (axis,))
        return self("Slice", x, *(self.sizes(*place) for place in places))

    def save(self, path: Path, outputs: Mapping[str, tuple[str, Shape]]) -> None:
        """Check and write the graph; ``outputs`` are name -> value and shape."""
        for name, (value, _) in outputs.items():
            self._nodes.append(helper.make_node("Identity", [value], [name]))
        declared = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))
            for name, (_, shape) in outputs.items()
        ]
        graph = helper.make_graph(
            self._needed(outputs), path.stem, self._inputs, declared, self._initializers
        )
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=11)
        model.producer_name = "strands-cosmos3"
        path.write_bytes(model.SerializeToString(deterministic=True))

    def _needed(self, outputs: Mapping[str, Any]) -> list[onnx.NodeProto]:
        """The nodes that outputs depend on."""
        wanted, nodes = {*outputs}, []
        for node in reversed(self._nodes):
            if wanted.intersection(node.output):
                wanted.update(node.input)
                nodes.append(node)
        return nodes[::-1]
