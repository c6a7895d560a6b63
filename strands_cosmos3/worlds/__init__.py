"""Worlds: what policies act in, and how they are judged. :mod:`.world` is the interface."""

from strands_cosmos3.worlds.world import (
    Executed,
    RunOptions,
    Session,
    SessionState,
    Start,
    Task,
    Variation,
    World,
    get_world,
    varied,
)

__all__ = [
    "Executed",
    "RunOptions",
    "Session",
    "SessionState",
    "Start",
    "Task",
    "Variation",
    "World",
    "get_world",
    "varied",
]
