"""Parser of instructions about coloured cubes and a bin: a verb, a cube, and for stacking another
cube.

The scripted expert and the tasks' judges use it. A learned policy reads the words itself.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum

from strands_cosmos3.errors import InstructionError

COLOURS = ("red", "green", "blue")


class Verb(StrEnum):
    """What to do with the cube."""

    REACH = "reach"
    PICK = "pick"
    PLACE = "place"
    STACK = "stack"
    LIFT = "lift"
    HAND_OVER = "hand_over"


_BAR = r"\b(?:bar|beam|rod)\b"
_GIVE = r"\b(?:hand|pass|give|transfer)\b"
_OF_HAND = "".join(
    f"(?<!{word} )"
    for word in ["clamp", "latch", "hold", "grab", "gripper", "fingers", "hand", "pick", "grasp"]
)
_ONTO = rf"{_OF_HAND}\b(?:onto|on)(?: top of)? the ({'|'.join(COLOURS)})\b"
BIN = r"\b(?:bin|box|container|tray|bucket|tub|receptacle|trash|trashcan|dustbin|garbage|rubbish)\b"
_TO_BIN = (
    rf"\bto(?:wards?)? (?:(?:the|a|your) )?{BIN}|\brelease .{{0,60}}\b(?:over|above) (?:the|a) "
    rf"{BIN}"
    rf"|\bbin (?:the|that|this)\b|\bfill (?:the|a|your) {BIN} with\b"
)
_DISCARD = r"\b(?:trash|discard|throw away|throw out|dispose of|get rid of) (?:the|that|this)\b"
TO_BIN = rf"{BIN}|{_DISCARD}"
"""In a sentence that says where a cube is to be put: the bin, or a verb that means it."""
_HOLD = r"\bhold (?:up |on to |onto |of )?(?:the|that|this)\b"
_HAND = re.compile(  # the hand is moved, not a cube: "put your hand above ..."
    r"\b(?:move|moving|bring|put|place|position|hold|align|lower|extend|stretch|get|keep|set|send|guide|steer|direct|take|drive|rest"
    r"|stop|close(?! (?:\w+ ){1,3}(?:on|onto|around)\b)"
    r"|want|need|point|swing|slide|lift|raise|park|float|glide|shift|centre|center|line|aim|wave|hang|poise"
    r"|settle|relocate|transport|reposition|sweep|advance|ease|lean)"
    r"(?: out| up)? (?:(?:your|the|its) )?(?:robot |little |own )?"
    r"(?:hand|gripper|arm|fingers?|fingertips?|end "
    r"effector|effector|claw|palm|tool|manipulator|pincers?|ee|eef|tcp|jaws?)\b"
    r"(?= (?:out |over |across |along |right |directly |straight |just |close |down |up )*"
    r"(?:to|towards?|above|over|near|onto|on|at|around|with|beside|next to|there|so it)\b|$)"
    r"|^(?:please |just )?(?:(?:your|the) )?(?:hand|gripper|arm|claw|ee|eef|tcp)"
    rf"(?= (?:to|above|near|at) (?:the )?(?:{'|'.join(COLOURS)})\b)"
)
REWORDED = re.compile(rf"{_HAND.pattern}|{_TO_BIN}|{_HOLD}")
"""Where a word has another sense than in the plain sentences: a policy may know the words, and
not this.
"""
_THERE = (  # the arm itself moves; without a preposition a cube would: "swing the red cube"
    r"\b(?:moving|going|drive|get|swing|stretch|lean|shift|glide|float|drift|fly|cruise|scoot|sweep|advance|proceed"
    r"|stop(?! at| by)|make your way|find your "
    r"way|park|settle|wait|hang|stand|stay|rest|line|line up|lined up|centre|center"
    r"|be|get ready|poise|position|align)"
    r"(?: yourself)? (?:out |over |across |along |up |straight |directly |right |just |close "
    r"|nearer |closer )*"
    r"(?:to|towards?|near|above|over|at|by)\b"
)
_WORDS: tuple[tuple[Verb, str], ...] = (
    (Verb.STACK, rf"\bstack|{_ONTO}"),
    (
        Verb.PLACE,
        rf"\b(?:place|put|drop)\b|\b(?:in|into|inside) (?:(?:the|a) )?{BIN}|{_TO_BIN}|{_DISCARD}",
    ),
    (
        Verb.PICK,
        r"\b(?:pick|grasp|grab|grip\b|clasp|clutch|lift|take|raise|fetch|snatch|seize|collect|retrieve|pluck|hoist|elevate"
        r"|scoop"
        rf"|obtain|nab|snag|gather|capture|acquire|pinch|clamp|procure|heft|extract|remove)"
        r"|\b(?:get|take|catch|lay|grab|have) (?:a )?(?:good |firm )?(?:hold|grip) (?:of|on)\b"
        r"|\b(?:pull|draw|haul|heave|bring) (?:up )?(?:the|that|this) .{0,20}\b(?:up|off the "
        r"(?:table|surface|tabletop))\b"
        r"|\b(?:pull|draw|haul|heave) up\b"
        r"|\b(?:do|execute|perform) a (?:pick|grasp|lift) (?:on|of|for)\b"
        r"|\bclose (?:\w+ ){1,3}(?:on|onto|around) (?:the|that|this)\b"
        rf"|\bget (?:me |us )?(?:the|that|this)\b|{_HOLD}",
    ),
    (
        Verb.REACH,
        r"\b(?:reach|touch|go to|move "
        r"to|hover|point|approach|contact|tap|navigate|travel|locate|find|get close|get near)"
        r"|\b(?:head|come|move|go) (?:over |down |towards? |close |near |above |straight "
        r"|directly )*(?:to|the|that|this)\b"
        rf"|{_THERE}|\bget (?:on )?over to\b"
        r"|\b(?:line up|lined up|align)(?: yourself)? (?:exactly )?with\b|\b(?:home|zero) in on\b",
    ),
)
SYNONYMS = frozenset(
    """
    snatch seize collect retrieve pluck hoist elevate scoop obtain contact tap navigate travel locate find head come drive
    container grip clasp clutch position align lower extend stretch keep send guide steer direct rest stop its end
    effector claw palm tool fingertip fingertips throw deposit transfer deliver stick release dump chuck pop stow store
    load insert slip shift lay dispose goes placed towards mind reaching touching picking lifting grasping grabbing fetching
    approaching hovering pointing putting placing dropping moving swing slide join meet use using needs clear top fall
    nab gather capture acquire pinch clamp procure heft extract remove catch pull draw haul heave hold grip
    bucket tub cubes blocks
    float glide drift fly cruise scoot sweep advance proceed park settle wait hang stand stay rest zero line lined yourself
    centre center poise lean going moving aim ease reposition relocate transport convey ferry lug cart shuttle plop plonk
    plunk tuck stash lodge slot file tidy clean ditch discard trash bung install nestle sink pitch fling lob feed lowering
    trashcan dustbin garbage rubbish receptacle manipulator pincer pincers snag secure cast yeet picked grabbed lifted grasped
    raised reached touched dropped moved brought fetched clamped
    holding upwards fill ee eef tcp jaw jaws throwing out
    carrying taking raising getting bringing hoisting tossing depositing delivering transferring
    """.split()  # noqa: SIM905
)
"""Words of these patterns that the bundled policy's training does not contain."""


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


TEMPLATES = {
    Verb.REACH: "reach the {a} cube",
    Verb.PICK: "pick up the {a} cube",
    Verb.PLACE: "place the {a} cube in the bin",
    Verb.STACK: "stack the {a} cube on the {b} cube",
}
"""Default wording of each task with cubes: ``{a}`` is the colour of the cube to move, ``{b}`` of
the one below it.
"""
LIFT_THE_BAR = "lift the bar with both hands"
HAND_OVER_THE_BAR = "hand the bar over from the left hand to the right hand"
BAR_SENTENCES = {Verb.LIFT: LIFT_THE_BAR, Verb.HAND_OVER: HAND_OVER_THE_BAR}
"""Default wording of what is done with a bar."""


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
    moved = _HAND.sub("reach", words)
    verbs = _WORDS if moved == words else _WORDS[1:]  # a hand on a cube is no stack
    verb = next((verb for verb, pattern in verbs if re.search(pattern, moved)), None)
    colours = re.findall(rf"\b({'|'.join(COLOURS)})\b", words)
    if re.search(_GIVE, words) and re.search(_BAR, words) and not colours:
        return Goal(Verb.HAND_OVER, "bar", to=_receiver(words))
    if verb is Verb.PICK and re.search(_BAR, words) and not colours:
        return Goal(Verb.LIFT, "bar")
    if verb is None or not colours:
        known = (
            "verbs reach, pick up, place in the bin, stack"
            if verb is None
            else f"cubes {', '.join(COLOURS)}"
        )
        raise InstructionError(
            f"instruction {text!r} names none of the {known}; try 'pick up the red cube'."
        )
    if verb is not Verb.STACK:
        return Goal(verb, f"cube_{colours[0]}")
    below = re.search(_ONTO, words)
    onto = (
        below.group(1)
        if below
        else next((colour for colour in colours if colour != colours[0]), colours[0])
    )
    cube = next((colour for colour in colours if colour != onto), onto)
    if cube == onto:
        raise InstructionError(
            f"instruction {text!r} names one cube; try 'stack the red cube on the blue cube'."
        )
    return Goal(verb, f"cube_{cube}", f"cube_{onto}")


def _receiver(words: str) -> str:
    """The hand that is to have the bar: the one after "to", or not the one after "from"."""
    if to := re.search(r"\bto (?:the |your )?(left|right)\b", words):
        return to.group(1)
    return "left" if re.search(r"\bfrom (?:the |your )?right\b", words) else "right"
