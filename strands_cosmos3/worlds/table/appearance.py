"""How a scene looks: the table's surface, the light and the cameras. Nothing here changes the
physics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, known_name, positive, within
from strands_cosmos3.errors import InputError
from strands_cosmos3.tables import from_tables, read_toml

RIGS = ("wide", "near")
_TEXTURE_PX = 512  # along each side of the table, about 2.6 mm a pixel
_FEATURE_PX = 19  # about 5 cm: what a wrist camera can follow from frame to frame
LARGEST_LIGHT = 10.0
LARGEST_OFFSET_M = 0.5


@dataclass(frozen=True)
class Surface:
    """The table's surface.

    Args:
        pattern: ``planks``, ``tiles``, ``checks``, ``stripes`` or ``clouds``.
        rgb: Its mean colour, in 0..1.
        contrast: Depth of the pattern, in 0..2: relative, and 1 for planks.
        seed: Of the pattern's random part.

    Raises:
        UnknownNameError, InputError: No such pattern, or a number outside its range.
    """

    pattern: str = "planks"
    rgb: tuple[float, float, float] = (0.80, 0.69, 0.55)
    contrast: float = 1.0
    seed: int = 7

    def __post_init__(self) -> None:
        known_name(self.pattern, "pattern", _PATTERNS)
        within(self.rgb, "a surface's rgb", 0, 1, (3,))
        within(self.contrast, "a surface's contrast", 0, 2, ())

    def texture(self) -> NDArray[np.uint8]:
        """Return the picture [512, 512, 3] that covers the table."""
        rng = np.random.default_rng(self.seed)
        shade = 1.0 + self.contrast * _PATTERNS[self.pattern](rng)
        return (np.clip(np.array(self.rgb) * shade[..., None], 0.0, 1.0) * 255).astype(np.uint8)


def _planks(rng: np.random.Generator) -> F64:
    """Wavy grain along the rows, planks across."""
    y, x = np.mgrid[0:_TEXTURE_PX, 0:_TEXTURE_PX] / _TEXTURE_PX
    planks = 6
    plank = np.minimum((y * planks).astype(int), planks - 1)
    phase = rng.uniform(0, 50, planks)[plank]
    wave = 0.35 * np.sin(2 * np.pi * (x + phase)) + 0.12 * np.sin(
        2 * np.pi * (3.0 * x + 2.3 * phase)
    )
    rings = np.sin(2 * np.pi * (9.0 * y * planks / 2 + 1.5 * wave + phase))
    fibre = rng.normal(0, 1, (_TEXTURE_PX, 16)).repeat(_TEXTURE_PX // 16, axis=1)
    fibre = np.stack([np.convolve(row, np.ones(65) / 65, mode="same") for row in fibre])
    tone = rng.normal(0, 0.016, planks)[plank]
    shade = 1.0 + 0.022 * rings + 0.05 * fibre + tone
    seam = np.abs(y * planks - np.round(y * planks)) < 0.012
    shade = np.where(seam & (y > 0.02) & (y < 0.98), shade * 0.86, shade)
    return shade - 1.0


def _tiles(rng: np.random.Generator) -> F64:
    """Squares of 5 cm, each of its own tone, with thin seams."""
    cell, within_px = np.divmod(np.arange(_TEXTURE_PX), _FEATURE_PX)
    tone = rng.uniform(-1, 1, (cell[-1] + 1, cell[-1] + 1))[np.ix_(cell, cell)]
    edge = within_px == 0
    return np.where(edge[:, None] | edge[None], -1.2, tone)


def _checks(rng: np.random.Generator) -> F64:
    """Squares of 5 cm, light and dark in turn."""
    cell = (np.arange(_TEXTURE_PX) + rng.integers(_FEATURE_PX)) // _FEATURE_PX
    return np.where((cell[:, None] + cell[None]) % 2 == 0, 1.0, -1.0)


def _stripes(rng: np.random.Generator) -> F64:
    """Stripes of about 5 cm at any angle, each with its own tone."""
    angle = rng.uniform(0, np.pi)
    y, x = np.mgrid[0:_TEXTURE_PX, 0:_TEXTURE_PX]
    along = (x * np.cos(angle) + y * np.sin(angle)) / _FEATURE_PX
    return rng.uniform(-1, 1, 128)[along.astype(int) % 128]


def _clouds(rng: np.random.Generator) -> F64:
    """Smooth blots of 4 to 12 cm."""
    return 0.7 * _smooth_noise(rng, 2 * _FEATURE_PX) + 0.5 * _smooth_noise(rng, _FEATURE_PX)


def _smooth_noise(rng: np.random.Generator, spacing_px: int) -> F64:
    """Normal noise on a grid, interpolated between its points."""
    grid = rng.normal(0, 1, (_TEXTURE_PX // spacing_px + 3,) * 2)
    at = np.arange(_TEXTURE_PX) / spacing_px
    cell = at.astype(int)
    part = at % 1
    part = part * part * (3 - 2 * part)
    rows = grid[cell] * (1 - part)[:, None] + grid[cell + 1] * part[:, None]
    return rows[:, cell] * (1 - part) + rows[:, cell + 1] * part


_PATTERNS = {
    "planks": _planks,
    "tiles": _tiles,
    "checks": _checks,
    "stripes": _stripes,
    "clouds": _clouds,
}

PATTERNS = tuple(_PATTERNS)

TABLES: Mapping[str, Surface] = MappingProxyType(
    from_tables(Surface, read_toml(Path(__file__).with_name("surfaces.toml")))
)
"""Tables by name."""


@dataclass(frozen=True)
class Appearance:
    """How a scene looks.

    Args:
        table: One of :data:`TABLES`, or a surface of your own.
        rig: Where the outer cameras look: ``wide`` shows the whole arm, ``near`` the hand and the
            cubes.
        light: Factor on all lights.
        wrist_offset_m: [3] displacement of the wrist camera in the hand's frame.

    Raises:
        UnknownNameError, InputError: No such table or rig, or a number outside its range.
    """

    table: str | Surface = "wood"
    rig: str = "wide"
    light: float = 1.0
    wrist_offset_m: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if isinstance(self.table, str):
            known_name(self.table, "table", TABLES)
        known_name(self.rig, "rig", RIGS)
        if positive(self.light, "light") > LARGEST_LIGHT:
            raise InputError(f"light is a factor of at most {LARGEST_LIGHT:g}, got {self.light:g}.")
        within(self.wrist_offset_m, "wrist_offset_m", -LARGEST_OFFSET_M, LARGEST_OFFSET_M, (3,))

    @property
    def surface(self) -> Surface:
        """The table's surface."""
        return TABLES[self.table] if isinstance(self.table, str) else self.table


NOMINAL = Appearance()
"""Of scenes whose views are not the DROID rig's; see
:func:`~strands_cosmos3.sim.scene_builder.nominal`.
"""
