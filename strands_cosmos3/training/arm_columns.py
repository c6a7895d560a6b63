"""The motion of one arm in a dataset's episodes, at the rate of the model's windows.

Columns are found by their names, wherever they stand; those without names are in the order that
docs/training.md states. What contradicts that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from strands_cosmos3.datasets.reader import (
    action_info,
    column_names,
    named_columns,
    require_meaning,
    require_openings,
)
from strands_cosmos3.datasets.spec import GRIPPER, POSE_COLUMNS, POSE_MEANING, STATE_MEANING
from strands_cosmos3.embodiments import MODEL_GRIPPER, Embodiment
from strands_cosmos3.errors import ConfigError

_GRIPPER = re.compile("grip|grasp|jaw|width", re.IGNORECASE)
_RATE_TOLERANCE = 2e-3  # 29.97 frames a second are twice 15
_REACH_M = 10.0  # no arm's: a pose beyond it is in another unit


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
        or the dataset is of another embodiment, and DatasetFormatError if an episode lacks a film.
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
        recorded = action_info(dataset).get("embodiment") or (None if told else embodiment.name)
        if recorded != embodiment.name:
            raise ConfigError(
                f"the dataset was recorded for embodiment {recorded!r} and not for "
                f"{embodiment.name!r}: its poses are of another frame. Give --embodiment "
                f"{recorded or 'NAME'}, or name the embodiment in the info of {ACTION!r}."
            )
        dataset.require_films(cameras)
        return replace(self, cameras=cameras)


def frames_per_row(dataset: Dataset, embodiment: Embodiment) -> int:
    """Return how many frames of a dataset pass from one row of a window to the next. Raises
    ConfigError unless the dataset's rate is a whole multiple of the embodiment's.
    """
    if embodiment.fps is None:
        return 1
    dataset.require_rate()
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
        ConfigError: The rate does not fit; or, when a feature is read, no column or several are
            named as the gripper, or it is of another unit.
        DatasetFormatError: A feature that is read lacks columns.
    """

    def __init__(self, dataset: Dataset, embodiment: Embodiment, keys: ArmKeys):
        self.every = frames_per_row(dataset, embodiment)
        """Frames from one row to the next."""
        self._dataset = dataset
        self._keys = keys
        self._embodiment = embodiment
        self._sound: set[str] = set()  # features whose grippers were looked at

    def span(self, first: int, rows: int) -> slice:
        """Return the frames of a window: that of each row, and the one after the last."""
        return slice(first, first + rows * self.every + 1, self.every)

    def rows(self, episode: RecordedEpisode, span: slice) -> F64:
        """Return the ``midtrain`` rows of an episode's frames: a controller's commands, or what was
        executed after each frame but the last.
        """
        if self._embodiment.in_controller_units:
            columns = self._embodiment.action_space("midtrain").columns
            rows = named_columns(episode, ACTION, columns, columns)[span]
            self._require_openings(ACTION, column_names(self._dataset, ACTION, columns), GRIPPER)
            return rows
        poses = self.poses(episode, span)
        command = self._with_gripper(episode, self._keys.gripper_command, span)[:, -1]
        return raw_rows(poses, command)[:-1]

    def poses(self, episode: RecordedEpisode, span: slice) -> F64:
        """Return [n, 4, 4] poses of the Cosmos frame in the base. Raises ConfigError unless they
        are in metres, and DatasetFormatError if they are stated to be of another frame.
        """
        require_meaning(self._dataset, self._keys.pose, POSE_MEANING)
        pose = named_columns(episode, self._keys.pose, POSE_COLUMNS, POSE_COLUMNS)[span]
        if (farthest := np.abs(pose[:, :3]).max(initial=0)) > _REACH_M:
            raise ConfigError(
                f"{self._keys.pose!r} is {farthest:.4g} m from the base in episode "
                f"{episode.index}; positions must be in metres."
            )
        return poses_of(pose)

    def state(self, episode: RecordedEpisode, span: slice) -> F64:
        """Return [n, joints + 1] measured joint angles [rad] and, last, open fractions."""
        require_meaning(self._dataset, self._keys.state, STATE_MEANING)
        return self._with_gripper(episode, self._keys.state, span)

    def _with_gripper(self, episode: RecordedEpisode, key: str, span: slice) -> F64:
        """The columns of a feature, the gripper last; others whose names differ in numbers alone,
        by these.
        """
        others = self._dataset.spec.features[key].shape[0] - 1
        unnamed = (*(f"joint_{i}" for i in range(others)), GRIPPER)
        names = column_names(self._dataset, key, unnamed)
        grippers = [name for name in names if _GRIPPER.search(name)]
        if len(grippers) != 1:
            raise ConfigError(
                f"one column of {key!r} must be named as the gripper; it has "
                f"{', '.join(names) or 'no names that fit'}. "
                "Name it 'gripper' in meta/info.json."
            )
        self._require_openings(key, names, grippers[0])
        joints = [name for name in names if name not in grippers]
        if len({re.sub(r"\d+", "", name) for name in joints}) == 1:
            joints.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
        return named_columns(episode, key, [*joints, *grippers], unnamed)[span]

    def _require_openings(self, key: str, names: Sequence[str], gripper: str) -> None:
        """Look at a gripper's column in all episodes, once: one may be too short for its unit."""
        if key in self._sound:
            return
        self._sound.add(key)
        column = self._dataset.column(key)
        values = column.reshape(len(column), len(names))[:, names.index(gripper)]
        commanded = key == self._keys.gripper_command and self._embodiment.gripper
        unit = commanded or MODEL_GRIPPER
        require_openings(values, unit, f"{gripper!r} of {key!r}", whole=True)
