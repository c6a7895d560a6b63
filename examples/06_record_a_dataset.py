"""Record two rollouts as a LeRobot v3 dataset, and read it back.

    python examples/06_record_a_dataset.py [FOLDER]   # needs pip install -e '.[sim,data]'

The folder is what `LeRobotDataset(..., root=FOLDER)` reads too. Run it again with the same folder
and the episodes are added.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

try:
    import mink  # noqa: F401
    import pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[data,sim]'") from None
import numpy as np

from strands_cosmos3 import Robot, decode_pose_trajectory
from strands_cosmos3.actions.rotations import quaternion_to_matrix, se3
from strands_cosmos3.datasets import ACTION, EE_POSE, Dataset, DatasetWriter, camera_key
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec


def record(folder: Path) -> None:
    robot = Robot("panda")
    with DatasetWriter(folder, rollout_spec()) as writer:
        for seed, colour in enumerate(("red", "green")):
            robot.run_policy(
                instruction=f"reach the {colour} cube",
                policy_config={"embodiment": "droid", "backend": "scripted"},
                task="reach",
                seed=seed,
                recorder=RolloutRecorder(writer),
            )


def look_at(folder: Path) -> None:
    with Dataset(folder) as dataset:
        print(
            f"{len(dataset)} episodes, {dataset.n_frames} frames at {dataset.fps} Hz, "
            f"{', '.join(dataset.spec.cameras)}"
        )
        for episode in dataset:
            pose, rows = episode[EE_POSE][0], episode[ACTION]
            start = se3(quaternion_to_matrix(pose[3:]), pose[:3])
            # the rows, integrated from frame 0
            commanded = decode_pose_trajectory(rows[:, :9], start)[:-1, :3, 3]
            off_mm = 1e3 * np.linalg.norm(commanded - episode[EE_POSE][:, :3], axis=1)
            # two frames; only these are decoded
            seen = episode.frames(camera_key("wrist"), [0, -1 + len(episode)])
            print(
                f"  {episode.task!r}: {len(episode)} frames, {episode.note['outcome']}; the arm "
                "was within "
                f"{off_mm.max():.1f} mm of the rows' path; wrist {seen.shape[1]}x{seen.shape[2]}, "
                f"changed by {np.abs(seen[1].astype(int) - seen[0]).mean():.0f} of 255"
            )
        slowest, fastest = (
            dataset.stats[ACTION]["q01"][:3] * 1e3,
            dataset.stats[ACTION]["q99"][:3] * 1e3,
        )
        print(
            "  translations a row, q01..q99:",
            ", ".join(f"{a:.1f}..{b:.1f} mm" for a, b in zip(slowest, fastest, strict=True)),
        )


with TemporaryDirectory() as scratch:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else scratch) / "reach"
    record(place)
    look_at(place)
