"""Rules for parallel layouts that `strata train` can run.

DeepSpeed and the model's sizes restrict how dimensions combine. Training checks a recipe against these rules before it starts a
worker; the planner searches only layouts that pass them. Nothing here needs torch.
"""

from typing import NamedTuple

from strata.platform.recipe import ModelSection, Offload, ParallelSection, Precision, Schedule, TrainSection, WorkerCount


class ModelSizes(NamedTuple):
    """Sizes of a recipe's model section that a layout has to divide. `experts` is 0 in a dense model."""

    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    experts: int
    shared_ffn: int


class Division(NamedTuple):
    """Keys of a recipe's train and parallel sections that decide a layout."""

    precision: Precision
    batch: int
    micro_batch: int
    data: int
    zero: int
    tensor: int
    pipeline: int
    schedule: Schedule
    sequence: int
    expert: int
    offload: Offload

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step on each data-parallel worker."""
        return self.batch // (self.data * self.micro_batch)


def recipe_problem(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> str | None:
    """The first rule that a recipe's layout violates; None if it can run."""
    moe = model.moe
    sizes = ModelSizes(
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        context=model.context,
        experts=moe.experts if moe else 0,
        shared_ffn=moe.shared_ffn if moe else 0,
    )
    division = Division(
        precision=train.precision,
        batch=train.batch,
        micro_batch=train.micro_batch,
        data=parallel.data,
        zero=parallel.zero,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        schedule=parallel.schedule,
        sequence=parallel.sequence,
        expert=parallel.expert,
        offload=parallel.offload,
    )
    return (
        _picture_problem(model, parallel)
        or _architecture_problem(model, parallel)
        or _adapter_problem(train, parallel)
        or layout_problem(sizes, division)
    )


class FixedLayout(NamedTuple):
    """Layout of one number of workers, with the micro-batch that divides the global batch among them."""

    train: TrainSection
    parallel: ParallelSection


def resized(model: ModelSection, train: TrainSection, parallel: ParallelSection, workers: int) -> FixedLayout | None:
    """The layout with another number of data-parallel workers and the same global batch. None if it cannot run."""
    data, rest = divmod(workers, parallel.cut)
    if rest or data == 0 or data % parallel.expert or train.batch % data:
        return None
    share, fixed = train.batch // data, parallel.model_copy(update={"workers": WorkerCount(workers)})
    for micro_batch in range(min(train.micro_batch, share), 0, -1):  # the largest that works: DualPipeV needs many
        layout = FixedLayout(train.model_copy(update={"micro_batch": micro_batch}), fixed)
        if share % micro_batch == 0 and recipe_problem(model, *layout) is None:
            return layout
    return None


def largest(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> FixedLayout:
    """The recipe's layout; of a range, that of the largest number of workers that can run."""
    if not parallel.workers.elastic:
        return FixedLayout(train, parallel)
    found = (resized(model, train, parallel, size) for size in parallel.workers.sizes())
    return next((layout for layout in found if layout), FixedLayout(train, parallel))


def _picture_problem(model: ModelSection, parallel: ParallelSection) -> str | None:
    """Layouts that a picture model's two streams of tokens exclude."""
    if model.picture is None:
        return None
    if parallel.pipeline > 1:
        return (
            f"A picture model has no pipeline (parallel.pipeline={parallel.pipeline}): each of its layers takes the streams of"
            " pictures and captions and the text encoder's modulation, which DeepSpeed's stages do not pass on."
        )
    if model.picture.caption_tokens % parallel.sequence:
        return (
            f"parallel.sequence={parallel.sequence} must divide model.picture.caption_tokens={model.picture.caption_tokens}:"
            " captions are divided as pictures are."
        )
    return None


def _adapter_problem(train: TrainSection, parallel: ParallelSection) -> str | None:
    """Layouts that need the frozen projections as plain parameters."""
    if train.lora is None:
        return None
    if train.lora.dora and parallel.expert > 1:
        return f"DeepSpeed's expert parallelism (parallel.expert={parallel.expert}) has no magnitudes (train.lora.dora)."
    if train.lora.base == "full":
        return None
    held = f"train.lora.base={train.lora.base} holds whole projections in four bits on every worker"
    if parallel.tensor > 1 or parallel.expert > 1:
        return f"{held}: parallel.tensor={parallel.tensor} and parallel.expert={parallel.expert} cannot divide them."
    if parallel.zero == 3:
        return f"{held}, which parallel.zero=3 would have to partition."
    return None


def _architecture_problem(model: ModelSection, parallel: ParallelSection) -> str | None:
    """Layouts that the switches of other families than Llama exclude."""
    if model.architecture.qk_norm == "width" and parallel.tensor > 1:
        return f"The norms of queries and keys span all heads, which parallel.tensor={parallel.tensor} would divide."
    moe = model.moe
    if moe is None or parallel.expert == 1:
        return None
    if moe.bias or moe.dense_layers or not moe.normalize or model.architecture.activation != "silu":
        return (
            f"DeepSpeed's expert parallelism (parallel.expert={parallel.expert}) has no biases, dense layers, unscaled weights"
            " and other activations than SiLU, as this model has."
        )
    return None


def layout_problem(model: ModelSizes, layout: Division) -> str | None:
    """The first rule that a layout violates, with the recipe's keys and values; None if it can run."""
    return (
        _pipeline_problem(model, layout)
        or _offload_problem(layout)
        or _size_problem(model, layout)
        or _combination_problem(model, layout)
        or _expert_problem(model, layout)
    )


def _pipeline_problem(model: ModelSizes, layout: Division) -> str | None:
    if layout.pipeline == 1:
        if layout.schedule == "dualpipev":
            return "parallel.schedule=dualpipev orders a pipeline's micro-batches, and parallel.pipeline is 1."
        return None
    parts = layout.pipeline * (2 if layout.schedule == "dualpipev" else 1)
    if layout.zero > 1:
        return f"A pipeline (parallel.pipeline={layout.pipeline}) works with ZeRO 0 and 1, not with parallel.zero={layout.zero}."
    if layout.sequence > 1 or layout.expert > 1:
        return (
            f"DeepSpeed's pipeline (parallel.pipeline={layout.pipeline}) supports neither sequence nor expert parallelism"
            f" (parallel.sequence={layout.sequence}, parallel.expert={layout.expert})."
        )
    if layout.offload != "none":
        return f"A pipeline does not offload (parallel.offload={layout.offload})."
    if model.layers < parts:
        return f"model.layers={model.layers} cannot be divided into the {parts} parts of this pipeline."
    if layout.schedule == "dualpipev" and layout.micro_batches < 2 * layout.pipeline:
        return (
            f"DualPipeV needs {2 * layout.pipeline} micro-batches a step; train.batch={layout.batch} makes {layout.micro_batches}"
            f" (data-parallel workers {layout.data} x train.micro_batch={layout.micro_batch})."
        )
    return None


def _offload_problem(layout: Division) -> str | None:
    if layout.offload != "none" and layout.zero == 0:
        return f"parallel.offload={layout.offload} offloads what ZeRO partitions, and parallel.zero is 0."
    if layout.offload == "all" and layout.zero < 3:
        return f"parallel.offload=all offloads parameters, which only parallel.zero=3 partitions (it is {layout.zero})."
    return None


def _size_problem(model: ModelSizes, layout: Division) -> str | None:
    for key, size in (("tensor", layout.tensor), ("sequence", layout.sequence)):
        if model.heads % size or model.kv_heads % size:
            return f"parallel.{key}={size} must divide model.heads={model.heads} and model.kv_heads={model.kv_heads}."
    if model.ffn % layout.tensor:
        return f"parallel.tensor={layout.tensor} must divide model.ffn={model.ffn}."
    if model.shared_ffn % layout.tensor:
        return f"parallel.tensor={layout.tensor} must divide model.moe.shared_ffn={model.shared_ffn}."
    if model.context % layout.sequence:
        return f"parallel.sequence={layout.sequence} must divide model.context={model.context}."
    return None


def _combination_problem(model: ModelSizes, layout: Division) -> str | None:
    if layout.precision == "bf16" and layout.zero == 0 and (layout.tensor > 1 or layout.expert > 1):
        return (
            "In bf16 without ZeRO (train.precision=bf16, parallel.zero=0), DeepSpeed clips each worker's part of the model"
            " by a norm of its own."
        )
    if layout.sequence > 1 and layout.tensor > 1:
        return (
            "DeepSpeed does not combine tensor and sequence parallelism"
            f" (parallel.tensor={layout.tensor}, parallel.sequence={layout.sequence})."
        )
    if layout.sequence > 1 and model.experts:
        return f"A mixture of experts balances whole sequences, which parallel.sequence={layout.sequence} would divide."
    return None


def _expert_problem(model: ModelSizes, layout: Division) -> str | None:
    if layout.expert == 1:
        return None
    if not model.experts:
        return f"parallel.expert={layout.expert} distributes experts, and the model has none (model.moe)."
    if model.experts % layout.expert:
        return f"parallel.expert={layout.expert} must divide model.moe.experts={model.experts}."
    if layout.tensor > 1:  # a mixture of experts has no sequence parallelism either: `_combination_problem`
        return (
            f"Expert parallelism (parallel.expert={layout.expert}) is combined with data parallelism only"
            f" (parallel.tensor={layout.tensor})."
        )
    if layout.offload != "none":
        return f"Expert parallelism does not offload (parallel.offload={layout.offload})."
    return None
