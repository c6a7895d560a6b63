"""``strands-cosmos3 rl``: a policy learns from what its chunks achieve in simulation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console

from strands_cosmos3.checks import positive, seed_number, whole_number
from strands_cosmos3.commands.files import require_writable_folder
from strands_cosmos3.commands.progress import terminated_as_interrupted, training_progress
from strands_cosmos3.commands.train import locked_run, plot_curves
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import needed_by, of_world
from strands_cosmos3.options import section
from strands_cosmos3.training.rl.options import RLConfig

_START = "training takes {:.2f} GiB; {:g} hours of iterations, then the last evaluation and films"
_LARGEST_KL = 1e-4
_FRACTIONS = ("anneal", "average", "grasp")


@dataclass(frozen=True)
class RLCommand:
    """Let a policy adapt to a condition, by trial in simulation.

    In each state that it visits, its chunk and displaced ones are run from there, in physics alone,
    and compared. Writes <out>/checkpoint, curves, and films of before and after. The state is saved
    after each iteration; run the command again to resume. See docs/rl.md.

    For one mounting of the wrist camera:

      strands-cosmos3 rl --task pick --conditions mount=7 --model CHECKPOINT --out run/

    Training on several processes: torchrun --nproc-per-node N -m strands_cosmos3 rl ...
    """

    out: Path
    """Folder of the run."""
    model: str
    """Checkpoint to begin from: a folder in the released layout, or owner/name[@revision] on the
    Hugging Face hub.
    """
    world: str = "table"
    """World to learn in, e.g. table, libero/libero_object, or module:name or file.py:name of your
    own. One that does not return to states, or does not say how far a task has come, gets
    `--whole-episodes`.
    """
    robot: str | None = None
    """A robot of the world; default: its first."""
    task: str = "pick"
    """Task to learn; several, separated by commas, take turns."""
    conditions: str = "plain"
    """The condition to learn under, as `evaluate` has them, e.g. mount=7 or light=0.3; one."""
    budget: float = 1.0
    """Hours of wall-clock time, those of earlier starts included; films and the last evaluation
    come on top.
    """
    duration: float = 12.0
    """Longest episode in simulated seconds."""
    workers: int | None = None
    """Simulators; default: one per core."""
    address: str | None = None
    """A running Ray cluster: HOST:PORT, or auto for that of RAY_ADDRESS, else one on this machine.
    By default, or with local, Ray runs on this machine, whatever RAY_ADDRESS says.
    """
    verify: bool = False
    """Read every byte of the checkpoint for its SHA-256, which tells whether a run is of it,
    whatever is remembered of files of the same size, inode and times.
    """
    learning: RLConfig = section(RLConfig)

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        return ("sim", "engine", "scale", "data", *of_world(self.world))

    def run(self) -> int:
        """Learn, and print the path of the checkpoint."""
        self._require_numbers()
        require_writable_folder(self.out, "--out")
        from strands_cosmos3.evaluation.settings import make_settings

        names = ("model", "world", "robot", "conditions", "duration")
        options = {name: getattr(self, name) for name in names}
        settings = make_settings({**options, "tasks": self.task})
        condition, *others = settings.conditions
        if others:
            raise ConfigError(
                f"--conditions {self.conditions}: a run learns under one condition; join them "
                "with +, or start a run for each."
            )
        if condition.policy.identity():
            raise ConfigError(
                f"--conditions {self.conditions}: a run learns what differs in the world, such as "
                "mount=7; leave conditions of the policy out."
            )
        console = Console()
        with needed_by("rl"), terminated_as_interrupted(), ExitStack() as stack:
            from strands_cosmos3.engine.checkpoint import Checkpoint, locate
            from strands_cosmos3.training.rl.controller import ReinforcementLearning
            from strands_cosmos3.training.sharding import processes

            share = stack.enter_context(processes())
            console.quiet = share.rank > 0
            stack.enter_context(locked_run(self.out, share))
            show = stack.enter_context(training_progress(console, share.rank == 0))

            def report(iteration: int, used_s: float, figures: Mapping[str, float]) -> None:
                names = ("success", "gain", "old_deviation", "kept_deviation")
                shown = {name: figures[name] for name in names if name in figures}
                metrics = {"iteration": float(iteration), **shown}
                minutes = round(used_s / 60)
                show("minutes", minutes, max(round(self.budget * 60), 1), metrics)

            if self.verify and not share.rank:
                Checkpoint.open(locate(self.model)).read_anew()
            learning = ReinforcementLearning(settings, self.out, self.learning, report, share)
            memory_gib = learning.memory_bytes / 2**30
            console.print(_START.format(memory_gib, self.budget), soft_wrap=True)
            workers = self.workers or len(os.sched_getaffinity(0))
            checkpoint = learning.run(3600 * self.budget, workers, self.address)
        if not share.rank:
            plot_curves(self.out, {"rl": "."})
        console.print(f"checkpoint: {checkpoint}")
        return 0

    def _require_numbers(self) -> None:
        learning = self.learning
        if self.workers is not None:
            whole_number(self.workers, "--workers", 1)
        for name in ("budget", "duration"):
            positive(getattr(self, name), f"--{name}")
        for option in fields(RLConfig):
            flag, value = f"--{option.name.replace('_', '-')}", getattr(learning, option.name)
            if type(option.default) is int:  # flags are none
                whole_number(value, flag, min(option.default, 1))
            elif option.name in _FRACTIONS and not 0 <= value <= 1:
                raise ConfigError(f"{flag} must be a fraction in 0..1, got {value!r}.")
            elif option.name in ("kl_beta", "keep") and not 0 <= value < float("inf"):
                raise ConfigError(f"{flag} must be at least zero, got {value!r}.")
            elif option.name in ("shift_cm", "turn_deg", "nft_beta", "lr"):
                positive(value, flag)
        if learning.kl_beta > _LARGEST_KL:
            warnings.warn(
                f"--kl-beta {learning.kl_beta:g} pulls the policy back to its start; at most "
                f"{_LARGEST_KL:g} lets it adapt.",
                stacklevel=2,
            )
        seed_number(learning.seed, "--seed")
