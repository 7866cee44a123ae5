"""Cross entropy between the next-token distributions of a teacher and a student, from the inputs and matrices of both output
layers.

The cross entropy is the forward KL divergence plus the teacher's entropy, which the student does not change: both have the same
gradients. Logits are in fp32 (fp64 for fp64 input), and those of all tokens are never in memory at once. The gradients are
computed with the losses, chunk by chunk, since the logits of both models would otherwise be computed twice.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.training.chunked_logits import chunks, logit_dtype, logits_of
from strata.training.targets import IGNORED


class Output(NamedTuple):
    """Input [tokens, width] and matrix [vocabulary, width] of an output layer, and the bound of its logits by tanh."""

    x_nd: Tensor
    weight_vd: Tensor
    softcap: float | None = None

    def logits(self, places_m: Tensor) -> Tensor:
        return logits_of(self.x_nd[places_m], self.weight_vd, self.softcap)


class Comparison(NamedTuple):
    """Sums over counted tokens: cross entropy of the student with the text, KL divergence of the student from the teacher, tokens
    whose most probable token is the same in both, and all tokens."""

    cross_entropy: Tensor
    kl: Tensor
    agreeing: Tensor
    tokens: Tensor


def distillation_loss(student: Output, teacher: Output, targets_n: Tensor) -> Tensor:
    """Sum of the cross entropies of counted tokens, in nats. Gradients flow to the student only."""
    assert teacher.x_nd.shape[0] == student.x_nd.shape[0] == len(targets_n), "one token each"
    assert len(teacher.weight_vd) == len(student.weight_vd), "the same vocabulary"
    places_m = (targets_n != IGNORED).nonzero().squeeze(1)
    total: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        student.x_nd, student.weight_vd, student.softcap, teacher, places_m
    )
    return total


@torch.no_grad()
def compare(student: Output, teacher: Output, targets_n: Tensor) -> Comparison:
    places_m = (targets_n != IGNORED).nonzero().squeeze(1)
    sums = student.x_nd.new_zeros(4, dtype=torch.float64)
    for part in chunks(len(places_m), student.weight_vd):
        at_m = places_m[part]
        logits_mv, teacher_mv = student.logits(at_m), teacher.logits(at_m)
        logq_mv, logp_mv = logits_mv.log_softmax(1), teacher_mv.log_softmax(1)
        sums[0] -= logq_mv.gather(1, targets_n[at_m].unsqueeze(1)).double().sum()
        sums[1] += (logp_mv.exp() * (logp_mv - logq_mv)).double().sum()
        sums[2] += (logits_mv.argmax(1) == teacher_mv.argmax(1)).sum()
    sums[3] = len(places_m)
    return Comparison(*sums.unbind())


class _CrossEntropy(torch.autograd.Function):
    """Sum over the tokens at some places [m]."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weight_vd: Tensor, softcap: float | None, teacher: Output, places_m: Tensor) -> Tensor:
        student, dtype = Output(x_nd, weight_vd, softcap), logit_dtype(x_nd)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx_nd = torch.zeros_like(x_nd) if needs_x else None
        # A sum of many chunks loses the smallest in bf16.
        dweight_vd = torch.zeros_like(weight_vd, dtype=dtype) if needs_weight else None
        total = x_nd.new_zeros((), dtype=torch.float64)
        for part in chunks(len(places_m), weight_vd):
            at_m = places_m[part]
            logits_mv = student.logits(at_m)
            target_mv = teacher.logits(at_m).softmax(1).to(dtype)
            total += (logits_mv.logsumexp(1) - (target_mv * logits_mv).sum(1)).double().sum()
            slope_mv = logits_mv.softmax(1).sub_(target_mv)
            if softcap is not None:
                slope_mv *= 1 - (logits_mv / softcap) ** 2
            slope_mv = slope_mv.to(x_nd.dtype)
            if dx_nd is not None:
                dx_nd[at_m] = slope_mv @ weight_vd
            if dweight_vd is not None:
                dweight_vd += slope_mv.T @ x_nd[at_m]
        ctx.save_for_backward(dx_nd, None if dweight_vd is None else dweight_vd.to(weight_vd.dtype))
        return total.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx_nd, dweight_vd = ctx.saved_tensors
        dx_nd, dweight_vd = (None if each is None else each * gradient.to(each.dtype) for each in (dx_nd, dweight_vd))
        return dx_nd, dweight_vd, None, None, None
