"""Windows of any arm's LeRobot v3 episodes, for post-training, made by the checkpoint's own
processor as in inference.

``midtrain`` rows follow from measured poses, except those in a controller's units (``libero``),
which are the recorded actions, and an expert's answers for several goals (``strands-cosmos3 demos
--robot``), which give as many windows of one picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.actions.controller_rows import METHOD as CONTROLLER_METHOD
from strands_cosmos3.actions.stats import ActionStats, denormalize_chunk, stats_for
from strands_cosmos3.checks import F64
from strands_cosmos3.datasets import (
    Dataset,
)
from strands_cosmos3.datasets.arm_rows import state_columns
from strands_cosmos3.datasets.reader import action_info
from strands_cosmos3.datasets.spec import EXPERT, INSTRUCTIONS, LABELLED
from strands_cosmos3.embodiments import Embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.engine.request import pixel_to_latent_shape
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json
from strands_cosmos3.training.arm_columns import ArmColumns, ArmKeys
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.windows import Batch, cached_latents

LATENTS = "latents.npy"
_MIN_RANGE = 1e-4
_VALIDATION_BATCHES = 16
_DROPOUT = 0.08  # fraction of windows that read the empty caption


class ArmWindows:
    """Windows of a dataset for one checkpoint.

    Args:
        dataset: An open dataset; it is read here and not afterwards.
        keys: Names of its features (:meth:`ArmKeys.resolved`).
        stats: Statistics of the rows; None means the embodiment's packaged ones.
        cache: Folder in which the latents are kept.

    Raises:
        ConfigError: The dataset does not fit, or no episode is longer than a chunk.
    """

    def __init__(
        self,
        dataset: Dataset,
        checkpoint: Checkpoint,
        embodiment: Embodiment,
        keys: ArmKeys,
        how: PostConfig,
        stats: ActionStats | None,
        cache: Path,
        on_window: Callable[[int, int], None],
    ):
        self._dataset = dataset
        self._checkpoint = checkpoint
        self._keys = keys
        self._how = how
        self._embodiment = embodiment
        self._space = checkpoint.require_space()
        self._columns = ArmColumns(dataset, embodiment, keys)
        self._rows = rows = embodiment.chunk_rows(self._space)
        self._frames = how.policy_frames or next(iter(checkpoint.policy_frames), rows + 1)
        device = torch.device("cpu")
        vae = WanVae(
            checkpoint.vae_config, checkpoint.vae_weights, device, torch.float32, decoder=False
        )
        trained_with = how.policy_frames
        self._processor = Cosmos3PolicyProcessor.for_checkpoint(
            # the new checkpoint will declare them
            checkpoint
            if trained_with is None
            else replace(checkpoint, policy_frames=(trained_with,)),
            domain_name=embodiment.name,
            action_chunk_size=rows,
            policy_frames=trained_with,
        )
        self._affine = (
            None
            if self._space == "joint_pos"
            else stats_for(embodiment, stats).normalizer(
                CONTROLLER_METHOD if embodiment.in_controller_units else "quantile"
            )
        )
        lengths = dataset.lengths
        self.frames_per_row = step = self._columns.every
        every = action_info(dataset).get("pictures_every", how.every * step)
        # recorded actions go on after the end as the last one, and the end of an episode is where a
        # gripper opens
        beyond = rows - 1 if embodiment.in_controller_units and self._frames == 1 else 0
        self._instructions = self._answered_instructions()
        starts = [
            (e, int(t))
            for e in range(len(dataset))
            for t in (
                np.flatnonzero(dataset[e][LABELLED])
                if self._instructions
                else range(0, int(lengths[e]) - (rows - beyond) * step, every)
            )
        ]
        if not starts:
            raise ConfigError(
                f"no episode is longer than a chunk of {rows * step} frames; the longest has "
                f"{int(lengths.max())} frames."
            )
        self._ids: dict[str, tuple[int, ...]] = {}  # of an instruction's caption
        windows: list[tuple[int, tuple[int, ...], F64]] = []
        states: list[torch.Tensor] = []
        for i, (episode, t) in enumerate(starts):
            # without its pixels: those of all pictures would fill the memory
            picture, answers = self._processed(episode, t, seen=False)
            windows += [(i, *answer) for answer in answers]
            if picture.action_prefix is not None:
                states.append(picture.action_prefix[0, : picture.raw_action_dim])
        training = len(dataset) - int(how.validation_fraction * len(dataset))
        self._trained = sum(starts[i][0] < training for i, *_ in windows)
        if not self._trained:
            raise ConfigError(
                "every episode that is longer than a chunk would only validate; "
                "lower --validation-fraction."
            )
        picture_of_window, self._prompts, chunks = zip(*windows, strict=True)
        self._picture = np.array(picture_of_window)
        self._chunks = np.stack(chunks).astype(np.float32)
        self._state = torch.stack(states) if states else None
        self._fps = float(picture.fps)
        self.empty = tuple(picture.neg_text_ids[0].tolist())
        _, height, width = pixel_to_latent_shape(*picture.video_shape)

        def latents(some: NDArray[np.int64]) -> torch.Tensor:
            pixels = torch.cat([self._processed(*starts[i])[0].pixel_values for i in some])
            return vae.encode(pixels)[..., :height, :width]

        at_once = 16 if self._frames == 1 else 1
        self._latents = cached_latents(
            latents, np.arange(len(starts)), cache / LATENTS, width, on_window, batch=at_once
        )

    def __len__(self) -> int:
        return len(self._prompts)

    def _answered_instructions(self) -> tuple[str, ...]:
        """Return the goals that the dataset's expert answered, or none: a clip shows what was done,
        and not what was answered.
        """
        feature = self._dataset.spec.features.get(EXPERT)
        is_answer = self._frames == 1 and self._space == "midtrain"
        if feature is None or INSTRUCTIONS not in feature.info or not is_answer:
            return ()
        instructions = tuple(feature.info[INSTRUCTIONS])
        scale = feature.info.get("normalized")
        embodiment = self._embodiment
        shape = (len(instructions) * self._rows * embodiment.action_space("midtrain").width,)
        if feature.shape != shape or scale != f"{embodiment.stats} quantiles":
            raise ConfigError(
                f"{EXPERT} holds {feature.shape[0]} numbers, normalised by {scale!r}; "
                f"{len(instructions)} chunks of {self._rows} rows of {embodiment.name!r} are "
                "needed. Record it again: strands-cosmos3 demos --robot NAME."
            )
        return instructions

    def _processed(
        self, episode: int, t: int, seen: bool = True
    ) -> tuple[Any, list[tuple[tuple[int, ...], F64]]]:
        """Return a picture as the processor makes it, and its windows: token ids of a caption, and
        rows in the model's scale.

        Unless it is to be ``seen``, the picture is black: decoding takes most of the time, and the
        rest does not depend on it.
        """
        recorded = self._dataset[episode]
        count = self._rows
        columns = self._columns
        span = columns.span(t, count)
        views = [
            recorded.frames(key, range(t, t + self._frames * columns.every, columns.every))
            if seen
            else np.zeros((self._frames, *self._dataset.spec.features[key].shape), np.uint8)
            for key in self._keys.cameras
        ]  # fmt: skip
        mode = "policy" if self._frames == 1 else "inverse_dynamics"
        tasks = self._instructions or (recorded.task_at(t),)
        raw: dict[str, Any] = {"images": self._composed(views), "task": tasks[0], "mode": mode}
        if self._space == "joint_pos":
            measured = columns.state(recorded, span)
            raw["state"] = measured[0].tolist()
            rows = measured[:-1]  # row 0 is the command for now
        else:
            rows = columns.rows(recorded, span)[:count]
            rows = np.concatenate([rows, np.repeat(rows[-1:], count - len(rows), axis=0)])
            if self._checkpoint.state_row is not None:
                now = slice(t, t + 1)
                opening = columns.state(recorded, now)[:, -1]
                raw["state"] = state_columns(columns.poses(recorded, now), opening)[0].tolist()
        chunks = [rows]
        if self._instructions:
            answers = np.asarray(recorded[EXPERT][t], np.float64)
            chunks = [
                denormalize_chunk(chunk, self._embodiment)
                for chunk in answers.reshape(len(tasks), count, -1)
            ]
        made = self._processor.preprocess(raw)
        self._ids[tasks[0]] = _ids_of(made)
        for text in tasks:
            if text not in self._ids:
                self._ids[text] = _ids_of(self._processor.preprocess({**raw, "task": text}))
        if self._affine is not None:  # a controller's commands are not clipped
            clip = not self._embodiment.in_controller_units
            chunks = [self._affine(chunk, clip) for chunk in chunks]
        return made, list(zip((self._ids[text] for text in tasks), chunks, strict=True))

    def _composed(self, views: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        rig = self._embodiment.rig
        if len(views) == 1:
            return views[0]
        if rig is None:
            return np.concatenate(views, axis=2)
        composites = [
            self._processor.compose(dict(zip(rig.views, moment, strict=True)), rig)
            for moment in zip(*views, strict=True)
        ]
        return np.stack(composites)

    def batch(self, step: int) -> Batch:
        """Return the windows of a step, drawn by (seed, step)."""
        rng = np.random.default_rng([self._how.seed, step])
        size = self._how.batch
        chosen = rng.integers(self._trained, size=size)
        return self._pick(chosen, rng.random(size) < _DROPOUT)

    def validation(self) -> Iterator[Batch]:
        """Return whole batches of windows of held-out episodes, evenly spaced; none without such
        episodes.
        """
        first = self._trained
        size = self._how.batch
        count = min(-(-(len(self) - first) // size), _VALIDATION_BATCHES)
        chosen = np.linspace(first, len(self) - 1, count * size).round().astype(np.int64)
        for batch in chosen.reshape(count, size):
            yield self._pick(batch, np.zeros(size, bool))

    def _pick(self, chosen: NDArray[np.int64], dropped: NDArray[np.bool_]) -> Batch:
        prompts = list(dict.fromkeys(self._prompts[i] for i in chosen))
        prompt = torch.tensor([prompts.index(self._prompts[i]) for i in chosen])
        prompt = torch.where(torch.from_numpy(dropped), torch.tensor(len(prompts)), prompt)
        pictures = self._picture[chosen]
        state = None if self._state is None else self._state[torch.from_numpy(pictures)]
        latents = torch.from_numpy(self._latents[pictures].astype(np.float32))
        return Batch(
            latents,
            state,
            torch.from_numpy(self._chunks[chosen]),
            (*prompts, self.empty),
            prompt,
            fps=self._fps,
        )


def _ids_of(processed: Any) -> tuple[int, ...]:
    return tuple(processed.text_ids[0].tolist())


def row_statistics(dataset: Dataset, embodiment: Embodiment, keys: ArmKeys) -> ActionStats:
    """Return 1 % and 99 % quantiles (apart even in a constant column), mean and deviation of
    ``midtrain`` rows, by column. ``keys``: as for :class:`ArmWindows`.
    """
    columns = ArmColumns(dataset, embodiment, keys)
    every = slice(None, None, columns.every)
    joined = np.concatenate([columns.rows(episode, every) for episode in dataset])
    low, high = np.quantile(joined, [0.01, 0.99], axis=0)
    apart = np.where(high - low < _MIN_RANGE, _MIN_RANGE / 2, 0.0)
    if embodiment.stats is None:
        raise ConfigError(f"embodiment {embodiment.name!r} has no statistics.")
    columns = embodiment.action_space("midtrain").columns
    return ActionStats(
        embodiment.stats,
        columns,
        low - apart,
        high + apart,
        joined.mean(0),
        np.maximum(joined.std(0), _MIN_RANGE),
    )


def write_statistics(stats: ActionStats, path: Path) -> None:
    """Write statistics of a dataset in this project's schema."""
    figures = {
        name: np.asarray(getattr(stats, name)).tolist() for name in ("q01", "q99", "mean", "std")
    }
    write_json(
        path,
        {
            "schema": 1,
            "domain": stats.domain,
            "source": "computed from the post-training dataset",
            "columns": list(stats.columns),
            **figures,
        },
    )
