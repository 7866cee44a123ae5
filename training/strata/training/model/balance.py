"""The load-balancing loss of a mixture of experts, as a gradient that is added where the routers compute.

Left alone, a router sends every token to the few experts that were a little better at first. The loss is DeepSeek-V3's
sequence-wise one: a mean over sequences, it adds up over micro-batches and data-parallel workers, so training is the same
in every layout. A batch-wise one is a product of two batch means, and changes with the cut.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import ModelSection

ROUTERS = (".mlp.gate", ".mlp.router.gate")  # the model's own, and what DeepSpeed's AutoEP puts in its place


def sequence_balance(logits_bte: Tensor, top_k: int) -> Tensor:
    """For each sequence, experts x sum over them of the share of assignments times the mean probability, averaged over
    sequences: 1 when even, experts / top_k when all tokens choose the same. Shares are counts: the gradient comes through
    the probabilities."""
    scores_bte = F.softmax(logits_bte.float(), dim=-1)
    chosen_btk = scores_bte.topk(top_k, dim=-1).indices
    share_be = torch.zeros_like(scores_bte).scatter(-1, chosen_btk, 1 / top_k).mean(dim=1)
    return logits_bte.shape[-1] * (share_be * scores_bte.mean(dim=1)).sum(-1).mean()


def attach(model: nn.Module, section: ModelSection, scale: float) -> None:
    """Call it once on the model that runs: AutoEP's routers are new modules, on which earlier hooks are lost.

    `scale` is what the engine multiplies the loss of one micro-batch by before its backward pass (1 / accumulation), which a
    gradient that is added inside the model does not see. Whole sequences must reach the routers.
    """
    moe = section.moe
    if moe is None or moe.balance == 0:
        return
    weight = scale * moe.balance / section.layers

    def add_balance(router: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor | None:
        if not logits.requires_grad:
            return None  # evaluation
        logits_bte = logits if logits.dim() == 3 else logits.view(-1, section.context, moe.experts)  # AutoEP's are flat
        balanced: Tensor = AddAuxiliary.apply(logits, sequence_balance(logits_bte, moe.top_k), weight)  # type: ignore[no-untyped-call]
        return balanced

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f".{name}".endswith(ROUTERS):
            module.register_forward_hook(add_balance)


class AddAuxiliary(torch.autograd.Function):
    """The identity on `x`, whose backward pass also starts one at `auxiliary`, as if weight x auxiliary were added to the loss.

    So the loss that is reported stays the cross entropy, and nothing has to be carried through pipeline stages.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.new_tensor(ctx.weight, dtype=torch.float32), None
