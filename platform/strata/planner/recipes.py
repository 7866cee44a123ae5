"""Between a plan and a recipe: which layouts `strata train` accepts, a recipe for one, and the plan of a recipe."""

import re
from math import ceil

from pydantic import ValidationError

from strata.planner.catalogue import library
from strata.planner.catalogue.hardware import Gpu
from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import program
from strata.planner.layout import Layout
from strata.planner.memory.activations import keeping_of
from strata.planner.memory.plan import peak_bytes
from strata.planner.units import show
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, MoESection, ParallelSection, Recipe, ServeSection, TrainSection

STEPS = 1000  # when nobody says a token budget
WARMUP = 2000  # steps, as Llama 2's; a tenth of a shorter run
EVALUATIONS = 100  # over a run, and as many checkpoints


def obstacle(shape: Shape, layout: Layout, sequence: int) -> str | None:
    """Why `strata train` would refuse this layout; None if it would not. The same rules as those of the training room, which
    the planner does not import; a test holds them against each other."""
    return _model_obstacle(shape) or _dimension_obstacle(layout) or _training_obstacle(shape, layout, sequence)


def _model_obstacle(shape: Shape) -> str | None:
    """Strata trains Llama-shaped models, dense or with experts in every layer."""
    if shape.latent:
        return f"{shape.name} has latent attention."
    if not shape.gated or shape.biases or shape.query_biases or shape.positions:
        return f"{shape.name} is not built like a Llama: it has biases, learned positions or no gate in its feed-forward blocks."
    if shape.head_dim * shape.heads != shape.hidden:
        return (
            f"{shape.heads} heads that are {shape.head_dim} wide do not make the {shape.hidden} hidden numbers of {shape.name}."
        )
    if shape.experts and shape.experts.dense_layers:
        return f"The first {shape.experts.dense_layers} layers of {shape.name} have no experts, and the others have."
    return None


def _dimension_obstacle(layout: Layout) -> str | None:
    if layout.context > 1:
        return "It shares sequences by heads (sequence), not in a ring (context)."
    if layout.sequence_parallel:
        return "It does not split by tokens what lies between tensor-parallel matrices (sequence_parallel)."
    if layout.precision not in ("fp32", "bf16"):
        return f"It trains in fp32 and bf16, not in {layout.precision}."
    if layout.schedule not in ("1f1b", "dualpipev"):
        return f"Its pipelines run as 1f1b or dualpipev, not as {layout.schedule}."
    return None


def _training_obstacle(shape: Shape, layout: Layout, sequence: int) -> str | None:
    moe = shape.experts
    if layout.pipeline > 1:
        if layout.zero > 1:
            return f"Its pipelines work with ZeRO 0 and 1, not with {layout.zero}."
        if layout.sequence > 1 or layout.expert > 1:
            return "Its pipelines know neither sequence nor expert parallelism."
        if layout.offload != "none":
            return "Its pipelines do not offload."
        if shape.layers < layout.pipeline * layout.interleave:
            return f"{shape.layers} layers cannot be cut into {layout.pipeline * layout.interleave} parts."
        if layout.schedule == "dualpipev" and layout.micro_batches < 2 * layout.pipeline:
            return f"DualPipeV needs {2 * layout.pipeline} micro-batches a step, not {layout.micro_batches}."
    elif layout.schedule == "dualpipev":
        return "DualPipeV orders a pipeline's micro-batches, and there is one stage."
    if layout.offload != "none" and layout.zero == 0:
        return "It offloads only what ZeRO shares out."
    if layout.offload == "all" and layout.zero < 3:
        return "It offloads parameters only with ZeRO-3."
    for size in (layout.tensor, layout.sequence):
        if shape.heads % size or shape.kv_heads % size:
            return f"{size} does not divide {shape.heads} heads and {shape.kv_heads} key/value heads."
    if (moe.ffn if moe else shape.ffn) % layout.tensor or (moe and moe.shared_ffn % layout.tensor):
        return f"{layout.tensor} does not divide the feed-forward width."
    if sequence % layout.sequence:
        return f"{layout.sequence} does not divide a sequence of {sequence}."
    if layout.precision == "bf16" and layout.zero == 0 and (layout.tensor > 1 or layout.expert > 1):
        return "In bf16 without ZeRO it does not cut the model."
    if layout.sequence > 1 and (layout.tensor > 1 or moe):
        return "It combines sequence parallelism neither with tensor parallelism nor with experts."
    if layout.expert > 1 and (moe is None or moe.count % layout.expert):
        return f"{layout.expert} workers cannot share out {moe.count if moe else 'no'} experts."
    if layout.expert > 1 and (layout.tensor > 1 or layout.offload != "none" or layout.data % layout.expert):
        return "It combines expert parallelism with data parallelism alone."
    return None


def as_recipe(shape: Shape, layout: Layout, sequence: int, tokens: float | None = None) -> Recipe:
    """A recipe that trains this model in this layout, for so many tokens. What a plan says nothing of (the learning rate, how
    often to evaluate) is as large models usually have it, and the data are a recipe's usual ones: change them."""
    problem = obstacle(shape, layout, sequence)
    if problem:
        raise UserError(f"strata train cannot run this plan. {problem}", "Search among what it can: --program strata.")
    try:
        return _recipe(shape, layout, sequence, tokens)
    except ValidationError as error:
        found = error.errors()[0]
        raise UserError(
            f"strata train cannot run this plan. {found['loc'][-1]}={found['input']}: {found['msg']}.",
            "Change the model, --seq or --batch.",
        ) from None


def _recipe(shape: Shape, layout: Layout, sequence: int, tokens: float | None) -> Recipe:
    moe = shape.experts
    steps = STEPS if tokens is None else ceil(tokens / (layout.batch * sequence))
    every = max(1, steps // EVALUATIONS)
    return Recipe(
        model=ModelSection(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            ffn=moe.ffn if moe else shape.ffn,
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
            precision="bf16" if layout.precision == "bf16" else "fp32",
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
            schedule="dualpipev" if layout.schedule == "dualpipev" else "1f1b",
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
    """The model, the layout and the tokens of a sequence that a recipe trains with."""
    model, train, parallel = recipe.model, recipe.train, recipe.parallel
    layout = Layout(
        data=parallel.data,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        sequence=parallel.sequence,
        expert=parallel.expert,
        schedule=parallel.schedule,
        interleave=2 if parallel.schedule == "dualpipev" else 1,
        zero=parallel.zero,
        micro_batch=train.micro_batch,
        batch=train.batch,
        recompute=train.recompute,
        offload=parallel.offload,
        precision=train.precision,
    )
    return library.from_recipe(model, "the recipe's model"), layout, model.context


def program_of(train: TrainSection) -> str:
    """Liger's kernels keep what ours do; attention, which it has none of, keeps the same with torch's."""
    if train.kernels != "torch":
        return "strata"
    return "strata-torch" if train.compile else "strata-eager"


def warning(recipe: Recipe, gpu: Gpu) -> str | None:
    """One line for who is about to train, if the plan says that the recipe does not fit."""
    if recipe.parallel.device != "gpu":
        return None
    shape, layout, sequence = from_recipe(recipe)
    peak = peak_bytes(shape, layout, keeping_of(program(program_of(recipe.train))), sequence)
    if peak <= gpu.memory:
        return None
    return (
        f"This recipe will hardly fit: by plan each worker needs {show(peak, 'B')} at its fullest, and {gpu.name} has"
        f" {show(gpu.memory, 'B')}, {show(peak - gpu.memory, 'B')} too little ('strata plan --recipe' shows what takes it)."
    )


# By words of the names that torch.cuda.get_device_name gives, such as "NVIDIA H100 80GB HBM3" and "Tesla V100-SXM2-32GB". A
# card that the catalogue does not have (an H100 NVL, an A100 for PCIe) has words of its own, and is none of these.
DEVICE_NAMES = {
    "v100-32gb": {"v100", "sxm2", "32gb"},
    "a100-40gb": {"a100", "sxm4", "40gb"},
    "a100-80gb": {"a100", "sxm4", "80gb"},
    "h100-sxm": {"h100", "80gb", "hbm3"},
    "h100-pcie": {"h100", "pcie"},
    "h200": {"h200"},
    "h800": {"h800"},
    "h20": {"h20"},
    "b200": {"b200"},
    "gb200": {"gb200"},
    "l40s": {"l40s"},
    "mi300x": {"mi300x"},
    "ascend-910b": {"ascend910b2"},
}


def gpu_named(device_name: str) -> Gpu | None:
    """A GPU of the catalogue by the name that its driver gives it."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    return next((library.gpu(name) for name, wanted in DEVICE_NAMES.items() if wanted <= words), None)
