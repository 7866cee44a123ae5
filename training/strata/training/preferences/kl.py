"""Reference point z of KTO: the KL divergence of the policy from the reference model, estimated from mismatched pairs.

A mismatched pair is a prompt with an answer to another prompt. The KTO paper and TRL pair the examples of one micro-batch and
estimate z there, so the loss depends on the size of micro-batches and on the number of ranks. Here the pairs are those of the
whole global batch, in its order (`mismatched`), and every rank uses the estimate from all of them:

    sums = kl_sums(logp_n, reference_n)   # of the mismatched pairs in a micro-batch, computed without gradient
    ...                                   # added over micro-batches and ranks
    kl = kl_estimate(sums)                # one number, the argument of the loss
"""

import torch
from torch import Tensor


def mismatched(documents: int) -> list[int]:
    """For each document of a global batch, the index of the document whose answer is paired with its prompt.

    Documents 2i and 2i + 1 have the same prompt, so the answer is that of the pair before.
    """
    if documents % 2 or documents < 4:
        raise ValueError(f"KTO's reference point needs at least two pairs in a global batch, got {documents} documents")
    return [(document - 2) % documents for document in range(documents)]


@torch.no_grad()
def kl_sums(logp_n: Tensor, reference_n: Tensor) -> Tensor:
    """Sum and number of the log-ratios of mismatched pairs, in fp64."""
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
