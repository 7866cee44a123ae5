"""Attention's backward pass in plain Triton: a kernel for the gradient of queries, and one for those of keys and values.

Both compute the probabilities again from the scores and each query's logsumexp, two products more than one kernel that adds to
the queries' gradient atomically would need; in return nothing is added in an order that changes from run to run, and nothing in
fp32 is in memory. With d_out the gradient of the output: dV = P' d_out, dS = P * (d_out V' - delta), dQ = dS K, dK = dS' Q, where
delta, the sum of d_out * out over a head, is computed by the first kernel, which has the tiles at hand, and read by the second.

A query that sees no key, or that a tile has beyond the last, gets an infinite logsumexp: its probabilities are zero, so that the
loops need masks for nothing but causality and windows.
"""

from functools import partial

import torch
from torch import Tensor

from strata.kernels.ops.flash_attention.portable import SHAPES_TO_TUNE, Arguments
from strata.kernels.ops.flash_attention.portable_dk_dv import dk_dv_triton, dk_dv_tunable, gradients_at_once, launch_dk_dv
from strata.kernels.ops.flash_attention.portable_dq import dq_triton, dq_tunable
from strata.kernels.tuning.tunable import Config, TuningCase


def backward(
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
    max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous; `max_seqlen` is of use to other paths only."""
    dq, delta = dq_triton(dout, q, k, v, out, lse, causal, window, scale, cu_seqlens)
    dk, dv = dk_dv_triton(dout, q, k, v, lse, delta, causal, window, scale, cu_seqlens)
    return dq, dk, dv


def tuning_cases(device: torch.device) -> list[TuningCase]:
    return [case for shape in SHAPES_TO_TUNE for case in _tuning_cases(device, *shape)]


def _tuning_cases(device: torch.device, dim: int, heads: int, causal: bool, window: int | None) -> list[TuningCase]:
    q, k, v, out, dout = (torch.randn(2, 8192, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(5))
    lse, delta = (torch.randn(2, heads, 8192, device=device) for _ in range(2))
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    shared = Arguments(q, k, causal, window, dim**-0.5, None)

    def run_dq(launch: Config) -> None:
        dq_triton(dout, q, k, v, out, lse, causal, window, dim**-0.5, None, launch)

    def run_dk_dv(with_dk: bool, with_dv: bool, launch: Config) -> None:
        launch_dk_dv(dout, q, k, v, lse, delta, dk, dv, None, shared, with_dk, with_dv, launch.arguments())

    return [
        TuningCase(dq_tunable, shared.key, run_dq),
        *(
            TuningCase(
                dk_dv_tunable,
                (*shared.key, int(with_dk), int(with_dv)),
                partial(run_dk_dv, with_dk, with_dv),
            )
            for with_dk, with_dv in gradients_at_once(shared.block_d)
        ),
    ]
