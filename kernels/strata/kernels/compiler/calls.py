"""Calls of each operation on meta tensors of realistic sizes, whose kernels `strata kernels stages` compiles."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strata.kernels.tuning.tunable import architecture

Call = Callable[[], Any]
TOKENS, HIDDEN, FFN, VOCABULARY = 8192, 4096, 14336, 131072
HEADS, KV_HEADS, DIM = 32, 8, 128
SEQS, CONTEXT, BLOCK = 32, 8192, 16
SIDE = 8192  # of the matrices of `matmul`


def calls(op: str) -> dict[str, Call]:
    """Calls by a label that distinguishes variants of one kernel; the default variant has no label."""
    return CALLS[op]()


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16, learned: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=learned)


def _with_backward(run: Callable[[], Tensor | tuple[Tensor, ...]]) -> Call:
    def both() -> None:
        outputs = run()
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])

    return both


def _rms_norm() -> dict[str, Call]:
    from strata.kernels.ops.rms_norm.rms_norm import add_rms_norm, rms_norm

    x, residual, weight = _empty(TOKENS, HIDDEN, learned=True), _empty(TOKENS, HIDDEN, learned=True), _empty(HIDDEN, learned=True)
    return {
        "": _with_backward(lambda: rms_norm(x, weight, 1e-6)),
        "with residual": _with_backward(lambda: add_rms_norm(x, residual, weight, 1e-6)),
    }


def _rope() -> dict[str, Call]:
    from strata.kernels.ops.rope import rope, rope_

    q, k = (_empty(1, TOKENS, heads, DIM, learned=True) for heads in (HEADS, KV_HEADS))
    cos, sin = (_empty(TOKENS, DIM // 2, dtype=torch.float32) for _ in range(2))
    positions = _empty(TOKENS, dtype=torch.int64)
    return {
        "": lambda: rope(q, k, cos, sin),
        "in place": lambda: rope_(q[0].detach(), k[0].detach(), cos, sin, positions=positions),
    }


def _swiglu() -> dict[str, Call]:
    from strata.kernels.ops.swiglu import swiglu

    packed = _empty(TOKENS, 2 * FFN, learned=True)
    return {"": _with_backward(lambda: swiglu(packed[:, :FFN], packed[:, FFN:]))}


def _linear_cross_entropy() -> dict[str, Call]:
    from strata.kernels.ops.linear_cross_entropy.linear_cross_entropy import linear_cross_entropy

    # The matrix products run for real. The kernels see only rows of logits, whose length does not depend on the width.
    x, weight = (torch.zeros(rows, 16, dtype=torch.bfloat16, requires_grad=True) for rows in (16, VOCABULARY))
    return {"": _with_backward(lambda: linear_cross_entropy(x, weight, torch.zeros(16, dtype=torch.int64)))}


def _flash_attention() -> dict[str, Call]:
    from strata.kernels.ops.flash_attention.flash_attention import flash_attention

    q, k, v = (_empty(1, TOKENS, heads, DIM, learned=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return {"": _with_backward(lambda: flash_attention(q, k, v))}


def _paged_attention() -> dict[str, Call]:
    from strata.kernels.ops.paged_attention.paged_attention import paged_attention

    blocks = CONTEXT // BLOCK
    cache, tables = _empty(SEQS * blocks, BLOCK, KV_HEADS, DIM), _empty(SEQS, blocks, dtype=torch.int32)
    lengths, starts = _empty(SEQS, dtype=torch.int32), _empty(SEQS + 1, dtype=torch.int32)

    def batch(tokens: int, longest: int) -> Call:
        q = _empty(tokens, HEADS, DIM)
        sequences = (cache, cache, tables, lengths, starts)
        return lambda: paged_attention(q, *sequences, max_query_len=longest, max_context_len=CONTEXT)

    return {"": batch(SEQS, 1), "prefill": batch(TOKENS, 2048)}


def _kv_cache_write() -> dict[str, Call]:
    from strata.kernels.ops.kv_cache_write import kv_cache_write

    key, cache = _empty(SEQS, KV_HEADS, DIM), _empty(SEQS, BLOCK, KV_HEADS, DIM)
    return {"": lambda: kv_cache_write(key, key, cache, cache, _empty(SEQS, dtype=torch.int64))}


def _w4a16_linear() -> dict[str, Call]:
    from strata.kernels.ops.w4a16_linear.w4a16_linear import w4a16_linear

    chunks = HIDDEN // 128
    packed, scales = _empty(chunks, FFN, 32, dtype=torch.int16), _empty(chunks, FFN)
    zeros = _empty(chunks, FFN, dtype=torch.uint8)

    def tokens(count: int, zeros: Tensor | None = None) -> Call:
        return lambda: w4a16_linear(_empty(count, HIDDEN), packed, scales, zeros)

    return {"": tokens(1), "zero points": tokens(16, zeros), "prompt": tokens(TOKENS)}


def _sample() -> dict[str, Call]:
    from strata.kernels.ops.sample.sample import Penalties, sample

    logits, numbers = _empty(SEQS, VOCABULARY, dtype=torch.float32), _empty(SEQS, dtype=torch.int64)
    share, most = _empty(SEQS, dtype=torch.float32), _empty(SEQS, dtype=torch.int32)
    tokens = _empty(SEQS, CONTEXT, dtype=torch.int32)
    penalties = Penalties(tokens, tokens, share, share, share)
    return {"": lambda: sample(logits, numbers, numbers, share, most, share, share, penalties)}


def _matmul() -> dict[str, Call]:
    """Every Triton and Gluon step that the architecture has the instructions for."""
    from strata.kernels.ladder.steps import STEPS

    a, b, out = (_empty(SIDE, SIDE) for _ in range(3))
    arch = architecture(a.device)
    steps = [step for step in STEPS if step.language != "CUDA C++" and step.arch in (None, arch)]

    def multiply() -> None:
        for step in steps:
            step.launch()(a, b, out)

    return {"": multiply}


CALLS: dict[str, Callable[[], dict[str, Call]]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "linear_cross_entropy": _linear_cross_entropy,
    "flash_attention": _flash_attention,
    "paged_attention": _paged_attention,
    "kv_cache_write": _kv_cache_write,
    "w4a16_linear": _w4a16_linear,
    "sample": _sample,
    "matmul": _matmul,
}
