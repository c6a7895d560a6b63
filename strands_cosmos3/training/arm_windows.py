"""Windows of any arm's LeRobot v3 episodes, for post-training: pictures and captions exactly as the checkpoint is asked.

A dataset needs an end-effector pose (position and quaternion xyzw of the Cosmos frame in the base), the gripper as an open
fraction, and pictures: the embodiment's views, or one camera. Each window goes through the checkpoint's own processor, so
that letterboxing, composite, canvas, caption and state row cannot differ from inference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.actions.normalization import ActionStats
from strands_cosmos3.actions.rotations import matrix_to_rot6d
from strands_cosmos3.actions.stats import stats_for
from strands_cosmos3.checks import F64
from strands_cosmos3.datasets import EE_POSE, STATE, Dataset, camera_key
from strands_cosmos3.embodiments import Embodiment
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.engine.request import pixel_to_latent_shape
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import compose
from strands_cosmos3.resources import write_json
from strands_cosmos3.training.lerobot import poses_of, raw_rows
from strands_cosmos3.training.windows import Batch, cached_latents

LATENTS = "latents.npy"
_LEAST_SPREAD = 1e-4


@dataclass(frozen=True)
class ArmKeys:
    """Which features of a dataset are meant.

    Args:
        pose: [7] position [m] and quaternion xyzw of the Cosmos frame in the base.
        state: Joint angles [rad] and, last, the measured open fraction.
        orders: Whose last column is the gripper's order as an open fraction; ``action`` by default.
        cameras: Feature keys: three in the order of the embodiment's rig, or one.
    """

    pose: str = EE_POSE
    state: str = STATE
    orders: str = "action"
    cameras: tuple[str, ...] = ()

    def resolved(self, dataset: Dataset, embodiment: Embodiment) -> ArmKeys:
        """The same with cameras found, checked against the dataset.

        Raises:
            ConfigError: A feature is missing or of another width; those that are there are listed.
        """
        features = dataset.spec.features
        rig = () if embodiment.rig is None else tuple(camera_key(view) for view in embodiment.rig.views)
        found = tuple(dataset.spec.cameras)
        cameras = self.cameras or (rig if rig and all(key in found for key in rig) else found)
        missing = [key for key in (self.pose, self.state, self.orders, *cameras) if key not in features]
        if missing or len(cameras) not in (1, 3):
            raise ConfigError(
                f"the dataset has {', '.join(features)}; {', '.join(missing) or 'the cameras'} cannot be used. Name the pose, "
                "the state, the gripper's orders, and one camera or the rig's three."
            )
        if features[self.pose].shape != (7,):
            raise ConfigError(
                f"{self.pose!r} must hold 7 numbers (position, quaternion xyzw), not {features[self.pose].shape}."
            )
        return ArmKeys(self.pose, self.state, self.orders, cameras)


class ArmWindows:
    """Windows of a dataset for one checkpoint.

    Args:
        dataset: Open.
        processor: The checkpoint's.
        encode: Pixels [1, 3, F, H, W] -> normalised latents [1, C, F, h, w].
        embodiment: Whose rows.
        space: ``midtrain`` or ``joint_pos``.
        keys: Which features are meant.
        stats: Statistics of the rows; None is the embodiment's packaged ones.
        state_row: Whether the checkpoint's ``midtrain`` sequence starts with a state row.
        policy_frames: Frames of a policy's clip, as the checkpoint records them.
        rows: Of a chunk.
        every: Frames between windows.
        cache: Folder for latents.
        batch, seed: As in the other windows.
        on_window: Called while latents are made with windows done and in all.

    Raises:
        ConfigError: The dataset does not fit, or no episode is longer than a chunk.
    """

    def __init__(
        self,
        dataset: Dataset,
        processor: Cosmos3PolicyProcessor,
        encode: Callable[[torch.Tensor], torch.Tensor],
        embodiment: Embodiment,
        space: str,
        keys: ArmKeys,
        stats: ActionStats | None,
        state_row: bool,
        policy_frames: int | None,
        rows: int,
        every: int,
        cache: Path,
        batch: int = 8,
        seed: int = 0,
        on_window: Callable[[int, int], None] | None = None,
    ):
        self._dataset, self._keys = dataset, keys.resolved(dataset, embodiment)
        self._processor, self._encode, self._embodiment = processor, encode, embodiment
        self._space, self._rows, self._batch, self._seed = space, rows, batch, seed
        self._with_state = state_row or space == "joint_pos"
        self._frames = rows + 1 if policy_frames is None else policy_frames
        self._affine = None if space == "joint_pos" else stats_for(embodiment, stats).normalizer("quantile")
        lengths = dataset.lengths
        self._at = [(e, t) for e in range(len(dataset)) for t in range(0, int(lengths[e]) - rows, every)]
        if not self._at:
            raise ConfigError(f"no episode is longer than a chunk of {rows} rows; the longest has {int(lengths.max())} frames.")
        made = [self._processed(e, t) for e, t in self._at]
        self._prompts = [tuple(processed.text_ids[0].tolist()) for processed, _ in made]
        self.empty: tuple[int, ...] = tuple(made[0][0].neg_text_ids[0].tolist())
        shape = pixel_to_latent_shape(*made[0][0].video_shape)
        index = np.arange(len(self._at))
        self._latents = cached_latents(
            lambda some: torch.cat([self._encode(made[i][0].pixel_values)[..., : shape[1], : shape[2]] for i in some]),
            index,
            cache / LATENTS,
            shape[2],
            on_window,
            batch=4,
        )
        width, self._fps = made[0][0].raw_action_dim, float(made[0][0].fps)
        self._chunks = np.stack([rows for _, rows in made]).astype(np.float32)
        states = [p.action_prefix[0, :width] for p, _ in made if p.action_prefix is not None]
        self._state = torch.stack(states) if states else None

    def __len__(self) -> int:
        return len(self._at)

    def _processed(self, episode: int, t: int) -> tuple[Any, F64]:
        """A window as the processor makes it, and its rows in the model's scale."""
        recorded = self._dataset[episode]
        span = slice(t, t + self._rows + 1)
        views = [recorded.frames(key, range(t, t + self._frames)) for key in self._keys.cameras]
        frames = views[0] if len(views) == 1 else self._composed(views)
        poses = poses_of(recorded[self._keys.pose][span])
        measured = np.asarray(recorded[self._keys.state][span], np.float64)
        mode = "policy" if self._frames == 1 else "inverse_dynamics"
        raw: dict[str, Any] = {"images": frames, "task": recorded.task, "mode": mode}
        if self._space == "joint_pos":
            raw["state"] = measured[0].tolist()
            rows = measured[:-1]  # row 0 is the command for now
        else:
            orders = np.asarray(recorded[self._keys.orders][span], np.float64)[:, -1]
            rows = raw_rows(poses, orders)[:-1]
            if self._with_state:
                pose9 = np.concatenate([poses[0, :3, 3], matrix_to_rot6d(poses[0, :3, :3])])
                raw["state"] = [*pose9.tolist(), float(measured[0, -1])]
        processed = self._processor.preprocess(raw)
        return processed, rows if self._affine is None else self._affine(rows, True)

    def _composed(self, views: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        rig = self._embodiment.rig
        assert rig is not None  # three cameras were resolved from it
        moments = zip(*views, strict=True)
        return np.stack([compose(dict(zip(rig.views, moment, strict=True)), rig) for moment in moments])

    def batch(self, step: int) -> Batch:
        """The windows of a step, drawn by (seed, step)."""
        rng = np.random.default_rng([self._seed, step])
        chosen = rng.integers(len(self), size=self._batch)
        prompts = list(dict.fromkeys(self._prompts[i] for i in chosen))
        prompt = torch.tensor([prompts.index(self._prompts[i]) for i in chosen])
        dropped = torch.from_numpy(rng.random(self._batch) < 0.08)
        prompt = torch.where(dropped, torch.tensor(len(prompts)), prompt)
        state = None if self._state is None else self._state[torch.from_numpy(chosen)]
        latents = torch.from_numpy(self._latents[chosen].astype(np.float32))
        return Batch(latents, state, torch.from_numpy(self._chunks[chosen]), (*prompts, self.empty), prompt, fps=self._fps)


def dataset_statistics(dataset: Dataset, embodiment: Embodiment, keys: ArmKeys) -> ActionStats:
    """Statistics of a dataset's own ``midtrain`` rows: first and ninety-ninth percentile, mean and spread of each column.

    A column that hardly moves is given the spread of a tenth of a millimetre, so that its scale can be inverted.
    """
    keys = keys.resolved(dataset, embodiment)
    rows = []
    for episode in dataset:
        orders = np.asarray(episode[keys.orders], np.float64)[:, -1]
        rows.append(raw_rows(poses_of(episode[keys.pose]), orders)[:-1])
    joined = np.concatenate(rows)
    low, high = np.quantile(joined, [0.01, 0.99], axis=0)
    short = high - low < _LEAST_SPREAD
    low, high = np.where(short, low - _LEAST_SPREAD / 2, low), np.where(short, high + _LEAST_SPREAD / 2, high)
    if embodiment.stats is None:
        raise ConfigError(f"embodiment {embodiment.name!r} takes no statistics.")
    columns = embodiment.action_space("midtrain").columns
    return ActionStats(embodiment.stats, columns, low, high, joined.mean(0), np.maximum(joined.std(0), _LEAST_SPREAD))


def write_statistics(stats: ActionStats, path: Path, source: str) -> None:
    """Write statistics in this project's schema."""
    figures = {name: np.asarray(getattr(stats, name)).tolist() for name in ("q01", "q99", "mean", "std")}
    data = {"schema": 1, "domain": stats.domain, "source": source, "columns": list(stats.columns), **figures}
    write_json(path, data)
