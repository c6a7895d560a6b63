"""Sound beside video and actions: against diffusers' pipeline, and each convention by itself."""

import json
import shutil
import sys
from dataclasses import replace
from inspect import signature
from itertools import product

import numpy as np
import pytest
import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
    _preprocess_conditioning_image,
    get_3d_mrope_ids_vae_tokens,
)
from safetensors.torch import load_file, save_file

from helpers.cosmos3_oracle import CHUNK, HW, Case, engine, frames, oracle, pipeline, request
from helpers.parity import case_share, reference, rms
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.engine import denoising, preflight, sequence
from strands_cosmos3.engine import engine as engine_module
from strands_cosmos3.engine import inference as inference_module
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.formats.inspect import inspect, lines_of
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.preflight import kept_bytes, needed_bytes
from strands_cosmos3.engine.sequence import SOUND, SequenceLayout, generation_positions
from strands_cosmos3.engine.sound import SoundDecoder, sound_bytes
from strands_cosmos3.engine.transformer import SoundHead
from strands_cosmos3.errors import (
    InputError,
    LayoutError,
    MissingDependencyError,
    PreflightError,
    ShapeError,
    VariantError,
    WeightsError,
)

MOST = 5e-5
KINDS = ("silu", "relu2")
BOTH = tuple(product(KINDS, (1.0, 3.0)))


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """Kind -> folder with ears."""
    root = tmp_path_factory.mktemp("hearing")
    return {kind: write_checkpoint(root / kind, hidden_act=kind, ears=True) for kind in KINDS}


@pytest.fixture(scope="module")
def hearing_joints(tmp_path_factory):
    """One that speaks joint_pos."""
    folder = tmp_path_factory.mktemp("hearing_joints") / "c"
    return write_checkpoint(folder, action_space="joint_pos", seed=3, ears=True)


def off(found, expected):
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max())


@pytest.mark.parametrize(("kind", "guidance"), BOTH)
def test_sound_and_actions_are_the_pipeline_s(hearing, kind, guidance):
    case = Case(hearing[kind], guidance=guidance, sound=True)
    found = engine(case.folder, torch.float32, sound=True).step(request(case))
    video, action, sound = oracle(case)
    assert off(found["sound"][0], sound) <= MOST
    assert off(found["video"], video) <= MOST
    assert off(found["action"][0], action) <= MOST
    assert case_share(case) <= 1


@pytest.mark.parametrize(("kind", "guidance"), BOTH)
def test_without_an_action_too(hearing, kind, guidance, monkeypatch):
    """The pipeline's image to video: the same sequence without rows."""
    case = Case(hearing[kind], guidance=guidance, sound=True)
    pipe, heard = pipeline(case.folder, torch.float32), []
    pipe.tokenize_prompt = lambda *_, **__: (list(case.prompt), list(case.negative))
    monkeypatch.setattr(pipe, "decode_sound", heard.append)
    out = pipe(
        prompt="x",
        image=frames()[0],
        num_frames=CHUNK + 1,
        height=HW[0],
        width=HW[1],
        enable_sound=True,
        fps=case.fps,
        num_inference_steps=case.steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(case.seed),
        output_type="latent",
    )
    ours = engine(case.folder, torch.float32, sound=True)
    whole = ours._layout
    monkeypatch.setattr(
        ours, "_layout", lambda asked: replace(whole(asked), action_rows=0, clean_rows=0)
    )
    picture = _preprocess_conditioning_image(frames()[0], *HW)[:, :, None]
    asked = replace(request(case), cond_video_pixels=picture, action_noise=None)
    found = ours.step(asked)
    assert off(found["sound"][0], heard[0]) <= MOST
    assert off(found["video"], out.video) <= MOST
    assert found["action"].numel() == 0


def of_state_row(folder, history=0, known_rows=1, **changes):
    """A request with a state row, rows of history before it and known rows after it."""
    rng = np.random.RandomState(21)
    rows = CHUNK + 1 + history
    return replace(
        request(Case(folder, sound=True)),
        raw_action_dim=8,
        action_prefix=torch.from_numpy(rng.randn(known_rows + history, 8)).float(),
        action_noise=torch.from_numpy(rng.randn(rows, 64)).float(),
        history_rows=history,
        **changes,
    )


@pytest.mark.parametrize(("history", "known_rows"), [(0, 1), (0, 4), (3, 1), (2, 3)])
def test_state_history_and_prefix(hearing_joints, history, known_rows):
    asked = of_state_row(hearing_joints, history, known_rows)
    found = engine(hearing_joints, torch.float32, sound=True).step(asked)
    known = reference(hearing_joints, asked, 1)
    assert known.share(found) <= 1
    assert {*known.peer} == {"video", "action", "sound"}


@pytest.mark.parametrize("mode", ["forward_dynamics", "inverse_dynamics"])
def test_both_dynamics(hearing, mode):
    assert case_share(Case(hearing["silu"], mode, sound=True)) <= 1


def test_a_batch(hearing):
    model = engine(hearing["relu2"], torch.float32, sound=True)
    one = request(Case(hearing["relu2"], sound=True))
    other = replace(one, seed=9, sound_noise=None, video_noise=None, guidance_scale=1.0)
    for asked, found in zip((one, other), model.step_batch((one, other)), strict=True):
        assert reference(hearing["relu2"], asked).share(found) <= 1
        assert found["waveform"].shape == (1, 2, 4800)


def test_requests_of_a_batch_have_equally_many_latents_of_sound(hearing):
    model = engine(hearing["silu"], torch.float32, sound=True)
    one = replace(request(Case(hearing["silu"], sound=True)), sound_noise=None)
    slower, silent = replace(one, fps=7.5), replace(one, sound=False)
    assert len({one.batch_key, slower.batch_key, silent.batch_key}) == 3
    assert silent.batch_key == replace(silent, fps=7.5).batch_key
    for other, latents in ((slower, 30), (silent, 0)):
        with pytest.raises(ShapeError, match=f"has {latents} latents of sound, request 0 has 15"):
            model.step_batch((one, other))


def test_without_sound_ears_change_nothing(hearing):
    asked = request(Case(hearing["silu"]))
    hears = engine(hearing["silu"], torch.float32, sound=True).step(asked)
    deaf = engine(hearing["silu"], torch.float32).step(asked)
    assert hears.keys() == deaf.keys()
    for name in ("action", "video"):
        assert torch.equal(hears[name], deaf[name])
    heard = engine(hearing["silu"], torch.float32, sound=True).step(
        request(Case(hearing["silu"], sound=True))
    )
    assert off(heard["action"], deaf["action"]) > 1e-3, (
        "what is denoised together is another answer"
    )


@pytest.mark.parametrize("fps", [15.0, 7.5, 24.0, 29.97, 10.0])
def test_a_clip_s_latents_and_samples(fps):
    """As many as diffusers' pipeline makes: so many that the clip's samples are there."""
    real = SoundDecoder(48_000, 1920, None)
    for count in range(5, 70, 4):
        samples = int(count / fps * 48_000)
        assert real.latents(count, fps) == (samples + 1919) // 1920
        assert real.samples(count, fps) == samples
    assert SoundDecoder(48_000, 1920, None).latents(17, 15) == 29  # 25 a second of 1.13 s
    stock = signature(Cosmos3OmniTransformer.__init__).parameters["sound_latent_fps"]
    assert TransformerConfig.sound_latent_fps == stock.default == 25


def placed(config, count, fps, text=7):
    """Positions of the sequence by diffusers: vision, sound, action."""
    where = {
        "temporal_offset": text + config.unified_3d_mrope_temporal_modality_margin,
        "reset_spatial_indices": config.unified_3d_mrope_reset_spatial_ids,
        "base_fps": config.base_fps,
    }
    rate = {True: fps, False: None}[config.enable_fps_modulation]
    heard = {True: config.sound_latent_fps, False: None}[config.enable_fps_modulation]
    parts = (
        get_3d_mrope_ids_vae_tokens(3, 3, 4, **where, fps=rate, temporal_compression_factor=4),
        get_3d_mrope_ids_vae_tokens(count, 1, 1, **where, fps=heard, temporal_compression_factor=1),
        get_3d_mrope_ids_vae_tokens(
            6,
            1,
            1,
            **where,
            fps=rate,
            temporal_compression_factor=1,
            base_temporal_compression_factor=4,
            start_frame_offset=1,
        ),
    )
    return torch.cat([part.float() for part, _ in parts], dim=1).numpy()


@pytest.mark.parametrize("count", [1, 2, 29])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_fps_modulation": False},
        {"unified_3d_mrope_reset_spatial_ids": False},
        {"sound_latent_fps": 21.5, "base_fps": 30.0},
    ],
    ids=str,
)
def test_sound_lies_behind_vision_on_a_clock_of_its_own(hearing, count, changes):
    config = replace(engine(hearing["silu"], torch.float32, sound=True).config, **changes)
    layout = SequenceLayout((3, 5, 7), 2, 6, (0,), 0, 10, 15.0, 1, count)
    assert layout.counts == (36, count, 6)
    assert [group.stop - group.start for group in layout.noisy] == [24, count, 6]
    found = generation_positions(layout, config, 7)
    np.testing.assert_allclose(found, placed(config, count, 15.0), rtol=0, atol=1e-2)
    if not changes and count > 1:
        second = found[0, 36 : 36 + count][-1] - found[0, 36]
        assert second == pytest.approx((count - 1) * 24 / 25, abs=1e-2)


def test_the_waveform_is_what_the_tokenizer_decodes(hearing, monkeypatch):
    """[-1, 1], float32, channels x samples, at the tokenizer's rate, as long as the clip."""
    folder = hearing["silu"]
    asked = request(Case(folder, fps=10, sound=True))
    found = engine(folder, torch.float32, sound=True).step(asked)
    waveform = found["waveform"]
    assert (waveform.dtype, waveform.shape, found["sample_rate"]) == (
        torch.float32,
        (1, 2, int(9 / 10 * 8000)),
        8000,
    )
    stock = Cosmos3OmniPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        expected = stock.decode_sound(found["sound"][0])
    assert expected.shape == (2, 23 * 320), "the last latent lasts longer than the clip"
    assert off(waveform[0], expected[:, :7200]) <= 1e-5
    assert 0.01 < float(waveform.std()) < 1
    loud = engine(folder, torch.float32, sound=True)._sound.decode(1e4 * found["sound"], 9, 10)
    assert float(loud.abs().max()) == 1


@pytest.mark.parametrize("quantize", ["int8", "int8-weights"])
def test_layers_in_8_bits_predict_sound_too(hearing, quantize):
    asked = request(Case(hearing["silu"], sound=True))
    exact = engine(hearing["silu"], torch.float32, sound=True).step(asked)["sound"]
    options = EngineOptions(decode_sound=True, quantize=quantize)
    with Cosmos3Engine.from_pretrained(hearing["silu"], options=options) as model:
        found = model.step(asked)["sound"]
    assert 0 < rms(found - exact) < 0.2 * rms(exact)


def test_preflight_counts_what_predicts_sound(hearing, monkeypatch):
    folder = hearing["silu"]
    checkpoint = Checkpoint.open(folder)
    deaf = engine(folder, torch.float32)
    hears = engine(folder, torch.float32, sound=True)
    more = sound_bytes(checkpoint, torch.float32)
    assert hears.kept_bytes - deaf.kept_bytes == more > 0
    assert 0 < sound_bytes(checkpoint, torch.float32, decoder=False) < more
    counted = [
        kept_bytes(checkpoint, torch.float32, sound=sound)
        for sound in (None, lambda dtype: sound_bytes(checkpoint, dtype))
    ]
    assert counted[1] - counted[0] == more
    enough = needed_bytes(checkpoint, torch.float32) + more // 2
    monkeypatch.setattr(preflight, "available_bytes", lambda device: enough)
    Cosmos3Engine.from_pretrained(folder).close()
    with pytest.raises(PreflightError, match="are needed"):
        Cosmos3Engine.from_pretrained(folder, options=EngineOptions(decode_sound=True))


def test_inspect_says_what_a_checkpoint_hears_with(hearing, checkpoints):
    report = inspect(hearing["relu2"])
    assert report["senses"]["ears"] == []
    assert "ears       yes" in lines_of(report)
    assert report["memory_gib"]["bfloat16 with sound"] >= report["memory_gib"]["bfloat16"]
    assert "bfloat16 with sound" not in inspect(checkpoints["silu"])["memory_gib"]


def without(part):
    """A change of a copy of a folder with ears that takes a part away."""

    def change(folder):
        file = folder / part
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()

    return change


def config_with(name, **fields):
    def change(folder):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def weights_with(change):
    def changed(folder):
        (file,) = (folder / "sound_tokenizer").glob("*.safetensors")
        stored = load_file(file)
        change(stored)
        save_file(stored, file)

    return changed


def headless(folder):
    for file in (folder / "transformer").glob("*.safetensors"):
        stored = load_file(file)
        stored.pop("audio_proj_out.bias", None)
        save_file(stored, file)
    (index,) = (folder / "transformer").glob("*.index.json")
    known = json.loads(index.read_text())
    del known["weight_map"]["audio_proj_out.bias"]
    index.write_text(json.dumps(known))


TOKENIZER = "sound_tokenizer/config.json"
DAMAGED = {
    "no tokenizer": (without("sound_tokenizer"), LayoutError, "It lacks the sound tokenizer"),
    "a head's bias is missing": (headless, LayoutError, "It lacks the sound heads"),
    "no config": (without(TOKENIZER), LayoutError, "config.json"),
    "text for a rate": (config_with(TOKENIZER, sampling_rate="x"), LayoutError, "sampling_rate"),
    "a stride of zero": (config_with(TOKENIZER, dec_strides=[5, 0, 8]), LayoutError, "dec_strides"),
    "three channels": (config_with(TOKENIZER, dec_out_channels=3), LayoutError, "from 1 to 2"),
    "stages without end": (
        config_with(TOKENIZER, dec_strides=[1] * 99, dec_c_mults=[1] * 99),
        LayoutError,
        "number of dec_strides",
    ),
    "another hop": (config_with(TOKENIZER, hop_size=300), LayoutError, "hop_size, the prod"),
    "another rate": (
        config_with(TOKENIZER, sampling_rate=16_000),
        VariantError,
        "6 channels and 50 latents a second, the transformer 6 and 25",
    ),
    "other channels": (config_with(TOKENIZER, vocoder_input_dim=8), VariantError, "8 channels"),
    "another decoder": (config_with(TOKENIZER, dec_type="x"), LayoutError, "decoder type 'x'"),
    "wider than its weights": (config_with(TOKENIZER, dec_dim=8), WeightsError, "shape of"),
    "a weight is missing": (
        weights_with(lambda stored: stored.pop("decoder.conv2.weight_v")),
        WeightsError,
        "missing: decoder.conv2.weight_v",
    ),
    "not a number": (
        weights_with(lambda stored: stored["decoder.snake1.beta"].fill_(torch.nan)),
        WeightsError,
        "decoder.snake1.beta",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_ears_that_cannot_hear_are_refused(hearing, tmp_path, name):
    """By the sentence that says why; the checkpoint acts without sound all the same."""
    change, error, says = DAMAGED[name]
    folder = shutil.copytree(hearing["silu"], tmp_path / "c")
    change(folder)
    with pytest.raises(error, match=says):
        Cosmos3Engine.from_pretrained(folder, options=EngineOptions(decode_sound=True))
    Cosmos3Engine.from_pretrained(folder).close()


def test_the_decoder_needs_diffusers(hearing, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingDependencyError, match=r"sound needs .*diffusers"):
        Cosmos3Engine.from_pretrained(hearing["silu"], options=EngineOptions(decode_sound=True))
    Cosmos3Engine.from_pretrained(hearing["silu"]).close()


def test_an_engine_without_ears_and_a_clip_of_one_frame(hearing):
    asked = replace(request(Case(hearing["silu"], sound=True)), sound_noise=None)
    with pytest.raises(InputError, match="decode_sound=True"):
        engine(hearing["silu"], torch.float32).step(asked)
    with pytest.raises(InputError, match=r"a single frame.*policy_frames"):
        replace(asked, video_shape=(1, 5, 7))
    with pytest.raises(ShapeError, match=r"sound_noise must be \[6, 15\]"):
        engine(hearing["silu"], torch.float32, sound=True).step(
            replace(asked, sound_noise=torch.zeros(6, 14))
        )


def test_the_seed_s_noise_is_that_of_every_modality(hearing):
    model = engine(hearing["silu"], torch.float32, sound=True)
    asked = replace(request(Case(hearing["silu"], sound=True)), sound_noise=None, seed=4)
    noise = np.random.RandomState(4).standard_normal((6, 15)).astype(np.float32)
    given = replace(asked, sound_noise=torch.from_numpy(noise)[None])
    assert torch.equal(model.step(asked)["sound"], model.step(given)["sound"])


def unguided_sound(patch):
    """Guidance for video and actions alone."""
    original = engine_module.Cosmos3Engine._velocities

    def velocities(self, of, state, *rest):
        found = original(self, of, state, *rest)
        found[SOUND] = original(self, replace(of, scale_R11=1 + 0 * of.scale_R11), state, *rest)[
            SOUND
        ]
        return found

    patch.setattr(engine_module.Cosmos3Engine, "_velocities", velocities)


def on_the_frames_clock(patch):
    original = sequence._times

    def times(count, first, rate, base_rate, config):
        return original(count, first, rate, min(base_rate, 6.0), config)

    patch.setattr(sequence, "_times", times)


def without_modality(patch):
    patch.setattr(SoundHead, "read", lambda self, sound: self.audio_proj_in(sound))


def without_time(patch):
    """As if sound were given."""
    original = inference_module.noisy_tokens

    def noisy(streams):
        flags = original(streams).clone()
        first = streams[0].start_RnP.shape[1]
        flags[:, first : first + streams[SOUND].start_RnP.shape[1]] = 0
        return flags

    patch.setattr(inference_module, "noisy_tokens", noisy)


def first_latent_given(patch):
    original = denoising._starting_sound

    def start(*arguments):
        noise, free = original(*arguments)
        free = free.clone()
        free[0] = 0
        return noise, free

    patch.setattr(denoising, "_starting_sound", start)


FLIPS = (
    unguided_sound,
    on_the_frames_clock,
    without_modality,
    without_time,
    first_latent_given,
)


@pytest.mark.parametrize("flip", FLIPS, ids=lambda flip: flip.__name__)
def test_a_flipped_convention_shows(hearing, monkeypatch, flip):
    """Each is ten times what the pipeline and the engine may differ by, at least."""
    case = Case(hearing["relu2"], sound=True)
    model = engine(case.folder, torch.float32, sound=True)
    model._table_of.cache_clear()
    flip(monkeypatch)
    found = model.step(request(case))["sound"][0]
    monkeypatch.undo()
    model._table_of.cache_clear()
    assert off(found, oracle(case)[2]) > 10 * MOST
    assert off(model.step(request(case))["sound"][0], oracle(case)[2]) <= MOST


def test_a_converted_checkpoint_hears_as_before(hearing, tmp_path):
    out = convert(Checkpoint.open(hearing["silu"]), tmp_path / "out", shard_bytes=1 << 12)
    assert len([*(out / "sound_tokenizer").glob("*.safetensors")]) > 1
    asked = request(Case(hearing["silu"], sound=True))
    expected = engine(hearing["silu"], torch.float32, sound=True).step(asked)
    with Cosmos3Engine.from_pretrained(out, options=EngineOptions(decode_sound=True)) as model:
        found = model.step(asked)
    assert torch.equal(found["waveform"], expected["waveform"])
