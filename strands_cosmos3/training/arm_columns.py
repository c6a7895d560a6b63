"""The motion of one arm in a dataset's episodes, at the rate of the model's windows.

Columns are found by their names, wherever they stand; those without names are in the order that
docs/training.md states. What contradicts that is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.datasets import (
    ACTION,
    EE_POSE,
    STATE,
    Dataset,
    RecordedEpisode,
    camera_key,
)
from strands_cosmos3.datasets.arm_rows import poses_of, raw_rows
from strands_cosmos3.datasets.reader import action_info
from strands_cosmos3.datasets.spec import POSE_COLUMNS
from strands_cosmos3.embodiments import Embodiment
from strands_cosmos3.errors import ConfigError

_GRIPPER = re.compile("grip|grasp|jaw|width", re.IGNORECASE)
_RATE_TOLERANCE = 2e-3  # 29.97 frames a second are twice 15
_REACH_M = 10.0  # no arm's: a pose beyond it is in another unit
_STATED = {"unit": ("m", "rad", "controller"), "gripper_open": (1.0,), "normalized": (False,)}
"""What a feature's info may say of it."""


@dataclass(frozen=True)
class ArmKeys:
    """Names of the features that are read. For rows in a controller's units, only actions and
    cameras are.
    """

    pose: str = EE_POSE  # position [m] and quaternion xyzw of the Cosmos frame in the base
    state: str = STATE  # joint angles [rad] and the measured open fraction
    gripper_command: str = ACTION  # one column is the commanded open fraction
    # the rig's three in its order, else from left to right; empty means what the dataset has
    cameras: tuple[str, ...] = ()

    def resolved(self, dataset: Dataset, embodiment: Embodiment) -> ArmKeys:
        """Return the names with the dataset's cameras; raise ConfigError if a feature is missing
        or has another shape.
        """
        features = dataset.spec.features
        rig = () if embodiment.rig is None else tuple(map(camera_key, embodiment.rig.views))
        found = tuple(dataset.spec.cameras)
        cameras = self.cameras or (rig if rig and set(rig) <= set(found) else found)
        told = embodiment.in_controller_units
        motion = (ACTION,) if told else (self.pose, self.state, self.gripper_command)
        missing = [key for key in (*motion, *cameras) if key not in features]
        if reasons := [dataset.info.foreign[key] for key in missing if key in dataset.info.foreign]:
            raise ConfigError(f"the dataset cannot be used: {reasons[0]}")
        if missing or len(cameras) not in ((1, 2) if told else (1, 3)):
            raise ConfigError(
                f"the dataset has {', '.join(features)}; {', '.join(missing) or 'the cameras'} "
                "cannot be used. Name "
                + ("one or two cameras." if told else
                   "the pose, the state, the gripper's commands, and one "
                   "camera or the rig's three.")
            )  # fmt: skip
        recorded = action_info(dataset).get("embodiment")
        if told and recorded != embodiment.name:
            raise ConfigError(
                f"the dataset's actions are of {recorded!r}, not of {embodiment.name!r}; its info "
                "must name the embodiment."
            )
        if isinstance(recorded, str) and recorded != embodiment.name:
            raise ConfigError(
                f"the dataset was recorded for embodiment {recorded!r} and not for "
                f"{embodiment.name!r}: its poses are of "
                f"another frame. Give --embodiment {recorded}."
            )
        for key in cameras:
            if lacking := dataset.episodes_without(key):
                raise ConfigError(
                    f"episode {lacking[0]} has no film of {key!r}; choose other --camera-keys, or "
                    "leave out such episodes."
                )
        pose = None if told else features[self.pose]
        if pose and pose.shape != (7,) and not set(POSE_COLUMNS) <= set(pose.names or ()):
            raise ConfigError(
                f"{self.pose!r} must hold 7 numbers (position, quaternion xyzw), not "
                f"{pose.shape}: windows are made of episodes of one arm."
            )
        return replace(self, cameras=cameras)


def frames_per_row(dataset: Dataset, embodiment: Embodiment) -> int:
    """Return how many frames of a dataset pass from one row of a window to the next. Raises
    ConfigError unless the dataset's rate is a whole multiple of the embodiment's.
    """
    if embodiment.fps is None:
        return 1
    if len(dataset):
        _ = dataset[0]["timestamp"]  # refuses a rate that the times contradict
    ratio = dataset.fps / embodiment.fps
    whole = max(round(ratio), 1)
    fits = abs(ratio / whole - 1) <= _RATE_TOLERANCE
    if not fits or (whole > 1 and embodiment.in_controller_units):
        multiple = "that rate" if embodiment.in_controller_units else "a whole multiple of it"
        raise ConfigError(
            f"the dataset has {dataset.fps:g} frames a second, and {embodiment.name!r} "
            f"{embodiment.fps:g} rows; record it at {multiple}."
        )
    return whole


class ArmColumns:
    """Reads an arm's motion from episodes; ``keys`` names the features.

    Raises:
        ConfigError: The rate does not fit; or, when a feature is read, its names do not say which
            column is which, or it is of another unit.
    """

    def __init__(self, dataset: Dataset, embodiment: Embodiment, keys: ArmKeys):
        self.every = frames_per_row(dataset, embodiment)
        """Frames from one row to the next."""
        self._dataset = dataset
        self._keys = keys
        self._embodiment = embodiment

    def span(self, first: int, rows: int) -> slice:
        """Return the frames of a window: that of each row, and the one after the last."""
        return slice(first, first + rows * self.every + 1, self.every)

    def rows(self, episode: RecordedEpisode, span: slice) -> F64:
        """Return the ``midtrain`` rows of an episode's frames: a controller's commands, or what was
        executed after each frame but the last.
        """
        if self._embodiment.in_controller_units:
            columns = self._embodiment.action_space("midtrain").columns
            return self._read(episode, ACTION, self._named(ACTION, columns), span)
        key = self._keys.gripper_command
        command = self._read(episode, key, [self._gripper(key)], span)[:, 0]
        return raw_rows(self.poses(episode, span), command)[:-1]

    def poses(self, episode: RecordedEpisode, span: slice) -> F64:
        """Return [n, 4, 4] poses of the Cosmos frame in the base. Raises ConfigError unless they
        are in metres.
        """
        columns = self._named(self._keys.pose, POSE_COLUMNS)
        pose = self._read(episode, self._keys.pose, columns, span)
        if (farthest := np.abs(pose[:, :3]).max(initial=0)) > _REACH_M:
            raise ConfigError(
                f"{self._keys.pose!r} is {farthest:.4g} m from the base in episode "
                f"{episode.index}; positions must be in metres."
            )
        return poses_of(pose)

    def state(self, episode: RecordedEpisode, span: slice) -> F64:
        """Return [n, joints + 1] measured joint angles [rad] and, last, open fractions."""
        opening = self._gripper(self._keys.state)
        joints = [i for i in self._joints() if i != opening]
        return self._read(episode, self._keys.state, [*joints, opening], span)

    def _read(self, episode: RecordedEpisode, key: str, columns: list[int], span: slice) -> F64:
        return np.asarray(episode[key][span], np.float64)[:, columns]

    def _names(self, key: str) -> tuple[str, ...] | None:
        """The names of a feature's columns, or None; ConfigError if it is not as it must be."""
        feature = self._dataset.spec.features[key]
        for name, allowed in _STATED.items():
            said: Any = feature.info.get(name, allowed[0])
            if said not in allowed:
                raise ConfigError(
                    f"{key!r} states {name} {said!r}; it must be {' or '.join(map(repr, allowed))}."
                )
        if key in self._dataset.info.misnamed:
            raise ConfigError(
                f"{key!r} has {feature.shape[0]} columns and another number of names; correct "
                "them in meta/info.json."
            )
        return feature.names

    def _named(self, key: str, wanted: tuple[str, ...]) -> list[int]:
        """The places of the named columns; in order, if a feature of this width has no names."""
        names = self._names(key)
        width = self._dataset.spec.features[key].shape[0]
        if names is None and width == len(wanted):
            return list(range(width))
        if names is None or not set(wanted) <= set(names):
            raise ConfigError(
                f"{key!r} needs the columns {', '.join(wanted)}; it has "
                f"{', '.join(names or (f'{width} without names',))}. Name them in meta/info.json."
            )
        return [names.index(name) for name in wanted]

    def _gripper(self, key: str) -> int:
        """The place of the gripper: the column that is named so, or the last without names."""
        names = self._names(key)
        if names is None:
            return self._dataset.spec.features[key].shape[0] - 1
        found = [i for i, name in enumerate(names) if _GRIPPER.search(name)]
        if len(found) != 1:
            raise ConfigError(
                f"one column of {key!r} must be named as the gripper; it has {', '.join(names)}. "
                "Name it 'gripper' in meta/info.json."
            )
        return found[0]

    def _joints(self) -> list[int]:
        """The places of the state's columns; those whose names differ in one number, by it."""
        names = self._names(self._keys.state) or ()
        joints = [i for i, name in enumerate(names) if not _GRIPPER.search(name)]
        stems = {re.sub(r"\d+", "", names[i]) for i in joints}
        numbers = {i: re.findall(r"\d+", names[i]) for i in joints}
        if len(stems) == 1 and all(len(found) == 1 for found in numbers.values()):
            return sorted(joints, key=lambda i: int(numbers[i][0]))
        return joints or list(range(self._dataset.spec.features[self._keys.state].shape[0]))
