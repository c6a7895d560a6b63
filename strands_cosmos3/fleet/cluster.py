"""Ray for the duration of a run: started and removed again, or a running cluster joined; and what
its actors return.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import warnings
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
_AUTO, _LOCAL = "auto", "local"
_LOCAL_RAY: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    # off: Ray stays on 127.0.0.1 instead of the machine's address
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray Serve would kill a proxy that a busy machine takes longer than 5 s to start
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
# requests with images are some megabytes; videos are transferred one at a time
_OBJECT_STORE_BYTES = 128 * 2**20
_CONNECT_S = 10.0
_RAY_ADDRESS = "RAY_ADDRESS"  # of itself, Ray joins the cluster that it names
_HTTP2_SETTINGS = b"\x04"  # type of the frame that both ends of HTTP/2 send first
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _HTTP2_SETTINGS + bytes(5)
_SHORT_FOLDER = "/tmp"
_LONGEST_FOLDER = 18
"""Of 107 characters, the most in the path of a Unix socket, Ray takes up to 89: ``/sc3-ray-<pid>-
<8>/session_<date>_<time>_<pid>/sockets/plasma_store``, with pids of seven digits.
"""


@contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[int]:
    """Provide Ray while a run lasts; the value is the number of its GPUs.

    Args:
        address: A running cluster, from :func:`joinable`, or None to start Ray on this machine, in
            a temporary folder.
        cpus: For Ray started here: processes (not cores) that may run at the same time.

    Raises:
        EvaluationError: Ray does not start, or cannot join the cluster.
    """
    if ray.is_initialized():
        raise EvaluationError(
            "Ray is already in use in this process; evaluate from a process of its own."
        )
    if address is not None:
        with _joined(address, runtime_env={"env_vars": dict(ONE_THREAD)}) as gpus:
            yield gpus
        return
    place = _short_folder()
    _remove_stale_folders(place)
    with (
        tempfile.TemporaryDirectory(
            prefix=f"{_PREFIX}{os.getpid()}-", dir=place, ignore_cleanup_errors=True
        ) as folder,
        _environment({**ONE_THREAD, **_LOCAL_RAY, **_auth_token()}),
        _on_loopback(),
        _joined(
            _LOCAL,
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            _system_config={"worker_niceness": 0},  # Ray's default slows the workers down
        ) as gpus,
    ):
        yield gpus


def joinable(address: str | None) -> str | None:
    """Return the address of the cluster that Ray is to join, once a server of Ray listens there,
    since Ray itself would retry for minutes; None to start Ray on this machine.

    Args:
        address: ``host:port``, or ``auto`` for the cluster of ``RAY_ADDRESS``, else one that Ray
            finds on this machine. None and ``local`` are Ray of its own on this machine; None warns
            if ``RAY_ADDRESS`` names a cluster, which is not joined.

    Raises:
        ConfigError: The address has another form.
        EvaluationError: No cluster answers there.
    """
    named = os.environ.get(_RAY_ADDRESS)
    if address is None and named not in (None, "", _LOCAL):
        warnings.warn(
            f"{_RAY_ADDRESS}={named} is not joined: Ray runs on this machine. --address {_AUTO} "
            f"joins that cluster, --address {_LOCAL} runs here without this warning.",
            stacklevel=2,
        )
    if address in (None, _LOCAL):
        return None
    said = f"--address {address}"
    if address == _AUTO:
        if named in (None, "", _AUTO, _LOCAL):
            return _AUTO
        address, said = named, f"{said} with {_RAY_ADDRESS}={named}"
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not host or "/" in host or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"{said}: a running cluster is HOST:PORT of its head node, usually port 6379, or "
            f"{_AUTO}; {_LOCAL}, or no address, runs on this machine."
        )
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S) as connection:
            if "RAY_USE_TLS" not in os.environ:
                connection.sendall(_HTTP2_GREETING)
                if connection.recv(9)[3:4] != _HTTP2_SETTINGS:
                    raise OSError("another kind of server")
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be a host's
        raise EvaluationError(
            f"no cluster of Ray answers at {said} ({error}). Start one there with "
            "`ray start --head`, or leave the address out to run on this machine."
        ) from None
    return address


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
def _joined(address: str, **options: Any) -> Iterator[int]:
    """Start or join Ray; the value is the number of its GPUs."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(address, **options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            # Ray reports a failed start with many types, bare Exception among them
            if address == _LOCAL:
                raise EvaluationError(f"Ray does not start on this machine: {error}") from error
            raise EvaluationError(
                f"Ray cannot join the cluster at {address!r}: {error} Where `ray start` enabled "
                "its token, set RAY_AUTH_MODE=token."
            ) from error
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
    """Return the folder for Ray's files: the usual one, unless its sockets cannot be there."""
    usual = tempfile.gettempdir()
    if usual.isascii() and len(usual) <= _LONGEST_FOLDER:
        return usual
    problem = (
        f"Ray's sockets cannot be in the temporary folder {usual}, whose path has more than "
        f"{_LONGEST_FOLDER} characters or others than ASCII: set TMPDIR to another one"
    )
    if not os.access(_SHORT_FOLDER, os.W_OK | os.X_OK):
        raise EvaluationError(f"{problem}; {_SHORT_FOLDER} is not writable.")
    warnings.warn(f"{problem}; {_SHORT_FOLDER} is used instead.", stacklevel=4)
    return _SHORT_FOLDER


def _remove_stale_folders(place: str) -> None:
    """Remove folders of killed runs; their Ray ended with them."""
    for folder in Path(place).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def require_gpus(gpus: int, num_gpus: int, address: str | None) -> None:
    """Raise a ConfigError if a cluster with ``gpus`` has fewer GPUs than a run wants."""
    if num_gpus > gpus:
        place = "on this machine" if address is None else f"in the cluster at {address}"
        raise ConfigError(
            f"num_gpus={num_gpus}, but Ray sees {gpus or 'no'} GPU{'s' * (gpus > 1)} {place}. Use "
            f"num_gpus={gpus}, or --address of a cluster that has them."
        )


def machines_alive() -> bool:
    """Return whether the cluster has a machine left; Ray itself would wait for another forever."""
    return any(node["Alive"] for node in ray.nodes())


@dataclass(frozen=True)
class Reply:
    """The outcome of an actor's method, with errors as text, because not every process can unpickle
    every error: ``done`` with a value; ``error`` with type name and
    message; or ``lost``, an error after which the work should be done again because its replica is
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
