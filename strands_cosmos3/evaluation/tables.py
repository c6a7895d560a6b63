"""The tables of a report. Terminal and HTML write the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Cell = str | Mapping[str, Any]
"""Text, or a rate, whose text is its interval and which can be drawn."""

_FOLLOWED = (
    "The policy's instruction asks for another goal than the one that is judged. A policy that "
    "reads it follows it; one that ignores it reaches the goal, or neither. Same goal: share of "
    "episodes in which both are equal by chance."
)
_AGREEMENT = (
    "What the judge says of each film, and how many of these episodes failed and succeeded. An "
    "unclear answer agrees with neither. Always likelier: the agreement (%) of one who always says "
    "what is more frequent."
)
_CHANGE = "; pp: percentage points relative to the first row, over the same episodes."
_LATENCY = (
    "Wall-clock time from a request to the policy until its answer, including the wait for a "
    "replica that simulators share."
)


@dataclass(frozen=True)
class Line:
    """A line of a table.

    Args:
        condition: Name of the condition, if it is another one than the line's before.
        task: None for all tasks together.
        instruction: That of all its episodes, if it is the same.
    """

    condition: str
    task: str | None
    instruction: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A table: ``heads`` of its columns after condition and task, ``lines``, and a sentence."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    note: str = ""


def tables_of(report: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables that have something to say."""
    rows = report["rows"]
    changed = any("change_pp" in row for row in rows)
    yield _table(
        "Success",
        ("success", "%", "95 % interval", *(["change\n(pp)"] if changed else [])),
        rows,
        lambda row: (
            _count(row["success"]),
            percent(row["success"]["rate"]),
            row["success"],
            *([_number(row.get("change_pp"), "+.1f")] if changed else []),
        ),
        "Wilson intervals" + (_CHANGE if changed else "."),
    )
    if reworded := [row for row in rows if "followed" in row]:
        yield _table(
            "Following instructions",
            (
                "followed\ninstruction",
                "followed /\n(followed\nor goal)",
                "95 % interval",
                "same\ngoal",
            ),
            reworded,
            _followed_cells,
            _FOLLOWED,
        )
    if judged := [row for row in rows if "judged" in row]:
        said = (f"{said}:\nfailed,\nsuccess" for said in ("yes", "no", "unclear"))
        heads = ("agrees", "95 % interval", "always\nlikelier", *said)
        yield _table("The judge's answers", heads, judged, _judged_cells, _AGREEMENT)
    categories = list(dict.fromkeys(name for row in rows for name in row.get("by_category", ())))
    if len(categories) > 1:
        yield _table(
            f"Success by {report['breakdown']}",
            tuple(categories),
            rows,
            lambda row: tuple(
                _count(rate) if (rate := row.get("by_category", {}).get(name)) else ""
                for name in categories
            ),
        )
    loop = report.get("loop_latency")
    experienced = loop and (
        f" The control loop itself had a latency of at most {loop['max_ms']:.1f} ms on its own "
        f"clock ({loop['clock']})."
    )
    yield _table(
        "Inference of a chunk, ms",
        ("p50", "p95", "p99", "max", "chunks"),
        [row for row in rows if row["answer_ms"] is not None],
        lambda row: (
            *(_number(row["answer_ms"][name], ".1f") for name in ("p50", "p95", "p99", "max")),
            str(row["answer_ms"]["of"]),
        ),
        _LATENCY + (experienced or ""),
    )
    yield _table(
        "Motion",
        ("time to\nsuccess, s", "waited,\ns", "seam,\nrad/s", "tracking mean,\nmax, mm", "CPU,\ns"),
        rows,
        _motion_cells,
        "Means of episodes: time to success, time without a motion to follow, jump of the fastest "
        "joint's velocity at a seam (median), and CPU time.",
    )


def _table(
    title: str,
    heads: tuple[str, ...],
    rows: Sequence[Row],
    cells: Callable[[Row], tuple[Cell, ...]],
    note: str = "",
) -> Table:
    lines: list[Line] = []
    last = None
    for row in rows:
        condition = row["condition"]
        task = row["task"]
        instruction = "" if task is None else row.get("instruction", "")
        lines.append(Line("" if condition == last else condition, task, instruction, cells(row)))
        last = condition
    return Table(title, heads, tuple(lines), note)


def _followed_cells(row: Row) -> tuple[Cell, ...]:
    share = row["followed_share"]
    same = row["same_goal"]
    return (
        _count(row["followed"]),
        _count(share),
        share if share["of"] else "",
        "" if same is None else f"{percent(same)} %",
    )


def _judged_cells(row: Row) -> tuple[Cell, ...]:
    judged = row["judged"]
    agreement = judged["agreement"]
    said = ("{failure}, {success}".format_map(count) for count in judged["table"].values())
    likelier = percent(judged["likelier"])
    return _count(agreement), agreement, likelier, *said


def _motion_cells(row: Row) -> tuple[Cell, ...]:
    mean = row["tracking_mean_mm"]
    most = row["tracking_max_mm"]
    seam = row["seam_rad_s"]
    return (
        _number(row["seconds_to_success"]),
        _number(row["waited_s_mean"]),
        "" if seam is None else _number(seam["p50"], ".3f"),
        "" if mean is None else f"{mean:.2f}, {most:.2f}",
        _number(row["cpu_s_mean"]),
    )


def text_of(cell: Cell) -> str:
    """Return a cell as text; of a rate its interval in per cent."""
    if isinstance(cell, str):
        return cell
    return f"{percent(cell['low'])} .. {percent(cell['high'])}"


def percent(value: float | None) -> str:
    """Return a fraction as per cent with one decimal; empty for None."""
    return "" if value is None else f"{100 * value:.1f}"


def _count(rate: Row) -> str:
    return f"{rate['successes']} / {rate['of']}"


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else f"{value:{form}}"


def dynamics_of(figures: Mapping[str, Any] | None) -> dict[str, str]:
    """Return each figure of dynamics with its reference, by name; none without figures."""
    if figures is None:
        return {}
    controls = figures["controls"]
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in controls.items())
    return {
        "forward dynamics": _with_gain(
            "{forward_db:.2f} dB, {gain_db:+.2f} dB relative to repeating the frame "
            "({copy_frame_psnr:.2f} dB); the VAE alone: {vae_psnr:.2f} dB",
            figures,
        ),
        "moving pixels": _with_gain(
            "{forward_db:.2f} dB, {gain_db:+.2f} dB relative to repeating the frame; the VAE "
            "alone: {vae_psnr:.2f} dB",
            figures["moving"],
        ),
        "error relative to that with the true actions": f"{ratios} (latents; foreign: a sentence "
        "of another goal)",
        "inverse dynamics": "end points {inverse_mm:.1f} mm apart (median), of {moved_mm:.1f} mm "
        "moved".format_map(figures),
    }


def _with_gain(text: str, figures: Mapping[str, Any]) -> str:
    """Fill in figures of forward dynamics, and what they gain over repeating the frame."""
    return text.format(gain_db=figures["forward_db"] - figures["copy_frame_psnr"], **figures)


def notices_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for everything that a reader of the figures must know."""
    if report["model_label"]:
        yield f"This checkpoint's label: {report['model_label']}."
    if report.get("judge_label"):
        yield f"The label of the judge's checkpoint: {report['judge_label']}."
    if missing := report["planned"] - report["episodes"]:
        yield (
            f"Not finished: {missing} episode{'s' * (missing > 1)} missing; run the same command "
            "with --resume to continue."
        )
    if report["hung"]:
        yield (
            "Counted as failures because they exceeded the time "
            f"limit: {', '.join(report['hung'])}."
        )
    if report["given_up"]:
        yield f"Given up because their process died repeatedly: {', '.join(report['given_up'])}."
    if report["damaged"]:
        yield (
            "Damaged, edited or copied, so they count only as run again: "
            f"{', '.join(report['damaged'])}."
        )
