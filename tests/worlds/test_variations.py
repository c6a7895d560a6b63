"""What can be varied on the table: other lights, tables, cameras and cubes, the same for every
policy and gone afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.robots.catalogue import PANDA, get_robot, write_robot
from strands_cosmos3.robots.spec import Workspace
from strands_cosmos3.worlds import Start, get_world, varied
from strands_cosmos3.worlds.table.grammar import parse_instruction
from strands_cosmos3.worlds.table.scene import CLOSE_M
from strands_cosmos3.worlds.table.world import TableVariation

TABLE = get_world("table")


def starts(*forms: str, n: int = 12):
    changes = (TableVariation.change(form) for form in forms)
    variation = TableVariation(
        **{name: value for change in changes for name, value in change.items()}
    )
    return [Start("pick", 100 + i, i, TABLE.instruction("pick", i), variation) for i in range(n)]


@pytest.fixture(scope="module")
def session():
    with TABLE.open(task="pick") as session:
        yield session


def wrist_m(session, start) -> np.ndarray:
    session.reset(start)
    return session.robot.model.cam("wrist").pos.copy()


def test_what_is_added_to_a_variation_makes_another_scene():
    @dataclass(frozen=True)
    class Hazy(TableVariation):
        haze: float | None = varied(0, 1)

    def key(variation):
        return TABLE.scene_key(PANDA, "pick", variation)

    values = {"light": 0.5, "table": "wood", "camera_cm": 2.0, "cubes_mm": 30.0, "close": True}
    values |= {"crowded": True, "haze": 0.5, "mount": 7}
    assert set(values) == {option.name for option in fields(Hazy)}
    same = {name for name, value in values.items() if key(Hazy(**{name: value})) == key(Hazy())}
    assert same == {"camera_cm", "mount", "close"}, "these are applied in one scene"


def test_the_wrist_camera_is_displaced_in_each_episode_and_not_afterwards(session):
    (plain,) = starts(n=1)
    nominal_m = wrist_m(session, plain)
    moved_m = [wrist_m(session, start) for start in starts("camera=2", n=4)]
    np.testing.assert_allclose(np.linalg.norm(np.array(moved_m) - nominal_m, axis=1), 0.02)
    assert len({tuple(place) for place in np.round(moved_m, 6).tolist()}) == 4
    np.testing.assert_array_equal(wrist_m(session, plain), nominal_m)


def test_a_mount_displaces_and_turns_the_wrist_camera_alike_in_all_episodes(session):
    def pose(start):
        session.reset(start)
        camera = session.robot.model.cam("wrist")
        return camera.pos.copy(), camera.quat.copy()

    (plain,) = starts(n=1)
    nominal_m, nominal_quat = pose(plain)
    (at_m, quat), again = (pose(start) for start in starts("mount=7", n=2))
    np.testing.assert_array_equal(again[0], at_m)
    np.testing.assert_array_equal(again[1], quat)
    assert 0.03 <= np.linalg.norm(at_m - nominal_m) <= 0.04
    assert 2 <= np.rad2deg(2 * np.arccos(abs(quat @ nominal_quat))) <= 5
    others_m = np.array([pose(starts(f"mount={seed}", n=1)[0])[0] for seed in range(8, 12)])
    assert np.linalg.norm(others_m - at_m, axis=1).min() > 0.001
    assert (others_m[:, 0] >= nominal_m[0]).all(), "away from the hand"
    assert pose(plain)[0].tolist() == nominal_m.tolist()
    assert pose(plain)[1].tolist() == nominal_quat.tolist()


def test_another_robots_wrist_camera_is_displaced():
    (plain,), (moved,) = starts(n=1), starts("camera=2", n=1)
    with TABLE.open("fr3", task="pick") as session:
        distance_m = np.linalg.norm(wrist_m(session, moved) - wrist_m(session, plain))
    assert distance_m == pytest.approx(0.02)


def xy_m(session, start) -> dict[str, np.ndarray]:
    session.reset(start)
    robot = session.robot
    return {name: robot.scene.T_world_body(robot.data, name)[:2, 3] for name in robot.scene.cubes}


def require_close(session, workspace: Workspace, n: int) -> None:
    for start, plain in zip(starts("close", n=n), starts(n=n), strict=True):
        close_m, plain_m = xy_m(session, start), xy_m(session, plain)
        goal = parse_instruction(start.instruction).cube
        np.testing.assert_array_equal(close_m[goal], plain_m[goal])  # the goal's cube stays
        away_m = [
            np.linalg.norm(close_m[goal] - at) for name, at in close_m.items() if name != goal
        ]
        assert min(away_m) == pytest.approx(CLOSE_M)
        assert max(away_m) >= 0.1
        for at in close_m.values():
            for value, (low, high) in zip(at, (workspace.x_m, workspace.y_m), strict=True):
                assert low <= value <= high


def test_close_cubes_stand_inside_the_workspace(session):
    require_close(session, PANDA.workspace, 12)


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_close_cubes_stand_in_the_robots_own_workspace(tmp_path: Path):
    file, workspace = tmp_path / "mine.toml", Workspace((0.42, 0.58), (-0.13, 0.13))
    file.write_text(write_robot(replace(get_robot("ur5e"), name="mine", workspace=workspace)))
    with TABLE.open(str(file), task="pick") as session:
        require_close(session, workspace, 6)


def test_cubes_and_distractors(session):
    session.reset(starts("cubes=32", n=1)[0])
    assert {cube.edge_m for cube in session.robot.scene.cubes.values()} == {0.032}
    session.reset(starts("crowded", "table=dark", "light=0.5", n=1)[0])
    assert len(session.robot.scene.cubes) == 5
    appearance = session.robot.scene.appearance
    assert (appearance.table, appearance.light) == ("dark", 0.5)
