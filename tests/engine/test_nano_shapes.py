"""Compilation of the layers, and Nano's real shapes through eager and compiled passes, on tensors
without data.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.parity import in_float64, share
from nano_latency import NANO
from strands_cosmos3.engine.graphs import compile_layers, compiling
from strands_cosmos3.engine.quantised import Int8Linear, Quantization, install, linears
from strands_cosmos3.engine.sequence import SequenceLayout
from strands_cosmos3.engine.text_cache import TextKV, side_by_side
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer
from strands_cosmos3.engine.vae import materialise
from strands_cosmos3.errors import ConfigError

DROID = SequenceLayout((9, 34, 40), 2, 33, (0,), 1, 8, 15.0, 0)
FEW = SequenceLayout((3, 4, 4), 2, 9, (0,), 1, 8, 15.0, 0)


def arguments(config, dtype, device, lengths=(160, 29), layout=DROID):
    def empty(*shape):
        return torch.empty(*shape, dtype=dtype, device=device)

    D, A, d = config.hidden_size, config.action_dim, config.head_dim
    rope = empty(len(lengths), layout.tokens, d), empty(len(lengths), layout.tokens, d)
    layers = config.num_hidden_layers
    texts = [TextKV(((empty(8, length, d), empty(8, length, d)),) * layers) for length in lengths]
    head = ActionHead(empty(A, D), empty(D), empty(D, A), empty(A))
    samples = (
        empty(layout.vision_tokens, config.patch_dim).float(),
        empty(layout.action_rows, A).float(),
    )
    return (
        samples,
        empty(D),
        empty(layout.tokens, 1),
        rope,
        side_by_side(texts),
        head,
        layout.noisy,
    )


def model(config, dtype, device, fill=lambda tensor: tensor):
    with torch.device("meta"):
        made = Cosmos3Transformer(config)
    materialise(made, lambda name, shape: fill(torch.empty(shape, dtype=dtype, device=device)))
    return made


def check_shapes(velocities):
    vision, action = velocities
    assert DROID.tokens == 3093
    assert vision.shape == (2, 8 * 17 * 20, 192)
    assert action.shape == (2, 32, 64)


def test_eager_and_compiled_passes_have_the_shapes_of_nano():
    """Tensors without data mix with none of the CPU: one that stayed there would raise."""
    config = replace(NANO, num_hidden_layers=3)
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph

    made = model(config, torch.bfloat16, "meta")
    given, longer = (
        arguments(config, torch.bfloat16, "meta", lengths) for lengths in ((160, 29), (256, 7))
    )
    with torch.inference_mode(), compiling():
        check_shapes(made.velocity(*given))
        compile_layers(made.generation, compiler)
        check_shapes(made.velocity(*given))
        check_shapes(made.velocity(*longer))
    assert len(graphs) == 1, "layers and prompts of all lengths share the code"


SMALL = replace(
    NANO,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=16,
    head_dim=8,
    intermediate_size=96,
    rope_axes_dim=(2, 1, 1),
)


@pytest.mark.slow
def test_compiled_and_eager_passes_agree():
    """Both as near to float64 as helpers/parity.py says."""
    torch.manual_seed(0)
    made = model(SMALL, torch.float32, "cpu", lambda tensor: tensor.normal_(0, 0.2))
    given = [random_like(value) for value in arguments(SMALL, torch.float32, "cpu")]
    exact = in_float64(made)
    with torch.inference_mode(), compiling():
        expected = exact.velocity(*map(as_float64, given))
        eager = made.velocity(*given)
        compile_layers(made.generation, "aot_eager")
        for found, wanted, peer in zip(made.velocity(*given), expected, eager, strict=True):
            assert share(found, wanted, peer) <= 1


@pytest.mark.parametrize("scheme", ["int8", "int8 of a GPU"])
def test_the_compiled_layers_of_8_bits_are_one_graph(scheme, monkeypatch):
    if scheme == "int8 of a GPU":
        monkeypatch.setattr(Quantization, "_packs", lambda *_: False)
    config = replace(SMALL, num_hidden_layers=3)
    torch.manual_seed(0)
    made = model(config, torch.float32, "cpu", lambda tensor: tensor.normal_(0, 0.2))
    weights = dict(made.named_parameters())
    quantization = Quantization(scheme.split()[0], linears(config, text=False))
    installed = install(made, quantization, torch.device("cpu"))
    for name, layer in installed.items():
        layer.place(tuple(weights[name].shape), torch.device("cpu"))
        layer.copy_(weights[name].detach())
    assert isinstance(layer, Int8Linear) is (scheme == "int8 of a GPU")
    given, longer = (
        [random_like(value) for value in arguments(config, torch.float32, "cpu", lengths, FEW)]
        for lengths in ((160, 29), (256, 7))
    )
    graphs = []
    with torch.inference_mode(), compiling():
        eager = made.velocity(*given)
        compile_layers(made.generation, lambda graph, _: graphs.append(graph) or graph)
        for found, expected in zip(made.velocity(*given), eager, strict=True):
            assert torch.equal(found, expected), "the same operations"
        made.velocity(*longer)
    assert len(graphs) == 1


def random_like(value):
    """The same structure, with noise in its tensors."""
    return changed(value, torch.randn_like)


def as_float64(value):
    return changed(value, torch.Tensor.double)


def changed(value, change):
    """The same structure, with other tensors in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(changed(part, change) for part in value)
    if isinstance(value, (TextKV, ActionHead)):
        return type(value)(**{name: changed(part, change) for name, part in vars(value).items()})
    return value


class Doubling(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_failed_compilation_is_an_error_of_this_package():
    def broken(*_):
        raise RuntimeError("no compiler")

    tower = SimpleNamespace(layers=[Doubling(), Doubling()])
    compile_layers(tower, broken)
    with pytest.raises(ConfigError, match=r"compile failed: .*no compiler"), compiling():
        tower.layers[0](torch.ones(2))
