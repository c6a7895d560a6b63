"""Loading needs little more memory than what is kept: anonymous memory, watched in a child process."""

import subprocess
import sys
from pathlib import Path

import pytest

from strands_cosmos3.engine.factory import FactorySizes, write_checkpoint

SCRIPT = """
import ctypes, gc, re, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from strands_cosmos3.engine.engine import Cosmos3Engine

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, folder, dtype = sys.argv[1:]
Cosmos3Engine.from_pretrained(small, dtype=torch.float32)  # imports and allocators are the baseline
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what the heap could lend would not be counted
baseline, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
engine = Cosmos3Engine.from_pretrained(folder, dtype=getattr(torch, dtype), domains=(8,))
done.set()
watcher.join()
print((max(peak, anonymous()) - baseline) / engine.kept_bytes, engine.kept_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_of_loading(tmp_path_factory, checkpoints, dtype):
    folder = tmp_path_factory.mktemp("mid") / "c"
    write_checkpoint(folder, sizes=FactorySizes(hidden=640, layers=4, heads=10, kv_heads=5, head_dim=64, intermediate=1920))
    arguments = [sys.executable, "-c", SCRIPT, str(checkpoints["silu"]), str(folder), dtype]
    ratio, kept = map(float, subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split())
    assert kept > (60e6 if dtype == "bfloat16" else 120e6), "too small to say anything"
    assert ratio <= 1.15
