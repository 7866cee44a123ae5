"""What one engine is started with: plain data, made in the driver, read in a replica.

The driver must not import vLLM (9 s of one core, before the first replica could start), so what crosses from driver to
replica is this, and the replica turns it into Ray's and vLLM's own configurations (`engine.py`).
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strata.kernels import vllm_plugin
from strata.platform.recipe import Device, PoolSection, ServeSection
from strata.serving import mps
from strata.serving.routing.policy import Rule
from strata.serving.transport.link import SECRET_BYTES
from strata.serving.vllm_patches.nixl_delay import DELAY_US

Role = Literal["prefill", "decode"]
LEASE_S = 12
TRANSFERRED_BLOCK = 128
DECODE_STEP_TOKENS = 2048
DECODE_STEP_TOKENS_IN_GRAPHS = 512
LARGEST_GRAPH = 1024
READ_BY_CUDA = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


@dataclass(frozen=True)
class Network:
    """How the processes of one endpoint reach and know each other."""

    host: str | None  # where they listen for each other; None: on the address their node has in the cluster
    secret: bytes

    @staticmethod
    def within(one_machine: bool) -> "Network":
        return Network("127.0.0.1" if one_machine else None, secrets.token_bytes(SECRET_BYTES))


@dataclass(frozen=True)
class EngineSpec:
    role: Role
    model_id: str
    model_dir: str
    device: Device
    dtype: str
    eager: bool
    our_kernels: bool
    max_sequences: int
    kv_cache_gib: int
    threads: int
    prefix_caching: bool
    tool_parser: str | None
    reasoning_parser: str | None
    pool: PoolSection
    extra_engine_args: dict[str, Any]  # arguments of vLLM's engine
    disaggregated: bool  # there is a prefill pool
    same_tensor_parallel: bool  # its engines divide a block among as many GPUs as the decode pool's
    uses_mps: bool  # on a GPU whose multiprocessors engines share
    rule: Rule
    network: Network
    # On nodes that are there for its role: they offer the Ray resource of that name, one for each engine they have room for.
    on_own_nodes: bool = False

    @staticmethod
    def of(role: Role, serve: ServeSection, model_dir: Path, model_id: str, network: Network) -> "EngineSpec":
        pool = serve.prefill if role == "prefill" else serve.decode
        engines = serve.prefill.most + serve.decode.most
        return EngineSpec(
            role=role,
            model_id=model_id,
            model_dir=str(model_dir.resolve()),
            device=serve.device,
            dtype=serve.dtype,
            eager=serve.eager,
            our_kernels=serve.kernels == "strata",
            max_sequences=serve.max_sequences,
            kv_cache_gib=serve.kv_cache_gib,
            threads=max(1, (os.cpu_count() or 1) // engines),
            prefix_caching=serve.prefix_caching,
            tool_parser=serve.tool_parser,
            reasoning_parser=serve.reasoning_parser,
            pool=pool,
            extra_engine_args=serve.engine | pool.engine,
            disaggregated=serve.prefill.replicas > 0,
            same_tensor_parallel=serve.prefill.tensor_parallel == serve.decode.tensor_parallel,
            uses_mps=mps.wanted(serve),
            rule=Rule(**serve.remote_prefill.model_dump()),
            network=network,
        )

    def cpus(self) -> float:
        """What the whole pool asks Ray for at most."""
        return float(self.pool.most * self.resources()["num_cpus"])

    def resources(self) -> dict[str, Any]:
        """Of one replica, engine and all: it has its GPUs itself, and its engine's processes inherit them."""
        place = {"resources": {f"strata-{self.role}": 1}} if self.on_own_nodes else {}
        if self.device == "cpu":
            return {"num_cpus": 1} | place
        return {"num_cpus": 2, "num_gpus": self.pool.gpus} | place

    def environment(self) -> dict[str, str]:
        """Set on the replica's process, and so on the engine processes it starts."""
        common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
        common["VLLM_XGRAMMAR_CACHE_MB"] = os.environ.get("VLLM_XGRAMMAR_CACHE_MB", "128")  # vLLM's 512 are clients' to fill
        if self.device == "gpu":
            if self.our_kernels:
                common |= vllm_plugin.environment()
            gpu = {
                # What vLLM's own server comes to; Ray would set it to the replica's CPUs.
                "OMP_NUM_THREADS": "1",
                # Where UCX sees no NVLink (engines that share a card, cards on PCIe, virtual machines) it has engines of one
                # node read each other's blocks over TCP (vllm-project/vllm 52607), unless it is told otherwise.
                READ_BY_CUDA: os.environ.get(READ_BY_CUDA, "on"),
            }
            return common | gpu | (mps.environment(self.pool.sm_share, self.role == "prefill") if self.uses_mps else {})
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
        """vLLM's. All of an engine's GPUs are on one node: its processes are plain ones, not Ray's."""
        kwargs: dict[str, Any] = {
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_num_seqs": self.max_sequences,
            "enable_prefix_caching": self.prefix_caching,
            "enable_logging_iteration_details": True,  # told to `engine_stats.py`, not logged
        }
        if self.reasoning_parser is not None:
            kwargs["reasoning_parser"] = self.reasoning_parser
        if self.disaggregated:
            kwargs["kv_transfer_config"] = self._transfer()
        if self.device == "gpu":
            kwargs["tensor_parallel_size"] = self.pool.tensor_parallel
            kwargs["distributed_executor_backend"] = "mp" if self.pool.tensor_parallel > 1 else "uni"
            kwargs["gpu_memory_utilization"] = self.pool.gpu_memory
            if self.disaggregated:
                # A transfer is posted block by block, between two steps, and every running stream waits for that.
                kwargs["block_size"] = TRANSFERRED_BLOCK
        if (step := self._step_tokens()) is not None:
            kwargs["max_num_batched_tokens"] = step
        if self.our_kernels:
            small = step is not None and step <= LARGEST_GRAPH
            kwargs |= vllm_plugin.engine_arguments(largest_graph=step if small else None)
        return kwargs | self.extra_engine_args

    def _step_tokens(self) -> int | None:
        """vLLM's own choice makes the most of a GPU. A decode engine with a prefill pool is there for its streams: what it still
        prefills itself comes in smaller pieces, and the smaller ones pay where kernels can have them in CUDA graphs."""
        if self.pool.step_tokens is None and self.device == "gpu" and self.role == "decode" and self.disaggregated:
            return max(DECODE_STEP_TOKENS_IN_GRAPHS if self.our_kernels else DECODE_STEP_TOKENS, self.max_sequences)
        return self.pool.step_tokens

    def frontend_kwargs(self) -> dict[str, Any]:
        """Of vLLM's OpenAI classes."""
        if self.tool_parser is None:
            return {}
        return {"tool_call_parser": self.tool_parser, "enable_auto_tool_choice": True}

    def _transfer(self) -> dict[str, Any]:
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "strata.serving.vllm_patches.side_channel",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            # Blocks that were lost with their owner are computed here, instead of failing the request.
            "kv_load_failure_policy": "recompute",
            # Blocks whose reader died are free again after this many seconds (vLLM's default is 30).
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        if self.device == "cpu":
            transfer["kv_buffer_device"] = "cpu"
        elif self.same_tensor_parallel:  # else vLLM must be able to take a block apart by its heads
            transfer["kv_connector_module_path"] = "strata.serving.vllm_patches.nixl_layout"
        return transfer


@dataclass(frozen=True)
class GatewaySpec:
    model_id: str
    host: str
    port: int
    gateways: int
    decode_replicas: int
    max_sequences: int
    max_queue: int
    disaggregated: bool
    network: Network
    keys_file: str | None = None  # of API keys; None: what the environment of the gateway's own process says
    # So many on each node that has engines, instead of so many in all: each node offers one of this Ray resource.
    on_every_node: bool = False

    @staticmethod
    def of(serve: ServeSection, model_id: str, network: Network) -> "GatewaySpec":
        return GatewaySpec(
            model_id=model_id,
            host=serve.host,
            port=serve.port,
            gateways=serve.gateways,
            decode_replicas=serve.decode.replicas,
            max_sequences=serve.max_sequences,
            max_queue=serve.max_queue,
            disaggregated=serve.prefill.replicas > 0,
            network=network,
        )

    def capacity(self, decode_replicas: int) -> int:
        """Sequences that may be under way, running or queued. Replicas that are being replaced count, for those who wait for
        them will be served."""
        return max(decode_replicas, self.decode_replicas) * self.max_sequences + self.max_queue
