"""Engine and gateway settings as plain data: created in the driver, read in a replica.

The driver must not import vLLM (9 s of one core before the first replica could start). The replica converts this into vLLM's
configuration (`engine.py`).
"""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from strata.kernels import vllm_plugin
from strata.platform.files import cache_dir
from strata.platform.recipe import Device, PoolSection, ServeSection
from strata.platform.recipe.serve import FilesSection, SloSection
from strata.serving import mps
from strata.serving.adapters import recipe as adapter_recipe
from strata.serving.adapters.entry import Entry, store
from strata.serving.adapters.recipe import AdapterSpec
from strata.serving.api import images
from strata.serving.gateway import admission
from strata.serving.kv_offload import settings as kv_offload
from strata.serving.kv_offload.settings import KvOffload
from strata.serving.models import adapter
from strata.serving.models.adapter import Adapter
from strata.serving.routing.policy import Rule
from strata.serving.runtime import autoscaling
from strata.serving.speculation import settings as speculation
from strata.serving.speculation.settings import Speculation
from strata.serving.transport.link import SECRET_BYTES
from strata.serving.vllm_patches.nixl_delay import DELAY_US

Role = Literal["prefill", "decode"]
LEASE_S = 12
TRANSFERRED_BLOCK = 128
# vLLM's kernels take multiples of 32, and its default is 128. Smaller blocks find more of a conversation in the prefix cache, at
# the same speed: of each turn, half a block is computed again on average.
CPU_BLOCK = 32
DECODE_STEP_TOKENS = 2048
DEFAULT_STEP_TOKENS = 8192  # vLLM's default of a server on large GPUs; prompts of smaller steps wait a little longer
DECODE_STEP_TOKENS_IN_GRAPHS = 512
LARGEST_GRAPH = 1024
WHOLE_BLOCKS = "strata.serving.vllm_patches.nixl_layout"
READ_BY_CUDA = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
WAIT_POLICY, SPIN = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
SHARING_WORKER = "strata.serving.gpu_sharing.worker.Worker"  # by name: it imports vLLM
CPU_WORKER = "strata.serving.engine.cpu_worker.Worker"


@dataclass(frozen=True)
class Network:
    """Address and shared secret of the links between an endpoint's processes."""

    host: str | None  # address to listen on; None: the node's address in the cluster
    secret: bytes

    @staticmethod
    def within(one_machine: bool) -> "Network":
        return Network("127.0.0.1" if one_machine else None, secrets.token_bytes(SECRET_BYTES))


def directory_of(model_id: str, revision: str) -> str:
    return f"{model_id}@{revision}" if revision else model_id


@dataclass(frozen=True)
class EngineSpec:
    role: Role
    model_id: str
    model_dir: str  # the base model's, with an adapter
    tokenizer_dir: str
    device: Device
    dtype: str
    eager: bool
    our_kernels: bool
    max_sequences: int
    kv_cache_gib: int
    kv_cache_dtype: str
    threads: int
    prefix_caching: bool
    tool_parser: str | None
    reasoning_parser: str | None
    pool: PoolSection
    extra_engine_args: dict[str, Any]  # for vLLM's AsyncEngineArgs
    disaggregated: bool  # there is a prefill pool
    same_tensor_parallel: bool  # both pools have the same tensor_parallel
    uses_mps: bool  # engines share a GPU through MPS
    rule: Rule
    network: Network
    routing: Literal["kv", "least-busy"] = "least-busy"  # of gateways
    # Runs on dedicated nodes, which offer the Ray resource `strata-<role>`, one unit per engine.
    on_own_nodes: bool = False
    adapter: Adapter | None = None  # on the model in `model_dir`
    adapters: AdapterSpec | None = None  # that come and go, on the model in `model_dir`
    speculation: Speculation | None = None
    kv_offload: KvOffload | None = None  # tiers beyond the KV cache
    stream_tokens: int = 0  # of all streams in one step, drafts included
    slo: SloSection | None = None  # scale the pool by it
    revision: str = ""  # of the model's weights; empty for those of the endpoint's start
    origin: str = ""  # the model's first revision

    @staticmethod
    def of(role: Role, serve: ServeSection, model_dir: Path, model_id: str, network: Network, revision: str = "") -> "EngineSpec":
        pool = serve.prefill if role == "prefill" else serve.decode
        engines = serve.prefill.most + serve.decode.most
        apart = adapter.read(model_dir) if serve.adapter == "apart" else None
        return EngineSpec(
            role=role,
            model_id=model_id,
            model_dir=str((apart.base if apart else model_dir).resolve()),
            tokenizer_dir=str(model_dir.resolve()),
            device=serve.device,
            dtype=serve.dtype,
            eager=serve.eager,
            our_kernels=serve.kernels == "strata",
            max_sequences=serve.max_sequences,
            kv_cache_gib=serve.kv_cache_gib,
            kv_cache_dtype=serve.kv_cache_dtype,
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
            routing=serve.routing,
            adapter=apart,
            adapters=adapter_recipe.spec(serve, model_dir),
            speculation=speculation.of(serve, role),
            kv_offload=KvOffload.of(serve.kv_offload),
            stream_tokens=serve.most_stream_tokens,
            slo=serve.slo,
            revision=revision,
        )

    @property
    def directory(self) -> str:
        """Name of the directory in which the model's replicas find each other. Those of different weights never do."""
        return directory_of(self.model_id, self.revision)

    @property
    def adapters_directory(self) -> str:
        """Name of the directory of adapters, the same for all revisions of the model."""
        return store(directory_of(self.model_id, self.origin))

    def scaling(self) -> dict[str, Any] | None:
        """Settings of Serve's autoscaler; None for a fixed number of replicas."""
        if self.pool.most <= self.pool.replicas:
            return None
        if self.slo is None:
            return autoscaling.config(self.pool.replicas, self.pool.most)
        return autoscaling.slo_config(
            endpoint=self.directory,
            role=self.role,
            slo={"ttft_s": self.slo.ttft_s, "itl_s": self.slo.itl_s},
            bounds={
                "least": self.pool.replicas,
                "most": self.pool.most,
                "cooldown_s": self.slo.cooldown_s,
                "idle_s": self.slo.idle_s,
            },
            max_sequences=self.max_sequences,
            step_tokens=self._step_tokens() or DEFAULT_STEP_TOKENS,
            disaggregated=self.disaggregated,
        )

    @property
    def announces_prefixes(self) -> bool:
        """Gateways route by what the replicas of this pool have cached, which needs more than one of them."""
        return self.role == "decode" and self.prefix_caching and self.routing == "kv" and self.pool.most > 1

    @property
    def kv_events(self) -> bool:
        """The engine reports the blocks of its cache, for gateways or for the choice between local and remote prefill."""
        return self.announces_prefixes or (self.role == "decode" and self.prefix_caching and self.disaggregated)

    def cpus(self) -> float:
        """CPUs that the pool requests from Ray at its maximum size."""
        return float(self.pool.most * self.resources()["num_cpus"])

    def resources(self) -> dict[str, Any]:
        """Ray resources of one replica. The replica owns the GPUs, and its engine's processes inherit them."""
        place = {"resources": {f"strata-{self.role}": 1}} if self.on_own_nodes else {}
        if self.device == "cpu":
            return {"num_cpus": 1} | place
        return {"num_cpus": 2, "num_gpus": self.pool.gpus} | place

    def environment(self) -> dict[str, str]:
        """Environment of the replica's process, which its engine processes inherit."""
        common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
        common["VLLM_XGRAMMAR_CACHE_MB"] = os.environ.get(
            "VLLM_XGRAMMAR_CACHE_MB", "128"
        )  # vLLM's default of 512 could be filled by clients
        if "profiler_config" in self.extra_engine_args:
            common["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"  # vLLM's own ranges in the traces
        if self.device == "gpu":
            if self.our_kernels:
                common |= vllm_plugin.environment()
            gpu = {
                # As in vLLM's own server. Ray would set it to the replica's CPUs.
                "OMP_NUM_THREADS": "1",
                # Without NVLink (engines that share a GPU, GPUs on PCIe, virtual machines) UCX would transfer blocks between
                # engines of one node over TCP (vllm-project/vllm 52607).
                READ_BY_CUDA: os.environ.get(READ_BY_CUDA, "on"),
            }
            return common | gpu | (mps.environment(self.pool.sm_share, self.role == "prefill") if self.uses_mps else {})
        cpu = {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Numba, which vLLM looks up n-grams with, shares OpenMP with the engine's kernels and would give them its own number
            # of threads: each kernel would then take ten times as long.
            "NUMBA_NUM_THREADS": "1",
            # Required by the single-process executor that `engine.py` sets.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            DELAY_US: "1000",
            # vLLM sets this itself, but not if NIXL was imported before, which our plugin does.
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
        if WAIT_POLICY not in os.environ:
            # Rounds that OpenMP's threads spin when they wait, enough to bridge two kernels of a step. By default they spin 300
            # times as long, between steps, too, on the cores that the gateway and the replica need then.
            cpu[SPIN] = os.environ.get(SPIN, "1000")
        if self.eager:
            # Without it vLLM compiles its sampler in the first request that samples: 25 s, and it needs a C++ compiler.
            cpu["TORCH_COMPILE_DISABLE"] = "1"
        return common | cpu

    def engine_kwargs(self) -> dict[str, Any]:
        """Arguments of vLLM's engine. An engine's GPUs are on one node, so its workers are plain processes, not Ray actors."""
        kwargs: dict[str, Any] = {
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "kv_cache_dtype": self.kv_cache_dtype,
            "max_num_seqs": self.max_sequences,
            "enable_prefix_caching": self.prefix_caching,
            "enable_logging_iteration_details": True,  # read by `engine_stats.py`, not logged
            "limit_mm_per_prompt": {"image": images.MOST, "video": 0, "audio": 0},  # without effect on a model of text
        }
        if self.adapter is not None:
            kwargs |= {"enable_lora": True, "max_lora_rank": self.adapter.rank_bound}
        if self.adapters is not None:
            kwargs |= {"enable_lora": True, "max_lora_rank": self.adapters.rule.rank}
            kwargs |= {"max_loras": self.adapters.slots, "max_cpu_loras": self.adapters.in_memory}
        if self.speculation is not None:
            kwargs |= self.speculation.engine_arguments(self.max_sequences)
        if self.reasoning_parser is not None:
            kwargs["reasoning_parser"] = self.reasoning_parser
        if (transfer := self._transfer()) is not None:
            kwargs["kv_transfer_config"] = transfer
        if self.device == "gpu":
            kwargs["tensor_parallel_size"] = self.pool.tensor_parallel
            kwargs["distributed_executor_backend"] = "mp" if self.pool.tensor_parallel > 1 else "uni"
            kwargs["gpu_memory_utilization"] = self.pool.gpu_memory
            if self.pool.gpus < 1:
                kwargs["worker_cls"] = SHARING_WORKER
            if self.disaggregated:
                # A transfer is posted block by block between two steps, while every running stream waits.
                kwargs["block_size"] = TRANSFERRED_BLOCK
        else:
            kwargs["block_size"] = CPU_BLOCK
            if self.eager:  # compiled kernels have a fixed number of threads, and norms of their own
                kwargs["worker_cls"] = CPU_WORKER
        if (step := self._step_tokens()) is not None:
            kwargs["max_num_batched_tokens"] = step
        if self.our_kernels:
            small = step is not None and step <= LARGEST_GRAPH
            kwargs |= vllm_plugin.engine_arguments(largest_graph=step if small else None)
        return kwargs | self.extra_engine_args

    def _step_tokens(self) -> int | None:
        """Token budget of a step. vLLM's default maximizes throughput. A decode engine with a prefill pool favours its streams:
        its local prefills use smaller chunks, smaller still if our kernels can run them in CUDA graphs."""
        if self.pool.step_tokens is None and self.device == "gpu" and self.role == "decode" and self.disaggregated:
            return max(DECODE_STEP_TOKENS_IN_GRAPHS if self.our_kernels else DECODE_STEP_TOKENS, self.stream_tokens)
        return self.pool.step_tokens

    def frontend_kwargs(self) -> dict[str, Any]:
        """Arguments of vLLM's OpenAI classes."""
        if self.tool_parser is None:
            return {}
        return {"tool_call_parser": self.tool_parser, "enable_auto_tool_choice": True}

    def _transfer(self) -> dict[str, Any] | None:
        """Connectors of the engine: NIXL beside another pool, and that of the tiers."""
        nixl = self._nixl() if self.disaggregated else None
        if self.kv_offload is None:
            return nixl
        folders = [self.model_dir, self.tokenizer_dir]
        identity = {"dtype": self.dtype, "our_kernels": self.our_kernels, "arguments": self.extra_engine_args}
        whole_blocks = nixl is not None and nixl["kv_connector_module_path"] == WHOLE_BLOCKS
        tiers = self.kv_offload.connector(folders, identity, whole_blocks)
        return tiers if nixl is None else kv_offload.beside(nixl, tiers)

    def _nixl(self) -> dict[str, Any]:
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "strata.serving.vllm_patches.side_channel",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            # Blocks that were lost with their owner are recomputed here instead of failing the request.
            "kv_load_failure_policy": "recompute",
            # Seconds until blocks whose reader died are freed (vLLM's default is 30).
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        if self.device == "cpu":
            transfer["kv_buffer_device"] = "cpu"
        elif self.same_tensor_parallel and (self.speculation is None or self.speculation.draft_dir is None):
            # Otherwise vLLM must split a block by heads, or has layers of two models, of different sizes, in a block.
            transfer["kv_connector_module_path"] = WHOLE_BLOCKS
        return transfer


@dataclass(frozen=True)
class FurtherModel:
    """A model beside the main one, from the start of the endpoint."""

    name: str
    folder: str
    section: dict[str, Any]  # serve section
    adapters: tuple[Entry, ...] | None = None  # from the start; None: the model has no adapters


@dataclass(frozen=True)
class GatewaySpec:
    model_id: str
    names: tuple[str, ...]  # of the models; requests without one get the first
    host: str
    port: int
    gateways: int
    decode_replicas: int
    max_sequences: int
    max_queue: int
    disaggregated: bool
    network: Network
    keys_file: str | None = None  # file of API keys; None: the environment of the gateway's process decides
    # `gateways` is per node with engines, not in total. Each node offers one unit of a Ray resource.
    on_every_node: bool = False
    # The starter publishes the end of its warm-up in the directory, and `/ready` waits for it.
    warm_up: bool = False
    role: Literal["decode", "pictures"] = "decode"  # of the replicas that answer
    by_slo: bool = False  # report the demand to the autoscaler
    to_zero: bool = False  # the decode pool may be empty
    audit_log: str | None = None  # folder
    routes_by_prefix: bool = False  # decode replicas announce their cached prefixes
    folder: str = ""  # of the main model
    section: dict[str, Any] = field(default_factory=dict)  # serve section of the main model
    models: tuple[FurtherModel, ...] = ()
    # Entries of the runtime environment that name the process which forks engines, and the environment that it has.
    forked: tuple[dict[str, Any], dict[str, str]] | None = None
    adapters: tuple[Entry, ...] | None = None  # from the start; None: the endpoint has no adapters
    files: FilesSection = field(default_factory=FilesSection)  # its folder is None if the gateways share none

    @staticmethod
    def of(serve: ServeSection, model_id: str, network: Network) -> "GatewaySpec":
        return GatewaySpec(
            model_id=model_id,
            names=adapter.names(serve, model_id),
            host=serve.host,
            port=serve.port,
            gateways=serve.gateways,
            decode_replicas=max(1, serve.decode.replicas),
            max_sequences=serve.max_sequences,
            max_queue=serve.max_queue,
            disaggregated=serve.prefill.replicas > 0,
            network=network,
            by_slo=serve.slo is not None,
            to_zero=serve.decode.replicas == 0,
            audit_log=str(Path(serve.audit_log).resolve()) if serve.audit_log else None,
            routes_by_prefix=serve.routing == "kv" and serve.prefix_caching and serve.decode.most > 1,
            section=serve.model_dump(mode="json", exclude={"models"}),
            files=serve.files.model_copy(update={"folder": _files(serve.files.folder, model_id, network)}),
        )

    def slots(self, decode_replicas: int) -> int:
        """Sequences that the engines run at once while `decode_replicas` are up."""
        return admission.capacity(decode_replicas, self._configured, self.max_sequences, 0)

    def capacity(self, decode_replicas: int) -> int:
        """Maximum number of sequences in flight while `decode_replicas` are up."""
        return admission.capacity(decode_replicas, self._configured, self.max_sequences, self.max_queue)

    @property
    def _configured(self) -> int:
        """Decode replicas that requests may count on. A pool at zero is brought back by the first request."""
        return max(1, self.decode_replicas)


def _files(folder: str | None, model_id: str, network: Network) -> str | None:
    """Folder of files and batches. Without one, gateways share one only on the same machine."""
    if folder is not None:
        return str(Path(folder).resolve())
    return str(cache_dir() / "files" / model_id.replace("/", "--")) if network.host is not None else None
