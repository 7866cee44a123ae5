"""Recipe models: one pydantic model for each section of a recipe.

Packages receive their section, never the whole recipe. `recipe_file.py` loads files, `extends` and overrides. `make docs` writes
docs/reference/recipe.md from these models, so every field has a description.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Device = Literal["cpu", "gpu"]
Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
Kernels = Literal["strata", "torch", "liger"]
Schedule = Literal["1f1b", "dualpipev"]
Offload = Literal["none", "optimizer", "all"]
DataKind = Literal["text", "chat", "completion", "preference"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
PreferenceLoss = Literal["dpo", "hinge", "ipo", "kto", "orpo", "simpo"]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RopeScalingSection(Section):
    """Rotary frequencies rescaled for a longer context than the model was first trained with, as in Hugging Face's
    `rope_parameters`."""

    kind: Literal["linear", "llama3", "yarn"] = Field(description="how frequencies are rescaled")
    factor: Annotated[float, Field(ge=1)] = Field(description="longer context over the original one")
    original_context: Positive | None = Field(None, description="context before the rescaling (llama3, yarn)")
    low_frequency_factor: float = Field(1.0, description="llama3: wavelengths above original_context / this are multiplied")
    high_frequency_factor: float = Field(4.0, description="llama3: wavelengths below original_context / this stay")
    beta_fast: float = Field(32.0, description="yarn: rotations in the original context above which a frequency stays")
    beta_slow: float = Field(1.0, description="yarn: rotations below which a frequency is divided by factor")
    truncate: bool = Field(True, description="yarn: round the bounds between beta_fast and beta_slow to whole dimensions")
    attention_factor: float | None = Field(None, description="yarn: factor of queries and keys; unset: 1 + 0.1 ln(factor)")

    @model_validator(mode="after")
    def original_is_known(self) -> Self:
        if self.kind != "linear" and self.original_context is None:
            raise ValueError(f"kind={self.kind} needs original_context")
        return self


class ArchitectureSection(Section):
    """Differences from Llama. An imported model (`model.from`) sets them; the defaults are Llama's."""

    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] | None = Field(None, description="width of a head; unset: hidden/heads")
    qkv_bias: bool = Field(False, description="biases of the query, key and value projections")
    output_bias: bool = Field(False, description="bias of the attention's output projection")
    qk_norm: Literal["none", "head", "width"] = Field(
        "none", description="RMSNorm of queries and keys; head: of each head, width: over all heads"
    )
    norms: Literal["pre", "post", "both"] = Field("pre", description="norms before, after, or before and after each block")
    norm_offset: bool = Field(False, description="norms multiply by one plus their weight")
    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = Field("silu", description="activation of the feed-forward blocks")
    embedding_scale: float | None = Field(None, description="factor of the input embeddings")
    attention_scale: Annotated[float, Field(gt=0)] | None = Field(
        None, description="factor of the attention's scores; unset: 1 / sqrt(head_dim)"
    )
    attention_softcap: Annotated[float, Field(gt=0)] | None = Field(None, description="bound of the scores, by tanh")
    logit_softcap: Annotated[float, Field(gt=0)] | None = Field(None, description="bound of the logits, by tanh")
    sinks: bool = Field(False, description="a learned score of each head that takes attention from all tokens")
    window: Positive | None = Field(None, description="tokens that a sliding layer attends to")
    sliding_layers: tuple[NonNegative, ...] = Field((), description="layers that attend to the window only")
    sliding_rope_theta: Annotated[float, Field(gt=0)] | None = Field(
        None, description="rope_theta of the sliding layers, without rope_scaling; unset: that of the others"
    )
    unrotated_layers: tuple[NonNegative, ...] = Field((), description="layers without rotary embedding")
    rope_scaling: RopeScalingSection | None = Field(None, description="rescaled rotary frequencies")


class MoESection(Section):
    """Mixture of experts in place of feed-forward blocks. Each expert is `model.ffn` wide."""

    experts: Annotated[int, Field(ge=2)] = Field(description="experts of a layer")
    top_k: Positive = Field(2, description="experts that process each token")
    shared_ffn: Annotated[int, Field(ge=0)] = Field(0, description="width of an expert that processes every token; 0: none")
    balance: Annotated[float, Field(ge=0)] = Field(0.01, description="weight of the load-balancing loss")
    normalize: bool = Field(True, description="scale the weights of a token's experts to a sum of one")
    bias: bool = Field(False, description="biases of the router and the experts")
    dense_layers: tuple[NonNegative, ...] = Field((), description="layers with a plain feed-forward block")
    dense_ffn: NonNegative = Field(0, description="width of the plain feed-forward blocks")

    @model_validator(mode="after")
    def enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must not exceed experts={self.experts}")
        return self


class ModelSection(Section):
    """Decoder: a Llama of any size, or an imported model. With `from`, the other keys except context come from that model."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    source: str | None = Field(
        None, alias="from", description="folder or Hugging Face id of a model to start from; unset: random weights"
    )
    family: str | None = Field(None, description="family of the imported model, such as qwen3; set by the import")
    layers: Positive = Field(description="decoder layers")
    hidden: Positive = Field(description="width of the residual stream; an even multiple of heads")
    heads: Positive = Field(description="query heads; a multiple of kv_heads")
    kv_heads: Positive = Field(description="key and value heads; below heads, grouped-query attention")
    ffn: Positive = Field(description="width of the feed-forward block")
    vocab: Positive = Field(
        description="vocabulary size: 256 bytes, the special tokens and the merges; at least 512 without an imported model"
    )
    context: Annotated[int, Field(ge=16)] = Field(
        description="training sequence length, and the longest sequence that serving accepts"
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(10_000.0, description="base of the rotary embedding's frequencies")
    norm_eps: Annotated[float, Field(gt=0, lt=1e-2)] = Field(1e-5, description="epsilon of RMSNorm")
    tie_embeddings: bool = Field(True, description="use the input embedding as the output projection")
    moe: MoESection | None = Field(None, description="mixture of experts in place of each feed-forward block")
    architecture: ArchitectureSection = Field(ArchitectureSection(), description="differences from Llama")

    @field_validator("vocab")
    @classmethod
    def vocab_holds_bytes(cls, vocab: int, given: ValidationInfo) -> int:
        if given.data.get("family") is None and vocab < 512:
            raise ValueError(f"vocab={vocab} must be at least 512")
        return vocab

    @model_validator(mode="after")
    def family_has_a_source(self) -> Self:
        if self.family is not None and self.source is None:
            raise ValueError(f"family={self.family} is set by an import, and needs from")
        return self

    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        if self.architecture.head_dim is None and (self.hidden % self.heads or (self.hidden // self.heads) % 2):
            raise ValueError(f"hidden={self.hidden} must be heads={self.heads} times an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        return self

    @property
    def head_dim(self) -> int:
        return self.architecture.head_dim or self.hidden // self.heads


def _local(path: Path) -> Path:
    """Refuses a URI, which a path would silently shorten: `s3://bucket` becomes `s3:/bucket`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ValueError(f"'{path}' is a URI: write it as uri in data.sets")
    return path


LocalPath = Annotated[Path, AfterValidator(_local)]
LEAST_SHARE = 1e-4  # of the rows, for a set: a block of the data order has some of each


class DataSetSection(Section):
    """One of several sets of examples that a run mixes by weight."""

    name: Annotated[str, Field(min_length=1)] | None = Field(None, description="name in messages; unset: from path, uri or hf")
    path: LocalPath | None = Field(
        None, description="file, folder, glob, or folder of a Hugging Face dataset that save_to_disk has written"
    )
    uri: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://.")] | None = Field(
        None, description="fsspec URI of a file, folder or glob (s3://, gs://, https://); downloaded once"
    )
    hf: str | None = Field(None, description="Hugging Face dataset id")
    hf_config: str | None = Field(None, description="configuration of the Hugging Face dataset")
    hf_split: str = Field("train", description="split of the Hugging Face dataset")
    kind: DataKind = Field("text", description="contents of a row")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="share of the rows, relative to the others"
    )
    text_field: str = Field("text", description="field with the text (kind=text)")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        given = [key for key in ("path", "uri", "hf") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: keep one" if given else "a set needs path, uri or hf")
        return self

    @property
    def title(self) -> str:
        """Name of the set in messages."""
        source = self.name or self.hf or str(self.path or self.uri)
        return source if self.name or self.hf else source.rstrip("/").rsplit("/", 1)[-1]


class DataSection(Section):
    """Corpus. Without `path`, `hf` or `sets` it is the source code of the Python standard library."""

    path: LocalPath | None = Field(None, description="text, JSONL or Parquet file, or a folder of them")
    hf: str | None = Field(None, description="Hugging Face dataset id")
    hf_config: str | None = Field(None, description="configuration of the Hugging Face dataset")
    hf_split: str = Field("train", description="split of the Hugging Face dataset")
    text_field: str = Field("text", description="field with the text in JSONL, Parquet and Hugging Face datasets")
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = Field(0.05, description="share of the documents held out for validation")
    kind: DataKind = Field(
        "text", description="contents of path or hf: text, chat messages, prompt and completion, or compared or labelled answers"
    )
    sets: tuple[DataSetSection, ...] = Field((), description="several sets, mixed by weight; excludes path and hf")
    pack: bool = Field(True, description="several documents in a row of model.context tokens; attention never crosses them")
    chat_template: Path | None = Field(None, description="file with a Jinja chat template; unset: the model's own")
    mask: Literal["assistant", "all"] = Field(
        "assistant", description="tokens that count in the loss; assistant: the answers and their end of turn"
    )
    on_long: Literal["drop", "truncate"] = Field(
        "drop", description="examples longer than model.context; long texts are always split"
    )

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if self.path and self.hf:
            raise ValueError("path and hf exclude each other: remove one")
        if self.sets and (self.path or self.hf):
            raise ValueError(f"sets and {'path' if self.path else 'hf'} exclude each other: remove one")
        if self.sets and self.kind != "text":
            raise ValueError(f"kind={self.kind} belongs to each of the sets: move it there")
        if self.kind != "text" and not (self.path or self.hf):
            raise ValueError(f"kind={self.kind} needs path or hf")
        return self

    @model_validator(mode="after")
    def sets_mix(self) -> Self:
        titles = [one.title for one in self.sets]
        if twice := next((title for title in titles if titles.count(title) > 1), None):
            raise ValueError(f"two sets are named '{twice}': set their name")
        preferences = [one.kind == "preference" for one in self.sets] or [self.kind == "preference"]
        if any(preferences) and not all(preferences):
            raise ValueError("kind=preference cannot be mixed with other kinds: their losses differ")
        if any(preferences) and self.mask == "all":
            raise ValueError("mask=all is not for kind=preference: only answers are compared")
        for one in self.sets:
            if one.weight < LEAST_SHARE * sum(other.weight for other in self.sets):
                raise ValueError(f"weight={one.weight:g} of '{one.title}' is below {LEAST_SHARE:g} of all weights")
        return self

    @property
    def all_sets(self) -> tuple[DataSetSection, ...]:
        """The sets, or the one set that `path` or `hf` describes; none for the standard library."""
        if self.sets or not (self.path or self.hf):
            return self.sets
        shared = {key: getattr(self, key) for key in ("path", "hf", "hf_config", "hf_split", "kind", "text_field")}
        return (DataSetSection(**shared),)


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
FrozenBase = Literal["full", "nf4"]


class LoraSection(Section):
    """Low-rank adapters beside frozen projections (LoRA)."""

    rank: Positive = Field(16, description="rank of the adapters")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="numerator of their scale, alpha / rank")
    targets: tuple[Projection, ...] = Field(PROJECTIONS, min_length=1, description="projections that get one")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of an adapter's inputs set to zero in training")
    source: str | None = Field(None, alias="from", description="folder with an adapter in peft's format to start from")
    dora: bool = Field(False, description="train the lengths of the adapted rows too (DoRA)")
    base: FrozenBase = Field("full", description="frozen projections: full, or in four bits by bitsandbytes (nf4: QLoRA)")

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)


class PreferenceSection(Section):
    """Preference optimization: pairs of a chosen and a rejected answer to the same prompt or, for kto, labelled answers."""

    loss: PreferenceLoss = Field(
        "dpo", description="loss; kto is for answers with a label, or pairs; orpo and simpo need no reference model"
    )
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="scale of the rewards; ipo: its tau, orpo: weight of the odds ratio; unset: 0.1, or 2 with simpo"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="dpo: probability that chosen and rejected are swapped by mistake"
    )
    gamma: Weight = Field(1.0, description="simpo: margin between the rewards of chosen and rejected")
    sft_weight: Weight = Field(
        0.0, description="dpo, hinge, ipo, simpo: weight of the chosen answers' mean loss; orpo always has it, with weight 1"
    )
    desirable_weight: Weight = Field(1.0, description="kto: weight of good answers (label true, chosen)")
    undesirable_weight: Weight = Field(1.0, description="kto: weight of bad answers (label false, rejected)")

    @model_validator(mode="after")
    def keys_belong_to_the_loss(self) -> Self:
        users = {
            "label_smoothing": ("dpo",),
            "gamma": ("simpo",),
            "sft_weight": ("dpo", "hinge", "ipo", "simpo"),
            "desirable_weight": ("kto",),
            "undesirable_weight": ("kto",),
        }
        for key, losses in users.items():
            value = getattr(self, key)
            if self.loss not in losses and value != type(self).model_fields[key].default:
                raise ValueError(f"{key}={value} has no effect with loss={self.loss}: remove it, or use {' or '.join(losses)}")
        return self

    @property
    def scale(self) -> float:
        """The value of beta, or its default for the loss."""
        return self.beta if self.beta is not None else 2.0 if self.loss == "simpo" else 0.1

    @property
    def needs_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo")


class SamplesSection(Section):
    """Greedy continuations of fixed prompts, generated at every evaluation."""

    prompts: tuple[str, ...] = Field(
        min_length=1, description="prompts; for conversations, messages of a user in the model's chat template"
    )
    tokens: Positive = Field(32, description="longest continuation, in tokens")


class TrainSection(Section):
    """Optimization, evaluation and checkpoints."""

    steps: NonNegative = Field(description="optimizer steps of the run; 0 exports an imported model as it is")
    batch: Positive = Field(description="sequences per optimizer step, over all workers")
    micro_batch: Positive = Field(description="sequences per forward pass on one data-parallel worker")
    lr: Annotated[float, Field(gt=0, lt=1)] = Field(description="peak learning rate")
    embedding_lr_ratio: Annotated[float, Field(gt=0)] = Field(
        1.0, description="learning rate of the embeddings over lr; narrow models train best near 10"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="final learning rate over lr")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up; fewer than steps")
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="weight decay of AdamW")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="rate after warm-up; cosine, linear: decay over all steps, wsd: constant for half, then linear"
    )
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="passes over the training data; replaces steps")
    early_stop: Positive | None = Field(
        None, description="evaluations without a lower validation loss after which the run ends; unset: it never does"
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
    samples: SamplesSection | None = Field(
        None, description="continuations of prompts at every evaluation, in samples.jsonl; unset: none"
    )
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
    lora: LoraSection | None = Field(None, description="train adapters and freeze the model; unset: full fine-tuning")
    freeze: tuple[str, ...] = Field((), description="patterns of parameters that are not trained: 'model.layers.[0-3].*'")
    max_failures: Annotated[int, Field(ge=0)] = Field(
        2, description="worker failures that the run recovers from; one more fails it"
    )
    trackers: tuple[Tracker, ...] = Field(
        (), description="experiment trackers that receive the metrics, in addition to the run's files"
    )
    preference: PreferenceSection | None = Field(
        None, description="preference optimization of a model on pairs of answers or labelled answers; unset: next-token loss"
    )

    @model_validator(mode="after")
    def warmup_ends(self) -> Self:
        if self.steps and self.warmup >= self.steps:
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
        *("enable_logging_iteration_details", "enable_lora", "max_lora_rank"),
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
    adapter: Literal["merged", "apart"] = Field(
        "merged", description="a LoRA run's export; merged: one model, apart: its base model and the adapter on it, by name"
    )
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
