"""Loading needs little more memory than what is kept: anonymous memory, watched in a child
process.
"""

import os
import subprocess
import sys

import pytest

from helpers.environments import TESTS
from recipes.random_checkpoint import FactorySizes, write_checkpoint

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from helpers.memory import peak_growth
from strands_cosmos3.engine.engine import Cosmos3Engine

small, folder, dtype = sys.argv[1:]
Cosmos3Engine.from_pretrained(small, dtype=torch.float32)  # imports and allocators are the baseline
engine, growth = peak_growth(lambda: Cosmos3Engine.from_pretrained(folder, dtype=getattr(torch, dtype), domains=(8,)))
print(growth / engine.kept_bytes, engine.kept_bytes)
"""


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory):
    sizes = FactorySizes(hidden=640, layers=4, heads=10, kv_heads=5, head_dim=64, intermediate=1920)
    return write_checkpoint(tmp_path_factory.mktemp("mid") / "c", sizes=sizes)


def test_peak_of_loading(checkpoints, mid_size):
    """In bfloat16, which the float32 weights on disk are converted to."""
    arguments = [sys.executable, "-c", SCRIPT, str(checkpoints["silu"]), str(mid_size), "bfloat16"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    beside = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(arguments, capture_output=True, text=True, check=True, env=beside)
    ratio, kept = map(float, ran.stdout.split())
    assert kept > 60e6, "too small to say anything"
    assert ratio <= 1.15
