"""``strands-cosmos3 evaluate``: measure how often a policy succeeds, on any number of processes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from strands_cosmos3.commands.files import versions
from strands_cosmos3.commands.flags import from_environment
from strands_cosmos3.embedded import TASKS, embedded_checkpoint
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.policy_settings import POLICY_OPTIONS, PolicySettings
from strands_cosmos3.extras import OF_BACKEND, needed_by
from strands_cosmos3.options import options_of, section, with_options

if TYPE_CHECKING:
    from strands_cosmos3.evaluation.driver import Progress
    from strands_cosmos3.evaluation.settings import Settings

_READING = " as told, of either: policy instruction fulfilled, of all episodes and of those that fulfilled either instruction."


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure success rates over many episodes, with an HTML report.

    The report has intervals, latencies and videos of failures.

    Every episode's scene and noise follow from the task and its index, so the result does not
    depend on the number of workers. Each finished episode is a file in the output folder; Ctrl-C, a
    crash or kill -9 loses only unfinished episodes, and --resume runs only those. See
    docs/evaluation.md.

      strands-cosmos3 evaluate --seeds 100 --out run/                                       the
      bundled checkpoint strands-cosmos3 evaluate --backend scripted --tasks place,stack --out run/
      the scripted expert strands-cosmos3 evaluate --model CHECKPOINT --conditions
      plain,blank,swapped --seeds 200 --out run/ strands-cosmos3 evaluate --model CHECKPOINT
      --num-gpus 8 --tp 2 --out run/       four replicas of two GPUs
    """

    out: Path | None = None
    """Output folder for episodes, videos, report.json and report.html. Required, here or in the
    TOML file.
    """
    config: Path | None = None
    """A TOML file with any of these options, with underscores for dashes; the policy's options
    may be in [model]. The command line takes precedence.
    """
    resume: bool = False
    """Continue in a folder with finished episodes, which are not run again. Seeds, tasks and
    conditions may be added.
    """
    suite: str | None = None
    """table (the default), or one of LIBERO's, which needs its extra: libero_spatial,
    libero_object, libero_goal, libero_10, and of each the variants _swap, _object, _task and
    _lan. See docs/libero.md.
    """
    protocol: Literal["openpi", "nvidia"] | None = None
    """For LIBERO: whose evaluation is followed where published ones differ; default: openpi."""
    robot: str | None = None
    """On our table: the robot, as `robot list` names it, or the .toml file of one
    (docs/robots.md); default: panda, the only one that the bundled policy drives.
    """
    tasks: str | None = None
    """Any of reach, pick, place and stack, separated by commas; default: all four, or those of
    the bundled checkpoint. Of two arms: lift_bar and hand_over. For LIBERO numbers from 0 to 9;
    default: all ten.
    """
    seeds: int | None = None
    """Episodes of each task and condition; default: 100, for LIBERO all 50 official initial
    states.
    """
    seed: int | None = None
    """Seed of the evaluation, from which the episodes' seeds are derived; default: 0."""
    noise_seed: int | None = None
    """Another seed for the policy's noise in the same scenes; the default derives it from the
    scene's.
    """
    conditions: str | None = None
    """Rows of the report, separated by commas: plain, blank (black images), swapped (the
    policy's instruction names another colour), shuffled (a random colour), paraphrased (held-out
    wordings), random (meaningless text), steps=N, replan=N, latency=S, limit=S, light=F,
    table=NAME, camera=CM, cubes=MM, close, crowded; combined with +, e.g. swapped+replan=8.
    Default: plain. See docs/evaluation.md.
    """
    instruction: str | None = None
    """For a single task: another wording, e.g. "grab the {a} cube"; {a} and {b} stand for
    colours, which rotate.
    """
    num_gpus: int | None = None
    """Number of GPUs for replicas; default: 0, which runs on CPU workers."""
    total_shard: int | None = None
    """Number of replicas. With GPUs it follows from the other three options and is checked
    against them.
    """
    workers: int | None = None
    """Number of simulators; default: one per core, and at most four per replica."""
    address: str | None = None
    """A running Ray cluster (HOST:PORT, or auto); by default Ray runs on this machine while the
    evaluation does.
    """
    duration: float | None = None
    """Maximum duration of an episode in simulated seconds; default: 20."""
    control_frequency: float | None = None
    """Rate of observation and state machine in Hz; it must divide 600. Default: 50."""
    episode_timeout: float | None = None
    """Maximum wall-clock time of an episode in seconds; default: 1800. A simulator that exceeds
    it is killed and its episode runs again; the second time the episode counts as a failure.
    """
    films: int | None = None
    """Number of failures of each row to record as video; default: 3."""
    clips: int | None = None
    """For native: also evaluate forward and inverse dynamics on this number of the expert's
    chunks, in scenes that were not used in training; about two seconds each. Default: 0.
    """
    policy: PolicySettings = section(PolicySettings)
    token: str | None = from_environment("STRANDS_COSMOS3_TOKEN")

    @classmethod
    def default(cls, arguments: Sequence[str]) -> EvaluateCommand:
        """Return the command without flags: the policy has the options of the TOML file that
        ``--config`` names.
        """
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config")
        path = parser.parse_known_args(arguments)[0].config
        if path is None:
            return cls()
        with needed_by("evaluate"):
            from strands_cosmos3.evaluation.settings import read_toml
        options = read_toml(Path(path))
        chosen = {name: value for name, value in options.items() if name in POLICY_OPTIONS}
        return cls(policy=with_options(PolicySettings(), chosen))

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        backend = self.policy.backend or ("native" if self.policy.policy is None else "python")
        suite = ("libero",) if (self.suite or "").startswith("libero") else ()
        return ("sim", *OF_BACKEND.get(backend, ()), "scale", *suite)

    def run(self) -> int:
        """Evaluate; return 0 if every episode finished, 1 if some were given up, 130 after
        Ctrl-C.
        """
        from strands_cosmos3.evaluation.settings import OPTIONS, make_settings, read_toml

        options = {} if self.config is None else read_toml(self.config)
        options = {name: value for name, value in options.items() if name not in POLICY_OPTIONS}
        options |= {
            name: value
            for name, option in options_of(EvaluateCommand).items()
            if name in OPTIONS and (value := option.value(self)) != option.default
        }
        _choose_checkpoint(options)
        settings = make_settings(
            options, self.token if options.get("backend") == "service" else None
        )
        if options.get("out") is None:
            raise ConfigError("evaluate needs a folder for its episodes: --out run/")
        out = Path(options["out"])
        with needed_by("evaluate"):
            from strands_cosmos3.evaluation.evaluate import evaluate
        console = Console()
        console.print(f"{settings.topology}; {len(settings.plan())} episodes", highlight=False)
        about = {"versions": versions(), "command": " ".join(["strands-cosmos3", *sys.argv[1:]])}
        dynamics = _dynamics(settings, console)
        with _display(console) as show:
            report, progress = evaluate(
                settings, out, self.resume, options.get("address"), show, about, dynamics
            )
        for table in _tables(report):
            console.print(table)
        _say(console, report, out)
        return 130 if progress.interrupted else int(not report["complete"])


def _choose_checkpoint(options: dict[str, Any]) -> None:
    """Choose the bundled checkpoint if no other is named."""
    options.setdefault("backend", "native" if options.get("policy") is None else "python")
    if options["backend"] == "native" and options.get("model") is None:
        if str(options.get("suite", "table")) != "table":
            raise ConfigError(
                f"the bundled policy knows our table, not {options['suite']}; give --model, or "
                "--backend scripted."
            )
        from strands_cosmos3.robots.catalogue import get_robot

        robot = get_robot(options.get("robot", "panda"))
        tasks = options.setdefault("tasks", ",".join(TASKS))
        if not isinstance(tasks, str | list):
            return  # make_settings raises
        for task in tasks.split(",") if isinstance(tasks, str) else tasks:
            options["model"] = str(
                embedded_checkpoint(robot.embodiment or "droid", robot.name, str(task).strip())
            )


@contextmanager
def _display(console: Console) -> Iterator[Any]:
    """Show a live table on a terminal, otherwise occasional lines."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(_live_table(progress))


def _dynamics(settings: Settings, console: Console) -> Callable[[], Mapping[str, Any]] | None:
    """Return what evaluates dynamics, if requested; the checkpoint is checked before anything
    starts.
    """
    if not settings.clips:
        return None
    from strands_cosmos3.training.dynamics import judge_dynamics, require_video
    from strands_cosmos3.training.windows import ROWS
    from strands_cosmos3.worlds.table.demonstrations import expert_clips
    from strands_cosmos3.worlds.table.grammar import Verb

    path = Path(str(settings.policy.model))
    checkpoint = require_video(path)

    def show(stage: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            if done in (1, total):
                console.print(f"{stage}: {done} of {total}", highlight=False)

        return report

    def measure() -> Mapping[str, Any]:
        verbs = (Verb.REACH, Verb.PICK)
        if checkpoint.dynamics_without_text:  # sentences do not matter
            verbs += (Verb.PLACE,)
        tier, clips = int(checkpoint.metadata["resolution_tier"]), settings.clips or 0
        expert = expert_clips(clips, ROWS, tier, settings.seed, verbs, show("expert"))
        num_steps = settings.policy.sampling.num_steps
        return asdict(judge_dynamics(path, expert, num_steps, show("dynamics")))

    return measure


class _Lines:
    """Prints a line for each tenth of the episodes."""

    def __init__(self, console: Console):
        self._console, self._last = console, (0, "")

    def __call__(self, progress: Progress) -> None:
        done, total = progress.done.total(), sum(progress.total.values())
        now = 10 * done // total, progress.stage
        if now != self._last:
            self._last = now
            self._console.print(_status(progress), highlight=False, soft_wrap=True)


def _live_table(progress: Progress) -> Table:
    table = Table(title=_status(progress), title_justify="left", title_style="")
    for name in ("condition", "task", "episodes", "", "success"):
        table.add_column(name, justify="right" if name in ("episodes", "success") else "left")
    last = None
    for (condition, task), total in progress.total.items():
        done, good = progress.done[condition, task], progress.successes[condition, task]
        bar = ProgressBar(total=total, completed=done, width=30)
        share = f"{good} ({100 * good / done:.0f} %)" if done else ""
        table.add_row(condition if condition != last else "", task, f"{done}/{total}", bar, share)
        last = condition
    return table


def _status(progress: Progress) -> str:
    """Return one line: progress, rate, remaining time, and what went wrong."""
    done, total = progress.done.total(), sum(progress.total.values())
    parts = [progress.stage, f"{done}/{total} episodes"]
    if progress.resumed:
        parts.append(f"{progress.resumed} from an earlier run")
    if progress.stage == "running" and (rate := progress.a_minute):
        parts += [f"{rate:.1f} a minute", f"{_clock(60 * (total - done) / rate)} left"]
    if progress.films_total:
        parts.append(f"{progress.films}/{progress.films_total} films")
    parts.append(f"{progress.workers} of {progress.wanted} workers")
    counted = {
        "died": progress.worker_failures,
        "hung": progress.hangs,
        "requeued": progress.requeued,
    }
    counted["replica restarts"] = progress.restarts
    parts += [f"{number} {what}" for what, number in counted.items() if number]
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        if minutes >= 60
        else f"{minutes}:{rest:02d}"
    )


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    """Return the tables of success and latency, each at most 80 columns wide."""
    from strands_cosmos3.evaluation.page import colours_of, interval, labelled, percent

    rows = report["rows"]
    extra = [name for name in ("delta_points", "told", "reads") if any(name in row for row in rows)]
    titles = {"delta_points": "points", "told": "as told", "reads": "of either"}
    table = _columns(
        "success with Wilson intervals",
        ("success", "%", "95 % interval", *(titles[name] for name in extra)),
    )
    for row, condition in labelled(rows):
        success = row["success"]
        cells = [
            f"{success['successes']}/{success['of']}",
            percent(success["rate"]),
            interval(success),
        ]
        for name in extra:
            value = row.get(name)
            cells.append(
                ""
                if value is None
                else f"{value:+.1f}"
                if name == "delta_points"
                else percent(value["rate"])
            )
        table.add_row(
            condition, row["task"] or "all", *cells, style="bold" if row["task"] is None else ""
        )
    if extra:
        table.caption = "points: relative to the first row, over the same episodes." + _READING * (
            "told" in extra
        )
        table.caption_justify = "left"
    yield table
    if colours := colours_of(rows):
        yield _colours(rows, colours)
    table = _columns(
        "inference of a chunk, ms of wall-clock time", ("p50", "p95", "p99", "max", "chunks")
    )
    for row, condition in labelled(rows):
        if (answer := row["answer_ms"]) is not None:
            cells = [
                *(f"{answer[name]:.1f}" for name in ("p50", "p95", "p99", "max")),
                str(answer["of"]),
            ]
            table.add_row(
                condition, row["task"] or "all", *cells, style="bold" if row["task"] is None else ""
            )
    yield table


def _colours(rows: list[dict[str, Any]], colours: list[str]) -> Table:
    from strands_cosmos3.evaluation.page import labelled

    table = _columns("success by the colour of the goal's cube", tuple(colours))
    for row, condition in labelled(rows):
        rates = [row.get("by_colour", {}).get(colour) for colour in colours]
        cells = ["" if one is None else f"{one['successes']}/{one['of']}" for one in rates]
        table.add_row(
            condition, row["task"] or "all", *cells, style="bold" if row["task"] is None else ""
        )
    return table


def _columns(title: str, names: tuple[str, ...]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("condition", no_wrap=True)
    table.add_column("task", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _say(console: Console, report: dict[str, Any], out: Path) -> None:
    if report["dynamics"] is not None:
        from strands_cosmos3.evaluation.page import dynamics_facts

        for name, text in dynamics_facts(report["dynamics"]).items():
            console.print(f"{name}: {text}", highlight=False)
    if report["model_label"]:
        console.print(
            f"this checkpoint's label: {report['model_label']}", style="yellow", highlight=False
        )
    if report["hung"]:
        console.print(
            f"exceeded the time limit and count as failures: {', '.join(report['hung'])}",
            style="red",
        )
    if report["given_up"]:
        console.print(
            f"given up because their process died repeatedly: {', '.join(report['given_up'])}",
            style="red",
        )
    for damaged in report["damaged"]:
        console.print(
            f"{damaged}; the episode counts only as run again",
            style="red",
            highlight=False,
            soft_wrap=True,
        )
    if report["without_checksum"]:
        console.print(
            f"{report['without_checksum']} episodes of an earlier version have no checksum",
            style="yellow",
        )
    missing = report["planned"] - report["episodes"]
    if missing:
        console.print(
            f"{missing} episodes are missing; run the same command with --resume to continue",
            highlight=False,
        )
    run = report["run"]
    counted = {"workers died": run["worker_failures"], "hung": run["workers_hung"]}
    died = "".join(f", {number} {what}" for what, number in counted.items() if number)
    died += f", {run['requeued']} episodes were queued again" if run["requeued"] else ""
    rate = (
        ""
        if run["episodes_a_minute"] is None
        else f", {run['episodes_a_minute']:.1f} a minute, start-up excluded"
    )
    console.print(
        f"{run['new_episodes']} new episodes in {_clock(run['wall_s'])}{rate}{died}",
        highlight=False,
    )
    for name in ("report.html", "report.json"):
        console.print(f"wrote {out / name}", highlight=False)
