"""Loss, log-sum-exp and in-place gradient of each row of a chunk of logits.

The Triton kernel reads a row twice. The rows in flight are slightly larger than the L2 cache, so the second pass goes backwards:
the end of the row is still cached, while the start is about to be evicted.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.tuning.tunable import Config, Key, Tunable, TuningCase, bucket, config

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Terms:
    """Settings of the loss."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


class Rows(Protocol):
    """Fills `losses` and `lse` [rows]; without `losses`, `lse` is an input. With `gradients`, overwrites the logits
    [rows, vocabulary] with the gradient of the losses, times `scale` [rows]."""

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        scale: Tensor,
        losses: Tensor | None,
        lse: Tensor,
        terms: Terms,
        gradients: bool,
    ) -> None: ...


@triton.jit
def softmax_rows_kernel(
    logits_ptr,
    targets_ptr,
    scale_ptr,
    losses_ptr,
    lse_ptr,
    row_stride,
    scale_stride,
    vocabulary,
    ignore_index,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    PADDED: tl.constexpr,
    LSE_KNOWN: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Loads and stores are bounded by the row stride, not by the vocabulary: the stride is a multiple of 16, which allows 16-byte
    # accesses. The padding is overwritten with finite values, because a product may multiply it by zero.
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, BLOCK)
    if target == ignore_index:
        if not LSE_KNOWN:
            tl.store(losses_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if GRADIENTS:
            for start in range(0, vocabulary, BLOCK):
                tl.store(logits_ptr + start + columns, 0.0, mask=start + columns < row_stride)
    else:
        if LSE_KNOWN:
            lse = tl.load(lse_ptr + row)
        else:
            valid = (target >= 0) & (target < vocabulary)
            chosen = tl.load(logits_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
            largest = float("-inf")
            exponentials = 0.0
            logit_sum = 0.0
            for start in range(0, vocabulary, BLOCK):
                inside = start + columns < vocabulary
                mask = start + columns < row_stride
                logits = tl.load(logits_ptr + start + columns, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
                if SMOOTHING > 0:
                    logit_sum += tl.sum(tl.where(inside, logits, 0.0))
                logits = tl.where(inside, logits, float("-inf"))
                before = largest
                largest = tl.maximum(before, tl.max(logits))
                exponentials *= tl.exp2((before - largest) * LOG2_E)
                exponentials += tl.sum(tl.exp2((logits - largest) * LOG2_E))
            lse = tl.where(valid, largest + tl.log(exponentials), float("nan"))
            loss = lse - (1 - SMOOTHING) * chosen - SMOOTHING * (logit_sum / vocabulary) + Z_LOSS * lse * lse
            tl.store(losses_ptr + row, loss)
            tl.store(lse_ptr + row, lse)
        if GRADIENTS:
            scale = tl.load(scale_ptr + row * scale_stride)
            steepness = scale * (1 + 2 * Z_LOSS * lse)
            last = (vocabulary - 1) // BLOCK * BLOCK
            for done in range(0, vocabulary, BLOCK):
                start = last - done
                mask = start + columns < row_stride
                logits = tl.load(logits_ptr + start + columns, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                if PADDED:
                    logits = tl.where(start + columns < vocabulary, logits, float("-inf"))
                gradient = tl.exp2((logits - lse) * LOG2_E) * steepness - scale * SMOOTHING / vocabulary
                gradient = tl.where(start + columns == target, gradient - scale * (1 - SMOOTHING), gradient)
                tl.store(logits_ptr + start + columns, gradient, mask=mask, eviction_policy="evict_first")


def _candidates(arch: int, key: Key) -> list[Config]:
    vocabulary = int(key[0])
    long = [(16384, 16), (8192, 8), (16384, 32), (8192, 16)]
    short = [(4096, 8), (8192, 8), (8192, 16), (2048, 4)]
    sizes = long if vocabulary > 65536 else short
    return [config(warps, BLOCK=size) for size, warps in sizes if size <= vocabulary] or [config(4, BLOCK=vocabulary)]


softmax_rows = Tunable("linear_cross_entropy_softmax_rows", _candidates)


def softmax_rows_triton(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    terms: Terms,
    gradients: bool,
    chosen: dict[str, int] | None = None,
) -> None:
    softmax_rows_kernel[(logits.shape[0],)](
        logits,
        targets,
        scale,
        lse if losses is None else losses,
        lse,
        logits.stride(0),
        scale.stride(0),
        logits.shape[1],
        terms.ignore_index,
        SMOOTHING=terms.label_smoothing,
        Z_LOSS=terms.z_loss,
        PADDED=logits.stride(0) > logits.shape[1],
        LSE_KNOWN=losses is None,
        GRADIENTS=gradients,
        **(chosen or softmax_rows.arguments((bucket(logits.shape[1]), logits.element_size()), logits.device)),
    )


def softmax_rows_cpu(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    terms: Terms,
    gradients: bool,
) -> None:
    ignored = targets == terms.ignore_index
    if bool(((targets < 0) | (targets >= logits.shape[1])).logical_and_(~ignored).any()):
        wrong = targets[((targets < 0) | (targets >= logits.shape[1])) & ~ignored][0].item()
        raise ValueError(
            f"linear_cross_entropy: target {wrong} is neither a row of the weight (0 to {logits.shape[1] - 1}) "
            f"nor the ignore_index {terms.ignore_index}"
        )
    chosen = targets.masked_fill(ignored, 0).unsqueeze(1)
    scores = logits.to(lse.dtype)  # the same tensor, unless the logits are fp16 or bf16
    if losses is None:
        scores.sub_(lse.unsqueeze(1)).exp_()
    else:
        largest = scores.amax(1)
        losses.copy_(scores.gather(1, chosen).squeeze(1)).mul_(terms.label_smoothing - 1)
        if terms.label_smoothing:
            losses.sub_(scores.mean(1), alpha=terms.label_smoothing)
        torch.softmax(scores, 1, out=scores)
        lse.copy_(largest - scores.amax(1).log())  # the largest probability is at least 1 / vocabulary, so the log is finite
        losses.add_(lse).add_(lse**2, alpha=terms.z_loss).masked_fill_(ignored, 0)
    if gradients:
        scale = scale.masked_fill(ignored, 0)
        scores.mul_((scale * (1 + 2 * terms.z_loss * lse)).unsqueeze(1))
        if terms.label_smoothing:
            scores.sub_((scale * (terms.label_smoothing / scores.shape[1])).unsqueeze(1))
        scores.scatter_add_(1, chosen, (scale * (terms.label_smoothing - 1)).unsqueeze(1))
        if scores is not logits:
            logits.copy_(scores)


def tuning_cases(device: torch.device) -> list[TuningCase]:
    return [_tuning_case(vocabulary, device) for vocabulary in (32768, 65536, 131072, 262144)]


def _tuning_case(vocabulary: int, device: torch.device) -> TuningCase:
    logits = torch.randn(1024, vocabulary, dtype=torch.bfloat16, device=device)
    targets = torch.randint(vocabulary, (1024,), device=device)
    losses, lse = torch.empty(2, 1024, device=device)
    scale = torch.ones(1, device=device).expand(1024)
    terms = Terms(ignore_index=-100, label_smoothing=0.0, z_loss=0.0)

    def run(chosen: Config) -> None:
        softmax_rows_triton(logits, targets, scale, losses, lse, terms, True, chosen.arguments())

    return TuningCase(softmax_rows, (bucket(vocabulary), 2), run)
