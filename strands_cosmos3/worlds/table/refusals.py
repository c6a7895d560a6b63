"""Sentences that name a verb and a cube, and ask for something else than to reach, pick or place
that cube.

A parser that looks for a verb and a colour would take them. Each pattern is tried on a normalised
sentence (:func:`~strands_cosmos3.worlds.table.instruction.normalize`); the first that fits gives the reason for
the refusal.
"""

from __future__ import annotations

import re

from strands_cosmos3.worlds.table.instruction import BIN, COLOURS

_COLOUR = rf"(?:{'|'.join(COLOURS)})"
_THE = r"(?:the|that|this|a|your)"
_CUBE = r"(?:cube|block|one|brick|dice|item|object|piece|thing|toy)"
_HAND = r"(?:hand|gripper|arm|fingers?|fingertips?|claw|palm|manipulator|pincers?)"
_PLACING = (
    r"\b(?:put|plac|drop|mov|bring|carr|toss|set|throw|stick|dump|deposit|releas|pop|load|insert|lay|slip|stow|store|chuck|rid"
    r"|let go|transport|transfer|relocat|convey|ferry|haul|lug|cart|shuttl|plop|plonk|plunk|tuck|stash|lodg|slot|file|tidy"
    r"|clean|ditch|discard|trash|bung|install|nestle|sink|pitch|fling|lob|feed|deliver|shift|dispos|send|tak|get|lower"
    r"|ends? up)"
)

_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        r"(?<!do )(?<!execute )(?<!perform )(?<!make )"
        r"\b(?:the|a|your|that's) "
        r"(?:up|down|of|in|into|to|the|a|and|at|on|from|with|please|pick|put|place|reach)\b"
        rf"|\b(?:the|a|of|your|into|and)$|\b{_COLOUR} of\b",
        "its words are in no order",
    ),
    (
        r"\b(?:not|never|no|none|neither|nor|without|except|instead|rather "
        r"than|avoid|ignore|leave|forget|don't|dont|doesn't|"
        r"isn't|aren't|can't|cannot|won't|shouldn't|mustn't|stop \w+ing)\b",
        "it negates",
    ),
    (
        r"^(?:is|are|was|does|did|has|have|where|what|which|when|who|why|how(?! about "
        r"you)|should|may|shall|do you"
        r"|(?:can|could|will|would) (?:i|the|it|he|she|they|we|anyone)(?! be possible)|would you "
        r"have)\b"
        r"|\b(?:could|should|would|must|may|might) (?:you )?have (?:\w+ed|put|taken)\b",
        "it asks",
    ),
    (
        rf"^(?:i (?:can|will|put|have|had|am|did|could|should|(?!need)\w+ed)|let me|there is) |"
        r"^you (?:are (?!to|now|asked|hereby)|just|have|had|must have)\b|"
        rf"^(?:the|this) (?:robot|{_HAND}|bin) (?!(?:should|must|needs?|has|is "
        r"to|to|above|near|at|over)\b)|"
        rf"\b{_COLOUR} (?:{_CUBE} )?(?:is "
        r"(?:picked|placed|put|lifted|held|reached)|picks?|picked|lifts?|lifted|grabs?|grabbed)"
        r" (?:up )?(?:the|you|me|a|in)\b|is picked up$|"
        rf"^the {_COLOUR} \w+ (?:is (?:in|on|at|near|by)|ends|sits|lies)\b|{BIN} is\b|{_CUBE} to "
        r"(?:move|go|fall)$",
        "it states something",
    ),
    (r"\b(?:or|until)\b|\bagain and again\b", "it leaves something open"),
    (
        rf"\b(?:out of|from|off) {_THE} {BIN}|\b{_CUBE} (?:back )?out\b",
        "training never took a cube out of something",
    ),
    (
        r"\b(?:next|close|left|right|front|beside|behind|near|under|below|outside|around|by|on|onto|at|top)"
        rf"(?: to| of)? {_THE} {BIN}|"
        rf"^(?!.*\b(?:releas|drop|let go|over to)).*\b(?:above|over) {_THE} {BIN}",
        "training placed cubes in the bin, not beside or above it",
    ),
    (
        rf"^(?!.*{_PLACING}).*\b(?:pick|lift|grab|grasp|reach|touch|raise|hold|fetch)\b.*\bin "
        rf"{_THE} {BIN}",
        "it does not say whether to put the cube in the bin or to fetch it there",
    ),
    (
        rf"\b{_COLOUR} "
        rf"(?:{BIN}|table(?:top)?|desk|counter(?:top)?|(?:work)?bench|workspace|computer|machine|unit|ro?bot|team"
        rf"|friend|folks|people|boss|captain|chief|dude|fly|{_HAND})\b|"
        r"\b(?:lift|hold|move|take|put|pick up|grab|reach(?: "
        r"for)?|raise|bring|lower|drop|touch|point at|place|get)"
        rf"(?: up)? {_THE} "
        r"(?:bin|tray|container|receptacle|trash(?:can)?|garbage|rubbish|dustbin|table|desk|(?:work)?bench|counter|computer|machine"
        r"|sample|specimen|unit|friend|captain|boss|chief|dude)\b(?! cube)|\btake the box\b",
        "it can act on the cubes alone",
    ),
    (
        rf"\b{_HAND}(?: up| back)? (?:off|from|away)\b|\b{_HAND} in(?:to|side)? {_THE} {BIN}",
        "it moves the hand away from the cubes",
    ),
    (
        r"\b(?:take|lift|pick|raise|bring) .*\b(?:down|back|left|right|sideways|there)$|\bpoint "
        r"away\b|\bup where\b"
        r"|\b(?:take|lift) (?:down|back|over|off|it from) |\btake .*\boff$|(?<!a )\bpick (?:on|at) "
        r"|\b(?:lift|pick|grab|raise|hold|make|let) (?:up )?(?:me|you|him|them)\b"
        rf"|\b(?:in|inside|into) {_THE} {_COLOUR}\b|\bhover {_THE} (?:{_COLOUR}|{_CUBE})\b|\bwith "
        rf"{_THE} {BIN}"
        rf"|\bmake {_THE} {_COLOUR}\b|\b{_CUBE} (?:pick|lift|grab)\b",
        "it does something else with the cube, or with somebody",
    ),
    (
        rf"\b(?!(?:bin|box|tray|container|contact|up|effector|tool|{_HAND})\b)\w+ with {_THE} "
        rf"{_COLOUR}\b(?! colou?r)|"
        rf"\b(?:point|aim) {_THE} {_COLOUR}\b|\busing {_THE} (?!(?:robot "
        rf")?{_HAND})|\b(?:reach|go) over\b.* to {_THE} {BIN}",
        "it uses a cube as a tool",
    ),
    (
        rf"(?<!red )(?<!green )(?<!blue )\b(?:{_CUBE}|what|box)\b(?: \w+){{0,3}} "
        rf"(?:left|right|front|side|behind|beside|next|near|close|below|under|above|over|away|by|with)\b(?: \w+){{0,2}} "
        rf"(?:{_THE} )?{_COLOUR}\b|\b(?:left|right|front|back|side) of {_THE}|\b{_CUBE} that "
        rf"{_THE} {_COLOUR}\b",
        "it tells a place by a cube",
    ),
    (
        rf"^(?!.*\b(?:in|into|inside|to|in it|with it)(?: {_THE})? "
        rf"?{BIN}).*\b(?:move|bring|carry) {_THE} (?:\w+ )?{_COLOUR}\b|"
        rf"\b{_COLOUR} (?:{_CUBE} )?(?:over |back |up )*(?:(?:to|onto) (?:me|us|your|the "
        r"(?:left|right|table|side|corner|edge|"
        r"middle|centre|center|front|back))|here)\b",
        "training moved cubes into the bin only",
    ),
    (
        rf"{BIN} and (?:then )?(?!(?:let|release|open|drop|stay)\b)|"
        rf"\b(?:{_CUBE}|it) and (?:then )?(?:go|move|come|return)\b(?!.*\b(?:in|into|inside|to) "
        rf"{_THE} {BIN})|"
        r"\b(?:pick|grab|lift|grasp|take)\b.* and (?:then )?touch\b",
        "it goes on after the task",
    ),
)
_COMPILED = tuple((re.compile(pattern), why) for pattern, why in _PATTERNS)


def refusal_of(sentence: str) -> str | None:
    """Return why a normalised sentence is refused, with the words that tell, or None."""
    for pattern, why in _COMPILED:
        if found := pattern.search(sentence):
            return f"{why} ({found.group()!r})"
    return None
