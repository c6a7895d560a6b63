"""Demonstrations: the scripted expert on random tables, disturbed now and then, with the clean expert's labels.

An episode is a rollout with real dynamics, one control tick for each row at 15 Hz, started anywhere over the table. Most
chunks are the expert's own; some are bent by a random drift, so that states beside its path are seen too (DART). What is
recorded at a tick is the picture, the measured pose and opening, what the gripper was told, and whether the chunk under way
is bent. Every second tick the expert, which keeps no memory, is also asked what it would do for *each* goal from that very
state: labels that no disturbance touches, six for each picture.

Everything random follows from (seed, episode): any worker may record any episode, and gives the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import se3, so3_exp
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.backends.scripted import ScriptedBackend
from strands_cosmos3.checks import F64
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.control.targets import tool_frame_in_ee
from strands_cosmos3.embodiments import DROID_RIG, PANDA_TENDON, get_embodiment
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.model import PHYSICS_HZ, load_model
from strands_cosmos3.robots.panda import HOME_Q, T_hand_tcp
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.sim.scene import DEFAULT_CUBES, Cube, Layout, Scene
from strands_cosmos3.training.fast_composite import QuickComposite
from strands_cosmos3.training.phrases import GOALS, plain
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation, Request

ROW_HZ = 15.0
_STEPS_A_ROW = round(PHYSICS_HZ / ROW_HZ)
DISTRACTORS = (Cube("other_yellow", (0.90, 0.78, 0.12)), Cube("other_violet", (0.50, 0.18, 0.62)))
_OVER_TABLE_M = ((0.30, 0.66), (-0.24, 0.24), (0.03, 0.42))
_HORIZONS = (2, 8)  # rows of a chunk that are executed before the expert is asked again
_SETTLED_RAD_S = 0.03
_TICKS_SETTLED = 8  # ticks after which a finished goal is exchanged for another, or the episode ends


@dataclass(frozen=True)
class DemoConfig:
    """What demonstrations look like.

    Args:
        tier: Resolution tier of the pictures.
        ticks: Longest episode, in rows at 15 Hz.
        label_every: Ticks between labels.
        bend: Share of chunks that are bent.
        home: Share of episodes that start at home, give or take; the others start anywhere over the table.
        distractors: Share of episodes with further cubes of other colours on the table.
        look: How far colours, light and cameras stray; 0 is the nominal look, 1 a cautious amount.
    """

    tier: int = 128
    ticks: int = 56
    label_every: int = 2
    bend: float = 0.3
    home: float = 0.35
    distractors: float = 0.15
    look: float = 1.0


@dataclass
class EpisodeRecord:
    """One episode, tick by tick.

    Attributes:
        frames: [T, H, W, 3] uint8 canvases.
        q_rad: [T, 7] measured angles. T_base_cosmos: [T, 4, 4] measured poses.
        opening: [T] measured open fractions.
        told: [T] open fraction that the gripper was told at the tick, for the row that follows.
        goal: [T] index of the goal pursued.
        bent: [T] whether the row that follows is bent.
        label_ticks: [L] ticks that have labels. labels: [L, goals, rows, 10] the expert's rows in the model's scale.
    """

    frames: NDArray[np.uint8]
    q_rad: F64
    T_base_cosmos: F64
    opening: F64
    told: F64
    goal: NDArray[np.int8]
    bent: NDArray[np.bool_]
    label_ticks: NDArray[np.int16]
    labels: NDArray[np.float32]


class BentExpert(Backend):
    """The expert, pursuing a goal of its own choice whatever it is told, with some of its chunks bent."""

    name = "bent expert"
    needs_privileged = True
    requires_images = False

    def __init__(self) -> None:
        self.expert = ScriptedBackend()
        self.rng = np.random.default_rng(0)
        self.goal = 0
        self.share = 0.0
        self.bent = False

    def infer(self, request: Request) -> ActionChunk:
        """The expert's chunk for the goal, bent or not."""
        chunk = self.expert.infer(replace(request, instruction=plain(self.goal)))
        self.bent = bool(self.rng.random() < self.share)
        return replace(chunk, action=self._bend(np.array(chunk.action))) if self.bent else chunk

    def _bend(self, rows: F64) -> F64:
        ramp = np.minimum(np.arange(1, len(rows) + 1) / 3, 1.0)[:, None]
        size = self.rng.choice([0.2, 0.5, 0.9])
        rows[:, :3] += ramp * self.rng.normal(0, size, 3)  # z of 1 is about 1.4 cm a row
        rows[:, 3:9] += ramp * self.rng.normal(0, 0.3 * size, 6)  # and about 2.7 degrees
        if self.rng.random() < 0.08:  # now and then the fingers do the opposite
            rows[:, 9] = -rows[:, 9]
        return np.clip(rows, -3, 3)

    def reset(self, seed: int | None = None) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class _Stage:
    """A scene with what draws it."""

    robot: Robot
    renderer: Renderer
    nominal: dict[str, Any] = field(default_factory=dict)


class DemoCollector:
    """Records episodes. It holds OpenGL contexts and belongs to the thread that made it; use it as a context manager.

    Args:
        config: What demonstrations look like.
    """

    def __init__(self, config: DemoConfig | None = None):
        self.config = config or DemoConfig()
        self._stages: dict[bool, _Stage] = {}
        self._expert = BentExpert()
        self._policy = Cosmos3Policy("droid", "panda", backend=self._expert)
        self._bridge = MinkIKBridge(load_model())
        self._droid = get_embodiment("droid")
        self._composite = QuickComposite(DROID_RIG, VIEW_HW, self.config.tier)

    def record(self, seed: int, episode: int) -> EpisodeRecord | None:
        """Record one episode.

        Args:
            seed: Of the whole collection.
            episode: Its number.

        Returns:
            The record, or None where the drawn start made it shorter than two ticks (a start that the arm cannot take).
        """
        rng = np.random.default_rng([seed, episode])
        crowded = bool(rng.random() < self.config.distractors)
        stage = self._stages.get(crowded) or self._stages.setdefault(crowded, _make_stage(crowded))
        randomize_visuals(stage, rng, self.config.look)
        layout = stage.robot.scene.sample_layout(rng)
        stage.robot.reset(q_rad=self._start(rng, layout), layout=layout)
        self._expert.rng, self._expert.share = rng, self.config.bend
        self._expert.goal = int(rng.integers(len(GOALS)))
        self._policy.reset(0)
        taker = EpisodeRecorder(self, stage, rng)
        try:
            self._play(stage.robot, taker)
        except Cosmos3Error:  # a start at the edge of what the arm can do
            if len(taker.frames) < 2:
                return None
        return taker.record()

    def _play(self, robot: Robot, taker: EpisodeRecorder) -> None:
        """Tick by tick until the time is over or there is nothing more to show; every tick is one row long."""
        executor, horizon = robot.executor, 0
        taker.tick(robot)  # the first picture is of the start, before anything moved
        for _ in range(self.config.ticks):
            spent = executor.state is not ExecutorState.RUNNING or executor.steps_to_row(horizon - 1) < _STEPS_A_ROW
            if spent:
                plan = self._policy.plan(robot.observation(), plain(0))
                assert isinstance(plan, JointTrajectory)  # the policy has an arm
                executor.accept(plan)
                horizon = taker.horizon
            before = executor.reference
            robot.execute(executor.advance(_STEPS_A_ROW), before)
            if not taker.tick(robot):
                break

    def _start(self, rng: np.random.Generator, layout: Layout) -> F64:
        """[7] where the arm starts: near home, or with the hand pointing down anywhere over the table or near a cube."""
        if rng.random() < self.config.home:
            return HOME_Q + rng.normal(0, 0.03, 7)
        place = np.array([rng.uniform(*span) for span in _OVER_TABLE_M])
        if rng.random() < 0.6:  # near a cube, where precision matters
            centre = layout.xy_m[int(rng.integers(len(layout.xy_m)))]
            place = np.array([*(centre + rng.normal(0, 0.03, 2)), rng.uniform(0.05, 0.22)])
        yaw = np.pi / 4 + rng.uniform(-np.pi / 4, np.pi / 4)
        tilt = so3_exp(np.array([*rng.normal(0, 0.06, 2), 0.0]))
        down = np.array([[np.cos(yaw), np.sin(yaw), 0.0], [np.sin(yaw), -np.cos(yaw), 0.0], [0.0, 0.0, -1.0]])
        target = se3(tilt @ down, place) @ np.linalg.inv(T_hand_tcp)
        solved = self._bridge.solve(np.stack([target] * 3), self._configuration(HOME_Q))
        return solved.q_rad[-1][self._bridge.q_address] if solved.converged[-1] else HOME_Q

    def _configuration(self, q_rad: F64) -> F64:
        q = np.zeros(self._bridge.model.nq)
        q[self._bridge.q_address] = q_rad
        return q

    def _question(self, observation: Observation) -> Request:
        """What a policy would be asked in a state, for any goal."""
        q = self._configuration(observation.q_rad)
        return Request(
            embodiment=self._droid,
            action_space=self._droid.action_space("midtrain"),
            instruction=plain(0),
            n_rows=self._droid.chunk_rows("midtrain"),
            q_rad=observation.q_rad,
            gripper=observation.gripper,
            T_base_cosmos=self._bridge.ee_pose(q) @ tool_frame_in_ee(self._droid, self._bridge, q),
            privileged=observation.privileged,
        )

    def close(self) -> None:
        """Give the OpenGL contexts back."""
        for stage in self._stages.values():
            stage.renderer.close()
        self._stages.clear()
        self._policy.close()

    def __enter__(self) -> DemoCollector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EpisodeRecorder:
    """Takes one episode's notes, tick by tick."""

    def __init__(self, studio: DemoCollector, stage: _Stage, rng: np.random.Generator):
        self._studio, self._stage, self._rng = studio, stage, rng
        self.frames: list[NDArray[np.uint8]] = []
        self._poses: list[F64] = []
        self._q_rad: list[F64] = []
        self._opening: list[float] = []
        self._goal: list[int] = []
        self._under_way: list[tuple[float, bool]] = []  # of the row that led to each tick
        self._labels: list[F64] = []
        self._label_ticks: list[int] = []
        self._done = 0
        self.horizon = 0

    def tick(self, robot: Robot) -> bool:
        """Note the state that the robot is in now; says whether to go on. (The chunk under way was chosen before.)"""
        studio, expert = self._studio, self._studio._expert
        if self.frames:
            told = float(PANDA_TENDON.to_fraction(float(robot.data.ctrl[robot.scene.gripper_actuator])))
            self._under_way.append((told, expert.bent))
        observation = robot.observation()
        request = studio._question(observation)
        assert request.T_base_cosmos is not None
        views = {name: self._stage.renderer.render(robot.data, name) for name in robot.scene.view_names}
        self.frames.append(studio._composite(views))
        self._poses.append(request.T_base_cosmos)
        self._q_rad.append(observation.q_rad)
        self._opening.append(observation.gripper)
        self._goal.append(expert.goal)
        if (len(self.frames) - 1) % studio.config.label_every == 0:
            self._label_ticks.append(len(self.frames) - 1)
            answers = [expert.expert.infer(replace(request, instruction=plain(goal))).action for goal in range(len(GOALS))]
            self._labels.append(np.stack(answers))
        return self._choose(observation)

    def _choose(self, observation: Observation) -> bool:
        """How long the next chunk lasts, and whether the goal is exchanged; says whether to go on."""
        studio, rng = self._studio, self._rng
        self.horizon = int(rng.integers(*_HORIZONS, endpoint=True))
        settled = observation.qd_rad_s is not None and np.abs(observation.qd_rad_s).max() < _SETTLED_RAD_S
        self._done = self._done + 1 if settled else 0
        if self._done >= _TICKS_SETTLED:
            if rng.random() < 0.5:
                return False
            self._done = 0
            studio._expert.goal = int(rng.integers(len(GOALS)))
        return True

    def record(self) -> EpisodeRecord:
        """What was noted, without the last tick's row that never came."""
        n = len(self._under_way)
        labelled = [i for i, tick in enumerate(self._label_ticks) if tick < n]
        return EpisodeRecord(
            np.stack(self.frames[:n]),
            np.stack(self._q_rad[:n]),
            np.stack(self._poses[:n]),
            np.array(self._opening[:n]),
            np.array([told for told, _ in self._under_way]),
            np.array(self._goal[:n], np.int8),
            np.array([bent for _, bent in self._under_way]),
            np.array([self._label_ticks[i] for i in labelled], np.int16),
            np.stack([self._labels[i] for i in labelled]).astype(np.float32),
        )


def _make_stage(crowded: bool) -> _Stage:
    robot = Robot(scene=Scene((*DEFAULT_CUBES, *DISTRACTORS) if crowded else DEFAULT_CUBES))
    model: Any = robot.scene.model
    kept = ("mat_rgba", "light_diffuse", "light_dir", "cam_pos", "cam_quat", "cam_fovy")
    return _Stage(robot, Renderer(robot.scene.model, *VIEW_HW), {name: np.array(getattr(model, name)) for name in kept})


def randomize_visuals(stage: _Stage, rng: np.random.Generator, look: float) -> None:
    """Colours, light and cameras for one episode, around the nominal ones."""
    model: Any = stage.robot.scene.model
    nominal = stage.nominal
    for name, value in nominal.items():
        getattr(model, name)[:] = value
    tint = rng.normal(0, 0.05 * look, nominal["mat_rgba"][:, :3].shape) + rng.normal(0, 0.03 * look)
    model.mat_rgba[:, :3] = np.clip(nominal["mat_rgba"][:, :3] * (1 + tint), 0, 1)
    model.light_diffuse[:] = nominal["light_diffuse"] * np.clip(1 + rng.normal(0, 0.2 * look), 0.4, 1.6)
    model.light_dir[:] = nominal["light_dir"] + rng.normal(0, 0.1 * look, nominal["light_dir"].shape)
    model.cam_pos[:] = nominal["cam_pos"] + look * rng.normal(0, 0.004, nominal["cam_pos"].shape)
    quat = nominal["cam_quat"] + look * rng.normal(0, 0.004, nominal["cam_quat"].shape)
    model.cam_quat[:] = quat / np.linalg.norm(quat, axis=1, keepdims=True)
    model.cam_fovy[:] = nominal["cam_fovy"] + look * rng.normal(0, 0.4, nominal["cam_fovy"].shape)
