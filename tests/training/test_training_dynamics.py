"""Forward and inverse dynamics of the embedded checkpoint, as ``evaluate --clips`` judges them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest

from strands_cosmos3.actions.decode import decode_pose_delta
from strands_cosmos3.actions.stats import denormalize_chunk
from strands_cosmos3.cli import main
from strands_cosmos3.datasets.arm_rows import ArmClip
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.training import dynamics
from strands_cosmos3.training.dynamics import (
    DynamicsReport,
    control_rows,
    judge_dynamics,
    require_video,
)
from strands_cosmos3.training.windows import ROWS
from strands_cosmos3.worlds.table import demonstrations
from strands_cosmos3.worlds.table.demo_config import DemoConfig
from strands_cosmos3.worlds.table.demonstrations import expert_clips


def clips_of(count: int, seed: int = 0) -> list[ArmClip]:
    return expert_clips(count, ROWS, 128, seed)


@pytest.fixture(scope="module")
def short_episodes():
    """The expert's episodes are hardly longer than a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demonstrations, "DemoConfig", partial(DemoConfig, ticks=20))
        yield


@pytest.fixture(scope="module")
def clips(short_episodes):
    return clips_of(2)


@pytest.fixture(scope="module")
def report(clips) -> DynamicsReport:
    return judge_dynamics(embedded_checkpoint(task="reach"), clips)


def test_figures_are_in_an_order_that_only_a_model_of_this_world_has(report):
    assert (report.clips, report.steps) == (2, 1)  # the checkpoint's preset for dynamics
    assert report.vae_psnr > report.forward_db > report.copy_frame_psnr - 2
    assert report.inverse_mm < 0.6 * report.moved_mm
    assert (
        report.moving["vae_psnr"] > report.moving["forward_db"] > report.moving["copy_frame_psnr"]
    )
    assert list(report.controls) == ["shuffled", "opposite", "zero", "foreign"]
    assert report.controls["opposite"] > 1
    assert report.controls["zero"] > 1


def test_controls_are_another_clip_the_inverse_motion_and_none(clips):
    backwards = [replace(clip, T_base_cosmos=clip.T_base_cosmos[::-1]) for clip in clips]
    rows = control_rows([*clips, *backwards])
    np.testing.assert_array_equal(rows["shuffled"], rows["true"][[2, 3, 0, 1]])
    deltas = {
        name: decode_pose_delta(denormalize_chunk(made[0], "droid_lerobot")[:, :9])
        for name, made in rows.items()
    }
    np.testing.assert_allclose(
        deltas["true"] @ deltas["opposite"], np.broadcast_to(np.eye(4), (ROWS, 4, 4)), atol=1e-5
    )
    np.testing.assert_allclose(deltas["zero"], np.broadcast_to(np.eye(4), (ROWS, 4, 4)), atol=1e-5)
    assert all(
        np.array_equal(rows[name][..., 9], rows["true"][..., 9]) for name in ("opposite", "zero")
    )


def test_another_seed_gives_other_clips(clips):
    (other,) = clips_of(1, seed=1)
    assert not np.array_equal(other.frames, clips[0].frames)


def test_only_a_checkpoint_with_a_future_is_asked(tmp_path):
    folder = shutil.copytree(embedded_checkpoint(task="reach"), tmp_path / "checkpoint")
    path = folder / "checkpoint.json"
    recorded = json.loads(path.read_text())
    recorded["strands_cosmos3"]["policy_frames"] = [1]
    path.write_text(json.dumps(recorded))
    with pytest.raises(ConfigError, match="without a video"):
        require_video(folder)


@pytest.mark.usefixtures("short_episodes")
def test_evaluate_judges_dynamics_once_and_keeps_them(report, tmp_path, monkeypatch, capsys):
    """On clips of the same seed, with the same figures."""
    out = tmp_path / "run"
    options = {"tasks": "reach", "seeds": "1", "duration": "0.2", "films": "0", "clips": "2"}
    asked = ["evaluate", "--out", str(out), "--num-steps", "1", "--workers", "1", "--resume"]
    asked += [word for name, value in options.items() for word in (f"--{name}", value)]
    finish = RunFolder.__enter__

    def finished(folder):
        """Its only episode is played here, without Ray."""
        for assignment in folder.settings.plan():
            if folder.read(assignment) is None:
                folder.write(assignment, AssignmentRunner(folder.settings).run(assignment))
        return finish(folder)

    monkeypatch.setattr(RunFolder, "__enter__", finished)
    assert main(asked) == 0
    assert "inverse dynamics: end points" in capsys.readouterr().out
    figures = json.loads((out / "report.json").read_text())["dynamics"]
    assert figures.items() >= asdict(report).items()
    assert "Dynamics" in (out / "report.html").read_text()
    monkeypatch.setattr(dynamics, "judge_dynamics", None)  # not asked again
    assert main(asked) == 0
    assert json.loads((out / "report.json").read_text())["dynamics"] == figures
