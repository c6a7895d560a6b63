"""A server in this process, and processes of any kind that are gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.environments import TESTS
from helpers.serving import Echo
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig


@pytest.fixture
def serve() -> Iterator[Callable[..., PolicyServer]]:
    """serve(backend, **config): a server in this process, stopped at the end."""
    started: list[PolicyServer] = []

    def start(
        backend: Any = None,
        action_space: str = "joint_pos",
        embodiment: str = "droid",
        **config: Any,
    ) -> PolicyServer:
        own = {name: config.pop(name, None) for name in ("warm_up_message", "http")}
        policy = ServedPolicy(backend or Echo(), embodiment, action_space, **own)
        server = PolicyServer(policy, ServerConfig(**{"port": 0, "grace_s": 5.0, **config}))
        server.__enter__()
        started.append(server)
        return server

    yield start
    for server in started:
        server.__exit__(None, None, None)


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """spawn(*command): a process that prints its port first, as (process, port); killed at the
    end.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, python: str = sys.executable) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [python, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=TESTS
        )
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip().isdigit():
            process.kill()
            raise AssertionError(f"{command} said {line!r}: {process.communicate()[1]}")
        return process, int(line)

    yield start
    for process in processes:
        process.kill()
        process.communicate()
