"""vLLM's spec of offloading with tiers: host memory first, then those of `secondary_tiers`.

Differs from vLLM's in three ways. It runs on CPU engines. Its manager counts found tokens by tier. And the file of the shared
memory has no name once all have mapped it, so that a killed engine leaves nothing in /dev/shm; vLLM does so only without
secondary tiers.
"""

from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from strata.serving.kv_offload.found_tokens import CountingManager
from strata.serving.kv_offload.host_worker import HostWorker
from strata.serving.kv_offload.settings import FOUND_TOKENS

MIB = 1 << 20


class TieredSpec(TieringOffloadingSpec):  # type: ignore[misc]
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        counted = OffloadingCounterMetadata("Prompt tokens loaded, by the tier that had them.", ("tier",))
        return {**super().build_metric_definitions(extra_config), FOUND_TOKENS: counted}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if config.worker_kv_bytes_per_block > 0 and self.num_blocks == 0:
            raise ValueError(
                f"kv_offload.cpu_gib holds no block of the KV cache: a block of {max(self.tokens_per_block)} tokens has "
                f"{self.kv_bytes_per_chunk / MIB:.1f} MiB. Raise serve.kv_offload.cpu_gib."
            )
        self._counting: CountingManager | None = None
        self._host_worker: HostWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._counting is None:
            built = super().get_manager()
            assert isinstance(built, TieringOffloadingManager) and self._scheduler_mmap is not None
            self._counting = CountingManager(built, self.tokens_per_block)
            # The scheduler is created after the workers have registered their caches, and maps the file last.
            Path(self._scheduler_mmap.mmap_path).unlink(missing_ok=True)
        return self._counting

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            worker = super().get_worker(kv_caches)
            worker._mmap_region._creator = False  # the scheduler removes the name
            return worker
        if self._host_worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_blocks=self.num_blocks,
                rank=self.config.parallel.rank,
                kv_bytes_per_block=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            region._creator = False
            self._host_worker = HostWorker(kv_caches, region)
        return self._host_worker
