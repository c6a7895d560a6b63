"""An evaluation from its first check to its report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strands_cosmos3.evaluation.cluster import cluster, require_gpus
from strands_cosmos3.evaluation.driver import Driver, Progress
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.report import Report, make_report, write_report
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.resources import write_json

_WORKERS_A_REPLICA = 4
"""Simulators that keep one replica busy: while one waits for its chunk, the others move."""


def evaluate(
    settings: Settings,
    out: Path,
    resume: bool = False,
    address: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    about: Mapping[str, Any] | None = None,
    world: Callable[[], Mapping[str, Any]] | None = None,
) -> tuple[Report, Progress]:
    """Run what is missing, and report on everything that is there.

    The report is written whatever happens after the first worker was started: an interrupted or failed evaluation leaves
    one that says what is missing.

    Args:
        settings: What to evaluate.
        out: The folder.
        resume: Whether it may hold episodes already.
        address: Of a running Ray cluster; None starts Ray here.
        progress: Called several times a second.
        about: What else the report is to say, e.g. versions.
        world: Judges forward and inverse dynamics, after the episodes; called where the settings ask for clips and the folder
            has no such figures.

    Raises:
        ConfigError: The folder, the options or the GPUs do not allow it; nothing was started.
        EvaluationError: It could not go on; what is finished is kept.
    """
    if settings.topology.replicas:
        from strands_cosmos3.evaluation.replica import check_model

        check_model(settings)
    with RunFolder(out, settings, resume) as folder:
        workers = settings.workers or default_workers(settings, len(os.sched_getaffinity(0)))
        driver = Driver(folder, workers, report=progress)
        run = {"settings": settings.to_dict(), **(about or {}), "started": _now()}
        write_json(folder.path / "run.json", run)
        started = time.monotonic()
        try:
            _run(driver, address, workers)
            if settings.clips and world is not None and not driver.progress.interrupted and folder.read_world() is None:
                folder.write_world(world())
        finally:
            state = driver.progress
            facts = {
                **(about or {}),
                "ran_on": f"{settings.topology}; {workers} simulator{'s' if workers > 1 else ''}"
                + (f"; Ray at {address}" if address else ""),
                "finished": _now(),
                "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
                "run": {
                    "wall_s": time.monotonic() - started,
                    "new_episodes": state.new,
                    "episodes_a_minute": state.a_minute,
                    "workers_died": state.deaths,
                    "workers_hung": state.hangs,
                    "requeued": state.requeued,
                    "gangs_restarted": state.restarts,
                },
            }
            report = make_report(folder, driver.records, facts, state.lost)
            write_report(folder, report)
    return report, driver.progress


def _run(driver: Driver, address: str | None, workers: int) -> None:
    if not driver.missing and not driver.films_missing():
        driver.run()
        return
    topology = driver.settings.topology
    with cluster(address, workers + topology.ranks) as resources:
        require_gpus(resources, topology.num_gpus, address)
        with ExitStack() as at_the_end:
            if topology.replicas:
                from strands_cosmos3.evaluation.replica import Replicas

                replicas = Replicas(driver.settings)
                at_the_end.callback(replicas.close)
                driver.share(replicas)
            at_the_end.callback(driver.close)
            driver.run()


def default_workers(settings: Settings, cores: int) -> int:
    """Simulators where nobody said how many: a core each that no CPU rank needs, and no more than replicas can feed."""
    topology = settings.topology
    free = cores - (0 if topology.num_gpus else topology.ranks)
    most = topology.replicas * _WORKERS_A_REPLICA or free
    return max(1, min(free, most, len(settings.plan())))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
