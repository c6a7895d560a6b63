"""The folder of an evaluation. Each episode is a file, written atomically and identified by its
settings.

::

    run/run.json                                    format, settings of the last start, versions,
                                                    and the folder's id
    run/episodes/<condition>/<task>/<index>.json    one episode
    run/films/<condition>/<task>-<index>.mp4        a failure, filmed; "-differs": another result
    run/dynamics.json                               forward and inverse dynamics, if requested
    run/report.json, run/report.html                the report

An episode whose file has the right identity is never run again. The files are the only state, so
after a kill at any moment the next start sees exactly the finished episodes. Each has a checksum
and its folder's id: an episode whose file was damaged, edited, or copied from another place is run
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from strands_cosmos3.checks import differences
from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.evaluation.judging import judge_identity
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings, digest_of
from strands_cosmos3.evaluation.statistics import Record, figures_of, loop_latency
from strands_cosmos3.resources import (
    UNFINISHED,
    Closeable,
    locked,
    read_json,
    require_creatable,
    write_json,
    write_whole,
)

FORMAT = 3
"""Of the records and of what identifies them."""
_FIELDS: Mapping[str, Any] = {
    "counters": dict,
    "times": dict,
    "success": bool | None,
    "duration_s": int | float,
    "fault": str | None,
    "held": str | None,
    "model_sha256": str | None,
}


class RunFolder(Closeable):
    """The folder of one evaluation, created and locked against others; ``resume`` allows one with
    episodes.

    Attributes:
        damaged: Files of episodes that were damaged, edited or copied, so that :meth:`read` ignored
            them.

    Raises:
        ConfigError: Another evaluation has it open, it cannot be written, it contains episodes
            and ``resume`` is False, or episodes of another format.
    """

    def __init__(self, path: Path, settings: Settings, resume: bool):
        self.path = Path(path)
        self.settings = settings
        self.damaged: list[Path] = []
        require_creatable(self.path / "run.json", "--out")
        with ExitStack() as stack:
            stack.enter_context(locked(self.path, "--out"))
            for unfinished in self.path.rglob(UNFINISHED):
                if unfinished.is_file():
                    unfinished.unlink(missing_ok=True)
            stored = list(self.path.glob("episodes/*/*/*.json"))
            if stored and not resume:
                raise ConfigError(
                    f"{self.path} contains {len(stored)} episode{'s' if len(stored) > 1 else ''} "
                    "already; add --resume to continue with them, or choose another --out."
                )
            start = _json(self.path / "run.json")
            if start and start.get("format") != FORMAT:
                raise ConfigError(
                    f"{self.path} was written by another version of this package, whose episodes "
                    "are not comparable; choose another --out."
                )
            if stored:  # None, where it was lost, is no reason to run them again
                self._id = start.get("id") if _is_whole(start) else None
            else:
                self._id = uuid4().hex
            self._lock = stack.pop_all()

    def write_start(self, facts: Mapping[str, Any]) -> None:
        """Store the settings and further facts of a start."""
        start = {"format": FORMAT, "id": self._id, "settings": self.settings.to_dict(), **facts}
        write_json(self.path / "run.json", _with_checksum(start))

    def episode_path(self, assignment: Assignment) -> Path:
        """Return the path of an episode."""
        condition, task, index = assignment.key
        return self.path / "episodes" / condition / task / f"{index:05d}.json"

    def film_of(self, assignment: Assignment) -> tuple[Path, bool] | None:
        """Return the path of an episode's video and whether its run was bit-equal; None if there
        is no video.
        """
        films = ((self._film_path(assignment, equal), equal) for equal in (True, False))
        return next((film for film in films if film[0].exists()), None)

    def _film_path(self, assignment: Assignment, equal: bool) -> Path:
        condition, task, index = assignment.key
        name = f"{task}-{index:05d}{'' if equal else '-differs'}.mp4"
        return self.path / "films" / condition / name

    def read(self, assignment: Assignment) -> Record | None:
        """Return a stored episode; None if there is none, or it is damaged, edited or copied (see
        :attr:`damaged`).

        Raises:
            ConfigError: The folder's episodes were run with other settings; the message names those
                that differ.
        """
        path = self.episode_path(assignment)
        if not path.exists():
            return None
        record = _json(path)
        if not self._is_sound(record, assignment):
            self.damaged.append(path)
            return None
        if record["digest"] != digest_of(self._identity(assignment)):
            raise ConfigError(
                f"{path} is another episode: {self._difference(record, assignment)}. Choose "
                "another --out."
            )
        return record

    def _is_sound(self, record: Record, assignment: Assignment) -> bool:
        """Return whether a record is whole, that of an episode, of this folder, and such that a
        report can be made of it: its checksum may be right, and its contents another version's.
        """
        if not all(isinstance(record.get(name), kind) for name, kind in _FIELDS.items()):
            return False
        try:
            figures_of([record])
            loop_latency([record])
            identity = record["identity"]
            place = record["condition"], identity["task"], identity["index"]
            return (
                _is_whole(record)
                and place == assignment.key
                and self._id in (None, record["times"]["folder"])
                and record["digest"] == digest_of(identity)
            )
        except (LookupError, RecursionError, TypeError, ValueError):
            return False

    def _difference(self, record: Record, assignment: Assignment) -> str:
        new = _flat(self._identity(assignment))
        stored = _flat(record["identity"])
        return "; ".join(differences(new, stored, "{0} was {2!r} and is {1!r}")[:3])

    def _identity(self, assignment: Assignment) -> dict[str, Any]:
        """That of the settings, and the judge's."""
        return {**self.settings.identity(assignment), **judge_identity(self.settings)}

    def read_all(self, plan: Iterable[Assignment]) -> dict[tuple[str, str, int], Record]:
        """Return every stored episode of a plan, by key. Errors: as :meth:`read`."""
        records = {assignment.key: self.read(assignment) for assignment in plan}
        return {key: record for key, record in records.items() if record is not None}

    def write(self, assignment: Assignment, record: Record) -> Record:
        """Store an episode atomically and return it as stored."""
        stored = {
            "condition": assignment.condition.name,
            "index": assignment.index,
            **record,
            "identity": (identity := self._identity(assignment)),
            "digest": digest_of(identity),
            "times": {**record["times"], "folder": self._id},  # what no comparison of runs looks at
        }
        stored = _with_checksum(stored)
        path = self.episode_path(assignment)
        if path.is_dir():  # which no file replaces
            path.rename(next(p for n in count() if not (p := Path(f"{path}.damaged{n}")).exists()))
        write_json(path, stored)
        return stored

    def write_film(self, assignment: Assignment, film: bytes, equal: bool) -> Path:
        """Store a video; ``equal`` tells whether its run was bit-equal to the stored episode."""
        path = self._film_path(assignment, equal)
        write_whole(path, lambda unfinished: unfinished.write_bytes(film))
        return path

    def read_dynamics(self) -> Record | None:
        """Return the stored figures of dynamics, or None if there are none of these settings."""
        stored = _json(self.path / "dynamics.json")
        same = stored.get("identity") == self.settings.dynamics_identity()
        return stored if same and _is_whole(stored) else None

    def write_dynamics(self, figures: Mapping[str, Any]) -> None:
        """Store figures of dynamics atomically."""
        stored = _with_checksum({**figures, "identity": self.settings.dynamics_identity()})
        write_json(self.path / "dynamics.json", stored)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if there is none, or it is damaged."""
    try:
        return read_json(path, EvaluationError, "")
    except EvaluationError:
        return {}


def without_times(record: Record) -> Record:
    """Return a record without its wall-clock times (with its folder's id) and its checksum:
    bit-equal for any number of workers, and in any folder.
    """
    return {name: record[name] for name in record if name not in ("times", "checksum")}


def _with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the SHA-256 of all others as their ``checksum``."""
    contents = {name: value for name, value in values.items() if name != "checksum"}
    contents = json.loads(json.dumps(contents))  # as it is read back
    text = json.dumps(contents, sort_keys=True)
    return {**values, "checksum": hashlib.sha256(text.encode()).hexdigest()}


def _is_whole(values: Mapping[str, Any]) -> bool:
    """Return whether the checksum of values is theirs."""
    return values.get("checksum") == _with_checksum(values)["checksum"]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = prefix + name
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat
