"""``strands-cosmos3``: the command line. Each subcommand is a dataclass in ``commands``; this
file selects one.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
import warnings
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import Annotated, Any, NoReturn

from strands_cosmos3 import __version__
from strands_cosmos3.errors import CheckpointError, ConfigError, Cosmos3Error, InputError
from strands_cosmos3.extras import needed_by, require_extras
from strands_cosmos3.parallel.rank import exit_rank

COMMANDS = {
    "rollout": ("rollout", "Rollout"),
    "view": ("view", "View"),
    "infer": ("infer", "Infer"),
    "serve": ("serve", "Serve"),
    "evaluate": ("evaluate", "Evaluate"),
    "demos": ("demos", "Demos"),
    "train": ("train", "Train"),
    "robot": ("robot", "RobotModels"),
    "checkpoint": ("checkpoint", "Checkpoint"),
    "doctor": ("doctor", "Doctor"),
}
"""Subcommand -> (module in ``commands``, class)."""

_RANK_0_REPORT_S = 20.0

_DESCRIPTION = f"""strands-cosmos3 {__version__}: run NVIDIA Cosmos 3 as a robot policy.

Start here:
  strands-cosmos3 doctor                     check this machine
  strands-cosmos3 rollout --video out.mp4    pick up a cube in simulation, filmed

Exit status: 0 done, 1 a task or check failed, 2 bad usage, 130 ended by Ctrl-C.
"""


def main(argv: list[str] | None = None) -> int:
    """Parse and run a command line; print this package's errors as one line on standard error.

    Returns:
        0 done, 1 a task or check failed, 2 bad usage, 130 ended by Ctrl-C.
    """
    import tyro

    arguments = sys.argv[1:] if argv is None else argv
    if arguments in (["--version"], ["-V"]):
        print(__version__)
        return 0
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    _print_help(arguments)
    arguments = _with_new_flags(arguments)
    try:
        command: Any = tyro.cli(
            _union(arguments), prog="strands-cosmos3", description=_DESCRIPTION, args=arguments
        )
        with (
            redirect_stdout(io.StringIO()) if _is_other_rank() else nullcontext(),
            needed_by("this command"),
        ):
            command = _with_environment(command)
            require_extras(_name_of(command), command.extras)
            return int(command.run())
    except Cosmos3Error as error:
        if _is_other_rank() and isinstance(
            error, InputError | ConfigError | CheckpointError
        ):  # every rank raised it; rank 0 reports it
            # torchrun ends all ranks when the first one ends, and rank 0 may come later
            time.sleep(_RANK_0_REPORT_S)
        else:
            print(f"strands-cosmos3: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    except KeyboardInterrupt:
        print("strands-cosmos3: interrupted.", file=sys.stderr)
        return 130


def program() -> NoReturn:
    """Run :func:`main` and exit; the entry point of ``strands-cosmos3`` and ``python -m
    strands_cosmos3``.
    """
    if not _launched():
        sys.exit(main())
    status = 1
    try:
        status = main()
    except SystemExit as end:  # usage or help, already printed
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a failed rank exits with a status instead of aborting
        traceback.print_exc()
    finally:  # also if standard error is closed
        exit_rank(status)


def _launched() -> bool:
    """Return whether torchrun started this process, as ``dist.is_torchelastic_launched`` does,
    without torch.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def _is_other_rank() -> bool:
    """Return whether torchrun started this process as a rank other than 0, which alone prints."""
    return _launched() and os.environ.get("RANK", "0") != "0"


def _union(arguments: list[str]) -> Any:
    """Return the subcommands as a tyro union, with only the selected one's module loaded."""
    import tyro

    named = [argument for argument in arguments if argument in COMMANDS]
    chosen = {named[0]: COMMANDS[named[0]]} if named else COMMANDS
    union: Any = None
    for name, (module, cls) in chosen.items():
        kind = getattr(import_module(f"strands_cosmos3.commands.{module}"), cls)
        member = Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)]
        union = member if union is None else union | member
    if named:  # a union of one member would lose the subcommand's name
        union = union | Annotated[_Nothing, tyro.conf.subcommand("help", prefix_name=False)]
    return union


def _print_help(arguments: list[str]) -> None:
    """Print the help that a command line asks for and exit, or do nothing."""
    if not {"-h", "--help"} & set(arguments):
        return
    from strands_cosmos3.commands.help import print_commands, print_options

    def kind_of(name: str) -> type:
        module, kind = COMMANDS[name]
        return getattr(import_module(f"strands_cosmos3.commands.{module}"), kind)

    if arguments[0] in COMMANDS:
        print_options(arguments[0], kind_of(arguments[0]))
    else:
        print_commands({name: kind_of(name) for name in COMMANDS}, _DESCRIPTION)
    raise SystemExit(0)


def _with_new_flags(arguments: list[str]) -> list[str]:
    """Replace flags of 0.1 that a command has renamed, with a warning. Remove in 0.3."""
    chosen = next((COMMANDS[argument] for argument in arguments if argument in COMMANDS), None)
    if chosen is None:
        return arguments
    command = getattr(import_module(f"strands_cosmos3.commands.{chosen[0]}"), chosen[1])
    renamed: dict[str, str] = vars(command).get("RENAMED_FLAGS", {})
    replaced = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in renamed:
            print(f"strands-cosmos3: {flag} is deprecated; use {renamed[flag]}.", file=sys.stderr)
            warnings.warn(
                f"{flag} is renamed to {renamed[flag]}.", DeprecationWarning, stacklevel=2
            )
        replaced.append(f"{renamed.get(flag, flag)}{equals}{value}")
    return replaced


def _with_environment(command: Any) -> Any:
    """Return the command with unset fields filled from the environment variables that they name."""
    if not is_dataclass(command) or isinstance(command, type):
        return command
    named = {
        f.name: os.environ.get(f.metadata["environment"])
        for f in fields(command)
        if "environment" in f.metadata
    }
    return replace(
        command,
        **{
            name: value for name, value in named.items() if value and getattr(command, name) is None
        },
    )


def _name_of(command: Any) -> str:
    return next(name for name, (_, kind) in COMMANDS.items() if kind == type(command).__name__)


@dataclass
class _Nothing:
    """Show this help."""


if __name__ == "__main__":
    program()
