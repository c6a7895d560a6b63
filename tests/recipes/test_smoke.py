"""The whole of the table policy's training: every stage runs, on made-up pictures."""

from __future__ import annotations

import json

import numpy as np

from recipes.table_policy.demos import write_demos
from recipes.table_policy.record import LabelledRecord
from recipes.table_policy.train import main
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.worlds.table.phrases import GOALS

TICKS = 20


def made_up_episode(seed: int) -> LabelledRecord:
    rng = np.random.default_rng(seed)
    labels, T = np.arange(0, TICKS, 2), np.repeat(np.eye(4)[None], TICKS, axis=0)
    T[:, :3, 3] = rng.normal(0, 0.01, (TICKS, 3)).cumsum(axis=0)
    rows = rng.normal(0, 0.5, (len(labels), len(GOALS), 16, 10)).astype(np.float32)
    return LabelledRecord(
        frames=rng.integers(0, 255, (TICKS, 128, 160, 3), np.uint8),
        looks=rng.integers(0, 255, (len(labels), 128, 160, 3), np.uint8),
        q_rad=np.zeros((TICKS, 7)),
        T_base_cosmos=T,
        gripper_opening=np.ones(TICKS),
        gripper_command=np.ones(TICKS),
        goal=np.zeros(TICKS, np.int8),
        perturbed=np.zeros(TICKS, bool),
        label_ticks=labels.astype(np.int16),
        labels=rows,
        continued=rows,
        prefix_rows=np.zeros(rows.shape[:2], np.int8),
        looks_labels=rows,
        looks_continued=rows,
    )


def test_every_stage_of_training_runs(tmp_path, capsys):
    (tmp_path / "demos").mkdir()
    write_demos(tmp_path / "demos", [made_up_episode(seed) for seed in range(2)])
    stages = ("vae", "vae-decoder", "policy", "preview", "joint", "decoder")
    steps = [text for stage in stages for text in (f"--{stage}-steps", "1")]
    sizes = ["--hidden", "64", "--layers", "2", "--latent-channels", "16", "--no-gate"]
    sizes += ["--vae-base", "8", "--vae-decoder-base", "8", "--vae-batch", "1"]
    sizes += ["--policy-batch", "4", "--joint-batch", "2", "--joint-pictures", "2"]
    out = ["--out", str(tmp_path / "run"), "--demos", str(tmp_path / "demos")]
    assert main([*out, *steps, *sizes, "--no-tensorboard"]) == 0
    assert "decoder/checkpoint" in capsys.readouterr().out.replace("\n", "")
    checkpoint = Checkpoint.open(tmp_path / "run/decoder/checkpoint")
    checkpoint.verify()
    assert checkpoint.policy_frames == (1, 17)
    assert checkpoint.preview is not None
    figures = json.loads((tmp_path / "run/decoder/dynamics.json").read_text())
    assert figures["clips"] >= 1
    assert (tmp_path / "run/curves.png").exists()
