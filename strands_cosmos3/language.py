"""What a checkpoint understands: its verbs, its colours, and the words of its training.

Words outside the training vocabulary give meaningless output, so such sentences are rejected. The
:class:`Language` is data of the checkpoint; how a sentence is read is a grammar's, which is found
by name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from strands_cosmos3.errors import ConfigError, LayoutError
from strands_cosmos3.resources import shown
from strands_cosmos3.tables import packaged_worlds

ENTRY_POINTS = "strands_cosmos3.grammars"
"""Entry points with which other packages add grammars. A checkpoint names one and never a
module.
"""


class Grammar(Protocol):
    """What reads sentences: the verbs that there are, and two functions."""

    VERBS: tuple[str, ...]

    def understand(self, text: str, language: Language) -> str:
        """Return the sentence as the model reads it; InstructionError refuses it."""
        ...

    def sentences(self, language: Language | None = None) -> list[str]:
        """Return sentences that are understood."""
        ...


@dataclass(frozen=True)
class Language:
    """Verbs, colours and words of a checkpoint's training.

    Args:
        verbs, colours: What a goal may consist of.
        words: Every word of its sentences.
        grammar: Name of a packaged world with a grammar, or of an entry point.
    """

    verbs: tuple[str, ...]
    colours: tuple[str, ...]
    words: frozenset[str]
    grammar: str = "table"

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Language | None:
        """Return the ``language`` that a checkpoint records, or None; LayoutError if it is
        malformed.
        """
        language = metadata.get("language")
        if language is None:
            return None
        try:
            verbs, colours, words = (
                tuple(language[name]) for name in ("verbs", "colours", "words")
            )
            grammar = language.get("grammar", cls.grammar)
        except (AttributeError, KeyError, TypeError):
            verbs = colours = words = ()
            grammar = ""
        strings = (grammar, *verbs, *colours, *words)
        valid = verbs and colours and all(isinstance(word, str) and word for word in strings)
        reader = _grammar(grammar) if valid else None
        if not valid or (reader is not None and not set(verbs) <= set(reader.VERBS)):
            raise LayoutError(
                "checkpoint.json: language must hold lists of strings verbs (of its grammar's), "
                f"colours and words, got {shown(language)}. Correct it, or download it again."
            )
        return cls(verbs, colours, frozenset(words), grammar)

    def to_metadata(self) -> dict[str, Any]:
        """Return the ``language`` to record."""
        return {
            "verbs": list(self.verbs),
            "colours": list(self.colours),
            "words": sorted(self.words),
            **({} if self.grammar == Language.grammar else {"grammar": self.grammar}),
        }

    @property
    def example(self) -> str:
        """A sentence that is understood."""
        return self._reader.sentences(self)[0]

    def understand(self, text: str) -> str:
        """Return the sentence as the model reads it.

        Raises:
            InstructionError: The checkpoint does not understand it.
            ConfigError: Its grammar is not installed.
        """
        return self._reader.understand(text, self)

    @property
    def _reader(self) -> Grammar:
        if (reader := _grammar(self.grammar)) is None:
            raise ConfigError(
                f"the checkpoint's grammar {self.grammar!r} is not installed; there are "
                f"{', '.join(_modules())}. Install its package, or set check_language=False."
            )
        return reader


@functools.cache  # reading the entry points of everything installed takes milliseconds
def _modules() -> Mapping[str, str]:
    added = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    packaged = packaged_worlds().items()
    return added | {name: world["grammar"] for name, world in packaged if "grammar" in world}


def _grammar(name: str) -> Grammar | None:
    module = _modules().get(name)
    return None if module is None else cast("Grammar", importlib.import_module(module))
