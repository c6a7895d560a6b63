#!/usr/bin/env bash
# diffusers 0.42.1 mixes up the attention of Cosmos 3's two towers when it chooses the precision of a
# denoising step.
#
# NVIDIA's FP8 checkpoints state which steps round activations to FP8 (diffusion_step_policy), for the
# generation tower by step and for the text tower ("reasoner") once for all. diffusers decides by a
# layer's name to which tower it belongs: _classify_cosmos3_linear in
# pipelines/cosmos/mixed_precision.py. Its own attention processor (Cosmos3AttnProcessor in
# models/transformers/transformer_cosmos3.py) computes text with to_q, to_k, to_v and to_out, and
# generation with add_q_proj, add_k_proj, add_v_proj and to_add_out: the other way round.
#
# It matters to whoever compares an FP8 implementation with diffusers, or measures what a step policy
# costs: the generation tower's attention is never rounded, the text tower's is in the steps between.
#
# The script runs one decoder layer on text and generation tokens of different numbers, sees which
# linear is given which, and prints how far the generation tokens of a step in FP8 are from those
# that the same code gives with linears sorted by tower. It exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet diffusers==0.42.1 torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from types import MethodType, SimpleNamespace

import diffusers
import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3VLTextMoTDecoderLayer
from diffusers.pipelines.cosmos import mixed_precision as mixed
from torch import nn
from torch.nn import functional as F

TEXT, GENERATION, HEAD, STEP, STEPS = 5, 9, 32, 4, 8
INPUT_SCALE = 0.02

torch.manual_seed(0)
layer = Cosmos3VLTextMoTDecoderLayer(
    hidden_size=64, head_dim=HEAD, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160,
    attention_bias=False, rms_norm_eps=1e-6, hidden_act="silu", qk_norm_for_text=True,
    use_und_k_norm_for_gen=False,
)
model = nn.Module()
model.layers = nn.ModuleList([layer])
linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
text, generation = torch.randn(TEXT, 64), torch.randn(GENERATION, 64)
rotary = [f(torch.rand(n, HEAD)) for n in (TEXT, GENERATION) for f in (torch.cos, torch.sin)]

rows = {}
hooks = [
    m.register_forward_hook(lambda _, given, __, name=name: rows.__setitem__(name, len(given[0])))
    for name, m in linears.items()
]
with torch.inference_mode():
    layer(text, generation, rotary)
for hook in hooks:
    hook.remove()
tower = {name: {TEXT: "reasoner", GENERATION: "generation"}[count] for name, count in rows.items()}

print("python", sys.version.split()[0], "torch", torch.__version__, "diffusers", diffusers.__version__)
print(f"{'linear':32} runs on      classified as")
swapped = set()
for name in linears:
    said = mixed._classify_cosmos3_linear(name)
    print(f"{name:32} {tower[name]:12} {said}{'' if said == tower[name] else '   <-- not its tower'}")
    swapped |= {name.rpartition(".")[2]} if said != tower[name] else set()


def rounded_product(self, x):
    """A ModelOpt linear in W8A8."""
    small = (x / INPUT_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * INPUT_SCALE
    return F.linear(small, self.weight.float() * self.weight_quantizer._scale, self.bias)


for m in linears.values():
    scale = m.weight.detach().abs().max() / 448
    m.weight = nn.Parameter((m.weight.detach() / scale).to(torch.float8_e4m3fn), requires_grad=False)
    m.weight_quantizer = SimpleNamespace(is_enabled=True, _scale=scale)
    m.input_quantizer = SimpleNamespace(is_enabled=True)
    m._should_run_real_quant_gemm = True

policy = mixed.Cosmos3MixedPrecisionConfig("fp8")  # the official one: 3 steps, 3 steps, reasoner a16
results = []
for classify in (mixed._classify_cosmos3_linear, tower.get):
    mixed._classify_cosmos3_linear = classify
    for m in linears.values():
        m.forward = MethodType(rounded_product, m)
    runtime = mixed.Cosmos3MixedPrecisionRuntime(model, policy)
    print("step", STEP, "of", STEPS, runtime.set_step(STEP, STEPS), runtime.installed_counts)
    with torch.inference_mode():
        results.append(layer(text, generation, rotary))
texts, generations = zip(*results)
changed = [float((a - b).norm() / b.norm()) for a, b in (texts, generations)]
print(f"against linears sorted by tower, text differs by {changed[0]:.1e}, generation by {changed[1]:.1e}")

expected = {"to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
if swapped != expected or min(changed) < 1e-4:
    sys.exit(f"this has changed: linears of the other tower are {sorted(swapped)}")
print("as described: all eight linears of attention are taken for the other tower's")
PYTHON
