"""The contract: what the rows, pictures and prompts of a checkpoint mean. Nothing of it follows from the weights.

A folder may state some of it; a ``contract.toml`` states the rest (docs/formats.md). Its fields become keys of the checkpoint's
metadata (:mod:`..checkpoint`), which ``checkpoint convert`` writes into ``checkpoint.json``.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from strands_cosmos3.actions.normalization import FIGURES, Method
from strands_cosmos3.embodiments import get_embodiment, list_embodiments
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.errors import ContractError, InputError, UnknownNameError
from strands_cosmos3.observe.views import TIERS
from strands_cosmos3.resources import contained, read_json, require_file, resource, shown

CONTRACT = "contract.toml"
NORMALIZATIONS = ("none", *get_args(Method))
_MAX_BYTES = 1 << 20
_STATISTICS = "statistics"


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _one_of(*valid: object) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in valid)


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _sampling(value: Any) -> bool:
    wanted = {"num_steps", "guidance_scale", "flow_shift"}
    if not isinstance(value, Mapping) or set(value) != wanted or not _whole(1, 1000)(value["num_steps"]):
        return False
    return all(type(value[name]) in (int, float) and math.isfinite(value[name]) for name in wanted) and value["flow_shift"] > 0


def _domain(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(get_embodiment(value))
    except InputError:
        return False


def _views(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 8 and all(isinstance(v, str) and 0 < len(v) < 80 for v in value)


FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "domain": (_domain, "an embodiment: " + ", ".join(list_embodiments())),
    "action_space": (_one_of("midtrain", "joint_pos"), '"midtrain" (pose deltas) or "joint_pos" (joint angles)'),
    "width": (_whole(1, 64), "number of action columns, 1 to 64"),
    "chunk": (_whole(1, 10_000), "rows of an answer"),
    "fps": (_positive, "rows and frames a second"),
    "normalization": (_one_of(*NORMALIZATIONS), " or ".join(map(json.dumps, NORMALIZATIONS))),
    _STATISTICS: (
        lambda value: isinstance(value, Mapping) or _domain(value),
        "a domain with packaged statistics, or a JSON file beside this one",
    ),
    "gripper": (_one_of("1=open", "1=closed", "none"), 'the model\'s gripper column: "1=open", "1=closed" or "none"'),
    "views": (_views, "names of the pictures in the order in which they are composed"),
    "prompt_format": (_one_of("plain", "json"), '"plain" or "json"'),
    "resolution_tier": (_one_of(*TIERS), " or ".join(map(str, TIERS))),
    "sampling": (_sampling, "{ num_steps = ..., guidance_scale = ..., flow_shift = ... }"),
}
"""Field -> its check, and its valid values in words."""
OPTIONAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "variant": (_one_of(*VARIANTS), " or ".join(VARIANTS)),
    "composition": (_one_of("letterbox", "framework"), '"letterbox" or "framework"'),
}
_LINKS = ("checkpoint", "base", "like", "sources")


def read_contract(path: Path, root: Path) -> dict[str, Any]:
    """Read a contract file; its statistics file, if it names one, must lie in ``root``. Raises ContractError for a bad value.

    ``like`` takes the fields of a known contract (:func:`known_contracts`) that the file does not state.
    """
    require_file(contained(path, root, "checkpoint", ContractError), ContractError, _MAX_BYTES)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"{path} cannot be read as TOML ({str(error)[:200]}); docs/formats.md shows an example.") from None
    known = known_contract(found["like"]) if "like" in found else {}
    named = found.get(_STATISTICS)
    if isinstance(named, str) and named.endswith(".json"):
        file = contained(path.parent / named, root, "checkpoint", ContractError)
        found[_STATISTICS] = figures_of(read_json(file, ContractError, f"{path} names it as statistics."), file)
    return checked(known | found, str(path))


def figures_of(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The figures of a statistics file in the schema of this project, of cosmos-framework (``global``) or LeRobot (``action``).

    Raises ContractError if it has no lists q01 and q99.
    """
    block = next((data[name] for name in ("action", "global") if isinstance(data.get(name), Mapping)), data)
    raw = next((data[name] for name in ("global_raw", "raw") if isinstance(data.get(name), Mapping)), None)
    if not all(isinstance(block.get(name), list) for name in FIGURES[:2]):
        raise ContractError(f"{path} has no lists q01 and q99 of the action columns; statistics need at least those.")
    figures: dict[str, Any] = {name: block[name] for name in FIGURES if isinstance(block.get(name), list)}
    return figures | ({} if raw is None else {"raw": figures_of(raw, path)})


def checked(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a contract; raises ContractError for an unknown one, or a value that is not valid."""
    valid = {**FIELDS, **OPTIONAL}
    for name, value in found.items():
        if name in _LINKS:
            if name != "sources" and not isinstance(value, str):
                raise ContractError(f"{where}: {name} must be a string, got {shown(value)}.")
        elif name not in valid:
            raise ContractError(f"{where}: unknown field {shown(name)}; valid: {', '.join((*valid, *_LINKS))}.")
        elif not valid[name][0](value):
            raise ContractError(f"{where}: {name} must be {valid[name][1]}; got {shown(value)}.")
    return {name: value for name, value in found.items() if name != "sources"}


def merged(recorded: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a folder records and a contract states together; raises ContractError where they contradict each other."""
    wrong = [
        f"{name} is {shown(recorded[name])} in the folder and {shown(value)} in the contract"
        for name, value in given.items()
        if name in FIELDS and recorded.get(name) is not None and recorded[name] != value
    ]
    if wrong:
        raise ContractError(f"{where}: {'; '.join(wrong)}. One of the two is wrong; correct the contract.")
    return {**recorded, **{name: value for name, value in given.items() if name not in _LINKS}}


def missing(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that metadata does not state; statistics are needed for normalised rows only."""
    raw = metadata.get("normalization") == "none"
    return tuple(name for name in FIELDS if metadata.get(name) is None and not (name == _STATISTICS and raw))


def template(metadata: Mapping[str, Any], root: Path, base: str | None = None) -> str:
    """A contract file with what is known filled in, and the rest as comments that say what is valid."""
    lines = [
        "# What the actions of this checkpoint mean. Fill in the lines with '?', save it as a .toml file and pass that file",
        f'# as the checkpoint. A line like = "NAME" takes over a known contract: {", ".join(known_contracts())}.',
        f"checkpoint = {json.dumps(str(root))}",
        f"base = {json.dumps(base)}" if base else '# base = ?  # source of VAE and tokenizer, e.g. "nvidia/Cosmos3-Nano"',
    ]
    for name, (_, valid) in FIELDS.items():
        value = metadata.get(name)
        if value is None:
            lines.append(f"# {name} = ?  # {valid}")
        elif name == _STATISTICS and isinstance(value, Mapping):
            lines.append(f"# {name}: the folder has them")
        else:
            lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines)


def require_complete(metadata: Mapping[str, Any], given: Iterable[str], root: Path) -> None:
    """Raise ContractError, with the file to fill in, if fields are neither stated nor ``given``."""
    lacking = [name for name in missing(metadata) if name not in set(given)]
    if lacking:
        raise ContractError(
            f"{root} does not state {', '.join(lacking)}, and none of it follows from the weights: its actions have no known "
            f"meaning. Fill in this file:\n\n{template(metadata, root)}"
        )


def known_contracts() -> tuple[str, ...]:
    """Names of the contracts that ship with this package, for ``like``."""
    return tuple(sorted(path.stem for path in resource("stats/contracts").glob("*.toml")))


def known_contract(name: object) -> dict[str, Any]:
    """A contract that ships with this package; what its sources do not state is left out.

    Raises UnknownNameError for another name.
    """
    if name not in known_contracts():
        raise UnknownNameError("contract", name, known_contracts())
    path = resource(f"stats/contracts/{name}.toml")
    return checked(tomllib.loads(path.read_text(encoding="utf-8")), str(path))


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml_value(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)
