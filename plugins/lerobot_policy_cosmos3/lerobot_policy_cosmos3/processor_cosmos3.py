"""LeRobot's processors around the policy."""

from __future__ import annotations

from typing import Any

from lerobot.processor import (
    PolicyAction,
    PolicyProcessorPipeline,
    make_default_pre_post_processors,
)

from lerobot_policy_cosmos3.configuration_cosmos3 import Cosmos3Config

Pipelines = tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]],
    PolicyProcessorPipeline[PolicyAction, PolicyAction],
]


def make_cosmos3_pre_post_processors(
    config: Cosmos3Config, dataset_stats: dict[str, Any] | None = None
) -> Pipelines:
    """LeRobot's default pair. Nothing is normalised: the policy takes and answers radians and
    open fractions.
    """
    return make_default_pre_post_processors(config, dataset_stats)
