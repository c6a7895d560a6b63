"""``strands-cosmos3 demos``: demonstrations of the scripted expert, as a LeRobot v3 dataset."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strands_cosmos3.checks import whole_number
from strands_cosmos3.errors import ConfigError

_BATCH = 20


@dataclass(frozen=True)
class Demos:
    """Record the scripted expert on random tables, as a LeRobot v3 dataset to train on.

    Cubes lie anywhere in the spawn region at any yaw; colours, light, cameras and start poses stray, further cubes of other
    colours lie about now and then. Some chunks are bent, so that states beside the expert's path are seen; every second frame
    carries the expert's clean answer for each goal (reach and pick, three colours). Instructions are paraphrased.

    A run that was interrupted goes on when it is started again.
    """

    out: Path
    """The dataset's folder; it appears whole when all episodes are there."""
    episodes: int = 1200
    """Episodes, of up to 56 frames each at 15 Hz."""
    workers: int = 1
    """Processes; one for each core is right."""
    seed: int = 0
    """Of everything random: the same seed gives the same episodes, whatever the workers."""
    bend: float = 0.3
    """Share of chunks that are bent."""
    distractors: float = 0.15
    """Share of episodes with further cubes of other colours."""
    look: float = 1.0
    """How far colours, light and cameras stray; 0 is the nominal look."""
    tier: int = 128
    """Resolution tier of the composites."""

    def run(self) -> int:
        """Record, merge, and say what was written."""
        from strands_cosmos3.datasets import Dataset, merge_datasets
        from strands_cosmos3.training.run_manifest import keep_settings

        whole_number(self.episodes, "--episodes", 1)
        whole_number(self.workers, "--workers", 1)
        self._check()
        console = Console()
        parts = self.out.with_name(f".{self.out.name}.parts-seed{self.seed}")
        look = {name: getattr(self, name) for name in ("seed", "bend", "distractors", "look", "tier")}
        keep_settings(parts / "options.json", look)
        roots = {first: parts / self._part(first) for first in range(0, self.episodes, _BATCH)}
        with _bar(console) as bar:
            row = bar.add_task("episodes", total=self.episodes)
            context = multiprocessing.get_context("spawn")  # OpenGL does not survive a fork
            with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
                waiting = {pool.submit(record_part, self, root, first): first for first, root in roots.items()}
                try:
                    for part in as_completed(waiting):
                        part.result()
                        bar.advance(row, min(_BATCH, self.episodes - waiting[part]))
                finally:  # on Ctrl-C or a failure nothing further is begun
                    pool.shutdown(wait=False, cancel_futures=True)
        merge_datasets(list(roots.values()), self.out).close()
        shutil.rmtree(parts)
        with Dataset(self.out) as dataset:
            console.print(f"wrote {self.out}: {len(dataset)} episodes, {dataset.n_frames} frames")
        return 0

    def _drawn(self, first: int) -> range:
        """The episodes of the part that begins with one."""
        return range(first, min(first + _BATCH, self.episodes))

    def _part(self, first: int) -> str:
        """The name of that part: its first and last episode, so that a shorter one is never taken for it."""
        return f"{first:06d}-{self._drawn(first)[-1]:06d}"

    def _check(self) -> None:
        if self.out.exists() and any(self.out.iterdir()):
            raise ConfigError(f"--out {str(self.out)!r} is not empty; choose another folder.")
        for name in ("bend", "distractors"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name} is a share in 0..1, got {getattr(self, name)}.")


def record_part(options: Demos, root: Path, first: int) -> None:
    """Record one batch of episodes as a dataset of its own, unless it is there. Runs in a worker process.

    Raises:
        ConfigError: None of them could begin.
    """
    from strands_cosmos3.datasets import DatasetWriter
    from strands_cosmos3.training.demos import DemoCollector, DemoConfig
    from strands_cosmos3.training.lerobot import VIDEO, add_record, demo_spec

    if root.exists():
        return
    hidden = root.with_name(f".{root.name}.unfinished")
    shutil.rmtree(hidden, ignore_errors=True)  # of a run that was killed
    config = DemoConfig(options.tier, bend=options.bend, distractors=options.distractors, look=options.look)
    with DemoCollector(config) as studio:
        records = [(episode, studio.record(options.seed, episode)) for episode in options._drawn(first)]
    kept = [(episode, record) for episode, record in records if record is not None]
    if not kept:
        raise ConfigError(
            f"of episodes {first} to {records[-1][0]} of seed {options.seed} no start could be taken; give another --seed, or "
            f"--episodes of at least {records[-1][0] + 2}."
        )
    with DatasetWriter(hidden, demo_spec(kept[0][1].frames.shape[1:3]), commit_every=_BATCH, video=VIDEO) as writer:
        for episode, record in kept:
            add_record(writer, record, options.seed, episode)
    os.replace(hidden, root)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)
