"""Processes that torchrun started, on one machine or several, and the watch that ends all of them
when one is lost. Importing this loads no torch.

Where there are several machines, every process keeps a connection to rank 0. It carries one
message at most: that this process succeeded, or, from rank 0, who was lost. A process that ends
closes its connection, and the system's probes find a machine that no longer answers. A thread then
ends this process, which may be in an exchange that would wait for minutes.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NoReturn

from strands_cosmos3.errors import ConfigError, RankLostError

SILENT_S = 6
"""Seconds without an answer to a probe after which a machine counts as lost."""
_JOIN_S = 120
_OWN_ERROR_S = 1.0  # a process that failed itself says why, and not that it lost the others
_TORCHRUN_S = 1.0  # torchrun ends a machine's processes when the first of them has ended
_DONE = b"done"
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR

_watched: list[Connection] = []
"""Rank 0's connections to all others, or another rank's to rank 0."""
_ending = threading.Lock()


def is_launched() -> bool:
    """Return whether torchrun started this process, as ``dist.is_torchelastic_launched`` does,
    without torch.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def told(name: str, alone: int = 0) -> int:
    """Return a number that torchrun told this process, such as RANK or WORLD_SIZE; ``alone`` where
    torchrun did not start it.
    """
    return int(os.environ.get(name, alone)) if is_launched() else alone


def watch_machines() -> None:
    """Wait for the processes of all machines, if there are several, and watch them from then on; do
    nothing if they are watched.

    A process that ends without :func:`leave`, or whose machine is silent for six seconds, ends all
    of them. gloo is told to use the network interface that leads to the others.

    Raises:
        ConfigError: torchrun did not tell where rank 0 is.
        RankLostError: The other processes do not come.
    """
    if told("GROUP_WORLD_SIZE", 1) == 1 or _watched:
        return
    from torch.distributed.rendezvous import rendezvous

    rank = told("RANK")
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_JOIN_S)))
        if rank:
            port = store.get(f"port for rank {rank}")
            _watch(socket.create_connection((os.environ["MASTER_ADDR"], int(port))), 0)
            return
        with socket.create_server(("", 0)) as server:
            server.settimeout(_JOIN_S)
            for other in range(1, told("WORLD_SIZE")):
                store.set(f"port for rank {other}", str(server.getsockname()[1]))
                _watch(server.accept()[0], other)
    except ValueError as error:
        raise ConfigError(
            f"{error}: start torchrun on every machine with --master-addr, the address of node 0, "
            "and --master-port."
        ) from None
    except (RuntimeError, OSError) as error:
        raise RankLostError(
            f"rank {rank} did not find the other machines ({error}): start the same command on "
            "all, with the address of node 0 as --master-addr, and open the ports between them."
        ) from None


def leave() -> None:
    """Tell the others that this process succeeded, so that its end ends nobody."""
    _tell(_DONE)


def end(reason: str) -> NoReturn:
    """Say why this process ends, in one line for its machine, and end it at once."""
    _ending.acquire()  # for ever: one thread ends the process
    if told("LOCAL_RANK"):
        time.sleep(_TORCHRUN_S)
    else:
        print(f"strands-cosmos3: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _watch(peer: socket.socket, rank: int) -> None:
    """Watch a rank from a thread of its own."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    name = f"rank {rank} (node {rank // told('LOCAL_WORLD_SIZE')}, {peer.getpeername()[0]})"
    _use_interface(peer.getsockname()[0])
    _watched.append(Connection(peer.detach()))
    threading.Thread(target=_wait, args=(_watched[-1], name), daemon=True).start()


def _wait(connection: Connection, name: str) -> None:
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError):
        time.sleep(_OWN_ERROR_S)
        message = (
            f"lost {name}: it failed and says why on its machine, was killed, or its network is "
            "gone. All ranks were ended; start the command again on every machine."
        ).encode()
        _tell(message)
    if message != _DONE:
        end(message.decode())


def _tell(message: bytes) -> None:
    for connection in _watched:
        with suppress(OSError):
            connection.send_bytes(message)


def _use_interface(address: str) -> None:
    """Let gloo, which would take that of the machine's name, use the network interface with an IPv4
    address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("40s", name.encode())
                answer = fcntl.ioctl(probe, _INTERFACE_ADDRESS, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
