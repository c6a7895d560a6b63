"""The report as a self-contained HTML page, without scripts, fonts or network access."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from strands_cosmos3.evaluation.tables import (
    Cell,
    Table,
    dynamics_of,
    notices_of,
    percent,
    tables_of,
    text_of,
)

_TEMPLATE = Path(__file__).with_name("page.html")
_CHART_PX = 230
_EPISODES = (
    "{episodes} of {planned}: {seeds} per task and condition, seed {seed}, at most {duration:g} "
    "s, {control_frequency:g} Hz"
)


def page(report: Mapping[str, Any], films: Mapping[str, str]) -> str:
    """Return the page of a report. ``films``: path of each video -> the URL that its player
    loads (a data URI, or the path).
    """
    details = {name: report.get(name) for name in ("settings", "versions", "machine", "run")}
    policy = report["settings"]["policy"]
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"Evaluation: {policy.get('model') or policy['backend']}"),
        facts=_facts(_head(report)),
        notices="\n".join(
            f'<div class="card notice">{escape(text)}</div>' for text in notices_of(report)
        ),
        tables="\n".join(_table(table) for table in tables_of(report)),
        dynamics=_dynamics(report.get("dynamics")),
        failures=_failures(report, films),
        details=escape(json.dumps(details, indent=1)),
    )


def _facts(facts: Mapping[str, Any]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in facts.items()
        if value
    )
    return f'<dl class="facts">{items}</dl>'


def _head(report: Mapping[str, Any]) -> dict[str, Any]:
    settings = report["settings"]
    robot = report["robot"]
    options = {**settings["policy"]}
    policy = (options.pop("backend"), options.pop("model"))
    domain = robot["borrowed_domain"]
    notes = (
        robot["name"],
        robot["assumed"] and "some of its limits are assumed",
        domain and f"driven by the rows of {domain}, another robot's",
    )
    return {
        "world": settings["world"],
        "robot": "; ".join(filter(None, notes)),
        "policy": ", ".join(filter(None, policy)),
        "judge": settings.get("judge"),
        "options": ", ".join(f"{name} {value}" for name, value in options.items()) or "presets",
        "SHA-256 of checkpoint or policy": report["model_sha256"],
        "episodes": _EPISODES.format_map({**report, **settings}),
        "ran on": report.get("ran_on"),
        "finished": report.get("finished"),
        "command": report.get("command"),
    }


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in table.heads)
    lines = []
    for number, line in enumerate(table.lines):
        first = "first " * bool(number and line.condition)
        total = "all" * (line.task is None)
        task = ": ".join(filter(None, (line.task or "all tasks", line.instruction)))
        lines.append(
            f'<tr class="{(first + total).strip()}"><td class="l">{escape(line.condition)}</td>'
            f'<td class="l">{escape(task)}</td>{"".join(map(_cell, line.cells))}</tr>'
        )
    note = f'<p class="dim">{escape(table.note)}</p>' if table.note else ""
    body = "\n".join(lines)
    return (
        f'<h2>{escape(table.title)}</h2>{note}<div class="card scroll"><table><thead><tr>'
        f'<th class="l">condition</th><th class="l">task</th>{heads}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td class="chart">{_chart(cell)}{escape(text_of(cell))}</td>'


def _chart(rate: Mapping[str, Any]) -> str:
    """Return a chart from 0 to 100 % with the interval as a band and the rate as a dot."""
    if rate["rate"] is None:
        return ""

    def x_px(value: float) -> float:
        return 6 + (_CHART_PX - 12) * value

    band = max(x_px(rate["high"]) - x_px(rate["low"]), 1)
    ticks = "".join(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="3" y2="17" stroke="var(--line)"/>'
        for x in (x_px(quarter / 4) for quarter in range(5))
    )
    return (
        f'<svg width="{_CHART_PX}" height="20" role="img" aria-label="{percent(rate["rate"])} %">'
        f'<rect x="6" y="8" rx="2" width="{_CHART_PX - 12}" height="4" fill="var(--track)"/>'
        f'{ticks}<rect x="{x_px(rate["low"]):.1f}" y="6" rx="3" width="{band:.1f}" height="8" '
        'fill="var(--mark)" opacity="0.35"/>'
        f'<circle cx="{x_px(rate["rate"]):.1f}" cy="10" r="4.5" fill="var(--mark)"/></svg>'
    )


def _dynamics(figures: Mapping[str, Any] | None) -> str:
    """Return forward and inverse dynamics, if they were evaluated."""
    if figures is None:
        return ""
    return (
        f'<h2>Dynamics</h2><p class="dim">{figures["clips"]} chunks of the unperturbed expert on '
        f"scenes that were not used in training, {figures['steps']} denoising steps: mean PSNR of "
        "frames predicted from actions, and the end-point error of actions recovered from frames."
        f"</p>{_facts(dynamics_of(figures))}"
    )


def _failures(report: Mapping[str, Any], films: Mapping[str, str]) -> str:
    if not report["failures"]:
        return '<p class="dim">None.</p>'
    cards = "".join(_failure(failure, films) for failure in report["failures"])
    wrong = ", those first about which the judge is wrong" * bool(report["settings"].get("judge"))
    return (
        f'<p class="dim">The first {report["settings"]["films"]} of each row by index{wrong}, run '
        "again with the same seed and recorded by the policy's cameras.</p>"
        f'<div class="films">{cards}'
        "</div>"
    )


def _failure(failure: Mapping[str, Any], films: Mapping[str, str]) -> str:
    lines = [f"“{failure['goal_instruction']}”"]
    if failure["policy_instruction"] != failure["goal_instruction"]:
        lines.append(f"policy instruction: “{failure['policy_instruction']}”")
    if judged := failure.get("judged"):
        lines.append(f"the judge: “{judged['answer']}”" + " (wrong)" * failure["disagrees"])
    if failure["fault"]:
        lines.append(failure["fault"])
    if failure["film_is_equal"] is False:
        lines.append(
            "The recorded run with the same seed differs: this policy is not deterministic."
        )
    tags = (
        failure["condition"],
        f"{failure['task']} {failure['index']}",
        f"seed {failure['seed']}",
        failure["ended"],
        f"{failure['duration_s']:.1f} s",
    )
    spans = "".join(f'<span class="tag">{escape(tag)}</span>' for tag in tags)
    text = "".join(f"<p>{escape(line)}</p>" for line in lines) + f"<p>{spans}</p>"
    if failure["repeat"]:
        text += (
            "<details><summary>repeat this episode</summary>"
            f"<pre>{escape(failure['repeat'])}</pre></details>"
        )
    video = ""
    if film := films.get(failure["film"] or ""):
        video = f'<video controls muted loop preload="metadata" src="{escape(film)}"></video>'
    return f'<div class="card">{video}<div class="text">{text}</div></div>'
