"""run/: whole files, known by what they are."""

import json
import os
import re
import shutil
import sys

import pytest

from helpers.hostile_checkpoints import no_file
from helpers.storage import full_disk
from strands_cosmos3.errors import ConfigError, StorageError
from strands_cosmos3.evaluation.folder import RunFolder, _with_checksum, without_times
from strands_cosmos3.evaluation.settings import digest_of, make_settings

SETTINGS = make_settings({"tasks": "reach,pick", "seeds": 3, "conditions": "plain,swapped"})
PLAN = SETTINGS.plan()


def record(a):
    return {
        **a.instructions(),
        "seed": a.seed,
        "task": a.task,
        "success": True,
        "outcome": "success",
        "counters": {},
        "duration_s": 2.0,
        "times": {"wall_s": 1.0},
    }


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run", SETTINGS, resume=False) as made:
        yield made


def test_episodes_come_back_by_what_they_are(folder):
    for a in PLAN[::2]:
        folder.write(a, record(a))
    assert set(folder.read_all(PLAN)) == {a.key for a in PLAN[::2]}
    assert folder.read(PLAN[0])["seed"] == PLAN[0].seed
    assert folder.read(PLAN[1]) is None
    assert len({folder.episode_path(a) for a in PLAN}) == len(PLAN)


def test_a_write_that_fails_leaves_what_was_there(folder):
    folder.write(PLAN[0], record(PLAN[0]))
    with pytest.raises(TypeError):
        folder.write(PLAN[0], {**record(PLAN[0]), "success": object()})
    assert folder.read(PLAN[0])["success"] is True
    assert [p.name for p in folder.episode_path(PLAN[0]).parent.iterdir()] == ["00000.json"]


def test_what_a_killed_process_left_is_removed_and_run_again(tmp_path):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        folder.write(PLAN[0], record(PLAN[0]))
        folder.write(PLAN[1], record(PLAN[1]))
        path = folder.episode_path(PLAN[1])
    half = path.with_name(".00002.4711.part.json")
    half.write_text('{"succ')
    path.write_text(path.read_text()[:100])
    with RunFolder(tmp_path, SETTINGS, resume=True) as folder:
        assert not half.exists()
        assert set(folder.read_all(PLAN)) == {PLAN[0].key}


def test_a_full_folder_wants_resume(tmp_path):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        folder.write(PLAN[0], record(PLAN[0]))
    with pytest.raises(ConfigError, match="contains 1 episode already; add --resume"):
        RunFolder(tmp_path, SETTINGS, resume=False)
    RunFolder(tmp_path, SETTINGS, resume=True).close()


def test_episodes_of_other_settings_are_refused_and_the_difference_is_named(tmp_path):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        folder.write(PLAN[0], record(PLAN[0]))
    other = make_settings({"tasks": "reach,pick", "seeds": 3, "duration": 5.0})
    with (
        RunFolder(tmp_path, other, resume=True) as folder,
        pytest.raises(ConfigError, match=r"duration was 20\.0 and is 5\.0"),
    ):
        folder.read_all(other.plan())


def test_more_seeds_and_rows_go_on_in_the_same_folder(tmp_path):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        for a in PLAN:
            folder.write(a, record(a))
    more = make_settings(
        {"tasks": "reach,pick,place", "seeds": 5, "conditions": "plain,swapped,shuffled"}
    )
    with RunFolder(tmp_path, more, resume=True) as folder:
        assert set(folder.read_all(more.plan())) == {a.key for a in PLAN}


def test_one_evaluation_at_a_time(folder):
    with pytest.raises(ConfigError, match="another process writes to"):
        RunFolder(folder.path, SETTINGS, resume=True)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another place"):
        RunFolder(tmp_path / "file", SETTINGS, resume=False)


def test_films_say_whether_they_show_the_same(folder):
    assert folder.film_of(PLAN[0]) is None
    folder.write_film(PLAN[0], b"film", equal=True)
    folder.write_film(PLAN[1], b"film", equal=False)
    assert folder.film_of(PLAN[0]) == (folder.path / "films/plain/reach-00000.mp4", True)
    assert folder.film_of(PLAN[1])[1] is False


def test_only_times_are_left_out_of_a_comparison(folder):
    stored = folder.write(PLAN[0], record(PLAN[0]))
    assert stored == json.loads(folder.episode_path(PLAN[0]).read_text())
    assert set(stored) - set(without_times(stored)) == {"times", "checksum"}


def test_figures_of_dynamics_are_kept_for_the_settings_they_were_made_with(tmp_path):
    def settings(**more):
        return make_settings(
            {"tasks": "reach", "seeds": 1, "model": "somewhere", "clips": 4, **more}
        )

    with RunFolder(tmp_path, settings(), resume=False) as folder:
        assert folder.read_dynamics() is None
        folder.write_dynamics({"forward_db": 21.0})
        assert folder.read_dynamics()["forward_db"] == 21.0
    for other in ({"clips": 5}, {"seed": 1}, {"num_steps": 1}, {"model": "elsewhere"}):
        with RunFolder(tmp_path, settings(**other), resume=False) as folder:
            assert folder.read_dynamics() is None, other
    with RunFolder(tmp_path, settings(seeds=9), resume=False) as folder:
        assert folder.read_dynamics() is not None


def edited(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def sealed(path, without=(), **values):
    """Edited by someone who knows the checksum, or written by another version."""
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in without}
    path.write_text(json.dumps(_with_checksum({**kept, **values})))


def instead(path, make):
    path.unlink()
    make(path)


DAMAGE = {
    "success": lambda path: edited(path, success=False),
    "latency": lambda path: edited(path, times={"wall_s": 0.1}),
    "checksum": lambda path: edited(path, checksum="0" * 64),
    "no checksum": lambda path: edited(path, checksum=None),
    "older": lambda path: path.write_text(
        re.sub(r'"checksum": "\w+"', '"age": 1', path.read_text())
    ),
    "checksum of nothing": lambda path: edited(path, checksum=""),
    "empty object": lambda path: path.write_text("{}"),
    "list": lambda path: path.write_text("[]"),
    "half": lambda path: path.write_text(path.read_text()[:100]),
    "nothing": lambda path: path.write_text(""),
    "bytes": lambda path: path.write_bytes(b"\xff\x00"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "no file": lambda path: instead(path, no_file),
    "folder": lambda path: instead(path, os.mkdir),
    **{
        f"sealed without {name}": lambda path, name=name: sealed(path, without=[name])
        for name in ("identity", "outcome", "times", "success")
    },
    **{
        f"sealed with {values}": lambda path, values=values: sealed(path, **values)
        for values in (
            {"digest": ["0" * 16]},
            {"digest": "0" * 16},
            {"identity": []},
            {"identity": {}, "digest": digest_of({})},
            {"success": "yes"},
            {"duration_s": "2.0"},
            {"times": {"answer_ms": 12.0}},
            {"times": {"answer_ms": [12.0, None]}},
            {"times": {"cpu_s": "1"}},
            {"counters": {"ticks": 100}},
            {"tracking": {"mean": 0.1}},
            {"tracking": {"mean_mm": 0.1, "max_mm": "large"}},
            {"latency_ms": {"max": [3.0]}, "latency_clock": "wall"},
            {"held": 3},
            {"seam_rad_s": {"p95": 0.1}},
            {"latency_ms": 3.0},
            {"model_sha256": ["0"]},
            {"condition": "swapped"},
        )
    },
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_or_edited_record_is_named_and_costs_itself_only(tmp_path, how):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        for a in PLAN[:3]:
            folder.write(a, record(a))
        path = folder.episode_path(PLAN[1])
    DAMAGE[how](path)
    with RunFolder(tmp_path, SETTINGS, resume=True) as folder:
        assert set(folder.read_all(PLAN)) == {PLAN[0].key, PLAN[2].key}
        assert folder.damaged == [path]


def test_a_record_may_be_nested_as_deeply_as_can_just_be_read(folder):
    """Some depth can be read, and not be written again for its checksum."""
    path = folder.episode_path(PLAN[0])
    path.parent.mkdir(parents=True)
    depths = range(sys.getrecursionlimit() - 200, sys.getrecursionlimit())
    for depth in depths:
        path.write_text('{"a": ' + "[" * depth + "]" * depth + "}")
        assert folder.read(PLAN[0]) is None
    assert folder.damaged == [path] * len(depths)


def copy_of(place, path):
    """Put another episode's record, or that of another evaluation, in the place of one."""
    source = {
        "sibling": lambda: (SETTINGS, PLAN[2]),
        "task": lambda: (SETTINGS, PLAN[4]),
        "condition": lambda: (SETTINGS, PLAN[7]),
        "settings": lambda: (
            make_settings({"tasks": "reach,pick", "seeds": 3, "duration": 5.0}),
            PLAN[1],
        ),
        "folder": lambda: (SETTINGS, PLAN[1]),
    }
    settings, a = source[place]()
    inside = place in ("sibling", "task", "condition")
    with RunFolder(
        path.parents[3] if inside else path.parents[4] / "other", settings, True
    ) as folder:
        kept = folder.episode_path(a).exists()
        folder.write(a, record(a))
        shutil.copy2(folder.episode_path(a), path)
        if not kept:
            folder.episode_path(a).unlink()


@pytest.mark.parametrize("place", ["sibling", "task", "condition", "settings", "folder"])
def test_a_copied_record_is_named_and_costs_itself_only(tmp_path, place):
    with RunFolder(tmp_path / "run", SETTINGS, resume=False) as folder:
        folder.write_start({})
        for a in PLAN[:3]:
            folder.write(a, record(a))
        path = folder.episode_path(PLAN[1])
    copy_of(place, path)
    more = make_settings({"tasks": "reach,pick", "seeds": 4, "conditions": "plain,shuffled"})
    with RunFolder(tmp_path / "run", more, resume=True) as folder:
        assert set(folder.read_all(more.plan())) == {PLAN[0].key, PLAN[2].key}
        assert folder.damaged == [path]


def test_a_folder_is_the_same_over_starts(tmp_path):
    ids = []
    for resume, tasks in ((False, "reach"), (True, "place"), (True, "reach")):
        settings = make_settings({"tasks": tasks, "seeds": 2})
        with RunFolder(tmp_path, settings, resume) as folder:
            folder.write_start({"command": tasks})
            folder.write(settings.plan()[0], record(settings.plan()[0]))
            assert folder.damaged == []
        start = json.loads((tmp_path / "run.json").read_text())
        assert start["command"] == tasks
        ids.append(start["id"])
    assert ids[0] == ids[1] == ids[2] is not None


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 3, "id": "c"}'])
def test_a_damaged_start_costs_no_episode(tmp_path, damage):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        folder.write_start({})
        folder.write(PLAN[0], record(PLAN[0]))
    (tmp_path / "run.json").write_text(damage)
    with RunFolder(tmp_path, SETTINGS, resume=True) as folder:
        assert set(folder.read_all(PLAN)) == {PLAN[0].key}
        assert folder.damaged == []
        folder.write_start({})
        folder.write(PLAN[1], record(PLAN[1]))
    with RunFolder(tmp_path, SETTINGS, resume=True) as folder:
        assert set(folder.read_all(PLAN)) == {PLAN[0].key, PLAN[1].key}


def test_a_folder_in_the_place_of_a_record_is_set_aside(folder):
    path = folder.episode_path(PLAN[0])
    for content in ("first", "second"):
        path.mkdir(parents=True)
        (path / content).touch()
        assert folder.read(PLAN[0]) is None
        folder.write(PLAN[0], record(PLAN[0]))
        assert folder.read(PLAN[0])["success"] is True
        path.unlink()
    assert sorted(str(kept.relative_to(path.parent)) for kept in path.parent.rglob("*")) == [
        "00000.json.damaged0",
        "00000.json.damaged0/first",
        "00000.json.damaged1",
        "00000.json.damaged1/second",
    ]


@pytest.mark.parametrize("values", [{"forward_db": 99.0}, {"checksum": None}, {"clips": "4"}])
def test_edited_figures_of_dynamics_are_computed_anew(tmp_path, values):
    settings = make_settings({"tasks": "reach", "seeds": 1, "model": "somewhere", "clips": 4})
    with RunFolder(tmp_path, settings, resume=False) as folder:
        folder.write_dynamics({"forward_db": 21.0, "clips": 4})
        edited(tmp_path / "dynamics.json", **values)
        assert folder.read_dynamics() is None


def test_a_folder_of_another_format_is_refused_in_one_line(tmp_path):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        folder.write_start({"versions": {}})
        folder.write(PLAN[0], record(PLAN[0]))
    start = json.loads((tmp_path / "run.json").read_text())
    RunFolder(tmp_path, SETTINGS, resume=True).close()
    del start["format"]
    (tmp_path / "run.json").write_text(json.dumps(start))
    with pytest.raises(ConfigError, match=r"another version of this package.*another --out\.$"):
        RunFolder(tmp_path, SETTINGS, resume=True)


def test_a_full_disk_names_the_path_and_loses_nothing(folder):
    folder.write(PLAN[0], record(PLAN[0]))
    with full_disk(), pytest.raises(StorageError, match=str(folder.episode_path(PLAN[1]))):
        folder.write(PLAN[1], record(PLAN[1]))
    assert set(folder.read_all(PLAN)) == {PLAN[0].key}
    assert [p.name for p in folder.episode_path(PLAN[0]).parent.iterdir()] == ["00000.json"]
