"""Rotary position embedding of queries and keys in one launch, in place or out of place.

The inverse rotation uses the opposite angle, so the gradient is the same kernel with a negated sine. Only the first
`2 * cos.shape[-1]` values of a head are rotated (partial rope). A pair is two values half the rotated size apart, as in Hugging
Face's models, or two neighbours (`interleaved`), as in the original and in GPT-J.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.tuning.tunable import Config, Key, Tunable, TuningCase, bucket, config

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """q [batch, tokens, heads, dim], k [batch, tokens, kv_heads, dim]; cos, sin [tokens, half] or [batch, tokens, half]"""
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for every head
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((pairs.flatten(-2), x[..., 2 * half :]), dim=-1)
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, x_head_stride, out_head_stride, cos, sin,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        inside = (head < HEADS) & (column < 2 * HALF)
        pairs = tl.load(x_ptr + head * x_head_stride + column, mask=inside)
        first, second = tl.split(tl.reshape(pairs, [BLOCK_HEADS, BLOCK_HALF, 2]))
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
        rotated = tl.reshape(rotated, [BLOCK_HEADS, 2 * BLOCK_HALF])
        tl.store(out_ptr + head * out_head_stride + column, rotated, mask=inside)
    else:
        column = tl.arange(0, BLOCK_HALF)[None, :]
        inside = (head < HEADS) & (column < HALF)
        first = tl.load(x_ptr + head * x_head_stride + column, mask=inside).to(tl.float32)
        second = tl.load(x_ptr + head * x_head_stride + HALF + column, mask=inside).to(tl.float32)
        tl.store(out_ptr + head * out_head_stride + column, first * cos - second * sin, mask=inside)
        tl.store(out_ptr + head * out_head_stride + HALF + column, second * cos + first * sin, mask=inside)
    if BLOCK_REST:
        column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        inside = (head < HEADS) & (column < DIM)
        rest = tl.load(x_ptr + head * x_head_stride + column, mask=inside)
        tl.store(out_ptr + head * out_head_stride + column, rest, mask=inside)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr, tokens,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    q_out_batch_stride, q_out_token_stride, q_out_head_stride, k_out_batch_stride, k_out_token_stride, k_out_head_stride,
    table_batch_stride, table_token_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) % tokens).to(tl.int64)
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    angle = tl.arange(0, BLOCK_HALF)[None, :]
    place = tl.load(positions_ptr + token).to(tl.int64) if HAS_POSITIONS else token
    table = batch * table_batch_stride + place * table_token_stride + angle
    cos = tl.load(cos_ptr + table, mask=angle < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=angle < HALF, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    _rotate_heads(
        q_ptr + batch * q_batch_stride + token * q_token_stride,
        q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride,
        q_head_stride, q_out_head_stride, cos, sin, HEADS, DIM, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + batch * k_batch_stride + token * k_token_stride,
        k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride,
        k_head_stride, k_out_head_stride, cos, sin, KV_HEADS, DIM, HALF, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
    )  # fmt: skip


def _candidates(arch: int, key: Key) -> Sequence[Config]:
    return [config(8), config(4), config(2)]


tunable = Tunable("rope", _candidates)


def rope_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    q, k = _heads(q), _heads(k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _launch(q, k, cos, sin, None, q_out, k_out, interleaved, inverse)
    return q_out, k_out


def rope_in_place_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    if positions is not None:
        q, k = q.unsqueeze(0), k.unsqueeze(0)
    _launch(q, k, cos, sin, positions, q, k, interleaved, False)


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, q_out: Tensor, k_out: Tensor,
    interleaved: bool, inverse: bool, chosen: dict[str, int] | None = None,
) -> None:  # fmt: skip
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    half = cos.shape[-1]
    if not batch * tokens:
        return
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    block_heads, block_half = bucket(heads), bucket(half)
    passes_through = 2 * half < dim and q_out is not q
    rope_kernel[(batch * tokens,)](
        q, k, cos, sin, positions, q_out, k_out, tokens,
        *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
        cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, BLOCK_HEADS=block_heads, BLOCK_KV_HEADS=bucket(kv_heads),
        BLOCK_HALF=block_half, BLOCK_REST=bucket(dim - 2 * half) if passes_through else 0,
        INTERLEAVED=interleaved, INVERSE=inverse, HAS_POSITIONS=positions is not None,
        **(chosen or tunable.arguments((block_heads, block_half, q.element_size()), q.device)),
    )  # fmt: skip


def tuning_cases(device: torch.device) -> list[TuningCase]:
    return [_tuning_case(heads, 8, 128, device) for heads in (16, 32, 64)]


def _tuning_case(heads: int, kv_heads: int, dim: int, device: torch.device) -> TuningCase:
    q, k = (torch.randn(4, 4096, count, dim, device=device, dtype=torch.bfloat16) for count in (heads, kv_heads))
    cos, sin = torch.randn(2, 4096, dim // 2, device=device)

    def run(chosen: Config) -> None:
        _launch(q, k, cos, sin, None, q, k, False, False, chosen.arguments())

    return TuningCase(tunable, (bucket(heads), dim // 2, q.element_size()), run)


def _heads(x: Tensor) -> Tensor:
    """x, copied only if the values of a head are not contiguous. Other strides are preserved in the result."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rope_cpu(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    sin = -sin if inverse else sin
    return _rotated_cpu(q, cos, sin, interleaved), _rotated_cpu(k, cos, sin, interleaved)


def rope_in_place_cpu(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    for x in (q, k):
        x.copy_(_rotated_cpu(x, cos, sin, interleaved))


def _rotated_cpu(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """One product over all rotated values and one addition to each half, without a copy with swapped halves."""
    half = cos.shape[-1]
    wide = _heads(x if x.dtype in (torch.float32, torch.float64) else x.float())
    cos, sin = cos.to(wide.dtype).unsqueeze(-2), sin.to(wide.dtype).unsqueeze(-2)
    out = torch.empty_like(wide)
    out[..., 2 * half :] = wide[..., 2 * half :]
    if interleaved:
        torch.mul(wide[..., : 2 * half], cos.repeat_interleave(2, -1), out=out[..., : 2 * half])
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        torch.mul(wide[..., : 2 * half], torch.cat((cos, cos), -1), out=out[..., : 2 * half])
        first, second = slice(0, half), slice(half, 2 * half)
    out[..., first].addcmul_(wide[..., second], sin, value=-1)
    out[..., second].addcmul_(wide[..., first], sin)
    return out.to(x.dtype)


library = torch.library.Library("strata", "FRAGMENT")
library.define("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> (Tensor, Tensor)")
library.define("rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, Tensor? positions, bool interleaved) -> ()")
library.impl("rope", rope_cpu, "CPU")
library.impl("rope", on_tensor_device(rope_triton), "CUDA")
library.impl("rope_", rope_in_place_cpu, "CPU")
library.impl("rope_", on_tensor_device(rope_in_place_triton), "CUDA")


@torch.library.register_fake("strata::rope", lib=library)
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_heads(q)), torch.empty_like(_heads(k))


@torch.library.register_fake("strata::rope_", lib=library)
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    dq, dk = torch.ops.strata.rope(dq, dk, cos, sin, ctx.interleaved, not ctx.inverse)
    return dq, dk, None, None, None, None


torch.library.register_autograd("strata::rope", _gradients, setup_context=_setup_context, lib=library)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotates q [batch, tokens, heads, dim] and k [batch, tokens, kv_heads, dim] by the angles with these cosines and sines,
    [tokens, half] or [batch, tokens, half]. cos and sin get no gradient."""
    _check(q, k, cos, sin)
    if q.dim() != 4 or cos.shape[:-1] not in (q.shape[:2], q.shape[1:2]):
        raise ValueError(
            f"rope expects q [batch, tokens, heads, dim] and cos [tokens, half] or [batch, tokens, half], "
            f"got {list(q.shape)} and {list(cos.shape)}"
        )
    return torch.ops.strata.rope(q, k, cos, sin, interleaved, False)  # type: ignore[no-any-return]


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False) -> None:
    """In-place `rope` without gradients. With positions [tokens], cos and sin are tables [max_position, half] indexed by
    position, and q is [tokens, heads, dim]: the concatenated tokens of a batch of sequences, as in serving."""
    _check(q, k, cos, sin)
    if positions is None and (q.dim() != 4 or cos.shape[:-1] not in (q.shape[:2], q.shape[1:2])):
        raise ValueError(
            f"rope_ without positions expects q [batch, tokens, heads, dim] and cos [tokens, half] or [batch, tokens, half], "
            f"got {list(q.shape)} and {list(cos.shape)}"
        )
    if positions is not None and (q.dim() != 3 or cos.dim() != 2 or positions.shape != q.shape[:1]):
        raise ValueError(
            f"rope_ with positions [tokens] expects q [tokens, heads, dim] and cos [max_position, half], "
            f"got {list(positions.shape)}, {list(q.shape)} and {list(cos.shape)}"
        )
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        raise ValueError("rope_ expects q and k with contiguous heads (a stride of 1 in the last dimension)")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise ValueError("rope_ has no gradient: call rope, or rope_ under torch.no_grad()")
    torch.ops.strata.rope_(q, k, cos, sin, positions, interleaved)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.dtype not in DTYPES and not (q.dtype == torch.float64 and q.device.type == "cpu"):
        raise ValueError(f"rope expects float32, float16 or bfloat16 (float64 on a CPU), got {q.dtype}")
    if q.dtype != k.dtype or q.dim() != k.dim() or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"rope expects q and k that differ only in the number of heads, got {list(q.shape)} {q.dtype} and "
            f"{list(k.shape)} {k.dtype}"
        )
    if cos.shape != sin.shape or 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"rope expects cos and sin of one shape, with up to {q.shape[-1] // 2} angles (half of q's last dimension), "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
