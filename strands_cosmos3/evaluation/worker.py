"""What runs inside a Ray actor: a simulator behind a door through which only plain values and our own errors' text pass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray

from strands_cosmos3 import __version__
from strands_cosmos3.errors import Cosmos3Error, ReplicaLostError
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.simulator import Simulator


@dataclass(frozen=True)
class Reply:
    """What a worker answers.

    Args:
        kind: ``done``, ``lost`` (its replica is gone; give the episode to somebody again) or ``error``.
        value: What was asked for.
        error: Name and message of one of our own errors, which not every process could unpickle.
    """

    kind: str
    value: Any = None
    error: tuple[str, str] | None = None


class Worker:
    """A simulator in a process of its own. It does nothing until it is opened, so that opening can fail with a reason."""

    def __init__(self, number: int):
        self._number = number
        self._simulator: Simulator | None = None

    def open(self, settings: Settings, replica: Any) -> Reply:
        """Make robot and policy; answers what this worker is."""

        def make() -> dict[str, Any]:
            self._simulator = Simulator(settings, None if replica is None else _remote_engine(settings, replica))
            who = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}
            return {"version": __version__, **who, "model_sha256": self._simulator.model_sha256}

        return _answer(make)

    def run(self, assignment: Assignment) -> Reply:
        """An episode's record."""

        def episode() -> Any:
            record = self._opened.run(assignment)
            record["times"]["worker"] = self._number
            return record

        return _answer(episode)

    def film(self, assignment: Assignment) -> Reply:
        """The record of the same episode again, and its film's bytes."""
        return _answer(lambda: self._opened.film(assignment))

    @property
    def _opened(self) -> Simulator:
        assert self._simulator is not None  # the driver opens a worker before it gives it work
        return self._simulator


def _answer(work: Any) -> Reply:
    try:
        return Reply("done", work())
    except ReplicaLostError as error:
        return Reply("lost", error=(type(error).__name__, str(error)))
    except Cosmos3Error as error:
        return Reply("error", error=(type(error).__name__, str(error)))


def _remote_engine(settings: Settings, replica: Any) -> Any:
    from strands_cosmos3.evaluation.replica import remote_engine

    return remote_engine(settings, replica)
