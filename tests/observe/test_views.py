from fractions import Fraction

import numpy as np
import pytest

from strands_cosmos3.embodiments import DROID_RIG, CameraRig
from strands_cosmos3.errors import ConfigError, ObservationError, ShapeError
from strands_cosmos3.observe.views import (
    TIERS,
    as_uint8,
    canvas_composite,
    canvas_hw,
    compose,
    compose_for_tier,
    letterbox,
    resize,
    to_canvas,
)


def picture(height, width, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)


def views(height=360, width=640):
    return {name: picture(height, width, i) for i, name in enumerate(DROID_RIG.views)}


def test_composite():
    given = views()
    made = compose(given, DROID_RIG)
    assert made.shape == (*DROID_RIG.composite_hw, 3)
    assert np.array_equal(made[:360], given["wrist"])
    for view, left in (("exterior_1", 0), ("exterior_2", 320)):
        quarter = given[view].reshape(180, 2, 320, 2, 3).mean((1, 3))
        assert np.abs(made[360:, left : left + 320] - quarter).max() <= 0.5


def test_halved_views_are_resampled_bilinearly_to_the_bit():
    given = {name: picture(180, 320, i) for i, name in enumerate(DROID_RIG.views)}
    made = compose(given, DROID_RIG)
    for view, left in (("exterior_1", 0), ("exterior_2", 320)):
        boxed = letterbox(given[view], (360, 640))
        expected = np.floor(resize(boxed, (180, 320), "bilinear", antialias=False) + 0.5)
        np.testing.assert_array_equal(made[360:, left : left + 320], expected)


@pytest.mark.parametrize("hw", [(180, 320), (1, 1), (1, 5), (3, 2)])
def test_doubled_views_are_resampled_bilinearly_to_the_bit(hw):
    given = np.random.default_rng(1).integers(0, 256, (*hw, 3), dtype=np.uint8)
    twice = 2 * hw[0], 2 * hw[1]
    expected = np.floor(resize(given, twice, "bilinear") + 0.5)
    np.testing.assert_array_equal(letterbox(given, twice), expected)
    higher = letterbox(given, (twice[0] + 2, twice[1]))
    np.testing.assert_array_equal(higher[1:-1], expected)
    assert not higher[[0, -1]].any()


def test_composite_tells_left_from_right_and_what_is_missing():
    flat = {
        name: np.full((90, 160, 3), v, np.uint8)
        for name, v in zip(DROID_RIG.views, (10, 20, 30), strict=True)
    }
    made = compose(flat, DROID_RIG)
    assert [int(made[y, x, 0]) for y, x in ((100, 300), (500, 100), (500, 600))] == [10, 20, 30]
    del flat["exterior_2"]
    with pytest.raises(ObservationError, match=r"exterior_2 are missing.*given: wrist, exterior_1"):
        compose(flat, DROID_RIG)


def test_letterbox_keeps_the_aspect():
    made = letterbox(np.full((480, 640, 3), 200, np.uint8), (360, 640))
    assert made.shape == (360, 640, 3)
    assert (made[:, 80:560] == 200).all()
    assert (made[:, :80] == 0).all()
    assert (made[:, 560:] == 0).all()
    assert letterbox(made, (360, 640)) is made


def test_a_letterboxed_picture_fills_one_side_and_is_cut_on_the_other():
    """Exactly: 78 rows times 360 / 78 are 360, not 359 by rounding; 249.5 columns are 249."""
    for height, width in ((78, 70), (101, 70), (90, 400), (93, 165), (1, 4000), (360, 640)):
        scale = min(Fraction(360, height), Fraction(640, width))
        expected = max(1, int(height * scale)), max(1, int(width * scale))
        inside = letterbox(np.full((height, width, 3), 200, np.uint8), (360, 640)).any(-1)
        assert (inside.any(1).sum(), inside.any(0).sum()) == expected


@pytest.mark.parametrize("hw", [(180, 320), (45, 77), (400, 700)])
def test_letterbox_resamples_as_pil(hw):
    Image = pytest.importorskip("PIL.Image")
    given = picture(360, 640)
    fitted = np.asarray(Image.fromarray(given).resize(hw[::-1], Image.Resampling.BILINEAR)).astype(
        float
    )
    assert np.abs(resize(given, hw, "bilinear") - fitted).max() <= 1.01


@pytest.mark.parametrize("hw", [(45, 77), (90, 160), (100, 301)])
@pytest.mark.parametrize(
    ("kernel", "antialias"), [("bilinear", False), ("bilinear", True), ("bicubic", True)]
)
def test_resize_as_torch(hw, kernel, antialias):
    torch = pytest.importorskip("torch")
    given = picture(180, 320).astype(np.float32)
    tensor = torch.from_numpy(given).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(
        tensor, hw, mode=kernel, antialias=antialias, align_corners=False
    )
    assert (
        np.abs(resize(given, hw, kernel, antialias) - expected[0].permute(1, 2, 0).numpy()).max()
        < 0.02
    )  # torch computes positions in float32


@pytest.mark.parametrize(
    ("hw", "tier", "expected"),
    [
        ((540, 640), 480, (544, 736)),
        ((540, 640), 256, (256, 320)),
        ((480, 640), 480, (544, 736)),
        ((720, 1280), 720, (720, 1280)),
        ((1280, 720), 704, (1280, 704)),
        ((300, 300), 480, (640, 640)),
    ],
)
def test_canvas(hw, tier, expected):
    assert canvas_hw(*hw, tier) == expected


def test_tiers_as_in_diffusers():
    pytest.importorskip("torch")
    module = pytest.importorskip("diffusers.pipelines.cosmos.pipeline_cosmos3_omni")
    # ours alone, for small checkpoints
    theirs = {tier: canvases for tier, canvases in TIERS.items() if tier != 128}
    for tier, canvases in theirs.items():
        assert set(canvases) == set(module._ACTION_RESOLUTION_BINS[str(tier)].values())
    from diffusers.video_processor import VideoProcessor

    for height, width in ((540, 640), (100, 900), (333, 222), (128, 128), (240, 320)):
        for tier in theirs:
            bins = module._ACTION_RESOLUTION_BINS[str(tier)]
            assert canvas_hw(height, width, tier) == VideoProcessor.classify_height_width_bin(
                height, width, bins
            )


def test_no_upscaling_and_reflect_padding():
    given = picture(540, 640)
    canvas = to_canvas(given[None], (544, 736))
    assert canvas.content_hw == (540, 640)
    unit = given.astype(np.float32) / 255 * 2 - 1
    assert np.array_equal(canvas.frames[0, :540, :640], unit)
    assert np.array_equal(canvas.frames[0, :540, 640:], unit[:, 638:542:-1])
    assert np.array_equal(canvas.frames[0, 540:, :640], unit[538:534:-1])


def test_a_small_picture_repeats_its_edge():
    given = picture(100, 300)
    canvas = to_canvas(given[None], (640, 640))
    assert canvas.content_hw == (100, 300)
    assert np.array_equal(
        canvas.frames[0, 100:, 5], np.repeat(canvas.frames[0, 99:100, 5], 540, axis=0)
    )


@pytest.mark.parametrize("hw", [(540, 640), (720, 1280), (96, 128), (1000, 300)])
def test_canvas_as_diffusers_pads_it(hw):
    torch = pytest.importorskip("torch")
    given = picture(*(n - n % 16 for n in hw))
    target = canvas_hw(*given.shape[:2], 480)
    frames = torch.from_numpy(given.astype(np.float32) / 255 * 2 - 1).permute(2, 0, 1)[None]
    scale = min(target[1] / given.shape[1], target[0] / given.shape[0], 1.0)
    content = int(scale * given.shape[0] + 0.5), int(scale * given.shape[1] + 0.5)
    if content != given.shape[:2]:
        frames = torch.nn.functional.interpolate(
            frames, content, mode="bicubic", align_corners=False, antialias=True
        )
    right, bottom = target[1] - content[1], target[0] - content[0]
    mode = "replicate" if right >= content[1] or bottom >= content[0] else "reflect"
    expected = (
        torch.nn.functional.pad(frames, (0, right, 0, bottom), mode=mode)[0]
        .permute(1, 2, 0)
        .numpy()
    )
    canvas = to_canvas(given[None], target)
    assert canvas.content_hw == content
    assert np.abs(canvas.frames[0] - expected).max() < 2e-4  # torch computes positions in float32


def test_the_nearest_aspect_is_by_height_over_width():
    """As diffusers and cosmos-framework measure it; by width over height 207 x 300 would be
    nearer to 256 x 320.
    """
    assert canvas_hw(207, 300, 256) == (192, 320)


def test_padding_as_wide_as_the_content_repeats_the_edge():
    given = picture(64, 32)
    canvas = to_canvas(given[None], (64, 64))
    assert np.array_equal(
        canvas.frames[0, :, 32:], np.repeat(canvas.frames[0, :, 31:32], 32, axis=1)
    )


def test_letterbox_centres_wide_pictures_too():
    made = letterbox(np.full((100, 400, 3), 200, np.uint8), (360, 640))
    assert (made[100:260] == 200).all()
    assert not made[:100].any()
    assert not made[260:].any()


@pytest.mark.parametrize(
    ("hw", "top", "left"),
    [((78, 70), 0, 158), ((97, 70), 0, 190), ((60, 125), 26, 0), ((71, 330), 111, 0)],
)
def test_an_odd_padding_is_smaller_at_the_top_and_on_the_left(hw, top, left):
    view = np.full((*hw, 3), 200, np.uint8)
    content = letterbox(view, (360, 640)).any(-1)
    assert (content.any(1).argmax(), content.any(0).argmax()) == (top, left)
    assert 0 <= content.any(1)[::-1].argmax() - top <= 1
    assert 0 <= content.any(0)[::-1].argmax() - left <= 1
    one_view = CameraRig(("wrist",), ("wrist",), (360, 640), ((0, 0, 360, 640),), "")
    require_equal_canvases({"wrist": view}, one_view, 128)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int16, np.int64])
def test_a_picture_of_at_most_one_may_have_either_scale(dtype):
    unit = np.zeros((2, 3, 3), dtype)
    unit[0, 0, 0] = 1
    assert as_uint8(unit) is unit
    unit[1, 1, 1] = 2
    assert np.array_equal(as_uint8(unit), unit.astype(np.uint8))
    assert as_uint8(unit).dtype == np.uint8


def test_floats_and_bytes_agree():
    given = picture(64, 64)
    assert np.array_equal(
        to_canvas(given[None], (64, 64)).frames,
        to_canvas(given[None].astype(np.float32) / 255, (64, 64)).frames,
    )


def test_refusals():
    with pytest.raises(ConfigError, match="256, 480, 704, 720"):
        canvas_hw(10, 10, 500)
    with pytest.raises(ShapeError, match="multiple of 16"):
        to_canvas(picture(64, 64)[None], (60, 64))
    with pytest.raises(ShapeError):
        letterbox(picture(64, 64)[..., :1], (32, 32))
    with pytest.raises(ShapeError):
        letterbox(picture(64, 64).astype(np.float32), (32, 32))


SIDE_BY_SIDE = CameraRig(
    ("agent", "wrist"),
    ("observation/image", "observation/wrist_image"),
    (256, 256),
    ((0, 0, 192, 192), (0, 192, 192, 192)),
    "The left half shows the scene.",
)
"""Another layout than the packaged rigs': two views beside each other, both smaller."""


def test_a_composite_follows_the_rig_s_boxes():
    pictures = {
        name: np.full((240, 240, 3), level, np.uint8)
        for name, level in zip(SIDE_BY_SIDE.views, (40, 90), strict=True)
    }
    composite = compose(pictures, SIDE_BY_SIDE)
    assert SIDE_BY_SIDE.composite_hw == composite.shape[:2] == (192, 384)
    assert (composite[:, :192] == 40).all()
    assert (composite[:, 192:] == 90).all()
    with pytest.raises(ObservationError, match="wrist are missing"):
        compose({"agent": pictures["agent"]}, SIDE_BY_SIDE)


GREY_LEVELS = 1.5


def pictures(*sizes):
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 256, (*hw, 3)).astype(np.uint8) for hw in sizes]
    return dict(zip(DROID_RIG.views, made, strict=True))


@pytest.mark.parametrize("tier", [128, 256])
@pytest.mark.parametrize(
    "sizes",
    [
        ((180, 320),) * 3,
        ((360, 640),) * 3,
        ((480, 640), (360, 640), (90, 400)),
        ((100, 70), (720, 1280), (181, 321)),
    ],
)
def test_a_composite_for_a_tier_is_the_composite_on_its_canvas(sizes, tier):
    """The worst case is noise: each of three roundings hits every pixel."""
    require_equal_canvases(pictures(*sizes), DROID_RIG, tier)


def test_a_composite_for_a_tier_follows_any_rig_s_boxes():
    views = dict(zip(SIDE_BY_SIDE.views, pictures(*((200, 240),) * 3).values(), strict=False))
    require_equal_canvases(views, SIDE_BY_SIDE, 128)


def require_equal_canvases(views, rig, tier):
    whole = compose(views, rig)
    expected = to_canvas(whole[None], canvas_hw(*whole.shape[:2], tier))
    height, width = expected.content_hw
    quick = compose_for_tier(views, rig, tier)
    assert quick.shape == (height, width, 3)
    levels = np.clip((expected.frames[0] + 1) * 127.5, 0, 255)
    apart = np.abs(levels[:height, :width] - quick)
    assert apart.max() < GREY_LEVELS
    assert apart.mean() < 0.4
    again = to_canvas(quick[None], canvas_hw(height, width, tier))
    assert (again.content_hw, again.frames.shape) == (expected.content_hw, expected.frames.shape)
    assert np.abs((again.frames[0] + 1) * 127.5 - levels).max() < GREY_LEVELS, "the padding too"


def test_views_keep_their_places_for_a_tier():
    views = {
        name: np.full((90, 160, 3), v, np.uint8)
        for name, v in zip(DROID_RIG.views, (10, 20, 30), strict=True)
    }
    made = compose_for_tier(views, DROID_RIG, 128)
    assert [int(made[y, x, 0]) for y, x in ((40, 75), (110, 30), (110, 120))] == [10, 20, 30]
    other = compose_for_tier(views | {"exterior_2": views["wrist"]}, DROID_RIG, 128)
    assert int(other[110, 120, 0]) == 10, "the maps are kept, the pictures are not"


def test_a_large_canvas_takes_the_composite_as_it_is():
    views = pictures(*((180, 320),) * 3)
    assert np.array_equal(compose_for_tier(views, DROID_RIG, 480), compose(views, DROID_RIG))


def test_training_pads_it_as_the_canvas_is_padded():
    views = pictures(*((180, 320),) * 3)
    quick = canvas_composite(DROID_RIG, ((180, 320),) * 3, 128)
    assert (quick.canvas_hw, quick.content_hw) == ((128, 160), (128, 152))
    padded = quick.padded(list(views.values()))
    canvas = to_canvas(quick(list(views.values()))[None], (128, 160)).frames[0]
    assert np.abs((canvas + 1) * 127.5 - padded).max() < 1e-3


def test_errors_for_a_tier_are_those_of_the_composite():
    views = pictures(*((180, 320),) * 3)
    with pytest.raises(ShapeError, match="exterior_1"):
        compose_for_tier(views | {"exterior_1": views["exterior_1"][..., 0]}, DROID_RIG, 128)
    del views["exterior_2"]
    with pytest.raises(ObservationError, match="exterior_2 are missing"):
        compose_for_tier(views, DROID_RIG, 128)
