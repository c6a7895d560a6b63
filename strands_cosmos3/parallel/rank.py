"""One rank of an engine, in the process that hosts it, and ranks in processes on this machine.
Importing this loads no torch.

The two ends of a socket pair are ``multiprocessing.connection`` connections. A message is one line
of JSON, then raw bytes; nothing is pickled. A process whose parent is gone ends by itself, whatever
it waits for. No port is opened except torch's own.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from strands_cosmos3.errors import ConfigError, Cosmos3Error, RankLostError, RankSilentError
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.group import (
    HEARTBEAT_S,
    RESTART_NOTE,
    OnStep,
    RankGroup,
    RankHandle,
    RankStatus,
    RankTimeouts,
)
from strands_cosmos3.parallel.launched import leave
from strands_cosmos3.tables import as_tuples

if TYPE_CHECKING:
    from strands_cosmos3.engine.engine import Cosmos3Engine

_UNWRITTEN = 120
"""Python's own exit status when standard output cannot be flushed."""


def exit_rank(status: int) -> NoReturn:
    """Flush logs and standard streams, then end this process immediately, without Python's
    shutdown.

    gloo's threads outlive ``destroy_process_group``. A thread that releases a tensor while Python
    shuts down terminates the process with SIGABRT, and torchrun reports a failure although the
    rank's work is done.

    ``atexit`` handlers, non-daemon threads and ``__del__`` are skipped: close everything first.
    Ranks that succeeded should call ``dist.barrier`` and destroy their group before they exit.
    """
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or _UNWRITTEN
    if status == 0:
        leave()
    os._exit(status)


class Rank:
    """One rank. Its methods report errors as a status, because the rank's group decides for all
    ranks.

    ``progress`` grows during inference. Any thread may read it.
    """

    def __init__(self) -> None:
        self.progress = 0
        self._rank = 0
        self._engine: Cosmos3Engine | None = None

    def load(
        self,
        checkpoint: str,
        parallel: ParallelConfig,
        rank: int,
        init_method: str,
        options: RankOptions,
    ) -> RankStatus:
        """Connect to the other ranks and load this rank's shard of the weights; ``ready`` once
        every rank has loaded.

        Args:
            checkpoint: A folder in the released layout, or a hub repository that every rank can
                fetch.
            rank: This rank's number, 0 .. ``parallel.ranks - 1``.
            init_method: ``file:///path`` of a new file, on one machine; or ``tcp://host:port``,
                where rank 0 listens.
        """

        def work() -> None:
            import torch
            import torch.distributed as dist

            from strands_cosmos3.engine.checkpoint import locate
            from strands_cosmos3.engine.engine import Cosmos3Engine
            from strands_cosmos3.parallel.collectives import connect

            if dist.is_initialized():
                raise ConfigError(
                    "this process is a rank of another group already; one process hosts one rank."
                )
            if options.threads is not None:
                torch.set_num_threads(options.threads)
            device = torch.device(options.engine.device or "cpu")
            if device.type == "cuda" and device.index is None:
                device = torch.device(
                    "cuda", (options.first_gpu + rank) % max(torch.cuda.device_count(), 1)
                )
            if parallel.ranks > 1:
                connect(device, parallel.timeout_s, init_method, rank, parallel.ranks)
            self._rank = rank
            self._engine = Cosmos3Engine.from_pretrained(
                str(locate(checkpoint)),
                device=device,
                parallel=parallel,
                options=options.engine,
                action_space=options.action_space,
            )
            self._engine.parallel_context.barrier()

        return _report("ready", work)

    def infer(self, payload: bytes, on_step: OnStep | None = None) -> RankStatus:
        """Answer a request together with the other ranks, which must get the same bytes
        (``payload.encode_requests``).

        Returns ``answer``, whose payload on rank 0 is for ``payload.decode_results``. ``on_step``:
        as in the engine's ``step``.
        """
        from strands_cosmos3.parallel.payload import decode_requests, encode_results

        engine = self._engine
        assert engine is not None, "call load first"

        def count(done: int, total: int) -> None:
            self.progress += 1
            if on_step is not None:
                on_step(done, total)

        def step() -> bytes:
            results = engine.step_batch(decode_requests(payload), on_step=count)
            self.progress += 1
            return encode_results(results) if self._rank == 0 else b""

        return _report("answer", step)

    def close(self) -> None:
        """Free the weights and leave the process group."""
        import torch.distributed as dist

        if self._engine is not None:
            self._engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _report(kind: Literal["ready", "answer"], work: Callable[[], bytes | None]) -> RankStatus:
    try:
        return RankStatus(kind, payload=work() or b"")
    except Exception as error:  # whatever it was, the group decides for all ranks
        name = type(error).__name__
        message = str(error).strip()
        if not isinstance(error, Cosmos3Error):
            message = message.split("\n")[0] or "no message"
            # the request's fault, not the process': the rank accepts the next one
            if isinstance(error, ArithmeticError | LookupError | TypeError | ValueError):
                message = f"inference failed ({name}: {message})."
                name = "BackendError"
        return RankStatus("error", error=(name, message))


_CLOSE_S = 5.0


def rank_processes(
    checkpoint: str | Path,
    parallel: ParallelConfig,
    options: RankOptions,
    timeouts: RankTimeouts = RankTimeouts(),
) -> RankGroup:
    """Return a group with one process for each rank, on this machine. Nothing is started yet.

    Without ``options.threads`` the CPU cores are divided among the ranks.
    """
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // parallel.ranks)
    on_cpu = options.engine.device in (None, "cpu")
    loaded = {**asdict(options), "threads": threads if on_cpu else options.threads}

    def start(end: ExitStack) -> list[RankProcess]:
        folder = end.enter_context(tempfile.TemporaryDirectory(prefix="strands-cosmos3-ranks-"))
        settings = {"checkpoint": str(checkpoint), "parallel": asdict(parallel), "options": loaded}
        settings["init_method"] = f"file://{folder}/ranks"
        handles: list[RankProcess] = []
        for rank in range(parallel.ranks):
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
                    "strands_cosmos3.parallel.rank",
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

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message; a RankLostError or RankSilentError if the process cannot be reached."""
        try:
            self._connection.send_bytes(_pack(header, payload))
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
        received: list[RankStatus] = []
        try:
            while self._connection.poll(0.0 if received else wait_s):
                received.append(_status(self._connection.recv_bytes()))
        except BlockingIOError:
            raise RankSilentError(
                f"{self.name} stopped in the middle of a message. {RESTART_NOTE}"
            ) from None
        except (EOFError, OSError):
            if not received:  # its last messages come first
                raise self._lost() from None
        return received

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
            event = "closed its connection"
        else:
            event = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with status {code}"
            )
        return RankLostError(f"{self.name} {event}. {RESTART_NOTE}")


def _pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    return json.dumps(header).encode() + b"\n" + payload


def _unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, payload = message.partition(b"\n")
    return json.loads(header), payload


def _status(message: bytes) -> RankStatus:
    header, payload = _unpack(message)
    fields = {name: as_tuples(value) for name, value in header.items()}
    return RankStatus(**fields, payload=payload)


class _Parent:
    """The parent, seen from a rank's process: requests in a queue, statuses from any thread."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._sending = threading.Lock()
        self.requests: SimpleQueue[tuple[dict[str, Any], bytes]] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, status: RankStatus) -> None:
        """Send a status; end this process if the parent is gone."""
        header = {name: value for name, value in vars(status).items() if name != "payload"}
        try:
            with self._sending:
                self._connection.send_bytes(_pack(header, status.payload))
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
    parent = _Parent(connection)
    rank = Rank()
    settings, _ = parent.requests.get()
    settings["parallel"] = ParallelConfig(**settings["parallel"])
    settings["options"] = RankOptions.from_dict(settings["options"])
    parent.send(rank.load(**settings))
    while True:
        header, payload = parent.requests.get()
        if header["command"] == "close":
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
