"""Write, merge and read LeRobot v3 datasets with numpy, pyarrow and PyAV; no torch."""

from strands_cosmos3.extras import needed_by

with needed_by("strands_cosmos3.datasets"):
    from strands_cosmos3.datasets.merge import merge_datasets
    from strands_cosmos3.datasets.reader import (
        Dataset,
        RecordedEpisode,
        RecordedLimb,
        recorded_limbs,
    )
    from strands_cosmos3.datasets.spec import (
        ACTION,
        EE_POSE,
        STATE,
        DatasetSpec,
        Feature,
        arm_spec,
        camera_key,
    )
    from strands_cosmos3.datasets.video import VideoConfig
    from strands_cosmos3.datasets.writer import DatasetWriter, EpisodeWriter

__all__ = [
    "ACTION",
    "EE_POSE",
    "STATE",
    "Dataset",
    "DatasetSpec",
    "DatasetWriter",
    "EpisodeWriter",
    "Feature",
    "RecordedEpisode",
    "RecordedLimb",
    "VideoConfig",
    "arm_spec",
    "camera_key",
    "merge_datasets",
    "recorded_limbs",
]
