"""How a process ends that was a rank of a ``torch.distributed`` group.

gloo's threads outlive ``destroy_process_group``: meshes and sharded modules keep their groups. One that lets go of a finished
exchange's last tensor needs Python's lock, and where Python is being taken down it is ended in the middle of C++ that does not
allow it: "terminate called without an active exception". The rank dies by SIGABRT though its work is done, and torchrun fails.
A rank therefore ends here, without Python's own end.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

_UNWRITTEN = 120
"""Status with which Python itself ends where what was printed cannot be written."""


def leave(status: int) -> NoReturn:
    """End this process at once; what was printed and logged is written first.

    ``atexit``, threads that are not daemons and objects' ``__del__`` are not waited for: close what is open before. Ranks that
    succeeded should meet (``dist.barrier``) and destroy their group before they come here.

    Args:
        status: For whoever started this process.
    """
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or _UNWRITTEN
    os._exit(status)
