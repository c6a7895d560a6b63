"""Writes droid_golden_rows.json from the recorded DROID episode, without one line of this package:
plain trigonometry.

python tests/assets/make_droid_golden_rows.py PATH/droid_episode_48330.json
PATH/droid_lerobot_stats.json
"""

import json
import sys
from pathlib import Path

import numpy as np

FIRST, ROWS = 38, 6


def pose(raw):
    """Raw DROID pose (panda_link8: x y z, extrinsic xyz Euler) -> the Cosmos frame's, link8
    Rz(+90 deg).
    """
    x, y, z, a, b, c = raw
    Rx = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    Ry = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
    Rz = np.array([[np.cos(c), -np.sin(c), 0], [np.sin(c), np.cos(c), 0], [0, 0, 1]])
    quarter_turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    return Rz @ Ry @ Rx @ quarter_turn, np.array([x, y, z])


def row(before, after, wire_gripper, q01, q99):
    (R0, p0), (R1, p1) = pose(before), pose(after)
    R = R0.T @ R1
    values = [
        *(R0.T @ (p1 - p0)),
        R[0, 0],
        R[1, 0],
        R[2, 0],
        R[0, 1],
        R[1, 1],
        R[2, 1],
        1 - wire_gripper,
    ]
    return [2 * (a - low) / (high - low) - 1 for a, low, high in zip(values, q01, q99, strict=True)]


def main(episode_path, stats_path):
    episode = json.loads(Path(episode_path).read_text())
    stats = json.loads(Path(stats_path).read_text())
    raw = episode["cartesian_position_xyz_eulerxyz"][FIRST : FIRST + ROWS + 1]
    wire = episode["gripper_action"][FIRST : FIRST + ROWS]
    lines = {
        "source": episode["source"],
        "made_by": "make_droid_golden_rows.py: plain trigonometry, independent of strands_cosmos3",
        "legend": "rows[i] leads from raw pose i to i + 1, with wire_gripper[i]; "
        "quantile-normalised midtrain columns",
        "frame_of_raw_poses": "panda_link8 in the base: x y z [m], extrinsic xyz Euler [rad]; "
        "Cosmos = link8 Rz(+90)",
        "gripper_polarity": "wire: 1 = closed",
        "first_frame": FIRST,
        "raw_poses": raw,
        "wire_gripper": wire,
        "rows": [
            row(a, b, g, stats["q01"], stats["q99"])
            for a, b, g in zip(raw, raw[1:], wire, strict=False)
        ],
    }
    body = ",\n".join(f"  {json.dumps(key)}: {_lines(value)}" for key, value in lines.items())
    Path(__file__).with_name("droid_golden_rows.json").write_text("{\n" + body + "\n}\n")


def _lines(value):
    if isinstance(value, list) and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
