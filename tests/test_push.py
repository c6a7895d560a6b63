"""``--push``: every file reaches the hub as it is, here a local server; a refusal says what to
do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from helpers.fake_hub import fake_hub
from strands_cosmos3.cli import main
from strands_cosmos3.commands.push import push_folder, require_repository
from strands_cosmos3.errors import ConfigError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """A hub that huggingface_hub, which has read HF_ENDPOINT when it was imported, speaks to."""
    monkeypatch.setenv("HF_TOKEN", "hf_token_of_a_test")
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        yield hub


def test_a_recorded_dataset_is_pushed(hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "picks"
    run = ["rollout", "--backend", "scripted", "--task", "reach", "--duration", "0.4"]
    main([*run, "--dataset", str(folder), "--push", "me/picks"])
    assert "pushed to" in capsys.readouterr().out
    (created,) = hub.created
    assert (created["name"], created["organization"], created["type"]) == ("picks", "me", "dataset")
    # by huggingface_hub's version
    assert created.get("private") or created.get("visibility") == "private"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        if not path.name.startswith("."):
            name = path.relative_to(folder).as_posix()
            assert hub.files["datasets/me/picks", name] == path.read_bytes()


def test_a_checkpoint_is_pushed_and_a_refusal_says_what_to_do(hub, tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text("{}")
    assert push_folder(tmp_path, "me/policy", "model") == f"{hub.endpoint}/me/policy"
    assert hub.files == {("models/me/policy", "transformer/config.json"): b"{}"}
    hub.status = 401
    with pytest.raises(ConfigError, match="hf auth login") as refused:
        push_folder(tmp_path, "me/policy", "model")
    assert "hf_token_of_a_test" not in str(refused.value)


@pytest.mark.parametrize("name", ["picks", "a/b/c", "me/", "../x", "me/a b", ""])
def test_names_that_are_no_repository_are_refused_before_anything_runs(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="--push"):
        require_repository(name)
    assert (
        main(
            [
                "rollout",
                "--backend",
                "scripted",
                "--dataset",
                str(tmp_path / "d"),
                "--push",
                name or "x",
            ]
        )
        == 2
    )
    assert not (tmp_path / "d").exists()


def test_push_needs_a_dataset():
    assert main(["rollout", "--backend", "scripted", "--push", "me/picks"]) == 2
