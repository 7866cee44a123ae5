"""Compute time of one layer for one micro-batch: its matrix products at the tensor cores' rate, the rest at the memory's.

A GPU's rates are those of its datasheet times two shares:

- matrix products reach `Gpu.sustained` of what the best shape reaches in a short test (`Gpu.reachable`): under the load of
  hours, power and heat lower the clocks;
- everything else is a kernel that reads and writes memory, at STREAMED of the datasheet's bandwidth, on every GPU.

All is counted for one GPU of the `tensor` that share a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware.specs import FP8_SHARE, Gpu, Precision

# A copy measures 0.9; softmax, norms and dropout, which alternately read, compute and write, 0.6 to 0.8. The figure
# between these was settled with the tables of `strata plan validate` in view.
STREAMED = 0.65
# Attention that never writes its scores alternates products and exponentials. FlashAttention-2 measures 0.6 to 0.65 of an
# A100's peak forwards and 0.5 to 0.55 backwards (arXiv 2307.08691), FlashAttention-3 and cuDNN about as much of an H100's.
FLASH_FORWARD = 0.60
FLASH_BACKWARD = 0.48
FLASH_BACKWARD_WORK = 2.5  # five products for the two of the forward pass
LAUNCH_S = 4e-6  # from one kernel to the next when the host keeps up


@dataclass(frozen=True)
class Cut:
    """One GPU's part of a micro-batch: `tokens` of sequences of length `sequence`, in layers sharded over `tensor` GPUs.

    `split` is the number of GPUs over which activations between tensor-parallel parts are sharded: all of them with Megatron's
    sequence parallelism.
    """

    tokens: float
    sequence: int
    tensor: int
    split: int
    expert: int
    precision: Precision


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer, a part of it, or the head: matrix products, attention core, and memory-bound kernels.

    The backward pass has every product twice: for the gradient of its input and for that of its weights.
    """

    products: float = 0.0
    weight: float = 0.0
    core: float = 0.0
    core_backward: float = 0.0
    stream: float = 0.0
    stream_backward: float = 0.0

    def __add__(self, other: "LayerTime") -> "LayerTime":
        return LayerTime(
            self.products + other.products,
            self.weight + other.weight,
            self.core + other.core,
            self.core_backward + other.core_backward,
            self.stream + other.stream,
            self.stream_backward + other.stream_backward,
        )

    def times(self, count: float) -> "LayerTime":
        return LayerTime(*(getattr(self, field.name) * count for field in fields(self)))

    @property
    def forward(self) -> float:
        return self.products + self.core + self.stream

    @property
    def backward(self) -> float:
        """Gradient of the input."""
        return self.products + self.core_backward + self.stream_backward


def rates(gpu: Gpu, precision: Precision, worksheet: Worksheet) -> None:
    """Lines that every layer uses."""
    peak = gpu.flops.get(precision)
    if peak is None:
        raise UserError(f"{gpu.name} does not compute in {precision}.", f"Take one of {', '.join(gpu.flops)}.")
    worksheet.given("peak", peak, "FLOP/s", f"{gpu.name}, {precision}, dense, by its datasheet")
    worksheet.given("reachable", gpu.reachable, "", "share of it that the best shape reaches")
    worksheet.given("sustained", gpu.sustained, "", "share of that which lasts, at the clocks of a long run")
    worksheet.given("narrow", FP8_SHARE if precision == "fp8" else 1.0, "", "share of it in FP8, which reaches less of its peak")
    worksheet.work_out("matrix_rate", "peak * reachable * sustained * narrow", "FLOP/s", "of large matrix products")
    worksheet.given("attention_peak", gpu.flops["bf16"] if precision == "fp8" else peak, "FLOP/s", "attention is not done in FP8")
    worksheet.given("bandwidth", gpu.bandwidth, "B/s", "of memory, by its datasheet")
    worksheet.given("streamed", STREAMED, "", "share of it that kernels reach")
    worksheet.work_out("memory_rate", "bandwidth * streamed", "B/s")
    worksheet.given("launch", LAUNCH_S, "s", "between two kernels")


def _cut(cut: Cut, shape: Shape, worksheet: Worksheet) -> None:
    worksheet.given("tokens", cut.tokens, "", "of a micro-batch, on this GPU")
    worksheet.given("sequence", cut.sequence, "", "tokens that attend to each other")
    worksheet.given("tensor", cut.tensor, "", "GPUs that share each matrix")
    worksheet.given("split", cut.split, "", "GPUs that share what lies between the matrices")
    worksheet.given("width", 4 if cut.precision == "fp32" else 2, "B", "of an activation")
    worksheet.given("hidden", shape.hidden)


def _products(worksheet: Worksheet, products: Mapping[str, tuple[float, float]]) -> tuple[str, str]:
    """Formulas for the seconds of products [tokens, inner] x [inner, columns], given by name as (columns, inner), and of the
    gradients of their weights."""
    for name, (columns, inner) in products.items():
        worksheet.work_out(f"{name}_flops", f"2 * tokens * {columns:g} * {inner:g}", "FLOP")
        worksheet.work_out(f"{name}_s", f"{name}_flops / (matrix_rate * filled(tokens, {columns:g}, {inner:g})) + launch", "s")
        # The weights' gradient sums over tokens instead.
        worksheet.work_out(
            f"{name}_weight_s", f"{name}_flops / (matrix_rate * filled({inner:g}, {columns:g}, tokens)) + launch", "s"
        )
    return " + ".join(f"{name}_s" for name in products), " + ".join(f"{name}_weight_s" for name in products)


def attention(shape: Shape, cut: Cut, software: Software, worksheet: Worksheet) -> LayerTime:
    """Norm, projections, scores and the residual connection."""
    _cut(cut, shape, worksheet)
    t = cut.tensor
    products: dict[str, tuple[float, float]] = {}
    if shape.latent:
        m = shape.latent
        key, value = m.plain_dim + m.rotary_dim, m.value_dim
        if m.query_rank:
            products |= {"query_down": (m.query_rank, shape.hidden), "query_up": (shape.heads * key / t, m.query_rank)}
        else:
            products["query"] = (shape.heads * key / t, shape.hidden)
        products["kv_down"] = (m.kv_rank + m.rotary_dim, shape.hidden)
        products["kv_up"] = (shape.heads * (m.plain_dim + value) / t, m.kv_rank)
    else:
        key = value = shape.head_dim
        products["qkv"] = ((shape.heads + 2 * max(shape.kv_heads, t)) * key / t, shape.hidden)
    products["out"] = (shape.hidden, shape.heads * value / t)
    seconds, weights = _products(worksheet, products)
    worksheet.work_out("projections", seconds, "s", "matrix products before and after attention")
    worksheet.work_out("projection_weights", weights, "s", "gradients of their weights")
    worksheet.given("heads", shape.heads / t, "", "on this GPU")
    worksheet.given("key", key, "", "width of a head's keys")
    worksheet.given("value", value, "", "and of its values")
    if software.attention == "flash":
        worksheet.work_out(
            "core_flops", "2 * tokens * sequence * heads * (key + value) / 2", "FLOP", "half of it is masked, and skipped"
        )
        worksheet.given("flash_forward", FLASH_FORWARD, "", "share of the peak that attention reaches")
        worksheet.given("flash_backward", FLASH_BACKWARD, "", "and in its backward pass")
        worksheet.work_out("core", "core_flops / (attention_peak * flash_forward) + launch", "s")
        worksheet.given("more", FLASH_BACKWARD_WORK, "", "products of the backward pass, per product forwards")
        worksheet.work_out("core_backward", "core_flops * more / (attention_peak * flash_backward) + 2 * launch", "s")
    else:
        worksheet.work_out("scores", "tokens * sequence * heads", "", "numbers, written to memory, masked ones too")
        worksheet.work_out(
            "score_s", "max(2 * key / matrix_rate, width / memory_rate)", "s", "a score by its product; memory is slower"
        )
        dropped = "2 * width + 1" if software.dropout else "0"
        worksheet.work_out(
            "core",
            f"scores * (2 * score_s + (1.5 * width + {dropped}) / memory_rate) + 4 * launch",
            "s",
            "two products; softmax reads the unmasked half and writes, dropout reads, writes and keeps a byte",
        )
        worksheet.work_out(
            "core_backward",
            f"scores * (4 * score_s + (3 * width + {dropped}) / memory_rate) + 6 * launch",
            "s",
            "four products; softmax reads two and writes one",
        )
    _streams(worksheet, software, "heads * (3 * key + value) / hidden")
    return LayerTime(
        worksheet["projections"],
        worksheet["projection_weights"],
        worksheet["core"],
        worksheet["core_backward"],
        worksheet["stream"],
        worksheet["stream_backward"],
    )


def _streams(worksheet: Worksheet, software: Software, inner: str) -> None:
    """Bytes that pass through memory beside the products, for one half of a layer: a norm reads and writes, so does the
    residual connection, which reads twice; dropout keeps a byte. `inner`, numbers of inner width per hidden one, are read and
    written once (by positions or the activation function); on the way back once more."""
    dropped = 1 if software.dropout else 0
    worksheet.work_out("inner", inner, "", "numbers of inner width per number of hidden width")
    worksheet.work_out(
        "stream",
        f"tokens * hidden * ((5 * width + {dropped}) / split + 2 * width * inner) / memory_rate + 3 * launch",
        "s",
        "norm (read, write), residual (read twice, write) and what is done between the products (read, write)",
    )
    worksheet.work_out(
        "stream_backward",
        f"tokens * hidden * ((7 * width + {dropped}) / split + 3 * width * inner) / memory_rate + 4 * launch",
        "s",
        "norm (read input and gradient, write), sum of two gradients, and between the products (read both, write)",
    )


def feed_forward(shape: Shape, cut: Cut, software: Software, worksheet: Worksheet) -> LayerTime:
    _cut(cut, shape, worksheet)
    width = shape.ffn / cut.tensor
    gates = 2 if shape.gated else 1
    seconds, weights = _products(worksheet, {"up": (gates * width, shape.hidden), "down": (shape.hidden, width)})
    worksheet.work_out("feed_forward", seconds, "s", "matrix products")
    weight = worksheet.work_out("feed_forward_weights", weights, "s", "gradients of their weights")
    _streams(worksheet, software, f"{(gates + 1) / 2 * width:g} / hidden")
    return LayerTime(worksheet["feed_forward"], weight, stream=worksheet["stream"], stream_backward=worksheet["stream_backward"])


IMBALANCE = 1.1  # tokens of the GPU with most of them over the mean; what a balanced router leaves


def mixture(shape: Shape, cut: Cut, software: Software, worksheet: Worksheet) -> LayerTime:
    """Router, experts and what every token passes through. Tokens are copied into the order of experts and back."""
    assert shape.experts
    _cut(cut, shape, worksheet)
    experts = shape.experts
    gates = 2 if shape.gated else 1
    worksheet.given("top_k", experts.top_k, "", "experts that a token passes through")
    worksheet.given("imbalance", IMBALANCE, "", "tokens of the busiest GPU over the mean")
    worksheet.given("experts", experts.count / cut.expert, "", "on this GPU")
    worksheet.work_out("chosen", "tokens * top_k * imbalance", "", "tokens that come to this GPU's experts")
    worksheet.work_out("rows", "chosen / experts", "", "tokens of one expert")
    width = experts.ffn / cut.tensor
    routed = {"up": (gates * width, shape.hidden), "down": (shape.hidden, width)}
    for name, (columns, inner) in routed.items():
        worksheet.work_out(f"{name}_flops", f"2 * chosen * {columns:g} * {inner:g}", "FLOP")
        # One grouped product for all experts: their tiles fill the GPU together, but none is shorter than a tile's rows.
        worksheet.work_out(
            f"{name}_s",
            f"{name}_flops * max(1, 128 / rows) / (matrix_rate * filled(chosen, {columns:g}, {inner:g})) + launch",
            "s",
        )
        # and no quicker than its weights can be read
        worksheet.work_out(f"{name}_s", f"max({name}_s, experts * {columns:g} * {inner:g} * width / memory_rate)", "s")
    shared: dict[str, tuple[float, float]] = {"router": (experts.count, shape.hidden)}
    if experts.shared_ffn:
        common = experts.shared_ffn / cut.tensor
        shared |= {"shared_up": (gates * common, shape.hidden), "shared_down": (shape.hidden, common)}
    seconds, weights = _products(worksheet, shared)
    inner_numbers = (gates + 1) / 2 * (experts.ffn * experts.top_k + experts.shared_ffn) / cut.tensor
    worksheet.work_out("mixture", f"up_s + down_s + {seconds}", "s", "matrix products")
    weight = worksheet.work_out("mixture_weights", f"up_s + down_s + {weights}", "s", "gradients of their weights")
    _streams(worksheet, software, f"{inner_numbers:g} / hidden + 2 * top_k")
    return LayerTime(worksheet["mixture"], weight, stream=worksheet["stream"], stream_backward=worksheet["stream_backward"])


def head(shape: Shape, cut: Cut, software: Software, worksheet: Worksheet) -> LayerTime:
    """The last norm, the logits and their loss."""
    _cut(cut, shape, worksheet)
    columns = shape.vocab / cut.tensor
    seconds, weights = _products(worksheet, {"logits": (columns, shape.hidden)})
    if software.fused_loss:
        why = "logits are read for their sum, read again and overwritten by their gradient"
        worksheet.work_out("loss", f"tokens * {columns:g} * 3 * width / memory_rate + launch", "s", why)
        worksheet.given("loss_backward", 0.0, "s", "is done by then")
    else:
        # Megatron's and torch's cross entropy, in fp32: cast, maximum, difference, exponent, sum, quotient; then times the
        # gradient, and cast back.
        worksheet.work_out(
            "loss", f"tokens * {columns:g} * (width + 9 * 4) / memory_rate + 6 * launch", "s", "nine passes in fp32"
        )
        worksheet.work_out(
            "loss_backward", f"tokens * {columns:g} * (width + 3 * 4) / memory_rate + 2 * launch", "s", "three more"
        )
    weight = worksheet.work_out("head_weights", weights, "s", "gradient of the weights")
    return LayerTime(
        worksheet.work_out("head", seconds, "s"), weight, stream=worksheet["loss"], stream_backward=worksheet["loss_backward"]
    )
