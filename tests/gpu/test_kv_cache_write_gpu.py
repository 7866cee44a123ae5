"""kv_cache_write on a GPU against torch's indexing, bit for bit, for every cache layout."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.kv_cache_write import kv_cache_write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def expected(key: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    result = cache.clone()
    result[slots[valid] // cache.shape[1], slots[valid] % cache.shape[1]] = key[valid]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "tokens, heads, dim, block_size",
    [(1, 1, 64, 16), (3, 3, 80, 32), (127, 8, 128, 16), (129, 5, 127, 64), (4097, 2, 256, 128), (5, 1, 1, 16), (9, 1, 1030, 16)],
)
def test_tokens_are_written_to_their_slots(tokens: int, heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    key, value = torch.randn(2, tokens, heads, dim, device="cuda").to(dtype)
    caches = torch.randn(2, tokens // block_size + 3, block_size, heads, dim, device="cuda").to(dtype)
    slots = torch.randperm(caches[0, :, :, 0, 0].numel(), device="cuda")[:tokens]
    slots[1::5] = -1
    want = expected(key, caches[0], slots), expected(value, caches[1], slots)
    kv_cache_write(key, value, caches[0], caches[1], slots)
    assert torch.equal(caches[0], want[0]) and torch.equal(caches[1], want[1])


def test_vllm_layouts() -> None:
    """Keys and values are slices of a packed projection. Caches have key and value adjacent in a block, and head-major order."""
    packed = torch.randn(50, 3 * 4 * 128, device="cuda", dtype=torch.bfloat16)
    key, value = (packed[:, part * 512 : (part + 1) * 512].view(50, 4, 128) for part in (1, 2))
    slots = torch.randperm(20 * 16, device="cuda")[:50]
    slots[7], slots[8] = 20 * 16, 2**62  # beyond the cache: skipped
    side_by_side = torch.randn(20, 2, 16, 4, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    heads_first = torch.randn(2, 20, 4, 16, 128, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    for caches in (side_by_side, heads_first):
        want = expected(key, caches[0], slots), expected(value, caches[1], slots)
        kv_cache_write(key, value, caches[0], caches[1], slots)
        assert torch.equal(caches[0], want[0]) and torch.equal(caches[1], want[1])


def test_in_a_cuda_graph() -> None:
    key, value = torch.randn(2, 32, 8, 128, device="cuda", dtype=torch.bfloat16)
    caches = torch.zeros(2, 10, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.full((32,), -1, device="cuda")
    kv_cache_write(key, value, caches[0], caches[1], slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_cache_write(key, value, caches[0], caches[1], slots)
    assert not caches.any()
    slots[:20] = torch.randperm(160, device="cuda")[:20]
    graph.replay()
    want = expected(key, torch.zeros_like(caches[0]), slots)
    assert torch.equal(caches[0], want) and caches[1].any()
