"""Engine settings of the peers: those of the recipe, without Strata's own changes."""

import json
import os
from typing import Any

from strata.platform.recipe import PoolSection, ServeSection

WHOLE_GPU = 0.85  # share of a GPU's memory for an engine that has the GPU to itself


def kwargs(section: ServeSection, prefix_caching: bool, sharing: int = 1) -> dict[str, Any]:
    """vLLM's arguments for one engine on the whole machine, whose memory `sharing` engines divide."""
    common = {
        "dtype": section.dtype,
        "max_num_seqs": section.max_sequences,
        "enforce_eager": section.eager,
        "kv_cache_dtype": section.kv_cache_dtype,
        "enable_prefix_caching": prefix_caching,
        **section.engine,
    }
    if section.device == "cpu":
        return common
    return common | {"tensor_parallel_size": section.decode.tensor_parallel, "gpu_memory_utilization": WHOLE_GPU / sharing}


def pool_kwargs(section: ServeSection, pool: PoolSection, role: str, prefix_caching: bool, sharing: int = 1) -> dict[str, Any]:
    """vLLM's arguments for one engine of a disaggregated pair, on its pool's share of the machine."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": role}
    if section.device == "cpu":
        return kwargs(section, prefix_caching) | {"kv_transfer_config": transfer | {"kv_buffer_device": "cpu"}}
    share = {"tensor_parallel_size": pool.tensor_parallel, "gpu_memory_utilization": pool.gpu_memory / sharing}
    return kwargs(section, prefix_caching) | share | {"kv_transfer_config": transfer}


def flags(settings: dict[str, Any]) -> list[str]:
    """The settings as options of vLLM's command line."""
    words = []
    for name, value in settings.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, dict | list):
            words += [f"--{dashed}", json.dumps(value)]
        else:
            words += [f"--{dashed}", str(value)]
    return words


def environment(section: ServeSection, engines: int) -> dict[str, str]:
    common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if section.device == "gpu":
        return common
    cpu = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // engines)),
        "VLLM_CPU_KVCACHE_SPACE": str(section.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if section.eager:
        cpu["TORCH_COMPILE_DISABLE"] = "1"  # else vLLM still compiles its sampler, in the first request that samples
    return common | cpu
