"""Ten minutes (SOAK_S) of kills, stops, floods and a full disk, while one honest client goes on:
`make test-hostile`.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_server import recording

from helpers.serving import MIDTRAIN, request
from helpers.storage import full_disk
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import ServiceError, StorageError
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.serving.client import ClientConfig, PolicyClient

SOAK_S = float(os.environ.get("SOAK_S", "600"))
GROWTH = 200 << 20


class Server:
    """``strands-cosmos3 serve`` in a process, on one port however often it is started."""

    def __init__(self, trajectory: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._command = [
            sys.executable,
            "-m",
            "strands_cosmos3",
            "serve",
            "--trajectory",
            str(trajectory),
        ]
        self._command += ["--port", str(self.port), "--max-clients", "32", "--max-queue-age", "5"]
        self.process = self.start()

    def start(self):
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert "serving" in self.process.stdout.readline()
        self.idle = self.resident()
        return self.process

    def resident(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )


def flood(port: int, rng: random.Random) -> None:
    """Twenty sockets that say nothing, nonsense, or half of a handshake, then hang up."""
    sockets = []
    for _ in range(20):
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=2)
            sockets.append(one)
            one.sendall(
                rng.choice(
                    [
                        b"",
                        rng.randbytes(2000),
                        b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n",
                        b"\x16" * 999,
                    ]
                )
            )
        except OSError:
            continue
    time.sleep(rng.random())
    for one in sockets:
        one.close()


@pytest.mark.slow
def test_soak(tmp_path):
    rng, motion = random.Random(0), recording()
    motion.save_npz(tmp_path / "motion.npz")
    server = Server(tmp_path / "motion.npz")
    config = ClientConfig("127.0.0.1", server.port, read_s=2.0, attempts=20)
    client = ServiceBackend(PolicyClient(config), action_space="midtrain")
    space = {"limb_poses": {"arm": motion.T_base_cosmos[0]}, "t_motion_s": 0.0}
    until, served, failed, longest_s = time.monotonic() + SOAK_S, 0, 0, 0.0
    settings = make_settings({"tasks": "reach", "seeds": 1})
    plan = settings.plan()[0]
    record = {
        "success": True,
        "outcome": "success",
        "duration_s": 1.0,
        "times": {},
    }
    attacks = dict.fromkeys(("kill", "stop", "flood", "disk", "none"), 0)
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        folder.write(plan, record)
        while time.monotonic() < until:
            attack = rng.choice(list(attacks))
            attacks[attack] += 1
            flooding = None
            match attack:
                case "kill":
                    server.process.kill()
                    server.process.wait()
                    server.start()
                case "stop":
                    server.process.send_signal(signal.SIGSTOP)
                case "flood":
                    flooding = threading.Thread(
                        target=flood, args=(server.port, random.Random(rng.random()))
                    )
                    flooding.start()
                case "disk":
                    with full_disk(), pytest.raises(StorageError):
                        folder.write(plan, {**record, "success": False})
                    assert folder.read(plan)["success"] is True
            for _ in range(10):
                began = time.monotonic()
                try:
                    assert client.infer(request(space=MIDTRAIN, **space)).action.shape == (16, 8)
                    served += 1
                except ServiceError:
                    failed += 1
                longest_s = max(longest_s, time.monotonic() - began)
                server.process.send_signal(signal.SIGCONT)
            if flooding is not None:
                flooding.join()
            assert server.resident() - server.idle < GROWTH
    client.close()
    server.process.terminate()
    assert server.process.wait(60) == 0
    print(
        f"\n{SOAK_S:g} s: {served} served, {failed} typed errors, longest call {longest_s:.2f} s, "
        f"{attacks}"
    )
    assert served > 10 * failed
    assert longest_s < 30
