"""What a checkpoint understands: its verbs, its colours, and the words that its training showed it.

A small model gives a word that it never read whatever its random weights say. So a sentence is
understood or refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strands_cosmos3.errors import InstructionError, LayoutError
from strands_cosmos3.resources import shown
from strands_cosmos3.worlds.table.instruction import (
    BIN,
    COLOURS,
    REWORDED,
    SYNONYMS,
    TEMPLATES,
    TO_BIN,
    Goal,
    Verb,
    normalize,
    parse_instruction,
)
from strands_cosmos3.worlds.table.refusals import refusal_of

_FILLERS = frozenset(
    """
    a about above accurately across again ahead ahold all aloft also an and any appreciate are arm around as ask asked
    asking at attentively away awesome back be been being below bench beside bit boss bot brick bring briskly buddy by
    calmly can captain carefully cautiously champ chap cheers chief cleanly close colored coloured completely computer
    confidently corner correctly could counter countertop courteously currently darling dear deliberately delicately
    demonstrate desk dexterously dice die diligently directly do does down dude efficiently effortlessly end ends ensure
    everyone exactly execute fast favor favour fella finally finger fingers firmly first firstly folks for forward forwards
    friend from front fully gently get gingerly go gonna good got gracefully great gripper gripper's hand happy has hastily
    have hello help helping here hereby hey hi honey hope hopefully how hurry i i'd immediately in instantly instructed into
    is it it's item its itself job just kind kindly last left legend let let's lies lightly like little love lovely lying
    ma'am machine make mate may me meticulously middle might mind mister moment mr ms much must my near neatly need needed
    next nice nicely now o object obligingly of off ok okay on one only onto onwards or our out over painted pal patiently
    people perfectly perform piece plastic please pls plz position pray precisely pretty promptly properly provided quick
    quickly quietly quite rapidly rather ready really reliably request respectfully rest resting right robot safely sample
    securely see shall shiny should show side silently simply single sir sits sitting skilfully skillfully slowly small
    smoothly so soft softly some soon specimen speedily standing steadily steady straight straightforwardly sure surely
    surface sweetheart swiftly ta table tabletop task team tenderly thank thankfully thanks that that's the then there
    there's these thing this those thx thy tightly time tiny tip to today toward towards toy try u unit until up ur us
    vertically very visitors wanna want we wee well what when whenever where which who will wish with within wonderful
    wooden workbench workspace worktop would ya yes yo you you'd you're your yours yourself
    """.split()  # noqa: SIM905
)
"""Words that change no goal."""
_COURTESY = re.compile(
    r",? ?\b(?:if (?:you (?:please|can|could|would|will|like|may|wouldn't mind|don't "
    r"mind)|possible)|pretty please|hurry up and"
    r"|(?:would|is) it (?:be )?possible (?:for you )?to|how about|would (?:ya|you)(?=$)|no "
    r"rush|no hurry"
    r"|be an? (?:dear|darling|pal|friend|sport|champ|star|love|sweetheart|angel) and|there's a "
    r"(?:good|dear|nice) ?\w*"
    r"|(?:please )?show (?:me|us|everyone) how (?:you|to)|let \w+(?: \w+)? see you|when(?:ever)? "
    r"you(?:'re| are) ready"
    r"|if it's not too much trouble|between (?:your |the |its )?(?:two "
    r")?(?:fingers|fingertips|jaws|claws)"
    rf"|(?:open|empty|nearby) (?={BIN}))\b,?"
)
"""Phrases around a sentence that change no goal, whatever their words mean elsewhere."""
_REQUEST = re.compile(r"\b(?:can|could|would|will|may|might|mind|please|about|chance|possible)\b")
"""Words of a request in the form of a question; another question asks for an answer."""
_BOX = re.compile(rf"(?<!in the )(?<!into the )(?<!inside the )\b({'|'.join(COLOURS)}) box\b")
"""A cube, as some people call it; "in the red box" is a bin that is not there."""
_ARROW = re.compile(r" ?(?:->|=>|\u2192) ?")
_LONGEST = 200  # characters of a sentence; training's have at most 66
_OTHER_COLOURS = frozenset(
    [
        "yellow",
        "orange",
        "purple",
        "violet",
        "pink",
        "brown",
        "black",
        "white",
        "grey",
        "gray",
        "cyan",
        "magenta",
        "turquoise",
        "teal",
        "gold",
        "silver",
        "beige",
    ]
)


@dataclass(frozen=True)
class Language:
    """Verbs, colours and words of a checkpoint's training.

    Args:
        verbs, colours: What a goal may consist of.
        words: Every word of its sentences.
    """

    verbs: tuple[str, ...]
    colours: tuple[str, ...]
    words: frozenset[str]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Language | None:
        """Return the ``language`` that a checkpoint records, or None; LayoutError if it is
        malformed.
        """
        found = metadata.get("language")
        if found is None:
            return None
        try:
            verbs, colours, words = (found[name] for name in ("verbs", "colours", "words"))
            valid = all(
                isinstance(one, str) and one for part in (verbs, colours, words) for one in part
            )
        except (KeyError, TypeError):
            valid, verbs, colours, words = False, (), (), ()
        if not valid or not set(verbs) <= set(Verb) or not colours:
            raise LayoutError(
                "checkpoint.json: language must hold lists of strings verbs (of "
                f"{', '.join(Verb)}), colours and words, got "
                f"{shown(found)}. Correct it, or download it again."
            )
        return cls(tuple(verbs), tuple(colours), frozenset(words))

    def to_metadata(self) -> dict[str, list[str]]:
        """Return the ``language`` to record."""
        return {
            "verbs": list(self.verbs),
            "colours": list(self.colours),
            "words": sorted(self.words),
        }

    @property
    def example(self) -> str:
        """A sentence that is understood."""
        return plainest(Goal(Verb(self.verbs[0]), f"cube_{self.colours[0]}"))

    def understand(self, text: str) -> str:
        """Return the sentence as the model reads it: in lower case; with a word new to it, the
        plainest one of the same goal.

        Raises:
            InstructionError: It is long, negates, asks, names an unknown word, no or another verb,
                no or another colour, or two targets; or it asks for something else than a task
                (:mod:`.refusals`).
        """
        read = normalize(text)
        if len(read) > _LONGEST:  # before any pattern: some take time with the square of it
            raise self._refusal(text, f"it has {len(read)} characters, more than {_LONGEST}")
        sentence = _without_courtesy(read)
        if read == sentence and text.rstrip().endswith("?") and not _REQUEST.search(sentence):
            raise self._refusal(text, "it asks")
        if why := refusal_of(sentence):
            raise self._refusal(text, why)
        words = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[^\w\s,:;.!?'\"()-]", sentence)
        if absent := [word for word in words if word in _OTHER_COLOURS - set(self.colours)]:
            raise self._refusal(text, f"nothing on its table is {absent[0]}")
        known = self.words | _FILLERS | SYNONYMS
        if unknown := [word for word in words if word not in known]:
            raise self._refusal(
                text, f"it does not know {', '.join(map(repr, dict.fromkeys(unknown[:4])))}"
            )
        named = dict.fromkeys(word for word in words if word in self.colours)
        if len(named) > 1:
            raise self._refusal(text, f"it names {len(named)} cubes ({', '.join(named)})")
        try:
            goal = parse_instruction(sentence)
        except InstructionError:
            raise self._refusal(
                text, "it names no colour" if not named else "it names no verb"
            ) from None
        if goal.verb not in self.verbs:
            raise self._refusal(text, f"training never showed how to {goal.verb}")
        if goal.verb is Verb.PLACE and not re.search(TO_BIN, sentence):
            raise self._refusal(text, "it does not say where to put the cube: in the bin")
        verbatim = (
            read == sentence
            and all(word in self.words for word in words)
            and not REWORDED.search(sentence)
        )
        verbatim = verbatim and (
            goal.verb is not Verb.PLACE or re.search(BIN, sentence) is not None
        )
        return sentence if verbatim else plainest(goal)

    def _refusal(self, text: str, why: str) -> InstructionError:
        return InstructionError(
            f"instruction {shown(text)} is not understood: {why}. This checkpoint understands "
            f"{' or '.join(self.verbs)}, and one cube of {', '.join(self.colours)}: "
            f"{self.example!r}."
        )


def _without_courtesy(sentence: str) -> str:
    """Return a normalised sentence without phrases that change no goal; an arrow is "to", and a
    coloured box a cube.
    """
    bare = _COURTESY.sub(" ", _ARROW.sub(" to ", _BOX.sub(r"\1 cube", sentence)))
    return " ".join(bare.split()).strip(" ,")


def plainest(goal: Goal) -> str:
    """Return the plainest sentence of a goal."""
    below = "" if goal.onto is None else goal.onto.removeprefix("cube_")
    return TEMPLATES[goal.verb].format(a=goal.cube.removeprefix("cube_"), b=below)
