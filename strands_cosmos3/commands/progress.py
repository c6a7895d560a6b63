"""Progress of long commands, and how they are interrupted."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Timer
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, which schedulers send, end a run as Ctrl-C does: the state is saved first."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class WaitNotice:
    """Says in one line what a command waits for, where that takes more than a second. As a context
    manager it says nothing after the block.
    """

    def __init__(self, console: Console, after_s: float = 1.0):
        self._console = console
        self._after_s = after_s
        self._timer: Timer | None = None

    def begin(self, phase: str) -> None:
        """Begin to wait for something else, e.g. "loading the policy"."""
        self.end()
        self._timer = Timer(self._after_s, self._say, [phase])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """The wait is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _say(self, phase: str) -> None:
        self._console.print(
            f"{phase} ...", style="dim", highlight=False, markup=False, soft_wrap=True
        )

    def __enter__(self) -> WaitNotice:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end()


class LoggedProgress(Progress):
    """Progress bars on a terminal; in a file or a pipe, a line every minute."""

    _last_s = -math.inf

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task as ``Progress.update`` does."""
        super().update(task_id, **changes)
        task = self._tasks[task_id]
        now_s = time.monotonic()
        if self.disable or self.console.is_terminal or now_s - self._last_s < 60:
            return
        self._last_s = now_s
        left = "" if task.time_remaining is None else f"  {task.time_remaining / 60:.0f} min left"
        metrics = task.fields.get("metrics", "")
        self.console.print(
            f"{task.description} {task.completed:.0f}/{task.total:.0f}{left}  {metrics}".rstrip(),
            soft_wrap=True,
        )


def progress_bar(console: Console, *columns: ProgressColumn, disable: bool = False) -> Progress:
    """Return a progress bar with counts and remaining time, and further columns on the right."""
    left = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return LoggedProgress(*left, *columns, console=console, transient=not columns, disable=disable)


@contextmanager
def training_progress(
    console: Console, enabled: bool
) -> Iterator[Callable[[str, int, int, Mapping[str, float]], None]]:
    """Yield what shows a row for each stage: its progress and its last metrics."""
    tasks: dict[str, Any] = {}
    with progress_bar(console, TextColumn("{task.fields[metrics]}"), disable=not enabled) as bar:

        def show(stage: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, metrics="")
            text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            bar.update(tasks[stage], completed=done, metrics=text)

        yield show
