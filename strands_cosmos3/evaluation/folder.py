"""The folder of an evaluation. Each episode is a file, written atomically and identified by its
settings.

::

    run/run.json                                    format, settings of the last start, versions
    run/episodes/<condition>/<task>/<index>.json    one episode
    run/films/<condition>/<task>-<index>.mp4        a failure, filmed; "-differs": another result
    run/dynamics.json                               forward and inverse dynamics, if requested
    run/report.json, run/report.html                the report

An episode whose file has the right identity is never run again. The files are the only state, so
after a kill at any moment the next start sees exactly the finished episodes. Each has a checksum:
an episode whose file was damaged or edited is run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from strands_cosmos3.checks import differences
from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.resources import (
    UNFINISHED,
    Closeable,
    locked,
    read_json,
    require_creatable,
    write_json,
    write_whole,
)

FORMAT = 2
"""Of the records and of what identifies them."""
Record = dict[str, Any]


class RunFolder(Closeable):
    """The folder of one evaluation, created and locked against others; ``resume`` allows one with
    episodes.

    Attributes:
        damaged: Files of episodes that were damaged or edited, so that :meth:`read` ignored them.

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
            self._lock = stack.pop_all()

    def write_start(self, facts: Mapping[str, Any]) -> None:
        """Store the settings and further facts of a start."""
        start = {"format": FORMAT, "settings": self.settings.to_dict(), **facts}
        write_json(self.path / "run.json", start)

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
        """Return a stored episode; None if there is none, or it is damaged or edited (see
        :attr:`damaged`).

        Raises:
            ConfigError: It was run with other settings; the message names those that differ.
        """
        path = self.episode_path(assignment)
        if not path.exists():
            return None
        record = _json(path)
        if record.get("checksum") != _checksum(record):
            self.damaged.append(path)
            return None
        if record["digest"] != self.settings.digest(assignment):
            raise ConfigError(
                f"{path} is another episode: {self._difference(record, assignment)}. Choose "
                "another --out."
            )
        return record

    def _difference(self, record: Record, assignment: Assignment) -> str:
        new = _flat(self.settings.identity(assignment))
        stored = _flat(record["identity"])
        return "; ".join(differences(new, stored, "{0} was {2!r} and is {1!r}")[:3])

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
            "identity": self.settings.identity(assignment),
            "digest": self.settings.digest(assignment),
        }
        stored["checksum"] = _checksum(stored)
        write_json(self.episode_path(assignment), stored)
        return stored

    def write_film(self, assignment: Assignment, film: bytes, equal: bool) -> Path:
        """Store a video; ``equal`` tells whether its run was bit-equal to the stored episode."""
        path = self._film_path(assignment, equal)
        write_whole(path, lambda unfinished: unfinished.write_bytes(film))
        return path

    def read_dynamics(self) -> Record | None:
        """Return the stored figures of dynamics, or None if there are none of these settings."""
        stored = _json(self.path / "dynamics.json")
        return stored if stored.get("identity") == self.settings.dynamics_identity() else None

    def write_dynamics(self, figures: Mapping[str, Any]) -> None:
        """Store figures of dynamics atomically."""
        write_json(
            self.path / "dynamics.json", {**figures, "identity": self.settings.dynamics_identity()}
        )

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
    """Return a record without its wall-clock times and its checksum: bit-equal for any number of
    workers.
    """
    return {name: value for name, value in record.items() if name not in ("times", "checksum")}


def _checksum(record: Record) -> str:
    """Return the SHA-256 of a record's contents, the checksum excepted."""
    contents = {name: value for name, value in record.items() if name != "checksum"}
    contents = json.loads(json.dumps(contents))  # as it is read back
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = prefix + name
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat
