"""Load action statistics, normalise and de-normalise rows. Malformed rows raise InputError,
ShapeError or NonFiniteError.

Statistics are looked up by domain name: several domains have ten columns, so the width does not
identify one. The figures come from NVIDIA cosmos-framework and are in ``stats/`` with their
licence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from strands_cosmos3.actions.normalization import FIGURES, ActionStats, Affine, Method
from strands_cosmos3.checks import F64, finite_array, instance_of, typed
from strands_cosmos3.embodiments import Embodiment, get_embodiment, list_embodiments
from strands_cosmos3.errors import ActionSpaceError, ResourceNotFoundError, StatisticsError
from strands_cosmos3.resources import resource

_SCHEMA = 1
_UPSTREAM_DOMAINS: Mapping[str, str] = {
    "agibotworld_beta_lerobot_stats": "agibotworld",
    "bridge_orig_lerobot_stats": "bridge_orig_lerobot",
    "droid_lerobot_stats": "droid_lerobot",
    "fractal_lerobot_stats": "fractal",
    "human_hand_pose_lerobot_stats": "hand_pose",
    "libero_native_frame_wise_relative_rot6d": "libero",
    "robomind_franka_dual_stats": "robomind-franka-dual",
    "robomind_franka_stats": "robomind-franka",
    "robomind_ur_stats": "robomind-ur",
    "umi_lerobot_stats": "umi",
}


def load_action_stats(source: str | Path, domain: str | None = None) -> ActionStats:
    """Load statistics of a single arm (the first ten columns of UMI's two) by name, or from a file.

    Args:
        source: A domain or embodiment (``"droid_lerobot"``, ``"droid"``), a cosmos-framework file
            name without its suffix (``"droid_lerobot_stats"``), or the path of a ``.json`` file in
            this project's or cosmos-framework's schema.
        domain: Name of the domain; needed for a framework file that was renamed.

    Raises:
        UnknownNameError, ResourceNotFoundError: No such embodiment, or no such file.
        StatisticsError: The domain has no statistics, is unknown or another one, or the file's
            content is wrong.
    """
    if not isinstance(source, Path):
        source = instance_of(source, str, "source of statistics")
        if not (source.endswith(".json") or "/" in source or "\\" in source):
            stats = _packaged(_domain_of(source))
            if domain is not None and _domain_of(domain) != stats.domain:
                raise StatisticsError(
                    f"{source!r} names statistics of {stats.domain!r}, not of {domain!r}."
                )
            return stats
    path = Path(source)
    data = _read(path)
    return (
        _from_schema(data, path, domain) if "schema" in data else _from_upstream(data, path, domain)
    )


def stats_for(
    embodiment: Embodiment | str, stats: ActionStats | str | Path | None = None
) -> ActionStats:
    """Return the statistics of an embodiment's rows, the packaged ones by default.

    Raises:
        StatisticsError: They are of another domain or width, or there are none for this embodiment.
    """
    embodiment = get_embodiment(embodiment)
    if stats is None:
        stats = _packaged(_has_stats(embodiment))
    elif isinstance(stats, str | Path):
        stats = load_action_stats(stats)
    stats = instance_of(stats, ActionStats, "stats")
    width = embodiment.action_space("midtrain").width
    if stats.domain != embodiment.stats:
        raise StatisticsError(
            f"statistics of {stats.domain!r} do not fit embodiment {embodiment.name!r}, whose "
            "statistics are "
            f"{embodiment.stats!r}; equal width does not make them interchangeable. Pass "
            "load_action_stats("
            f"{embodiment.stats!r})."
        )
    if stats.width != width:
        raise StatisticsError(
            f"statistics of {stats.domain!r} have {stats.width} columns, {embodiment.name!r} "
            f"{width}."
        )
    return stats


@typed()
def stats_of_domain(
    embodiment: Embodiment,
    stats: ActionStats | Mapping[str, Any] | str | Path | None,
    domain: str | None,
) -> ActionStats | str | Path | None:
    """Return statistics, those of a mapping with ``q01`` and ``q99`` as :class:`ActionStats`, where
    their domain is declared.

    Raises:
        StatisticsError: ``domain`` is not the embodiment's, or is missing beside a mapping, or the
            mapping lacks a figure.
    """
    if domain is not None and _domain_of(domain) != embodiment.stats:
        raise StatisticsError(
            f"stats_domain={domain!r} does not describe embodiment {embodiment.name!r}, which "
            f"needs {embodiment.stats!r}."
        )
    if not isinstance(stats, Mapping):
        return stats
    if domain is None or not {"q01", "q99"} <= stats.keys():
        raise StatisticsError(
            "a mapping of statistics holds q01 and q99 and needs "
            f"stats_domain={embodiment.stats!r}; got "
            f"{sorted(map(str, stats))} and stats_domain={domain!r}. Equal width does not make "
            "statistics interchangeable."
        )
    columns = embodiment.action_space("midtrain").columns
    return ActionStats(_has_stats(embodiment), columns, stats["q01"], stats["q99"])


@typed()
def normalize_quantile(a: Any, q01: Any, q99: Any, clip: bool = False) -> F64:
    """Normalise [..., D] actions: ``q01`` [D] maps to -1, ``q99`` [D] to 1; ``clip`` clamps, as in
    DROID's training data.

    Raises:
        StatisticsError: q99 <= q01 in some column, or their widths differ.
    """
    return _quantile_map(q01, q99)(a, clip)


def denormalize_quantile(z: Any, q01: Any, q99: Any) -> F64:
    """De-normalise [..., D] rows without clamping: ``z (q99 - q01)/2 + (q99 + q01)/2``. Zeros are
    mid-range, not a stop.

    Raises:
        ActionOutOfRangeError, StatisticsError: A value lies beyond |z| = 10; otherwise as
            :func:`normalize_quantile`.
    """
    return _quantile_map(q01, q99).inverse(z)


def denormalize_chunk(
    action: Any,
    embodiment: Embodiment | str,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
) -> F64:
    """De-normalise [T, D] ``midtrain`` rows to metres, rotation columns and the gripper's own unit.

    Raises:
        ActionSpaceError: The embodiment's rows are not normalised, or these are of another action
            space.
        StatisticsError, ActionOutOfRangeError: Statistics of another domain or width, or a value
            beyond |z| = 10.
    """
    rows = finite_array(action, "action", (None, None))
    return _chunk_map(rows.shape[1], embodiment, stats, method).inverse(rows)


@typed()
def normalize_chunk(
    action: Any,
    embodiment: Embodiment | str,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
    clip: bool = False,
) -> F64:
    """The inverse of :func:`denormalize_chunk`; ``clip`` clamps to [-1, 1], as in training."""
    rows = finite_array(action, "action", (None, None))
    return _chunk_map(rows.shape[1], embodiment, stats, method)(rows, clip)


def _chunk_map(
    width: int, embodiment: Embodiment | str, stats: ActionStats | str | Path | None, method: Method
) -> Affine:
    embodiment = get_embodiment(embodiment)
    space = embodiment.action_space("midtrain")
    if not space.normalized:
        raise ActionSpaceError(
            f"{space.name!r} rows of {embodiment.name!r} are not normalised; use them unchanged."
        )
    if width != space.width:
        others = [name for name, other in embodiment.spaces.items() if other.width == width]
        raise ActionSpaceError(
            f"rows have {width} columns{f' (as {others} do)' if others else ''}, but only "
            f"{space.name!r} rows of "
            f"{embodiment.name!r} are normalised, and they have {space.width}. Other rows are "
            "used without statistics."
        )
    return stats_for(embodiment, stats).normalizer(method)


def _quantile_map(q01: Any, q99: Any) -> Affine:
    columns = tuple(f"column {i}" for i in range(len(finite_array(q01, "q01", (None,)))))
    return ActionStats("the caller", columns, q01, q99).normalizer()


def _has_stats(embodiment: Embodiment) -> str:
    if embodiment.stats is None:
        have = ", ".join(name for name in list_embodiments() if get_embodiment(name).stats)
        raise StatisticsError(
            f"there are no action statistics for {embodiment.name!r}; there are for: {have}."
        )
    return embodiment.stats


def _domain_of(name: str) -> str:
    key = instance_of(name, str, "domain").strip().lower()
    return _has_stats(get_embodiment(_UPSTREAM_DOMAINS.get(key, key)))


@cache
def _packaged(domain: str) -> ActionStats:
    return load_action_stats(resource(f"stats/{domain}.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResourceNotFoundError(
            f"no statistics file {str(path)!r}; pass another path or a name: "
            f"{', '.join(_UPSTREAM_DOMAINS.values())}."
        ) from None
    except (OSError, ValueError) as error:
        raise StatisticsError(f"{str(path)!r} is not a readable JSON file: {error}") from None
    if not isinstance(data, dict):
        raise StatisticsError(f"{str(path)!r} must hold a JSON object, not {type(data).__name__}.")
    return cast("dict[str, Any]", data)


def _from_schema(data: dict[str, Any], path: Path, domain: str | None) -> ActionStats:
    own, columns = data.get("domain"), data.get("columns")
    names: list[Any] = cast("list[Any]", columns) if isinstance(columns, list) else [None]
    if (
        data["schema"] != _SCHEMA
        or not isinstance(own, str)
        or not all(isinstance(name, str) for name in names)
    ):
        raise StatisticsError(
            f"{str(path)!r} does not follow statistics schema {_SCHEMA}, which stats/README.md "
            "describes."
        )
    if domain is not None and own != domain and own != _domain_of(domain):
        raise StatisticsError(f"{str(path)!r} holds statistics of {own!r}, not of {domain!r}.")
    skipped = _indices(data.get("skip_rotation_dims", []), path)
    stats = _stats(own, tuple(names), data, data.get("raw"), path, skipped)
    single = data.get("single_arm_columns", stats.width)
    return stats.first(instance_of(single, int, f"single_arm_columns of {str(path)!r}"))


def _from_upstream(data: dict[str, Any], path: Path, domain: str | None) -> ActionStats:
    if domain is None and path.stem not in _UPSTREAM_DOMAINS:
        raise StatisticsError(
            f"{str(path)!r} does not name the domain of its statistics, and its name is not one "
            "of cosmos-framework's "
            f"({', '.join(_UPSTREAM_DOMAINS)}); pass domain=."
        )
    known = _domain_of(path.stem if domain is None else domain)
    columns = get_embodiment(known).action_space("midtrain").columns
    block = data.get("global", data)
    width = len(columns)
    if known == "umi" and len(_block(block, path)["q01"]) == 2 * width:
        columns = (*columns, *(f"second_{column}" for column in columns))
    meta = data.get("metadata")
    skipped = (
        _indices(cast("dict[str, Any]", meta).get("skip_rotation_dims", []), path)
        if isinstance(meta, dict)
        else ()
    )
    return _stats(known, columns, block, data.get("global_raw"), path, skipped).first(width)


def _stats(
    domain: str,
    columns: tuple[str, ...],
    block: Any,
    raw: Any,
    path: Path,
    skipped: tuple[int, ...] = (),
) -> ActionStats:
    figures = {
        name: value
        for name, value in _block(block, path).items()
        if name in FIGURES and value is not None
    }
    raw_stats = None if raw is None else _stats(domain, columns, raw, None, path)
    return ActionStats(domain, columns, **figures, raw=raw_stats, skip_rotation_dims=skipped)


def _block(block: Any, path: Path) -> dict[str, Any]:
    figures = cast("dict[str, Any]", block) if isinstance(block, dict) else {}
    if any(not isinstance(figures.get(name), list) for name in FIGURES[:2]):
        raise StatisticsError(
            f"{str(path)!r} has no lists q01 and q99; statistics need at least those."
        )
    return figures


def _indices(value: Any, path: Path) -> tuple[int, ...]:
    if not isinstance(value, list) or any(not isinstance(i, int) for i in cast("list[Any]", value)):
        raise StatisticsError(
            f"{str(path)!r}: skip_rotation_dims must be a list of column numbers, got {value!r}."
        )
    return tuple(cast("list[int]", value))
