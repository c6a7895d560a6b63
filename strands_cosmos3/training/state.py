"""The saved state of a training run: a ``torch.save`` file that ends with its SHA-256, and the
state before it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strands_cosmos3.errors import TrainingError

STATE = "state.pt"
PREVIOUS = "state.previous.pt"
_MARK = b"sha256:"
_TRAILER = len(_MARK) + 64


def has_state(folder: Path) -> bool:
    """Whether a folder holds a state, damaged or not."""
    return any((folder / name).exists() for name in (STATE, PREVIOUS))


def write_state(state: Mapping[str, Any], path: Path) -> None:
    """Write a state and its digest; raises OSError if the disk is full."""
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch's way to say so
        raise OSError(str(error).splitlines()[0]) from None
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.write(_MARK + digest.encode())


def read_state(folder: Path) -> tuple[Mapping[str, Any], Path]:
    """Return the latest undamaged state of a folder, and its path; a damaged one is named in a
    warning.

    Raises:
        TrainingError: None can be read; the message says why.
    """
    problems = []
    for path in (folder / STATE, folder / PREVIOUS):
        if path.exists():
            try:
                state = _read(path)
            except (OSError, ValueError) as error:
                problems.append(f"{path} is damaged ({error})")
                continue
            for problem in problems:
                warnings.warn(
                    f"{problem}; training resumes from {path.name}, at step {state['step']}.",
                    stacklevel=2,
                )
            return state, path
    raise TrainingError(
        f"{'; '.join(problems)}. Remove the file to train from the start, or restore a copy."
    )


def _read(path: Path) -> Mapping[str, Any]:
    file: Any = np.memmap(path, mode="r")
    digest = hashlib.sha256(file[:-_TRAILER]).hexdigest()
    if bytes(file[-_TRAILER:]) != _MARK + digest.encode():
        raise ValueError("its contents differ from its SHA-256")
    return torch.load(path, map_location="cpu", weights_only=True)
