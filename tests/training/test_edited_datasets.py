"""Datasets as strangers bring them: read, merged and trained on, they give the sound one's episodes
or are refused with a typed error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.edited_datasets import CAMERA, CASES, NAMES, Case, N, rows_seen, sound
from helpers.post_training import SMALL, SMALL_CANVAS
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.datasets import Dataset, merge_datasets
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.errors import ConfigError, DatasetError
from strands_cosmos3.observe import views
from strands_cosmos3.training.arm_columns import ArmKeys
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.post import PostTraining

REFUSALS = (DatasetError, ConfigError)
KEYS = ArmKeys(cameras=(CAMERA,))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound(tmp_path_factory.mktemp("sound") / "set")


@pytest.fixture(scope="module")
def truth(original: Path) -> dict[str, Any]:
    return episodes(original)


@pytest.fixture(autouse=True)
def small_canvas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "TIERS", SMALL_CANVAS)
    monkeypatch.setenv("SVT_LOG", "0")


def episodes(root: Path, times: int = 1) -> dict[str, Any]:
    """What the episodes hold at every ``times``-th frame: columns in the order of their names in
    the sound dataset, pictures and instructions.
    """
    found: dict[str, Any] = {"tasks": [], "pictures": []}
    with Dataset(root) as dataset:
        for key, wanted in NAMES.items():
            feature = dataset.spec.features.get(key)
            names = (feature and feature.names) or wanted
            order = [
                list(names).index(name) if name in names else i for i, name in enumerate(wanted)
            ]
            found[key] = dataset.column(key)[::times][:, order]
        for episode in dataset:
            rows = range(0, len(episode), times)
            found["tasks"] += [episode.task_at(row) for row in rows]
            found["pictures"] += rows_seen(episode.frames(CAMERA, rows))
    return found


def require_same(found: dict[str, Any], truth: dict[str, Any], case: Case) -> None:
    assert tuple(found["tasks"]) == case.instructions
    assert found["pictures"] == truth["pictures"]
    for key in NAMES.keys() - {case.other}:
        np.testing.assert_array_equal(found[key], truth[key])


@pytest.fixture
def edited(original: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Case]:
    case = CASES[request.param]
    root = Path(shutil.copytree(original, tmp_path / "edited"))
    case.edit(root)
    return root, case


ALIKE = {
    "quaternion before position",
    "pose backwards",
    "pose in a label",
    "action shuffled",
    "state in a list in a list",
    "another first frame",
    "instructions in another order",
    "instructions as an index",
    "a null for total_tasks",
    "a version with three parts",
    "a version without a letter",
    "null for chunks and robot",
    "many small row groups",
    "packed in another way",
    "rows in another folder",
    "film in VP9",
    "film that begins late",
    "another camera not in the index",
    "60 frames a second",
    "5 frames a second",
    "a newer version",
    "half of a film",
}
"""Edits of a kind of which another one is made by default."""
SLOW = [pytest.mark.slow]
EDITS = [pytest.param(name, marks=SLOW * (name in ALIKE)) for name in CASES]
ALL = pytest.mark.parametrize("edited", EDITS, indirect=True)


@ALL
def test_it_is_read_right_or_refused(edited: tuple[Path, Case], truth: dict[str, Any]):
    root, case = edited
    if case.opened:
        require_same(episodes(root, case.times), truth, case)
    else:
        with pytest.raises(REFUSALS, match=r"\w.{20}"):
            episodes(root, case.times)


@ALL
def test_it_is_merged_right_or_refused(
    edited: tuple[Path, Case], truth: dict[str, Any], tmp_path: Path
):
    root, case = edited
    if case.merged:
        merge_datasets([root], tmp_path / "merged").close()
        require_same(episodes(tmp_path / "merged", case.times), truth, case)
    else:
        with pytest.raises(REFUSALS, match=r"\w.{20}"):
            merge_datasets([root], tmp_path / "merged").close()
        assert not (tmp_path / "merged").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(space: str) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / space
        return write_checkpoint(folder, action_space=space, sizes=SMALL, seed=4)

    return make


def windows(source: Path, root: Path, out: Path) -> Any:
    """A run's windows; the pictures are decoded and not encoded, which would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WanVae, "encode", lambda self, pixels: pixels[:, :, ::4, ::16, ::16])
        return PostTraining(source, root, out, PostConfig(batch=2, every=8), KEYS).windows


@pytest.fixture(scope="module")
def expected(original: Path, checkpoint: Any, tmp_path_factory: Any) -> Callable[[str], Any]:
    @cache
    def make(space: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(views, "TIERS", SMALL_CANVAS)
            return windows(checkpoint(space), original, tmp_path_factory.mktemp("run"))

    return make


JOINTS = ("gripper first in the state", "joints backwards", "state of motors", "30 frames a second")
SPACES = [pytest.param(name, "midtrain", marks=SLOW * (name in ALIKE)) for name in CASES] + [
    (name, "joint_pos") for name in JOINTS
]


@pytest.mark.parametrize(("edited", "space"), SPACES, indirect=["edited"])
def test_windows_are_the_same_or_it_is_refused(
    edited: tuple[Path, Case], space: str, checkpoint: Any, expected: Any, tmp_path: Path
):
    root, case = edited
    if not case.trained:
        with pytest.raises(REFUSALS, match=r"\w.{20}"):
            windows(checkpoint(space), root, tmp_path / "run")
        return
    found, wanted = windows(checkpoint(space), root, tmp_path / "run"), expected(space)
    np.testing.assert_array_equal(found._chunks, wanted._chunks)
    assert (found._state is None) == (space == "midtrain")
    if found._state is not None:
        np.testing.assert_array_equal(found._state, wanted._state)
    lossy = np.abs(found._latents.astype(float) - wanted._latents)
    assert lossy.max() < 0.06  # of 2; a row is 0.04 in a field, an episode 0.7
    per_episode = len(found) // 2
    captions = [found._prompts[i * per_episode + k] for i in range(2) for k in range(per_episode)]
    texts = [case.instructions[i * N + 8 * k] for i in range(2) for k in range(per_episode)]
    assert dict(zip(texts, captions, strict=True)) == {
        text: found._ids[text] for text in dict.fromkeys(texts)
    }
    assert len(set(zip(texts, captions, strict=True))) == len(set(texts))


def test_every_edit_that_may_be_used_is_used_somewhere():
    """Refusing everything would be no success."""
    used = [case.opened + case.merged + case.trained for case in CASES.values()]
    assert len(CASES) >= 55
    assert CASES.keys() >= ALIKE
    assert sum(used) > 1.5 * len(CASES)
