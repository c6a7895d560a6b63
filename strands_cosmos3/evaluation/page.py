"""The report as a self-contained HTML page, without scripts, fonts or network access."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { --ink: #1c2430; --dim: #66707f; --line: #dfe4ea; --paper: #ffffff; --ground: #f4f6f8;
  --mark: #2563a8; --warn: #b7791f; --track: #e8ecf0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --dim: #96a1b0; --line: #313a46; --paper: #1b212a;
  --ground: #12161c; --mark: #6cacf0; --warn: #e0a84a; --track: #2a323d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; }
p { margin: 4px 0; }
.dim { color: var(--dim); }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px; }
.notice { border-left: 4px solid var(--warn); margin-top: 16px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; font-size: 12px; color: var(--dim); padding: 6px 10px; vertical-align: bottom;
  border-bottom: 1px solid var(--line); }
td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.l, td.l { text-align: left; }
tr.all td { font-weight: 600; }
tr:last-child td { border-bottom: 0; }
tr.first td { border-top: 2px solid var(--line); }
td.chart { min-width: 240px; padding-top: 3px; padding-bottom: 3px; }
svg { display: block; }
.films { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(520px, 100%), 1fr)); gap: 16px; }
.films .card { padding: 0; overflow: hidden; }
.films .text { padding: 10px 14px 12px; }
video { display: block; width: 100%; background: #000; aspect-ratio: 16 / 3; }
.tag { display: inline-block; font-size: 12px; padding: 0 8px; border-radius: 9px; margin-right: 6px;
  background: var(--track); color: var(--dim); }
pre { font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--dim); font-size: 13px; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin-top: 14px; }
.facts dt { color: var(--dim); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
"""
_HOW_TO_READ = (
    "An episode succeeds if the goal of its task was reached, judged from the physics by the goal "
    "instruction, whatever "
    "instruction the policy received. Intervals are Wilson score intervals at 95 % (Wilson 1927). "
    "Every episode's scene and "
    "noise follow from the evaluation's seed, the task and the index, so rows can be compared "
    "episode by episode."
)
_READING = (
    "The policy's instruction names another colour than the goal instruction. A policy that reads "
    "it follows it; one that "
    "ignores it reaches the goal, or neither."
)
_LATENCY = "Wall-clock time from a request to the policy until its answer, including the wait for a replica that simulators share."
_DYNAMICS = (
    "{clips} chunks of the unperturbed expert on scenes that were not used in training, {steps} "
    "denoising steps: mean PSNR of "
    "frames predicted from actions, and the end-point error of actions recovered from frames."
)
_EXPERIENCED = (
    "The control loop itself saw a latency of at most {max_ms:.1f} ms on its own clock ({clock})."
)


def page(report: Mapping[str, Any], films: Mapping[str, str]) -> str:
    """Return the page of a report. ``films``: path of each video -> the URL that its player
    loads (a data URI, or the path).
    """
    rows = report["rows"]
    body = [
        _head(report),
        *_notices(report),
        _success(rows),
        _colours(rows),
        _dynamics(report),
        _latency(report),
    ]
    body += [_failures(report, films), _foot(report)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_title(report)}</title>'
    main = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><main>\n{main}\n</main></body></html>\n"
    )


def percent(value: float | None) -> str:
    """Return a fraction as per cent with one decimal; empty for None."""
    return "" if value is None else f"{100 * value:.1f}"


def _title(report: Mapping[str, Any]) -> str:
    policy = report["settings"]["policy"]
    return escape(f"Evaluation: {policy['model'] or policy['backend']}")


def _head(report: Mapping[str, Any]) -> str:
    settings, policy = report["settings"], report["settings"]["policy"]
    shown = (
        "num_steps",
        "guidance_scale",
        "policy_frames",
        "replan_rows",
        "device",
        "host",
        "port",
    )
    options = {name: policy.get(name) for name in shown}
    facts = {
        "suite": None if settings["suite"] == "table" else settings["suite"],
        "robot": _robot(report.get("robot")),
        "policy": f"{policy['backend']}" + (f", {policy['model']}" if policy["model"] else ""),
        "options": ", ".join(
            f"{name} {value}" for name, value in options.items() if value is not None
        )
        or "presets",
        "SHA-256 of the checkpoint": report["model_sha256"],
        "episodes": f"{report['episodes']} of {report['planned']}: {settings['seeds']} per task "
        "and condition, seed "
        f"{settings['seed']}, at most {settings['duration']:g} s, "
        f"{settings['control_frequency']:g} Hz",
        "ran on": report.get("ran_on"),
        "finished": report.get("finished"),
        "command": report.get("command"),
    }
    listed = "".join(
        f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items() if value
    )
    about = '<p class="dim">strands-cosmos3: closed loop, real dynamics in MuJoCo</p>'
    return f'<h1>{_title(report)}</h1>{about}<dl class="facts">{listed}</dl>'


def _robot(robot: Mapping[str, Any] | None) -> str | None:
    if robot is None:
        return None
    notes = [robot["name"]]
    notes += ["some of its limits are assumed"] if robot["assumed"] else []
    notes += (
        [f"driven by the rows of {robot['borrowed_domain']}, another robot's"]
        if robot["borrowed_domain"]
        else []
    )
    return "; ".join(notes)


def _notices(report: Mapping[str, Any]) -> list[str]:
    texts = []
    if report["model_label"]:
        texts.append(f"This checkpoint's label: {report['model_label']}.")
    if not report["complete"]:
        missing = report["planned"] - report["episodes"]
        texts.append(
            f"Not finished: {missing} episodes are missing. Run the same command with --resume to "
            "continue."
        )
    if report["hung"]:
        texts.append(
            "Counted as failures because they exceeded the time limit: "
            f"{', '.join(report['hung'])}."
        )
    if report["given_up"]:
        texts.append(
            f"Given up because their process died repeatedly: {', '.join(report['given_up'])}."
        )
    return [f'<div class="card notice">{escape(text)}</div>' for text in texts]


def labelled(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield rows, each with its condition if that differs from the row before, else an empty
    string.
    """
    last = None
    for row in rows:
        yield row, row["condition"] if row["condition"] != last else ""
        last = row["condition"]


def interval(rate: Mapping[str, Any]) -> str:
    """Return a rate's interval in per cent."""
    return f"{percent(rate['low'])} .. {percent(rate['high'])}"


def _success(rows: Sequence[Mapping[str, Any]]) -> str:
    delta = any("delta_points" in row for row in rows)
    heads = ["condition", "task", "success", "rate with 95 % Wilson interval", "%", "interval"]
    heads += ["points relative to the first row"] if delta else []

    def cells(row: Mapping[str, Any]) -> list[str]:
        success, points = row["success"], row.get("delta_points")
        shown = [
            _cell(f"{success['successes']} / {success['of']}"),
            f'<td class="chart">{_whisker(success)}</td>',
            _cell(percent(success["rate"])),
            _cell(interval(success)),
        ]
        return [*shown, *([_cell("" if points is None else f"{points:+.1f}")] if delta else [])]

    return f"<h2>Success</h2>{_table(heads, rows, cells, left=(0, 1, 3))}{_reading(rows)}"


def colours_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the colours of the goals' cubes in some rows; none if there is one row's and one
    colour at most.
    """
    found = list(dict.fromkeys(colour for row in rows for colour in row.get("by_colour", ())))
    return found if len(found) > 1 else []


def _colours(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of success by the colour of the goal's cube."""
    colours = colours_of(rows)
    if not colours:
        return ""

    def cells(row: Mapping[str, Any]) -> list[str]:
        rates = [row.get("by_colour", {}).get(colour) for colour in colours]
        return [_cell("" if one is None else f"{one['successes']} / {one['of']}") for one in rates]

    return f"<h2>Success by colour</h2>{_table(['condition', 'task', *colours], rows, cells, left=(0, 1))}"


def _reading(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of rows whose policy instruction differs from the goal instruction, if
    there are any.
    """
    told = [row for row in rows if "told" in row]
    if not told:
        return ""
    heads = [
        "condition",
        "task",
        "policy instruction fulfilled",
        "share of episodes that fulfilled either",
        "%",
        "interval",
    ]
    heads += ["equal instructions by chance"]

    def cells(row: Mapping[str, Any]) -> list[str]:
        did, reads = row["told"], row["reads"]
        shown = [
            _cell(f"{did['successes']} / {did['of']}"),
            f'<td class="chart">{_whisker(reads)}</td>',
            _cell(f"{percent(reads['rate'])} of {reads['of']}"),
            _cell(interval(reads) if reads["of"] else ""),
        ]
        return [*shown, _cell("" if row["chance"] is None else f"{percent(row['chance'])} %")]

    return (
        f'<h2>Reading</h2><p class="dim">{_READING}</p>{_table(heads, told, cells, left=(0, 1, 3))}'
    )


def _dynamics(report: Mapping[str, Any]) -> str:
    """Return forward and inverse dynamics, if they were evaluated."""
    figures = report.get("dynamics")
    if figures is None:
        return ""
    facts = dynamics_facts(figures)
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f'<h2>Dynamics</h2><p class="dim">{_DYNAMICS.format(**figures)}</p><dl class="facts">{listed}</dl>'


def dynamics_facts(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return each figure of dynamics with its reference, by name."""
    gain = figures["forward_db"] - figures["copy_frame_psnr"]
    moving, controls = figures["moving"], figures["controls"]
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in controls.items())
    return {
        "forward dynamics": f"{figures['forward_db']:.2f} dB, {gain:+.2f} dB relative to "
        "repeating the given frame "
        f"({figures['copy_frame_psnr']:.2f} dB); the VAE alone: {figures['vae_psnr']:.2f} dB",
        "moving pixels": f"{moving['forward_db']:.2f} dB, "
        f"{moving['forward_db'] - moving['copy_frame_psnr']:+.2f} dB relative "
        f"to repeating the given frame; the VAE alone: {moving['vae_psnr']:.2f} dB",
        "error relative to that with the true "
        "actions": f"{said} (latents; foreign: a sentence of another goal)",
        "inverse dynamics": f"end points {figures['inverse_mm']:.1f} mm apart (median), of "
        f"{figures['moved_mm']:.1f} mm moved",
    }


def _latency(report: Mapping[str, Any]) -> str:
    rows, loop = report["rows"], report.get("loop_latency")
    heads = [
        "condition",
        "task",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "max ms",
        "chunks",
        "seconds to success",
    ]
    heads += [
        "waited, s per episode",
        "jump at a seam, rad/s",
        "tracking mean / max mm",
        "CPU s per episode",
    ]

    def cells(row: Mapping[str, Any]) -> list[str]:
        answer = row["answer_ms"]
        shown = (
            [""] * 5
            if answer is None
            else [f"{answer[name]:.1f}" for name in ("p50", "p95", "p99", "max")]
        )
        shown += [] if answer is None else [str(answer["of"])]
        mean, most, seam = row["tracking_mean_mm"], row["tracking_max_mm"], row["seam_rad_s"]
        shown += [_number(row["seconds_to_success"]), _number(row["waited_s_mean"])]
        shown += [
            "" if seam is None else f"{seam['p50']:.3f}",
            "" if mean is None else f"{mean:.2f} / {most:.2f}",
        ]
        return [_cell(text) for text in (*shown, _number(row["cpu_s_mean"]))]

    table = _table(heads, rows, cells, left=(0, 1))
    about = _LATENCY if loop is None else f"{_LATENCY} {_EXPERIENCED.format(**loop)}"
    return f'<h2>Inference of a chunk, and motion</h2><p class="dim">{about}</p>{table}'


def _table(
    heads: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    cells: Callable[[Mapping[str, Any]], list[str]],
    left: Sequence[int],
) -> str:
    """Return a table of rows labelled by condition and task; each condition is named once, its
    row for all tasks is bold.
    """
    head = "".join(
        f'<th class="{"l" if i in left else "r"}">{text}</th>' for i, text in enumerate(heads)
    )
    body: list[str] = []
    for row, condition in labelled(rows):
        marks = {"first": condition and body, "all": row["task"] is None}
        label = _cell(condition, "l") + _cell(_task(row), "l")
        css = " ".join(name for name, yes in marks.items() if yes)
        body.append(f'<tr class="{css}">{label}{"".join(cells(row))}</tr>')
    lines = "\n".join(body)
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _task(row: Mapping[str, Any]) -> str:
    if row["task"] is None:
        return "all tasks"
    return f"{row['task']}: {row['instruction']}" if "instruction" in row else row["task"]


def _cell(text: str, css: str = "r") -> str:
    return f'<td class="{css}">{escape(text)}</td>'


def _whisker(rate: Mapping[str, Any], width: int = 230) -> str:
    """Return a chart from 0 to 100 % with the interval as a band and the rate as a dot."""
    if rate["rate"] is None:
        return ""

    def at(value: float) -> float:
        return 6 + (width - 12) * value

    band = max(at(rate["high"]) - at(rate["low"]), 1)
    quarters = (at(quarter / 4) for quarter in range(5))
    ticks = "".join(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="3" y2="17" stroke="var(--line)"/>' for x in quarters
    )
    return (
        f'<svg width="{width}" height="20" role="img" aria-label="{percent(rate["rate"])} %">'
        f'<rect x="6" y="8" rx="2" width="{width - 12}" height="4" fill="var(--track)"/>{ticks}'
        f'<rect x="{at(rate["low"]):.1f}" y="6" rx="3" width="{band:.1f}" height="8" '
        'fill="var(--mark)" opacity="0.35"/>'
        f'<circle cx="{at(rate["rate"]):.1f}" cy="10" r="4.5" fill="var(--mark)"/></svg>'
    )


def _failures(report: Mapping[str, Any], films: Mapping[str, str]) -> str:
    if not report["failures"]:
        return '<h2>Failures</h2><p class="dim">None.</p>'
    most = report["settings"]["films"]
    about = f"The first {most} of each row by index, run again with the same seed and recorded by the policy's cameras."
    views = len((report.get("robot") or {}).get("views", (1, 2, 3)))
    cards = "".join(_failure(failure, films, views) for failure in report["failures"])
    return f'<h2>Failures</h2><p class="dim">{about}</p><div class="films">{cards}</div>'


def _failure(failure: Mapping[str, Any], films: Mapping[str, str], views: int) -> str:
    film = films.get(failure["film"] or "")
    lines = [f"“{failure['goal_instruction']}”"]
    if failure["policy_instruction"] != failure["goal_instruction"]:
        lines.append(f"policy instruction: “{failure['policy_instruction']}”")
    if failure["fault"]:
        lines.append(failure["fault"])
    if failure["film_is_same"] is False:
        lines.append(
            "The recorded run with the same seed differs: this policy is not deterministic."
        )
    tags = [
        failure["condition"],
        f"{failure['task']} {failure['index']}",
        f"seed {failure['seed']}",
        failure["outcome"],
    ]
    spans = "".join(
        f'<span class="tag">{escape(tag)}</span>'
        for tag in (*tags, f"{failure['duration_s']:.1f} s")
    )
    shape = "" if views == 3 else f' style="aspect-ratio:{16 * views}/9"'
    video = (
        f'<video controls muted loop preload="metadata"{shape} src="{escape(film)}"></video>'
        if film
        else ""
    )
    text = "".join(f"<p>{escape(line)}</p>" for line in lines) + f"<p>{spans}</p>"
    if failure["repeat"]:
        text += f"<details><summary>repeat this episode</summary><pre>{escape(failure['repeat'])}</pre></details>"
    return f'<div class="card">{video}<div class="text">{text}</div></div>'


def _foot(report: Mapping[str, Any]) -> str:
    whole = {name: report.get(name) for name in ("settings", "versions", "machine", "run")}
    details = f"<details><summary>settings, versions, machine</summary><pre>{escape(json.dumps(whole, indent=1))}</pre></details>"
    return f'<h2>How to read this</h2><div class="card"><p>{_HOW_TO_READ}</p>{details}</div>'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
