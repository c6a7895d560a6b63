"""A process that hosts one rank, and the member that starts and feeds it.

The two ends of a socket pair speak frames: two lengths (<IQ), a JSON object, raw bytes. A worker whose leader is gone ends
by itself, in whatever exchange it waits, so nobody stays behind; no port is opened but torch's own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from strands_cosmos3.errors import Cosmos3Error, RankLostError, RankSilentError
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.gang import BEAT_S, Gang, GangLimits, Report
from strands_cosmos3.parallel.process_exit import exit_rank

if TYPE_CHECKING:
    from strands_cosmos3.parallel.rank import InferenceRank

_LENGTHS = struct.Struct("<IQ")
_CHUNK = 1 << 20
_CLOSE_S = 5.0


def start_processes(
    checkpoint: str | Path,
    parallel: ParallelConfig,
    options: RankOptions,
    limits: GangLimits | None = None,
) -> Gang:
    """Start one process for each rank on this machine, and wait until all have loaded.

    Args:
        checkpoint: A folder.
        parallel: How many, and how they divide the work.
        options: How each loads. Without ``threads`` the CPU's cores are divided among the ranks.
        limits: How long to wait for them.

    Raises:
        Cosmos3Error: Loading failed; every process is gone.
    """
    limits = limits or GangLimits()
    meeting = tempfile.TemporaryDirectory(prefix="strands-cosmos3-ranks-")
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // parallel.world_size)
    settings = {
        "checkpoint": str(checkpoint),
        "parallel": asdict(parallel),
        "init_method": f"file://{meeting.name}/ranks",
        "options": {**asdict(options), "threads": threads if options.device == "cpu" else options.threads},
    }
    members: list[ProcessMember] = []
    gang = Gang(members, limits, meeting.cleanup)
    try:
        for rank in range(parallel.world_size):
            members.append(ProcessMember(rank, {**settings, "rank": rank}, limits.silent_s))
    finally:
        gang.members = tuple(members)
        if len(members) < parallel.world_size:
            gang.kill()
    gang.wait_ready()
    return gang


class ProcessMember:
    """A rank in a process of its own.

    Args:
        rank: Its number.
        settings: What :class:`InferenceRank` is made of, as JSON knows it.
        send_s: How long a request may take to hand over.
    """

    def __init__(self, rank: int, settings: dict[str, Any], send_s: float):
        self._socket, theirs = socket.socketpair()
        self._received = bytearray()
        self._send_s = send_s
        command = [sys.executable, "-m", "strands_cosmos3.parallel.worker", str(theirs.fileno())]
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}  # ranks of one machine speak over its loopback
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is the leader's to handle
            )
        self._name = f"rank {rank} (process {self._process.pid})"
        self._send(settings)

    @property
    def name(self) -> str:
        """Rank and process."""
        return self._name

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def submit(self, payload: bytes) -> None:
        """See :meth:`Member.submit`."""
        self._send({"do": "infer"}, payload)

    def reports(self, wait_s: float) -> Sequence[Report]:
        """See :meth:`Member.reports`."""
        found: list[Report] = []
        while select.select([self._socket], [], [], 0.0 if found else wait_s)[0]:
            try:
                received = self._socket.recv(_CHUNK)
            except ConnectionError:
                received = b""
            if not received:
                if found:
                    break  # its last words first
                raise RankLostError(
                    f"{self._name} {self._how_it_ended()}. All ranks were ended; the next call starts them again."
                )
            self._received += received
            found += [_report(*frame) for frame in _frames(self._received)] or [Report("beat")]
        return found

    def close(self) -> None:
        """See :meth:`Member.close`."""
        try:
            self._send({"do": "close"})
            self._process.wait(_CLOSE_S)
        except (RankLostError, RankSilentError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self) -> None:
        """See :meth:`Member.kill`."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def _send(self, about: dict[str, Any], payload: bytes = b"") -> None:
        self._socket.settimeout(self._send_s)
        try:
            _send(self._socket, about, payload)
        except TimeoutError:
            raise RankSilentError(f"{self._name} takes no request: it was stopped, or hangs. All ranks were ended; "
                                  "the next call starts them again.") from None  # fmt: skip
        except OSError:
            raise RankLostError(f"{self._name} {self._how_it_ended()}. All ranks were ended; "
                                "the next call starts them again.") from None  # fmt: skip

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _report(about: dict[str, Any], payload: bytes) -> Report:
    step = about.get("step")
    return Report(
        about["kind"],
        about.get("progress", 0),
        None if step is None else tuple(step),
        payload,
        tuple(about.get("error", ("", ""))),
    )


def _send(to: socket.socket, about: dict[str, Any], payload: bytes = b"") -> None:
    header = json.dumps(about).encode()
    to.sendall(_LENGTHS.pack(len(header), len(payload)) + header)
    if payload:
        to.sendall(payload)


def _frames(received: bytearray) -> list[tuple[dict[str, Any], bytes]]:
    """Take every complete frame off the beginning."""
    found = []
    while len(received) >= _LENGTHS.size:
        header, body = _LENGTHS.unpack_from(received)
        end = _LENGTHS.size + header + body
        if len(received) < end:
            break
        about = json.loads(received[_LENGTHS.size : _LENGTHS.size + header])
        found.append((about, bytes(received[_LENGTHS.size + header : end])))
        del received[:end]
    return found


class _Leader:
    """The worker's end: requests in a queue, reports from any thread."""

    def __init__(self, fd: int):
        self._socket = socket.socket(fileno=fd)
        self._sending = threading.Lock()
        self.requests: SimpleQueue[tuple[dict[str, Any], bytes]] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def say(self, kind: str, payload: bytes = b"", **about: Any) -> None:
        """Send a report; there is nobody to tell where the leader is gone."""
        try:
            with self._sending:
                _send(self._socket, {"kind": kind, **about}, payload)
        except OSError:
            os._exit(1)

    def _receive(self) -> None:
        received = bytearray()
        while True:
            try:
                more = self._socket.recv(_CHUNK)
            except OSError:
                more = b""
            if not more:
                os._exit(1)  # the main thread may wait for other ranks for ever
            received += more
            for frame in _frames(received):
                self.requests.put(frame)


def main(fd: int) -> None:
    """Host one rank until its leader says goodbye, or is gone."""
    from strands_cosmos3.parallel.rank import InferenceRank  # its leader, which reads this file too, needs no torch

    leader = _Leader(fd)
    settings, _ = leader.requests.get()
    rank: InferenceRank | None = None
    try:
        rank = InferenceRank(
            settings["checkpoint"],
            ParallelConfig(**settings["parallel"]),
            settings["rank"],
            settings["init_method"],
            RankOptions(**settings["options"]),
        )
        leader.say("ready")
        while True:
            about, payload = leader.requests.get()
            if about["do"] == "close":
                break
            _answer(leader, rank, payload)
    except Exception as error:  # the seam: whatever it was, the leader decides for all ranks
        leader.say("error", error=_described(error))
        leader.requests.get()  # it ends this process
    else:
        rank.close()


def _answer(leader: _Leader, rank: InferenceRank, payload: bytes) -> None:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            leader.say("beat", progress=rank.progress)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        answer = rank.infer(payload, lambda *step: leader.say("beat", progress=rank.progress, step=step))
    except Cosmos3Error as error:
        leader.say("error", error=_described(error))
    else:
        leader.say("answer", answer or b"")
    finally:
        done.set()
        beating.join()


def _described(error: Exception) -> tuple[str, str]:
    lines = str(error).strip().splitlines()
    return type(error).__name__, str(error) if isinstance(error, Cosmos3Error) else (lines[0] if lines else "no message")


if __name__ == "__main__":
    main(int(sys.argv[1]))
    exit_rank(0)
