"""Ray for the duration of an evaluation: started and removed again, or a running cluster joined;
and what its actors return.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private import ray_constants
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from strands_cosmos3.errors import ConfigError, Cosmos3Error, EvaluationError, ReplicaLostError
from strands_cosmos3.parallel.group import error_from_name

ONE_THREAD: Mapping[str, str] = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "LP_NUM_THREADS",
        "MALLOC_ARENA_MAX",
    ),
    "1",
)
"""For every process that simulates or infers on the CPU; numpy, torch and software OpenGL would
each use all cores. With an arena of memory for each of Ray's threads, a worker that compiles
LIBERO's scenes grows from 1.3 to 4 GB.
"""
WORKER_FAILURES = (
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,
    NodeDiedError,
    ObjectLostError,
)
"""Raised by Ray if a process, or the machine it ran on, is gone."""
_PREFIX = "sc3-ray-"
_LOCAL_RAY: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    # off: Ray stays on 127.0.0.1 instead of the machine's address
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
# requests with images are some megabytes; videos are transferred one at a time
_OBJECT_STORE_BYTES = 128 * 2**20
_CONNECT_S = 10.0
_LONGEST_FOLDER = 32  # Ray's socket paths are some 70 characters longer, and limited to 107


@contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[int]:
    """Provide Ray while the evaluation runs; the value is the number of its GPUs.

    Args:
        address: A running cluster (``host:port`` or ``auto``), or None to start Ray on this
            machine, in a temporary folder.
        cpus: For Ray started here: processes (not cores) that may run at the same time.

    Raises:
        EvaluationError: No cluster responds at the address, or Ray does not start.
    """
    if ray.is_initialized():
        raise EvaluationError(
            "Ray is already in use in this process; evaluate from a process of its own."
        )
    if address is not None:
        _check_address(address)
        with _joined(address=address, runtime_env={"env_vars": dict(ONE_THREAD)}) as gpus:
            yield gpus
        return
    _remove_stale_folders()
    with (
        tempfile.TemporaryDirectory(
            prefix=f"{_PREFIX}{os.getpid()}-", dir=_short_folder(), ignore_cleanup_errors=True
        ) as folder,
        _environment({**ONE_THREAD, **_LOCAL_RAY, **_auth_token()}),
        _on_loopback(),
        _joined(
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            _system_config={"worker_niceness": 0},  # Ray's default slows the workers down
        ) as gpus,
    ):
        yield gpus


def _check_address(address: str) -> None:
    """Check that a server listens; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or another form that Ray accepts
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise EvaluationError(
            f"no server listens at --address {address} ({error.strerror or error}). Start a "
            "cluster there with "
            "`ray start --head`, or leave the address out to run on this machine."
        ) from None


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Keep Ray in this process on loopback, too: it has read the variable of :data:`_LOCAL_RAY`
    when it was imported.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for Ray's processes. They do not affect this process, whose libraries are
    loaded already.
    """
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def _joined(address: str | None = None, **options: Any) -> Iterator[int]:
    """Start or join Ray; the value is the number of its GPUs."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(address, **options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            # Ray reports a failed start with many types, bare Exception among them
            place = "on this machine" if address is None else f"at {address!r}"
            raise EvaluationError(f"Ray does not start {place}: {error}") from error
        yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


@cache
def _auth_token() -> Mapping[str, str]:
    """Return a token for Ray started here, which would otherwise write one to the home folder.
    Ray caches it, so do we.
    """
    if any(name.startswith("RAY_AUTH_") for name in os.environ):
        return {}
    return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _short_folder() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_FOLDER else "/tmp"


def _remove_stale_folders() -> None:
    """Remove folders of killed evaluations; their Ray ended with them."""
    for folder in Path(_short_folder()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def require_gpus(gpus: int, num_gpus: int, address: str | None) -> None:
    """Raise a ConfigError if a cluster with ``gpus`` has fewer GPUs than an evaluation wants."""
    if num_gpus > gpus:
        place = "on this machine" if address is None else f"in the cluster at {address}"
        raise ConfigError(
            f"num_gpus={num_gpus}, but Ray sees {gpus or 'no'} GPU{'s' * (gpus > 1)} {place}. Use "
            f"num_gpus={gpus}, or --address of a cluster that has them."
        )


@dataclass(frozen=True)
class Reply:
    """The outcome of an actor's method, with errors as text, because not every process can unpickle
    every error: ``done`` with a value; ``error`` with type name and
    message; or ``lost``, an error after which the episode should run again because its replica is
    gone.
    """

    kind: Literal["done", "lost", "error"]
    value: Any = None
    error: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, work: Callable[[], Any]) -> Reply:
        """Run ``work`` and return its outcome."""
        try:
            return cls("done", work())
        except Cosmos3Error as error:
            kind = "lost" if isinstance(error, ReplicaLostError) else "error"
            return cls(kind, error=(type(error).__name__, str(error)))

    def unwrap(self) -> Any:
        """Return the value, or raise the error."""
        if self.kind != "done":
            raise error_from_name(*self.error)
        return self.value
