"""What the file of a robot's model states of a whole simulation: a scene has its own.

A model's file is the description of an arm, and it usually is a simulation as well: it has a
solver, gravity, a visual style and memory of its own. Put into a scene, they would act on all that
stands there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mujoco
import numpy as np

_UNSET = -1
_SIZES = ("memory", "njmax", "nconmax", "nstack")
_INERTIA_BY_FILE = 1  # inertiafromgeom="true": stated inertias are ignored
_INERTIA_AUTO = 2
_IGNORED = ("timestep", "integrator")
"""Options that every scene sets; a file states them for its own simulation."""
_NO_FIELDS = ("classname", "compiler", "frame", "id", "parent", "signature")
"""Of a part of a specification: what it is, not what it states."""


def leave_settings_out(spec: mujoco.MjSpec) -> None:
    """Take from a file's specification what is no part of its robot: options, sizes, visual style,
    and the defaults and compiler settings that things would get that are added to it.
    """
    plain = mujoco.MjSpec()
    for kind in filter(str.isalpha, dir(plain.default)):
        if kind != "name":
            defaults = getattr(spec.default, kind)
            for name, value in _differences(getattr(plain.default, kind), defaults):
                setattr(defaults, name, value)  # what the file has, has had its own
    spec.option = plain.option
    spec.visual = plain.visual
    spec.stat = plain.stat
    for name in _SIZES:
        setattr(spec, name, _UNSET)
    # a URDF's, which would remove finger pads and what is only seen
    spec.compiler.fusestatic = spec.compiler.discardvisual = False
    _settle_inertias(spec)


def _settle_inertias(spec: mujoco.MjSpec) -> None:
    """Write the masses that the file's compiler settings result in into its bodies, so that nothing
    else gets them.
    """
    compiler = spec.compiler
    bounds = (compiler.settotalmass, compiler.boundmass, compiler.boundinertia)
    if max(bounds) <= 0 and compiler.inertiafromgeom != _INERTIA_BY_FILE:
        return
    alone = spec.copy()
    model = alone.compile()
    for body, compiled in zip(spec.bodies[1:], alone.bodies[1:], strict=True):
        body.mass = model.body_mass[compiled.id]
        body.inertia = model.body_inertia[compiled.id]
        body.fullinertia = np.full(6, np.nan)
        body.ipos = model.body_ipos[compiled.id]
        body.iquat = model.body_iquat[compiled.id]
        body.explicitinertial = True
    compiler.settotalmass = _UNSET
    compiler.boundmass = compiler.boundinertia = 0.0
    compiler.inertiafromgeom = _INERTIA_AUTO


def settings_left_out(spec: mujoco.MjSpec, of_scene: Any) -> list[str]:
    """Return the options and sizes that a file's specification states and a scene does not take
    over, e.g. ``"iterations 5"``. ``of_scene`` are the scene's options; what they have as well is
    not listed.
    """
    plain = mujoco.MjSpec()
    stated = [
        f"{name} {value}"
        for name, value in _differences(spec.option, plain.option)
        if name not in _IGNORED and not np.array_equal(value, getattr(of_scene, name))
    ]
    return stated + [f"size {name}" for name in _SIZES if getattr(spec, name) != _UNSET]


def _differences(part: Any, other: Any) -> Iterator[tuple[str, Any]]:
    """The numbers, texts and enumerations of a part of a specification that another has otherwise,
    by name.
    """
    for name in dir(part):
        if name.startswith("_") or name in _NO_FIELDS:
            continue
        value = getattr(part, name)
        if isinstance(value, np.ndarray):
            if not np.array_equal(value, getattr(other, name), equal_nan=True):
                yield name, value
        elif isinstance(value, int | float | str) or hasattr(type(value), "__members__"):
            before = getattr(other, name)
            if value != before and not (value != value and before != before):  # two NaN
                yield name, value
