"""What is written: checked with pyarrow, PyAV and json directly, never with the project's own
reader alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from helpers.environments import TESTS
from helpers.small_episodes import columns, fill, pictures, spec, which
from strands_cosmos3.datasets import (
    ACTION,
    STATE,
    Dataset,
    DatasetSpec,
    DatasetWriter,
    Feature,
    VideoConfig,
    arm_spec,
)
from strands_cosmos3.errors import (
    ConfigError,
    DatasetBusyError,
    DatasetError,
    DatasetMismatchError,
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
)

WRIST = "observation.images.wrist"


def info_of(root: Path) -> dict:
    return json.loads((root / "meta/info.json").read_text())


def test_the_files_are_those_of_lerobot_v3(write):
    root = write([3, 5, 4, 6], commit_every=2)
    assert sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()
    ) == sorted(
        [
            "meta/info.json",
            "meta/stats.json",
            "meta/tasks.parquet",
            *(f"meta/episodes/chunk-000/file-00{k}.parquet" for k in (0, 1)),
            *(f"data/chunk-000/file-00{k}.parquet" for k in (0, 1)),
            *(
                f"videos/observation.images.{view}/chunk-000/file-00{k}.mp4"
                for view in ("wrist", "exterior_1")
                for k in (0, 1)
            ),
        ]
    )
    info = info_of(root)
    assert info["codebase_version"] == "v3.0"
    assert (info["fps"], info["robot_type"], info["chunks_size"]) == (15, "panda", 1000)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (4, 18, 3)
    assert info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    assert (
        info["video_path"] == "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    )
    assert info["features"][WRIST]["shape"] == [48, 64, 3]
    assert info["features"][WRIST]["dtype"] == "video"
    assert info["features"][ACTION]["names"] == [
        "tx",
        "ty",
        "tz",
        "r0",
        "r1",
        "r2",
        "r3",
        "r4",
        "r5",
        "grasp",
    ]
    assert info["features"][ACTION]["info"]["normalized"] is False
    assert info["features"]["timestamp"] == {"dtype": "float32", "shape": [1], "names": None}


def test_rows_and_index_read_by_pyarrow(write):
    root = write([3, 5, 4, 6], commit_every=2)
    data = pq.read_table(root / "data").to_pydict()
    assert data["index"] == list(range(18))
    assert data["episode_index"] == [0] * 3 + [1] * 5 + [2] * 4 + [3] * 6
    assert data["frame_index"] == [*range(3), *range(5), *range(4), *range(6)]
    np.testing.assert_allclose(data["timestamp"][3:8], np.arange(5) / 15, atol=1e-6)
    assert data["task_index"] == [0] * 3 + [1] * 5 + [2] * 4 + [0] * 6
    np.testing.assert_allclose(data["action"][3:8], columns(5, 1)[ACTION], atol=1e-7)
    assert data["next.done"] == [k in (2, 7, 11, 17) for k in range(18)]
    schema = pq.read_schema(root / "data/chunk-000/file-000.parquet")
    assert str(schema.field("action").type).startswith("fixed_size_list")
    assert str(schema.field("next.done").type) == "bool"
    tasks = pq.read_table(root / "meta/tasks.parquet")
    assert tasks.column("task").to_pylist() == [
        "pick up cube 0",
        "pick up cube 1",
        "pick up cube 2",
    ]
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    episodes = pq.read_table(root / "meta/episodes").to_pydict()
    assert episodes["length"] == [3, 5, 4, 6]
    assert episodes["dataset_from_index"] == [0, 3, 8, 12]
    assert episodes["dataset_to_index"] == [3, 8, 12, 18]
    assert episodes["tasks"][1] == ["pick up cube 1"]
    assert episodes["data/file_index"] == [0, 0, 1, 1]
    assert episodes[f"videos/{WRIST}/file_index"] == [0, 0, 1, 1]
    np.testing.assert_allclose(episodes[f"videos/{WRIST}/from_timestamp"], [0, 3 / 15, 0, 4 / 15])
    np.testing.assert_allclose(
        episodes[f"videos/{WRIST}/to_timestamp"], [3 / 15, 8 / 15, 4 / 15, 10 / 15]
    )
    np.testing.assert_allclose(
        episodes["stats/action/mean"][1], columns(5, 1)[ACTION].mean(axis=0), atol=1e-7
    )


def test_pictures_read_by_pyav_at_the_index_s_own_times(write):
    root = write([3, 5, 4], commit_every=3)
    with av.open(str(root / f"videos/{WRIST}/chunk-000/file-000.mp4")) as film:
        assert film.streams.video[0].average_rate == 15
        frames = {
            round(float(frame.pts * frame.time_base) * 15): frame for frame in film.decode(video=0)
        }
    assert sorted(frames) == list(range(12))
    for k, (n, first) in enumerate([(3, 0), (5, 3), (4, 8)]):
        seen = np.stack([frames[first + row].to_ndarray(format="rgb24") for row in range(n)])
        assert which(seen, k, n) == list(range(n))
        assert np.abs(seen.astype(int) - pictures(k, n)[WRIST]).mean() < 3
    assert frames[0].key_frame
    assert frames[3].key_frame  # every episode begins with one
    assert frames[8].key_frame


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv444p"])
@pytest.mark.parametrize(
    "colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (212, 31, 28), (13, 32, 90)]
)
def test_colours_survive(tmp_path: Path, colour: tuple[int, int, int], pixel_format: str):
    one = DatasetSpec(15, {WRIST: Feature("video", (48, 64, 3))})
    wall = np.broadcast_to(np.array(colour, np.uint8), (4, 48, 64, 3))
    with DatasetWriter(
        tmp_path / "set", one, video=VideoConfig(crf=10, pixel_format=pixel_format)
    ) as writer:
        writer.add_episode({}, {WRIST: wall}, task="look")
    with av.open(str(tmp_path / f"set/videos/{WRIST}/chunk-000/file-000.mp4")) as film:
        frame = next(film.decode(video=0))
        assert frame.format.name == pixel_format
        assert int(frame.colorspace) == 6  # tagged as what it is: BT.601
        assert np.abs(frame.to_ndarray(format="rgb24")[24, 32].astype(int) - colour).max() <= 4


def test_figures_are_those_of_the_rows(write):
    root = write([7, 30, 11], commit_every=1)
    stats = json.loads((root / "meta/stats.json").read_text())
    rows = np.array(pq.read_table(root / "data").column("action").to_pylist())
    action = stats["action"]
    assert action["count"] == [48]
    for name, of in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        np.testing.assert_allclose(action[name], of(rows, axis=0), rtol=1e-5, atol=1e-9)
    for name, q in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_allclose(action[name], np.quantile(rows, q, axis=0), rtol=1e-5, atol=1e-9)
    seen = np.concatenate([pictures(k, n)[WRIST] for k, n in enumerate([7, 30, 11])]) / 255
    assert np.shape(stats[WRIST]["mean"]) == (3, 1, 1)
    np.testing.assert_allclose(np.ravel(stats[WRIST]["mean"]), seen.mean(axis=(0, 1, 2)), atol=0.02)
    np.testing.assert_allclose(np.ravel(stats[WRIST]["max"]), seen.max(axis=(0, 1, 2)), atol=0.02)


def test_appending_goes_on_where_the_last_writer_stopped(write, tmp_path: Path):
    write([3, 5], commit_every=5)
    root = write([4], first=2)
    assert info_of(root)["total_frames"] == 12
    assert pq.read_table(root / "data").column("index").to_pylist() == list(range(12))
    stats = json.loads((root / "meta/stats.json").read_text())
    rows = np.array(pq.read_table(root / "data").column("action").to_pylist())
    np.testing.assert_allclose(stats["action"]["q99"], np.quantile(rows, 0.99, axis=0), rtol=1e-5)
    with Dataset(root) as dataset:
        assert [episode.note["seed"] for episode in dataset] == [0, 1, 2]
        assert which(dataset[2].frames(WRIST), 2, 4) == list(range(4))


def test_frame_by_frame_is_the_same_as_whole(write, tmp_path: Path):
    whole = write([6], name="whole")
    values, views = columns(6, 0), pictures(0, 6)
    with (
        DatasetWriter(tmp_path / "steps", spec()) as writer,
        writer.episode("pick up cube 0") as episode,
    ):
        for row in range(6):
            episode.add({key: value[row] for key, value in {**values, **views}.items()})
        episode.replace_last("next.success", True)
    a, b = (
        pq.read_table(whole / "data").to_pydict(),
        pq.read_table(tmp_path / "steps/data").to_pydict(),
    )
    assert b.pop("next.success") == [False] * 5 + [True]
    a.pop("next.success")
    assert a == b
    assert (whole / f"videos/{WRIST}/chunk-000/file-000.mp4").read_bytes() == (
        tmp_path / f"steps/videos/{WRIST}/chunk-000/file-000.mp4"
    ).read_bytes()


def test_an_exception_discards_the_episode_and_keeps_those_before(tmp_path: Path):
    def record() -> None:
        with DatasetWriter(tmp_path / "set", spec(), commit_every=10) as writer:
            fill(writer, [3, 4])
            with writer.episode("pick up cube 0") as episode:
                episode.add(
                    {key: value[0] for key, value in {**columns(1), **pictures(0, 1)}.items()}
                )
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record()
    with Dataset(tmp_path / "set") as dataset:
        assert [len(episode) for episode in dataset] == [3, 4]


OTHER_PROCESSES = """
import os, sys, time
from pathlib import Path
from helpers.small_episodes import columns, fill, pictures, spec
from strands_cosmos3.datasets import DatasetWriter

def crash(root, when):
    writer = DatasetWriter(root, spec())
    fill(writer, [3, 4])
    if when == "mid-episode":
        episode = writer.episode("pick up cube 0")
        episode.add({key: value[0] for key, value in {**columns(1), **pictures(0, 1)}.items()})
        os.kill(os.getpid(), 9)
    place, left = os.replace, int(when)
    def replace(a, b):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        place(a, b)
    os.replace = replace
    fill(writer, [5], first=2)
    os.kill(os.getpid(), 9)

root, *moments = sys.argv[1:]
for when in moments:
    if (child := os.fork()) == 0:
        try:
            crash(Path(root) / when, when)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
writer = DatasetWriter(Path(root) / "open", spec())
print("open", flush=True)
time.sleep(600)
"""
MOMENTS = ("mid-episode", "0", "4", "7")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory):
    """A process that forks others, each killed at a moment of its writing, and has a writer open:
    (itself, the folder of their datasets, their exit statuses).
    """
    folder = tmp_path_factory.mktemp("others")
    command = [sys.executable, "-c", OTHER_PROCESSES, str(folder), *MOMENTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) as process:
        assert process.stdout is not None
        statuses = [int(process.stdout.readline()) for _ in MOMENTS]
        assert process.stdout.readline() == "open\n"
        yield process, folder, dict(zip(MOMENTS, statuses, strict=True))
        process.kill()


@pytest.mark.parametrize("when", MOMENTS)
def test_a_killed_process_leaves_whole_episodes(others, when: str):
    """A commit puts seven files in place (two videos, rows, index, tasks, figures, info); it
    dies before the first, in between, or after the last.
    """
    _, folder, statuses = others
    assert statuses[when] == -signal.SIGKILL
    root = folder / when
    survived = 3 if when == "7" else 2
    with Dataset(root) as dataset:
        assert len(dataset) == survived
        assert [len(dataset[i].frames(WRIST)) for i in range(2)] == [3, 4]
        assert dataset.column("index").tolist() == list(range(dataset.n_frames))
    DatasetWriter(root, spec()).close()  # sweeps up
    rows = pq.read_table(root / "data").num_rows
    assert rows == info_of(root)["total_frames"]
    with DatasetWriter(root, spec()) as writer:  # and can be written to
        fill(writer, [6], first=7)
    assert pq.read_table(root / "data").column("index").to_pylist() == list(
        range(7 + (5 if survived == 3 else 0) + 6)
    )
    assert not [path for path in root.rglob("*") if path.name.startswith(".")]
    with Dataset(root) as dataset:
        assert which(dataset[-1].frames(WRIST), 7, 6) == list(range(6))


def test_a_full_disk_is_a_typed_error_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with DatasetWriter(tmp_path / "set", spec()) as writer:
        fill(writer, [3])

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(DatasetError, match="No space left"):
                fill(writer, [4], first=1)
        with Dataset(tmp_path / "set") as dataset:
            assert len(dataset) == 1
    with Dataset(tmp_path / "set") as dataset:  # the writer's end tried again
        assert [len(episode) for episode in dataset] == [3, 4]


def test_one_writer_at_a_time(others):
    process, folder, _ = others
    with pytest.raises(DatasetBusyError, match="another process"):
        DatasetWriter(folder / "open", spec())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            DatasetWriter(folder / "open", spec()).close()
            break
        except DatasetBusyError:
            time.sleep(0.05)
    else:
        pytest.fail("the lock outlived its process")


OTHERS = {
    "fps": arm_spec(dict.fromkeys(("wrist", "exterior_1"), (48, 64)), fps=30),
    "robot type": arm_spec(dict.fromkeys(("wrist", "exterior_1"), (48, 64)), robot_type="ur5"),
    "observation.images.wrist": arm_spec({"wrist": (48, 32), "exterior_1": (48, 64)}),
    "observation.images.exterior_1": arm_spec({"wrist": (48, 64)}),
    "action": arm_spec(
        dict.fromkeys(("wrist", "exterior_1"), (48, 64)), embodiment="bridge", fps=15
    ),
    "observation.state": arm_spec(dict.fromkeys(("wrist", "exterior_1"), (48, 64)), n_joints=6),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_of_episodes_is_refused_and_named(write, what: str):
    root = write([3])
    before = info_of(root)
    with pytest.raises(DatasetMismatchError, match=what):
        DatasetWriter(root, OTHERS[what])
    assert info_of(root) == before
    DatasetWriter(root, spec()).close()  # and the lock is free


def test_a_folder_with_something_else_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(DatasetError, match=r"thesis\.tex"):
        DatasetWriter(tmp_path, spec())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(DatasetError, match="not a folder"):
        DatasetWriter(tmp_path / "thesis.tex", spec())


def spoiled(key: str, value: object) -> dict:
    return {**columns(4), key: value}


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        (spoiled(ACTION, np.full((4, 10), np.nan)), NonFiniteError, r"action\[0, 0\] is nan"),
        (spoiled(STATE, np.full((4, 8), 1e300)), NonFiniteError, "finite"),  # too large for float32
        (spoiled(STATE, np.zeros((4, 7))), ShapeError, r"\[4, 8\]"),
        (spoiled(ACTION, np.zeros((3, 10))), ShapeError, r"\[4, 10\]"),
        (spoiled("next.done", np.zeros(4)), InputError, "bool"),
        (spoiled(ACTION, np.full((4, 10), "x")), InputError, "float32"),
        (spoiled("reward", np.zeros(4)), InputError, "has also reward"),
        (
            {key: value for key, value in columns(4).items() if key != ACTION},
            InputError,
            "lacks action",
        ),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(
    tmp_path: Path, values: dict, error: type, says: str
):
    with DatasetWriter(tmp_path / "set", spec()) as writer:
        with pytest.raises(error, match=says):
            writer.add_episode(values, pictures(0, 4), task="pick")
        with writer.episode("pick") as episode:
            for key, value in pictures(0, 4).items():
                values[key] = value
            with pytest.raises(InputError):
                episode.add(
                    {key: np.asarray(value)[0] for key, value in values.items()}
                    | {STATE: [np.inf] * 8}
                )
            episode.discard()
    assert info_of(tmp_path / "set")["total_episodes"] == 0
    assert not list((tmp_path / "set").rglob("*.parquet"))


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((4, 48, 64, 3)),
        np.zeros((4, 64, 48, 3), np.uint8),
        np.zeros((3, 48, 64, 3), np.uint8),
    ],
)
def test_bad_pictures_are_refused(tmp_path: Path, frames: np.ndarray):
    with (
        DatasetWriter(tmp_path / "set", spec()) as writer,
        pytest.raises(InputError, match="uint8 of shape"),
    ):
        writer.add_episode(columns(4), {**pictures(0, 4), WRIST: frames}, task="pick")


def test_misuse_is_named(tmp_path: Path):
    writer = DatasetWriter(tmp_path / "set", spec())
    for task in ("", "  ", None):
        with pytest.raises(InputError, match="instruction"):
            writer.episode(task)  # type: ignore[arg-type]
    episode = writer.episode("pick")
    with pytest.raises(ConfigError, match="being recorded"):
        writer.episode("pick")
    with pytest.raises(InputError, match="at least one frame"):
        episode.save()
    episode.discard()
    with pytest.raises(ConfigError, match="saved or discarded"):
        episode.save()
    with pytest.raises(InputError, match="JSON"):
        writer.add_episode(columns(2), pictures(0, 2), task="pick", note={"q": np.zeros(3)})
    writer.close()
    writer.close()
    with pytest.raises(ConfigError, match="closed"):
        writer.add_episode(columns(2), pictures(0, 2), task="pick")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Feature("float16", (3,)), UnknownNameError),
        (lambda: Feature("float32", (3, 3)), ShapeError),
        (lambda: Feature("float32", (0,)), ShapeError),
        (lambda: Feature("float32", (2,), ("x",)), ShapeError),
        (lambda: Feature("video", (47, 64, 3)), ShapeError),
        (lambda: Feature("video", (10**9, 64, 3)), ShapeError),
        (lambda: DatasetSpec(0, {"a": Feature("bool", (1,))}), InputError),
        (lambda: DatasetSpec(15, {"a": Feature("bool", (1,))}, 5), InputError),  # pyright: ignore[reportArgumentType]
        (lambda: DatasetSpec(15, {"../a": Feature("bool", (1,))}), InputError),
        (lambda: DatasetSpec(15, {"index": Feature("int64", (1,))}), ConfigError),
        (lambda: DatasetSpec(15, {}), InputError),
        (lambda: arm_spec({}, embodiment="pusht"), ConfigError),
        (lambda: arm_spec({}, embodiment="robomind-franka-dual"), ConfigError),
        (lambda: VideoConfig(crf=99), InputError),
        (lambda: VideoConfig(pixel_format="rgb24"), UnknownNameError),
    ],
)
def test_specs_that_cannot_be_are_refused(make, error: type):
    with pytest.raises(error):
        make()
