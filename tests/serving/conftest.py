"""Backends small enough to read, a server in this process, and processes of any kind that are gone afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.types import ActionChunk, Request

HERE = Path(__file__).parent


class Echo:
    """Answers four rows: the joint angles it was shown plus 0.01 a row, and the gripper it was shown."""

    name = "echo"
    needs_privileged = False
    requires_images = False
    model_sha256 = None

    def __init__(self, before: Callable[[Request], None] = lambda request: None):
        self.before = before
        self.requests: list[Request] = []
        self.resets = 0

    def infer(self, request: Request) -> ActionChunk:
        self.before(request)
        self.requests.append(request)
        rows = np.zeros((4, 8))
        assert request.q_rad is not None
        rows[:, :7] = request.q_rad + 0.01 * np.arange(4)[:, None]
        rows[:, 7] = request.gripper
        return ActionChunk(rows, request.action_space, request.embodiment)

    def reset(self, seed: int | None = None) -> None:
        self.resets += 1

    def close(self) -> None:
        pass


def observation(q: Any = None, gripper: float = 0.0, **more: Any) -> dict[str, Any]:
    """A joint_pos request as a RoboLab client writes it (gripper: 1 = closed)."""
    return {
        "prompt": "pick up the red cube",
        "observation/joint_position": np.linspace(0.1, 0.7, 7) if q is None else np.asarray(q),
        "observation/gripper_position": np.array([gripper]),
        **more,
    }


def picture(height: int = 36, width: int = 64) -> np.ndarray:
    return np.full((height, width, 3), 100, np.uint8)


@pytest.fixture
def serve() -> Iterator[Callable[..., PolicyServer]]:
    """serve(backend, **config): a server in this process, stopped at the end."""
    started: list[PolicyServer] = []

    def start(backend: Any = None, action_space: str = "joint_pos", **config: Any) -> PolicyServer:
        policy = ServedPolicy(backend or Echo(), "droid", action_space, warm_up_message=config.pop("warm_up_message", None))
        server = PolicyServer(policy, ServerConfig(**{"port": 0, "grace_s": 5.0, **config}))
        server.__enter__()
        started.append(server)
        return server

    yield start
    for server in started:
        server.__exit__(None, None, None)


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """spawn(*command): a process that prints its port first, as (process, port); killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, python: str = sys.executable) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen([python, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE)
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


def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait for something that is bound to happen."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


DROID = get_embodiment("droid")
