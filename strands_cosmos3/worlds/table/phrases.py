"""Sentences of demonstrations, from ``phrases.toml``: many trained wordings, and some held out.

Trained wordings combine verbs, names and endings; a few are written out. None contains one of
:data:`VALIDATION` or of the evaluation's ``paraphrased`` rows, but their words occur.
``parse_instruction`` must understand every sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from strands_cosmos3.tables import read_toml
from strands_cosmos3.worlds.table.grammar import COLOURS, PARAPHRASES, Verb

_TOML = read_toml(Path(__file__).with_suffix(".toml"))
_WORDS: Mapping[Verb, Mapping[str, Any]] = {
    Verb(verb): words for verb, words in _TOML["verbs"].items()
}
VALIDATION: Mapping[Verb, tuple[str, ...]] = MappingProxyType(
    {verb: tuple(words["validation"]) for verb, words in _WORDS.items()}
)
"""Verb -> templates that are never trained."""


def _trained(verb: Verb, words: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every trained wording, the plainest first."""
    combined = (
        "".join((act, " ", *rest))
        for act, *rest in product(words["acts"], _TOML["names"], words["places"], words["endings"])
    )
    untrained = (*VALIDATION[verb], *(text.replace("{a}", "{}") for text in PARAPHRASES[verb]))
    wordings = dict.fromkeys((words["plain"], *words["written_out"], *combined))
    return tuple(wording for wording in wordings if not any(text in wording for text in untrained))


TRAINED: Mapping[Verb, tuple[str, ...]] = MappingProxyType(
    {verb: _trained(verb, words) for verb, words in _WORDS.items()}
)
"""Verb -> trained templates with ``{}`` for the colour, the plainest first."""

GOALS: tuple[tuple[Verb, str], ...] = tuple(
    (verb, colour) for verb in TRAINED for colour in COLOURS
)
"""Goals of demonstrations, in the order of the labels' goal axis."""


def sentence(
    goal: int, rng: np.random.Generator, templates: Mapping[Verb, tuple[str, ...]] = TRAINED
) -> str:
    """Draw a sentence for a goal, given by its index in :data:`GOALS`."""
    verb, colour = GOALS[goal]
    choices = templates[verb]
    return choices[int(rng.integers(len(choices)))].format(colour)


def plain(goal: int) -> str:
    """Return the plainest sentence of a goal."""
    verb, colour = GOALS[goal]
    return TRAINED[verb][0].format(colour)
