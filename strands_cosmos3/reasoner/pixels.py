"""Films as the patches that a reasoner's vision encoder reads.

transformers' video processors need torchvision, so a film is here a row of pictures of one size for
its image processor, which does without; two of them share a patch where the encoder merges two
frames (Nano). Sizes and times of frames follow transformers 5.23's ``Qwen3VLVideoProcessor`` and
``Cosmos3EdgeVideoProcessor``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.video_utils import VideoMetadata

from strands_cosmos3.checks import image_array, positive
from strands_cosmos3.engine.frames import read_chosen

_DEFAULTS = {
    "size": {"shortest_edge": 64 * 64, "longest_edge": 24 << 20},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
}
"""What ``video_preprocessor_config.json`` need not say."""


@dataclass(frozen=True)
class Film:
    """A film in memory.

    Args:
        frames: [F, H, W, 3] uint8.
        fps: Frames a second.

    Raises ShapeError or InputError if they are not.
    """

    frames: NDArray[np.uint8]
    fps: float

    def __post_init__(self) -> None:
        image_array(self.frames, "frames", (None, None, None, 3))
        positive(self.fps, "fps")


class FilmProcessor:
    """Does for films what transformers' processors expect of a video processor.

    Args:
        pictures: transformers' image processor.
        stated: Contents of ``video_preprocessor_config.json``.
    """

    def __init__(self, pictures: Any, stated: Mapping[str, Any]):
        self.merge_size: int = pictures.merge_size
        self.temporal_patch_size: int = pictures.temporal_patch_size
        self._pictures = pictures
        self._settings = _DEFAULTS | dict(stated)

    def chosen(self, count: int, fps: float) -> list[int]:
        """Indices of the frames that are read of ``count`` at a rate, first and last included."""
        least, most = self._settings["min_frames"], self._settings["max_frames"]
        sampled = min(max(int(count / fps * self._settings["fps"]), least), most, count)
        return np.linspace(0, count - 1, sampled).round().astype(int).tolist()

    def read(self, film: str | Path | Film) -> tuple[NDArray[np.uint8], VideoMetadata]:
        """The frames that are read of a film, and when they were taken."""
        if isinstance(film, Film):
            fps, indices = film.fps, self.chosen(len(film.frames), film.fps)
            frames = film.frames[indices]
        else:
            frames, fps, indices = read_chosen(film, self.chosen)
        return frames, VideoMetadata(total_num_frames=len(frames), fps=fps, frames_indices=indices)

    def __call__(
        self, videos: Sequence[NDArray[np.uint8]], video_metadata: Sequence[Any], **_: Any
    ) -> dict[str, Any]:
        """Patches and grids of films whose frames are read."""
        pixels, grids = zip(*map(self._cut, videos), strict=True)
        return {
            "pixel_values_videos": torch.cat(pixels),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": video_metadata,
        }

    def _cut(self, frames: NDArray[np.uint8]) -> tuple[torch.Tensor, list[int]]:
        joined = self.temporal_patch_size
        missing = -len(frames) % joined  # the last frame fills the last patch
        # a film's limits of size are those of all of its frames together
        size = {name: n // len(frames) for name, n in self._settings["size"].items()}
        patches = self._pictures(
            images=[*frames, *[frames[-1]] * missing], size=size, return_tensors="pt"
        )
        pixels, (_, height, width) = patches["pixel_values"], patches["image_grid_thw"][0].tolist()
        # a picture's patch holds it as often as a film's has frames; axes are group, frame, patch,
        # colour, copy, pixels, and for one frame a patch the order of its pixels does not matter
        single = pixels.view(-1, joined, height * width, 3, joined, self._pictures.patch_size**2)
        groups = single[..., 0, :].permute(0, 2, 3, 1, 4).reshape(-1, pixels.shape[-1])
        return groups, [len(frames) // joined + bool(missing), height, width]
