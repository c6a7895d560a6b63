"""LeRobot's own processor steps and our contract (de-)normalise alike, to a millionth.

What lerobot 0.6.1 wrote and answered is stored in ``assets/lerobot_processors``. `make
test-lerobot` runs it again, on the folders that we convert as well; with RECORD=1 it stores the
answers anew.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from helpers import checkpoint_formats as formats
from helpers import environments
from helpers.environments import TESTS
from strands_cosmos3.actions.stats import denormalize_quantile, normalize_quantile
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.acting import row_quantiles
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.formats.detect import open_layout

STORED = TESTS / "assets/lerobot_processors"
MODES = {"IDENTITY": "none", "QUANTILES": "quantile", "MEAN_STD": "meanstd", "MIN_MAX": "minmax"}
Z = np.random.default_rng(0).uniform(-1.5, 1.5, (16, 10)).astype(np.float32)
ROWS = np.random.default_rng(1).uniform(-2, 2, (16, 10)).astype(np.float32)


def ours(checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``Z``, as acting makes them of a chunk, and ``ROWS`` normalised."""
    droid = get_embodiment("droid")
    quantiles = row_quantiles(
        checkpoint, checkpoint.action_stats(), droid, droid.action_space("midtrain")
    )
    return denormalize_quantile(Z, *quantiles), normalize_quantile(ROWS, *quantiles)


def lerobot_folder(released: Path, folder: Path, processors: Path, mode: str) -> Path:
    """A LeRobot policy with the processors that LeRobot wrote."""
    formats.lerobot_policy(released, folder, normalization_mapping={"ACTION": mode})
    shutil.copytree(processors, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_lerobot_s_own_steps(checkpoints, tmp_path, mode):
    folder = lerobot_folder(checkpoints["silu"], tmp_path / "c", STORED / mode, mode)
    opened = Checkpoint.open(open_layout(folder, checkpoints["silu"]))
    assert opened.metadata["normalization"] == MODES[mode]
    answers = json.loads((STORED / "answers.json").read_text())[mode]
    for found, expected in zip(ours(opened), (answers["after"], answers["before"]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert (mode == "IDENTITY") == np.allclose(answers["after"], Z)


@pytest.mark.slow
def test_lerobot_reads_what_we_write(checkpoints, tmp_path, pytestconfig):
    """Its pipelines, unmodified: of its own folders, and of checkpoints that we convert, with
    every normalisation.
    """
    lerobot = environments.lerobot(pytestconfig)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("PYTHONPATH", None)

    def run(*arguments: object) -> None:
        command = [lerobot, str(TESTS / "helpers/lerobot_normalises.py"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr

    run("write", tmp_path / "theirs")
    folders, opened = [], []
    for mode in MODES:
        folders.append(tmp_path / "theirs" / mode)
        policy = lerobot_folder(checkpoints["silu"], tmp_path / mode, folders[-1], mode)
        opened.append(Checkpoint.open(open_layout(policy, checkpoints["silu"])))
    source = formats.framework_export(checkpoints["silu"], tmp_path / "c", edge=False)
    low, high = np.linspace(-2, -1, 10).tolist(), np.linspace(0.5, 3, 10).tolist()
    figures = {
        "q01": low,
        "q99": high,
        "mean": low,
        "std": high,
        "min": high,
        "max": [value + 2 for value in high],
    }
    formats.write_json(
        tmp_path / "figures.json",
        figures | {"raw": {"q01": low, "q99": [value * 2 for value in high]}},
    )
    for method in ("none", "quantile", "quantile_rot", "meanstd", "minmax"):
        contract = tmp_path / f"{method}.toml"
        formats.contract_file(
            contract, source, checkpoints["silu"], normalization=method, statistics="figures.json"
        )
        folders.append(convert(Checkpoint.open(contract), tmp_path / f"out-{method}", "lerobot"))
        opened.append(Checkpoint.open(folders[-1]))
        for found, expected in zip(ours(opened[-1]), ours(Checkpoint.open(contract)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.savez(tmp_path / "rows.npz", z=Z, rows=ROWS)
    run("read", tmp_path / "rows.npz", *folders)
    with np.load(tmp_path / "rows.npz") as said:
        answers = {
            m: {key: said[f"{key}{i}"].tolist() for key in ("after", "before")}
            for i, m in enumerate(MODES)
        }
        for i, checkpoint in enumerate(opened):
            for found, key in zip(ours(checkpoint), ("after", "before"), strict=True):
                np.testing.assert_allclose(
                    found, said[f"{key}{i}"], rtol=1e-6, atol=1e-6, err_msg=str(folders[i])
                )
    if os.environ.get("RECORD"):
        shutil.copytree(tmp_path / "theirs", STORED, dirs_exist_ok=True)
        (STORED / "answers.json").write_text(json.dumps(answers) + "\n")
    stored = json.loads((STORED / "answers.json").read_text())
    for mode, said in answers.items():
        for file in (tmp_path / "theirs" / mode).iterdir():
            assert (STORED / mode / file.name).read_bytes() == file.read_bytes()
        for key in said:
            np.testing.assert_allclose(said[key], stored[mode][key], rtol=1e-6, atol=1e-6)
