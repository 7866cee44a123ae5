"""Counts the prompt tokens that an engine loads, by the tier that had them.

vLLM counts lookups of blocks, and looks a block up again while its request waits. Here a block counts once, when it is loaded
into the KV cache. One that was read from a disk for it counts as the disk's.
"""

from collections.abc import Collection, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.manager import JobMetadata, TieringOffloadingManager

from strata.serving.kv_offload.settings import FOUND_TOKENS

CPU, DISK = "cpu", "disk"


class CountingManager(TieringOffloadingManager):  # type: ignore[misc]
    def __init__(self, built: TieringOffloadingManager, tokens_per_block: Sequence[int]) -> None:
        """Takes the tiers of a manager that vLLM built and nothing has used."""
        super().__init__(built.primary_tier, built.secondary_tiers)
        self._tokens_per_block = tokens_per_block
        self._found = OffloadingConnectorStats()
        self._read: set[OffloadKey] = set()  # from a disk, and not loaded yet

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        for key in keys:
            if (group := get_offload_group_idx(key)) == 0:  # of a hybrid model, the first group of layers stands for all
                tier = DISK if key in self._read else CPU
                self._found.increase_counter(FOUND_TOKENS, self._tokens_per_block[group], (tier,))
        self._read.difference_update(keys)
        return super().prepare_load(keys, req_context)

    def _complete_promotion(self, job_metadata: JobMetadata, completed_job: JobResult) -> None:
        super()._complete_promotion(job_metadata, completed_job)
        keys = job_metadata.transfer_job.keys if completed_job.success else completed_job.successful_keys or ()
        if len(self._read) > self.primary_tier._num_blocks:  # those that were evicted again without a load
            self._read.clear()
        self._read.update(keys)

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = super().get_stats()
        found, self._found = self._found, OffloadingConnectorStats()
        if stats is None:
            return None if found.is_empty() else found
        return stats.aggregate(found)
