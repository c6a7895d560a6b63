"""The decoder of films: causal, read from a checkpoint's own folder, used on demand only, and
refused if damaged.
"""

import json
import shutil
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from helpers.cosmos3_oracle import Case, request
from helpers.options import backend_options
from helpers.parity import in_float64, share
from helpers.training_data import random_preview, write_preview
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.loading import load_preview
from strands_cosmos3.engine.novelty import NovelPictureWarning
from strands_cosmos3.engine.vae import PreviewDecoder
from strands_cosmos3.errors import ConfigError, LayoutError, WeightsError
from strands_cosmos3.parallel.sharded_vae import ShardedVae
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.types import Observation


@pytest.fixture(scope="module")
def with_preview(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview") / "c"
    shutil.copytree(checkpoints["silu"], folder)
    write_preview(folder, torch.float32)
    return folder


def pixels_of(folder, decode, **changes):
    asked = replace(request(Case(folder, steps=1)), decode_frames=9, **changes)
    with Cosmos3Engine.from_pretrained(folder, dtype=torch.float32, decode_video=decode) as engine:
        result = engine.step(asked)
        return result["pixels"], result["video"], engine.kept_bytes


def test_frames_follow_their_latents_and_none_later():
    decoder, latents = (
        random_preview(16),
        torch.randn(2, 16, 3, 2, 4, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        pixels, exact = decoder(latents), in_float64(decoder)(latents.double())
        assert pixels.shape == (2, 3, 9, 32, 64)
        assert share(decoder(latents[:, :, :2]), exact[:, :, :5], pixels[:, :, :5]) <= 1
        for frame, seen in ((1, range(1, 9)), (2, range(5, 9))):
            other = latents.clone()
            other[:, :, frame] += 1
            changed = (decoder(other) - pixels).abs().amax((0, 1, 3, 4)) > 1e-4
            assert [i for i in range(9) if changed[i]] == list(seen), frame


def test_pixels_and_gradients_are_those_of_plain_layers():
    decoder = random_preview(16)
    latents = torch.randn(2, 16, 2, 1, 2, generator=torch.Generator().manual_seed(0))

    def residual(block, x):
        return x + block.conv2(F.silu(block.conv1(F.silu(x))))

    def plain(latents):
        before = latents[:, :, [0, 0]]
        x = decoder.conv_in(torch.cat([latents, before], dim=1).transpose(1, 2).flatten(0, 1))
        x = decoder.frames(F.silu(residual(decoder.coarse[1], residual(decoder.coarse[0], x))))
        x = x.reshape(2, 8, -1, 1, 2)[:, 3:].flatten(0, 1)
        x = residual(decoder.middle, F.pixel_shuffle(decoder.to_middle(F.silu(x)), 2))
        x = residual(decoder.fine, F.pixel_shuffle(decoder.to_fine(F.silu(x)), 2))
        x = F.pixel_shuffle(decoder.conv_out(F.silu(x)), 4)
        return x.unflatten(0, (2, 5)).transpose(1, 2)

    found = []
    for decode in (decoder, plain):
        own = latents.clone().requires_grad_()
        pixels = decode(own)
        pixels.square().mean().backward()
        found.append([pixels, own.grad, *(p.grad.clone() for p in decoder.parameters())])
        decoder.zero_grad()
    exact = in_float64(decoder)
    own = latents.double().requires_grad_()
    pixels = exact(own)
    pixels.square().mean().backward()
    wanted = [pixels.detach(), own.grad, *(p.grad for p in exact.parameters())]
    for one, expected, peer in zip(found[0], wanted, found[1], strict=True):
        assert share(one.detach(), expected, peer.detach()) <= 1


def test_a_known_first_frame_is_shown_and_the_later_ones_alone_are_decoded():
    decoder, made = random_preview(16), []
    in_double = in_float64(decoder)
    latents = torch.randn(2, 16, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    decoder.fine.register_forward_hook(lambda _, args, out: made.append(len(out)))
    with torch.no_grad():
        pixels, exact = decoder(latents), in_double(latents.double())
        first = torch.rand(2, 3, 1, 32, 64)
        film = decoder(latents, first)
        torch.testing.assert_close(film[:, :, :1], first, rtol=0, atol=0)
        assert share(film[:, :, 1:], exact[:, :, 1:], pixels[:, :, 1:]) <= 1
        torch.testing.assert_close(decoder(latents[:, :, :1], first), first, rtol=0, atol=0)
    assert made == [18, 16, 0]


def test_films_are_decoded_by_it_and_everything_else_by_the_vae(with_preview, checkpoints):
    cheap, video, small = pixels_of(with_preview, "preview")
    exact, _, large = pixels_of(with_preview, True)
    config, files = Checkpoint.open(with_preview).preview
    decoder = PreviewDecoder.from_config(config, 16)
    decoder.load_state_dict(load_file(files.folder / "diffusion_pytorch_model.safetensors"))
    with torch.no_grad():
        wanted, peer = (
            ((each(latents) + 1) / 2).clamp(0, 1)
            for each, latents in ((in_float64(decoder), video.double()), (decoder, video))
        )
    assert share(cheap, wanted, peer) <= 1
    assert (cheap - exact).abs().max() > 0.05
    without, _, plain = pixels_of(checkpoints["silu"], "preview")  # has none: its VAE decodes
    torch.testing.assert_close(without, exact, rtol=0, atol=0)
    assert (large, small) == (plain, plain - (large - small))
    counted = sum(p.numel() * 4 for p in decoder.parameters())
    wan = sum(
        p.numel() * 4
        for n, p in _wan(with_preview)
        if n.startswith(("decoder.", "post_quant_conv."))
    )
    assert large - small == wan - counted


def _wan(folder):
    with Cosmos3Engine.from_pretrained(folder, dtype=torch.float32, decode_video=True) as engine:
        return list(engine.vae.model.named_parameters())


def test_damage_is_an_error_that_names_the_file(with_preview, tmp_path):
    def damaged(name, change):
        folder = tmp_path / name
        shutil.copytree(with_preview, folder)
        change(folder / "preview_decoder")
        with Cosmos3Engine.from_pretrained(folder, dtype=torch.float32, decode_video="preview"):
            pass

    def write(widths):
        return lambda home: (home / "config.json").write_text(json.dumps({"widths": widths}))

    def not_finite(home):
        path = home / "diffusion_pytorch_model.safetensors"
        weights = load_file(path)
        weights["conv_in.bias"][0] = torch.nan
        save_file(weights, path)

    for i, widths in enumerate(
        ([128, 64], [128, 64, 0], [128, 64, 10**9], "abc", None, [[1], 2, 3])
    ):
        with pytest.raises(LayoutError, match=r"preview_decoder/config\.json"):
            damaged(f"w{i}", write(widths))
    with pytest.raises(WeightsError):
        damaged("other", write([128, 64, 16]))
    with pytest.raises(WeightsError, match=r"conv_in\.bias"):
        damaged("nan", not_finite)
    with pytest.raises(LayoutError):
        damaged("gone", lambda home: (home / "config.json").unlink())


def test_other_values_are_refused():
    with pytest.raises(ConfigError, match="'fast' is unknown; valid: True, False, 'preview'"):
        backend_options(decode_video="fast")


@dataclass
class Ranks:
    rank: int
    size: int = 2


def test_on_several_ranks_the_first_decodes_alone(with_preview):
    latents = torch.randn(1, 16, 2, 2, 4, generator=torch.Generator().manual_seed(1))
    with (
        Cosmos3Engine.from_pretrained(
            with_preview, dtype=torch.float32, decode_video="preview"
        ) as engine,
        torch.no_grad(),
    ):
        expected = engine.vae.decode(latents)
        ranks = Ranks(1)
        vae = ShardedVae(engine.vae, ranks, "exact")
        assert vae.decode(latents) is None
        ranks.rank = 0
        torch.testing.assert_close(vae.decode(latents), expected)


@pytest.fixture(scope="module")
def telling(with_preview, tmp_path_factory):
    """A checkpoint that tells how novel pictures are."""
    folder = tmp_path_factory.mktemp("novelty") / "c"
    shutil.copytree(with_preview, folder)
    _record(folder, novelty_rmse=0.25)
    return folder


def _record(folder, **figures):
    path = folder / "checkpoint.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(
        json.dumps({"strands_cosmos3": {**known.get("strands_cosmos3", {}), **figures}})
    )


def test_novelty_is_the_error_of_the_first_picture_over_the_quantile(telling, with_preview):
    asked = request(Case(telling, steps=1))
    other = replace(asked, cond_video_pixels=asked.cond_video_pixels.flip(-1), seed=5)
    with Cosmos3Engine.from_pretrained(telling, dtype=torch.float32) as engine:
        first, second, third = engine.step_batch([asked, other, replace(asked, seed=9)])
        decoder = load_preview(Checkpoint.open(telling), torch.device("cpu"), torch.float32)
        with torch.no_grad():
            latents = engine.vae.encode(asked.cond_video_pixels[:, :, :1])
            made = decoder(latents).clamp(-1, 1)
        _, height, width = asked.video_shape
        difference = (made - asked.cond_video_pixels[:, :, :1])[..., : 16 * height, : 16 * width]
    assert first["novelty"] == pytest.approx(
        float(difference.square().mean().sqrt()) / 2 / 0.25, rel=1e-4
    )
    assert third["novelty"] == first["novelty"] != second["novelty"]
    with Cosmos3Engine.from_pretrained(with_preview, dtype=torch.float32) as engine:
        assert "novelty" not in engine.step(asked)


def test_a_film_begins_with_its_own_picture_as_novelty_saw_it(telling, with_preview):
    asked = replace(request(Case(telling, steps=1)), decode_frames=9)
    other = replace(asked, cond_video_pixels=asked.cond_video_pixels.flip(-1), seed=5)
    decoder = load_preview(Checkpoint.open(telling), torch.device("cpu"), torch.float32)
    exact = in_float64(decoder)

    def check(result, count):
        latents = result["video"]
        wanted, peer = (
            ((each[:, :, :count] + 1) / 2).clamp(0, 1)
            for each in (exact(latents.double()), decoder(latents))
        )
        assert share(result["pixels"], wanted, peer) <= 1

    with (
        Cosmos3Engine.from_pretrained(
            telling, dtype=torch.float32, decode_video="preview"
        ) as engine,
        torch.no_grad(),
    ):
        made: list[int] = []
        engine.vae.model.preview.fine.register_forward_hook(lambda *seen: made.append(len(seen[2])))
        for each in (asked, other, asked):
            check(engine.step(each), 9)
        assert made == [1, 8] * 3
        for results in (engine.step_batch([asked, other]), engine.step_batch([other, asked])):
            first, second = (result["pixels"][:, :, 0] for result in results)
            assert (first - second).abs().max() > 0.005  # thousands of roundings
            for result in results:
                check(result, 9)
        for count in (1, 3, 5, 17):
            check(engine.step(replace(other, decode_frames=count)), count)
        assert "pixels" not in engine.step(replace(asked, decode_frames=0))
        # frame 0 of this clip is not given: its picture is not that of the latents
        later = asked.cond_video_pixels.repeat_interleave(9, dim=2)
        check(engine.step(replace(asked, cond_video_pixels=later, cond_frame_indexes=(1,))), 9)
    by_vae = [pixels_of(folder, True)[0] for folder in (telling, with_preview)]
    assert torch.equal(*by_vae)


def test_a_novel_picture_is_counted_and_warned_of(telling, tmp_path):
    def policy(quantile):
        folder = tmp_path / f"q{quantile}"
        shutil.copytree(telling, folder)
        _record(folder, novelty_rmse=quantile, resolution_tier=128)
        return Cosmos3Policy("droid", "panda", model=folder, device="cpu", num_steps=1)

    views = {name: np.full((180, 320, 3), 90, np.uint8) for name in DROID_RIG.views}
    shown = Observation(t_capture_s=0.0, q_rad=HOME_Q, gripper=1.0, images=views)
    with policy(1.0) as calm, warnings.catch_warnings():
        warnings.simplefilter("error", NovelPictureWarning)
        calm.plan(shown, "reach")
        assert 0 < calm.last_rollout["novelty"] <= 1
        assert calm.counters["novel_pictures"] == 0
    with policy(1e-6) as alarmed:
        with pytest.warns(NovelPictureWarning, match=r"the 99\.9 % quantile"):
            alarmed.plan(shown, "reach")
        assert alarmed.last_rollout["novelty"] > 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", NovelPictureWarning)
            alarmed.plan(shown, "reach")  # the next ones are only counted
        assert alarmed.counters["novel_pictures"] == 2


@pytest.mark.parametrize("value", [0, -1, 2, "0.1", float("nan"), True])
def test_a_malformed_quantile_is_refused(with_preview, tmp_path, value):
    folder = shutil.copytree(with_preview, tmp_path / "c")
    _record(folder, novelty_rmse=value)
    with pytest.raises(LayoutError, match="novelty_rmse"):
        Checkpoint.open(folder)
