"""Two machines with a network between them: namespaces of this one, each with an address of its
own, and programs in them that believe torchrun started them.

Run as a program, this imports the engine once and forks whoever is asked for on standard input; see
:class:`Machines`.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from itertools import count
from pathlib import Path
from threading import Thread

from helpers.environments import ROOT, TESTS

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class Machines:
    """Two machines; ``names`` are their namespaces.

    A command that is started on both prints to ``log`` + the number of its machine. It writes the
    file ``log`` + ".working" in the third denoising step of its first inference.
    """

    def __init__(self):
        self.names = [f"cosmos-{os.getpid()}-{node}" for node in range(2)]
        self._ports = count(29500)
        self._forks = None
        self._started = []

    def __enter__(self):
        for name in self.names:
            ip("netns", "add", name)
        ends = [("name", f"cable{node}", "netns", name) for node, name in enumerate(self.names)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for node, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"{ADDRESSES[node]}/24", "dev", f"cable{node}")
            ip("-n", name, "link", "set", "lo", "up")
            self.plug(node)
        return self

    def __exit__(self, *_):
        if self._forks is not None:
            for process in self._started:
                process.kill()
            self._forks.stdin.close()
            self._forks.wait(30)
        for name in self.names:
            ip("netns", "delete", name)

    def plug(self, node, state="up"):
        """Plug the network cable of a machine in, or out with "down"."""
        ip("-n", self.names[node], "link", "set", f"cable{node}", state)

    def start(self, log, *commands, again=False, **environment):
        """Start a command on each machine; return their processes. ``again``: at the same port as
        before.
        """
        self._port = self._port if again else next(self._ports)
        for node in range(len(commands)):
            Path(f"{log}{node}").unlink(missing_ok=True)
        processes = [
            self._start(log, node, command, environment) for node, command in enumerate(commands)
        ]
        self._started += processes
        return processes

    def _start(self, log, node, command, environment):
        told = {
            "TORCHELASTIC_RUN_ID": "tests",
            "RANK": node,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": 2,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": self._port,
        }
        told.update(environment)
        return Forked(
            self._answer(
                namespace=self.names[node],
                environment={name: str(value) for name, value in told.items()},
                arguments=[str(argument) for argument in command],
                log=str(log),
            ),
            Path(f"{log}{node}"),
            self._answer,
        )

    def _answer(self, **order):
        if self._forks is None:
            path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
            self._forks = subprocess.Popen(
                [sys.executable, "-m", "helpers.machines"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self._forks.stdin.write(json.dumps(order) + "\n")
        self._forks.stdin.flush()
        return json.loads(self._forks.stdout.readline())


class Forked:
    """A process on one of the machines."""

    def __init__(self, pid, log, answer):
        self.pid, self._log, self._answer = pid, log, answer
        self._status = None

    def wait(self, limit_s=120):
        """Its exit status, negative for a signal; it is killed after the limit."""
        deadline = time.monotonic() + limit_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still runs after {limit_s} s, and said: {self.said}")
            time.sleep(0.05)
        return status

    def poll(self):
        """Its exit status, or None."""
        if self._status is None:
            self._status = self._answer(status=self.pid)
        return self._status

    def kill(self):
        """Kill it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def said(self):
        """What it has printed, without the remarks of torch's store and gloo."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return "\n".join(line for line in lines if not line.startswith(("[W", "[E", "[/")))


def ip(*arguments):
    """Run the program of that name."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def enter(namespace):
    """Move the calling thread into a network namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def inside(namespace, work):
    """Return what ``work`` returns in a network namespace."""
    answers = []

    def enter_and_work():
        enter(namespace)
        answers.append(work())

    thread = Thread(target=enter_and_work)
    thread.start()
    thread.join()
    return answers[0]


def main():
    """Fork what standard input asks for, and tell the status of what was forked."""
    from strands_cosmos3 import cli
    from strands_cosmos3.commands import infer, serve  # noqa: F401 - before the first fork
    from strands_cosmos3.engine import engine, processor  # noqa: F401
    from strands_cosmos3.parallel import rank_engine  # noqa: F401
    from strands_cosmos3.serving import served, server  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        if "status" in order:
            pid, status = os.waitpid(order["status"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        if pid := os.fork():
            print(json.dumps(pid), flush=True)
            continue
        try:
            become(cli, **order)
        except BaseException:
            traceback.print_exc()
        os._exit(99)


def become(cli, namespace, environment, arguments, log):
    """Turn a fork into a process on a machine."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    enter(namespace)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(environment)
    printed = os.open(
        f"{log}{environment['GROUP_RANK']}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in enumerate((nothing, printed, printed)):
        os.dup2(target, stream)
    say_when_working(Path(f"{log}.working"))
    sys.argv[1:] = arguments
    cli.program()


def say_when_working(path):
    """Write a file in the third denoising step."""
    from strands_cosmos3.engine.engine import Cosmos3Engine

    step_batch = Cosmos3Engine.step_batch

    def spied(self, requests, on_step=None):
        def told(done, total):
            if done == 3:
                path.touch()
            if on_step is not None:
                on_step(done, total)

        return step_batch(self, requests, told)

    Cosmos3Engine.step_batch = spied


if __name__ == "__main__":
    main()
