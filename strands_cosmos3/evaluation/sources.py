"""The source of a policy of another project: its module, and what that names in its own folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}


def sources_of(module: str) -> set[Path]:
    """Return the files of an imported module, and of all modules in the folder in which it was
    found whose names, with those of their folders, stand anywhere in the source of these.

    So every import counts, wherever and however it is written, and at worst a module too many,
    whose name is also another word. What is installed, this package, and names that are put
    together at run time do not count. Of an installed module, its own package alone is searched.
    """
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    if file is None:
        return set()
    top = Path(file).parents[module.count(".") + (Path(file).stem == "__init__")].resolve()
    if not _INSTALLED.isdisjoint(top.parts):
        top /= module.partition(".")[0]
    words = {"__init__", *module.split(".")}
    found = {top}
    while (
        named := {
            path.resolve()
            for folder in found
            for path in folder.glob("*")
            if path.name.partition(".")[0] in words - {"strands_cosmos3"}
            and (path.suffix in (".py", ".so") or path.is_dir())
        }
        - found
    ):
        found |= named
        for path in named:
            if path.suffix == ".py":
                words.update(re.findall(r"\w+", path.read_text(errors="replace")))
    return {Path(file).resolve(), *(path for path in found if path.is_file())}
