"""Pictures as video and back: an episode encoded in memory, episodes joined without encoding again, frames by number.

An episode begins with a key frame and has no B-frames, so that joining is copying packets, frame k is due at exactly
``k / fps``, and a frame is decoded from the key frame before it and nothing else. Colours are BT.601, limited range, and
tagged so.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from strands_cosmos3.checks import whole_number
from strands_cosmos3.errors import DatasetFormatError, UnknownNameError

Frames = NDArray[np.uint8]
_PIXEL_FORMATS = ("yuv420p", "yuv444p")
_BT601, _LIMITED = 6, 1  # FFmpeg's AVCOL_SPC_SMPTE170M (for the tag), AVCOL_RANGE_MPEG
_SWS_BT601 = 5  # SWS_CS_ITU601, the same for its scaler
_SEEK_FROM = 32  # frames: a gap longer than this is jumped rather than decoded


@dataclass(frozen=True)
class VideoConfig:
    """How pictures are encoded (H.264).

    Args:
        crf: Constant rate factor: 0 is lossless (nearly, for colours pass through YUV), 51 worst.
        gop: Frames from one key frame to the next: what random access decodes at worst.
        pixel_format: ``"yuv420p"`` (every player; colour at half the resolution) or ``"yuv444p"``.
        preset: x264's trade of time for size.

    Raises:
        InputError, UnknownNameError: A figure outside its range.
    """

    crf: int = 18
    gop: int = 15
    pixel_format: str = "yuv420p"
    preset: str = "veryfast"

    def __post_init__(self) -> None:
        whole_number(self.crf, "crf", 0, 51)
        whole_number(self.gop, "gop", 1)
        if self.pixel_format not in _PIXEL_FORMATS:
            raise UnknownNameError("pixel format", self.pixel_format, _PIXEL_FORMATS)

    def info(self, height: int, width: int, fps: int) -> dict[str, Any]:
        """What LeRobot states about a video stream in ``meta/info.json``."""
        return {
            "video.height": height,
            "video.width": width,
            "video.codec": "h264",
            "video.pix_fmt": self.pixel_format,
            "video.is_depth_map": False,
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": False,
        }


class EpisodeEncoder:
    """Encodes one camera's frames of one episode into memory.

    Args:
        shape: (height, width).
        fps: Frames a second.
        config: How.
    """

    def __init__(self, shape: tuple[int, int], fps: int, config: VideoConfig):
        self._bytes = io.BytesIO()
        self._container: Any = av.open(self._bytes, "w", format="mp4")
        stream: Any = self._container.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *shape, config.pixel_format
        context = stream.codec_context
        context.gop_size, context.max_b_frames, context.thread_count = config.gop, 0, 1
        context.time_base = Fraction(1, fps)
        context.colorspace, context.color_range = _BT601, _LIMITED
        context.color_primaries = context.color_trc = _BT601
        context.options = {"crf": str(config.crf), "preset": config.preset}
        self._stream, self._config = stream, config
        self._reformatter = VideoReformatter()  # keeps its tables from frame to frame
        self.frames = 0

    def add(self, frame: Frames) -> None:
        """Append [H, W, 3] uint8, already checked."""
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture = self._reformatter.reformat(
            picture, format=self._config.pixel_format, dst_colorspace=_SWS_BT601, dst_color_range=_LIMITED
        )
        picture.pts = self.frames
        self._container.mux(self._stream.encode(picture))
        self.frames += 1

    def finish(self) -> bytes:
        """The episode as an mp4."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._bytes.getvalue()

    def abandon(self) -> None:
        """Free the encoder; nothing is kept."""
        self._container.close()


def join_videos(parts: Iterable[tuple[bytes | Path, int]], fps: int, path: Path) -> None:
    """Copy the packets of several videos into one file, without encoding again.

    Args:
        parts: Video and its number of frames, in order; all with the same encoding.
        fps: Frames a second.
        path: The file to write.

    Raises:
        DatasetFormatError: A part is no video, or holds another number of frames.
    """
    out: Any = av.open(str(path), "w", format="mp4", options={"movflags": "faststart"})
    target: Any = None
    done = 0
    with out:
        for part, n_frames in parts:
            with _opened(part) as source:
                stream = source.streams.video[0]
                if target is None:
                    target = out.add_stream_from_template(stream)
                    target.time_base = stream.time_base
                shift = round(Fraction(done, fps) / stream.time_base)
                copied = 0
                for packet in source.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue
                    packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, target
                    out.mux(packet)
                    copied += 1
                if copied != n_frames:
                    raise DatasetFormatError(f"{_name(part)} holds {copied} frames, and its episodes {n_frames}.")
            done += n_frames


def video_layout(part: bytes | Path) -> tuple[Any, ...]:
    """What must agree for two videos to be joined: codec, size, pixel format, time base, the codec's own header."""
    with _opened(part) as source:
        stream = source.streams.video[0]
        context = stream.codec_context
        return (
            context.name,
            context.width,
            context.height,
            context.pix_fmt,
            stream.time_base,
            bytes(context.extradata or b""),
        )


def _name(part: bytes | Path) -> str:
    return str(part) if isinstance(part, Path) else "an encoded episode"


def _opened(part: bytes | Path) -> Any:
    try:
        container: Any = av.open(str(part) if isinstance(part, Path) else io.BytesIO(part))
    except (OSError, av.error.FFmpegError) as error:
        raise DatasetFormatError(f"{_name(part)} cannot be opened as a video: {error}.") from None
    if not container.streams.video:
        container.close()
        raise DatasetFormatError(f"{_name(part)} holds no video stream.")
    return container


class FrameReader:
    """Frames by number out of video files; a few files stay open. Not to be shared between threads.

    Args:
        fps: Frames a second.
        keep_open: How many files.
    """

    def __init__(self, fps: int, keep_open: int = 6):
        self._fps, self._keep = fps, keep_open
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._reformatter = VideoReformatter()

    def read(self, path: Path, first: int, rows: Sequence[int], shape: tuple[int, ...]) -> Frames:
        """Decode frames.

        Args:
            path: The file.
            first: Number of the frame in the file that row 0 is.
            rows: Which rows, in any order; repetitions are allowed.
            shape: [H, W, 3] that every frame must have.

        Returns:
            [len(rows), H, W, 3] uint8

        Raises:
            DatasetFormatError: The file is absent or no video, its frames have another size, or one is missing.
        """
        if not len(rows):
            return np.empty((0, *shape), np.uint8)
        container = self._container(path)
        stream = container.streams.video[0]
        if (stream.height, stream.width) != tuple(shape[:2]):
            raise DatasetFormatError(f"{path} shows {stream.height} x {stream.width}, its feature states {list(shape)}.")
        wanted = sorted({int(row) for row in rows})
        found: dict[int, Frames] = {}
        try:
            for run in _runs(wanted):
                found |= self._decode(container, stream, first, run)
        except (OSError, av.error.FFmpegError) as error:
            raise DatasetFormatError(f"{path} cannot be decoded: {error}.") from None
        missing = [row for row in wanted if row not in found]
        if missing:
            raise DatasetFormatError(f"{path} has no frame {first + missing[0]}; its episode says it has.")
        return np.stack([found[int(row)] for row in rows])

    def _decode(self, container: Any, stream: Any, first: int, run: list[int]) -> dict[int, Frames]:
        """The frames of one run that can be found: from the key frame before it up to its last."""
        start = stream.start_time or 0
        container.seek(start + round(Fraction(first + run[0], self._fps) / stream.time_base), stream=stream)
        wanted, found = set(run), {}
        for frame in container.decode(stream):
            row = round((frame.pts - start) * stream.time_base * self._fps) - first
            if row in wanted:
                found[row] = self._reformatter.reformat(frame, format="rgb24").to_ndarray()
            if row >= run[-1]:
                break
        return found

    def _container(self, path: Path) -> Any:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if not path.is_file():
            raise DatasetFormatError(f"the video {path} is missing.")
        container = _opened(path)
        container.streams.video[0].codec_context.thread_count = 1
        self._open[path] = container
        while len(self._open) > self._keep:
            self._open.popitem(last=False)[1].close()
        return container

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def __reduce__(self) -> tuple[Any, ...]:  # into another process: files are opened there anew
        return FrameReader, (self._fps, self._keep)


def _runs(rows: list[int]) -> list[list[int]]:
    """Ascending rows, cut where a gap is worth a seek."""
    runs = [[rows[0]]]
    for row in rows[1:]:
        if row - runs[-1][-1] > _SEEK_FROM:
            runs.append([])
        runs[-1].append(row)
    return runs
