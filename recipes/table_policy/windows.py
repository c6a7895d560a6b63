"""Windows of table demonstrations: labelled pictures for the policy stage, clips with their
future for the joint stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.table_policy.auxiliary_head import LabelledBatch
from recipes.table_policy.captions import Captions
from recipes.table_policy.clip_latents import ClipLatents
from recipes.table_policy.demos import Demos
from strands_cosmos3.actions.rotations import se3_between
from strands_cosmos3.datasets.arm_rows import state_columns
from strands_cosmos3.engine.metadata import StateRow
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.windows import (
    FORWARD,
    INVERSE,
    POLICY,
    RAW_WIDTH,
    ROWS,
    Batch,
    scaled_rows,
)
from strands_cosmos3.worlds.table.phrases import GOALS

# fraction of pictures that are labelled for the goal of their episode; the others draw any goal
_OWN_GOAL = 0.5
# additional fraction of pictures whose answer opens closed fingers, which few ticks show
_RELEASES = 0.1
_DROPOUT = 0.08  # fraction of windows that read the empty caption
# fraction of pictures with another table, colours, light and cameras than their episode
_OTHER_LOOKS = 0.65
_NO_PREFIX = 0.5  # fraction of a policy's windows without an action prefix
# fraction of those with a prefix whose prefix is a hand at rest, after which it goes on
_WAITS = 0.25


def state_row_of(demos: Demos) -> StateRow:
    """Return the scale of the state row: the translation's mean and deviation, round numbers for
    rotation and opening.
    """
    columns = state_columns(demos.T_base_cosmos, demos.gripper_opening)
    mean, std = np.zeros(RAW_WIDTH), np.ones(RAW_WIDTH)
    mean[:3], std[:3] = columns[:, :3].mean(0).round(4), columns[:, :3].std(0).round(4)
    mean[9], std[9] = 0.5, 0.5
    return StateRow(tuple(mean.tolist()), tuple(std.tolist()))


def executed_rows(demos: Demos, ticks: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return [n, ROWS, 10] executed after each tick, in the model's scale: deltas of measured
    poses, gripper commands.
    """
    index = ticks[:, None] + np.arange(ROWS + 1)
    poses = demos.T_base_cosmos[index]
    return scaled_rows(
        se3_between(poses[:, :-1], poses[:, 1:]), demos.gripper_command[index[:, :-1]]
    )


def _after_rest(
    rows: NDArray[np.float32], rest: NDArray[np.float32], waiting: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return [n, rows, 10] that begin so many rows later, after the row of a hand at rest [n,
    10].
    """
    index = np.arange(rows.shape[1]) - waiting[:, None]
    later = np.take_along_axis(rows, np.maximum(index, 0)[..., None], axis=1)
    return np.where((index < 0)[..., None], rest[:, None], later)


def undisturbed(demos: Demos, ticks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return [n] whether the chunk after each tick pursues one goal and is not perturbed."""
    span = ticks[:, None] + np.arange(ROWS)
    return ~demos.perturbed[span].any(1) & (demos.goal[span] == demos.goal[ticks][:, None]).all(1)


@dataclass(eq=False)
class _DemoWindows:
    """Windows of demonstrations; subclasses draw them."""

    demos: Demos
    latents: NDArray[np.float16] | ClipLatents  # chosen ones are read when they are drawn
    state: StateRow
    captions: Captions
    size: int = 64  # windows per step
    dropout: float = _DROPOUT  # fraction of them that read the empty caption
    seed: int = 0
    prefix_rows: int = 0  # longest action prefix

    def _read(self, ticks: NDArray[np.int64]) -> None:
        """Read the state row and the goal of each window by its first tick."""
        demos = self.demos
        columns = state_columns(demos.T_base_cosmos[ticks], demos.gripper_opening[ticks])
        self._state = self.state.scaled(columns).astype(np.float32)
        self._goal = demos.goal[ticks].astype(np.int64)

    def __len__(self) -> int:
        return len(self.latents)

    def _draw_prompts(
        self, rng: np.random.Generator, goal: NDArray[np.int64]
    ) -> tuple[tuple[tuple[int, ...], ...], NDArray[np.int64]]:
        """Draw a sentence for each goal, and for each window its sentence's index; some windows
        read the empty caption.
        """
        drawn = (
            sentences[int(rng.integers(len(sentences)))] for sentences in self.captions.by_goal
        )
        prompts = (*drawn, self.captions.empty)
        return prompts, np.where(rng.random(self.size) < self.dropout, len(GOALS), goal)

    def _windows(
        self,
        chosen: NDArray[np.int64],
        rows: NDArray[np.float32],
        prompts: tuple[tuple[int, ...], ...],
        prompt: NDArray[np.int64],
        mode: NDArray[np.int64] | None = None,
        prefix: NDArray[np.int64] | None = None,
    ) -> Batch:
        latents = torch.from_numpy(self.latents[chosen].astype(np.float32))
        return Batch(
            latents if latents.ndim == 5 else latents[:, :, None],
            torch.from_numpy(self._state[chosen]),
            torch.from_numpy(np.clip(rows, -3, 3)),
            prompts,
            torch.from_numpy(prompt),
            None if mode is None else torch.from_numpy(mode),
            None if prefix is None else torch.from_numpy(prefix),
        )

    def _draw_prefix(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw the length of each window's action prefix: none for half of them, any length for
        the others.
        """
        rows = rng.integers(1, max(self.prefix_rows, 1), endpoint=True, size=self.size)
        none = (rng.random(self.size) < _NO_PREFIX) | (self.prefix_rows == 0)
        return np.where(none, 0, rows)


@dataclass(eq=False)
class PictureWindows(_DemoWindows):
    """Windows of a single picture with the expert's labels for every goal.

    Args:
        latents, looks: [L, C, H, W] float16 of the pictures at labelled ticks, and with other looks
            (None: none).
        among: Those that are drawn; None is all.
    """

    among: range | None = None
    looks: NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        demos = self.demos
        self._read(demos.label_ticks)
        ticks, before = demos.label_ticks, np.maximum(demos.label_ticks - 1, 0)
        command = demos.gripper_command[
            np.where(demos.last[before] == demos.last[ticks], before, ticks)
        ]
        self._rest = scaled_rows(
            np.broadcast_to(np.eye(4), (len(ticks), 1, 4, 4)), command[:, None]
        )[:, 0]
        self.among = self.among or range(len(ticks))
        fingers = demos.labels[np.arange(len(ticks)), self._goal, :, 9]
        releases = (fingers[:, 0] < 0) & (fingers > 0).any(1)
        self._releasing = np.flatnonzero(releases & np.isin(np.arange(len(ticks)), self.among))

    def batch(self, step: int) -> LabelledBatch:
        """Return the windows of a step, drawn by (seed, step)."""
        rng, demos = np.random.default_rng([self.seed, step]), self.demos
        assert self.among is not None  # __post_init__ filled it
        chosen = rng.integers(self.among.start, self.among.stop, size=self.size)
        releases = rng.random(self.size) < (_RELEASES if len(self._releasing) else 0)
        chosen[releases] = self._releasing[
            rng.integers(max(len(self._releasing), 1), size=releases.sum())
        ]
        own = (rng.random(self.size) < _OWN_GOAL) | releases
        goal = np.where(own, self._goal[chosen], rng.integers(len(GOALS), size=self.size))
        prompts = self._draw_prompts(rng, goal)
        length = np.minimum(demos.prefix_rows[chosen, goal], self.prefix_rows)
        prefix = np.where(rng.random(self.size) < _NO_PREFIX, 0, length)
        other = rng.random(self.size) < (0 if self.looks is None else _OTHER_LOOKS)
        answers = _of(other, chosen, demos.labels, demos.looks_labels)
        after = _of(other, chosen, demos.continued, demos.looks_continued)
        after, asked = (of_goals[np.arange(self.size), goal] for of_goals in (after, answers))
        # its fingers do not move
        waits = (rng.random(self.size) < _WAITS) & (asked[:, 0, 9] * self._rest[chosen, 9] > 0)
        after[waits] = _after_rest(asked, self._rest[chosen], prefix)[waits]
        rows = np.where((prefix > 0)[:, None, None], after, asked)
        windows = self._windows(chosen, rows, *prompts, prefix=prefix)
        if self.looks is not None:
            looks = torch.from_numpy(self.looks[chosen[other]].astype(np.float32))
            windows.latents[torch.from_numpy(other)] = looks[:, :, None]
        return LabelledBatch(**vars(windows), goal_rows=torch.from_numpy(np.clip(answers, -3, 3)))

    def pick(
        self,
        chosen: NDArray[np.int64],
        goal: NDArray[np.int64],
        prompts: tuple[tuple[int, ...], ...],
        prompt: NDArray[np.int64],
    ) -> Batch:
        """Return windows by index, each with a goal and the index of its prompt."""
        return self._windows(chosen, self.demos.labels[chosen, goal], prompts, prompt)

    def held_out(self, first: int, count: int) -> Batch:
        """Return windows from an index on, the same each time, half of them with the goal of
        their episode.
        """
        rng = np.random.default_rng(5)
        chosen = rng.integers(first, len(self), size=count)
        drawn = rng.integers(len(GOALS), size=count)
        goal = np.where(np.arange(count) % 2 == 0, self._goal[chosen], drawn)
        plainest = tuple(sentences[0] for sentences in self.captions.by_goal)
        return self.pick(chosen, goal, plainest, goal)


def _of(
    other: NDArray[np.bool_],
    chosen: NDArray[np.int64],
    own: NDArray[np.float32],
    looks: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return [B, goals, rows, 10] of chosen pictures, or of their other looks."""
    rows = own[chosen]
    rows[other] = looks[chosen[other]]
    return rows


@dataclass(eq=False)
class ClipWindows(_DemoWindows):
    """Clips with their future, executed rows and goal; the policy learns from undisturbed ones
    (ConfigError if there are none).

    Windows of dynamics begin at any tick and read the empty caption: an expert's future follows
    from its goal, not only from the actions. A policy's begin at labelled ticks. Its rows after an
    action prefix are those that were executed; without one they are the expert's label, which the
    first picture explains.

    Args:
        ticks, latents: [n] first tick of each clip; their latents, of which chosen ones are [k, C,
            F, H, W] float16.
        forward, inverse: Fractions of windows that train forward and inverse dynamics.
    """

    ticks: NDArray[np.int64] = field(kw_only=True)
    forward: float = 0.15
    inverse: float = 0.15

    def __post_init__(self) -> None:
        demos, ticks = self.demos, self.ticks
        self._read(ticks)
        self._rows = executed_rows(demos, ticks)
        self._label = np.searchsorted(demos.label_ticks[:-1], ticks)
        self._undisturbed = np.flatnonzero(
            undisturbed(demos, ticks) & np.isin(ticks, demos.label_ticks)
        )
        if not len(self._undisturbed):
            raise ConfigError(
                "no labelled clip shows the expert undisturbed for a whole chunk; "
                "record more demonstrations."
            )

    def batch(self, step: int) -> Batch:
        """Return the windows of a step, drawn by (seed, step)."""
        rng = np.random.default_rng([self.seed, step, 1])
        draw = rng.random(self.size)
        mode = np.where(
            draw < self.forward, FORWARD, np.where(draw > 1 - self.inverse, INVERSE, POLICY)
        )
        free = rng.integers(len(self), size=self.size)
        clean = rng.integers(len(self._undisturbed), size=self.size)
        chosen = np.where(mode == POLICY, self._undisturbed[clean], free)
        prompts, prompt = self._draw_prompts(rng, self._goal[chosen])
        # a world does not follow from a sentence
        prompt = np.where(mode == POLICY, prompt, len(GOALS))
        prefix = np.where(mode == POLICY, self._draw_prefix(rng), 0)
        answers = self.demos.labels[self._label[chosen], self._goal[chosen]]
        rows = np.where(
            ((mode == POLICY) & (prefix == 0))[:, None, None], answers, self._rows[chosen]
        )
        return self._windows(chosen, rows, prompts, prompt, mode, prefix)

    def forward_dynamics(self, chosen: NDArray[np.int64]) -> Batch:
        """Return windows of forward dynamics by index: their executed rows are given, and they
        read the empty caption.
        """
        mode = np.full(len(chosen), FORWARD)
        return self._windows(
            chosen, self._rows[chosen], (self.captions.empty,), np.zeros_like(chosen), mode
        )
