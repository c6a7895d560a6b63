"""The source of a policy of another project: its module, and what that imports from its own
folder, found without running any of it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}


def sources_of(module: str) -> dict[str, Path]:
    """Return the files of a module, of its packages, and of all modules that these import from
    the folder in which it was found, by name; not installed ones, this package, or what is named
    only at run time.

    An ``import_module`` of a literal name counts as an import. Of an installed module, its own
    package alone is searched.
    """
    importlib.invalidate_caches()
    found: dict[str, Path] = {}
    own = module.partition(".")[0]
    folder = next((_folder_of(spec) for spec in _specs(own)), None)
    waiting = [module]
    while waiting and folder is not None:
        for spec in _specs(waiting.pop()):
            if spec.name in found or not spec.has_location or spec.origin is None:
                continue
            path = Path(spec.origin)
            top = spec.name.partition(".")[0]
            elsewhere = not path.is_relative_to(folder) or top == "strands_cosmos3"
            if elsewhere or (top != own and not _INSTALLED.isdisjoint(path.parts)):
                continue
            found[spec.name] = path
            waiting.extend(_imports(spec, path))
    return found


def _specs(name: str) -> Iterator[ModuleSpec]:
    """Yield the specs of a module's packages and of itself, as far as they are found."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # ValueError: __main__, and no name at all
        return
    while spec is not None:
        yield spec
        if not rest or spec.submodule_search_locations is None:
            return
        inner = f"{spec.name}.{rest.pop(0)}"
        spec = PathFinder.find_spec(inner, list(spec.submodule_search_locations))


def _folder_of(spec: ModuleSpec) -> Path | None:
    """Return the folder in which a module at the top was found."""
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec.origin else None


def _imports(spec: ModuleSpec, path: Path) -> Iterator[str]:
    """Yield every name that a module's source imports, those of a module's members among them."""
    try:
        tree = ast.parse(path.read_bytes() if path.suffix == ".py" else b"")
    except (SyntaxError, ValueError):  # imported nowhere, or by another Python
        return
    package = spec.name if spec.submodule_search_locations else spec.parent
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                try:
                    base = resolve_name("." * level + (module or ""), package)
                except ImportError:  # above the top
                    continue
                yield from (base, *(f"{base}.{alias.name}" for alias in names))
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ) if not name.startswith("."):
                yield name
            case _:
                pass
