"""The scene of a condition: other lights, tables, cameras and cubes, the same for every policy
and gone afterwards.
"""

from __future__ import annotations

import numpy as np
import pytest

from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.plan import make_plan
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.stages import Stages
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend
from strands_cosmos3.worlds.table.scene import CLOSE_M


def episodes(condition: str, n: int = 12):
    return make_plan(["pick"], n, 0, [Perturbation.parse(condition)])


@pytest.fixture(scope="module")
def stages() -> Stages:
    return Stages()


def wrist_m(robot) -> np.ndarray:
    return robot.model.cam("wrist").pos.copy()


def test_the_wrist_camera_is_displaced_in_each_episode_and_not_afterwards(stages):
    nominal = wrist_m(stages.prepare(episodes("plain")[0])[0])
    moved = [wrist_m(stages.prepare(episode)[0]) for episode in episodes("camera=2", 4)]
    np.testing.assert_allclose(np.linalg.norm(np.array(moved) - nominal, axis=1), 0.02, atol=1e-12)
    assert len({tuple(place) for place in np.round(moved, 6).tolist()}) == 4
    np.testing.assert_array_equal(wrist_m(stages.prepare(episodes("plain")[0])[0]), nominal)


def test_close_cubes_stand_where_they_should(stages):
    for episode in episodes("close"):
        robot, layout = stages.prepare(episode)
        plain = robot.scene.sample_layout(np.random.default_rng(episode.seed))
        at = layout.names.index(episode.goals[0].cube)
        np.testing.assert_array_equal(layout.xy_m[at], plain.xy_m[at])  # the goal's cube stays
        away = np.linalg.norm(np.delete(layout.xy_m, at, axis=0) - layout.xy_m[at], axis=1)
        assert away.min() == pytest.approx(CLOSE_M)
        assert away.max() >= 0.1
        for axis, (low, high) in enumerate((PANDA.workspace.x_m, PANDA.workspace.y_m)):
            assert (layout.xy_m[:, axis] >= low).all()
            assert (layout.xy_m[:, axis] <= high).all()


def test_cubes_and_distractors(stages):
    small, _ = stages.prepare(episodes("cubes=32")[0])
    assert {cube.edge_m for cube in small.scene.cubes.values()} == {0.032}
    crowded, _ = stages.prepare(episodes("crowded+table=dark")[0])
    assert len(crowded.scene.cubes) == 5
    assert crowded.scene.appearance.table == "dark"


def test_identities_of_former_conditions_are_what_they_were():
    assert set(Perturbation.parse("swapped+replan=8").identity()) == {
        "name",
        "images",
        "text",
        "num_steps",
        "replan_rows",
    }
    assert Perturbation.parse("light=0.5+close").identity()["light"] == 0.5


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("light=0.5", {"light": 0.5}),
        ("latency=0.4+limit=7", {"latency_s": 0.4, "limit_s": 7.0}),
        ("table=white+crowded", {"table": "white", "crowded": True}),
        ("camera=2+cubes=32+close", {"camera_cm": 2.0, "cubes_mm": 32.0, "close": True}),
    ],
)
def test_short_forms(text, fields):
    assert Perturbation.parse(text) == Perturbation(text, **fields)


@pytest.mark.parametrize(
    "text",
    [
        "light=",
        "light=x",
        "light=0",
        "light=nan",
        "table=glass",
        "cubes=200",
        "latency=-1",
        "close=1",
        "limit=0",
        "near",
    ],
)
def test_short_forms_that_mean_nothing(text):
    with pytest.raises((UnknownNameError, ConfigError)):
        Perturbation.parse(text)


def test_scene_and_noise_have_seeds_of_their_own():
    episode = episodes("plain")[0]
    assert episode.noise_seed(None) == episode.seed
    assert len({episode.seed, episode.noise_seed(0), episode.noise_seed(1)}) == 3
    seen = []

    class Seeded(ScriptedBackend):
        def infer(self, request):
            seen.append(request.seed)
            return super().infer(request)

    robot = Robot()
    with Cosmos3Policy(robot="panda", backend=Seeded()) as policy:
        for noise_seed in (None, 7):
            robot.run_policy(
                instruction="reach the red cube",
                policy=policy,
                duration=0.1,
                seed=3,
                noise_seed=noise_seed,
            )
    assert seen == [3, 7]
    assert "noise_seed" not in Settings().identity(episode)
    assert Settings(noise_seed=1).identity(episode)["noise_seed"] == 1
