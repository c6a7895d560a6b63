"""``strands-cosmos3 bench``: measure the README's figures on this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from strands_cosmos3.checks import seed_number, whole_number
from strands_cosmos3.commands.files import require_apart, require_writable, versions, write_json
from strands_cosmos3.errors import ConfigError

_LEAST_WIDTH = 132  # of a table; a narrower terminal wraps its lines
_ROLLOUTS = "engine --part bfloat16-rollouts"
_BENCHES = {
    "chunks": ("ik", "tracking", "robustness", "loop"),
    "episodes": ("sim", "tasks", _ROLLOUTS),
    "plant_errors": ("tasks",),
    "robot": ("tasks", "loop"),
    **dict.fromkeys(("exchanges", "clients", "requests"), ("service",)),
    "seed": ("ik", "tracking", "robustness", "loop", "sim", "tasks", "service", _ROLLOUTS),
    "episode": ("tracking", "robustness"),
    "part": ("engine", _ROLLOUTS),
    **dict.fromkeys(("tier", "repeats", "steps"), ("engine",)),
}
"""Option -> the benches that heed it."""


@dataclass(frozen=True)
class Bench:
    """Measure accuracy and speed on this machine.

    Times depend on the machine and its load. Where another library did the same work in the same
    run, the ratio is printed as well.
    """

    what: Annotated[
        Literal["ik", "tracking", "robustness", "loop", "sim", "tasks", "engine", "service"],
        tyro.conf.Positional,
    ]
    """ik: inverse kinematics of 32-row chunks. tracking: tracking error of the simulated arm.
    robustness: tracking and drift with payloads, heavier links, friction, delays and noise, with
    and without compensation. loop: cost of a control tick. sim: speed of episodes. tasks:
    success rate of the scripted expert. engine: Cosmos 3 inference against diffusers' pipeline,
    one thread, CPU time. service: the wire against a bare websockets exchange, or many clients
    of the bundled policy against one.
    """
    chunks: int | None = None
    """Random chunks (ik, tracking, robustness, loop: 40)."""
    episodes: int | None = None
    """Episodes (sim: 5, tasks: 100 for each task, bfloat16-rollouts: 100)."""
    plant_errors: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """For tasks: an arm with heavier links, a payload, friction, delay and noise that its
    controller does not know of.
    """
    robot: str | None = None
    """For tasks and loop: the robot (default: panda), or the .toml file of one."""
    exchanges: int | None = None
    """Round trips of each kind (service: 200)."""
    clients: int | None = None
    """For service: instead, that many clients of the bundled policy at once against one."""
    requests: int | None = None
    """With --clients: chunks to serve before the server's memory is compared (5000)."""
    seed: int | None = None
    """First seed; default: 0 (all but the times of engine)."""
    episode: Path | None = None
    """Also measure a recorded DROID episode (tracking, robustness; .json)."""
    part: Literal["pipeline", "bfloat16", "bfloat16-rollouts"] | None = None
    """For engine: against diffusers' pipeline, and the bundled policy (the default); bfloat16
    against float32 on a CPU; or the bundled policy's success rates in both.
    """
    tier: Literal["256", "480", "bundled"] | None = None
    """A small composite at the 256 tier (minutes, the default), or DROID's at the 480 tier (half
    an hour), and then the bundled policy: films, composites, batches; or that alone (engine).
    """
    repeats: int | None = None
    """Runs of each side, of which the medians are reported (engine: 3)."""
    steps: int | None = None
    """Denoising steps (engine: 4)."""
    json: Path | None = None
    """Write the figures (.json)."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        served = ("serve",) if self.clients is None else ("serve", "engine")
        return {
            "engine": ("sim", "engine"),
            "service": served,
            "loop": ("sim",) if self.robot else (),
        }.get(self.what, ("sim",))

    def run(self) -> int:
        """Measure and print the figures."""
        self._check()
        require_writable(self.json, (".json",), "--json")
        console = Console()
        with console.status("starting") as status:
            figures = self._measure(status.update)
        Console(width=max(console.width, _LEAST_WIDTH)).print(self._table(figures))
        if self.json is not None:
            machine = {"platform": platform.platform(), "python": platform.python_version()}
            write_json(
                self.json,
                {"bench": self.what, **figures, "machine": machine, "versions": versions()},
            )
            console.print(f"wrote {self.json}")
        return 0

    def _check(self) -> None:
        """Refuse what the bench does not heed, and read the recording, before anything is
        measured.
        """
        bench = (
            _ROLLOUTS if self.what == "engine" and self.part == "bfloat16-rollouts" else self.what
        )
        for name, owners in _BENCHES.items():
            value = getattr(self, name)
            if value is not None and value is not False and bench not in owners:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} belongs to bench {' or '.join(owners)}, not to bench {bench}; leave "
                    "it out."
                )
        if self.part == "bfloat16" and self.tier == "bundled":
            raise ConfigError(
                "--part bfloat16 measures --tier 256 or 480; the bundled policy stays in float32."
            )
        for name in ("chunks", "episodes", "exchanges", "clients", "requests", "repeats", "steps"):
            if (count := getattr(self, name)) is not None:
                whole_number(count, f"--{name}", 1)
        if self.clients is None and self.requests is not None:
            raise ConfigError("--requests belongs to --clients; leave it out.")
        if self.clients is not None and self.exchanges is not None:
            raise ConfigError(
                "--exchanges measures one client without inference; leave it or --clients out."
            )
        seed_number(self.seed or 0, "--seed")
        require_apart({"--json": self.json}, {"--episode": self.episode})
        if self.episode is not None:
            from strands_cosmos3.backends.replay import load_recording

            load_recording(self.episode)

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
        chunks, seed = self.chunks or 40, self.seed or 0
        if self.what == "ik":
            from strands_cosmos3.bench import ik

            return ik.run(chunks, seed, progress)
        if self.what == "tracking":
            from strands_cosmos3.bench import tracking

            return tracking.run(chunks, seed, self.episode, progress)
        if self.what == "robustness":
            from strands_cosmos3.bench import robustness

            return robustness.run(chunks, seed, self.episode, progress)
        if self.what == "loop":
            from strands_cosmos3.bench import loop

            return loop.run(chunks, seed, progress, self.robot)
        if self.what == "tasks":
            from strands_cosmos3.bench import tasks

            return tasks.run(
                self.episodes or 100, seed, progress, self.plant_errors, self.robot or "panda"
            )
        if self.what == "engine":
            return self._measure_engine(progress)
        if self.what == "service":
            from strands_cosmos3.bench import fleet, service

            if self.clients is not None:
                return fleet.run(self.clients, self.requests or 5000, seed, progress)
            return service.run(self.exchanges or 200, seed, progress)
        from strands_cosmos3.bench import sim

        return sim.run(self.episodes or 5, seed, progress)

    def _measure_engine(self, progress: Any) -> dict[str, Any]:
        from strands_cosmos3.bench import bfloat16, bundled, engine

        tier, repeats, steps = self.tier or "256", self.repeats or 3, self.steps or 4
        if self.part == "bfloat16-rollouts":
            return bfloat16.closed_loop(self.episodes or 100, self.seed or 0, progress)
        if self.part == "bfloat16":
            return bfloat16.measure(tier, steps=steps, repeats=repeats, progress=progress)
        figures = {"bundled": bundled.measure(max(self.repeats or 0, 9), progress=progress)}
        return (
            figures
            if tier == "bundled"
            else engine.measure(tier, repeats=repeats, steps=steps, progress=progress) | figures
        )


def _flat(figures: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in figures.items():
        rows += (
            _flat(value, f"{prefix}{name}/")
            if isinstance(value, dict)
            else [(prefix + name, value)]
        )
    return rows
