"""Copies KV blocks between the KV cache of a CPU engine and its tier in host memory. vLLM has copies for GPUs only."""

import time
from collections.abc import Sequence

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, in the engine's thread: a block takes microseconds, and prefilling it milliseconds."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._groups = caches.group_data_refs
        self._cache = [each.tensor.view(torch.int8) for each in caches.tensors]  # [blocks, bytes]
        self._tier = [region.create_next_worker_view(each.page_size_bytes) for each in caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        self._copy(job_id, (self._cache, src_spec), (self._tier, dst_spec), src_spec.group_sizes)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        self._copy(job_id, (self._tier, src_spec), (self._cache, dst_spec), dst_spec.group_sizes)
        return True

    def _copy(
        self,
        job_id: int,
        source: tuple[list[torch.Tensor], BlockIDsLoadStoreSpec],
        target: tuple[list[torch.Tensor], BlockIDsLoadStoreSpec],
        group_sizes: Sequence[int],
    ) -> None:
        began, moved, first = time.perf_counter(), 0, 0
        (sources, origin), (targets, place) = source, target
        assert len(origin.block_ids) == len(place.block_ids) == sum(group_sizes)
        for size, refs in zip(group_sizes, self._groups, strict=True):
            chosen = slice(first, first + size)
            for here, there in zip(origin.block_ids[chosen].tolist(), place.block_ids[chosen].tolist(), strict=True):
                for ref in refs:
                    page = ref.page_size_bytes
                    targets[ref.tensor_idx][there, :page] = sources[ref.tensor_idx][here, :page]
                    moved += page
            first += size
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - began))

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: a submitted copy is done."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._tier.clear()
        self._region.cleanup()
