"""What is heard in a film."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray


def track_of(path: Path | str) -> tuple[NDArray[Any], int, float, float]:
    """Samples [channels, N] of a film's only track, its rate in Hz, and how long the track and the
    pictures last in s.
    """
    with av.open(str(path)) as film:
        (track,), (pictures,) = film.streams.audio, film.streams.video
        lasts = [float(stream.duration * stream.time_base) for stream in (track, pictures)]
        samples = np.concatenate([f.to_ndarray() for f in film.decode(audio=0)], axis=1)
        return samples, track.rate, lasts[0], lasts[1]
