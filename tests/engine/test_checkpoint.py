"""Damaged, hostile and mismatched checkpoints: a typed error each, and nothing opened outside
the folder.
"""

import json
import os
import pickle
import shutil
import struct
import sys
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.random_checkpoint import LABEL, write_checkpoint
from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends.diffusers import DiffusersBackend
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import Sampling, get_embodiment
from strands_cosmos3.engine import checkpoint as checkpoint_module
from strands_cosmos3.engine.checkpoint import Checkpoint, _space, locate
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.inspect import inspect
from strands_cosmos3.engine.formats.layout import Layout
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.engine.variants import VARIANTS, variant_of_repo
from strands_cosmos3.engine.weight_files import weight_digests
from strands_cosmos3.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    DigestError,
    LayoutError,
    PreflightError,
    UnknownNameError,
    VariantError,
    WeightsError,
)
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.types import Mode

INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(checkpoints, tmp_path):
    return Path(shutil.copytree(checkpoints["silu"], tmp_path / "c"))


def load(folder, **options):
    return Cosmos3Engine.from_pretrained(folder, dtype=torch.float32, **options)


def edit_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_weights(path, change):
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.999])
@pytest.mark.parametrize("name", [SHARD, VAE])
def test_truncated(copy, name, share):
    path = copy / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(LayoutError, match="safetensors"):
        load(copy)


def test_every_flipped_bit_of_a_header_is_caught_or_harmless(copy):
    """A flip in the header is an error of ours, or changes nothing but the free-form metadata."""
    path = copy / SHARD
    good = path.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    label_at = good.index(LABEL.encode())
    caught = 0
    for at in [*range(8), *range(8, 8 + length, max(1, length // 60))]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        try:
            load(copy)
        except CheckpointError:
            caught += 1
        else:
            assert label_at - 40 <= at < label_at + len(LABEL) or good[at : at + 1] in b' \n"', (
                f"byte {at} unnoticed"
            )
    assert caught > 50


def test_flipped_index(copy):
    good = (copy / INDEX).read_bytes()
    for at in range(0, len(good), max(1, len(good) // 60)):
        (copy / INDEX).write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        try:
            load(copy)
        except CheckpointError:
            continue
        changed = json.loads((copy / INDEX).read_bytes())["weight_map"]
        assert changed == json.loads(good)["weight_map"], f"byte {at} changed the map unnoticed"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [SHARD, VAE])
def test_non_finite(copy, name, value):
    def spoil(weights):
        key = sorted(
            k
            for k in weights
            if "proj" not in k and not k.startswith(("lm_head", "decoder", "post_quant"))
        )[-1]
        weights[key].view(-1)[-1] = value
        spoil.key = key

    edit_weights(copy / name, spoil)
    with pytest.raises(WeightsError, match=spoil.key.replace(".", r"\.")):
        load(copy)


def test_non_finite_head_of_a_domain_is_found_when_read(copy):
    for shard in copy.glob("transformer/*.safetensors"):
        edit_weights(
            shard,
            lambda w: (
                w["action_proj_in.fc.weight"][8].fill_(float("nan"))
                if "action_proj_in.fc.weight" in w
                else None
            ),
        )
    with pytest.raises(WeightsError, match=r"action_proj_in\.fc\.weight"):
        load(copy, domains=(8,))
    assert load(copy, domains=(7,))


@pytest.mark.parametrize(
    "name",
    [
        "../../secret.safetensors",
        "/nowhere/secret",
        "sub/x.safetensors",
        "..",
        "x.bin",
        7,
        None,
    ],
)
def test_escaping_index(copy, name, tmp_path):
    save_file({"norm.weight": torch.ones(64)}, tmp_path / "secret.safetensors")
    edit_json(copy / INDEX, lambda data: data["weight_map"].update({"norm.weight": name}))
    with pytest.raises(LayoutError, match="beside it"):
        load(copy)


def test_escaping_links(copy, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (copy / SHARD).rename(outside)
    (copy / SHARD).symlink_to(outside)
    with pytest.raises(LayoutError, match="outside"):
        load(copy)
    config = tmp_path / "config.json"
    (copy / "vae/config.json").rename(config)
    (copy / "vae/config.json").symlink_to(config)
    with pytest.raises(PreflightError, match=r"2 reasons(.|\n)*outside(.|\n)*outside"):
        load(copy)


def test_no_file_is_opened_outside_the_folder(copy, tmp_path):
    """Asked of the interpreter: an audit hook sees every open."""
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    edit_json(
        copy / INDEX,
        lambda data: data["weight_map"].update({"norm.weight": "../../secret.safetensors"}),
    )
    opened: list[str] | None = []

    def watch(event, arguments):  # a hook stays for good
        if opened is not None and event in ("open", "os.open"):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    with pytest.raises(LayoutError):
        load(copy)
    seen, opened = opened, None
    assert any(str(copy) in name for name in seen)
    assert not [name for name in seen if "secret" in name]


def test_the_hub_cache_may_link_into_its_blobs(copy, tmp_path):
    repository = tmp_path / "models--nvidia--small"
    snapshot = repository / "snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    shutil.move(copy, snapshot)
    (repository / "blobs").mkdir()
    (snapshot / SHARD).rename(repository / "blobs/123")
    (snapshot / SHARD).symlink_to("../../../blobs/123")
    assert load(snapshot)


def test_pickled(copy):
    for path in copy.glob("transformer/*.safetensors*"):
        path.unlink()

    class Bomb:
        def __reduce__(self):
            return Path.touch, (copy / "exploded",)

    (copy / "transformer/diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(LayoutError, match="pickled"):
        load(copy)
    assert not (copy / "exploded").exists()


def test_a_pickle_in_disguise(copy):
    (copy / SHARD).write_bytes(pickle.dumps({"norm.weight": [1.0]}) * 100)
    with pytest.raises(LayoutError, match="safetensors"):
        load(copy)


def test_missing_surplus_and_misshapen_weights_are_named(copy):
    def change(weights):
        del weights["proj_in.bias"]
        weights["novel.weight"] = torch.ones(3)
        weights["norm_moe_gen.weight"] = torch.ones(65)

    for path in copy.glob("transformer/*.safetensors"):
        edit_weights(path, lambda w: change(w) if "proj_in.bias" in w else None)
    everything = {
        k: v for p in copy.glob("transformer/*.safetensors") for k, v in load_file(p).items()
    }
    everything |= {"novel.weight": torch.ones(3), "norm_moe_gen.weight": torch.ones(65)}
    everything.pop("proj_in.bias", None)
    for path in copy.glob("transformer/*.safetensors*"):
        path.unlink()
    save_file(everything, copy / "transformer/diffusion_pytorch_model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load(copy)
    for named in (
        "missing: proj_in.bias",
        "surplus: novel.weight",
        "norm_moe_gen.weight is [65], expected [64]",
    ):
        assert named in str(caught.value)


def test_index_and_header_disagree(copy):
    edit_json(copy / INDEX, lambda data: data["weight_map"].pop("norm_moe_gen.weight"))
    with pytest.raises(WeightsError, match=r"norm_moe_gen\.weight"):
        load(copy)


def test_integer_weights(copy):
    for path in copy.glob("transformer/*.safetensors"):
        edit_weights(
            path,
            lambda w: (
                w.update({"norm.weight": w["norm.weight"].int()}) if "norm.weight" in w else None
            ),
        )
    with pytest.raises(WeightsError, match="I32"):
        load(copy)


def test_lm_head_may_be_absent_and_sound_heads_present(copy):
    everything = {
        k: v for p in copy.glob("transformer/*.safetensors") for k, v in load_file(p).items()
    }
    for path in copy.glob("transformer/*.safetensors*"):
        path.unlink()
    del everything["lm_head.weight"]
    everything |= {
        "audio_proj_in.weight": torch.ones(64, 5),
        "audio_modality_embed": torch.ones(64),
    }
    save_file(everything, copy / "transformer/diffusion_pytorch_model.safetensors")
    assert load(copy)


@pytest.mark.parametrize(
    "name", ["transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json", INDEX]
)
@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"weight_map": {}}'])
def test_broken_json(copy, name, text):
    (copy / name).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError):
        load(copy)


def test_unknown_config_keys_are_ignored(copy):
    for name in ("transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"):
        edit_json(
            copy / name, lambda data: data.update({"novelty": {"a": 1}, "_diffusers_version": "9"})
        )
    assert load(copy)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "multiple"),
        ({"rope_axes_dim": [1, 2, 3]}, "sum to"),
        ({"hidden_act": "gelu"}, "silu, relu2"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"action_gen": False}, "action_gen"),
    ],
)
def test_unusable_config(copy, change, match):
    edit_json(copy / "transformer/config.json", lambda data: data.update(change))
    with pytest.raises(LayoutError, match=match):
        load(copy)


def test_foreign_vae(copy):
    edit_json(copy / "vae/config.json", lambda data: data.update({"scale_factor_spatial": 8}))
    with pytest.raises(LayoutError, match=r"\(4, 8\)"):
        load(copy)
    edit_json(
        copy / "vae/config.json",
        lambda data: data.update({"scale_factor_spatial": 16, "latents_std": [1.0]}),
    )
    with pytest.raises(LayoutError, match="z_dim"):
        load(copy)


def test_empty_and_absent(tmp_path):
    with pytest.raises(LayoutError, match="empty"):
        load(tmp_path)
    with pytest.raises(LayoutError, match="neither a folder nor a hub"):
        load(tmp_path / "nothing")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(LayoutError, match="not a folder"):
        load(file)


def test_several_faults_are_listed_at_once(copy):
    shutil.rmtree(copy / "vae")
    (copy / "scheduler/scheduler_config.json").unlink()
    (copy / SHARD).unlink()
    with pytest.raises(PreflightError) as caught:
        load(copy)
    for named in ("vae/config.json", "scheduler_config.json", SHARD.rsplit("/")[-1]):
        assert named in str(caught.value)


def test_wrong_variant(checkpoints):
    with pytest.raises(VariantError, match="variant 'nano' was requested"):
        load(checkpoints["silu"], variant="nano")
    with pytest.raises(UnknownNameError, match="edge-policy-droid"):
        load(checkpoints["silu"], variant="nanu")


def test_a_relu2_config_over_silu_weights(copy):
    edit_json(copy / "transformer/config.json", lambda data: data.update({"hidden_act": "relu2"}))
    with pytest.raises((WeightsError, PreflightError), match="gate_proj"):
        load(copy)


def test_released_variants_know_their_sizes_and_actions():
    edge = {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    edge |= {
        "head_dim": 128,
        "intermediate_size": 9216,
        "vocab_size": 131072,
        "hidden_act": "relu2",
        "action_dim": 64,
    }
    VARIANTS["edge"].check(TransformerConfig.from_dict(edge))
    with pytest.raises(VariantError, match="hidden_size is 2048, nano has 4096"):
        VARIANTS["nano"].check(TransformerConfig.from_dict(edge))
    for folder, space in (
        ("nvidia/Cosmos3-Nano-Policy-DROID", "joint_pos"),
        ("Cosmos3-Nano", "midtrain"),
    ):
        variant = variant_of_repo(folder)
        assert variant is not None
        assert variant.action_space == space


def test_the_action_space_must_come_from_somewhere(copy):
    (copy / "checkpoint.json").unlink()
    assert load(copy).action_space is None
    assert load(copy, action_space="joint_pos").action_space == "joint_pos"
    with pytest.raises(VariantError, match="pose_abs"):
        load(copy, action_space="pose_abs")


def stating_joint_pos(copy, name, stated):
    """A renamed checkpoint whose action space a file states, or the caller, or nobody; and what
    the caller says.
    """
    (copy / "checkpoint.json").unlink()
    folder = copy.rename(copy.with_name(name))
    if stated == "metadata":
        ours = {"strands_cosmos3": {"action_space": "joint_pos"}}
        (folder / "checkpoint.json").write_text(json.dumps(ours))
    if stated == "contract":
        (folder / "contract.toml").write_text('action_space = "joint_pos"')
    return folder, "joint_pos" if stated == "caller" else None


@pytest.mark.parametrize("stated", ["metadata", "contract", "caller", "nobody"])
@pytest.mark.parametrize("name", ["edge", "my-nano-policy", "snapshot 3"])
def test_a_renamed_folder_is_as_stated(copy, name, stated):
    folder, said = stating_joint_pos(copy, name, stated)
    checkpoint = Checkpoint.open(folder, action_space=said)
    if stated == "nobody":
        assert inspect(folder)["missing"] == ["action_space"]
        with pytest.raises(ContractError, match="--action-space"):
            Cosmos3PolicyProcessor.for_checkpoint(checkpoint, domain_name="droid")
        with pytest.raises(ContractError, match="--action-space"):
            Cosmos3Policy(model=folder)
    else:
        assert checkpoint.action_space == checkpoint.metadata["action_space"] == "joint_pos"


@pytest.mark.parametrize("stated", ["metadata", "contract", "caller", "nobody"])
def test_a_renamed_folder_acts_as_stated_or_not_at_all(copy, stated):
    folder, said = stating_joint_pos(copy, "my-nano-policy", stated)
    for act in (NativeBackend, DiffusersBackend):
        expected = ContractError if stated == "nobody" else VariantError
        if act is DiffusersBackend or stated == "nobody":  # diffusers has no joint_pos
            with pytest.raises(expected, match="action space"):
                act(folder, action_space=said)
        else:
            with closing(act(folder, action_space=said)) as backend:
                assert backend.info.action_space == "joint_pos"
                assert ServedPolicy(backend).about["action_space"] == "joint_pos"


def test_a_server_states_the_space_of_its_backend():
    with closing(NativeBackend(embedded_checkpoint())) as backend:
        assert ServedPolicy(backend).about["action_space"] == "midtrain"


@pytest.mark.parametrize(
    ("variant", "recorded", "caller"),
    [
        (None, "midtrain", "joint_pos"),
        ("nano-policy-droid", "midtrain", None),
        ("edge", None, "joint_pos"),
    ],
)
def test_two_that_state_an_action_space_must_agree(variant, recorded, caller):
    space = VARIANTS[variant or "small-silu"]
    layout = Layout(Path("ck"))
    with pytest.raises(VariantError, match="'joint_pos' by"):
        _space(layout, space, {"action_space": recorded}, caller)


def test_digests(tmp_path):
    folder = write_checkpoint(tmp_path / "c", digests=True)
    assert load(folder)
    for path in (folder / SHARD, folder / VAE):
        intact = path.read_bytes()
        data = bytearray(intact)
        data[-5] ^= 1
        path.write_bytes(data)
        with pytest.raises(DigestError, match="SHA-256"):
            load(folder)
        assert load(folder, verify=False), "without its digest nothing shows that bit"
        path.write_bytes(intact)


def test_the_digest_tells_checkpoints_apart(checkpoints):
    first, second = (Checkpoint.open(folder).digest for folder in checkpoints.values())
    assert first != second
    assert len(first) == 64
    found = Checkpoint.open(checkpoints["silu"])
    recorded = replace(found, metadata={**found.metadata, "sha256": {"vae/config.json": "0" * 64}})
    assert recorded.digest != first, "of equal shapes, the recorded digests"


@pytest.mark.parametrize(
    "trained", ["norm.weight", "action_proj_out", "layers.1", "post_quant_conv"]
)
def test_a_checkpoint_trained_further_has_another_digest(checkpoints, tmp_path, trained):
    """A released checkpoint and a training run record no digests."""
    folder = Path(shutil.copytree(checkpoints["silu"], tmp_path / "c"))
    before = Checkpoint.open(folder).digest
    assert Checkpoint.open(checkpoints["silu"]).digest == before, "wherever it lies"
    digests, names = [], []
    for factor in (1, 1.001):  # files of one size, written by one tool
        for file in folder.glob("*/*.safetensors"):
            weights = load_file(file)
            names = [name for name in weights if trained in name] or names
            save_file({k: w * factor if k in names else w for k, w in weights.items()}, file)
        digests.append(Checkpoint.open(folder).digest)
    assert names
    assert digests[0] != digests[1]


def test_recorded_digests_of_some_files_do_not_stand_for_the_others(tmp_path):
    folder = write_checkpoint(tmp_path / "c", digests=True)
    file = folder / "checkpoint.json"
    content = json.loads(file.read_text())
    content["strands_cosmos3"]["sha256"].pop(str(VAE))
    file.write_text(json.dumps(content))
    before = Checkpoint.open(folder).digest
    data = bytearray((folder / VAE).read_bytes())
    data[-5] ^= 1
    (folder / VAE).write_bytes(data)
    assert Checkpoint.open(folder).digest != before


@pytest.mark.parametrize(
    ("key", "value"),
    [("prompt_format", "plain"), ("action_space", "joint_pos"), ("resolution_tier", 480)],
)
def test_a_checkpoint_that_states_something_else_has_another_digest(
    checkpoints, tmp_path, key, value
):
    folder = Path(shutil.copytree(checkpoints["silu"], tmp_path / "c"))
    before = Checkpoint.open(folder, action_space="midtrain").digest
    assert before == Checkpoint.open(folder).digest, "what the caller states is not the folder's"
    file = folder / "checkpoint.json"
    content = json.loads(file.read_text())
    content["strands_cosmos3"][key] = value
    file.write_text(json.dumps(content))
    assert Checkpoint.open(folder).digest != before


@pytest.mark.parametrize(
    "edited",
    ["scheduler/scheduler_config.json", "text_tokenizer/tokenizer.json", "vae/config.json"],
)
def test_a_checkpoint_whose_other_files_were_edited_has_another_digest(
    checkpoints, tmp_path, edited
):
    """Though the digests of all weights are recorded."""
    folder = Path(shutil.copytree(checkpoints["silu"], tmp_path / "c"))
    about = folder / "checkpoint.json"
    content = json.loads(about.read_text())
    content["strands_cosmos3"]["sha256"] = weight_digests(folder)
    about.write_text(json.dumps(content))
    before = Checkpoint.open(folder).digest
    file = folder / edited
    file.write_text(file.read_text().rstrip() + "\n\n")
    assert Checkpoint.open(folder).digest != before


@pytest.mark.parametrize("offset", [5_000, 9_999_999, -2])
def test_every_byte_of_a_large_file_counts(checkpoints, tmp_path, offset):
    folder = Path(shutil.copytree(checkpoints["silu"], tmp_path / "c"))
    large = folder / "vae" / "large.bin"
    large.touch()
    os.truncate(large, 20_000_000)
    before = Checkpoint.open(folder).digest
    with large.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(b"\1")
    assert Checkpoint.open(folder).digest != before


@pytest.mark.parametrize("name", ["model_index.json", "action_stats.json"])
def test_files_at_the_top_count(checkpoints, tmp_path, name):
    folder = Path(shutil.copytree(checkpoints["silu"], tmp_path / "c"))
    before = Checkpoint.open(folder).digest
    with (folder / name).open("a") as file:
        file.write(" ")
    assert Checkpoint.open(folder).digest != before


def test_a_digest_that_nobody_asks_for_costs_nothing(checkpoints, monkeypatch):
    """A backend is opened and answers without; a server, a record or a resumed run asks."""
    read = []
    monkeypatch.setattr(
        checkpoint_module,
        "file_sha256",
        lambda path, anew=False: read.append((path, anew)) or "0" * 64,
    )
    with closing(NativeBackend(checkpoints["silu"])) as backend:
        assert not read
        assert len(backend.model_sha256) == 64
        assert read
        assert not any(anew for _, anew in read)
        read.clear()
        backend.engine.checkpoint.read_anew()
        assert read
        assert all(anew for _, anew in read)


def test_preflight_lists_every_failure(checkpoints, monkeypatch):
    with pytest.raises(PreflightError, match=r"float64.*sees no CUDA"):
        Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float64, device="cuda")
    from strands_cosmos3.engine import preflight

    monkeypatch.setattr(preflight, "available_bytes", lambda _: 1000)
    with pytest.raises(PreflightError, match=r"0\.00 GiB left"):
        load(checkpoints["silu"])


def test_preflight_counts_what_is_kept(checkpoints):
    from strands_cosmos3.engine.preflight import kept_bytes

    for folder in checkpoints.values():
        model = load(folder, domains=(8,), decode_video=True)
        expected = kept_bytes(model.checkpoint, torch.float32, decoder=True, text=True)
        assert model.kept_bytes == expected


def test_preflight_s_figures_hold_a_step_and_tell_forms_apart(checkpoints, monkeypatch):
    from strands_cosmos3.engine import preflight

    opened = Checkpoint.open(checkpoints["silu"])
    (kept, kept_apart), (needed, needed_apart) = (
        [sizes(opened, torch.float32, decoder=False, text=text) for text in (True, False)]
        for sizes in (preflight.kept_bytes, preflight.needed_bytes)
    )
    mlp = 3093 * opened.config.intermediate_size * 4  # DROID's tokens at tier 480
    assert needed > 1.04 * kept + 3 * mlp
    assert needed - needed_apart > 1.04 * (kept - kept_apart) > 0
    needs = partial(preflight.needed_bytes, opened)
    forms = preflight.memory_forms(needs, opened.config)
    single, half, small, with_text, apart, small_apart = forms.values()
    assert list(forms)[1:] == [
        *("bfloat16", "int8 or fp8", "int8 or fp8 with quantize_text"),
        *("bfloat16 with offload_text", "int8 or fp8 with offload_text"),
    ]
    assert single > half > small > with_text > small_apart < apart < half
    free = iter([1 << 40, 1000])  # of the device, of the host
    monkeypatch.setattr(preflight, "available_bytes", lambda _: next(free))
    with pytest.raises(PreflightError, match=r"text tower needs .* of host memory"):
        Cosmos3Engine.from_pretrained(
            checkpoints["silu"], options=EngineOptions(offload_text=True), device="cpu"
        )


COMMITS = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def hub_cache(tmp_path, checkpoints, monkeypatch):
    """A function that puts snapshots of me/arm into an empty cache, and branches to them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--arm"

    def fill(commits, **branches):
        for commit in commits:
            shutil.copytree(checkpoints["silu"], repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        for branch, commit in branches.items():
            (repository / "refs" / branch).write_text(commit)
        return repository / "snapshots"

    return fill


def test_a_revision_is_part_of_the_name(hub_cache):
    first, second = COMMITS
    snapshots = hub_cache(COMMITS, main=first, v2=second)
    for name, commit in {
        "me/arm": first,
        "me/arm@main": first,
        "me/arm@v2": second,
        f"me/arm@{second}": second,
    }.items():
        assert locate(name, local_files_only=True) == snapshots / commit
    assert locate("me/arm", revision="v2", local_files_only=True) == snapshots / second
    with pytest.raises(LayoutError, match="me/arm@v3"):
        locate("me/arm@v3", local_files_only=True)
    with pytest.raises(ConfigError, match="two revisions"):
        locate("me/arm@v2", revision="main")
    with pytest.raises(LayoutError, match="owner/name@revision"):
        locate("me/arm@")


def test_a_cache_that_was_filled_by_commit(hub_cache):
    first, _ = COMMITS
    snapshots = hub_cache([first])
    assert locate("me/arm", local_files_only=True) == snapshots / first


def test_a_cache_of_two_commits_and_no_branch_asks_for_one(hub_cache):
    hub_cache(COMMITS)
    with pytest.raises(LayoutError, match=f"the revisions {', '.join(COMMITS)}"):
        locate("me/arm", local_files_only=True)


def test_locate(tmp_path, checkpoints, monkeypatch):
    assert locate(checkpoints["silu"]) == checkpoints["silu"]
    with pytest.raises(ConfigError, match="revision"):
        locate(checkpoints["silu"], revision="main")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LayoutError, match="could not be fetched"):
        locate("nvidia/Cosmos3-Nothing", local_files_only=True)


def test_weights_are_labelled_random(checkpoints):
    metadata = json.loads((checkpoints["silu"] / "checkpoint.json").read_text())["strands_cosmos3"]
    assert "random weights" in metadata["label"]


def test_code_beside_a_tokenizer_is_not_run(copy, monkeypatch):
    folder = copy / "text_tokenizer"
    (folder / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\nclass Evil: ...\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with suppress(LayoutError):
        PromptTokenizer(folder).ids("pick")
    assert not (copy / "ran").exists(), "the checkpoint's code ran"
    assert not questions, "transformers asked whether to run it"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_tokenizer_that_leads_out_of_the_checkpoint_is_refused(copy, tmp_path, what):
    folder, outside = copy / "text_tokenizer", tmp_path / "outside"
    shutil.copytree(folder, outside)
    PromptTokenizer(folder)
    if what == "folder":
        shutil.rmtree(folder)
        folder.symlink_to(outside)
    else:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    with pytest.raises(LayoutError, match="outside the checkpoint"):
        PromptTokenizer(folder)


def test_both_dynamics_have_the_steps_that_they_record_and_a_policy_its_own():
    domain, opened = (
        get_embodiment("droid"),
        replace(Checkpoint.open(embedded_checkpoint()), dynamics_steps=2),
    )
    steps = {
        mode: opened.resolve_sampling(domain, "midtrain", Sampling(), mode).num_steps
        for mode in Mode
    }
    assert steps == {Mode.POLICY: 3, Mode.FORWARD_DYNAMICS: 2, Mode.INVERSE_DYNAMICS: 2}
    assert (
        opened.resolve_sampling(domain, "midtrain", Sampling(7), Mode.FORWARD_DYNAMICS).num_steps
        == 7
    )
    same = replace(opened, dynamics_steps=None)
    assert (
        same.resolve_sampling(domain, "midtrain", Sampling(), Mode.FORWARD_DYNAMICS).num_steps == 3
    )


TRANSFORMER = "transformer"
SINGLE = "diffusion_pytorch_model.safetensors"
SHARDS = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def in_one_file(copy):
    """Leave one weight file in the transformer's folder, instead of shards and their index."""
    folder = copy / TRANSFORMER
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (copy / INDEX).unlink(missing_ok=True)
    save_file(weights, folder / SINGLE)
    return folder, weights


@pytest.mark.parametrize(
    "twin",
    [
        "diffusion_pytorch_model.bf16.safetensors",
        "diffusion_pytorch_model-00002-of-00003.fp16.safetensors",
        "model.safetensors",
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.safetensors.index.bf16.json",
        "ema.safetensors",
    ],
)
@pytest.mark.parametrize("part", [TRANSFORMER, "vae"])
def test_a_second_weight_file_is_never_ignored(copy, part, twin):
    in_one_file(copy)
    path = copy / part / twin
    if twin.endswith(".json"):
        path.write_text(json.dumps({"weight_map": {"x": SHARDS[0]}}))
    else:
        save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(LayoutError) as caught:
        load(copy)
    assert twin in str(caught.value)
    assert SINGLE in str(caught.value)


@pytest.mark.parametrize("also_gone", [False, True])
def test_new_weights_beside_an_older_index_are_told_apart(copy, also_gone):
    """Whether the older shards are still there or not."""
    _, weights = in_one_file(copy)
    (copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, SHARDS[0])}))
    if not also_gone:
        save_file(weights, copy / TRANSFORMER / SHARDS[0])
    with pytest.raises(
        LayoutError, match=rf"index.json.* beside .*{SINGLE}|{SINGLE}.* beside .*index.json"
    ):
        load(copy)


@pytest.mark.parametrize("variant", ["bf16", "fp16", "ema"])
def test_the_only_weights_are_found_by_their_variant(copy, variant):
    folder, _ = in_one_file(copy)
    (folder / SINGLE).rename(folder / f"diffusion_pytorch_model.{variant}.safetensors")
    (folder / "._diffusion_pytorch_model.safetensors").write_bytes(b"of a file manager")
    load(copy).close()
    (folder / "pytorch_model.safetensors").write_bytes(b"")
    (folder / f"diffusion_pytorch_model.{variant}.safetensors").unlink()
    with pytest.raises(LayoutError, match=r"only pytorch_model\.safetensors"):
        load(copy)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "b" * 64 + "\nsize 9\n"


@pytest.mark.parametrize(
    "name", [SHARD, VAE, "model_index.json", "vae/config.json", "scheduler/scheduler_config.json"]
)
def test_a_git_lfs_pointer_is_named(copy, name):
    (copy / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=f"{Path(name).name}.*git lfs pull"):
        load(copy)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "added_tokens.json"])
def test_a_git_lfs_pointer_beside_a_tokenizer_is_named(copy, name):
    (copy / "text_tokenizer" / name).write_text(POINTER)
    with pytest.raises(LayoutError, match=f"{name} is a Git LFS pointer"):
        PromptTokenizer(copy / "text_tokenizer")


@pytest.mark.parametrize(
    "wrapper",
    [
        "module.{}",
        "_fsdp_wrapped_module.{}",
        "_orig_mod.module.{}",
        "{}._checkpoint_wrapped_module",
    ],
)
def test_names_of_wrapped_modules_fit(copy, wrapper):
    folder, weights = in_one_file(copy)
    first = "layers.0"
    inner = {
        (
            wrapper.format(key)
            if wrapper.endswith("{}")
            else key.replace(first, wrapper.format(first))
        ): value
        for key, value in weights.items()
    }
    save_file(inner, folder / SINGLE)
    with closing(load(copy)) as engine:
        assert set(engine.checkpoint.weights.shapes) == set(weights)
    save_file({f"ours.{key}": value for key, value in weights.items()}, folder / SINGLE)
    with pytest.raises(WeightsError, match=r"surplus: ours\.") as caught:
        load(copy)
    assert "missing: " in str(caught.value)
    twice = {**weights, "module.norm.weight": weights["norm.weight"].clone()}
    save_file(twice, folder / SINGLE)
    with pytest.raises(WeightsError, match="are both"):
        load(copy)
