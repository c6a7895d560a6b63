"""A small make: the steps of a recipe run one after another in a folder, each of them once.

``records/<step>.json`` holds the command of a step, the machine and the time that it took. A step
that has finished is skipped, and one that was interrupted runs again, because each step resumes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tyro

from strands_cosmos3.cli import status_of
from strands_cosmos3.commands.demos import Recording
from strands_cosmos3.commands.flags import registry
from strands_cosmos3.errors import ConfigError, TrainingError
from strands_cosmos3.evaluation.tables import percent, text_of
from strands_cosmos3.resources import load_json, locked, storing, write_folder, write_json
from strands_cosmos3.tables import read_toml
from strands_cosmos3.training.cost import duration, machine


@dataclass(frozen=True)
class PipelineStep:
    """A step of a recipe.

    Args:
        name: Its name, and that of the folder or record that it writes.
        command: What the record and the card show. A folder whose step was begun with another one
            is refused.
        work: Runs it in a folder.
    """

    name: str
    command: str
    work: Callable[[Path], object] = field(compare=False)


@dataclass(frozen=True)
class PipelineOptions:
    """Options of a recipe."""

    out: Path  # folder of everything that is made; the same one resumes
    workers: int = 2  # processes that record and evaluate; one per core
    seed: int = 0  # of everything random; another one makes another policy
    tiny: bool = False  # all steps in minutes, for a policy that can do nothing


def command_step(name: str, command: str, unrecorded: str = "") -> PipelineStep:
    """Return a step that runs ``strands-cosmos3``, or a module of the recipes if its name is the
    first word; ``unrecorded`` arguments change no result.
    """
    words = shlex.split(command)
    module = words[0].startswith("recipes.")
    record = " ".join(["python -m" if module else "strands-cosmos3", *words])
    program = [*([] if module else ["strands_cosmos3"]), *words, *shlex.split(unrecorded)]
    return PipelineStep(name, record, lambda folder: _run(folder, program, record))


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Args:
        name: What it makes.
        path: A TOML file: its ``steps``, the ``options`` in their commands, and those of a ``tiny``
            run.
        trained: Folder of the trained checkpoint in that of the recipe.
        card: Returns the model card.
        files: Further files that the checkpoint has, of the recipe's folder.
        works: The steps that are no command: each works in a folder, with the options.
    """

    name: str
    path: Path
    trained: str
    card: Callable[[Path], str]
    files: tuple[str, ...] = ()
    works: Mapping[str, Callable[[Path, Mapping[str, Any]], object]] = field(default_factory=dict)

    def steps(self, options: PipelineOptions) -> list[PipelineStep]:
        """Return the steps; the last one writes ``checkpoint/``, the trained one with its card."""
        content = read_toml(self.path)
        values = {**content["options"], **vars(options), "trained": self.trained}
        if options.tiny:
            values |= content["tiny"]
        steps = [self._step(step, values) for step in content["steps"]]
        return [*steps, PipelineStep("card", "the checkpoint with its card", self._write)]

    def _step(self, step: Mapping[str, str], values: Mapping[str, Any]) -> PipelineStep:
        name = step["name"]
        texts = {key: text.format_map({**values, "name": name}) for key, text in step.items()}
        if "command" in step:
            return command_step(**texts)
        return PipelineStep(name, texts["text"], lambda folder: self.works[name](folder, values))

    def _write(self, folder: Path) -> None:
        def fill(unfinished: Path) -> None:
            shutil.copytree(folder / self.trained, unfinished, dirs_exist_ok=True)
            for file in self.files:
                shutil.copy(folder / file, unfinished)
            (unfinished / "README.md").write_text(self.card(folder), encoding="utf-8")

        write_folder(folder / "checkpoint", fill)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command of the recipe: parse its options, run its steps; return an exit
        status.
        """
        options = tyro.cli(PipelineOptions, args=arguments, description=f"Make the {self.name}.")
        # under nohup SIGINT is ignored, and steps would ignore it, too
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)

        def work() -> None:
            run_steps(options.out, self.steps(options))
            print(f"checkpoint and card: {options.out / 'checkpoint'}")

        return status_of(self.name, work, "; the same command goes on")


def run_steps(folder: Path, steps: Sequence[PipelineStep]) -> None:
    """Run the steps of a folder that have not finished.

    Raises:
        ConfigError: A step was begun with another command, or another process uses the folder.
        TrainingError: A step failed; what it made so far is kept.
        StorageError: The folder cannot be made.
    """
    with storing(folder):
        (folder / "records").mkdir(parents=True, exist_ok=True)
    with locked(folder, "--out"):
        for step in steps:
            path = folder / "records" / f"{step.name}.json"
            fresh = {"command": step.command, "seconds": 0.0}
            record: dict[str, Any] = load_json(path) if path.exists() else fresh
            if record["command"] != step.command:
                raise ConfigError(
                    f"{folder} holds {step.name} by {record['command']!r}, which is now "
                    f"{step.command!r}; choose another --out."
                )
            if "finished" in record:
                print(f"{step.name}: done on {record['finished']}")
                continue
            print(f"{step.name}: {step.command}", flush=True)
            start = time.monotonic()
            try:
                step.work(folder)
            finally:
                record["seconds"] += round(time.monotonic() - start, 1)
                write_json(path, record)
            finished = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
            write_json(path, {**record, "machine": machine(), "finished": finished})


def _run(folder: Path, program: Sequence[str], command: str) -> None:
    """Run a module in a process of its own, which saves its state when Ctrl-C ends it."""
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # a session of its own, so that a terminal's Ctrl-C reaches it once, from here
    process = subprocess.Popen(
        [sys.executable, "-m", *program], cwd=folder, env=environment, start_new_session=True
    )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGINT)
        process.wait()
        raise
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise TrainingError(f"status {status} of: cd {folder} && {command}")


def record_main(recording: type[Recording], arguments: Sequence[str] | None) -> int:
    """Run a command that records demonstrations; return an exit status."""
    settings = tyro.cli(
        recording, args=arguments, registry=registry, config=(tyro.conf.OmitArgPrefixes,)
    )
    return status_of("demos", settings.run)


def evaluated(folder: Path, name: str) -> str:
    """Return the table of successes of an evaluation, and its command, for a card."""
    lines = [
        "| condition | task | success | 95 % interval | mean time | followed instruction |",
        "|---|---|---|---|---|---|",
    ]
    for row in load_json(folder / name / "report.json")["rows"]:
        seconds = row["seconds_to_success"]
        cells = (
            row["condition"],
            row["task"] or "all",
            _rate(row["success"]),
            f"{text_of(row['success'])} %",
            "" if seconds is None else f"{seconds:.1f} s",
            _rate(row["followed"]) if "followed" in row else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    record = load_json(folder / "records" / f"{name}.json")
    return "\n".join(lines) + f"\n\n    {record['command']}"


def _rate(rate: Mapping[str, Any]) -> str:
    return f"{rate['successes']} of {rate['of']} ({percent(rate['rate'])} %)"


def history(folder: Path, names: Sequence[str]) -> str:
    """Return the commands of steps, their times and machines, for a card."""
    records = {name: load_json(folder / "records" / f"{name}.json") for name in names}
    commands = "\n".join(f"    {record['command']}" for record in records.values())
    rows = "\n".join(
        f"| {name} | {record['finished']} | {duration(record['seconds'])} | {record['machine']} |"
        for name, record in records.items()
    )
    return f"{commands}\n\n| step | finished | duration | machine |\n|---|---|---|---|\n{rows}"
