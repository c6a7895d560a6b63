"""Conversions keep every number, resume, and need one tensor of memory; so does reading."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from helpers import checkpoint_formats as formats
from helpers.environments import TESTS
from recipes.random_checkpoint import FactorySizes, write_checkpoint
from strands_cosmos3.cli import main
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.formats.detect import open_layout
from strands_cosmos3.engine.formats.inspect import inspect
from strands_cosmos3.errors import ConfigError, DigestError


@pytest.fixture
def contract(checkpoints, tmp_path):
    folder = formats.framework_export(checkpoints["relu2"], tmp_path / "c", edge=True)
    return formats.contract_file(tmp_path / "my.toml", folder, checkpoints["relu2"])


def numbers(folder):
    return formats.weights_of(folder)


def test_convert_to_the_released_layout(contract, checkpoints, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["checkpoint", "convert", str(contract), "--out", str(out)]) == 0
    made, original = numbers(out), numbers(checkpoints["relu2"])
    assert made.keys() == original.keys()
    assert all(torch.equal(made[key], original[key]) for key in made)
    report = inspect(out)
    assert (report["verdict"], report["format"], report["missing"]) == ("ready", "released", [])
    assert Checkpoint.open(out).metadata["chunk"] == 16
    with Cosmos3Engine.from_pretrained(out) as engine:
        assert engine.action_space == "midtrain"
    file = out / "transformer/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(DigestError):
        Checkpoint.open(out).verify()
    assert main(["checkpoint", "convert", str(contract), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_interrupted_conversion_goes_on(contract, checkpoints, tmp_path):
    class Killed(Exception):
        pass

    def kill(name, number, count):
        assert count > 4
        if number == 4:
            raise Killed

    out, opened = tmp_path / "out", Checkpoint.open(contract)
    with pytest.raises(Killed):
        convert(opened, out, on_file=kill, shard_bytes=400_000)
    assert not out.exists()
    written = {
        path: path.stat().st_mtime_ns for path in tmp_path.glob(".out.converting/*/*.safetensors")
    }
    assert len(written) == 3
    with pytest.raises(ConfigError, match="something else"):
        convert(opened, out, dtype="bfloat16", shard_bytes=400_000)
    # by a kill
    left = (
        tmp_path / ".out.converting/transformer/.diffusion_pytorch_model-00004.123.part.safetensors"
    )
    left.touch()
    convert(opened, out, shard_bytes=400_000)
    assert not [*out.rglob(".*")]
    kept = {out / path.parent.name / path.name: stamp for path, stamp in written.items()}
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    original = numbers(checkpoints["relu2"])
    assert all(torch.equal(w, original[key]) for key, w in numbers(out).items())
    Checkpoint.open(out).verify()


def test_convert_to_lerobot_and_back(contract, checkpoints, tmp_path):
    folder = convert(Checkpoint.open(contract), tmp_path / "lerobot", "lerobot")
    report = inspect(folder)
    assert (report["verdict"], report["format"], report["missing"]) == (
        "ready",
        "LeRobot policy",
        [],
    )
    opened = Checkpoint.open(folder)
    expected = Checkpoint.open(contract).action_stats()
    torch.testing.assert_close(torch.tensor(opened.action_stats().q99), torch.tensor(expected.q99))
    back = convert(opened, tmp_path / "back")
    original = numbers(checkpoints["relu2"])
    assert all(torch.equal(w, original[key]) for key, w in numbers(back).items())
    config = json.loads((folder / "config.json").read_text())
    assert (config["type"], config["domain_id"], config["chunk_size"]) == ("cosmos3", 8, 16)
    keys = load_file(folder / "model.safetensors").keys()
    assert {key.split(".")[1] for key in keys} == {"transformer", "vae"}


def test_convert_to_bfloat16_keeps_the_time_embedder(contract, tmp_path):
    made = numbers(convert(Checkpoint.open(contract), tmp_path / "out", dtype="bfloat16"))
    assert {w.dtype for key, w in made.items() if key.startswith("time_embedder.")} == {
        torch.float32
    }
    assert {w.dtype for key, w in made.items() if not key.startswith("time_embedder.")} == {
        torch.bfloat16
    }


def test_the_command_prints_a_report_and_the_contract(contract, checkpoints, tmp_path, capsys):
    assert main(["checkpoint", "inspect", str(contract), "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "ready"
    assert "cosmos-framework export" in capsys.readouterr().out
    base = str(checkpoints["relu2"])
    assert main(["checkpoint", "contract", str(tmp_path / "c"), "--base", base]) == 0
    assert 'domain = "droid_lerobot"' in capsys.readouterr().out
    written = [
        "checkpoint",
        "contract",
        str(tmp_path / "c"),
        "--base",
        base,
        "--out",
        str(tmp_path / "new.toml"),
    ]
    assert (main(written), main(written)) == (0, 2)
    assert inspect(tmp_path / "new.toml")["verdict"] == "needs a contract"
    assert main(["checkpoint", "inspect", str(tmp_path / "c")]) == 1
    assert "LayoutError" in capsys.readouterr().out


RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from helpers.checkpoint_formats import framework_name, weights_of

rank, released, folder = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder.parent}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
state = {f"net.{framework_name(key)}": distribute_tensor(w, mesh, [Shard(0)]) for key, w in weights_of(released).items()}
dcp.save(state, checkpoint_id=folder / "model")
dist.destroy_process_group()
"""


def environment():
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }


@pytest.mark.slow
def test_a_run_of_two_ranks_without_averaged_weights(checkpoints, tmp_path):
    """Each rank's file has half of every tensor."""
    folder, released = tmp_path / "run", checkpoints["silu"]
    made = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(i), str(released), str(folder)], env=environment()
        )
        for i in (0, 1)
    ]
    assert [process.wait(120) for process in made] == [0, 0]
    opened = Checkpoint.open(open_layout(folder, released))
    assert len(opened.weights.files) == 2
    original = numbers(released)
    for key, part in opened.weights.parts({key: (key, ()) for key in original}):
        assert torch.equal(part, original[key])


FORMATS = ("released", "export", "lerobot", "dcp", "fp8", "framework", "peft")


def mid_size(tmp_path, name, layers=4):
    """A checkpoint in a format, of 180 MB in float32 if it has 4 layers, and what is passed as the
    checkpoint.
    """
    sizes = FactorySizes(
        hidden=640, layers=layers, heads=10, kv_heads=5, head_dim=64, intermediate=1920
    )
    released, folder = write_checkpoint(tmp_path / "mid", sizes=sizes), tmp_path / "c"
    changes = {}
    if name == "released":
        shutil.copytree(released, folder)
    elif name == "export":
        formats.framework_export(released, folder, edge=False)
    elif name == "lerobot":
        formats.lerobot_policy(released, folder)
        changes = {"views": None, "statistics": None}
    elif name == "dcp":
        formats.dcp_run(released, folder)
    elif name == "fp8":
        formats.modelopt_fp8(released, folder)
    else:
        formats.adapter(released, folder, name)
    base = None if name in ("released", "fp8") else released
    return released, formats.contract_file(tmp_path / "my.toml", folder, base, **changes)


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from helpers.memory import peak_growth, peak_rss_growth
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.convert import convert

small, contract, dtype, out = sys.argv[1:]
load = lambda path: Cosmos3Engine.from_pretrained(path, dtype=getattr(torch, dtype), domains=(8,))
load(small)  # imports and allocators are the baseline
peak_growth(lambda: None)  # gives back what the heap could lend
resident = peak_rss_growth()
engine, growth = peak_growth(lambda: load(contract))
reading, kept = resident(), engine.kept_bytes
engine.close()
for to in ("released", "lerobot"):
    peak_growth(lambda: None)
    resident = peak_rss_growth()
    _, converting = peak_growth(lambda: convert(Checkpoint.open(Path(contract)), Path(f"{out}-{to}"), to))
    print(growth / kept, kept, converting, reading / kept, resident())
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_peak_of_reading_and_converting(tmp_path, name, dtype):
    """Of memory that no file backs. Resident memory (VmHWM), of which mapped files are a part,
    is printed beside it.
    """
    # of weights that stay in 8 bits more are needed for as much
    released, contract = mid_size(tmp_path, name, 13 if name == "fp8" else 4)
    arguments = [
        sys.executable,
        "-c",
        SCRIPT,
        *map(str, (released, contract, dtype, tmp_path / "out")),
    ]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment())
    for line in ran.stdout.splitlines():
        ratio, kept, converting, resident, converting_resident = map(float, line.split())
        figures = (
            f"reading {ratio:.2f}, VmHWM {resident:.2f}; converting {converting:.3g}, VmHWM "
            f"{converting_resident:.3g} bytes"
        )
        print(f"{name} {dtype}: kept {kept:.4g} bytes, {figures}")
        assert kept > (60e6 if dtype == "bfloat16" else 120e6), "too small to say anything"
        assert ratio <= 1.15
        assert converting < 40e6  # the largest tensor has 10 MB in float32; FP8 holds three of it


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.convert import convert

contract, out, to, limit = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])

def written():
    try:
        return sum(file.stat().st_size for file in out.with_name(f".{out.name}.converting").rglob("*"))
    except FileNotFoundError:  # a file got its name meanwhile
        return 0

def watch():
    while written() < limit:
        time.sleep(1e-4)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=watch, daemon=True).start()
convert(Checkpoint.open(contract), out, to, shard_bytes=16 << 20)
"""


def contents(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to"), [*((name, "released") for name in FORMATS), ("dcp", "lerobot")]
)
def test_a_killed_conversion_goes_on(tmp_path, name, to):
    """Killed (SIGKILL) again and again, in the middle of files and after the last one: the
    folder is the same in the end.
    """
    _, contract = mid_size(tmp_path, name)
    whole = convert(Checkpoint.open(contract), tmp_path / "whole", to, shard_bytes=16 << 20)
    total = sum(file.stat().st_size for file in whole.rglob("*.safetensors"))
    out, kills = tmp_path / "out", 0
    for part in (0.03, 0.3, 0.62, 0.9, 1.0, 9.0):
        command = [sys.executable, "-c", KILLED, *map(str, (contract, out, to, int(part * total)))]
        ended = subprocess.run(command, capture_output=True, env=environment(), timeout=600)
        kills += ended.returncode == -signal.SIGKILL
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        if ended.returncode == 0:
            break
        assert not out.exists()
    assert kills >= 4
    assert contents(out) == contents(whole)
    assert not [*tmp_path.glob(".out*")]
    Checkpoint.open(out).verify()
