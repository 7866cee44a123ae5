"""Matrix product of 16-bit activations with 4-bit weights, bound by reading the weights once for few tokens.

Weights are the left operand of the tensor cores and tokens the right one, so that a few tokens waste little of a tile. A word of
packed weights holds the same place of four runs of 32 inputs. Its nibbles are unpacked in registers, in the layout that the
tensor cores read, two words at a time: a nibble in the lowest mantissa bits of 128 (1024 in fp16) is 128 + nibble, and a
subtraction of 128 + zero point is exact. Scales multiply fp32 sums of a group, not weights.

If a product has too few tiles for the GPU, programs share a tile, each for a range of inputs. They store partial sums, and the
program that arrives last adds them in a fixed order, so that results do not depend on timing.

From Hopper on, a launch starts while the kernel before it ends (programmatic dependent launch), and waits for its results.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strata.kernels.ops.arrivals import multiprocessors, stream_arrivals
from strata.kernels.tuning.tunable import Config, Key, Tunable, architecture, bucket, config

WORDS = 32  # 16-bit words of an output's chunk
CHUNK = 4 * WORDS  # inputs of a chunk
MOST_TOKENS = 128  # of a tile
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.constexpr_function
def unpacking(nibble, bf16):
    """Assembly for two words, whose nibbles become two weights. 0xea is the truth table of (a & b) | c."""
    magic, kind = ("0x43004300", "bf16x2") if bf16 else ("0x64006400", "f16x2")
    return f"{{ .reg .b32 t; shr.u32 t, $1, {4 * nibble}; lop3.b32 t, t, 0x000f000f, {magic}, 0xea; sub.{kind} $0, t, $2; }}"


@triton.jit
def unpack(words, zeros, NIBBLE: tl.constexpr, BF16: tl.constexpr, COMPILED: tl.constexpr):
    """Weights of one nibble of every word, minus their zero points, exact. The interpreter has no inline assembly."""
    if COMPILED:
        CODE: tl.constexpr = unpacking(NIBBLE, BF16)
        return tl.inline_asm_elementwise(
            CODE, "=r,r,r", [words, zeros], dtype=tl.bfloat16 if BF16 else tl.float16, is_pure=True, pack=2
        )
    else:
        return ((words.to(tl.int32) >> (4 * NIBBLE)) & 15).to(zeros.dtype) - zeros


@triton.jit(do_not_specialize=["tokens"])
def w4a16_linear_kernel(
    out,
    parts,  # partial sums [splits, token tiles, output tiles, BLOCK_N, BLOCK_T], fp32
    arrivals,  # [token tiles, output tiles], zero before and after a launch
    x,
    packed,  # [chunks, outputs, WORDS]
    scales,  # [chunks * GROUPS, outputs]
    zeros,  # as scales; not read if SYMMETRIC
    bias,
    tokens,
    x_stride,
    outputs,
    inputs,
    chunks,
    GROUPS: tl.constexpr,  # of a chunk
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    PADDED: tl.constexpr,  # the last chunk reaches beyond the inputs
    COMPILED: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched while the kernel before it ends
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    WORDS: tl.constexpr = 32
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    tile_n, split, tile_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(n < outputs, n, 0)  # rows beyond the last output read valid memory and are not stored
    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    there = t < tokens
    word = tl.arange(0, WORDS)
    first, last = split * chunks // SPLITS, (split + 1) * chunks // SPLITS
    x_tile = x + tl.where(there, t, 0).to(tl.int64)[None, :] * x_stride + word[:, None]
    packed_tile = packed + row[:, None] * WORDS + word[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # Scales and zero points are too narrow for the compiler's pipeline of asynchronous copies: those of groups of a whole chunk
    # are loaded one chunk ahead.
    if GROUPS == 1:
        next_scale = tl.load(scales + first * outputs + row)
        if not SYMMETRIC:
            next_zero = tl.load(zeros + first * outputs + row)
    for chunk in range(first, last):
        words = tl.load(packed_tile + chunk * outputs * WORDS)
        if GROUPS == 1:
            scale = next_scale
            ahead = tl.minimum(chunk + 1, chunks - 1) * outputs + row
            next_scale = tl.load(scales + ahead)
            if not SYMMETRIC:
                zero = next_zero
                next_zero = tl.load(zeros + ahead)
        partial = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for nibble in tl.static_range(4):
            group = (chunk * GROUPS + nibble * GROUPS // 4) * outputs + row
            if SYMMETRIC:
                zero = tl.full([BLOCK_N], 8, tl.uint8)
            elif GROUPS > 1:
                zero = tl.load(zeros + group)
            magic = (zero.to(tl.int32) + (0x4300 if BF16 else 0x6400)).to(tl.int16)
            minus = magic if COMPILED else zero.to(x.dtype.element_ty)
            weight = unpack(words, tl.broadcast_to(minus[:, None], [BLOCK_N, WORDS]), nibble, BF16, COMPILED)
            start = chunk * (4 * WORDS) + nibble * WORDS
            inside = there[None, :] & (start + word < inputs)[:, None] if PADDED else there[None, :]
            columns = tl.load(x_tile + start, mask=inside, other=0.0)
            partial = tl.dot(weight, columns, partial, input_precision="ieee")
            if (nibble + 1) % (4 // GROUPS) == 0:
                if GROUPS > 1:
                    scale = tl.load(scales + group)
                acc += scale.to(tl.float32)[:, None] * partial
                partial = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)

    complete = True
    if SPLITS > 1:
        tile = tile_t * tl.num_programs(0) + tile_n
        tiles = tl.num_programs(0) * tl.num_programs(2)
        place = tl.arange(0, BLOCK_T)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = parts + (split * tiles + tile).to(tl.int64) * (BLOCK_N * BLOCK_T)
        tl.store(own + place, acc.T, mask=there[:, None])
        tl.debug_barrier()  # all threads have stored before the arrival is counted
        before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        complete = before == SPLITS - 1
    if complete:
        result = acc.T
        if SPLITS > 1:
            tl.store(arrivals + tile, 0)  # reset for the next launch
            result = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            for part in tl.static_range(0, SPLITS, PARTS):
                index = part + tl.arange(0, PARTS)
                every = parts + (index * tiles + tile).to(tl.int64)[:, None, None] * (BLOCK_N * BLOCK_T) + place[None, :, :]
                used = (index < SPLITS)[:, None, None] & there[None, :, None]
                result += tl.sum(tl.load(every, mask=used, other=0.0, cache_modifier=".cg"), 0)  # L1 may be stale
        if BIAS:
            result += tl.load(bias + row).to(tl.float32)[None, :]
        target = out + t.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=there[:, None] & (n < outputs)[None, :])


def candidates(arch: int, key: Key) -> list[Config]:
    """`key` is the number of tokens of a tile and the weights' `size_class`. PROGRAMS is the number of programs per SM that
    a product is split for. Fewer than four warps compile to mma.sync, four and more to wgmma with weights in registers."""
    tokens = int(key[0])
    if arch == 0:
        return [config(BLOCK_N=16, PROGRAMS=1)]
    if tokens > 32:
        return [
            config(8, 3, BLOCK_N=128, PROGRAMS=1),
            config(4, 3, BLOCK_N=128, PROGRAMS=1),
            config(4, 4, BLOCK_N=64, PROGRAMS=2),
            config(8, 3, BLOCK_N=64, PROGRAMS=2),
        ]
    return [
        config(4, 4, BLOCK_N=128, PROGRAMS=4),
        config(4, 6, BLOCK_N=128, PROGRAMS=2),
        config(4, 4, BLOCK_N=128, PROGRAMS=2),
        config(4, 5, BLOCK_N=128, PROGRAMS=3),
        config(4, 6, BLOCK_N=64, PROGRAMS=4),
        config(4, 4, BLOCK_N=64, PROGRAMS=6),
        config(8, 4, BLOCK_N=256, PROGRAMS=2),
        config(2, 3, BLOCK_N=64, PROGRAMS=8),
        config(2, 4, BLOCK_N=64, PROGRAMS=4),
        config(2, 6, BLOCK_N=64, PROGRAMS=4),
        config(2, 4, BLOCK_N=64, PROGRAMS=8),
        config(1, 4, BLOCK_N=32, PROGRAMS=8),
        config(1, 6, BLOCK_N=32, PROGRAMS=4),
        config(1, 3, BLOCK_N=32, PROGRAMS=16),
        config(1, 4, BLOCK_N=64, PROGRAMS=8),
        config(4, 4, BLOCK_N=32, PROGRAMS=4),
    ]


tunable = Tunable("w4a16_linear", candidates)
LEAST_CHUNKS = 4  # of a program: with fewer, merging takes longer than reading
MERGED_VALUES = 2**12  # values held in registers


def token_tile(tokens: int) -> int:
    return min(max(bucket(tokens), 8), MOST_TOKENS)


def size_class(inputs: int, outputs: int) -> tuple[int, bool]:
    """Rounded log2 of the number of weights, from the projections of attention in an 8B model to its fused gate and up, and
    whether there are many inputs for each output."""
    return min(max(bucket(inputs * outputs).bit_length() - 1, 24), 27), inputs >= 2 * outputs


def w4a16_linear_triton(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, chosen: dict[str, int] | None = None
) -> Tensor:
    inputs = x.shape[-1]
    chunks, outputs, _ = packed.shape
    rows = x.reshape(-1, inputs)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    tokens = rows.shape[0]
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block_t = token_tile(tokens)
    arguments = dict(chosen or tunable.arguments((block_t, *size_class(inputs, outputs)), x.device))
    block_n = arguments["BLOCK_N"]
    tiles_n, tiles_t = -(-outputs // block_n), -(-tokens // block_t)
    programs = multiprocessors(x.device) * arguments.pop("PROGRAMS")
    splits = max(min(programs // (tiles_n * tiles_t), chunks // LEAST_CHUNKS), 1)
    dependent = architecture(x.device) >= 90
    parts, arrivals = out, out
    if splits > 1:
        parts = torch.empty(splits * tiles_t * tiles_n * block_n * block_t, dtype=torch.float32, device=x.device)
        arrivals = stream_arrivals(tiles_t * tiles_n, x.device)
    w4a16_linear_kernel[(tiles_n, splits, tiles_t)](
        out,
        parts,
        arrivals,
        rows,
        packed,
        scales,
        packed if zeros is None else zeros,
        out if bias is None else bias,
        tokens,
        rows.stride(0),
        outputs,
        inputs,
        chunks,
        GROUPS=scales.shape[0] // chunks,
        SYMMETRIC=zeros is None,
        BIAS=bias is not None,
        PADDED=inputs < chunks * CHUNK,
        COMPILED=not INTERPRETED,
        DEPENDENT=dependent,
        BLOCK_T=block_t,
        SPLITS=splits,
        PARTS=max(min(bucket(splits), MERGED_VALUES // (block_n * block_t)), 1),
        launch_pdl=dependent,
        **arguments,
    )
    return out
