"""The model card: every figure from the records and reports of the stages, with the command that
measured it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from recipes.pipeline import read_record
from strands_cosmos3.training.cost import duration

_MADE = ("demos", "vae", "policy", "preview", "joint", "decoder")
_MEASURED = ("evaluation", "conditions", "controls")
_CONTROLS = ("blank", "random", "shuffled")  # conditions in which success would be chance or a leak
_ENOUGH = 0.8
_NOT_FOR = """- It knows one simulated table, cubes of three colours, a bin, and this package's Panda. It is not for a real arm,
  another robot or another task, and nothing keeps it from being confidently wrong there.
- It reads short English sentences of its tasks; others are refused with the reason. It has no safety behaviour of its
  own: limits, collisions and stops are the executor's.
- It looks at three small pictures, 128 x 160 together. What they do not show, it does not find."""


def write_card(folder: Path, checkpoint: Path) -> None:
    """Write ``README.md`` into a checkpoint that the stages of ``folder`` made."""
    reports = {name: _json(folder / name / "report.json") for name in _MEASURED}
    records = {name: read_record(folder, name) for name in (*_MADE, *_MEASURED)}
    about = _json(checkpoint / "checkpoint.json")["strands_cosmos3"]
    parts = (
        _summary(checkpoint, about),
        _abilities(reports, records),
        _limits(reports, records["controls"]),
        _world(
            reports["evaluation"]["dynamics"],
            _json(folder / "run/decoder/dynamics.json"),
            records["evaluation"],
        ),
        _novelty(about),
        _making(records, _json(folder / "run/vae/gate.json")),
        _curves(folder),
    )
    (checkpoint / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _summary(checkpoint: Path, about: Mapping[str, Any]) -> str:
    config = _json(checkpoint / "transformer/config.json")
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) / 1e6
    numbers = {
        part.name: f"{_numbers(part) / 1e6:.1f} M"
        for part in sorted(checkpoint.iterdir())
        if any(part.glob("*.safetensors"))
    }
    language = about["language"]
    counted = ", ".join(f"{name} {count} numbers" for name, count in numbers.items())
    verbs, colours = (", ".join(language[name]) for name in ("verbs", "colours"))
    rows = about.get("prefix_rows", 0)
    prefixes = (
        f"It takes action prefixes of up to {rows} rows." if rows else "It takes no action prefix."
    )
    return f"""# Model card: the table policy

A Cosmos 3 transformer, {config["hidden_size"]} wide with {config["num_hidden_layers"]} layers, and a small Wan VAE, in the
released layout ({counted}; {size:.0f} MB). It looks at the three DROID views, reads a sentence (verbs: {verbs};
colours: {colours}), and answers 16 pose deltas at 15 Hz, with a prediction of the pictures to come. {prefixes}

    strands-cosmos3 rollout --task pick --instruction "pick up the blue cube" --video out.mp4

This card was written by `make bundled-policy` from the records of its stages."""


def _numbers(part: Path) -> int:
    total = 0
    for file in part.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _abilities(
    reports: Mapping[str, Mapping[str, Any]], records: Mapping[str, Mapping[str, Any]]
) -> str:
    settings = reports["evaluation"]["settings"]
    return f"""## What it can do

Closed loop in simulation with dynamics, in scenes that no training had. The policy is handed pictures, the sentence, the
measured pose and the gripper's opening, and nothing else. An episode may last {settings["duration"]:g} s of simulated time
(condition `limit=S`: S), with zero latency (`latency=S`: S). Success with its 95 % interval (Wilson), and the mean time to
success:

{success_table(_rows(reports["evaluation"]))}

{_command(records["evaluation"])}

Harder conditions, on scenes of the same seeds. `swapped` names another colour than the judged one: "took what it was told" is
then what counts.

{success_table(_rows(reports["conditions"]))}

{_command(records["conditions"])}

{_late(reports["conditions"])}"""


def _late(report: Mapping[str, Any]) -> str:
    """Return how the arm moved while answers were late."""
    lines = []
    for row in _rows(report):
        waited, seam = row["waited_s_mean"], row["seam_rad_s"]
        if row["condition"].startswith("latency=") and waited is not None:
            jump = " | " if seam is None else f"{seam['p50']:.3f} | {seam['p95']:.3f}"
            lines.append(f"| {row['condition']} | {waited:.1f} s | {jump} |")
    heads = [
        "| condition | waited, of an episode | jump at a seam, rad/s: median | 95 % |",
        "|---|---|---|---|",
    ]
    about = "How long the arm had nothing to follow, and how much its fastest joint's velocity changed where a chunk began"
    return (
        f"**Latency.** {about} (of episodes' medians):\n\n" + "\n".join([*heads, *lines])
        if lines
        else ""
    )


def _limits(reports: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    weak = [
        f"{row['condition']}: {row['task']} {_rate(row['success'])}"
        for report in reports.values()
        for row in _rows(report)
        if "told" not in row
        and row["condition"] not in _CONTROLS
        and row["success"]["rate"] < _ENOUGH
    ]
    said = "\n".join(f"- {one}" for one in weak) or "- none of the conditions that were measured"
    return f"""## What it cannot do

{_NOT_FOR}

Below {100 * _ENOUGH:.0f} %, of everything in this card:

{said}

Every task in fewer scenes, and controls ({", ".join(f"`{name}`" for name in _CONTROLS)}), in which success would be chance:

{success_table(_rows(reports["controls"]))}

{_command(record)}"""


def _rows(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (row for row in report["rows"] if row["task"] is not None)


def success_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows of a report as a table."""
    lines = [
        "| condition | task | success | 95 % interval | mean time | took what it was told |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        success, seconds = row["success"], row["seconds_to_success"]
        time = "" if seconds is None else f"{seconds:.1f} s"
        interval = f"{100 * success['low']:.1f} .. {100 * success['high']:.1f} %"
        told = _rate(row["told"]) if "told" in row else ""
        lines.append(
            f"| {row['condition']} | {row['task']} | {_rate(success)} | {interval} | {time} | "
            f"{told} |"
        )
    return "\n".join(lines)


def _rate(rate: Mapping[str, Any]) -> str:
    return f"{rate['successes']} of {rate['of']} ({100 * rate['rate']:.1f} %)"


def _world(
    measured: Mapping[str, Any], validation: Mapping[str, Any], record: Mapping[str, Any]
) -> str:
    columns = (("on the expert's chunks", measured), ("on validation demonstrations", validation))
    rows: list[tuple[str, ...]] = [("", *(name for name, _ in columns)), ("---",) * 3]
    rows.append(("clips", *(str(figures["clips"]) for _, figures in columns)))
    for name, key in (
        ("forward dynamics", "forward_db"),
        ("repeating the frame", "copy_frame_psnr"),
        ("the VAE alone", "vae_psnr"),
    ):
        both = (f"{figures[key]:.1f} dB ({figures['moving'][key]:.1f})" for _, figures in columns)
        rows.append((f"{name}, all pixels (moving ones)", *both))
    for control in measured["controls"]:
        label = (
            "with a sentence of another goal" if control == "foreign" else f"with {control} actions"
        )
        rows.append(
            (
                f"error {label} / true",
                *(f"{figures['controls'][control]:.2f}" for _, figures in columns),
            )
        )
    ends = (
        f"{figures['inverse_mm']:.0f} mm of {figures['moved_mm']:.0f}" for _, figures in columns
    )
    rows.append(("inverse dynamics, median end point", *ends))
    table = "\n".join("|".join(("", *row, "")) for row in rows)
    return f"""## As a model of the world

Forward dynamics predict pictures from actions, inverse dynamics actions from pictures. Ratios are of squared errors of
predicted latents, with other actions, or with a sentence, over those with the true actions alone.

{table}

First column:

{_command(record)}

Second column: `run/decoder/dynamics.json`, which training writes."""


def _novelty(about: Mapping[str, Any]) -> str:
    threshold = about.get("novelty_rmse")
    known = "It has no preview decoder, and cannot tell."
    if threshold is not None:
        known = f"""The error of a picture's reconstruction is divided by {threshold:.4f}, its 99.9 % quantile over
held-out pictures; above 1 there is a warning, and `novel_pictures` counts. A low novelty is no proof that a scene is known."""
    return f"## Novelty\n\n{known}"


def _making(records: Mapping[str, Mapping[str, Any]], gate: Mapping[str, Any]) -> str:
    stages = [(name, records[name]) for name in (*_MADE, *_MEASURED)]
    lines = ["| stage | finished | duration |", "|---|---|---|"]
    lines += [
        f"| {name} | {record['finished']} | {duration(record['seconds'])} |"
        for name, record in stages
    ]
    total = duration(sum(record["seconds"] for _, record in stages[: len(_MADE)]))
    commands = "\n".join(f"    {record['command']}" for _, record in stages[: len(_MADE)])
    machines = "; ".join(dict.fromkeys(record["machine"] for _, record in stages))
    colours = ", ".join(f"{name} {100 * share:.0f} %" for name, share in gate["by_colour"].items())
    seeds = ", ".join(
        dict.fromkeys(str(record["decides"]["seed"]) for _, record in stages[: len(_MADE)])
    )
    return f"""## How it was made

`make bundled-policy`, from nothing: the checkpoint took {total}. Seed {seeds}. On {machines}. Every command of this
card runs in `out/bundled-policy`.

{commands}

{chr(10).join(lines)}

Pixels whose hue the VAE keeps: {colours}; {gate["psnr"]:.1f} dB. The joint stage also exports the preview decoder,
and calibrates the novelty on held-out pictures; the decoder's measures the dynamics."""


def _curves(folder: Path) -> str:
    parts = ["## Curves\n\n![learning curves](curves.png)"]
    for stage in ("policy", "joint"):
        for name, title in (
            ("validation", "validation windows of frame 0"),
            ("closed_loop", "episodes in simulation during training"),
        ):
            path = folder / "run" / stage / f"{name}.jsonl"
            if path.exists():
                lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                parts.append(f"Stage {stage}, {title}:\n\n{_points(lines)}")
    return "\n\n".join(parts)


def _points(lines: Sequence[Mapping[str, Any]], most: int = 12) -> str:
    """Return a table of at most so many points, the last among them."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    every = -(-len(lines) // most)
    shown = lines[::-1][::every][::-1]
    rows = [[f"{line[name]:g}" if name in line else "" for name in names] for line in shown]
    return "\n".join("|".join(("", *row, "")) for row in (names, ["---"] * len(names), *rows))


def _command(record: Mapping[str, Any]) -> str:
    return f"    {record['command']}"
