"""A backend for fleets, whose "checkpoint" is a text, and which says in a folder what it infers."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path

from helpers.serving import Echo
from strands_cosmos3.types import ActionChunk, Request


class Counted(Echo):
    """Echoes the joint angles plus an offset of its checkpoint.

    An instruction ``sleep S`` takes S seconds. ``folder`` gets a file for each inference, named by
    the request's seed, and one for each process.
    """

    def __init__(self, checkpoint: str, folder: str = ""):
        super().__init__()
        digest = hashlib.sha256(checkpoint.encode()).hexdigest()
        self.info = replace(self.info, model_sha256=digest)
        self._folder = Path(folder) if folder else None
        self.offset = int(digest[:2], 16) / 256
        if self._folder:
            (self._folder / f"process-{os.getpid()}").touch()

    def infer(self, request: Request) -> ActionChunk:
        if self._folder:
            (self._folder / f"seed-{request.seed}-{os.getpid()}-{uuid.uuid4().hex}").touch()
        if request.instruction.startswith("sleep "):
            time.sleep(float(request.instruction.split()[1]))
        chunk = super().infer(request)
        rows = chunk.action.copy()
        rows[:, :7] += self.offset + 1e-9 * (request.seed or 0)
        return replace(chunk, action=rows)


def counted(model: str | None) -> Counted:
    """Make one of ``checkpoint`` or ``checkpoint@folder``."""
    return Counted(*(model or "none").split("@"))
