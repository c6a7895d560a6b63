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
from strands_cosmos3.evaluation.driver import Driver, Progress
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.judging import judge_identity
from strands_cosmos3.evaluation.policies import source_sha256
from strands_cosmos3.evaluation.report import Report, make_report, write_report
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.fleet.cluster import cluster, joinable, require_gpus
from strands_cosmos3.fleet.replicas import ReplicaPool

_WORKERS_PER_REPLICA = 4
"""Simulators that keep one replica busy: while one waits for its chunk, the others move."""


def evaluate(
    settings: Settings,
    out: Path,
    resume: bool = False,
    address: str | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    facts: Mapping[str, Any] | None = None,
    dynamics: Callable[[], Mapping[str, Any]] | None = None,
    verify: bool = False,
) -> tuple[Report, Progress]:
    """Run the missing episodes and report on all of them.

    Once workers have started, the report is written even after an interruption or a failure.

    Args:
        resume: Whether the folder may contain episodes.
        address: A running Ray cluster, as
            :func:`~strands_cosmos3.fleet.cluster.joinable` takes it; None starts Ray here.
        progress: Called several times a second.
        facts: Further facts for the report, e.g. versions.
        dynamics: Computes figures of dynamics, if the settings have clips and the folder has no
            figures.
        verify: Whether the checkpoint is read for its digest in any case; see :func:`check_model`.

    Raises:
        ConfigError: The folder, the options or the GPUs do not allow it; nothing was started.
        CheckpointError: The model's folder cannot be read, or states another domain, or the judge's
            checkpoint has no eyes; nothing was started.
        EvaluationError: The evaluation failed; finished episodes are stored.
    """
    answers = check_model(settings, verify)
    judge_identity(settings)  # refuses a judge that cannot be asked
    with RunFolder(out, settings, resume) as folder:
        workers = settings.workers or default_workers(settings, len(os.sched_getaffinity(0)))
        driver = Driver(folder, workers, report=progress)
        if answers is not None:
            driver.require_same(answers)
        address = joinable(address) if driver.missing else None
        folder.write_start({**(facts or {}), "started": _now()})
        started_s = time.monotonic()
        try:
            _run(driver, address, workers)
            interrupted = driver.progress.interrupted
            if dynamics is not None and not interrupted and folder.read_dynamics() is None:
                folder.write_dynamics(dynamics())
        finally:
            run = _facts(driver, address, workers, time.monotonic() - started_s)
            report = make_report(
                folder, driver.records, {**(facts or {}), **run}, driver.progress.given_up
            )
            write_report(folder, report)
    return report, driver.progress


def check_model(settings: Settings, verify: bool = False) -> str | None:
    """Read the headers of a checkpoint in a folder here, or of one that replicas will divide, or
    another project's policy; return its digest, None if only a worker knows. ``verify`` reads every
    byte of the checkpoint, on this machine, whatever is remembered of it.

    Raises:
        CheckpointError: They cannot be read, or are of another domain than the world's rows.
        ConfigError: The checkpoint cannot be divided so, or the policy cannot be imported.
    """
    model = settings.policy.model
    sharded = settings.topology.replicas
    if settings.policy.policy is not None:
        return source_sha256(settings.policy.policy)
    if model is None or not (verify or sharded or Path(model).is_dir()):
        return None  # a hub repository is read by whoever loads it
    from strands_cosmos3.engine.checkpoint import Checkpoint, locate
    from strands_cosmos3.engine.formats.acting import require_domain

    checkpoint = Checkpoint.open(locate(model))
    require_domain(checkpoint, get_embodiment(settings.embodiment))
    if verify:
        checkpoint.read_anew()
    if sharded:
        settings.policy.parallel.check_transformer(checkpoint.config)
    return settings.policy.engine.answers_digest(checkpoint.digest)


def _facts(driver: Driver, address: str | None, workers: int, wall_s: float) -> dict[str, Any]:
    progress = driver.progress
    place = f"{driver.settings.topology}; {workers} simulator{'s' if workers > 1 else ''}"
    return {
        "ran_on": place + (f"; Ray at {address}" if address else ""),
        "finished": _now(),
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "run": {
            "wall_s": wall_s,
            "new_episodes": progress.new,
            "episodes_a_minute": progress.a_minute,
            "worker_failures": progress.worker_failures,
            "workers_hung": progress.hangs,
            "requeued": progress.requeued,
            "replica_restarts": progress.replica_restarts,
        },
    }


def _run(driver: Driver, address: str | None, workers: int) -> None:
    if not driver.missing:
        driver.run()
        return
    topology = driver.settings.topology
    with cluster(address, workers + topology.ranks) as gpus, ExitStack() as stack:
        require_gpus(gpus, topology.num_gpus, address)
        if topology.replicas:
            policy = driver.settings.policy
            driver.replicas = ReplicaPool(str(policy.model), topology, policy.engine)
            stack.callback(driver.replicas.close)
        stack.enter_context(driver)
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
