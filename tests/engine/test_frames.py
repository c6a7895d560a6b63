"""Films are read at the rate of the rows, by the times of their frames; each frame's grey level
tells when it was taken.
"""

from __future__ import annotations

import struct
import wave
from fractions import Fraction

import numpy as np
import pytest

av = pytest.importorskip("av")
pytest.importorskip("torch")

from strands_cosmos3.engine.frames import read_clip  # noqa: E402
from strands_cosmos3.errors import InputError  # noqa: E402

PER_S = 90  # levels


def film(path, stamps_s, fps, codec="libx264", pixels="yuv420p", container=None, per_s=PER_S):
    """A film with a frame at each time; without times, at its rate."""
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = 32, 48, pixels
        stream.codec_context.time_base = Fraction(1, 9000)
        for at_s in stamps_s:
            level = np.full((32, 48, 3), round(20 + per_s * at_s), np.uint8)
            frame = av.VideoFrame.from_ndarray(level, format="rgb24")
            frame.pts, frame.time_base = round(9000 * at_s), Fraction(1, 9000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


def even(fps, seconds=2.2):
    return np.arange(int(seconds * fps) + 1) / float(fps)


def taken_s(clip, per_s=PER_S):
    return (clip.mean(axis=(1, 2, 3)) - 20) / per_s


@pytest.mark.parametrize(
    ("fps", "rows_fps"),
    [
        (15, 15),
        (45, 15),
        (90, 15),
        (Fraction(30000, 1001), 15),
        (Fraction(60000, 1001), 20),
        (Fraction(15000, 1001), 15),
        (120, 20),
        (25, 5),
        (24, 3),
    ],
)
@pytest.mark.parametrize("name", ["film.mp4", "film.mkv", "film.ts"])
def test_frames_are_those_of_the_rows_times(tmp_path, name, fps, rows_fps):
    clip = read_clip(film(tmp_path / name, even(fps), fps), 7, rows_fps)
    expected = np.arange(7) / rows_fps
    within = expected <= 2.2
    np.testing.assert_allclose(taken_s(clip), expected[within], atol=1.5 / PER_S)


@pytest.mark.parametrize("fps", [195, 225, 240])
def test_of_several_frames_that_are_near_enough_the_nearest_is_read(tmp_path, fps):
    path = film(tmp_path / "fast.mp4", even(fps, 0.3), fps, per_s=750)
    clip = read_clip(path, 5, 15)
    np.testing.assert_allclose(taken_s(clip, 750), np.arange(5) / 15, atol=0.002)


TURNED = {
    "clockwise": (0, 1, -1, 0),
    "counterclockwise": (0, -1, 1, 0),
    "upside down": (-1, 0, 0, -1),
}
"""How a film is to be shown -> a, b, c, d of its matrix: x' = a x + c y, y' = b x + d y, y down."""


@pytest.mark.parametrize(("how", "bright"), [*zip(TURNED, ("below", "above", "left"), strict=True)])
def test_a_film_is_read_as_it_is_to_be_shown(tmp_path, how, bright):
    """Phones store frames as the sensor lies; here the right half is bright."""
    path = tmp_path / "phone.mp4"
    halves = np.zeros((32, 48, 3), np.uint8)
    halves[:, 24:] = 255
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=15)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for _ in range(3):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(halves, format="rgb24")))
        out.mux(stream.encode(None))
    a, b, c, d = (65536 * value for value in TURNED[how])
    stored = bytearray(path.read_bytes())
    matrix = stored.index(b"tkhd") + 44
    stored[matrix : matrix + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(stored)
    (frame,) = read_clip(path, 1, 15)
    parts = {
        "above": frame[:8],
        "below": frame[-8:],
        "left": frame[:, :8],
        "right": frame[:, -8:],
    }
    assert frame.shape == ((32, 48, 3) if how == "upside down" else (48, 32, 3))
    assert parts[bright].mean() > 230
    assert max(parts, key=lambda part: parts[part].mean()) == bright


@pytest.mark.parametrize("fps", [30, 45, 75])
def test_a_film_that_ends_early_gives_the_frames_that_it_has(tmp_path, fps):
    clip = read_clip(film(tmp_path / "short.mp4", even(fps, 0.3), fps), 17, 15)
    np.testing.assert_allclose(taken_s(clip), np.arange(5) / 15, atol=1.5 / PER_S)


@pytest.mark.parametrize(
    ("fps", "rows_fps", "says"),
    [
        (10, 15, r"frames 0\.000 s and 0\.100 s after its first, and 15 a second are needed: none"),
        (25, 15, r"none is at 0\.067 s.*minterpolate=fps=15"),
        (50, 15, "15 frames a second, or of a whole multiple"),
        (30, 20, r"none is at 0\.050 s"),
        (4, 5, r"none is at 0\.200 s"),
    ],
)
def test_rates_that_are_no_multiple_are_refused(tmp_path, fps, rows_fps, says):
    path = film(tmp_path / "film.mp4", even(fps), fps)
    with pytest.raises(InputError, match=says):
        read_clip(path, 7, rows_fps)
    assert len(read_clip(path, 1, rows_fps)) == 1  # a single frame has no rate


@pytest.mark.parametrize("lost", [slice(8, 10), slice(2, 3), slice(11, 20)])
def test_a_film_with_a_hole_is_refused(tmp_path, lost):
    stamps_s = np.delete(even(30), lost)
    with pytest.raises(InputError, match="none is at"):
        read_clip(film(tmp_path / "film.mp4", stamps_s, 30), 12, 15)


@pytest.mark.parametrize(
    ("codec", "container", "pixels"),
    [
        ("libx264", "h264", "yuv420p"),
        ("mjpeg", "mjpeg", "yuvj420p"),
        ("mpeg4", "m4v", "yuv420p"),
    ],
)
def test_a_film_that_states_no_times_is_refused(tmp_path, codec, container, pixels):
    path = film(tmp_path / f"bare.{container}", even(25), 25, codec, pixels, container)
    with pytest.raises(InputError, match=r"does not say when.*ffmpeg -r RATE"):
        read_clip(path, 5, 5)
    assert len(read_clip(path, 1, 5)) == 1


def test_a_file_of_sound_alone_holds_no_pictures(tmp_path):
    with wave.open(str(tmp_path / "sound.wav"), "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes(bytes(1600))
    with pytest.raises(InputError, match=r"sound\.wav' holds no pictures"):
        read_clip(tmp_path / "sound.wav", 5, 15)
