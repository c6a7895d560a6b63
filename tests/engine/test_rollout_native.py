"""A checkpoint in the loop: simulated cameras in, a robot that moves out, the predicted world in the film."""

import json
import shutil

import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.cli import main


@pytest.fixture
def cheap(checkpoints, tmp_path):
    """The same checkpoint, saying that it was trained on small pictures."""
    folder = shutil.copytree(checkpoints["silu"], tmp_path / "c")
    about = json.loads((folder / "checkpoint.json").read_text())
    about["strands_cosmos3"]["resolution_tier"] = 256
    (folder / "checkpoint.json").write_text(json.dumps(about))
    return folder


def test_rollout_with_a_model(cheap, tmp_path):
    film, figures = tmp_path / "f.mp4", tmp_path / "f.json"
    base = ["rollout", "--task", "reach", "--backend", "native", "--model", str(cheap), "--device", "cpu"]
    short = ["--num-steps", "1", "--duration", "0.2", "--film", "views", "--video", str(film), "--json", str(figures)]
    assert main([*base, *short]) == 1, "random weights reach nothing"
    episode = json.loads(figures.read_text())["episodes"][0]
    assert len(episode["model_sha256"]) == 64
    assert episode["steps"]["total"] > 0
    assert film.stat().st_size > 0


def test_a_model_needs_its_backend_and_the_other_way_round(capsys):
    assert main(["rollout", "--backend", "native"]) == 2
    assert main(["rollout", "--model", "x"]) == 2
    assert capsys.readouterr().err.count("--model") == 2
