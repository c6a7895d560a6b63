"""Sound through the backends and the policy: the engine, diffusers' pipeline, ranks, a server.
Random weights: the noise that is heard means nothing.
"""

import json
import shutil
import wave
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("av")

from helpers.options import backend_options  # noqa: E402
from helpers.parity import asked_of  # noqa: E402
from helpers.tracks import track_of  # noqa: E402
from recipes.random_checkpoint import write_checkpoint  # noqa: E402
from strands_cosmos3.backends import make_backend  # noqa: E402
from strands_cosmos3.backends.native import NativeBackend  # noqa: E402
from strands_cosmos3.embodiments import get_embodiment  # noqa: E402
from strands_cosmos3.errors import (  # noqa: E402
    BackendError,
    ConfigError,
    InputError,
    LayoutError,
    ServiceRefusedError,
)
from strands_cosmos3.films import Sound  # noqa: E402
from strands_cosmos3.options import with_options  # noqa: E402
from strands_cosmos3.policy import Cosmos3Policy  # noqa: E402
from strands_cosmos3.serving.served import ServedPolicy  # noqa: E402
from strands_cosmos3.serving.server import PolicyServer, ServerConfig  # noqa: E402
from strands_cosmos3.types import Mode, Request  # noqa: E402

QUICK = {"device": "cpu", "num_steps": 2, "guidance_scale": 3.0, "image_size": 128}
HEARING = backend_options(**QUICK, decode_sound=True)
DROID = get_embodiment("droid")
VIEWS = {
    name: np.random.RandomState(i).randint(0, 256, (90, 160, 3), dtype=np.uint8)
    for i, name in enumerate(("wrist", "exterior_1", "exterior_2"))
}
FLAT = {**{f"joint_{i}": 0.1 * i for i in range(7)}, "gripper": 0.8, **VIEWS}
ROWS = 8
SECONDS = (ROWS + 1) / 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sounding") / "c", ears=True)


@pytest.fixture(scope="module")
def joint_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounding") / "joints"
    return write_checkpoint(folder, action_space="joint_pos", ears=True)


@pytest.fixture(scope="module")
def native(folder):
    with closing(make_backend("native", folder, HEARING)) as backend:
        yield backend


def question(**changes):
    picture = np.random.RandomState(0).randint(0, 256, (80, 112, 3), dtype=np.uint8)
    made = Request(
        DROID,
        DROID.action_space(),
        "pick up the red cube",
        ROWS,
        np.zeros(7),
        0.8,
        composite=picture,
        seed=3,
        sound=True,
    )
    return replace(made, **changes)


def declaring(folder, to, **metadata):
    """A copy of a checkpoint whose checkpoint.json declares something more."""
    shutil.copytree(folder, to)
    about = json.loads((to / "checkpoint.json").read_text())
    about["strands_cosmos3"] |= metadata
    (to / "checkpoint.json").write_text(json.dumps(about))
    return to


def assert_heard(sound, seconds=SECONDS):
    assert isinstance(sound, Sound)
    assert (sound.rate_hz, sound.samples.shape) == (8000, (2, int(seconds * 8000)))
    assert sound.duration_s == pytest.approx(seconds, abs=1e-3)
    assert 0.001 < sound.samples.std() < 1


def test_a_chunk_has_the_sound_that_was_asked_for(native):
    assert native.info.sound
    chunk = native.infer(question())
    assert_heard(chunk.sound)
    assert chunk.timing["sound_ms"] > 0
    silent = native.infer(question(sound=False))
    assert silent.sound is None
    assert "sound_ms" not in silent.timing


def test_the_two_backends_answer_alike(folder, native, monkeypatch):
    """Given the pipeline's noise, drawn for vision, sound and actions in this order."""
    stock_options = with_options(HEARING, {"image_size": 256})  # the smallest that diffusers takes
    with closing(make_backend("diffusers", folder, stock_options)) as stock:
        assert stock.info.sound
        expected = stock.infer(question(n_rows=4))
        silent = stock.infer(question(n_rows=4, sound=False))
    assert silent.sound is None
    generator = torch.Generator().manual_seed(3)
    noise = {
        "video_noise": torch.randn((1, 16, 2, 5, 7), generator=generator),
        "sound_noise": torch.randn((6, 9), generator=generator),
        "action_noise": torch.randn((4, 64), generator=generator),
    }
    step_batch = native.engine.step_batch
    monkeypatch.setattr(
        native.engine, "step_batch", lambda asked: step_batch([replace(a, **noise) for a in asked])
    )
    other = NativeBackend(native.engine, stock_options)
    found = other.infer(question(n_rows=4))
    assert_heard(expected.sound, 5 / 15)
    np.testing.assert_allclose(found.action, expected.action, atol=5e-5)
    np.testing.assert_allclose(found.sound.samples, expected.sound.samples, atol=5e-5)


def test_the_pipeline_without_sound_reads_no_tokenizer(folder, tmp_path):
    """A hub's snapshot of a checkpoint with ears has no sound_tokenizer/ unless it was asked for."""
    lacking = shutil.copytree(folder, tmp_path / "c")
    shutil.rmtree(lacking / "sound_tokenizer")
    stock_options = backend_options(**{**QUICK, "image_size": 256})
    with closing(make_backend("diffusers", lacking, stock_options)) as stock:
        assert not stock.info.sound
        assert stock.infer(question(n_rows=4, sound=False)).action.shape == (4, 10)
        with pytest.raises(BackendError, match="sound=True"):
            stock.infer(question(n_rows=4))


def test_ranks(folder, native):
    options = with_options(HEARING, {"sp": 2})
    with closing(make_backend("distributed", folder, options)) as ranks:
        assert ranks.info.sound
        found = ranks.infer(question())
    expected = native.infer(question())
    np.testing.assert_allclose(found.sound.samples, expected.sound.samples, atol=5e-5)
    np.testing.assert_allclose(found.action, expected.action, atol=5e-5)


@pytest.mark.parametrize("backend", ["native", "distributed", "diffusers"])
def test_a_checkpoint_without_ears_says_so(backend, tmp_path_factory):
    deaf = write_checkpoint(tmp_path_factory.mktemp("deaf") / "c")
    with pytest.raises(LayoutError, match=r"cannot predict sound\. It lacks the sound tok"):
        make_backend(backend, deaf, HEARING)


def test_the_bundled_policy_has_no_ears():
    with pytest.raises(LayoutError, match="cannot predict sound"):
        Cosmos3Policy("droid", "panda", options={"sound": True})


def test_an_action_prefix_and_sound(folder, tmp_path):
    bound = declaring(folder, tmp_path / "c", prefix_rows=3)
    rows = np.random.RandomState(1).uniform(-0.5, 0.5, (3, 10))
    with closing(make_backend("native", bound, HEARING)) as backend:
        chunk = backend.infer(question(action_prefix=rows))
    np.testing.assert_array_equal(chunk.action[:3], rows.astype(np.float32))
    assert_heard(chunk.sound)


def test_futures_from_actions_are_heard_in_the_second_pass(folder, tmp_path, monkeypatch):
    """The same rows come with and without a sound, which is that of the rows' video."""
    declared = {"future_mode": "forward_dynamics", "policy_frames": [1, 9]}
    apart = declaring(folder, tmp_path / "c", **declared)
    with closing(make_backend("native", apart, HEARING)) as backend:
        silent = backend.infer(question(sound=False))
        asked = asked_of(backend.engine, monkeypatch)
        chunk = backend.infer(question())
    assert [(one.mode, one.sound) for one in asked] == [
        (Mode.POLICY, False),
        (Mode.FORWARD_DYNAMICS, True),
    ]
    np.testing.assert_array_equal(chunk.action, silent.action)
    assert_heard(chunk.sound)


def test_one_frame_has_no_sound(folder, tmp_path):
    brief = declaring(folder, tmp_path / "c", policy_frames=[1, 9])
    options = with_options(HEARING, {"policy_frames": 1})
    with (
        closing(make_backend("native", brief, options)) as backend,
        pytest.raises(InputError, match="policy_frames"),
    ):
        backend.infer(question())
    with closing(make_backend("native", brief, HEARING)) as backend:  # the largest number
        assert_heard(backend.infer(question()).sound)


def policy(folder, **options):
    return Cosmos3Policy(
        backend="native",
        model=folder,
        options={**QUICK, "chunk_rows": ROWS, "sound": True, **options},
    )


def test_the_policy_returns_a_waveform_or_paths(folder, tmp_path):
    with policy(folder) as arrays:
        arrays.get_actions_sync(FLAT, "pick up the red cube")
        assert arrays.last_rollout["video"] is None
        assert_heard(arrays.last_rollout["sound"])
        expected = arrays.last_rollout["sound"].samples
    with policy(folder, rollout_folder=tmp_path / "files", decode_frames=5) as files:
        for _ in range(2):
            files.get_actions_sync(FLAT, "pick up the red cube")
            files.reset()
        rollout = files.last_rollout or (files.get_actions_sync(FLAT, "go") and files.last_rollout)
    names = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert names == [f"rollout_00000{i}.{suffix}" for i in range(3) for suffix in ("mp4", "wav")]
    assert (Path(rollout["video"]).name, Path(rollout["sound"]).name) == tuple(names[-2:])
    with wave.open(str(tmp_path / "files/rollout_000000.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (8000, int(SECONDS * 8000))
        levels = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2).T
    np.testing.assert_allclose(levels / 32767, expected, atol=1e-4)
    samples, rate, track_s, film_s = track_of(rollout["video"])
    assert film_s == pytest.approx(5 / 15, abs=1e-3), "as many frames as were asked for"
    assert track_s == pytest.approx(film_s, abs=1024 / rate)
    assert len(samples) == 2


def test_files_of_another_run_stay(folder, tmp_path):
    (tmp_path / "rollout_000000.mp4").write_bytes(b"older")
    with policy(folder, rollout_folder=tmp_path) as files:
        files.get_actions_sync(FLAT, "go")
        assert files.last_rollout["sound"] == str(tmp_path / "rollout_000001.wav")
        assert files.last_rollout["video"] is None
    assert (tmp_path / "rollout_000000.mp4").read_bytes() == b"older"


def test_without_predictions_there_are_no_files(folder, tmp_path):
    with policy(folder, rollout_folder=tmp_path, sound=False) as files:
        files.get_actions_sync(FLAT, "go")
        assert (files.last_rollout["video"], files.last_rollout["sound"]) == (None, None)
    assert not list(tmp_path.iterdir())


def test_a_backend_that_hears_nothing_is_refused():
    episode = {"model": None}
    with pytest.raises(ConfigError, match="'service' predicts no sound"):
        Cosmos3Policy(host="localhost", options={"sound": True, "dialect": "roboarena"})
    with pytest.raises(ConfigError, match="'native' predicts no sound"):
        Cosmos3Policy(backend=_Deaf(), options={"sound": True, **episode})


class _Deaf(NativeBackend):
    """Only its info is asked."""

    def __init__(self):
        self.info = replace(NativeBackend.info, name="native")

    def close(self):
        pass


def test_a_loaded_backend_is_asked(native):
    with Cosmos3Policy(backend=native, options={"sound": True, "chunk_rows": ROWS}) as asking:
        asking.get_actions_sync(FLAT, "go")
        assert_heard(asking.last_rollout["sound"])


@pytest.fixture(scope="module")
def served(joint_folder):
    """Two servers of one checkpoint, with and without ears."""
    servers = {}
    for name, options in (
        ("hears", backend_options(**QUICK, decode_sound=True)),
        ("deaf", backend_options(**QUICK)),
    ):
        backend = make_backend("native", joint_folder, options)
        servers[name] = PolicyServer(ServedPolicy(backend, "droid"), ServerConfig(port=0))
    with servers["hears"], servers["deaf"]:
        yield servers


def asking(server, **options):
    return Cosmos3Policy(host="127.0.0.1", port=server.port, options=options)


def test_over_the_wire_where_it_is_asked_for(served):
    with asking(served["hears"], sound=True) as asks:
        asks.get_actions_sync(FLAT, "go")
        heard = asks.last_rollout
    with asking(served["hears"]) as silent:
        silent.get_actions_sync(FLAT, "go")
        assert silent.last_rollout["sound"] is None
    assert_heard(heard["sound"], 33 / 15)


def test_a_server_without_ears_says_so(served):
    with (
        asking(served["deaf"], sound=True) as asks,
        pytest.raises(ServiceRefusedError, match=r"'cosmos3/sound' is true.*--sound"),
    ):
        asks.get_actions_sync(FLAT, "go")
