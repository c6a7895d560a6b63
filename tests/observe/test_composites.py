"""The composite in one step against the composite and the canvas in two."""

import numpy as np
import pytest

from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.errors import ObservationError, ShapeError
from strands_cosmos3.observe.composites import canvas_composite, compose_for_tier
from strands_cosmos3.observe.views import canvas_hw, compose, to_canvas

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
def test_it_is_the_composite_on_its_canvas(sizes, tier):
    """The worst case is noise: each of three roundings hits every pixel."""
    views = pictures(*sizes)
    whole = compose(views, DROID_RIG)
    expected = to_canvas(whole[None], canvas_hw(*whole.shape[:2], tier))
    height, width = expected.content_hw
    quick = compose_for_tier(views, DROID_RIG, tier)
    assert quick.shape == (height, width, 3)
    levels = np.clip((expected.frames[0] + 1) * 127.5, 0, 255)
    apart = np.abs(levels[:height, :width] - quick)
    assert apart.max() < GREY_LEVELS
    assert apart.mean() < 0.4
    again = to_canvas(quick[None], canvas_hw(height, width, tier))
    assert (again.content_hw, again.frames.shape) == (expected.content_hw, expected.frames.shape)
    assert np.abs((again.frames[0] + 1) * 127.5 - levels).max() < GREY_LEVELS, "the padding too"


def test_views_keep_their_places():
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


def test_errors_are_those_of_the_composite():
    views = pictures(*((180, 320),) * 3)
    with pytest.raises(ShapeError, match="exterior_1"):
        compose_for_tier(views | {"exterior_1": views["exterior_1"][..., 0]}, DROID_RIG, 128)
    del views["exterior_2"]
    with pytest.raises(ObservationError, match="exterior_2 are missing"):
        compose_for_tier(views, DROID_RIG, 128)
