"""Plots of rollouts (commanded and achieved motion) and of learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import pose_distances
from strands_cosmos3.extras import needed_by
from strands_cosmos3.types import Rollout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_rollout(rollout: Rollout, path: Path) -> None:
    """Plot hand position, joint angles, gripper and tracking error of a rollout with trajectories
    over time; the path's suffix selects the format. MissingDependencyError without matplotlib.
    """
    arrays = rollout.arrays
    t = rollout.arrays["t_s"]
    figure = _page(11, 9)
    axes = figure.subplots(4, 1, sharex=True)
    _plot_curves(axes, arrays)
    for axis in axes:
        axis.grid(alpha=0.25)
        for change_s in t[1:][np.diff(arrays["chunk"]) > 0]:
            axis.axvline(change_s, color="0.8", lw=0.6, zorder=0)
    title = rollout.instruction or "replay"
    figure.suptitle(
        f"{title}: {rollout.outcome}, seed {rollout.seed} (thin verticals: a new chunk)",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)


def hands_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return the commanded and achieved poses of each limb in a rollout's arrays; the name of an
    only limb is empty.
    """
    first = "T_base_hand_commanded"
    names = [key.removeprefix(first) for key in arrays if key.startswith(first)]
    return {
        name.removeprefix("_"): (arrays[first + name], arrays[f"T_base_hand_achieved{name}"])
        for name in names
    }


def _plot_curves(axes: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
    t = arrays["t_s"]
    hands = hands_of(arrays)

    def compare(axis: Any, commanded: Any, achieved: Any, label: str, color: Any = None) -> None:
        (line,) = axis.plot(t, achieved, lw=1.3, color=color, label=label.strip())
        axis.plot(t, commanded, "--", lw=1.0, color=line.get_color())

    for limb, (commanded, achieved) in hands.items():
        for i, color in enumerate(("tab:red", "tab:green", "tab:blue")):
            compare(axes[0], commanded[:, i, 3], achieved[:, i, 3], f"{limb} {'xyz'[i]}", color)
    joints = zip(arrays["q_commanded_rad"].T, arrays["q_achieved_rad"].T, strict=True)
    for joint, (commanded, achieved) in enumerate(joints, 1):
        compare(axes[1], commanded, achieved, f"joint{joint}")
    openings = (np.atleast_2d(arrays[f"gripper_{which}"].T) for which in ("commanded", "achieved"))
    for limb, commanded, achieved in zip(hands, *openings, strict=False):
        compare(axes[2], commanded, achieved, f"{limb} gripper")
    for limb, (commanded, achieved) in hands.items():
        distance_m, angle_rad = pose_distances(commanded, achieved)
        for error, unit in (
            (distance_m * 1e3, "position [mm]"),
            (np.rad2deg(angle_rad) * 10, "rotation [0.1 deg]"),
        ):
            axes[3].plot(t, error, lw=1.0, label=f"{limb} {unit}".strip())
    labels = "hand, base frame [m]", "joints [rad]", "gripper\nopen fraction", "tracking error"
    for axis, label in zip(axes, labels, strict=True):
        axis.set_ylabel(label)
        axis.legend(ncols=7, loc="upper right", fontsize=7)
    axes[3].set_xlabel("simulated time [s]; dashed: commanded")


def plot_learning(curves: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Plot learning curves, one panel for each stage; the path's suffix selects the format.

    ``curves``: stage -> points, each with ``step`` and further numbers. MissingDependencyError
    without matplotlib.
    """
    shown = {stage: points for stage, points in curves.items() if points}
    figure = _page(9, 2.6 * max(1, len(shown)))
    axes = np.atleast_1d(figure.subplots(max(1, len(shown)), 1))
    for axis, (stage, points) in zip(axes, shown.items(), strict=False):
        steps = [point["step"] for point in points]
        names = dict.fromkeys(
            name for point in points for name in point if name not in ("step", "time", "windows")
        )
        for name in names:
            values = [point.get(name, np.nan) for point in points]
            marker = "." if len(points) < 20 else None
            axis.plot(steps, values, lw=1.1, label=name, marker=marker)
        if all(point.get(name, 1) > 0 for point in points for name in names):  # success may be 0
            axis.set_yscale("log")
        axis.set_title(stage, fontsize=10, loc="left")
        axis.legend(fontsize=8, ncols=6)
        axis.grid(alpha=0.25)
    axes[-1].set_xlabel("optimiser steps")
    figure.savefig(path, dpi=110)


def _page(width_in: float, height_in: float) -> Figure:
    with needed_by("a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
