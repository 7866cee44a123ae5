"""Sections of training: optimization, adapters, preferences and samples."""

from typing import Annotated, Literal, Self, get_args

from pydantic import ConfigDict, Field, model_validator

from strata.platform.recipe.picture import FlowSection
from strata.platform.recipe.section import NonNegative, Positive, Section, Weight
from strata.platform.recipe.watchdog import SpikeSection, WatchdogSection

Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
Kernels = Literal["strata", "torch", "liger"]

Tracker = Literal["tensorboard", "wandb", "mlflow"]
PreferenceLoss = Literal["dpo", "hinge", "ipo", "kto", "orpo", "simpo"]

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
    memory_copy_every: NonNegative = Field(
        1, description="steps between copies of the state to memory, from which a run continues after a lost worker; 0: no copies"
    )
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
    watchdog: WatchdogSection | None = Field(
        WatchdogSection(), description="names hangs and slow ranks, and has ranks that hang restarted; null: off"
    )
    on_spike: SpikeSection | None = Field(
        None,
        description="back to the newest checkpoint and on without that batch; unset: a loss that is not finite ends the run",
    )
    trackers: tuple[Tracker, ...] = Field(
        (), description="experiment trackers that receive the metrics, in addition to the run's files"
    )
    preference: PreferenceSection | None = Field(
        None, description="preference optimization of a model on pairs of answers or labelled answers; unset: next-token loss"
    )
    distill: str | None = Field(
        None,
        description="run, folder or Hugging Face id of a teacher with the same tokenizer, whose next-token distribution the model"
        " learns; unset: it learns from the text alone",
    )
    flow: FlowSection | None = Field(None, description="flow matching of a picture model (model.picture); unset: next-token loss")

    @model_validator(mode="after")
    def warmup_ends(self) -> Self:
        if self.steps and self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be below steps={self.steps}")
        return self

    @model_validator(mode="after")
    def one_objective(self) -> Self:
        if self.distill is not None and self.preference is not None:
            raise ValueError("distill and preference are two objectives: remove one")
        return self
