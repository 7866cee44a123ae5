"""The last linear layer and the cross-entropy of what it says, without a logit for every token and word at once in memory.

Tokens are taken in chunks. For each, a matrix product makes the logits, one pass turns them in place into their gradient, and two
more products make of that the gradients of input and weight. So these are there at the end of the forward pass, three products in
all, and the backward pass has only to scale them by what comes in: in place, and not at all where that is one. Where each token
has an incoming gradient of its own (reduction "none") this cannot be, and the backward pass makes the logits a second time.

A target that is neither in the vocabulary nor `ignore_index` is an error on a CPU. A GPU would have to be waited for to know:
there its loss and gradient are NaN, and nothing is read out of bounds. The mean over no tokens is 0, with gradients of 0.
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
from strata.kernels.ops.on_device import on_its_device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("mean", "sum", "none")
LOGITS_BYTES = {"cuda": 1 << 29, "cpu": 1 << 24}  # of a chunk: a GPU wants few large products, a CPU what stays in its caches
LEAST_TOKENS = 128  # of a chunk: each reads the weight twice and its gradient once
MOST_ROUNDINGS = 8  # a weight gradient that is the sum of more chunks than this is summed in fp32


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


def in_chunks(
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
    """What `rows` does, and the gradients of input and weight, in `held_dtype`; empty where not asked for."""
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    stride = vocabulary + -vocabulary % 64  # products of rows that do not start at multiples of 16 bytes are far slower
    size = chunk_size(tokens, stride * x.element_size(), x.device)
    scale = scale.expand(tokens)
    dx = x.new_empty((tokens, width) if x_gradient else 0, dtype=held_dtype(x.dtype))
    total_dtype = held_dtype(x.dtype) if tokens <= size * MOST_ROUNDINGS else torch.promote_types(x.dtype, torch.float32)
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
    return dx, dweight.to(held_dtype(x.dtype))


def chunk_size(tokens: int, row_bytes: int, device: torch.device) -> int:
    """Chunks of one size, as far as that goes: a small last one would leave the matrix units half empty."""
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


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of gradients between forward and backward pass. While their factor, the loss scale over the count of tokens, is not known,
    a sum may leave the range of fp16 on either side."""
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
    """The loss; the gradients of input and weight as they are held, with the factor that they still lack; each token's lse."""
    losses, lse = (x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
    share = lse.new_ones(1)
    if reduction == "mean":
        share = share / (targets != ignore_index).sum().clamp(min=1)
    if x.dtype == torch.float16:  # a probability over the count of tokens is too small for it
        scale, lacking = torch.full_like(share, 256), share / 256
    else:
        scale, lacking = share, torch.ones_like(share)
    terms, now = Terms(ignore_index, label_smoothing, z_loss), reduction != "none"
    dx, dweight = in_chunks(rows, x, weight, targets, scale, losses, lse, terms, x_gradient and now, weight_gradient and now)
    return (losses.sum() * share[0] if now else losses), dx, dweight, lacking, lse


def backward_of_each(
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
    dx, dweight = in_chunks(rows, x, weight, targets, dlosses, None, lse, terms, x_gradient, weight_gradient)
    return dx.to(x.dtype), dweight.to(x.dtype)


library = torch.library.Library("strata", "FRAGMENT")
library.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, int ignore_index, float label_smoothing, float z_loss, "
    "str reduction, bool x_gradient, bool weight_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "linear_cross_entropy_backward(Tensor dlosses, Tensor x, Tensor weight, Tensor targets, Tensor lse, int ignore_index, "
    "float label_smoothing, float z_loss, bool x_gradient, bool weight_gradient) -> (Tensor, Tensor)"
)
for name, run in (("linear_cross_entropy", forward), ("linear_cross_entropy_backward", backward_of_each)):
    library.impl(name, partial(run, softmax_rows_cpu), "CPU")
    library.impl(name, on_its_device(partial(run, softmax_rows_triton)), "CUDA")


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
    dx = x.new_empty(x.shape if x_gradient and now else 0, dtype=held_dtype(x.dtype))
    dweight = weight.new_empty(weight.shape if weight_gradient and now else 0, dtype=held_dtype(x.dtype))
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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, targets, *ctx.terms, ctx.reduction, _, _ = inputs
    _, dx, dweight, lacking, lse = output
    ctx.mark_non_differentiable(dx, dweight, lacking, lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*((x, weight, targets, lse) if ctx.reduction == "none" else (dx, dweight, lacking)))
    ctx.dtype = x.dtype


def finished(held: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """In place, unless another backward pass may follow, or this one is being traced."""
    if type(held) is not Tensor:
        return (held * factor).to(dtype)
    if held.dtype != dtype or torch._C._autograd._get_current_graph_task_keep_graph():
        return torch.mul(held, factor, out=torch.empty_like(held, dtype=dtype))
    if held.device.type == "cuda":
        multiply_triton(held, factor)
    else:
        held.mul_(factor)
    return held


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
        dx, dweight, lacking = ctx.saved_tensors
        dx, dweight = (finished(held, lacking * dloss, ctx.dtype) for held in (dx, dweight))
    return dx if x_gradient else None, dweight if weight_gradient else None, *[None] * 7


torch.library.register_autograd("strata::linear_cross_entropy", _gradients, setup_context=_keep, lib=library)


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
    """The cross-entropy of `x @ weight.T`, x [tokens, width] and weight [vocabulary, width], with targets [tokens], as
    torch.nn.functional.cross_entropy has it, and z_loss * logsumexp² on top for each token. In fp32 (fp64 for fp64)."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or targets.shape != x.shape[:1]:
        raise ValueError(
            "linear_cross_entropy takes x [tokens, width], weight [vocabulary, width] and targets [tokens], "
            f"not {list(x.shape)}, {list(weight.shape)} and {list(targets.shape)}"
        )
    if not weight.shape[0]:
        raise ValueError("linear_cross_entropy needs a vocabulary: the weight has no rows")
    if targets.dtype != torch.int64:
        raise ValueError(f"linear_cross_entropy takes int64 targets, not {targets.dtype}")
    if x.dtype not in DTYPES and not (x.dtype == torch.float64 and x.device.type == "cpu"):
        raise ValueError(f"linear_cross_entropy takes float32, float16 and bfloat16 (float64 on a CPU), not {x.dtype}")
    if x.dtype != weight.dtype:
        raise ValueError(f"linear_cross_entropy takes x and weight of one dtype, not {x.dtype} and {weight.dtype}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"linear_cross_entropy has the reductions {', '.join(REDUCTIONS)}, not '{reduction}'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is a share, from 0 to 1, not {label_smoothing}")
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
