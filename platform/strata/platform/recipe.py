"""The recipe: one file that says everything about a run.

Each section is one model here; rooms take their section, never the whole recipe. Loading (files, `extends`, overrides)
is in `recipe_file.py`.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Device = Literal["cpu", "gpu"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
    micro_batch: Positive = Field(description="sequences per forward pass on one worker")
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
    keep: Positive = Field(3, description="checkpoints kept, newest first")
    max_failures: Annotated[int, Field(ge=0)] = Field(2, description="worker losses survived before the run fails")

    @model_validator(mode="after")
    def warmup_ends(self) -> Self:
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be below steps={self.steps}")
        return self


class ParallelSection(Section):
    workers: Positive = 1
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    device: Device = "cpu"
    cpus_per_worker: Positive = 1


class PoolSection(Section):
    """One pool of engines, prefill or decode."""

    replicas: Positive = 1
    gpus: Annotated[float, Field(gt=0)] = Field(1.0, description="GPUs a replica takes; below 1, replicas share one")
    tensor_parallel: Positive = 1
    gpu_memory: Annotated[float, Field(gt=0, lt=1)] = Field(0.9, description="share of each GPU's memory an engine takes")

    @model_validator(mode="after")
    def sharing_fits(self) -> Self:
        if self.gpus < 1 and self.gpu_memory > self.gpus:
            raise ValueError(f"gpu_memory={self.gpu_memory} must not exceed gpus={self.gpus} when replicas share a GPU")
        if self.gpus >= 1 and self.gpus != self.tensor_parallel:
            raise ValueError(
                f"gpus={self.gpus} must equal tensor_parallel={self.tensor_parallel} (or be below 1 to share one GPU)"
            )
        return self


class ServeSection(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    device: Device = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    eager: bool = Field(False, description="skip torch.compile: slower tokens, a much faster start")
    kv_cache_gib: Positive = Field(1, description="KV cache of one CPU engine; on GPUs gpu_memory decides")
    max_sequences: Positive = Field(64, description="sequences an engine runs at once")
    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()


class Recipe(Section):
    model: ModelSection
    data: DataSection = DataSection()
    train: TrainSection
    parallel: ParallelSection = ParallelSection()
    serve: ServeSection = ServeSection()

    @model_validator(mode="after")
    def batch_divides(self) -> Self:
        share = self.parallel.workers * self.train.micro_batch
        if self.train.batch % share:
            raise ValueError(
                f"train.batch={self.train.batch} must be a multiple of parallel.workers x train.micro_batch = {share}"
            )
        return self
