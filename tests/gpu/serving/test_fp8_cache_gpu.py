"""fp8 caches on a GPU: kv_cache_write bit for bit, paged_attention against fp64, every launch configuration."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.fp8_cache import FP8, narrowed, widened
from strata.kernels.ops.kv_cache_write import kv_cache_write
from strata.kernels.ops.paged_attention.decode import candidates, decode_triton
from strata.kernels.ops.paged_attention.paged_attention import paged_attention
from strata.kernels.tuning.tunable import architecture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens, heads, dim", [(1, 1, 64), (127, 8, 128), (129, 5, 80), (4097, 2, 256)])
def test_written_values(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    key, value = (torch.randn(2, tokens, heads, dim, device=CUDA) * 40).to(dtype)
    caches = torch.zeros(2, tokens // 16 + 3, 16, heads, dim, device=CUDA, dtype=torch.uint8).view(FP8)
    slots = torch.randperm(caches.shape[1] * 16, device=CUDA)[:tokens]
    scales = torch.tensor(0.13, device=CUDA), torch.tensor([0.7], device=CUDA)
    kv_cache_write(key, value, caches[0], caches[1], slots, *scales)
    for cache, x, scale in zip(caches, (key, value), scales, strict=True):
        stored = cache.view(torch.uint8)[slots // 16, slots % 16]
        assert torch.equal(stored, narrowed(x, scale).view(torch.uint8))


def inputs(
    contexts: list[int], queries: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, size: float
) -> list[Tensor]:
    """Blocks of 16 scattered over a cache in which keys and values of a head are adjacent; unused slots are NaN."""
    needed = [-(-context // 16) for context in contexts]
    blocks = sum(needed)
    cache = (torch.randn(blocks, 16, kv_heads, 2 * dim, device=CUDA) * 30).to(FP8)
    order = torch.randperm(blocks, device=CUDA).int().split(needed)
    tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32, device=CUDA)
    for row, own in enumerate(order):
        tables[row, : len(own)] = own
        cache.view(torch.uint8)[own[-1], (contexts[row] - 1) % 16 + 1 :] = 127
    q = (torch.randn(sum(queries), heads, dim, device=CUDA) * size).to(dtype)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=CUDA)
    starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=CUDA)
    return [q, cache[..., :dim], cache[..., dim:], tables, lengths, starts]


def exact(arguments: list[Tensor], scale: float, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    q, key_cache, value_cache, tables, lengths, starts = arguments
    out = torch.empty(q.shape, dtype=torch.float64, device=CUDA)
    group = q.shape[1] // key_cache.shape[2]
    for seq, context in enumerate(lengths.tolist()):
        own = slice(int(starts[seq]), int(starts[seq + 1]))
        blocks = tables[seq, : -(-context // 16)].long()
        k, v = (
            widened(cache.view(torch.uint8)[blocks].view(FP8), one, torch.float64)
            .flatten(0, 1)[:context]
            .repeat_interleave(group, 1)
            for cache, one in ((key_cache, k_scale), (value_cache, v_scale))
        )
        queries = own.stop - own.start
        seen = torch.arange(context, device=CUDA) <= torch.arange(context - queries, context, device=CUDA)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k) * scale
        out[own] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (14, 2, 64), (4, 4, 80), (16, 1, 256)])
@pytest.mark.parametrize(
    "contexts, queries",
    [([1, 3, 127, 129, 4097], [1] * 5), ([20000], [1]), ([100, 3000, 1, 777], [100, 1, 1, 33]), ([512] * 2, [512] * 2)],
)
def test_attention(contexts: list[int], queries: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    arguments = inputs(contexts, queries, heads, kv_heads, dim, dtype, 1.0)
    scales = torch.tensor(0.03, device=CUDA), torch.tensor([0.5], device=CUDA)
    limits = {"max_query_len": max(queries), "max_context_len": max(contexts)}
    out = paged_attention(*arguments, **limits, k_scale=scales[0], v_scale=scales[1])
    truth = exact(arguments, dim**-0.5, *scales)
    assert float((out.double() - truth).norm() / truth.norm()) < {torch.float16: 2e-3, torch.bfloat16: 5e-3}[dtype]


def test_queries_beyond_the_range_of_fp16() -> None:
    arguments = inputs([500, 700], [1, 1], 8, 2, 128, torch.bfloat16, 1e6)
    one = torch.ones((), device=CUDA)
    out = paged_attention(*arguments, max_query_len=1, max_context_len=700, scale=1e-8, k_scale=one, v_scale=one)
    truth = exact(arguments, 1e-8, one, one)
    assert float((out.double() - truth).norm() / truth.norm()) < 5e-3


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_launch_configuration(dim: int) -> None:
    arguments = inputs([2000, 77, 1300], [1, 1, 1], 32, 8, dim, torch.bfloat16, 1.0)
    scale = torch.tensor(0.03, device=CUDA)
    truth = exact(arguments, dim**-0.5, scale, scale)
    for candidate in candidates(architecture(CUDA), (dim, 16, 1)):
        out = torch.full_like(arguments[0], torch.nan)
        decode_triton(*arguments, out, 1, 2000, dim**-0.5, 0, scale, scale, chosen=candidate.arguments())
        assert float((out.double() - truth).norm() / truth.norm()) < 5e-3, candidate
