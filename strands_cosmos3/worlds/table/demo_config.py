"""Options of the table's demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.options import option
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.worlds.table.phrases import GOALS

DemoTask = Literal["reach", "pick", "place"]


@dataclass(frozen=True)
class DemoConfig:
    """How to record demonstrations."""

    robot: str = "panda"
    """The robot: one that `rollout` simulates, or the .toml file of one (docs/post_training.md).
    Pictures, rows and rate are those of its embodiment, the table is that of rollouts.
    """
    tasks: tuple[DemoTask, ...] = ("reach", "pick", "place")
    """Tasks that the expert pursues and answers for."""
    hand_yaw: Literal["cube", "home"] = "cube"
    """Yaw of the expert's hand over a cube: the cube's; or home's, for reaching with cameras
    that do not show the cube's yaw. The hand then also descends gradually, without a stop above
    the cube.
    """
    ticks: int = 60
    """Rows of the longest episode, twice that for the bin, which is far. Many short episodes show
    more layouts.
    """
    perturbed: float = 0.4
    """Fraction of chunks that are perturbed."""
    wandering: float = 0.15
    """Fraction of episodes that move at random."""
    distractors: float = 0.25
    """Fraction of episodes with additional cubes of other colours and sizes."""
    close: float = 0.35
    """Fraction of episodes in which cubes may be 6 cm apart."""
    visual_randomization: float = 1.0
    """Scale of the random changes of table, colours, light and cameras; 0 is the nominal scene."""
    tier: int = 128
    """Resolution tier of the composites."""
    label_every: int = option(4, hidden=True)
    """Ticks between labels."""
    home: float = option(0.35, hidden=True)
    """Fraction of episodes that start near home; the others start anywhere over the table."""
    edges_m: tuple[float, ...] = option((0.030, 0.036, 0.043, 0.050), hidden=True)
    """Edges of the cubes, one for each episode."""
    turning: float = option(0.3, hidden=True)
    """For the DROID rig, whose composite does not show a cube's yaw: fraction of episodes in which
    the expert turns to it.
    """

    @property
    def spec(self) -> RobotSpec:
        """The robot."""
        return get_robot(self.robot)

    @property
    def embodiment(self) -> Embodiment:
        """Embodiment of the rows."""
        return get_embodiment(self.spec.embodiment or "droid")

    @property
    def cameras(self) -> tuple[str, ...]:
        """Cameras of the dataset: the composite, or the only view of an embodiment without a
        rig.
        """
        return ("composite",) if self.embodiment.rig else self.embodiment.view_names[:1]

    @property
    def goals(self) -> tuple[int, ...]:
        """Goals that the expert pursues and answers for, by their index."""
        return tuple(index for index, (verb, _) in enumerate(GOALS) if verb in self.tasks)

    @property
    def turns(self) -> bool:
        """Whether the expert's hand turns to a cube's yaw."""
        return self.hand_yaw == "cube"
