"""Groups of ranks that live as long as the test session; a case runs on all ranks of one."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener

from helpers.environments import ROOT, TESTS


class Ranks:
    """A group; ``run(case, **arguments)`` calls ``rank_cases.<case>`` on every rank and returns
    every rank's answer.
    """

    def __init__(self, connections, processes):
        self._connections, self._processes = connections, processes

    def run(self, case, **arguments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            # a case that joins by itself must not meet the store of the one before
            port = free.getsockname()[1]
        for connection in self._connections:
            connection.send((case, arguments, port))
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(240):
                for process in self._processes:
                    os.kill(process, signal.SIGUSR1)  # it prints what it is doing
                raise AssertionError(
                    f"rank {rank} does not answer {case}; stderr has the ranks' stacks"
                )
            answers.append(connection.recv())
        failed = [
            f"rank {rank}: {text}" for rank, (kind, text) in enumerate(answers) if kind == "error"
        ]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]


class Harness:
    """Starts the process that forks groups, when the first is asked for."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._groups = {}
        self._fork_server = self._process = None

    def group(self, size, joined=True):
        """Ranks that have joined a process group, or, if not ``joined``, such as torchrun
        starts.
        """
        if self._fork_server is None:
            self._start()
        if (size, joined) not in self._groups:
            self._fork_server.send((size, f"{self._folder.name}/store{size}" if joined else None))
            accepted = [self._listener.accept() for _ in range(size)]
            ranks = sorted(
                ((*connection.recv(), connection) for connection in accepted),
                key=lambda rank: rank[0],
            )
            _, processes, connections = zip(*ranks, strict=True)
            self._groups[size, joined] = Ranks(connections, processes)
        return self._groups[size, joined]

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
        """Hang up: every rank ends by itself."""
        for group in self._groups.values():
            for connection in group._connections:
                connection.close()
        if self._fork_server is not None:
            self._fork_server.close()
            self._listener.close()
            self._process.wait(30)
        self._folder.cleanup()
