"""Simulation: the scene, its tasks, the robot in it, pictures and films of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_cosmos3.robots.model import load_panda

__all__ = ["load_panda"]


def __getattr__(name: str) -> Any:
    if name != "load_panda":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from strands_cosmos3.extras import needed_by

    with needed_by("strands_cosmos3.sim.load_panda"):
        from strands_cosmos3.robots.model import load_panda
    return load_panda
