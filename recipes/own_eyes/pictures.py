"""``python -m recipes.own_eyes.pictures``: pictures of the table with what the simulator knows of
them, in shards that are made once each.

``posed`` pictures are made without physics: the hand anywhere, a cube in its fingers in some, some
cubes missing. ``played`` ones are from demonstrations, partly perturbed, with the first picture of
the episode and the goals that are achieved, as the judges of the tasks say.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image

from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.resources import write_whole
from strands_cosmos3.robots.model import pose_of
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.demo_config import DemoConfig, DemoTask
from strands_cosmos3.worlds.table.demonstrations import DemoCollector, EpisodeRecorder
from strands_cosmos3.worlds.table.grammar import COLOURS, parse_instruction
from strands_cosmos3.worlds.table.phrases import GOALS, plain
from strands_cosmos3.worlds.table.randomized_scene import RandomizedScene
from strands_cosmos3.worlds.table.tasks import TableJudge, cube_state, get_task

CUBES = tuple(f"cube_{colour}" for colour in COLOURS)
NOTHING = -1
_ALL_PRESENT, _PRESENT = 0.5, 0.65
_HELD, _EMPTY, _PARTLY = 0.35, 0.15, 0.1  # fractions of posed pictures
_LOOKS_KEPT = 8  # posed pictures of one table, light and cameras
_DEEPEST_M = 0.004  # that the posed hand may be in what it touches
_SLIP_M = 0.006  # of a held cube in the fingers
_TICKS_BETWEEN = 4  # pictures of an episode
_KERNEL = Image.Resampling.BICUBIC


@dataclass(frozen=True)
class PictureOptions:
    """Options of the command."""

    out: Path
    kind: Literal["posed", "played"] = "posed"
    shards: int = 10
    first: int = 0
    pictures: int = 1000  # of a posed shard
    episodes: int = 25  # of a played shard
    seed: int = 0
    looks: float = 0.6  # largest scale of random looks
    tasks: tuple[DemoTask, ...] = DemoConfig.tasks  # that are played


def sees(scene: RandomizedScene, collector: DemoCollector) -> NDArray[np.uint8]:
    """Return what the policy sees of a scene's present state, on the whole canvas [H, W, 3] as a
    reasoner's processor scales a composite to it.
    """
    robot = scene.robot
    views = [scene.renderer.render(robot.data, name) for name in robot.scene.view_names]
    composite = collector.composite
    assert composite is not None
    height, width = composite.canvas_hw
    return np.asarray(Image.fromarray(composite(views)).resize((width, height), _KERNEL))


def known(robot: Robot, present: NDArray[np.bool_], held: int) -> dict[str, Any]:
    """Return what the simulator knows: which cubes there are [3], the nearest one and the held one
    (or :data:`NOTHING`), all cubes' places from the hand [3, 3], and the hand's.
    """
    data = robot.data
    tcp = pose_of(data.site(robot.scene.only.tcp_site))
    cubes = np.array([data.body(name).xpos for name in CUBES]) - tcp[:3, 3]
    away = np.where(present, np.linalg.norm(cubes, axis=1), np.inf)
    margins = np.sort(away)
    return {
        "present": present.copy(),
        "nearest": int(away.argmin()) if present.any() else NOTHING,
        "margin_m": float(min(margins[1] - margins[0], 1.0)) if present.sum() > 1 else 1.0,
        "held": held,
        "cubes_m": np.where(present[:, None], cubes, 0.0).astype(np.float32),
        "tcp_m": tcp[:3, 3].astype(np.float32),
        "opening": np.float32(robot.joint_state()[2]),
    }


class PosedTables:
    """Poses tables and draws them."""

    def __init__(self, collector: DemoCollector, rng: np.random.Generator, looks: float):
        self._collector = collector
        self._rng = rng
        self._looks = looks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield pictures with what is known of them, for ever."""
        rng = self._rng
        config = self._collector.config
        while True:
            crowded = bool(rng.random() < config.distractors)
            edge_m = config.edges_m[int(rng.integers(len(config.edges_m)))]
            scene = self._collector._scene(crowded, edge_m)
            scale = 0.0 if rng.random() < 0.2 else rng.uniform(0, self._looks)
            scene.randomize(rng, scale)
            for _ in range(_LOOKS_KEPT):
                yield self.posed(scene, edge_m)

    def posed(self, scene: RandomizedScene, edge_m: float) -> dict[str, Any]:
        """Pose the hand and the cubes at random, and draw them."""
        rng = self._rng
        while True:
            present = np.ones(3, bool)
            if rng.random() >= _ALL_PRESENT:
                present = rng.random(3) < _PRESENT
            held = self._pose(scene, edge_m, present)
            if _is_clear(scene.robot):
                break
        model: Any = scene.robot.scene.model
        for name, shown in zip(CUBES, present, strict=True):
            model.mat_rgba[model.mat(name).id, 3] = float(shown)
        facts = known(scene.robot, present, held)
        return {"picture": sees(scene, self._collector), **facts}

    def _pose(self, scene: RandomizedScene, edge_m: float, present: NDArray[np.bool_]) -> int:
        rng = self._rng
        robot = scene.robot
        table = robot.scene
        layout = table.sample_layout(rng, self._collector.separation_m(rng))
        start = Layout(CUBES, layout.xy_m[:3], layout.yaw_rad[:3])
        q_rad = self._collector._start(rng, start)
        table.reset(robot.data, layout, q_rad)
        data = robot.data
        kind = rng.random()
        limb = table.only
        held = NOTHING
        opening_m = limb.gripper.opening.open_value
        if kind < _HELD and present.any():
            held = int(rng.choice(np.flatnonzero(present)))
            self._hold(robot, CUBES[held])
            opening_m = edge_m / 2
        elif kind < _HELD + _EMPTY:
            opening_m = rng.uniform(0, 0.003)
        elif kind < _HELD + _EMPTY + _PARTLY:
            opening_m = rng.uniform(0.003, opening_m)
        data.qpos[limb.finger_qpos] = opening_m
        for name, shown in zip(CUBES, present, strict=True):
            if not shown:
                at = table.bodies[name].qpos
                data.qpos[at : at + 3] = (-3.0, 3.0, -3.0)
        mujoco.mj_forward(table.model, data)
        return held

    def _hold(self, robot: Robot, cube: str) -> None:
        """Put a cube between the fingers, a little aside and turned about the axis between them."""
        rng = self._rng
        data = robot.data
        limb = robot.scene.only
        T_world_tcp = pose_of(data.site(limb.tcp_site))
        between = limb.opening_direction(data, 0)
        aside = rng.normal(0, _SLIP_M, 3)
        aside -= between * (between @ aside)
        turn = so3_exp(between * rng.normal(0, 0.15))
        quaternion = np.zeros(4)
        axes = np.stack([between, np.cross(T_world_tcp[:3, 2], between), T_world_tcp[:3, 2]], 1)
        mujoco.mju_mat2Quat(quaternion, (turn @ axes).ravel())
        at = robot.scene.bodies[cube].qpos
        data.qpos[at : at + 7] = (*(T_world_tcp[:3, 3] + aside), *quaternion)


def _is_clear(robot: Robot) -> bool:
    """Whether nothing is deep in something else, except fingers in the cube that they hold."""
    return bool((robot.data.contact.dist > -_DEEPEST_M).all())


class PlayedRecorder(EpisodeRecorder):
    """Records some ticks of a demonstration, with the goals that are achieved at each."""

    def __init__(self, collector: DemoCollector, scene: RandomizedScene, rng: np.random.Generator):
        super().__init__(collector, scene, rng)
        self.seen: list[dict[str, Any]] = []
        self._tick = -1
        table: Any = scene.robot.scene
        self._judges = [
            TableJudge(get_task(str(verb)), table, parse_instruction(plain(goal)))
            for goal, (verb, _) in enumerate(GOALS)
        ]

    def tick(self, robot: Robot) -> bool:
        """Ask all judges; draw every few ticks, and when a goal was achieved just now."""
        self._tick += 1
        achieved = np.array([judge.succeeded(robot.data) for judge in self._judges])
        before = self.seen[-1]["achieved"] if self.seen else achieved
        if self._tick % _TICKS_BETWEEN == 0 or (achieved & ~before).any():
            scene: Any = robot.scene
            gripped = [cube_state(scene, robot.data, cube).gripped for cube in CUBES]
            held = int(np.argmax(gripped)) if any(gripped) else NOTHING
            self.seen.append(
                {
                    "picture": sees(self._scene, self._collector),
                    **known(robot, np.ones(3, bool), held),
                    "achieved": achieved,
                    "goal": np.int8(self._collector.expert.goal),
                    "time_s": np.float32(robot.now_s()),
                }
            )
        return self._choose(robot.observation())

    def record(self) -> Any:
        """Return the pictures."""
        return self.seen

    @property
    def complete(self) -> list[dict[str, Any]]:
        """The pictures."""
        return self.seen


class PlayedCollector(DemoCollector):
    """Plays demonstrations."""

    recorder = PlayedRecorder


def config_of(looks: float) -> DemoConfig:
    """Return what tables and demonstrations are drawn from."""
    return DemoConfig(
        ticks=130, perturbed=0.2, wandering=0.1, home=0.5, visual_randomization=looks / 2
    )


def posed_shard(seed: int, pictures: int, looks: float) -> dict[str, NDArray[Any]]:
    """Return arrays of posed pictures."""
    rng = np.random.default_rng([seed, 1])
    with DemoCollector(config_of(looks)) as collector:
        drawn = iter(PosedTables(collector, rng, looks))
        return stacked([next(drawn) for _ in range(pictures)])


def played_shard(
    seed: int, episodes: int, looks: float, tasks: tuple[DemoTask, ...] = DemoConfig.tasks
) -> dict[str, NDArray[Any]]:
    """Return arrays of episodes' pictures; ``start`` is the index of each episode's first one."""
    seen: list[dict[str, Any]] = []
    with PlayedCollector(replace(config_of(looks), tasks=tasks)) as collector:
        for episode in range(episodes):
            record: Any = collector.record(seed, episode)
            first = len(seen)
            seen += [{**each, "start": first} for each in record or []]
    return stacked(seen)


def stacked(rows: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Return one array for each field."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def main(options: PictureOptions) -> None:
    """Make the shards that are missing."""
    options.out.mkdir(parents=True, exist_ok=True)
    for shard in range(options.first, options.first + options.shards):
        path = options.out / f"{options.kind}-{options.seed}-{shard:04d}.npz"
        if path.exists():
            continue
        cpu_s = time.process_time()
        number = 1_000_000 * (options.seed + 1) + 1000 * shard + (options.kind == "played")
        if options.kind == "posed":
            arrays = posed_shard(number, options.pictures, options.looks)
        else:
            arrays = played_shard(number, options.episodes, options.looks, options.tasks)
        write_whole(path, lambda unfinished, arrays=arrays: _save(unfinished, arrays))
        cpu_s = time.process_time() - cpu_s
        print(f"{path.name}: {len(arrays['picture'])} pictures, {cpu_s:.0f} CPU s", flush=True)


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(PictureOptions)))
