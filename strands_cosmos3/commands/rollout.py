"""``strands-cosmos3 rollout``: a simulated Franka follows a policy, and you can look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from strands_cosmos3.commands.files import numbered, require_writable, versions, write_json, write_whole
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.types import Outcome
from strands_cosmos3.types import Rollout as Episode

_MODELS = ("native", "diffusers")


@dataclass(frozen=True)
class Rollout:
    """Run a policy in simulation: a Franka with real dynamics, in a closed loop, filmed if you like.

    The scripted backend is an expert that sees the simulator's state and speaks the model's own action rows; replay follows
    a recorded end-effector trajectory; service asks a policy server and shows it what the cameras see. Ctrl-C brings the arm
    to rest and keeps everything; a second one stops at once.
    """

    task: Literal["reach", "pick", "place", "stack"] | None = None
    """What to judge success by. The default is pick, or nothing for replay."""
    instruction: str = ""
    """What the policy is told, e.g. "pick up the blue cube". The default is the task's own."""
    backend: Literal["scripted", "replay", "native", "diffusers", "service"] = "scripted"
    """Where actions come from: an expert, a recording, or a Cosmos 3 checkpoint run by this package, by
    diffusers, or by a policy server."""
    model: str | None = None
    """For native and diffusers: a checkpoint's folder or hub repository."""
    num_steps: int | None = None
    """For native and diffusers: denoising steps. The default is the checkpoint's preset."""
    guidance_scale: float | None = None
    """For native and diffusers: guidance; 1 is none. The default is the checkpoint's preset."""
    device: str | None = None
    """For native and diffusers: cpu, cuda or cuda:N. The default is cuda where there is one."""
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
    """Ask for a new chunk after this many rows; the default executes whole chunks."""
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
    """Write every figure of every episode (.json)."""
    plot: Path | None = None
    """Write a plot of commanded against achieved (.png, .pdf or .svg)."""
    npz: Path | None = None
    """Write the trajectories (.npz)."""
    view: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Watch it live, where there is a display."""
    token: Annotated[str | None, tyro.conf.Suppress] = field(
        default=None, repr=False, metadata={"environment": "STRANDS_COSMOS3_TOKEN"}
    )

    def run(self) -> int:
        """Run it; returns 0 if every judged episode succeeded, else 1."""
        self._check()
        from strands_cosmos3.instruction import parse_instruction
        from strands_cosmos3.sim.episode import physics_steps_per_tick
        from strands_cosmos3.sim.robot import ControlConfig, Robot

        physics_steps_per_tick(self.control_frequency)
        if self.instruction and self.backend == "scripted":
            parse_instruction(self.instruction)
        robot = Robot("panda", ControlConfig(self.limits, self.derating, self.feed_forward), arm_model=self.arm_model)
        console = Console()
        episodes: list[Episode] = []
        with _viewer(robot, self.view) as on_tick, _bar(console) as bar:
            for seed in range(self.seed, self.seed + self.episodes):
                episode = self._episode(robot, seed, bar, on_tick)
                episodes.append(episode)
                self._keep(episode)
                if episode.outcome is Outcome.INTERRUPTED:
                    break
        summary = _summary(episodes)
        if self.json is not None:
            write_json(
                self.json,
                {"episodes": [e.to_dict() for e in episodes], "summary": summary, "versions": versions()},
            )
        _print(console, episodes, summary, [p for p in (self.video, self.json, self.plot, self.npz) if p is not None])
        failed = any(e.success is False or e.outcome in (Outcome.FAULT, Outcome.INTERRUPTED) for e in episodes)
        return int(failed)

    @property
    def _task(self) -> str | None:
        return self.task if self.task is not None or self.backend == "replay" else "pick"

    def _check(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"--episodes must be at least 1, got {self.episodes}.")
        if self.backend == "replay" and self.trajectory is None:
            raise ConfigError("--backend replay needs --trajectory FILE: a DROID episode (.json) or a recording (.npz).")
        if self.backend != "replay" and self.trajectory is not None:
            raise ConfigError(f"--trajectory belongs to --backend replay, not to {self.backend}.")
        if (self.backend in _MODELS) != (self.model is not None):
            raise ConfigError(
                "--model CHECKPOINT belongs to --backend native or diffusers, which need it: a folder in the released layout, "
                "or a hub repository."
            )
        served = {"host": self.host, "port": self.port, "action-space": self.action_space, "dialect": self.dialect}
        given = [f"--{name}" for name, value in served.items() if value is not None]
        if self.backend != "service" and given:
            raise ConfigError(f"{', '.join(given)} belong to --backend service, not to {self.backend}.")
        if self.backend == "replay" and self.task is not None:
            raise ConfigError("a replay has no task to judge; leave --task out.")
        require_writable(self.video, (".mp4", ".mkv", ".mov"), "--video")
        require_writable(self.json, (".json",), "--json")
        require_writable(self.plot, (".png", ".pdf", ".svg"), "--plot")
        require_writable(self.npz, (".npz",), "--npz")

    def _episode(self, robot: Any, seed: int, bar: Progress, on_tick: Callable[[Any], None] | None) -> Episode:
        config: dict[str, Any] = {"embodiment": "droid", "backend": self.backend, "actions_per_step": self.replan_rows}
        if self.trajectory is not None:
            config["model"] = self.trajectory
        if self.backend in _MODELS:
            config |= {"model": self.model, "num_steps": self.num_steps, "guidance_scale": self.guidance_scale}
            config |= {"device": self.device, "decode_video": self.video is not None}
        if self.backend == "service":
            address = {"host": self.host, "port": self.port, "api_key": self.token}
            config |= {**address, "action_space": self.action_space, "dialect": self.dialect}
        label = f"{self._task or self.backend}, seed {seed}"
        row = bar.add_task(label, total=self.duration)
        episode = robot.run_policy(
            instruction=self.instruction,
            policy_config=config,
            duration=self.duration,
            control_frequency=self.control_frequency,
            video=numbered(self.video, seed, self.episodes > 1),
            film_layout=self.film,
            task=self._task,
            seed=seed,
            progress=lambda now, total: bar.update(row, completed=now, total=total),
            on_tick=on_tick,
        )
        bar.update(row, description=f"{label}: {episode.outcome}", completed=episode.duration_s, total=episode.duration_s)
        return episode

    def _keep(self, episode: Episode) -> None:
        many = self.episodes > 1
        npz, plot = numbered(self.npz, episode.seed, many), numbered(self.plot, episode.seed, many)
        if npz is not None:
            write_whole(npz, lambda hidden: episode.save_npz(str(hidden)))
        if plot is not None:
            from strands_cosmos3.sim.plot import plot_rollout

            write_whole(plot, lambda hidden: plot_rollout(episode, hidden))


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


def _print(console: Console, episodes: list[Episode], summary: dict[str, Any], files: list[Path]) -> None:
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
    steps, latency = last.steps, last.latency_ms
    console.print(
        f"rows executed {steps['total']} (clamped {steps['clamped']}, stretched {steps['stretched']}, unconverged "
        f"{steps['unconverged']}); chunk latency p50 {latency['p50']:.1f} ms, max {latency['max']:.1f} ms; "
        f"{last.duration_s:.2f} s simulated at {last.realtime_factor:.1f} x real time"
    )
    console.print(f"outcome: [bold]{last.outcome}[/bold]. {last.outcome.message}" + (f" {last.fault}" if last.fault else ""))
    if summary["success_rate"] is not None and len(episodes) > 1:
        console.print(f"success: {summary['successes']} of {len(episodes)}")
    for file in files:
        console.print(f"wrote {file}" + (" (one for each seed)" if len(episodes) > 1 and file.suffix != ".json" else ""))


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f}/{task.total:.1f} s"),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def _viewer(robot: Any, wanted: bool) -> Iterator[Callable[[Any], None] | None]:
    """MuJoCo's passive viewer, kept in step with the clock on the wall, or nothing."""
    if not wanted:
        yield None
        return
    from strands_cosmos3.sim.live import live_viewer

    with live_viewer(robot) as on_tick:
        yield on_tick
