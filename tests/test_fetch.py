"""Datasets by name: every file comes from the hub, here a local server, once; what goes wrong is
typed and says what to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.environments import TESTS
from helpers.fake_hub import Hub, fake_hub
from helpers.post_training import made_up_arm
from strands_cosmos3.cli import main
from strands_cosmos3.commands.fetch import locate_dataset
from strands_cosmos3.errors import DatasetNotFoundError

FETCH = """
import json, sys
from pathlib import Path
from strands_cosmos3.commands.fetch import locate_dataset
from strands_cosmos3.datasets import Dataset
from strands_cosmos3.errors import DatasetError
said = []
for name in sys.argv[1:]:
    try:
        folder = locate_dataset(name, "--demos")
        with Dataset(folder) as dataset:
            said.append([str(folder), [episode.task for episode in dataset]])
    except DatasetError as error:
        said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""
OLD, NEW = "a" * 40, "b" * 40


def fetch(hub: Hub, home: Path, *names: str) -> list[list]:
    """huggingface_hub reads HF_ENDPOINT once, so each call has a process of its own."""
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    env |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}  # of a slow machine
    command = [sys.executable, "-c", FETCH, *names]
    done = subprocess.run(
        command, env=env, cwd=TESTS.parent, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_dataset_is_fetched_once_and_read_without_a_network(tmp_path: Path):
    old, new = (made_up_arm(tmp_path / task, (f"{task} the drawer",)) for task in ("open", "close"))
    with fake_hub() as hub:
        hub.datasets["me/arm"] = {
            OLD: contents(old),
            NEW: contents(new) | {"weights/big.bin": b"no part of a dataset"},
        }
        hub.datasets["me/gated"], hub.gated = {NEW: contents(new)}, {"me/gated"}
        names = ["me/arm", f"me/arm@{OLD}", "me/gated", "me/nothing", "me/arm@v9", "me/arm"]
        latest, pinned, gated, nothing, revision, again = fetch(hub, tmp_path / "home", *names)
    assert (latest[1], pinned[1]) == (["close the drawer"], ["open the drawer"])
    assert Path(latest[0]).parts[-2:] == ("snapshots", NEW)
    assert Path(pinned[0]).parts[-2:] == ("snapshots", OLD)
    assert again == latest
    wanted = {content: path for folder in (new, old) for path, content in contents(folder).items()}
    assert sorted(hub.downloads) == sorted(wanted.values())  # each content once, and no weights
    assert gated[0] == "DatasetAccessError"
    assert "accept its conditions" in gated[1]
    assert nothing[0] == revision[0] == "DatasetNotFoundError"
    assert "if it is private, log in with `hf auth login`" in nothing[1]
    assert "has no revision 'v9'" in revision[1]
    cached, unreachable = fetch(hub, tmp_path / "home", "me/arm", "me/other")  # the server is gone
    assert cached == latest
    assert unreachable[0] == "DatasetUnreachableError"
    assert "HF_ENDPOINT" in unreachable[1]


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "me/arm@1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_dataset("me/arm@1", "--demos") == Path("me/arm@1")


@pytest.mark.parametrize("name", ["demos", "./me/arm", "/me/arm", "a/b/c", "me/a b"])
def test_what_is_neither_a_folder_nor_a_name_is_refused_without_a_network(
    name: str, tmp_path: Path, capsys
):
    with pytest.raises(DatasetNotFoundError, match=r"--demos .* neither a folder nor a dataset"):
        locate_dataset(name, "--demos")
    assert main(["train", "--out", str(tmp_path / "run"), "--model", "x", "--dataset", name]) == 2
    assert "neither a folder nor a dataset" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
