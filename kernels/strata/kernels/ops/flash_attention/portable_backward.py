"""Flash attention backward in plain Triton: one kernel for dQ, one for dK and dV.

Both kernels recompute the probabilities from the scores and each query's log-sum-exp. This takes two more products than a single
kernel with atomic additions to dQ. In return, the result is deterministic and no fp32 buffer is needed. With d_out the gradient
of the output: dV = P' d_out, dS = P * (d_out V' - delta), dQ = dS K, dK = dS' Q. delta, the sum of d_out * out over a head, is
computed by the dQ kernel, which already holds the tiles, and read by the other.

A query that attends to no key, or that is padding at the end of a tile, gets an infinite log-sum-exp and so zero
probabilities. The loops need masks only for causality and windows.
"""

from functools import partial

import torch
from torch import Tensor

from strata.kernels.ops.flash_attention.portable import SHAPES_TO_TUNE, Arguments
from strata.kernels.ops.flash_attention.portable_dk_dv import dk_dv_triton, dk_dv_tunable, gradients_per_launch, launch_dk_dv
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
    """(dq, dk, dv), contiguous; `max_seqlen` is used only by other implementations."""
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
            for with_dk, with_dv in gradients_per_launch(shared.block_d)
        ),
    ]
