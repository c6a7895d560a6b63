"""A Rerun recording read back with Rerun's own reader: the rollout's figures, at the rollout's
times.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strands_cosmos3.cli import main
from strands_cosmos3.worlds.arms import Robot

pytestmark = pytest.mark.slow  # with `make test-docs`, which installs rerun-sdk


def test_a_recording_holds_the_rollout(tmp_path: Path):
    reader = pytest.importorskip("rerun.chunk").RrdReader
    from strands_cosmos3.sim.rerun_export import save_rrd

    rollout = Robot().run_policy(
        policy_config={"backend": "scripted"}, instruction="reach the red cube", duration=0.4
    )
    save_rrd(rollout, tmp_path / "a.rrd")
    batches = {
        str(chunk.entity_path): chunk.to_record_batch()
        for chunk in reader(tmp_path / "a.rrd").stream().to_chunks()
    }
    assert {
        "/world/commanded",
        "/world/achieved",
        "/joints/joint7/achieved",
        "/gripper/commanded",
        "/about",
    } <= batches.keys()
    t_s, arrays = rollout.arrays["t_s"][::6], rollout.arrays
    for entity, wanted in (
        ("/joints/joint4/achieved", arrays["q_achieved_rad"][::6, 3]),
        ("/joints/joint2/commanded", arrays["q_commanded_rad"][::6, 1]),
        ("/gripper/achieved", arrays["gripper_achieved"][::6]),
    ):
        batch = batches[entity]
        at_ns = batch.column("time").cast("int64").to_numpy()
        np.testing.assert_allclose(at_ns / 1e9, t_s, atol=1e-6)
        np.testing.assert_allclose(
            [row[0] for row in batch.column("Scalars:scalars").to_pylist()], wanted
        )
    moved = np.array(
        [row[0] for row in batches["/world/achieved"].column("Transform3D:translation").to_pylist()]
    )
    np.testing.assert_allclose(moved, arrays["T_base_hand_achieved"][::6, :3, 3], atol=1e-6)
    path = tmp_path / "b.rrd"
    assert main(
        [
            "rollout",
            "--backend",
            "scripted",
            "--task",
            "reach",
            "--duration",
            "0.2",
            "--rrd",
            str(path),
        ]
    ) in (0, 1)
    assert path.stat().st_size > 1000
