"""Trees of ``golden.py``: a checkout's command lines, servers and processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from golden_results import NAMES

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
CASE_S = 600.0
SERVER_S = 120.0
STOP_S = 20.0


class Processes:
    """The processes of all cases, each in a session of its own, so that Ctrl-C ends all."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def start(
        self, command: list[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process that writes to a log."""
        with self._lock, log.open("wb") as out:
            if self._stopped:
                raise KeyboardInterrupt
            files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            process = subprocess.Popen(
                command, cwd=log.parent, env=environment, start_new_session=True, **files
            )
            self._running.add(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End a process by SIGTERM, and whatever of its group is left by SIGKILL."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with self._lock:
            self._running.discard(process)

    def end_all(self) -> None:
        """End all processes and start no more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # evaluations stop their own workers
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            self.end(process)


@dataclass
class Tree:
    """A checkout, the inputs of its cases, and the flags that its commands list."""

    folder: Path
    inputs: Path
    processes: Processes
    flags: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of its processes: its own package and tests, one thread, wide help."""
        path = f"{self.folder}{os.pathsep}{self.folder / 'tests'}"
        more = {"PYTHONPATH": path, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
        more |= {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl"), "RAY_USAGE_STATS_ENABLED": "0"}
        return {**os.environ, **ONE_THREAD, **more}

    def flags_of(self, command: str) -> frozenset[str]:
        """Return the flags at the beginnings of the lines of a command's help."""
        if command not in self.flags:
            line = [sys.executable, "-m", "strands_cosmos3", command, "--help"]
            shown = subprocess.check_output(line, env=self.environment, cwd=self.inputs, text=True)
            heads = re.findall(r"^\s+(-.*?)(?:\s{2,}|$)", shown, re.M)
            self.flags[command] = frozenset(re.findall(r"--[a-z][a-z0-9.-]*", " ".join(heads)))
        return self.flags[command]

    def spelled(self, flag: str, command: str) -> str:
        """Return a flag as this tree spells it."""
        listed = self.flags_of(command)
        for spelling in NAMES["spellings"].get(flag, (flag,)):
            grouped = [name for name in listed if name.endswith(f".{spelling[2:]}")]
            if spelling in listed or len(grouped) == 1:
                return spelling if spelling in listed else grouped[0]
        return flag

    def line(self, command: str, options: str, out: Path, port: int = 0) -> list[str]:
        """Return a command line in this tree."""
        words = {
            "INPUTS": str(self.inputs),
            "OUT": str(out),
            "TREE": str(self.folder),
            "PORT": str(port),
        }
        parts = [
            re.sub(r"INPUTS|OUT|TREE|PORT", lambda match: words[match[0]], part)
            for part in shlex.split(options)
        ]
        parts = [self.spelled(part, command) if part.startswith("--") else part for part in parts]
        return [sys.executable, "-m", "strands_cosmos3", command, *parts]

    def run(self, line: list[str], out: Path, allowed: tuple[int, ...] = (0, 1)) -> int:
        """Run a process and return its exit status; RuntimeError if that is not allowed."""
        log = out / "command.log"
        process = self.processes.start(line, log, self.environment)
        try:
            status = process.wait(CASE_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"longer than {CASE_S:g} s: {shlex.join(line)}") from None
        finally:
            self.processes.end(process)
        if status not in allowed:
            raise RuntimeError(f"exit status {status}: {shlex.join(line)}\n{end_of(log)}")
        return status

    @contextmanager
    def server(self, options: str, out: Path) -> Iterator[int]:
        """Serve a policy; yields the port."""
        log = out / "server.log"
        line = self.line("serve", f"{options} --port 0", out)
        process = self.processes.start(line, log, self.environment)
        try:
            end = time.monotonic() + SERVER_S
            while not (address := re.search(r"ws://[^:\s]+:(\d+)", end_of(log))):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"no server: {shlex.join(line)}\n{end_of(log)}")
                time.sleep(0.1)
            yield int(address[1])
        finally:
            self.processes.end(process)


def end_of(log: Path) -> str:
    """Return the last lines that a process wrote."""
    return log.read_text(errors="replace")[-2000:]
