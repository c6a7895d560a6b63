"""Demonstrations on LIBERO: what is asked of a layout, and what an episode holds. ``make
test-libero`` runs this.
"""

import numpy as np
import pytest

pytest.importorskip("libero", reason="LIBERO has an environment of its own: make test-libero")

from recipes.libero_policy.demos import TARGETS_A_LAYOUT, demo_of, record_libero
from strands_cosmos3.actions.controller_rows import decode_rows
from strands_cosmos3.datasets import ACTION, Dataset
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.worlds.libero.protocol import LiberoConfig

pytestmark = pytest.mark.libero


def test_a_layout_is_asked_for_several_objects():
    for layout in range(10):
        drawn = [
            demo_of("libero_object", 0, TARGETS_A_LAYOUT * layout + turn)
            for turn in range(TARGETS_A_LAYOUT)
        ]
        assert len({(scene.number, seed) for scene, _, seed in drawn}) == 1
        assert len({asked.instruction for _, asked, _ in drawn}) == TARGETS_A_LAYOUT
    assert demo_of("libero_object", 1, 0)[2] != demo_of("libero_object", 0, 0)[2]
    with pytest.raises(ConfigError, match="libero_goal"):
        demo_of("libero_goal", 0, 0)


def test_an_episode_holds_both_views_and_the_rows_that_follow(tmp_path):
    record_libero(tmp_path / "demos", "libero_object", 0, [0, 1], LiberoConfig(picture_px=64))
    with Dataset(tmp_path / "demos") as dataset:
        episode, other = dataset
        assert other.task != episode.task
        for view in dataset.spec.cameras:
            first, last = (other.frames(view, [t])[0].astype(int) for t in (0, len(other) - 1))
            apart = np.abs(first - episode.frames(view, [0])[0]).mean()  # the video is lossy
            assert apart < 2, "only the sentence tells what is asked"
            assert np.abs(first - last).mean() > 2 * apart
        assert dataset.fps == 20
        assert not [key for key in dataset.spec.features if "state" in key]
        assert episode.task == demo_of("libero_object", 0, 0)[1].instruction
        actions = decode_rows(episode[ACTION].astype(float))
        assert np.abs(actions).max() <= 1 + 1e-6
        assert set(np.round(actions[:, 6])) == {-1, 1}
        assert episode["next.success"].tolist() == [False] * (len(episode) - 1) + [True]
        for view in ("agentview", "wrist"):
            assert episode.frames(f"observation.images.{view}").shape == (len(episode), 64, 64, 3)
