"""Attention of a layer: projections, norms of queries and keys, rotary embedding, and the masked products between tokens."""

import math

import torch
from torch import Tensor, nn

from strata.platform.recipe import ModelSection
from strata.training.model.norms import norm
from strata.training.model.ops import Ops, sees
from strata.training.model.projections import Projecting, projected
from strata.training.model.rope import Positions


class CausalAttention(nn.Module):
    """Masked attention between tokens as a module without weights, which a sequence-parallel layout can replace.

    `bounds` are those of the documents in the flattened batch; `sinks_h` are a score of each head that no token has.
    """

    def __init__(self, ops: Ops, window: int | None, scale: float, softcap: float | None) -> None:
        super().__init__()
        self.ops = ops
        self.window, self.scale, self.softcap = window, scale, softcap

    def forward(
        self, q_bthe: Tensor, k_btke: Tensor, v_btke: Tensor, bounds: Tensor | None = None, sinks_h: Tensor | None = None
    ) -> Tensor:
        shape = q_bthe.shape
        longest = shape[1]  # no document is longer than a row
        if bounds is not None:  # documents of all rows in one, which is how kernels take them
            q_bthe, k_btke, v_btke = (x.reshape(1, -1, *x.shape[2:]) for x in (q_bthe, k_btke, v_btke))
        if self.softcap is None and sinks_h is None:
            return self.ops.attention(q_bthe, k_btke, v_btke, self.window, self.scale, bounds, longest).reshape(shape)
        mask_ts = sees(q_bthe.shape[1], self.window, bounds, q_bthe.device)
        return plain(q_bthe, k_btke, v_btke, mask_ts, self.scale, self.softcap, sinks_h).reshape(shape)


class Attention(Projecting):
    def __init__(self, section: ModelSection, ops: Ops, layer: int) -> None:
        super().__init__()
        architecture = section.architecture
        self.head_dim = section.head_dim
        self.ops = ops
        width, kv_width = section.heads * self.head_dim, section.kv_heads * self.head_dim
        self.q_proj = nn.Linear(section.hidden, width, bias=architecture.qkv_bias)
        self.k_proj = nn.Linear(section.hidden, kv_width, bias=architecture.qkv_bias)
        self.v_proj = nn.Linear(section.hidden, kv_width, bias=architecture.qkv_bias)
        self.o_proj = nn.Linear(width, section.hidden, bias=architecture.output_bias)
        by_head = architecture.qk_norm == "head"
        self.by_head = by_head
        self.q_norm = norm(section, self.head_dim if by_head else width, ops) if architecture.qk_norm != "none" else None
        self.k_norm = norm(section, self.head_dim if by_head else kv_width, ops) if architecture.qk_norm != "none" else None
        self.sinks = nn.Parameter(torch.zeros(section.heads)) if architecture.sinks else None
        self.slides = layer in architecture.sliding_layers
        self.rotates = layer not in architecture.unrotated_layers
        scale = architecture.attention_scale or self.head_dim**-0.5
        window = architecture.window if self.slides else None
        self.core: nn.Module = CausalAttention(ops, window, scale, architecture.attention_softcap)

    def forward(self, x_btd: Tensor, positions: Positions) -> Tensor:
        q_btd, k_btd, v_btd = projected(self, x_btd, self.q_proj, self.k_proj, self.v_proj)
        if self.q_norm is not None and self.k_norm is not None and not self.by_head:
            q_btd, k_btd = self.q_norm(q_btd), self.k_norm(k_btd)
        q_bthe, k_btke, v_btke = self._heads(q_btd), self._heads(k_btd), self._heads(v_btd)
        if self.q_norm is not None and self.k_norm is not None and self.by_head:
            q_bthe, k_btke = self.q_norm(q_bthe), self.k_norm(k_btke)
        if self.rotates:
            q_bthe, k_btke = self._rotated(q_bthe, k_btke, *(positions.sliding if self.slides else positions.full))
        y_bthe = self.core(q_bthe, k_btke, v_btke, positions.bounds, self.sinks)
        y_btd: Tensor = self.o_proj(y_bthe.flatten(2))
        return y_btd

    def _heads(self, x_btd: Tensor) -> Tensor:
        batch, tokens, width = x_btd.shape
        return x_btd.view(batch, tokens, width // self.head_dim, self.head_dim)

    def _rotated(self, q_bthe: Tensor, k_btke: Tensor, cos_te: Tensor, sin_te: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens = q_bthe.shape[:2]
        if batch == 1 or cos_te.shape[0] == tokens:
            return self.ops.rope(q_bthe, k_btke, cos_te, sin_te)
        q, k = (x.reshape(1, batch * tokens, *x.shape[2:]) for x in (q_bthe, k_btke))
        q, k = self.ops.rope(q, k, cos_te, sin_te)
        return q.view_as(q_bthe), k.view_as(k_btke)


def plain(
    q_bthe: Tensor,
    k_btke: Tensor,
    v_btke: Tensor,
    mask_ts: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """Attention with all scores in memory, in fp32, for what flash kernels do not have: bounded scores and sinks."""
    batch, tokens, heads, _ = q_bthe.shape
    kv_heads = k_btke.shape[2]
    q_btkge = q_bthe.float().view(batch, tokens, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("btkge,bske->bkgts", q_btkge, k_btke.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask_ts, -math.inf)
    if sinks_h is not None:
        sinks = sinks_h.float().view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, tokens, 1)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    y_btkge = torch.einsum("bkgts,bske->btkge", probabilities, v_btke.float())
    return y_btkge.reshape(q_bthe.shape).to(q_bthe.dtype)
