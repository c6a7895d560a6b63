"""Simulation: the scene, its tasks, the robot in it, pictures and films of it."""

from __future__ import annotations

from strands_cosmos3.robots.model import load_panda

__all__ = ["load_panda"]
