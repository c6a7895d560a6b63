"""Groups of ranks that live as long as the test session; a case runs on all ranks of one."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Listener

from helpers.environments import ROOT, TESTS


class Ranks:
    """A group; ``run(case, **arguments)`` calls ``rank_cases.<case>`` on every rank and returns
    every rank's answer.

    ``ended`` is true once a rank died or hung: the others were killed, and the next case needs
    another group.
    """

    def __init__(self, connections, processes, status_of):
        self._connections, self._processes = connections, processes
        self._status_of = status_of
        self.ended = False

    def run(self, case, **arguments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            # a case that joins by itself must not meet the store of the one before
            port = free.getsockname()[1]
        answers = []
        for connection in self._connections:
            with suppress(ConnectionError):  # a rank that died since has no answer either
                connection.send((case, arguments, port))
        for rank, connection in enumerate(self._connections):
            if not connection.poll(240):
                self._print_stacks()
                self._end()
                raise AssertionError(
                    f"rank {rank} does not answer {case}; stderr has the ranks' stacks"
                )
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionError):
                status = self._status_of(self._processes[rank])
                self._end()
                raise AssertionError(f"rank {rank} died in {case}: {status}") from None
        failed = [
            f"rank {rank}: {text}" for rank, (kind, text) in enumerate(answers) if kind == "error"
        ]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def _print_stacks(self):
        for process in self._processes:
            os.kill(process, signal.SIGUSR1)
        time.sleep(1)

    def _end(self):
        self.ended = True
        self.close()
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def close(self):
        """Hang up: every rank ends by itself."""
        for connection in self._connections:
            connection.close()


class Harness:
    """Starts the process that forks groups, when the first is asked for."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._groups, self._started = {}, 0
        self._fork_server = self._process = None

    def group(self, size, joined=True):
        """Ranks that have joined a process group, or, if not ``joined``, such as torchrun
        starts.
        """
        if self._fork_server is None:
            self._start()
        group = self._groups.get((size, joined))
        if group is None or group.ended:
            self._started += 1
            store = f"{self._folder.name}/store{self._started}" if joined else None
            self._fork_server.send(("fork", size, store))
            accepted = [self._listener.accept() for _ in range(size)]
            ranks = sorted(
                ((*connection.recv(), connection) for connection in accepted),
                key=lambda rank: rank[0],
            )
            _, processes, connections = zip(*ranks, strict=True)
            self._groups[size, joined] = Ranks(connections, processes, self._status)
        return self._groups[size, joined]

    def _status(self, process):
        """How a rank that is gone has ended."""
        self._fork_server.send(("status", process))
        code = self._fork_server.recv()
        return signal.Signals(-code).name if code < 0 else f"status {code}"

    def _start(self):
        self._listener = Listener(f"{self._folder.name}/ranks", "AF_UNIX")
        path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.rank_fork_server", self._listener.address],
            env=environment,
        )
        self._fork_server = self._listener.accept()
        assert self._fork_server.recv() == "ready"

    def close(self):
        """Hang up on every group."""
        for group in self._groups.values():
            group.close()
        if self._fork_server is not None:
            self._fork_server.close()
            self._listener.close()
            self._process.wait(30)
        self._folder.cleanup()
