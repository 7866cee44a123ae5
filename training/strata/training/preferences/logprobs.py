"""Log-probabilities of documents, from the input and the matrix of the output layer.

The logits of all tokens are never in memory at once: tokens are processed in chunks, whose logits the backward pass computes
again. Tokens that do not count, such as those of a prompt, are not processed at all. Logits are in fp32 (fp64 for fp64 input).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata.training.chunked_logits import chunks, logit_dtype, logits_of
from strata.training.targets import IGNORED


def document_logprobs(
    x_nd: Tensor,
    weight_vd: Tensor,
    targets_n: Tensor,
    document_n: Tensor,
    documents: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the log-probabilities of each document's counted targets, and their number.

    `document_n` is the index of each token's document, in any order. Targets of `IGNORED` do not count. With `softcap`, logits
    are softcap * tanh(logits / softcap). If a document's tokens are on several ranks, both results are partial: `summed_over`
    adds them.
    """
    if x_nd.dim() != 2 or weight_vd.dim() != 2 or x_nd.shape[1] != weight_vd.shape[1]:
        raise ValueError(
            f"expected x [tokens, width] and weight [vocabulary, width], got {list(x_nd.shape)}, {list(weight_vd.shape)}"
        )
    if targets_n.shape != x_nd.shape[:1] or document_n.shape != x_nd.shape[:1]:
        shapes = f"{list(targets_n.shape)}, {list(document_n.shape)}"
        raise ValueError(f"expected a target and a document for each of {len(x_nd)} tokens, got {shapes}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    counted = (targets_n != IGNORED).nonzero().squeeze(1)
    # By document, so that each one's sum has a fixed order. An indexed addition on a GPU would not.
    counted = counted[document_n[counted].argsort(stable=True)]
    lengths = document_n[counted].bincount(minlength=documents)
    if len(lengths) > documents:
        raise ValueError(f"document_n has the index {len(lengths) - 1}, but there are {documents} documents")
    logp_n: Tensor = _TokenLogprobs.apply(x_nd, weight_vd, counted, targets_n[counted], softcap)  # type: ignore[no-untyped-call]
    # In fp64: losses subtract sums that are nearly equal, and one of a thousand numbers in sequence loses two digits of fp32.
    if documents == 0:
        return logp_n[:0], lengths  # which `segment_reduce` refuses
    sums = torch.segment_reduce(logp_n.double(), "sum", lengths=lengths, initial=0)
    return sums.to(logp_n.dtype), lengths


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of the targets [m] of some tokens, given by their places [m] in x."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weight_vd: Tensor, places_m: Tensor, targets_m: Tensor, softcap: float | None) -> Tensor:
        logp_m = x_nd.new_empty(len(places_m), dtype=logit_dtype(x_nd))
        for part in chunks(len(places_m), weight_vd):
            logits = logits_of(x_nd[places_m[part]], weight_vd, softcap)
            at_target = logits.gather(1, targets_m[part].unsqueeze(1)).squeeze(1)
            logp_m[part] = at_target - logits.logsumexp(1)
        ctx.save_for_backward(x_nd, weight_vd, places_m, targets_m)
        ctx.softcap = softcap
        return logp_m

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_m: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_nd, weight_vd, places_m, targets_m = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx_nd = torch.zeros_like(x_nd) if needs_x else None
        # A sum of many chunks loses the smallest in bf16.
        dweight_vd = torch.zeros_like(weight_vd, dtype=logit_dtype(weight_vd)) if needs_weight else None
        for part in chunks(len(places_m), weight_vd):
            x_md = x_nd[places_m[part]]
            logits = logits_of(x_md, weight_vd, ctx.softcap)
            slope = logits.softmax(1).neg_()
            slope.scatter_add_(1, targets_m[part].unsqueeze(1), slope.new_ones(len(slope), 1))
            if ctx.softcap is not None:
                slope *= 1 - (logits / ctx.softcap) ** 2
            slope = (slope * gradient_m[part].unsqueeze(1)).to(x_nd.dtype)
            if dx_nd is not None:
                dx_nd[places_m[part]] = slope @ weight_vd
            if dweight_vd is not None:
                dweight_vd += slope.T @ x_md
        return dx_nd, None if dweight_vd is None else dweight_vd.to(weight_vd.dtype), None, None, None


def summed_over(values: Tensor, group: Any) -> Tensor:
    """Sum of `values` over the ranks of a process group, on every rank, with gradients.

    The gradient is that of the sum of all ranks' losses: the backward pass sums the ranks' gradients. So if each of `size` ranks
    computes the same loss from the sum, the gradients are `size` times those of one loss, and averaging over the ranks (or
    `gradient_scale`, which divides by the sequence-parallel size) corrects that as for losses that differ between ranks.
    """
    summed: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return summed


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in both directions. torch.distributed.nn.functional has one that is deprecated."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_reduced(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, ctx.group), None


def _all_reduced(values: Tensor, group: Any) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
