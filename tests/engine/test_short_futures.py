"""Policies that were fine-tuned with fewer future frames: declared, run and refused."""

import json
import re
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from helpers import checkpoint_formats as formats
from helpers.cosmos3_oracle import CHUNK, Case, engine, request
from helpers.options import backend_options
from helpers.parity import case_share, reference, reference_of
from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.cli import main
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.formats.inspect import inspect
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.errors import BackendError, ConfigError, ContractError, LayoutError
from strands_cosmos3.types import Request

DROID = get_embodiment("droid")


@pytest.fixture
def export(checkpoints, tmp_path):
    """A fine-tune as cosmos-framework exports it, which says nothing of its clip."""
    return formats.framework_export(checkpoints["relu2"], tmp_path / "c", edge=True)


@pytest.fixture
def declared(export, checkpoints, tmp_path):
    path = tmp_path / "short.toml"
    return formats.contract_file(path, export, checkpoints["relu2"], policy_frames=5)


def ask():
    picture = np.random.RandomState(0).randint(0, 255, (540, 640, 3), dtype=np.uint8)
    space = DROID.action_space("midtrain")
    return Request(DROID, space, "pick up the cube", 16, None, 1.0, composite=picture)


def shortened(case, latent_frames):
    """The request of a case with all rows, and a clip of fewer latent frames."""
    asked = request(case)
    assert asked.video_noise is not None
    shape = (latent_frames, *asked.video_shape[1:])
    return replace(
        asked,
        video_shape=shape,
        video_noise=asked.video_noise[:, :, :latent_frames],
        cond_video_pixels=asked.cond_video_pixels[:, :, : 4 * latent_frames - 3],
    )


@pytest.mark.parametrize(("kind", "frames"), [*product(("silu", "relu2"), (1, 2))])
def test_a_short_clip_with_all_rows_against_the_stock_transformer(checkpoints, kind, frames):
    """The stock loop gives frames and rows the times of the rate, whatever the clip's length."""
    case = Case(checkpoints[kind], steps=2)
    asked = shortened(case, frames)
    found = engine(case.folder, case.dtype).step(asked)
    assert found["action"].shape == (1, CHUNK, 10)
    assert found["video"].shape[2] == frames
    assert reference(case.folder, asked).share(found) <= 1
    # and the frames that are left out matter, so that a wrong clip is no rounding
    whole = reference_of(case).exact["action"]
    assert (found["action"][0] - whole).abs().max() > 1e-3
    assert case_share(case) <= 1


def test_the_contract_command_declares_and_everything_follows(
    export, checkpoints, tmp_path, capsys
):
    base = ["--base", str(checkpoints["relu2"])]
    full = formats.contract_file(tmp_path / "full.toml", export, checkpoints["relu2"])
    out = tmp_path / "new.toml"
    command = ["checkpoint", "contract", str(full), "--policy-frames", "5", "--out", str(out)]
    assert main(command) == 0
    assert "policy_frames = 5\n" in out.read_text()
    assert main(["checkpoint", "contract", str(export), *base, "--policy-frames", "5"]) == 0
    assert "policy_frames = 5\n" in capsys.readouterr().out
    report = inspect(out)
    assert (report["verdict"], report["contract"]["policy_frames"]) == ("ready", 5)
    assert main(["checkpoint", "inspect", str(out)]) == 0
    assert "contract   policy_frames = 5\n" in capsys.readouterr().out

    options = backend_options(device="cpu")
    backend = NativeBackend(out, options)
    assert backend.engine_requests([ask()])[0].video_shape[0] == 2
    rows = backend.infer(ask()).action
    named = NativeBackend(out, backend_options(device="cpu", policy_frames=5))
    np.testing.assert_array_equal(rows, named.infer(ask()).action)
    whole = NativeBackend(full, options).infer(ask()).action
    assert np.abs(rows - whole).max() > 1e-3

    released = convert(Checkpoint.open(out), tmp_path / "released")
    assert Checkpoint.open(released).policy_frames == (5,)
    converted = NativeBackend(released, options).infer(ask()).action
    np.testing.assert_array_equal(converted, rows)
    with pytest.raises(ContractError, match=r"records policy_frames, for which LeRobot"):
        convert(Checkpoint.open(out), tmp_path / "lerobot", "lerobot")


def test_the_processor_asks_for_the_declared_frames_and_for_all_rows(declared):
    processor = Cosmos3PolicyProcessor.for_checkpoint(Checkpoint.open(declared))
    picture = {"images": np.zeros((540, 640, 3), np.uint8), "task": "act"}
    made = processor.preprocess(picture)
    assert made.video_shape[0] == 5
    assert (made.engine_request.video_shape[0], made.engine_request.action_chunk) == (2, 16)
    assert made.engine_request.fps == 15
    dynamics = processor.preprocess({**picture, "mode": "forward_dynamics", "action": [[0.0] * 10]})
    assert dynamics.video_shape[0] == 17


def test_an_undeclared_number_is_refused_with_the_remedy(export, checkpoints, tmp_path):
    full = formats.contract_file(tmp_path / "full.toml", export, checkpoints["relu2"])
    backend = NativeBackend(full, backend_options(device="cpu", policy_frames=5))
    with pytest.raises(ConfigError) as refused:
        backend.infer(ask())
    said = str(refused.value)
    remedy = re.search(r"strands-cosmos3 (checkpoint contract .*?) --out NAME\.toml", said)
    assert remedy is not None
    assert remedy[1].endswith("--policy-frames 5")
    assert "train --policy-frames 5" in said
    out = tmp_path / "declared.toml"
    command = [*remedy[1].split(), "--base", str(checkpoints["relu2"]), "--out", str(out)]
    assert main(command) == 0
    assert "policy_frames = 5" in out.read_text()


@pytest.mark.parametrize("frames", [0, 6, 261, [5, 6], True, "5"])
def test_a_number_that_cannot_be_is_refused_by_name(export, checkpoints, tmp_path, frames):
    path = tmp_path / "my.toml"
    formats.contract_file(path, export, checkpoints["relu2"], policy_frames=frames)
    with pytest.raises(ContractError, match=r"policy_frames must be 1 \+ a multiple of 4"):
        Checkpoint.open(path)


def test_a_number_that_the_rows_do_not_allow_is_refused_by_name(
    export, checkpoints, tmp_path, capsys
):
    path = tmp_path / "my.toml"
    formats.contract_file(path, export, checkpoints["relu2"], policy_frames=[5, 21])
    said = r"policy_frames is \[5, 21\] in .*my.toml and 'at most 17' in a chunk of 16 rows"
    with pytest.raises(ContractError, match=said):
        Checkpoint.open(path)
    base = ["--base", str(checkpoints["relu2"])]
    for number, word in (("6", "1 + a multiple of 4"), ("21", "'at most 17'")):
        command = ["checkpoint", "contract", str(export), *base, "--policy-frames", number]
        assert main(command) == 1
        assert word in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(export), "--policy-frames", "5"]) == 2
    assert "--policy-frames belongs to contract" in capsys.readouterr().err


def test_files_that_declare_different_numbers_contradict_each_other(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["relu2"], tmp_path / "c")
    metadata = folder / "checkpoint.json"
    known = json.loads(metadata.read_text())
    known["strands_cosmos3"]["policy_frames"] = [9]
    metadata.write_text(json.dumps(known))
    path = tmp_path / "my.toml"
    formats.contract_file(path, folder, None, policy_frames=9)
    assert Checkpoint.open(path).policy_frames == (9,)
    formats.contract_file(path, folder, None, policy_frames=5)
    with pytest.raises(ContractError, match=r"policy_frames is \[9\] in .* and 5 in .*my.toml"):
        Checkpoint.open(path)
    known["strands_cosmos3"]["policy_frames"] = [6]
    metadata.write_text(json.dumps(known))
    with pytest.raises(LayoutError, match=r"policy_frames must be 1 \+ a multiple of 4"):
        Checkpoint.open(folder)


def test_a_processor_refuses_a_clip_that_cannot_be(checkpoints):
    opened = Checkpoint.open(checkpoints["relu2"])
    for frames in (0, 6, 21):
        long = replace(opened, policy_frames=(frames,))
        with pytest.raises(ConfigError, match=rf"policy_frames {frames}: .*at most rows \+ 1 = 17"):
            Cosmos3PolicyProcessor.for_checkpoint(long, domain_name="droid")


def test_the_stock_pipeline_cannot_run_it_and_says_so(declared, tmp_path):
    released = convert(Checkpoint.open(declared), tmp_path / "released")
    stock = make_backend("diffusers", released, backend_options(device="cpu", dtype="float32"))
    with pytest.raises(BackendError, match="declares policy_frames 5: use backend='native'"):
        stock.infer(ask())
