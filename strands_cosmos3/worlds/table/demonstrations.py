"""Demonstrations: the scripted expert on random tables, sometimes perturbed, with labels of the
undisturbed expert.

An episode is a rollout with real dynamics, one control tick per row at 15 Hz, from a random start
over the table. Some chunks drift at random, so that states beside the expert's path are seen as
well (DART), and some episodes wander about, so that a world model sees what no goal explains. At
every fourth tick the expert, which is stateless, also answers for *each* goal. Everything random
follows from (seed, episode). Rows have the rate of the robot's embodiment; a picture is that of its
only camera, or the composite of its rig.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import radians
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.actions.rotations import se3, so3_exp
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.checks import F64
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.datasets.arm_rows import ArmClip
from strands_cosmos3.datasets.spec import EXPERT
from strands_cosmos3.errors import ControlError, InputError
from strands_cosmos3.observe.views import canvas_composite
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.resources import Closeable
from strands_cosmos3.robots.catalogue import model_file
from strands_cosmos3.robots.limits import limits_of_arm
from strands_cosmos3.robots.model import PHYSICS_HZ, load_model
from strands_cosmos3.sim.dataset import rollout_spec
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation, Request
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.demo_config import DemoConfig, DemoTask
from strands_cosmos3.worlds.table.expert import ScriptedBackend
from strands_cosmos3.worlds.table.grammar import Verb
from strands_cosmos3.worlds.table.hands import gripper_down, length, yaw_of
from strands_cosmos3.worlds.table.phrases import GOALS, plain
from strands_cosmos3.worlds.table.randomized_scene import RandomizedScene
from strands_cosmos3.worlds.table.scene import SEPARATION_M

# where hands start and wander, for cubes around (0.5, 0); shifted to the robot's own workspace
_OVER_TABLE_M = ((0.30, 0.66), (-0.24, 0.24), (0.03, 0.42))
_HORIZONS = (2, 8)  # rows of a chunk that are executed before the next one
_SETTLED_RAD_S = 0.03
_TICKS_SETTLED = 8  # ticks after which a finished goal is replaced, or the episode ends
VALIDATION_SEED = 1_000_000
_CLIPS_PER_EPISODE = 4
CLOSE_M = 0.06
"""Least distance between the centres of two cubes where some are close."""
# heights of starts near a cube; low ones: a policy that came down beside it learns to rise again
_NEAR_M = (0.02, 0.22)
_YAW_SPREAD_RAD = radians(10.0)  # of starts, where the hand keeps home's yaw
_WANDER_M = ((0.32, 0.66), (-0.24, 0.24), (0.06, 0.40))


@dataclass
class EpisodeRecord:
    """One episode of T ticks, L of them with labels."""

    frames: NDArray[np.uint8]  # [T, H, W, 3] canvases
    q_rad: F64  # [T, n] measured
    T_base_cosmos: F64  # [T, 4, 4] measured
    gripper_opening: F64  # [T] measured open fractions
    gripper_command: F64  # [T] open fraction commanded for the row that follows
    goal: NDArray[np.int8]  # [T] index of the goal pursued
    perturbed: NDArray[np.bool_]  # [T] whether the row that follows is perturbed
    label_ticks: NDArray[np.int16]  # [L]
    labels: NDArray[np.float32]  # [L, goals, rows, 10] the expert's rows in the model's scale

    def pictures(self) -> tuple[NDArray[np.uint8], ...]:
        """Return [T, H, W, 3] of each camera of the dataset."""
        return (self.frames,)

    def label_columns(self) -> dict[str, NDArray[Any]]:
        """Return the dataset's columns [L, numbers] of the labelled ticks."""
        return {EXPERT: self.labels.reshape(len(self.labels), -1)}


class PerturbedExpert(Backend):
    """The scripted expert for a goal that the collector sets, whatever the instruction; some of its
    chunks are perturbed.

    Args:
        yaw_rad: Yaw that its hand keeps; None: it turns to the cube's.
        shift_m: Of the robot's workspace [3], from one around (0.5, 0).
        funnel: Whether it descends the lower the closer it is, although it turns.
    """

    info = BackendInfo(name="perturbed expert", needs_privileged=True, requires_images=False)

    def __init__(self, yaw_rad: float | None, shift_m: F64, funnel: bool = False) -> None:
        self.expert = ScriptedBackend(turns=yaw_rad is None, funnel=funnel or yaw_rad is not None)
        self._yaw: dict[str, F64] = {} if yaw_rad is None else {"grasp_yaw_rad": np.array(yaw_rad)}
        self.shift_m = shift_m
        self.rng = np.random.default_rng(0)
        self.goal = 0
        self.share = 0.0
        self.perturbed = False
        self.wandering = False
        self.askew = False

    def infer(self, request: Request) -> ActionChunk:
        """Return the expert's chunk for the goal, perturbed or not, or a random motion."""
        if self.wandering:
            self.perturbed = True
            return self._wander(request)
        chunk = self.expert.plan(self.asked(request, self.goal), askew=self.askew)
        self.perturbed = bool(self.rng.random() < self.share)
        if not self.perturbed:
            return chunk
        return replace(chunk, action=self._perturb(np.array(chunk.action)))

    def asked(self, request: Request, goal: int, state: Mapping[str, F64] | None = None) -> Request:
        """Return a request of the expert for a goal; ``state`` replaces some of the simulator's."""
        privileged = {**(request.privileged or {}), **self._yaw, **(state or {})}
        return replace(request, instruction=plain(goal), privileged=privileged)

    def _perturb(self, rows: F64) -> F64:
        ramp = np.minimum(np.arange(1, len(rows) + 1) / 3, 1.0)[:, None]
        size = self.rng.choice([0.2, 0.5, 0.9])
        rows[:, :3] += ramp * self.rng.normal(0, size, 3)  # 1 is about 1.4 cm per row
        rows[:, 3:9] += ramp * self.rng.normal(0, 0.3 * size, 6)  # 1 is about 2.7 degrees per row
        if self.rng.random() < 0.08:  # sometimes the fingers do the opposite
            rows[:, 9] = -rows[:, 9]
        return np.clip(rows, -3, 3)

    def _wander(self, request: Request) -> ActionChunk:
        """Move towards a random place, at a random speed, turning about a random axis."""
        rng = self.rng
        start = request.T_base_cosmos
        assert start is not None  # the policy has an arm
        place = np.array([rng.uniform(*span) for span in _WANDER_M]) + self.shift_m - start[:3, 3]
        step_m = place / max(length(place), 0.05) * rng.uniform(0.0, 0.013)
        turn_rad = rng.normal(0, np.deg2rad(0.6), 3)
        ramp = np.cumsum(np.minimum(np.arange(1, request.n_rows + 1) / 3, 1.0))
        steps = np.concatenate(([0.0], ramp))[:, None]
        poses = se3(so3_exp(turn_rad * steps) @ start[:3, :3], start[:3, 3] + step_m * steps)
        gripper = np.full(request.n_rows, float(rng.random() < 0.5))
        rows = encode_chunk(poses, gripper, request.embodiment)
        return ActionChunk(
            np.clip(rows, -3, 3), request.action_space, request.embodiment, seed=request.seed
        )


class EpisodeRecorder:
    """Record one episode, tick by tick. ``horizon`` is the number of rows to execute of the next
    chunk.
    """

    record_type: type[EpisodeRecord] = EpisodeRecord

    def __init__(self, collector: DemoCollector, scene: RandomizedScene, rng: np.random.Generator):
        self._collector = collector
        self._scene = scene
        self._rng = rng
        # what the record has of each tick, by name; of the last one, no row was executed yet
        self._ticks: list[dict[str, Any]] = []
        self._labels: dict[int, dict[str, NDArray[Any]]] = {}  # tick -> what the record has of it
        self._settled = 0
        self.horizon = 0

    @property
    def complete(self) -> list[dict[str, Any]]:
        """The ticks whose row was executed."""
        return self._ticks[:-1]

    def tick(self, robot: Robot) -> bool:
        """Record the robot's current state; return whether the episode continues."""
        collector = self._collector
        expert = collector.expert
        if self._ticks:
            limb = robot.scene.only
            ctrl = float(robot.data.ctrl[limb.gripper_actuator])
            command = float(limb.gripper.command.to_fraction(ctrl))
            self._ticks[-1] |= {"gripper_command": command, "perturbed": expert.perturbed}
        observation = robot.observation()
        request = collector.request(observation)
        tick = len(self._ticks)
        picture = self._picture(robot, robot.data)
        self._ticks.append(
            {
                "frames": picture,
                "q_rad": observation.q_rad,
                "T_base_cosmos": request.T_base_cosmos,
                "gripper_opening": float(observation.gripper),
                "goal": np.int8(expert.goal),
            }
        )
        if tick % collector.config.label_every == 0:
            self._labels[tick] = self._label(robot, request)
        return self._choose(observation)

    def _picture(self, robot: Robot, data: mujoco.MjData) -> NDArray[np.uint8]:
        views = [self._scene.renderer.render(data, name) for name in robot.scene.view_names]
        composite = self._collector.composite
        return views[0] if composite is None else composite.padded(views)

    def _label(self, robot: Robot, request: Request) -> dict[str, NDArray[Any]]:
        """Return what the record has of a labelled tick.

        One picture does not show the arm's speed, which would turn the next rows by several
        centimetres. The expert therefore answers as if the arm stood still.
        """
        expert = self._collector.expert
        still = {"tcp_twist": np.zeros(6)}
        answers = [
            expert.expert.infer(expert.asked(request, goal, still)).action
            for goal in self._collector.config.goals
        ]
        return {"labels": np.stack(answers).astype(np.float32)}

    def _choose(self, observation: Observation) -> bool:
        """Draw the next chunk's length and, once the arm has settled, a new goal or the end of
        the episode.
        """
        rng = self._rng
        self.horizon = int(rng.integers(*_HORIZONS, endpoint=True))
        settled = (
            observation.qd_rad_s is not None and np.abs(observation.qd_rad_s).max() < _SETTLED_RAD_S
        )
        self._settled = self._settled + 1 if settled else 0
        if self._settled >= _TICKS_SETTLED:
            if rng.random() < 0.5:
                return False
            self._settled = 0
            self._collector.expert.goal = int(rng.choice(self._collector.config.goals))
        return True

    def record(self) -> EpisodeRecord:
        """Return the record without the last tick, whose row was never executed."""
        ticks = self.complete
        labels = {tick: answers for tick, answers in self._labels.items() if tick < len(ticks)}
        return self.record_type(
            label_ticks=np.array(list(labels), np.int16),
            **_stacked(ticks),
            **_stacked(list(labels.values())),
        )


def _stacked(parts: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


class DemoCollector(Closeable):
    """Record episodes. A context manager that holds OpenGL contexts; use it in the thread that
    made it.
    """

    recorder = EpisodeRecorder

    def __init__(self, config: DemoConfig | None = None):
        self.config = config or DemoConfig()
        self._scenes: dict[tuple[bool, float], RandomizedScene] = {}
        robot = self.config.spec
        embodiment = self.config.embodiment
        limb = robot.limb()
        self.composite = None
        if embodiment.rig is not None:
            self.composite = canvas_composite(
                embodiment.rig, (VIEW_HW,) * len(embodiment.view_names), self.config.tier
            )
        self.steps_per_row = round(PHYSICS_HZ / rollout_spec(embodiment, robot).fps)
        model = load_model(model_file(robot.model[0]))
        self._ik = LimbIK(robot, model=model, limits={limb.name: limits_of_arm(model, robot)})
        self._bridge = self._ik.bridges[limb.name]
        self._home = np.array(limb.home)
        self._T_tcp_frame = np.linalg.inv(limb.T_frame_tool)
        R_home = (self._bridge.ee_pose(self._configuration(self._home)) @ limb.T_frame_tool)[:3, :3]
        yaw_rad = None if self.config.turns else yaw_of(R_home)
        workspace = robot.workspace
        self._start_yaw_rad = np.deg2rad(workspace.grasp_yaw_deg) if yaw_rad is None else yaw_rad
        shift_m = np.array([np.mean(workspace.x_m) - 0.5, np.mean(workspace.y_m), 0.0])
        self.expert = PerturbedExpert(yaw_rad, shift_m, funnel=embodiment.rig is not None)
        self._policy = Cosmos3Policy(embodiment.name, self.config.robot, backend=self.expert)

    def record(self, seed: int, episode: int) -> EpisodeRecord | None:
        """Record one episode, or return None if it ended within two ticks because the arm cannot
        reach its start.
        """
        rng = np.random.default_rng([seed, episode])
        config = self.config
        crowded = bool(rng.random() < config.distractors)
        edge_m = config.edges_m[int(rng.integers(len(config.edges_m)))]
        scene = self._scene(crowded, edge_m)
        scene.randomize(rng, config.visual_randomization)
        layout = scene.robot.scene.sample_layout(rng, self.separation_m(rng))
        scene.robot.reset(q_rad=self._start(rng, layout), layout=layout)
        self.expert.rng = rng
        self.expert.share = config.perturbed
        self.expert.goal = int(rng.choice(config.goals))
        self.expert.wandering = bool(rng.random() < config.wandering)
        self.expert.askew = config.embodiment.rig is not None and bool(
            rng.random() >= config.turning
        )
        self._policy.reset(0)
        recorder = self.recorder(self, scene, rng)
        try:
            self._play(scene.robot, recorder)
        except (ControlError, InputError):  # the start is at the edge of the workspace
            if not recorder.complete:
                return None
        return recorder.record()

    def _scene(self, crowded: bool, edge_m: float) -> RandomizedScene:
        if (crowded, edge_m) not in self._scenes:
            self._scenes[crowded, edge_m] = RandomizedScene.make(edge_m, crowded, self.config.robot)
        return self._scenes[crowded, edge_m]

    def _play(self, robot: Robot, recorder: EpisodeRecorder) -> None:
        """Run until the time is over or the recorder ends the episode; every tick is one row
        long.
        """
        executor = robot.executor
        horizon = 0
        far = GOALS[self.expert.goal][0] is Verb.PLACE and not self.expert.wandering
        recorder.tick(robot)  # the first picture shows the start
        for _ in range(self.config.ticks * (2 if far else 1)):
            spent = (
                executor.state is not ExecutorState.RUNNING
                or executor.steps_to_row(horizon - 1) < self.steps_per_row
            )
            if spent:
                plan = self._policy.plan(robot.observation(), plain(0))
                assert isinstance(plan, JointTrajectory)  # the policy has an arm
                executor.accept(plan)
                horizon = recorder.horizon
            reference = executor.reference  # where the row begins
            robot.execute(executor.advance(self.steps_per_row), reference)
            if not recorder.tick(robot):
                break

    def _start(self, rng: np.random.Generator, layout: Layout) -> F64:
        """Draw the start [n]: near home, or with the hand pointing down anywhere over the table
        or near a cube.
        """
        if rng.random() < self.config.home:
            return self._home + rng.normal(0, 0.03, len(self._home))
        place = np.array([rng.uniform(*span) for span in _OVER_TABLE_M]) + self.expert.shift_m
        if rng.random() < 0.6:  # near a cube, where precision matters
            centre = layout.xy_m[int(rng.integers(len(layout.xy_m)))]
            place = np.array([*(centre + rng.normal(0, 0.03, 2)), rng.uniform(*_NEAR_M)])
        spread_rad = np.pi / 4 if self.config.turns else _YAW_SPREAD_RAD
        yaw = self._start_yaw_rad + rng.uniform(-spread_rad, spread_rad)
        tilt = so3_exp(np.array([*rng.normal(0, 0.06, 2), 0.0]))
        target = se3(tilt @ gripper_down(yaw), place) @ self._T_tcp_frame
        solved = self._bridge.solve(np.stack([target] * 3), self._configuration(self._home))
        return solved.q_rad[-1][self._bridge.q_address] if solved.converged[-1] else self._home

    def _configuration(self, q_rad: F64) -> F64:
        q = self._ik.home.copy()
        q[self._ik.q_address] = q_rad
        return q

    def request(self, observation: Observation) -> Request:
        """Return a policy's request; the caller replaces its instruction."""
        embodiment = self.config.embodiment
        q = self._configuration(observation.q_rad)
        ((limb, columns),) = self._ik.join(embodiment)
        T_base_cosmos = self._ik.forward(q)[limb.name] @ self._ik.tool_frame(limb, columns, q)
        return Request(
            embodiment=embodiment,
            action_space=embodiment.action_space("midtrain"),
            instruction=plain(0),
            n_rows=embodiment.chunk_rows("midtrain"),
            q_rad=observation.q_rad,
            gripper=observation.gripper,
            limb_poses={limb.name: T_base_cosmos},
            privileged=observation.privileged,
        )

    def separation_m(self, rng: np.random.Generator) -> float:
        """Draw the least distance between the centres of two cubes."""
        return CLOSE_M if rng.random() < self.config.close else SEPARATION_M

    def close(self) -> None:
        """Release the OpenGL contexts."""
        for scene in self._scenes.values():
            scene.renderer.close()
        self._scenes.clear()
        self._policy.close()


def expert_clips(
    clips: int,
    rows: int,
    tier: int,
    seed: int = 0,
    tasks: tuple[DemoTask, ...] = DemoConfig.tasks,
    on_episode: Callable[[int, int], None] | None = None,
) -> list[ArmClip]:
    """Record the unperturbed expert on new tables and return some of its chunks, spread evenly.

    Args:
        clips: Number of clips; on average four per episode.
        tier: Resolution tier of the pictures.
        seed: Tables are drawn by ``VALIDATION_SEED + seed``, apart from those of demonstrations.
        tasks: What the expert pursues.
        on_episode: Called with the numbers of episodes recorded and in all.
    """
    config = DemoConfig(
        tasks=tasks,
        tier=tier,
        visual_randomization=0.1,
        perturbed=0.0,
        wandering=0.0,
        distractors=0.0,
        close=0.0,
        edges_m=(0.04,),
    )
    episodes = -(-clips // _CLIPS_PER_EPISODE)
    recorded = 0
    episode = 0
    whole: list[ArmClip] = []
    with DemoCollector(config) as collector:
        while recorded < episodes:
            record = collector.record(VALIDATION_SEED + seed, episode)
            episode += 1
            if record is not None and len(record.goal) > rows + 1:
                whole += _undisturbed_clips(record, rows)
                recorded += 1
                if on_episode is not None:
                    on_episode(recorded, episodes)
    return [whole[i] for i in np.linspace(0, len(whole) - 1, clips).round().astype(int)]


def clip_of(record: Any, tick: int, rows: int) -> ArmClip:
    """Return the clip that begins at a tick of an :class:`EpisodeRecord`, or of arrays like its."""
    goal = int(record.goal[tick])
    frames = slice(tick, tick + rows + 1)
    return ArmClip(
        record.frames[frames],
        record.T_base_cosmos[frames],
        record.gripper_command[tick : tick + rows],
        float(record.gripper_opening[tick]),
        plain(goal),
        plain((goal + 1) % len(GOALS)),
    )


def _undisturbed_clips(record: EpisodeRecord, rows: int) -> list[ArmClip]:
    """Return an episode's clips that pursue one goal and are not perturbed."""
    return [
        clip_of(record, tick, rows)
        for tick in range(len(record.goal) - rows)
        if not record.perturbed[tick : tick + rows].any()
        and (record.goal[tick : tick + rows] == record.goal[tick]).all()
    ]
