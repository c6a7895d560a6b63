"""Films and sounds: what is predicted of a world, and its files, which appear only when they are
complete.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import finite_array, positive, whole_number
from strands_cosmos3.errors import ConfigError, InputError, ShapeError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.resources import require_creatable, write_whole

_SUFFIXES = (".mp4", ".mkv", ".mov")
_ENCODER = {"crf": "20", "preset": "veryfast"}
_LAYOUTS = {1: "mono", 2: "stereo"}
_TRACK_HZ = 48_000  # of a film's track; a sound of another rate is resampled
_HIGHEST_HZ = 768_000
_FULL_SCALE = 2**15 - 1


@dataclass(frozen=True, eq=False)
class Sound:
    """A waveform.

    Args:
        samples: [channels, N] numbers in [-1, 1], of one or two channels; read-only float32.
        rate_hz: Samples a second.

    Raises:
        ShapeError, NonFiniteError, InputError: A field is malformed.
    """

    samples: NDArray[np.float32]
    rate_hz: int

    def __post_init__(self) -> None:
        whole_number(self.rate_hz, "rate_hz", 1, _HIGHEST_HZ)
        samples = finite_array(self.samples, "samples", (None, None)).astype(np.float32)
        if len(samples) not in _LAYOUTS:
            raise ShapeError(
                f"samples are [channels, N] of one or two channels, got {list(samples.shape)}."
            )
        if (largest := float(np.abs(samples).max())) > 1:
            raise InputError(f"samples reach {largest:.4g}; a waveform lies in [-1, 1].")
        samples.setflags(write=False)
        object.__setattr__(self, "samples", samples)

    @property
    def duration_s(self) -> float:
        """How long it lasts, in seconds."""
        return self.samples.shape[1] / self.rate_hz


def write_wav(path: Path, sound: Sound) -> None:
    """Write a sound to a .wav file of 16 bits a sample. Raises StorageError if that fails."""
    from scipy.io import wavfile  # takes longer to import than all of this

    levels = (sound.samples.T * _FULL_SCALE).round().astype(np.int16)
    write_whole(path, lambda unfinished: wavfile.write(unfinished, sound.rate_hz, levels))


class VideoWriter:
    """Writes frames to a film (H.264, yuv420p), with a track (AAC) if there is a sound. As a
    context manager it keeps the film only if the block succeeded.

    Frames go to a hidden file beside ``path``, which replaces it in :meth:`close`. Missing folders
    are made.

    Attributes:
        frames: Frames written so far.
        kept: The finished film, once :meth:`close` has moved it to its place; else None.

    Raises:
        InputError, ConfigError: fps is not above zero; a suffix not .mp4, .mkv or .mov.
        MissingDependencyError: PyAV is not installed.
    """

    def __init__(self, path: str | Path, fps: float):
        self.path = Path(path).expanduser()
        if self.path.suffix.lower() not in _SUFFIXES:
            raise ConfigError(
                f"a film's name must end in {', '.join(_SUFFIXES)}, got {str(path)!r}."
            )
        self._rate = Fraction(positive(fps, "fps")).limit_denominator(1000)
        require_creatable(self.path, "the film")
        with needed_by("a film"):
            import av
        self._hidden = self.path.with_name(
            f".{self.path.stem}.{os.getpid()}.{id(self):x}{self.path.suffix}"
        )
        self._av: Any = av
        self._stream: Any = None
        self._container: Any = av.open(str(self._hidden), "w")
        self._track: Any = None
        self._sounds: list[tuple[float, float, Sound]] = []
        self.frames = 0
        self.kept: Path | None = None

    def write(self, frame: NDArray[np.uint8]) -> None:
        """Append a frame [H, W, 3] uint8; height and width even, and the same for every frame."""
        stream = self._stream
        if stream is None:
            stream = self._container.add_stream("libx264", rate=self._rate, options=_ENCODER)
            stream.height, stream.width, _ = frame.shape
            stream.pix_fmt = "yuv420p"
            self._stream = stream
            if self._sounds:
                self._track = self._container.add_stream("aac", rate=_TRACK_HZ)
                self._track.layout = _LAYOUTS[len(self._sounds[0][2].samples)]
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        self._container.mux(stream.encode(picture))
        self.frames += 1

    def hear(self, sound: Sound, at_s: float = 0.0, skipped_s: float = 0.0) -> None:
        """Take a sound that is heard from a time of the film on, until the next one is, without
        its first ``skipped_s`` seconds. The first one comes before the first frame; the others
        have its rate and channels.
        """
        self._sounds.append((at_s, skipped_s, sound))

    def _write_track(self, container: Any) -> None:
        """Append the sounds, which last as long as the frames."""
        first = self._sounds[0][2]
        channels, hz = len(first.samples), first.rate_hz
        samples = np.zeros((channels, round(self.frames / self._rate * hz)), np.float32)
        ends = [at_s for at_s, _, _ in self._sounds[1:]] + [samples.shape[1] / hz]
        for (at_s, skipped_s, sound), end_s in zip(self._sounds, ends, strict=True):
            heard = sound.samples[:, round(skipped_s * hz) :]
            place = samples[:, round(at_s * hz) : round(end_s * hz)]
            count = min(heard.shape[1], place.shape[1])
            place[:, :count] = heard[:, :count]
        layout = _LAYOUTS[channels]
        frame = self._av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        # without a time stamp some lengths cannot be muxed (findings/pyav_aac_without_pts.sh)
        frame.sample_rate, frame.pts, frame.time_base = hz, 0, Fraction(1, hz)
        container.mux([*self._track.encode(frame), *self._track.encode(None)])

    def close(self, keep: bool = True) -> None:
        """Finish the film and move it to ``path``, if it has a frame; closing twice is harmless.

        Without ``keep`` it is deleted; an older one at ``path`` stays.
        """
        container = self._container
        self._container = None
        if container is None:
            return
        try:
            if self._stream is not None:
                if keep:
                    container.mux(self._stream.encode(None))
                    if self._track is not None:
                        self._write_track(container)
                container.close()
                if keep:
                    os.replace(self._hidden, self.path)
                    self.kept = self.path.absolute()
        finally:
            self._hidden.unlink(missing_ok=True)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(keep=error is None)
