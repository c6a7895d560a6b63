"""An evaluation, from its first check to its report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.evaluation.cluster import cluster, require_gpus
from strands_cosmos3.evaluation.driver import Driver, Progress
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.report import Report, make_report, write_report
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.resources import write_json

_WORKERS_PER_REPLICA = 4
"""Simulators that keep one replica busy: while one waits for its chunk, the others move."""


def evaluate(
    settings: Settings,
    out: Path,
    resume: bool = False,
    address: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    about: Mapping[str, Any] | None = None,
    dynamics: Callable[[], Mapping[str, Any]] | None = None,
) -> tuple[Report, Progress]:
    """Run the missing episodes and report on all of them.

    Once workers have started, the report is written even after an interruption or a failure.

    Args:
        resume: Whether the folder may contain episodes.
        address: Address of a running Ray cluster; None starts Ray here.
        progress: Called several times a second.
        about: Further facts for the report, e.g. versions.
        dynamics: Computes figures of dynamics, if the settings have clips and the folder has no
            figures.

    Raises:
        ConfigError: The folder, the options or the GPUs do not allow it; nothing was started.
        CheckpointError: The model's folder cannot be read, or states another domain; nothing was
            started.
        EvaluationError: The evaluation failed; finished episodes are stored.
    """
    _require_checkpoint(settings)
    with RunFolder(out, settings, resume) as folder:
        workers = settings.workers or default_workers(settings, len(os.sched_getaffinity(0)))
        driver = Driver(folder, workers, report=progress)
        write_json(
            folder.path / "run.json",
            {"settings": settings.to_dict(), **(about or {}), "started": _now()},
        )
        started_s = time.monotonic()
        try:
            _run(driver, address, workers)
            _evaluate_dynamics(driver, dynamics)
        finally:
            facts = {
                **(about or {}),
                **_facts(driver, address, workers, time.monotonic() - started_s),
            }
            report = make_report(folder, driver.records, facts, driver.progress.lost)
            write_report(folder, report)
    return report, driver.progress


def _require_checkpoint(settings: Settings) -> None:
    """Read the headers of a checkpoint before anything is started; refuse one that cannot be split
    as the settings say, or that is of another domain.
    """
    model = settings.policy.model
    if settings.topology.replicas:
        from strands_cosmos3.evaluation.replica import check_model

        checkpoint = check_model(settings)
    elif model is not None and Path(model).is_dir():
        from strands_cosmos3.engine.checkpoint import Checkpoint

        checkpoint = Checkpoint.open(Path(model))
    else:  # a hub repository is read by whoever loads it
        return
    from strands_cosmos3.engine.formats.acting import require_domain

    require_domain(checkpoint, get_embodiment(settings.embodiment))


def _evaluate_dynamics(driver: Driver, dynamics: Callable[[], Mapping[str, Any]] | None) -> None:
    folder, wanted = driver.folder, driver.settings.clips and not driver.progress.interrupted
    if dynamics is not None and wanted and folder.read_dynamics() is None:
        folder.write_dynamics(dynamics())


def _facts(driver: Driver, address: str | None, workers: int, wall_s: float) -> dict[str, Any]:
    state = driver.progress
    ran_on = f"{driver.settings.topology}; {workers} simulator{'s' if workers > 1 else ''}"
    return {
        "ran_on": ran_on + (f"; Ray at {address}" if address else ""),
        "finished": _now(),
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "run": {
            "wall_s": wall_s,
            "new_episodes": state.new,
            "episodes_a_minute": state.a_minute,
            "worker_failures": state.worker_failures,
            "workers_died": state.worker_failures,  # 0.1's name, until 0.3
            "workers_hung": state.hangs,
            "requeued": state.requeued,
            "replica_restarts": state.restarts,
            "gangs_restarted": state.restarts,  # 0.1's name, until 0.3
        },
    }


def _run(driver: Driver, address: str | None, workers: int) -> None:
    if not driver.missing:
        driver.run()
        return
    topology = driver.settings.topology
    with cluster(address, workers + topology.ranks) as resources:
        require_gpus(resources, topology.num_gpus, address)
        with ExitStack() as end:
            if topology.replicas:
                from strands_cosmos3.evaluation.replica import ReplicaPool

                driver.replicas = ReplicaPool(driver.settings)
                end.callback(driver.replicas.close)
            end.callback(driver.close)
            driver.run()


def default_workers(settings: Settings, cores: int) -> int:
    """Return the default number of simulators: one for each core that no CPU rank needs, limited
    by what replicas can feed.
    """
    topology = settings.topology
    free = cores - (0 if topology.num_gpus else topology.ranks)
    most = topology.replicas * _WORKERS_PER_REPLICA or free
    return max(1, min(free, most, len(settings.plan())))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
