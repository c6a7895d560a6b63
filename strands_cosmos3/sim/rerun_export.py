"""A rollout as a Rerun recording (.rrd): the hand's paths and poses, joints, gripper and tracking error over simulated time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from strands_cosmos3.checks import typed
from strands_cosmos3.extras import needed_by
from strands_cosmos3.types import Rollout

_COLOURS = {"commanded": (246, 140, 40), "achieved": (40, 150, 235)}
_EVERY = 6  # physics steps from one row to the next: 100 Hz


@typed()
def save_rrd(rollout: Rollout, path: str | Path) -> None:
    """Write a rollout as a Rerun recording; open it with ``rerun FILE``.

    Entities: ``world/commanded`` and ``world/achieved`` (the hand's pose, and its path), ``joints/<joint>/<which>`` [rad],
    ``gripper/<which>`` (open fraction), ``tracking_mm`` and ``about``; the timeline is ``time``, in simulated seconds.

    Raises:
        MissingDependencyError: rerun-sdk is not installed.
        InputError: ``rollout`` is no rollout, or ``path`` is no path.
    """
    with needed_by("a Rerun recording"):
        import rerun as rr  # pyright: ignore[reportMissingImports]
    arrays = rollout.arrays
    rows = slice(None, None, _EVERY)
    recording = rr.RecordingStream("strands_cosmos3", recording_id=f"{rollout.instruction or 'replay'}-{rollout.seed}")
    recording.save(str(path))
    time = [rr.TimeColumn("time", duration=arrays["t_s"][rows])]
    recording.log("world", rr.ViewCoordinates.RIGHT_HAND_Z_UP, static=True)
    about = f"{rollout.instruction or 'replay'}: {rollout.outcome}, seed {rollout.seed}, {rollout.duration_s:.2f} s"
    recording.log("about", rr.TextDocument(about), static=True)
    for which, colour in _COLOURS.items():
        T = arrays[f"T_base_hand_{which}"][rows]
        recording.log(f"world/path_{which}", rr.LineStrips3D([T[:, :3, 3]], colors=[colour]), static=True)
        pose = rr.Transform3D.columns(translation=T[:, :3, 3], mat3x3=T[:, :3, :3])
        recording.send_columns(f"world/{which}", indexes=time, columns=pose)
        for k in range(arrays[f"q_{which}_rad"].shape[1]):
            angle = rr.Scalars.columns(scalars=arrays[f"q_{which}_rad"][rows, k])
            recording.send_columns(f"joints/joint{k + 1}/{which}", indexes=time, columns=angle)
        opening = rr.Scalars.columns(scalars=arrays[f"gripper_{which}"][rows])
        recording.send_columns(f"gripper/{which}", indexes=time, columns=opening)
    off = arrays["T_base_hand_achieved"][rows, :3, 3] - arrays["T_base_hand_commanded"][rows, :3, 3]
    tracking = rr.Scalars.columns(scalars=np.linalg.norm(off, axis=1) * 1e3)
    recording.send_columns("tracking_mm", indexes=time, columns=tracking)
    recording.flush()
    recording.disconnect()
