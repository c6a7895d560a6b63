"""Runs inside lerobot's own environment: reads a dataset with LeRobotDataset and writes down
what it saw.
"""

import json
import sys

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

dataset = LeRobotDataset("local/set", root=sys.argv[1], video_backend="pyav")
rows = dataset.hf_dataset.with_format("numpy")
ends = [int(dataset.meta.episodes[k]["dataset_to_index"]) for k in range(dataset.num_episodes)]
starts = [0, *ends[:-1]]
lengths = np.subtract(ends, starts)
picked = [(k, row) for k, n in enumerate(lengths) for row in sorted({0, n // 2, n - 1})]
items = [dataset[starts[k] + row] for k, row in picked]
np.savez(
    sys.argv[2],
    **{key: np.stack(rows[key]) for key in ("action", "observation.state")},
    q99=dataset.meta.stats["action"]["q99"],
    episode=[k for k, _ in picked],
    row=[row for _, row in picked],
    wrist=np.stack([item["observation.images.wrist"].numpy() for item in items]),
)
said = {
    "fps": dataset.fps,
    "episodes": dataset.num_episodes,
    "frames": len(dataset),
    "cameras": dataset.meta.camera_keys,
    "tasks": [dataset[a]["task"] for a in starts],
}
print(json.dumps(said))
