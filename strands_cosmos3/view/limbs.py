"""A robot's limbs on the page: every joint by name, with its position in its range, and the
grippers.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.sim.scene import Scene


@dataclass(frozen=True)
class Gauge:
    """A figure on the page.

    Args:
        name: Of the joint or gripper.
        value: The figure as text, with its unit.
        filled: Where it lies in its range, 0 to 1; None if the range is not known.
    """

    name: str
    value: str
    filled: float | None


@dataclass(frozen=True)
class LimbState:
    """Joints of a limb, base first, and its gripper."""

    name: str
    gauges: tuple[Gauge, ...]


def limb_states(scene: Scene, q_rad: F64, gripper: float | F64) -> list[LimbState]:
    """Return the state of each limb: joint positions [n] of all limbs, and an open fraction, or
    those [G] of several.
    """
    states: list[LimbState] = []
    for (name, limb), opened in zip(
        scene.limbs.items(), np.atleast_1d(gripper).tolist(), strict=True
    ):
        joints = zip(limb.limb.joints, q_rad[limb.columns].tolist(), strict=True)
        gauges = [_joint(scene.model, joint, q) for joint, q in joints]
        states.append(
            LimbState(name, (*gauges, Gauge("gripper", f"{100 * opened:.0f} % open", opened)))
        )
    return states


def _joint(model: mujoco.MjModel, name: str, q: float) -> Gauge:
    joint = model.joint(name).id
    low, high = model.jnt_range[joint].tolist()
    filled = (q - low) / (high - low) if model.jnt_limited[joint] and high > low else None
    slides = model.jnt_type[joint] == int(mujoco.mjtJoint.mjJNT_SLIDE)
    return Gauge(name, f"{1e3 * q:.1f} mm" if slides else f"{np.rad2deg(q):.1f}°", filled)


def limbs_html(limbs: Sequence[LimbState]) -> str:
    """Return the limbs side by side, each a column of gauges under its name."""
    columns = "".join(_column(limb) for limb in limbs)
    return (
        '<div id="limbs" style="display:flex;gap:16px;padding:2px 10px 8px;font-size:12px;'
        f'line-height:1.35">{columns}</div>'
    )


def _column(limb: LimbState) -> str:
    return (
        '<div style="flex:1;min-width:0"><div '
        f'style="font-weight:600;margin-bottom:2px">{html.escape(limb.name)}</div>'
        + "".join(map(_row, limb.gauges))
        + "</div>"
    )


def _row(gauge: Gauge) -> str:
    """A name, a figure, and below them a bar that marks where in its range it lies."""
    mark = ""
    if gauge.filled is not None:
        at = 100 * min(max(gauge.filled, 0.0), 1.0)
        mark = (
            '<div style="height:3px;background:rgba(128,128,128,.25);border-radius:2px;'
            'margin-bottom:2px">'
            f'<div style="position:relative;left:calc({at:.1f}% - '
            '3px);width:6px;height:3px;background:#2b7fd0"></div></div>'
        )
    name = html.escape(gauge.name)
    return (
        f'<div style="display:flex;justify-content:space-between;gap:6px" title="{name}">'
        '<span style="opacity:.75;overflow:hidden;text-overflow:ellipsis;white-space:nowrap">'
        f"{name}</span>"
        '<span style="font-variant-numeric:tabular-nums;white-space:nowrap">'
        f"{html.escape(gauge.value)}</span></div>{mark}"
    )
