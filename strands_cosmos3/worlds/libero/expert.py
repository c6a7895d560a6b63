"""A scripted expert for ``libero_object`` and its variants: it puts the object that the instruction
names into the basket.

It is a backend that reads the simulator's state and answers single rows of the ``libero`` domain,
normalised as a checkpoint's, so that its success depends on the whole convention of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np

from strands_cosmos3.actions.controller_rows import UNIT_M, UNIT_RAD, normalize_actions
from strands_cosmos3.actions.rotations import so3_log
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.checks import F64
from strands_cosmos3.errors import BackendError, InstructionError
from strands_cosmos3.types import ActionChunk, Request
from strands_cosmos3.worlds.libero.protocol import CLOSE, OPEN
from strands_cosmos3.worlds.libero.simulation import TCP

BASKET = "basket"
_FINGERS_DOWN = np.diag([1.0, -1.0, -1.0])  # at yaw 0
_GAIN = 2.0  # the controller's goal lies this far ahead, because it never arrives
_CLEAR_M = 0.10  # height above objects
# below the object's top, but this far above its lowest point
_GRASP_DEPTH_M = 0.035
_FLOOR_M = 0.012
_ABOVE_WITHIN_M = 0.012
_DOWN_WITHIN_M = 0.006
_BASKET_WITHIN_M = 0.020
_CLOSE_STEPS = 12
_DOWN_STEPS = 25
_OPEN_STEPS = 15
_LOST_M = 0.08  # a held object is no further than this from the fingers


class Phase(IntEnum):
    """What the hand is doing, in order."""

    ABOVE, DOWN, CLOSE, LIFT, ACROSS, OPEN = range(6)


class LiberoExpert(Backend):
    """Answers one row at a time from the state; it begins anew if it loses the object."""

    info = BackendInfo(
        name="scripted", needs_privileged=True, requires_images=False, replan_rows=1, chunk_rows=1
    )

    def __init__(self) -> None:
        self.phase = Phase.ABOVE
        self._steps = 0

    def reset(self, seed: int | None = None) -> None:
        """Begin a new episode."""
        self._enter(Phase.ABOVE)

    def infer(self, request: Request) -> ActionChunk:
        """Return the next row.

        Raises:
            BackendError: The request has no privileged state.
            InstructionError: The instruction names no object of the scene, or there is no basket.
        """
        if request.privileged is None:
            raise BackendError(
                "the scripted LIBERO expert needs the simulator's state, and the request has none."
            )
        action = self.act(request.privileged, request.instruction)
        return ActionChunk(
            normalize_actions(action[None]),
            request.action_space,
            request.embodiment,
            seed=request.seed,
        )

    def act(self, state: Mapping[str, F64], instruction: str) -> F64:
        """Return the next action [7] for a state as :func:`.simulation.privileged` returns
        it. Errors as :meth:`infer`.
        """
        scene = {name: extent for name, extent in state.items() if name != TCP}
        item = scene[named_object(instruction, scene)]
        basket = scene[_basket(scene)]
        p = state[TCP][:3, 3]
        R = state[TCP][:3, :3]
        self._advance(p, item, basket)
        target = self._target(p, item, basket)
        move = np.clip(_GAIN * (target - p) / UNIT_M, -1, 1)
        turn = np.clip(so3_log(_FINGERS_DOWN @ R.T) / UNIT_RAD, -1, 1)
        self._steps += 1
        closed = Phase.CLOSE <= self.phase < Phase.OPEN
        return np.concatenate((move, turn, [CLOSE if closed else OPEN]))

    def _target(self, p: F64, item: F64, basket: F64) -> F64:
        """Return where the hand should go [3]."""
        centre = item.mean(0)
        top = item[1, 2]
        bottom = item[0, 2]
        grasp = np.array([*centre[:2], max(bottom + _FLOOR_M, top - _GRASP_DEPTH_M)])
        carry = basket[1, 2] + (top - bottom) + _CLEAR_M
        if self.phase is Phase.ABOVE:
            return np.array([*centre[:2], top + _CLEAR_M])
        if self.phase in (Phase.DOWN, Phase.CLOSE):
            return grasp
        if self.phase is Phase.LIFT:
            return np.array([*p[:2], carry])
        # the object, not the hand, over the basket
        return np.array([*(p + basket.mean(0) - centre)[:2], carry])

    def _advance(self, p: F64, item: F64, basket: F64) -> None:
        """Enter the next phase if the present one is done."""
        phase = self.phase
        centre = item.mean(0)
        steps = self._steps
        off_m = np.linalg.norm(self._target(p, item, basket) - p)
        aside_m = np.linalg.norm((basket.mean(0) - centre)[:2])
        is_done = {
            Phase.ABOVE: off_m < _ABOVE_WITHIN_M,
            Phase.DOWN: off_m < _DOWN_WITHIN_M or steps >= _DOWN_STEPS,
            Phase.CLOSE: steps >= _CLOSE_STEPS,
            Phase.LIFT: item[0, 2] > basket[1, 2] + _FLOOR_M,
            Phase.ACROSS: aside_m < _BASKET_WITHIN_M,
            Phase.OPEN: steps >= _OPEN_STEPS,
        }
        carries = Phase.CLOSE < phase < Phase.OPEN
        if carries and np.linalg.norm(centre - p) > _LOST_M + np.ptp(item[:, 2]) / 2:
            self._enter(Phase.ABOVE)
        elif is_done[phase]:
            self._enter(Phase((phase + 1) % len(Phase)))

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._steps = 0


def named_object(instruction: str, scene: Mapping[str, F64]) -> str:
    """Return the object of a scene that an instruction names: the one with the most words of its
    name's end in it.

    So ``red_cream_cheese_1`` of a variant is "the cream cheese". InstructionError if nothing is
    named.
    """
    text = f" {instruction.lower()} "
    names = {name: name.rsplit("_", 1)[0].split("_") for name in scene if BASKET not in name}
    length = {
        name: max(
            (n for n in range(1, len(words) + 1) if f" {' '.join(words[-n:])} " in text), default=0
        )
        for name, words in names.items()
    }
    match = max(length, key=lambda name: (length[name], -len(names[name])), default="")
    if not length.get(match):
        objects = ", ".join(" ".join(words) for words in names.values())
        raise InstructionError(
            f"the LIBERO expert puts an object into the basket; {instruction!r:.200} names "
            f"none of: {objects}."
        )
    return match


def _basket(scene: Mapping[str, F64]) -> str:
    baskets = [name for name in scene if BASKET in name]
    if not baskets:
        raise InstructionError(
            f"the scripted LIBERO expert needs a basket; the scene has {', '.join(scene)}."
        )
    return baskets[0]
