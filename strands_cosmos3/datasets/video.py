"""Videos of cameras: encode an episode in memory, join episodes without re-encoding, decode frames
by index.

An episode begins with a key frame and has no B-frames. Therefore joining copies packets, frame k
has the time ``k / fps``, and decoding a frame starts at the key frame before it. Colours are
BT.601, limited range, and tagged as such.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
from av.codec.codec import UnknownCodecError
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from strands_cosmos3.checks import known_name, typed_fields, whole_number
from strands_cosmos3.datasets.spec import Feature
from strands_cosmos3.datasets.stats import PictureStats, Stats
from strands_cosmos3.errors import DatasetFormatError
from strands_cosmos3.resources import require_file

Frames = NDArray[np.uint8]
_PIXEL_FORMATS = ("yuv420p", "yuv444p")
_BT601, _LIMITED = 6, 1  # FFmpeg's AVCOL_SPC_SMPTE170M (for the tag), AVCOL_RANGE_MPEG
_SWS_BT601 = 5  # SWS_CS_ITU601, the same for its scaler
_SAMPLED_FRAMES = 8  # of an episode, for the statistics
_FILES_OPEN = 6
_SEEK_FROM = 32  # frames: larger gaps are skipped by seeking
_PADDING_PX = 512  # a codec may round each side of a picture up to its blocks and edges


@dataclass(frozen=True)
class VideoConfig:
    """Options of the H.264 encoder.

    Args:
        crf: Constant rate factor: 0 is lossless apart from the conversion to YUV, 51 is worst.
        gop: Frames from one key frame to the next; random access decodes at most as many.
        pixel_format: ``"yuv420p"`` (every player; colour at half the resolution) or ``"yuv444p"``.
        preset: x264's preset: encoding time against size.

    Raises:
        InputError, UnknownNameError: A value is out of range.
    """

    crf: int = 18
    gop: int = 15
    pixel_format: str = "yuv420p"
    preset: str = "veryfast"

    def __post_init__(self) -> None:
        typed_fields(self)
        whole_number(self.crf, "crf", 0, 51)
        whole_number(self.gop, "gop", 1)
        known_name(self.pixel_format, "pixel format", _PIXEL_FORMATS)

    def info(self, height: int, width: int, fps: float) -> dict[str, Any]:
        """Return LeRobot's description of a video stream in ``meta/info.json``."""
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


class CameraWriter:
    """Encodes one camera of one episode in memory, and collects its statistics.

    If ``n_frames`` is known beforehand, the statistics are taken from evenly spaced frames.
    """

    def __init__(
        self, feature: Feature, fps: float, config: VideoConfig, n_frames: int | None = None
    ):
        self._bytes = io.BytesIO()
        self._container: Any = av.open(self._bytes, "w", format="mp4")
        stream: Any = self._container.add_stream("libx264", rate=Fraction(str(fps)))
        stream.height, stream.width, stream.pix_fmt = *feature.shape[:2], config.pixel_format
        context = stream.codec_context
        context.gop_size = config.gop
        context.max_b_frames = 0
        context.thread_count = 1
        context.time_base = 1 / Fraction(str(fps))
        context.colorspace = _BT601
        context.color_range = _LIMITED
        context.color_primaries = context.color_trc = _BT601
        context.options = {"crf": str(config.crf), "preset": config.preset}
        self._stream = stream
        self._config = config
        self._reformatter = VideoReformatter()  # keeps its tables from frame to frame
        self._stats = PictureStats()
        self._sampled: set[int] | None = None
        if n_frames is not None:
            spaced = np.linspace(0, n_frames - 1, min(n_frames, _SAMPLED_FRAMES)).round()
            self._sampled = set(spaced.astype(int).tolist())
        self._n = 0

    def add(self, frame: Frames) -> None:
        """Append a checked frame [H, W, 3] uint8."""
        if self._n in self._sampled if self._sampled is not None else self._n % 16 == 0:
            self._stats.add(frame)
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture = self._reformatter.reformat(
            picture,
            format=self._config.pixel_format,
            dst_colorspace=_SWS_BT601,
            dst_color_range=_LIMITED,
        )
        picture.pts = self._n
        self._container.mux(self._stream.encode(picture))
        self._n += 1

    def finish(self) -> tuple[bytes, Stats]:
        """Return the episode's mp4 and statistics."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._bytes.getvalue(), self._stats.result()

    def discard(self) -> None:
        """Free the encoder."""
        self._container.close()


def join_videos(
    parts: Iterable[tuple[bytes | Path, int]], fps: float, path: Path, shape: Sequence[int]
) -> None:
    """Copy the packets of several videos with the same encoding, each given with its number of
    frames, into one file. No codec is needed for that.

    The first frame of each part follows the last one of the part before it, whatever time the
    part begins at. ``shape``: [H, W, 3] of the pictures.

    Raises:
        DatasetFormatError: A part is not a video of these pictures, or has another number of
            frames, or its packets cannot follow those of the parts before it.
    """
    out: Any = av.open(str(path), "w", format="mp4", options={"movflags": "faststart"})
    target: Any = None
    done = 0
    with out:
        for part, n_frames in parts:
            with (
                _opened(part, shape) as source,
                _typed(part, "cannot follow the films before it", writing=True),
            ):
                stream = source.streams.video[0]
                if target is None:
                    # opaque: else PyAV asks for an encoder with the decoder's name
                    target = out.add_stream_from_template(stream, opaque=True)
                    target.time_base = stream.time_base
                shift = round(done / Fraction(str(fps)) / stream.time_base)
                shift -= stream.start_time or 0
                copied = 0
                for packet in source.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = target
                    out.mux(packet)
                    copied += 1
                if copied != n_frames:
                    raise DatasetFormatError(
                        f"{_name(part)} has {copied} frames, but its episodes have {n_frames}."
                    )
            done += n_frames


def video_layout(part: bytes | Path, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return what two videos must share to be joined: codec, size, pixel format, time base,
    and the codec's header. Raises DatasetFormatError unless the pictures are
    of ``shape``.
    """
    with _opened(part, shape) as source:
        stream = source.streams.video[0]
        codec = stream.codec_context
        return (
            codec.name,
            codec.width,
            codec.height,
            codec.pix_fmt,
            stream.time_base,
            bytes(codec.extradata or b""),
        )


def _name(part: bytes | Path) -> str:
    return str(part) if isinstance(part, Path) else "an encoded episode"


@contextmanager
def _typed(part: bytes | Path, what: str, writing: bool = False) -> Iterator[None]:
    """Convert what PyAV raises about a film into DatasetFormatError; an OSError while ``writing``
    is the target's.
    """
    try:
        yield
    except (OSError, av.error.FFmpegError, UnknownCodecError) as error:
        if writing and isinstance(error, OSError):
            raise
        raise DatasetFormatError(f"{_name(part)} {what}: {error}.") from None


def _opened(part: bytes | Path, shape: Sequence[int]) -> Any:
    """Open an mp4 whose header states pictures of ``shape``; larger ones are not decoded.

    FFmpeg's other formats, e.g. its scripts, may name files anywhere; its protocols are no
    absolute paths.
    """
    if isinstance(part, Path):
        require_file(part, DatasetFormatError, hint="The dataset refers to it.")
    source = str(part.absolute()) if isinstance(part, Path) else io.BytesIO(part)
    height, width = shape[:2]
    # opening decodes a few frames, and a frame may be larger than the header says
    limits = {"max_pixels": str((height + _PADDING_PX) * (width + _PADDING_PX))}
    with ExitStack() as stack:
        with _typed(part, "cannot be opened as a video"):
            container: Any = stack.enter_context(av.open(source, format="mp4", options=limits))
        _check_stream(part, container.streams.video, (height, width))
        container.streams.video[0].codec_context.options = limits
        stack.pop_all()
    return container


def _check_stream(part: bytes | Path, streams: Any, size: tuple[int, int]) -> None:
    if not streams or streams[0].codec_context is None:
        raise DatasetFormatError(f"{_name(part)} has no video stream in a codec that PyAV reads.")
    if (found := (streams[0].height, streams[0].width)) != size:
        raise DatasetFormatError(
            f"{_name(part)} has size {found[0]} x {found[1]}, but its feature is {[*size, 3]}."
        )


class FrameReader:
    """Decodes frames of video files by index, and keeps the last files open. Not thread-safe."""

    def __init__(self, fps: float):
        self._fps = Fraction(str(fps))
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._reformatter = VideoReformatter()

    def read(
        self, path: Path, first: int, rows: Sequence[int], shape: tuple[int, ...], n_frames: int
    ) -> Frames:
        """Return the frames ``first + rows`` of a file as [len(rows), H, W, 3] uint8, in any order,
        repetitions allowed. ``n_frames``: as many the index refers to, from the first one on.

        Raises:
            DatasetFormatError: The file is missing or not a video, its frames are not of ``shape``,
                or some are missing.
        """
        if not len(rows):
            return np.empty((0, *shape), np.uint8)
        container = self._container(path, shape)
        stream = container.streams.video[0]
        if stream.start_time and 0 < stream.frames < n_frames:
            raise DatasetFormatError(
                f"{path} begins late and has {stream.frames} frames, but the index refers to "
                f"{n_frames} from its first one on; its times must count from the first frame."
            )
        frames: dict[int, Frames] = {}
        ordered = sorted(set(rows))
        seeks = np.flatnonzero(np.diff(ordered) > _SEEK_FROM) + 1
        with _typed(path, "cannot be decoded"):
            for run in np.split(ordered, seeks):
                frames |= self._decode(container, stream, first, run.tolist())
        if missing := set(rows) - set(frames):
            raise DatasetFormatError(
                f"{path} has no frame {first + min(missing)}, but an episode refers to it."
            )
        if other := next((f.shape for f in frames.values() if f.shape != tuple(shape)), None):
            raise DatasetFormatError(
                f"{path} has a frame of {list(other)}, but its feature is {list(shape)}."
            )
        return np.stack([frames[row] for row in rows])

    def _decode(self, container: Any, stream: Any, first: int, run: list[int]) -> dict[int, Frames]:
        """Decode from the key frame before the run to its last frame; return the run's frames that
        exist, each the one that is nearest to its row in time.
        """
        start = stream.start_time or 0
        container.seek(
            start + round((first + run[0]) / self._fps / stream.time_base), stream=stream
        )
        off = dict.fromkeys(run, Fraction(1))
        frames: dict[int, Any] = {}
        for frame in container.decode(stream):
            time = (frame.pts - start) * stream.time_base * self._fps - first
            row = round(time)
            if abs(time - row) < off.get(row, 0):
                off[row] = abs(time - row)
                frames[row] = self._reformatter.reformat(frame, format="rgb24").to_ndarray()
            if time >= run[-1]:
                break
        return frames

    def _container(self, path: Path, shape: tuple[int, ...]) -> Any:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        container = self._open[path] = _opened(path, shape)
        container.streams.video[0].codec_context.thread_count = 1
        if len(self._open) > _FILES_OPEN:
            self._open.popitem(last=False)[1].close()
        return container

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()
