"""``strands-cosmos3 demos``: record demonstrations of the scripted expert as a LeRobot v3
dataset.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from strands_cosmos3.checks import seed_number, whole_number
from strands_cosmos3.commands.files import require_writable_folder
from strands_cosmos3.commands.progress import progress_bar, terminated_as_interrupted
from strands_cosmos3.commands.push import push_folder, require_repository
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import TIERS
from strands_cosmos3.options import section
from strands_cosmos3.resources import locked
from strands_cosmos3.worlds.table.demo_config import DemoConfig

if TYPE_CHECKING:
    from strands_cosmos3.worlds.table.demonstrations import DemoCollector

_BATCH = 20


@dataclass(frozen=True)
class Recording(ABC):
    """Episodes that processes record in parts, which become one dataset."""

    out: Path
    """Folder of the dataset. It appears when all episodes are recorded."""
    push: str | None = None
    """Upload the dataset to this repository of the Hugging Face hub, e.g. me/demos; a new one is
    private.
    """
    episodes: int = 1200
    """Number of episodes, of up to 60 frames each at 15 Hz (120 for place)."""
    workers: int = 1
    """Number of processes; use one per core."""
    seed: int = 0
    """Seed of everything random. The number of workers does not change the episodes."""

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError for options that contradict each other."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what a run that goes on must have in common with the one begun."""

    @abstractmethod
    def record(self, root: Path, episodes: range) -> None:
        """Record episodes as a new dataset, in a worker process."""

    def run(self) -> int:
        """Record and merge the episodes."""
        from strands_cosmos3.datasets import Dataset
        from strands_cosmos3.training.run_manifest import keep_settings

        whole_number(self.episodes, "--episodes", 1)
        whole_number(self.workers, "--workers", 1)
        seed_number(self.seed, "--seed")
        require_writable_folder(self.out, "--out")
        require_repository(self.push)
        if self.out.exists() and any(self.out.iterdir()):
            raise ConfigError(f"--out {str(self.out)!r} is not empty; choose another folder.")
        self.check()
        console = Console()
        parts = self.out.with_name(f".{self.out.name}.parts-seed{self.seed}")
        keep_settings(parts / "options.json", self.settings())
        with locked(parts, "--out"):
            self._record(parts, console)
        with Dataset(self.out) as dataset:
            contents = f"{len(dataset)} episodes, {dataset.n_frames} frames"
            console.print(f"wrote {self.out}: {contents}", soft_wrap=True)
        if self.push is not None:
            console.print(f"pushed to {push_folder(self.out, self.push, 'dataset')}")
        return 0

    def _record(self, parts: Path, console: Console) -> None:
        """Record what a folder of parts lacks, and merge them."""
        from strands_cosmos3.datasets import merge_datasets

        # a part's name has its last episode too, because --episodes may change
        firsts = range(0, self.episodes, _BATCH)
        roots = {
            first: parts / f"{first:06d}-{self.episodes_of(first)[-1]:06d}" for first in firsts
        }
        with terminated_as_interrupted(), progress_bar(console) as bar:
            task = bar.add_task("episodes", total=self.episodes)
            context = multiprocessing.get_context("spawn")  # OpenGL does not survive a fork
            with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
                pending = {
                    pool.submit(record_part, self, root, first): first
                    for first, root in roots.items()
                }
                try:
                    for part in as_completed(pending):
                        part.result()
                        bar.update(task, advance=min(_BATCH, self.episodes - pending[part]))
                except KeyboardInterrupt:
                    # SIGTERM reaches this process alone; a part is written whole
                    for worker in multiprocessing.active_children():
                        worker.terminate()
                    raise
                finally:  # after Ctrl-C or a failure no further part starts
                    pool.shutdown(wait=False, cancel_futures=True)
        merge_datasets(list(roots.values()), self.out).close()
        shutil.rmtree(parts)

    def episodes_of(self, first: int) -> range:
        """Return the episodes of the part that starts with ``first``."""
        return range(first, min(first + _BATCH, self.episodes))


@dataclass(frozen=True)
class Demos(Recording):
    """Record demonstrations of the scripted expert to train on.

    The result is a LeRobot v3 dataset.

    Tables, colours, light, cameras, start poses and wordings are random. Every fourth frame has the
    expert's unperturbed answer for each goal (reach, pick and place in the bin, three colours).
    Start an interrupted run again to resume it.
    """

    table: DemoConfig = section(DemoConfig)

    LARGEST: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("perturbed", "wandering", "distractors", "close"), 1),
        "visual_randomization": 10,
    }
    """Option of the table -> its largest value; the least is 0."""
    extras: ClassVar[tuple[str, ...]] = ("sim", "data")
    """Extras of the package that it needs."""

    def settings(self) -> dict[str, Any]:
        """Return the options that determine an episode."""
        return {"seed": self.seed, **asdict(self.table)}

    def check(self) -> None:
        """Raise ConfigError for values that a robot or the table does not take."""
        from strands_cosmos3.sim.dataset import rollout_spec

        config = self.table
        robot = self.table.spec
        whole_number(config.ticks, "--ticks", 2)
        for name, largest in self.LARGEST.items():
            fraction = getattr(config, name)
            if not 0 <= fraction <= largest:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be from 0 to {largest}, got {fraction}.")
        if not config.tasks:
            raise ConfigError("--tasks needs at least one of reach, pick and place, got none.")
        if config.tier not in TIERS:
            raise ConfigError(
                f"--tier must be one of {', '.join(map(str, TIERS))}, got {config.tier}."
            )
        if len(robot.limbs) > 1:
            raise ConfigError(
                f"demonstrations are of one arm, and robot {robot.name!r} has {len(robot.limbs)}; "
                "record its expert with rollout --backend scripted --dataset."
            )
        rollout_spec(config.embodiment, robot)  # what speaks against recording it
        if config.embodiment.rig is None and config.tier != DemoConfig.tier:
            raise ConfigError(
                f"--tier {config.tier} is of composites, and {robot.name!r} is recorded by one "
                "camera as it is; leave it out."
            )

    def record(self, root: Path, episodes: range) -> None:
        """Record episodes of the table; ConfigError if no start of them was reachable."""
        from strands_cosmos3.worlds.table.demo_dataset import record_demos

        record_demos(root, _collector(self), self.seed, episodes)

    def collector(self) -> DemoCollector:
        """Return what records episodes of the table."""
        from strands_cosmos3.worlds.table.demonstrations import DemoCollector

        return DemoCollector(self.table)


def record_part(options: Recording, root: Path, first: int) -> None:
    """Record one part as a dataset, unless it exists, in a worker process."""
    if root.exists():
        return
    unfinished = root.with_name(f".{root.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted run
    options.record(unfinished, options.episodes_of(first))
    os.replace(unfinished, root)


@cache
def _collector(options: Demos) -> DemoCollector:
    """Return this worker process's collector: building its scenes takes longer than recording a
    part.
    """
    return options.collector()
