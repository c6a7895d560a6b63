#!/usr/bin/env bash
# ONNX Runtime 1.32.0 on a CPU cannot run ONNX's Attention (opset 23) with past keys unless the node
# also has the outputs present_key and present_value.
#
# The operator's specification calls both outputs optional, whatever its inputs are, and ONNX's
# checker accepts the graph. ONNX Runtime opens it, and fails at the first run: "The implementation
# does not support past_key provided and present_key being null".
#
# It matters to whoever passes cached keys and values to the operator and does not want the joined
# ones back, as in cross-step caches of a prompt: name the outputs, even if nobody reads them.
#
# The script runs the same node without and with these outputs. It exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

SHAPES = {"q": (1, 4, 8, 16), "k": (1, 4, 8, 16), "v": (1, 4, 8, 16)}
PAST = {"past_key": (1, 4, 3, 16), "past_value": (1, 4, 3, 16)}


def run(outputs):
    inputs = [*SHAPES, "", *PAST]
    node = helper.make_node("Attention", inputs, outputs)
    declared = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in {**SHAPES, **PAST}.items()
    ]
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPES["q"])
    graph = helper.make_graph([node], "g", declared, [answer])
    opset = [helper.make_opsetid("", 23)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {name: np.ones(shape, np.float32) for name, shape in {**SHAPES, **PAST}.items()}
    try:
        return session.run(["y"], feeds)[0].shape
    except Exception as error:
        return str(error)[-130:].strip()


alone, joined = run(["y"]), run(["y", "present_key", "present_value"])
print("without present outputs:", alone)
print("with present outputs:   ", joined)
sys.exit(not ("present_key being null" in str(alone) and joined == SHAPES["q"]))
PYTHON
