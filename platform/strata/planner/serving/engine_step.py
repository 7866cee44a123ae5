"""The time of an engine's steps and the memory it has for sequences, from FLOPs and bytes.

A step is a row of kernels, each bound by matrix units or by memory: their times add up. An engine is `tensor` GPUs that share
every matrix. `describe` writes its figures to a worksheet; `prefill` and `decode` read them there and write their own.
"""

from dataclasses import dataclass
from typing import Literal

from strata.planner.catalogue.shape import Shape
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware.specs import FP8_SHARE, Gpu

Precision = Literal["fp16", "bf16", "fp8"]
BYTES: dict[Precision, int] = {"fp16": 2, "bf16": 2, "fp8": 1}

# Of the memory's bandwidth, what kernels reach: 4.3 of an H200's 4.8 TB/s are measured for a copy.
BANDWIDTH_SHARE = 0.9
# Between two kernels of a captured graph about 1 us passes, and a short kernel fills and drains the GPU in about 2 us more.
KERNEL_S = 3e-6
# Of a layer: norm, qkv, rotary and cache write, attention, its sum over splits, output, norm, gate and up, activation, down.
KERNELS = 10
# More with experts: router, top-k, sort, gather, weighted sum. More with latent attention: the narrow projections and their
# norms, and the two products that take queries to latents and latents back.
EXPERT_KERNELS = 5
LATENT_KERNELS = 6
# Scheduling, input preparation, sampling and the tokens' way to the host, once a step. Engines hide part of it behind the GPU.
STEP_S = 1e-3
# The same for each sequence: bare vLLM's tokens come 2.4 ms apart at 16 streams and 2.9 at 64 (1.2B on an H200), of which the
# GPU's work explains 0.2.
SEQUENCE_S = 5e-6
# All-reduce over NVLink: quick kernels for few bytes (SGLang #2904, H100: 4-8 us up to 64 KB; 22 us for 1 MiB on 8 GPUs), and
# NCCL for many (8 H200: 39 us up to 512 KiB, then 0.9 of the link's rate).
QUICK_S, QUICK_SHARE = 8e-6, 0.3
LIBRARY_S, LIBRARY_SHARE = 40e-6, 0.9
MEMORY_SHARE = 0.9  # what engines take of a GPU's memory, by default
RUNTIME_BYTES = 1.5e9  # CUDA context, communication buffers, captured graphs
CHUNK = 8192  # tokens of a step at most: vLLM's default on GPUs of this class


@dataclass(frozen=True)
class Load:
    """`cached` is the share of a prompt that is in the cache already; `variation` the standard deviation of prompt lengths over
    their mean: 0 in most benchmarks, about 1 in production."""

    requests_per_s: float
    prompt: int
    output: int
    cached: float = 0.0
    variation: float = 1.0

    @property
    def context(self) -> float:
        """Tokens of a sequence, on average over its output."""
        return self.prompt + self.output / 2


def describe(
    shape: Shape,
    gpu: Gpu,
    worksheet: Worksheet,
    tensor: int = 1,
    precision: Precision = "bf16",
    kv_precision: Precision = "bf16",
    max_sequences: int = 1024,
) -> None:
    _check(shape, gpu, tensor, precision)
    _write_shape(shape, tensor, worksheet)
    for name, value, unit, why in (
        ("bytes_per_weight", BYTES[precision], "B", precision),
        ("bytes_per_value", BYTES[kv_precision], "B", f"KV cache in {kv_precision}"),
        ("memory", gpu.memory, "B", gpu.name),
        ("memory_rate", gpu.bandwidth * BANDWIDTH_SHARE, "B/s", f"{BANDWIDTH_SHARE:.0%} of {gpu.bandwidth:.3g}"),
        ("matrix_rate", gpu.flops[precision] * gpu.reachable * (FP8_SHARE if precision == "fp8" else 1), "FLOP/s", "in reach"),
        ("attention_rate", gpu.flops["fp16" if precision == "fp16" else "bf16"] * gpu.reachable, "FLOP/s", "in 16 bits"),
        ("link", gpu.link, "B/s", "between GPUs that share a model"),
        ("host_s", STEP_S, "s", "scheduling, sampling and the tokens' way to the host, once a step"),
        ("host_s_per_sequence", SEQUENCE_S, "s", "sampling, detokenizing and streaming of one token"),
        ("chunk", CHUNK, "", "tokens of a step at most"),
        ("max_sequences", max_sequences, "", "that an engine runs at once"),
    ):
        worksheet.given(name, value, unit, why)
    _write_attention(shape, tensor, worksheet)
    worksheet.work_out(
        "flops_per_token", "2 * (common_weights + routed_weights * top_k / experts) / tensor", "FLOP", "on one GPU"
    )
    formula = "2 * (8 * layers * hidden + 2 * choices * hidden + (2 * layers * attention_widths + 3 * ffn_widths) / tensor)"
    worksheet.work_out("elementwise_bytes", formula, "B", "of a token: norms with residuals, experts' sum, rotary, activation")
    formula = "((common_weights + routed_weights) * bytes_per_weight + table_weights * 2) / tensor"
    worksheet.work_out("weights_bytes", formula, "B", "on one GPU; embedding and head stay in 16 bits")
    formula = (
        f"chunk * 2 * (4 * hidden + 3 * ffn_widths / layers / tensor) + max_sequences * vocab * 4 / tensor + {RUNTIME_BYTES:g}"
    )
    worksheet.work_out("activation_bytes", formula, "B", "a step's widest layer, logits, runtime")
    worksheet.work_out(
        "kv_room", f"{MEMORY_SHARE} * memory - weights_bytes - activation_bytes", "B", "of one GPU, for the KV cache"
    )


def prefill(prompt: float, cached: float, worksheet: Worksheet) -> float:
    """Seconds that one engine takes for one prompt by itself. Of them `prefill_work_s` remain when it runs beside others."""
    worksheet.given("prompt", prompt, "", "tokens")
    worksheet.given("cached", cached, "", "share that is in the cache already")
    worksheet.work_out("new_tokens", "prompt * (1 - cached)")
    worksheet.work_out("prefill_matrix_s", "new_tokens * flops_per_token / matrix_rate", "s")
    formula = "new_tokens * (prompt - new_tokens / 2) * prefill_pair_flops / attention_rate"
    worksheet.work_out("prefill_attention_s", formula, "s", "each token looks at those before it")
    worksheet.work_out("prefill_elementwise_s", "new_tokens * elementwise_bytes / memory_rate", "s")
    formula = f"new_tokens * 2 * layers * {_wire('1')} / ({LIBRARY_SHARE} * link)"
    worksheet.work_out("prefill_wire_s", formula, "s", "two sums over the GPUs a layer, by their bytes")
    parts = "prefill_attention_s + prefill_elementwise_s"
    formula = f"prefill_matrix_s + {parts} + prefill_wire_s"
    worksheet.work_out("prefill_work_s", formula, "s", "what a prompt adds to steps that run anyway")
    worksheet.work_out("chunks", "ceil(new_tokens / chunk)", "", "steps that the prompt takes")
    formula = f"chunks * {_weights_read('min(new_tokens, chunk)')} / memory_rate"
    worksheet.work_out("prefill_weights_s", formula, "s", "reading the weights")
    worksheet.work_out(
        "prefill_all_reduce_s", f"chunks * {_all_reduce('min(new_tokens, chunk)', worksheet)}", "s", "with its latency"
    )
    formula = f"max(prefill_matrix_s, prefill_weights_s) + {parts} + prefill_all_reduce_s + chunks * (host_s + kernels_s)"
    return worksheet.work_out("prefill_s", formula, "s", "a prompt alone")


def decode(batch: float, context: float, worksheet: Worksheet) -> float:
    """Seconds of one step that gives each of `batch` sequences, `context` tokens long on average, its next token."""
    worksheet.given("batch", max(batch, 1.0), "", "sequences that decode together")
    worksheet.given("context", context, "", "tokens of a sequence, on average over its output")
    worksheet.work_out("weights_read", _weights_read("batch"), "B", "once for the batch; of the experts, those that it meets")
    formula = "max(weights_read / memory_rate, batch * (flops_per_token + 2 * vocab * hidden / tensor) / matrix_rate)"
    worksheet.work_out("decode_matrix_s", formula, "s", "the slower of reading weights and multiplying by them")
    formula = "batch * context * max(kv_bytes_per_token / memory_rate, decode_pair_flops / attention_rate)"
    worksheet.work_out("decode_attention_s", formula, "s", "the slower of reading the KV cache and computing on it")
    worksheet.work_out("decode_elementwise_s", "batch * elementwise_bytes / memory_rate", "s")
    worksheet.work_out("decode_all_reduce_s", _all_reduce("batch", worksheet), "s")
    worksheet.work_out("decode_host_s", "host_s + batch * host_s_per_sequence", "s")
    formula = "decode_matrix_s + decode_attention_s + decode_elementwise_s + decode_all_reduce_s + kernels_s + decode_host_s"
    return worksheet.work_out("step_s", formula, "s", "one token for every sequence")


def most(load: Load, worksheet: Worksheet) -> tuple[int, float]:
    """The batch that fits and the output tokens a second that it gives, prompts of the same requests read in between."""
    longest = load.prompt + load.output
    needed = worksheet["weights_bytes"] + worksheet["activation_bytes"] + worksheet["kv_bytes_per_token"] * longest
    usable = MEMORY_SHARE * worksheet["memory"]
    if needed > usable:
        raise UserError(
            f"one sequence of {longest} tokens needs {needed / 1e9:.1f} GB on each GPU, of which {usable / 1e9:.1f} can be used",
            f"raise tensor above {worksheet['tensor']:.0f}, use fp8, or shorten prompts",
        )
    part = worksheet.part("the most one replica gives")
    part.given("output", load.output, "", "tokens of an answer")
    part.given("longest", longest, "", "tokens of a sequence at its end, so that none has to be evicted")
    batch = part.work_out("batch_that_fits", "floor(min(max_sequences, kv_room / (kv_bytes_per_token * longest)))")
    decode(batch, load.context, part)
    formula = "output / (prefill_work_s + output * step_s / batch)"
    return int(batch), part.work_out("tokens_per_s", formula, "", "output tokens, while prompts take their share of the time")


def _check(shape: Shape, gpu: Gpu, tensor: int, precision: Precision) -> None:
    if precision not in gpu.flops:
        raise UserError(f"{gpu.name} does not compute in {precision}", f"use one of {', '.join(gpu.flops)}")
    if tensor > gpu.domain:
        raise UserError(
            f"tensor={tensor} is more than the {gpu.domain} {gpu.name} that a fast link joins",
            "keep tensor within them: two all-reduces a layer over the network make every token slow",
        )
    if shape.heads % tensor:
        raise UserError(f"tensor={tensor} does not divide the {shape.heads} heads of {shape.name}", "use a divisor of heads")


def _write_shape(shape: Shape, tensor: int, worksheet: Worksheet) -> None:
    e = shape.experts
    widths = shape.dense_layers * shape.ffn + (shape.sparse_layers * (e.top_k * e.ffn + e.shared_ffn) if e else 0)
    routed = shape.routed_parameters(shape.sparse_layers)
    common = shape.layers_parameters(shape.dense_layers, shape.sparse_layers)
    tables = shape.embedding_parameters() + (0 if shape.tied else shape.table_parameters())
    kernels = shape.layers * (KERNELS + (LATENT_KERNELS if shape.latent else 0)) + shape.sparse_layers * EXPERT_KERNELS
    for name, value, why in (
        ("tensor", tensor, "GPUs that share every matrix"),
        ("layers", shape.layers, ""),
        ("hidden", shape.hidden, ""),
        ("vocab", shape.vocab, ""),
        ("heads", shape.heads, ""),
        ("experts", e.count if e else 1, ""),
        ("top_k", e.top_k if e else 1, ""),
        ("choices", shape.sparse_layers * e.top_k if e else 0, "experts that a token meets, over all layers"),
        ("common_weights", common, "parameters that every token passes through, without embedding and head"),
        ("routed_weights", routed, "parameters of all experts"),
        ("table_weights", tables, "parameters of embedding and head"),
        ("ffn_widths", widths, "of the feed-forward blocks a token passes through, over all layers"),
    ):
        worksheet.given(name, value, "", why)
    worksheet.given("kernels_s", kernels * KERNEL_S, "s", f"{kernels} kernels, one after the other")


def _write_attention(shape: Shape, tensor: int, worksheet: Worksheet) -> None:
    """What a token leaves in the KV cache, and the work of one token with one before it."""
    pair = "2 * layers * heads / tensor * head_widths"
    if latent := shape.latent:
        worksheet.given("latent", latent.kv_rank, "", "width of the compressed keys and values")
        worksheet.given("rotary", latent.rotary_dim, "", "width of the keys with position, shared by all heads")
        worksheet.given("head_widths", latent.plain_dim + latent.rotary_dim + latent.value_dim, "", "of a head's keys and values")
        worksheet.given("attention_widths", shape.heads * (latent.plain_dim + latent.rotary_dim), "", "of queries")
        formula = "layers * (latent + rotary) * bytes_per_value"
        worksheet.work_out("kv_bytes_per_token", formula, "B", "latents serve all heads: every GPU holds them whole")
        formula = "2 * layers * heads / tensor * (2 * latent + rotary)"
        worksheet.work_out("decode_pair_flops", formula, "FLOP", "queries against latents, and latents summed")
    else:
        worksheet.given(
            "kv_heads_per_gpu", max(1, shape.kv_heads / tensor), "", "a head that has to serve several GPUs is copied"
        )
        worksheet.given("head_widths", 2 * shape.head_dim, "", "of a head's keys and values")
        worksheet.given("attention_widths", (shape.heads + shape.kv_heads) * shape.head_dim, "", "of queries and keys")
        formula = "layers * kv_heads_per_gpu * head_widths * bytes_per_value"
        worksheet.work_out("kv_bytes_per_token", formula, "B", "keys and values, on one GPU")
        worksheet.work_out("decode_pair_flops", pair, "FLOP", "of one token with one before it")
    worksheet.work_out("prefill_pair_flops", pair, "FLOP", "of one token with one before it")


def _weights_read(tokens: str) -> str:
    """Experts that `tokens` tokens meet when each chooses top_k of them at random: E (1 - (1 - k/E)^tokens)."""
    met = f"routed_weights * (1 - (1 - top_k / experts) ** ({tokens}))"
    return f"((common_weights + {met}) * bytes_per_weight + 2 * vocab * hidden) / tensor"


def _wire(tokens: str) -> str:
    """Bytes that a GPU sends in an all-reduce of these tokens' 16-bit activations."""
    return f"(2 * (tensor - 1) / tensor * 2 * hidden * {tokens})"


def _all_reduce(tokens: str, worksheet: Worksheet) -> str:
    """Two a layer: each GPU has a part of every token's sum."""
    if worksheet["tensor"] == 1:
        return "0"
    wire = _wire(tokens)
    quick, library = f"{QUICK_S} + {wire} / ({QUICK_SHARE} * link)", f"{LIBRARY_S} + {wire} / ({LIBRARY_SHARE} * link)"
    return f"2 * layers * min({quick}, {library})"
