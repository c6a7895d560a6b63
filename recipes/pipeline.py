"""Stages that follow one another in a folder: each runs once, resumes, and runs anew when something
before it has changed.

``records/<stage>.json`` says what a stage was begun with and, once it has finished, what it made. A
stage is done while both are as recorded. If not, what it and the later stages made is moved to
``stale-<n>/``, never deleted, and made anew. A stage that was interrupted is run again as it is,
because each of them resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strands_cosmos3.errors import Cosmos3Error, TrainingError
from strands_cosmos3.resources import locked, storing, write_json
from strands_cosmos3.training.cost import duration, machine

Work = Callable[[Path], None]


@dataclass(frozen=True)
class Stage:
    """A stage. Paths are relative to the folder.

    Args:
        command: Its command line, which runs in the folder, as the card shows it.
        decides: Options that determine its result; the others may change.
        reads: Files and folders that it depends on, whose contents count.
        makes: Those by which others know its result.
        owns: Everything of it that is moved away before it runs anew.
        work: Runs it, given the folder.
    """

    name: str
    command: str
    decides: Mapping[str, Any]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    owns: tuple[str, ...]
    work: Work = field(compare=False)


def make(folder: Path, stages: Sequence[Stage], say: Callable[[str], object] = print) -> None:
    """Run the stages of a folder that are not done.

    Raises:
        ConfigError: Another process is at work on the folder.
        TrainingError: A stage failed; its message has the command. What it made so far is kept.
        StorageError: The folder cannot be made.
    """
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "--out"):
        for i in range(len(stages)):
            _make_stage(folder, stages[i:], say)


def _make_stage(folder: Path, stages: Sequence[Stage], say: Callable[[str], object]) -> None:
    """Run the first of these stages if it is not done."""
    stage = stages[0]
    path = record_path(folder, stage.name)
    begun = json.loads(
        json.dumps({"decides": stage.decides, "reads": digests(folder, stage.reads)})
    )
    record = read_record(folder, stage.name)
    same = {name: record.get(name) for name in begun} == begun
    if same and record.get("makes") == digests(folder, stage.makes):
        say(f"{stage.name}: done on {record['finished']}, in {duration(record['seconds'])}")
        return
    if not same or "makes" in record:
        put_aside(folder, stages, say)
        record = {**begun, "began": now(), "seconds": 0.0}
    say(f"{stage.name}: {stage.command}")
    record |= {"command": stage.command, "machine": machine()}
    write_json(path, record)
    start = time.monotonic()
    try:
        stage.work(folder)
    finally:
        record["seconds"] = round(record["seconds"] + time.monotonic() - start, 1)
        write_json(path, record)
    made = digests(folder, stage.makes)
    if missing := [name for name, digest in made.items() if digest is None]:
        raise TrainingError(
            f"stage {stage.name} did not write {', '.join(missing)} in {folder}: {stage.command}"
        )
    write_json(path, {**record, "makes": made, "finished": now()})


def record_path(folder: Path, stage: str) -> Path:
    """Return the path of a stage's record."""
    return folder / "records" / f"{stage}.json"


def read_record(folder: Path, stage: str) -> dict[str, Any]:
    """Return the record of a stage, or an empty one."""
    path = record_path(folder, stage)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def put_aside(folder: Path, stages: Sequence[Stage], say: Callable[[str], object]) -> None:
    """Move what stages made, and their records, to a new folder ``stale-<n>``, if there is
    anything.
    """
    owned = dict.fromkeys(
        path for stage in stages for path in (*stage.owns, f"records/{stage.name}.json")
    )
    paths = [path for path in owned if (folder / path).exists()]
    if not paths:
        return
    stale = next(place for n in range(1, 10_000) if not (place := folder / f"stale-{n}").exists())
    for path in paths:
        if (folder / path).exists():  # it may have lain in a folder that was moved
            (stale / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / path, stale / path)
    say(f"{stages[0].name} begins; what was there before is in {stale}: {', '.join(paths)}")


def digests(folder: Path, paths: Sequence[str]) -> dict[str, str | None]:
    """Return the SHA-256 of files and of folders (names and contents, apart from hidden ones);
    None for a missing one.
    """
    return {path: digest(folder / path) for path in paths}


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file or folder, or None if it does not exist."""
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")
        )
        text = "".join(f"{file.relative_to(path).as_posix()} {digest(file)}\n" for file in files)
        return hashlib.sha256(text.encode()).hexdigest()
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def program(arguments: Sequence[str]) -> Work:
    """Return what runs ``strands-cosmos3`` in a process of its own, which saves its state when
    Ctrl-C ends it.
    """

    def work(folder: Path) -> None:
        package = [] if arguments[0].startswith("recipes.") else ["strands_cosmos3"]
        command = [sys.executable, "-m", *package, *arguments]
        # a session of its own, so that a terminal's Ctrl-C reaches it once, from here
        here = str(Path(__file__).resolve().parents[1])
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(command, cwd=folder, start_new_session=True, env=environment)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
        if status == 130:
            raise KeyboardInterrupt
        if status:
            raise TrainingError(
                f"status {status} of: cd {folder} && strands-cosmos3 {' '.join(arguments)}"
            )

    return work


def now() -> str:
    """Return the date and time."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def run_stages(
    arguments: Sequence[str] | None,
    name: str,
    description: str,
    stages: Callable[[bool, int, int], Sequence[Stage]],
    made: str,
) -> int:
    """Run the command of a recipe: parse its options, make what is missing, return an exit status.

    Args:
        arguments: Of the command line; None means the program's.
        name: What is made, e.g. ``"bundled policy"``.
        stages: Whether the recipe is the tiny one, its seed, and the number of workers -> its
            stages.
        made: The result, in the folder ``--out``.
    """
    parser = argparse.ArgumentParser(f"make {name.replace(' ', '-')}", description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that record and evaluate; one per core"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of everything random; another one makes another policy"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="all stages in minutes, for a policy that can do nothing",
    )
    given = parser.parse_args(arguments)
    # under nohup SIGINT is ignored, and stages would ignore it, too
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        make(given.out, stages(given.tiny, given.seed, given.workers))
    except Cosmos3Error as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on.", file=sys.stderr)
        return 130
    print(f"checkpoint and card: {given.out / made}")
    return 0
