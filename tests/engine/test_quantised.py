"""Weights that stay in 8 bits: layers against formulas by hand, engines against float32, and FP8
against diffusers' own reading of it.
"""

import json
import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.pipelines.cosmos.mixed_precision import (
    Cosmos3MixedPrecisionConfig,
    _w8a16_linear,
    apply_cosmos3_mixed_precision_step,
    parse_diffusion_step_policy,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from helpers import checkpoint_formats as formats
from helpers.cosmos3_oracle import Case, engine, oracle, pipeline, request
from helpers.parity import ROUNDING, of_neighbours, of_products, reference_of, rms
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.formats.eight_bit import Quantised
from strands_cosmos3.engine.formats.inspect import inspect, lines_of
from strands_cosmos3.engine.options import QUANTIZE, EngineOptions
from strands_cosmos3.engine.precision import EightBit, StepPolicy, StoredScale
from strands_cosmos3.engine.preflight import kept_bytes
from strands_cosmos3.engine.quantised import (
    Fp8Linear,
    Int8Linear,
    PackedInt8Linear,
    Quantization,
    QuantizedLinear,
    linears,
)
from strands_cosmos3.engine.weight_files import WeightSource
from strands_cosmos3.engine.weights import checkpoint_key, parameter_shapes
from strands_cosmos3.errors import ConfigError, LayoutError, UnknownNameError
from strands_cosmos3.evaluation.settings import digest_of, make_settings

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(layer, weight, scale=None, activation=None):
    layer.stored = StoredScale(scale, activation)
    layer.place(tuple(weight.shape), CPU)
    layer.copy_(weight)
    return layer


def rounded(x, scale, most=127):
    return (x / scale).round().clamp(-most, most) * scale


def per_row(x, most=127):
    return x.abs().amax(-1, keepdim=True) / most


def within(found, expected, x, weight, bias=None):
    """Whether two ways to sum the products of what is rounded agree, up to their own roundings."""
    bias = torch.zeros(len(weight)) if bias is None else bias
    most = of_products(x, weight) + 2 * ROUNDING * (expected.abs() + bias.abs())
    return bool(((found - expected).abs() <= most).all())


def two_terms(x, most=127):
    """Tokens in 8 bits, and what that leaves in 8 bits of a finer scale."""
    coarse = rounded(x, per_row(x, most), most)
    return coarse + rounded(x - coarse, per_row(x, most) / (2 * most), most)


SEEN = {Int8Linear: lambda x: rounded(x, per_row(x)), PackedInt8Linear: two_terms}


@pytest.fixture
def exact_int_mm(monkeypatch):
    """Integer products without ``torch._int_mm``, which overflows on a CPU without VNNI, or where
    oneDNN may not use it: :class:`Int8Linear` is for a GPU.
    """
    monkeypatch.setattr(torch.ops.aten, "_int_mm", lambda a, b: a.int() @ b.int())


@pytest.mark.usefixtures("exact_int_mm")
@pytest.mark.parametrize("kind", SEEN)
def test_int8_is_the_product_of_rounded_rows_and_rounded_tokens(kind):
    weight, x, bias = drawn(48, 64), drawn(2, 7, 64, seed=1), drawn(48, seed=2)
    layer = filled(kind(nn.Parameter(bias, requires_grad=False)), weight)
    expected = F.linear(SEEN[kind](x), rounded(weight, per_row(weight)), bias)
    with torch.inference_mode():
        assert within(layer(x), expected, SEEN[kind](x), rounded(weight, per_row(weight)), bias)
        assert 0.01 < float((layer(x) - F.linear(x, weight, bias)).abs().max()) < 0.5
        # the same alone as in a batch
        assert torch.equal(layer(x)[1], layer(x[1:])[0])
        assert layer.product(x.bfloat16()).dtype == torch.bfloat16
        assert not layer(torch.zeros(1, 64)).sub(bias).any()


@pytest.mark.parametrize("most", [127, 63])
def test_two_terms_of_8_bits_hold_a_token_to_14_bits(most):
    """Also on a CPU without VNNI, whose terms have 7 bits: weights alone change the product."""
    weight, x = drawn(48, 64), drawn(100, 64, seed=1) * torch.logspace(-3, 3, 100)[:, None]
    layer = PackedInt8Linear(None)
    layer._most = most
    filled(layer, weight)
    with torch.inference_mode():
        exact = F.linear(x, rounded(weight, per_row(weight)))
        errors = (layer(x) - exact).square().mean(1).sqrt() / exact.square().mean(1).sqrt()
    assert float(errors.max()) < 1 / most**2


LAYERS = [Int8Linear, PackedInt8Linear, Fp8Linear]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_row_of_zeros_stays_zero(kind):
    weight = drawn(48, 64)
    weight[3] = 0
    with torch.inference_mode():
        y = filled(kind(None), weight)(drawn(7, 64, seed=1))
    assert not y[:, 3].any()
    assert y.isfinite().all()


@pytest.mark.usefixtures("exact_int_mm")
@pytest.mark.parametrize("kind", SEEN)
def test_int8_with_one_scale_for_all_rows(kind):
    weight, x = drawn(48, 64), drawn(7, 64, seed=1)
    layer = filled(kind(None), weight, torch.tensor([0.02]))
    with torch.inference_mode():
        seen, kept = SEEN[kind](x), rounded(weight, 0.02)
        assert within(layer(x), F.linear(seen, kept), seen, kept)


def test_weights_alone_in_8_bits():
    weight, x = drawn(48, 64), drawn(7, 64, seed=1)
    layer = filled(Int8Linear(None), weight)
    layer.a16 = True
    with torch.inference_mode():
        kept = rounded(weight, per_row(weight))
        assert within(layer(x), F.linear(x, kept), x, kept)


def test_fp8_is_the_product_of_what_modelopt_rounds():
    weight, x = drawn(48, 64), drawn(2, 16, 64, seed=1)
    scale, activation = float(weight.abs().max() / 448), 0.004  # the largest inputs are cut off
    layer = filled(Fp8Linear(None), weight, torch.tensor([scale]), activation)
    small = (weight / scale).to(E4M3).float() * scale
    seen = (x / activation).clamp(-448, 448).to(E4M3).float() * activation
    with torch.inference_mode():
        assert within(layer(x), F.linear(seen, small), seen, small)
        layer.a16 = True
        assert torch.equal(layer(x), F.linear(x, small))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w8a16_is_diffusers_linear_to_the_bit(dtype):
    weight, x = drawn(48, 64), drawn(9, 64, seed=1).to(dtype)
    scale = weight.abs().max() / 448
    layer = filled(Fp8Linear(None), weight, scale[None], 1.0)
    layer.a16 = True
    theirs = stand_in(nn.Linear(64, 48, bias=False), weight)
    with torch.inference_mode():
        assert torch.equal(layer(x), _w8a16_linear(theirs, x, "x"))


def test_a_changed_weight_with_a_fixed_scale_of_the_input_has_one_scale():
    """Its rows are of different sizes; the product knows one number for all of them."""
    weight, x = drawn(48, 64) * torch.logspace(-1, 1, 48)[:, None], drawn(16, 64, seed=1)
    layer = filled(Fp8Linear(None), weight, None, 0.02)
    scale = weight.abs().max() / 448
    small = (weight / scale).to(E4M3).float() * scale
    seen = (x / 0.02).clamp(-448, 448).to(E4M3).float() * 0.02
    with torch.inference_mode():
        for a16, given in ((False, seen), (True, x)):
            layer.a16 = a16
            assert apart(layer(x), F.linear(given, small)) < 1e-6


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        ((), [0, 1, 2, 3]),
        ((slice(1, 3), slice(0, 1)), [1, 2]),
        ((slice(0, 4, 2),), [0, 2]),
        ((slice(None), slice(1, 2)), [0, 1, 2, 3]),
        (2, 2),
    ],
    ids=str,
)
def test_scales_follow_the_rows_of_a_part(index, rows):
    each, one = StoredScale(torch.arange(4.0)), StoredScale(torch.ones(1))
    assert each.part(index).tolist() == rows
    assert one.part(index).tolist() == [1.0]
    assert StoredScale().part(index) is None


def test_the_error_of_a_weight_is_of_all_its_rows():
    """More rows than are compared at once, of which those in the middle are the worst rounded."""
    weight = drawn(1300, 16)
    weight[600:700, 0] = 40.0
    weights = Held({"w": weight})
    source = Quantised(weights, frozenset({"w"}))
    ((_, small),) = source.parts({"w": ("w", ())})
    kept = small.float() * (weight.abs().amax(1, keepdim=True) / 127)
    assert source.errors["w"] == pytest.approx(apart(kept, weight), rel=1e-4)


class Held(WeightSource):
    """Weights in memory."""

    def __init__(self, tensors):
        self.tensors, self.folder = tensors, Path("held")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = dict.fromkeys(tensors, "F32")

    def parts(self, requests):
        for key, (name, index) in requests.items():
            yield key, self.tensors[name][index] if index != () else self.tensors[name]


def test_fp8_without_a_scale_of_the_input_measures_each_token():
    weight, x = drawn(48, 64), drawn(2, 16, 64, seed=1) * torch.tensor([1.0, 1e3])[:, None, None]
    layer = filled(Fp8Linear(None), weight)
    with torch.inference_mode():
        error = (layer(x) - F.linear(x, weight)).square().mean((1, 2)).sqrt()
        share = error / F.linear(x, weight).square().mean((1, 2)).sqrt()
        assert (share < 0.06).all()
        assert torch.equal(layer(x)[1], layer(x[1:])[0])


def test_a_stored_weight_is_the_same_again():
    """Reading gives float32 of what is stored; rounding that with the same scale gives it back."""
    weight = drawn(33, 64)
    int8 = filled(Int8Linear(None), weight)
    again = filled(Int8Linear(None), int8.weight * int8.scale_N[:, None], int8.scale_N)
    assert torch.equal(again.weight, int8.weight)
    for kind in (Int8Linear, PackedInt8Linear):  # a scale that another tool chose
        wide = filled(kind(None), weight, 4 * int8.scale_N)
        kept = rounded(weight, 4 * int8.scale_N[:, None])
        with torch.inference_mode():
            one = torch.eye(64)
            assert within(wide(one), F.linear(one, kept), one, kept)
    scale = weight.abs().max()[None] / 448
    fp8 = (weight / scale).to(E4M3).float()
    assert torch.equal(filled(Fp8Linear(None), fp8 * scale, scale).weight.float(), fp8)


@pytest.fixture(scope="module")
def stored(checkpoints, tmp_path_factory):
    """A checkpoint in FP8 and one in INT8."""
    folder = tmp_path_factory.mktemp("stored")
    fp8, _ = formats.modelopt_fp8(checkpoints["silu"], folder / "fp8")
    opened = Checkpoint.open(checkpoints["silu"], action_space="midtrain")
    int8 = convert(opened, folder / "int8", quantize=EngineOptions(quantize="int8"))
    return {"fp8": fp8, "int8": int8}


def loaded(folder, **options):
    return Cosmos3Engine.from_pretrained(
        folder, dtype=torch.float32, options=EngineOptions(**options)
    )


def asked(folder, **changes):
    return replace(request(Case(folder, steps=3)), **changes)


def apart(one, other):
    """RMS of what differs, as a share of the RMS."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *product(["silu"], QUANTIZE),
        ("relu2", "int8"),
        *(pytest.param("relu2", s, marks=pytest.mark.slow) for s in ("fp8", "int8-weights")),
    ],
)
def test_an_engine_in_8_bits(checkpoints, kind, scheme):
    whole = asked(checkpoints[kind])
    with loaded(checkpoints[kind], quantize=scheme) as model:
        result = model.step(whole)
        exact = engine(checkpoints[kind], torch.float32).step(whole)
        assert 1e-5 < apart(result["action"], exact["action"]) < 0.5
        steps, known = of_neighbours(model, whole), reference_of(Case(checkpoints[kind], steps=3))
        other = replace(whole, seed=9, text_ids=whole.text_ids + 1, video_noise=None)
        both = model.step_batch([whole, other])
        for name in ("action", "video"):
            most = steps[name] + 2 * known.allowed(name)
            assert rms(both[0][name] - result[name]) <= most
        alone = model.step(replace(whole, return_video=False))
        assert torch.equal(alone["action"], result["action"])


@pytest.fixture(scope="module")
def float32_bytes(checkpoints):
    with loaded(checkpoints["silu"]) as whole:
        return whole.kept_bytes


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("scheme", QUANTIZE)
def test_bytes(checkpoints, float32_bytes, scheme, text):
    """At most 0.30 of float32's, scales included; embeddings, norms and heads stay."""
    options = EngineOptions(quantize=scheme, quantize_text=text)
    with Cosmos3Engine.from_pretrained(checkpoints["silu"], options=options) as model:
        shapes = parameter_shapes(model.config)
        exact = 4 * sum(
            math.prod(shape)
            for name, shape in shapes.items()
            if ".layers." in name and len(shape) == 2 and (text or name.startswith("generation."))
        )
        saved = float32_bytes - model.kept_bytes
        assert exact - saved <= 0.30 * exact
        quantization = Quantization.of(model.config, None, options)
        counted = kept_bytes(
            model.checkpoint,
            torch.float32,
            quantization,
        )
        model.action_head(8)
        assert model.kept_bytes == pytest.approx(counted, rel=1e-3)
        kept = [m for m in model.transformer.modules() if isinstance(m, QuantizedLinear)]
        assert len(kept) == len(linears(model.config, text))


def test_what_is_never_quantised(checkpoints):
    config = Checkpoint.open(checkpoints["silu"]).config
    names = linears(config, True)
    assert len(linears(config, False)) == 3 * 7
    assert len(names) == 3 * 7 + 2 * 7 + 2  # the text tower's last layer has keys and values alone
    assert all(name.startswith("layers.") and "norm" not in name for name in names)


def test_an_adapter_is_merged_before_its_base_is_rounded(checkpoints, tmp_path):
    _, merged = formats.adapter(checkpoints["silu"], tmp_path / "a", "peft")
    contract = formats.contract_file(tmp_path / "my.toml", tmp_path / "a", checkpoints["silu"])
    results = []
    for folder in (contract, merged):
        with Cosmos3Engine.from_pretrained(
            folder, options=EngineOptions(quantize="int8"), action_space="midtrain"
        ) as model:
            results.append(model.step(asked(checkpoints["silu"]))["action"])
    assert torch.equal(*results)


def test_a_closed_engine_keeps_no_packed_weights(checkpoints):
    model = loaded(checkpoints["silu"], quantize="int8")
    layer = next(m for m in model.transformer.modules() if isinstance(m, PackedInt8Linear))
    assert layer.packed is not None
    model.close()
    assert layer.packed is None


def test_a_device_without_kernels_is_refused(checkpoints, monkeypatch):
    def none(*_):
        raise RuntimeError("no such engine")

    monkeypatch.setattr(PackedInt8Linear, "copy_", none)
    with pytest.raises(ConfigError, match=r"cpu multiplies no such numbers.*int8-weights"):
        loaded(checkpoints["silu"], quantize="int8")
    with pytest.raises(ConfigError, match="multiples of 16"):
        Quantization("fp8", frozenset()).require_kernels(
            {"w": (24, 64)}, torch.device("cuda"), torch.bfloat16
        )
    with pytest.raises(UnknownNameError, match="Valid: fp8, int8, int8-weights"):
        EngineOptions(quantize="int4")
    with pytest.raises(ConfigError, match="quantize_text needs"):
        EngineOptions(quantize_text=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Int8Linear, PackedInt8Linear, Fp8Linear])
def test_a_compiled_layer_gives_the_same_product(kind):
    """Of tokens that 8 bits hold exactly, so that no last bit of float32 rounds one otherwise."""
    most = 448 if kind is Fp8Linear else 127
    tokens = (drawn(2, 16, 64, seed=1) * most / 4).clamp(-most, most)
    tokens = tokens.to(E4M3).float() if kind is Fp8Linear else tokens.round()
    tokens[..., 0] = most
    tokens *= 2.0 ** torch.arange(-8, 8)[:, None]
    layer = filled(kind(None), drawn(48, 64))
    with torch.inference_mode():
        expected = layer(tokens)
        assert apart(torch.compile(layer)(tokens), expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("scheme", QUANTIZE)
def test_compiled_code_gives_the_same_actions(checkpoints, scheme):
    """A last bit of float32 rounds some token to another number of 8 bits, which this random model
    amplifies: compiled code moves actions by at most what neighbours and roundings do.
    """
    whole = asked(checkpoints["silu"])
    with (
        loaded(checkpoints["silu"], quantize=scheme) as eager,
        loaded(checkpoints["silu"], quantize=scheme, compile=True) as model,
    ):
        expected = eager.step(whole)["action"]
        known = reference_of(Case(checkpoints["silu"], steps=3))
        most = of_neighbours(eager, whole)["action"] + 2 * known.allowed("action")
        assert most < 0.1 * rms(expected), "draws of other noise are more than all of it apart"
        assert rms(model.step(whole)["action"] - expected) <= most


def policy(**changes):
    return {**formats.STEP_POLICY, **changes}


def window(count, mode="a16"):
    return {"count": count, "mode": mode}


def test_steps_run_as_diffusers_runs_them():
    """Every policy of a grid, at every step."""
    compared = set()
    for first, last, overlap, reasoner in product(
        (window(0), window(1), window(3), window(2, "native")),
        (window(0), window(2), window(3, "native")),
        ("a16", "native"),
        ("a16", "native"),
    ):
        stated = policy(first_steps=first, last_steps=last, overlap=overlap, reasoner=reasoner)
        ours, theirs = StepPolicy.parse(stated, "x"), parse_diffusion_step_policy(stated)
        assert (ours.reasoner == "a16") == (theirs.reasoner_policy == "high_precision")
        config = Cosmos3MixedPrecisionConfig(
            "fp8", theirs.first_steps, theirs.last_steps, theirs.reasoner_policy, theirs.overlap
        )
        for steps in (1, 2, 4, 30):
            for step in range(steps):
                assert ours.is_a16(step, steps) == config.use_high_precision(step, steps)
                compared.add(ours.is_a16(step, steps))
    assert compared == {True, False}


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 2},
        {"schema_version": True},
        {"type": "every_n"},
        {"index_space": "timestep"},
        {"scope": ["transformer", "vae"]},
        {"default_mode": "a16"},
        {"first_steps": window(-1)},
        {"first_steps": window(True)},
        {"last_steps": {"count": 1}},
        {"last_steps": window(3, "a8")},
        {"last_steps": {**window(3), "stride": 2}},
        {"overlap": "both"},
        {"reasoner": "high"},
        {"middle_steps": window(1)},
    ],
    ids=str,
)
def test_a_policy_of_another_version_is_refused(changes):
    with pytest.raises(LayoutError, match=r"config\.json: diffusion_step_policy"):
        StepPolicy.parse(policy(**changes), "config.json")


def test_an_engine_refuses_a_policy_of_another_version(checkpoints, tmp_path):
    folder, _ = formats.modelopt_fp8(checkpoints["silu"], tmp_path / "c", policy(overlap="both"))
    with pytest.raises(LayoutError, match=r"diffusion_step_policy\.overlap is 'both'"):
        Cosmos3Engine.from_pretrained(folder)


def stand_in(linear, weight):
    """A linear layer as ModelOpt restores it, as far as diffusers looks at it; its own product is
    not called.
    """
    scale = weight.abs().max() / 448
    linear.weight = nn.Parameter((weight / scale).to(E4M3), requires_grad=False)
    linear.weight_quantizer = SimpleNamespace(is_enabled=True, _scale=scale)
    linear.input_quantizer = SimpleNamespace(is_enabled=True)
    linear._should_run_real_quant_gemm = True
    return linear


@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_w8a16_steps_are_those_of_diffusers(checkpoints, tmp_path, kind):
    """Its parser reads the file's policy and its linear computes; all four steps are in W8A16."""
    folder, plain = formats.modelopt_fp8(checkpoints[kind], tmp_path / "c")
    transformer = pipeline(plain, torch.float32).transformer
    original = formats.weights_of(checkpoints[kind])
    for name, module in transformer.named_modules():
        key = f"{name}.weight"
        if isinstance(module, nn.Linear) and ("self_attn.to_" in key or "proj.weight" in key):
            stand_in(module, original[key])
    stated = json.loads((folder / "transformer/config.json").read_text())["quantization_config"]
    config = Cosmos3MixedPrecisionConfig.resolve(transformer, quantization_config=stated)
    assert config.enabled
    for step in range(4):
        assert apply_cosmos3_mixed_precision_step(transformer, config, step, 4) == "W8A16"
    case = Case(plain, steps=4)
    with loaded(folder) as model:
        result = model.step(request(case))
        assert sum(isinstance(m, Fp8Linear) for m in model.transformer.modules()) > 20
    assert reference_of(case).share(result) <= 1


def towers_of_diffusers(folder):
    """Released names of the linears that see the prompt's tokens, and of those that see all other
    tokens, as its transformer calls them.
    """
    transformer = pipeline(folder, torch.float32).transformer
    seen, rows = {}, []
    embedding = transformer.embed_tokens.register_forward_hook(
        lambda _, inputs, __: rows.append(inputs[0].numel())
    )
    layers = [
        module.register_forward_hook(
            lambda _, inputs, __, name=name: seen.setdefault(f"{name}.weight", []).append(
                inputs[0].shape[:-1].numel()
            )
        )
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("layers.")
    ]
    oracle.__wrapped__(Case(folder, steps=1))
    for hook in (embedding, *layers):
        hook.remove()
    assert all(len(each) == len(rows) for each in seen.values())
    text = {name for name, each in seen.items() if each == rows}
    assert all(set(seen[name]).isdisjoint(rows) for name in seen.keys() - text)
    return text, seen.keys() - text


@pytest.mark.parametrize("kind", ["silu", "relu2"])
@pytest.mark.parametrize("reasoner", ["a16", "native"])
def test_each_linear_follows_the_tower_it_belongs_to(checkpoints, tmp_path, kind, reasoner):
    """By the tokens that diffusers' transformer gives it, whatever its names say (its own
    ``_classify_cosmos3_linear`` takes the attention of the towers for each other's).
    """
    text, generation = towers_of_diffusers(checkpoints[kind])
    stated = policy(reasoner=reasoner)
    folder, _ = formats.modelopt_fp8(checkpoints[kind], tmp_path / "c", stated)
    with loaded(folder) as model:
        layers = {
            checkpoint_key(f"{name}.weight"): module
            for name, module in model.transformer.named_modules()
            if isinstance(module, Fp8Linear)
        }
        assert generation <= layers.keys() <= generation | text
        assert linears(model.config, False) == generation
        for step, steps, wide in ((0, 8, True), (3, 8, False), (7, 8, True), (0, 1, False)):
            model._precision.select(step, steps)
            a16 = {name for name, module in layers.items() if module.a16}
            assert (a16 >= generation) == wide
            assert (a16 & generation == set()) == (not wide)
            assert a16 - generation == (text & layers.keys() if reasoner == "a16" else set())


class ByHand(nn.Module):
    """ModelOpt's product in float32: what is stored, times the input as it would be stored."""

    def __init__(self, linear, activation):
        super().__init__()
        self.weight, self.bias, self.activation = linear.weight, linear.bias, activation

    def forward(self, x):
        s = self.activation
        return F.linear((x / s).clamp(-448, 448).to(E4M3).float() * s, self.weight, self.bias)


def test_w8a8_steps_are_those_by_hand(checkpoints, tmp_path):
    """Of five steps the third alone rounds activations; the text tower never does."""
    stated = policy(first_steps=window(2), last_steps=window(2))
    folder, plain = formats.modelopt_fp8(checkpoints["silu"], tmp_path / "c", stated, 0.02)
    whole = asked(checkpoints["silu"], num_inference_steps=5)
    with loaded(folder) as model, loaded(plain) as reference:
        stored = model.checkpoint.weights.eight_bit.scales
        tower, step = reference.transformer.generation, reference._precision.select
        layers = [
            (tower.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module)
            for name, module in [*tower.named_modules()]
            if isinstance(module, nn.Linear) and f"{name}.weight" in stored
        ]
        assert len(layers) == 3 * 7

        def select(i, steps):
            for owner, name, module in layers:
                setattr(owner, name, ByHand(module, 0.02) if i == 2 else module)
            return step(i, steps)

        plain_action = reference.step(whole)["action"]
        reference._precision.select = select
        expected = reference.step(whole)["action"]
        result = model.step(whole)["action"]
        steps = of_neighbours(model, whole)["action"]
    most = steps + 2 * reference_of(Case(plain, steps=5)).allowed("action")
    assert rms(result - expected) <= most
    assert rms(result - plain_action) > 2 * most, "rounding activations matters"


def test_without_a_policy_every_step_is_in_w8a8(checkpoints, tmp_path):
    folder, plain = formats.modelopt_fp8(checkpoints["silu"], tmp_path / "c", None)
    with loaded(folder) as model, loaded(plain) as other:
        assert not any(m.a16 for m in model.transformer.modules() if isinstance(m, Fp8Linear))
        whole = asked(checkpoints["silu"])
        assert 1e-3 < apart(model.step(whole)["action"], other.step(whole)["action"]) < 1


def rewritten(folder, change):
    """The folder with the weights that ``change`` makes of its own, in one file."""
    weights = change(formats.weights_of(folder))
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    for old in path.parent.glob("*safetensors*"):
        old.unlink()
    save_file(weights, path)
    return folder


def edited(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


NUMBERS = {"num_bits": 8, "type": "float", "dynamic": False}
GROUPS = {
    "group_0": {"weights": NUMBERS, "input_activations": NUMBERS, "targets": ["Linear"]},
}


def as_files_differ(folder):
    """The same weights as other tools write them."""
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    )
    stated = json.loads((folder / "transformer/config.json").read_text())["quantization_config"]
    edited(
        folder,
        "transformer/config.json",
        quantization_config={**stated, "quant_algo": "FP8", "config_groups": GROUPS, "ignore": []},
    )
    for path in (folder / "transformer").glob("*.safetensors"):
        stored = load_file(path)
        for i, name in enumerate(sorted(stored)):
            if name.endswith("_scale"):
                stored[name] = stored[name].reshape([(), (1,), (1, 1)][i % 3])
        save_file(stored, path)
    index = next((folder / "transformer").glob("*.index.json"))
    names = json.loads(index.read_text())["weight_map"]
    path = folder / "transformer" / next(iter(names.values()))
    buffer = "layers.0.mlp.up_proj.input_quantizer._amax"
    save_file({**load_file(path), buffer: torch.ones(())}, path)
    edited(folder / "transformer", index.name, weight_map={**names, buffer: path.name})


def test_fp8_as_other_tools_write_it(checkpoints, stored, tmp_path):
    folder = Path(shutil.copytree(stored["fp8"], tmp_path / "c"))
    with loaded(folder) as model:
        expected = model.step(asked(checkpoints["silu"]))["action"]
    as_files_differ(folder)
    with loaded(folder) as model:
        assert torch.equal(model.step(asked(checkpoints["silu"]))["action"], expected)
    report = inspect(folder)
    assert report["skipped"]["names"] == ["layers.0.mlp.up_proj.input_quantizer._amax"]
    assert report["quantised"]["stored"] == "fp8"
    assert report["quantised"]["weights"] == 3 * 14
    assert report["parts"]["generation tower"]["dtypes"]["F8_E4M3"] == 3 * 7
    assert report["parts"]["text tower"]["dtypes"]["F8_E4M3"] == 3 * 7
    text = "\n".join(lines_of(report))
    assert "42 weights in fp8" in text
    assert "the first 3 and the last 3 steps in W8A16" in text
    assert "int8 or fp8 with offload_text" in text


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hf_quant_config.json", {"quant_algo": "NVFP4"}, "NVFP4"),
        ("hf_quant_config.json", {"config_groups": {"g": {"weights": {"num_bits": 4}}}}, "4"),
        ("hf_quant_config.json", {"config_groups": {"g": {"targets": ["Conv2d"]}}}, "targets"),
        ("hf_quant_config.json", {"config_groups": []}, None),
        ("hf_quant_config.json", {"config_groups": [1]}, "JSON objects"),
        ("hf_quant_config.json", {"runtime": {"kv_cache": 1}}, "kv_cache"),
        ("hf_quant_config.json", {"quant_algo": "fp8", "quant_method": "ModelOpt"}, None),
        ("hf_quant_config.json", {"quantization": {"quant_type": "Fp8"}}, None),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "int8"}}, "'FP8' and 'INT8'"),
        ("hf_quant_config.json", {"quant_method": "strands_cosmos3"}, "contradict each other"),
        ("hf_quant_config.json", {"quant_algo": None}, "config.json: quantization_config must"),
        ("hf_quant_config.json", {"runtime": {"diffusion_step_policy": None}}, None),
        ("hf_quant_config.json", {"runtime": {"other": None}}, None),
        ("hf_quant_config.json", {"kv_cache_quant_algo": None}, None),
        ("hf_quant_config.json", {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo = 'FP8'"),
        ("hf_quant_config.json", {"config_groups": {"g": {"weights": None}}}, "how its weights"),
        ("transformer/config.json", {"quantization_config": "FP8"}, "JSON objects"),
        ("hf_quant_config.json", {"exclude_modules": "lm_head"}, None),
    ],
    ids=str,
)
def test_what_a_config_may_say(stored, tmp_path, name, changes, message):
    folder = Path(shutil.copytree(stored["fp8"], tmp_path / "c"))
    edited(folder, name, **changes)
    report = inspect(folder)
    assert (report["verdict"] == "LayoutError") == (message is not None)
    assert (message or "") in report.get("problem", "")


LEFT_OUT = "layers.0.mlp_moe_gen.up_proj"


@pytest.mark.parametrize("pattern", [LEFT_OUT, "*mlp_moe_gen.up_*", "layers.0.mlp_moe_gen", "*"])
@pytest.mark.parametrize("option", ["ignore", "exclude_modules", "modules_to_not_convert"])
def test_layers_that_are_excluded_are_those_that_are_not_in_8_bits(
    stored, tmp_path, option, pattern
):
    """Also in another place than the one that states the type; a layer's number is a whole one."""
    folder = rewritten(Path(shutil.copytree(stored["fp8"], tmp_path / "c")), lambda w: w)
    edited(folder, "hf_quant_config.json", **{option: ["lm_head", "layers.0.mlp_moe", pattern]})
    report = inspect(folder)
    assert report["verdict"] == "WeightsError"
    assert "layers.0.mlp" in report["problem"].partition("must be either stored as F8_E4M3")[0]
    assert repr(pattern) in report["problem"]
    edited(folder, "hf_quant_config.json", **{option: [LEFT_OUT, "proj_in"]})
    rewritten(folder, one_in_float32(LEFT_OUT))
    assert inspect(folder)["verdict"] == "ready"


def test_a_tower_may_be_wide_as_a_whole(checkpoints, stored, tmp_path):
    """As files are whose generation alone was quantised, which states no exclusions."""
    folder = Path(shutil.copytree(stored["fp8"], tmp_path / "c"))
    text = linears(Checkpoint.open(folder).config, True) - linears(
        Checkpoint.open(folder).config, False
    )

    def change(weights):
        for name in text:
            weights = one_in_float32(name.removesuffix(".weight"))(weights)
        return weights

    assert inspect(rewritten(folder, change))["verdict"] == "ready"


@pytest.mark.parametrize(
    ("text", "says"),
    [("null", "got NoneType"), ("[]", "got list"), ("{", "as JSON"), ("", "as JSON")],
)
def test_a_damaged_statement_says_what_is_wrong_with_it(stored, tmp_path, text, says):
    folder = Path(shutil.copytree(stored["fp8"], tmp_path / "c"))
    (folder / "hf_quant_config.json").write_text(text)
    problem = inspect(folder)["problem"]
    assert "hf_quant_config.json" in problem
    assert says in problem
    assert "A Cosmos 3 checkpoint has this file" not in problem, "only those in 8 bits do"


def test_policies_of_two_files_have_to_agree(stored, tmp_path):
    """A window that rounds as the others do is the same as none; another count is not."""
    folder = Path(shutil.copytree(stored["fp8"], tmp_path / "c"))
    for count, problem in ((3, None), (2, "hf_quant_config.json and")):
        named = policy(first_steps=window(count), overlap="a16")
        edited(folder, "hf_quant_config.json", runtime={"diffusion_step_policy": named})
        report = inspect(folder)
        assert (report["verdict"] == "LayoutError") == (problem is not None)
        assert (problem or "") in report.get("problem", "")
    assert "transformer/config.json: quantization_config contradict" in report["problem"]


def without_input_scales(weights):
    return {name: w for name, w in weights.items() if not name.endswith("input_scale")}


@pytest.mark.parametrize("group", [{}, {"input_activations": None}, {"input_activations": {}}])
def test_a_file_that_rounds_weights_alone(checkpoints, stored, tmp_path, group):
    """ModelOpt's weight-only FP8 is the product of the dequantised weights, at every step."""
    folder, plain = formats.modelopt_fp8(checkpoints["silu"], tmp_path / "c", None)
    groups = {"group_0": {"weights": NUMBERS, "targets": ["Linear"], **group}}
    edited(folder, "hf_quant_config.json", config_groups=groups)
    assert "config_groups state that activations are not rounded" in inspect(folder)["problem"]
    rewritten(folder, without_input_scales)
    whole = asked(plain, num_inference_steps=1)
    with loaded(folder) as model, loaded(plain) as other:
        assert sum(isinstance(m, Fp8Linear) for m in model.transformer.modules()) > 20
        assert torch.equal(model.step(whole)["action"], other.step(whole)["action"])
    assert "every step in W8A16" in "\n".join(lines_of(inspect(folder)))
    edited(folder, "hf_quant_config.json", runtime={"diffusion_step_policy": policy()})
    assert "config_groups state that none are" in inspect(folder)["problem"]


def test_groups_that_differ_are_refused(stored, tmp_path):
    folder = Path(shutil.copytree(stored["fp8"], tmp_path / "c"))
    other = {"weights": NUMBERS, "targets": ["Linear"]}
    edited(folder, "hf_quant_config.json", config_groups={**GROUPS, "group_1": other})
    assert "input_activations is True and False" in inspect(folder)["problem"]


def without_one_input_scale(weights):
    return {name: w for name, w in weights.items() if name != "layers.1.mlp.up_proj.input_scale"}


def with_buffer(name):
    return lambda weights: {**weights, name: torch.ones(())}


def in_float32(weights):
    """As a model is saved whose quantizers were never packed."""
    plain = {name: w for name, w in weights.items() if not name.endswith("_scale")}
    return {name: w.float() for name, w in plain.items()}


def one_in_float32(layer):
    def change(weights):
        kept = {name: w for name, w in weights.items() if not name.startswith(f"{layer}.")}
        return {**kept, f"{layer}.weight": weights[f"{layer}.weight"].float()}

    return change


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("fp8", without_one_input_scale, "layers.1.mlp.up_proj.input_scale must be there"),
        (
            "fp8",
            one_in_float32("layers.2.mlp_moe_gen.up_proj"),
            "2.mlp_moe_gen.up_proj.weight must be either",
        ),
        (
            "fp8",
            one_in_float32("layers.0.self_attn.to_k"),
            "layers.0.self_attn.to_k.weight must be",
        ),
        ("int8", one_in_float32("layers.1.mlp_moe_gen.down_proj"), "gen.down_proj.weight must be"),
        ("fp8", in_float32, "stores no weight as F8_E4M3"),
        ("int8", in_float32, "stores no weight as I8"),
        *(
            ("fp8", with_buffer(f"layers.0.self_attn.to_q.{name}"), f"to_q.{name}")
            for name in (
                "input_quantizer._pre_quant_scale",
                "input_quantizer.pre_quant_scale",
                "input_quantizer._amax_for_smoothing",
                "weight_quantizer._scale",
                "weight_quantizer._bias_value",
                "pre_quant_scale",
                "output_quantizer._amax",
                "k_bmm_quantizer._amax",
                "softmax_quantizer._amax",
            )
        ),
        ("int8", with_buffer("layers.0.self_attn.to_q.input_scale"), "to_q.input_scale"),
    ],
)
def test_tensors_that_contradict_the_config_are_named(stored, tmp_path, family, change, message):
    folder = rewritten(Path(shutil.copytree(stored[family], tmp_path / "c")), change)
    report = inspect(folder)
    assert report["verdict"] == "WeightsError"
    assert message in report["problem"]
    assert "\n" not in report["problem"]


def test_a_type_that_is_not_the_stated_one_is_named(stored, tmp_path):
    folder = Path(shutil.copytree(stored["int8"], tmp_path / "c"))
    formats.write_json(
        folder / "hf_quant_config.json", {"quant_method": "modelopt", "quant_algo": "FP8"}
    )
    config = json.loads((folder / "transformer/config.json").read_text())
    del config["quantization_config"]
    formats.write_json(folder / "transformer/config.json", config)
    report = inspect(folder)
    assert report["verdict"] == "WeightsError"
    assert "must be stored as F8_E4M3, for the config states FP8" in report["problem"]


def test_amax_of_inputs_and_weights_is_skipped(stored, tmp_path):
    names = [f"layers.0.mlp.up_proj.{kind}_quantizer._amax" for kind in ("input", "weight")]
    folder = rewritten(
        Path(shutil.copytree(stored["fp8"], tmp_path / "c")),
        lambda weights: weights | {name: torch.ones(1) for name in names},
    )
    assert sorted(inspect(folder)["skipped"]["names"]) == sorted(names)


@pytest.mark.parametrize(
    ("family", "which", "change"),
    [
        *(
            (family, "weight_scale", lambda s, value=value: s * 0 + value)
            for family in ("fp8", "int8")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
        ("fp8", "input_scale", lambda s: s * -1),
        ("fp8", "input_scale", lambda s: s.repeat(2)),
        ("fp8", "weight_scale", lambda s: s.repeat(2)),
        ("fp8", "weight_scale", lambda s: s.repeat(64)),  # one a row, and one of a column
        ("fp8", "weight_scale", lambda s: s.repeat(64)[:, None]),
        ("int8", "weight_scale", lambda s: s[1:].clone()),
        ("int8", "weight_scale", lambda s: s[:, None].clone()),
    ],
)
def test_a_scale_that_cannot_be_is_named(stored, tmp_path, family, which, change):
    folder = Path(shutil.copytree(stored[family], tmp_path / "c"))
    for path in sorted((folder / "transformer").glob("*.safetensors")):
        weights = load_file(path)
        if names := [name for name in weights if name.endswith(which)]:
            save_file({**weights, names[0]: change(weights[names[0]])}, path)
            break
    report = inspect(folder)
    assert report["verdict"] == "WeightsError"
    assert names[0] in report["problem"]
    assert "\n" not in report["problem"]


def test_int8_has_no_steps_of_other_precision(stored, tmp_path):
    """Packed layers always round activations: they could not follow a policy."""
    folder = Path(shutil.copytree(stored["int8"], tmp_path / "c"))
    path = folder / "transformer/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["runtime"] = {"diffusion_step_policy": policy()}
    path.write_text(json.dumps(config))
    report = inspect(folder)
    assert report["verdict"] == "LayoutError"
    assert "diffusion_step_policy is for weights in FP8, not 'INT8'" in report["problem"]


@pytest.mark.parametrize("scheme", ["int8", "int8-weights"])
def test_a_file_in_another_scheme_is_rounded_anew(stored, scheme):
    """As its dequantised weights are, and without its policy of steps."""
    plain = stored["fp8"].with_name("fp8_plain")
    whole = asked(plain)
    with (
        loaded(stored["fp8"], quantize=scheme) as model,
        loaded(plain, quantize=scheme) as other,
    ):
        assert not any(isinstance(m, Fp8Linear) for m in model.transformer.modules())
        assert torch.equal(model.step(whole)["action"], other.step(whole)["action"])


def test_which_layers_of_a_quantised_file_are_in_8_bits(stored):
    """Those that it stores; where the option is named, all that it names, too."""
    config = Checkpoint.open(stored["fp8"]).config
    first = min(linears(config, True))
    file = EightBit("fp8", {first: StoredScale(torch.ones(1))})
    assert Quantization.of(config, file, EngineOptions()).names == {first}
    named = Quantization.of(config, file, EngineOptions(quantize="fp8"))
    assert named.names == linears(config, False) | {first}
    assert named.stored is file
    assert Quantization.of(config, file, EngineOptions(quantize="int8")).stored is None


def test_a_dtype_is_that_of_what_is_not_in_8_bits(stored):
    with Cosmos3Engine.from_pretrained(stored["fp8"], dtype="bfloat16") as model:
        tower = model.transformer.generation
        assert sum(isinstance(m, Fp8Linear) for m in tower.modules()) == 3 * 7
        assert tower.norm_moe_gen.weight.dtype is torch.bfloat16
        whole = asked(stored["fp8"].with_name("fp8_plain"))
        assert model.step(whole)["action"].isfinite().all()


def test_an_adapter_on_a_file_in_8_bits(stored, tmp_path):
    """Layers that it changes are rounded anew, with a scale of the same kind; others keep their
    bits.
    """
    plain = stored["fp8"].with_name("fp8_plain")
    _, merged = formats.adapter(plain, tmp_path / "a", "peft")
    contract = formats.contract_file(tmp_path / "my.toml", tmp_path / "a", stored["fp8"])
    before, after = formats.weights_of(plain), formats.weights_of(merged)
    changed = 0
    with Cosmos3Engine.from_pretrained(contract, action_space="midtrain") as model:
        for name, module in model.transformer.named_modules():
            if isinstance(module, Fp8Linear):
                key = checkpoint_key(f"{name}.weight")
                kept = module.weight.float() * module.scale_N[:, None]
                changed += not torch.equal(before[key], after[key])
                bound = 0.0 if torch.equal(before[key], after[key]) else 0.04
                assert apart(kept, after[key]) <= bound
                assert module.activation_scale == 1
    assert changed == 3 * 3


def test_layers_in_8_bits_take_no_other_weights(checkpoints):
    with loaded(checkpoints["silu"], quantize="int8-weights") as model:
        weights = {"transformer.generation.layers.0.mlp.up_proj.weight": drawn(1)}
        with pytest.raises(ConfigError, match="8 bits, which take no others"):
            model.take_weights(weights, 8)


def test_answers_of_other_schemes_have_other_digests(checkpoints):
    """A server states the digest, and an evaluation that goes on compares it."""
    folder = checkpoints["silu"]
    schemes = [None, *QUANTIZE]
    settings = [make_settings({"model": str(folder), "quantize": scheme}) for scheme in schemes]
    assert len({digest_of(each.identity(each.plan()[0])) for each in settings}) == len(schemes)
    assert len({each.policy.engine.answers_digest("a") for each in settings}) == len(schemes)
    backends = []
    for options in (EngineOptions(), EngineOptions(quantize="int8")):
        with Cosmos3Engine.from_pretrained(
            folder, options=options, action_space="midtrain"
        ) as model:
            backends.append(NativeBackend(model).model_sha256)
            assert backends[-1] == options.answers_digest(model.checkpoint.digest)
    assert backends[0] != backends[1]


def test_a_missing_config_is_named(checkpoints, tmp_path):
    folder, _ = formats.modelopt_fp8(checkpoints["silu"], tmp_path / "c", None)
    (folder / "hf_quant_config.json").unlink()
    assert "hf_quant_config.json, which is missing" in inspect(folder)["problem"]


@pytest.mark.parametrize("text", [False, True])
def test_a_converted_file_is_what_quantising_at_load_makes(checkpoints, tmp_path, text):
    options = EngineOptions(quantize="int8", quantize_text=text)
    opened = Checkpoint.open(checkpoints["silu"], action_space="midtrain")
    made = convert(opened, tmp_path / "c", shard_bytes=500_000, quantize=options)
    stated = json.loads((made / "transformer/config.json").read_text())["quantization_config"]
    assert stated["recipe"]["layers"] == sorted(stated["errors"])
    assert all(0.001 < error < 0.02 for error in stated["errors"].values())
    whole = asked(checkpoints["silu"])
    with loaded(made) as model, loaded(checkpoints["silu"], **vars_of(options)) as other:
        expected = other.step(whole)["action"]
        assert torch.equal(model.step(whole)["action"], expected)
        assert model.kept_bytes == other.kept_bytes
    with loaded(made, quantize="int8-weights") as model:
        assert apart(model.step(whole)["action"], expected) > 0
    assert inspect(made)["quantised"]["stored"] == "int8"
    files = [path for path in made.rglob("*.safetensors") if path.parent.name == "transformer"]
    assert len(files) > 2


def test_a_dtype_of_the_others_leaves_quantised_weights(checkpoints, tmp_path):
    opened = Checkpoint.open(checkpoints["silu"], action_space="midtrain")
    options = EngineOptions(quantize="int8")
    made = convert(opened, tmp_path / "c", dtype="bfloat16", quantize=options)
    report = inspect(made)
    assert report["quantised"]["weights"] == 21
    assert report["parts"]["generation tower"]["dtypes"]["I8"] == 21
    assert "I8" not in report["parts"]["text tower"]["dtypes"]


def vars_of(options):
    return {"quantize": options.quantize, "quantize_text": options.quantize_text}


def test_an_interrupted_conversion_keeps_its_errors(checkpoints, tmp_path):
    opened = Checkpoint.open(checkpoints["silu"], action_space="midtrain")
    options = EngineOptions(quantize="int8")

    def stop(_, number, count):
        if number == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(opened, tmp_path / "c", on_file=stop, shard_bytes=500_000, quantize=options)
    for other in (None, EngineOptions(quantize="int8", quantize_text=True)):
        with pytest.raises(ConfigError, match="something else"):
            convert(opened, tmp_path / "c", shard_bytes=500_000, quantize=other)
    damaged = next(tmp_path.glob(".c.converting/transformer/*-00001-*"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    for name, folder in (("c", tmp_path / "c"), ("d", tmp_path / "d")):
        convert(opened, folder, shard_bytes=500_000, quantize=options)
        assert folder.name == name
    one, other = (
        json.loads((tmp_path / name / "transformer/config.json").read_text()) for name in "cd"
    )
    assert one == other
    for path in (tmp_path / "d").rglob("*.safetensors"):
        assert (tmp_path / "c" / path.relative_to(tmp_path / "d")).read_bytes() == path.read_bytes()
    assert len(one["quantization_config"]["errors"]) == 21


def test_only_int8_is_written(checkpoints, tmp_path):
    opened = Checkpoint.open(checkpoints["silu"], action_space="midtrain")
    for scheme, to in (("fp8", "released"), ("int8", "lerobot")):
        with pytest.raises(ConfigError, match="only int8 is written"):
            convert(opened, tmp_path / "c", to, quantize=EngineOptions(quantize=scheme))
