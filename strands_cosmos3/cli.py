"""``strands-cosmos3``: the command line. Each subcommand is a dataclass in ``commands``; this
file selects one.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields, replace
from importlib import import_module
from typing import Annotated, Any, NoReturn

from strands_cosmos3 import __version__
from strands_cosmos3.checks import known_name
from strands_cosmos3.errors import CheckpointError, ConfigError, Cosmos3Error, InputError
from strands_cosmos3.extras import needed_by, require_extras
from strands_cosmos3.parallel.launched import is_launched, told, watch_machines
from strands_cosmos3.parallel.rank import exit_rank

COMMANDS = {
    "rollout": "RolloutCommand",
    "view": "ViewCommand",
    "infer": "InferCommand",
    "ask": "AskCommand",
    "serve": "ServeCommand",
    "evaluate": "EvaluateCommand",
    "demos": "Demos",
    "train": "Train",
    "rl": "RLCommand",
    "robot": "RobotModels",
    "checkpoint": "Checkpoint",
    "export": "ExportCommand",
    "doctor": "Doctor",
}
"""Subcommand, which is the name of its module in ``commands``, -> class."""

_FIRST_REPORT_S = 20.0

_DESCRIPTION = f"""strands-cosmos3 {__version__}: run NVIDIA Cosmos 3 as a robot policy.

Start here:
  strands-cosmos3 doctor                     check this machine
  strands-cosmos3 rollout --video out.mp4    pick up a cube in simulation, filmed

Tab completes commands and flags after `eval "$(strands-cosmos3 --tyro-print-completion bash)"`;
zsh and tcsh are understood, too.

Exit status: 0 done, 1 a task or check failed, 2 bad usage, 130 ended by Ctrl-C.
"""


def main(argv: list[str] | None = None) -> int:
    """Parse and run a command line; print this package's errors as one line on standard error.

    Returns:
        0 done, 1 a task or check failed, 2 bad usage, 130 ended by Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments in (["--version"], ["-V"]):
        print(__version__)
        return 0
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    return status_of("strands-cosmos3", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    watch_machines()
    command = _parsed(arguments)
    with (
        redirect_stdout(io.StringIO()) if told("RANK") else nullcontext(),
        needed_by("this command"),
    ):
        command = _with_environment(command)
        require_extras(type(command).__module__.rpartition(".")[2], command.extras)
        return command.run()


def status_of(name: str, work: Callable[[], int | None], remedy: str = "") -> int:
    """Do the work of a program, and return its exit status; if it fails, say why in one line."""
    try:
        return int(work() or 0)
    except Cosmos3Error as error:
        if told("LOCAL_RANK") and isinstance(
            error, InputError | ConfigError | CheckpointError
        ):  # every rank raised it; the first of each machine reports it
            # torchrun ends all ranks when the first one ends, and that one may come later
            time.sleep(_FIRST_REPORT_S)
        else:
            print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted{remedy}.", file=sys.stderr)
        return 130


def program(run: Callable[[], int] = main) -> NoReturn:
    """Run a program, by default :func:`main`, and exit with its status."""
    if not is_launched():
        sys.exit(run())
    status = 1
    try:
        status = run()
    except SystemExit as end:  # usage or help, already printed
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a failed rank exits with a status instead of aborting
        traceback.print_exc()
    finally:  # also if standard error is closed
        exit_rank(status)


def _parsed(arguments: list[str]) -> Any:
    """Return the command that a command line describes; only its own module is loaded."""
    import tyro

    from strands_cosmos3.commands.flags import description, registry, required_options

    settings: dict[str, Any] = {
        "config": (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
        "prog": "strands-cosmos3",
        "registry": registry,
    }
    name = arguments[0] if arguments else ""
    if name and not name.startswith("-"):
        kind = _kind(known_name(name, "command", COMMANDS))
        rest = arguments[1:]
        default = {"default": kind.default(rest)} if hasattr(kind, "default") else {}
        settings["prog"] += f" {name}"
        if {"-h", "--help"} & {*rest}:  # tyro wraps no description, and names no required option
            print(f"{description(kind)}\n")
            settings["prog"] += required_options(kind)
        return tyro.cli(kind, args=rest, description="", **default, **settings)
    union: Any = None
    for name in COMMANDS:
        kind = _kind(name)
        summary = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
        member = Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, description=summary)]
        union = member if union is None else union | member
    return tyro.cli(union, description=_DESCRIPTION, args=arguments, **settings)


def _kind(name: str) -> Any:
    """Return the class of a command."""
    return getattr(import_module(f"strands_cosmos3.commands.{name}"), COMMANDS[name])


def _with_environment(command: Any) -> Any:
    """Return the command with the environment variables that its fields name."""
    variables = {f.name: f.metadata.get("environment") for f in fields(command)}
    read = {name: os.environ.get(variable) for name, variable in variables.items() if variable}
    return replace(command, **{name: value for name, value in read.items() if value})


if __name__ == "__main__":
    program()
