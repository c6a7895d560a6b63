"""Captions of the bundled policy, and the tokenizer that is made for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from recipes.random_checkpoint import write_tokenizer
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.language import Language
from strands_cosmos3.observe.prompts import VIEW_SENTENCES
from strands_cosmos3.training.dynamics import caption
from strands_cosmos3.worlds.table.grammar import COLOURS
from strands_cosmos3.worlds.table.phrases import GOALS, TRAINED

_SENTENCES = [
    template.format(colour) for verb in TRAINED for template in TRAINED[verb] for colour in COLOURS
]
LANGUAGE = Language(tuple(TRAINED), COLOURS, frozenset(re.findall(r"[a-z]+", " ".join(_SENTENCES))))
"""What training shows a policy."""


@dataclass(frozen=True, eq=False)
class Captions:
    """Token ids of captions."""

    by_goal: tuple[tuple[tuple[int, ...], ...], ...]  # [goal][template], every trained sentence
    empty: tuple[int, ...]  # the empty caption, for the unconditional branch


def fresh_tokenizer(folder: Path, canvas_hw: tuple[int, int]) -> int:
    """Write a tokenizer in which each fixed sentence of the caption is one token; return the
    size of its vocabulary.
    """
    rest = caption("x", canvas_hw).removeprefix("x.")
    fixed = [
        f" {VIEW_SENTENCES['concat']}",
        *(f" {s}" for s in DROID_RIG.layout.replace(". ", ".|").split("|")),
    ]
    length, size = rest.removeprefix("".join(fixed)).split(" This video is of ")
    phrases = [*fixed, length, f" This video is of {size}", "user\n", "assistant\n"]
    return write_tokenizer(folder, _SENTENCES, phrases)


def read_captions(tokenizer: Path, canvas_hw: tuple[int, int]) -> Captions:
    """Token ids of every training sentence and of the empty caption."""
    tokens = PromptTokenizer(tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokens.ids(text)[0].tolist())

    goals = ([template.format(colour) for template in TRAINED[verb]] for verb, colour in GOALS)
    return Captions(
        tuple(tuple(ids(caption(text, canvas_hw)) for text in goal) for goal in goals), ids("")
    )
