"""Playback of recorded episodes on the page, from a dataset or from a rollout's npz file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import mujoco
import numpy as np

from strands_cosmos3.actions.rotations import se3_inverse
from strands_cosmos3.backends.replay import commanded_motion
from strands_cosmos3.checks import F64, finite_array, of_grippers
from strands_cosmos3.datasets.reader import Dataset, RecordedEpisode, recorded_limbs
from strands_cosmos3.datasets.spec import IMAGES
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.catalogue import PANDA, recorded_robot
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.sim.film import RolloutTrace, tool_path
from strands_cosmos3.sim.pacing import Pacer
from strands_cosmos3.sim.scene import Scene
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.view.page import LivePage, Status, limb_gauges

_NPZ_FPS = 15.0
_AHEAD_ROWS = 16


@dataclass(frozen=True, eq=False)
class Recorded:
    """An episode to play back.

    Args:
        q_rad: [N, n] measured angles of all limbs' joints.
        gripper: [N] measured open fractions, or those [N, G] of several grippers.
        tcp_commanded_m: By limb: [N, 3] commanded path of its tool centre point in the world.
        fps: Rows a second.
        label: The instruction or file name.
        episode: Source of the camera frames, or None.
    """

    q_rad: F64
    gripper: F64
    tcp_commanded_m: Mapping[str, F64]
    fps: float
    label: str
    episode: RecordedEpisode | None = None


def from_episode(episode: RecordedEpisode, scene: Scene) -> Recorded:
    """Return an episode of a dataset.

    Raises:
        ConfigError, DatasetFormatError: It is not of the scene's robot, in this project's schema.
    """
    measured = recorded_limbs(episode)
    recording = commanded_motion(episode)
    paths: dict[str, F64] = {}
    for name, motion in recording.of_limbs(scene.robot.limbs).items():
        limb = scene.limbs[name]
        T_world_tool = (
            limb.T_world_base
            @ motion.T_base_cosmos[:-1]
            @ se3_inverse(recording.tool_frame(name).T_parent_cosmos)
            @ limb.limb.T_frame_tool
        )
        paths[name] = T_world_tool[:, :3, 3]
    # the only limb may have another name
    in_order = [measured[name] for name in scene.limbs] if len(measured) > 1 else measured.values()
    q_rad = np.concatenate([motion.q_rad for motion in in_order], axis=1)
    gripper = of_grippers(np.stack([motion.gripper for motion in in_order], axis=1))
    return Recorded(q_rad, gripper, paths, episode.dataset.fps, episode.task, episode)


def from_npz(path: Path, scene: Scene) -> Recorded:
    """Return the episode in a file of ``rollout --npz``.

    Raises:
        InputError: The file is not such a recording.
        ConfigError: It is of a robot with another number of joints or grippers than the scene's.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = ("t_s", "q_achieved_rad", "gripper_achieved", "q_commanded_rad")
            t_s, q, gripper, commanded = (np.asarray(arrays[name]) for name in names)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise InputError(
            f"{path} is not a recording of a rollout ({error}); `rollout --npz` writes one."
        ) from None
    n = len(scene.robot.joints)
    grippers = len(scene.limbs)
    if q.ndim == 2 and q.shape[1] != n:
        raise ConfigError(
            f"{path} is of a robot with {q.shape[1]} joints, and {scene.robot.name!r} has {n}; "
            "name its robot (--robot)."
        )
    t_s = finite_array(t_s, "t_s", (None,))
    at_s = np.append(np.arange(t_s[0], t_s[-1], 1 / _NPZ_FPS), t_s[-1])
    rows = np.clip(np.searchsorted(t_s, at_s), 0, len(t_s) - 1)
    q = finite_array(q, "q_achieved_rad", (len(t_s), n))[rows]
    commanded = finite_array(commanded, "q_commanded_rad", (len(t_s), n))[rows]
    each = () if grippers == 1 else (grippers,)
    openings = finite_array(gripper, "gripper_achieved", (len(t_s), *each))[rows]
    plan = JointTrajectory(commanded, np.arange(1, len(rows) + 1) / _NPZ_FPS)
    paths = {name: tool_path(plan, limb) for name, limb in scene.limbs.items()}
    return Recorded(q, openings, paths, _NPZ_FPS, path.name)


def robot_of(path: Path, robot: RobotSpec) -> RobotSpec:
    """Return the robot of a recording: ``robot``, but if that is the Panda, the known one that a
    dataset names.
    """
    if path.suffix == ".npz" or robot.name != PANDA.name:
        return robot
    with Dataset(path) as dataset:
        return recorded_robot(dataset.spec.robot_type) or robot


def recorded_episodes(path: Path, scene: Scene, first: int = 0) -> Iterator[Recorded]:
    """Yield the episodes of a dataset of the scene's robot from number ``first`` on, or that of an
    npz file.

    Raises:
        ConfigError, InputError, DatasetError: There is nothing to play back.
    """
    if path.suffix == ".npz":
        yield from_npz(path, scene)
        return
    with Dataset(path) as dataset:
        if not 0 <= first < len(dataset):
            raise ConfigError(f"{path} has the episodes 0 to {len(dataset) - 1}, not {first}.")
        for i in range(first, len(dataset)):
            yield from_episode(dataset[i], scene)


def play(
    page: LivePage, scene: Scene, recorded: Recorded, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Play back an episode in real time. Resting bodies are hidden, because their poses are not
    recorded.

    Args:
        page, scene, recorded: The page, its scene and the episode.
        stopped: Ends the playback when it returns True.
    """
    data = mujoco.MjData(scene.model)
    for name in scene.bodies:
        page.hide(name)
    page.world(None, "a recording holds no predicted video")
    trace = RolloutTrace(scene, len(recorded.q_rad))
    episode = recorded.episode
    keys = [] if episode is None else episode.dataset.spec.cameras
    cameras = {key: key.removeprefix(IMAGES) for key in keys if key.startswith(IMAGES)}
    pacer = Pacer(0.0)
    for k, (q, opening) in enumerate(zip(recorded.q_rad, recorded.gripper, strict=True)):
        if stopped():
            return
        data.qpos[scene.arm_qpos] = q
        for limb, fraction in zip(scene.limbs.values(), np.atleast_1d(opening), strict=True):
            data.qpos[limb.finger_qpos] = limb.gripper.opening.from_fraction(fraction)
        mujoco.mj_kinematics(scene.model, data)
        page.pose(data)
        ahead = [path[k : k + _AHEAD_ROWS] for path in recorded.tcp_commanded_m.values()]
        page.path(ahead, trace.extend_trails(data))
        page.limbs(limb_gauges(scene, q, opening))
        frame = f"frame {k + 1} of {len(recorded.q_rad)}"
        page.status(Status("PLAYBACK", recorded.label, "recorded", k / recorded.fps, frame))
        if episode is not None and cameras:
            page.cameras({name: episode.frames(key, [k])[0] for key, name in cameras.items()})
        pacer.wait((k + 1) / recorded.fps)
