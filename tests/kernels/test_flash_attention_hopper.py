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
import torch
from strata.kernels.ops.flash_attention import hopper
from strata.kernels.compiler.compilation import launched
from strata.kernels.compiler.stages import compile_stages


def call(dim, causal, window, packed):
    q, k = (torch.empty(1, 8192, heads, dim, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
    return lambda: hopper.forward(q, k, k, causal, window, dim**-0.5, cu_seqlens, 2048 if packed else 8192)


found = []
for case in ((128, True, None, False), (64, True, 1000, True), (72, False, None, False)):
    (compilation,) = launched(call(*case))
    compiled = compile_stages(compilation, 90)
    found.append({
        "case": case, "wgmma": compiled.tensor_cores["wgmma"], "tma": compiled.tma["loads"], "wide": compiled.wide,
        "spilled": compiled.spilled, "stack": compiled.stack, "shared": compiled.shared,
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
    assert [hopper.tiled_dim(dim) for dim in (40, 64, 72, 128, 136, 256)] == [64, 64, 128, 128, 256, 256]
    descriptor = hopper._descriptor(torch.empty(2, 100, 4, 72, dtype=torch.bfloat16, device="meta"), 64, 128)
    assert descriptor.shape == [2, 4, 100, 72] and descriptor.block_shape == [1, 1, 64, 128]


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
