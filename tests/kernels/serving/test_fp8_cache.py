"""fp8 caches: kv_cache_write and paged_attention, on the CPU and interpreted, against plain torch."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.fp8_cache import FP8
from strata.kernels.ops.kv_cache_write import kv_cache_write, kv_cache_write_cpu, kv_cache_write_triton, reference
from strata.kernels.ops.paged_attention.paged_attention import paged_attention, paged_attention_cpu, paged_attention_triton

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernel")
WRITES = [pytest.param(kv_cache_write_cpu, id="cpu"), pytest.param(kv_cache_write_triton, id="triton", marks=interpreted)]
ATTENTION = [pytest.param(paged_attention_cpu, id="cpu"), pytest.param(paged_attention_triton, id="triton", marks=interpreted)]
K_SCALE, V_SCALE = torch.tensor(0.03), torch.tensor([0.5])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_written_values_are_divided_and_limited(write: object, dtype: torch.dtype) -> None:
    """Values that need no rounding: Triton's interpreter rounds 1.96 to 1 instead of 2."""
    torch.manual_seed(0)
    key, value = (torch.randn(2, 6, 2, 16) * 4).to(FP8).float().mul(0.03125).to(dtype)
    key[0, 0, :3] = torch.tensor([60.0, -60.0, 448 * 0.03125])
    caches = torch.zeros(2, 2, 3, 16, 2, 16, dtype=torch.uint8).view(FP8)
    slots = torch.tensor([5, -1, 40, 0, 17, 33])
    scales = torch.tensor(0.03125), torch.tensor([0.0625])
    for each, run in zip(caches, (reference, write), strict=True):
        run(key, value, each[0], each[1], slots, *scales)  # type: ignore[operator]
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    assert caches[1, 0, 0, 5, 0, :3].float().tolist() == [448, -448, 448]
    assert torch.equal(caches[1, 1, 2, 8].float(), value[2].float() / 0.0625)


def test_written_values_are_rounded_to_the_nearest() -> None:
    numbers = torch.tensor([1.96, 1.93, 1.06, 300.0, 0.001, -1.96])
    caches = torch.zeros(2, 1, 16, 1, 6, dtype=torch.uint8).view(FP8)
    kv_cache_write(numbers.view(1, 1, 6) * 3, numbers.view(1, 1, 6), *caches, torch.tensor([2]), torch.tensor(3.0), torch.ones(1))
    expected = [2.0, 1.875, 1.0, 288.0, 2**-10 + 2**-10, -2.0]
    assert caches[0, 0, 2, 0].float().tolist() == caches[1, 0, 2, 0].float().tolist() == expected


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("contexts, queries", [([40, 3], [1, 1]), ([50, 17], [50, 1])])
@pytest.mark.parametrize("size, dim, padding", [(1.0, 16, 0), (1e5, 16, 0), (1.0, 72, 0), (1.0, 72, 1)])
def test_attention_equals_that_of_the_widened_cache(
    attention: object, contexts: list[int], queries: list[int], size: float, dim: int, padding: int
) -> None:
    """Decodes and a prompt. Queries beyond the range of fp16 too, values read in words of four, and rows that are not whole
    words."""
    torch.manual_seed(1)
    stored = torch.randn(8, 16, 2, 2 * dim + padding).mul(30).to(FP8)
    q = torch.randn(sum(queries), 4, dim) * size
    tables = torch.randperm(8).int().view(2, 4)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    starts = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32)

    def attended(run: object, caches: tuple[Tensor, Tensor], *scales: Tensor) -> Tensor:
        out = torch.full_like(q, torch.nan)
        run(q, *caches, tables, lengths, starts, out, max(queries), max(contexts), 0.25 / size, 0, *scales)  # type: ignore[operator]
        return out

    key_cache, value_cache = stored[..., :dim], stored[..., dim : 2 * dim]
    truth = attended(paged_attention_cpu, (key_cache.float() * 0.03, value_cache.float() * 0.5))
    out = attended(attention, (key_cache, value_cache), K_SCALE, V_SCALE)
    assert float((out - truth).norm() / truth.norm()) < (1e-5 if attention is paged_attention_cpu else 2e-3)


def test_scales_are_needed_for_fp8_and_refused_otherwise() -> None:
    x, slots = torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int64)
    wide, fp8 = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8).to(FP8)
    lengths = torch.ones(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    tables = torch.zeros(3, 4, dtype=torch.int32)
    for caches, scales in (((wide, wide), (K_SCALE, V_SCALE)), ((fp8, fp8), (K_SCALE, None)), ((fp8, fp8), (None, V_SCALE))):
        with pytest.raises(ValueError, match="for caches in float8_e4m3fn and only for these"):
            kv_cache_write(x, x, *caches, slots, *scales)
        with pytest.raises(ValueError, match="for caches in float8_e4m3fn and only for these"):
            paged_attention(
                x, *caches, tables, *lengths, max_query_len=1, max_context_len=1, k_scale=scales[0], v_scale=scales[1]
            )
    with pytest.raises(ValueError, match=r"one float32, got \[2\]"):
        kv_cache_write(x, x, fp8, fp8, slots, torch.ones(2), V_SCALE)
    with pytest.raises(ValueError, match="caches in float8_e4m3fn, got"):
        kv_cache_write(x, x, fp8, wide, slots, K_SCALE, V_SCALE)
