"""What the benchmarks share: options from a function's signature, progress, and figures as JSON."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import tyro

from strands_cosmos3.commands.files import versions
from strands_cosmos3.errors import Cosmos3Error


def run(measure: Callable[..., Mapping[str, Any]]) -> None:
    """Measure with the options of the command line; print the figures and the machine as JSON."""
    try:
        figures = tyro.cli(measure, description=sys.modules["__main__"].__doc__)
    except Cosmos3Error as error:
        sys.exit(str(error))
    print(with_machine(figures))


def with_machine(figures: Mapping[str, Any]) -> str:
    """Figures, the machine and its packages as JSON."""
    machine = {"platform": platform.platform(), "python": platform.python_version()}
    return json.dumps({**figures, "machine": machine, "versions": versions()}, indent=2)


def progress(text: str) -> None:
    """Say on standard error what is measured now."""
    print(text, file=sys.stderr, flush=True)
