"""What the figures and counters on the page mean, in a sentence each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "chunks": "Chunks that the arm took up.",
        "requested": "Inferences that were requested.",
        "rejected": "Chunks that the arm could not follow; the old motion went on.",
        "failed": "Inferences that raised an error and were requested again.",
        "expired": "Chunks that came too late to be used.",
        "idle_ticks": "Control ticks in which the arm had nothing to follow.",
        "deadline_misses": "Times that the arm came to rest because no chunk had arrived.",
        "holds": "Times that the motion ended and the arm held its position.",
        "stops": "Times that the arm was told to stop.",
        "faults": "Times that the arm could follow no further.",
        "restarts": "Chunks that could only be entered from rest.",
        "limited_by_joint_end": "Chunks whose motion was limited by the end of a joint's range.",
        "anchored_on_measurement": "Chunks that departed from the measured angles, because the "
        "arm was off its reference.",
        "abandoned_inferences": "Inferences that were still running when the episode ended.",
        "lead_clipped": "References that could not lead the known delay within range and speed.",
        "reconnects": "Times that the connection to the policy server was made again.",
        "novel_pictures": "Pictures that are unlike those of the policy's training.",
        "collision_stopped": "Chunks that end with the arm held before a collision.",
        "collision_avoided": "Chunks that lead around a collision.",
        "collision_touching": "Chunks that began with two bodies in touch.",
        "collision_unchecked": "Chunks that were not checked for collisions.",
        "backend": "Source of the actions.",
        "time": "Simulated time of this episode.",
        "novelty": "How unlike training the latest chunk's picture is; 1 is the 99.9 % quantile "
        "of training's.",
        "chunk inference": "Wall-clock time of the latest inference and its inverse kinematics.",
    }
)
