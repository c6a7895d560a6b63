"""Run NVIDIA Cosmos 3 as a robot policy: frames and an instruction in, motion that a real arm can follow out.

Public names load on first use, so importing the package loads neither torch nor mujoco.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Cosmos3Policy": "policy",
    "Policy": "policy",
    "create_policy": "policy",
    "register": "policy",
    "Robot": "sim.robot",
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
    "MinkIKBridge": "control.ik",
    "decode_cosmos_chunk_to_targets": "control.targets",
}
__all__ = ["__version__", *_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
