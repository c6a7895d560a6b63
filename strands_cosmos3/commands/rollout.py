"""``strands-cosmos3 rollout``: run a policy on a simulated robot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from strands_cosmos3.checks import positive, seed_number
from strands_cosmos3.commands.files import (
    numbered,
    recorder_for,
    require_apart,
    require_writable,
    require_writable_folder,
    versions,
)
from strands_cosmos3.commands.flags import from_environment
from strands_cosmos3.commands.progress import WaitNotice
from strands_cosmos3.commands.push import push_folder, require_repository
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import OF_BACKEND, of_world
from strands_cosmos3.options import (
    MODEL_BACKENDS,
    SAMPLER_BACKENDS,
    option,
    require_heeded,
    section,
    with_options,
)
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.resources import write_json, write_whole
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.types import Outcome, Rollout
from strands_cosmos3.worlds.world import RunOptions, Start, World, get_world

if TYPE_CHECKING:
    from strands_cosmos3.policy import Cosmos3Policy
    from strands_cosmos3.sim.simulated_arm import SimulatedArmOptions

_WARNED = (
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
_ERRORS = {
    "ik": "joint solution and commanded poses",
    "path": "commanded motion and intended path",
    "tracking": "arm and commanded motion, at every physics step",
    "drift": "arm and recording, at the same time",
    "loop_drift": "arm and the chunks' motions joined end to end",
    "between_hands": "second hand in the first one's frame, and as commanded",
}
"""Errors of a rollout, and what they are the difference between."""


@dataclass(frozen=True)
class Listeners:
    """Callbacks of a viewer while episodes run."""

    begin: Callable[[str], None] = field(default=lambda instruction: None)  # before each episode
    on_tick: Callable[[Any], bool | None] | None = None  # after every tick; True ends the episode
    audience: Any = None  # a RolloutListener
    end: Callable[[Rollout], None] = field(default=lambda episode: None)


@dataclass(frozen=True)
class ArmFlags:
    """The simulated arm and its control."""

    feed_forward: Literal["velocity", "computed_torque", "none"] = "velocity"
    """Feed-forward of the joint servos."""
    plant: Literal["nominal", "all-errors"] = "nominal"
    """The simulated arm: as its controller's model, or with heavier links, a payload, friction,
    delay and sensor noise that the controller does not know of.
    """
    compensate: Literal["none", "known", "identified"] = "none"
    """Compensate the plant's delay, payload and friction: their true values, or those identified
    from a motion of 6 s.
    """
    limits: Literal["fer", "fr3"] | None = None
    """Velocity, acceleration and jerk limits of a Panda (fer) or a Research 3 (fr3). The default
    is the robot's own.
    """
    derating: float = 1.0
    """Factor on those limits, above 0 and at most 1."""
    strict: bool = False
    """Refuse a robot some of whose limits are assumed."""
    arm_model: str | None = None
    """Another model of the arm: an .xml with the robot's names, or menagerie (a Panda, fetched
    over the network).
    """

    @property
    def options(self) -> SimulatedArmOptions:
        """The same for a world of simulated arms."""
        from strands_cosmos3.sim.plant import ALL_ERRORS
        from strands_cosmos3.sim.simulated_arm import ControlConfig, SimulatedArmOptions

        control = ControlConfig(self.limits, self.derating, self.feed_forward, strict=self.strict)
        plant = ALL_ERRORS if self.plant == "all-errors" else None
        return SimulatedArmOptions(control, plant, self.arm_model, self.compensate)


@dataclass(frozen=True)
class FileFlags:
    """What is written. Of several episodes each has files of its own, with its seed in their names;
    figures and dataset are of all.
    """

    video: Path | None = None
    """Write a film (.mp4): the scene, the commanded path and the cameras."""
    film: Literal["full", "views"] = "full"
    """Layout of the film: the scene and the cameras, or the cameras alone (ten times faster)."""
    json: Path | None = None
    """Write the figures of all episodes (.json), after each one."""
    plot: Path | None = None
    """Write a plot of the commanded and the achieved motion (.png, .pdf or .svg)."""
    npz: Path | None = None
    """Write the trajectories (.npz)."""
    rrd: Path | None = None
    """Write a Rerun recording (.rrd): paths, poses, joints and the tracking error over time."""
    dataset: Path | None = None
    """Add the episodes to a LeRobot v3 dataset in this folder: cameras, state and commanded
    actions at the rate of the robot's embodiment (15 Hz for the panda), of two arms by limb.
    """
    push: str | None = None
    """Upload that dataset to this repository of the Hugging Face hub, e.g. me/picks; a new one
    is private.
    """

    SUFFIXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "video": (".mp4", ".mkv", ".mov"),
        "json": (".json",),
        "plot": (".png", ".pdf", ".svg"),
        "npz": (".npz",),
        "rrd": (".rrd",),
    }

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        extras = {"data": self.dataset, "rerun": self.rrd, "engine": self.push}
        return tuple(extra for extra, flag in extras.items() if flag is not None)

    def check(self, trajectory: Path | None) -> None:
        """Raise ConfigError if something cannot be written, or would overwrite the trajectory."""
        files: dict[str, Path | None] = {name: getattr(self, name) for name in self.SUFFIXES}
        outputs = {f"--{name}": path for name, path in files.items()}
        require_apart({**outputs, "--dataset": self.dataset}, {"--trajectory": trajectory})
        for name, path in files.items():
            require_writable(path, self.SUFFIXES[name], f"--{name}")
        require_writable_folder(self.dataset, "--dataset")
        if self.push is not None and self.dataset is None:
            raise ConfigError(f"--push {self.push} uploads a dataset; add --dataset FOLDER.")
        require_repository(self.push)

    def save(self, episodes: list[Rollout], summary: Mapping[str, Any], many: bool) -> None:
        """Write the latest episode's files and the figures of all so far, so that a later
        failure loses nothing.
        """
        episode = episodes[-1]
        if self.json is not None:
            figures = [episode.to_dict() for episode in episodes]
            write_json(self.json, {"episodes": figures, "summary": summary, "versions": versions()})
        if npz := numbered(self.npz, episode.seed, many):
            write_whole(npz, lambda unfinished: episode.save_npz(str(unfinished)))
        if rrd := numbered(self.rrd, episode.seed, many):
            from strands_cosmos3.sim.rerun_export import save_rrd

            write_whole(rrd, lambda unfinished: save_rrd(episode, unfinished))
        if plot := numbered(self.plot, episode.seed, many):
            from strands_cosmos3.sim.plot import plot_rollout

            write_whole(plot, lambda unfinished: plot_rollout(episode, unfinished))

    def written(self, episodes: list[Rollout], many: bool, recorded: int) -> Iterator[str]:
        """Return a line for each file that these episodes wrote, or did not come to write;
        ``recorded`` of them are in the dataset.
        """
        filmed = [episode for episode in episodes if episode.video is not None]
        for path in (self.video, self.json, self.plot, self.npz, self.rrd, self.dataset):
            if path is None:
                continue
            wrote = {self.video: filmed, self.dataset: episodes[:recorded]}.get(path, episodes)
            for_each = many and path not in (self.json, self.dataset)
            if wrote:
                rest = " (one for each seed)" if for_each and len(wrote) > 1 else ""
                yield f"wrote {numbered(path, wrote[-1].seed, for_each)}{rest}"
            else:
                path = numbered(path, episodes[-1].seed, for_each)
                kept = "; the older one is as it was" if path is not None and path.exists() else ""
                yield f"did not write {path}: the episode ended before its first picture{kept}"
        if self.push is not None and self.dataset is not None and recorded:
            yield f"pushed to {push_folder(self.dataset, self.push, 'dataset')}"


@dataclass(frozen=True)
class RolloutCommand:
    """Run a policy on a simulated robot, and film it if you like.

    The arm has real dynamics, and the loop is closed: each inference sees what the arm did.

    native runs a Cosmos 3 checkpoint on the camera images, and onnx one that was exported; without
    --model it is the bundled policy, which can reach, pick and place on this table. scripted is an
    expert that reads the simulator's state, can do every task and returns the model's action rows.
    replay follows a recorded end-effector trajectory. service calls a policy server. Ctrl-C brings
    the arm to rest and keeps all files; a second one stops at once.
    """

    world: str = "table"
    """What the policy acts in: table, libero/SUITE, or a world of your own as module:name or
    file.py:name.
    """
    task: str | None = None
    """Task to judge success by. On the table reach, pick, place or stack, and with two arms
    lift_bar, or hand_over from one hand to the other. The default is the robot's first (pick,
    lift_bar), and none for replay.
    """
    instruction: str = ""
    """Instruction for the policy, e.g. "pick up the blue cube". The default is the task's."""
    trajectory: Path | None = option(None, "replay")
    """For replay: a DROID episode (.json), the recording of a rollout (rollout --npz), or a
    dataset's folder (rollout --dataset), of two arms too. The scene is that of --seed.
    """
    trajectory_episode: int | None = option(None, "replay")
    """For replay of a dataset: the episode's number; the default is 0."""
    seed: int = 0
    """Seed of the first episode's scene and noise; each next one adds 1."""
    noise_seed: int | None = None
    """Seed of the policy's noise in every episode; the default is the scene's."""
    episodes: int = 1
    """Number of episodes."""
    duration: float = 20.0
    """Longest duration of an episode in simulated seconds."""
    control_frequency: float = 50.0
    """Control ticks in a simulated second; it must divide 600."""
    latency: float = 0.0
    """Simulate slow inference: the arm follows its present chunk for this many simulated seconds
    before the next arrives. Chunks must last more than twice as long, or the arm has to wait. 0
    stops the simulation for each inference.
    """
    realtime: bool = False
    """Run no faster than wall-clock time and accept each chunk when it arrives, as on a real
    arm.
    """
    on_stall: Literal["report", "stop", "retreat"] = "report"
    """What follows where the arm stays on the spot for 6 s while its chunks repeat: count it, as it
    is in any case (report), end the episode as a fault (stop), or lead the hand back by 10 cm and
    aside by 4 cm and ask again, at most three times before it stops (retreat).
    """
    robot: str = ""
    """The robot, as `robot list` names it, or the .toml file of one (docs/robots.md). The default
    is the world's first, on the table a panda, which the bundled policy drives.
    """
    view: bool = False
    """Show a live window; it needs a display."""
    arm: ArmFlags = section(ArmFlags)
    files: FileFlags = section(FileFlags)
    policy: PolicyOptions = section(PolicyOptions)
    token: str | None = from_environment("STRANDS_COSMOS3_TOKEN")

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        needed = *OF_BACKEND.get(self._backend, ()), *of_world(self.world), *self.files.extras
        return ("sim", *needed)

    def run(self) -> int:
        """Run it; returns 0 if every judged episode succeeded, 130 if Ctrl-C ended it, else 1."""
        console = Console()
        with WaitNotice(console) as wait:
            wait.begin(f"loading world {self.world} and policy {self._backend}")
            return self._run(console, wait)

    def _run(self, console: Console, wait: WaitNotice) -> int:
        self._check()
        from strands_cosmos3.control.loop import LoopConfig
        from strands_cosmos3.sim.episode import physics_steps_per_tick
        from strands_cosmos3.sim.film import frames_shown

        physics_steps_per_tick(self.control_frequency)
        LoopConfig(self.control_frequency, self.policy.replan_rows, self.latency)
        if self.latency and self.realtime:
            raise ConfigError(
                "--latency is simulated and --realtime measures the real one; leave one out."
            )
        if self.instruction and self._task is not None:
            self._world.check_instruction(self._task, self.instruction)
        arm = None if self.arm == ArmFlags() else self.arm.options
        episodes: list[Rollout] = []
        with (
            self._world.open(self._robot, task=self._task, arm=arm) as session,
            self._make_policy(session) as policy,
            recorder_for(self.files.dataset, get_robot(self._robot)) as recorder,
            self._listeners(session, policy, console) as listeners,
            _bar(console) as bar,
        ):
            if not self.realtime:
                policy.decode_frames = frames_shown(policy.replan_rows, self.latency)
            wait.begin("waiting for the first answer")
            for seed in self._seeds():
                episode = self._episode(session, policy, seed, bar, wait, listeners, recorder)
                episodes.append(episode)
                self.files.save(episodes, self._summary(episodes), self.episodes != 1)
                if episode.outcome is Outcome.INTERRUPTED and not self._goes_on():
                    break
        _print(console, episodes, self._summary(episodes))
        recorded = 0 if recorder is None else recorder.saved
        for line in self.files.written(episodes, self.episodes != 1, recorded):
            console.print(line, soft_wrap=True)
        if episodes[-1].outcome is Outcome.INTERRUPTED:
            return 130
        return int(any(e.success is False or e.outcome is Outcome.FAULT for e in episodes))

    @property
    def _backend(self) -> str:
        default = self.policy.bundled_backend if self.trajectory is None else "replay"
        return self.policy.backend_with(self.policy.model, default)

    def _seeds(self) -> Iterable[int]:
        return range(self.seed, self.seed + self.episodes)

    @contextmanager
    def _listeners(self, session: Any, policy: Any, console: Console) -> Iterator[Listeners]:
        """Open the viewers for the duration of the episodes."""
        if not self.view:
            yield Listeners()
            return
        from strands_cosmos3.sim.live import live_viewer

        with live_viewer(session.robot) as on_tick:
            yield Listeners(on_tick=lambda session: on_tick(session.robot))

    def _goes_on(self) -> bool:
        """Whether another episode follows one that was ended early."""
        return False

    @property
    def _latency(self) -> float | Callable[[], float]:
        """Simulated duration of an inference."""
        return self.latency

    @property
    def _task(self) -> str | None:
        if self.task is not None or self._backend == "replay":
            return self.task
        return next(iter(self._world.tasks(self._robot)))

    @cached_property
    def _world(self) -> World:
        return get_world(self.world)

    @property
    def _robot(self) -> str:
        return self.robot or self._world.robots[0]

    @property
    def _wants_prediction(self) -> bool:
        """Whether the predicted video is shown."""
        return self.files.video is not None and self.files.film == "full"

    @property
    def _policy_instruction(self) -> str:
        task = self._task
        return self.instruction or ("" if task is None else self._start(0).instruction)

    def _start(self, seed: int) -> Start:
        """What an episode begins from."""
        if self._task is None:
            return Start(None, seed, instruction=self.instruction)
        task = self._world.task(self._task, self._robot)
        index = 0 if task.starts is None else seed % task.starts
        return Start(task.name, seed, index, self.instruction or task.instruction)

    def _check(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"--episodes must be at least 1, got {self.episodes}.")
        self._check_options()

    def _check_options(self) -> None:
        seed_number(self.seed, "--seed")
        if self.noise_seed is not None:
            seed_number(self.noise_seed, "--noise-seed")
        seed_number(self.seed + max(self.episodes, 1) - 1, "--seed of the last episode")
        positive(self.duration, "--duration")
        if self._backend == "replay" and self.trajectory is None:
            raise ConfigError(
                "--backend replay needs --trajectory FILE: a DROID episode (.json), a recording "
                "(.npz) or a dataset."
            )
        require_heeded(self._backend, self, flags=True)
        if self.task is not None:
            self._world.task(self.task, self._robot)
        if self._backend in SAMPLER_BACKENDS and self.policy.model is None:
            domain = self._world.embodiment(self._robot)
            robot = get_robot(self._robot).name
            embedded_checkpoint(domain, robot, self.task, self._world.name)
        if self._backend == "diffusers" and self.policy.model is None:
            raise ConfigError(
                "--backend diffusers needs --model CHECKPOINT: a folder in the released layout, "
                "or a hub name."
            )
        if self._backend == "replay" and self.task is not None:
            raise ConfigError("a replay is not judged by a task; leave --task out.")
        self.files.check(self.trajectory)

    def _make_policy(self, session: Any) -> Cosmos3Policy:
        from strands_cosmos3.policy import Cosmos3Policy

        policy = self.policy
        model = None
        if self.trajectory is not None:
            from strands_cosmos3.backends.replay import recording_at

            model = recording_at(self.trajectory, self.trajectory_episode)
        changes: dict[str, Any] = {"backend": self._backend, **session.policy_options()}
        expert = None
        if self._backend == "scripted":
            expert = self._world.required_expert(self._robot)
            changes["backend"] = None
        if self._backend == "service":
            changes["api_key"] = self.token
        shown = self._wants_prediction and policy.sampling.policy_frames != 1
        if self._backend in MODEL_BACKENDS and shown:
            changes["decode_video"] = "preview"
        return Cosmos3Policy(
            backend=expert,
            model=model,
            options=with_options(policy, changes),
            **session.policy_arguments(),
        )

    def _episode(
        self,
        session: Any,
        policy: Any,
        seed: int,
        bar: Progress,
        wait: WaitNotice,
        listeners: Listeners,
        recorder: Any,
    ) -> Rollout:
        label = f"{self._task or self._backend}, seed {seed}"
        row = bar.add_task(label, total=self.duration)

        def show_progress(now_s: float, total_s: float) -> None:
            wait.end()
            bar.update(row, completed=now_s, total=total_s)

        listeners.begin(self._policy_instruction)
        session.reset(replace(self._start(seed), instruction=self._policy_instruction))
        hz = None if self._world.fixed_frequency else self.control_frequency
        episode = session.run(
            policy,
            RunOptions(
                duration_s=self.duration,
                control_frequency_hz=hz,
                video=numbered(self.files.video, seed, self.episodes != 1),
                film_layout=self.files.film,
                noise_seed=self.noise_seed,
                latency=self._latency,
                realtime=self.realtime,
                on_stall=self.on_stall,
                progress=show_progress,
                on_tick=listeners.on_tick,
                audience=listeners.audience,
                recorder=recorder,
                identify=any((self.files.json, self.files.dataset)),
            ),
        )
        listeners.end(episode)
        bar.update(
            row,
            description=f"{label}: {episode.outcome}",
            completed=episode.duration_s,
            total=episode.duration_s,
        )
        return episode

    def _summary(self, episodes: list[Rollout]) -> dict[str, Any]:
        return _summary(episodes) | {
            "simulated_latency_s": self.latency,
            "realtime": self.realtime,
            "replan_rows": self.policy.replan_rows,
            "plant": self.arm.plant,
            "compensate": self.arm.compensate,
        }


def _summary(episodes: list[Rollout]) -> dict[str, Any]:
    """Success rate and means over episodes."""
    judged = [
        e.success
        for e in episodes
        if e.success is not None and e.outcome is not Outcome.INTERRUPTED
    ]
    tracking = [e.tracking for e in episodes if e.tracking is not None]
    return {
        "episodes": len(episodes),
        "successes": sum(judged) if judged else None,
        "success_rate": _mean(judged),
        "tracking_mean_mm": _mean([e.mean_mm for e in tracking]),
        "tracking_max_mm": max((float(e.max_mm) for e in tracking), default=None),
        "realtime_factor": _mean([e.realtime_factor for e in episodes]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _print(console: Console, episodes: list[Rollout], summary: dict[str, Any]) -> None:
    last = episodes[-1]
    title = f"“{last.instruction}”" if last.instruction else "replay"
    table = Table("error", title=title, title_justify="left")
    for name in ("mean mm", "max mm", "mean deg", "max deg"):
        table.add_column(name, justify="right")
    table.add_column("difference between")
    for name, meaning in _ERRORS.items():
        if (error := getattr(last, name)) is not None:
            figures = (f"{x:.3f}" if x >= 5e-4 else f"{x:.1e}" for x in vars(error).values())
            table.add_row(name.replace("_", " "), *figures, meaning)
    console.print(table)
    rows = (
        "rows executed {total} (clamped {clamped}, stretched {stretched}, unconverged "
        "{unconverged}, over 1 mm off {off_pose})"
    ).format_map(last.steps)
    spread = "p50 {p50:.1f} ms, max {max:.1f} ms"
    felt = "the arm waited for each answer"
    if last.latency_ms["max"]:
        felt = f"latency {spread.format_map(last.latency_ms)} ({last.latency_clock})"
    speed = last.realtime_factor
    console.print(
        f"{rows}; {felt}; inference took {spread.format_map(last.inference_ms)} of wall-clock "
        f"time; {last.duration_s:.2f} s simulated, "
        f"{speed:{'.0f' if speed >= 10 else '.2g'}} times as fast as real time"
    )
    counters = sum((Counter(episode.counters) for episode in episodes), Counter[str]())
    if warnings := [
        f"{name.replace('_', ' ')} {counters[name]}" for name in _WARNED if counters[name]
    ]:
        console.print(f"[yellow]{', '.join(warnings)}[/yellow]")
    console.print(
        f"outcome: [bold]{last.outcome}[/bold]. {last.outcome.message} {last.fault or ''}"
    )
    if last.collisions:
        console.print(
            f"[yellow]collisions in {len(last.collisions)} chunks; in the last one "
            f"{last.collisions[-1]}[/yellow]"
        )
    if last.held and not last.fault:
        console.print(f"[yellow]when the time was up {last.held}[/yellow]")
    if summary["success_rate"] is not None and len(episodes) > 1:
        stopped = sum(e.outcome is Outcome.INTERRUPTED for e in episodes)
        left_out = f" ({stopped} interrupted, not counted)" if stopped else ""
        console.print(f"success: {summary['successes']} of {len(episodes) - stopped}{left_out}")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f}/{task.total:.1f} s"),
        TimeRemainingColumn(),
        console=console,
    )
