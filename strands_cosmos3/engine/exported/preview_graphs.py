"""Graphs of the preview decoder; :mod:`~strands_cosmos3.engine.vae` says what they compute.

Shape suffixes: B batch, C latent channels, F latent frames.
"""

from __future__ import annotations

from pathlib import Path

from strands_cosmos3.engine.exported.graph_builder import GraphBuilder
from strands_cosmos3.engine.exported.transformer_graphs import silu
from strands_cosmos3.engine.sequence import TEMPORAL_COMPRESSION


def write_first_preview(g: GraphBuilder, channels: int, path: Path) -> None:
    """First pictures [B, 3, 1, height, width] of normalised latents [B, C, 1, H, W]."""
    latents = g.input("latents", ("B", channels, 1, "H", "W"))
    one = g("Squeeze", latents, g.sizes(2))
    last = TEMPORAL_COMPRESSION - 1  # the first latent frame has one frame, its last
    pictures = _pictures(g, g("Concat", one, one, axis=1), last)
    pixels = g("Unsqueeze", pictures, g.sizes(2))
    g.save(path, {"pixels": (pixels, ("B", 3, 1, "height", "width"))})


def write_preview(g: GraphBuilder, channels: int, path: Path) -> None:
    """Pixels [1, 3, frames, height, width] of normalised latents [1, C, F, H, W], of which there
    are two or more, and their first picture [1, 3, 1, height, width].
    """
    latents = g.input("latents", (1, channels, "F", "H", "W"))
    first = g.input("first", (1, 3, 1, "height", "width"))
    frames = g("Transpose", g("Squeeze", latents, g.sizes(0)), perm=[1, 0, 2, 3])
    pairs = g("Concat", g.part(frames, 1, 2**31 - 1, 0), g.part(frames, 0, -1, 0), axis=1)
    pictures = g("Transpose", _pictures(g, pairs, 0), perm=[1, 0, 2, 3])
    pixels = g("Concat", first, g("Unsqueeze", pictures, g.sizes(0)), axis=2)
    g.save(path, {"pixels": (pixels, (1, 3, "T", "height", "width"))})


def _pictures(g: GraphBuilder, pairs: str, surplus: int) -> str:
    """Pictures [n, 3, height, width] of pairs [n, 2 C, H, W] of latent frames, four each but for
    those that are ``surplus``.
    """

    def convolved(x: str, key: str, pad: int = 1) -> str:
        weights = (g.weight(f"{key}.{kind}") for kind in ("weight", "bias"))
        return g("Conv", x, *weights, pads=[pad] * 4)

    def residual(x: str, key: str) -> str:
        inner = convolved(silu(g, x), f"{key}.conv1")
        return g("Add", convolved(silu(g, inner), f"{key}.conv2"), x)

    x = convolved(pairs, "conv_in")
    x = silu(g, residual(residual(x, "coarse.0"), "coarse.1"))
    weight, bias = g.weight("frames.weight"), g.weight("frames.bias")
    if surplus:  # the others' channels are not computed
        weight, bias = (_last_part(g, value) for value in (weight, bias))
    x = g("Conv", x, weight, bias)
    if not surplus:
        grid, apart = g("Shape", x, start=2), g.sizes(0, TEMPORAL_COMPRESSION, -1)
        x = g("Reshape", x, g("Concat", apart, grid, axis=0))
        x = g("Reshape", x, g("Concat", g.sizes(-1), g("Shape", x, start=2), axis=0))
    for size, key in (("to_middle", "middle"), ("to_fine", "fine")):
        x = g("DepthToSpace", convolved(silu(g, x), size), blocksize=2, mode="CRD")
        x = residual(x, key)
    x = convolved(silu(g, x), "conv_out")
    return g("DepthToSpace", x, blocksize=4, mode="CRD")


def _last_part(g: GraphBuilder, value: str) -> str:
    """The rows of a weight that make the last of a latent frame's frames."""
    return g.several(TEMPORAL_COMPRESSION, "Split", value, axis=0, num_outputs=4)[-1]
