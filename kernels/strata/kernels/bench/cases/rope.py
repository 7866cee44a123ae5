"""rope of queries and keys, in place and out of place, with token-major and head-major layouts."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.rope import reference, rope, rope_

TOLERANCE = 1e-2  # bf16
BARS = (Bar(0.9, "copy"), Bar(1.0, "Liger"), Bar(1.0, "torch.compile"))


def cases() -> list[Case]:
    """16384 tokens, with the head counts of common models."""
    llama_8b, llama_70b, qwen_30b = (32, 8, 128), (64, 8, 128), (32, 4, 128)
    return [
        _case("32/8 heads", llama_8b, BARS),
        _case("64/8 heads", llama_70b, BARS),
        _case("32/4 heads", qwen_30b, ()),
        _case("32/8 heads, interleaved", llama_8b, (), interleaved=True),
        _case("32/8 heads, in place", llama_8b, (), in_place=True),
        _case("32/8 heads before tokens", llama_8b, (), heads_first=True),
    ]


def _case(
    name: str,
    heads: tuple[int, int, int],
    bars: tuple[Bar, ...],
    *,
    interleaved: bool = False,
    in_place: bool = False,
    heads_first: bool = False,
) -> Case:
    return Case("rope", f"16384 x {name}", partial(_contest, *heads, interleaved, in_place, heads_first), bars)


def _contest(
    heads: int, kv_heads: int, dim: int, interleaved: bool, in_place: bool, heads_first: bool, device: torch.device
) -> Contest:
    batch, tokens = 4, 4096
    q, k = (_heads(batch, tokens, count, dim, heads_first, device) for count in (heads, kv_heads))
    angles = torch.outer(torch.arange(tokens, device=device), 1e4 ** -(torch.arange(0, dim, 2, device=device) / dim))
    cos, sin = angles.cos(), angles.sin()
    eager = partial(_eager, interleaved=interleaved)
    return Contest(
        contenders={
            OURS: _in_place(q, k, cos, sin, interleaved) if in_place else partial(rope, q, k, cos, sin, interleaved=interleaved),
            "torch eager": partial(eager, q, k, cos, sin),
            "torch.compile": partial(torch.compile(eager, dynamic=False), q, k, cos, sin),
            "Liger": Missing("has no interleaved pairs") if interleaved else _liger(q, k, cos, sin),
        },
        reference=partial(reference, q.float(), k.float(), cos, sin, interleaved=interleaved),
        tolerance=TOLERANCE,
        bytes=2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes,
    )


def _heads(batch: int, tokens: int, heads: int, dim: int, heads_first: bool, device: torch.device) -> Tensor:
    shape = (batch, heads, tokens, dim) if heads_first else (batch, tokens, heads, dim)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return x.transpose(1, 2) if heads_first else x


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    q32, k32 = reference(q, k, cos, sin, interleaved=interleaved)
    return q32.to(q.dtype), k32.to(k.dtype)


def _in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """Rotates its own copies further on every call; only the first call is compared with the reference."""
    q, k = q.clone(), k.clone()

    def rotate() -> tuple[Tensor, Tensor]:
        rope_(q, k, cos, sin, interleaved=interleaved)
        return q, k

    return rotate


def _liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Callable[[], tuple[Tensor, Tensor]] | Missing:
    """Works in place, on tensors with shape [batch, heads, tokens, dim] and memory order [batch, tokens, heads, dim]."""
    try:
        from liger_kernel.ops.rope import rope_forward
    except ImportError:
        return Missing("liger-kernel is not installed")
    q, k = q.clone().transpose(1, 2), k.clone().transpose(1, 2)
    cos, sin = (torch.cat((half, half), dim=-1)[None] for half in (cos, sin))

    def rotate() -> tuple[Tensor, Tensor]:
        rotated_q, rotated_k, _, _ = rope_forward(q, k, cos, sin)
        return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)

    return rotate
