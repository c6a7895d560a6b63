"""Pictures and captions as NVIDIA's cosmos-framework makes them:
``assets/make_framework_golden.py`` ran its own functions.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from helpers.cosmos3_oracle import pipeline
from helpers.options import backend_options
from strands_cosmos3.backends.model_input import ModelInput
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.frames import compose_views, read_frames
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.engine.request import pixel_to_latent_shape
from strands_cosmos3.engine.tokens import SYSTEM_PROMPT
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.errors import InputError, ShapeError
from strands_cosmos3.observe.prompts import compose_prompt
from strands_cosmos3.observe.views import compose
from strands_cosmos3.serving import wire

ASSETS = Path(__file__).parents[1] / "assets"
sys.path.insert(0, str(ASSETS))
from make_framework_golden import CASES, KEYS, picture  # noqa: E402 - the inputs, not the functions

GOLDEN = json.loads((ASSETS / "framework_golden.json").read_text(encoding="utf-8"))
DROID = get_embodiment("droid")


def pictures(name):
    sizes, dtype, _ = CASES[name]
    return [picture(seed, hw, dtype) for seed, hw in enumerate(sizes)]


def assert_as_recorded(made, name):
    assert made.shape == (*DROID_RIG.composite_hw, 3)
    assert made.dtype == np.uint8
    off = np.abs(made[::29, ::31].astype(int) - np.array(GOLDEN["composites"][name]["pixels"]))
    assert off.max() == 0 if CASES[name][2] else (off.max() <= 1 and (off > 0).mean() < 0.01)


@pytest.mark.parametrize("name", CASES)
def test_pictures(name):
    given = pictures(name)
    images = dict(zip(DROID_RIG.views, given, strict=True)) if len(given) == 3 else given[0]
    (made,) = read_frames(images, DROID_RIG, "framework")
    assert_as_recorded(made, name)


@pytest.mark.parametrize("name", CASES)
def test_pictures_through_a_served_policy(released, joint_checkpoint, name):
    """The same messages that their server gets."""
    given = pictures(name)
    keys = KEYS if len(given) == 3 else (wire.COMPOSITE,)
    message = dict(zip(keys, given, strict=True)) | {
        wire.JOINTS: np.zeros(7),
        wire.GRIPPER: 0.2,
        wire.PROMPT: "go!",
    }
    read = wire.decode_request(
        message, DROID, DROID.spaces["joint_pos"], images=True, compose=released.compose
    )
    (made,) = released([read], "native")
    assert made.video_shape == pixel_to_latent_shape(33, *DROID_RIG.composite_hw)
    canvas = made.cond_video_pixels[
        0, :, 0, : DROID_RIG.composite_hw[0], : DROID_RIG.composite_hw[1]
    ].permute(1, 2, 0)
    assert_as_recorded(((canvas + 1) * 127.5).round().byte().numpy(), name)
    tokenizer = AutoTokenizer.from_pretrained(joint_checkpoint / "text_tokenizer")
    assert "go!. This video contains" in tokenizer.decode(made.text_ids[0])


@pytest.fixture
def released(joint_checkpoint):
    """A small checkpoint in the place of the released Nano policy."""
    found = replace(Checkpoint.open(joint_checkpoint), variant=VARIANTS["nano-policy-droid"])
    return ModelInput(found, backend_options(image_size=480))


def test_released_policies_have_the_servers_pictures_and_others_ours(joint_checkpoint, released):
    assert [v.name for v in VARIANTS.values() if v.composition == "framework"] == [
        "nano-policy-droid",
        "edge-policy-droid",
    ]
    views = {name: picture(seed, (480, 640), "uint8") for seed, name in enumerate(DROID_RIG.views)}
    letterboxed = compose(views, DROID_RIG)
    ours = ModelInput(Checkpoint.open(joint_checkpoint), backend_options())
    assert np.array_equal(ours.compose(views, DROID_RIG), letterboxed)
    assert released.compose(views, DROID_RIG).shape == (720, 640, 3)
    found = replace(Checkpoint.open(joint_checkpoint), variant=VARIANTS["edge-policy-droid"])
    optional = ModelInput(found, backend_options(composition="letterbox"))
    assert np.array_equal(optional.compose(views, DROID_RIG), letterboxed)
    recorded = replace(Checkpoint.open(joint_checkpoint), metadata={"composition": "framework"})
    assert ModelInput(recorded, backend_options()).compose(views, DROID_RIG).shape == (720, 640, 3)


def test_a_composed_picture_precedes_views(released):
    """As in their server, where a message holds both."""
    message = {key: picture(i, (360, 640), "uint8") for i, key in enumerate(KEYS)} | {
        wire.JOINTS: np.zeros(7),
        wire.GRIPPER: 0,
        wire.PROMPT: "pick up the red cube",
    }
    whole = picture(9, DROID_RIG.composite_hw, "uint8")
    read = wire.decode_request(
        {**message, wire.COMPOSITE: whole},
        DROID,
        DROID.spaces["joint_pos"],
        images=True,
        compose=released.compose,
    )
    assert np.array_equal(read.composite, whole)


def test_letterboxed_pictures_keep_their_size():
    small = picture(0, (100, 123), "uint8")
    assert read_frames(small, DROID_RIG).shape == (1, 100, 123, 3)
    assert read_frames(small, None, "framework").shape == (1, 100, 123, 3), (
        "domains without a rig have no canvas of their own"
    )


def test_refused_compositions():
    views = {name: picture(0, (360, 641), "uint8") for name in DROID_RIG.views}
    with pytest.raises(ShapeError, match="even width"):
        compose_views(views, DROID_RIG, "framework")
    with pytest.raises(InputError, match="framework, letterbox"):
        compose_views(views, DROID_RIG, "mosaic")
    unit = dict.fromkeys(DROID_RIG.views, np.full((36, 64, 3), 0.5))
    # within [0, 1] the scale is in doubt; their server would see black
    with pytest.raises(ShapeError, match="uint8"):
        compose_views(unit, DROID_RIG, "framework")
    assert read_frames(unit["wrist"], DROID_RIG, "framework").dtype == np.float32, (
        "a single one is read as a fraction"
    )


@pytest.mark.parametrize("case", GOLDEN["captions"], ids=lambda c: f"{c[1]}-{c[2]}-{c[0]}-{c[3]}")
def test_captions(case):
    instruction, kind, view, frames, fps, hw, expected = case
    made = compose_prompt(
        instruction,
        prompt_format=kind,
        view=view,
        num_frames=frames,
        fps=fps,
        canvas_hw=tuple(hw),
        layout=DROID_RIG.layout if view == "concat_view" else "",
    )
    # the framework drops the caption, diffusers keeps it without a description
    if kind == "json" and not instruction:
        assert (expected, json.loads(made)["actions"][0]["description"]) == ("", "")
    else:
        assert made == expected


def test_the_system_prompt_is_diffusers(checkpoints):
    """As in diffusers' pipeline; NVIDIA's own checkpoints have none in the framework."""
    found = Checkpoint.open(checkpoints["silu"])
    assert found.use_system_prompt is False
    raw = {
        "images": picture(0, (96, 128), "uint8"),
        "task": "go",
        "domain_name": "bridge_orig_lerobot",
    }
    made = Cosmos3PolicyProcessor.for_checkpoint(
        replace(found, use_system_prompt=True), image_size=256, fps=5
    ).preprocess(raw)
    pipe = pipeline(checkpoints["silu"], torch.float32)
    about = {
        "num_frames": 17,
        "fps": 5,
        "height": 256,
        "width": 320,
        "action_mode": "policy",
        "action_view_point": "ego_view",
    }
    ids, negative = type(pipe).tokenize_prompt(pipe, "go", None, use_system_prompt=True, **about)
    assert (made.text_ids[0].tolist(), made.neg_text_ids[0].tolist()) == (list(ids), list(negative))
    text = pipe.text_tokenizer.decode(ids)
    assert SYSTEM_PROMPT in text


@pytest.mark.parametrize(("index", "expected"), [(True, True), (False, False), (None, False)])
def test_what_model_index_says(checkpoints, tmp_path, index, expected):
    folder = tmp_path / "c"
    shutil.copytree(checkpoints["silu"], folder)
    path = folder / "model_index.json"
    known = json.loads(path.read_text())
    known.pop("default_use_system_prompt")
    flags = dict.fromkeys(("default_use_system_prompt", "use_native_flow_schedule"), index)
    path.write_text(json.dumps(known if index is None else known | flags))
    found = Checkpoint.open(folder)
    assert (found.use_system_prompt, found.scheduler.native_flow) == (expected, expected)


def test_history_is_the_last_rows_of_the_state(joint_checkpoint):
    found = Checkpoint.open(joint_checkpoint)
    three = Cosmos3PolicyProcessor.for_checkpoint(
        found, domain_name="droid", image_size=256, history_length=3
    )
    past = np.random.RandomState(0).uniform(0, 1, (5, 8))
    made = three.preprocess({"images": picture(0, (96, 128), "uint8"), "task": "go", "state": past})
    np.testing.assert_allclose(made.action_prefix[:, :8], past[2:], rtol=1e-6)
    assert made.request().history_rows == 2
    with pytest.raises(InputError, match="history_length is 3"):
        three.preprocess(
            {"images": picture(0, (96, 128), "uint8"), "task": "go", "state": past[:2]}
        )
    one = Cosmos3PolicyProcessor.for_checkpoint(found, domain_name="droid", image_size=256)
    latest = one.preprocess({"images": picture(0, (96, 128), "uint8"), "task": "go", "state": past})
    np.testing.assert_allclose(latest.action_prefix[:, :8], past[4:], rtol=1e-6)
