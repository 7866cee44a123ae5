"""Conversion between plans and recipes, and the layouts that `strata train` can run."""

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import get_args

from pydantic import ValidationError

from strata.planner.catalogue import library
from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import program
from strata.planner.layout import Layout
from strata.planner.memory.activations import keeping_of
from strata.planner.memory.plan import peak_bytes
from strata.planner.memory.tuning import tuning_of
from strata.planner.pipeline.schedules import CHUNKS
from strata.planner.step.step import plan_step
from strata.planner.units import show
from strata.planner.worksheet import Worksheet
from strata.platform import layout_rules
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Fabric, Gpu
from strata.platform.layout_rules import Division, ModelSizes
from strata.platform.model_families import imported
from strata.platform.recipe import (
    ModelSection,
    MoESection,
    ParallelSection,
    Precision,
    Recipe,
    Schedule,
    ServeSection,
    TrainSection,
)

STEPS = 1000  # without a token budget
WARMUP = 2000  # steps, as Llama 2's; a tenth of a shorter run
EVALUATIONS = 100  # over a run, and as many checkpoints
PRECISIONS, SCHEDULES = get_args(Precision), get_args(Schedule)


def layout_problem(shape: Shape, layout: Layout, sequence: int) -> str | None:
    """The reason why `strata train` cannot run this layout; None if it can."""
    return _inexpressible(shape, layout) or layout_rules.layout_problem(_sizes(shape, sequence), _division(layout))


def _inexpressible(shape: Shape, layout: Layout) -> str | None:
    """The reason why no recipe describes this plan. Recipes train Llama-shaped models, dense or with experts in every layer."""
    if shape.latent:
        return f"{shape.name} has latent attention."
    if not shape.gated or shape.biases or shape.query_biases or shape.positions:
        return f"{shape.name} is not a Llama: it has biases, learned positions or no gate in its feed-forward blocks."
    if shape.head_dim * shape.heads != shape.hidden:
        return f"{shape.heads} heads of width {shape.head_dim} do not add up to the hidden size {shape.hidden} of {shape.name}."
    if shape.experts and shape.experts.dense_layers:
        return f"The first {shape.experts.dense_layers} layers of {shape.name} have no experts, and the others have."
    if layout.context > 1:
        return "It shares sequences by heads (sequence), not in a ring (context)."
    if layout.sequence_parallel:
        return "It does not split activations between tensor-parallel matrices by tokens (sequence_parallel)."
    if layout.precision not in PRECISIONS:
        return f"It trains in {' and '.join(PRECISIONS)}, not in {layout.precision}."
    if layout.schedule not in SCHEDULES:
        return f"Its pipelines run as {' or '.join(SCHEDULES)}, not as {layout.schedule}."
    return None


@lru_cache(maxsize=64)
def _sizes(shape: Shape, sequence: int) -> ModelSizes:
    moe = shape.experts
    return ModelSizes(
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=moe.ffn if moe else shape.ffn,
        context=sequence,
        experts=moe.count if moe else 0,
        shared_ffn=moe.shared_ffn if moe else 0,
    )


def _division(layout: Layout) -> Division:
    """Recipe keys of a layout that a recipe can express."""
    return Division(
        precision="bf16" if layout.precision == "bf16" else "fp32",
        batch=layout.batch,
        micro_batch=layout.micro_batch,
        data=layout.data,
        zero=layout.zero,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        schedule="dualpipev" if layout.schedule == "dualpipev" else "1f1b",
        sequence=layout.sequence,
        expert=layout.expert,
        offload=layout.offload,
    )


def as_recipe(shape: Shape, layout: Layout, sequence: int, tokens: float | None = None) -> Recipe:
    """A recipe that trains this model in this layout, for so many tokens. Keys that no plan decides (learning rate, evaluation
    interval) are those of large models, and the corpus is the default: change them."""
    problem = layout_problem(shape, layout, sequence)
    if problem:
        raise UserError(f"strata train cannot run this plan. {problem}", "Search layouts that it can run: --program strata.")
    try:
        return _recipe(shape, layout, sequence, tokens)
    except ValidationError as error:
        found = error.errors()[0]
        value = f"{found['loc'][-1]}={found['input']}: " if found["loc"] else ""
        raise UserError(
            f"strata train cannot run this plan. {value}{found['msg'].removeprefix('Value error, ')}.",
            "Change the model, --seq or --batch.",
        ) from None


def _recipe(shape: Shape, layout: Layout, sequence: int, tokens: float | None) -> Recipe:
    moe, sizes, division = shape.experts, _sizes(shape, sequence), _division(layout)
    steps = STEPS if tokens is None else ceil(tokens / (layout.batch * sequence))
    every = max(1, steps // EVALUATIONS)
    return Recipe(
        model=ModelSection(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            ffn=sizes.ffn,
            vocab=shape.vocab,
            context=sequence,
            tie_embeddings=shape.tied,
            moe=MoESection(experts=moe.count, top_k=moe.top_k, shared_ffn=moe.shared_ffn) if moe else None,
        ),
        train=TrainSection(
            steps=steps,
            batch=layout.batch,
            micro_batch=layout.micro_batch,
            lr=learning_rate(shape),
            warmup=min(WARMUP, steps // 10),
            precision=division.precision,
            recompute=layout.recompute,
            compile=True,
            eval_every=every,
            checkpoint_every=every,
        ),
        parallel=ParallelSection(
            workers=layout.gpus,
            zero=layout.zero,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            schedule=division.schedule,
            sequence=layout.sequence,
            expert=layout.expert,
            offload=layout.offload,
            device="gpu",
        ),
        serve=ServeSection(device="gpu", dtype="bfloat16"),
    )


def learning_rate(shape: Shape) -> float:
    """Llama 3's rates, 3e-4 at 8 billion parameters, 1.5e-4 at 70 and 8e-5 at 405 (arXiv 2407.21783, table 3), fall with the
    third root."""
    return float(f"{min(1e-3, 3e-4 * (8e9 / shape.active_parameters()) ** (1 / 3)):.1e}")


def from_recipe(recipe: Recipe) -> tuple[Shape, Layout, int]:
    """The model, the layout and the sequence length that a recipe trains with. A range of workers is planned at its largest."""
    model = recipe.model
    train, parallel = layout_rules.largest(model, recipe.train, recipe.parallel)
    layout = Layout(
        data=parallel.data,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        sequence=parallel.sequence,
        expert=parallel.expert,
        schedule=parallel.schedule,
        interleave=CHUNKS[parallel.schedule],
        zero=parallel.zero,
        micro_batch=train.micro_batch,
        batch=train.batch,
        recompute=train.recompute,
        offload=parallel.offload,
        precision=train.precision,
    )
    return library.from_recipe(model, "the recipe's model"), layout, model.context


def program_of(train: TrainSection) -> str:
    """Liger's kernels save the same activations as Strata's; with Liger attention is torch's, which saves the same too."""
    if train.kernels != "torch":
        return "strata"
    return "strata-torch" if train.compile else "strata-eager"


def planned_peak(recipe: Recipe) -> float:
    """Bytes of the fullest worker at its fullest moment, on the recipe's device. On a CPU, without the process before it has a
    model."""
    shape, layout, sequence = from_recipe(recipe)
    tuning = tuning_of(recipe.model, recipe.train)
    keeping = replace(keeping_of(program(program_of(recipe.train))), cpu=recipe.parallel.device == "cpu", tuning=tuning)
    return peak_bytes(shape, layout, keeping, sequence) + teacher_bytes(recipe)


def teacher_bytes(recipe: Recipe) -> float:
    """Bytes of the teacher's weights in a distillation, whole on each worker that has an output layer."""
    if recipe.train.distill is None:
        return 0.0
    section = imported.teacher(recipe.train.distill, recipe.model.context)
    return library.from_recipe(section, "the teacher").parameters() * (2.0 if recipe.train.precision == "bf16" else 4.0)


def planned_seconds(recipe: Recipe, gpu: Gpu, fabric: Fabric) -> float:
    """Seconds of an optimizer step by plan."""
    shape, layout, sequence = from_recipe(recipe)
    return plan_step(shape, layout, gpu, fabric, program(program_of(recipe.train)), Worksheet(shape.name), sequence).seconds


def warning(recipe: Recipe, gpu: Gpu) -> str | None:
    """One line if, by plan, the recipe does not fit on this GPU."""
    if recipe.parallel.device != "gpu":
        return None
    peak = planned_peak(recipe)
    if peak <= gpu.memory:
        return None
    return (
        f"This recipe will hardly fit: by plan each worker needs {show(peak, 'B')} at its fullest, and {gpu.name} has"
        f" {show(gpu.memory, 'B')}, {show(peak - gpu.memory, 'B')} too little ('strata plan --recipe' prints the parts)."
    )
