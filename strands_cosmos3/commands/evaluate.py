"""``strands-cosmos3 evaluate``: measure how often a policy succeeds, on any number of processes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from strands_cosmos3.commands.files import versions
from strands_cosmos3.commands.flags import from_environment
from strands_cosmos3.commands.progress import progress_bar
from strands_cosmos3.embedded import TASKS, WORLD, embedded_checkpoint
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.policy_settings import POLICY_OPTIONS, PolicySettings
from strands_cosmos3.extras import OF_BACKEND, needed_by, of_world
from strands_cosmos3.options import options_of, section, with_options

if TYPE_CHECKING:
    from strands_cosmos3.evaluation.driver import Progress
    from strands_cosmos3.evaluation.settings import Settings


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure success rates over many episodes, with an HTML report.

    The report has intervals, latencies and videos of failures.

    Every episode's scene and noise follow from the task and its index, so the result does not
    depend on the number of workers. Each finished episode is a file in the output folder; Ctrl-C, a
    crash or kill -9 loses only unfinished episodes, and --resume runs only those. See
    docs/evaluation.md.

    The bundled policy, the scripted expert, and a checkpoint on four replicas of two GPUs:

      strands-cosmos3 evaluate --seeds 100 --out run/
      strands-cosmos3 evaluate --backend scripted --tasks place,stack --out run/
      strands-cosmos3 evaluate --model CHECKPOINT --num-gpus 8 --tp 2 --out run/
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
    world: str | None = None
    """What the policy acts in: table (the default), libero/SUITE, which needs its extra (the suites
    are libero_spatial, libero_object, libero_goal, libero_10, and of each the variants _swap,
    _object, _task and _lan; libero/SUITE/nvidia follows NVIDIA's protocol, docs/libero.md), or
    module:name or file.py:name of a world of your own.
    """
    robot: str | None = None
    """A robot of the world: as `robot list` names it, or the .toml file of one (docs/robots.md);
    default: the world's first, on the table panda, the only one that the bundled policy drives.
    """
    tasks: str | None = None
    """Any of the world's tasks, separated by commas; default: all, or those of the bundled
    checkpoint. On the table reach, pick, place and stack, of two arms lift_bar and hand_over; of
    LIBERO numbers from 0 to 9.
    """
    seeds: int | None = None
    """Episodes of each task and condition; default: 100, or all official initial states (LIBERO:
    50).
    """
    seed: int | None = None
    """Seed of the evaluation, from which the episodes' seeds are derived; default: 0."""
    noise_seed: int | None = None
    """Another seed for the policy's noise in the same scenes; the default derives it from the
    scene's.
    """
    conditions: str | None = None
    """Rows of the report, separated by commas: plain, blank (black images), swapped (the policy's
    instruction has another goal), shuffled (a random goal), paraphrased (held-out wordings), random
    (meaningless text), steps=N, replan=N, latency=S, limit=S, and what can be varied in the world,
    on the table light=F, table=NAME, camera=CM, mount=SEED, cubes=MM, close, crowded;
    combined with +, e.g. swapped+replan=8. Default: plain. See docs/evaluation.md.
    """
    instruction: str | None = None
    """For a single task: another instruction; on the table e.g. "grab the {a} cube", where {a} and
    {b} stand for colours, which rotate.
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
    """A running Ray cluster: HOST:PORT, or auto for that of RAY_ADDRESS, else one on this machine.
    By default, or with local, Ray runs on this machine while the evaluation does, whatever
    RAY_ADDRESS says.
    """
    duration: float | None = None
    """Maximum duration of an episode in simulated seconds; default: the task's, on the table 20."""
    control_frequency: float | None = None
    """Control ticks in a simulated second; it must divide 600. Default: the world's, on the
    table 50.
    """
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
    judge: str | None = None
    """Ask after each episode whether its film shows success, and report how often the answer agrees
    with the simulator: reasoner, a Cosmos 3 checkpoint with a vision encoder, or module:name, which
    makes a function of (question, frames, fps) that answers in words.
    """
    judge_model: str | None = None
    """For --judge reasoner: its checkpoint, a folder or hub repository; default: the evaluated one.
    Each simulator loads it.
    """
    judge_question: str | None = None
    """What the judge is asked, with {instruction} for the goal. Default: "Task: {instruction}. Did
    the robot succeed? Answer yes or no."
    """
    verify: bool = False
    """Read every byte of the checkpoint for its SHA-256, by which stored episodes are known,
    whatever is remembered of files of the same size, inode and times.
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
            from strands_cosmos3.evaluation.settings import read_options
        options = read_options(Path(path))
        chosen = {name: value for name, value in options.items() if name in POLICY_OPTIONS}
        return cls(policy=with_options(PolicySettings(), chosen))

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        given = {"policy": self.policy.policy, "model": self.policy.model}
        backend = self.policy.backend or _default_backend(given)
        return ("sim", *OF_BACKEND.get(backend, ()), "scale", *of_world(self.world))

    def run(self) -> int:
        """Evaluate; return 0 if every episode finished, 1 if some were given up, 130 after
        Ctrl-C.
        """
        from strands_cosmos3.evaluation.settings import OPTIONS, make_settings, read_options

        options = {} if self.config is None else read_options(self.config)
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
        facts = {"versions": versions(), "command": " ".join(["strands-cosmos3", *sys.argv[1:]])}
        dynamics = _dynamics(settings, console)
        with _display(console) as show:
            resume = options.get("resume", False)
            report, progress = evaluate(
                settings,
                out,
                resume,
                options.get("address"),
                show,
                facts,
                dynamics,
                options.get("verify", False),
            )
        _print_report(console, report, out)
        return 130 if progress.interrupted else int(not report["complete"])


def _choose_checkpoint(options: dict[str, Any]) -> None:
    """Choose the bundled checkpoint if no other is named."""
    options.setdefault("backend", _default_backend(options))
    if options["backend"] not in ("native", "onnx") or options.get("model") is not None:
        return
    from strands_cosmos3.robots.catalogue import get_robot
    from strands_cosmos3.worlds.world import get_world

    world = options.get("world", WORLD)
    robot = get_robot(options.get("robot") or get_world(world).robots[0])
    tasks = options.setdefault("tasks", ",".join(TASKS))
    if not isinstance(tasks, str | list):
        return  # make_settings raises
    embodiment = robot.embodiment or "droid"
    for task in tasks.split(",") if isinstance(tasks, str) else tasks:
        checkpoint = embedded_checkpoint(embodiment, robot.name, str(task).strip(), world)
        options["model"] = str(checkpoint)


def _default_backend(options: dict[str, Any]) -> str:
    """The backend where none is named. What the bundled policy's graphs cannot do, is native's."""
    if options.get("policy") is not None:
        return "python"
    chosen = {name: value for name, value in options.items() if name in POLICY_OPTIONS}
    if options.get("model") is not None or {"clips", "num_gpus", "total_shard"} & options.keys():
        return "native"
    return with_options(PolicySettings(), chosen).bundled_backend


@contextmanager
def _display(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Show the progress of the evaluation, and below it that of each row of the report."""
    tasks: dict[tuple[str, ...], TaskID] = {}
    with progress_bar(console) as bar:

        def show(progress: Progress) -> None:
            whole = progress.done.total(), sum(progress.total.values()), _status(progress)
            rows: dict[tuple[str, ...], tuple[int, int, str]] = {(): whole}
            for row, total in progress.total.items():
                text = f"{', '.join(row)}: {progress.successes[row]} succeeded"
                rows[row] = progress.done[row], total, text
            for row, (done, total, text) in rows.items():
                if row not in tasks:
                    tasks[row] = bar.add_task("", total=total, completed=done)
                bar.update(tasks[row], completed=done, description=text)

        yield show


def _dynamics(settings: Settings, console: Console) -> Callable[[], Mapping[str, Any]] | None:
    """Return what evaluates dynamics, if requested; the checkpoint is checked before anything
    starts.
    """
    if not settings.clips:
        return None
    if settings.get_world().identity(settings.robot) != {"world": "table"}:
        raise ConfigError(
            f"clips={settings.clips}: dynamics are evaluated on the table with "
            "a Panda; leave it out."
        )
    from strands_cosmos3.training.dynamics import judge_dynamics, require_video
    from strands_cosmos3.training.windows import ROWS
    from strands_cosmos3.worlds.table.demo_config import DemoConfig
    from strands_cosmos3.worlds.table.demonstrations import expert_clips

    path = Path(str(settings.policy.model))
    checkpoint = require_video(path)

    def show(stage: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            if done in (1, total):
                console.print(f"{stage}: {done} of {total}", highlight=False)

        return report

    def measure() -> Mapping[str, Any]:
        # of a checkpoint that reads no sentence, they do not matter
        tasks = DemoConfig.tasks if checkpoint.dynamics_without_text else ("reach", "pick")
        tier = int(checkpoint.metadata["resolution_tier"])
        clips = settings.clips or 0
        expert = expert_clips(clips, ROWS, tier, settings.seed, tasks, show("expert"))
        num_steps = settings.policy.sampling.num_steps
        return asdict(judge_dynamics(path, expert, num_steps, show("dynamics")))

    return measure


def _status(progress: Progress) -> str:
    """Return the phase, the rate, and what went wrong."""
    parts = [progress.phase]
    if progress.resumed:
        parts.append(f"{progress.resumed} from an earlier run")
    if progress.phase == "running" and progress.a_minute:
        parts.append(f"{progress.a_minute:.1f} a minute")
    if progress.films_total:
        parts.append(f"{progress.films}/{progress.films_total} films")
    parts.append(f"{progress.workers} of {progress.workers_total} workers")
    parts += _counted(
        died=progress.worker_failures,
        hung=progress.hangs,
        requeued=progress.requeued,
        replica_restarts=progress.replica_restarts,
    )
    return ", ".join(parts)


def _counted(**events: int) -> list[str]:
    return [f"{number} {event.replace('_', ' ')}" for event, number in events.items() if number]


def _print_report(console: Console, report: dict[str, Any], out: Path) -> None:
    from strands_cosmos3.evaluation.tables import dynamics_of, notices_of, tables_of, text_of

    for table in tables_of(report):
        printed = Table(
            title=table.title,
            title_justify="left",
            caption=table.note,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for head in ("condition", "task", *table.heads):
            justify = "left" if head in ("condition", "task") else "right"
            printed.add_column(head, justify=justify, no_wrap=True)
        for line in table.lines:
            cells = (line.condition, line.task or "all", *map(text_of, line.cells))
            printed.add_row(*cells, style="bold" if line.task is None else "")
        console.print(printed)
    for figure, text in dynamics_of(report["dynamics"]).items():
        console.print(f"{figure}: {text}", highlight=False)
    for notice in notices_of(report):
        console.print(notice, style="yellow", highlight=False, soft_wrap=True)
    run = report["run"]
    parts = [f"{run['new_episodes']} new episodes in {timedelta(seconds=round(run['wall_s']))}"]
    if run["episodes_a_minute"] is not None:
        parts.append(f"{run['episodes_a_minute']:.1f} a minute, start-up excluded")
    parts += _counted(
        workers_died=run["worker_failures"],
        hung=run["workers_hung"],
        episodes_were_queued_again=run["requeued"],
    )
    console.print(", ".join(parts), highlight=False)
    for file in ("report.html", "report.json"):
        console.print(f"wrote {out / file}", highlight=False, soft_wrap=True)
