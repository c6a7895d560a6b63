"""RMS norm and attention for training on CPUs, each with a gradient of its own, in blocks that stay
in a core's cache.

A batch of windows does not fit there, so each elementwise step of torch's own versions goes to
memory and back, forwards and backwards. In bfloat16 (``lower_precision``) a clip of the joint stage
takes about 0.7 times as long (recipes/table_policy/NOTES.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from strands_cosmos3.engine.transformer import Cosmos3Transformer, RmsNorm

_BLOCK = 2**17
"""Numbers of a block: half a megabyte in float32."""


class BlockRmsNorm(RmsNorm):
    """An :class:`RmsNorm` whose training on CPUs is faster. Its output has the dtype that the
    matrices after it compute in.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.nemotron or x.device.type != "cpu" or not torch.is_grad_enabled():
            return super().forward(x)
        dtype = (
            torch.get_autocast_dtype("cpu")
            if torch.is_autocast_enabled("cpu")
            else self.weight.dtype
        )
        return _RmsNorm.apply(x, self.weight, self.eps, dtype)  # pyright: ignore[reportReturnType]


def norm_in_blocks(model: Cosmos3Transformer) -> None:
    """Replace the norms of hidden states, in place, by :class:`BlockRmsNorm` with the same
    weights.
    """
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is RmsNorm and len(child.weight) == model.config.hidden_size:
                norm = BlockRmsNorm(len(child.weight), model.config)
                norm.weight = child.weight
                setattr(owner, name, norm)


def attention(
    q_BhNd: torch.Tensor, k_BkMd: torch.Tensor, v_BkMd: torch.Tensor, mask_BM: torch.Tensor
) -> torch.Tensor:
    """Attention [B, h, N, d] with grouped heads to the keys where the mask is True."""
    lower = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    # in float32 torch's kernel is faster
    if q_BhNd.device.type == "cpu" and torch.is_grad_enabled() and lower:
        hidden = torch.zeros(mask_BM.shape, dtype=torch.bfloat16).masked_fill_(
            ~mask_BM, float("-inf")
        )
        return _Attention.apply(q_BhNd, k_BkMd, v_BkMd, hidden)  # pyright: ignore[reportReturnType]
    return F.scaled_dot_product_attention(
        q_BhNd, k_BkMd, v_BkMd, attn_mask=mask_BM[:, None, None], enable_gqa=True
    )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, scales = x.reshape(-1, x.shape[-1]), []
        out = torch.empty(rows.shape, dtype=dtype)
        for block, made in zip(_blocks(rows), _blocks(out), strict=True):
            wide = block.float()
            scales.append(wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_())
            made.copy_(wide.mul(scales[-1]).mul_(weight))
        ctx.save_for_backward(x, weight, torch.cat(scales))
        return out.view(x.shape)

    @staticmethod
    def backward(  # pyright: ignore
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        rows, of_weight = x.reshape(-1, x.shape[-1]), torch.zeros_like(weight, dtype=torch.float32)
        of_x = torch.empty_like(rows)
        parts = (
            _blocks(rows),
            _blocks(grad.reshape(rows.shape)),
            scale.split(len(_blocks(rows)[0])),
            _blocks(of_x),
        )
        for block, back, by, made in zip(*parts, strict=True):
            normed, back = block.float().mul(by), back.float()
            of_weight += (back * normed).sum(0)
            back = back.mul(weight)
            along = (back * normed).mean(-1, keepdim=True)
            made.copy_(back.sub_(normed.mul_(along)).mul_(by))
        return of_x.view(x.shape), of_weight.to(weight.dtype), None, None


class _Attention(torch.autograd.Function):
    """One window after the other, whose probabilities fit in the cache in bfloat16; torch's
    kernel computes in float32.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        B, key_heads = k.shape[:2]
        # queries that share a key head are its rows
        q_BkNd = (q * q.shape[-1] ** -0.5).reshape(B, key_heads, -1, q.shape[-1])
        out, shares = torch.empty_like(q_BkNd), q_BkNd.new_empty(*q_BkNd.shape[:3], k.shape[2])
        for b in range(B):
            torch.softmax(
                torch.bmm(q_BkNd[b], k[b].transpose(1, 2)).add_(hidden[b]), -1, out=shares[b]
            )
            torch.bmm(shares[b], v[b], out=out[b])
        ctx.save_for_backward(q_BkNd, k, v, shares, out)
        return out.view(q.shape)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(  # pyright: ignore
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, shares, out = ctx.saved_tensors
        of_q, of_k, of_v = (torch.empty_like(tensor) for tensor in (q, k, v))
        back = grad.reshape(out.shape)
        for b in range(len(q)):
            torch.bmm(shares[b].transpose(1, 2), back[b], out=of_v[b])
            scores = torch.bmm(back[b], v[b].transpose(1, 2))
            scores.sub_((back[b] * out[b]).sum(-1, keepdim=True)).mul_(shares[b])
            torch.bmm(scores, k[b], out=of_q[b])
            torch.bmm(scores.transpose(1, 2), q[b], out=of_k[b])
        return (of_q * q.shape[-1] ** -0.5).view(grad.shape), of_k, of_v, None


def _blocks(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.split(max(1, _BLOCK // rows.shape[-1]))
