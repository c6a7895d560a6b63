"""Statistics of a domain's actions: load them, normalise and de-normalise rows by them.

Each normalisation method is an affine map, ``a = z * scale + offset`` in each column (NVIDIA
cosmos-framework, ``action_processing``). Statistics are looked up by domain name: several domains
have ten columns, so the width does not identify one. The figures come from cosmos-framework and are
in ``stats/`` with their licence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from strands_cosmos3.checks import F64, finite_array, instance_of, known_name, trailing, typed
from strands_cosmos3.embodiments import Embodiment, get_embodiment, list_embodiments
from strands_cosmos3.errors import (
    ActionSpaceError,
    ResourceNotFoundError,
    StatisticsError,
)
from strands_cosmos3.resources import read_json, resource
from strands_cosmos3.types import ActionChunk, require_in_range

Method = Literal["quantile", "quantile_rot", "meanstd", "minmax"]
FIGURES = ("q01", "q99", "mean", "std", "min", "max")  # the first two are always present
_SMALLEST_SPREAD = 1e-12  # the narrowest in real data, AgiBot's still head, is 1e-6


@dataclass(frozen=True, eq=False)
class Affine:
    """A normalisation ``(a - offset) / scale`` by column.

    ``offset`` [D] maps to zero, ``scale`` [D] is positive; ``column_names`` are for
    messages.
    """

    offset: F64
    scale: F64
    column_names: tuple[str, ...]

    def __call__(self, rows: Any, clip: bool = False) -> F64:
        """Normalise [..., D] rows; ``clip`` clamps them to [-1, 1], as training did. ShapeError,
        NonFiniteError, InputError: They are malformed.
        """
        z = (trailing(rows, "action", (len(self.column_names),)) - self.offset) / self.scale
        return np.clip(z, -1.0, 1.0) if clip else z

    def inverse(self, rows: Any) -> F64:
        """De-normalise [..., D] rows, ``z * scale + offset``, without clamping.

        Raises:
            ActionOutOfRangeError: A value lies beyond |z| = 10.
            ShapeError, NonFiniteError, InputError: The rows are malformed.
        """
        z = trailing(rows, "normalised action", (len(self.column_names),), largest=np.inf)
        require_in_range(z, self.column_names)
        return z * self.scale + self.offset


@dataclass(frozen=True, eq=False)
class ActionStats:
    """Statistics of one domain's actions; arrays are [D] float64 and read-only.

    Args:
        domain: Name of the domain, as in ``Embodiment.stats``.
        columns: [D] names of the rows' columns.
        q01, q99: First and ninety-ninth percentiles.
        mean, std, min, max: Further figures, if the source has them.
        raw: The same figures over the unprocessed data, if the source has both.

    Raises:
        StatisticsError: A width differs from the columns', or q99 <= q01, max <= min or std <= 0 in
            some column.
        ShapeError, NonFiniteError, InputError: A figure is malformed.
    """

    domain: str
    columns: tuple[str, ...]
    q01: F64
    q99: F64
    mean: F64 | None = None
    std: F64 | None = None
    min: F64 | None = None
    max: F64 | None = None
    raw: ActionStats | None = None

    @classmethod
    def of_figures(
        cls, domain: str, columns: tuple[str, ...], figures: Mapping[str, Any]
    ) -> ActionStats:
        """Return statistics of figures by name, among them those of ``raw``, if any.

        Raises:
            StatisticsError: There are no q01 and q99, or they do not fit the columns.
        """
        if not {*FIGURES[:2]} <= figures.keys():
            raise StatisticsError(
                f"statistics of {domain!r} lack q01 or q99; they need at least those."
            )
        raw = figures.get("raw")
        return cls(
            domain,
            columns,
            **{name: figures[name] for name in FIGURES if name in figures},
            raw=None if raw is None else cls.of_figures(domain, columns, raw),
        )

    def __post_init__(self) -> None:
        names = cast("tuple[object, ...]", (self.domain, *self.columns))
        if not all(isinstance(name, str) for name in names):
            raise StatisticsError(
                f"domain {self.domain!r} and columns {self.columns!r} must be names."
            )
        for name in FIGURES:
            if (value := getattr(self, name)) is not None or name in FIGURES[:2]:
                figure = trailing(value, name, (None,), leading=0)
                if len(figure) != len(self.columns):
                    raise StatisticsError(
                        f"{name} of {self.domain!r} has {len(figure)} columns, but there "
                        f"are {len(self.columns)}."
                    )
                object.__setattr__(self, name, figure)
        for low_name, high_name in (("q01", "q99"), ("min", "max"), ("0", "std")):
            low = getattr(self, low_name, np.zeros(self.width))
            high = getattr(self, high_name)
            if low is None or high is None:
                continue
            if (bad := np.flatnonzero(high - low < _SMALLEST_SPREAD)).size:
                i = int(bad[0])
                raise StatisticsError(
                    f"statistics of {self.domain!r}: {high_name} must exceed {low_name}, but in "
                    f"column {i} ({self.columns[i]}) it is {high[i]:g}, against {low[i]:g}; the "
                    "normalisation could not be inverted."
                )

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.columns)

    def first(self, width: int) -> ActionStats:
        """Return the statistics of the first ``width`` columns: one arm of a file that describes
        two.

        Raises:
            StatisticsError: There are fewer columns.
        """
        if not 1 <= width <= self.width:
            raise StatisticsError(
                f"statistics of {self.domain!r} have {self.width} columns, not {width}."
            )
        cut = {
            name: value[:width] for name in FIGURES if (value := getattr(self, name)) is not None
        }
        raw = None if self.raw is None else self.raw.first(width)
        return replace(self, columns=self.columns[:width], **cut, raw=raw)

    def normalizer(self, method: Method = "quantile") -> Affine:
        """Return the map from actions to normalised rows.

        ``quantile`` maps q01..q99 to -1..1, ``quantile_rot`` does so with the raw figures if there
        are any, ``minmax`` maps min..max to -1..1, ``meanstd`` maps mean, std to 0, 1.

        Raises:
            UnknownNameError, StatisticsError: No such method, or these statistics lack its figures.
        """
        known_name(method, "normalisation method", get_args(Method))
        if method == "quantile_rot":
            return (self.raw or self).normalizer("quantile")
        low, high = {
            "quantile": ("q01", "q99"),
            "minmax": ("min", "max"),
            "meanstd": ("mean", "std"),
        }[method]
        a = cast("F64 | None", getattr(self, low))
        b = cast("F64 | None", getattr(self, high))
        if a is None or b is None:
            raise StatisticsError(
                f"statistics of {self.domain!r} have no {low}/{high} for "
                f"{method!r}; use 'quantile'."
            )
        offset, scale = (a, b) if method == "meanstd" else ((b + a) / 2, (b - a) / 2)
        return Affine(offset, scale, self.columns)


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
            stats = _packaged(_stats_domain(source))
            if domain is not None and _stats_domain(domain) != stats.domain:
                raise StatisticsError(
                    f"{source!r} names statistics of {stats.domain!r}, not of {domain!r}."
                )
            return stats
    path = Path(source)
    if not path.exists():
        raise ResourceNotFoundError(
            f"no statistics file {str(path)!r}; pass another path or a name: "
            f"{', '.join(_UPSTREAM_DOMAINS.values())}."
        )
    data = read_json(path, StatisticsError, "stats/README.md describes these files.")
    figures = figures_of(data, path)
    if "schema" in data:
        name, columns = _described(data, path)
        width = data.get("single_arm_columns", len(columns))
        width = instance_of(width, int, f"single_arm_columns of {str(path)!r}")
    else:
        named = _UPSTREAM_DOMAINS.get(path.stem, domain)
        if named is None:
            raise StatisticsError(
                f"{str(path)!r} does not name the domain of its statistics; call it as "
                f"cosmos-framework does: {', '.join(sorted(_UPSTREAM_DOMAINS))}; or pass domain= "
                "to load_action_stats."
            )
        name = _stats_domain(named)
        columns = get_embodiment(name).action_space("midtrain").columns
        width = len(columns)
        if name == "umi" and len(figures["q01"]) == 2 * width:
            columns = (*columns, *(f"second_{column}" for column in columns))
    if domain is not None and name != domain and name != _stats_domain(domain):
        raise StatisticsError(f"{str(path)!r} holds statistics of {name!r}, not of {domain!r}.")
    return ActionStats.of_figures(name, columns, figures).first(width)


def figures_of(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the figures of a statistics file in the schema of this project, of cosmos-framework
    (``global``) or LeRobot (``action``), and under ``raw`` those of unprocessed data, if any.

    Raises:
        StatisticsError: It has no lists q01 and q99, or two blocks of figures that differ.
    """
    blocks = {name: data[name] for name in ("action", "global") if name in data}
    figures = _only_figures({"": data, **blocks}, path)
    raw = {name: data[name] for name in ("global_raw", "raw") if name in data}
    return figures | ({"raw": _only_figures(raw, path)} if raw else {})


def _only_figures(blocks: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The figures of the one block that has some; StatisticsError if there are several, and they
    differ.
    """
    none: dict[str, Any] = {}
    by_block: dict[str, dict[str, Any]] = {}
    for name, block in blocks.items():
        fields = cast("dict[str, Any]", block) if isinstance(block, Mapping) else none
        if figures := {f: fields[f] for f in FIGURES if isinstance(fields.get(f), list)}:
            by_block[name] = figures
    first = next(iter(by_block.values()), none)
    if any(figures != first for figures in by_block.values()):
        listed = " and ".join(repr(name) if name else "the top level" for name in by_block)
        raise StatisticsError(
            f"{path}: {listed} hold different figures; keep the ones that the "
            "rows were normalised with."
        )
    if not {*FIGURES[:2]} <= first.keys():
        raise StatisticsError(
            f"{path} has no lists q01 and q99 of the action columns; "
            "statistics need at least those."
        )
    return first


def _described(data: Mapping[str, Any], path: Path) -> tuple[str, tuple[str, ...]]:
    """The domain and the columns that a file in this project's schema states."""
    domain = data.get("domain")
    columns = data.get("columns")
    if data["schema"] != _SCHEMA or not isinstance(domain, str) or not isinstance(columns, list):
        raise StatisticsError(
            f"{str(path)!r} does not follow statistics schema {_SCHEMA}, which "
            "stats/README.md describes."
        )
    return domain, tuple(cast("list[str]", columns))


def stats_for(
    embodiment: Embodiment | str, stats: ActionStats | str | Path | None = None
) -> ActionStats:
    """Return the statistics of an embodiment's rows, the packaged ones by default.

    Raises:
        StatisticsError: They are of another domain or width, or there are none for this embodiment.
    """
    embodiment = get_embodiment(embodiment)
    if stats is None:
        stats = _packaged(_require_stats(embodiment))
    elif isinstance(stats, str | Path):
        stats = load_action_stats(stats)
    stats = instance_of(stats, ActionStats, "stats")
    width = embodiment.action_space("midtrain").width
    if stats.domain != embodiment.stats:
        raise StatisticsError(
            f"statistics of {stats.domain!r} do not fit embodiment {embodiment.name!r}, whose "
            f"statistics are {embodiment.stats!r}; equal width does not make them interchangeable. "
            f"Pass load_action_stats({embodiment.stats!r})."
        )
    if stats.width != width:
        raise StatisticsError(
            f"statistics of {stats.domain!r} have {stats.width} columns, "
            f"{embodiment.name!r} {width}."
        )
    return stats


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
    if domain is not None and _stats_domain(domain) != embodiment.stats:
        raise StatisticsError(
            f"stats_domain={domain!r} does not describe embodiment {embodiment.name!r}, which "
            f"needs {embodiment.stats!r}."
        )
    if domain is not None and isinstance(stats, str | Path):
        return load_action_stats(stats, domain)
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
    return ActionStats(_require_stats(embodiment), columns, stats["q01"], stats["q99"])


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
    return _chunk_map(np.shape(action)[-1], embodiment, stats, method).inverse(action)


def denormalize_rows(
    chunk: ActionChunk,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
) -> F64:
    """De-normalise a chunk's rows, by the checkpoint's own quantiles unless ``stats`` are given;
    rows that are not normalised are returned as they are. Errors as :func:`denormalize_chunk`.
    """
    if not chunk.action_space.normalized:
        return chunk.action
    if stats is None and chunk.quantiles is not None:
        return denormalize_quantile(chunk.action, *chunk.quantiles)
    return denormalize_chunk(chunk.action, chunk.embodiment, stats, method)


def normalize_chunk(
    action: Any,
    embodiment: Embodiment | str,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
    clip: bool = False,
) -> F64:
    """The inverse of :func:`denormalize_chunk`; ``clip`` clamps to [-1, 1], as in training."""
    return _chunk_map(np.shape(action)[-1], embodiment, stats, method)(action, clip)


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
        names = [name for name, other in embodiment.spaces.items() if other.width == width]
        raise ActionSpaceError(
            f"rows have {width} columns{f' (as {names} do)' if names else ''}, but only "
            f"{space.name!r} rows of "
            f"{embodiment.name!r} are normalised, and they have {space.width}. Other rows are "
            "used without statistics."
        )
    return stats_for(embodiment, stats).normalizer(method)


def _quantile_map(q01: Any, q99: Any) -> Affine:
    column_names = tuple(f"column {i}" for i in range(len(finite_array(q01, "q01", (None,)))))
    return ActionStats("the caller", column_names, q01, q99).normalizer()


def _require_stats(embodiment: Embodiment) -> str:
    if embodiment.stats is None:
        have = ", ".join(name for name in list_embodiments() if get_embodiment(name).stats)
        raise StatisticsError(
            f"there are no action statistics for {embodiment.name!r}; there are for: {have}."
        )
    return embodiment.stats


def _stats_domain(name: str) -> str:
    key = instance_of(name, str, "domain").strip().lower()
    return _require_stats(get_embodiment(_UPSTREAM_DOMAINS.get(key, key)))


@cache
def _packaged(domain: str) -> ActionStats:
    return load_action_stats(resource(f"stats/{domain}.json"))
