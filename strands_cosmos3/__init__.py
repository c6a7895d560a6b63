"""Run NVIDIA Cosmos 3 as a robot policy: frames and an instruction in, motion that a real arm can
follow out.

Public names load on first use, so importing the package loads neither torch nor mujoco.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors
    from strands_cosmos3.actions.decode import decode_pose_delta, decode_pose_trajectory
    from strands_cosmos3.actions.stats import (
        denormalize_quantile,
        load_action_stats,
        normalize_quantile,
    )
    from strands_cosmos3.control.ik import MinkIKBridge
    from strands_cosmos3.control.targets import decode_cosmos_chunk_to_targets
    from strands_cosmos3.embodiments import get_embodiment, list_embodiments
    from strands_cosmos3.engine.engine import Cosmos3Engine
    from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
    from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
    from strands_cosmos3.parallel.config import ParallelConfig
    from strands_cosmos3.policy import (
        Cosmos3Policy,
        Policy,
        PolicyOptions,
        create_policy,
        register,
    )
    from strands_cosmos3.reasoner.reasoner import Reasoner
    from strands_cosmos3.worlds.arms import Robot

__version__ = "0.1.0"
__all__ = [
    "Cosmos3ActionRequest",
    "Cosmos3Engine",
    "Cosmos3Policy",
    "Cosmos3PolicyProcessor",
    "MinkIKBridge",
    "ParallelConfig",
    "Policy",
    "PolicyOptions",
    "Reasoner",
    "Robot",
    "__version__",
    "create_policy",
    "decode_cosmos_chunk_to_targets",
    "decode_pose_delta",
    "decode_pose_trajectory",
    "denormalize_quantile",
    "get_embodiment",
    "list_embodiments",
    "load_action_stats",
    "normalize_quantile",
    "pixel_to_latent_shape",
    "register",
]

_MODULES = {
    "Cosmos3Policy": "policy",
    "Policy": "policy",
    "PolicyOptions": "policy",
    "create_policy": "policy",
    "register": "policy",
    "Robot": "worlds.arms",
    "get_embodiment": "embodiments",
    "list_embodiments": "embodiments",
    "load_action_stats": "actions.stats",
    "normalize_quantile": "actions.stats",
    "denormalize_quantile": "actions.stats",
    "decode_pose_delta": "actions.decode",
    "decode_pose_trajectory": "actions.decode",
    "Cosmos3Engine": "engine.engine",
    "Cosmos3PolicyProcessor": "engine.processor",
    "Cosmos3ActionRequest": "engine.request",
    "ParallelConfig": "parallel.config",
    "pixel_to_latent_shape": "engine.request",
    "Reasoner": "reasoner.reasoner",
    "MinkIKBridge": "control.ik",
    "decode_cosmos_chunk_to_targets": "control.targets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from strands_cosmos3.extras import needed_by

    with needed_by(f"strands_cosmos3.{name}"):
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
