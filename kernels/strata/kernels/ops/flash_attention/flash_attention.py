"""Flash attention for training and prefill: `torch.ops.strata.flash_attention` and its gradients.

Query i of t is at key position i + s - t, so the last query is aligned with the last key. With `causal`, a query attends to no
later key. With `window`, it attends to the last `window` keys, its own included; without `causal`, to the window on both sides. A
query that attends to no key has output zero and no gradient. With more query heads than key heads, groups of query heads share a
key head (GQA).

Packed documents attend only to themselves. `cu_seqlens` holds the start of each document, and the end of the last.

On a GPU, the kernels are plain Triton (`portable`), or Gluon (`hopper`) for the shapes that it supports. On a CPU, torch's own
flash attention runs once per document, so that CPU training uses the same operator.

The operator also returns `lse`, the log-sum-exp of each query's scores, from which the backward pass recomputes the
probabilities: fp32 [b, h, t], -inf for a query that attends to no key.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.tuning.tunable import architecture

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU_DTYPES = (*DTYPES, torch.float64)  # gradcheck needs it


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    _, t, h, e = q.shape
    s, kv = k.shape[1:3]
    k, v = k.repeat_interleave(h // kv, dim=2), v.repeat_interleave(h // kv, dim=2)
    scores = torch.einsum("bthe,bshe->bhts", q, k) * (e**-0.5 if scale is None else scale)
    sees = _sees(t, s, causal, window, q.device)
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(t, device=q.device), cu_seqlens[1:], right=True)
        sees = sees & (document[:, None] == document[None, :])
    probabilities = scores.masked_fill(~sees, -math.inf).softmax(dim=-1).masked_fill(~sees.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhts,bshe->bthe", probabilities, v)


def _sees(t: int, s: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(s - t, s, device=device)[:, None] - torch.arange(s, device=device)[None, :]
    sees = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return sees if window is None else sees & (distance.abs() < window)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """q [b, t, h, e], k and v [b, s, kv, e] -> [b, t, h, e]. `scale` defaults to 1/sqrt(e). `cu_seqlens` is int32 [documents + 1]
    and requires b = 1. `max_seqlen`, an upper bound on the document lengths, reduces the launch grid."""
    _check(q, k, v, window, scale, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, _ = torch.ops.strata.flash_attention.default(q, k, v, causal, window, scale, cu_seqlens, max_seqlen)
    return out  # type: ignore[no-any-return]


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None, cu_seqlens: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"flash_attention expects q [b, t, h, e] with k and v [b, s, kv, e], {_given(q, k, v)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"flash_attention expects q heads to be a multiple of k and v heads, {_given(q, k, v)}")
    dtypes = DTYPES if q.is_cuda else CPU_DTYPES
    if q.dtype not in dtypes or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"flash_attention expects q, k and v in one of {', '.join(map(str, dtypes))} on {q.device.type}, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.is_cuda and q.shape[3] > MAX_HEAD_DIM:
        raise ValueError(f"flash_attention on a GPU supports head dimensions up to {MAX_HEAD_DIM}, {_given(q, k, v)}")
    if window is not None and window < 1:
        raise ValueError(f"flash_attention expects a window of at least 1, the query itself, got {window}")
    if scale is not None and not scale > 0:
        raise ValueError(f"flash_attention expects a scale above 0, got {scale}")
    if cu_seqlens is not None:
        if q.shape[0] != 1 or q.shape[1] != k.shape[1]:
            raise ValueError(
                f"flash_attention expects packed documents (cu_seqlens) in one row, b = 1 and t = s, {_given(q, k, v)}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"flash_attention expects cu_seqlens as int32 [documents + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )


def _given(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def _gpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    from strata.kernels.ops.flash_attention import portable

    if q.numel() == 0 or k.numel() == 0:
        return _no_keys(q)
    q, k, v = (_with_contiguous_heads(x) for x in (q, k, v))
    arguments = (causal, window, scale, cu_seqlens, max_seqlen or q.shape[1])
    if architecture(q.device) == 90:
        from strata.kernels.ops.flash_attention import hopper

        if hopper.supports(q, k, v, causal, window, cu_seqlens):
            return hopper.forward(q, k, v, *arguments)
    return portable.forward(q, k, v, *arguments)


def _gpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from strata.kernels.ops.flash_attention import portable_backward

    if q.numel() == 0 or k.numel() == 0:
        return _contiguous_zeros(q), _contiguous_zeros(k), _contiguous_zeros(v)
    dout, q, k, v = (_with_contiguous_heads(x) for x in (dout, q, k, v))
    arguments = (causal, window, scale, cu_seqlens, max_seqlen or q.shape[1])
    if architecture(q.device) == 90:
        from strata.kernels.ops.flash_attention import hopper_backward

        if hopper_backward.supports(q, k, v, causal, window, cu_seqlens):
            return hopper_backward.backward(dout, q, k, v, out, lse, *arguments)
    return portable_backward.backward(dout, q, k, v, out, lse, *arguments)


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _no_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    return _contiguous_zeros(q), q.new_full((b, h, t), -math.inf, dtype=_lse_dtype(q))


def _contiguous_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _cpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return _no_keys(q)
    outs, lses = [], []
    for queries, keys in _documents(q, k, cu_seqlens):
        blind, is_causal, mask = _torch_mask_arguments(queries, keys, causal, window, q)
        heads_first = (x.transpose(1, 2) for x in (q[:, queries][:, blind:], k[:, keys], v[:, keys]))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        outs.append(F.pad(out.transpose(1, 2), (0, 0, 0, 0, blind, 0)) if blind else out.transpose(1, 2))
        lses.append(F.pad(lse, (blind, 0), value=-math.inf))
    return _joined(outs, 1), _joined(lses, 2)


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return _contiguous_zeros(q), _contiguous_zeros(k), _contiguous_zeros(v)
    dqs, dks, dvs = [], [], []
    for queries, keys in _documents(q, k, cu_seqlens):
        blind, is_causal, mask = _torch_mask_arguments(queries, keys, causal, window, q)
        seeing = slice(queries.start + blind, queries.stop)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (dout[:, seeing], q[:, seeing], k[:, keys], v[:, keys], out[:, seeing])),
            lse[:, :, seeing], 0.0, is_causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        dqs.append(F.pad(dq.transpose(1, 2), (0, 0, 0, 0, blind, 0)) if blind else dq.transpose(1, 2))
        dks.append(dk.transpose(1, 2))
        dvs.append(dv.transpose(1, 2))
    return _joined(dqs, 1), _joined(dks, 1), _joined(dvs, 1)


def _documents(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> list[tuple[slice, slice]]:
    """Ranges of q and k that attend to each other, one pair per non-empty document."""
    if cu_seqlens is None:
        return [(slice(0, q.shape[1]), slice(0, k.shape[1]))]
    bounds = cu_seqlens.tolist()
    documents = [slice(start, end) for start, end in pairwise(bounds) if end > start]
    return [(document, document) for document in documents]


def _torch_mask_arguments(
    queries: slice, keys: slice, causal: bool, window: int | None, q: Tensor
) -> tuple[int, bool, Tensor | None]:
    """(number of leading queries that attend to no key, `is_causal`, `attn_mask` for the others). torch aligns the first query
    with the first key, which equals our alignment only for t == s, and has no windows."""
    t, s = queries.stop - queries.start, keys.stop - keys.start
    if window is None and (t == s or not causal):
        return 0, causal, None
    blind = max(t - s - (0 if causal or window is None else window - 1), 0)
    sees = _sees(t, s, causal, window, q.device)[blind:]
    return blind, False, torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill(~sees, -math.inf)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


_library = torch.library.Library("strata", "FRAGMENT")
_library.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool causal, int? window, float scale, Tensor? cu_seqlens, SymInt? max_seqlen)"
    " -> (Tensor out, Tensor lse)"
)
_library.define(
    "flash_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, int? window,"
    " float scale, Tensor? cu_seqlens, SymInt? max_seqlen) -> (Tensor dq, Tensor dk, Tensor dv)"
)
_library.impl("flash_attention", on_tensor_device(_gpu_forward), "CUDA")
_library.impl("flash_attention", _cpu_forward, "CPU")
_library.impl("flash_attention_backward", on_tensor_device(_gpu_backward), "CUDA")
_library.impl("flash_attention_backward", _cpu_backward, "CPU")


@torch.library.register_fake("strata::flash_attention", lib=_library)
def _fake_forward(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    b, t, h, e = q.shape
    return q.new_empty(b, t, h, e), q.new_empty(b, h, t, dtype=_lse_dtype(q))


@torch.library.register_fake("strata::flash_attention_backward", lib=_library)
def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options, cu_seqlens, max_seqlen = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
    ctx.options, ctx.max_seqlen = options, max_seqlen


def _backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens = ctx.saved_tensors
    gradients = torch.ops.strata.flash_attention_backward.default(dout, *tensors, *ctx.options, cu_seqlens, ctx.max_seqlen)
    return *gradients, None, None, None, None, None


torch.library.register_autograd("strata::flash_attention", _backward, setup_context=_setup_context, lib=_library)
