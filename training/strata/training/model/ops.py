"""Operations between the matrix products, and the loss, in three implementations: Strata's kernels, torch, and Liger's kernels.

All implementations compute the same function, so a run can be compared between them. Shapes in names are the model's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.platform.errors import UserError
from strata.platform.recipe import Kernels
from strata.training.targets import IGNORED


@dataclass(frozen=True)
class Ops:
    """One implementation of the operations. `rope` and `attention` have heads after tokens; `attention` also gets the window, the
    scale of the scores and, for rows of packed documents, the documents' bounds and a length that none of them exceeds.

    `loss_sum` receives the output layer's input and matrix, so that the logits, the largest tensor of a training step, are never
    complete in memory. Targets of `IGNORED` add nothing.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, int | None, float, Tensor | None, int], Tensor]
    loss_sum: Callable[[Tensor, Tensor, Tensor], Tensor]


def by(kernels: Kernels) -> Ops:
    return {"strata": _strata, "torch": _torch, "liger": _liger}[kernels]()


def _torch() -> Ops:
    return Ops(_torch_rms_norm, _torch_rope, _torch_swiglu, _torch_attention, _torch_loss_sum)


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()  # the mean of squares loses too much in bf16
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _torch_rope(q_bthe: Tensor, k_btke: Tensor, cos_te: Tensor, sin_te: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(q_bthe, cos_te, sin_te), _rotate(k_btke, cos_te, sin_te)


def _rotate(x_bthe: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
    """Hugging Face's convention: a dimension is paired with the one half a head away, not with its neighbour."""
    first, second = x_bthe.chunk(2, dim=-1)
    cos, sin = cos_te.unsqueeze(1), sin_te.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_bthe.dtype)


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _torch_attention(
    q_bthe: Tensor, k_btke: Tensor, v_btke: Tensor, window: int | None, scale: float, bounds: Tensor | None, longest: int
) -> Tensor:
    q_bhte, k_bkte, v_bkte = (x.transpose(1, 2) for x in (q_bthe, k_btke, v_btke))
    plain = window is None and bounds is None
    mask = None if plain else sees(q_bthe.shape[1], window, bounds, q_bthe.device)
    return F.scaled_dot_product_attention(
        q_bhte, k_bkte, v_bkte, attn_mask=mask, is_causal=plain, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def sees(tokens: int, window: int | None, bounds: Tensor | None, device: torch.device) -> Tensor:
    """[t, s]: whether token t attends to token s."""
    at = torch.arange(tokens, device=device)
    distance_ts = at[:, None] - at[None, :]
    mask_ts = distance_ts >= 0
    if window is not None:
        mask_ts = mask_ts & (distance_ts < window)
    if bounds is not None:
        document_t = torch.bucketize(at, bounds[1:], right=True)
        mask_ts = mask_ts & (document_t[:, None] == document_t[None, :])
    return mask_ts


def _torch_loss_sum(x_nd: Tensor, weight_vd: Tensor, targets_n: Tensor) -> Tensor:
    """Loss in fp32 for any precision of the model."""
    return F.cross_entropy(F.linear(x_nd, weight_vd).float(), targets_n, ignore_index=IGNORED, reduction="sum")


def _strata() -> Ops:
    """Strata's kernels. On a CPU their counterparts are written in torch, and torch's own operators take less time to call: they
    are used except where Strata's do less work, in attention between packed documents and in the loss."""
    from strata.kernels.ops.flash_attention.flash_attention import flash_attention
    from strata.kernels.ops.linear_cross_entropy.linear_cross_entropy import linear_cross_entropy
    from strata.kernels.ops.rms_norm.rms_norm import rms_norm
    from strata.kernels.ops.rope import rope
    from strata.kernels.ops.swiglu import swiglu

    def loss_sum(x_nd: Tensor, weight_vd: Tensor, targets_n: Tensor) -> Tensor:
        return linear_cross_entropy(x_nd, weight_vd, targets_n, ignore_index=IGNORED, reduction="sum")

    def attention(
        q_bthe: Tensor, k_btke: Tensor, v_btke: Tensor, window: int | None, scale: float, bounds: Tensor | None, longest: int
    ) -> Tensor:
        if not q_bthe.is_cuda and bounds is None:
            return _torch_attention(q_bthe, k_btke, v_btke, window, scale, bounds, longest)
        return flash_attention(q_bthe, k_btke, v_btke, window=window, scale=scale, cu_seqlens=bounds, max_seqlen=longest)

    return Ops(
        lambda x, weight, eps: (rms_norm if x.is_cuda else _torch_rms_norm)(x, weight, eps),
        lambda q_bthe, k_btke, cos_te, sin_te: (rope if q_bthe.is_cuda else _torch_rope)(q_bthe, k_btke, cos_te, sin_te),
        lambda gate, up: (swiglu if gate.is_cuda else _torch_swiglu)(gate, up),
        attention,
        loss_sum,
    )


def _liger() -> Ops:
    """Liger's kernels, with torch's attention, which Liger does not have."""
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError as error:
        fix = "Set up with PROFILE=gpu, or set train.kernels to strata or torch."
        raise UserError(f"train.kernels=liger needs Liger-Kernel, which is not here ({error}).", fix) from error

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor = liger.liger_rms_norm(x, weight, eps, in_place=False)
        return y

    def rope(q_bthe: Tensor, k_btke: Tensor, cos_te: Tensor, sin_te: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (table.repeat(1, 2).unsqueeze(0) for table in (cos_te, sin_te))
        q_bhte, k_bkte = liger.liger_rope(q_bthe.transpose(1, 2), k_btke.transpose(1, 2), cos, sin)
        return q_bhte.transpose(1, 2), k_bkte.transpose(1, 2)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        y: Tensor = liger.liger_swiglu(gate, up)
        return y

    def loss_sum(x_nd: Tensor, weight_vd: Tensor, targets_n: Tensor) -> Tensor:
        loss: Tensor = liger.liger_fused_linear_cross_entropy(x_nd, weight_vd, targets_n, ignore_index=IGNORED, reduction="sum")
        return loss

    return Ops(rms_norm, rope, swiglu, _torch_attention, loss_sum)
