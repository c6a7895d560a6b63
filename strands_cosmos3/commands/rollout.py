"""``strands-cosmos3 rollout``: a simulated Franka follows a policy, and you can look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from strands_cosmos3.backends.options import MODEL_BACKENDS, require_backend
from strands_cosmos3.commands.files import numbered, require_writable, versions, write_json, write_whole
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.types import Outcome
from strands_cosmos3.types import Rollout as Episode

_TROUBLES = (
    "deadline_misses",
    "idle_ticks",
    "expired",
    "rejected",
    "failed",
    "reconnects",
    "restarts",
    "late_ticks",
    "abandoned_inferences",
)


@dataclass(frozen=True)
class Watch:
    """Who looks on while episodes run.

    Args:
        begin: Called with each episode's instruction before it starts.
        on_tick: Called with the robot after every tick, or None.
        audience: Is shown plans and predictions, or None.
        end: Called with what came of the episode.
    """

    begin: Callable[[str], None] = field(default=lambda instruction: None)
    on_tick: Callable[[Any], bool | None] | None = None
    audience: Any = None
    end: Callable[[Episode], None] = field(default=lambda episode: None)


@dataclass(frozen=True)
class Rollout:
    """Run a policy in simulation: a Franka with real dynamics, in a closed loop, filmed if you like.

    native is a Cosmos 3 checkpoint that sees what the cameras see; without --model it is the small one that comes with this
    package, which knows reach and pick on this table and nothing else. scripted is an expert that sees the simulator's state,
    knows all four tasks and speaks the model's own action rows; replay follows a recorded end-effector trajectory; service
    asks a policy server. Ctrl-C brings the arm to rest and keeps
    everything; a second one stops at once.
    """

    task: Literal["reach", "pick", "place", "stack"] | None = None
    """What to judge success by. The default is pick, or nothing for replay."""
    instruction: str = ""
    """What the policy is told, e.g. "pick up the blue cube". The default is the task's own."""
    backend: Literal["scripted", "replay", "native", "distributed", "diffusers", "service"] | None = None
    """Where actions come from: an expert, a recording, or a Cosmos 3 checkpoint run by this package in this process (native)
    or on several (distributed), by diffusers, or by a policy server. The default is native."""
    model: str | None = None
    """For native, distributed and diffusers: a checkpoint's folder or hub repository. The default of the first two is the small
    policy that comes with this package; it knows reach and pick on this table, and nothing else."""
    num_steps: int | None = None
    """For native, distributed and diffusers: denoising steps. The default is the checkpoint's preset."""
    guidance_scale: float | None = None
    """For native, distributed and diffusers: guidance; 1 is none. The default is the checkpoint's preset."""
    policy_frames: int | None = None
    """For native and distributed: frames of the clip that a policy denoises. 1 answers actions without a future, several times
    faster, where the checkpoint was trained to. The default is the checkpoint's own."""
    device: str | None = None
    """For native, distributed and diffusers: cpu, cuda or cuda:N. The default is cuda where there is one."""
    tp: int = 1
    """For distributed: ranks that split every layer."""
    cfg: int = 1
    """For distributed: 2 computes guidance's two passes on two groups of ranks. tp x cfg processes are started."""
    trajectory: Path | None = None
    """For replay: a DROID episode (.json) or a recording of this project (.npz)."""
    host: str | None = None
    """For service: where the policy server is; the default is localhost. Its token is read from the environment's
    STRANDS_COSMOS3_TOKEN."""
    port: int | None = None
    """For service: its port; the default is 8000."""
    action_space: Literal["joint_pos", "midtrain"] | None = None
    """For service: what it serves; the default is joint_pos."""
    dialect: Literal["robolab", "openpi", "vllm-omni", "roboarena"] | None = None
    """For service: how it differs from openpi's; the default is robolab."""
    seed: int = 0
    """Seed of the first episode; the next ones count up."""
    episodes: int = 1
    """How many episodes to run."""
    duration: float = 20.0
    """Longest duration of an episode in simulated seconds."""
    control_frequency: float = 50.0
    """Rate of observation and state machine in Hz; it must divide 600."""
    replan_rows: int | None = None
    """Ask for a new chunk after this many rows; the default is what the checkpoint says is best (8 for the
    embedded one), else whole chunks."""
    chunk_rows: int | None = None
    """Rows that a chunk is asked to have; the default is the embodiment's: 16 pose deltas or 32 joint rows at 15 Hz."""
    latency: float = 0.0
    """Simulated seconds that an inference takes: the arm goes on meanwhile, and the answer is joined that much later.
    Chunks must last more than twice as long, or the arm has to wait. 0 stops the simulation for each inference."""
    realtime: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run no faster than the clock on the wall and take each answer when it is there, as on a real arm."""
    feed_forward: Literal["velocity", "computed_torque", "none"] = "velocity"
    """What is added to the reference before it reaches the joint servos."""
    limits: Literal["fer", "fr3"] = "fer"
    """Whose velocity, acceleration and jerk limits hold: the Panda's (fer) or the Research 3's."""
    derating: float = 1.0
    """Factor on those limits, above 0 and at most 1."""
    arm_model: str = "panda"
    """The arm: panda is the embedded model; else an .xml with the Franka's names, or menagerie (fetched over the network)."""
    video: Path | None = None
    """Write a film (.mp4): the scene, the commanded path, and what the cameras see."""
    film: Literal["full", "views"] = "full"
    """What the film shows: the scene and the cameras, or the cameras alone (ten times quicker)."""
    json: Path | None = None
    """Write every figure of every episode (.json), anew after each."""
    plot: Path | None = None
    """Write a plot of commanded against achieved (.png, .pdf or .svg)."""
    npz: Path | None = None
    """Write the trajectories (.npz)."""
    dataset: Path | None = None
    """Add the episodes to a LeRobot v3 dataset in this folder: cameras, state and commanded actions at 15 Hz."""
    view: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Watch it live, where there is a display."""
    token: Annotated[str | None, tyro.conf.Suppress] = field(
        default=None, repr=False, metadata={"environment": "STRANDS_COSMOS3_TOKEN"}
    )

    def run(self) -> int:
        """Run it; returns 0 if every judged episode succeeded, else 1."""
        if (settled := self._settled()) != self:
            return settled.run()
        self._check()
        from strands_cosmos3.control.loop import LoopConfig
        from strands_cosmos3.instruction import parse_instruction
        from strands_cosmos3.policy import create_policy
        from strands_cosmos3.sim.episode import physics_steps_per_tick
        from strands_cosmos3.sim.robot import ControlConfig, Robot

        physics_steps_per_tick(self.control_frequency)
        LoopConfig(self.control_frequency, self.replan_rows, self.latency)
        if self.latency and self.realtime:
            raise ConfigError("--latency is simulated and --realtime takes inference's own; leave one out.")
        if self.instruction and self._task is not None:
            parse_instruction(self.instruction)  # it is judged by
        robot = Robot("panda", ControlConfig(self.limits, self.derating, self.feed_forward), arm_model=self.arm_model)
        console = Console()
        episodes: list[Episode] = []
        with (
            create_policy("cosmos3", robot="panda", limits=robot.limits, **self._policy_config()) as policy,
            recorder_for(self.dataset) as recorder,
            self._watched(robot, console) as watch,
            _bar(console) as bar,
        ):
            for seed in self._seeds():
                episode = self._episode(robot, policy, seed, bar, watch, recorder)
                episodes.append(episode)
                self._keep(episodes)
                if episode.outcome is Outcome.INTERRUPTED:
                    break
        files = [p for p in (self.video, self.json, self.plot, self.npz, self.dataset) if p is not None]
        _print(console, episodes, self._summary(episodes), files, self.episodes != 1)
        failed = any(e.success is False or e.outcome in (Outcome.FAULT, Outcome.INTERRUPTED) for e in episodes)
        return int(failed)

    def _settled(self) -> Rollout:
        """The same with the backend named, and the embedded checkpoint where no other is."""
        backend = self.backend or "native"
        embedded = backend in ("native", "distributed") and self.model is None and self.trajectory is None
        model = str(embedded_checkpoint(task=self.task)) if embedded else self.model
        return replace(self, backend=backend, model=model)

    def _seeds(self) -> Iterable[int]:
        return range(self.seed, self.seed + self.episodes)

    @contextmanager
    def _watched(self, robot: Any, console: Console) -> Iterator[Watch]:
        """Whoever looks on, for as long as the episodes last."""
        with _viewer(robot, self.view) as on_tick:
            yield Watch(on_tick=on_tick)

    @property
    def _task(self) -> str | None:
        return self.task if self.task is not None or self.backend == "replay" else "pick"

    @property
    def _wants_world(self) -> bool:
        """Whether somebody looks at the world that a model predicts."""
        return self.video is not None

    @property
    def _told(self) -> str:
        """What the policy is told."""
        from strands_cosmos3.sim.tasks import get_task

        return self.instruction or ("" if self._task is None else get_task(self._task).instruction)

    def _check(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"--episodes must be at least 1, got {self.episodes}.")
        self._check_options()

    def _check_options(self) -> None:
        if self.backend == "replay" and self.trajectory is None:
            raise ConfigError("--backend replay needs --trajectory FILE: a DROID episode (.json) or a recording (.npz).")
        parallel = {name: None if degree == 1 else degree for name, degree in (("tp", self.tp), ("cfg", self.cfg))}
        served = {"host": self.host, "port": self.port, "dialect": self.dialect}
        require_backend(self.backend, {"trajectory": self.trajectory, **self._model_options, **parallel, **served}, flags=True)
        if self.backend in MODEL_BACKENDS and self.model is None:
            raise ConfigError(
                f"--backend {self.backend} needs --model CHECKPOINT: a folder in the released layout, or a hub name."
            )
        if self.backend not in MODEL_BACKENDS and self.model is not None:
            raise ConfigError(
                f"--model {self.model} belongs to --backend native, distributed or diffusers, not to {self.backend}; leave it "
                "out."
            )
        if self.backend != "service" and self.action_space is not None:
            raise ConfigError(f"--action-space belongs to --backend service, not to {self.backend}; leave it out.")
        ParallelConfig(self.tp, self.cfg)
        if self.backend == "replay" and self.task is not None:
            raise ConfigError("a replay has no task to judge; leave --task out.")
        require_writable(self.video, (".mp4", ".mkv", ".mov"), "--video")
        require_writable(self.json, (".json",), "--json")
        require_writable(self.plot, (".png", ".pdf", ".svg"), "--plot")
        require_writable(self.npz, (".npz",), "--npz")

    @property
    def _model_options(self) -> dict[str, Any]:
        names = ("num_steps", "guidance_scale", "device", "policy_frames")
        return {name: getattr(self, name) for name in names}

    def _policy_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"embodiment": "droid", "backend": self.backend, "actions_per_step": self.replan_rows}
        if self.trajectory is not None:
            config["model"] = self.trajectory
        if self.backend in MODEL_BACKENDS:
            config |= {"model": self.model, **self._model_options}
            config["decode_video"] = self._wants_world and self.policy_frames != 1
        if self.backend == "distributed":
            config["parallel"] = ParallelConfig(self.tp, self.cfg)
        if self.backend == "service":
            address = {"host": self.host, "port": self.port, "api_key": self.token}
            config |= {**address, "action_space": self.action_space, "dialect": self.dialect}
        config["chunk_rows"] = self.chunk_rows
        return config

    def _episode(self, robot: Any, policy: Any, seed: int, bar: Progress, watch: Watch, recorder: Any) -> Episode:
        label = f"{self._task or self.backend}, seed {seed}"
        row = bar.add_task(label, total=self.duration)
        watch.begin(self._told)
        episode = robot.run_policy(
            instruction=self.instruction,
            policy=policy,
            duration=self.duration,
            control_frequency=self.control_frequency,
            video=numbered(self.video, seed, self.episodes != 1),
            film_layout=self.film,
            task=self._task,
            seed=seed,
            latency=self.latency,
            realtime=self.realtime,
            progress=lambda now, total: bar.update(row, completed=now, total=total),
            on_tick=watch.on_tick,
            audience=watch.audience,
            recorder=recorder,
        )
        watch.end(episode)
        bar.update(row, description=f"{label}: {episode.outcome}", completed=episode.duration_s, total=episode.duration_s)
        return episode

    def _keep(self, episodes: list[Episode]) -> None:
        """Write the latest episode's files, and the figures of all so far: a later one that fails takes nothing with it."""
        episode, many = episodes[-1], self.episodes != 1
        if self.json is not None:
            report = {"episodes": [e.to_dict() for e in episodes], "summary": self._summary(episodes), "versions": versions()}
            write_json(self.json, report)
        npz, plot = numbered(self.npz, episode.seed, many), numbered(self.plot, episode.seed, many)
        if npz is not None:
            write_whole(npz, lambda hidden: episode.save_npz(str(hidden)))
        if plot is not None:
            from strands_cosmos3.sim.plot import plot_rollout

            write_whole(plot, lambda hidden: plot_rollout(episode, hidden))

    def _summary(self, episodes: list[Episode]) -> dict[str, Any]:
        how = {"simulated_latency_s": self.latency, "realtime": self.realtime, "replan_rows": self.replan_rows}
        return _summary(episodes) | how


def _summary(episodes: list[Episode]) -> dict[str, Any]:
    """Success rate and means over episodes."""
    judged = [e.success for e in episodes if e.success is not None]
    return {
        "episodes": len(episodes),
        "successes": sum(judged) if judged else None,
        "success_rate": float(np.mean(judged)) if judged else None,
        "tracking_mean_mm": float(np.mean([e.tracking.mean_mm for e in episodes])),
        "tracking_max_mm": float(max(e.tracking.max_mm for e in episodes)),
        "realtime_factor": float(np.mean([e.realtime_factor for e in episodes])),
    }


def _print(console: Console, episodes: list[Episode], summary: dict[str, Any], files: list[Path], many: bool) -> None:
    last = episodes[-1]
    table = Table(title=f"“{last.instruction}”" if last.instruction else "replay", title_justify="left")
    for name in ("error", "mean mm", "max mm", "mean deg", "max deg", "of what against what"):
        table.add_column(name, justify="left" if name in ("error", "of what against what") else "right")
    meanings = {
        "ik": "joint solution against the commanded poses",
        "path": "commanded motion against the intended path",
        "tracking": "arm against the commanded motion, every physics step",
        "drift": "arm against the recording, at the same time",
    }
    for name, meaning in meanings.items():
        error = getattr(last, name)
        if error is not None:
            figures = (error.mean_mm, error.max_mm, error.mean_deg, error.max_deg)
            table.add_row(name, *(f"{figure:.3f}" if figure >= 5e-4 else f"{figure:.1e}" for figure in figures), meaning)
    console.print(table)
    steps, latency, took = last.steps, last.latency_ms, last.inference_ms
    felt = f"latency p50 {latency['p50']:.1f} ms, max {latency['max']:.1f} ms ({last.latency_clock})"
    console.print(
        f"rows executed {steps['total']} (clamped {steps['clamped']}, stretched {steps['stretched']}, unconverged "
        f"{steps['unconverged']}); {felt if latency['max'] else 'the arm waited for each answer'}; inference took p50 "
        f"{took['p50']:.1f} ms, max {took['max']:.1f} ms on the wall's clock; {last.duration_s:.2f} s simulated at "
        f"{last.realtime_factor:.1f} x real time"
    )
    counters: Counter[str] = sum((Counter(dict(episode.counters)) for episode in episodes), Counter())
    if troubles := [f"{name.replace('_', ' ')} {counters[name]}" for name in _TROUBLES if counters.get(name)]:
        console.print(f"[yellow]{', '.join(troubles)}[/yellow]")
    console.print(f"outcome: [bold]{last.outcome}[/bold]. {last.outcome.message}" + (f" {last.fault}" if last.fault else ""))
    if last.held and not last.fault:
        console.print(f"[yellow]when the time was up {last.held}[/yellow]")
    if summary["success_rate"] is not None and len(episodes) > 1:
        console.print(f"success: {summary['successes']} of {len(episodes)}")
    for file in files:
        one_each = many and file.suffix not in (".json", "")
        rest = " (one for each seed)" if one_each and len(episodes) > 1 else ""
        console.print(f"wrote {numbered(file, last.seed, one_each)}{rest}")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f}/{task.total:.1f} s"),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def recorder_for(folder: Path | None) -> Iterator[Any]:
    """What records rollouts into a dataset, open for as long as it lasts; None without a folder."""
    if folder is None:
        yield None
        return
    try:
        from strands_cosmos3.datasets.writer import DatasetWriter
        from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
    except ImportError as error:
        raise MissingDependencyError("datasets need pyarrow and PyAV: pip install 'strands-cosmos3[data]'.") from error
    with DatasetWriter(folder, rollout_spec()) as writer:
        yield RolloutRecorder(writer)


@contextmanager
def _viewer(robot: Any, wanted: bool) -> Iterator[Callable[[Any], bool] | None]:
    """MuJoCo's passive viewer, kept in step with the clock on the wall, or nothing."""
    if not wanted:
        yield None
        return
    from strands_cosmos3.sim.live import live_viewer

    with live_viewer(robot) as on_tick:
        yield on_tick
