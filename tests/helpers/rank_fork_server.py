"""Ranks for tests: one process imports torch once and forks whole groups, which stay alive from case to case.

Run as a program with the address of a ``multiprocessing.connection`` listener; see ``rank_groups.py``, which starts it.
"""

import os
import signal
import sys
import traceback
from multiprocessing.connection import Client


def main(address: str) -> None:
    from helpers import rank_cases  # noqa: F401 - torch, diffusers and the engine, before the first fork

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended ranks are nobody's to wait for
    connection = Client(address, "AF_UNIX")
    connection.send("ready")
    while True:
        try:
            size, store = connection.recv()
        except EOFError:
            return
        for rank in range(size):
            if os.fork() == 0:
                connection.close()
                serve(address, rank, size, store)
                os._exit(0)


def serve(address: str, rank: int, size: int, store: str) -> None:
    """Join the group and run cases until the harness hangs up."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from helpers import rank_cases

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    with Client(address, "AF_UNIX") as connection:
        connection.send((rank, os.getpid()))
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            try:
                connection.send(("ok", getattr(rank_cases, name)(**arguments)))
            except BaseException:
                connection.send(("error", traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1])
