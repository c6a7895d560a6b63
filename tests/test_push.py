"""``--push``: every file reaches the hub as it is, here a local server; a refusal says what to
do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.fake_hub import fake_hub
from strands_cosmos3.cli import main
from strands_cosmos3.commands.push import require_repository
from strands_cosmos3.errors import ConfigError

PUSH = (
    "import sys; from pathlib import Path; from strands_cosmos3.commands.push import push_folder; "
)
PUSH += "print(push_folder(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))"


def run(endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads HF_ENDPOINT once, so each call has a process of its own."""
    env = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": "hf_token_of_a_test",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_recorded_dataset_is_pushed(tmp_path: Path):
    with fake_hub() as hub:
        command = [
            "-m",
            "strands_cosmos3.cli",
            "rollout",
            "--backend",
            "scripted",
            "--task",
            "reach",
            "--duration",
            "0.4",
        ]
        done = run(
            hub.endpoint, *command, "--dataset", str(tmp_path / "picks"), "--push", "me/picks"
        )
    assert "pushed to" in done.stdout, done.stdout + done.stderr
    (created,) = hub.created
    assert (created["name"], created["organization"], created["type"]) == ("picks", "me", "dataset")
    # by huggingface_hub's version
    assert created.get("private") or created.get("visibility") == "private"
    files = [path for path in (tmp_path / "picks").rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        if not path.name.startswith("."):
            assert (
                hub.files["datasets/me/picks", path.relative_to(tmp_path / "picks").as_posix()]
                == path.read_bytes()
            )


def test_a_checkpoint_is_pushed_and_a_refusal_says_what_to_do(tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text("{}")
    with fake_hub() as hub:
        done = run(hub.endpoint, "-c", PUSH, str(tmp_path), "me/policy", "model")
        assert done.stdout.strip() == f"{hub.endpoint}/me/policy", done.stderr
        assert hub.files == {("models/me/policy", "transformer/config.json"): b"{}"}
        hub.status = 401
        done = run(hub.endpoint, "-c", PUSH, str(tmp_path), "me/policy", "model")
    assert "ConfigError" in done.stderr
    assert "hf auth login" in done.stderr
    assert "hf_token_of_a_test" not in done.stderr


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
