"""Loading needs little more memory than what is kept: anonymous memory, watched in a child
process, and pages of the files.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from helpers import checkpoint_formats as formats
from helpers.environments import TESTS
from helpers.memory import peak_rss_growth
from recipes.random_checkpoint import FactorySizes, write_checkpoint
from strands_cosmos3.engine import weight_files
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.weight_files import WeightFiles, require_finite

SCRIPT = """
import json
import sys
import torch
torch.set_num_threads(1)
from helpers.memory import peak_growth
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import EngineOptions

small, folder, options = sys.argv[1:]
options = EngineOptions(**json.loads(options))
# imports and allocators are the baseline
Cosmos3Engine.from_pretrained(small, dtype=torch.float32)
engine, growth = peak_growth(
    lambda: Cosmos3Engine.from_pretrained(folder, options=options, domains=(8,))
)
print(growth / engine.kept_bytes, engine.kept_bytes)
"""


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory):
    sizes = FactorySizes(hidden=640, layers=4, heads=10, kv_heads=5, head_dim=64, intermediate=1920)
    return write_checkpoint(tmp_path_factory.mktemp("mid") / "c", sizes=sizes)


def ratio_of_peak(small, folder, options):
    """The peak as a multiple of what is kept."""
    arguments = [sys.executable, "-W", "ignore", "-c", SCRIPT, small, folder, json.dumps(options)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    beside = {**os.environ, "PYTHONPATH": path}
    command = [str(argument) for argument in arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=beside)
    ratio, kept = map(float, ran.stdout.split())
    assert kept > 60e6, "too small to say anything"
    return ratio


def test_peak_of_loading(checkpoints, mid_size):
    """In bfloat16, which the float32 weights on disk are converted to."""
    assert ratio_of_peak(checkpoints["silu"], mid_size, {"dtype": "bfloat16"}) <= 1.15


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The same weights in float32, FP8 and INT8, in tensors of up to 17 MB of float32."""
    folder = tmp_path_factory.mktemp("large")
    sizes = FactorySizes(
        hidden=1024, layers=8, heads=16, kv_heads=8, head_dim=64, intermediate=4096
    )
    plain = write_checkpoint(folder / "plain", sizes=sizes)
    fp8, _ = formats.modelopt_fp8(plain, folder / "fp8")
    opened = Checkpoint.open(plain, action_space="midtrain")
    whole = EngineOptions(quantize="int8", quantize_text=True)
    return {"plain": plain, "fp8": fp8, "int8": convert(opened, folder / "int8", quantize=whole)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ("plain", {"quantize": "int8", "quantize_text": True}),
        ("plain", {"quantize": "int8-weights", "quantize_text": True}),
        ("plain", {"quantize": "fp8", "quantize_text": True}),
        ("int8", {}),
        ("fp8", {}),
    ],
    ids=str,
)
def test_peak_of_loading_8_bits(checkpoints, large, stored, options):
    """Tensors that come and go do not tear the heap, whose pieces would stay."""
    assert ratio_of_peak(checkpoints["silu"], large[stored], options) <= 1.15


def test_pages_of_the_file_do_not_pile_up(tmp_path, monkeypatch):
    """What was read of a mapped file counts as this process's memory until it is closed."""
    monkeypatch.setattr(weight_files, "_RESIDENT_BYTES", 4 << 20)
    stored = {f"layer.{i:02d}": torch.full((1 << 18,), float(i)) for i in range(64)}
    save_file(stored, tmp_path / "diffusion_pytorch_model.safetensors")
    source = WeightFiles(tmp_path, tmp_path)
    growth = peak_rss_growth()
    found = {}
    for key, part in source.parts({name: (name, ()) for name in stored}):
        require_finite(part, key)
        found[key] = float(part[-1])
    assert found == {name: float(tensor[0]) for name, tensor in stored.items()}
    assert growth() < 16 << 20, "of 64 MB"
