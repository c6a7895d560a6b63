"""cosmos-framework's own functions, unmodified, against our readers: COSMOS_FRAMEWORK names a
checkout (or its git directory).

Its scripts as a whole do not run here: ``export_model``, ``convert_model_to_dcp`` and
``convert_model_to_diffusers`` import the model package and with it CUDA's libraries (flash
attention, Transformer Engine), and build the network at its full size. What decides about names,
policies and quantisation in them needs none of this; it is cut out of the source by its syntax
tree.
"""

import ast
import json
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import checkpoint_formats as formats
from helpers.checkpoint_formats import framework_name
from helpers.environments import checkout
from helpers.real_shapes import real_config
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.formats.detect import open_layout
from strands_cosmos3.engine.formats.framework import released_name, renamed
from strands_cosmos3.engine.formats.inspect import inspect
from strands_cosmos3.engine.weights import expected_shapes

pytestmark = pytest.mark.peers
HEADER = "from __future__ import annotations\nimport inspect, json, pathlib, re\n"
HEADER += "from pathlib import Path\nfrom typing import Any, Callable\n"


@pytest.fixture
def theirs(tmp_path):
    """(file of the framework, names that are wanted or None for the file as it is) -> what it
    defines.
    """
    folder, _ = checkout("COSMOS_FRAMEWORK", "NVIDIA/cosmos-framework")

    def run(file, wanted=None):
        shown = ["git", "-C", str(folder), "show", f"HEAD:cosmos_framework/{file}"]
        text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        if wanted is not None:
            parts = [
                node
                for node in ast.parse(text).body
                if any(re.fullmatch(wanted, name) for name in names_of(node))
            ]
            text = HEADER + "\n".join(ast.get_source_segment(text, node) for node in parts)
        path = tmp_path / Path(file).name
        path.write_text(text)
        return runpy.run_path(str(path))

    return run


def names_of(node):
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return (
        [node.name]
        if isinstance(node, ast.FunctionDef)
        else [t.id for t in targets if isinstance(t, ast.Name)]
    )


@pytest.mark.parametrize("kind", ["edge", "nano", "nano-sound"])
def test_names_both_ways(theirs, kind):
    to_net = theirs(
        "inference/model.py", "_DIFFUSERS_.*|_(diffusers_to_net|apply_diff|should_drop|is_load).*"
    )
    back = theirs(
        "scripts/_convert_model_to_diffusers.py",
        "_ATTN_KEY_REMAP|_LANGUAGE_MODEL_VISION.*|_TIME_EMB.*|_remap_.*",
    )
    shapes = expected_shapes(TransformerConfig.from_dict(real_config(kind)))
    pairs = {name: to_net["_diffusers_to_net_key"](name) for name in shapes}
    assert pairs == {name: framework_name(name) for name in shapes}
    text = {
        net.removeprefix("language_model."): net
        for net in pairs.values()
        if net.startswith("language_model.")
    }
    assert {
        new: released_name(net)
        for new, net in back["_remap_language_model_state_dict"](text).items()
    } == {new: new for new in pairs if pairs[new] in text.values()}
    vision = ["model.visual.blocks.0.attn.qkv.weight", "visual.merger.norm.weight"]
    assert back["_remap_language_model_state_dict"](dict.fromkeys(vision)) == {}
    assert renamed([f"model.net.language_model.{key}" for key in vision], "model.net.")[0] == {}


@pytest.mark.parametrize("edge", [True, False])
def test_the_architecture_of_an_export(theirs, checkpoints, tmp_path, edge):
    helpers = theirs("scripts/_export_model_helpers.py")  # as it is
    kind, other = ("relu2", "silu") if edge else ("silu", "relu2")
    folder = formats.framework_export(checkpoints[kind], tmp_path / "c", edge=edge)
    about = [
        json.loads((folder / "config.json").read_text())["model"],
        {
            "config": {
                "vlm_config": {
                    "model_name": helpers["_EDGE_MODEL_NAME"]
                    if edge
                    else "Qwen/Qwen3-VL-8B-Instruct"
                }
            }
        },
        {
            "config": {
                "vlm_config": {
                    "pretrained_weights": {
                        "backbone_path": "a/Cosmos3-Edge/b" if edge else "a/Qwen/b"
                    }
                }
            }
        },
    ]
    for model in about:
        assert helpers["is_edge_model"](model) == edge
        formats.write_json(folder / "config.json", {"model_type": "cosmos3_omni", "model": model})
        assert inspect(folder, checkpoints[kind])["verdict"] == "needs a contract"
        assert inspect(folder, checkpoints[other])["verdict"] in ("VariantError", "PreflightError")


def test_the_policy_that_an_export_states(theirs, checkpoints, tmp_path):
    made = theirs(
        "scripts/export_model.py", "_config_value|_dataset_config_value|_build_edge_policy_metadata"
    )
    rows = {
        "dataset": {"_target_": None, "chunk_length": 24, "fps": 20, "embodiment_type": " libero "}
    }
    action = SimpleNamespace(dataloader=SimpleNamespace(dataset={"list_of_datasets": [rows]}))
    config = SimpleNamespace(
        dataloader_train=SimpleNamespace(dataloaders=SimpleNamespace(action_data=action))
    )
    folder = formats.framework_export(checkpoints["relu2"], tmp_path / "c", edge=True)
    formats.write_json(
        folder / "checkpoint.json", {"policy": made["_build_edge_policy_metadata"](config)}
    )
    assert inspect(folder, checkpoints["relu2"])["contract"] == {
        "domain": "libero",
        "chunk": 24,
        "fps": 20.0,
    }


def test_what_is_quantised(theirs, checkpoints, tmp_path):
    found = theirs(
        "utils/generator/quantization.py", "is_modelopt_fp8_checkpoint|plan_modelopt_fp8_targets"
    )
    folder, _ = formats.modelopt_fp8(checkpoints["silu"], tmp_path / "c")
    assert found["is_modelopt_fp8_checkpoint"](folder)
    index = json.loads(
        (folder / "transformer/diffusion_pytorch_model.safetensors.index.json").read_text()
    )
    paths = {key: f"transformer/{file}" for key, file in index["weight_map"].items()}
    targets = found["plan_modelopt_fp8_targets"](
        folder, lambda key, _: framework_name(key), weight_map=paths
    )
    ours = Checkpoint.open(open_layout(folder)).weights.source.quantized
    assert [f"{name}.weight" for name in targets] == sorted(map(framework_name, ours))
    for wrong in ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"quant_algo": "FP8"}):
        formats.write_json(folder / "hf_quant_config.json", wrong)
        with pytest.raises(ValueError, match="Unsupported"):
            found["is_modelopt_fp8_checkpoint"](folder)
        assert inspect(folder)["verdict"] == "LayoutError"
