"""transformers' model on batches of pictures of one size, as training needs it: the same numbers as
its own forward pass, without its loops over pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_vl.modeling_qwen3_vl import rotate_half
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from recipes.own_eyes.folder import EMBEDDING, HEAD, HW
from strands_cosmos3.reasoner.pixels import Film
from strands_cosmos3.reasoner.reasoner import Reasoner

PATCH, MERGE = 16, 2
_OURS = {"q_proj": "to_q", "o_proj": "to_out", "q_norm": "norm_q"}
IGNORED = -100


@dataclass(frozen=True, eq=False)
class Written:
    """A question with its answer, as tokens; or Q of them, cut behind the longest.

    Args:
        ids: [L] or [Q, L], padded at the end. positions: [L, 3] or [Q, L, 3] of time, height and
            width. first: [] or [Q] index of the first token that stands for the picture.
        targets: [L] or [Q, L] the token that follows, where it belongs to the answer, else
            :data:`IGNORED`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def stacked(cls, questions: Sequence[Written]) -> Written:
        """Several questions as one. No more tokens are kept than up to the last answer's last
        but one, which is the last that is read.
        """
        most = max(int((each.targets != IGNORED).nonzero()[-1]) + 1 for each in questions)
        ids, positions, targets = (
            torch.stack([getattr(each, name)[:most] for each in questions])
            for name in ("ids", "positions", "targets")
        )
        return cls(ids, positions, torch.stack([each.first for each in questions]), targets)

    def on(self, device: torch.device) -> Written:
        """The same on a device."""
        return Written(*(getattr(self, field.name).to(device) for field in fields(self)))


class Sight(nn.Module):
    """A reasoner whose eyes, head and rows of new words are trained, and nothing else.

    Args:
        reasoner: Of a folder of :func:`recipes.own_eyes.folder.write_sight`, in float32.
        known: Number of words that the policy has.
        length: Tokens of a question with its answer at most.
    """

    def __init__(self, reasoner: Reasoner, known: int, length: int = 72):
        super().__init__()
        self._reasoner = [reasoner]  # no part of this module
        self.device = reasoner.model.device
        self.length = length
        model = reasoner.model
        self.visual: Any = model.model.visual.requires_grad_(True)
        text = model.model.language_model
        text.config._attn_implementation = "eager"  # see _attend
        self._text = [text]
        table = text.embed_tokens.weight.detach()
        self._known = [table[:known].clone()]
        self.words = nn.Parameter(table[known:].clone())
        self.head = nn.Parameter(model.lm_head.weight.detach().clone())
        self.last = nn.ModuleDict()
        layer = text.layers[-1]
        for name in ("q_proj", "q_norm", "o_proj"):
            self.last[name] = getattr(layer.self_attn, name)
        self.last["mlp"] = layer.mlp
        self.last["post_attention_layernorm"] = layer.post_attention_layernorm
        self.last["norm"] = text.norm
        self.last.requires_grad_(True)
        grid = torch.tensor([[1, HW[0] // PATCH, HW[1] // PATCH]])
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid, self.visual.num_grid_per_side, "bilinear", True, spatial_merge_size=MERGE
        )
        self._places = [indices.to(self.device), weights.to(self.device)]
        place = get_vision_position_ids(grid, MERGE)
        self._rotary = list(self.visual.rotary_pos_emb(self._places[1], place.to(self.device)))

    def see(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return tokens [B, 20, D] of pairs of pictures [B, 2, H, W, 3] in [-1, 1]."""
        visual = self.visual
        patches = patches_of(pictures)
        kernel = visual.patch_embed.proj
        hidden = F.linear(patches, kernel.weight.flatten(1), kernel.bias)
        indices, weights = self._places
        hidden = hidden + (visual.pos_embed(indices) * weights[:, :, None]).sum(1)
        for block in visual.blocks:
            hidden = hidden + self._attend(block.attn, block.norm1(hidden))
            hidden = hidden + block.mlp(block.norm2(hidden))
        merger = visual.merger
        joined = merger.norm(hidden).view(len(hidden), -1, merger.hidden_size)
        return merger.linear_fc2(merger.act_fn(merger.linear_fc1(joined)))

    def _attend(self, attention: Any, hidden: torch.Tensor) -> torch.Tensor:
        B, N, _ = hidden.shape
        qkv = attention.qkv(hidden).view(B, N, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = (table.to(qkv.dtype) for table in self._rotary)
        q, k = (each * cos + rotate_half(each) * sin for each in qkv[:2])
        # on a processor, the gradient of scaled_dot_product_attention takes several times as long
        scores = (q @ k.transpose(2, 3) * attention.scaling).softmax(-1)
        out = scores.to(qkv.dtype) @ qkv[2]
        return attention.proj(out.transpose(1, 2).reshape(B, N, -1))

    def forward(
        self, seen: torch.Tensor, of: torch.Tensor, written: Written
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [A, V] of the answers' tokens, and these [A].

        Args:
            seen: Tokens [B, 20, D] of pictures. of: [Q] the picture of each question.
            written: Q questions with their answers.
        """
        hidden = F.embedding(written.ids, torch.cat([self._known[0], self.words]))
        columns = written.first[:, None] + torch.arange(seen.shape[1], device=self.device)
        rows = torch.arange(len(of), device=self.device)[:, None].expand_as(columns)
        hidden = hidden.index_put((rows, columns), seen[of].to(hidden.dtype))
        out = self._text[0](
            inputs_embeds=hidden, position_ids=written.positions.permute(2, 0, 1), use_cache=False
        ).last_hidden_state
        answers = written.targets != IGNORED
        return F.linear(out[answers], self.head), written.targets[answers]

    def write(self, question: str, answer: str, film_s: float | None = None) -> Written:
        """Return a question about a picture, or about a film of so many seconds, with its
        answer.
        """
        return _written(self, question, answer, film_s)

    def vision_weights(self) -> dict[str, torch.Tensor]:
        """Return the encoder's weights by their released names."""
        return dict(self.visual.state_dict())

    def text_weights(self) -> dict[str, torch.Tensor]:
        """Return what is trained of ``transformer/``, by released names."""
        layer = f"layers.{len(self._text[0].layers) - 1}."
        weights: dict[str, torch.Tensor] = {EMBEDDING: self.words, HEAD: self.head}
        for name, parameter in self.last.named_parameters():
            part, _, rest = name.partition(".")
            if part in _OURS:
                weights[f"{layer}self_attn.{_OURS[part]}.{rest}"] = parameter
            else:
                weights[name if part == "norm" else layer + name] = parameter
        return weights


@lru_cache(maxsize=20_000)
def _written(sight: Sight, question: str, answer: str, film_s: float | None) -> Written:
    reasoner = sight._reasoner[0]
    blank = np.zeros((*HW, 3), np.uint8)
    if film_s is None:
        inputs = reasoner.prompts.inputs(question, [blank])
    else:
        film = Film(np.stack([blank, blank]), 1 / max(film_s, 1e-3))
        inputs = reasoner.prompts.inputs(question, videos=[film])
    prompt = inputs["input_ids"][0]
    tokenizer = reasoner.prompts.tokenizer
    said = torch.tensor([*tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
    missing = sight.length - len(prompt) - len(said)
    assert missing >= 0, f"{question!r} needs {-missing} more tokens"
    ids = torch.cat([prompt, said, said.new_zeros(missing)])
    kinds = F.pad(inputs["mm_token_type_ids"][0], (0, len(said) + missing))
    positions, _ = reasoner.model.model.get_rope_index(
        ids[None],
        kinds[None],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
    )
    targets = torch.full((sight.length,), IGNORED)
    end = len(prompt) - 1
    targets[end : end + len(said)] = said
    return Written(ids, positions[:, 0].T, (kinds > 0).nonzero()[0, 0], targets)


def patches_of(pictures: torch.Tensor) -> torch.Tensor:
    """Return patches [B, N, 1536] of pairs of pictures [B, 2, H, W, 3], in the processor's order:
    2 x 2 patches that are merged follow one another, and one has colour, frame, row, column.
    """
    B, T, H, W, C = pictures.shape
    tall, wide = H // PATCH // MERGE, W // PATCH // MERGE
    cut = pictures.view(B, T, tall, MERGE, PATCH, wide, MERGE, PATCH, C)
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(B, -1, C * T * PATCH * PATCH)


def signed(pictures: torch.Tensor) -> torch.Tensor:
    """Return pictures of bytes as numbers in [-1, 1]."""
    return pictures.float() / 127.5 - 1
