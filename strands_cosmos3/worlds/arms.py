"""Worlds of simulated arms: robots in MuJoCo, run by policies in the closed loop.

A world of this kind (:class:`ArmWorld`) says what stands around a robot and what success is; the
arms, the loop, the films and saved states are here.
"""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import pose_distances
from strands_cosmos3.backends.replay import LimbRecording
from strands_cosmos3.checks import F64, instance_of, positive, seed_number, typed
from strands_cosmos3.control.identification import identify
from strands_cosmos3.control.loop import LoopConfig
from strands_cosmos3.control.stall import OnStall
from strands_cosmos3.errors import (
    ActuatorGuardError,
    ConfigError,
    ControlError,
    InputError,
    UnknownNameError,
)
from strands_cosmos3.options import with_options
from strands_cosmos3.policy import Policy, create_policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.robots.catalogue import (
    aliases,
    get_robot,
    model_file,
    packaged_robots,
    source_of,
)
from strands_cosmos3.robots.model import frame_body, pose_of
from strands_cosmos3.robots.servo import NO_COMPENSATION, Compensation
from strands_cosmos3.robots.spec import Limb, RobotSpec
from strands_cosmos3.sim.episode import EpisodeRunner, physics_steps_per_tick
from strands_cosmos3.sim.film import RolloutListener, VideoRecorder, ViewCameras
from strands_cosmos3.sim.judge import Judge
from strands_cosmos3.sim.plant import ALL_ERRORS, PlantErrors
from strands_cosmos3.sim.policy_planner import planner_for, recording_of
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.sim.simulated_arm import ControlConfig, SimulatedArm, SimulatedArmOptions
from strands_cosmos3.snapshots import restore_parts, snapshot_parts
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation, Rollout
from strands_cosmos3.worlds.world import (
    NOT_VARIED,
    Executed,
    RunOptions,
    Session,
    SessionState,
    Start,
    Task,
    Variation,
    World,
    get_world,
)

if TYPE_CHECKING:
    # needs pyarrow, which other rollouts do not
    from strands_cosmos3.sim.dataset import RolloutRecorder

_SIMULATED = (
    name
    for name, robot in packaged_robots().items()
    if source_of(robot) is None or len(robot.limbs) == 1
)
ROBOTS = tuple(dict.fromkeys(("panda", "franka", *_SIMULATED)))
"""Names of the robots that can be simulated."""
DOMAIN = "droid"
"""Embodiment of a robot that Cosmos 3 has no domain for."""
Progress = Callable[[float, float], None]
_START_M = 0.02
_START_RAD = 0.1
_POLICY_METHODS = (
    "get_actions_sync",
    "set_robot_state_keys",
    "set_control_frequency",
    "reset",
)
_POLICY_PROPERTIES = ("actions_per_step", "requires_images")


class ArmWorld(World):
    """A world of simulated arms. A subclass has tasks, scenes and judges."""

    robots = ROBOTS

    @abstractmethod
    def scene(
        self,
        robot: RobotSpec,
        task: str | None = None,
        variation: Variation = NOT_VARIED,
        arm: str | Path | None = None,
    ) -> Scene:
        """Return a new scene around a robot; ``arm`` is another model of it, see
        :class:`~strands_cosmos3.sim.scene.Scene`.
        """

    @abstractmethod
    def judge(self, task: str, scene: Scene, instruction: str) -> Judge:
        """Return the judge of an episode.

        Raises:
            InstructionError: The instruction cannot be judged.
            ConfigError: The scene does not have what task and instruction are about.
        """

    def scene_key(self, robot: RobotSpec, task: str | None, variation: Variation) -> Hashable:
        """Return what a scene depends on: episodes with equal keys share one."""
        return task, variation

    def arrange(self, robot: Robot, start: Start) -> Layout | None:
        """Change what a variation changes without another scene; return the layout, or None for
        that of the seed.
        """
        return None

    def potential(self, robot: Robot, start: Start) -> float | None:
        """Return how far the task of an episode has come
        (:meth:`~strands_cosmos3.worlds.world.Session.potential`); None is not known.
        """
        return None

    def embodiment(self, robot: str | None = None) -> str:
        """Return the name of the embodiment whose rows drive a robot."""
        return get_robot(robot or self.robots[0]).embodiment or DOMAIN

    def check_run(self, options: RunOptions) -> None:
        """Raise ConfigError for a rate that is no whole number of physics steps, and for a latency
        in real time.
        """
        if options.control_frequency_hz is not None:
            physics_steps_per_tick(options.control_frequency_hz)
        if options.realtime and options.latency:
            raise ConfigError(
                f"latency={options.latency!r} is simulated, and realtime=True measures the real "
                "one; leave one out."
            )

    def identity(self, robot: str | None = None) -> dict[str, Any]:
        """Return the world's name, and of another robot than the first its name and its files."""
        return {"world": self.name, **_robot_identity(robot or self.robots[0], self.robots[0])}

    def open(
        self,
        robot: str | None = None,
        *,
        task: str | None = None,
        arm: SimulatedArmOptions | None = None,
    ) -> ArmSession:
        """Open a session with a simulated arm."""
        return ArmSession(self, robot or self.robots[0], task, arm or SimulatedArmOptions())


@lru_cache(maxsize=32)
def _robot_identity(name: str, default: str) -> dict[str, Any]:
    robot = get_robot(name)
    if robot == get_robot(default):
        return {}
    if not _is_file(name):
        return {"robot": robot.name}
    digest = hashlib.sha256()
    for path in (Path(name), *(model_file(part) for part in robot.model)):
        digest.update(path.read_bytes())
    return {"robot": robot.name, "robot_sha256": digest.hexdigest()}


class Robot(SimulatedArm):
    """A simulated arm that policies can drive.

    ``"franka"`` is the same arm as ``"panda"``; a ``.toml`` file describes another one. ``task`` is
    the one that the scene is built for, by default the robot's first; ``world`` is a name as for
    :func:`~strands_cosmos3.worlds.get_world`, or an :class:`ArmWorld`. Other arguments and errors:
    :class:`~strands_cosmos3.sim.simulated_arm.SimulatedArm`.
    """

    @typed("world")
    def __init__(
        self,
        name: str = "panda",
        control: ControlConfig | None = None,
        scene: Scene | None = None,
        arm_model: str | Path | None = None,
        plant: PlantErrors | None = None,
        task: str | None = None,
        world: str | World = "table",
    ):
        self.name = name
        spec = _simulated_robot(name)
        self.world = arm_world(world)
        scene = self.world.scene(spec, task, arm=arm_model) if scene is None else scene
        if scene.robot.name != spec.name:
            raise ConfigError(
                f"the scene was built around robot {scene.robot.name!r}, not {name!r}; give "
                "a scene of this robot."
            )
        super().__init__(scene, control, plant)

    @typed()
    def reset(self, seed: int = 0, q_rad: F64 | None = None, layout: Layout | None = None) -> None:
        """Place the arm at rest and the resting bodies, see
        :meth:`~strands_cosmos3.sim.simulated_arm.SimulatedArm.reset`.
        """
        self.runner: EpisodeRunner | None = None
        super().reset(seed, q_rad, layout)

    def counters(self) -> dict[str, int]:
        """Events of the current episode by name, from the executor and the control loop."""
        return {**super().counters(), **({} if self.runner is None else self.runner.loop.counters)}

    def identify(self) -> Compensation:
        """Identify this robot's delay, payload and friction from a motion of 6 s from home; the
        robot itself stays as it is.

        The arm moves in free space: it passes through whatever a low hand would hit.

        ConfigError: It has several limbs.
        """
        limb = self.scene.only.limb
        control = replace(self.control, feed_forward="velocity", compensation=NO_COMPENSATION)
        twin = SimulatedArm(self.scene, control, self.plant)
        twin.model = _in_free_space(twin.model, limb)
        return identify(
            twin, twin.executor, self.scene.model, twin.servo.kp, twin.servo.damping, limb
        )

    @typed("policy", "duration", "control_frequency", "recorder", "audience")
    def run_policy(
        self,
        robot_name: str | None = None,
        instruction: str = "",
        policy_provider: str = "cosmos3",
        policy_config: Mapping[str, Any] | None = None,
        duration: float = 15.0,
        control_frequency: float = 50.0,
        video: str | Path | None = None,
        *,
        film_layout: str = "full",
        policy: Policy | None = None,
        task: str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        layout: Layout | None = None,
        latency: float | Callable[[], float] = 0.0,
        realtime: bool = False,
        on_stall: OnStall = "report",
        progress: Progress | None = None,
        on_tick: Callable[[Robot], bool | None] | None = None,
        recorder: RolloutRecorder | None = None,
        audience: RolloutListener | None = None,
    ) -> Rollout:
        """Run one episode in the closed loop.

        Args:
            robot_name: The policy's robot; None is this one.
            instruction: The policy's instruction; empty is the task's default.
            policy_config: Arguments of :class:`Cosmos3Policy`, e.g. ``{"embodiment": "droid",
                "backend": "scripted"}``.
            duration: Longest duration in simulated seconds; an episode ends when its task succeeds,
                or a replay's recording ends.
            control_frequency: Rate of the control loop [Hz]; it must divide the physics' 600 Hz, at
                which motor commands (MuJoCo's ``ctrl``) are written in any case.
            video: A film to write (.mp4).
            film_layout: ``"full"`` or ``"views"``, see :data:`strands_cosmos3.sim.film.LAYOUTS`.
            policy: A policy object instead of provider and config; the caller closes it. Other
                packages' policies are wrapped.
            task: One of the world's tasks, or None for no success criterion.
            seed: Seed of the scene, and of the policy's noise unless ``noise_seed`` is given.
            layout: Positions of what lies on the table, instead of random ones.
            latency: Simulated duration of an inference [s], or a callable that returns the next
                one's: the arm follows its current chunk meanwhile. 0 pauses the simulation for each
                inference. Not together with ``realtime``.
            realtime: Run no faster than wall-clock time, and accept each chunk when it arrives.
            on_stall: What follows where the arm stays on the spot while its chunks repeat:
                ``"report"`` counts it, ``"stop"`` ends the episode as a fault, ``"retreat"`` leads
                back along the executed path and aside, at most three times, and then stops.
            progress: Called with simulated and total seconds.
            on_tick: Called after every tick with this robot, e.g. by a viewer; True ends the
                episode (``interrupted``).
            audience: Receives each chunk's plan and predicted video.

        Returns:
            The commanded and the achieved motion, and the outcome. Ctrl-C brings the arm to rest
            first (outcome ``interrupted``); a second one stops at once.

        Raises:
            ConfigError, UnknownNameError, InputError: Bad arguments; nothing moved and no file was
                made.
        """
        robot_name = self.name if robot_name is None else robot_name
        if _simulated_robot(robot_name).name != self.scene.robot.name:
            raise ConfigError(
                f"robot_name {robot_name!r} is another robot than this one, {self.name!r}; leave "
                "it out."
            )
        _require_members(recorder, "recorder", ("recording",))
        _require_members(audience, "audience", ("show_plan", "show_prediction"))
        options = RunOptions(
            duration_s=duration,
            control_frequency_hz=control_frequency,
            latency=latency,
            realtime=realtime,
            on_stall=on_stall,
            noise_seed=noise_seed,
            video=video,
            film_layout=film_layout,
            recorder=recorder,
            audience=audience,
            progress=progress,
        )
        start = Start(task, seed, instruction=instruction)
        tick = None if on_tick is None else partial(on_tick, self)
        self._judges(start, options)  # errors before a policy is made
        if policy is not None:
            return self.run_episode(policy, start, options, layout=layout, on_tick=tick)
        arguments = {} if policy_config is None else policy_config
        config = self._policy_config(robot_name, instance_of(arguments, Mapping, "policy_config"))
        with create_policy(policy_provider, **config) as owned:
            return self.run_episode(owned, start, options, layout=layout, on_tick=tick)

    def _policy_config(self, robot_name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        embodiment = self.scene.robot.embodiment
        domain = {} if embodiment is None else {"embodiment": embodiment}
        config = {"robot": robot_name, **domain, **arguments}
        backend = config.get("backend")
        if isinstance(backend, str) and backend == "scripted":
            config["backend"] = self.world.required_expert(robot_name)
        options = PolicyOptions.of(config.get("options", {}))
        if options.arm.limits is None:
            options = with_options(options, {"limits": self.limits})
        return {**config, "options": options}

    def _judges(self, start: Start, options: RunOptions) -> tuple[str, Judge | None, Judge | None]:
        """Check the options; return the goal's instruction, its judge, and that of the policy's own
        instruction if it is another goal.
        """
        self.world.check_run(options)
        if start.task is None:
            return start.instruction, None, None
        goal = self._goal(start)
        instruction = options.instruction
        differs = bool(instruction) and not self.world.same_goal(start.task, goal, instruction)
        followed = self.world.judge(start.task, self.scene, instruction) if differs else None
        return goal, self.judge_of(start), followed

    def judge_of(self, start: Start) -> Judge | None:
        """Return a new judge of an episode; None where nothing is judged."""
        if start.task is None:
            return None
        return self.world.judge(start.task, self.scene, self._goal(start))

    def _goal(self, start: Start) -> str:
        """Return the goal's instruction; UnknownNameError: there is no such task."""
        task = self.world.task(str(start.task), self.name)
        return start.instruction or task.instruction

    def run_episode(
        self,
        policy: Policy,
        start: Start,
        options: RunOptions,
        *,
        layout: Layout | None = None,
        on_tick: Callable[[], bool | None] | None = None,
        state: dict[str, Any] | None = None,
    ) -> Rollout:
        """Reset the arm and run a policy; with ``state``, a runner's snapshot, go on from there.
        Errors: as :meth:`run_policy`.
        """
        _require_members(policy, "policy", _POLICY_METHODS, _POLICY_PROPERTIES)
        goal, judge, followed = self._judges(start, options)
        instruction = options.instruction or goal
        hz = options.control_frequency_hz
        hz = self.world.control_frequency_hz if hz is None else hz
        duration_s = options.duration_s
        if duration_s is None:
            task = None if start.task is None else self.world.task(start.task, self.name)
            duration_s = Task.horizon_s if task is None else task.horizon_s
        n_ticks = max(1, round(positive(duration_s, "duration") * hz))
        recording = recording_of(policy)
        if state is None:
            if recording is None:
                self.reset(start.seed, layout=layout)
            else:
                self._reset_to(recording, start.seed, layout)
            noise = options.noise_seed
            policy.reset(start.seed if noise is None else seed_number(noise, "noise_seed"))
        with VideoRecorder(
            self.scene,
            options.video,
            hz,
            instruction,
            options.film_layout,
            audience=options.audience,
        ) as film:
            planner = planner_for(self, policy, instruction, film, hz)
            latency_s = None if options.realtime else options.latency
            self.runner = runner = EpisodeRunner(
                self,
                planner,
                judge,
                film,
                LoopConfig(
                    hz,
                    planner.replan_rows,
                    latency_s,
                    following_m=self.control.following_m,
                    following_rad=self.control.following_rad,
                    on_stall=options.on_stall,
                ),
                n_ticks,
                realtime=options.realtime,
                on_tick=on_tick,
                followed=followed,
                recording=recording,
                progress=options.progress,
                identify=options.identify,
            )
            if state is not None:
                runner.restore(state)
            if options.recorder is None:
                rollout = runner.run(start.seed, start.task)
            else:
                with options.recorder.recording(self, film.observe, instruction) as save:
                    rollout = save(runner.run(start.seed, start.task))
        return replace(rollout, video=film.film)

    def _reset_to(self, recording: LimbRecording, seed: int, layout: Layout | None) -> None:
        """Place the arm where a recording begins, joined with the robot's limbs by name. Raise
        ConfigError unless the hands then stand where it says; else it is another robot's, or
        damaged.
        """
        scene = self.scene
        data = self.data
        by_limb = recording.of_limbs(scene.robot.limbs)
        q_rad = np.concatenate([motion.q_start_rad for motion in by_limb.values()])
        self.reset(seed, q_rad, layout)
        for name, limb in scene.limbs.items():
            tool = recording.tool_frame(name)
            frame = limb.limb.frame_called(tool.parent)
            site = mujoco.mj_name2id(scene.model, mujoco.mjtObj.mjOBJ_SITE, frame)
            T_world_parent = pose_of(data.body(frame) if site < 0 else data.site(frame))
            T_world_recorded = limb.T_world_base @ by_limb[name].T_base_cosmos[0]
            T_world_cosmos = T_world_parent @ tool.T_parent_cosmos
            away_m, turned_rad = pose_distances(T_world_recorded, T_world_cosmos)
            if away_m > _START_M or turned_rad > _START_RAD:
                raise ConfigError(
                    f"at the recording's first joint angles the {name} of {scene.robot.name!r} is "
                    f"{away_m * 1e3:.0f} mm and {np.rad2deg(turned_rad):.0f} degrees from the "
                    "recorded pose; replay it on the robot that it is of."
                )


class ArmSession(Session):
    """A session with a simulated arm, in the scenes that its episodes need.

    Attributes:
        robot: The arm of the present episode.
        start: What it began from.
    """

    can_restore = True

    def __init__(self, world: ArmWorld, robot: str, task: str | None, arm: SimulatedArmOptions):
        self.world = world
        self._name = robot
        self._arm = arm
        self._spec = _simulated_robot(robot)
        self._control = arm.control
        self._robots: dict[Hashable, Robot] = {}
        self.robot = self._robot_for(task, NOT_VARIED)
        if arm.compensate != "none":
            plant = arm.plant or PlantErrors()
            known = arm.compensate == "known"
            compensation = plant.compensation() if known else self.robot.identify()
            self._control = replace(arm.control, compensation=compensation)
            self._robots.clear()
            self.robot = self._robot_for(task, NOT_VARIED, self.robot.scene)
        self._cameras = ViewCameras(self.robot.scene)
        self.start = Start(task)
        self._layout: Layout | None = None
        self._judge: Judge | None = None
        self._run: dict[str, Any] | None = None  # a restored state of a run
        self._running = False

    def _robot_for(
        self, task: str | None, variation: Variation, scene: Scene | None = None
    ) -> Robot:
        key = self.world.scene_key(self._spec, task, variation)
        if key not in self._robots:
            scene = scene or self.world.scene(self._spec, task, variation, self._arm.model)
            self._robots[key] = Robot(
                self._name, self._control, scene, plant=self._arm.plant, world=self.world
            )
        return self._robots[key]

    def reset(self, start: Start) -> None:
        """Begin an episode; errors as of :class:`~strands_cosmos3.worlds.world.Session`."""
        self._arrange(start)
        self.robot.reset(start.seed, layout=self._layout)
        self._run = None

    def _arrange(self, start: Start) -> None:
        if start.task is not None:
            self.world.task(start.task, self._name)
        robot = self._robot_for(start.task, start.variation)
        if robot is not self.robot:
            self._cameras.close()
            self._cameras = ViewCameras(robot.scene)
        self.robot = robot
        self.start = start
        self._layout = self.world.arrange(robot, start)
        self._judge = robot.judge_of(start)

    def policy_arguments(self, instruction: str = "") -> dict[str, Any]:
        """Return embodiment and robot. Its limits are the option ``limits``, see
        :meth:`policy_options`.
        """
        return {"embodiment": self.world.embodiment(self._name), "robot": self._name}

    def policy_options(self) -> dict[str, Any]:
        """Return the robot's limits."""
        return {"limits": self.robot.limits}

    def run(self, policy: Policy, options: RunOptions | None = None) -> Rollout:
        """Run a policy to the end of the episode; errors as of
        :class:`~strands_cosmos3.worlds.world.Session`.
        """
        return self._run_episode(policy, options, None)

    def resume(self, policy: Policy, options: RunOptions | None = None) -> Rollout:
        """Continue the run that the restored state was saved in, with the same options.

        Raises:
            ConfigError: The state was not saved in a run.
        """
        if self._run is None:
            raise ConfigError("no state of a run was restored; save one in a run's on_tick.")
        return self._run_episode(policy, options, self._run)

    def _run_episode(
        self, policy: Policy, options: RunOptions | None, state: dict[str, Any] | None
    ) -> Rollout:
        options = options or RunOptions()
        tick = None if options.on_tick is None else partial(options.on_tick, self)
        self._running = True
        try:
            return self.robot.run_episode(
                policy, self.start, options, layout=self._layout, on_tick=tick, state=state
            )
        finally:
            self._running = False
            self._run = None

    def observation(self, images: bool = True) -> Observation:
        """Return the observation now, anchored at the reference."""
        observation = self.robot.observation(self.draw() if images else None)
        return observation.anchored(self.robot.executor.reference.q_rad)

    def execute(
        self, plan: JointTrajectory | ActionChunk, rows: int | None = None, ticks: int = 1
    ) -> Executed:
        """Execute rows of a plan; errors as of :class:`~strands_cosmos3.worlds.world.Session`."""
        if not isinstance(plan, JointTrajectory):
            raise ConfigError("an arm follows joint angles; make the policy with robot=.")
        robot = self.robot
        executor = self.robot.executor
        from_s = self.robot.now_s()
        tick = physics_steps_per_tick(self.world.control_frequency_hz)
        motion = executor.accept(plan)
        ahead = len(motion.nominal_s) - 1
        last = min(rows or len(plan.t_s), ahead) - 1
        begun = 0
        touched: list[bool] = []
        try:
            while True:
                reference = executor.reference
                left = executor.steps_to_row(last) // tick
                block = executor.advance(tick * max(min(ticks, left), 1))
                begun = executor.rows_begun + len(plan.t_s) - ahead  # a row due now is reached
                robot.execute(block, reference)
                touched.append(_touches_fixed(robot))
                success = self._judge is not None and self._judge.succeeded(robot.data)
                if success or executor.steps_to_row(last) < tick:
                    time_s = robot.now_s() - from_s
                    part = sum(touched) / len(touched)
                    return Executed(success, time_s, rows=begun, touched=part)
        except ControlError as error:
            executor.fault(followed=not isinstance(error, ActuatorGuardError))
            return Executed(False, robot.now_s() - from_s, str(error), begun)

    def potential(self) -> float | None:
        """Return how far the task has come, as the world says."""
        return None if self.start.task is None else self.world.potential(self.robot, self.start)

    def plain_views(self) -> Mapping[str, NDArray[np.uint8]] | None:
        """Return the views without the episode's variation, unless that is another scene."""
        plain = replace(self.start, variation=self.world.variation())
        keys = {
            self.world.scene_key(self._spec, start.task, start.variation)
            for start in (plain, self.start)
        }
        if len(keys) > 1:
            return None
        try:
            self._move_cameras(plain)
            return self.draw()
        finally:
            self._move_cameras(self.start)

    def _move_cameras(self, start: Start) -> None:
        self.world.arrange(self.robot, start)
        mujoco.mj_camlight(self.robot.model, self.robot.data)

    def save(self, policy: Policy | None = None) -> SessionState:
        """Return the complete state. In a run's ``on_tick``, that of the run and its policy."""
        if self._running and self.robot.runner is not None:
            return SessionState({"start": self.start, "run": self.robot.runner.snapshot()})
        return SessionState({"start": self.start, **snapshot_parts(self._parts(policy))})

    def restore(self, state: SessionState, policy: Policy | None = None) -> None:
        """Return to a saved state, exact to the bit; one that was saved in a run goes on with
        :meth:`resume`.
        """
        values = state.values
        self._arrange(values["start"])
        self._run = values.get("run")
        if self._run is None:
            restore_parts(self._parts(policy), values)
        else:
            self.robot.restore(self._run["arm"])

    def _parts(self, policy: Policy | None) -> dict[str, Any]:
        return {"arm": self.robot, "judge": self._judge, "policy": policy}

    def draw(self) -> dict[str, NDArray[np.uint8]]:
        """Return the views of the robot's rig, [180, 320, 3] each."""
        return self._cameras.render(self.robot.data)

    def close(self) -> None:
        """Free OpenGL."""
        self._cameras.close()


def arm_world(world: str | World) -> ArmWorld:
    """Return a world of simulated arms by name; ConfigError if it is of another kind."""
    chosen = get_world(world)
    if not isinstance(chosen, ArmWorld):
        raise ConfigError(f"world {chosen.name!r} has no simulated arms; choose another.")
    return chosen


def _touches_fixed(robot: Robot) -> bool:
    """Whether a limb touches what cannot move, such as a table."""
    model = robot.model
    bodies = model.geom_bodyid[robot.data.contact.geom]
    limbs = np.isin(model.body_rootid[bodies], list(robot.scene.robot_roots))
    fixed = model.body_weldid[bodies] == 0
    return bool((limbs[:, ::-1] & fixed).any())


def _in_free_space(model: mujoco.MjModel, limb: Limb) -> mujoco.MjModel:
    """A copy of a scene's model in which the arm passes through everything."""
    free = copy.copy(model)
    arm = free.body_rootid[free.geom_bodyid] == free.body_rootid[frame_body(free, limb)]
    free.geom_contype[arm] = free.geom_conaffinity[arm] = 0
    return free


def _simulated_robot(name: str) -> RobotSpec:
    known = isinstance(name, str) and (_is_file(name) or aliases().get(name, name) in ROBOTS)
    if not known:
        raise UnknownNameError("simulated robot", name, ROBOTS)
    return get_robot(name)


def _require_members(
    value: object, name: str, methods: Iterable[str], properties: Iterable[str] = ()
) -> None:
    """Check an object that other packages may make."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    missing += [member for member in properties if not hasattr(value, member)]
    if missing and value is not None:
        raise InputError(f"{name} must have {', '.join(missing)}, got {type(value).__name__}.")


def _is_file(name: str) -> bool:
    return name.lower().endswith(".toml")


__all__ = [
    "ALL_ERRORS",
    "ROBOTS",
    "ArmSession",
    "ArmWorld",
    "Compensation",
    "ControlConfig",
    "PlantErrors",
    "Robot",
    "SimulatedArmOptions",
]
