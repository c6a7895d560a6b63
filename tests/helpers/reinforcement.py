"""A run of reinforcement learning whose episodes were run before, on any number of processes."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from strands_cosmos3.evaluation.settings import Settings, make_settings
from strands_cosmos3.training.rl import controller
from strands_cosmos3.training.rl.controller import ReinforcementLearning
from strands_cosmos3.training.rl.options import RLConfig
from strands_cosmos3.training.rl.rollout import Episode
from strands_cosmos3.training.sharding import processes


class InlinePool:
    """Answers an iteration with an episode that was run before."""

    deaths = 0

    def __init__(self, episode: Episode):
        self.episode = episode

    def publish(self, version: int, weights: Any) -> None:
        pass

    def submit(self, job: Any) -> None:
        pass

    def result(self, key: Any) -> Any:
        return {"success": False} if "evaluation" in key else self.episode

    def results(self, key: Any, method: str, *_: Any) -> list[Any]:
        return [(None, b"film")] if method == "film" else [{"success": False}]


def settings_of(model: str) -> Settings:
    """Settings of a short pick on another mount of the camera."""
    options = {"model": model, "tasks": "pick", "conditions": "mount=4", "duration": 1.5}
    return make_settings(options | {"seeds": 2})


def config(**options: Any) -> RLConfig:
    """Iterations of two steps."""
    how: dict[str, Any] = {"episodes": 1, "pairs": 2, "steps": 2, "batch": 5}
    return RLConfig(**how | {"evaluate_episodes": 1} | options)


def main(model: str, episode: Path, folder: Path, until: int) -> None:
    """Learn from a pickled episode, up to an iteration, and write the checkpoint."""
    torch.set_num_threads(1)
    pool = InlinePool(pickle.loads(episode.read_bytes()))
    with (
        processes() as share,
        patch.object(controller, "cluster", lambda *_: nullcontext()),
        patch.object(controller, "ActorPool", lambda *_: nullcontext(pool)),
    ):
        how = config(lr=1e-3, kl_beta=1e-4)
        run = ReinforcementLearning(settings_of(model), folder, how, share=share)
        run.run(3600.0, 1, until=until)
