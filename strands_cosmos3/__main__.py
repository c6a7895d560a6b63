"""``strands-cosmos3`` and ``python -m strands_cosmos3``: the command line, e.g. under torchrun.

Nothing but the standard library is loaded before Ctrl-C has its handler.
"""

import errno
import os
import signal
import sys
from io import TextIOWrapper
from types import FrameType


def program() -> None:
    """Run the command line and exit with its status."""
    signal.signal(signal.SIGINT, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that lacks a character shows "?"
            stream.reconfigure(errors="replace")
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit("strands-cosmos3: this folder was deleted; change into another one.")
    from strands_cosmos3.cli import program as run

    try:
        try:
            run()
        finally:
            print(end="", flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:  # the reader, such as head, has left
            sys.exit(1)
        sys.exit(f"strands-cosmos3: the output cannot be written ({error.strerror}).")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end at once during an import, which may turn it into another
    error.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"strands-cosmos3: interrupted.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    program()
