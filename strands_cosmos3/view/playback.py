"""Playback of recorded episodes on the page, from a dataset or from a rollout's npz file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import mujoco
import numpy as np

from strands_cosmos3.actions.decode import decode_pose_trajectory
from strands_cosmos3.actions.rotations import quaternion_to_matrix, se3, se3_inverse
from strands_cosmos3.checks import F64, finite_array
from strands_cosmos3.datasets.reader import Dataset, RecordedEpisode
from strands_cosmos3.datasets.spec import ACTION, EE_POSE, IMAGES, STATE
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.panda import T_hand_tcp, dh_forward
from strands_cosmos3.sim.pacing import Pacer
from strands_cosmos3.sim.scene import Scene
from strands_cosmos3.view.stage import Stage, Status

_NPZ_FPS = 15.0
_AHEAD_ROWS = 16


@dataclass(frozen=True, eq=False)
class Recorded:
    """An episode to play back.

    Args:
        q_rad: [N, 7] measured angles.
        gripper: [N] measured open fractions.
        tcp_commanded_m: [N, 3] commanded path of the tool centre point.
        fps: Rows a second.
        label: The instruction or file name.
        episode: Source of the camera frames, or None.
    """

    q_rad: F64
    gripper: F64
    tcp_commanded_m: F64
    fps: float
    label: str
    episode: RecordedEpisode | None = None


def from_episode(episode: RecordedEpisode) -> Recorded:
    """Return an episode of a dataset.

    Raises:
        ConfigError: It is not of a seven-joint arm in this project's schema.
    """
    features = episode.dataset.spec.columns
    wanted = {STATE: 8, EE_POSE: 7, ACTION: 10}
    if any(key not in features or features[key].shape != (width,) for key, width in wanted.items()):
        raise ConfigError(f"{episode.dataset.root} holds no episodes of a Panda; the columns needed are {', '.join(wanted)}.")
    pose, rows = episode[EE_POSE].astype(np.float64), episode[ACTION].astype(np.float64)
    start = se3(quaternion_to_matrix(pose[0, 3:]), pose[0, :3])
    T_cosmos_tcp = se3_inverse(get_embodiment("droid").tool_frame.T_parent_cosmos) @ T_hand_tcp
    commanded = (decode_pose_trajectory(rows[:, :9], start)[:-1] @ T_cosmos_tcp)[:, :3, 3]
    state = episode[STATE].astype(np.float64)
    return Recorded(state[:, :7], state[:, 7], commanded, episode.dataset.fps, episode.task, episode)


def from_npz(path: Path) -> Recorded:
    """Return the episode in a file of ``rollout --npz``.

    Raises:
        InputError: The file is not such a recording.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = ("t_s", "q_achieved_rad", "gripper_achieved", "q_commanded_rad")
            t_s, q, gripper, commanded = (np.asarray(arrays[name]) for name in names)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is not a recording of a rollout ({error}); `rollout --npz` writes one.") from None
    t_s = finite_array(t_s, "t_s", (None,))
    at_s = np.append(np.arange(t_s[0], t_s[-1], 1 / _NPZ_FPS), t_s[-1])
    rows = np.clip(np.searchsorted(t_s, at_s), 0, len(t_s) - 1)
    q = finite_array(q, "q_achieved_rad", (len(t_s), 7))[rows]
    tcp = (dh_forward(finite_array(commanded, "q_commanded_rad", (len(t_s), 7))[rows]) @ T_hand_tcp)[:, :3, 3]
    return Recorded(q, finite_array(gripper, "gripper_achieved", (len(t_s),))[rows], tcp, _NPZ_FPS, path.name)


def recorded_episodes(path: Path, first: int = 0) -> Iterator[Recorded]:
    """Yield the episodes of a dataset from number ``first`` on, or that of an npz file.

    Raises:
        ConfigError, InputError, DatasetError: There is nothing to play back.
    """
    if path.suffix == ".npz":
        yield from_npz(path)
        return
    with Dataset(path) as dataset:
        if not 0 <= first < len(dataset):
            raise ConfigError(f"{path} has the episodes 0 to {len(dataset) - 1}, not {first}.")
        for i in range(first, len(dataset)):
            yield from_episode(dataset[i])


def play(stage: Stage, scene: Scene, recorded: Recorded, stopped: Callable[[], bool] = lambda: False) -> None:
    """Play back an episode in real time. The cubes are hidden, because their poses are not recorded.

    Args:
        stage, scene, recorded: The page, its scene and the episode.
        stopped: Ends the playback when it returns True.
    """
    data = mujoco.MjData(scene.model)
    for name in scene.cubes:
        stage.hide(name)
    stage.world(None, "a recording holds no predicted video")
    trail: list[Any] = []
    pacer = Pacer(0.0)
    for k, (q, opening) in enumerate(zip(recorded.q_rad, recorded.gripper, strict=True)):
        if stopped():
            return
        data.qpos[scene.arm_qpos] = q
        data.qpos[scene.finger_qpos] = scene.gripper.opening.from_fraction(opening)
        mujoco.mj_kinematics(scene.model, data)
        trail.append(data.site_xpos[scene.tcp_site].copy())
        stage.pose(data)
        stage.path(recorded.tcp_commanded_m[k : k + _AHEAD_ROWS], np.array(trail))
        stage.status(
            Status("PLAYBACK", recorded.label, "recorded", k / recorded.fps, f"frame {k + 1} of {len(recorded.q_rad)}")
        )
        if recorded.episode is not None:
            views = [key for key in recorded.episode.dataset.spec.cameras if key.startswith(IMAGES)]
            if views:
                stage.cameras({key.removeprefix(IMAGES): recorded.episode.frames(key, [k])[0] for key in views})
        pacer.wait((k + 1) / recorded.fps)
