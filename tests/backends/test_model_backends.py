"""``native`` and ``diffusers`` behind the policy: the same question, the same world, answers in
the model's own rows.
"""

import json
import os
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

torch = pytest.importorskip("torch")
AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
pytest.importorskip("diffusers")

from helpers.options import backend_options  # noqa: E402
from helpers.parity import asked_of, reference, share  # noqa: E402
from recipes.random_checkpoint import write_checkpoint  # noqa: E402
from strands_cosmos3.actions.decode import decode_chunk  # noqa: E402
from strands_cosmos3.actions.stats import load_action_stats  # noqa: E402
from strands_cosmos3.backends import BACKENDS, make_backend, required_inputs  # noqa: E402
from strands_cosmos3.backends.base import Backend  # noqa: E402
from strands_cosmos3.backends.engine_backend import EngineBackend  # noqa: E402
from strands_cosmos3.backends.model_input import ModelInput, as_pictures  # noqa: E402
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment  # noqa: E402
from strands_cosmos3.engine.checkpoint import Checkpoint  # noqa: E402
from strands_cosmos3.engine.frames import compose_views  # noqa: E402
from strands_cosmos3.engine.metadata import StateRow  # noqa: E402
from strands_cosmos3.engine.variants import VARIANTS  # noqa: E402
from strands_cosmos3.errors import (  # noqa: E402
    ActionSpaceError,
    BackendError,
    ConfigError,
    InputError,
    LayoutError,
    MissingDependencyError,
    StatisticsError,
    UnknownNameError,
    VariantError,
)
from strands_cosmos3.options import with_options  # noqa: E402
from strands_cosmos3.policy import Cosmos3Policy  # noqa: E402
from strands_cosmos3.robots.panda import HOME_Q  # noqa: E402
from strands_cosmos3.serving.wire import encode_rows  # noqa: E402
from strands_cosmos3.types import Mode, Observation, Request  # noqa: E402

QUICK = backend_options(device="cpu", num_steps=2, guidance_scale=3.0, image_size=128)
STOCK = with_options(QUICK, {"image_size": 256})  # the smallest that diffusers takes
HW = (80, 112)
DROID = get_embodiment("droid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "midtrain")


@pytest.fixture(scope="module")
def joint_folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "joint", action_space="joint_pos")


@pytest.fixture(scope="module")
def native(folder):
    return make_backend("native", folder, QUICK)


def question(**changes):
    picture = np.random.RandomState(0).randint(0, 256, (*HW, 3), dtype=np.uint8)
    made = Request(
        DROID,
        DROID.action_space(),
        "pick up the red cube",
        8,
        np.zeros(7),
        0.8,
        composite=picture,
        seed=3,
    )
    return replace(made, **changes)


def test_both_keep_the_protocol_and_the_engine_agrees_with_the_pipeline(
    folder, native, monkeypatch
):
    """Given the pipeline's noise, the two backends answer alike: pictures, captions and schedule
    are the same.
    """
    stock = make_backend("diffusers", folder, STOCK)
    assert isinstance(native, Backend)
    assert isinstance(stock, Backend)
    assert native.model_sha256 == stock.model_sha256
    expected = stock.infer(question(n_rows=4))
    generator = torch.Generator().manual_seed(3)
    noise = [
        torch.randn((1, 16, 2, HW[0] // 16, HW[1] // 16), generator=generator),
        torch.randn((4, 64), generator=generator),
    ]
    step_batch = native.engine.step_batch
    with_noise = {"video_noise": noise[0], "action_noise": noise[1]}
    monkeypatch.setattr(
        native.engine,
        "step_batch",
        lambda asked: step_batch([replace(one, **with_noise) for one in asked]),
    )
    asked = asked_of(native.engine, monkeypatch)
    found = EngineBackend(native.engine, STOCK).infer(question(n_rows=4))
    assert found.action.shape == (4, 10)
    exact = reference(folder, replace(asked[0], **with_noise)).exact["action"]
    assert share(found.action, exact, expected.action) <= 1


def declaring(folder, to, **metadata):
    """A copy of a checkpoint whose checkpoint.json declares something more."""
    shutil.copytree(folder, to, copy_function=os.link)
    about = json.loads((to / "checkpoint.json").read_text())
    about["strands_cosmos3"] |= metadata
    (to / "checkpoint.json").unlink()
    (to / "checkpoint.json").write_text(json.dumps(about))
    return to


@pytest.mark.parametrize("space", ["midtrain", "joint_pos"])
def test_a_chunk_begins_with_what_the_arm_is_bound_to_do(folder, joint_folder, space, tmp_path):
    """Clean rows in front, to the bit of float32; they change what follows, and the first
    chunk's own rows lead back to it.
    """
    declares = declaring(
        folder if space == "midtrain" else joint_folder, tmp_path / "model", prefix_rows=3
    )
    backend = make_backend("native", declares, QUICK)
    assert backend.info.prefix_rows == 3
    asked = question(action_space=DROID.action_space(space), n_rows=8)
    free = backend.infer(asked).action
    bound = np.random.RandomState(1).uniform(-0.5, 0.5, (3, free.shape[1])) + (
        0.5 if space == "joint_pos" else 0
    )
    chunk = backend.infer(replace(asked, action_prefix=bound)).action
    np.testing.assert_allclose(chunk[:3], bound, atol=1e-6)
    assert np.abs(chunk[3:] - free[3:]).max() > 1e-3
    assert chunk.shape == free.shape
    longer = np.concatenate((bound, bound[:1]))
    with pytest.raises(InputError, match=r"4 rows.*takes 3 of a chunk of 8.*declares"):
        backend.infer(replace(asked, action_prefix=longer))
    policy = Cosmos3Policy(backend=backend, robot="panda" if space == "midtrain" else None)
    assert policy.prefix_rows == 3
    seen = Observation(
        HOME_Q, 1.0, dict.fromkeys(DROID_RIG.views, np.zeros((90, 160, 3), np.uint8))
    )
    with pytest.raises(InputError, match=r"4 rows.* takes 3"):
        policy.plan(seen, "reach the red cube", action_prefix=longer)
    backend.close()


def with_own_statistics(folder, to, domain="droid_lerobot"):
    """A copy of a checkpoint whose rows are in units of 0.5 to 3 times the packaged range."""
    copy, packaged = declaring(folder, to, prefix_rows=3), load_action_stats("droid")
    half = (packaged.q99 - packaged.q01) / 2 * np.linspace(0.5, 3, 10)
    stats = {
        "schema": 1,
        "domain": domain,
        "columns": packaged.columns,
        "q01": list(0.1 - half),
        "q99": list(0.1 + half),
    }
    (copy / "action_stats.json").write_text(json.dumps(stats))
    return copy


@pytest.mark.parametrize(("name", "options"), [("native", QUICK), ("diffusers", STOCK)])
def test_a_chunk_carries_the_statistics_of_its_checkpoint(folder, native, name, options, tmp_path):
    own = make_backend(name, with_own_statistics(folder, tmp_path / "own"), options)
    plain, chunk = (backend.infer(question(n_rows=4)) for backend in (native, own))
    stats = load_action_stats(tmp_path / "own" / "action_stats.json")
    own.close()
    assert plain.quantiles is None
    if name == "native":
        np.testing.assert_array_equal(chunk.action, plain.action)  # the model's own units
    np.testing.assert_array_equal(chunk.quantiles, (stats.q01, stats.q99))
    decoded = decode_chunk(chunk, np.eye(4))
    np.testing.assert_array_equal(
        decoded.T_base_frame,
        decode_chunk(replace(chunk, quantiles=None), np.eye(4), stats).T_base_frame,
    )
    packaged = decode_chunk(replace(chunk, quantiles=None), np.eye(4))
    assert np.abs(decoded.T_base_frame - packaged.T_base_frame).max() > 1e-2
    asked = question(limb_poses={"arm": np.eye(4)}, action_space=DROID.action_space("midtrain"))
    sent = encode_rows(chunk, asked)  # a client reads metres
    np.testing.assert_allclose(sent[:, :3], decoded.T_base_frame[:, :3, 3], atol=1e-6)


def test_known_rows_are_in_the_units_of_the_chunk(folder, tmp_path):
    own = make_backend("native", with_own_statistics(folder, tmp_path / "own"), QUICK)
    rows = np.random.RandomState(1).uniform(-0.5, 0.5, (8, 10))
    chunk = own.infer(question(action_prefix=rows[:3]))
    np.testing.assert_allclose(chunk.action[:3], rows[:3], atol=1e-6)
    forward = own.infer(question(mode=Mode.FORWARD_DYNAMICS, conditioning_actions=rows))
    np.testing.assert_allclose(forward.action, rows, atol=1e-6)
    assert forward.quantiles is not None
    own.close()


def test_statistics_of_another_domain_are_refused(folder, tmp_path):
    own = make_backend("native", with_own_statistics(folder, tmp_path / "own", "umi"), QUICK)
    with pytest.raises(StatisticsError, match="umi"):
        own.infer(question())
    own.close()


def test_a_checkpoint_that_declares_no_prefix_rows_is_sent_none(native):
    assert native.info.prefix_rows == 0
    with pytest.raises(InputError, match="takes none of a chunk"):
        native.infer(question(action_prefix=np.zeros((3, 10))))
    policy = Cosmos3Policy(backend=native)
    assert policy.prefix_rows == 0


@pytest.mark.parametrize("rows", [0, -1, 2.5, True, "8"])
def test_prefix_rows_that_make_no_sense_are_refused(folder, tmp_path, rows):
    with pytest.raises(LayoutError, match="prefix_rows must be a whole number"):
        make_backend("native", declaring(folder, tmp_path / "model", prefix_rows=rows), QUICK)


def test_committed_rows_that_make_no_sense_are_refused(native):
    rows = np.zeros((3, 10))
    for changes in (
        {"action_prefix": np.zeros((8, 10))},  # nothing would be left to answer
        {"action_prefix": np.zeros((3, 9))},
        {"action_prefix": np.full((3, 10), np.nan)},
        {
            "action_prefix": rows,
            "mode": Mode.INVERSE_DYNAMICS,
            "clip": np.zeros((9, 16, 16, 3), np.uint8),
        },
    ):
        with pytest.raises(InputError):
            native.infer(question(**changes))
    with Cosmos3Policy(backend="scripted", robot="panda") as scripted:
        assert scripted.prefix_rows == 0
        with pytest.raises(ConfigError, match="declare prefix_rows"):
            scripted.plan(Observation(HOME_Q, 1.0), "reach the red cube", action_prefix=rows)


@pytest.mark.parametrize("instruction", ["", " \n"])
def test_a_robot_is_told_what_to_do(native, instruction):
    """The engine takes a blank prompt; a policy does not, unless the caption is given as it
    stands.
    """
    with pytest.raises(InputError, match="the instruction is blank"):
        native.infer(question(instruction=instruction))
    assert native.infer(
        question(instruction=instruction, prompt="pick up the red cube")
    ).action.shape == (8, 10)


def test_the_backend_composes_the_views(native, monkeypatch):
    """A policy and a server leave it to the backend, which knows its checkpoint."""
    from strands_cosmos3.evaluation.plan import Condition
    from strands_cosmos3.evaluation.policies import ConditionedBackend

    views = {
        name: np.full((90, 160, 3), 50 * i, np.uint8) for i, name in enumerate(DROID_RIG.views)
    }
    stretching = EngineBackend(native.engine, with_options(QUICK, {"composition": "framework"}))
    assert native.compose(views, DROID_RIG).shape == (128, 152, 3), (
        "what its canvas holds of 540 x 640"
    )
    assert stretching.compose(views, DROID_RIG).shape == (135, 160, 3)
    conditioned = ConditionedBackend(stretching, Condition())
    assert conditioned.compose(views, DROID_RIG).shape == (135, 160, 3)
    asked = []
    monkeypatch.setattr(
        stretching, "infer", lambda request: asked.append(request) or native.infer(request)
    )
    names = [f"joint_{i}" for i in range(7)]
    observation = {**dict.fromkeys(names, 0.1), "gripper": 0.5, **views}
    # not closed: the engine is the other tests'
    policy = Cosmos3Policy("droid", backend=stretching)
    policy.set_robot_state_keys([*names, "gripper"])
    policy.get_actions_sync(observation, "pick up the red cube")
    assert asked[0].composite.shape == (135, 160, 3)


def test_seeds_and_timing(native):
    first, again, other = (
        native.infer(question()),
        native.infer(question()),
        native.infer(question(seed=4)),
    )
    assert np.array_equal(first.action, again.action)
    assert not np.array_equal(first.action, other.action)
    assert {"encode_ms", "text_ms", "denoise_ms", "total_ms"} <= set(first.timing)
    assert (first.seed, first.fps, first.video) == (3, 15, None)


def test_the_instruction_and_the_picture_matter(native):
    first = native.infer(question()).action
    assert (
        np.abs(native.infer(question(instruction="pick up the blue cube")).action - first).max()
        > 1e-3
    )
    dark = np.zeros((*HW, 3), np.uint8)
    assert np.abs(native.infer(question(composite=dark)).action - first).max() > 1e-3


def test_a_batch_of_two_lengths_is_answered_in_its_order(native, folder, monkeypatch):
    """In a batch as alone: both as near to float64 as helpers/parity.py says."""
    asked = [
        question(),
        question(n_rows=4, seed=4),
        question(composite=question().composite[::-1], seed=5),
    ]
    together = native.infer_batch(asked)
    requests = asked_of(native.engine, monkeypatch)
    alone = [native.infer(one) for one in asked]
    for request, *answers in zip(requests, together, alone, strict=True):
        known = reference(folder, request)
        assert [known.share({"action": one.action}) <= 1 for one in answers] == [True, True]
        assert [one.seed for one in answers] == [request.seed] * 2


def test_pictures_are_rounded():
    levels = torch.tensor([0.0, 0.4, 0.6, 254.4, 254.6, 255]).view(1, 1, 1, 1, -1) / 255
    assert as_pictures(levels.expand(1, 3, 1, 1, -1))[0, 0, :, 0].tolist() == [
        0,
        0,
        1,
        254,
        255,
        255,
    ]


@pytest.mark.parametrize(("name", "options"), [("native", QUICK), ("diffusers", STOCK)])
def test_predicted_world(folder, name, options):
    backend = make_backend(name, folder, with_options(options, {"decode_video": True, "fps": 7.0}))
    chunk = backend.infer(question(n_rows=4))
    assert chunk.fps == 7.0
    video = chunk.video
    assert video.shape == (5, *HW, 3)
    assert video.dtype == np.uint8
    backend.close()
    backend.close()


def test_a_future_from_actions_leaves_the_rows_alone_and_shows_what_they_do(
    folder, tmp_path, monkeypatch
):
    about = {"future_mode": "forward_dynamics", "policy_frames": [1, 9], "dynamics_steps": 1}
    apart = declaring(folder, tmp_path / "apart", **about)
    shown, plain = (
        make_backend("native", apart, with_options(QUICK, {"decode_video": how}))
        for how in (True, False)
    )
    chunk, (alone, again) = (
        shown.infer(question()),
        plain.infer_batch([question(), question(seed=4)]),
    )
    assert chunk.action.tolist() == alone.action.tolist()
    assert alone.video is None
    own = make_backend(
        "native",
        apart,
        with_options(QUICK, {"decode_video": True, "num_steps": None, "guidance_scale": None}),
    )
    known = question(mode=Mode.FORWARD_DYNAMICS, conditioning_actions=chunk.action)
    np.testing.assert_array_equal(
        chunk.video, own.infer(known).video, "in the steps of its own dynamics, not in two"
    )
    assert chunk.timing.keys() >= {"encode_ms", "denoise_ms", "decode_ms"}
    requests = asked_of(shown.engine, monkeypatch)
    both = shown.infer_batch([question(decode_frames=0), question(seed=4, decode_frames=5)])
    assert both[0].video is None
    assert both[1].video.shape == (5, *HW, 3)
    known = reference(apart, requests[1])
    assert known.share({"action": both[1].action}) <= 1
    assert known.share({"action": again.action}) <= 1
    karras = with_options(QUICK, {"decode_video": True, "use_karras_sigmas": "true"})
    other = EngineBackend(shown.engine, karras).infer(question())
    assert other.action.tolist() != chunk.action.tolist()
    known = question(mode=Mode.FORWARD_DYNAMICS, conditioning_actions=other.action)
    np.testing.assert_array_equal(
        other.video, own.infer(known).video, "in the noise levels of its own dynamics"
    )
    together = make_backend(
        "native", apart, with_options(QUICK, {"decode_video": True, "policy_frames": 9})
    ).infer(question())
    assert together.action.tolist() != alone.action.tolist(), (
        "rows and video denoised together, where that is asked for"
    )
    for backend in (shown, plain, own):
        backend.close()


def test_joint_pos(joint_folder, folder):
    backend = make_backend("native", joint_folder, QUICK)
    space = DROID.action_space("joint_pos")
    first = backend.infer(question(action_space=space)).action
    assert first.shape == (8, 8)
    assert (
        np.abs(backend.infer(question(action_space=space, gripper=0.2)).action - first).max() > 1e-4
    )
    with pytest.raises(ActionSpaceError):
        backend.infer(question())
    with pytest.raises(VariantError, match="state row"):
        make_backend("diffusers", joint_folder, QUICK)
    with pytest.raises(ActionSpaceError):
        make_backend("native", folder, QUICK).infer(question(action_space=space))


def test_presets_and_overrides(folder):
    checkpoint = Checkpoint.open(folder)
    asked = question()
    preset = ModelInput(checkpoint, backend_options()).sampling(asked)
    assert (preset.num_steps, preset.guidance_scale, preset.flow_shift) == (30, 1.0, 10.0)
    preset = ModelInput(checkpoint, backend_options()).sampling(
        question(action_space=DROID.action_space("joint_pos"))
    )
    assert (preset.num_steps, preset.guidance_scale, preset.flow_shift) == (4, 3.0, 5.0)
    assert ModelInput(checkpoint, QUICK).sampling(asked).num_steps == 2
    edge = ModelInput(
        replace(checkpoint, variant=VARIANTS["edge-policy-droid"]),
        with_options(QUICK, {"num_steps": None}),
    )
    preset = edge.sampling(question(action_space=DROID.action_space("joint_pos")))
    made = edge([asked], "native")[0].sampled(preset)
    found = made.num_inference_steps, made.guidance_scale, made.flow_shift, made.guidance_interval
    assert found == (4, 3.0, 5.0, (960.0, 1001.0)), "the variant's"


def test_options_of_the_caption_and_the_schedule(folder, native):
    checkpoint = Checkpoint.open(folder)

    def made(**chosen):
        (request,) = ModelInput(checkpoint, with_options(QUICK, chosen))([question()], "native")
        return request

    def caption(**chosen):
        return tokenizer.decode(made(**chosen).text_ids[0])

    tokenizer = AutoTokenizer.from_pretrained(folder / "text_tokenizer")
    plain = made()
    assert (made(fps=7.0).fps, plain.fps) == (7.0, 15.0)
    assert '"fps": 7' in caption(fps=7.0)
    assert "wrist-mounted" in caption(view_point="wrist_view")
    assert caption(view_point="ego_view") != caption()
    blurry = made(negative_prompt="blurry")
    assert not torch.equal(blurry.neg_text_ids, plain.neg_text_ids)
    assert torch.equal(blurry.text_ids, plain.text_ids)
    expected = native.infer(question()).action
    for choice, same in (("false", True), ("true", False), ("checkpoint", False)):
        chosen = with_options(QUICK, {"use_karras_sigmas": choice})
        answer = EngineBackend(native.engine, chosen).infer(question())
        assert np.array_equal(answer.action, expected) == same
    rated = EngineBackend(native.engine, with_options(QUICK, {"fps": 7.0}))
    assert rated.infer(question()).fps == 7.0
    with pytest.raises(ConfigError, match="use_karras_sigmas belongs to backend native"):
        Cosmos3Policy("droid", backend="diffusers", options={"use_karras_sigmas": "true"})
    for name in ("fps", "view_point", "negative_prompt"):
        with pytest.raises(ConfigError, match=f"{name} belongs to backend"):
            Cosmos3Policy("droid", backend="service", options={name: 9.0 if name == "fps" else "x"})


def test_a_checkpoints_state_and_tier(folder):
    found = replace(
        Checkpoint.open(folder),
        state_row=StateRow((0.0,) * 10, (1.0,) * 10),
        metadata={"resolution_tier": 128},
    )
    given, pose = ModelInput(found, backend_options()), np.eye(4)
    pose[:3] = [[0, -1, 0, 0.4], [1, 0, 0, 0.2], [0, 0, 1, 0.3]]
    (made,) = given([question(limb_poses={"arm": pose}, gripper=0.7)], "native")
    np.testing.assert_allclose(
        made.action_prefix[0, :10], [0.4, 0.2, 0.3, 0, 1, 0, -1, 0, 0, 0.7], atol=1e-7
    )
    views = {
        name: np.full((180, 320, 3), 50 * i, np.uint8) for i, name in enumerate(DROID_RIG.views)
    }
    assert given.compose(views, DROID_RIG).shape == (128, 152, 3)


def test_refusals(native, folder, tmp_path):
    with pytest.raises(BackendError, match="picture"):
        native.infer(question(composite=None))
    with pytest.raises(InputError, match="conditioning_actions"):
        native.infer(question(mode=Mode.FORWARD_DYNAMICS))
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        make_backend("native")
    with pytest.raises(UnknownNameError, match="diffusers, distributed, native"):
        make_backend("magic", folder)
    with pytest.raises(LayoutError):
        make_backend("native", tmp_path / "nothing")
    with pytest.raises(UnknownNameError, match="float64"):
        backend_options(dtype="float64")


def test_a_missing_library_names_the_extra(folder, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("strands_cosmos3.engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "strands_cosmos3.backends.native", raising=False)
    monkeypatch.delitem(sys.modules, "strands_cosmos3.backends.model_input", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingDependencyError, match=r"strands-cosmos3\[engine\]"):
        make_backend("native", folder)


def test_behind_the_policy(folder, joint_folder):
    views = {
        name: np.full((90, 160, 3), 40 * i, np.uint8) for i, name in enumerate(DROID_RIG.views)
    }
    seen = Observation(np.array([0, -0.6, 0, -2.5, 0, 1.9, 0]), 1.0, views)
    policy = Cosmos3Policy("droid", backend=make_backend("native", folder, QUICK))
    assert policy.requires_images
    chunk = policy.plan(seen, "pick up the red cube")
    assert chunk.action.shape == (16, 10)
    assert policy.last_rollout["timing"]["denoise_ms"] > 0
    flat = {f"joint_{i}": 0.0 for i in range(7)} | {"gripper": 0.5, **views}
    policy.set_robot_state_keys([*(f"joint_{i}" for i in range(7)), "gripper"])
    assert len(policy.get_actions_sync(flat, "pick up the red cube")) == 16
    joint = Cosmos3Policy("droid", model=str(joint_folder), num_steps=1, device="cpu")
    assert joint.action_space.name == "joint_pos", "the checkpoint says so"


def test_options_reach_the_engine(folder):
    chosen = {"compile": True, "offload_text": True, "text_cache_bytes": 0}
    policy = Cosmos3Policy(
        "droid", model=str(folder), device="cpu", dtype="bfloat16", options=chosen
    )
    with (
        closing(policy),
        closing(make_backend("native", folder, with_options(QUICK, chosen))) as backend,
    ):
        for engine in (policy.backend.engine, backend.engine):
            assert chosen.items() <= vars(engine.options).items()
        assert policy.backend.engine.dtype is torch.bfloat16
    with pytest.raises(
        ConfigError, match="compile belongs to backend native or distributed, not to diffusers"
    ):
        make_backend("diffusers", folder, with_options(QUICK, {"compile": True}))
    with pytest.raises(ConfigError, match="unknown option 'graphs'"):
        Cosmos3Policy.preflight({"image"}, options={"graphs": True})


def test_the_composition_can_be_chosen(folder):
    views = {
        name: np.random.RandomState(i).randint(0, 256, (120, 160, 3), np.uint8)
        for i, name in enumerate(DROID_RIG.views)
    }
    for composition in ("framework", "letterbox"):
        with closing(
            Cosmos3Policy(
                "droid", model=str(folder), device="cpu", options={"composition": composition}
            )
        ) as policy:
            picture = policy.backend.compose(views, DROID_RIG)
            assert np.array_equal(picture, compose_views(views, DROID_RIG, composition))
    with pytest.raises(InputError, match=r"'stretch'.*Valid: framework, letterbox"):
        Cosmos3Policy("droid", model=str(folder), options={"composition": "stretch"})
    with pytest.raises(
        ConfigError,
        match="composition belongs to backend native, onnx or distributed, not to scripted",
    ):
        Cosmos3Policy("droid", backend="scripted", options={"composition": "letterbox"})


def test_what_backends_need_is_known_before_they_are_made():
    for name in BACKENDS:
        module = "worlds.table.expert" if name == "scripted" else f"backends.{name}"
        kind = getattr(import_module(f"strands_cosmos3.{module}"), f"{name.capitalize()}Backend")
        # its server may need no pictures, so it is asked for
        made = kind(client=None) if name == "service" else kind
        known = required_inputs(name)
        assert (known.requires_images, known.needs_privileged) == (
            made.info.requires_images,
            made.info.needs_privileged,
        ), name
        if name == "service":
            assert required_inputs(made).requires_images
    assert required_inputs(None).requires_images  # the default backend sees
