"""Checkpoints in other formats act to the bit as the same weights in the released layout."""

import json
import math
import re
import runpy
import shutil
import sys
import tomllib
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from helpers import checkpoint_formats as formats
from helpers import damaged_formats as damaged
from helpers.checkpoint_formats import framework_name
from helpers.options import backend_options
from recipes.random_checkpoint import FactorySizes, write_checkpoint
from strands_cosmos3.actions.stats import load_action_stats
from strands_cosmos3.backends.model_input import ModelInput
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.acting import require_acting
from strands_cosmos3.engine.formats.contract import FIELDS, known_contract, known_contracts
from strands_cosmos3.engine.formats.dcp import DcpFiles, DcpRun, model_folder
from strands_cosmos3.engine.formats.detect import kind_of, open_layout
from strands_cosmos3.engine.formats.framework import renamed
from strands_cosmos3.engine.formats.inspect import inspect
from strands_cosmos3.engine.loading import load_action_head
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.weights import expected_shapes
from strands_cosmos3.errors import ConfigError, ContractError, LayoutError, WeightsError
from strands_cosmos3.resources import resource
from strands_cosmos3.types import Request

ASSETS = Path(__file__).parents[1] / "assets"

DTYPES = (torch.float32, torch.bfloat16)
REQUEST = Cosmos3ActionRequest(
    text_ids=torch.arange(40, 60),
    neg_text_ids=torch.arange(20, 29),
    video_shape=(2, 4, 4),
    action_chunk=4,
    domain_id=8,
    raw_action_dim=10,
    cond_video_pixels=torch.rand(1, 3, 1, 64, 64, generator=torch.Generator().manual_seed(0)) * 2
    - 1,
    num_inference_steps=2,
    guidance_scale=3.0,
    return_video=False,
)


@pytest.fixture(scope="module")
def pairs(checkpoints, tmp_path_factory):
    """Format and kind -> (what is passed as the checkpoint, the same weights in the released
    layout); made once.
    """
    return made_pairs(checkpoints, tmp_path_factory)


def made_pairs(checkpoints, tmp_path_factory):
    made = {}

    def get(name, kind):
        if (name, kind) in made:
            return made[name, kind]
        root, released = tmp_path_factory.mktemp("formats"), checkpoints[kind]
        folder, same = root / "c", released
        if name == "export":
            formats.framework_export(released, folder, edge=kind == "relu2")
        elif name == "lerobot":
            formats.lerobot_policy(released, folder)
        elif name == "dcp":
            formats.dcp_run(released, folder)
        elif name == "fp8":
            _, same = formats.modelopt_fp8(released, folder)
            made[name, kind] = folder, same
            return made[name, kind]
        else:
            _, same = formats.adapter(released, folder, name)
        changes = {"views": None, "statistics": None} if name == "lerobot" else {}
        made[name, kind] = (
            formats.contract_file(root / "my.toml", folder, released, **changes),
            same,
        )
        return made[name, kind]

    return get


@cache  # of a released layout, for every format that is compared with it
def actions(checkpoint, dtype):
    with Cosmos3Engine.from_pretrained(checkpoint, dtype=dtype, action_space="midtrain") as engine:
        return engine.step(REQUEST)["action"]


OFTEN = [("silu", torch.float32), ("relu2", torch.bfloat16)]
RARELY = [
    pytest.param(*pair, marks=pytest.mark.slow)
    for pair in product(("silu", "relu2"), DTYPES)
    if pair not in OFTEN
]


@pytest.mark.parametrize(("kind", "dtype"), [*OFTEN, *RARELY], ids=str)
@pytest.mark.parametrize("name", ["export", "lerobot", "dcp", "fp8", "framework", "peft"])
def test_actions_are_those_of_the_released_layout(pairs, name, kind, dtype):
    """FP8 runs with its step policy: W8A16 is the dequantised weight, in float32 to the bit."""
    if name == "fp8":
        dtype = torch.float32
    path, same = pairs(name, kind)
    assert torch.equal(actions(path, dtype), actions(same, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "kind", "layers", "names"), [("edge", "relu2", 28, 549), ("nano", "silu", 36, 809)]
)
def test_all_names_of_a_released_checkpoint_at_a_reduced_width(
    tmp_path_factory, variant, kind, layers, names
):
    """Every tensor of Edge and Nano, narrow: all formats, both dtypes, to the bit. Nano's five
    of sound are never read.
    """
    root = tmp_path_factory.mktemp(variant)
    released = write_checkpoint(
        root / "c", sizes=FactorySizes(hidden=64, layers=layers), hidden_act=kind
    )
    assert len(expected_shapes(Checkpoint.open(released).config)) == names
    get = made_pairs({kind: released}, tmp_path_factory)
    for name, dtype in product(["export", "lerobot", "dcp", "fp8", "framework", "peft"], DTYPES):
        path, same = get(name, kind)
        dtype = torch.float32 if name == "fp8" else dtype
        assert torch.equal(actions(path, dtype), actions(same, dtype)), (name, dtype)


def test_fp8_is_within_its_rounding_of_the_original(pairs, checkpoints):
    """E4M3 has three bits after the leading one: half a step is a sixteenth of a weight, or
    2^-10 scales near zero.
    """
    folder, _ = pairs("fp8", "silu")
    weights, original = Checkpoint.open(folder).weights, formats.weights_of(checkpoints["silu"])
    changed = 0
    for key, part in weights.parts({key: (key, ()) for key in original}):
        bound = (original[key].abs() / 16).clamp_min(original[key].abs().max() / 448 * 2**-10)
        assert ((part - original[key]).abs() <= bound * 1.001).all(), key
        changed += not torch.equal(part, original[key])
    assert changed > 30


@pytest.mark.parametrize("kind", ["edge", "nano"])
def test_names_are_those_of_the_framework(kind):
    """All 549 names of Edge and 814 of Nano, as cosmos-framework's own functions map them, at
    their real shapes.
    """
    made = runpy.run_path(str(ASSETS / "make_framework_names.py"))
    recorded = json.loads((ASSETS / "framework_names.json").read_text())[kind]
    shapes = expected_shapes(made["config"](kind))
    pairs = {name: framework_name(name) for name in shapes}
    assert (len(pairs), made["digest"](pairs)) == (
        {"edge": 549, "nano": 814}[kind],
        recorded["sha256"],
    )
    assert pairs.items() >= recorded["pairs"].items()
    stored = [f"model.net.{net}" for net in pairs.values()] + [
        "model.net.language_model.visual.merger.norm.weight"
    ]
    names, rest = renamed(stored, "model.net.")
    assert {name: stored.removeprefix("model.net.") for name, stored in names.items()} == pairs
    assert rest == ("model.net.language_model.visual.merger.norm.weight",)
    assert (
        sum(math.prod(shape) for shape in shapes.values())
        == {"edge": 3_369_657_024, "nano": 15_173_669_120}[kind]
    )


def observe(embodiment="droid", rows=16, space="midtrain"):
    domain = get_embodiment(embodiment)
    picture = np.random.RandomState(0).randint(0, 255, (540, 640, 3), dtype=np.uint8)
    return Request(
        domain, domain.action_space(space), "pick up the cube", rows, None, 1.0, composite=picture
    )


def test_acting_without_a_contract_prints_the_file_to_fill_in(checkpoints, tmp_path):
    folder = formats.framework_export(checkpoints["relu2"], tmp_path / "c", edge=True)
    path = tmp_path / "my.toml"
    path.write_text(f'checkpoint = "c"\nbase = "{checkpoints["relu2"]}"\n')
    with pytest.raises(ContractError) as caught:
        NativeBackend(path, backend_options(device="cpu"))
    said = str(caught.value)
    assert 'domain = "droid_lerobot"\n' in said
    assert "chunk = 16\nfps = 15.0\n" in said
    assert "# action_space = ?" in said
    filled = formats.contract_file(path, folder, checkpoints["relu2"])
    assert inspect(filled)["verdict"] == "ready"
    backend = NativeBackend(filled, backend_options(device="cpu"))
    assert backend.info.chunk_rows == 16
    assert backend.infer(observe()).action.shape == (16, 10)
    with pytest.raises(ContractError, match="domain is 'droid_lerobot'"):
        backend.infer(observe("umi"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gripper": "1=closed"}, "1 as closed"),
        (
            {"action_space": "joint_pos", "width": 8, "normalization": "none"},
            "action space is 'joint_pos'",
        ),
        ({"domain": "umi", "statistics": "umi"}, "domain is 'umi'"),
    ],
)
def test_a_contract_that_is_not_the_requests(checkpoints, tmp_path, changes, word):
    folder = formats.framework_export(checkpoints["silu"], tmp_path / "c", edge=False)
    path = formats.contract_file(tmp_path / "my.toml", folder, checkpoints["silu"], **changes)
    request = observe()
    with pytest.raises(ContractError, match=word):
        require_acting(Checkpoint.open(path), request.embodiment, request.action_space)


RIG = '["wrist", "exterior_1", "exterior_2"]'


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("speed = 3", "unknown field"),
        ("chunk = 8", "chunk is 16 in .*checkpoint.json and 8 in .*contract.toml"),
        ("fps = 1e300", "0.1 to 1000"),
        ("fps = 0.001", "0.1 to 1000"),
        ("chunk = 10000", "1 to 256"),
        ('normalization = "zscore"', "quantile_rot"),
        ("fps = true", "fps must be"),
        ("width = 'ten'", "width must be"),
        ("sampling = { num_steps = 2 }", "flow_shift"),
        ("sampling = { num_steps = 2, guidance_scale = 1e30, flow_shift = 1.0 }", "at most 100"),
        ("[", "TOML"),
        (
            'gripper = "none"',
            "gripper is 'none' in .*contract.toml and '1=open or 1=closed' in embodiment",
        ),
        ('views = ["wrist", "wrist", "wrist"]', "different names"),
        (
            'views = ["a", "b", "c"]',
            "contract.toml and .'wrist', 'exterior_1', 'exterior_2'. in embodiment",
        ),
        (
            'views = ["exterior_1", "wrist", "exterior_2"]',
            "contract.toml and .'wrist', 'exterior_1', 'exterior_2'. in",
        ),
        (
            'action_space = "midtrain"\nwidth = 9',
            "width is 9 in .*contract.toml and 10 in midtrain rows of embodiment",
        ),
        (
            'domain = "umi"',
            "domain is 'droid_lerobot' in .*checkpoint.json and 'umi' in .*contract.toml",
        ),
        (
            'statistics = "umi"',
            "statistics is 'umi' in .*contract.toml and 'droid_lerobot' in embodiment",
        ),
        (
            'width = 10\nstatistics = "stats/nine.json"',
            "width is 10 in .*contract.toml and 9 in the list q01",
        ),
        ('statistics = "stats/true.json"', "statistics must be"),
        ('statistics = "stats/two.json"', "'action' and 'global' hold different figures"),
        ('statistics = "../outside/stats.json"', "outside the checkpoint"),
        ('statistics = "../outside/stats"', "statistics must be"),
        ('like = "nobody"', "cosmos-framework-libero"),
        ('base = "/etc"', "may name only nvidia/"),
        ('base = "somebody/else"', "may name only nvidia/"),
    ],
)
def test_a_contract_inside_a_folder_that_cannot_be_used(checkpoints, tmp_path, line, word):
    """It contradicts what the folder's other files say, or what follows from them, or is not
    valid.
    """
    folder = formats.framework_export(checkpoints["relu2"], tmp_path / "c", edge=True)
    low, high = [-1.0] * 10, [1.0] * 10
    for name, figures in {
        "c/stats/nine": {"q01": low[1:], "q99": high[1:]},
        "c/stats/true": {"q01": [False] * 10, "q99": [True] * 10},
        "c/stats/two": {
            "global": {"q01": low, "q99": high},
            "action": {"q01": low, "q99": [2.0] * 10},
        },
        "outside/stats": {"q01": [0], "q99": [1]},
    }.items():
        formats.write_json(tmp_path / f"{name}.json", figures)
    (folder / "contract.toml").write_text(line + "\n")
    base = None if line.startswith("base") else checkpoints["relu2"]
    report = inspect(folder, base)
    assert report["verdict"] in ("ContractError", "UnknownNameError")
    assert re.search(word, report["problem"])


def test_a_contract_of_another_folder(pairs, checkpoints, tmp_path):
    released = checkpoints["silu"]
    folder = formats.framework_export(released, tmp_path / "c", edge=False)
    path = formats.contract_file(tmp_path / "my.toml", folder, None)
    other = formats.dcp_run(released, tmp_path / "other")
    assert inspect(folder, released, path)["verdict"] == "ready"
    report = inspect(other, released, path)
    assert (report["verdict"], "is the contract of" in report["problem"]) == ("ContractError", True)
    path.write_text(path.read_text().replace(str(folder), "c"))
    assert inspect(folder, released, path)["verdict"] == "ready"
    (folder / "contract.toml").write_text("chunk = 8\n")
    assert "chunk is 16 in" in inspect(folder, released, path)["problem"], (
        "the folder's own counts beside the caller's"
    )


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 5000, "a\0b", "~" + "a" * 5000])
def test_a_checkpoint_that_no_file_can_be(checkpoints, tmp_path, name):
    path = formats.contract_file(tmp_path / "my.toml", name, checkpoints["silu"])
    for report in (
        inspect(path),
        inspect(formats.dcp_run(checkpoints["silu"], tmp_path / "c"), name),
    ):
        assert (report["verdict"], "neither a folder" in report["problem"]) == ("LayoutError", True)
    with pytest.raises(LayoutError):
        Cosmos3Engine.from_pretrained(name)


def test_known_contracts_state_the_source_of_every_field():
    assert "cosmos-framework-libero" in known_contracts()
    for name in known_contracts():
        stated = tomllib.loads(resource(f"stats/contracts/{name}.toml").read_text())
        sources = stated.pop("sources")
        assert set(sources) == set(FIELDS), name
        needed = {field for field in FIELDS if field != "statistics"}
        for field in needed:
            assert (field in stated) != sources[field].startswith("unknown"), (name, field)
        assert known_contract(name) == stated


def test_the_framework_contract_of_libero_takes_the_raw_figures(checkpoints, tmp_path):
    folder = formats.framework_export(checkpoints["silu"], tmp_path / "c", edge=False)
    path = tmp_path / "my.toml"
    path.write_text(
        f'checkpoint = "c"\nbase = "{checkpoints["silu"]}"\nlike = "cosmos-framework-libero"\n'
    )
    assert inspect(path)["missing"] == []
    low, high = ModelInput(Checkpoint.open(path), backend_options()).quantiles(observe("libero"))
    raw = load_action_stats("libero").raw
    np.testing.assert_allclose(low, raw.q01, atol=1e-12)
    np.testing.assert_allclose(high, raw.q99, atol=1e-12)
    assert folder.exists()


def test_a_lerobot_folder_brings_its_statistics(pairs, checkpoints, tmp_path):
    path, _ = pairs("lerobot", "silu")
    opened = Checkpoint.open(path)
    low, high = ModelInput(opened, backend_options()).quantiles(observe())
    np.testing.assert_allclose(low, np.linspace(-1, -0.1, 10), atol=1e-6)
    np.testing.assert_allclose(high, np.linspace(0.5, 2, 10), atol=1e-6)
    assert opened.layout.skipped == tuple(sorted(formats.SIGLIP))
    folder = formats.lerobot_policy(checkpoints["silu"], tmp_path / "c", invert_gripper=False)
    (folder / "policy_postprocessor.json").unlink()
    report = inspect(folder, checkpoints["silu"])
    assert report["verdict"] == "needs a contract"
    assert report["missing"] == ["statistics", "gripper", "prompt_format"]


LAYER = "layers.0.mlp_moe_gen.down_proj"
GAUSSIAN = {"peft_type": "LORA", "target_modules": ["up_proj"], "init_lora_weights": "gaussian"}
ADAPTERS = {
    "diffusers' pipeline": ({"r": 4, "lora_alpha": 3, **GAUSSIAN}, "transformer.", 3 / 4, 3 / 4),
    "diffusers' model": ({"r": 4, "lora_alpha": 2, "use_rslora": True}, "", 1.0, 1.0),
    "an alpha by layer": (
        {"r": 4, "lora_alpha": 8, "alpha_pattern": {LAYER[7:]: 2.0, "down_proj": 4}},
        None,
        1 / 2,
        2.0,
    ),
    "alphas that overlap": (
        {"r": 4, "lora_alpha": 8, "alpha_pattern": {"down_proj": 4, f"^{LAYER}": 2}},
        None,
        1.0,
        2.0,
    ),
    "every rank by layer": (
        {
            "r": 9,
            "lora_alpha": 8,
            "rank_pattern": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 4),
        },
        None,
        2.0,
        2.0,
    ),
    "a saved module": (
        {"rank": 4, "alpha": 8, "modules_to_save": ["proj_in"], "use_dora": False},
        None,
        2.0,
        2.0,
    ),
}


def peft_adapter(base, folder, config, prefix, **whole):
    """An adapter with its config in the header, its names after ``prefix``, or in a file (None)."""
    formats.adapter(base, folder, "peft")
    file = folder / "adapter_model.safetensors"
    weights = {**load_file(file), **whole}
    metadata = None
    if prefix is None:
        formats.write_json(folder / "adapter_config.json", config)
    else:
        (folder / "adapter_config.json").unlink()
        metadata = {
            "lora_adapter_metadata": json.dumps({f"{prefix}{k}": v for k, v in config.items()})
        }
    save_file(weights, file, metadata)
    return weights


@pytest.mark.parametrize("name", ADAPTERS)
def test_scales_of_adapters_of_other_trainers(checkpoints, tmp_path, name):
    config, prefix, scale, up_scale = ADAPTERS[name]
    base = checkpoints["silu"]
    released = formats.weights_of(base)
    saved = {key: released[key] + 1 for key in ("proj_in.weight", "proj_in.bias")}
    whole = {f"base_model.model.{key}": w for key, w in saved.items()}
    stored = peft_adapter(
        base, tmp_path / "c", config, prefix, **(whole if "modules_to_save" in config else {})
    )
    source = open_layout(tmp_path / "c", base).weights()
    for module, factor in ((LAYER, scale), (LAYER.replace("down", "up"), up_scale)):
        key = f"{module}.weight"
        read = {key: torch.empty(source.shapes[key])}
        source.read_into(read)
        a, b = (stored[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(read[key], released[key].float() + factor * b @ a)
    if "modules_to_save" in config:
        read = {key: torch.empty(w.shape) for key, w in saved.items()}
        source.read_into(read)
        assert all(torch.equal(read[key], w.float()) for key, w in saved.items())


VECTOR = {f"base_model.model.{LAYER}.lora_magnitude_vector": torch.ones(4)}
OTHER_ADAPTERS = {
    "DoRA without its config": ({}, "", VECTOR, "use_dora = True: not implemented"),
    "DoRA beside a plain config": (
        {"r": 4, "lora_alpha": 8},
        None,
        {f"base_model.model.{LAYER}.lora_magnitude_vector.weight": torch.ones(4)},
        "use_dora = True: not implemented",
    ),
    "DoRA whose config denies it": (
        {"r": 4, "lora_alpha": 8, "use_dora": False},
        "transformer.",
        VECTOR,
        "use_dora = True: not implemented",
    ),
    "an expression": (
        {"r": 4, "lora_alpha": 8, "alpha_pattern": {".*up_proj": 2}},
        "",
        {},
        "alpha_pattern .*no expressions",
    ),
    "a pattern that is a number": (
        {"r": 4, "lora_alpha": 8, "rank_pattern": 4},
        None,
        {},
        "rank_pattern = 4",
    ),
    "a rank in words": (
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"up_proj": "4"}},
        None,
        {},
        "r='4'",
    ),
    "half a saved module": (
        {"r": 4, "lora_alpha": 8, "modules_to_save": ["proj_in"]},
        "transformer.",
        {"base_model.model.proj_in.bias": torch.ones(64)},
        "modules_to_save = 'proj_in': its weights are not all",
    ),
    "a text encoder too": (
        {"r": 4, "lora_alpha": 8, "text_encoder.r": 4},
        "",
        {},
        "text_encoder.r = 4: not implemented",
    ),
}


@pytest.mark.parametrize("name", OTHER_ADAPTERS)
def test_other_adapters_are_refused_by_name(checkpoints, tmp_path, name):
    config, prefix, more, message = OTHER_ADAPTERS[name]
    peft_adapter(checkpoints["silu"], tmp_path / "c", config, prefix, **more)
    with pytest.raises(LayoutError, match=message):
        open_layout(tmp_path / "c", checkpoints["silu"]).weights()


def test_the_config_of_an_adapter_is_one_sound_object(checkpoints, tmp_path):
    base, folder = checkpoints["silu"], tmp_path / "c"
    weights = peft_adapter(base, folder, {"r": 4, "lora_alpha": 8}, "")
    (folder / "lora_config.json").write_text('{"r": 4, "lora_alpha": 16}')
    with pytest.raises(LayoutError, match=r"lora_config.json and lora_adapter_metadata of"):
        open_layout(folder, base).weights()
    (folder / "lora_config.json").unlink()
    for text, message in (("[1]", "JSON object, got list"), ("[" * 9999, "cannot be read as")):
        metadata = {"lora_adapter_metadata": text}
        save_file(weights, folder / "adapter_model.safetensors", metadata)
        with pytest.raises(LayoutError, match=message):
            open_layout(folder, base).weights()


@pytest.fixture(scope="module")
def sound(checkpoints, tmp_path_factory):
    """Format -> a folder that is read; damaged ones are copies."""
    root, released = tmp_path_factory.mktemp("sound"), checkpoints["silu"]
    formats.framework_export(released, root / "export", edge=False)
    formats.lerobot_policy(released, root / "lerobot")
    formats.dcp_run(released, root / "dcp")
    formats.modelopt_fp8(released, root / "fp8")
    formats.adapter(released, root / "peft", "peft")
    shutil.copytree(released, root / "released")
    return root


def test_sound_folders_pass(sound, checkpoints):
    for name in ("export", "lerobot", "dcp", "peft"):
        assert inspect(sound / name, checkpoints["silu"])["verdict"] == "needs a contract"
    assert [inspect(sound / name)["verdict"] for name in ("fp8", "released")] == ["ready", "ready"]
    with pytest.raises(ConfigError, match="whole checkpoint"):
        inspect(sound / "fp8", checkpoints["silu"])
    for name in ("export", "dcp", "peft"):
        assert "base" in inspect(sound / name)["problem"]


@pytest.mark.parametrize("folder", ["dcp/checkpoints", "released/scheduler", "empty"])
def test_a_folder_of_no_format_is_not_taken_for_a_whole_checkpoint(sound, checkpoints, folder):
    (sound / "empty").mkdir(exist_ok=True)
    report = inspect(sound / folder, checkpoints["silu"])
    assert report["verdict"] in ("LayoutError", "PreflightError")
    assert "transformer" in report["problem"]


@pytest.mark.parametrize("name", damaged.CASES)
def test_damaged_folders_get_a_typed_verdict(sound, checkpoints, opened_files, tmp_path, name):
    source, damage, verdict, word = damaged.CASES[name]
    folder = Path(shutil.copytree(sound / source, tmp_path / "c"))
    damage(folder)
    with opened_files() as seen:
        report = inspect(folder, None if source in ("fp8", "released") else checkpoints["silu"])
    assert report["verdict"] == verdict, report
    assert re.search(word, report["problem"])
    assert report["problem"].isprintable() or "\n" in report["problem"]
    assert not damaged.EXECUTED.exists()
    assert not [path for path in seen if "outside" in path]


def test_an_archive_that_runs_code(sound, checkpoints, tmp_path):
    """Inspecting reads no archive; loading does, with the restricted unpickler."""
    folder = Path(shutil.copytree(sound / "dcp", tmp_path / "c"))
    file = next(folder.rglob("*.distcp")).with_name("evil.distcp")
    torch.save([torch.ones(3), damaged.Bomb(damaged.EXECUTED)], file)

    def to_evil(metadata):
        for info in metadata.storage_data.values():
            info.relative_path, info.offset, info.length = file.name, 0, file.stat().st_size

    damaged.edit_dcp(to_evil)(folder)
    checkpoint = Checkpoint.open(open_layout(folder, checkpoints["silu"]))
    with pytest.raises(LayoutError, match="nothing of it was run"):
        load_action_head(checkpoint, 8, torch.device("cpu"), torch.float32)
    assert not damaged.EXECUTED.exists()


@pytest.fixture(scope="module")
def opened_files():
    """A context in which the list that it gives grows by the paths that Python opens. An audit hook
    stays for good: there is one.
    """
    lists: list[list[str]] = []
    sys.addaudithook(
        lambda event, args: lists[-1].append(str(args[0])) if lists and event == "open" else None
    )

    @contextmanager
    def watched():
        lists.append([])
        try:
            yield lists[-1]
        finally:
            lists.clear()

    return watched


@pytest.mark.parametrize(
    "wrapper",
    [
        "{}._fsdp_wrapped_module",
        "module.{}",
        "{}._orig_mod._checkpoint_wrapped_module",
        "_orig_mod.module.{}",
    ],
)
def test_names_of_wrapped_modules_in_a_distributed_checkpoint(tmp_path, wrapper):
    weights = {"net.layers.0.mlp.weight": torch.arange(6.0), "net.norm.weight": torch.ones(2)}
    inner = wrapper.format("net.layers")
    stored = {key.replace("net.layers", inner): value for key, value in weights.items()}
    dcp.save(stored, checkpoint_id=tmp_path / "c", no_dist=True)
    files = DcpFiles(tmp_path / "c", tmp_path)
    assert set(files.shapes) == set(weights)
    read = dict(files.parts({key: (key, ()) for key in weights}))
    assert all(torch.equal(read[key], value) for key, value in weights.items())
    dcp.save(weights | stored, checkpoint_id=tmp_path / "twice", no_dist=True)
    with pytest.raises(WeightsError, match=r"are both net\.layers\.0\.mlp\.weight"):
        DcpFiles(tmp_path / "twice", tmp_path)


@pytest.mark.parametrize(
    ("complete", "words"),
    [
        ([20], None),
        ([20, 40], "iter_000000020.*iter_000000040.*complete"),
        ([], "none is complete"),
    ],
)
def test_a_run_without_its_latest_file(checkpoints, tmp_path, complete, words):
    for step in (20, 40):
        folder = tmp_path / f"checkpoints/iter_{step:09d}/model"
        folder.mkdir(parents=True)
        if step in complete:
            (folder / ".metadata").write_bytes(b"")
    assert kind_of(tmp_path) is DcpRun
    if words is None:
        assert model_folder(tmp_path).parent.name == "iter_000000020"
    else:
        with pytest.raises(LayoutError, match=words):
            model_folder(tmp_path)
