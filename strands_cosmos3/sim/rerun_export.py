"""A rollout as a Rerun recording (.rrd): the hand's paths and poses, joints, gripper and
tracking error over simulated time.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np

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
    for (i, (which, colour)), (limb, poses) in product(enumerate(_COLOURS.items()), hands.items()):
        T, of = poses[i][rows], f"{limb}/" if limb else ""
        recording.log(
            f"world/{of}path_{which}", rr.LineStrips3D([T[:, :3, 3]], colors=[colour]), static=True
        )
        pose = rr.Transform3D.columns(translation=T[:, :3, 3], mat3x3=T[:, :3, :3])
        recording.send_columns(f"world/{of}{which}", indexes=time, columns=pose)
    for which in _COLOURS:
        for k in range(arrays[f"q_{which}_rad"].shape[1]):
            angle = rr.Scalars.columns(scalars=arrays[f"q_{which}_rad"][rows, k])
            recording.send_columns(f"joints/joint{k + 1}/{which}", indexes=time, columns=angle)
        grippers = np.atleast_2d(arrays[f"gripper_{which}"][rows].T)
        for name, opening in zip(hands if len(grippers) > 1 else [""], grippers, strict=True):
            columns = rr.Scalars.columns(scalars=opening)
            recording.send_columns(
                f"gripper/{name}/{which}".replace("//", "/"), indexes=time, columns=columns
            )
    for limb, (commanded, achieved) in hands.items():
        off = achieved[rows, :3, 3] - commanded[rows, :3, 3]
        tracking = rr.Scalars.columns(scalars=np.linalg.norm(off, axis=1) * 1e3)
        recording.send_columns(f"tracking_mm/{limb}".rstrip("/"), indexes=time, columns=tracking)
    recording.flush()
    recording.disconnect()
