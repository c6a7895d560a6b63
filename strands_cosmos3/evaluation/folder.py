"""``run/``: where an evaluation's episodes lie, each written whole, each known by what it is.

::

    run/run.json                                    the settings of the last start, versions
    run/episodes/<condition>/<task>/<index>.json    one episode
    run/films/<condition>/<task>-<index>.mp4        a failure, run again and filmed; "-differs" where it then went otherwise
    run/dynamics.json                               forward and inverse dynamics, where they were asked for
    run/report.json, run/report.html                what it comes to

An episode that is there and is the one wanted is never run again. Nothing is counted and no log is replayed: the files are
the state, so whatever moment a process is killed at, the next start sees exactly what was finished.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.resources import write_json, write_whole

Record = dict[str, Any]


class RunFolder:
    """The folder of one evaluation. Open it as a context manager: a second evaluation cannot write to it meanwhile.

    Args:
        path: The folder; it is made.
        settings: What is evaluated.
        resume: Whether episodes may be there already.

    Raises:
        ConfigError: Another evaluation has it open, it cannot be written, it holds episodes and ``resume`` is False, or
            an episode in it was run with other settings.
    """

    def __init__(self, path: Path, settings: Settings, resume: bool):
        self.path, self.settings = Path(path), settings
        self._lock: IO[str] | None = None
        try:
            (self.path / "episodes").mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"another evaluation is writing to {self.path}; wait for it, or choose another --out.") from None
        except OSError as error:
            self.close()
            raise ConfigError(f"--out {str(self.path)!r} cannot be written ({error.strerror}); choose another place.") from None
        try:
            self._tidy()
            if not resume and (stored := self._stored_files()):
                raise ConfigError(
                    f"{self.path} holds {len(stored)} episode{'s' if len(stored) > 1 else ''} already; add --resume to go on "
                    "with them, or choose another --out."
                )
        except ConfigError:
            self.close()
            raise

    def _tidy(self) -> None:
        """Remove what a killed process left half-written: hidden files that were never put in their place."""
        for hidden in self.path.rglob(".*"):
            if hidden.suffix in (".json", ".html", ".mp4"):
                hidden.unlink(missing_ok=True)

    def _stored_files(self) -> list[Path]:
        return sorted(self.path.glob("episodes/*/*/*.json"))

    def episode_path(self, assignment: Assignment) -> Path:
        """Where an episode lies."""
        condition, task, index = assignment.key
        return self.path / "episodes" / condition / task / f"{index:05d}.json"

    def film_of(self, assignment: Assignment) -> tuple[Path, bool] | None:
        """Where its film lies, and whether the filmed run was the same to the bit; None where there is none."""
        return next(((path, same) for same in (True, False) if (path := self._film_path(assignment, same)).exists()), None)

    def _film_path(self, assignment: Assignment, same: bool) -> Path:
        condition, task, index = assignment.key
        return self.path / "films" / condition / f"{task}-{index:05d}{'' if same else '-differs'}.mp4"

    def read(self, assignment: Assignment) -> Record | None:
        """A stored episode, or None where there is none that can be read.

        Raises:
            ConfigError: It was run with other settings; the message names the first that differs.
        """
        path = self.episode_path(assignment)
        try:
            record = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return None
        if not isinstance(record, dict) or record.get("digest") != self.settings.digest(assignment):
            raise ConfigError(f"{path} is another episode: {self._difference(record, assignment)}. Choose another --out.")
        return record

    def _difference(self, record: Any, assignment: Assignment) -> str:
        wanted = _flat(self.settings.identity(assignment))
        found = _flat(record.get("identity", {})) if isinstance(record, dict) else {}
        different = [
            f"{name} was {found.get(name)!r} and is {wanted[name]!r}" for name in wanted if found.get(name) != wanted[name]
        ]
        return "; ".join(different[:3]) or "its contents cannot be understood"

    def read_all(self, plan: Iterable[Assignment]) -> dict[tuple[str, str, int], Record]:
        """Every stored episode of a plan, by key.

        Raises:
            ConfigError: As :meth:`read`.
        """
        found = {assignment.key: self.read(assignment) for assignment in plan}
        return {key: record for key, record in found.items() if record is not None}

    def write(self, assignment: Assignment, record: Record) -> Record:
        """Store an episode, whole or not at all; returns it as stored."""
        stored = {
            "condition": assignment.condition.name,
            "index": assignment.index,
            **record,
            "identity": self.settings.identity(assignment),
            "digest": self.settings.digest(assignment),
        }
        path = self.episode_path(assignment)
        write_json(path, stored)
        return stored

    def write_film(self, assignment: Assignment, film: bytes, same: bool) -> Path:
        """Store a film; ``same`` says whether the filmed run ended as the stored episode did, to the bit."""
        path = self._film_path(assignment, same)
        write_whole(path, lambda hidden: hidden.write_bytes(film))
        return path

    def read_world(self) -> Record | None:
        """The stored figures of dynamics, or None where there are none of these settings."""
        try:
            stored = json.loads((self.path / "dynamics.json").read_text())
        except (OSError, ValueError):
            return None
        return stored if isinstance(stored, dict) and stored.get("identity") == self.settings.world_identity() else None

    def write_world(self, figures: Mapping[str, Any]) -> None:
        """Store figures of dynamics, whole or not at all."""
        write_json(self.path / "dynamics.json", {**figures, "identity": self.settings.world_identity()})

    def write_file(self, name: str, write: Callable[[Path], object]) -> Path:
        """Store a file of the evaluation's own, such as its report."""
        write_whole(self.path / name, write)
        return self.path / name

    def close(self) -> None:
        """Let others write."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def without_times(record: Record) -> Record:
    """An episode without what the clock on the wall decided: the same on any number of workers, to the bit."""
    return {name: value for name, value in record.items() if name != "times"}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
