"""``strands-cosmos3 bench``: measure the README's figures on this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from strands_cosmos3.checks import seed_number
from strands_cosmos3.commands.files import require_writable, versions, write_json
from strands_cosmos3.errors import ConfigError

_LEAST_WIDTH = 132  # of a table; a narrower terminal wraps its lines


@dataclass(frozen=True)
class Bench:
    """Measure this installation on this machine.

    Times depend on the machine and its load. Where another library did the same work in the same run, the ratio is printed
    as well.
    """

    what: Annotated[Literal["ik", "tracking", "robustness", "loop", "sim", "tasks", "engine", "service"], tyro.conf.Positional]
    """ik: inverse kinematics of 32-row chunks. tracking: tracking error of the simulated arm. robustness: tracking and drift
    with payloads, heavier links, friction, delays and noise, with and without compensation. loop: cost of a control
    tick. sim: speed of episodes. tasks: success rate of the scripted expert. engine: Cosmos 3 inference against diffusers'
    pipeline, one thread, CPU time. service: the wire against a bare websockets exchange."""
    chunks: int = 40
    """Random chunks (ik, tracking, robustness, loop)."""
    episodes: int | None = None
    """Episodes (sim: 5, tasks: 100 for each task)."""
    plant_errors: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """For tasks: an arm with heavier links, a payload, friction, delay and noise that its controller does not know of."""
    exchanges: int = 200
    """Round trips of each kind (service)."""
    seed: int = 0
    """First seed."""
    episode: Path | None = None
    """Also measure a recorded DROID episode (tracking, robustness; .json)."""
    tier: Literal["256", "480"] = "256"
    """A small composite at the 256 tier (minutes), or DROID's at the 480 tier (half an hour) (engine)."""
    repeats: int = 3
    """Runs of each side, of which the medians are reported (engine)."""
    steps: int = 4
    """Denoising steps (engine)."""
    json: Path | None = None
    """Write the figures (.json)."""

    def run(self) -> int:
        """Measure and print the figures."""
        if self.chunks < 1 or (self.episodes is not None and self.episodes < 1):
            raise ConfigError("--chunks and --episodes must be at least 1.")
        if self.repeats < 1 or self.steps < 1 or self.exchanges < 1:
            raise ConfigError("--repeats, --steps and --exchanges must be at least 1.")
        seed_number(self.seed, "--seed")
        require_writable(self.json, (".json",), "--json")
        console = Console()
        with console.status("starting") as status:
            figures = self._measure(status.update)
        Console(width=max(console.width, _LEAST_WIDTH)).print(self._table(figures))
        if self.json is not None:
            machine = {"platform": platform.platform(), "python": platform.python_version()}
            write_json(self.json, {"bench": self.what, **figures, "machine": machine, "versions": versions()})
            console.print(f"wrote {self.json}")
        return 0

    def _table(self, figures: dict[str, Any]) -> Table:
        table = Table(title=f"bench {self.what}", title_justify="left")
        if self.what == "robustness":
            from strands_cosmos3.bench import robustness

            titles, *rows = robustness.table(figures)
            for k, title in enumerate(titles):
                table.add_column(title, justify="left" if k < 3 else "right", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            return table
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in _flat(figures):
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
        return table

    def _measure(self, progress: Any) -> dict[str, Any]:
        if self.what == "ik":
            from strands_cosmos3.bench import ik

            return ik.run(self.chunks, self.seed, progress)
        if self.what == "tracking":
            from strands_cosmos3.bench import tracking

            return tracking.run(self.chunks, self.seed, self.episode, progress)
        if self.what == "robustness":
            from strands_cosmos3.bench import robustness

            return robustness.run(self.chunks, self.seed, self.episode, progress)
        if self.what == "loop":
            from strands_cosmos3.bench import loop

            return loop.run(self.chunks, self.seed, progress)
        if self.what == "tasks":
            from strands_cosmos3.bench import tasks

            return tasks.run(self.episodes or 100, self.seed, progress, self.plant_errors)
        if self.what == "engine":
            from strands_cosmos3.bench import engine

            return engine.measure(self.tier, repeats=self.repeats, steps=self.steps, progress=progress)
        if self.what == "service":
            from strands_cosmos3.bench import service

            return service.run(self.exchanges, self.seed, progress)
        from strands_cosmos3.bench import sim

        return sim.run(self.episodes or 5, self.seed, progress)


def _flat(figures: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in figures.items():
        rows += _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]
    return rows
