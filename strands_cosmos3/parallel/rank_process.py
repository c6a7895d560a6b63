"""Ranks in processes on this machine: the process that hosts a rank, and the handle that starts and
controls it.

The two ends of a socket pair are ``multiprocessing.connection`` connections. A message is one line
of JSON, then raw bytes; nothing is pickled. A process whose parent is gone ends by itself, whatever
it waits for. No port is opened except torch's own.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from strands_cosmos3.errors import RankLostError, RankSilentError
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.group import (
    HEARTBEAT_S,
    RESTART_NOTE,
    RankGroup,
    RankHandle,
    RankStatus,
    RankTimeouts,
)
from strands_cosmos3.parallel.process_exit import exit_rank
from strands_cosmos3.parallel.rank import Rank

_CLOSE_S = 5.0


def rank_processes(
    checkpoint: str | Path,
    parallel: ParallelConfig,
    options: RankOptions,
    timeouts: RankTimeouts | None = None,
) -> RankGroup:
    """Return a group with one process for each rank, on this machine. Nothing is started yet.

    Without ``options.threads`` the CPU cores are divided among the ranks.
    """
    timeouts = timeouts or RankTimeouts()
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // parallel.world_size)
    loaded = {**asdict(options), "threads": threads if options.device == "cpu" else options.threads}

    def start(end: ExitStack) -> list[RankProcess]:
        folder = end.enter_context(tempfile.TemporaryDirectory(prefix="strands-cosmos3-ranks-"))
        settings = {"checkpoint": str(checkpoint), "parallel": asdict(parallel), "options": loaded}
        settings["init_method"] = f"file://{folder}/ranks"
        handles: list[RankProcess] = []
        for rank in range(parallel.world_size):
            handles.append(RankProcess(rank, timeouts.silent_s))
            end.callback(handles[-1].kill)
            handles[-1].send({**settings, "rank": rank})
        return handles

    return RankGroup(start, timeouts)


class RankProcess(RankHandle):
    """A rank in a process of its own.

    ``transfer_s``: how long the process may neither take nor send a byte in the middle of a
    message.
    """

    def __init__(self, rank: int, transfer_s: float):
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", math.floor(transfer_s), int(transfer_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "strands_cosmos3.parallel.rank_process",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                # ranks of one machine use its loopback
                env={"GLOO_SOCKET_IFNAME": "lo", **os.environ},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the parent handles Ctrl-C
            )
        self.pid = self._process.pid
        self.name = f"rank {rank} (process {self.pid})"

    def send(self, about: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message; a RankLostError or RankSilentError if the process cannot be reached."""
        try:
            self._connection.send_bytes(_pack(about, payload))
        except BlockingIOError:
            raise RankSilentError(
                f"{self.name} takes no request: it was stopped, or hangs. {RESTART_NOTE}"
            ) from None
        except OSError:
            raise self._lost() from None

    def submit(self, payload: bytes) -> None:
        """See :meth:`RankHandle.submit`."""
        self.send({"command": "infer"}, payload)

    def statuses(self, wait_s: float) -> Sequence[RankStatus]:
        """See :meth:`RankHandle.statuses`."""
        found: list[RankStatus] = []
        try:
            while self._connection.poll(0.0 if found else wait_s):
                found.append(_status(self._connection.recv_bytes()))
        except BlockingIOError:
            raise RankSilentError(
                f"{self.name} stopped in the middle of a message. {RESTART_NOTE}"
            ) from None
        except (EOFError, OSError):
            if not found:  # its last messages come first
                raise self._lost() from None
        return found

    def close(self) -> None:
        """See :meth:`RankHandle.close`."""
        try:
            self.send({"command": "close"})
            self._process.wait(_CLOSE_S)
        except (RankLostError, RankSilentError, subprocess.TimeoutExpired):
            self.kill()

    @property
    def lost(self) -> bool:
        """See :attr:`RankHandle.lost`."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """See :meth:`RankHandle.kill`."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def _lost(self) -> RankLostError:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with status {code}"
            )
        return RankLostError(f"{self.name} {how}. {RESTART_NOTE}")


def _pack(about: dict[str, Any], payload: bytes = b"") -> bytes:
    return json.dumps(about).encode() + b"\n" + payload


def _unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, payload = message.partition(b"\n")
    return json.loads(header), payload


def _status(message: bytes) -> RankStatus:
    about, payload = _unpack(message)
    step = about["step"] and tuple(about["step"])
    return RankStatus(about["kind"], about["progress"], step, payload, tuple(about["error"]))


class _Parent:
    """The parent, seen from a rank's process: requests in a queue, statuses from any thread."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._sending = threading.Lock()
        self.requests: SimpleQueue[tuple[dict[str, Any], bytes]] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, status: RankStatus) -> None:
        """Send a status; end this process if the parent is gone."""
        about = {
            "kind": status.kind,
            "progress": status.progress,
            "step": status.step,
            "error": status.error,
        }
        try:
            with self._sending:
                self._connection.send_bytes(_pack(about, status.payload))
        except OSError:
            os._exit(1)

    def _receive(self) -> None:
        try:
            while True:
                self.requests.put(_unpack(self._connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(1)  # the main thread may wait for other ranks forever


def main(connection: Connection) -> None:
    """Host one rank until the parent closes it or is gone."""
    parent, rank = _Parent(connection), Rank()
    settings, _ = parent.requests.get()
    degrees, options = ParallelConfig(**settings["parallel"]), RankOptions(**settings["options"])
    parent.send(
        rank.load(
            settings["checkpoint"], degrees, settings["rank"], settings["init_method"], options
        )
    )
    while True:
        about, payload = parent.requests.get()
        if about["command"] == "close":
            break
        parent.send(_infer(parent, rank, payload))
    rank.close()


def _infer(parent: _Parent, rank: Rank, payload: bytes) -> RankStatus:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            parent.send(RankStatus("heartbeat", rank.progress))

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        return rank.infer(
            payload, lambda *step: parent.send(RankStatus("heartbeat", rank.progress, step))
        )
    finally:
        done.set()
        beating.join()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
    exit_rank(0)
