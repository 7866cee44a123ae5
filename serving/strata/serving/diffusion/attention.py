"""Attention of diffusion transformers through one function, by diffusers' own seam: the attention processors of a model.

A model's processors compute queries, keys and values as diffusers does and pass them to the `Seam` that they share. The seam
calls `attention`, or what a layout over several workers puts in its place for the duration of a sampling call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

import strata.kernels.ops.flash_attention.flash_attention  # noqa: F401  registers the operator
from strata.serving.diffusion.joined_layers import join_projections


@dataclass(frozen=True)
class Site:
    """One attention module. `joint`: text tokens take part, beside the image's."""

    name: str
    joint: bool


Attend = Callable[[Site, Tensor, Tensor, Tensor], Tensor]  # q, k and v are [b, tokens, heads, dim]


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [b, t, h, e], k and v [b, s, h, e] -> out [b, t, h, e] and the log-sum-exp of the scores, fp32 [b, h, t]. No mask."""
    out, lse = torch.ops.strata.flash_attention.default(q, k, v, False, None, q.shape[-1] ** -0.5, None, None)
    return out, lse


def plain_attention(_: Site, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Strata's flash attention over tokens that are all on this worker."""
    return attention(q, k, v)[0]


class Seam:
    """The self-attention that all processors of one model call."""

    def __init__(self, attend: Attend = plain_attention) -> None:
        self.attend = attend

    @contextmanager
    def using(self, attend: Attend) -> Iterator[None]:
        before, self.attend = self.attend, attend
        try:
            yield
        finally:
            self.attend = before


def install(model: nn.Module, seam: Seam) -> None:
    """Give every attention module of a transformer the processor of its kind, and join its projections."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "set_processor"):
            kind = FluxProcessor if type(module).__name__ == "FluxAttention" else Processor
            module.set_processor(kind(name, seam))
            join_projections(module)


class FluxProcessor:
    """Joint attention of FLUX with rotary positions; the order of tokens is text, image, as the rotary embedding's."""

    def __init__(self, name: str, seam: Seam) -> None:
        self.site, self.seam = Site(name, joint=True), seam

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = _heads(attn.to_qkv(hidden_states), 3, attn.head_dim)
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            text_q, text_k, text_v = _heads(attn.to_added_qkv(encoder_hidden_states), 3, attn.head_dim)
            text_q, text_k = attn.norm_added_q(text_q), attn.norm_added_k(text_k)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((text_q, q), (text_k, k), (text_v, v)))
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        out = self.seam.attend(self.site, q, k, v).flatten(2)
        if encoder_hidden_states is None:
            return out
        text, image = torch.split(out, [encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


class Processor:
    """Self-attention, joint attention (SD3; the order of tokens is image, text) and cross attention to masked text (PixArt)."""

    def __init__(self, name: str, seam: Seam) -> None:
        self.sites = {joint: Site(name, joint) for joint in (False, True)}
        self.seam = seam

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        joint = encoder_hidden_states is not None and attn.added_kv_proj_dim is not None
        cross = encoder_hidden_states is not None and not joint
        dim = attn.inner_dim // attn.heads
        if cross:
            (q,), (k, v) = _heads(attn.to_q(hidden_states), 1, dim), _heads(attn.to_kv(encoder_hidden_states), 2, dim)
        else:
            q, k, v = _heads(attn.to_qkv(hidden_states), 3, dim)
        q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
        if cross:
            out = _cross_attention(q, k, v, attention_mask)
        else:
            if joint:
                text_q, text_k, text_v = _heads(attn.to_added_qkv(encoder_hidden_states), 3, dim)
                text_q, text_k = _normed(attn.norm_added_q, text_q), _normed(attn.norm_added_k, text_k)
                q, k, v = (torch.cat(pair, dim=1) for pair in ((q, text_q), (k, text_k), (v, text_v)))
            out = self.seam.attend(self.sites[joint], q, k, v)
        image = out[:, : hidden_states.shape[1]].flatten(2)
        image = attn.to_out[1](attn.to_out[0](image))
        if not joint:
            return image  # type: ignore[no-any-return]
        text = out[:, hidden_states.shape[1] :].flatten(2)
        return image, text if attn.context_pre_only else attn.to_add_out(text)


def _heads(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """The outputs of joined projections, [b, tokens, heads, dim] each."""
    return [torch.unflatten(part, -1, (-1, dim)) for part in x.chunk(count, dim=-1)]


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _cross_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Every worker has all text tokens, so no layout changes this. `bias` is [b, 1, t]; the flash attention has no such mask."""
    if bias is None:
        return attention(q, k, v)[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None].to(q.dtype)).transpose(1, 2)
