"""Exported graphs against the engine that they were exported of, and without torch."""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from helpers.cosmos3_oracle import CHUNK, Case, engine, given_actions, request  # noqa: E402
from helpers.without_torch import WITHOUT_TORCH  # noqa: E402
from strands_cosmos3.backends.native import NativeBackend  # noqa: E402
from strands_cosmos3.backends.onnx import OnnxBackend  # noqa: E402
from strands_cosmos3.backends.options import BackendOptions  # noqa: E402
from strands_cosmos3.embedded import embedded_checkpoint  # noqa: E402
from strands_cosmos3.embodiments import get_embodiment  # noqa: E402
from strands_cosmos3.engine.checkpoint import Checkpoint  # noqa: E402
from strands_cosmos3.engine.engine import Cosmos3Engine  # noqa: E402
from strands_cosmos3.engine.exported.engine import OnnxEngine  # noqa: E402
from strands_cosmos3.engine.exported.export import export  # noqa: E402
from strands_cosmos3.engine.exported.folder import EXPORT, Exported  # noqa: E402
from strands_cosmos3.engine.options import EngineOptions  # noqa: E402
from strands_cosmos3.errors import (  # noqa: E402
    ConfigError,
    DigestError,
    InputError,
    LayoutError,
    ShapeError,
)
from strands_cosmos3.observe.views import canvas_hw  # noqa: E402
from strands_cosmos3.types import Request  # noqa: E402

CANVAS = 96, 128
TOLERANCE = 5e-5
"""Of the largest difference to the native engine; both compute in float32."""


def exported(checkpoint, out, decoder=True):
    export(Checkpoint.open(checkpoint), out, CANVAS, (80, 112), CHUNK + 1, decoder, str(checkpoint))
    return out


def of_numpy(one):
    """A request with arrays of NumPy."""
    return replace(
        one,
        **{
            field.name: getattr(one, field.name).numpy()
            for field in fields(one)
            if isinstance(getattr(one, field.name), torch.Tensor)
        },
    )


@pytest.fixture(scope="module")
def graphs(checkpoints, joint_checkpoint, tmp_path_factory):
    """Kind -> checkpoint and the folder of its graphs."""
    root = tmp_path_factory.mktemp("graphs")
    every = {**checkpoints, "joint": joint_checkpoint}
    return {kind: (folder, exported(folder, root / kind)) for kind, folder in every.items()}


@pytest.fixture(scope="module")
def opened(graphs):
    """Kind -> engine of its graphs."""
    options = EngineOptions(decode_video=True)
    engines = {kind: OnnxEngine.from_exported(out, options) for kind, (_, out) in graphs.items()}
    yield engines
    for one in engines.values():
        one.close()


@pytest.fixture(scope="module")
def asked(checkpoints):
    one = request(Case(checkpoints["silu"], steps=3))
    return replace(one, video_noise=None, action_noise=None, decode_frames=0)


@pytest.fixture(scope="module")
def mixed(asked, checkpoints):
    """All modes; guidance at all steps, at some, at none; prefixes, prompts of several lengths,
    domains, rates and given frames.
    """
    clip = request(Case(checkpoints["silu"], "inverse_dynamics")).cond_video_pixels
    prefix = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    return {
        "policy": asked,
        "prefix": replace(asked, action_prefix=prefix, guidance_scale=1.0, return_video=False),
        "interval": replace(asked, guidance_interval=(900, 1001), fps=7.5, seed=4),
        "inverse": replace(asked, mode="inverse_dynamics", cond_video_pixels=clip, seed=5),
        "forward": replace(
            asked, mode="forward_dynamics", cond_action=given_actions(), guidance_scale=1.0
        ),
        "frames": replace(asked, cond_frame_indexes=(0, 1), cond_video_pixels=clip, domain_id=6),
        "short": replace(asked, text_ids=asked.text_ids[:9], seed=7, raw_action_dim=7),
    }


def check_alike(ours, theirs):
    assert {*ours} == {*theirs} - {"pixels"}
    for name in ("action", "video"):
        if name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_all_modes_equal_the_native_engine(kind, opened, graphs, mixed):
    native = engine(graphs[kind][0], torch.float32)
    for name, one in mixed.items():
        ours = opened[kind].step(of_numpy(one))
        assert isinstance(ours["action"], np.ndarray), name
        check_alike(ours, native.step(one))


def test_a_batch_of_four_equals_single_requests(opened, mixed):
    """Prompts of two lengths, some with guidance and some without, in shared products."""
    four = [of_numpy(mixed[name]) for name in ("policy", "inverse", "forward", "short")]
    for together, one in zip(opened["silu"].step_batch(four), four, strict=True):
        check_alike(together, opened["silu"].step(one))


def test_a_state_row_is_read(opened, graphs, asked):
    state = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    one = replace(asked, raw_action_dim=8, action_prefix=state, action_noise=None)
    ours = opened["joint"].step(of_numpy(one))
    check_alike(ours, engine(graphs["joint"][0], torch.float32).step(one))


def test_decoded_frames_equal_the_native_decoder_s(opened, graphs, asked):
    with Cosmos3Engine.from_pretrained(graphs["silu"][0], decode_video=True) as native:
        for count in (1, 5, CHUNK + 1):
            one = replace(asked, decode_frames=count)
            ours, theirs = opened["silu"].step(of_numpy(one)), native.step(one)
            assert ours["pixels"].shape == theirs["pixels"].shape == (1, 3, count, 80, 112)
            np.testing.assert_allclose(ours["pixels"], theirs["pixels"], rtol=0, atol=TOLERANCE)


def test_graphs_hold_no_weights_and_name_the_files_tensors(graphs):
    folder, out = graphs["silu"]
    files = sum(path.stat().st_size for path in out.iterdir())
    assert files < 1_000_000
    record = Exported.read(out)
    for graph in record.graphs.values():
        model = onnx.load(out / graph.file, load_external_data=False)
        external = [one for one in model.graph.initializer if one.data_location == 1]
        assert {one.name for one in external} == {*graph.weights}
        for one in external:
            place = {entry.key: entry.value for entry in one.external_data}
            stored = (folder / place["location"]).read_bytes()[int(place["offset"]) :]
            numbers = np.frombuffer(stored[: int(place["length"])], np.float32)
            assert numbers.size == np.prod(one.dims)
        small = [one.ByteSize() for one in model.graph.initializer if one.data_location == 0]
        assert max(small) < 4096


def test_graphs_beside_the_files_load_in_plain_onnx_runtime(graphs, tmp_path):
    folder, out = graphs["relu2"]
    beside = shutil.copytree(folder, tmp_path / "c")
    for name in ("text", "step", "encoder", "decoder", "clip_encoder"):
        path = shutil.copy(out / f"{name}.onnx", beside)
        onnx.checker.check_model(path, full_check=True)
        ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_a_changed_checkpoint_is_refused(graphs, tmp_path):
    folder = shutil.copytree(graphs["silu"][0], tmp_path / "c")
    exported(folder, folder / "onnx", decoder=False)
    OnnxEngine.from_exported(folder).close()
    OnnxEngine.from_exported(folder / "onnx").close()
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flow_shift": 3.0}))
    with pytest.raises(DigestError, match=r"it was changed since.*strands-cosmos3 export"):
        OnnxEngine.from_exported(folder)


def test_a_changed_graph_is_refused(graphs, tmp_path):
    folder = shutil.copytree(graphs["silu"][1], tmp_path / "c")
    (folder / "step.onnx").write_bytes((folder / "text.onnx").read_bytes())
    with pytest.raises(DigestError, match=r"step\.onnx"):
        OnnxEngine.from_exported(folder)


@pytest.mark.parametrize("text", ["{}", '{"format": 1}', '{"format": 2, "checkpoint": "c"}', "["])
def test_a_damaged_record_is_refused(graphs, tmp_path, text):
    folder = shutil.copytree(graphs["silu"][1], tmp_path / "c")
    (folder / EXPORT).write_text(text)
    with pytest.raises(
        LayoutError, match=rf"ake it with strands-cosmos3 export --model {tmp_path}"
    ):
        OnnxEngine.from_exported(folder)


def test_what_was_not_exported_is_refused(graphs, opened, asked, checkpoints, tmp_path):
    with pytest.raises(LayoutError, match="strands-cosmos3 export --model"):
        OnnxEngine.from_exported(checkpoints["silu"])
    with pytest.raises(ConfigError, match="--decoder"):
        OnnxEngine.from_exported(graphs["silu"][1], EngineOptions(decode_video="preview"))
    with pytest.raises(ConfigError, match="cuda"):
        OnnxEngine.from_exported(graphs["silu"][1], EngineOptions(execution_provider="cuda"))
    one = of_numpy(asked)
    with pytest.raises(ShapeError, match=r"--canvas 96,112"):
        opened["silu"].step(replace(one, cond_video_pixels=one.cond_video_pixels[..., :112]))
    with pytest.raises(InputError, match="sound"):
        opened["silu"].step(replace(one, sound=True))
    longer = np.repeat(one.cond_video_pixels, 13, axis=2)
    with pytest.raises(InputError, match="--rows 12"):
        opened["silu"].step(
            replace(
                one,
                mode="inverse_dynamics",
                cond_video_pixels=longer,
                video_shape=(4, *one.video_shape[1:]),
                action_chunk=12,
            )
        )


def test_the_bundled_policy_s_graphs_answer_as_the_engine_does():
    """Rows within 1e-5, its score, and its film to a grey level."""
    options = BackendOptions(engine=EngineOptions(decode_video="preview"))
    droid, pose = get_embodiment("droid"), np.diag([1.0, -1.0, -1.0, 1.0])
    pose[:3, 3] = 0.48, 0.0, 0.24
    blocks = np.random.RandomState(2).randint(0, 256, (8, 8, 3), np.uint8)
    asked = Request(
        embodiment=droid,
        action_space=droid.action_space("midtrain"),
        instruction="pick up the red cube",
        n_rows=16,
        q_rad=None,
        gripper=1.0,
        composite=blocks.repeat(16, axis=0).repeat(19, axis=1),
        limb_poses={"arm": pose},
        seed=3,
    )
    found = []
    for make in (OnnxBackend, NativeBackend):
        with closing(make(embedded_checkpoint(), options)) as backend:
            chunk = backend.infer(asked)
            found.append((chunk, replace(backend.info, name=""), backend.model_sha256))
    (ours, *facts), (theirs, *native_facts) = found
    assert facts == native_facts
    np.testing.assert_allclose(ours.action, theirs.action, rtol=0, atol=1e-5)
    assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)
    assert ours.video.shape == theirs.video.shape == (17, 128, 144, 3)
    assert np.abs(ours.video.astype(int) - theirs.video).max() <= 1


_PLANNING = (
    WITHOUT_TORCH
    + """
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.policy import Cosmos3Policy
import numpy as np
policy = Cosmos3Policy("droid", None, "onnx", sys.argv[1], action_space="midtrain")
seen = {name: np.zeros((180, 320, 3), np.uint8) for name in get_embodiment("droid").rig.views}
seen |= {f"joint_{i}": 0.0 for i in range(7)} | {"gripper": 1.0}
with policy:
    steps = policy.get_actions_sync(seen, "pick up the red cube")
print(len(steps), sorted(steps[0])[:2], policy.last_rollout["action"].sum())
"""
)


def test_a_policy_acts_without_torch(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["relu2"], tmp_path / "c")
    canvas = canvas_hw(540, 640, 480)
    export(Checkpoint.open(folder), folder / "onnx", canvas, (540, 640), 17, False, "..")
    ran = subprocess.run(
        [sys.executable, "-c", _PLANNING, folder], capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr
    assert ran.stdout.startswith("16 ")
