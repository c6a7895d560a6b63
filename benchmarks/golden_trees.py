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
from dataclasses import dataclass, field
from pathlib import Path

from golden_results import NAMES

CASE_S = 600.0
SERVER_S = 120.0
STOP_S = 20.0
RUNNING: set[subprocess.Popen[bytes]] = set()
"""The processes of all cases, each in a session of its own, so that Ctrl-C ends all."""


@dataclass
class Tree:
    """A checkout, the inputs of its cases, and the flags that its commands list."""

    folder: Path
    inputs: Path
    flags: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of its processes: its own package and tests, one thread, wide help."""
        path = f"{self.folder}{os.pathsep}{self.folder / 'tests'}"
        return {"MUJOCO_GL": "egl", **os.environ, **NAMES["environment"], "PYTHONPATH": path}

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
        words = {"INPUTS": self.inputs, "OUT": out, "TREE": self.folder, "PORT": port}
        parts = [
            re.sub("|".join(words), lambda match: str(words[match[0]]), part)
            for part in shlex.split(options)
        ]
        parts = [self.spelled(part, command) if part.startswith("--") else part for part in parts]
        return [sys.executable, "-m", "strands_cosmos3", command, *parts]

    @contextmanager
    def process(self, line: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process that writes to a log; end it by SIGTERM, and whatever of its group is
        left by SIGKILL.
        """
        with log.open("wb") as out:
            process = subprocess.Popen(
                line,
                cwd=log.parent,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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
