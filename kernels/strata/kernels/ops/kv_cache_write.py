"""Scatters keys and values into a paged KV cache, in place: token i goes to slots[i] = block * block size + offset in the block.

Negative slots are skipped, so that a batch can be padded to the size a CUDA graph was captured for. A slot beyond the cache is an
error on a CPU. On a GPU it is skipped, because an error would need a synchronization. If tokens share a slot, any of them may
be the final value.

A cache in fp8 (e4m3) stores keys and values divided by one scale each, rounded, and limited to 448, the largest number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.fp8_cache import FP8, check_scales, narrowed
from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.tuning.tunable import Config, Key, Tunable, bucket, config

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    block_size = key_cache.shape[1]
    key, value = narrowed(key, k_scale), narrowed(value, v_scale)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]


@triton.jit
def narrow(x, scale_ptr, DTYPE: tl.constexpr):
    if tl.float8e4nv == DTYPE:
        x = tl.math.div_rn(x.to(tl.float32), tl.load(scale_ptr))
        x = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)
    return x


@triton.jit(do_not_specialize=["rows", "capacity"])  # one kernel for batches of any size
def kv_cache_write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    rows,  # tokens * heads
    capacity,
    token_stride,
    head_stride,
    block_stride,
    slot_stride,
    cache_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, (row % HEADS).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=row < rows, other=-1)
    valid = (slot >= 0) & (slot < capacity)
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    source = (token.to(tl.int64) * token_stride + head * head_stride)[:, None] + dim[None, :]
    cached = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * cache_head_stride
    cached = cached[:, None] + dim[None, :]
    key = narrow(tl.load(key_ptr + source, mask=mask), k_scale_ptr, key_cache_ptr.dtype.element_ty)
    if VALUE:
        value = narrow(tl.load(value_ptr + source, mask=mask), v_scale_ptr, value_cache_ptr.dtype.element_ty)
        tl.store(value_cache_ptr + cached, value, mask=mask)
    tl.store(key_cache_ptr + cached, key, mask=mask)


def _candidates(arch: int, key: Key) -> list[Config]:
    """`key` is the head dimension, rounded up. On an H200, 512 to 4096 elements and 2 to 8 warps per program are equally fast,
    for 1 token and for 16k tokens."""
    dims = min(int(key[0]), 1024)
    return [config(num_warps=4, ROWS=1024 // dims, DIMS=dims)]


kv_cache_write_tunable = Tunable("kv_cache_write", _candidates)


def kv_cache_write_triton(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    if not slots.numel() or not key.numel():
        return
    chosen = kv_cache_write_tunable.arguments((bucket(key.shape[2]),), key.device)
    if key.stride() == value.stride() and key_cache.stride() == value_cache.stride():
        _launch(key, value, key_cache, value_cache, slots, k_scale, v_scale, True, chosen)
    else:
        _launch(key, key, key_cache, key_cache, slots, k_scale, k_scale, False, chosen)
        _launch(value, value, value_cache, value_cache, slots, v_scale, v_scale, False, chosen)


def _launch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    both: bool,
    chosen: dict[str, int],
) -> None:
    """Passes one set of strides for key and value: integer arguments are most of the host cost of a launch."""
    _, heads, head_dim = key.shape
    blocks, block_size, _, _ = key_cache.shape
    rows = slots.shape[0] * heads
    kv_cache_write_kernel[(-(-rows // chosen["ROWS"]), -(-head_dim // chosen["DIMS"]))](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        slots if k_scale is None else k_scale,
        slots if v_scale is None else v_scale,
        rows,
        blocks * block_size,
        key.stride(0),
        key.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        VALUE=both,
        **chosen,
    )


def kv_cache_write_cpu(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    blocks, block_size = key_cache.shape[:2]
    if slots.numel() and slots.max() >= blocks * block_size:
        raise ValueError(f"kv_cache_write: slot {slots.max().item()} is beyond the cache of {blocks} blocks of {block_size}")
    valid = (slots >= 0).nonzero().squeeze(1)
    block, place = slots[valid] // block_size, slots[valid] % block_size
    for cache, new in ((key_cache, narrowed(key[valid], k_scale)), (value_cache, narrowed(value[valid], v_scale))):
        raw = torch.uint8 if cache.dtype == FP8 else cache.dtype  # torch cannot assign fp8 by an index
        cache.view(raw)[block, place] = new.view(raw)


library = torch.library.Library("strata", "FRAGMENT")
library.define(
    "kv_cache_write(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)
library.impl("kv_cache_write", kv_cache_write_cpu, "CPU")
library.impl("kv_cache_write", on_tensor_device(kv_cache_write_triton), "CUDA")


@torch.library.register_fake("strata::kv_cache_write", lib=library)
def _(*arguments: object) -> None:
    return None


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes key and value [tokens, heads, dim] into caches [blocks, block size, heads, dim] at slots [tokens], int64. The last
    dimension of keys, values and caches must be contiguous; other strides are free. Caches in float8_e4m3fn need the scales of
    keys and values, fp32 tensors of one element."""
    if key.dim() != 3 or key.shape != value.shape or slots.shape != key.shape[:1]:
        raise ValueError(
            "kv_cache_write expects key and value [tokens, heads, dim] and slots [tokens], "
            f"got {list(key.shape)}, {list(value.shape)} and {list(slots.shape)}"
        )
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or key_cache.shape[2:] != key.shape[1:]:
        raise ValueError(
            f"kv_cache_write expects caches [blocks, block size, heads, dim] with heads and dim of the key {list(key.shape)}, "
            f"got {list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    if (
        key.dtype not in DTYPES
        or value.dtype != key.dtype
        or key_cache.dtype not in (key.dtype, FP8)
        or value_cache.dtype != key_cache.dtype
    ):
        raise ValueError(
            "kv_cache_write expects keys, values and caches of one dtype, float32, float16 or bfloat16, or caches in "
            f"float8_e4m3fn, got {key.dtype}, {value.dtype}, {key_cache.dtype} and {value_cache.dtype}"
        )
    check_scales("kv_cache_write", key_cache, k_scale, v_scale)
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"kv_cache_write expects contiguous int64 slots, got {slots.dtype} with stride {slots.stride()}")
    if key.shape[2] > 1 and not key.stride(2) == value.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1:
        raise ValueError("kv_cache_write expects tensors whose last dimension is contiguous")
    torch.ops.strata.kv_cache_write(key, value, key_cache, value_cache, slots, k_scale, v_scale)
