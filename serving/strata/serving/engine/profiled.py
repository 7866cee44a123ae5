"""Torch profile of an engine by vLLM's own profiler, on request: files in a folder that the endpoint's starter shares."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from strata.platform.files import write_atomic

START, STOP = "start", "stop"  # files that request a profile, and in an engine's own folder those that confirm it
LOG = "scheduler.jsonl"  # of an engine's scheduler, in the engine's own folder
SCHEDULERS = "strata.serving.engine.recorded_scheduler"
LOOK_S = 0.2


def prepare(config: Any, role: str, replica: str) -> Path | None:
    """Prepares vLLM's configuration: a folder of the engine's own, and a scheduler that records its steps. Returns the folder;
    None for an engine without a profiler."""
    profiler, scheduler = config.profiler_config, config.scheduler_config
    if profiler.profiler != "torch":
        return None
    own = Path(profiler.torch_profiler_dir) / f"{role}-{replica}"
    own.mkdir(parents=True, exist_ok=True)
    profiler.torch_profiler_dir = str(own)
    scheduler.scheduler_cls = f"{SCHEDULERS}.{'RecordedAsyncScheduler' if scheduler.async_scheduling else 'RecordedScheduler'}"
    return own


async def follow(vllm: Any, own: Path, role: str, replica: str) -> None:
    """Starts and stops the profile when it is requested. The confirmation of the stop has the facts about the engine."""
    for request, call in ((START, vllm.start_profile), (STOP, vllm.stop_profile)):
        while not (own.parent / request).exists():
            await asyncio.sleep(LOOK_S)
        await call()
        write_atomic(own / request, json.dumps(_facts(vllm.vllm_config, role, replica)))


def _facts(config: Any, role: str, replica: str) -> dict[str, Any]:
    cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    return {
        "role": role,
        "replica": replica,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_sequences": scheduler.max_num_seqs,
        "step_tokens": scheduler.max_num_batched_tokens,
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "tensor_parallel": parallel.tensor_parallel_size,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
    }
