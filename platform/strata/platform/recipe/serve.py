"""Sections of the endpoint: pools, remote prefill, engine arguments."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from strata.platform.recipe.kv_offload import KvOffloadSection
from strata.platform.recipe.picture_serving import PictureServingSection
from strata.platform.recipe.section import Device, NonNegative, Positive, Section
from strata.platform.recipe.speculative import SpeculativeSection

OWN_ENGINE_ARGUMENTS = frozenset(
    {
        *("model", "served_model_name", "tokenizer", "dtype", "enforce_eager", "attention_backend", "attention_config"),
        *("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "block_size", "gpu_memory_utilization"),
        "kv_cache_dtype",
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"),
        *("kv_transfer_config", "reasoning_parser", "structured_outputs_config", "disable_log_stats"),
        *("enable_logging_iteration_details", "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "kv_events_config"),
        *("speculative_config", "scheduler_cls", "worker_cls", "kv_offloading_size", "kv_offloading_backend"),
    }
)


def _not_our_own(arguments: dict[str, Any]) -> dict[str, Any]:
    if "kv_cache_dtype" in arguments:
        raise ValueError("'kv_cache_dtype' is not set here: set serve.kv_cache_dtype, the one dtype of both pools")
    if taken := sorted(OWN_ENGINE_ARGUMENTS & arguments.keys()):
        raise ValueError(f"'{taken[0]}' is not set here: other keys of the recipe decide it, or the endpoint")
    return arguments


EngineArguments = Annotated[dict[str, Any], AfterValidator(_not_our_own)]


class PoolSection(Section):
    """Pool of engines, prefill or decode."""

    replicas: NonNegative = Field(1, description="engine replicas; serve.prefill.replicas=0 is aggregated serving")
    max_replicas: Positive | None = Field(None, description="replicas that the pool may scale up to under load; unset: fixed")
    gpus: Annotated[float, Field(gt=0)] = Field(1.0, description="GPUs of a replica; below 1, replicas share a GPU")
    tensor_parallel: Positive = Field(1, description="tensor-parallel size of an engine; equals gpus unless gpus is below 1")
    gpu_memory: Annotated[float, Field(gt=0, lt=1)] = Field(0.9, description="share of each GPU's memory for an engine")
    sm_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of a GPU's multiprocessors for an engine (CUDA MPS); needs gpus below 1"
    )
    step_tokens: Positive | None = Field(
        None,
        description="prompt and stream tokens of one engine step; fewer: lower ITL, higher TTFT; unset: vLLM's default, but 2048 "
        "(512 with serve.kernels=strata) for a GPU decode engine beside a prefill pool",
    )
    engine: EngineArguments = Field({}, description="further vLLM engine arguments of this pool; override serve.engine")

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Self:
        if self.max_replicas is not None and self.replicas > self.max_replicas:
            raise ValueError(f"replicas={self.replicas} must not exceed max_replicas={self.max_replicas}")
        return self

    @model_validator(mode="after")
    def sharing_fits(self) -> Self:
        if self.gpus < 1 and self.gpu_memory > self.gpus:
            raise ValueError(f"gpu_memory={self.gpu_memory} must not exceed gpus={self.gpus} when replicas share a GPU")
        if self.sm_share is not None and self.gpus >= 1:
            raise ValueError(f"sm_share={self.sm_share} is for replicas that share a GPU (gpus below 1)")
        if self.gpus >= 1 and self.gpus != self.tensor_parallel:
            raise ValueError(
                f"gpus={self.gpus} must equal tensor_parallel={self.tensor_parallel} (or be below 1 to share one GPU)"
            )
        return self


class SloSection(Section):
    """Service-level objective by which the pools scale between replicas and max_replicas."""

    ttft_s: Annotated[float, Field(gt=0)] = Field(2.0, description="seconds to the first token")
    itl_s: Annotated[float, Field(gt=0)] = Field(0.05, description="seconds per further token, on average")
    cooldown_s: Annotated[float, Field(ge=0)] = Field(600.0, description="seconds that a pool must need fewer replicas to shrink")
    idle_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="seconds without a request until the decode pool is emptied, with serve.decode.replicas=0"
    )


class AdaptersSection(Section):
    """LoRA adapters that are loaded and removed while the endpoint runs."""

    slots: Positive = Field(4, description="adapters that an engine computes in one step; requests of further ones wait")
    in_memory: Positive = Field(16, description="adapters that an engine holds in memory; idle ones are evicted")
    rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(16, description="largest rank")
    roots: tuple[str, ...] = Field((), description="folders below which adapters may be loaded, besides the run store")
    load: dict[str, str] = Field({}, description="adapters at the start: folders in peft's format, by name")

    @model_validator(mode="after")
    def memory_holds_every_slot(self) -> Self:
        if self.in_memory < self.slots:
            raise ValueError(f"in_memory={self.in_memory} must be at least slots={self.slots}")
        return self


class RemotePrefillSection(Section):
    """Conditions under which the prefill pool prefills a prompt instead of the decode engine."""

    when: Literal["cheaper", "always"] = Field(
        "cheaper", description="cheaper: by measured rates and queues; always: whenever a prefill engine is up"
    )
    min_tokens: NonNegative = Field(256, description="uncached prompt tokens below which prefill stays local")
    max_queue_s: Annotated[float, Field(gt=0)] = Field(
        2.0, description="queue of a prefill engine above which prefill stays local"
    )
    stall_weight: Annotated[float, Field(ge=0)] = Field(
        0.25, description="weight of a second of delay of each running stream, relative to the request's own delay"
    )


# Keys of the endpoint, which its models share.
ENDPOINT_KEYS = frozenset({"host", "port", "allow_unauthenticated", "gateways", "audit_log", "pictures", "models"})
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class ServedModelSection(BaseModel):
    """A further model of the endpoint. Other keys of the serve section, such as `decode`, replace those of the main model."""

    model_config = ConfigDict(extra="allow", frozen=True)

    run: str | None = Field(None, description="serve this run's export")
    model: str | None = Field(None, description="model folder, id on Hugging Face or a bucket's URI, instead of a run")

    @property
    def changes(self) -> dict[str, Any]:
        """Keys of the serve section."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def has_one_source(self) -> Self:
        if (self.run is None) == (self.model is None):
            raise ValueError("a model has either 'run' or 'model'")
        return self


class FilesSection(Section):
    """Storage of /v1/files and /v1/batches."""

    folder: str | None = Field(
        None, description="folder that all gateways share; unset: .strata/files on one machine, no files on a cluster"
    )
    file_mib: Positive = Field(200, description="largest file, in MiB")
    tenant_gib: Positive = Field(10, description="files of one tenant, in GiB")


class ServeSection(Section):
    """OpenAI-compatible endpoint."""

    host: str = Field("127.0.0.1", description="address to listen on; loopback admits this machine only")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8000, description="port of the endpoint")
    allow_unauthenticated: bool = Field(
        False, description="admit other machines without an API key (STRATA_API_KEYS_FILE); needed only if host is not loopback"
    )
    start_timeout_s: Positive | None = Field(
        None, description="seconds until the engines must answer; unset: 600 on CPUs, 1800 on GPUs"
    )
    device: Device = Field("cpu", description="device of the engines")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="dtype of weights and activations")
    adapter: Literal["merged", "apart"] = Field(
        "merged", description="a LoRA run's export; merged: one model, apart: its base model and the adapter on it, by name"
    )
    adapters: AdaptersSection | None = Field(
        None, description="LoRA adapters on the served model, loaded and removed while it runs; {} for the defaults; unset: none"
    )
    eager: bool = Field(False, description="skip torch.compile: slower tokens, a much faster start")
    kernels: Literal["vllm", "strata"] = Field(
        "vllm", description="attention kernels of GPU engines: vLLM's own choice, or Strata's through a vLLM plugin"
    )
    kv_cache_gib: Positive = Field(1, description="KV cache of a CPU engine, in GiB; on GPUs gpu_memory decides")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="dtype of the KV caches of both pools; auto: the model's; fp8: e4m3, half the bytes of 16 bits"
    )
    max_sequences: Positive = Field(64, description="sequences that an engine runs concurrently")
    max_queue: NonNegative = Field(256, description="sequences that may wait; further requests get 429 with Retry-After")
    audit_log: str | None = Field(None, description="folder for a JSON line per request, without prompts; unset: no log")
    files: FilesSection = Field(FilesSection(), description="uploaded files and the output of batches")
    prefix_caching: bool = Field(True, description="reuse KV blocks of prompts with a common prefix")
    tool_parser: str | None = Field(None, description="vLLM tool parser of the model, such as hermes")
    reasoning_parser: str | None = Field(None, description="vLLM reasoning parser of the model")
    engine: EngineArguments = Field({}, description="further vLLM engine arguments, such as {max_model_len: 8192}")
    gateways: Positive = Field(1, description="gateway processes that share the port")
    routing: Literal["kv", "least-busy"] = Field(
        "kv", description="choice among decode replicas; kv: least expected TTFT by cached prefix, queue and load"
    )
    prefill: PoolSection = Field(PoolSection(), description="prefill engines")
    decode: PoolSection = Field(PoolSection(), description="decode engines")
    remote_prefill: RemotePrefillSection = Field(RemotePrefillSection(), description="choice between local and remote prefill")
    speculative: SpeculativeSection | None = Field(
        None, description="speculative decoding, such as {method: ngram} or {method: draft, draft: small-run}; unset: none"
    )
    kv_offload: KvOffloadSection | None = Field(
        None, description="tiers for KV blocks beyond the KV cache, such as {cpu_gib: 8}; {} for the defaults; unset: none"
    )
    slo: SloSection | None = Field(None, description="scale the pools by this objective; unset: by the number of requests")
    pictures: PictureServingSection = Field(
        PictureServingSection(), description="endpoint of a diffusion model; the pools are then unused"
    )
    models: dict[Annotated[str, Field(pattern=MODEL_NAME)], ServedModelSection] = Field(
        {},
        description="further models by name, such as {small: {run: my-run, max_sequences: 8}}; unset keys as above",
    )

    def further(self, changes: dict[str, Any]) -> "ServeSection":
        """Section of a further model or revision: this one with changes. Raises ValueError."""
        if common := sorted(changes.keys() & ENDPOINT_KEYS):
            raise ValueError(f"{common[0]} is of the whole endpoint, not of one model")
        own = self.model_dump(mode="json", exclude={"models"})
        if self.adapters is not None:
            own["adapters"]["load"] = {}  # of this model, and of its present weights
        try:
            return ServeSection.model_validate(_merged(own, changes))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None

    @model_validator(mode="after")
    def further_models_are_valid(self) -> Self:
        for name, model in self.models.items():
            try:
                self.further(model.changes)
            except ValueError as error:
                raise ValueError(f"models.{name}: {error}") from None
        return self

    @model_validator(mode="after")
    def something_decodes(self) -> Self:
        if self.decode.replicas == 0 and (self.slo is None or self.decode.max_replicas is None):
            raise ValueError("decode.replicas=0 leaves no engine to answer; scaling from zero needs slo and decode.max_replicas")
        if self.prefill.replicas == 0 and self.prefill.max_replicas is not None:
            raise ValueError(
                f"prefill.replicas=0 is aggregated serving; prefill.max_replicas={self.prefill.max_replicas} is unused"
            )
        if self.slo is not None and self.decode.max_replicas is None and self.prefill.max_replicas is None:
            raise ValueError("slo scales pools with max_replicas: set decode.max_replicas or prefill.max_replicas")
        return self

    @model_validator(mode="after")
    def adapters_have_one_base(self) -> Self:
        if self.adapters is not None and self.adapter == "apart":
            raise ValueError("adapter=apart serves one adapter from the start; with adapters, name it in adapters.load")
        return self

    @model_validator(mode="after")
    def steps_hold_every_stream(self) -> Self:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if pool.step_tokens is not None and pool.step_tokens < self.max_sequences:
                raise ValueError(
                    f"{name}.step_tokens={pool.step_tokens} must be at least max_sequences={self.max_sequences}: "
                    "a step has a token of each stream"
                )
        needed = self.most_stream_tokens
        if self.decode.step_tokens is not None and self.decode.step_tokens < needed:
            raise ValueError(
                f"decode.step_tokens={self.decode.step_tokens} must be at least {needed}: a step has a token of each of "
                f"max_sequences={self.max_sequences} streams, and its drafts"
            )
        return self

    @property
    def most_stream_tokens(self) -> int:
        """Tokens of all streams in one step of a decode engine. A draft model adds a slot to the drafts of each stream."""
        if self.speculative is None:
            return self.max_sequences
        return self.max_sequences * (1 + self.speculative.tokens + (self.speculative.method == "draft"))

    @model_validator(mode="after")
    def speculation_has_one_model(self) -> Self:
        if self.speculative is not None and (self.adapters is not None or self.adapter == "apart"):
            raise ValueError("speculative is for one model, and drafts know no adapters: remove speculative or the adapters")
        if self.speculative is not None and self.kernels == "strata":
            raise ValueError("speculative is not tested with kernels=strata: set kernels=vllm, or remove speculative")
        return self

    @model_validator(mode="after")
    def offloaded_blocks_can_be_found(self) -> Self:
        if self.kv_offload is not None and not self.prefix_caching:
            raise ValueError("kv_offload finds blocks by the hashes of the prefix cache: set prefix_caching=true")
        if self.kv_offload is not None and self.speculative is not None:
            raise ValueError("kv_offload is not tested with speculative: remove one of them")
        return self

    @model_validator(mode="after")
    def drafts_have_a_cache_in_their_dtype(self) -> Self:
        if self.kv_cache_dtype == "fp8" and self.speculative is not None and self.speculative.method == "draft":
            raise ValueError(
                "kv_cache_dtype=fp8 is not tested with the cache of a draft model: set speculative.method=ngram, or "
                "kv_cache_dtype=auto"
            )
        return self

    @model_validator(mode="after")
    def kernels_have_a_gpu(self) -> Self:
        if self.kernels == "strata" and self.device == "cpu":
            raise ValueError("kernels=strata are Triton kernels for NVIDIA GPUs: set device=gpu, or kernels=vllm on a CPU")
        return self


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = base | changes
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merged(base[key], value)
    return merged
