"""Loading needs little more memory than what is kept: anonymous memory, watched in a child
process.
"""

import json
import os
import subprocess
import sys

import pytest

from helpers import checkpoint_formats as formats
from helpers.environments import TESTS
from recipes.random_checkpoint import FactorySizes, write_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.options import EngineOptions

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
