"""Joint attention of a picture's and a caption's tokens, as diffusers' JointAttnProcessor2_0, with attention that a layout or a
kernel replaces."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import Kernels


class FullAttention(nn.Module):
    """Attention between all tokens, as a module without weights, which a sequence-parallel layout can replace."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, q_bthe: Tensor, k_bthe: Tensor, v_bthe: Tensor) -> Tensor:
        if self.kernels == "strata" and q_bthe.is_cuda:
            from strata.kernels.ops.flash_attention.flash_attention import flash_attention

            return flash_attention(q_bthe, k_bthe, v_bthe, causal=False)
        q_bhte, k_bhte, v_bhte = (x.transpose(1, 2) for x in (q_bthe, k_bthe, v_bthe))
        return F.scaled_dot_product_attention(q_bhte, k_bhte, v_bhte).transpose(1, 2)


class JointAttention:
    """Processor of diffusers' Attention. The width of a head stays the same when tensor-parallel ranks divide the heads."""

    def __init__(self, kernels: Kernels) -> None:
        self.core: nn.Module = FullAttention(kernels)

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: None = None
    ) -> tuple[Tensor, Tensor]:
        image_bnd, text_btd = hidden_states, encoder_hidden_states
        (width,) = attn.norm_q.dim

        def heads(x_btd: Tensor) -> Tensor:
            return x_btd.view(*x_btd.shape[:2], -1, width)

        q_norm, k_norm, q_text_norm, k_text_norm = head_norms(attn)
        q = torch.cat([q_norm(heads(attn.to_q(image_bnd))), q_text_norm(heads(attn.add_q_proj(text_btd)))], 1)
        k = torch.cat([k_norm(heads(attn.to_k(image_bnd))), k_text_norm(heads(attn.add_k_proj(text_btd)))], 1)
        v = torch.cat([heads(attn.to_v(image_bnd)), heads(attn.add_v_proj(text_btd))], 1)
        joint_btd = self.core(q, k, v).flatten(2)
        image_bnd, text_btd = joint_btd.split([image_bnd.shape[1], text_btd.shape[1]], 1)
        if not attn.context_pre_only:
            text_btd = attn.to_add_out(text_btd)
        return attn.to_out[0](image_bnd), text_btd


def head_norms(attn: Any) -> tuple[Any, Any, Any, Any]:
    """Norms of the queries and keys of pictures, then of captions. Each has one weight for all heads."""
    return attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k
