import json

import pytest

from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.errors import InputError, UnknownNameError
from strands_cosmos3.observe.prompts import compose_prompt

DROID = {
    "view": "concat",
    "num_frames": 33,
    "fps": 15,
    "canvas_hw": (544, 736),
    "layout": DROID_RIG.layout,
}
LAYOUT = (
    "This video contains concatenated views from multiple camera perspectives. The top row is "
    "from the wrist-mounted camera. "
    "The bottom row contains two horizontally concatenated third-person perspective views of the "
    "scene from opposite sides, "
    "with the robot visible."
)


def test_plain_is_exact():
    assert compose_prompt("pick up the red cube", prompt_format="plain", **DROID) == (
        f"pick up the red cube. {LAYOUT} The video is 2.0 seconds long and is of 15 FPS. This "
        "video is of 544x736 resolution."
    )


def test_json_is_exact():
    assert compose_prompt("pick up the red cube", prompt_format="json", **DROID) == (
        '{"cinematography": {"framing": "'
        + LAYOUT
        + '"}, "actions": [{"time": "0:00-0:02", "description": '
        '"pick up the red cube."}], "duration": "2s", "fps": 15.0, "resolution": {"H": 544, "W": '
        "736}, "
        '"aspect_ratio": "4,3"}'
    )


@pytest.mark.parametrize("view", ["ego_view", "third_person_view", "wrist_view", "concat_view"])
@pytest.mark.parametrize(
    ("frames", "fps", "hw"),
    [(17, 5, (480, 832)), (61, 10, (256, 320)), (901, 10, (320, 192)), (17, 5, (720, 832))],
)
def test_json_as_diffusers_writes_it(view, frames, fps, hw):
    pytest.importorskip("torch")
    pipeline = pytest.importorskip("diffusers").Cosmos3OmniPipeline
    expected = pipeline._build_action_json_prompt(
        "stop!", view_point=view, num_frames=frames, fps=fps, height=hw[0], width=hw[1]
    )
    assert (
        compose_prompt(
            "stop!", prompt_format="json", view=view, num_frames=frames, fps=fps, canvas_hw=hw
        )
        == expected
    )


def test_duration_is_cut_and_the_end_is_rounded():
    caption = json.loads(
        compose_prompt(
            "go", prompt_format="json", view="ego", num_frames=17, fps=6, canvas_hw=(256, 256)
        )
    )
    assert (caption["duration"], caption["actions"][0]["time"]) == ("2s", "0:00-0:03")  # 2.83 s
    plain = compose_prompt(
        "go", prompt_format="plain", view="ego", num_frames=17, fps=6, canvas_hw=(256, 256)
    )
    assert "is 2.0 seconds long" in plain, "cosmos-framework's int(num_frames / fps)"


@pytest.mark.parametrize("text", ["go", " go ", "go."])
def test_full_stop(text):
    made = compose_prompt(
        text, prompt_format="plain", view="ego", num_frames=17, fps=15, canvas_hw=(256, 256)
    )
    assert made.startswith("go. This video is captured from a first-person")
    assert "is 1.0 seconds long" in made


@pytest.mark.parametrize("text", ["", "  \n"])
def test_a_blank_instruction_is_a_caption(text):
    """As diffusers writes it in JSON, and as cosmos-framework leaves it in the plain format."""
    pytest.importorskip("torch")
    pipeline = pytest.importorskip("diffusers").Cosmos3OmniPipeline
    assert compose_prompt(text, prompt_format="plain", **DROID) == ""
    about = {"num_frames": 17, "fps": 5}
    expected = pipeline._build_action_json_prompt(
        text, view_point="ego_view", height=256, width=320, **about
    )
    assert (
        compose_prompt(text, prompt_format="json", view="ego", canvas_hw=(256, 320), **about)
        == expected
    )


def test_refusals():
    with pytest.raises(UnknownNameError, match="concat, ego"):
        compose_prompt(
            "go", prompt_format="plain", view="top", num_frames=17, fps=15, canvas_hw=(256, 256)
        )
    with pytest.raises(UnknownNameError, match="json, plain"):
        compose_prompt("go", prompt_format="yaml", **DROID)
    with pytest.raises(InputError, match="fps"):
        compose_prompt("go", prompt_format="plain", **{**DROID, "fps": 0})
