"""vLLM's GPU worker for engines that share a GPU and start at the same time.

Chosen by vLLM's argument `worker_cls`. Imports vLLM: only engine processes import this file.
"""

import fcntl
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.startup_plan import compute_plan_fingerprint

from strata.serving.gpu_sharing import claims, kv_sizes, own_memory
from strata.serving.gpu_sharing.claims import LOOK_S, Share
from strata.serving.gpu_sharing.own_memory import OUTSIDE_TORCH, OwnMemory

COMPILE_LIMIT_S = 600.0


class Worker(gpu_worker.Worker):  # type: ignore[misc]
    """A worker that claims its share of the GPU, and from then on counts only its own memory."""

    _share: Share
    _end_view: Callable[[], None] | None = None
    _recorded: bool = False

    def init_device(self) -> None:
        device = torch.device("cuda", current_platform.logical_device_id_to_visible_device_id(self.local_rank))
        _, total = torch.accelerator.get_memory_info(device)
        share = math.ceil(total * self.cache_config.gpu_memory_utilization)  # as vLLM's `request_memory`
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        # vLLM's allocator for sleeping engines bypasses PyTorch's, which then does not know the engine's memory.
        sleeps = bool(self.model_config.enable_sleep_mode)
        self._share = claims.claim(
            claims.folder_of(gpu), share, lambda: int(torch.accelerator.get_memory_info(device)[0]), sleeps
        )
        super().init_device()
        if not self._share.alone:
            before = self.init_snapshot
            memory = OwnMemory(before.free_memory, before.total_memory, before.torch_memory)
            self._end_view = own_memory.install(memory, self.device)

    def determine_available_memory(self) -> int:
        cache = self.cache_config
        if not self._share.alone and cache.kv_cache_memory_bytes is None:
            cache.kv_cache_memory_bytes = kv_sizes.read(self._records, self._record)
            self._recorded = cache.kv_cache_memory_bytes is not None
        if self.parallel_config.world_size == 1 and not self.model_config.enforce_eager:
            self.model_runner.profile_run = _one_compiles(self.model_runner.profile_run, self.vllm_config.compute_hash())
        return int(super().determine_available_memory())

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self._end_view is not None:
            self._end_view()
        self._share.started()
        measured = getattr(self, "available_kv_cache_memory_bytes", None)
        if measured is not None and not self._share.alone and not self._recorded:
            kv_sizes.write(self._records, self._record, int(measured))
        return times

    @property
    def _records(self) -> Path:
        return Path(envs.VLLM_CACHE_ROOT) / "strata_kv_sizes"

    @cached_property
    def _record(self) -> str:
        graphs = self.vllm_config.compilation_config
        return kv_sizes.key(
            {
                "settings": compute_plan_fingerprint(self.vllm_config, self.rank, self.parallel_config.world_size),
                "share": self.requested_memory,
                "outside_torch": OUTSIDE_TORCH,
                "graphs": [graphs.cudagraph_mode, graphs.cudagraph_capture_sizes, self.model_config.enforce_eager],
                "sequences": [self.scheduler_config.max_num_seqs, self.scheduler_config.max_num_batched_tokens],
            }
        )


def _one_compiles(profile: Callable[[], None], settings: str) -> Callable[[], None]:
    """`profile`, which compiles the model, one at a time among engines with the same settings: the others then load the compiled
    code, where they would compile the same and write the same files. Only for engines with one worker: those of a tensor-parallel
    engine must compile together."""

    def run() -> None:
        with _turn(Path(envs.VLLM_CACHE_ROOT) / "strata_locks" / settings):
            profile()

    return run


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Holds the lock, or goes on without it after COMPILE_LIMIT_S or where there can be no lock."""
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock, began = held.enter_context(path.open("w")), time.monotonic()
            while not _locked(lock) and time.monotonic() - began < COMPILE_LIMIT_S:
                time.sleep(LOOK_S)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
