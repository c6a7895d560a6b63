"""A rollout as a Rerun recording (.rrd): the hand's paths and poses, joints, gripper and
tracking error over simulated time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.extras import needed_by
from strands_cosmos3.sim.plot import hands_of
from strands_cosmos3.types import Rollout

_COLOURS = {"commanded": (246, 140, 40), "achieved": (40, 150, 235)}
_EVERY = 6  # physics steps from one row to the next: 100 Hz


def save_rrd(rollout: Rollout, path: str | Path) -> None:
    """Write a rollout as a Rerun recording; open it with ``rerun FILE``.

    Entities: ``world/commanded`` and ``world/achieved`` (the hand's pose, and its path),
    ``joints/<joint>/<which>`` [rad], ``gripper/<which>`` (open fraction), ``tracking_mm`` and
    ``about``; the timeline is ``time``, in simulated seconds. Of several limbs they are
    ``world/<limb>/...``, ``gripper/<limb>/...`` and ``tracking_mm/<limb>``.

    Raises:
        MissingDependencyError: rerun-sdk is not installed.
        InputError: ``rollout`` is no rollout, or ``path`` is no path.
    """
    with needed_by("a Rerun recording"):
        import rerun as rr  # pyright: ignore[reportMissingImports]
    arrays = rollout.arrays
    rows = slice(None, None, _EVERY)
    recording = rr.RecordingStream(
        "strands_cosmos3", recording_id=f"{rollout.instruction or 'replay'}-{rollout.seed}"
    )
    recording.save(str(path))
    time = [rr.TimeColumn("time", duration=arrays["t_s"][rows])]
    recording.log("world", rr.ViewCoordinates.RIGHT_HAND_Z_UP, static=True)
    about = (
        f"{rollout.instruction or 'replay'}: {rollout.outcome}, seed {rollout.seed}, "
        f"{rollout.duration_s:.2f} s"
    )
    recording.log("about", rr.TextDocument(about), static=True)
    hands = hands_of(arrays)

    def send(entity: str, values: NDArray[Any]) -> None:
        columns = rr.Scalars.columns(scalars=values)
        recording.send_columns(entity, indexes=time, columns=columns)

    for limb, hand in hands.items():
        of = f"{limb}/" if limb else ""
        for poses, (which, colour) in zip(hand, _COLOURS.items(), strict=True):
            T = poses[rows]
            line = rr.LineStrips3D([T[:, :3, 3]], colors=[colour])
            recording.log(f"world/{of}path_{which}", line, static=True)
            pose = rr.Transform3D.columns(translation=T[:, :3, 3], mat3x3=T[:, :3, :3])
            recording.send_columns(f"world/{of}{which}", indexes=time, columns=pose)
        commanded, achieved = hand
        off = achieved[rows, :3, 3] - commanded[rows, :3, 3]
        send(f"tracking_mm/{limb}".rstrip("/"), np.linalg.norm(off, axis=1) * 1e3)
    for which in _COLOURS:
        for joint, angles in enumerate(arrays[f"q_{which}_rad"][rows].T, 1):
            send(f"joints/joint{joint}/{which}", angles)
        openings = np.atleast_2d(arrays[f"gripper_{which}"][rows].T)
        for limb, opening in zip(hands if len(openings) > 1 else [""], openings, strict=True):
            send(f"gripper/{limb}/{which}".replace("//", "/"), opening)
    recording.flush()
    recording.disconnect()
