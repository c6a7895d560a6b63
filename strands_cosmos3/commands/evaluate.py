"""``strands-cosmos3 evaluate``: how often a policy succeeds, on as many processes as there are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from strands_cosmos3.commands.files import versions
from strands_cosmos3.embedded import TASKS, embedded_checkpoint
from strands_cosmos3.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from strands_cosmos3.evaluation.driver import Progress
    from strands_cosmos3.evaluation.settings import Settings

_READING = " as told, of either: did what it was told, of all episodes and of those that did either."
_NO_OPTIONS = ("config", "resume", "token")


@dataclass(frozen=True)
class Evaluate:
    """Run many episodes and report success with its intervals, latency, and films of failures.

    Every episode's scene and noise follow from the task and its index, so the result is the same on one worker and on a
    hundred. Each finished episode is a file in the output folder; Ctrl-C, a crash or kill -9 loses only episodes under way,
    and --resume goes on without repeating any. docs/evaluation.md tells more.

      strands-cosmos3 evaluate --seeds 100 --out run/                                       the embedded checkpoint
      strands-cosmos3 evaluate --backend scripted --tasks place,stack --out run/            the expert
      strands-cosmos3 evaluate --model CHECKPOINT --conditions plain,blank,swapped --seeds 200 --out run/
      strands-cosmos3 evaluate --model CHECKPOINT --num-gpus 8 --tp-size 2 --out run/       four replicas of two GPUs
    """

    out: Path | None = None
    """The folder for episodes, films, report.json and report.html. Needed, here or in the TOML file."""
    config: Path | None = None
    """A TOML file with any of these options, underscores for dashes; tp_size, cfg_size and the policy's may stand in [model].
    What is given on the command line wins."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with a folder that holds episodes; those are not run again. More seeds, tasks or conditions may be asked for."""
    tasks: str | None = None
    """Of reach, pick, place and stack, separated by commas; the default is all four, or what the embedded checkpoint knows."""
    seeds: int | None = None
    """Episodes of each task in each condition; the default is 100."""
    seed: int | None = None
    """The evaluation's own seed, from which every episode's follows; the default is 0."""
    conditions: str | None = None
    """Rows of the report, separated by commas: plain, blank (black pictures), swapped (told another colour), shuffled (told a
    random colour), paraphrased (held-out wordings), steps=N, replan=N; joined with +, e.g. swapped+replan=8. The default is
    plain."""
    instruction: str | None = None
    """For a single task: another wording, e.g. "grab the {a} cube"; {a} and {b} stand for the colours, which go round."""
    backend: Literal["scripted", "native", "diffusers", "service"] | None = None
    """Where actions come from: a checkpoint that sees what the cameras see (native, the default), or the scripted expert, which
    sees the simulator's state and knows all four tasks, or a policy server."""
    model: str | None = None
    """For native and diffusers: a checkpoint's folder or hub repository. native's default is the small policy that comes with
    this package; it knows reach and pick on this table, and nothing else."""
    num_steps: int | None = None
    """For native and diffusers: denoising steps; the default is the checkpoint's preset."""
    guidance_scale: float | None = None
    """For native and diffusers: guidance; 1 is none. The default is the checkpoint's preset."""
    policy_frames: int | None = None
    """For native: 1 answers actions without a future, several times faster; the default is the checkpoint's own."""
    device: str | None = None
    """For native and diffusers without replicas: cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """For native and diffusers: the default is bfloat16 on a GPU, else float32."""
    replan_rows: int | None = None
    """Ask for a new chunk after this many rows; the default is what the checkpoint says is best (8 for the
    embedded one), else whole chunks."""
    host: str | None = None
    """For service: where the policy server is. Its token is read from the environment's STRANDS_COSMOS3_TOKEN."""
    port: int | None = None
    """For service: its port."""
    action_space: Literal["joint_pos", "midtrain"] | None = None
    """For service: what it serves."""
    dialect: Literal["robolab", "openpi", "vllm-omni", "roboarena"] | None = None
    """For service: how it differs from openpi's."""
    num_gpus: int | None = None
    """GPUs for replicas; 0, the default, runs on CPU workers."""
    tp_size: int | None = None
    """Ranks that split every layer of one replica; the default is 1."""
    cfg_size: int | None = None
    """2 computes the two passes of guidance on two groups of ranks; the default is 1."""
    total_shard: int | None = None
    """Replicas. It follows from the other three and is checked against them; with --num-gpus 0 it says how many there are."""
    workers: int | None = None
    """Simulators; the default is a core each, and four for each replica at most."""
    address: str | None = None
    """A running Ray cluster (HOST:PORT, or auto); the default starts Ray on this machine and ends it."""
    duration: float | None = None
    """Longest duration of an episode in simulated seconds; the default is 20."""
    control_frequency: float | None = None
    """Rate of observation and state machine in Hz; it must divide 600. The default is 50."""
    episode_timeout: float | None = None
    """Longest time of an episode in seconds on the wall; the default is 1800. A simulator that takes longer is killed and its
    episode given to another one; the second time it counts as a failure."""
    films: int | None = None
    """Failures of each row that are filmed; the default is 3."""
    clips: int | None = None
    """For native: judge forward and inverse dynamics too, on so many chunks of the expert on tables that no training saw; some
    two seconds each. The default is 0."""
    token: Annotated[str | None, tyro.conf.Suppress] = field(
        default=None, repr=False, metadata={"environment": "STRANDS_COSMOS3_TOKEN"}
    )

    def run(self) -> int:
        """Evaluate; returns 0 if every episode is there, 1 if some were given up, 130 after Ctrl-C."""
        from strands_cosmos3.evaluation.settings import make_settings, read_toml

        options = {} if self.config is None else read_toml(self.config)
        mine = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_OPTIONS}
        options |= {name: value for name, value in mine.items() if value is not None}
        _settle(options)
        settings = make_settings(options, self.token if options.get("backend") == "service" else None)
        if options.get("out") is None:
            raise ConfigError("evaluate needs a folder for its episodes: --out run/")
        out = Path(options["out"])
        try:
            from strands_cosmos3.evaluation.evaluate import evaluate
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"evaluation needs {error.name}: pip install 'strands-cosmos3[scale]'.") from None
        console = Console()
        console.print(f"{settings.topology}; {len(settings.plan())} episodes", highlight=False)
        about = {"versions": versions(), "command": " ".join(["strands-cosmos3", *sys.argv[1:]])}
        world = _world(settings, console)
        with _display(console) as show:
            report, progress = evaluate(settings, out, self.resume, options.get("address"), show, about, world)
        for table in _tables(report):
            console.print(table)
        _say(console, report, out)
        return 130 if progress.interrupted else int(not report["complete"])


def _settle(options: dict[str, Any]) -> None:
    """Name the embedded checkpoint, where no other is."""
    options.setdefault("backend", "native")
    if options["backend"] == "native" and options.get("model") is None:
        asked = options.setdefault("tasks", ",".join(TASKS))
        if not isinstance(asked, str | list):
            return  # make_settings says what tasks are
        for task in asked.split(",") if isinstance(asked, str) else asked:
            options["model"] = str(embedded_checkpoint(task=str(task).strip()))


@contextmanager
def _display(console: Console) -> Iterator[Any]:
    """A live table on a terminal; elsewhere a line now and then."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(_live_table(progress))


def _world(settings: Settings, console: Console) -> Callable[[], Mapping[str, Any]] | None:
    """What judges dynamics, where it was asked for; the checkpoint is looked at before anything starts."""
    if not settings.clips:
        return None
    from strands_cosmos3.training.bundled.dynamics import judge_on_expert, require_video

    checkpoint = Path(str(settings.policy.model))
    require_video(checkpoint)

    def said(stage: str, done: int, of: int) -> None:
        if done in (1, of):
            console.print(f"{stage}: {done} of {of}", highlight=False)

    return lambda: asdict(judge_on_expert(checkpoint, settings.clips, settings.seed, settings.policy.num_steps, said))


class _Lines:
    """Prints a line whenever another tenth is done."""

    def __init__(self, console: Console):
        self._console, self._said = console, (0, "")

    def __call__(self, progress: Progress) -> None:
        done, total = progress.done.total(), sum(progress.total.values())
        now = 10 * done // total, progress.stage
        if now != self._said:
            self._said = now
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
    """One line: how far, how fast, how long still, and what went wrong on the way."""
    done, total = progress.done.total(), sum(progress.total.values())
    parts = [progress.stage, f"{done}/{total} episodes"]
    if progress.resumed:
        parts.append(f"{progress.resumed} from before")
    if progress.stage == "running" and (rate := progress.a_minute):
        parts += [f"{rate:.1f} a minute", f"{_clock(60 * (total - done) / rate)} left"]
    if progress.films_total:
        parts.append(f"{progress.films}/{progress.films_total} films")
    parts.append(f"{progress.workers} of {progress.wanted} workers")
    counted = {"died": progress.deaths, "hung": progress.hangs, "requeued": progress.requeued}
    counted["gangs restarted"] = progress.restarts
    parts += [f"{number} {what}" for what, number in counted.items() if number]
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    """Success and latency, each narrow enough for 80 columns."""
    from strands_cosmos3.evaluation.page import percent

    rows = report["rows"]
    extra = [name for name in ("delta_points", "told", "reads") if any(name in row for row in rows)]
    titles = {"delta_points": "points", "told": "as told", "reads": "of either"}
    table = _columns("success, with Wilson intervals", ("success", "%", "95 % interval", *(titles[name] for name in extra)))
    for row, label in _labelled(rows):
        success = row["success"]
        cells = [f"{success['successes']}/{success['of']}", percent(success["rate"])]
        cells.append(f"{percent(success['low'])} .. {percent(success['high'])}")
        for name in extra:
            value = row.get(name)
            cells.append("" if value is None else f"{value:+.1f}" if name == "delta_points" else percent(value["rate"]))
        table.add_row(*label, *cells, style="bold" if row["task"] is None else "")
    if extra:
        table.caption = "points: against the first row, over the same episodes." + _READING * ("told" in extra)
        table.caption_justify = "left"
    yield table
    table = _columns("inference of a chunk, ms on the wall's clock", ("p50", "p95", "p99", "max", "chunks"))
    for row, label in _labelled(rows):
        if (answer := row["answer_ms"]) is not None:
            figures = (f"{answer[name]:.1f}" for name in ("p50", "p95", "p99", "max"))
            table.add_row(*label, *figures, str(answer["of"]), style="bold" if row["task"] is None else "")
    yield table


def _labelled(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[str, str]]]:
    """Rows with condition and task; a condition is named once."""
    last = None
    for row in rows:
        yield row, (row["condition"] if row["condition"] != last else "", row["task"] or "all")
        last = row["condition"]


def _columns(title: str, names: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("condition", no_wrap=True)
    table.add_column("task", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _say(console: Console, report: dict[str, Any], out: Path) -> None:
    if report["dynamics"] is not None:
        from strands_cosmos3.evaluation.page import world_facts

        for name, text in world_facts(report["dynamics"]).items():
            console.print(f"{name}: {text}", highlight=False)
    if report["model_label"]:
        console.print(f"this checkpoint says of itself: {report['model_label']}", style="yellow", highlight=False)
    if report["hung"]:
        console.print(f"did not end in time and count as failures: {', '.join(report['hung'])}", style="red")
    if report["given_up"]:
        console.print(f"given up, their process died again and again: {', '.join(report['given_up'])}", style="red")
    missing = report["planned"] - report["episodes"]
    if missing:
        console.print(f"{missing} episodes are missing; the same command with --resume goes on", highlight=False)
    run = report["run"]
    counted = {"workers died": run["workers_died"], "hung": run["workers_hung"]}
    died = "".join(f", {number} {what}" for what, number in counted.items() if number)
    died += f", {run['requeued']} episodes were given out again" if run["requeued"] else ""
    rate = "" if run["episodes_a_minute"] is None else f", {run['episodes_a_minute']:.1f} a minute once workers had started"
    console.print(f"{run['new_episodes']} new episodes in {_clock(run['wall_s'])}{rate}{died}", highlight=False)
    for name in ("report.html", "report.json"):
        console.print(f"wrote {out / name}", highlight=False)
