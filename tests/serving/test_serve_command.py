"""``strands-cosmos3 serve`` as a process, and its refusals."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_server import ask, dial, recording
from websockets.exceptions import InvalidStatus

from strands_cosmos3.cli import main


@pytest.fixture
def motion(tmp_path: Path) -> Path:
    recording().save_npz(tmp_path / "motion.npz")
    return tmp_path / "motion.npz"


def test_it_serves_a_recording_with_a_token_from_the_environment_and_stops_on_sigterm(motion: Path):
    command = [sys.executable, "-m", "strands_cosmos3.cli", "serve", "--trajectory", str(motion), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STRANDS_COSMOS3_TOKEN": "s3cret"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ws://127\.0\.0\.1:(\d+)", line)
        assert found, line or process.communicate()[1]
        port = int(found[1])
        with dial(port, additional_headers={"Authorization": "Bearer s3cret"}) as client:
            request = {
                "observation/eef_pos": np.array([0.4, 0, 0.4]),
                "observation/eef_quat": np.array([1.0, 0, 0, 0]),
                "observation/gripper_position": np.zeros(1),
            }
            assert ask(client, request)["action"].shape == (16, 8)
        with pytest.raises(InvalidStatus), dial(port):
            pass
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"OK\n"
        connection.close()
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "stopped\n")
        assert "s3cret" not in error
        assert "Traceback" not in error
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trajectory", "MOTION", "--host", "0.0.0.0"], "token"),
        (["--trajectory", "MOTION", "--token-file", "/no/such"], "/no/such"),
        (["--trajectory", "MOTION", "--token-file", "/"], "token"),
        (["--trajectory", "MOTION", "--port", "99999"], "port"),
        (["--backend", "scripted"], "never leaves its process"),
        (["--backend", "scripted", "--trajectory", "MOTION"], "--backend replay"),
        (["--backend", "oracle"], "unknown backend"),
        ([], "recording"),
        (["--trajectory", "/no/such.npz"], "/no/such.npz"),
        (["--trajectory", "MOTION", "--embodiment", "umi"], "wire"),
    ],
)
def test_bad_usage_is_status_two_and_one_line(arguments, says, motion: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", *(str(motion) if a == "MOTION" else a for a in arguments)]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1


def test_a_recording_has_no_joint_angles_to_serve(motion: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--trajectory", str(motion), "--action-space", "joint_pos"]) == 1
    assert "midtrain" in capsys.readouterr().err
