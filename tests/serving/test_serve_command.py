"""``strands-cosmos3 serve`` as a process, and its refusals."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_server import ask, dial, get, recording
from websockets.exceptions import InvalidStatus

from helpers.environments import TESTS
from helpers.serving import Echo, observation, until
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.cli import main
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.server import PolicyServer

TOKEN = "s3cret-s3cret-s3cret"


@pytest.fixture
def motion(tmp_path: Path) -> Path:
    recording().save_npz(tmp_path / "motion.npz")
    return tmp_path / "motion.npz"


def test_it_serves_a_recording_with_a_token_from_the_environment_and_stops_on_sigterm(motion: Path):
    command = [
        sys.executable,
        "-m",
        "strands_cosmos3.cli",
        "serve",
        "--trajectory",
        str(motion),
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, "--http", "libero"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STRANDS_COSMOS3_TOKEN": TOKEN},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ws://127\.0\.0\.1:(\d+)", line)
        assert found, line or process.communicate()[1]
        port = int(found[1])
        with dial(port, additional_headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            request = {
                "observation/eef_pos": np.array([0.4, 0, 0.4]),
                "observation/eef_quat": np.array([1.0, 0, 0, 0]),
                "observation/gripper_position": np.zeros(1),
            }
            assert ask(client, request)["action"].shape == (16, 8)
        with pytest.raises(InvalidStatus), dial(port):
            pass
        assert "/predict" in line
        status, info = get(port, "/info", Authorization=f"Bearer {TOKEN}")
        assert (status, json.loads(info)["raw_action_dim"]) == (200, 10)
        assert get(port, "/info")[0] == 401
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"OK\n"
        connection.close()
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "stopped\n")
        assert TOKEN not in error
        assert "Traceback" not in error
    finally:
        process.kill()
        process.communicate()


def test_options_reach_the_server(motion: Path, monkeypatch: pytest.MonkeyPatch):
    servers: list[PolicyServer] = []

    def end(server: PolicyServer, ready: object):
        servers.append(server)
        raise ConfigError("not started")

    monkeypatch.setattr(PolicyServer, "run", end)
    flags = {
        "--max-per-address": 3,
        "--max-clients": 7,
        "--max-batch": 5,
        "--max-queue-age": 2.5,
        "--grace": 1.5,
    }
    arguments = [text for flag, value in flags.items() for text in (flag, str(value))]
    assert main(["serve", "--trajectory", str(motion), *arguments]) == 2
    config = servers[0].config
    limits = (config.max_per_address, config.max_clients, config.max_batch)
    assert [*limits, config.queue_s, config.grace_s] == [*flags.values()]


STUCK = """
import sys, threading
from helpers.serving import Echo
from strands_cosmos3 import backends, cli

class Stuck(Echo):
    action_space = "joint_pos"

def infer_forever(request):
    if request.instruction != "warm up":
        threading.Event().wait()

backends.make_backend = lambda *_: Stuck(infer_forever)
sys.exit(cli.main(["serve", "--replicas", "0", "--port", "0", "--grace", "0.3"]))
"""


def test_an_inference_longer_than_the_grace_is_abandoned_and_said():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", STUCK], cwd=TESTS, **pipes)
    try:
        found = re.search(r":(\d+) ", process.stdout.readline())
        assert found, process.communicate()[1]
        with dial(int(found[1])) as client:
            client.send(encode(observation()))
            until(lambda: "in_flight 1" in get(int(found[1]), "/metrics")[1])
            process.send_signal(signal.SIGTERM)
            out, error = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, error
    assert "after 0.3 s was abandoned" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trajectory", "MOTION", "--host", "0.0.0.0"], "token"),
        (["--trajectory", "MOTION", "--token-file", "/no/such"], "/no/such"),
        (["--trajectory", "MOTION", "--token-file", "/"], "token"),
        (["--trajectory", "MOTION", "--tls-cert", "x"], "--tls-key"),
        (["--trajectory", "MOTION", "--tls-cert", "/no/such", "--tls-key", "/no/such"], "PEM"),
        (["--trajectory", "MOTION", "--port", "99999"], "port"),
        (["--backend", "diffusers"], "checkpoint"),
        (["--embodiment", "umi"], "the bundled policy knows embodiment 'droid'"),
        (["--model", "/no/such", "--trajectory", "MOTION"], "mutually exclusive"),
        (["--backend", "replay"], "recording"),
        (["--trajectory", "/no/such.npz"], "/no/such.npz"),
        (
            ["--trajectory", "MOTION", "--num-steps", "3"],
            "--num-steps 3 belongs to --backend native",
        ),
        (["--trajectory", "MOTION", "--device", "cuda"], "--device cuda"),
        (["--trajectory", "MOTION", "--embodiment", "umi"], "wire"),
    ],
)
def test_bad_usage_is_status_two_and_one_line(
    arguments, says, motion: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", *(str(motion) if a == "MOTION" else a for a in arguments)]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    # a library that is imported for the first time may be waited for
    (_,) = [line for line in error.splitlines() if not line.startswith("loading policy")]


def test_a_recording_has_no_joint_angles_to_serve(motion: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--trajectory", str(motion), "--action-space", "joint_pos"]) == 1
    assert "midtrain" in capsys.readouterr().err


def test_a_rollout_asks_a_policy_server_with_its_cameras(serve, tmp_path: Path):

    backend = Echo()
    backend.info = BackendInfo(name="echo")
    server = serve(backend)
    report = tmp_path / "r.json"
    arguments = [
        "--host",
        "127.0.0.1",
        "--port",
        str(server.port),
        "--instruction",
        "pick up the red cube",
        "--duration",
        "1",
    ]
    # it waves; nothing is picked up
    assert main(["rollout", "--backend", "service", *arguments, "--json", str(report)]) == 1
    (episode,) = json.loads(report.read_text())["episodes"]
    assert episode["outcome"] == "timeout"
    assert len(backend.requests) > 2
    assert backend.requests[-1].instruction == "pick up the red cube"
    assert all(picture.std() > 5 for picture in backend.requests[-1].images.values())
    assert len(backend.requests[-1].images) == 3


def test_a_rollout_without_a_server_ends_in_one_line(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    status = main(
        [
            "rollout",
            "--backend",
            "service",
            "--port",
            str(port),
            "--instruction",
            "pick up the red cube",
            "--duration",
            "1",
        ]
    )
    printed = capsys.readouterr()
    assert status == 1
    assert "no policy server" in " ".join((printed.out + printed.err).split())
    assert "Traceback" not in printed.err


def test_the_expert_is_no_backend_of_a_server(capsys: pytest.CaptureFixture[str]):
    """It needs the simulator's state, which never leaves its process."""
    with pytest.raises(SystemExit) as end:
        main(["serve", "--backend", "scripted"])
    assert end.value.code == 2
    assert "scripted" in capsys.readouterr().err
