"""Copies between the KV cache of a CPU engine and its tier, for each layout that vLLM's connector registers."""

import uuid
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from strata.serving.kv_offload.host_worker import HostWorker

BLOCKS, TIER = 8, 5


def region(page: int) -> SharedOffloadRegion:
    stride = -(-page // PAGESIZE) * PAGESIZE
    made = SharedOffloadRegion(f"test-{uuid.uuid4()}", TIER, 0, stride, page)
    Path(made.mmap_path).unlink()
    made._creator = False
    return made


@pytest.fixture
def layers() -> Iterator[tuple[HostWorker, list[torch.Tensor]]]:
    """Three layers in tensors of their own."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randint(-128, 127, (BLOCKS, 96), dtype=torch.int8, generator=generator) for _ in range(3)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(each, 96) for each in tensors], [[CanonicalKVCacheRef(number, 96) for number in range(3)]]
    )
    worker = HostWorker(caches, region(3 * 96))
    yield worker, tensors
    worker.shutdown()


def cache_blocks(*numbers: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(numbers), group_sizes=[len(numbers)], block_indices=[0])


def test_blocks_come_back_as_they_were(layers: tuple[HostWorker, list[torch.Tensor]]) -> None:
    worker, tensors = layers
    before = [each.clone() for each in tensors]
    assert worker.submit_store(1, cache_blocks(3, 0, 7), CPULoadStoreSpec([4, 1, 0]))
    for each in tensors:
        each.zero_()
    assert worker.submit_load(2, CPULoadStoreSpec([0, 4]), cache_blocks(2, 5))
    for each, old in zip(tensors, before, strict=True):
        assert torch.equal(each[2], old[7]) and torch.equal(each[5], old[3])
        assert not each[[0, 1, 3, 4, 6, 7]].any()
    store, load = worker.get_finished()
    assert (store.job_id, store.success, store.transfer_size) == (1, True, 3 * 3 * 96)
    assert (load.job_id, load.success, load.transfer_size) == (2, True, 2 * 3 * 96)
    assert worker.get_finished() == []


def test_groups_of_a_hybrid_model(layers: tuple[HostWorker, list[torch.Tensor]]) -> None:
    """Groups share the tensors, and a group may have no blocks in a job."""
    worker, tensors = layers
    worker._groups = [[CanonicalKVCacheRef(0, 96)], [CanonicalKVCacheRef(1, 64)], [CanonicalKVCacheRef(2, 96)]]
    before = [each.clone() for each in tensors]
    worker.submit_store(1, GPULoadStoreSpec([1, 2, 6], [1, 2, 0], [0, 0, 0]), CPULoadStoreSpec([0, 1, 2]))
    for each in tensors:
        each.zero_()
    worker.submit_load(2, CPULoadStoreSpec([0, 1, 2]), GPULoadStoreSpec([1, 2, 6], [1, 2, 0], [0, 0, 0]))
    assert torch.equal(tensors[0][1], before[0][1]) and not tensors[0][[2, 6]].any()
    assert torch.equal(tensors[1][[2, 6], :64], before[1][[2, 6], :64]) and not tensors[1][:, 64:].any()
    assert not tensors[2].any()


def test_no_name_is_left_in_shared_memory(layers: tuple[HostWorker, list[torch.Tensor]]) -> None:
    worker, _ = layers
    assert not Path(worker._region.mmap_path).exists()


def test_blocks_that_hold_all_layers_are_copied_whole() -> None:
    """vLLM's connector registers them as one tensor, so `whole_blocks.py` may accept NIXL's layout."""
    layers, heads, tokens, content = 3, 2, 16, 8
    memory = torch.randn(BLOCKS, heads, layers, tokens, content)  # BHLNC
    caches = {f"layer{number}": memory[:, :, number] for number in range(layers)}
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=content // 2, dtype=torch.float32)
    page = layers * spec.page_size_bytes
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(caches), spec)])
    made = []

    def worker_for(registered: CanonicalKVCaches) -> HostWorker:
        made.append(HostWorker(registered, region(page)))
        return made[0]

    offloading = SimpleNamespace(get_worker=worker_for, replicated_layout=False)
    unmapped = SimpleNamespace(tensor_parallel_size=1, prefill_context_parallel_size=1, world_size=2)
    OffloadingConnectorWorker(offloading, SimpleNamespace(parallel_config=unmapped), config).register_kv_caches(caches)
    (worker,) = made
    before = memory.clone()
    worker.submit_store(1, cache_blocks(6), CPULoadStoreSpec([2]))
    memory.zero_()
    worker.submit_load(2, CPULoadStoreSpec([2]), cache_blocks(1))
    assert torch.equal(memory[1], before[6]) and not memory[[0, 2, 3, 4, 5, 6, 7]].any()
    assert worker.get_finished()[0].transfer_size == page
    worker.shutdown()
