"""The Ray actor around a simulator. Only plain values and the text of errors leave it."""

from __future__ import annotations

import os
from typing import Any

import ray

from strands_cosmos3 import __version__
from strands_cosmos3.evaluation.episode_runner import EpisodeRunner
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.reply import Reply
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.simulator import Simulator


class SimulatorActor:
    """A simulator in a process of its own. :meth:`open` makes it, so that a failure can give its
    reason.
    """

    def __init__(self, number: int):
        self._number = number
        self._simulator: EpisodeRunner | None = None

    def open(self, settings: Settings, replica: Any) -> Reply:
        """Make robot and policy; reply with version, process and checkpoint."""

        def make() -> dict[str, Any]:
            engine = None
            if replica is not None:
                from strands_cosmos3.evaluation.replica import replica_engine

                engine = replica_engine(settings, replica)
            self._simulator = _make(settings, engine)
            about = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}
            return {"version": __version__, **about, "model_sha256": self._simulator.model_sha256}

        return Reply.of(make)

    def run(self, assignment: Assignment) -> Reply:
        """Reply with an episode's record."""

        def episode() -> Any:
            record = self._opened.run(assignment)
            record["times"]["worker"] = self._number
            return record

        return Reply.of(episode)

    def film(self, assignment: Assignment) -> Reply:
        """Reply with the record of the same episode again, and its video as bytes."""
        return Reply.of(lambda: self._opened.film(assignment))

    @property
    def _opened(self) -> EpisodeRunner:
        assert self._simulator is not None, "call open first"
        return self._simulator


def _make(settings: Settings, engine: Any) -> EpisodeRunner:
    if not settings.is_libero:
        return Simulator(settings, engine)
    from strands_cosmos3.evaluation.libero_simulator import LiberoSimulator

    return LiberoSimulator(settings, engine)
