"""The recipe: one file that says everything about a run.

Each section is one model here; rooms take their section, never the whole recipe. Loading (files, `extends`, overrides)
is in `recipe_file.py`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Device = Literal["cpu", "gpu"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MoESection(Section):
    """Turns every feed-forward block into a mixture of `experts`, each of them `ffn` wide."""

    experts: Annotated[int, Field(ge=2)]
    top_k: Positive = Field(2, description="experts that a token passes through")
    shared_ffn: Annotated[int, Field(ge=0)] = Field(0, description="width of an expert that every token passes through")
    balance: Annotated[float, Field(ge=0)] = Field(0.01, description="weight of the load-balancing loss")

    @model_validator(mode="after")
    def enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must not exceed experts={self.experts}")
        return self


class ModelSection(Section):
    """A Llama-shaped decoder. `context` is both the training sequence length and what serving accepts."""

    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    ffn: Positive
    vocab: Annotated[int, Field(ge=512, description="256 bytes, the special tokens and at least some merges")]
    context: Annotated[int, Field(ge=16)]
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0, lt=1e-2)] = 1e-5
    tie_embeddings: bool = True
    moe: MoESection | None = Field(None, description="a mixture of experts in place of each feed-forward block")

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
    """Without `path` or `hf` the corpus is the Python standard library's own source."""

    path: Path | None = Field(None, description="a text, JSONL or Parquet file, or a folder of them")
    hf: str | None = Field(None, description="a Hugging Face dataset id")
    hf_config: str | None = None
    hf_split: str = "train"
    text_field: str = Field("text", description="the field that holds the text in JSONL, Parquet and hf datasets")
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = Field(0.05, description="share of the documents kept for validation")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if self.path and self.hf:
            raise ValueError("path and hf exclude each other: remove one")
        return self


class TrainSection(Section):
    steps: Positive
    batch: Positive = Field(description="sequences per optimizer step, over all workers")
    micro_batch: Positive = Field(description="sequences per forward pass on one data-parallel worker")
    lr: Annotated[float, Field(gt=0, lt=1)]
    embedding_lr_ratio: Annotated[float, Field(gt=0)] = Field(
        1.0, description="the embeddings' rate over lr; narrow models want 10"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.1
    clip: Annotated[float, Field(gt=0)] = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    matmul: Literal["highest", "high", "medium"] = Field(
        "highest", description="torch's float32_matmul_precision: below highest, fp32 products may use TF32 or bf16 units"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    eval_every: Positive = 100
    eval_sequences: Positive = 64
    checkpoint_every: Positive = 100
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in the backward pass: all but matrix products, or whole layers"
    )
    kernels: Literal["strata", "torch", "liger"] = Field(
        "strata", description="what norms, rotations, attention and the loss run on: our kernels, plain torch, or Liger's (GPUs)"
    )
    compile: bool = Field(False, description="torch.compile each layer: minutes at the start, faster steps")
    checkpoints: str | None = Field(
        None, description="where checkpoints go, any fsspec or pyarrow URI (s3://, gs://, file://); else the run's folder"
    )
    checkpoint_upload: Literal["async", "sync"] = Field("async", description="whether steps go on while a checkpoint is written")
    keep: Positive = Field(3, description="checkpoints kept, newest first")
    keep_best: bool = Field(True, description="keep the checkpoint with the lowest validation loss too")
    max_failures: Annotated[int, Field(ge=0)] = Field(2, description="worker losses survived before the run fails")

    @model_validator(mode="after")
    def warmup_ends(self) -> Self:
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be below steps={self.steps}")
        return self


class ParallelSection(Section):
    """How the model and its batch are cut over the workers. What is left of them after the tensor, pipeline and sequence
    dimensions is data parallel; experts are spread over data-parallel workers."""

    workers: Positive = 1
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        1, description="what data-parallel workers share out: 1 optimizer, 2 and gradients, 3 and parameters"
    )
    tensor: Positive = Field(1, description="workers that share each matrix (Megatron's column and row split)")
    pipeline: Positive = Field(1, description="stages the layers are cut into")
    schedule: Literal["1f1b", "dualpipev"] = Field("1f1b", description="the order of a pipeline's micro-batches")
    sequence: Positive = Field(1, description="workers that share each sequence (Ulysses)")
    expert: Positive = Field(1, description="workers that share a layer's experts")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="kept in the host's memory: the optimizer's state, or the parameters too"
    )
    device: Device = "cpu"
    cpus_per_worker: Positive = 1

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
        """Workers that train on sequences of their own."""
        return self.workers // (self.tensor * self.pipeline * self.sequence)


# Arguments of vLLM's engine that other keys of a recipe decide, or the endpoint itself.
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
    """One pool of engines, prefill or decode."""

    replicas: NonNegative = 1
    max_replicas: Positive | None = Field(None, description="with load the pool grows up to so many; without it, it does not")
    gpus: Annotated[float, Field(gt=0)] = Field(1.0, description="GPUs a replica takes; below 1, replicas share one")
    tensor_parallel: Positive = 1
    gpu_memory: Annotated[float, Field(gt=0, lt=1)] = Field(0.9, description="share of each GPU's memory an engine takes")
    sm_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of a GPU's multiprocessors an engine may use at once (CUDA MPS); for replicas that share one"
    )
    step_tokens: Positive | None = Field(
        None, description="tokens an engine takes on in one step, of prompts and streams; fewer: steadier streams, slower prompts"
    )
    engine: EngineArguments = Field({}, description="further arguments of vLLM's engine for this pool, above serve.engine's")

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
    """When a decode engine has a prompt prefilled by the prefill pool instead of doing it itself."""

    when: Literal["cheaper", "always"] = Field("cheaper", description="by measured rates and queues, or whenever it is possible")
    min_tokens: NonNegative = Field(256, description="fewer tokens that are not cached never leave")
    max_queue_s: Annotated[float, Field(gt=0)] = Field(2.0, description="a prefill engine with more work ahead is busy")
    stall_weight: Annotated[float, Field(ge=0)] = Field(
        0.25, description="how much a second of each running stream's delay counts beside a second of the request's own"
    )


class ServeSection(Section):
    host: str = Field("127.0.0.1", description="address to listen on; other machines reach only one that is not loopback")
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    allow_unauthenticated: bool = Field(
        False, description="let other machines in without an API key (STRATA_API_KEYS_FILE); needed only if host is not loopback"
    )
    start_timeout_s: Positive | None = Field(
        None, description="seconds in which the engines must start and answer; 600 on CPUs, 1800 on GPUs unless set"
    )
    device: Device = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    eager: bool = Field(False, description="skip torch.compile: slower tokens, a much faster start")
    kernels: Literal["vllm", "strata"] = Field(
        "vllm", description="whose attention GPU engines run: the one that vLLM chooses, or ours, through a plugin of vLLM's"
    )
    kv_cache_gib: Positive = Field(1, description="KV cache of one CPU engine; on GPUs gpu_memory decides")
    max_sequences: Positive = Field(64, description="sequences an engine runs at once")
    max_queue: NonNegative = Field(256, description="sequences that may wait beyond those running; more get 429 and Retry-After")
    prefix_caching: bool = Field(True, description="keep KV blocks of prompts for others that begin alike")
    tool_parser: str | None = Field(None, description="how this model writes tool calls: a tool parser of vLLM's, such as hermes")
    reasoning_parser: str | None = Field(None, description="how it marks its reasoning: a reasoning parser of vLLM's")
    engine: EngineArguments = Field(
        {}, description="further arguments of vLLM's engine, as vLLM names them: {max_model_len: 8192, kv_cache_dtype: fp8}"
    )
    gateways: Positive = Field(1, description="front processes that share the port")
    prefill: PoolSection = Field(PoolSection(), description="0 replicas: aggregated serving")
    decode: PoolSection = PoolSection()
    remote_prefill: RemotePrefillSection = RemotePrefillSection()

    @model_validator(mode="after")
    def something_decodes(self) -> Self:
        if self.decode.replicas == 0:
            raise ValueError("decode.replicas=0 leaves nobody to answer; only prefill.replicas may be 0")
        return self

    @model_validator(mode="after")
    def steps_have_room_for_every_stream(self) -> Self:
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
    """What Kubernetes has to give when `strata deploy` puts the recipe there. A laptop needs none of it."""

    name: str = Field("strata", description="of the endpoint; the job is <name>-train, the interactive cluster <name>-lab")
    image: str | None = Field(None, description="the container image, with a tag or digest that will not change")
    storage: str | None = Field(None, description="behind /mnt/strata: a bucket on GKE, a NAS mount target on ACK")
    gpu: str | None = Field(None, description="the type of GPU, such as h100")
    prefill_gpu: str | None = Field(None, description="the prefill pool's, if it is another")
    decode_gpu: str | None = Field(None, description="the decode pool's, if it is another")
    gpus_per_node: Positive | None = Field(None, description="else those of the largest machine with this GPU")
    nodes: Positive | None = Field(None, description="nodes of each type of GPU there are; else as many as training takes")
    cpus: Positive | None = Field(None, description="of each worker pod; else its GPUs' share of the node")
    memory_gib: Positive | None = Field(None, description="of each worker pod; else its GPUs' share of the node")


class Recipe(Section):
    model: ModelSection
    data: DataSection = DataSection()
    train: TrainSection
    parallel: ParallelSection = ParallelSection()
    serve: ServeSection = ServeSection()
    deploy: DeploySection = DeploySection()

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
