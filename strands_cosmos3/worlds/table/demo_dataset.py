"""Demonstrations as a LeRobot v3 dataset: the columns of any arm's episode and the expert's
labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, DatasetWriter, VideoConfig
from strands_cosmos3.datasets.arm_rows import pose7, raw_rows
from strands_cosmos3.datasets.spec import (
    DONE,
    INSTRUCTIONS,
    LABELLED,
    SUCCESS,
    DatasetSpec,
    Feature,
    arm_spec,
)
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.worlds.table.demo_config import DemoConfig
from strands_cosmos3.worlds.table.demonstrations import DemoCollector, EpisodeRecord
from strands_cosmos3.worlds.table.phrases import GOALS, plain, sentence

PERTURBED = "perturbed"
GOAL = "goal"
VIDEO = VideoConfig(crf=8, gop=8, pixel_format="yuv444p")
"""Nearly lossless and with full colour resolution: a cube is a few pixels wide."""


def demo_spec(record: EpisodeRecord, config: DemoConfig) -> DatasetSpec:
    """Return the schema of a dataset of episodes such as ``record``."""
    robot = config.spec
    embodiment = config.embodiment
    names = [f"{verb}_{colour}" for verb, colour in GOALS]
    answers: dict[str, Any] = {
        "goals": [names[goal] for goal in config.goals],
        "rows": embodiment.chunk_rows("midtrain"),
        "width": embodiment.action_space("midtrain").width,
        "normalized": f"{embodiment.stats} quantiles",
        INSTRUCTIONS: [plain(goal) for goal in config.goals],
    }
    extra = {
        name: Feature("int64", values.shape[1:])
        if values.dtype == np.int64
        else Feature("float32", values.shape[1:], None, answers)
        for name, values in record.label_columns().items()
    }
    extra |= dict.fromkeys((LABELLED, PERTURBED), Feature("bool", (1,)))
    extra[GOAL] = Feature("int64", (1,), None, {"goals": names})
    return arm_spec(
        dict.fromkeys(config.cameras, record.frames.shape[1:3]),
        embodiment,
        None,
        len(robot.limb().joints),
        robot.name,
        extra,
    )


def add_record(writer: DatasetWriter, record: EpisodeRecord, seed: int, episode: int) -> int:
    """Add an episode, with a sentence for its first goal as its task. The last frame's action is
    to stay.
    """
    ticks = np.arange(len(record.gripper_opening))
    numbers = {
        STATE: np.column_stack([record.q_rad, record.gripper_opening]),
        EE_POSE: pose7(record.T_base_cosmos),
        ACTION: raw_rows(record.T_base_cosmos, record.gripper_command),
    }
    columns = {name: values.astype(np.float32) for name, values in numbers.items()}
    columns |= {DONE: ticks == ticks[-1], SUCCESS: np.zeros(len(ticks), bool)}
    for name, values in record.label_columns().items():
        columns[name] = np.zeros((len(ticks), values.shape[1]), values.dtype)
        columns[name][record.label_ticks] = values
    columns |= {
        LABELLED: np.isin(ticks, record.label_ticks),
        PERTURBED: record.perturbed,
        GOAL: record.goal.astype(np.int64),
    }
    task = sentence(int(record.goal[0]), np.random.default_rng([seed, episode, 7]))
    videos = dict(zip(writer.spec.cameras, record.pictures(), strict=True))
    return writer.add_episode(columns, videos, task, {"seed": seed, "episode": episode})


def record_demos(root: Path, collector: DemoCollector, seed: int, episodes: range) -> None:
    """Record episodes as a new dataset; ConfigError if no start of them is reachable."""
    drawn = {episode: collector.record(seed, episode) for episode in episodes}
    records = {episode: record for episode, record in drawn.items() if record is not None}
    if not records:
        raise ConfigError(
            f"episodes {episodes[0]} to {episodes[-1]} of seed {seed} have no reachable start; "
            f"give another --seed, or --episodes of at least {episodes[-1] + 2}."
        )
    spec = demo_spec(next(iter(records.values())), collector.config)
    with DatasetWriter(root, spec, commit_every=len(episodes), video=VIDEO) as writer:
        for episode, record in records.items():
            add_record(writer, record, seed, episode)
