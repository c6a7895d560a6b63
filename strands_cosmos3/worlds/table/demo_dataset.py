"""Demonstrations as a LeRobot v3 dataset: the columns of any arm's episode and the expert's
labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, DatasetWriter, VideoConfig
from strands_cosmos3.datasets.arm_rows import pose7, raw_rows
from strands_cosmos3.datasets.spec import (
    DONE,
    EXPERT,
    INSTRUCTIONS,
    LABELLED,
    SUCCESS,
    DatasetSpec,
    Feature,
    arm_spec,
    camera_key,
)
from strands_cosmos3.worlds.table.demonstrations import DemoConfig, EpisodeRecord
from strands_cosmos3.worlds.table.phrases import GOALS, plain, sentence

COMPOSITE, LOOKS = camera_key("composite"), camera_key("composite_looks")
PERTURBED, GOAL = "perturbed", "goal"
CONTINUED, PREFIX_ROWS = "expert.continued", "expert.prefix_rows"
LOOKS_EXPERT, LOOKS_CONTINUED = "expert.looks_rows", "expert.looks_continued"
_LABELS = {
    EXPERT: "labels",
    CONTINUED: "continued",
    PREFIX_ROWS: "prefix_rows",
    LOOKS_EXPERT: "looks_labels",
    LOOKS_CONTINUED: "looks_continued",
}
"""Column -> attribute of the record, of what labelled ticks have."""
VIDEO = VideoConfig(crf=8, gop=8, pixel_format="yuv444p")
"""Nearly lossless and with full colour resolution: a cube is a few pixels wide."""


def demo_spec(picture_hw: tuple[int, int], config: DemoConfig | None = None) -> DatasetSpec:
    """Return the schema of demonstrations with pictures of a size: composites, or those of the
    embodiment's only camera.
    """
    config = config or DemoConfig()
    robot, embodiment = config.spec, config.embodiment
    rows, width = embodiment.chunk_rows("midtrain"), embodiment.action_space("midtrain").width
    names = [f"{verb}_{colour}" for verb, colour in GOALS]
    labels: dict[str, Any] = {
        "goals": [names[goal] for goal in config.labelled],
        "rows": rows,
        "width": width,
        "normalized": f"{embodiment.stats} quantiles",
    }
    if embodiment.rig is None:
        cameras = embodiment.view_names[:1]
        labels[INSTRUCTIONS] = [plain(goal) for goal in config.labelled]
    else:
        cameras = ("composite", "composite_looks")
    answers = Feature("float32", (len(config.labelled) * rows * width,), None, labels)
    extra = {EXPERT: answers}
    if embodiment.rig is not None:
        extra[LOOKS_EXPERT] = answers
        if config.prefix_rows:
            extra |= {CONTINUED: answers, PREFIX_ROWS: Feature("int64", (len(GOALS),))}
            extra[LOOKS_CONTINUED] = answers
    extra |= dict.fromkeys((LABELLED, PERTURBED), Feature("bool", (1,)))
    extra[GOAL] = Feature("int64", (1,), None, {"goals": names})
    return arm_spec(
        dict.fromkeys(cameras, picture_hw),
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
    n, labelled = len(ticks), np.isin(ticks, record.label_ticks)
    numbers = {
        STATE: np.column_stack([record.q_rad, record.gripper_opening]),
        EE_POSE: pose7(record.T_base_cosmos),
        ACTION: raw_rows(record.T_base_cosmos, record.gripper_command),
    }
    columns: dict[str, Any] = {
        **{name: values.astype(np.float32) for name, values in numbers.items()},
        DONE: ticks == n - 1,
        SUCCESS: np.zeros(n, bool),
        **{
            name: _at_ticks(getattr(record, attribute), record.label_ticks, n)
            for name, attribute in _LABELS.items()
            if name in writer.spec.features
        },
        LABELLED: labelled,
        PERTURBED: record.perturbed,
        GOAL: record.goal.astype(np.int64),
    }
    task = sentence(int(record.goal[0]), np.random.default_rng([seed, episode, 7]))
    latest = np.maximum(np.searchsorted(record.label_ticks, ticks, side="right") - 1, 0)
    # a robot's only camera has no other looks
    videos = dict(zip(writer.spec.cameras, (record.frames, record.looks[latest]), strict=False))
    return writer.add_episode(columns, videos, task, {"seed": seed, "episode": episode})


def _at_ticks(values: NDArray[Any], ticks: NDArray[np.int16], n: int) -> NDArray[Any]:
    """Return [n, numbers] with the values [L, ...] of some ticks, and zeros at the others."""
    flat = values.reshape(len(ticks), -1)
    out = np.zeros((n, flat.shape[1]), np.float32 if flat.dtype == np.float32 else np.int64)
    out[ticks] = flat
    return out
