"""Films: whole or not at all, faithful, and composed on an even page."""

from __future__ import annotations

import numpy as np
import pytest

from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.films import VideoWriter
from strands_cosmos3.observe.views import compose, compose_for_tier, resize
from strands_cosmos3.sim.film import VideoRecorder, composite, observed_picture
from strands_cosmos3.sim.record import compose_film
from strands_cosmos3.worlds.arms import Robot

av = pytest.importorskip("av")


def gray(level: int, height: int = 48, width: int = 64) -> np.ndarray:
    return np.full((height, width, 3), level, np.uint8)


def read(path) -> tuple[np.ndarray, float]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate)
        return np.stack(
            [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        ), rate


def test_frames_come_back(tmp_path):
    path = tmp_path / "deep" / "film.mp4"
    levels = [20, 90, 160, 230, 60]
    with VideoWriter(path, 15) as film:
        for level in levels:
            film.write(gray(level))
        assert film.frames == len(levels)
        assert not path.exists(), "it appears only when it is whole"
    frames, rate = read(path)
    assert frames.shape == (5, 48, 64, 3)
    assert rate == pytest.approx(15)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), levels, atol=4)
    assert [entry.name for entry in path.parent.iterdir()] == ["film.mp4"]


def test_colors_keep_their_channels(tmp_path):
    frame = gray(30)
    frame[..., 0] = 220
    with VideoWriter(tmp_path / "red.mp4", 29.97) as film:
        film.write(frame)
    frames, rate = read(tmp_path / "red.mp4")
    assert frames[0, ..., 0].mean() > 190
    assert frames[0, ..., 2].mean() < 60
    assert rate == pytest.approx(29.97, abs=1e-3)


def test_nothing_is_left_of_a_film_that_failed(tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes(b"an older film")

    class Crash(Exception):
        pass

    def fail() -> None:
        with VideoWriter(path, 15) as film:
            film.write(gray(9))
            raise Crash

    with pytest.raises(Crash):
        fail()
    assert [entry.name for entry in tmp_path.iterdir()] == ["film.mp4"]
    assert path.read_bytes() == b"an older film"


def test_a_new_film_takes_an_older_ones_place(tmp_path):
    for level in (40, 200):
        with VideoWriter(tmp_path / "film.mp4", 15) as film:
            film.write(gray(level))
    assert read(tmp_path / "film.mp4")[0].mean() == pytest.approx(200, abs=4)


def test_no_frames_no_film(tmp_path):
    with VideoWriter(tmp_path / "film.mp4", 15):
        pass
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_and_writing_afterwards(tmp_path):
    film = VideoWriter(tmp_path / "film.mp4", 15)
    film.write(gray(1))
    film.close()
    film.close()
    film.close(keep=False)
    assert (tmp_path / "film.mp4").exists()


def test_writer_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"\.mp4"):
        VideoWriter(tmp_path / "film.gif", 15)
    with pytest.raises(InputError, match="fps"):
        VideoWriter(tmp_path / "film.mp4", 0)
    assert list(tmp_path.iterdir()) == []


VIEWS = {
    "wrist": gray(50, 36, 64),
    "exterior_1": gray(100, 36, 64),
    "exterior_2": gray(150, 36, 64),
}


def test_page_shows_beauty_and_views_in_order():
    page = compose_film(gray(200, 180, 320), VIEWS)
    np.testing.assert_array_equal(page[:180, :320], 200)
    strip = page[180:]
    row = strip[strip.shape[0] // 3, :, 0].astype(int)
    places = [np.flatnonzero(row == level).mean() for level in (50, 100, 150)]
    assert places == sorted(places)
    for level in (50, 100, 150):
        assert (row == level).sum() > 90


@pytest.mark.parametrize("size", [(180, 320), (181, 321), (99, 133), (540, 960), (8, 8)])
@pytest.mark.parametrize("predicted", [None, gray(77, 135, 160), gray(77, 10, 200)])
@pytest.mark.parametrize("views", [VIEWS, {}, {"wrist": gray(50, 33, 65)}])
def test_page_is_even_and_its_size_depends_on_shapes_only(size, predicted, views):
    pages = [
        compose_film(gray(200, *size), views, predicted, caption)
        for caption in (None, "pick up", "long " * 25)  # too long for the widest
    ]
    shapes = {page.shape for page in pages}
    assert len(shapes) == 1
    height, width, _ = shapes.pop()
    assert height % 2 == 0
    assert width % 2 == 0


def test_prediction_is_beside_the_scene_and_caption_over_it():
    beauty, predicted = gray(200, 180, 320), gray(77, 135, 160)
    page = compose_film(beauty, VIEWS, predicted, "pick up the red cube")
    assert page.shape[1] > 320
    assert (page[:, 320:] == 77).all(axis=2).sum() > 5000
    assert not (page[:, :320] == 77).all(axis=2).any()
    assert page[:10, :320].mean() < 150, "the caption's band"
    assert page[:, 320:, 0].max() > 200, "the label"
    np.testing.assert_array_equal(beauty, 200)
    assert not np.array_equal(page, compose_film(beauty, VIEWS, predicted, "place the red cube"))


def test_what_happened_is_below_what_was_predicted():
    page = compose_film(gray(200, 180, 320), VIEWS, gray(77, 135, 160), None, gray(33, 135, 160))
    assert page.shape == compose_film(gray(200, 180, 320), VIEWS, gray(77, 135, 160)).shape
    rows = [
        np.flatnonzero((page[:, 320:] == level).all(axis=2).sum(axis=1) > 20) for level in (77, 33)
    ]
    assert len(rows[0]) > 40
    assert len(rows[1]) > 40
    assert rows[0].max() < rows[1].min()


def test_predicted_and_observed_are_of_one_size_and_fill_their_panel():
    page = compose_film(gray(200, 180, 320), VIEWS, gray(77, 135, 160), None, gray(33, 90, 400))
    boxes = [np.argwhere((page[:, 320:] == level).all(axis=2)) for level in (77, 33)]
    sizes = [tuple(np.ptp(box, axis=0) + 1) for box in boxes]
    assert sizes[0] == sizes[1]
    assert boxes[0][:, 1].min() == 8  # a gap on either side and no more
    assert page.shape[1] - 320 - boxes[0][:, 1].max() <= 8 + 2


def test_the_clock_is_over_the_scene_and_the_outcome_across_it():
    beauty = gray(100, 180, 320)
    at = [
        compose_film(beauty, VIEWS, None, "pick up", None, time_s)[:20, :320]
        for time_s in (None, 3.2, 14.7)
    ]
    np.testing.assert_array_equal(at[0][:, :160], at[1][:, :160])
    assert not np.array_equal(at[0][:, 240:], at[1][:, 240:])
    assert not np.array_equal(at[1][:, 240:], at[2][:, 240:])
    good, bad = (
        compose_film(beauty, VIEWS, outcome=f"{word}: ...")[150:180, :320]
        for word in ("success", "timeout")
    )
    assert good[-1, -1, 1] > good[-1, -1, 0] + 40
    assert bad[-1, -1, 0] > bad[-1, -1, 1] + 40


def test_a_film_begins_before_its_first_prediction_and_ends_with_the_outcome(tmp_path):
    """Frames before the first chunk get its panel, so that a film with latency has one size; the
    last ones say how it ended.
    """
    robot = Robot()
    with VideoRecorder(robot.scene, tmp_path / "film.mp4", 10.0, "go") as film:
        for _ in range(3):
            film.film_tick(robot.data)
        assert film._writer.frames == 0
        film.show_prediction(np.full((4, 27, 32, 3), 90, np.uint8), 0.0)
        film.film_tick(robot.data)
        assert film._writer.frames == 4
        film.finish(robot.data, "timeout: The time was up.")
    frames, rate = read(tmp_path / "film.mp4")
    assert (len(frames), rate) == (4 + 15, 10)
    band = frames[:, 350, 600].astype(int)
    assert np.ptp(band[:4], axis=0).max() < 6
    assert np.ptp(band[4:], axis=0).max() < 6
    assert np.abs(band[-1] - [150, 60, 40]).max() < 16


def test_what_happened_is_composed_as_the_policy_sees_it():
    rng = np.random.default_rng(0)
    views = {
        name: np.kron(rng.integers(0, 256, (18, 32, 3)), np.ones((10, 10, 1))).astype(np.uint8)
        for name in DROID_RIG.views
    }
    quick, asked = composite(list(views.values())), compose(views, DROID_RIG)
    # a view in another place: 30 and more
    assert np.abs(resize(asked, quick.shape[:2], "bilinear") - quick).mean() < 12


def test_what_happened_is_shown_as_far_as_the_prediction_reaches():
    """The bundled policy's canvas holds a picture 152 wide, of which a predicted frame has the
    first 144 columns.
    """
    rng = np.random.default_rng(1)
    views = {
        name: np.kron(rng.integers(0, 256, (18, 32, 3)), np.ones((10, 10, 1))).astype(np.uint8)
        for name in DROID_RIG.views
    }
    predicted = compose_for_tier(views, DROID_RIG, 128)[:, :144]
    shown, whole = observed_picture(views, predicted), observed_picture(views)
    assert shown.shape[1] < whole.shape[1]

    def off(seen):
        return np.abs(resize(seen, (128, 144), "bilinear").astype(float) - predicted).mean()

    assert off(shown) < 0.6 * off(whole)
    assert observed_picture(views, whole).shape == whole.shape
