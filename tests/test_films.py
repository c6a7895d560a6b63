"""Sounds, their files, and the track of a film."""

import wave

import av
import numpy as np
import pytest

from helpers.tracks import track_of
from strands_cosmos3.errors import InputError, NonFiniteError, ShapeError, StorageError
from strands_cosmos3.films import Sound, VideoWriter, write_wav

HZ = 8000
RED = np.full((32, 48, 3), (200, 30, 30), np.uint8)


def tone(frequency_hz, seconds, rate_hz=HZ, channels=2, amplitude=0.5):
    t_s = np.arange(round(seconds * rate_hz)) / rate_hz
    one = amplitude * np.sin(2 * np.pi * frequency_hz * t_s)
    return Sound(np.stack([one, -one][:channels]).astype(np.float32), rate_hz)


def pitch(samples, rate_hz):
    """The strongest frequency in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return spectrum.argmax() * rate_hz / len(samples)


@pytest.mark.parametrize("channels", [1, 2])
def test_a_wav_has_the_rate_the_duration_and_the_samples(tmp_path, channels):
    sound = tone(440, 1.5, channels=channels, amplitude=1.0)
    write_wav(tmp_path / "new" / "s.wav", sound)
    with wave.open(str(tmp_path / "new" / "s.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (
            HZ,
            channels,
            12000,
        )
        levels = np.frombuffer(file.readframes(12000), "<i2").reshape(-1, channels).T
    assert sound.duration_s == 1.5
    np.testing.assert_allclose(levels / 32767, sound.samples, atol=1e-4)
    assert np.abs(levels).max() == 32767


def test_a_wav_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        write_wav(tmp_path / "file" / "s.wav", tone(440, 0.1))


@pytest.mark.parametrize(
    ("samples", "rate_hz", "error", "says"),
    [
        (np.zeros(5), HZ, ShapeError, "any, any"),
        (np.zeros((3, 5)), HZ, ShapeError, "one or two channels"),
        (
            np.full((1, 5), 1.01),
            HZ,
            InputError,
            r"samples reach 1.01; a waveform lies in \[-1, 1\]",
        ),
        (np.full((1, 5), np.nan), HZ, NonFiniteError, "nan"),
        (np.zeros((1, 5)), 0, InputError, "rate_hz"),
        (np.zeros((1, 5)), 25.5, InputError, "rate_hz"),
        ("loud", HZ, InputError, "samples must be"),
    ],
)
def test_what_is_no_sound(samples, rate_hz, error, says):
    with pytest.raises(error, match=says):
        Sound(samples, rate_hz)


@pytest.mark.parametrize("rate_hz", [HZ, 48_000])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 30.0])
def test_a_film_s_track_is_as_long_as_the_film(tmp_path, rate_hz, seconds):
    with VideoWriter(tmp_path / "f.mp4", 15) as film:
        film.hear(tone(440, seconds, rate_hz))
        for _ in range(round(15 * seconds)):
            film.write(RED)
    samples, rate, track_s, film_s = track_of(tmp_path / "f.mp4")
    assert len(samples) == 2
    assert film_s == pytest.approx(round(15 * seconds) / 15, abs=1e-3)
    assert track_s == pytest.approx(film_s, abs=1024 / rate + 1e-3)  # AAC's frame
    middle = samples[0, samples.shape[1] // 4 :][: rate // 4]
    assert pitch(middle, rate) == pytest.approx(440, abs=5)
    assert np.corrcoef(samples[0], samples[1])[0, 1] < -0.95, "channels keep their places"


def test_each_sound_is_heard_until_the_next_and_silence_follows_the_last(tmp_path):
    """As a rollout's chunks: 300 Hz from 0 s, then 900 Hz from 1 s on, without its first 0.2 s."""
    with VideoWriter(tmp_path / "f.mp4", 20) as film:
        film.hear(tone(300, 5.0))
        film.hear(
            Sound(np.concatenate([tone(1500, 0.2).samples, tone(900, 0.5).samples], 1), HZ), 1, 0.2
        )
        for _ in range(40):
            film.write(RED)
    samples, rate, *_ = track_of(tmp_path / "f.mp4")
    parts = [samples[0, round(t * rate) :][: round(0.3 * rate)] for t in (0.5, 1.1, 1.65)]
    assert pitch(parts[0], rate) == pytest.approx(300, abs=5)
    assert pitch(parts[1], rate) == pytest.approx(900, abs=5)
    assert np.abs(parts[2]).max() < 0.02
    assert np.abs(parts[1]).max() > 0.3


def test_a_film_without_sound_has_no_track(tmp_path):
    with VideoWriter(tmp_path / "f.mp4", 15) as film:
        film.write(RED)
    with av.open(str(tmp_path / "f.mp4")) as opened:
        assert not opened.streams.audio
