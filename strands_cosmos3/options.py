"""Declaration of options. A field of an option dataclass carries its help text (the docstring below
it), its default and the backends that heed it; command line, TOML and policies are built from these
fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, get_args

from strands_cosmos3.errors import ConfigError

_T = TypeVar("_T")
BackendName = Literal["scripted", "replay", "native", "onnx", "distributed", "diffusers", "service"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
MODEL_BACKENDS = ("native", "onnx", "distributed", "diffusers")
"""The backends that run a checkpoint."""
TORCH_BACKENDS = ("native", "distributed", "diffusers")
"""Those of them that run it with torch."""
ENGINE_BACKENDS = ("native", "distributed")
"""Those that run it with this package's engine in torch."""
SAMPLER_BACKENDS = ("native", "onnx", "distributed")
"""Those that sample with this package's engine, whatever runs the networks."""


def option(
    default: Any, *backends: str, flag: str | None = None, hidden: bool = False, repr: bool = True
) -> Any:
    """Declare a field of an option dataclass.

    Args:
        default: Its default.
        backends: The backends that heed it; none means that all do.
        flag: Its flag, without dashes, if that is not its name.
        hidden: Whether it is for Python only, without a flag.
        repr: Whether it is printed.
    """
    metadata = {"backends": backends, "flag": flag, "hidden": hidden}
    return field(default=default, repr=repr, metadata=metadata)


def section(kind: type, hidden: bool = False) -> Any:
    """Declare a field that holds further options, of its own dataclass."""
    return field(default_factory=kind, metadata={"hidden": hidden})


@dataclass(frozen=True)
class Option:
    """An option of a dataclass or of one nested in it.

    Args:
        name: Its name in TOML; with dashes it is the flag.
        path: Attributes that lead to its value.
        default: Its default.
        backends: The backends that heed it; empty for all.
        hidden: Whether it is for Python only, without a flag.
    """

    name: str
    path: tuple[str, ...]
    default: Any
    backends: tuple[str, ...]
    hidden: bool

    def value(self, options: Any) -> Any:
        """Return its value in the dataclass."""
        for attribute in self.path:
            options = getattr(options, attribute)
        return options


@cache
def options_of(kind: type) -> Mapping[str, Option]:
    """Return the options of a dataclass and of those nested in it, by name."""
    return {option.name: option for option in _options(kind, (), False)}


def _options(kind: type, path: tuple[str, ...], hidden: bool) -> Iterator[Option]:
    for declared in fields(kind):
        here = (*path, declared.name)
        about = declared.metadata
        is_hidden = hidden or about.get("hidden", False)
        inner = declared.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            yield from _options(inner, here, is_hidden)
        else:
            name = about.get("flag") or declared.name
            yield Option(name, here, declared.default, about.get("backends", ()), is_hidden)


def changed_options(options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, by name."""
    values = ((option, option.value(options)) for option in options_of(type(options)).values())
    return {
        option.name: value
        for option, value in values
        # an array, which no option is, has no truth value
        if (value is not None if option.default is None else value != option.default)
    }


def with_options(options: _T, values: Mapping[str, Any]) -> _T:
    """Return a dataclass with some of its options, or of those nested in it, set by name.

    Raises:
        ConfigError: There is no such option; the message lists all.
    """
    known = options_of(type(options))
    if unknown := [name for name in values if name not in known]:
        raise ConfigError(
            f"unknown option {', '.join(map(repr, unknown))}; valid: {', '.join(known)}."
        )
    return _replaced(
        options,
        {
            known[name].path: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        },
    )


def _replaced(options: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    changes = {path[0]: value for path, value in values.items() if len(path) == 1}
    for section in {path[0] for path in values if len(path) > 1}:
        inner = {path[1:]: value for path, value in values.items() if path[0] == section}
        changes[section] = _replaced(getattr(options, section), inner)
    return replace(options, **changes)


def heeds(backend: str, options: Any) -> bool:
    """Whether a backend heeds every option that is set."""
    owners = (options_of(type(options))[name].backends for name in changed_options(options))
    return all(not each or backend in each for each in owners)


def require_heeded(backend: str | None, options: Any, flags: bool = False) -> None:
    """Refuse options that a backend does not heed.

    Args:
        backend: Its name.
        options: A dataclass; options with their default are not refused.
        flags: Whether the message writes them as on the command line.

    Raises:
        ConfigError: One is set that the backend does not heed; the message names the backends that
            do.
    """
    for name, value in changed_options(options).items():
        owners = options_of(type(options))[name].backends
        if not owners or backend in owners:
            continue
        text = f"--{name.replace('_', '-')} {value}" if flags else name
        owner = " or ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
        raise ConfigError(
            f"{text} belongs to {'--' * flags}backend {owner}, not to {backend}; leave it out."
        )
