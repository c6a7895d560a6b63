"""The settings of LIBERO's protocol, each with its source; where published evaluations differ,
both are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from strands_cosmos3.checks import known_name, whole_number
from strands_cosmos3.observe.prompts import LIBERO_CAPTIONS, LiberoCaption

CONTROL_HZ = 20
"""Steps per second; a step is 25 physics steps of 2 ms (robosuite 1.4.0, LIBERO's
``ControlEnv``).
"""
OPEN = -1.0
CLOSE = 1.0
"""The gripper's command; 0 holds (robosuite's ``PandaGripper.format_action``)."""


@dataclass(frozen=True)
class LiberoConfig:
    """How episodes are run.

    Args:
        wait_steps: Steps without motion before the first action, in which objects fall into place.
            10: cosmos-framework ``closed_loop_eval.py`` 664-671, openpi ``main.py`` 37, lerobot
            ``envs/libero.py``.
        wait_counts: Whether they count towards the horizon. cosmos-framework: yes (664-671);
            openpi: no (104).
        picture_px: Edge of the square pictures. 256: all three.
        caption: For models in this process: the ``checkpoint``'s own caption of the clip, or
            NVIDIA's JSON, with the sentence about the views' layout where its server leaves it (in
            ``description``) or where training has it (in ``framing``).

    Raises:
        InputError, UnknownNameError: A value is invalid.
    """

    wait_steps: int = 10
    wait_counts: bool = False
    picture_px: int = 256
    caption: LiberoCaption = "checkpoint"

    def __post_init__(self) -> None:
        whole_number(self.wait_steps, "wait_steps", 0, 200)
        whole_number(self.picture_px, "picture_px", 16, 1024)
        known_name(self.caption, "caption", LIBERO_CAPTIONS)

    def steps(self, horizon: int) -> int:
        """Return the most actions of an episode with that horizon."""
        return horizon - self.wait_steps if self.wait_counts else horizon


PROTOCOLS: Mapping[str, LiberoConfig] = MappingProxyType(
    {"openpi": LiberoConfig(), "nvidia": LiberoConfig(wait_counts=True, caption="nvidia_server")}
)
"""Whole protocols by name."""
DEFAULT_PROTOCOL = "openpi"


def get_protocol(name: str) -> LiberoConfig:
    """Return the protocol of that name; UnknownNameError lists the protocols."""
    return PROTOCOLS[known_name(name, "LIBERO protocol", PROTOCOLS)]
