"""``strands-cosmos3 demos``: record demonstrations of the scripted expert as a LeRobot v3
dataset.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from abc import ABC, abstractmethod
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rich.console import Console

from strands_cosmos3.checks import seed_number, whole_number
from strands_cosmos3.commands.files import require_writable_folder
from strands_cosmos3.commands.progress import progress_bar, terminated_as_interrupted
from strands_cosmos3.commands.push import push_folder, require_repository
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import TIERS
from strands_cosmos3.resources import locked

if TYPE_CHECKING:
    from strands_cosmos3.worlds.table.demonstrations import DemoCollector, DemoConfig

_BATCH = 20
_LARGEST = {
    **dict.fromkeys(("perturbed", "wandering", "distractors", "close"), 1),
    **dict.fromkeys(("visual_randomization", "looks_randomization"), 10),
    "prefix_rows": 15,  # of the 16 rows of a chunk
}
"""Option of the table -> its largest value; the least is 0."""
_OPTIONS = (*_LARGEST, "tier")


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
    """Number of episodes, of up to 60 frames each at 15 Hz (120 for the bin)."""
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
            console.print(f"wrote {self.out}: {len(dataset)} episodes, {dataset.n_frames} frames")
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

    robot: str = "panda"
    """The robot: panda, for the bundled policy's recipe, or another one that `rollout`
    simulates, or the .toml file of one, for post-training (docs/post_training.md): pictures,
    rows and rate of its embodiment, on the table of rollouts.
    """
    tasks: tuple[Literal["reach", "pick", "place"], ...] = ("reach", "pick", "place")
    """Tasks that the expert pursues and, for another robot, answers for."""
    hand_yaw: Literal["cube", "home"] = "cube"
    """Yaw of the expert's hand over a cube: the cube's; or home's, for reaching with cameras
    that do not show the cube's yaw. The hand then also descends gradually, without a stop above
    the cube.
    """
    ticks: int = 60
    """Rows of the longest episode, twice that for the bin. Many short episodes show more
    layouts.
    """
    perturbed: float = 0.4
    """Fraction of chunks that are perturbed."""
    wandering: float = 0.15
    """Fraction of episodes that move at random."""
    distractors: float = 0.25
    """Fraction of episodes with additional cubes of other colours and sizes."""
    close: float = 0.35
    """Fraction of episodes in which cubes may be 6 cm apart."""
    visual_randomization: float = 1.0
    """Scale of the random changes of table, colours, light and cameras; 0 is the nominal scene."""
    looks_randomization: float = 1.0
    """The highest scale for the second picture of each labelled frame, which only the bundled
    policy's recipe has.
    """
    prefix_rows: int = 0
    """Longest action prefix for which the bundled policy's recipe gets labels of its own
    (docs/bundled_policy.md); 0: none.
    """
    tier: int = 128
    """Resolution tier of the composites."""

    extras: ClassVar[tuple[str, ...]] = ("sim", "data")
    """Extras of the package that it needs."""

    def settings(self) -> dict[str, Any]:
        """Return the options that determine an episode."""
        names = ("seed", "robot", "tasks", "hand_yaw", "ticks", *_OPTIONS)
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise ConfigError for values that a robot or the table does not take."""
        whole_number(self.ticks, "--ticks", 2)
        for name, largest in _LARGEST.items():
            if not 0 <= getattr(self, name) <= largest:
                raise ConfigError(
                    f"{_flag(name)} must be from 0 to {largest}, got {getattr(self, name)}."
                )
        if not self.tasks:
            raise ConfigError("--tasks needs at least one of reach, pick and place, got none.")
        if self.tier not in TIERS:
            raise ConfigError(
                f"--tier must be one of {', '.join(map(str, TIERS))}, got {self.tier}."
            )
        self._check_robot()

    def _check_robot(self) -> None:
        from strands_cosmos3.sim.dataset import rollout_spec

        config = self.config()
        robot = config.spec
        if len(robot.limbs) > 1:
            raise ConfigError(
                f"demonstrations are of one arm, and robot {robot.name!r} has {len(robot.limbs)}; "
                "record its expert with rollout --backend scripted --dataset."
            )
        rollout_spec(config.embodiment, robot)  # what speaks against recording it
        if config.embodiment.rig is not None:
            return
        if self.prefix_rows:
            raise ConfigError(
                f"--prefix-rows is of the bundled policy's recipe, and {robot.name!r} has no "
                "labels after action prefixes; leave it out."
            )
        if self.tier != Demos.tier:
            raise ConfigError(
                f"--tier {self.tier} is of composites, and {robot.name!r} is recorded by one "
                "camera as it is; leave it out."
            )

    def config(self) -> DemoConfig:
        """Return how to record an episode; ConfigError or UnknownNameError if the robot cannot
        be recorded.
        """
        from strands_cosmos3.worlds.table.demonstrations import DemoConfig
        from strands_cosmos3.worlds.table.phrases import GOALS

        goals = tuple(index for index, (verb, _) in enumerate(GOALS) if verb in self.tasks)
        options = {name: getattr(self, name) for name in _OPTIONS}
        turns = self.hand_yaw == "cube"
        return DemoConfig(robot=self.robot, ticks=self.ticks, goals=goals, turns=turns, **options)

    def record(self, root: Path, episodes: range) -> None:
        """Record episodes of the table; ConfigError if no start of them was reachable."""
        from strands_cosmos3.datasets import DatasetWriter
        from strands_cosmos3.worlds.table.demo_dataset import VIDEO, add_record, demo_spec

        config = self.config()
        collector = _collector(config)
        drawn = [(episode, collector.record(self.seed, episode)) for episode in episodes]
        records = [(episode, record) for episode, record in drawn if record is not None]
        if not records:
            raise ConfigError(
                f"episodes {episodes[0]} to {episodes[-1]} of seed {self.seed} have no reachable "
                f"start; give another --seed, or --episodes of at least {episodes[-1] + 2}."
            )
        spec = demo_spec(records[0][1].frames.shape[1:3], config)
        with DatasetWriter(root, spec, commit_every=_BATCH, video=VIDEO) as writer:
            for episode, record in records:
                add_record(writer, record, self.seed, episode)


def record_part(options: Recording, root: Path, first: int) -> None:
    """Record one part as a dataset, unless it exists, in a worker process."""
    if root.exists():
        return
    hidden = root.with_name(f".{root.name}.unfinished")
    shutil.rmtree(hidden, ignore_errors=True)  # of an interrupted run
    options.record(hidden, options.episodes_of(first))
    os.replace(hidden, root)


@cache
def _collector(config: DemoConfig) -> DemoCollector:
    """Return this worker process's collector: building its scenes takes longer than recording a
    part.
    """
    from strands_cosmos3.worlds.table.demonstrations import DemoCollector

    return DemoCollector(config)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
