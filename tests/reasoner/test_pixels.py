"""Pictures and films become the patches that the models were trained on."""

import numpy as np
import pytest
import torch
from PIL import Image

from reasoner.conftest import KINDS, QUESTION
from strands_cosmos3.errors import InputError, ResourceNotFoundError, ShapeError
from strands_cosmos3.films import VideoWriter
from strands_cosmos3.reasoner.pixels import Film

MEAN, DEVIATION = 0.5, 0.5  # of preprocessor_config.json


@pytest.fixture(params=KINDS)
def processor(request, reasoners):
    return reasoners[request.param].prompts.processor


def cut_pictures(processor, images):
    """Patches and grids of pictures."""
    made = processor(text=[processor.image_token * len(images)], images=images, return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def cut_film(processor, film):
    """Patches and grid of a film."""
    films = processor.video_processor
    frames, metadata = films.read(film)
    made = films([frames], [metadata])
    return made["pixel_values_videos"], made["video_grid_thw"][0].tolist()


def restored(patches, grid, joined, edge):
    """Frames [F, H, W, 3] that patches were cut of: blocks of 2 x 2 patches of 16 x 16 pixels, row
    by row; Nano's hold colour, time, row, column, Edge's row, column, colour.
    """
    t, h, w = grid
    blocks = np.asarray(patches).reshape(t, h // 2, w // 2, 2, 2, -1)
    inner = (16, 16, 3, joined) if edge else (3, joined, 16, 16)
    pixels = blocks.reshape(*blocks.shape[:-1], *inner)
    order = (0, 8, 1, 3, 5, 2, 4, 6, 7) if edge else (0, 6, 1, 3, 7, 2, 4, 8, 5)
    return pixels.transpose(order).reshape(t * joined, h * 16, w * 16, 3)


def frames_of(processor, patches, grid):
    joined = processor.video_processor.temporal_patch_size
    return restored(patches, grid, joined, joined == 1)


def test_patches_of_pictures(processor, pictures):
    pixels, grids = cut_pictures(processor, pictures)
    start = 0
    for picture, grid in zip(pictures, grids.tolist(), strict=True):
        count = grid[1] * grid[2]
        # Nano's patches hold the picture twice
        for frame in frames_of(processor, pixels[start : start + count], grid):
            np.testing.assert_allclose(frame, (picture / 255 - MEAN) / DEVIATION, atol=1e-6)
        start += count
    assert start == len(pixels)


def test_patches_of_a_film(processor, film):
    """Five frames of 2.5 s; where two share a patch the last one is repeated."""
    joined = processor.video_processor.temporal_patch_size
    chosen = [0, 5, 10, 14, 19] + [19] * (joined - 1)
    frames = frames_of(processor, *cut_film(processor, film))
    np.testing.assert_allclose(frames, (film.frames[chosen] / 255 - MEAN) / DEVIATION, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "fps", "chosen"),
    [
        (20, 8.0, [0, 5, 10, 14, 19]),  # two a second, first and last among them
        (20, 100.0, [0, 6, 13, 19]),  # at least four
        (3, 30.0, [0, 1, 2]),  # or all
        (1, 30.0, [0]),
        (10, 1.0, list(range(10))),
    ],
)
def test_frames_that_are_read(processor, count, fps, chosen):
    assert processor.video_processor.chosen(count, fps) == chosen


def test_no_more_frames_than_the_checkpoint_says(processor):
    assert len(processor.video_processor.chosen(100_000, 10.0)) == 768


def test_a_film_on_disk_is_the_film_in_memory(processor, tmp_path):
    """Up to what its compression loses; the frames are told apart by their grey."""
    grey = np.arange(20, dtype=np.uint8) * 12
    frames = np.broadcast_to(grey[:, None, None, None], (20, 64, 96, 3)).copy()
    with VideoWriter(tmp_path / "f.mp4", 8.0) as writer:
        for frame in frames:
            writer.write(frame)
    films = processor.video_processor
    assert films.read(tmp_path / "f.mp4")[1] == films.read(Film(frames, 8.0))[1]
    on_disk, grid = cut_film(processor, tmp_path / "f.mp4")
    in_memory, same = cut_film(processor, Film(frames, 8.0))
    assert grid == same
    assert (on_disk - in_memory).abs().max() < 4 * 2 / 255


def test_large_films_and_pictures_are_scaled_down(processor):
    """To the size that the checkpoint's files state, in multiples of two patches."""
    _, grids = cut_pictures(processor, [Image.new("RGB", (1400, 700))])
    _, h, w = grids[0].tolist()
    assert h % 2 == w % 2 == 0
    assert 200_000 < h * w * 256 <= 512 * 512
    _, (t, h, w) = cut_film(processor, Film(np.zeros((64, 700, 700, 3), np.uint8), 2.0))
    assert (t * processor.video_processor.temporal_patch_size, h, w) == (64, 16, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_the_same_as_a_path_an_image_and_floats(kind, reasoners, pictures, tmp_path):
    writer = reasoners[kind].prompts
    path = tmp_path / "a.png"
    Image.fromarray(pictures[0]).save(path)
    expected = writer.inputs(QUESTION, pictures[:1])["pixel_values"]
    for same in (path, str(path), Image.fromarray(pictures[0]), pictures[0] / np.float32(255)):
        assert torch.equal(writer.inputs(QUESTION, [same])["pixel_values"], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_refused(kind, reasoners, tmp_path):
    inputs = reasoners[kind].prompts.inputs
    (tmp_path / "text.mp4").write_text("no film")
    with pytest.raises(InputError, match="not a readable video"):
        inputs(QUESTION, (), [tmp_path / "text.mp4"])
    with pytest.raises(ResourceNotFoundError, match="does not exist"):
        inputs(QUESTION, (), [tmp_path / "none.mp4"])
    with pytest.raises(InputError, match="one frame, got 2"):
        inputs(QUESTION, [np.zeros((2, 64, 64, 3), np.uint8)])
    with pytest.raises(InputError, match="cannot be read"):
        inputs(QUESTION, [np.zeros((4, 4000, 3), np.uint8)])
    with pytest.raises(ShapeError, match="frames must be uint8"):
        Film(np.zeros((2, 64, 64, 3)), 8.0)
    with pytest.raises(InputError, match="fps"):
        Film(np.zeros((2, 64, 64, 3), np.uint8), 0.0)
