"""Tier of KV blocks in a folder: vLLM's file system tier with checked files, a limit, and a name that binds it to the weights.

Engines of one node share the folder. Blocks outlive engines; those of other weights are never found, and age out.
"""

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from strata.serving.kv_offload import block_file, fingerprint
from strata.serving.kv_offload.folder_limit import FolderLimit

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger(__name__)

THREADS = 4  # of each kind; vLLM's default is 16
QUIET_S = 60.0  # between two log lines about failed writes


class DiskTier(FileSystemTierManager):  # type: ignore[misc]
    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        folder: str,
        capacity: int,
        weights: list[str],
        identity: Mapping[str, object],
    ) -> None:
        config = offloading_spec.config
        whole = {
            "vllm": vllm.__version__,
            "layout": config.kv_cache_layout,
            "block_bytes": config.worker_kv_bytes_per_block,
            "workers": config.parallel.world_size,
            "identity": dict(identity),
        }
        name = fingerprint.of(weights, whole)
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            root_dir=str(Path(folder, name)),
            n_read_threads=THREADS,
            n_write_threads=THREADS,
        )
        self._limit = FolderLimit(Path(folder), capacity)
        self._warned: float | None = None
        logger.info("KV blocks of these weights are in %s/%s.", folder, name)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._pool.enqueue_store(job_metadata.job_id, 1, [partial(self._write, self._blocks(job_metadata))])

    def submit_load(self, job_metadata: TransferJob) -> None:
        job_id = job_metadata.job_id
        self._load_job_keys[job_id] = list(job_metadata.keys)
        self._pool.enqueue_load(job_id, 1, [partial(self._read, job_id, self._blocks(job_metadata))])

    def _blocks(self, job: TransferJob) -> list[tuple[Path, memoryview]]:
        """Files and their places in the tier of host memory."""
        memory, size = self._primary_kv_view.cast("B"), self._block_size
        paths = (Path(self.file_mapper.get_file_name(key)) for key in job.keys)
        return [
            (path, memory[number * size : (number + 1) * size])
            for path, number in zip(paths, map(int, job.block_ids), strict=True)
        ]

    def _write(self, blocks: list[tuple[Path, memoryview]]) -> None:
        """A block that cannot be written is not on the disk; the engine goes on."""
        try:
            for path, content in blocks:
                self._limit.wrote(block_file.write(path, content))
        except OSError as error:
            if self._warned is None or time.monotonic() - self._warned > QUIET_S:
                self._warned = time.monotonic()
                logger.warning("KV blocks cannot be written to the disk tier, and are computed again when needed: %s", error)

    def _read(self, job_id: int, blocks: list[tuple[Path, memoryview]]) -> None:
        for number, (path, content) in enumerate(blocks):
            try:
                block_file.read(path, content)
            except OSError:
                self._load_progress[job_id] = number  # vLLM keeps those before, and looks the others up no more
                raise
