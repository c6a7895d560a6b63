"""The questions that the eyes answer, and the words that the bundled vocabulary lacks for them."""

from __future__ import annotations

from collections.abc import Iterable

from strands_cosmos3.worlds.table.grammar import COLOURS

WHICH_COLOURS = "Which colours are there?"
WHICH_IS_NEAREST = "Which cube is nearest to the hand?"
IS_CLOSED = "Is the gripper closed on something?"
SUCCEEDED = "Task: {}. Did the robot succeed? Answer yes or no."
"""Of a film, whose first and last picture are read."""
YES, NO = "yes", "no"
NO_CUBE = "no cube"

MERGES = ("re d", "g reen", "b l", "bl ue", "y es")
"""Merges that make a word of an answer's beginning one token."""
WORDS = (
    "Which",
    " colours",
    " nearest",
    "Is",
    " closed",
    " something",
    "Task",
    " Did",
    " robot",
    " succeed",
    " Answer",
    " yes",
    " or",
    " seconds>",
)
"""Words of the questions, and of the time that stands before a film's pictures."""


def colours_said(present: Iterable[bool]) -> str:
    """Return the answer to :data:`WHICH_COLOURS`, e.g. ``red, green and blue``."""
    names = [colour for colour, there in zip(COLOURS, present, strict=True) if there]
    if not names:
        return NO_CUBE
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def nearest_said(cube: int) -> str:
    """Return the answer to :data:`WHICH_IS_NEAREST`; below 0 is no cube."""
    return NO_CUBE if cube < 0 else f"the {COLOURS[cube]} cube"


def said(whether: bool) -> str:
    """Return yes or no."""
    return YES if whether else NO
