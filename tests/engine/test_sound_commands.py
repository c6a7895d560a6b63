"""``--sound`` of infer and rollout: files of the right rate and length. Random weights, labelled so;
what is heard means nothing.
"""

import json
import wave

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("mujoco")

from helpers.tracks import track_of
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.cli import main

QUICK = ("--device", "cpu", "--num-steps", "1", "--image-size", "128", "--sound")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("heard") / "c", ears=True)
    about = json.loads((folder / "checkpoint.json").read_text())
    about["strands_cosmos3"]["resolution_tier"] = 128
    (folder / "checkpoint.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def infer(folder, tmp_path):
    picture = tmp_path / "view.png"
    Image.fromarray(np.full((96, 128, 3), 90, np.uint8)).save(picture)

    def run(*arguments):
        asked = ("--model", folder, "--image", picture, "--prompt", "go", "--out", tmp_path / "o")
        return main(["infer", *map(str, asked), *QUICK, *arguments])

    return run


def test_infer_writes_a_wav_and_a_track(infer, tmp_path, capsys):
    assert infer("--chunk-rows", "8", "--decode-video") == 0
    seconds = 9 / 15
    with wave.open(str(tmp_path / "o.wav")) as file:
        assert (file.getframerate(), file.getnchannels()) == (8000, 2)
        assert file.getnframes() == int(seconds * 8000)
        assert any(file.readframes(100))
    _, rate, track_s, film_s = track_of(tmp_path / "o.mp4")
    assert film_s == pytest.approx(seconds, abs=1e-3)
    assert track_s == pytest.approx(film_s, abs=1024 / rate)
    said = capsys.readouterr().out
    assert "o.wav: 0.600 s at 8000 Hz" in said
    assert "random weights" in said


def test_infer_without_a_film_writes_the_wav_alone(infer, tmp_path):
    assert infer("--chunk-rows", "4") == 0
    assert (tmp_path / "o.wav").exists()
    assert not (tmp_path / "o.mp4").exists()


def test_a_rollout_s_film_has_a_track_as_long_as_itself(folder, tmp_path):
    """Four rows of each chunk are executed, and its sound is heard meanwhile."""
    film = tmp_path / "f.mp4"
    arguments = ["--task", "reach", "--model", str(folder), "--duration", "2.5"]
    arguments += ["--replan-rows", "4"]
    assert main(["rollout", *arguments, *QUICK, "--film", "views", "--video", str(film)]) == 1
    samples, rate, track_s, film_s = track_of(film)
    assert film_s > 2
    assert track_s == pytest.approx(film_s, abs=1024 / rate)
    assert samples[:, rate // 2 : rate].std() > 1e-3
    assert samples[:, 3 * rate // 2 : 2 * rate].std() > 1e-3, "so is the second chunk"


def test_scripted_and_bundled_policies_have_no_sound(tmp_path, capsys):
    film = str(tmp_path / "f.mp4")
    for backend, status, says in (
        ("scripted", 2, "--sound True belongs to --backend native"),
        ("native", 1, "cannot predict sound. It lacks the sound tokenizer"),
    ):
        asked = ("--backend", backend, "--task", "reach", "--video", film, "--sound")
        assert main(["rollout", *asked]) == status
        assert says in " ".join(capsys.readouterr().err.split())
