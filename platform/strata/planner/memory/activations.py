"""Activations that a layer saves for its backward pass, per micro-batch, by part and by training program.

`unfused` is Megatron's GPT with dropout and with attention scores in memory: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4, whose sums ours are. `flash` is Megatron-Core with
Transformer Engine: flash attention, fused kernels, no dropout. `eager` is our own model in plain torch, operation by
operation as autograd saves it; `own` the same model on our own kernels.
"""

from dataclasses import dataclass, replace
from typing import Literal

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.layout import Layout, Recompute
from strata.planner.memory.tuning import Tuning
from strata.planner.worksheet import Worksheet

PARTS = ("norms", "projections", "core", "feed_forward", "residual")
# Tokens choose their experts, so the fullest GPU gets more than its share. 1.25 is the capacity that Switch Transformers
# (arXiv 2101.03961) gives experts, beyond which a balanced router drops few tokens. With all experts on one GPU it is exact.
CROWDING = 1.25


@dataclass(frozen=True)
class Keeping:
    """A training program, by what it holds beside what the arithmetic needs. `selective` is what it computes again then:
    attention's core, all but the matrix products, or every other one of those too. `cpu`: its workers run on CPUs. `tuning`: it
    trains a part of the model."""

    style: Literal["unfused", "flash", "eager", "own"]
    engine: Literal["megatron", "fsdp", "deepspeed"]
    selective: Literal["core", "streams", "half"] = "core"
    fp32_gradients: bool = False  # Megatron's --accumulate-allreduce-grads-in-fp32
    cpu: bool = False
    tuning: Tuning | None = None

    @property
    def saving(self) -> str:
        """Style of what layers save. On CPUs our training takes all but its loss from torch."""
        return "eager" if self.cpu and self.style == "own" else self.style


UNFUSED = Keeping("unfused", "megatron")
FSDP = Keeping("flash", "fsdp", "half")  # as torchtitan uses torch's FSDP2
OWN = Keeping("own", "deepspeed", "streams")  # Strata's own training
EAGER = replace(OWN, style="eager")  # with train.kernels=torch
# With train.compile as well: torch.compile computes norms and activation functions again rather than keep what they made. One
# H200 with the h200 recipe: 61 GiB allocated, 71 planned so and 87 as eager.
COMPILED = replace(EAGER, style="flash")
OURS = {"strata": OWN, "strata-torch": COMPILED, "strata-eager": EAGER}


def keeping_of(software: Software) -> Keeping:
    if software.name in OURS:
        return OURS[software.name]
    if software.selective == "half":
        return FSDP
    return Keeping(software.attention, "megatron", fp32_gradients=software.gradient_bytes == 4)


@dataclass(frozen=True)
class Parts:
    """Bytes. `residual` is what lies on the residual stream: dropout masks, or a recomputed layer's input."""

    norms: float
    projections: float
    core: float
    feed_forward: float
    residual: float

    @property
    def total(self) -> float:
        return self.norms + self.projections + self.core + self.feed_forward + self.residual


def layer_parts(shape: Shape, layout: Layout, keeping: Keeping, sparse: bool = False, sequence: int | None = None) -> Parts:
    """Activations of one layer, dense or with experts, for one micro-batch on one GPU."""
    worksheet = Worksheet("a layer's activations")
    write_tokens(worksheet, shape, layout, shape.context if sequence is None else sequence)
    write_layer(worksheet, shape, layout, keeping, sparse)
    return Parts(*(worksheet[_name(part, sparse)] for part in PARTS))


def write_tokens(worksheet: Worksheet, shape: Shape, layout: Layout, sequence: int) -> None:
    """Lines that all layers share."""
    worksheet.given("micro_batch", layout.micro_batch, "", "sequences in a micro-batch")
    worksheet.given("sequence_length", sequence)
    worksheet.given("ulysses", layout.sequence, "", "GPUs that share each sequence, by heads in attention")
    worksheet.given("ring", layout.context, "", "GPUs that share each sequence, in attention too")
    worksheet.given("tensor", layout.tensor, "", "GPUs that share each matrix")
    worksheet.given("hidden", shape.hidden)
    worksheet.given("width", 4 if layout.precision == "fp32" else 2, "B", "of a number in the residual stream")
    worksheet.given("input_width", {"fp32": 4, "fp8": 1}.get(layout.precision, 2), "B", "of a matrix product's saved input")
    worksheet.work_out("tokens", "micro_batch * sequence_length / (ulysses * ring)", "", "of a micro-batch, on one GPU")
    split = "tokens / tensor" if layout.sequence_parallel else "tokens"
    worksheet.work_out("between", split, "", "tokens that a GPU has between tensor-parallel matrices")
    _write_attention_widths(worksheet, shape)


def write_layer(worksheet: Worksheet, shape: Shape, layout: Layout, keeping: Keeping, sparse: bool) -> None:
    """A line for each part, their sum `dense_layer` or `sparse_layer`, and `..._whole`, which is all that a layer that is
    computed again holds for that time."""
    if sparse:
        _write_experts(worksheet, shape, layout)
    else:
        worksheet.given("ffn", shape.ffn, "", "width of a dense feed-forward block")
    saved = _formulas(shape, layout, keeping, sparse, layout.recompute)
    for part in PARTS:
        worksheet.work_out(_name(part, sparse), saved[part], "B", _WHY[part])
    kind = "sparse" if sparse else "dense"
    worksheet.work_out(
        f"{kind}_layer", " + ".join(_name(part, sparse) for part in PARTS), "B", "saved by a layer of one micro-batch"
    )
    if layout.recompute != "none":
        whole = _formulas(shape, layout, keeping, sparse, "none")
        formula = " + ".join(formula for formula in whole.values() if formula != "0")
        worksheet.work_out(f"{kind}_whole", formula, "B", "of a layer while it is computed again")


_WHY = {
    "norms": "what the layer's two norms keep",
    "projections": "inputs of the matrices before and after attention",
    "core": "queries, keys, values and what attention between them keeps",
    "feed_forward": "inputs of the matrices and of what lies between them",
    "residual": "dropout masks, or the input of a layer that is computed again",
}


def _name(part: str, sparse: bool) -> str:
    """Attention's lines are alike in dense and sparse layers."""
    return "experts_feed_forward" if sparse and part == "feed_forward" else part


def _write_attention_widths(worksheet: Worksheet, shape: Shape) -> None:
    worksheet.given("heads", shape.heads)
    if shape.latent:
        worksheet.given("plain_dim", shape.latent.plain_dim)
        worksheet.given("rotary_dim", shape.latent.rotary_dim)
        worksheet.given("value_dim", shape.latent.value_dim)
        worksheet.given("query_rank", shape.latent.query_rank)
        worksheet.given("kv_rank", shape.latent.kv_rank)
        worksheet.work_out("queries", "heads * (plain_dim + rotary_dim) / tensor", "", "numbers a token has of them on one GPU")
        worksheet.work_out("keys_values", "heads * (plain_dim + rotary_dim + value_dim) / tensor")
        worksheet.work_out("attended", "heads * value_dim / tensor", "", "what attention makes of a token")
        why = "narrow projections, before and after their norms"
        worksheet.work_out("narrow", "2 * query_rank + 2 * kv_rank + rotary_dim", "", why)
    else:
        worksheet.given("kv_heads", shape.kv_heads)
        worksheet.given("head_dim", shape.head_dim)
        worksheet.work_out("queries", "heads * head_dim / tensor", "", "numbers a token has of them on one GPU")
        why = "a key head that has too few to share goes to every GPU"
        worksheet.work_out("keys_values", "2 * max(kv_heads / tensor, ulysses) * head_dim", "", why)
        worksheet.work_out("attended", "queries", "", "what attention makes of a token")


def _write_experts(worksheet: Worksheet, shape: Shape, layout: Layout) -> None:
    assert shape.experts
    worksheet.given("experts", shape.experts.count)
    worksheet.given("top_k", shape.experts.top_k, "", "experts that a token passes through")
    worksheet.given("expert_ffn", shape.experts.ffn)
    worksheet.given("shared_ffn", shape.experts.shared_ffn)
    crowding = CROWDING if layout.expert > 1 else 1.0
    worksheet.given("crowding", crowding, "", "tokens that the fullest GPU's experts get, over the mean")
    # Every tensor-parallel GPU has the whole of a token that reaches its part of an expert.
    worksheet.work_out("dispatched", "tokens * top_k * crowding", "", "tokens' copies that a GPU's experts get")


def _formulas(shape: Shape, layout: Layout, keeping: Keeping, sparse: bool, recompute: Recompute) -> dict[str, str]:
    """Formula of each part, over the lines above."""
    if recompute == "full":
        return dict.fromkeys(PARTS, "0") | {"residual": "between * hidden * width"}
    if recompute == "selective" and keeping.selective != "core":
        return _products(shape, layout, keeping, sparse)
    if keeping.saving == "eager":
        return _ours(shape, sparse, norm="hidden * (4 + width) + 4", wide=4)
    if keeping.saving == "own":
        return _ours(shape, sparse, norm="hidden * width + 4", wide=3)
    return _megatron(shape, keeping, sparse, recompute)


STATISTICS = "4 * tokens * heads / tensor"  # flash attention keeps each row's sum of exponentials, in fp32
SCORES = "(2 * width + 1) * tokens * sequence_length * heads / tensor"  # softmax, its dropout's output and mask


def _megatron(shape: Shape, keeping: Keeping, sparse: bool, recompute: Recompute) -> dict[str, str]:
    """Selective recomputation is of attention's core alone, whose scores (or statistics) are not saved then."""
    unfused = keeping.style == "unfused"
    attention = "" if recompute == "selective" else f" + {SCORES if unfused else STATISTICS}"
    inputs = "hidden + narrow" if shape.latent else "hidden"
    # Of a SwiGLU: gate, up, the product, and where kernels are not fused the gate's activation. Of a GeLU: before and after.
    before, after = ("3", 1) if shape.gated and unfused else ("2", 1) if shape.gated else ("1", 1)
    wide = f"({before} * width + {after} * input_width)"
    if sparse:
        # Router probabilities are in fp32. The dispatched tokens are the experts' inputs; without fused kernels their
        # outputs are saved too, to be weighted.
        returned = " + dispatched * hidden * width" if unfused else ""
        feed_forward = (
            f"between * (hidden * input_width + 4 * experts) + dispatched * (hidden * input_width + expert_ffn / tensor * {wide})"
            f"{returned} + tokens * shared_ffn / tensor * {wide}"
        )
    else:
        feed_forward = f"between * hidden * input_width + tokens * ffn / tensor * {wide}"
    return {
        "norms": "2 * between * hidden * width",
        "projections": f"between * ({inputs}) * input_width + tokens * attended * input_width",
        "core": f"tokens * (queries + keys_values) * width{attention}",
        "feed_forward": feed_forward,
        "residual": "2 * between * hidden" if unfused else "0",  # a byte for each number that may be dropped
    }


def _ours(shape: Shape, sparse: bool, norm: str, wide: int) -> dict[str, str]:
    """A norm keeps its input and its root mean square; in plain torch the input in fp32, and what it made before its weight. A
    SwiGLU keeps gate, up and product; in plain torch the activated gate, too. Experts keep their inputs, and their outputs both
    as they come and put back in the tokens' order."""
    inputs = "hidden + narrow" if shape.latent else "hidden"
    if sparse:
        always = shape.experts and shape.experts.shared_ffn
        shared = f" + tokens * (hidden + {wide} * shared_ffn / tensor) * width" if always else ""
        feed_forward = (
            f"between * (hidden * width + 8 * experts) + dispatched * (3 * hidden + {wide} * expert_ffn / tensor) * width{shared}"
        )
    else:
        feed_forward = f"between * hidden * width + {wide} * tokens * ffn / tensor * width"
    return {
        "norms": f"2 * between * ({norm})",
        "projections": f"between * ({inputs}) * width + tokens * attended * width",
        "core": f"tokens * (queries + keys_values) * width + {STATISTICS}",
        "feed_forward": feed_forward,
        "residual": "0",
    }


def _products(shape: Shape, layout: Layout, keeping: Keeping, sparse: bool) -> dict[str, str]:
    """Results of matrix products (or of every other one) and of attention, and the layer's input. DeepSpeed's tensor parallelism
    sums in place, so that we keep none of the products it sums."""
    summed = keeping.engine == "deepspeed" and layout.tensor > 1
    out = "" if summed else " + between * hidden * width"
    share = "1 / 2" if keeping.selective == "half" else "1"
    if sparse:
        back = "" if summed else " + dispatched * hidden * width"
        shared = f" + 2 * tokens * shared_ffn / tensor * width{out}" if shape.experts and shape.experts.shared_ffn else ""
        feed_forward = f"between * experts * width + 2 * dispatched * expert_ffn / tensor * width{back}{shared}"
    else:
        feed_forward = f"2 * tokens * ffn / tensor * width{out}"
    narrow = " + between * narrow * width" if shape.latent else ""
    return {
        "norms": "0",
        "projections": f"{share} * (tokens * (queries + keys_values) * width{narrow}{out})",
        "core": f"tokens * attended * width + {STATISTICS}",
        "feed_forward": f"{share} * ({feed_forward})",
        "residual": "between * hidden * width",
    }
