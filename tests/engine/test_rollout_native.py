"""A checkpoint in the loop: simulated cameras in, a robot that moves out, the predicted world in
the film.
"""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.cli import main
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.worlds.arms import Robot


@pytest.fixture
def cheap(checkpoints, tmp_path):
    """The same checkpoint, saying that it was trained on small pictures."""
    folder = shutil.copytree(checkpoints["silu"], tmp_path / "c")
    about = json.loads((folder / "checkpoint.json").read_text())
    about["strands_cosmos3"] |= {"resolution_tier": 128, "prefix_rows": 6}
    (folder / "checkpoint.json").write_text(json.dumps(about))
    return folder


def test_rollout_with_a_model(cheap, tmp_path):
    film, figures = tmp_path / "f.mp4", tmp_path / "f.json"
    base = [
        "rollout",
        "--task",
        "reach",
        "--backend",
        "native",
        "--model",
        str(cheap),
        "--device",
        "cpu",
    ]
    short = [
        "--num-steps",
        "1",
        "--duration",
        "0.2",
        "--film",
        "views",
        "--video",
        str(film),
        "--json",
        str(figures),
    ]
    assert main([*base, *short]) == 1, "random weights reach nothing"
    episode = json.loads(figures.read_text())["episodes"][0]
    assert len(episode["model_sha256"]) == 64
    assert episode["steps"]["total"] > 0
    assert film.stat().st_size > 0


@pytest.mark.parametrize(("layout", "decoded"), [("full", "preview"), ("views", False)])
def test_only_a_film_that_shows_the_prediction_has_one_made(layout, decoded, tmp_path, monkeypatch):
    asked = []

    def noted(*_, **options):
        asked.append(options["options"].engine.decode_video)
        raise ConfigError("that is all that this test wants to know")

    monkeypatch.setattr("strands_cosmos3.policy.Cosmos3Policy", noted)
    main(
        [
            "rollout",
            "--task",
            "reach",
            "--backend",
            "native",
            "--film",
            layout,
            "--video",
            str(tmp_path / "f.mp4"),
        ]
    )
    assert asked == [decoded]


def test_the_next_chunk_begins_with_the_rows_that_the_arm_is_bound_to(cheap, monkeypatch):
    """Random weights, labelled so; the loop, the policy and the engine are the real ones. 0.4 s
    are six rows of 15 Hz.
    """
    assert (
        "random" in json.loads((cheap / "checkpoint.json").read_text())["strands_cosmos3"]["label"]
    )
    asked = []
    with Cosmos3Policy(
        robot="panda", backend="native", model=cheap, device="cpu", num_steps=1, actions_per_step=8
    ) as policy:
        infer = policy.backend.infer

        def noted(request):
            chunk = infer(request)
            asked.append((request, chunk.action))
            return chunk

        monkeypatch.setattr(policy.backend, "infer", noted)
        rollout = Robot("panda").run_policy(
            policy=policy, instruction="reach the red cube", duration=2.5, latency=0.4
        )
    assert rollout.counters["chunks"] >= 2
    assert rollout.latency_ms["p50"] == pytest.approx(400.0, abs=1e-3)
    assert asked[0][0].action_prefix is None  # nothing was under way
    bound = [
        (request.action_prefix, action, i)
        for i, (request, action) in enumerate(asked)
        if request.action_prefix is not None
    ]
    assert bound
    for action_prefix, action, i in bound:
        n = len(action_prefix)
        assert 1 <= n <= 6
        earlier = [rows[k : k + n] for _, rows in asked[:i] for k in range(len(rows) - n + 1)]
        # rows of a chunk before it, as they were
        assert any(np.array_equal(rows, action_prefix) for rows in earlier)
        np.testing.assert_allclose(action[:n], action_prefix, atol=1e-6)
        assert np.abs(action[n:]).max() > 1e-3  # and then rows of its own


def test_a_model_needs_its_backend_and_the_other_way_round(capsys):
    assert main(["rollout", "--backend", "diffusers"]) == 2
    assert main(["rollout", "--backend", "scripted", "--model", "x"]) == 2
    assert capsys.readouterr().err.count("--model") == 2
