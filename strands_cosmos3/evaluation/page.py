"""The report as one HTML page that needs nothing beside itself: no scripts, no fonts, no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    "An episode succeeds if the condition of its task held, judged from the physics by the instruction that was asked, "
    "whatever the policy was told. Intervals are Wilson score intervals at 95 % (Wilson 1927). Every episode's scene and "
    "noise follow from the evaluation's seed, the task and the index, so rows can be compared episode by episode."
)
_READING = (
    "Told another colour than the one it is judged by, a policy that reads does what it was told; one that ignores the text "
    "does what was asked, or neither."
)
_LATENCY = (
    "From the question to the policy until its answer, on the clock on the wall; where simulators share a replica, waiting "
    "for it is included."
)
_DYNAMICS = (
    "{clips} chunks of the undisturbed expert on tables that no training saw, {steps} denoising steps: mean PSNR of the frames "
    "that follow from known rows, and the end point of the rows that are recovered from frames."
)
_EXPERIENCED = "The loop itself experienced a latency of at most {max_ms:.1f} ms on its own clock ({clock})."


def page(report: Mapping[str, Any], films: Mapping[str, str]) -> str:
    """The page.

    Args:
        report: As ``report.make_report`` made it.
        films: Film's path -> what its player loads: the film itself as a data URI, or the path.
    """
    rows = report["rows"]
    body = [_head(report), *_notices(report), _success(rows), _world(report), _latency(report)]
    body += [_failures(report, films), _foot(report)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_title(report)}</title>'
    main = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><main>\n{main}\n</main></body></html>\n"
    )


def percent(value: float | None) -> str:
    """A share as per cent with one decimal, or nothing."""
    return "" if value is None else f"{100 * value:.1f}"


def _title(report: Mapping[str, Any]) -> str:
    policy = report["settings"]["policy"]
    return escape(f"Evaluation: {policy['model'] or policy['backend']}")


def _head(report: Mapping[str, Any]) -> str:
    settings, policy = report["settings"], report["settings"]["policy"]
    shown = ("num_steps", "guidance_scale", "policy_frames", "replan_rows", "device", "host", "port")
    options = {name: policy[name] for name in shown}
    facts = {
        "policy": f"{policy['backend']}" + (f", {policy['model']}" if policy["model"] else ""),
        "options": ", ".join(f"{name} {value}" for name, value in options.items() if value is not None) or "the presets",
        "checkpoint's SHA-256": report["model_sha256"],
        "episodes": f"{report['episodes']} of {report['planned']}: {settings['seeds']} of each task in each condition, seed "
        f"{settings['seed']}, at most {settings['duration']:g} s, {settings['control_frequency']:g} Hz",
        "ran on": report.get("ran_on"),
        "finished": report.get("finished"),
        "command": report.get("command"),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items() if value)
    about = '<p class="dim">strands-cosmos3: closed loop, real dynamics in MuJoCo</p>'
    return f'<h1>{_title(report)}</h1>{about}<dl class="facts">{listed}</dl>'


def _notices(report: Mapping[str, Any]) -> list[str]:
    texts = []
    if report["model_label"]:
        texts.append(f"This checkpoint says of itself: {report['model_label']}.")
    if not report["complete"]:
        missing = report["planned"] - report["episodes"]
        texts.append(f"Not finished: {missing} episodes are missing. The same command with --resume goes on.")
    if report["hung"]:
        texts.append(f"Counted as failures because they did not end in time on the wall: {', '.join(report['hung'])}.")
    if report["given_up"]:
        texts.append(f"Given up because their process died again and again: {', '.join(report['given_up'])}.")
    return [f'<div class="card notice">{escape(text)}</div>' for text in texts]


def _success(rows: Sequence[Mapping[str, Any]]) -> str:
    delta = any("delta_points" in row for row in rows)
    heads = ["condition", "task", "success", "rate, with its 95 % Wilson interval", "%", "interval"]
    heads += ["points against the first row"] if delta else []

    def cells(row: Mapping[str, Any]) -> list[str]:
        success, points = row["success"], row.get("delta_points")
        shown = [
            _cell(f"{success['successes']} / {success['of']}"),
            f'<td class="chart">{_whisker(success)}</td>',
            _cell(percent(success["rate"])),
            _cell(f"{percent(success['low'])} .. {percent(success['high'])}"),
        ]
        return [*shown, *([_cell("" if points is None else f"{points:+.1f}")] if delta else [])]

    return f"<h2>Success</h2>{_table(heads, rows, cells, left=(0, 1, 3))}{_reading(rows)}"


def _reading(rows: Sequence[Mapping[str, Any]]) -> str:
    """What rows with another text than was asked tell about reading, where there are any."""
    told = [row for row in rows if "told" in row]
    if not told:
        return ""
    heads = ["condition", "task", "did what it was told", "of those that did either, as told", "%", "interval"]
    heads += ["told what was asked, by chance"]

    def cells(row: Mapping[str, Any]) -> list[str]:
        did, reads = row["told"], row["reads"]
        shown = [
            _cell(f"{did['successes']} / {did['of']}"),
            f'<td class="chart">{_whisker(reads)}</td>',
            _cell(f"{percent(reads['rate'])} of {reads['of']}"),
            _cell(f"{percent(reads['low'])} .. {percent(reads['high'])}" if reads["of"] else ""),
        ]
        return [*shown, _cell("" if row["chance"] is None else f"{percent(row['chance'])} %")]

    return f'<h2>Reading</h2><p class="dim">{_READING}</p>{_table(heads, told, cells, left=(0, 1, 3))}'


def _world(report: Mapping[str, Any]) -> str:
    """Forward and inverse dynamics, where they were judged."""
    figures = report.get("dynamics")
    if figures is None:
        return ""
    facts = world_facts(figures)
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f'<h2>Dynamics</h2><p class="dim">{_DYNAMICS.format(**figures)}</p><dl class="facts">{listed}</dl>'


def world_facts(figures: Mapping[str, Any]) -> dict[str, str]:
    """What to call each figure of dynamics, and the figure with its reference."""
    gain = figures["forward_db"] - figures["copy_frame_psnr"]
    return {
        "forward dynamics": f"{figures['forward_db']:.2f} dB, {gain:+.2f} dB beside repeating the given frame "
        f"({figures['copy_frame_psnr']:.2f} dB); the VAE alone: {figures['vae_psnr']:.2f} dB",
        "inverse dynamics": f"end points {figures['inverse_mm']:.1f} mm apart (median), of {figures['moved_mm']:.1f} mm moved",
    }


def _latency(report: Mapping[str, Any]) -> str:
    rows, loop = report["rows"], report.get("loop_latency")
    heads = ["condition", "task", "p50 ms", "p95 ms", "p99 ms", "max ms", "chunks", "seconds to success"]
    heads += ["tracking mean / max mm", "CPU s an episode"]

    def cells(row: Mapping[str, Any]) -> list[str]:
        answer = row["answer_ms"]
        shown = [""] * 5 if answer is None else [f"{answer[name]:.1f}" for name in ("p50", "p95", "p99", "max")]
        shown += [] if answer is None else [str(answer["of"])]
        mean, most = row["tracking_mean_mm"], row["tracking_max_mm"]
        shown += [_number(row["seconds_to_success"]), "" if mean is None else f"{mean:.2f} / {most:.2f}"]
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
    """Rows labelled by condition and task; a condition is named once, and its row for all tasks is bold."""
    head = "".join(f'<th class="{"l" if i in left else "r"}">{text}</th>' for i, text in enumerate(heads))
    body, last = [], None
    for row in rows:
        first = row["condition"] != last
        marks = {"first": first and last is not None, "all": row["task"] is None}
        last = row["condition"]
        label = _cell(row["condition"] if first else "", "l") + _cell(row["task"] or "all tasks", "l")
        css = " ".join(name for name, yes in marks.items() if yes)
        body.append(f'<tr class="{css}">{label}{"".join(cells(row))}</tr>')
    lines = "\n".join(body)
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _cell(text: str, css: str = "r") -> str:
    return f'<td class="{css}">{escape(text)}</td>'


def _whisker(rate: Mapping[str, Any], width: int = 230) -> str:
    """A track from 0 to 100 %, the interval as a band on it, the rate as a dot."""
    if rate["rate"] is None:
        return ""

    def at(value: float) -> float:
        return 6 + (width - 12) * value

    band = max(at(rate["high"]) - at(rate["low"]), 1)
    quarters = (at(quarter / 4) for quarter in range(5))
    ticks = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="3" y2="17" stroke="var(--line)"/>' for x in quarters)
    return (
        f'<svg width="{width}" height="20" role="img" aria-label="{percent(rate["rate"])} %">'
        f'<rect x="6" y="8" rx="2" width="{width - 12}" height="4" fill="var(--track)"/>{ticks}'
        f'<rect x="{at(rate["low"]):.1f}" y="6" rx="3" width="{band:.1f}" height="8" fill="var(--mark)" opacity="0.35"/>'
        f'<circle cx="{at(rate["rate"]):.1f}" cy="10" r="4.5" fill="var(--mark)"/></svg>'
    )


def _failures(report: Mapping[str, Any], films: Mapping[str, str]) -> str:
    if not report["failures"]:
        return '<h2>Failures</h2><p class="dim">None to look at.</p>'
    most = report["settings"]["films"]
    about = (
        f"The first {most} of each row by index, run again with the same seed and filmed: from the wrist, then from two sides."
    )
    cards = "".join(_failure(failure, films) for failure in report["failures"])
    return f'<h2>Failures</h2><p class="dim">{about}</p><div class="films">{cards}</div>'


def _failure(failure: Mapping[str, Any], films: Mapping[str, str]) -> str:
    film = films.get(failure["film"] or "")
    lines = [f"“{failure['asked']}”"]
    if failure["told"] != failure["asked"]:
        lines.append(f"told: “{failure['told']}”")
    if failure["fault"]:
        lines.append(failure["fault"])
    if failure["film_is_same"] is False:
        lines.append("Filmed, the same seed went differently: this policy does not repeat itself.")
    tags = [failure["condition"], f"{failure['task']} {failure['index']}", f"seed {failure['seed']}", failure["outcome"]]
    spans = "".join(f'<span class="tag">{escape(tag)}</span>' for tag in (*tags, f"{failure['duration_s']:.1f} s"))
    video = f'<video controls muted loop preload="metadata" src="{escape(film)}"></video>' if film else ""
    text = "".join(f"<p>{escape(line)}</p>" for line in lines) + f"<p>{spans}</p>"
    if failure["repeat"]:
        text += f"<details><summary>run it again</summary><pre>{escape(failure['repeat'])}</pre></details>"
    return f'<div class="card">{video}<div class="text">{text}</div></div>'


def _foot(report: Mapping[str, Any]) -> str:
    whole = {name: report.get(name) for name in ("settings", "versions", "machine", "run")}
    details = (
        f"<details><summary>settings, versions, machine</summary><pre>{escape(json.dumps(whole, indent=1))}</pre></details>"
    )
    return f'<h2>How to read this</h2><div class="card"><p>{_HOW_TO_READ}</p>{details}</div>'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
