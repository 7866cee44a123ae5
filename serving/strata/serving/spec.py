"""What one engine is started with: plain data, made in the driver, read in a replica.

The driver must not import vLLM (9 s of one core, before the first replica could start), so what crosses from driver to
replica is this, and the replica turns it into Ray's and vLLM's own configurations (`engine.py`).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strata.platform.recipe import Device, PoolSection, ServeSection
from strata.serving.nixl_patience import DELAY_US

Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class EngineSpec:
    role: Role
    model_id: str
    model_dir: str
    device: Device
    dtype: str
    eager: bool
    max_sequences: int
    kv_cache_gib: int
    threads: int
    pool: PoolSection
    nixl_port: int

    @staticmethod
    def of(role: Role, serve: ServeSection, model_dir: Path, model_id: str, nixl_port: int) -> "EngineSpec":
        pool = serve.prefill if role == "prefill" else serve.decode
        engines = serve.prefill.replicas + serve.decode.replicas
        return EngineSpec(
            role=role,
            model_id=model_id,
            model_dir=str(model_dir.resolve()),
            device=serve.device,
            dtype=serve.dtype,
            eager=serve.eager,
            max_sequences=serve.max_sequences,
            kv_cache_gib=serve.kv_cache_gib,
            threads=max(1, (os.cpu_count() or 1) // engines),
            pool=pool,
            nixl_port=nixl_port,
        )

    def cpus(self) -> float:
        """What the whole pool asks Ray for."""
        return self.pool.replicas * sum(bundle["CPU"] for bundle in self.bundles())

    def bundles(self) -> list[dict[str, float]]:
        """What Ray reserves: the replica itself sits in the first bundle, the engine's GPU workers in one each."""
        if self.device == "cpu":
            return [{"CPU": 1.0}]
        share = min(self.pool.gpus, 1.0)
        return [{"CPU": 2.0, "GPU": share}] + [{"CPU": 1.0, "GPU": share}] * (self.pool.tensor_parallel - 1)

    def environment(self) -> dict[str, str]:
        """Set on the replica's process, and so on the engine processes it starts."""
        common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.device == "gpu":
            return common
        cpu = {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Lets vLLM keep the one-process executor that `engine.py` asks for.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            DELAY_US: "1000",
            # vLLM sets this itself, unless NIXL is imported before, as our plugin does.
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
        if self.eager:
            # Without it vLLM still compiles its sampler, in the first request that samples: 25 s, and a C++ compiler.
            cpu["TORCH_COMPILE_DISABLE"] = "1"
        return common | cpu

    def engine_kwargs(self) -> dict[str, Any]:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer"}
        kwargs: dict[str, Any] = {
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_num_seqs": self.max_sequences,
            "kv_transfer_config": transfer,
        }
        if self.device == "cpu":
            transfer["kv_buffer_device"] = "cpu"
        else:
            kwargs["tensor_parallel_size"] = self.pool.tensor_parallel
            kwargs["gpu_memory_utilization"] = self.pool.gpu_memory
        return kwargs
