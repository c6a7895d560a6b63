"""Ten minutes (SOAK_S) of kills, stops, floods and a full disk, and as long of fragments, silent
sockets and pings, while one honest client goes on: `make test-hostile`.
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
from contextlib import suppress
from pathlib import Path

import pytest
from test_server import get, recording
from websockets.frames import Frame, Opcode

from helpers.handshakes import HANDSHAKE, together
from helpers.serving import MIDTRAIN, request, until
from helpers.storage import full_disk
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import ServiceError, StorageError
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.serving.client import ClientConfig, PolicyClient

SOAK_S = float(os.environ.get("SOAK_S", "600"))
GROWTH = 200 << 20
FLOODED_GROWTH = 50 << 20


class Server:
    """``strands-cosmos3 serve`` in a process, on one port however often it is started."""

    def __init__(self, trajectory: Path, *options: str):
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
        self._command += ["--port", str(self.port), *options]
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
    server = Server(tmp_path / "motion.npz", "--max-clients", "32", "--max-queue-age", "5")
    config = ClientConfig("127.0.0.1", server.port, read_s=2.0, attempts=20)
    client = ServiceBackend(PolicyClient(config), action_space="midtrain")
    space = {"limb_poses": {"arm": motion.T_base_cosmos[0]}, "t_motion_s": 0.0}
    end, served, failed, longest_s = time.monotonic() + SOAK_S, 0, 0, 0.0
    settings = make_settings({"tasks": "reach", "seeds": 1})
    plan = settings.plan()[0]
    record = {
        "success": True,
        "outcome": "success",
        "duration_s": 1.0,
        "counters": {},
        "times": {},
    }
    attacks = dict.fromkeys(("kill", "stop", "flood", "disk", "none"), 0)
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        folder.write(plan, record)
        while time.monotonic() < end:
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


class Attacker:
    """A socket that sends frames at a rate and reads nothing, or says nothing more; one that is
    closed connects anew.

    Args:
        port: The server's.
        opening: What it says first.
        frames_s: Frames in a second.
        frame: One of them.
    """

    def __init__(self, port: int, opening: bytes, frames_s: int = 0, frame: bytes = b""):
        self.port, self.opening, self.frames_s, self.frame = port, opening, frames_s, frame
        self.connects, self.total = -1, 0
        self.connect()

    def connect(self) -> None:
        self.connects += 1
        self.since, self.sent, self.left = time.monotonic(), 0, b""
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(20)
        with suppress(OSError):
            self.socket.connect(("127.0.0.1", self.port))
            self.socket.sendall(self.opening)
        self.socket.setblocking(False)

    def go_on(self) -> None:
        due = int((time.monotonic() - self.since) * self.frames_s) - self.sent
        self.sent += due
        due = min(due, self.frames_s // 4)  # no burst after a pause
        self.total += due
        self.left += self.frame * due
        try:
            while self.left:
                self.left = self.left[self.socket.send(self.left) :]
            while not self.frames_s:
                if self.socket.recv(4096) == b"":
                    raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self.socket.close()
            self.connect()


def frame(opcode: Opcode, data: bytes = b"") -> bytes:
    return Frame(opcode, data, fin=opcode is Opcode.PING).serialize(mask=True)


SHAKEN = (HANDSHAKE + "\r\n").encode()
BEGUN = SHAKEN + frame(Opcode.BINARY)


def attackers(port: int) -> list[Attacker]:
    """A hundred and four clients that send frames, up to nearly 2,000 in a second, and a thousand
    sockets without a request.
    """
    empty, short = frame(Opcode.CONT), frame(Opcode.CONT, b"x")
    ping = frame(Opcode.PING, bytes(125))
    return [
        *(Attacker(port, BEGUN, 250, empty) for _ in range(40)),
        *(Attacker(port, BEGUN, 250, short) for _ in range(20)),
        *(Attacker(port, SHAKEN, 250, ping) for _ in range(40)),
        *(Attacker(port, BEGUN, 1900, empty) for _ in range(2)),
        *(Attacker(port, SHAKEN, 1900, ping) for _ in range(2)),
        *(Attacker(port, said) for said in (b"", SHAKEN[:-2], b"POST / HTTP/1.1\r\n", b"G") * 250),
    ]


@pytest.mark.slow
def test_fragments_silent_sockets_and_unread_pongs_cost_no_memory(tmp_path):
    motion = recording()
    motion.save_npz(tmp_path / "motion.npz")
    server = Server(tmp_path / "motion.npz")
    config = ClientConfig("127.0.0.1", server.port, read_s=60.0, handshake_s=30.0)
    client = ServiceBackend(PolicyClient(config), action_space="midtrain")
    space = {"limb_poses": {"arm": motion.T_base_cosmos[0]}, "t_motion_s": 0.0}
    for _ in range(20):
        client.infer(request(space=MIDTRAIN, **space))
    start, end, growth, served, longest_s = server.resident(), time.monotonic() + SOAK_S, [], 0, 0.0
    held, stopped = attackers(server.port), threading.Event()

    def attack(some: list[Attacker], pause_s: float) -> None:
        while not stopped.wait(pause_s):
            for one in some:
                one.go_on()

    speaking = [one for one in held if one.frames_s]
    silent = [one for one in held if not one.frames_s]
    attacking = [
        threading.Thread(target=attack, args=(speaking, 0.02)),
        threading.Thread(target=attack, args=(silent, 1.0)),
    ]
    for thread in attacking:
        thread.start()
    try:
        while (now := time.monotonic()) < end:
            if now >= end - SOAK_S + 10 * len(growth):
                growth.append(server.resident() - start)
                line = f"{now - end + SOAK_S:.0f} s: {growth[-1] / 2**20:+.1f} MB, {served} served"
                print(line, flush=True)
            assert client.infer(request(space=MIDTRAIN, **space)).action.shape == (16, 8)
            served += 1
            longest_s = max(longest_s, time.monotonic() - now)
            time.sleep(0.2)
    finally:
        stopped.set()
        for thread in attacking:
            thread.join()
    _, metrics = get(server.port, "/metrics")
    print(
        f"{SOAK_S:g} s: {served} served, longest call {longest_s:.2f} s, memory "
        f"{min(growth) / 2**20:+.1f} to {max(growth) / 2**20:+.1f} MB, "
        f"{sum(one.connects for one in held)} times cut off, "
        f"{sum(one.total for one in held) / SOAK_S:.0f} frames/s",
        *(line for line in metrics.splitlines() if "cut_off_total{" in line),
        sep="\n",
    )
    client.close()
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert max(growth) < FLOODED_GROWTH


@pytest.mark.slow
def test_four_hundred_handshakes_of_one_token_and_a_hundred_of_another(serve):
    tokens = {name: name + "-0123456789abcdef" for name in ("many", "few")}
    server = serve(token=tokens)
    many, few = ({"Authorization": f"Api-Key {token}"} for token in tokens.values())
    for i in range(10):
        order = [[many] * 400 + [few] * 100, [few] * 100 + [many] * 400, ([many] * 4 + [few]) * 100]
        asked = order[i % 3]
        with together(server.port, asked) as answers:
            taken = [
                name is few for name, status in zip(asked, answers, strict=True) if status == 101
            ]
            assert len(taken) == server.metrics.clients == 128
            assert sum(taken) == 64
        until(lambda: server.metrics.clients == 0)
