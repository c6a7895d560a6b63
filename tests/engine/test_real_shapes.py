"""The released models' real shapes pass through every format, by their headers alone: no weight
is allocated or read.
"""

import math
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from helpers.memory import peak_rss_growth
from helpers.real_shapes import ALL, hollow, real_config
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.formats.detect import open_layout
from strands_cosmos3.engine.mapped_file import MappedFile
from strands_cosmos3.engine.transformer import Cosmos3Transformer
from strands_cosmos3.engine.weights import checkpoint_key, expected_shapes

COUNTS = {
    "edge": (549, 3_369_657_024),
    "nano": (809, 15_173_136_576),
    "nano-sound": (814, 15_173_669_120),
}
VAE = (196, 704_688_668)


class Planned(Exception):
    """Raised before the first file of a conversion."""


def count(source):
    return len(source.shapes), sum(map(math.prod, source.shapes.values()))


@pytest.mark.parametrize(
    "kind",
    ["edge", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nano", "nano-sound"))],
)
def test_every_format_at_its_real_size(tmp_path, kind):
    config = TransformerConfig.from_dict(real_config(kind))
    shapes = expected_shapes(config)
    with torch.device("meta"):
        model = Cosmos3Transformer(config)
    needed = {checkpoint_key(name): tuple(p.shape) for name, p in model.named_parameters()}
    growth = peak_rss_growth()
    for name, write in ALL.items():
        folder = write(tmp_path / name, kind, shapes)
        base = tmp_path / "released" if name in ("export", "dcp", "adapter") else None
        opened = Checkpoint.open(open_layout(folder, base))
        assert (count(opened.weights), count(opened.vae_weights)) == (COUNTS[kind], VAE), name
        assert needed.items() <= opened.weights.shapes.items(), name
        assert {opened.weights.dtypes[key] for key in needed} <= (
            {"BF16", "F32"} if name == "fp8" else {"BF16"}
        ), name
        files = []

        def planned(file, number, of, files=files):
            files.append((number, of))
            raise Planned

        with pytest.raises(Planned):
            convert(opened, tmp_path / f"{name}-out", dtype="bfloat16", on_file=planned)
        assert files == [(1, math.ceil(COUNTS[kind][1] * 2 / (4 << 30)) + 1)], name
    assert growth() < 300 << 20
    held = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file())
    assert held < 32 << 20, "the files are holes"


def test_a_file_larger_than_the_memory_is_read_alike(tmp_path):
    generator = torch.Generator().manual_seed(0)
    w = {
        "a": torch.randn(6, 4, generator=generator),
        "b": torch.tensor(2.5),
        "c": torch.randn(3, generator=generator).half(),
    }
    w |= {"d": w["a"].bfloat16(), "e": w["a"].to(torch.float8_e4m3fn)}
    save_file(w, tmp_path / "w.safetensors")
    ours = MappedFile(tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys()) == sorted(w)
        for name in w:
            a, b = theirs.get_slice(name), ours.get_slice(name)
            assert (a.get_dtype(), list(a.get_shape())) == (b.get_dtype(), list(b.get_shape()))
            for index in (
                ()
                if name == "b"
                else (
                    slice(None),
                    1,
                    slice(0, 2),
                    (slice(1, 3), *[slice(0, 2)] * (w[name].ndim - 1)),
                )
            ):
                assert torch.equal(a[index].float(), b[index].float()), (name, index)
            assert torch.equal(ours.get_tensor(name).float(), w[name].float())
    (tmp_path / "w.safetensors").write_bytes(b"\x08" + bytes(30))
    with pytest.raises(SafetensorError):
        MappedFile(tmp_path / "w.safetensors")


LITTLE = """
import resource, sys
from pathlib import Path
from safetensors import safe_open
from strands_cosmos3.engine.weight_files import WeightFiles
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))  # of which private mappings are a part
try:
    safe_open(folder / "w.safetensors", "pt")
except RuntimeError:
    files = WeightFiles(folder, folder, "w")
    ((_, row),) = files.parts({"": ("a", 7)})
    print(files.shapes["a"], float(row.abs().sum()))
"""


@pytest.mark.slow
def test_a_file_that_torch_cannot_map(tmp_path):
    hollow(tmp_path / "w.safetensors", {"a": ("BF16", (1 << 20, 4096))})
    ran = subprocess.run(
        [sys.executable, "-c", LITTLE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "(1048576, 4096) 0.0\n"
