"""``strands-cosmos3 robot``: the robots that are installed or can be fetched, and what a model
tells of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro
from rich.console import Console
from rich.text import Text

from strands_cosmos3.commands.files import require_writable
from strands_cosmos3.errors import ConfigError, FetchError, InputError, UnknownNameError
from strands_cosmos3.resources import write_whole

if TYPE_CHECKING:
    from strands_cosmos3.robots.spec import RobotSpec


@dataclass(frozen=True)
class RobotModels:
    """List robots, download one's model, or derive one from a MuJoCo model.

    docs/robots.md explains a robot's file, and what works for which robot.
    """

    what: Annotated[Literal["list", "fetch", "inspect"], tyro.conf.Positional]
    """list the robots, fetch the model of one, or inspect a model and print a robot's file
    (TOML) to complete.
    """
    model: Annotated[Path | None, tyro.conf.Positional] = None
    """The model that inspect reads: an .xml file, or a robot's .toml file, which is checked.
    With fetch, the robot's name.
    """
    out: Path | None = None
    """New .toml file that inspect writes. The default is to print it."""
    wheels: Path | None = None
    """Folder that has fetch's archives already, for a machine without network. The default is to
    let pip download them.
    """

    GROUPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Robot": ("what", "model"),
        "Inspect": ("out",),
        "Fetch": ("wheels",),
    }

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        return ("sim",)

    def run(self) -> int:
        """List, fetch or inspect; 0."""
        if self.wheels is not None and self.what != "fetch":
            raise ConfigError(f"--wheels belongs to fetch, not to {self.what}.")
        if self.what == "list":
            if self.model is not None or self.out is not None:
                raise ConfigError("list takes neither a model nor --out; they belong to inspect.")
            return _list()
        if self.what == "fetch":
            if self.out is not None:
                raise ConfigError("--out belongs to inspect, not to fetch.")
            return _fetch("" if self.model is None else str(self.model), self.wheels)
        if self.model is None:
            raise ConfigError("inspect needs a model: strands-cosmos3 robot inspect model.xml")
        require_writable(self.out, (".toml",), "--out")
        if self.out is not None and self.out.exists():
            raise ConfigError(f"--out {str(self.out)!r} exists already; choose another file.")
        return self._inspect(self.model)

    def _inspect(self, path: Path) -> int:
        from strands_cosmos3.robots.catalogue import get_robot, write_robot
        from strands_cosmos3.robots.inspection import inspect_model
        from strands_cosmos3.robots.model import load_robot

        if path.suffix.lower() == ".toml":
            if self.out is not None:
                raise ConfigError(
                    "--out takes what is derived from a model (.xml); a .toml is only checked. "
                    "Leave it out."
                )
            robot = get_robot(path)
            model = load_robot(robot)
            Console().print(
                Text(f"{_line(robot)}: {model.nq} positions, {model.nu} actuators."), soft_wrap=True
            )
            Console().print(Text(_simulated(robot)), soft_wrap=True)
            return 0
        robot, notes = inspect_model(path)
        text = (
            "\n".join(f"# Complete or check: {note}" for note in notes) + "\n" + write_robot(robot)
        )
        if self.out is None:
            print(text, end="")
        else:
            write_whole(self.out, lambda hidden: hidden.write_text(text, encoding="utf-8"))
            Console().print(Text(f"wrote {self.out}"))
        return 0


def _simulated(robot: RobotSpec) -> str:
    """Return whether the simulation takes a robot, and what it lacks otherwise."""
    from strands_cosmos3.sim.scene import Scene

    try:
        Scene(robot=robot)
    except (ConfigError, InputError) as error:
        return f"LimbIK takes it, the simulation does not: {error}"
    return "LimbIK and the simulation take it."


def _list() -> int:
    from strands_cosmos3.robots.catalogue import is_present, packaged_robots, source_of

    for name, robot in packaged_robots().items():
        line = _line(robot)
        if source_of(robot) is not None:
            line += f". {'Fetched.' if is_present(robot) else f'To fetch: strands-cosmos3 robot fetch {name}'}"
        Console().print(Text(line), soft_wrap=True)
    return 0


def _fetch(name: str, wheels: Path | None) -> int:
    from strands_cosmos3.robots.catalogue import aliases, packaged_robots, source_of
    from strands_cosmos3.robots.fetch import fetch_model
    from strands_cosmos3.robots.model import load_robot

    name = aliases().get(name.strip().lower(), name.strip().lower())
    sources = {name: source_of(robot) for name, robot in packaged_robots().items()}
    if (source := sources.get(name)) is None:
        raise UnknownNameError("robot to fetch", name, filter(sources.get, sources))
    robot = packaged_robots()[name]
    path = fetch_model(source, wheels, lambda line: print(line, flush=True))
    try:
        model = load_robot(robot)
    except ConfigError as error:
        raise FetchError(
            f"the model in {source.folder} is damaged: {error} Delete that folder, and fetch it "
            "again."
        ) from error
    lines = (
        f"{_line(robot)}: {model.nq} positions, {model.nu} actuators.",
        f"model: {path}",
        f"licence: {source.licence}",
    )
    Console().print(
        Text("\n".join((*lines, f'next: LimbIK("{name}") in Python; see docs/robots.md'))),
        soft_wrap=True,
    )
    return 0


def _line(robot: RobotSpec) -> str:
    limbs = ", ".join(
        f"{limb.name} ({len(limb.joints)} joints{', gripper' if limb.gripper else ''})"
        for limb in robot.limbs
    )
    return f"{robot.name:<12} {robot.title}. Limbs: {limbs}"
