"""Reference point z of KTO: the KL divergence of the policy from the reference model, estimated from mismatched answers.

A mismatched answer is an answer to another prompt (`mismatched.py`). z is the mean log-ratio of those that belong to the whole
global batch, at least 0, and a constant in the loss. It is computed by a forward pass before the step's first micro-batch, so it
is the same number whatever the micro-batches and the layout, for as many forward passes as TRL has. TRL computes one z for each
micro-batch over all ranks, so there the loss depends on the size of micro-batches and on the number of ranks.

    sums = kl_sums(logp_n, reference_n)   # of this rank's mismatched answers
    ...                                   # added over ranks
    kl = kl_estimate(sums)                # one number, the argument of the loss
"""

import torch
from torch import Tensor


@torch.no_grad()
def kl_sums(logp_n: Tensor, reference_n: Tensor) -> Tensor:
    """Sum and number of the log-ratios of mismatched answers, in fp64."""
    if logp_n.shape != reference_n.shape:
        raise ValueError(
            f"logp_n and reference_n must have the same documents, got {list(logp_n.shape)}, {list(reference_n.shape)}"
        )
    ratio_n = logp_n.double() - reference_n.double()
    return torch.stack([ratio_n.sum(), ratio_n.new_tensor(ratio_n.numel())])


def kl_estimate(sums: Tensor) -> Tensor:
    """Mean log-ratio, at least 0 as a divergence is."""
    mean: Tensor = sums[0] / sums[1]
    return mean.clamp(min=0).float()
