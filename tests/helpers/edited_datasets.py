"""Edits of one small sound dataset, as other programs, hands and accidents make them, and what
must come of each: the same episodes, or a typed refusal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from helpers.films import write_film
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.datasets import (
    ACTION,
    EE_POSE,
    STATE,
    DatasetSpec,
    DatasetWriter,
    arm_spec,
    camera_key,
)
from strands_cosmos3.datasets.arm_rows import pose7, raw_rows

CAMERA, OTHER = camera_key("composite"), camera_key("other")
_POSE = ["x", "y", "z", "qx", "qy", "qz", "qw"]
_STATE = [*(f"joint_{i}" for i in range(7)), "gripper"]
NAMES = {
    STATE: _STATE,
    EE_POSE: _POSE,
    ACTION: ["tx", "ty", "tz", *(f"r{i}" for i in range(6)), "grasp"],
}
"""The columns in their order in the sound dataset."""
TASKS = ("open the drawer", "close the drawer")
N, SIZE, FPS = 38, (32, 48), 15
INFO, ROWS, TEXTS = "meta/info.json", "data/chunk-000/file-000.parquet", "meta/tasks.parquet"
INDEX = "meta/episodes/chunk-000/file-000.parquet"
FILM = f"videos/{CAMERA}/chunk-000/file-000.mp4"
Edit = Callable[[Path], None]


def picture(episode: int, row: int) -> np.ndarray:
    """Two grey fields that tell the episode and the row."""
    frame = np.full((*SIZE, 3), 40, np.uint8)
    frame[:16] = 30 + 5 * row
    frame[16:, :24] = 60 + 90 * episode
    return frame


def rows_seen(frames: np.ndarray) -> list[tuple[int, int]]:
    """(episode, row) of each picture."""
    level = frames.astype(float)
    episodes = np.round((level[:, 20:28, 4:20].mean((1, 2, 3)) - 60) / 90)
    rows = np.round((level[:, 4:12, 4:-4].mean((1, 2, 3)) - 30) / 5)
    return list(zip(episodes.astype(int).tolist(), rows.astype(int).tolist(), strict=True))


def sound(root: Path) -> Path:
    """Two episodes of an arm with two cameras, each with its own instruction."""
    rng = np.random.default_rng(0)
    full = arm_spec({"composite": SIZE, "other": SIZE})
    keys = (STATE, EE_POSE, ACTION, CAMERA, OTHER)
    spec = DatasetSpec(FPS, {key: full.features[key] for key in keys}, "panda")
    with DatasetWriter(root, spec, commit_every=2) as writer:
        for episode, task in enumerate(TASKS):
            T = np.tile(np.eye(4), (N, 1, 1))
            T[:, :3, 3] = [0.4, 0.0, 0.3] + np.cumsum(rng.normal(0.004, 0.002, (N, 3)), 0)
            T[:, :3, :3] = so3_exp(np.cumsum(rng.normal(0, 0.05, (N, 3)), 0))
            order = (np.arange(N) < 9 + episode).astype(float)
            state = np.concatenate([rng.normal(0, 0.3, (N, 7)), order[:, None]], 1)
            columns = {STATE: state, EE_POSE: pose7(T), ACTION: raw_rows(T, order)}
            film = np.stack([picture(episode, row) for row in range(N)])
            writer.add_episode(columns, dict.fromkeys((CAMERA, OTHER), film), task)
    return root


def info(change: Callable[[dict[str, Any]], Any]) -> Edit:
    """An edit of ``meta/info.json``."""

    def edit(root: Path) -> None:
        told = json.loads((root / INFO).read_text())
        change(told)
        (root / INFO).write_text(json.dumps(told))

    return edit


def stated(**values: Any) -> Edit:
    return info(lambda told: told.update(values))


def unstated(key: str) -> Edit:
    return info(lambda told: told.pop(key))


def feature(key: str, **values: Any) -> Edit:
    return info(lambda told: told["features"][key].update(values))


def told(key: str, **values: Any) -> Edit:
    """An edit of what a feature's info states."""
    return info(lambda whole: whole["features"][key]["info"].update(values))


def column(file: str, name: str, values: Any) -> Edit:
    """An edit of a column of a file: new values, or a function of the old ones."""

    def edit(root: Path) -> None:
        table = pq.read_table(root / file)
        old = table.column(name).to_pylist()
        new = values(np.array(old)).tolist() if callable(values) else values
        at = table.column_names.index(name)
        pq.write_table(table.set_column(at, name, pa.array(new)), root / file)

    return edit


def gripper(key: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """An edit of the last column of a feature."""
    return column(ROWS, key, lambda v: np.concatenate([v[:, :-1], change(v[:, -1:])], axis=1))


def table(file: str, change: Callable[[pa.Table], pa.Table], **options: Any) -> Edit:
    return lambda root: pq.write_table(change(pq.read_table(root / file)), root / file, **options)


def both(*edits: Edit) -> Edit:
    def edit(root: Path) -> None:
        for one in edits:
            one(root)

    return edit


def reordered(key: str, order: list[int], names: Any = None) -> Edit:
    """Columns in another order, and named so."""

    def edit(root: Path) -> None:
        old = json.loads((root / INFO).read_text())["features"][key]["names"]
        column(ROWS, key, lambda values: values[:, order])(root)
        new = [old[i] for i in order] if names is None else names
        feature(key, names=new)(root)

    return edit


def filmed(times: int = 1, fps: float = FPS, size: tuple[int, int] | None = None, **film: Any):
    """The camera's film encoded anew; of ``times`` frames a row, the first alone shows it."""

    def edit(root: Path) -> None:
        frames = np.stack([picture(e, row) for e in range(2) for row in range(N)])
        frames = np.repeat(frames, times, axis=0)
        if times > 1:
            frames[np.arange(len(frames)) % times > 0] = 0
        if size is not None:
            frames = np.zeros((len(frames), *size, 3), np.uint8)
        write_film(root / FILM, frames, fps, **film)

    return edit


def faster(times: int, fps: float) -> Edit:
    """``times`` frames for each, at another rate; those between hold other numbers."""

    def edit(root: Path) -> None:
        rows = pq.read_table(root / ROWS)
        columns = {}
        between = np.arange(2 * N * times) % times > 0
        for name in rows.column_names:
            values = np.repeat(np.array(rows.column(name).to_pylist()), times, axis=0)
            if name in (STATE, ACTION):
                values[between] = 0.5
            if name == EE_POSE:
                values[between, :3] += 0.05
            columns[name] = values.tolist()
        row = np.tile(np.arange(N * times), 2)
        columns |= {"index": list(range(2 * N * times)), "frame_index": row.tolist()}
        columns["timestamp"] = (row / fps).astype(np.float32).tolist()
        pq.write_table(pa.table(columns), root / ROWS)
        for name, values in (
            ("length", [N * times] * 2),
            ("dataset_from_index", [0, N * times]),
            ("dataset_to_index", [N * times, 2 * N * times]),
            *((f"videos/{key}/from_timestamp", [0.0, N * times / fps]) for key in (CAMERA, OTHER)),
        ):
            column(INDEX, name, values)(root)
        stated(fps=fps, total_frames=2 * N * times)(root)
        filmed(times, fps)(root)
        shutil.copy(root / FILM, root / FILM.replace(CAMERA, OTHER))

    return edit


def tasks(numbers: list[int], texts: list[str]) -> Edit:
    """Instructions by frame."""
    return both(
        column(ROWS, "task_index", numbers),
        lambda root: pq.write_table(
            pa.table({"task": texts, "task_index": list(range(len(texts)))}), root / TEXTS
        ),
        stated(total_tasks=len(texts)),
    )


def cut(file: str) -> Edit:
    def edit(root: Path) -> None:
        whole = (root / file).read_bytes()
        (root / file).write_bytes(whole[: len(whole) // 2])

    return edit


def moved(root: Path) -> None:
    """The data file in a folder of another name."""
    (root / "rows").mkdir()
    (root / ROWS).rename(root / "rows/0-0.parquet")
    stated(data_path="rows/{chunk_index}-{file_index}.parquet")(root)


@dataclass(frozen=True)
class Case:
    """An edit and what must come of it.

    Args:
        opened, merged, trained: Whether reading, merging and training give the sound dataset's
            episodes; else they must refuse.
        times: Frames of the edited dataset for one of the sound one.
        instructions: By frame of the sound dataset, if they are others.
        other: A feature whose numbers are others.
    """

    edit: Edit
    opened: bool = True
    merged: bool = True
    trained: bool = True
    times: int = 1
    instructions: tuple[str, ...] = tuple(TASKS[e] for e in range(2) for _ in range(N))
    other: str = ""


def _refused(edit: Edit) -> Case:
    return Case(edit, opened=False, merged=False, trained=False)


def _untrained(edit: Edit, other: str = "") -> Case:
    return Case(edit, trained=False, other=other)


_THREE = ["lift", "turn", "put"]
_BY_FRAME = [0] * 5 + [1] * 8 + [2] * 25 + [1] * 27 + [0] * 11


def _absent(key: str) -> Edit:
    return both(
        *(
            column(INDEX, f"videos/{key}/{name}", [0, None])
            for name in ("chunk_index", "file_index", "from_timestamp")
        )
    )


def _unknown(key: str) -> Edit:
    return table(
        INDEX,
        lambda rows: rows.drop_columns([n for n in rows.column_names if f"videos/{key}/" in n]),
    )


def _twice(name: str) -> Edit:
    return table(
        ROWS,
        lambda rows: pa.Table.from_arrays(
            [*rows.columns, rows[name]], names=[*rows.column_names, name]
        ),
    )


CASES = {
    "nothing": Case(lambda root: None),
    # columns
    "pose with w first": Case(reordered(EE_POSE, [0, 1, 2, 6, 3, 4, 5])),
    "quaternion before position": Case(reordered(EE_POSE, [3, 4, 5, 6, 0, 1, 2])),
    "pose backwards": Case(reordered(EE_POSE, list(range(7))[::-1])),
    "pose in a label": Case(feature(EE_POSE, names=["pose"])),
    "pose of angles": Case(
        feature(EE_POSE, names=[*_POSE[:3], "roll", "pitch", "yaw", "grip"]), trained=False
    ),
    "pose without one name": Case(feature(EE_POSE, names=_POSE[:6]), trained=False),
    "pose in millimetres": Case(
        column(ROWS, EE_POSE, lambda v: v * ([1e3] * 3 + [1] * 4)), trained=False, other=EE_POSE
    ),
    "pose of the flange": _untrained(told(EE_POSE, frame="panda_link8")),
    "pose in the world": _untrained(told(EE_POSE, parent="world")),
    "pose stated in inches": _untrained(told(EE_POSE, unit="inch")),
    "pose without a word of its frame": Case(feature(EE_POSE, info={})),
    "gripper first in the action": Case(reordered(ACTION, [9, *range(9)])),
    "action shuffled": Case(reordered(ACTION, [4, 1, 9, 0, 8, 2, 3, 7, 5, 6])),
    "action without a gripper": Case(
        feature(ACTION, names=[f"a{i}" for i in range(10)]), trained=False
    ),
    "action with two grippers": Case(
        feature(ACTION, names=["grip", *(f"a{i}" for i in range(8)), "grasp"]), trained=False
    ),
    "gripper in percent": _untrained(gripper(ACTION, lambda v: v * 100), ACTION),
    "gripper of -1 and 1": _untrained(gripper(ACTION, lambda v: 1 - 2 * v), ACTION),
    "gripper of the pad's width": _untrained(gripper(ACTION, lambda v: v * 0.11), ACTION),
    "gripper of the finger's way": _untrained(gripper(ACTION, lambda v: v * 0.05), ACTION),
    "gripper first in the state": Case(reordered(STATE, [7, *range(7)])),
    "joints backwards": Case(reordered(STATE, [*range(7)][::-1] + [7])),
    "state in a list in a list": Case(feature(STATE, names=[_STATE])),
    "state of motors": Case(feature(STATE, names={"motors": _STATE})),
    "state by places": Case(feature(STATE, names={name: i for i, name in enumerate(_STATE)})),
    "two joints of one name": _refused(feature(STATE, names=["joint_0", *_STATE[:6], "gripper"])),
    "two columns of one name": _refused(_twice(ACTION)),
    "a foreign feature": Case(
        info(lambda told: told["features"].update(more={"dtype": "string", "shape": [1]})),
        merged=False,
    ),
    "texts that training does not read": Case(
        column(ROWS, STATE, [["x"] * 8] * 2 * N), opened=False, merged=False
    ),
    # instructions
    "three instructions": Case(
        tasks(_BY_FRAME, _THREE), instructions=tuple(_THREE[i] for i in _BY_FRAME)
    ),
    "another first frame": Case(
        tasks([1] + [0] * (2 * N - 1), _THREE[:2]),
        instructions=("turn", *("lift",) * (2 * N - 1)),
    ),
    "instructions in another order": Case(table(TEXTS, lambda rows: rows.take([1, 0]))),
    "instructions as an index": Case(
        table(TEXTS, lambda rows: rows.rename_columns(["task_index", "__index_level_0__"]))
    ),
    "an instruction too few": _refused(column(ROWS, "task_index", [0] * N + [2] * N)),
    # what info.json states
    "no total_tasks": Case(unstated("total_tasks")),
    "a null for total_tasks": Case(stated(total_tasks=None)),
    "tasks without end": _refused(stated(total_tasks=2**50)),
    "no total_episodes": _refused(unstated("total_episodes")),
    "no total_frames": _refused(unstated("total_frames")),
    "a frame too many": _refused(stated(total_frames=2 * N + 1)),
    "a newer version": _refused(stated(codebase_version="v10.0")),
    "an older version": _refused(stated(codebase_version="v2.1")),
    "a version with three parts": Case(stated(codebase_version="v3.0.0")),
    "a version without a letter": Case(stated(codebase_version="3.0")),
    "null for chunks and robot": Case(stated(chunks_size=None, robot_type=None)),
    # the index and the rows
    "a length too many": _refused(column(INDEX, "length", [N, N + 1])),
    "times of another frame": _refused(column(ROWS, "timestamp", lambda v: v + 0.2)),
    "frame numbers backwards": _refused(
        column(ROWS, "frame_index", lambda v: np.tile(np.arange(N)[::-1], 2))
    ),
    "frame numbers from one": _refused(column(ROWS, "frame_index", lambda v: v + 1)),
    "frame numbers of the whole set": _refused(
        column(ROWS, "frame_index", lambda v: np.arange(2 * N))
    ),
    "rows of another order": _refused(table(ROWS, lambda rows: rows.take([*range(2 * N)][::-1]))),
    "half of the rows": _refused(cut(ROWS)),
    "many small row groups": Case(
        table(ROWS, lambda rows: pa.Table.from_pylist(rows.to_pylist()), row_group_size=7)
    ),
    "packed in another way": Case(
        table(ROWS, lambda rows: rows, compression="zstd", use_dictionary=False)
    ),
    "rows in another folder": Case(moved),
    # films
    "film that begins late": Case(filmed(begin=3)),
    "film that begins late with B-frames": Case(filmed(begin=1, b_frames=2)),
    "film in AV1": Case(filmed(codec="libsvtav1")),
    "film in VP9": Case(filmed(codec="libvpx-vp9", begin=2)),
    "film of twice the rate": Case(filmed(2, 30), merged=False),
    "film of another size": _refused(filmed(size=(48, 48))),
    "half of a film": _refused(cut(FILM)),
    "late film whose start is counted twice": _refused(
        both(
            filmed(begin=3),
            column(INDEX, f"videos/{CAMERA}/from_timestamp", [3 / FPS, (N + 3) / FPS]),
        )
    ),
    "another camera absent once": Case(_absent(OTHER), merged=False),
    "the camera absent once": _refused(_absent(CAMERA)),
    "another camera not in the index": Case(_unknown(OTHER), merged=False),
    # rates
    "30 frames a second": Case(faster(2, 30), times=2),
    "60 frames a second": Case(faster(4, 60), times=4),
    "29.97 frames a second": Case(faster(2, 29.97), times=2),
    "29.97 frames a second, stated as 29": _refused(both(faster(2, 29.97), stated(fps=29))),
    "25 frames a second": Case(faster(1, 25), trained=False),
    "5 frames a second": Case(faster(1, 5), trained=False),
}
