"""End a process that was a rank of a ``torch.distributed`` group. Importing this loads no torch.

gloo's threads outlive ``destroy_process_group``. A thread that releases a tensor while Python shuts
down terminates the process with SIGABRT ("terminate called without an active exception"), and
torchrun reports a failure although the rank's work is done. A rank therefore ends without Python's
shutdown.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

_UNWRITTEN = 120
"""Python's own exit status when standard output cannot be flushed."""


def exit_rank(status: int) -> NoReturn:
    """Flush logs and standard streams, then end this process immediately.

    ``atexit`` handlers, non-daemon threads and ``__del__`` are skipped: close everything first.
    Ranks that succeeded should call ``dist.barrier`` and destroy their group before they exit.
    """
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or _UNWRITTEN
    os._exit(status)
