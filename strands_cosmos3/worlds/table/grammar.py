"""Sentences about the table: a verb, a cube, and for stacking another cube; or what to do with a
bar. Words and patterns are in ``grammar.toml``.

:func:`parse_instruction` is lenient: judges and the scripted expert use it. :func:`understand` is
strict: a checkpoint that declares its :class:`~strands_cosmos3.language.Language` was trained on
few words, and refuses the sentences whose words or sense are not among them.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from strands_cosmos3.errors import InstructionError
from strands_cosmos3.resources import shown
from strands_cosmos3.tables import read_toml

if TYPE_CHECKING:
    from strands_cosmos3.language import Language

_LONGEST = 200  # characters of a sentence; training's have at most 66
_TOML = read_toml(Path(__file__).with_suffix(".toml"))
COLOURS: tuple[str, ...] = tuple(_TOML["colours"])


def _pattern(text: str | list[str]) -> str:
    """Return a pattern of the file with its parts filled in."""
    joined = text if isinstance(text, str) else "".join(text)
    return re.sub(r"<(\w+)>", lambda part: _part(part.group(1)), joined)


def _part(name: str) -> str:
    return "|".join(COLOURS) if name == "colours" else _pattern(_TOML["parts"][name])


class Verb(StrEnum):
    """What to do with a cube or a bar."""

    REACH = "reach"
    PICK = "pick"
    PLACE = "place"
    STACK = "stack"
    LIFT = "lift"
    HAND_OVER = "hand_over"


VERBS = tuple(map(str, Verb))
TEMPLATES = {Verb(verb): text for verb, text in _TOML["templates"].items()}
"""Default wording by verb: ``{a}`` is the colour of the cube to move, ``{b}`` of the one below."""
PARAPHRASES = {Verb(verb): tuple(texts) for verb, texts in _TOML["paraphrases"].items()}
"""Other wordings, which demonstrations must not use."""
BAR_VERBS = (Verb.LIFT, Verb.HAND_OVER)
_SYNONYMS = frozenset(_TOML["synonyms"].split())
_NO_GOAL = frozenset(_TOML["fillers"].split()) | _SYNONYMS
_OTHER_COLOURS = frozenset(_TOML["other_colours"])
_VERBS = {Verb(verb): re.compile(_pattern(text)) for verb, text in _TOML["verbs"].items()}
_PARTS = {name: re.compile(_part(name)) for name in _TOML["parts"]}
_LANGUAGE = {name: re.compile(_pattern(text)) for name, text in _TOML["language"].items()}
_REFUSALS = [(re.compile(_pattern(row["pattern"])), row["reason"]) for row in _TOML["refusals"]]


@dataclass(frozen=True)
class Goal:
    """A parsed instruction.

    Args:
        verb: What to do.
        cube: Name of the cube to move, e.g. ``"cube_red"``; ``"bar"`` to lift or hand over.
        onto: The cube to stack it on, or None.
        to: The hand that is to have the bar, e.g. ``"right"``, or None.
    """

    verb: Verb
    cube: str
    onto: str | None = None
    to: str | None = None


def normalize(text: str) -> str:
    """Return a sentence in lower case, with single spaces and without the full stop: as model,
    judge and expert read it.

    Raises:
        InstructionError: Not a string, or blank.
    """
    if not isinstance(text, str):
        raise InstructionError(f"an instruction must be a string, got {type(text).__name__}.")
    sentence = " ".join(
        unicodedata.normalize("NFKC", text).replace("\u2019", "'").lower().split()
    ).rstrip(".!?,;: ")
    if not sentence:
        raise InstructionError("the instruction is blank; try 'pick up the red cube'.")
    return sentence


def parse_instruction(text: str) -> Goal:
    """Parse an instruction: a verb and a colour, and for stacking the colour after "on" for the
    cube below; or to lift a bar, or to hand it over ("from the left to the right hand", which is
    the default).

    Raises:
        InstructionError: Not a string, blank, no known verb or colour, or a stack that names only
            one cube.
    """
    words = normalize(text)
    moved = _PARTS["hand_moves"].sub("reach", words)
    verb = next(
        (
            verb
            for verb, pattern in _VERBS.items()
            # a hand on a cube is no stack
            if pattern.search(moved) and (moved == words or verb is not Verb.STACK)
        ),
        None,
    )
    colours = re.findall(rf"\b({'|'.join(COLOURS)})\b", words)
    if not colours and _PARTS["bar"].search(words):
        if _PARTS["give"].search(words):
            return Goal(Verb.HAND_OVER, "bar", to=_receiver(words))
        if verb is Verb.PICK:
            return Goal(Verb.LIFT, "bar")
    if verb is None or not colours:
        names = (
            "verbs reach, pick up, place in the bin, stack"
            if verb is None
            else f"cubes {', '.join(COLOURS)}"
        )
        raise InstructionError(
            f"instruction {text!r:.200} names none of the {names}; try 'pick up the red cube'."
        )
    if verb is not Verb.STACK:
        return Goal(verb, f"cube_{colours[0]}")
    different = list(dict.fromkeys(colours))
    if len(different) < 2:
        raise InstructionError(
            f"instruction {text!r:.200} names one cube; try 'stack the red cube on the blue cube'."
        )
    below = _PARTS["onto"].search(words)
    onto = below.group(1) if below else different[1]
    cube = next(colour for colour in different if colour != onto)
    return Goal(verb, f"cube_{cube}", f"cube_{onto}")


def _receiver(words: str) -> str:
    """The hand that is to have the bar: the one after "to", or not the one after "from"."""
    if to := re.search(r"\bto (?:the |your )?(left|right)\b", words):
        return to.group(1)
    return "left" if re.search(r"\bfrom (?:the |your )?right\b", words) else "right"


def worded(goal: Goal, template: str = "") -> str:
    """Return a sentence of a goal, by default the plainest."""
    a, b = (str(cube).removeprefix("cube_") for cube in (goal.cube, goal.onto))
    return (template or TEMPLATES[goal.verb]).format(a=a, b=b)


def sentences(language: Language | None = None) -> list[str]:
    """Return the plainest sentence of each goal with cubes that a language has, picking first; None
    is one that has all.
    """
    colours = COLOURS if language is None else language.colours
    cube_verbs = [verb for verb in Verb if verb not in BAR_VERBS]
    verbs = cube_verbs if language is None else [Verb(verb) for verb in language.verbs]
    return [
        worded(
            Goal(
                verb,
                f"cube_{colour}",
                f"cube_{colours[(i + 1) % len(colours)]}" if verb is Verb.STACK else None,
            )
        )
        for verb in sorted(verbs, key=lambda verb: verb is not Verb.PICK)
        for i, colour in enumerate(colours)
    ]


def understand(text: str, language: Language) -> str:
    """Return a sentence as the model reads it: in lower case; with a word new to it, the plainest
    one of the same goal.

    Raises:
        InstructionError: It is long, negates, asks, names an unknown word, no or another verb, no
            or another colour, or two targets; or it asks for something else than a task.
    """
    read = normalize(text)
    refused = partial(_refusal, text, language)
    if len(read) > _LONGEST:  # before any pattern: some take time with the square of it
        raise refused(f"it has {len(read)} characters, more than {_LONGEST}")
    sentence = _without_courtesy(read)
    words = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[^\w\s,:;.!?'\"()-]", sentence)
    colours = dict.fromkeys(word for word in words if word in language.colours)
    asks = read == sentence and text.rstrip().endswith("?")
    if asks and not _LANGUAGE["request"].search(sentence):
        raise refused("it asks")
    for pattern, reason in _REFUSALS:
        if match := pattern.search(sentence):
            raise refused(f"{reason} ({match.group()!r})")
    absent_colours = _OTHER_COLOURS.difference(language.colours)
    known = language.words | _NO_GOAL
    if absent := [word for word in words if word in absent_colours]:
        raise refused(f"nothing on its table is {absent[0]}")
    if unknown := [word for word in words if word not in known]:
        names = ", ".join(map(repr, dict.fromkeys(unknown[:4])))
        raise refused(f"it does not know {names}")
    if len(colours) > 1:
        raise refused(f"it names {len(colours)} cubes ({', '.join(colours)})")
    try:
        goal = parse_instruction(sentence)
    except InstructionError:
        reason = "it names no verb" if colours else "it names no colour"
        raise refused(reason) from None
    if goal.verb not in language.verbs:
        raise refused(f"training never showed how to {goal.verb}")
    places = goal.verb is Verb.PLACE
    names_bin = bool(_PARTS["bin"].search(sentence))
    if places and not _PARTS["placed"].search(sentence):
        raise refused("it does not say where to put the cube: in the bin")
    verbatim = (
        read == sentence
        and all(word in language.words for word in words)
        and not _LANGUAGE["reworded"].search(sentence)
        and (names_bin or not places)
    )
    return sentence if verbatim else worded(goal)


def _refusal(text: str, language: Language, reason: str) -> InstructionError:
    return InstructionError(
        f"instruction {shown(text)} is not understood: {reason}. This checkpoint understands "
        f"{' or '.join(language.verbs)}, and one cube of "
        f"{', '.join(language.colours)}: {sentences(language)[0]!r}."
    )


def _without_courtesy(sentence: str) -> str:
    """Return a normalised sentence without phrases that change no goal; an arrow is "to", and a
    coloured box a cube.
    """
    plain = _LANGUAGE["arrow"].sub(" to ", _LANGUAGE["box"].sub(r"\1 cube", sentence))
    return " ".join(_LANGUAGE["courtesy"].sub(" ", plain).split()).strip(" ,")
