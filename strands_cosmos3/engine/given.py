"""Tensors that a request gives, as the engine needs them."""

from __future__ import annotations

import numpy as np
import torch

from strands_cosmos3.errors import InputError, ShapeError


def token_ids(ids: torch.Tensor, mask: torch.Tensor | None, name: str, vocab: int) -> tuple[int, ...]:
    """The ids of a prompt whose mask is not 0.

    Raises:
        ShapeError: Ids or mask have another shape than [S] or [1, S].
        InputError: There are none, or one lies outside the vocabulary.
    """
    flat = ids.reshape(-1)
    if ids.ndim > 2 or (ids.ndim == 2 and ids.shape[0] != 1):
        raise ShapeError(f"{name} must be [S] or [1, S], got {list(ids.shape)}.")
    if mask is not None:
        if mask.numel() != flat.numel():
            raise ShapeError(f"the mask of {name} has {mask.numel()} values for {flat.numel()} ids.")
        flat = flat[mask.reshape(-1) != 0]
    values = tuple(int(i) for i in flat.tolist())
    if not values or not all(0 <= i < vocab for i in values):
        raise InputError(f"{name} must hold at least one id, all of them 0..{vocab - 1} (the model's vocabulary).")
    return values


def starting_noise(given: torch.Tensor | None, seed: int, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Noise of a shape, float32: the given one, or the seed's, which is the same on every device and every rank.

    Raises:
        ShapeError: The given one has another shape.
    """
    if given is None:
        return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))
    given = given[0] if given.ndim == len(shape) + 1 and given.shape[0] == 1 else given
    if tuple(given.shape) != shape:
        raise ShapeError(f"{name} must be {list(shape)} (a leading 1 is allowed), got {list(given.shape)}.")
    return given.float()


def widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows [n, D] cut or padded with zeros to [n, width]."""
    if rows.shape[1] >= width:
        return rows[:, :width]
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
