"""`plugins/lerobot_policy_cosmos3` in lerobot 0.6.1 with the bundled policy: `make
test-lerobot`. In its own environment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import environments
from helpers.environments import TESTS

pytestmark = pytest.mark.slow
SCRIPT = str(TESTS / "helpers/lerobot_policy.py")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def lerobot(pytestconfig: pytest.Config) -> str:
    return environments.lerobot(pytestconfig)


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # lerobot is imported several times
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture(scope="module")
def made(
    lerobot: str, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The folder of the saved policy, and what was said of it."""
    folder = tmp_path_factory.mktemp("plugin")
    return folder, run([lerobot, SCRIPT, "make", str(folder)], variables, folder)


def run(command: list[str], variables: dict[str, str], folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, cwd=folder, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_lerobots_factory_makes_the_policy_by_type(made: tuple[Path, dict[str, Any]]):
    folder, said = made
    assert said["class"] == "lerobot_policy_cosmos3.modeling_cosmos3.Cosmos3Policy"
    assert json.loads((folder / "policy/config.json").read_text())["type"] == "cosmos3"


def test_chunks_are_those_of_our_policy(made: tuple[Path, dict[str, Any]]):
    folder, said = made
    with np.load(folder / "made.npz") as seen:
        np.testing.assert_array_equal(seen["rows"], seen["own_rows"])
        np.testing.assert_array_equal(seen["chunks"], seen["own_joints"].astype(np.float32))
        assert seen["chunks"].shape[2] == 8
        # each call has its own noise
        assert np.abs(seen["chunks"][0] - seen["chunks"][1]).max() > 1e-4
        # select_action executes the checkpoint's own number of rows, then asks again
        assert said["rows"] == 8
        expected = [*seen["chunks"][0][:8], seen["chunks"][1][0]]
        np.testing.assert_array_equal(seen["selected"], expected)
        np.testing.assert_allclose(seen["batch"], seen["chunks"], atol=2e-5)
        np.testing.assert_allclose(seen["fast"], seen["own_fast"], atol=1e-6)
        assert len(seen["fast"]) > 1.9 * len(seen["chunks"][0])


def test_missing_inputs_are_refused(made: tuple[Path, dict[str, Any]]):
    for message, name in zip(
        made[1]["refused"], ("observation.state", "wrist", "exterior_1", "exterior_2"), strict=True
    ):
        assert name in message


def test_lerobots_asynchronous_server_answers_a_chunk(
    lerobot: str, variables: dict[str, str], made: tuple[Path, dict[str, Any]]
):
    folder, _ = made
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [
        lerobot,
        "-m",
        "lerobot_policy_cosmos3.policy_server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--fps=15",
    ]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log, env=variables, cwd=folder)
    try:
        wait_for(port, server, folder / "server.log")
        said = run([lerobot, SCRIPT, "ask", str(folder), str(port)], variables, folder)
    finally:
        server.terminate()
        server.wait(30)
    with np.load(folder / "asked.npz") as asked, np.load(folder / "made.npz") as seen:
        np.testing.assert_array_equal(asked["chunk"], seen["chunks"][0])
        assert said["steps"] == list(range(len(asked["chunk"])))
        np.testing.assert_array_equal(list(said["performed"].values()), asked["chunk"][0])


def test_the_server_sees_an_arm_in_radians_move(
    lerobot: str, variables: dict[str, str], tmp_path: Path
):
    """LeRobot's own takes seven joints that moved by 20 degrees for an arm that stands."""
    taken = run([lerobot, SCRIPT, "compare", str(tmp_path)], variables, tmp_path)
    assert taken == {"PolicyServer": [], "Cosmos3PolicyServer": ["joints", "gripper"]}


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s and server.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(log.read_text())
