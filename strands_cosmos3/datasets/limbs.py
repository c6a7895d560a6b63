"""Read the motion of each limb from a recorded episode. Columns belong to a limb by their names,
never by their position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strands_cosmos3.actions.decode import decode_pose_trajectory
from strands_cosmos3.actions.rotations import quaternion_to_matrix, se3
from strands_cosmos3.checks import F64, instance_of
from strands_cosmos3.datasets.reader import RecordedEpisode
from strands_cosmos3.datasets.spec import ACTION, EE_POSE, GRIPPER, POSE_COLUMNS, STATE, limb_prefix
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import DatasetFormatError


@dataclass(frozen=True, eq=False)
class RecordedLimb:
    """The motion of one limb in an episode of N frames.

    Args:
        q_rad: [N, n] measured joint angles.
        gripper: [N] measured open fractions.
        T_base_cosmos: [N, 4, 4] measured poses of the Cosmos frame in the limb's base.
        T_base_commanded: [N + 1, 4, 4] commanded poses of it: the first frame's, and where each row
            leads.
        gripper_commanded: [N] open fractions that the rows command.
    """

    q_rad: F64
    gripper: F64
    T_base_cosmos: F64
    T_base_commanded: F64
    gripper_commanded: F64


def embodiment_of(episode: RecordedEpisode) -> Embodiment:
    """Return the embodiment whose rows an episode records.

    Raises:
        DatasetFormatError: The dataset does not state it, or has other columns.
    """
    episode = instance_of(episode, RecordedEpisode, "episode")
    root, features = episode.dataset.root, episode.dataset.spec.columns
    name = features[ACTION].info.get("embodiment") if ACTION in features else None
    if not isinstance(name, str):
        raise DatasetFormatError(
            f"{root} does not state the embodiment of its {ACTION!r}; record it with rollout "
            "--dataset."
        )
    embodiment = get_embodiment(name)
    columns = embodiment.action_space("midtrain").columns
    if features[ACTION].names != columns or not embodiment.limbs:
        raise DatasetFormatError(
            f"the columns of {ACTION!r} in {root} are not those of {name!r}: {', '.join(columns)}."
        )
    return embodiment


def recorded_limbs(episode: RecordedEpisode) -> dict[str, RecordedLimb]:
    """Return the motion of each limb, by the limb's name, in the order of the embodiment's columns.

    Raises:
        DatasetFormatError: A limb's columns are missing, or the dataset does not state its
            embodiment.
    """
    embodiment = embodiment_of(episode)
    moved = [limb for limb in embodiment.limbs if not limb.is_camera and limb.gripper is not None]
    names, rows = [limb.name for limb in moved], episode[ACTION].astype(np.float64)
    found: dict[str, RecordedLimb] = {}
    for limb in moved:
        prefix = limb_prefix(limb.name, names)
        n = sum(name.startswith(f"{prefix}joint_") for name in _names(episode, STATE))
        state = _columns(
            episode, STATE, [*(f"{prefix}joint_{i}" for i in range(n)), prefix + GRIPPER]
        )
        pose = _columns(episode, EE_POSE, [prefix + name for name in POSE_COLUMNS])
        T = se3(quaternion_to_matrix(pose[:, 3:]), pose[:, :3])
        assert limb.gripper is not None
        commanded = limb.gripper.to_fraction(rows[:, limb.gripper_column])
        found[limb.name] = RecordedLimb(
            state[:, :-1],
            state[:, -1],
            T,
            decode_pose_trajectory(rows[:, limb.pose], T[0]),
            commanded,
        )
    return found


def _names(episode: RecordedEpisode, key: str) -> tuple[str, ...]:
    feature = episode.dataset.spec.columns.get(key)
    return () if feature is None or feature.names is None else feature.names


def _columns(episode: RecordedEpisode, key: str, wanted: list[str]) -> F64:
    """[N, len(wanted)] the named columns of a feature."""
    names = _names(episode, key)
    if missing := [name for name in wanted if name not in names]:
        raise DatasetFormatError(
            f"{key!r} of {episode.dataset.root} has no column {', '.join(missing)}; it has "
            f"{', '.join(names) or 'no names'}."
        )
    return episode[key].astype(np.float64)[:, [names.index(name) for name in wanted]]


__all__ = ["RecordedLimb", "embodiment_of", "recorded_limbs"]
