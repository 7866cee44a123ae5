"""Repacks 4-bit weights of GPTQ and AWQ checkpoints, once after loading, into the layout that the kernel reads.

Outputs are rows. A chunk is 128 consecutive inputs of an output, in 32 words of 16 bits. Word i holds inputs i, 32 + i, 64 + i
and 96 + i of the chunk, lowest bits first. Chunks are the outermost dimension, so that the rows of a tile are contiguous. Inputs
are padded to whole chunks.

Scales and zero points have one row per group of 32, 64 or 128 inputs; larger groups, and one scale per output, are repeated.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from strata.kernels.ops.w4a16_linear.kernel import CHUNK, WORDS

GROUPS = (32, 64, 128)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of an AWQ word that each nibble holds
SYMMETRIC_ZERO = 8


class PackedWeight(NamedTuple):
    """Arguments of `w4a16_linear` after the activations. Weights are (nibble - zero) * scale; without `zeros`, zero is 8."""

    packed: Tensor  # [chunks, outputs, 32], int16
    scales: Tensor  # [chunks * groups of a chunk, outputs]
    zeros: Tensor | None  # as scales, uint8


def pack_gptq(
    qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None, g_idx: Tensor | None = None, *, zero_offset: int = 1
) -> PackedWeight:
    """Packs a GPTQ layer: qweight [inputs / 8, outputs] and qzeros [groups, outputs / 8], int32, scales [groups, outputs].

    Without `qzeros` the weights are symmetric. GPTQ stores zero points minus 1; its second format, `gptq_v2`, stores them as they
    are: `zero_offset=0`. Only groups of consecutive inputs are supported, not those of activation order (`desc_act`).
    """
    nibbles = _nibbles(qweight).permute(0, 2, 1).flatten(0, 1)  # [inputs, outputs]
    zeros = None if qzeros is None else _nibbles(qzeros).flatten(1) + zero_offset
    if g_idx is not None and g_idx.numel():
        groups = scales.shape[0]
        if not torch.equal(g_idx.cpu().long(), torch.arange(nibbles.shape[0]) // -(-nibbles.shape[0] // groups)):
            raise ValueError(
                "pack_gptq supports groups of consecutive inputs, and g_idx assigns inputs to groups in activation order: "
                "every weight would need its own scale. Quantize with desc_act=False."
            )
    return pack(nibbles, scales, zeros)


def pack_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None) -> PackedWeight:
    """Packs an AWQ layer: qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8], int32, scales [groups, outputs]."""
    place = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()
    nibbles = _nibbles(qweight)[..., place].flatten(1)
    return pack(nibbles, scales, None if qzeros is None else _nibbles(qzeros)[..., place].flatten(1))


def pack(nibbles: Tensor, scales: Tensor, zeros: Tensor | None = None) -> PackedWeight:
    """Packs nibbles [inputs, outputs] with scales and zero points [groups, outputs], all groups of one size."""
    inputs, outputs = nibbles.shape
    groups = scales.shape[0]
    if scales.shape != (groups, outputs) or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(
            f"w4a16_linear expects scales and zero points [groups, outputs] for {outputs} outputs, got {list(scales.shape)}"
            + ("" if zeros is None else f" and {list(zeros.shape)}")
        )
    size = inputs // max(groups, 1)
    if not groups or inputs % groups or (groups > 1 and size not in GROUPS and size % CHUNK):
        raise ValueError(
            "w4a16_linear supports groups of 32, 64 or a multiple of 128 inputs, and one group for all, "
            f"got {groups} groups of {inputs} inputs"
        )
    chunks = -(-inputs // CHUNK)
    padded = torch.nn.functional.pad(nibbles.to(torch.uint8), (0, 0, 0, chunks * CHUNK - inputs))
    quarters = padded.view(chunks, 4, WORDS, outputs).permute(0, 1, 3, 2).to(torch.int32)  # [chunks, 4, outputs, words]
    words = quarters[:, 0] | quarters[:, 1] << 4 | quarters[:, 2] << 8 | quarters[:, 3] << 12
    packed = torch.where(words >= 2**15, words - 2**16, words).to(torch.int16).contiguous()
    stored = None if zeros is None else _by_chunk(zeros.to(torch.uint8), size, chunks)
    return PackedWeight(packed, _by_chunk(scales, size, chunks), stored)


def _by_chunk(values: Tensor, size: int, chunks: int) -> Tensor:
    """Rows of `values` [groups, outputs] for groups of at most a chunk, padded to whole chunks with the last row."""
    row = min(size, CHUNK) if size in GROUPS or size % CHUNK == 0 else CHUNK
    index = torch.arange(chunks * (CHUNK // row), device=values.device) * row // size
    return values[index.clamp(max=values.shape[0] - 1)].contiguous()


def unpack(weight: PackedWeight, inputs: int) -> Tensor:
    """Weights [outputs, inputs] in fp32."""
    packed, scales, zeros = weight
    chunks, outputs, _ = packed.shape
    shifts = torch.arange(0, 16, 4, device=packed.device, dtype=torch.int32)[None, :, None, None]
    nibbles = (packed.to(torch.int32)[:, None] >> shifts) & 15  # [chunks, 4, outputs, words]
    nibbles = nibbles.permute(2, 0, 1, 3).reshape(outputs, -1).float()
    size = chunks * CHUNK // scales.shape[0]
    wide = scales.float().T.repeat_interleave(size, 1)
    zero = SYMMETRIC_ZERO if zeros is None else zeros.float().T.repeat_interleave(size, 1)
    return ((nibbles - zero) * wide)[:, :inputs]


def _nibbles(words: Tensor) -> Tensor:
    """The eight nibbles of int32 words, lowest bits first, in a new last dimension."""
    if words.dtype != torch.int32:
        raise ValueError(f"w4a16_linear expects packed weights and zero points in int32, got {words.dtype}")
    return (words[..., None] >> torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)) & 15
