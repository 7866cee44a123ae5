"""Fused output projection and cross-entropy loss, without the logits of all tokens in memory.

Tokens are processed in chunks. For each chunk, a matrix product computes the logits, one pass replaces them in place by their
gradient, and two more products compute the gradients of input and weight. Both gradients therefore exist at the end of the
forward pass, after three products. The backward pass only scales them by the incoming gradient: in place, and not at all if it
is 1. With reduction "none" each token has its own incoming gradient, and the backward pass computes the logits again.

Ignored tokens are left out before the first product: in fine-tuning, which learns answers alone, they are most of the tokens.

On a CPU, a target that is neither in the vocabulary nor `ignore_index` is an error. On a GPU, an error would need a
synchronization: the token's loss and gradient are NaN, and nothing is read out of bounds. The mean over no tokens is 0, with
gradients of 0.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.linear_cross_entropy.rows import Rows, Terms, softmax_rows_cpu, softmax_rows_triton
from strata.kernels.ops.on_device import on_tensor_device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("mean", "sum", "none")
LOGITS_BYTES = {"cuda": 1 << 29, "cpu": 1 << 24}  # per chunk: large products on a GPU, cache-resident logits on a CPU
LEAST_TOKENS = 128  # per chunk: each chunk reads the weight twice and its gradient once
MOST_ROUNDINGS = 8  # with more chunks than this, the weight gradient is accumulated in fp32


def reference(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    logits = x @ weight.T
    losses = F.cross_entropy(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    counted = targets != ignore_index
    losses = losses + z_loss * (logits.logsumexp(1) ** 2).where(counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() / (counted.sum().clamp(min=1) if reduction == "mean" else 1)


@triton.jit
def multiply_unless_one_kernel(values_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            values = tl.load(values_ptr + places, mask=places < size)
            tl.store(values_ptr + places, values * factor, mask=places < size)


def multiply_triton(values: Tensor, factor: Tensor) -> None:
    programs = min(triton.cdiv(values.numel(), 4096), 1024)
    if programs:
        multiply_unless_one_kernel[(programs,)](values, factor, values.numel(), BLOCK=4096, num_warps=8)


def process_in_chunks(
    rows: Rows,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    terms: Terms,
    x_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Applies `rows` to each chunk of logits. Returns the gradients of input and weight in `accumulation_dtype`, or empty
    tensors."""
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    stride = vocabulary + -vocabulary % 64  # products are much slower if rows do not start at multiples of 16 bytes
    size = chunk_size(tokens, stride * x.element_size(), x.device)
    scale = scale.expand(tokens)
    dx = x.new_empty((tokens, width) if x_gradient else 0, dtype=accumulation_dtype(x.dtype))
    total_dtype = accumulation_dtype(x.dtype) if tokens <= size * MOST_ROUNDINGS else torch.promote_types(x.dtype, torch.float32)
    dweight = weight.new_empty((vocabulary, width) if weight_gradient else 0, dtype=total_dtype)
    buffer = x.new_empty(min(size, tokens), stride)
    for start in range(0, tokens, size):
        part = slice(start, min(start + size, tokens))
        logits = buffer[: part.stop - start, :vocabulary]
        torch.mm(x[part], weight.T, out=logits)
        part_losses = None if losses is None else losses[part]
        rows(logits, targets[part], scale[part], part_losses, lse[part], terms, x_gradient or weight_gradient)
        if x_gradient:
            add_product(dx[part], logits, weight, beta=0)
        if weight_gradient:
            add_product(dweight, logits.T, x[part], beta=0 if start == 0 else 1)
    if not tokens:
        dweight.zero_()
    return dx, dweight.to(accumulation_dtype(x.dtype))


def chunk_size(tokens: int, row_bytes: int, device: torch.device) -> int:
    """Tokens per chunk. Chunks have equal sizes where possible: a small last chunk would underuse the tensor cores."""
    affordable = max(LOGITS_BYTES[device.type] // row_bytes, LEAST_TOKENS)
    chunks = max(math.ceil(tokens / affordable), 1)
    even = math.ceil(tokens / chunks)
    return max(min(even + -even % 128, affordable), 1)


def add_product(total: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients between the forward and the backward pass: fp32 for fp16. Until the loss scale and the token count
    are applied, a sum may overflow or underflow in fp16."""
    return torch.float32 if dtype == torch.float16 else dtype


def forward(
    rows: Rows,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    x_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss, the unscaled gradients of input and weight, the factor still to apply to them, and each token's lse,
    which is 0 for ignored tokens."""
    places = counted_places(targets, ignore_index)
    if len(places) < len(targets):
        loss, dx, dweight, pending_scale, lse = forward(
            rows,
            x[places],
            weight,
            targets[places],
            ignore_index,
            label_smoothing,
            z_loss,
            reduction,
            x_gradient,
            weight_gradient,
        )
        loss = loss if reduction != "none" else spread(loss, places, len(targets))
        dx = spread(dx, places, len(targets)) if x_gradient and reduction != "none" else dx
        return loss, dx, dweight, pending_scale, spread(lse, places, len(targets))
    losses, lse = (x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
    share = lse.new_ones(1)
    if reduction == "mean":
        share = share / (targets != ignore_index).sum().clamp(min=1)
    if x.dtype == torch.float16:  # a probability divided by the token count underflows in fp16
        scale, pending_scale = torch.full_like(share, 256), share / 256
    else:
        scale, pending_scale = share, torch.ones_like(share)
    terms, now = Terms(ignore_index, label_smoothing, z_loss), reduction != "none"
    dx, dweight = process_in_chunks(
        rows, x, weight, targets, scale, losses, lse, terms, x_gradient and now, weight_gradient and now
    )
    return (losses.sum() * share[0] if now else losses), dx, dweight, pending_scale, lse


def backward_per_token(
    rows: Rows,
    dlosses: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    x_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    terms = Terms(ignore_index, label_smoothing, z_loss)
    places = counted_places(targets, ignore_index)
    tokens = x, targets, dlosses, lse
    x_n, targets_n, dlosses_n, lse_n = tokens if len(places) == len(targets) else (tensor[places] for tensor in tokens)
    dx, dweight = process_in_chunks(rows, x_n, weight, targets_n, dlosses_n, None, lse_n, terms, x_gradient, weight_gradient)
    if x_gradient and len(places) < len(targets):
        dx = spread(dx, places, len(targets))
    return dx.to(x.dtype), dweight.to(x.dtype)


def counted_places(targets: Tensor, ignore_index: int) -> Tensor:
    """Indices of the tokens that count. On a GPU this waits for the targets: the products that follow take far longer than their
    launches, so the wait costs nothing."""
    return (targets != ignore_index).nonzero().flatten()


def spread(values: Tensor, places: Tensor, tokens: int) -> Tensor:
    """Values of the tokens that count among those of all tokens, whose values are 0."""
    return values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, places, values)


library = torch.library.Library("strata", "FRAGMENT")
library.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, int ignore_index, float label_smoothing, float z_loss, "
    "str reduction, bool x_gradient, bool weight_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "linear_cross_entropy_backward(Tensor dlosses, Tensor x, Tensor weight, Tensor targets, Tensor lse, int ignore_index, "
    "float label_smoothing, float z_loss, bool x_gradient, bool weight_gradient) -> (Tensor, Tensor)"
)
for name, run in (("linear_cross_entropy", forward), ("linear_cross_entropy_backward", backward_per_token)):
    library.impl(name, partial(run, softmax_rows_cpu), "CPU")
    library.impl(name, on_tensor_device(partial(run, softmax_rows_triton)), "CUDA")


@torch.library.register_fake("strata::linear_cross_entropy", lib=library)
def _(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    x_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    lse = x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    now = reduction != "none"
    dx = x.new_empty(x.shape if x_gradient and now else 0, dtype=accumulation_dtype(x.dtype))
    dweight = weight.new_empty(weight.shape if weight_gradient and now else 0, dtype=accumulation_dtype(x.dtype))
    return lse.new_empty(() if now else x.shape[0]), dx, dweight, lse.new_empty(1), lse


@torch.library.register_fake("strata::linear_cross_entropy_backward", lib=library)
def _(
    dlosses: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    x_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if x_gradient else 0), weight.new_empty(weight.shape if weight_gradient else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, targets, *ctx.terms, ctx.reduction, _, _ = inputs
    _, dx, dweight, pending_scale, lse = output
    ctx.mark_non_differentiable(dx, dweight, pending_scale, lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*((x, weight, targets, lse) if ctx.reduction == "none" else (dx, dweight, pending_scale)))
    ctx.dtype = x.dtype


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient times its factor. Scales in place unless another backward pass may follow or this one is traced."""
    if type(gradient) is not Tensor:
        return (gradient * factor).to(dtype)
    if gradient.dtype != dtype or torch._C._autograd._get_current_graph_task_keep_graph():
        return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
    if gradient.device.type == "cuda":
        multiply_triton(gradient, factor)
    else:
        gradient.mul_(factor)
    return gradient


def _gradients(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise NotImplementedError("linear_cross_entropy has no second derivative (create_graph=True)")
    x_gradient, weight_gradient = ctx.needs_input_grad[:2]
    if dloss is None:
        dx = dweight = None
    elif ctx.reduction == "none":
        dx, dweight = torch.ops.strata.linear_cross_entropy_backward(
            dloss.contiguous(), *ctx.saved_tensors, *ctx.terms, x_gradient, weight_gradient
        )
    else:
        dx, dweight, pending_scale = ctx.saved_tensors
        dx, dweight = (scaled(gradient, pending_scale * dloss, ctx.dtype) for gradient in (dx, dweight))
    return dx if x_gradient else None, dweight if weight_gradient else None, *[None] * 7


torch.library.register_autograd("strata::linear_cross_entropy", _gradients, setup_context=_setup_context, lib=library)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of `x @ weight.T` and targets [tokens], for x [tokens, width] and weight [vocabulary, width], as in
    torch.nn.functional.cross_entropy, plus z_loss * logsumexp² per token. Computed in fp32 (fp64 for fp64)."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or targets.shape != x.shape[:1]:
        raise ValueError(
            "linear_cross_entropy expects x [tokens, width], weight [vocabulary, width] and targets [tokens], "
            f"got {list(x.shape)}, {list(weight.shape)} and {list(targets.shape)}"
        )
    if not weight.shape[0]:
        raise ValueError("linear_cross_entropy needs a vocabulary: the weight has no rows")
    if targets.dtype != torch.int64:
        raise ValueError(f"linear_cross_entropy expects int64 targets, got {targets.dtype}")
    if x.dtype not in DTYPES and not (x.dtype == torch.float64 and x.device.type == "cpu"):
        raise ValueError(f"linear_cross_entropy expects float32, float16 or bfloat16 (float64 on a CPU), got {x.dtype}")
    if x.dtype != weight.dtype:
        raise ValueError(f"linear_cross_entropy expects x and weight of one dtype, got {x.dtype} and {weight.dtype}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"linear_cross_entropy has the reductions {', '.join(REDUCTIONS)}, got '{reduction}'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    trains = torch.is_grad_enabled()
    loss: Tensor = torch.ops.strata.linear_cross_entropy(
        x,
        weight,
        targets.contiguous(),
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
        trains and x.requires_grad,
        trains and weight.requires_grad,
    )[0]
    return loss
