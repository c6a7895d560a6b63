"""The contract: what the rows, pictures and prompts of a checkpoint mean. Nothing of it follows
from the weights.

A folder may state some of it; a ``contract.toml`` states the rest (docs/formats.md). Its fields
become keys of the checkpoint's metadata (:mod:`..checkpoint`), which ``checkpoint convert`` writes
into ``checkpoint.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from strands_cosmos3.actions.stats import FIGURES, Method, figures_of
from strands_cosmos3.checks import known_name
from strands_cosmos3.embodiments import ACTION_DIM, MODEL_SPACES, get_embodiment, list_embodiments
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.errors import ContractError, InputError, StatisticsError
from strands_cosmos3.observe.views import TIERS
from strands_cosmos3.resources import contained, read_json, resource, shown
from strands_cosmos3.tables import read_toml, toml_value

CONTRACT = "contract.toml"
NORMALIZATIONS = ("none", *get_args(Method))
Field = tuple[Callable[[Any], bool], str]
"""The check of a field, and its valid values in words."""
Stated = tuple[str, Mapping[str, Any]]
"""A source, and the fields that it states."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "meanstd": ("mean", "std"),
    "minmax": ("min", "max"),
    "quantile_rot": ("raw",),
}
"""Normalisation -> the figures it needs beside q01 and q99."""
_STATISTICS = "statistics"
SAMPLING = ("num_steps", "guidance_scale", "flow_shift")
_FPS = (0.1, 1000)
_MOST_ROWS = 256


def whole_from(low: int, high: int) -> Callable[[Any], bool]:
    """The check of a whole number from ``low`` to ``high``."""
    return lambda value: type(value) is int and low <= value <= high


def one_of(*valid: object) -> Field:
    """A field with one of these values."""
    pairs = [(type(choice), choice) for choice in valid]
    return lambda value: (type(value), value) in pairs, " or ".join(map(json.dumps, valid))


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _sampling(value: Any) -> bool:
    if (
        not isinstance(value, Mapping)
        or value.keys() != set(SAMPLING)
        or not whole_from(1, 1000)(value["num_steps"])
    ):
        return False
    guidance = value["guidance_scale"]
    shift = value["flow_shift"]
    return _number(guidance) and 0 <= guidance <= 100 and _number(shift) and 0 < shift <= 1000


def _domain(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(get_embodiment(value))
    except InputError:
        return False


def _views(value: Any) -> bool:
    are_names = (
        isinstance(value, list)
        and 0 < len(value) <= 8
        and all(isinstance(v, str) and 0 < len(v) < 80 for v in value)
    )
    return are_names and len(set(value)) == len(value)


def _figures(value: Any, raw: bool = True) -> bool:
    if not isinstance(value, Mapping) or not value.keys() <= {*FIGURES, *(["raw"] * raw)}:
        return False
    rows = [row for name, row in value.items() if name != "raw"]
    sound = all(
        isinstance(row, list) and 0 < len(row) <= ACTION_DIM and all(map(_number, row))
        for row in rows
    )
    return sound and ("raw" not in value or _figures(value["raw"], raw=False))


def _clip_lengths(value: Any) -> bool:
    lengths = value if isinstance(value, list) else [value]
    return all(whole_from(1, _MOST_ROWS + 1)(n) and n % 4 == 1 for n in lengths)


FIELDS: Mapping[str, Field] = {
    "domain": (_domain, "an embodiment: " + ", ".join(sorted(list_embodiments()))),
    "action_space": (
        one_of(*MODEL_SPACES)[0],
        '"midtrain" (pose deltas) or "joint_pos" (joint angles)',
    ),
    "width": (whole_from(1, 64), "number of action columns, 1 to 64"),
    "chunk": (whole_from(1, _MOST_ROWS), f"rows of an answer, 1 to {_MOST_ROWS}"),
    "fps": (
        lambda value: _number(value) and _FPS[0] <= value <= _FPS[1],
        "rows and frames a second, 0.1 to 1000",
    ),
    "normalization": one_of(*NORMALIZATIONS),
    _STATISTICS: (
        lambda value: _figures(value) or _domain(value),
        "a domain with packaged statistics, or a JSON file beside this one: lists q01, q99 and "
        "what the normalisation needs",
    ),
    "gripper": (
        one_of("1=open", "1=closed", "none")[0],
        'the model\'s gripper column: "1=open", "1=closed" or "none"',
    ),
    "views": (_views, "different names of the pictures, in the order in which they are composed"),
    "prompt_format": one_of("plain", "json"),
    "resolution_tier": one_of(*TIERS),
    "sampling": (
        _sampling,
        "{ num_steps = ..., guidance_scale = ..., flow_shift = ... }, guidance_scale at most 100, "
        "flow_shift at most 1000",
    ),
}
"""Field -> its check, and its valid values in words."""
OPTIONAL: Mapping[str, Field] = {
    "variant": one_of(*VARIANTS),
    "composition": one_of("letterbox", "framework"),
    "policy_frames": (
        _clip_lengths,
        "1 + a multiple of 4 (frames of a policy's clip: 5 with one future latent frame), at most "
        "rows + 1, or a list of such, the default first",
    ),
}
_LINKS = ("checkpoint", "base", "like", "sources")
# other words for what the fields say
_ONLY_COMPARED = ("domain_id", "num_views", "action_dim", "state_row")


def read_contract(path: Path, root: Path) -> dict[str, Any]:
    """Read a contract file; its statistics file, if it names one, must lie in ``root``. Raises
    ContractError for a bad value.

    ``like`` takes the fields of a known contract (:func:`known_contracts`) that the file does not
    state.
    """
    contained(path, root, "checkpoint", ContractError)
    hint = "docs/formats.md shows an example."
    fields = read_toml(path, hint, ContractError, ContractError)
    inherited = known_contract(fields["like"]) if "like" in fields else {}
    statistics = fields.get(_STATISTICS)
    if isinstance(statistics, str) and statistics.endswith(".json"):
        file = contained(path.parent / statistics, root, "checkpoint", ContractError)
        data = read_json(file, ContractError, f"{path} names it as statistics.")
        try:
            fields[_STATISTICS] = figures_of(data, file)
        except StatisticsError as error:
            raise ContractError(str(error)) from None
    return checked(inherited | fields, str(path))


def checked(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a contract; raises ContractError for an unknown one, or a value that is not
    valid.
    """
    valid = {**FIELDS, **OPTIONAL}
    for name, value in fields.items():
        if name in _LINKS:
            if name != "sources" and not isinstance(value, str):
                raise ContractError(f"{where}: {name} must be a string, got {shown(value)}.")
        elif name not in valid:
            raise ContractError(
                f"{where}: unknown field {shown(name)}; valid: {', '.join((*valid, *_LINKS))}."
            )
        elif not valid[name][0](value):
            raise ContractError(f"{where}: {name} must be {valid[name][1]}; got {shown(value)}.")
    return {name: value for name, value in fields.items() if name != "sources"}


def fields_of(contract: Mapping[str, Any]) -> dict[str, Any]:
    """A contract without what it says of files."""
    return {name: value for name, value in contract.items() if name not in _LINKS}


def restated(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What a foreign config states, by our names; ``names`` are theirs -> ours."""
    return {
        ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None
    }


def merged(sources: Iterable[Stated], where: str, foreign: bool) -> dict[str, Any]:
    """Fields that all sources state together. Values of ``foreign`` files that are not valid here
    count as not stated.

    Raises ContractError, with both sources, where one contradicts another, or what follows from the
    others.
    """
    fields: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    wrong: list[str] = []

    def compare(source: str, values: Mapping[str, Any], keep: bool) -> None:
        for name, value in values.items():
            known = fields.get(name)
            if known is None:
                if keep and value is not None:
                    fields[name] = value
                    said_by[name] = source
            elif value is not None and not _agree(name, known, value):
                wrong.append(
                    f"{name} is {shown(known)} in {said_by[name]} and {shown(value)} in {source}"
                )
            elif isinstance(value, Mapping):
                fields[name] = {**known, **value}

    for source, values in sources:
        compare(source, values, keep=True)
    valid = {
        name: value
        for name, value in fields.items()
        if not foreign or name not in FIELDS or FIELDS[name][0](value)
    }
    for source, values in _implied(valid):
        compare(source, values, keep=False)
    if wrong:
        raise ContractError(f"{where}: {'; '.join(wrong)}. One of the two is wrong; correct it.")
    return {name: fields[name] for name in valid if name not in _ONLY_COMPARED}


def _agree(name: str, first: Any, second: Any) -> bool:
    if name == "domain" and _domain(first) and _domain(second):
        return get_embodiment(first) is get_embodiment(second)
    if name == "policy_frames":
        return lengths_of(first) == lengths_of(second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return all(_agree(key, first[key], second[key]) for key in first.keys() & second.keys())
    return first == second


def lengths_of(policy_frames: Any) -> tuple[Any, ...]:
    """The lengths that a field ``policy_frames`` states, which may be a single one."""
    return tuple(policy_frames) if isinstance(policy_frames, list) else (policy_frames,)


def _implied(fields: Mapping[str, Any]) -> Iterator[Stated]:
    """Fields that follow from others: a source like any other, except that it fills in none."""
    statistics: Any = fields.get(_STATISTICS)
    for block in (statistics, statistics.get("raw", {})) if isinstance(statistics, Mapping) else ():
        yield from (
            (f"the list {name} of the statistics", {"width": len(block[name])})
            for name in FIGURES
            if name in block
        )
    if "views" in fields:
        yield "the list of views", {"num_views": len(fields["views"])}
    longest = max(lengths_of(fields.get("policy_frames") or []), default=1)
    rows = fields.get("chunk")
    if rows is not None and longest > rows + 1:
        yield f"a chunk of {rows} rows", {"policy_frames": f"at most {rows + 1}"}
    if "domain" not in fields:
        return
    domain = get_embodiment(fields["domain"])
    source = f"embodiment {domain.name!r}"
    yield (
        source,
        {
            "domain_id": domain.domain_id,
            "views": None if domain.rig is None else list(domain.rig.views),
        },
    )
    if (domain.gripper is None) != (fields.get("gripper") == "none"):
        yield source, {"gripper": "none" if domain.gripper is None else "1=open or 1=closed"}
    if isinstance(statistics, str) and get_embodiment(statistics).stats != domain.stats:
        yield source, {_STATISTICS: domain.stats or "not packaged"}
    if (space := domain.spaces.get(fields.get("action_space", ""))) is not None:
        row = {} if fields.get("state") else {"state_row": space.state_row}
        yield f"{space.name} rows of {source}", {"width": space.width, **row}
    else:
        yield source, {"action_space": " or ".join(domain.spaces)}


def missing(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that metadata does not state; statistics, with what the normalisation needs,
    for normalised rows only.
    """
    method = metadata.get("normalization")
    figures = metadata.get(_STATISTICS)
    lacking = (
        isinstance(figures, Mapping)
        and not {*FIGURES[:2], *NEEDED.get(str(method), ())} <= figures.keys()
    )
    absent = [
        name for name in FIELDS if metadata.get(name) is None or (name == _STATISTICS and lacking)
    ]
    return tuple(name for name in absent if name != _STATISTICS or method != "none")


def template(metadata: Mapping[str, Any], root: Path, base: str | None = None) -> str:
    """A contract file with what is known filled in, and the rest as comments that say what is
    valid.
    """
    lines = [
        "# What the actions of this checkpoint mean. Fill in the lines with '?', save it as a "
        ".toml file and pass that file",
        '# as the checkpoint. A line like = "NAME" takes over a known contract: '
        f"{', '.join(known_contracts())}.",
        f"checkpoint = {json.dumps(str(root))}",
        f"base = {json.dumps(base)}"
        if base
        else '# base = ?  # source of VAE and tokenizer, e.g. "nvidia/Cosmos3-Nano"',
    ]
    lacking = missing(metadata)
    for name, (_, valid) in FIELDS.items():
        value = metadata.get(name)
        if value is None or name in lacking:
            lines.append(f"# {name} = ?  # {valid}")
        elif name == _STATISTICS and isinstance(value, Mapping):
            lines.append(f"# {name}: the folder has them")
        else:
            lines.append(f"{name} = {toml_value(value)}")
    stated = [name for name in OPTIONAL if metadata.get(name) is not None]
    lines += [f"{name} = {toml_value(metadata[name])}" for name in stated]
    return "\n".join(lines)


def require_complete(metadata: Mapping[str, Any], stated_fields: Iterable[str], root: Path) -> None:
    """Raise ContractError, with the file to fill in, if fields are neither in the metadata nor
    among ``stated_fields``.
    """
    lacking = [name for name in missing(metadata) if name not in set(stated_fields)]
    if lacking:
        raise ContractError(
            f"{root} does not state {', '.join(lacking)}, and none of it follows from the "
            "weights: its actions have no known "
            f"meaning. Fill in this file:\n\n{template(metadata, root)}"
        )


def known_contracts() -> tuple[str, ...]:
    """Names of the contracts that ship with this package, for ``like``."""
    return tuple(sorted(path.stem for path in resource("stats/contracts").glob("*.toml")))


def known_contract(name: object) -> dict[str, Any]:
    """A contract that ships with this package; what its sources do not state is left out.

    Raises UnknownNameError for another name.
    """
    known_name(name, "contract", known_contracts())
    path = resource(f"stats/contracts/{name}.toml")
    return checked(read_toml(path), str(path))
