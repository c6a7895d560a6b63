"""Ranks for tests: one process imports torch once and forks whole groups, which stay alive from
case to case.

A group is joined through a store, or, without one, left as torchrun starts it: joining is then up
to the case.

Run as a program with the address of a ``multiprocessing.connection`` listener; see
``rank_groups.py``, which starts it.
"""

import faulthandler
import os
import signal
import sys
import traceback
from multiprocessing.connection import Client


def main(address: str) -> None:
    from helpers import rank_cases, sharded_training  # noqa: F401 - torch, diffusers and the engine, before the first fork

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connection = Client(address, "AF_UNIX")
    connection.send("ready")
    while True:
        try:
            order, *arguments = connection.recv()
        except EOFError:
            return
        if order == "status":
            _, status = os.waitpid(arguments[0], 0)
            connection.send(os.waitstatus_to_exitcode(status))
            continue
        size, store = arguments
        for rank in range(size):
            if os.fork() == 0:
                connection.close()
                if store is None:
                    told = {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1"}
                    os.environ.update(
                        told, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size)
                    )
                serve(address, rank, size, store)
                os._exit(0)


def serve(address: str, rank: int, size: int, store: str | None) -> None:
    """Join the group, if it has a store, and run cases until the harness hangs up."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from helpers import rank_cases

    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if store is not None:
        timeout = timedelta(seconds=120)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
        )
    with Client(address, "AF_UNIX") as connection:
        connection.send((rank, os.getpid()))
        while True:
            try:
                name, arguments, port = connection.recv()
            except EOFError:
                os._exit(0)
            os.environ["MASTER_PORT"] = str(port)
            try:
                connection.send(("ok", getattr(rank_cases, name)(**arguments)))
            except BaseException:
                connection.send(("error", traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1])
