"""The input contract: what is accepted, what it becomes, what is refused."""

import copy
import json
import warnings
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.cosmos3_oracle import engine, pipeline
from strands_cosmos3.actions.stats import load_action_stats
from strands_cosmos3.embodiments import DROID_RIG, WIRE_GRIPPER, Sampling
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.metadata import StateRow
from strands_cosmos3.engine.processor import Clip, Cosmos3PolicyProcessor
from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    ActionSpaceError,
    ConfigError,
    InputError,
    LayoutError,
    NonFiniteError,
    ObservationError,
    ResourceNotFoundError,
    ShapeError,
    StatisticsError,
    UnknownNameError,
)


@pytest.fixture(scope="module")
def make(checkpoints):
    def build(**options):
        return Cosmos3PolicyProcessor(
            checkpoints["silu"] / "text_tokenizer",
            **{"domain_name": "droid_lerobot", "image_size": 256, **options},
        )

    return build


@pytest.fixture(scope="module")
def plain(make):
    return make()


def picture(height=96, width=128, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)


def call(image, **fields):
    return {"images": image, "task": "pick up the red cube", **fields}


def test_every_kind_of_image_gives_the_same_pixels(plain, tmp_path):
    array = picture()
    Image.fromarray(array).save(tmp_path / "a.png")
    tensor = torch.from_numpy(array)
    kinds = [
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        Image.fromarray(array),
        array,
        array.transpose(2, 0, 1),
        array.astype(np.float32) / 255,
        array.astype(np.float64) / 255,
        tensor,
        tensor.permute(2, 0, 1),
        tensor.permute(2, 0, 1)[None].float() / 255,
        [array],
        [Image.fromarray(array)],
        array[None],
    ]
    expected = plain.preprocess(call(array)).pixel_values
    assert expected.shape == (1, 3, 1, 256, 320)
    assert torch.equal(
        expected[0, :, 0, :96, :128], torch.from_numpy(array).permute(2, 0, 1).float() / 255 * 2 - 1
    )
    for kind in kinds:
        torch.testing.assert_close(
            plain.preprocess(call(kind)).pixel_values, expected, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(("orientation", "quarter_turns"), [(1, 0), (3, 2), (6, 1), (8, 3)])
def test_a_photograph_is_read_upright(plain, tmp_path, orientation, quarter_turns):
    array = picture()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.rot90(array, quarter_turns)).save(tmp_path / "a.png", exif=exif)
    found, expected = (plain.preprocess(call(image)) for image in (tmp_path / "a.png", array))
    assert torch.equal(found.pixel_values, expected.pixel_values)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_more_than_eight_bits_are_not_cut_off(plain, tmp_path, dtype):
    image = Image.fromarray(picture()[..., 0].astype(dtype))
    image.save(tmp_path / "a.tiff")
    for source in (image, tmp_path / "a.tiff"):
        with pytest.raises(InputError, match=r"more than 8 bits a pixel; scale it to 8 bits\."):
            plain.preprocess(call(source))


@pytest.mark.parametrize("side", [20_000, 60_000, 2**31 - 1])
def test_a_picture_of_too_many_pixels_is_refused(plain, tmp_path, side):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[16:24] = side.to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(InputError, match="is not a readable image"):
        plain.preprocess(call(tmp_path / "a.png"))


def test_views_are_composed(make):
    droid = make(image_size=480)
    views = {name: picture(360, 640, i) for i, name in enumerate(DROID_RIG.views)}
    made = droid.preprocess(call(views))
    assert made.pixel_values.shape == (1, 3, 1, 544, 736)
    assert made.video_shape == (17, 540, 640)
    assert made.request().video_shape == (5, 33, 40)
    assert "The top row is from the wrist-mounted camera." in made.prompt
    with pytest.raises(ObservationError, match="one picture"):
        make(domain_name="fractal", action_chunk_size=16).preprocess(call(views))


def test_the_seeds_own_example(make):
    """The single-GPU page's processor, argument by argument."""
    processor = make(
        height=480,
        width=832,
        num_frames=17,
        mode="policy",
        action_chunk_size=16,
        fps=24.0,
        image_size=480,
        prompt_format="json",
        view_point="ego_view",
        cond_frame_indexes=(0,),
        device="cpu",
        params_dtype=torch.bfloat16,
    )
    made = processor.preprocess(
        {"images": picture(480, 640), "task": ["robot picks up the cup", "x"], "cond_action": None}
    )
    assert (made.domain_id, made.raw_action_dim, made.action_chunk, made.fps) == (8, 10, 16, 24.0)
    assert made.pixel_values.shape == (1, 3, 1, 480, 832)
    assert made.pixel_values.dtype == torch.bfloat16
    assert made.text_ids.shape == made.text_mask.shape
    assert '"description": "robot picks up the cup."' in made.prompt
    assert "first-person" in made.prompt


def test_the_domain_gives_what_is_not_said(plain):
    made = plain.preprocess(call(picture()))
    assert (made.action_chunk, made.fps, made.raw_action_dim, made.space.name) == (
        16,
        15,
        10,
        "midtrain",
    )
    assert "concatenated views" in made.prompt


def test_a_call_resolves_its_own_mode_and_domain(plain, make):
    made = plain.preprocess(call(picture(), domain_name="agibotworld"))
    assert (made.domain_id, made.raw_action_dim, made.fps) == (15, 29, 10)
    bare = {
        "domain_id": 20,
        "mode": "forward_dynamics",
        "action": [[0.0] * 10],
    }
    made = make(fps=5, raw_action_dim=10).preprocess(call(picture(), **bare))
    assert (made.domain_id, made.mode, made.cond_action.shape) == (
        20,
        "forward_dynamics",
        (1, 16, 64),
    )
    with pytest.raises(ConfigError, match="fps"):
        make(raw_action_dim=10).preprocess(call(picture(), **bare))
    assert plain.preprocess(call(picture())).domain_id == 8, "and the next call is untouched"
    narrow = make(domain_name=20, raw_action_dim=7, fps=5)
    assert narrow.preprocess(call(picture())).raw_action_dim == 7
    assert narrow.preprocess(call(picture(), domain_name="agibotworld")).raw_action_dim == 29, (
        "the width was the other's"
    )


def test_tokens_are_those_of_the_stock_pipeline(plain, checkpoints):
    made = plain.preprocess(call(picture(), domain_name="bridge_orig_lerobot"))
    pipe = pipeline(checkpoints["relu2"], torch.float32)
    tokenize = type(pipe).tokenize_prompt
    ids, negative = tokenize(
        pipe,
        "pick up the red cube",
        None,
        num_frames=17,
        fps=5,
        height=256,
        width=320,
        use_system_prompt=False,
        action_mode="policy",
        action_view_point="ego_view",
    )
    assert made.text_ids[0].tolist() == list(ids)
    assert made.neg_text_ids[0].tolist() == list(negative)


@pytest.mark.parametrize("prompt", ["", "  ", "Füge ☃ 積み木を取る 🤖!", "is it there?", "go.\n"])
def test_any_prompt_that_the_stock_pipeline_accepts(make, checkpoints, prompt):
    made = make(negative_prompt=prompt).preprocess(
        {"images": picture(), "task": prompt, "domain_name": "bridge_orig_lerobot"}
    )
    pipe = pipeline(checkpoints["relu2"], torch.float32)
    about = {
        "num_frames": 17,
        "fps": 5,
        "height": 256,
        "width": 320,
        "action_mode": "policy",
        "action_view_point": "ego_view",
    }
    ids, negative = type(pipe).tokenize_prompt(
        pipe, prompt, prompt, use_system_prompt=False, **about
    )
    assert made.text_ids[0].tolist() == list(ids)
    assert made.neg_text_ids[0].tolist() == list(negative)


def test_longer_actions_are_cut_at_the_end(plain):
    rows = np.arange(400.0).reshape(40, 10) / 400
    made = plain.preprocess(call(picture(), mode="forward_dynamics", action=rows)).cond_action[0]
    np.testing.assert_allclose(made[:, :10], rows[:16], rtol=1e-6)


def test_a_caption_counts_the_given_frame_and_names_a_rigs_layout_only(make):
    """14 rows at 15 Hz are a clip of one second; LIBERO's views are joined otherwise than
    DROID's.
    """
    made = make(action_chunk_size=14).preprocess(call(picture()))
    assert '"duration": "1s"' in made.prompt
    assert "The top row is" in made.prompt
    libero = make(domain_name="libero").preprocess(call(picture()))
    assert "concatenated views" in libero.prompt
    assert "The top row is" not in libero.prompt


def test_the_domain_that_a_checkpoint_records(checkpoints):
    found = replace(
        Checkpoint.open(checkpoints["silu"]),
        metadata={"domain": "bridge_orig_lerobot", "resolution_tier": 256},
    )
    assert Cosmos3PolicyProcessor.for_checkpoint(found).preprocess(call(picture())).fps == 5


def test_a_policys_clip_may_be_shorter(make):
    processor = make(policy_frames=1)
    assert processor.preprocess(call(picture())).video_shape[0] == 1
    known = {"mode": "forward_dynamics", "action": [[0.0] * 10]}
    assert processor.preprocess(call(picture(), **known)).video_shape[0] == 17


def test_a_poses_state_row_is_scaled(make):
    scale = StateRow(tuple(np.linspace(-0.5, 0.4, 10)), tuple(np.linspace(0.5, 2, 10)))
    state = np.linspace(0.1, 1, 10)
    made = make(state_row=scale).preprocess(call(picture(), state=state))
    np.testing.assert_allclose(
        made.action_prefix[0, :10], (state - scale.mean) / scale.std, rtol=1e-6
    )


def test_a_caption_counts_as_it_stands(make):
    """An empty one too: it is the unconditional branch's."""
    processor = make(negative_prompt="blurred")
    empty = processor.preprocess(call(picture(), caption=""))
    assert empty.prompt == ""
    unconditional = make().preprocess(call(picture()))
    assert torch.equal(empty.text_ids, unconditional.neg_text_ids)
    assert processor.preprocess(call(picture(), caption="as it stands")).prompt == "as it stands"
    assert "pick up" in processor.preprocess(call(picture(), caption=None)).prompt


def test_a_negative_prompt(make, checkpoints):
    model = engine(checkpoints["silu"], torch.float32)
    asked = [make(negative_prompt=text).preprocess(call(picture())) for text in ("blurred", "")]
    assert not torch.equal(asked[0].neg_text_ids, asked[1].neg_text_ids)
    answers = [model.step(one.request(Sampling(1, 3.0)))["action"] for one in asked]
    assert not torch.allclose(*answers, atol=1e-3)


def test_other_samplings_of_a_request_share_its_tensors(plain):
    made = plain.preprocess(call(picture()))
    request = made.request(Sampling(2, 3.0), seed=3)
    assert (request.num_inference_steps, request.guidance_scale, request.seed) == (2, 3.0, 3)
    assert made.request().num_inference_steps == 30
    for name in ("cond_video_pixels", "text_ids", "neg_text_ids"):
        assert getattr(request, name) is getattr(made.engine_request, name)
    assert request.cond_video_pixels is made.pixel_values
    assert copy.copy(made).prompt == made.prompt


def test_forward_dynamics_repeats_and_trims(plain):
    rows = np.arange(30.0).reshape(3, 10) / 30
    made = plain.preprocess(call(picture(), mode="forward_dynamics", cond_action=rows)).cond_action[
        0
    ]
    assert made.shape == (16, 64)
    np.testing.assert_allclose(made[:3, :10], rows, rtol=1e-6)
    np.testing.assert_allclose(made[3:, :10], np.repeat(rows[2:], 13, axis=0), rtol=1e-6)
    assert not made[:, 10:].any()
    many = plain.preprocess(call(picture(), mode="forward_dynamics", action=torch.zeros(1, 40, 64)))
    assert many.cond_action.shape == (1, 16, 64)


@pytest.mark.parametrize("method", ["quantile", "quantile_rot", "meanstd", "minmax"])
def test_denormalisation_and_the_way_back(make, method, tmp_path):
    """What policy returns can be given to forward dynamics as it is."""
    source = tmp_path / "droid_lerobot_stats.json"
    figures = {
        name: getattr(load_action_stats("droid_lerobot"), name).tolist() for name in ("q01", "q99")
    }
    low, high = (np.array(figures[name]) for name in ("q01", "q99"))
    figures |= {"mean": ((low + high) / 2).tolist(), "std": ((high - low) / 3).tolist()}
    figures |= {"min": (2 * low - high).tolist(), "max": (2 * high - low).tolist()}
    raw = {**figures, "q01": (low - 0.01).tolist()}
    source.write_text(json.dumps({"global": figures, "global_raw": raw}))
    processor = make(action_stats_path=source, action_normalization=method)
    z = torch.from_numpy(np.random.RandomState(0).uniform(-1, 1, (1, 16, 10))).float()
    processor.preprocess(call(picture()))
    physical = processor.postprocess({"action": z, "pixels": torch.zeros(1)})
    a, b = {
        "quantile": (low, high),
        "quantile_rot": (low - 0.01, high),
        "minmax": (2 * low - high, 2 * high - low),
        "meanstd": ((low + high) / 2 - (high - low) / 3, (low + high) / 2 + (high - low) / 3),
    }[method]
    expected = z.numpy().astype(float) * (b - a) / 2 + (b + a) / 2
    np.testing.assert_allclose(physical["action"], expected, rtol=1e-6, atol=1e-9)
    assert "pixels" in physical
    back = processor.preprocess(
        call(picture(), mode="forward_dynamics", cond_action=physical["action"])
    ).cond_action
    np.testing.assert_allclose(back[..., :10], z, atol=2e-5)
    bound = processor.preprocess(
        call(picture(), action_prefix=physical["action"][0, :3])
    ).action_prefix
    np.testing.assert_allclose(bound[:, :10], z[0, :3], atol=2e-5)


@pytest.mark.parametrize("domain", ["droid_lerobot", "fractal", "bridge_orig_lerobot"])
def test_a_file_that_names_no_domain_is_of_the_processors(make, domain, tmp_path):
    """The seven keys of a file of NVIDIA's processor, under a name of one's own."""
    ones = np.ones(10)
    figures = {"mean": 0 * ones, "std": ones, "min": -4 * ones, "max": 4 * ones}
    figures |= {"q01": -2 * ones, "q99": 2 * ones}
    content = {name: value.tolist() for name, value in figures.items()}
    raw = {"q01": (-3 * ones).tolist(), "q99": (3 * ones).tolist()}
    source = tmp_path / "mine.json"
    source.write_text(json.dumps({**content, "global_raw": raw}))
    for method, scale in (("meanstd", 1), ("quantile", 2), ("quantile_rot", 3), ("minmax", 4)):
        processor = make(domain_name=domain, action_stats_path=source, action_normalization=method)
        processor.preprocess(call(picture()))
        physical = processor.postprocess(torch.full((1, 16, 10), 0.5))["action"]
        np.testing.assert_allclose(physical, 0.5 * scale)
    of_call = make(domain_name=None, action_stats_path=source)
    of_call.preprocess(call(picture(), domain_name=domain))
    np.testing.assert_allclose(of_call.postprocess(torch.ones(1, 16, 10))["action"], 2)
    named = source.rename(tmp_path / "umi_lerobot_stats.json")
    with pytest.raises(StatisticsError, match="of 'umi', not of"):
        make(domain_name=domain, action_stats_path=named)


def test_without_statistics_the_scale_stays(plain):
    action = torch.randn(1, 16, 64)
    plain.preprocess(call(picture()))
    assert torch.equal(plain.postprocess(action)["action"].float(), action[..., :10])
    assert plain.postprocess({"action": action[0]})["action"].shape == (1, 16, 10)


def test_statistics_must_fit(make):
    with pytest.raises(StatisticsError, match="droid_lerobot"):
        make(domain_name="fractal", action_stats_path="droid_lerobot")
    with pytest.raises(ActionSpaceError, match="joint_pos"):
        make(action_space="joint_pos", action_stats_path="droid_lerobot")
    processor = make(action_stats_path="droid_lerobot")
    with pytest.raises(StatisticsError):
        processor.preprocess(
            call(picture(), domain_name="umi", mode="forward_dynamics", action=[[0.0] * 10])
        )
    processor.preprocess(call(picture()))
    with pytest.raises(ActionOutOfRangeError):
        processor.postprocess(torch.full((1, 16, 10), 11.0))


@pytest.mark.parametrize(
    ("joints", "state"),
    [
        (True, [0.0, -36.0, 0.0, -144.0, 0.0, 108.0, 0.0, 1.0]),
        (False, [480.0, 0.0, 240.0, 1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 1.0]),
        (False, [0.48, 0.0, 0.24, 1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 100.0]),
    ],
)
def test_a_state_in_degrees_millimetres_or_per_cent_is_refused(make, joints, state):
    scale = StateRow((0.0,) * 10, (1.0,) * 10)
    made = make(action_space="joint_pos") if joints else make(state_row=scale)
    with pytest.raises(InputError, match="where 10 is the most: metres, rad"):
        made.preprocess(call(picture(), state=state))


@pytest.mark.parametrize(("value", "error"), [(float("nan"), NonFiniteError), (1.6, InputError)])
def test_a_clip_of_pixels_that_cannot_be_is_refused(value, error):
    """Requests trust a clip's."""
    pixels = torch.zeros(1, 3, 1, 16, 16)
    pixels[0, 2, 0, 15, 15] = value
    with pytest.raises(error, match="cond_video_pixels"):
        Clip(pixels, (16, 16))


def test_a_prefix_leaves_a_row_to_answer(plain, make):
    """And is no longer than the rows that are declared."""
    for processor, longest in (
        (plain, plain.settings().action_chunk - 1),
        (make(prefix_rows=3), 3),
    ):
        rows = np.full((longest + 1, 10), 0.5)
        made = processor.preprocess(call(picture(), action_prefix=rows[:longest]))
        assert len(made.action_prefix) == longest
        with pytest.raises(InputError, match=f"this checkpoint takes {longest} of a chunk"):
            processor.preprocess(call(picture(), action_prefix=rows))


def test_joint_pos_state_and_gripper(make):
    """An asymmetric opening, in both directions: the wire's 0.2 is four fifths open."""
    wire = make(action_space="joint_pos", gripper=WIRE_GRIPPER)
    state = [0.1, -0.2, 0.3, -2.0, 0.0, 1.5, 0.7, 0.2]
    made = wire.preprocess(call(picture(), state=state))
    assert (made.action_chunk, made.raw_action_dim) == (32, 8)
    assert made.action_prefix.shape == (1, 64)
    np.testing.assert_allclose(made.action_prefix[0, :8], [*state[:7], 0.8], rtol=1e-6)
    action = torch.zeros(1, 32, 8)
    action[..., -1] = 0.8
    np.testing.assert_allclose(wire.postprocess(action)["action"][..., -1], 0.2, rtol=1e-6)
    known = wire.preprocess(
        call(picture(), state=state, mode="forward_dynamics", cond_action=[state])
    ).cond_action
    np.testing.assert_allclose(known[0, 0, :8], [*state[:7], 0.8], rtol=1e-6)
    model = make(action_space="joint_pos").preprocess(call(picture(), state=state))
    np.testing.assert_allclose(model.action_prefix[0, :8], state, rtol=1e-6)


def test_end_to_end(checkpoints, make):
    model = engine(checkpoints["silu"], torch.float32)
    processor = Cosmos3PolicyProcessor.for_checkpoint(
        model.checkpoint, domain_name="droid", image_size=256
    )
    made = processor.preprocess(call(picture()))
    result = model.step(made.request(Sampling(2, 3.0), seed=1))
    assert processor.postprocess(result, made)["action"].shape == (1, 16, 10)
    clip = [picture(seed=i) for i in range(17)]
    made = processor.preprocess(call(clip, mode="inverse_dynamics"))
    assert made.pixel_values.shape[2] == 17
    assert model.step(made.request(Sampling(1)))["action"].shape == (1, 16, 10)
    two = Cosmos3PolicyProcessor.for_checkpoint(
        model.checkpoint, domain_name="droid", image_size=256, cond_frame_indexes=(0, 1)
    ).preprocess(call(clip, mode="inverse_dynamics"))
    assert two.pixel_values.shape[2] == 5, "only the frames that clean latents need"


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({}, InputError, "images"),
        ({"images": picture()}, InputError, "task"),
        ({"images": picture(), "task": 7}, InputError, "string"),
        (
            {"images": picture(), "task": None, "caption": None},
            InputError,
            "lacks 'task' or 'prompt'; it has: images",
        ),
        ({"images": picture(), "caption": 7}, InputError, "caption must be a string"),
        (
            {"images": picture(), "task": "x", "caption": [7]},
            InputError,
            "caption must be a string",
        ),
        ({"images": picture(), "task": "x", "fluff": 1}, InputError, "unknown input fields: fluff"),
        ({"images": [], "task": "x"}, InputError, "empty"),
        ({"images": "nothing.png", "task": "x"}, ResourceNotFoundError, "nothing.png"),
        ({"images": 5, "task": "x"}, InputError, "int"),
        ({"images": np.zeros((3, 64, 3), np.uint8), "task": "x"}, ShapeError, "first or last"),
        ({"images": np.zeros((64, 64), np.uint8), "task": "x"}, ShapeError, "64, 64"),
        ({"images": np.zeros((64, 64, 4), np.uint8), "task": "x"}, ShapeError, "three colours"),
        ({"images": np.zeros((64, 64, 3), np.int64), "task": "x"}, InputError, "int64"),
        ({"images": np.full((64, 64, 3), 200.0), "task": "x"}, InputError, "uint8"),
        ({"images": np.full((64, 64, 3), -0.5), "task": "x"}, InputError, r"\(x \+ 1\)"),
        ({"images": np.full((64, 64, 3), np.nan), "task": "x"}, NonFiniteError, "NaN"),
        ({"images": [picture(), picture(64, 64)], "task": "x"}, ShapeError, "share size"),
        ({"images": picture(), "task": "x", "mode": "dream"}, UnknownNameError, "inverse_dynamics"),
        (
            {"images": picture(), "task": "x", "mode": "inverse_dynamics"},
            InputError,
            "more than one frame",
        ),
        ({"images": picture(), "task": "x", "mode": "forward_dynamics"}, InputError, "cond_action"),
        (
            {"images": picture(), "task": "x", "cond_action": [[0.0] * 10]},
            InputError,
            "forward_dynamics",
        ),
        (
            {"images": picture(), "task": "x", "mode": "forward_dynamics", "action": [[0.0] * 9]},
            ShapeError,
            "9 columns",
        ),
        (
            {"images": picture(), "task": "x", "mode": "forward_dynamics", "action": "x"},
            InputError,
            "numbers",
        ),
        (
            {"images": picture(), "task": "x", "mode": "forward_dynamics", "action": []},
            ShapeError,
            "rows",
        ),
        (
            {
                "images": picture(),
                "task": "x",
                "mode": "forward_dynamics",
                "action": [[float("nan")] * 10],
            },
            NonFiniteError,
            "is nan",
        ),
        (
            {"images": picture(), "task": "x", "domain_name": "mars"},
            UnknownNameError,
            "droid_lerobot",
        ),
        ({"images": picture(), "task": "x", "domain_id": 8}, InputError, "raw_action_dim"),
        (
            {"images": picture(), "task": "x", "domain_id": 8, "domain_name": "umi"},
            ConfigError,
            "different",
        ),
        ({"images": picture(), "task": "x", "state": [0.0] * 8}, InputError, "joint_pos"),
    ],
)
def test_refused_inputs(plain, fields, error, match):
    with pytest.raises(error, match=match):
        plain.preprocess(fields)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"height": 480}, ConfigError),
        ({"num_frames": 17, "action_chunk_size": 15}, ConfigError),
        ({"domain_name": "xdof_yam"}, ConfigError),
        ({"domain_name": 8}, InputError),
        ({"domain_name": 8, "raw_action_dim": 65}, InputError),
        ({"fps": -1.0}, ConfigError),
        ({"view_point": "top"}, UnknownNameError),
        ({"mode": "dream"}, UnknownNameError),
        ({"action_space": "pose"}, ActionSpaceError),
    ],
)
def test_refused_options(make, options, error):
    with pytest.raises(error):
        make(**options)


@pytest.mark.parametrize("indexes", [(5,), (-1,), (0, 0), (), (0.5,), (True,)])
def test_bad_frame_indexes(make, indexes):
    with pytest.raises(InputError, match="cond_frame_indexes"):
        make(cond_frame_indexes=indexes).preprocess(call([picture(), picture()]))


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8, torch.bfloat16])
def test_a_clip_as_the_engine_answers_it(make, kind):
    """[1, 3, F, H, W]: its frames are those of a list of pictures."""
    clip = torch.rand(1, 3, 5, 48, 64)
    clip = (clip * 255).byte() if kind is torch.uint8 else clip.to(kind)
    processor = make(cond_frame_indexes=(0, 1))
    made = processor.preprocess(call(clip)).pixel_values
    frames = [frame.permute(1, 2, 0) for frame in clip[0].permute(1, 0, 2, 3)]
    assert torch.equal(made, processor.preprocess(call(frames)).pixel_values)
    for wrong in (clip.repeat(2, 1, 1, 1, 1), clip[:, :2], clip[None]):
        with pytest.raises(ShapeError, match=r"\[1, 3, F, H, W\]"):
            processor.preprocess(call(wrong))


@pytest.mark.parametrize("value", [True, False])
def test_metadata_of_a_caption_is_no_option(make, value):
    with pytest.raises(ConfigError, match="append_metadata: captions always"):
        make(append_metadata=value)


def test_one_picture_has_one_frame(make):
    with pytest.raises(InputError, match="single picture"):
        make(cond_frame_indexes=(0, 1)).preprocess(call(picture()))


def test_no_tokenizer(tmp_path):
    with pytest.raises(LayoutError, match="tokenizer"):
        Cosmos3PolicyProcessor(tmp_path, domain_name="droid")


def test_results_without_an_action(plain):
    with pytest.raises(InputError, match="action"):
        plain.postprocess({"pixels": 1})
    with pytest.raises(ShapeError):
        plain.postprocess(torch.zeros(1, 16, 9))


@pytest.mark.parametrize(
    ("largest", "warned"), [(0.009, True), (1e-4, True), (0.0, False), (0.3, False)]
)
@pytest.mark.parametrize("domain", ["droid_lerobot", "bridge_orig_lerobot", "umi"])
def test_raw_metres_where_normalised_rows_are_due(make, domain, largest, warned):
    rows = np.full((16, 10), 0.5)
    rows[:, :3] = 0
    rows[3, 1] = -largest
    given = {**call(picture()), "mode": "forward_dynamics", "cond_action": rows}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(domain_name=domain, action_chunk_size=16).preprocess(given)
    assert any("normalised" in str(warning.message) for warning in caught) == warned
