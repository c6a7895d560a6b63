"""The report: figures of every row, and details of failures, as JSON and as a page."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from strands_cosmos3.collision import CollisionOutcome
from strands_cosmos3.evaluation.driver import failures_to_film
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.page import page
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.statistics import Record, disagrees, loop_latency, summarise
from strands_cosmos3.resources import load_json, write_json, write_text
from strands_cosmos3.robots.catalogue import get_robot

Report = dict[str, Any]
_EMBED_BYTES = 32 * 2**20  # further videos are linked, to keep the page small
# what of a PolicyVariation `rollout` repeats; of a text only that it asks for the goal
_REPEATED = {"num_steps", "replan_rows", "latency_s", "limit_s", "text"}


def make_report(
    folder: RunFolder,
    records: Mapping[tuple[str, str, int], Record],
    facts: Mapping[str, Any],
    given_up: list[str],
) -> Report:
    """Return the figures of a folder's episodes.

    ``facts`` are of this run (versions, machine, times), ``given_up`` the labels of episodes
    without a record.
    """
    settings = folder.settings
    plan = settings.plan()
    failures = failures_to_film(plan, records, settings.films)
    return {
        "complete": len(records) == len(plan),
        "episodes": len(records),
        "planned": len(plan),
        "rows": summarise(plan, records),
        "breakdown": settings.get_world().breakdown,
        "dynamics": folder.read_dynamics() if settings.clips else None,
        "loop_latency": loop_latency(records.values()),
        "failures": [_failure(folder, a, records[a.key]) for a in failures],
        "given_up": given_up,
        "damaged": [str(path.relative_to(folder.path)) for path in folder.damaged],
        "hung": [a.label for a in plan if a.key in records and "hung" in records[a.key]["times"]],
        "model_sha256": _first(records.values(), "model_sha256"),
        "model_label": _label(settings.policy.model),
        "judge_label": settings.judge and _label(settings.judge_model or settings.policy.model),
        "robot": {
            "name": get_robot(settings.robot or settings.get_world().robots[0]).name,
            "assumed": _first(records.values(), "assumed") is True,
            "borrowed_domain": _first(records.values(), "borrowed_domain"),
        },
        "settings": settings.to_dict(),
        **facts,
    }


def _first(records: Iterable[Record], name: str) -> Any:
    return next((record[name] for record in records if record.get(name)), None)


def write_report(folder: RunFolder, report: Report) -> None:
    """Write ``report.json`` and the self-contained ``report.html``."""
    write_json(folder.path / "report.json", report)
    films: dict[str, str] = {}
    free_bytes = _EMBED_BYTES
    for film in (failure["film"] for failure in report["failures"] if failure["film"]):
        data = (folder.path / film).read_bytes()
        free_bytes -= len(data)
        films[film] = (
            f"data:video/mp4;base64,{base64.b64encode(data).decode()}" if free_bytes >= 0 else film
        )
    write_text(folder.path / "report.html", page(report, films))


def _failure(folder: RunFolder, assignment: Assignment, record: Record) -> dict[str, Any]:
    film, is_equal = folder.film_of(assignment) or (None, None)
    return {
        "condition": assignment.condition.name,
        "task": assignment.task,
        "index": assignment.index,
        "seed": assignment.seed,
        **assignment.instructions(),
        "outcome": record["outcome"],
        "ended": ended(record),
        "duration_s": record["duration_s"],
        "fault": record.get("fault"),
        "judged": record.get("judged"),
        "disagrees": disagrees(record),
        "film": None if film is None else str(film.relative_to(folder.path)),
        "film_is_equal": is_equal,
        "repeat": repeat_command(folder.settings, assignment),
    }


def ended(record: Record) -> str:
    """Return how an episode ended, in words: what kept it from its goal, if that was counted."""
    counters = record.get("counters", {})
    stops = counters.get(f"collision_{CollisionOutcome.STOPPED}", 0)
    reasons = [f"stopped for a collision {_times(stops)}"] if stops else []
    if record.get("held"):
        reasons.append(f"in the end {record['held']}")
    return "; ".join(reasons) or str(record["outcome"])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def repeat_command(settings: Settings, assignment: Assignment) -> str | None:
    """Return the command that runs the same episode again. None if ``rollout`` cannot: it varies
    no images, instructions or worlds, begins from no official start, and chooses the dtype by the
    device.
    """
    condition = assignment.condition
    policy = settings.policy
    topology = settings.topology
    world = settings.get_world()
    repeatable = (
        condition.policy.identity().keys() <= _REPEATED
        and not condition.world.identity()
        and assignment.goal_instruction == assignment.policy_instruction
        and world.task(assignment.task, settings.robot).starts is None
        and policy.engine.dtype is None
        and policy.policy is None
    )
    if not repeatable:
        return None
    on_cpu = policy.backend == "native" and not topology.num_gpus and topology.replicas > 0
    run = settings.run_options(condition)
    options: dict[str, Any] = {
        "world": None if settings.world == "table" else settings.world,
        "robot": settings.robot,
        "task": assignment.task,
        "instruction": assignment.goal_instruction,
        "seed": assignment.seed,
        "duration": run.duration_s or settings.duration_s(assignment.task),
        "control_frequency": run.control_frequency_hz or world.control_frequency_hz,
        **policy.to_dict(),
        "num_steps": condition.policy.num_steps or policy.sampling.num_steps,
        "device": policy.engine.device or ("cpu" if on_cpu else None),
        "replan_rows": condition.policy.replan_rows or policy.replan_rows,
        "latency": run.latency or None,
        "noise_seed": None
        if settings.noise_seed is None
        else assignment.noise_seed(settings.noise_seed),
        "video": "again.mp4",
    }
    options |= {"backend": "distributed"} if policy.parallel.ranks > 1 else {}
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not None
    ]
    return f"strands-cosmos3 rollout {' '.join(flags)}"


def _label(model: str | None) -> str | None:
    """Return a checkpoint's own label, e.g. that its weights are random."""
    try:
        values = load_json(Path(model or "", "checkpoint.json"))
        label = values.get("strands_cosmos3", {}).get("label")
    except (OSError, ValueError, AttributeError):
        return None
    return label if isinstance(label, str) else None
