"""The report: figures of every row, and details of failures."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from strands_cosmos3.evaluation.driver import failures_to_film
from strands_cosmos3.evaluation.folder import Record, RunFolder
from strands_cosmos3.evaluation.page import page
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.robots import evaluated_robot, identity_of
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.statistics import summarise
from strands_cosmos3.resources import write_json
from strands_cosmos3.sim.scene_builder import view_names_of

Report = dict[str, Any]
_EMBED_BYTES = 32 * 2**20  # further videos are linked, to keep the page small


def make_report(
    folder: RunFolder,
    records: dict[tuple[str, str, int], Record],
    about: Mapping[str, Any],
    lost: list[str],
) -> Report:
    """Return the figures of a folder's episodes.

    ``about`` holds facts about this run (versions, machine, times), ``lost`` the episodes that were
    given up.
    """
    settings = folder.settings
    plan = settings.plan()
    digest = next(
        (record["model_sha256"] for record in records.values() if record.get("model_sha256")), None
    )
    return {
        "complete": len(records) == len(plan),
        "episodes": len(records),
        "planned": len(plan),
        "rows": summarise(plan, records),
        "dynamics": folder.read_dynamics() if settings.clips else None,
        "loop_latency": _loop_latency(records.values()),
        "failures": [
            _failure(folder, a, records[a.key]) for a in failures_to_film(plan, records, settings)
        ],
        "given_up": lost,
        "damaged": [
            f"{path.relative_to(folder.path)} {why}" for path, why in folder.damaged.items()
        ],
        "without_checksum": len(folder.unverified),
        "hung": [a.label for a in plan if a.key in records and "hung" in records[a.key]["times"]],
        "model_sha256": digest,
        "model_label": _label(settings),
        "robot": None if settings.is_libero else _robot(settings, records.values()),
        "settings": settings.to_dict(),
        **about,
    }


def write_report(folder: RunFolder, report: Report) -> None:
    """Write ``report.json`` and the self-contained ``report.html``."""
    write_json(folder.path / "report.json", report)
    films: dict[str, str] = {}
    room = _EMBED_BYTES
    for failure in report["failures"]:
        film = failure["film"]
        if film is None:
            continue
        data = (folder.path / film).read_bytes()
        room -= len(data)
        films[film] = (
            f"data:video/mp4;base64,{base64.b64encode(data).decode()}" if room >= 0 else film
        )
    folder.write_file(
        "report.html", lambda hidden: hidden.write_text(page(report, films), encoding="utf-8")
    )


def _loop_latency(records: Iterable[Record]) -> dict[str, Any] | None:
    """Return the largest latency of any control loop, and its clock. The rows' ``answer_ms`` is
    wall-clock time.
    """
    known = [record for record in records if "latency_clock" in record]
    if not known:
        return None
    return {
        "max_ms": max(record["latency_ms"]["max"] for record in known),
        "clock": known[0]["latency_clock"],
    }


def _failure(folder: RunFolder, assignment: Assignment, record: Record) -> dict[str, Any]:
    film = folder.film_of(assignment)
    return {
        "condition": assignment.perturbation.name,
        "task": assignment.task,
        "index": assignment.index,
        "seed": assignment.seed,
        **assignment.instructions(),
        "outcome": record["outcome"],
        "duration_s": record["duration_s"],
        "fault": record.get("fault"),
        "film": None if film is None else str(film[0].relative_to(folder.path)),
        "film_is_same": None if film is None else film[1],
        "repeat": _repeat(folder.settings, assignment),
    }


def _repeat(settings: Settings, assignment: Assignment) -> str | None:
    """Return the command that runs the same episode again. None if ``rollout`` cannot: it knows
    no perturbation of images or text, and chooses the dtype by the device.
    """
    perturbation, policy, topology = assignment.perturbation, settings.policy, settings.topology
    same = (
        not settings.is_libero
        and perturbation.images == "seen"
        and not perturbation.changes_scene
        and assignment.goal_instruction == assignment.policy_instruction
    )
    if not same or policy.engine.dtype is not None or policy.policy is not None:
        return None
    on_cpu = policy.backend == "native" and not topology.num_gpus and topology.replicas > 0
    options: dict[str, Any] = {
        "task": assignment.task,
        "instruction": assignment.goal_instruction,
        "seed": assignment.seed,
        "duration": perturbation.limit_s or settings.duration,
        "control_frequency": settings.control_frequency,
        **policy.to_dict(),
        "num_steps": perturbation.num_steps or policy.sampling.num_steps,
        "device": policy.engine.device or ("cpu" if on_cpu else None),
        "replan_rows": perturbation.replan_rows or policy.replan_rows,
        "latency": perturbation.latency_s,
        "noise_seed": None
        if settings.noise_seed is None
        else assignment.noise_seed(settings.noise_seed),
        "video": "again.mp4",
    }
    options |= {"backend": "distributed"} if topology.ranks_per_replica > 1 else {}
    options |= {"robot": settings.robot} if identity_of(settings.robot) else {}
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not None
    ]
    return f"strands-cosmos3 rollout {' '.join(flags)}"


def _robot(settings: Settings, records: Iterable[Record]) -> dict[str, Any]:
    """Return the robot's name, its policy's cameras, whether limits are assumed, and the domain
    that a model borrows.
    """
    robot, found = evaluated_robot(settings.robot), list(records)
    return {
        "name": robot.name,
        "views": list(view_names_of(robot)),
        "assumed": any(record.get("assumed", False) for record in found),
        "borrowed_domain": next(
            (record["borrowed_domain"] for record in found if record.get("borrowed_domain")), None
        ),
    }


def _label(settings: Settings) -> str | None:
    """Return a checkpoint's own label, e.g. that its weights are random."""
    if settings.policy.model is None:
        return None
    about = Path(settings.policy.model) / "checkpoint.json"
    try:
        label = json.loads(about.read_text()).get("strands_cosmos3", {}).get("label")
    except (OSError, ValueError, AttributeError):
        return None
    return label if isinstance(label, str) else None
