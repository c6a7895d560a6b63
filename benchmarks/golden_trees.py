"""Trees of ``golden.py``: a checkout's command lines, servers and processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
CASE_S = 600.0
SERVER_S = 120.0
STOP_S = 20.0
RUNNING: set[subprocess.Popen[Any]] = set()
"""The processes of all cases, each in a session of its own."""


@dataclass
class Tree:
    """A checkout, and the inputs of its cases."""

    folder: Path
    inputs: Path

    def line(self, command: str, options: str, out: Path, port: int = 0) -> list[str]:
        """Return a command line in this tree."""
        words = {"INPUTS": self.inputs, "OUT": out, "TREE": self.folder, "PORT": port}
        options = re.sub("|".join(words), lambda match: str(words[match[0]]), options)
        return [sys.executable, "-m", "strands_cosmos3", command, *shlex.split(options)]

    @contextmanager
    def process(self, line: list[str], log: Path) -> Iterator[subprocess.Popen[Any]]:
        """Start a process of this tree's package that writes to a log; end what is left of it."""
        more = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        more |= {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl"), "RAY_USAGE_STATS_ENABLED": "0"}
        environment = {**os.environ, **ONE_THREAD, **more}
        with log.open("wb") as out:
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            process = subprocess.Popen(
                line, cwd=log.parent, env=environment, start_new_session=True, **files
            )
        RUNNING.add(process)
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            RUNNING.remove(process)

    def run(self, line: list[str], out: Path, allowed: tuple[int, ...] = (0, 1)) -> int:
        """Run a process and return its exit status; RuntimeError if that is not allowed."""
        log = out / "command.log"
        with self.process(line, log) as process:
            try:
                status = process.wait(CASE_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"longer than {CASE_S:g} s: {shlex.join(line)}") from None
        if status not in allowed:
            raise RuntimeError(f"exit status {status}: {shlex.join(line)}\n{end_of(log)}")
        return status

    @contextmanager
    def server(self, options: str, out: Path) -> Iterator[int]:
        """Serve a policy; yields the port."""
        log = out / "server.log"
        line = self.line("serve", f"{options} --port 0", out)
        with self.process(line, log) as process:
            end = time.monotonic() + SERVER_S
            while not (address := re.search(r"ws://[^:\s]+:(\d+)", end_of(log))):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"no server: {shlex.join(line)}\n{end_of(log)}")
                time.sleep(0.1)
            yield int(address[1])


def interrupt_all() -> None:
    """Interrupt the processes of all cases; evaluations then stop their own workers."""
    for process in list(RUNNING):
        process.send_signal(signal.SIGINT)


def end_of(log: Path) -> str:
    """Return the last lines that a process wrote."""
    return log.read_text(errors="replace")[-2000:]
