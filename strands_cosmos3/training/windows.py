"""Windows of demonstrations as the model sees them: latents of pictures, a state row, action rows, prompts.

The state row stands before the action rows, as in the policies' contract: the measured pose of the Cosmos frame in the
robot's base (translation, rot6d) and the opening, each column centred and scaled by figures that the checkpoint records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.actions.rotations import matrix_to_rot6d, se3_between
from strands_cosmos3.actions.stats import normalize_chunk
from strands_cosmos3.checks import F64
from strands_cosmos3.engine.sequence import SequenceLayout
from strands_cosmos3.engine.state import StateRow
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_whole
from strands_cosmos3.training.phrases import GOALS
from strands_cosmos3.training.shards import Demos

ROWS = 16
FPS = 15.0
RAW_WIDTH = 10
POLICY, FORWARD, INVERSE = 0, 1, 2
"""What a window learns: a policy's answer, what known actions do, what was done."""


def state_columns(T_base_cosmos: F64, opening: F64) -> F64:
    """[n, 10] translation [m], rot6d and open fraction of measured poses [n, 4, 4]."""
    return np.concatenate(
        [T_base_cosmos[:, :3, 3], matrix_to_rot6d(T_base_cosmos[:, :3, :3]), np.asarray(opening)[:, None]], axis=1
    )


def state_row_of(demos: Demos) -> StateRow:
    """The figures that centre and scale a state row: mean and spread of the data, rotation and opening by round numbers."""
    columns = state_columns(demos.T_base_cosmos, demos.opening)
    mean, std = np.zeros(RAW_WIDTH), np.ones(RAW_WIDTH)
    mean[:3], std[:3] = columns[:, :3].mean(0).round(4), columns[:, :3].std(0).round(4)
    mean[9], std[9] = 0.5, 0.5
    return StateRow(tuple(mean.tolist()), tuple(std.tolist()))


def layout_of(
    latent_hw: tuple[int, int],
    frames: int,
    clean_frames: Sequence[int],
    state_rows: int,
    rows: int = ROWS,
    width: int = RAW_WIDTH,
    fps: float = FPS,
) -> SequenceLayout:
    """The generation sequence of a window: ``frames`` latent frames, the state row if there is one, the chunk's rows.

    With a state row the sequence's clock starts at offset 0, without one at 1: the contract of the released checkpoints.
    """
    offset = 0 if state_rows else 1
    return SequenceLayout((frames, *latent_hw), 2, rows + state_rows, tuple(clean_frames), state_rows, width, fps, offset)


@dataclass(frozen=True, eq=False)
class Batch:
    """B windows.

    Args:
        latents: [B, C, F, H, W] clean.
        state: [B, 10] in the model's scale, or None where the sequence has no state row.
        rows: [B, rows, 10] clean, in the model's scale.
        prompts: G captions' token ids. prompt: [B] which of them each window reads.
        mode: [B] ``POLICY``, ``FORWARD`` or ``INVERSE`` (dynamics); None is a policy's throughout.
        fps: Rows a second.
    """

    latents: torch.Tensor
    state: torch.Tensor | None
    rows: torch.Tensor
    prompts: tuple[tuple[int, ...], ...]
    prompt: torch.Tensor
    mode: torch.Tensor | None = None
    fps: float = FPS


@dataclass(frozen=True, eq=False)
class Captions:
    """Token ids of every trained sentence for every goal, and of the empty caption.

    Args:
        by_goal: [goal][template].
        empty: The unconditional branch's.
    """

    by_goal: tuple[tuple[tuple[int, ...], ...], ...]
    empty: tuple[int, ...]

    def drawn(self, rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
        """One sentence for each goal, and the empty caption last."""
        return (*(sentences[int(rng.integers(len(sentences)))] for sentences in self.by_goal), self.empty)


class PictureWindows:
    """Windows of one given picture: labels of the expert for every goal.

    Args:
        demos: Labels and poses.
        latents: [L, C, H, W] float16 of the labelled ticks' pictures.
        state: How a state row is scaled.
        captions: What is said.
        batch: Windows a step. dropout: Share of windows that read the empty caption. own: DataShard that are asked for the goal
            that the episode pursued; the others for any.
        seed: Of everything that is drawn. among: Windows that are drawn from; None is all.

    Attributes:
        pursued: [L] the goal that the episode pursued.
    """

    def __init__(
        self,
        demos: Demos,
        latents: NDArray[np.float16],
        state: StateRow,
        captions: Captions,
        batch: int = 64,
        dropout: float = 0.08,
        own: float = 0.5,
        seed: int = 0,
        among: range | None = None,
    ):
        self._latents, self._labels = latents, demos.labels
        ticks = demos.label_ticks
        self._state = state.scaled(state_columns(demos.T_base_cosmos[ticks], demos.opening[ticks])).astype(np.float32)
        self.pursued = demos.goal[ticks]
        self._captions, self._batch, self._dropout, self._own, self._seed = captions, batch, dropout, own, seed
        self._among = range(len(latents)) if among is None else among

    def __len__(self) -> int:
        return len(self._latents)

    def batch(self, step: int) -> Batch:
        """The windows of a step, drawn by (seed, step)."""
        rng = np.random.default_rng([self._seed, step])
        chosen = rng.integers(self._among.start, self._among.stop, size=self._batch)
        own = rng.random(self._batch) < self._own
        goal = np.where(own, self.pursued[chosen], rng.integers(len(GOALS), size=self._batch))
        prompts = self._captions.drawn(rng)
        prompt = np.where(rng.random(self._batch) < self._dropout, len(GOALS), goal)
        return self.pick(chosen, goal, prompts, prompt)

    def pick(
        self,
        chosen: NDArray[np.int64],
        goal: NDArray[np.int64],
        prompts: tuple[tuple[int, ...], ...],
        prompt: NDArray[np.int64],
    ) -> Batch:
        """Some windows by their numbers, each with a goal and a prompt."""
        return Batch(
            torch.from_numpy(self._latents[chosen].astype(np.float32))[:, :, None],
            torch.from_numpy(self._state[chosen]),
            torch.from_numpy(np.clip(self._labels[chosen, goal], -3, 3)),
            prompts,
            torch.from_numpy(prompt),
        )


def executed_rows(demos: Demos, ticks: NDArray[np.int64], rows: int = ROWS) -> NDArray[np.float32]:
    """[n, rows, 10] what was done after some ticks, in the model's scale: deltas of measured poses, the gripper's orders."""
    index = ticks[:, None] + np.arange(rows + 1)
    poses = demos.T_base_cosmos[index]
    deltas = encode_pose_delta(se3_between(poses[:, :-1], poses[:, 1:]))
    raw = np.concatenate([deltas, demos.told[index[:, :-1]][..., None]], axis=-1)
    return normalize_chunk(raw.reshape(-1, raw.shape[-1]), "droid_lerobot").reshape(raw.shape).astype(np.float32)


def latent_columns(canvas_hw: tuple[int, int]) -> int:
    """Latent columns that a canvas's content reaches; DROID's composite is 640 x 540."""
    height, width = canvas_hw
    return max(int(min(width / 640, height / 540) * 640 + 0.5) // 16, 1)


def undisturbed(demos: Demos, ticks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n] whether the expert pursued one goal, and nothing bent what it did, over the chunk after each tick."""
    span = ticks[:, None] + np.arange(ROWS)
    return ~demos.bent[span].any(1) & (demos.goal[span] == demos.goal[ticks][:, None]).all(1)


class ClipWindows:
    """Windows with their future: whole clips, what was done in them, and what it was for.

    A policy learns from clips in which the expert pursued one goal undisturbed; dynamics are learnt from all.

    Args:
        demos: Poses, orders and goals.
        ticks: [n] where clips begin. latents: [n, C, F, H, W] float16.
        state, captions, batch, dropout, seed: As in :class:`PictureWindows`.
        forward, inverse: Shares of windows that learn forward and inverse dynamics.
    """

    def __init__(
        self,
        demos: Demos,
        ticks: NDArray[np.int64],
        latents: NDArray[np.float16],
        state: StateRow,
        captions: Captions,
        batch: int = 32,
        dropout: float = 0.08,
        forward: float = 0.15,
        inverse: float = 0.15,
        seed: int = 0,
    ):
        self._latents, self._rows = latents, executed_rows(demos, ticks)
        self._state = state.scaled(state_columns(demos.T_base_cosmos[ticks], demos.opening[ticks])).astype(np.float32)
        self._goal = demos.goal[ticks]
        self._undisturbed = np.flatnonzero(undisturbed(demos, ticks))
        if not len(self._undisturbed):
            raise ConfigError("no clip shows the expert undisturbed for a whole chunk; record more demonstrations.")
        self._captions, self._batch, self._dropout, self._seed = captions, batch, dropout, seed
        self._shares = forward, inverse

    def __len__(self) -> int:
        return len(self._latents)

    def batch(self, step: int) -> Batch:
        """The windows of a step, drawn by (seed, step)."""
        rng = np.random.default_rng([self._seed, step, 1])
        draw = rng.random(self._batch)
        mode = np.where(draw < self._shares[0], FORWARD, np.where(draw > 1 - self._shares[1], INVERSE, POLICY))
        free, clean = rng.integers(len(self), size=self._batch), rng.integers(len(self._undisturbed), size=self._batch)
        chosen = np.where(mode == POLICY, self._undisturbed[clean], free)
        prompts = self._captions.drawn(rng)
        prompt = np.where(rng.random(self._batch) < self._dropout, len(GOALS), self._goal[chosen])
        return self.pick(chosen, prompts, prompt, mode)

    def pick(
        self,
        chosen: NDArray[np.int64],
        prompts: tuple[tuple[int, ...], ...],
        prompt: NDArray[np.int64],
        mode: NDArray[np.int64],
    ) -> Batch:
        """Some windows by their numbers."""
        return Batch(
            torch.from_numpy(self._latents[chosen].astype(np.float32)),
            torch.from_numpy(self._state[chosen]),
            torch.from_numpy(np.clip(self._rows[chosen], -3, 3)),
            prompts,
            torch.from_numpy(prompt.astype(np.int64)),
            torch.from_numpy(mode),
        )


def cached_latents(
    encode: Callable[[NDArray[np.int64]], torch.Tensor],
    ticks: NDArray[np.int64],
    path: Path,
    columns: int,
    on_batch: Callable[[int, int], None] | None = None,
    batch: int = 32,
) -> NDArray[np.float16]:
    """Latents of some ticks, encoded once and then mapped from disk.

    Args:
        encode: Ticks [b] -> normalised latents [b, C, F, H, W].
        ticks: Whose. path: The cache (.npy), written whole.
        columns: Latent columns that the picture's content reaches; the rest is padding, which the model does not see.
        on_batch: Called with ticks done and ticks in all.

    Raises:
        ConfigError: The cache is of another number of ticks.
    """
    if not path.exists():
        parts = []
        for start in range(0, len(ticks), batch):
            with torch.no_grad():
                parts.append(encode(ticks[start : start + batch])[..., :columns].to(torch.float16).numpy())
            if on_batch is not None:
                on_batch(min(start + batch, len(ticks)), len(ticks))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda hidden: np.save(hidden, np.concatenate(parts)))
    latents = np.load(path, mmap_mode="r")
    if len(latents) != len(ticks):
        raise ConfigError(
            f"{path} holds the latents of {len(latents)} windows, and there are {len(ticks)}: they are of other episodes, or "
            "of other settings. Choose another folder."
        )
    return latents
