"""Films as other programs encode them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np


def write_film(
    path: Path,
    frames: np.ndarray,
    fps: float,
    codec: str = "libx264",
    begin: int = 0,
    b_frames: int = 0,
    time_base: Fraction | None = None,
) -> None:
    """Encode frames [n, H, W, 3] to an mp4 whose first frame has the time ``begin / fps``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rate = Fraction(str(fps))
    with av.open(str(path), "w", format="mp4") as out:
        stream: Any = out.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.codec_context.time_base = time_base or 1 / rate
        stream.codec_context.max_b_frames = b_frames
        stream.codec_context.thread_count = 1
        for i, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            picture.pts = round((begin + i) / rate / stream.codec_context.time_base)
            picture.time_base = stream.codec_context.time_base
            out.mux(stream.encode(picture))
        out.mux(stream.encode(None))
