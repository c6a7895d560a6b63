"""A LIBERO suite as a world: its tasks, what else can be asked for in their scenes, and
sessions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.controller_rows import controller_rows, decode_rows
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import PANDA_FINGER
from strands_cosmos3.errors import (
    ConfigError,
    Cosmos3Error,
    InstructionError,
    UnknownNameError,
)
from strands_cosmos3.films import VideoWriter
from strands_cosmos3.observe.prompts import libero_caption
from strands_cosmos3.policy import Cosmos3Policy, Policy
from strands_cosmos3.policy.policy import step_values
from strands_cosmos3.sim.interrupt import deferred_interrupt
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation, Outcome, Rollout
from strands_cosmos3.worlds.libero.expert import LiberoExpert
from strands_cosmos3.worlds.libero.protocol import CONTROL_HZ, DEFAULT_PROTOCOL, get_protocol
from strands_cosmos3.worlds.libero.simulation import (
    LiberoSimulation,
    as_seen,
    as_trained,
    privileged,
    side_by_side,
)
from strands_cosmos3.worlds.libero.suites import (
    INIT_STATES,
    Goal,
    LiberoTask,
    get_suite,
    load_tasks,
)
from strands_cosmos3.worlds.world import (
    NOT_VARIED,
    Executed,
    Rewording,
    RunOptions,
    Session,
    Start,
    Task,
    World,
)

ACTION_KEYS = ("dx", "dy", "dz", "rx", "ry", "rz", "gripper")
"""What another project's policy calls the columns of an action in its steps; the gripper opens
at -1.
"""
_FILM_EVERY = 2  # steps


class LiberoWorld(World):
    """A LIBERO suite. Tasks are named by their numbers; ``Start.index`` is an official initial
    state; an instruction is judged if a task of the suite has it and its objects are in the scene.

    Args:
        variant: A suite (:data:`~.suites.SUITES`), or ``SUITE/PROTOCOL`` (:data:`.PROTOCOLS`).

    Raises:
        UnknownNameError: There is no such suite or protocol.
    """

    robots = ("panda",)
    control_frequency_hz = float(CONTROL_HZ)
    fixed_frequency = True
    rewordings: tuple[Rewording, ...] = ("swapped", "shuffled")

    def __init__(self, variant: str = "libero_object"):
        suite, _, protocol = variant.partition("/")
        self.suite = get_suite(suite)
        self.config = get_protocol(protocol or DEFAULT_PROTOCOL)
        self.name = f"libero/{variant.removesuffix(f'/{DEFAULT_PROTOCOL}')}"

    def tasks(self, robot: str | None = None) -> Mapping[str, Task]:
        """Return the ten tasks; MissingDependencyError: LIBERO is not installed."""
        self._require_panda(robot)
        horizon_s = self.config.steps(self.suite.horizon) / CONTROL_HZ
        return {
            str(task.number): Task(str(task.number), task.instruction, horizon_s, INIT_STATES)
            for task in load_tasks(self.suite.name)
        }

    def libero_task(self, name: str) -> LiberoTask:
        """Return what LIBERO knows of a task."""
        self.task(name)
        return load_tasks(self.suite.name)[int(name)]

    def embodiment(self, robot: str | None = None) -> str:
        """Return ``libero``."""
        self._require_panda(robot)
        return "libero"

    def instruction(self, task: str, index: int = 0, template: str = "") -> str:
        """Return the task's instruction, or another one of the suite."""
        if template:
            self.check_instruction(task, template)
        return template or self.task(task).instruction

    def reworded(
        self, task: str, instruction: str, form: Rewording, rng: np.random.Generator
    ) -> str:
        """Return an instruction of the suite that can be judged in the task's scene."""
        if form not in self.rewordings:
            raise ConfigError(
                f"world {self.name!r} has no {form} instructions; other wordings are suites of "
                "their own, e.g. libero/libero_object_lan."
            )
        scene = self.libero_task(task)
        goal = self.goal(task, instruction)
        others = [
            other
            for other in load_tasks(self.suite.name)
            if other.goal != goal and scene.can_judge(other.goal)
        ]
        if not others:
            raise ConfigError(
                f"no other instruction of {self.suite.name} can be judged in the scene of task "
                f"{task} ({scene.instruction!r}); choose other tasks or another suite."
            )
        choices = [other.instruction for other in others]
        if form == "shuffled":
            choices.insert(0, instruction)
        return choices[int(rng.integers(len(choices)))]

    def same_goal(self, task: str, a: str, b: str) -> bool:
        """Whether two instructions ask for the same."""
        return a == b or self.goal(task, a) == self.goal(task, b)

    def check_instruction(self, task: str, instruction: str) -> None:
        """Raise InstructionError for an instruction that cannot be judged in a task's scene."""
        self.goal(task, instruction)

    def goal(self, task: str, instruction: str = "") -> Goal:
        """Return what must hold for an instruction, by default the task's.

        Raises:
            InstructionError: No task of the suite has the instruction, or its objects are not in
                the scene of this one.
        """
        scene = self.libero_task(task)
        goals = {other.instruction: other.goal for other in load_tasks(self.suite.name)}
        goal = scene.goal if instruction in ("", scene.instruction) else goals.get(instruction)
        if goal is None or not scene.can_judge(goal):
            judged = [text for text, other in goals.items() if scene.can_judge(other)]
            raise InstructionError(
                f"{instruction!r:.200} cannot be judged in the scene of task {task} of "
                f"{self.suite.name}; these can: {'; '.join(judged)}."
            )
        return goal

    def check_run(self, options: RunOptions) -> None:
        """Raise ConfigError for another rate, for latency and for what observes simulated arms."""
        if options.control_frequency_hz not in (None, CONTROL_HZ):
            raise ConfigError(f"LIBERO runs at {CONTROL_HZ} Hz; leave control_frequency out.")
        if options.latency or options.realtime:
            raise ConfigError(
                "time stands still in LIBERO during an inference; leave latency and realtime out."
            )
        if options.on_stall != "report":
            raise ConfigError("LIBERO's controller knows no retreat; leave on_stall out.")
        if options.recorder is not None or options.audience is not None:
            raise ConfigError("episodes of LIBERO cannot be recorded or shown while they run.")

    def expert(self, robot: str | None = None) -> Backend | None:
        """Return an expert for ``libero_object`` and its variants."""
        self._require_panda(robot)
        return LiberoExpert() if self.suite.name.startswith("libero_object") else None

    def identity(self, robot: str | None = None) -> dict[str, Any]:
        """Return the suite and the protocol's settings."""
        return {**super().identity(robot), "protocol": vars(self.config)}

    def open(
        self, robot: str | None = None, *, task: str | None = None, arm: Any = None
    ) -> LiberoSession:
        """Open a session."""
        self._require_panda(robot)
        if arm is not None:
            raise ConfigError("LIBERO's arm has a controller of its own; leave `arm` out.")
        self.tasks()  # raises if LIBERO is not installed
        return LiberoSession(self)

    def _require_panda(self, robot: str | None) -> None:
        if robot not in (None, *self.robots):
            raise UnknownNameError("robot of LIBERO", robot, self.robots)


class LiberoSession(Session):
    """The simulation of one task at a time; it is kept for the next episode of the same task,
    because making one takes seconds.
    """

    def __init__(self, world: LiberoWorld):
        self.world = world
        self._start: Start | None = None
        self._goal: Goal = ()
        self._simulation: LiberoSimulation | None = None
        self._begun = False

    def reset(self, start: Start) -> None:
        """Begin an episode, or several from the same start."""
        if start.task is None:
            raise ConfigError(f"name a task of {self.world.name!r}: a number from 0 to 9.")
        if start.variation != NOT_VARIED:
            raise ConfigError(f"nothing can be varied in {self.world.name!r}.")
        if not 0 <= start.index < INIT_STATES:
            raise ConfigError(
                "each task of LIBERO has the initial states 0 to "
                f"{INIT_STATES - 1}, got {start.index}."
            )
        self._goal = self.world.goal(start.task, start.instruction)
        self._start = start
        self._begun = False

    def policy_arguments(self, instruction: str = "") -> dict[str, Any]:
        """Return the embodiment."""
        return {"embodiment": self.world.embodiment()}

    def run(self, policy: Policy, options: RunOptions | None = None) -> Rollout:
        """Run a policy until success, another goal that its instruction names, or the horizon."""
        options = options or RunOptions()
        self.world.check_run(options)
        simulation = self._ready(policy.requires_images or options.video is not None, anew=True)
        start = self._episode
        instruction = options.instruction or self._instruction
        policy.set_control_frequency(CONTROL_HZ)
        policy.reset(start.seed if options.noise_seed is None else options.noise_seed)
        other = self._other_goal(instruction)
        limit = simulation.horizon
        if options.duration_s is not None:
            limit = min(limit, max(1, round(options.duration_s * CONTROL_HZ)))
        counters = Counter[str]()
        outcome = Outcome.TIMEOUT
        fault = None
        started = time.perf_counter()
        with ExitStack() as stack:
            film = None
            if options.video is not None:
                film = stack.enter_context(VideoWriter(options.video, CONTROL_HZ / _FILM_EVERY))
            interrupt = stack.enter_context(deferred_interrupt())
            try:
                while outcome is Outcome.TIMEOUT and simulation.steps < limit:
                    actions = next_actions(policy, simulation, instruction)
                    actions = actions[: limit - simulation.steps]
                    counters["chunks"] += 1
                    for row, action in enumerate(actions, 1):
                        if film is not None and simulation.steps % _FILM_EVERY == 0:
                            film.write(_filmed(simulation))
                        look = policy.requires_images and row == len(actions)
                        if self._step(simulation, action, look):
                            outcome = Outcome.SUCCESS
                        elif other is not None and simulation.fulfilled(other):
                            outcome = Outcome.FOLLOWED
                        elif interrupt.requested or (options.on_tick and options.on_tick(self)):
                            outcome = Outcome.INTERRUPTED
                        if options.progress is not None:
                            options.progress(simulation.steps / CONTROL_HZ, limit / CONTROL_HZ)
                        if outcome is not Outcome.TIMEOUT:
                            break
            except Cosmos3Error as error:
                if isinstance(error, ConfigError) or not counters["chunks"]:
                    raise  # nothing has moved; the caller must correct it
                outcome = Outcome.FAULT
                fault = f"{type(error).__name__}: {error}"
        duration_s = simulation.steps / CONTROL_HZ
        return Rollout(
            seed=start.seed,
            task=start.task,
            instruction=instruction,
            outcome=outcome,
            steps={},
            latency_ms={},
            latency_clock="simulated, stopped for each answer",
            counters={"steps": simulation.steps, **counters},
            duration_s=duration_s,
            realtime_factor=duration_s / (time.perf_counter() - started),
            model_sha256=policy.model_sha256 if options.identify else None,
            fault=fault,
            video=None if film is None else film.kept,
            followed=None if other is None else outcome is Outcome.FOLLOWED,
        )

    def observation(self, images: bool = True) -> Observation:
        """Return the joints and the simulator's state now, and both views side by side."""
        simulation = self._ready(images)
        return _observation(simulation, {"image": side_by_side(self._views())} if images else {})

    def execute(
        self, plan: JointTrajectory | ActionChunk, rows: int | None = None, ticks: int = 1
    ) -> Executed:
        """Execute normalised rows of the ``libero`` domain."""
        actions = _actions_of(plan)[:rows]
        simulation = self._ready(False)
        success = False
        before = simulation.steps
        for action in actions:
            success = self._step(simulation, action)
            if success or simulation.time_is_up:
                break
        steps = simulation.steps - before
        return Executed(success, steps / CONTROL_HZ, rows=steps)

    def draw(self) -> dict[str, NDArray[np.uint8]]:
        """Return both views as policies are trained on them [H, W, 3]: upright and mirrored."""
        self._ready(True)
        return self._views()

    def close(self) -> None:
        """Free the simulation and OpenGL."""
        if self._simulation is not None:
            self._simulation.close()
        self._simulation = None

    @property
    def _episode(self) -> Start:
        if self._start is None:
            raise ConfigError("this session has no episode; call reset first.")
        return self._start

    @property
    def _instruction(self) -> str:
        start = self._episode
        return start.instruction or self.world.task(str(start.task)).instruction

    def _ready(self, pictures: bool, anew: bool = False) -> LiberoSimulation:
        """Return the simulation, reset to the start if it has not begun it (or ``anew``)."""
        start = self._episode
        simulation = self._simulation
        task = self.world.libero_task(str(start.task))
        if simulation is None or simulation.task != task or (pictures > simulation.can_draw):
            if self._begun and not anew:
                raise ConfigError("pictures must be asked for before the first step of an episode.")
            self.close()
            self._simulation = simulation = LiberoSimulation(task, self.world.config, pictures)
            anew = True
        if anew or not self._begun:
            simulation.reset(start.index, start.seed)
            self._begun = True
        return simulation

    def _step(self, simulation: LiberoSimulation, action: F64, look: bool = False) -> bool:
        """Apply an action; return whether the episode's goal is fulfilled."""
        success = simulation.step(action, look)
        return success if self._goal == simulation.task.goal else simulation.fulfilled(self._goal)

    def _other_goal(self, instruction: str) -> Goal | None:
        """Return the goal of the policy's instruction, if that is another one than the episode's;
        a meaningless instruction has none.
        """
        try:
            goal = self.world.goal(str(self._episode.task), instruction)
        except InstructionError:
            return None
        return None if goal == self._goal else goal

    def _views(self) -> dict[str, NDArray[np.uint8]]:
        assert self._simulation is not None
        return {name: as_trained(view) for name, view in self._simulation.rendered().items()}


def next_actions(policy: Policy, simulation: LiberoSimulation, instruction: str) -> F64:
    """Ask a policy once and return its actions [T, 7], as many as it wants executed.

    This package's policies answer normalised rows of the ``libero`` domain. Others are asked with
    the observation of :class:`~strands_cosmos3.worlds.libero.env.LiberoEnv` and both views side
    by side as ``image``; they return steps with :data:`ACTION_KEYS`.

    Raises:
        ConfigError: The policy is of another embodiment.
        BackendError: A step lacks a key; or inference failed.
    """
    views = (
        {name: as_trained(view) for name, view in simulation.views().items()}
        if policy.requires_images
        else {}
    )
    image = {"image": side_by_side(views)} if views else {}
    if not isinstance(policy, Cosmos3Policy):
        steps = policy.get_actions_sync({**views, **image, "state": simulation.state}, instruction)
        return step_values(steps, ACTION_KEYS, policy)[: policy.actions_per_step]
    observation = _observation(simulation, image, policy.info.needs_privileged)
    exact = libero_caption(instruction, simulation.config.caption)
    chunk = policy.plan(observation, instruction, caption=exact)
    return _actions_of(chunk)[: policy.replan_rows]


def _actions_of(plan: JointTrajectory | ActionChunk) -> F64:
    """Return a chunk as actions [T, 7]."""
    if not isinstance(plan, ActionChunk) or plan.embodiment.name != "libero":
        kind = plan.embodiment.name if isinstance(plan, ActionChunk) else "joint angles"
        raise ConfigError(f"LIBERO executes rows of embodiment 'libero', got {kind}.")
    return decode_rows(controller_rows(plan))


def _observation(
    simulation: LiberoSimulation, images: dict[str, Any], with_state: bool = True
) -> Observation:
    observed = simulation.observed
    now_s = simulation.steps / CONTROL_HZ
    gripper = float(
        np.clip(PANDA_FINGER.to_fraction(np.abs(observed["robot0_gripper_qpos"]).mean()), 0, 1)
    )
    state = privileged(simulation) if with_state else None
    q = observed["robot0_joint_pos"]
    qd = observed["robot0_joint_vel"]
    return Observation(q, gripper, images, qd, now_s, now_s, state)


def _filmed(simulation: LiberoSimulation) -> NDArray[np.uint8]:
    return side_by_side({name: as_seen(view) for name, view in simulation.rendered().items()})
