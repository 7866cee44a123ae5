"""Hopper forward kernel without a GPU: its machine code, and the calls it supports.

Gluon has no interpreter, so results are tested on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.compiler.compilation import assume_architecture
from strata.kernels.ops.flash_attention import hopper

pytestmark = pytest.mark.slow

COMPILE = """
import json
import re
import torch
from strata.kernels.ops.flash_attention import hopper
from strata.kernels.compiler.compilation import launched
from strata.kernels.compiler.stages import compile_stages, opcodes


def call(dim, causal, window, packed):
    q, k = (torch.empty(1, 8192, heads, dim, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
    return lambda: hopper.forward(q, k, k, causal, window, dim**-0.5, cu_seqlens, 2048 if packed else 8192)


found = []
for case in ((128, True, None, False), (64, True, 1000, True), (72, False, None, False), (160, True, None, True)):
    (compilation,) = launched(call(*case))
    compiled = compile_stages(compilation, 90)
    found.append({
        "case": case, "wgmma": compiled.tensor_cores["wgmma"], "tma": compiled.tma["loads"], "wide": compiled.wide,
        "spilled": compiled.spilled, "stack": compiled.stack, "shared": compiled.shared,
        "products": {name.split(".")[1]: n for name, n in opcodes(compiled.texts["sass"]).items() if name.startswith("HGMMA")},
        "expected_bytes": [int(n) for n in re.findall(r"expect_tx\\S* _, \\[\\S*\\], (\\d+)", compiled.texts["ptx"])],
        "groups_left": [int(n) for n in re.findall(r"wgmma.wait_group\\S* (\\d)", compiled.texts["ptx"])],
    })
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(triton_cache: Path) -> list[dict[str, Any]]:
    """Compiles in a separate process, because Triton interprets kernels in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(triton_cache)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_uses_wgmma_and_tma_without_spills(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert kernel["wgmma"] > 0 and kernel["tma"] > 0 and kernel["wide"] > 0, kernel
        assert kernel["spilled"] == 0 and kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 232448, kernel  # the limit per program


def test_two_slices_multiply_no_columns_but_their_own(compiled: list[dict[str, Any]]) -> None:
    """Per warpgroup, of 128 keys: scores in 16 columns of the head each, values in 16 keys each, for the first block, the loop
    and the last block. Causal kernels have a second loop, of masked blocks."""
    whole, _, narrow, wide = compiled
    assert whole["products"] == {"64x128x16": 2 * (3 * 8 + 3 * 8)}
    assert narrow["products"] == {"64x128x16": 2 * 2 * 5, "64x64x16": 2 * 2 * 8, "64x16x16": 2 * 2 * 8}
    assert wide["products"] == {"64x128x16": 2 * (3 * 10 + 3 * 8), "64x32x16": 2 * 3 * 8}


def test_barriers_expect_the_bytes_of_all_slices(compiled: list[dict[str, Any]]) -> None:
    """Two tiles of 64 queries (three at 64 dimensions), then a block of keys and one of values."""
    for kernel, width, tiles in zip(compiled, (128, 64, 80, 160), (2, 3, 2, 2), strict=True):
        assert kernel["expected_bytes"] == [64 * width * 2] * tiles + [128 * width * 2] * 2, kernel


def test_scores_are_awaited_with_the_products_of_all_slices_in_flight(compiled: list[dict[str, Any]]) -> None:
    for kernel, slices in zip(compiled, (1, 1, 2, 2), strict=True):
        assert set(kernel["groups_left"]) == {0, slices}, kernel


Three = tuple[Tensor, Tensor, Tensor]


def tensors(dim: int = 128, dtype: torch.dtype = torch.bfloat16, tokens: int = 100, keys: int = 100) -> Three:
    k = torch.empty(2, keys, 4, dim, dtype=dtype, device="meta")
    return torch.empty(2, tokens, 4, dim, dtype=dtype, device="meta"), k, k


def supported(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, window: int | None = None, arch: int = 90) -> bool:
    with assume_architecture(arch, {}):
        return hopper.supports(q, k, v, causal, window, None)


def test_supports_half_precision_and_head_dimensions_that_a_tiling_holds_on_hopper() -> None:
    for dim in (40, 64, 72, 96, 128, 136, 256):
        assert supported(*tensors(dim)) and supported(*tensors(dim, torch.float16))
        assert not supported(*tensors(dim), arch=80) and not supported(*tensors(dim), arch=100)
    for dim in (32, 68, 100, 264):
        assert not supported(*tensors(dim))
    assert not supported(*tensors(dtype=torch.float32))


def test_a_head_is_padded_to_the_narrowest_tiling() -> None:
    padded = {40: 64, 64: 64, 72: 80, 80: 80, 88: 96, 96: 96, 104: 128, 128: 128, 136: 160, 160: 160, 168: 256, 256: 256}
    assert {dim: hopper.tiled_dim(dim) for dim in padded} == padded


def test_a_head_is_at_most_two_slices_of_powers_of_two() -> None:
    assert [hopper.slices(width) for width in (64, 80, 96, 160, 256)] == [(64, 0), (64, 16), (64, 32), (128, 32), (256, 0)]
    for width in hopper.TILINGS:
        assert sum(hopper.slices(width)) == width and all(one & (one - 1) == 0 for one in hopper.slices(width))


def test_descriptors_address_a_slice_and_pad_past_the_head() -> None:
    x = torch.empty(2, 100, 4, 72, dtype=torch.bfloat16, device="meta")
    found = [hopper._descriptor(x, 64, width) for width in (128, 64, 32, 16)]
    assert all(one.shape == [2, 4, 100, 72] and one.strides == [28800, 72, 288, 1] for one in found)
    assert [one.block_shape for one in found] == [[1, 1, 64, width] for width in (128, 64, 32, 16)]
    assert [one.layout.swizzle_byte_width for one in found] == [128, 128, 64, 32]
    assert hopper._descriptor(x, 64, 0) is None


def test_tilings_fit_the_registers_of_a_processor() -> None:
    for tiling in hopper.TILINGS.values():
        assert 128 * (tiling.consumers * tiling.registers + tiling.loader_registers) <= 65536
        assert 128 * (tiling.consumers + 1) * tiling.threads_registers <= 65536


def test_unsupported_masks() -> None:
    assert supported(*tensors(tokens=3, keys=1001)) and supported(*tensors(), window=7)
    assert supported(*tensors(tokens=101), causal=False)
    assert not supported(*tensors(tokens=101))
    assert not supported(*tensors(), causal=False, window=7)
    assert not supported(*tensors(tokens=0))


def test_strides_that_tma_cannot_address_are_unsupported() -> None:
    q, k, v = tensors()
    packed = torch.empty(2, 100, 12, 128, dtype=torch.bfloat16, device="meta")
    assert supported(packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:])
    odd = torch.empty(2, 100, 4, 132, dtype=torch.bfloat16, device="meta")[..., :128]
    assert not supported(odd, k, v)
    assert not supported(q, k.transpose(1, 3).contiguous().transpose(1, 3), v)
    assert not supported(q, k[:, :, :1].expand(-1, -1, 4, -1), v)
