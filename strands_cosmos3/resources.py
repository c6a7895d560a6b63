"""Where packaged data lives: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

from strands_cosmos3.errors import ResourceNotFoundError

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


def resource(relative: str) -> Path:
    """Path of a packaged file or folder, e.g. ``resource("stats/droid_lerobot.json")``.

    Raises:
        ResourceNotFoundError: The installation lacks it.
    """
    for root in _ROOTS:
        if (root / relative).exists():
            return root / relative
    looked = ", ".join(str(root) for root in _ROOTS)
    raise ResourceNotFoundError(f"{relative!r} is not part of this installation (looked in {looked}); reinstall it.")
