"""Attention and linears, bfloat16 and 8 bits, on the shapes of Nano's generation tower.

    PYTHONPATH=. python benchmarks/gpu_kernels.py          # on a CUDA GPU: half a minute
    PYTHONPATH=. python benchmarks/gpu_kernels.py --small  # that it runs, on any machine

Two branches of 3093 tokens, prompts of 160 and 29 tokens. Figures of one run: ``gpu_notes.md``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}
Run = Callable[[], torch.Tensor]


def milliseconds(run: Callable[[], Any], seconds: float = 0.5, most: int = 30) -> float:
    """Median time of a call after two others, by CUDA events where there is a GPU."""
    cuda, times = torch.cuda.is_available(), []
    for _ in range(2):
        run()
    end = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < most and time.perf_counter() < end):
        if cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def show(name: str, run: Run, tflop: float, expected: torch.Tensor | None = None) -> None:
    """Print time, rate and the relative error of the norm; or why it does not run here."""
    try:
        found, ms = run(), milliseconds(run)
    except (RuntimeError, NotImplementedError) as error:
        print(f"  {name:44s} {str(error).splitlines()[0][:80]}", flush=True)
        return
    error = ""
    if expected is not None:
        off = (found.float() - expected.float()).norm() / expected.float().norm()
        error = f" error {float(off):.4f}"
    print(f"  {name:44s} {ms:8.3f} ms {tflop / ms * 1e3:6.0f} TFLOP/s{error}", flush=True)


def attention(
    make: Callable[..., torch.Tensor], tokens: int, prompts: tuple[int, int], bucket: int
) -> None:
    """Two branches whose prompts differ in length: today's ways and torch's backends."""
    heads, key_heads, width, B = 32, 8, 128, 2
    q = make(B, tokens, heads, width).transpose(1, 2)
    own = [make(B, key_heads, tokens, width) for _ in range(2)]
    text = [make(B, key_heads, bucket, width) for _ in range(2)]
    tflop = sum(4e-12 * heads * tokens * (tokens + s) * width for s in prompts)

    def branches() -> torch.Tensor:
        out = torch.empty_like(q)
        for i, s in enumerate(prompts):
            here = slice(i, i + 1)
            joined = [
                torch.cat([t[here, :, :s], o[here]], 2) for t, o in zip(text, own, strict=True)
            ]
            out[here] = F.scaled_dot_product_attention(q[here], *joined, enable_gqa=True)
        return out

    expected = branches()
    show("a call for each branch, cat, copy", branches, tflop)
    joined = [torch.cat(pair, 2) for pair in zip(text, own, strict=True)]
    mask = q.new_zeros(B, 1, 1, bucket + tokens)
    for i, s in enumerate(prompts):
        mask[i, ..., s:bucket] = float("-inf")

    def masked() -> torch.Tensor:
        folded = q.unflatten(1, (key_heads, -1)).flatten(2, 3)
        out = F.scaled_dot_product_attention(folded, *joined, attn_mask=mask)
        return out.view(q.shape)

    show("padded prompts, a mask", masked, tflop, expected)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def whole(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, *joined, enable_gqa=True)

        more = 4e-12 * B * heads * tokens * (tokens + bucket) * width
        show(f"no mask, one call, {backend.name}", whole, more)
    # packed as [own, prompt, padding]: the lengths are data, so that one CUDA graph serves all
    packed = [torch.cat(p, 2).transpose(1, 2).flatten(0, 1) for p in zip(own, text, strict=True)]
    ints = {"device": q.device, "dtype": torch.int32}
    starts = [torch.arange(B + 1, **ints) * n for n in (tokens, tokens + bucket)]
    used = torch.tensor([tokens + s for s in prompts], **ints)
    flat = q.transpose(1, 2).flatten(0, 1)

    def varlen() -> torch.Tensor:
        flash = torch.ops.aten._flash_attention_forward
        sizes = tokens, tokens + bucket, 0.0, False, False
        out = flash(flat, *packed, *starts, *sizes, seqused_k=used)[0]
        return out.unflatten(0, (B, tokens)).transpose(1, 2)

    show("aten flash, lengths as data", varlen, tflop, expected)


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit rows [n, K] and a scale [n, 1] for each."""
    scale = rows.abs().amax(1, keepdim=True).float().clamp(min=1e-8) / LARGEST[dtype]
    scaled = rows.float() / scale
    return (scaled.round() if dtype == INT8 else scaled).to(dtype), scale


def product(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    """Of 8-bit rows and weights, with a scale for each row."""
    if w.dtype == INT8:
        return (torch._int_mm(x, w.t()).float() * x_scale * w_scale.t()).bfloat16()
    scales = {"scale_a": x_scale, "scale_b": w_scale.t()}
    return torch._scaled_mm(x, w.t(), out_dtype=torch.bfloat16, use_fast_accum=True, **scales)


def linear(make: Callable[..., torch.Tensor], rows: int, width: int, out: int) -> None:
    """A linear in bfloat16, W8A8 and W8A16; some columns of its input stand out."""
    x, w = make(rows, width), make(out, width) * width**-0.5
    x[:, ::37] *= 8
    tflop = 2e-12 * rows * width * out
    expected = F.linear(x, w)
    show("bfloat16", lambda: F.linear(x, w), tflop)
    for dtype, name in ((INT8, "int8"), (FP8, "fp8")):
        held, scale = quantise(w, dtype)
        x8, x_scale = quantise(x, dtype)
        w8a8 = lambda a, b, s: product(*quantise(a, b.dtype), b, s)  # noqa: E731
        w8a16 = lambda a, b, s: F.linear(a, b.to(a.dtype) * s.to(a.dtype))  # noqa: E731
        if dtype == INT8:
            show("int8 product alone", lambda a=x8, b=held: torch._int_mm(a, b.t()), tflop)
        else:
            alone = lambda a=x8, c=x_scale, b=held, s=scale: product(a, c, b, s)  # noqa: E731
            show("fp8 product alone", alone, tflop)
        for kind, way in (("W8A8", w8a8), ("W8A16", w8a16)):
            fast = torch.compile(way, dynamic=False)
            for how, call in (("eager", way), ("compiled", fast)):
                run = lambda c=call, b=held, s=scale: c(x, b, s)  # noqa: E731
                show(f"{name} {kind}, {how}", run, tflop, expected)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few tokens, narrow layers, the CPU")
    small = parser.parse_args().small
    device = "cpu" if small else "cuda"
    tokens, prompts, bucket = (48, (16, 9), 32) if small else (3093, (160, 29), 256)
    widths = (64, 32, 128) if small else (4096, 1024, 12288)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    D, kv, inner = widths
    print("attention", flush=True)
    attention(make, tokens, prompts, bucket)
    for width, out in ((D, D), (D, kv), (D, inner), (inner, D)):
        print(f"{2 * tokens} x {width} x {out}", flush=True)
        linear(make, 2 * tokens, width, out)


if __name__ == "__main__":
    main()
