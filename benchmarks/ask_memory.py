"""Peak memory of loading a reasoner, and of its first answer, on a checkpoint of random weights.

    python benchmarks/ask_memory.py > ask_memory.json   # writes 2.7 GB to a temporary folder

The weights are random, so the answers mean nothing. Both figures are what the process grows by,
after the imports and after a tiny checkpoint was loaded and asked: its largest resident memory,
which counts pages of files, and its largest anonymous memory, which does not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # recipes/

from recipes.random_checkpoint import (  # noqa: E402
    FactorySizes,
    _random_vae,
    transformer_config,
    write_checkpoint,
    write_parts,
    write_tokenizer,
)
from recipes.random_eyes import PADS, write_eyes  # noqa: E402
from strands_cosmos3.engine.config import TransformerConfig  # noqa: E402
from strands_cosmos3.engine.metadata import write_metadata  # noqa: E402
from strands_cosmos3.engine.weights import expected_shapes  # noqa: E402
from strands_cosmos3.reasoner.options import AskOptions  # noqa: E402
from strands_cosmos3.reasoner.reasoner import Reasoner  # noqa: E402

SIZES = FactorySizes(1536, 19, 12, 4, 128, 6144)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")


def write_large(folder: Path) -> Path:
    """Write a checkpoint of 2.7 GB in bfloat16, half of it the reasoner's."""
    special = (*SPECIAL, *PADS)
    vocabulary = write_tokenizer(folder / "text_tokenizer", special=special)
    config = transformer_config(SIZES, "silu", vocabulary)
    tile = torch.randn(1 << 22).to(torch.bfloat16)
    weights = {}
    for key, shape in expected_shapes(TransformerConfig.from_dict(config)).items():
        count = int(np.prod(shape))
        scaled = tile.repeat(-(-count // len(tile)))[:count].reshape(shape)
        weights[key] = torch.ones(shape, dtype=tile.dtype) if "norm" in key else scaled * 0.02
    write_parts(folder, config, weights, _random_vae(FactorySizes(), 0), 2)
    write_eyes(folder)
    write_metadata(folder, {"variant": "small-silu", "label": "random weights"})
    return folder


def resident(which: str) -> int:
    """A figure of /proc/self/status in bytes."""
    found = re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def growth(work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Result of some work, and by how many bytes resident and anonymous memory grew at most."""
    before = {which: resident(which) for which in ("VmRSS", "RssAnon")}
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest resident memory so far
    peak, done = before["RssAnon"], threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident("RssAnon"))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    done.set()
    watcher.join()
    return result, {
        "resident": resident("VmHWM") - before["VmRSS"],
        "anonymous": max(peak, resident("RssAnon")) - before["RssAnon"],
    }


def measure(small: str, large: str) -> dict[str, Any]:
    """Load the large checkpoint and ask it, after the small one."""
    torch.set_num_threads(1)
    picture = np.zeros((64, 96, 3), np.uint8)
    options = AskOptions(max_tokens=4)
    Reasoner.from_pretrained(small, dtype="bfloat16").ask("Why?", [picture], options=options)
    loaded, of_loading = growth(lambda: Reasoner.from_pretrained(large, dtype="bfloat16"))
    _, of_asking = growth(lambda: loaded.ask("Why?", [picture], options=options))
    weights = sum(p.nbytes for p in loaded.model.parameters())
    folder = sum(path.stat().st_size for path in Path(large).rglob("*.safetensors"))
    return {
        "checkpoint": "random weights, Nano's kind, bfloat16",
        "folder_bytes": folder,
        "reasoner_bytes": weights,
        "loading": {name: size / weights for name, size in of_loading.items()},
        "asking_beyond": {name: size / weights for name, size in of_asking.items()},
        "torch": torch.__version__,
    }


def main() -> None:
    """Write both checkpoints, and measure in a process of its own."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:]), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        small = write_checkpoint(Path(folder, "small"), eyes=True)
        large = write_large(Path(folder, "large"))
        subprocess.run([sys.executable, __file__, str(small), str(large)], check=True)


if __name__ == "__main__":
    main()
