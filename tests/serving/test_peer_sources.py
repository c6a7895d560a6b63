"""Peers that are not on PyPI, live. ROBOLAB, COSMOS_FRAMEWORK and ISAACLAB_ARENA name checkouts of
NVlabs/RoboLab, NVIDIA/cosmos-framework and isaac-sim/IsaacLab-Arena; without one, its tests are
skipped.

Run with ``make test-peer-sources``; with RECORD=1 the transcripts that ``test_transcripts.py``
replays are written anew.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from test_peers import peer, run  # noqa: F401
from test_transcripts import (
    ARENA,
    LIBERO,
    ROBOLAB,
    SERVERS,
    call,
    echo,
    require_libero_understood,
    require_understood,
)

from helpers.environments import checkout
from helpers.serving import Several, until
from helpers.transcripts import Transcript, assert_same, recorded, recorded_http

pytestmark = pytest.mark.peers
PACKAGES = Path(torch.__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
SOURCES = {
    "ROBOLAB": ("NVlabs/RoboLab", "policies/{}/client.py"),
    "COSMOS_FRAMEWORK": ("NVIDIA/cosmos-framework", "cosmos_framework/{}.py"),
    "ISAACLAB_ARENA": ("isaac-sim/IsaacLab-Arena", "isaaclab_arena_cosmos/policy/droid_adapter.py"),
}


def source(variable: str, file: str = "") -> tuple[Path, Transcript]:
    """The checkout that a variable names, and an empty transcript that says where it is from."""
    repository, path = SOURCES[variable]
    folder, commit = checkout(variable, repository)
    return folder, Transcript(
        {"repository": repository, "commit": commit, "file": path.format(file)}
    )


def keep(transcript: Transcript, name: str, ignored: tuple[str, ...] = ()) -> None:
    """Compare a session with the stored one, or store it with RECORD=1."""
    if os.environ.get("RECORD"):
        transcript.save(name)
    for sender in ("client", "server"):
        assert_same(transcript.sent_by(sender), Transcript.load(name).sent_by(sender), ignored)


@pytest.mark.parametrize("name", ROBOLAB)
def test_robolab_s_client_is_served(serve, peer: str, name: str):  # noqa: F811
    client, backend = name.removeprefix("robolab-"), echo()
    folder, transcript = source("ROBOLAB", client)
    with recorded(serve(backend).port, transcript) as port:
        out = run(peer, "robolab_calls.py", folder, PACKAGES, port, client)
    said = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    assert [len(line["action"]) for line in said[:-1]] == [8] * 8
    assert "InputError: 'prompt' has 5000 characters" in said[-1]["error"]
    require_understood(backend, transcript.sent_by("server"), bare=client == "dreamzero")
    keep(transcript, name, ("session_id", "session_ids"))


def test_isaaclab_arena_s_client_is_served(serve, peer: str):  # noqa: F811
    folder, transcript = source("ISAACLAB_ARENA")
    backend = echo()
    with recorded(serve(backend).port, transcript) as port:
        out = run(peer, "arena_calls.py", folder, PACKAGES, port)
    said = [json.loads(line) for line in out.splitlines()]
    assert [len(line["action"]) for line in said[:-1]] == [4, 4]
    assert "InputError: 'prompt' has 5000 characters" in said[-1]["error"]
    require_understood(backend, transcript.sent_by("server"), bare=False)
    keep(transcript, ARENA)


def test_nvidia_s_libero_client_is_served(serve, peer: str):  # noqa: F811
    folder, transcript = source("COSMOS_FRAMEWORK", "simulation/libero/closed_loop_eval")
    with recorded_http(serve(Several(), http="libero").port, transcript) as port:
        out = run(peer, "libero_calls.py", folder, PACKAGES, port)
    said = [json.loads(line) for line in out.splitlines()]
    assert said[0] == {"width": 10}
    assert [said[3]["actions"][i] == said[i + 1]["action"] for i in (0, 1)] == [True, True]
    assert "nowhere" in said[-1]["error"]
    require_libero_understood(transcript.sent_by("server"))
    keep(transcript, LIBERO, ("run_name",))


@pytest.mark.parametrize("name", SERVERS)
def test_our_client_calls_nvidia_s_server(peer: str, name: str):  # noqa: F811
    folder, transcript = source("COSMOS_FRAMEWORK", "scripts/action_policy_server_robolab")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    space = name.removeprefix("framework-")
    command = [peer, SCRIPTS / "framework_serves.py", folder, PACKAGES, port, space]
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE)

    def answers() -> bool:
        assert process.poll() is None, process.stderr.read().decode()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(answers, 60)
        with recorded(port, transcript) as here:
            call(here, space)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    keep(transcript, name)
