"""Recipe models: one pydantic model for each section of a recipe.

Packages receive their section, never the whole recipe. `recipe_file.py` loads files, `extends` and overrides. `make docs` writes
docs/reference/recipe.md from these models, so every field has a description.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Device = Literal["cpu", "gpu"]
Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
Kernels = Literal["strata", "torch", "liger"]
Schedule = Literal["1f1b", "dualpipev"]
Offload = Literal["none", "optimizer", "all"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MoESection(Section):
    """Mixture of experts in place of every feed-forward block. Each expert is `model.ffn` wide."""

    experts: Annotated[int, Field(ge=2)] = Field(description="experts of a layer")
    top_k: Positive = Field(2, description="experts that process each token")
    shared_ffn: Annotated[int, Field(ge=0)] = Field(0, description="width of an expert that processes every token; 0: none")
    balance: Annotated[float, Field(ge=0)] = Field(0.01, description="weight of the load-balancing loss")

    @model_validator(mode="after")
    def enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must not exceed experts={self.experts}")
        return self


class ModelSection(Section):
    """Llama-shaped decoder."""

    layers: Positive = Field(description="decoder layers")
    hidden: Positive = Field(description="width of the residual stream; an even multiple of heads")
    heads: Positive = Field(description="query heads; a multiple of kv_heads")
    kv_heads: Positive = Field(description="key and value heads; below heads, grouped-query attention")
    ffn: Positive = Field(description="width of the feed-forward block")
    vocab: Annotated[int, Field(ge=512)] = Field(description="vocabulary size: 256 bytes, the special tokens and the merges")
    context: Annotated[int, Field(ge=16)] = Field(
        description="training sequence length, and the longest sequence that serving accepts"
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(10_000.0, description="base of the rotary embedding's frequencies")
    norm_eps: Annotated[float, Field(gt=0, lt=1e-2)] = Field(1e-5, description="epsilon of RMSNorm")
    tie_embeddings: bool = Field(True, description="use the input embedding as the output projection")
    moe: MoESection | None = Field(None, description="mixture of experts in place of each feed-forward block")

    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden={self.hidden} must be heads={self.heads} times an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class DataSection(Section):
    """Corpus. Without `path` or `hf` it is the source code of the Python standard library."""

    path: Path | None = Field(None, description="text, JSONL or Parquet file, or a folder of them")
    hf: str | None = Field(None, description="Hugging Face dataset id")
    hf_config: str | None = Field(None, description="configuration of the Hugging Face dataset")
    hf_split: str = Field("train", description="split of the Hugging Face dataset")
    text_field: str = Field("text", description="field with the text in JSONL, Parquet and Hugging Face datasets")
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = Field(0.05, description="share of the documents held out for validation")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if self.path and self.hf:
            raise ValueError("path and hf exclude each other: remove one")
        return self


class TrainSection(Section):
    """Optimization, evaluation and checkpoints."""

    steps: Positive = Field(description="optimizer steps of the run")
    batch: Positive = Field(description="sequences per optimizer step, over all workers")
    micro_batch: Positive = Field(description="sequences per forward pass on one data-parallel worker")
    lr: Annotated[float, Field(gt=0, lt=1)] = Field(description="peak learning rate")
    embedding_lr_ratio: Annotated[float, Field(gt=0)] = Field(
        1.0, description="learning rate of the embeddings over lr; narrow models train best near 10"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="final learning rate over lr")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up; fewer than steps")
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="weight decay of AdamW")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="decay after warm-up; cosine: over all steps, wsd: constant for half of them, then linear"
    )
    time_budget_s: Positive | None = Field(
        None, description="seconds that the steps may take; a machine too slow for all steps trains fewer; unset: no limit"
    )
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="largest gradient norm; larger gradients are scaled down")
    precision: Precision = Field("fp32", description="precision of parameters and activations in a step")
    matmul: Literal["highest", "high", "medium"] = Field(
        "highest", description="torch's float32_matmul_precision; below highest, fp32 products may use TF32 or bf16 units"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="seed of the weights and of the data order")
    eval_every: Positive = Field(100, description="steps between evaluations")
    eval_sequences: Positive = Field(64, description="held-out sequences of an evaluation")
    checkpoint_every: Positive = Field(100, description="steps between checkpoints")
    recompute: Recompute = Field(
        "none", description="activations recomputed in the backward pass; selective: all but matrix products, full: whole layers"
    )
    kernels: Kernels = Field("strata", description="kernels of norms, rotary embedding, attention and loss; liger needs GPUs")
    compile: bool = Field(False, description="torch.compile each layer: minutes at the start, faster steps")
    checkpoints: str | None = Field(
        None, description="fsspec or pyarrow URI of the checkpoints (s3://, gs://, file://); unset: the run's folder"
    )
    checkpoint_upload: Literal["async", "sync"] = Field(
        "async", description="async: steps continue while a checkpoint is written"
    )
    keep: Positive = Field(3, description="newest checkpoints to retain")
    keep_best: bool = Field(True, description="retain the checkpoint with the lowest validation loss too")
    max_failures: Annotated[int, Field(ge=0)] = Field(
        2, description="worker failures that the run recovers from; one more fails it"
    )

    @model_validator(mode="after")
    def warmup_ends(self) -> Self:
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be below steps={self.steps}")
        return self


class ParallelSection(Section):
    """Parallel layout. Workers that remain after the tensor, pipeline and sequence dimensions are data parallel; experts are
    distributed over data-parallel workers."""

    workers: Positive = Field(1, description="worker processes; a multiple of tensor x pipeline x sequence")
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        1, description="ZeRO stage: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too"
    )
    tensor: Positive = Field(1, description="tensor-parallel workers (Megatron's column and row split)")
    pipeline: Positive = Field(1, description="pipeline stages")
    schedule: Schedule = Field("1f1b", description="pipeline schedule")
    sequence: Positive = Field(1, description="sequence-parallel workers (Ulysses)")
    expert: Positive = Field(1, description="expert-parallel workers; divides the data-parallel workers")
    offload: Offload = Field("none", description="state in host memory; optimizer: optimizer state, all: parameters too")
    device: Device = Field("cpu", description="device of the workers")
    cpus_per_worker: Positive = Field(1, description="CPU cores of a worker")

    @model_validator(mode="after")
    def workers_divide(self) -> Self:
        cut = self.tensor * self.pipeline * self.sequence
        if self.workers % cut:
            raise ValueError(f"workers={self.workers} must be a multiple of tensor x pipeline x sequence = {cut}")
        if self.data % self.expert:
            raise ValueError(f"expert={self.expert} must divide the {self.data} data-parallel workers")
        return self

    @property
    def data(self) -> int:
        """Data-parallel workers."""
        return self.workers // (self.tensor * self.pipeline * self.sequence)


# Arguments of vLLM's engine that other keys of a recipe or the endpoint itself set.
OWN_ENGINE_ARGUMENTS = frozenset(
    {
        *("model", "served_model_name", "tokenizer", "dtype", "enforce_eager", "attention_backend", "attention_config"),
        *("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "block_size", "gpu_memory_utilization"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"),
        *("kv_transfer_config", "reasoning_parser", "structured_outputs_config", "disable_log_stats"),
        "enable_logging_iteration_details",
    }
)


def _not_our_own(arguments: dict[str, Any]) -> dict[str, Any]:
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
        if self.max_replicas is not None and not 0 < self.replicas <= self.max_replicas:
            raise ValueError(f"replicas={self.replicas} must be between 1 and max_replicas={self.max_replicas}")
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
    eager: bool = Field(False, description="skip torch.compile: slower tokens, a much faster start")
    kernels: Literal["vllm", "strata"] = Field(
        "vllm", description="attention kernels of GPU engines: vLLM's own choice, or Strata's through a vLLM plugin"
    )
    kv_cache_gib: Positive = Field(1, description="KV cache of a CPU engine, in GiB; on GPUs gpu_memory decides")
    max_sequences: Positive = Field(64, description="sequences that an engine runs concurrently")
    max_queue: NonNegative = Field(256, description="sequences that may wait; further requests get 429 with Retry-After")
    prefix_caching: bool = Field(True, description="reuse KV blocks of prompts with a common prefix")
    tool_parser: str | None = Field(None, description="vLLM tool parser of the model, such as hermes")
    reasoning_parser: str | None = Field(None, description="vLLM reasoning parser of the model")
    engine: EngineArguments = Field(
        {}, description="further vLLM engine arguments, such as {max_model_len: 8192, kv_cache_dtype: fp8}"
    )
    gateways: Positive = Field(1, description="gateway processes that share the port")
    prefill: PoolSection = Field(PoolSection(), description="prefill engines")
    decode: PoolSection = Field(PoolSection(), description="decode engines")
    remote_prefill: RemotePrefillSection = Field(RemotePrefillSection(), description="choice between local and remote prefill")

    @model_validator(mode="after")
    def something_decodes(self) -> Self:
        if self.decode.replicas == 0:
            raise ValueError("decode.replicas=0 leaves no engine to answer; only prefill.replicas may be 0")
        return self

    @model_validator(mode="after")
    def steps_hold_every_stream(self) -> Self:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if pool.step_tokens is not None and pool.step_tokens < self.max_sequences:
                raise ValueError(
                    f"{name}.step_tokens={pool.step_tokens} must be at least max_sequences={self.max_sequences}: "
                    "a step has a token of each stream"
                )
        return self

    @model_validator(mode="after")
    def kernels_have_a_gpu(self) -> Self:
        if self.kernels == "strata" and self.device == "cpu":
            raise ValueError("kernels=strata are Triton kernels for NVIDIA GPUs: set device=gpu, or kernels=vllm on a CPU")
        return self


class DeploySection(Section):
    """Kubernetes deployment by `strata deploy`. A laptop needs none of it."""

    name: str = Field("strata", description="name of the endpoint; the job is <name>-train, the interactive cluster <name>-lab")
    image: str | None = Field(None, description="container image, with an immutable tag or digest")
    storage: str | None = Field(None, description="storage behind /mnt/strata: a bucket on GKE, a NAS mount target on ACK")
    gpu: str | None = Field(None, description="GPU type, such as h100")
    prefill_gpu: str | None = Field(None, description="GPU type of the prefill pool, if different")
    decode_gpu: str | None = Field(None, description="GPU type of the decode pool, if different")
    gpus_per_node: Positive | None = Field(None, description="GPUs of a node; unset: those of the largest machine with this GPU")
    nodes: Positive | None = Field(None, description="available nodes of each GPU type; unset: as many as training needs")
    cpus: Positive | None = Field(None, description="CPUs of a worker pod; unset: its GPUs' share of the node")
    memory_gib: Positive | None = Field(None, description="memory of a worker pod, in GiB; unset: its GPUs' share of the node")


class Recipe(Section):
    """All sections of a run."""

    model: ModelSection = Field(description="model shape")
    data: DataSection = Field(DataSection(), description="corpus")
    train: TrainSection = Field(description="optimization, evaluation and checkpoints")
    parallel: ParallelSection = Field(ParallelSection(), description="parallel layout")
    serve: ServeSection = Field(ServeSection(), description="endpoint")
    deploy: DeploySection = Field(DeploySection(), description="Kubernetes deployment")

    @model_validator(mode="after")
    def batch_divides(self) -> Self:
        share = self.parallel.data * self.train.micro_batch
        if self.train.batch % share:
            raise ValueError(
                f"train.batch={self.train.batch} must be a multiple of data-parallel workers x train.micro_batch = {share}"
            )
        return self

    @model_validator(mode="after")
    def kernels_have_their_device(self) -> Self:
        if self.train.kernels == "liger" and self.parallel.device != "gpu":
            raise ValueError("train.kernels=liger runs on GPUs only: set it to strata or torch, or parallel.device to gpu")
        return self
