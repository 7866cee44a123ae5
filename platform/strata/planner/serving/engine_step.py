"""Step time and KV cache space of an inference engine, from FLOPs and bytes.

A step is a sequence of kernels, each bound by compute or by memory bandwidth, and their times add up. An engine is `tensor` GPUs
that shard every matrix. `describe` writes the engine's figures to a worksheet; `prefill` and `decode` read them and add their
own.
"""

from dataclasses import dataclass
from typing import Literal

from strata.planner.catalogue.shape import Shape
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware.specs import FP8_SHARE, Gpu

Precision = Literal["fp16", "bf16", "fp8"]
BYTES: dict[Precision, int] = {"fp16": 2, "bf16": 2, "fp8": 1}

# Share of the memory bandwidth that kernels reach: a copy measures 4.3 of an H200's 4.8 TB/s.
BANDWIDTH_SHARE = 0.9
# Between two kernels of a captured graph about 1 us passes, and a short kernel fills and drains the GPU in about 2 us more.
KERNEL_S = 3e-6
# Per layer: norm, qkv, rotary and cache write, attention, its sum over splits, output, norm, gate and up, activation, down.
KERNELS = 10
# Additional with experts: router, top-k, sort, gather, weighted sum. Additional with latent attention: the narrow projections
# and their norms, and the two products that map queries to latents and latents back.
EXPERT_KERNELS = 5
LATENT_KERNELS = 6
# Scheduling, input preparation, sampling and the copy of tokens to the host, per step. Engines overlap part of it with the GPU.
STEP_S = 1e-3
# Host time per sequence: bare vLLM's ITL is 2.4 ms at 16 streams and 2.9 ms at 64 (1.2B on an H200), and GPU work explains 0.2 ms
# of the difference.
SEQUENCE_S = 5e-6
# Least time of a step: the host's scheduling, update and output of every sequence, which asynchronous scheduling runs beside the
# GPU. Fitted to Strata's endpoint of 1.04B on an H200 with an Intel Xeon: ITL 3.1 ms at 64 streams and 8.0 ms at 256.
HOST_STEP_S = 1.5e-3
HOST_SEQUENCE_S = 23e-6
# All-reduce over NVLink: custom kernels for few bytes (SGLang #2904, H100: 4-8 us up to 64 KB; 22 us for 1 MiB on 8 GPUs), and
# NCCL for many (8 H200: 39 us up to 512 KiB, then 0.9 of the link's rate).
CUSTOM_S, CUSTOM_SHARE = 8e-6, 0.3
LIBRARY_S, LIBRARY_SHARE = 40e-6, 0.9
MEMORY_SHARE = 0.9  # of a GPU's memory, the engines' default
RUNTIME_BYTES = 1.5e9  # CUDA context, communication buffers, captured graphs
CHUNK = 8192  # tokens per step: vLLM's default limit on GPUs of this class


@dataclass(frozen=True)
class Load:
    """A request load. `cached` is the share of a prompt that hits the prefix cache. `variation` is the standard deviation of
    prompt lengths over their mean: 0 in most benchmarks, about 1 in production."""

    requests_per_s: float
    prompt: int
    output: int
    cached: float = 0.0
    variation: float = 1.0

    @property
    def context(self) -> float:
        """Mean tokens of a sequence over its output."""
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
        ("matrix_rate", gpu.flops[precision] * gpu.reachable * (FP8_SHARE if precision == "fp8" else 1), "FLOP/s", "reachable"),
        ("attention_rate", gpu.flops["fp16" if precision == "fp16" else "bf16"] * gpu.reachable, "FLOP/s", "in 16 bits"),
        ("link", gpu.link, "B/s", "between the GPUs of an engine"),
        ("host_s", STEP_S, "s", "scheduling, sampling and the copy of tokens to the host, per step"),
        ("host_s_per_sequence", SEQUENCE_S, "s", "sampling, detokenization and streaming of one token"),
        ("least_s", HOST_STEP_S, "s", "host's time of a step, beside the GPU"),
        ("least_s_per_sequence", HOST_SEQUENCE_S, "s", "host's time of a sequence of a step, beside the GPU"),
        ("chunk", CHUNK, "", "limit of tokens per step"),
        ("max_sequences", max_sequences, "", "limit of concurrent sequences of an engine"),
    ):
        worksheet.given(name, value, unit, why)
    _write_attention(shape, tensor, worksheet)
    worksheet.work_out(
        "flops_per_token", "2 * (common_weights + routed_weights * top_k / experts) / tensor", "FLOP", "on one GPU"
    )
    formula = "2 * (8 * layers * hidden + 2 * choices * hidden + (2 * layers * attention_widths + 3 * ffn_widths) / tensor)"
    worksheet.work_out("elementwise_bytes", formula, "B", "per token: norms with residuals, sum of experts, rotary, activation")
    formula = "((common_weights + routed_weights) * bytes_per_weight + table_weights * 2) / tensor"
    worksheet.work_out("weights_bytes", formula, "B", "on one GPU; embedding and head stay in 16 bits")
    formula = (
        f"chunk * 2 * (4 * hidden + 3 * ffn_widths / layers / tensor) + max_sequences * vocab * 4 / tensor + {RUNTIME_BYTES:g}"
    )
    worksheet.work_out("activation_bytes", formula, "B", "a step's widest layer, logits, runtime")
    worksheet.work_out(
        "kv_space", f"{MEMORY_SHARE} * memory - weights_bytes - activation_bytes", "B", "of one GPU, for the KV cache"
    )


def prefill(prompt: float, cached: float, worksheet: Worksheet) -> float:
    """Seconds of one prompt on an idle engine. `prefill_work_s` is the part that remains in steps with other sequences."""
    worksheet.given("prompt", prompt, "", "tokens")
    worksheet.given("cached", cached, "", "share in the prefix cache")
    worksheet.work_out("new_tokens", "prompt * (1 - cached)")
    worksheet.work_out("prefill_matrix_s", "new_tokens * flops_per_token / matrix_rate", "s")
    formula = "new_tokens * (prompt - new_tokens / 2) * prefill_pair_flops / attention_rate"
    worksheet.work_out("prefill_attention_s", formula, "s", "causal attention")
    worksheet.work_out("prefill_elementwise_s", "new_tokens * elementwise_bytes / memory_rate", "s")
    formula = f"new_tokens * 2 * layers * {_wire('1')} / ({LIBRARY_SHARE} * link)"
    worksheet.work_out("prefill_wire_s", formula, "s", "two all-reduces per layer, bandwidth only")
    parts = "prefill_attention_s + prefill_elementwise_s"
    formula = f"prefill_matrix_s + {parts} + prefill_wire_s"
    worksheet.work_out("prefill_work_s", formula, "s", "time that a prompt adds to running steps")
    worksheet.work_out("chunks", "ceil(new_tokens / chunk)", "", "steps of the prompt")
    formula = f"chunks * {_weights_read('min(new_tokens, chunk)')} / memory_rate"
    worksheet.work_out("prefill_weights_s", formula, "s", "reading the weights")
    worksheet.work_out(
        "prefill_all_reduce_s", f"chunks * {_all_reduce('min(new_tokens, chunk)', worksheet)}", "s", "with latency"
    )
    formula = f"max(prefill_matrix_s, prefill_weights_s) + {parts} + prefill_all_reduce_s + chunks * (host_s + kernels_s)"
    return worksheet.work_out("prefill_s", formula, "s", "a prompt on an idle engine")


def decode(batch: float, context: float, worksheet: Worksheet) -> float:
    """Seconds of one decode step for `batch` sequences of `context` tokens on average."""
    worksheet.given("batch", max(batch, 1.0), "", "sequences that decode together")
    worksheet.given("context", context, "", "mean tokens of a sequence over its output")
    worksheet.work_out("weights_read", _weights_read("batch"), "B", "once per batch, with the experts that it activates")
    formula = "max(weights_read / memory_rate, batch * (flops_per_token + 2 * vocab * hidden / tensor) / matrix_rate)"
    worksheet.work_out("decode_matrix_s", formula, "s", "the slower of reading weights and matrix products")
    formula = "batch * context * max(kv_bytes_per_token / memory_rate, decode_pair_flops / attention_rate)"
    worksheet.work_out("decode_attention_s", formula, "s", "the slower of reading the KV cache and attention FLOPs")
    worksheet.work_out("decode_elementwise_s", "batch * elementwise_bytes / memory_rate", "s")
    worksheet.work_out("decode_all_reduce_s", _all_reduce("batch", worksheet), "s")
    worksheet.work_out("decode_host_s", "host_s + batch * host_s_per_sequence", "s")
    terms = "decode_matrix_s + decode_attention_s + decode_elementwise_s + decode_all_reduce_s + kernels_s + decode_host_s"
    formula = f"max({terms}, least_s + batch * least_s_per_sequence)"
    return worksheet.work_out("step_s", formula, "s", "one token for every sequence")


def most(load: Load, worksheet: Worksheet) -> tuple[int, float]:
    """Largest batch that fits, and its output tokens per second with the prefill of the same requests in between."""
    longest = load.prompt + load.output
    needed = worksheet["weights_bytes"] + worksheet["activation_bytes"] + worksheet["kv_bytes_per_token"] * longest
    usable = MEMORY_SHARE * worksheet["memory"]
    if needed > usable:
        raise UserError(
            f"one sequence of {longest} tokens needs {needed / 1e9:.1f} GB on each GPU, and {usable / 1e9:.1f} GB are usable",
            f"raise tensor above {worksheet['tensor']:.0f}, use fp8, or shorten prompts",
        )
    part = worksheet.part("largest throughput of one replica")
    part.given("output", load.output, "", "output tokens of a request")
    part.given("longest", longest, "", "tokens of a sequence at its end, so that none is preempted")
    batch = part.work_out("batch_that_fits", "floor(min(max_sequences, kv_space / (kv_bytes_per_token * longest)))")
    decode(batch, load.context, part)
    formula = "output / (prefill_work_s + output * step_s / batch)"
    return int(batch), part.work_out("tokens_per_s", formula, "", "output tokens, with the time of prefill")


def _check(shape: Shape, gpu: Gpu, tensor: int, precision: Precision) -> None:
    if precision not in gpu.flops:
        raise UserError(f"{gpu.name} does not compute in {precision}", f"use one of {', '.join(gpu.flops)}")
    if tensor > gpu.domain:
        raise UserError(
            f"tensor={tensor} exceeds the {gpu.domain} {gpu.name} of a fast-link domain",
            f"use at most tensor={gpu.domain}: two all-reduces per layer over the network slow down every token",
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
        ("tensor", tensor, "GPUs of the engine, which shard every matrix"),
        ("layers", shape.layers, ""),
        ("hidden", shape.hidden, ""),
        ("vocab", shape.vocab, ""),
        ("heads", shape.heads, ""),
        ("experts", e.count if e else 1, ""),
        ("top_k", e.top_k if e else 1, ""),
        ("choices", shape.sparse_layers * e.top_k if e else 0, "experts activated by a token, over all layers"),
        ("common_weights", common, "parameters outside routed experts, embedding and head"),
        ("routed_weights", routed, "parameters of all routed experts"),
        ("table_weights", tables, "parameters of embedding and head"),
        ("ffn_widths", widths, "active feed-forward widths of a token, summed over layers"),
    ):
        worksheet.given(name, value, "", why)
    worksheet.given("kernels_s", kernels * KERNEL_S, "s", f"{kernels} kernels in sequence")


def _write_attention(shape: Shape, tensor: int, worksheet: Worksheet) -> None:
    """Write the KV cache bytes of a token, and the FLOPs of one query-key pair."""
    pair = "2 * layers * heads / tensor * head_widths"
    if latent := shape.latent:
        worksheet.given("latent", latent.kv_rank, "", "width of the compressed keys and values")
        worksheet.given("rotary", latent.rotary_dim, "", "width of the rotary keys, shared by all heads")
        worksheet.given("head_widths", latent.plain_dim + latent.rotary_dim + latent.value_dim, "", "of a head's keys and values")
        worksheet.given("attention_widths", shape.heads * (latent.plain_dim + latent.rotary_dim), "", "of queries")
        formula = "layers * (latent + rotary) * bytes_per_value"
        worksheet.work_out("kv_bytes_per_token", formula, "B", "latents serve all heads, so every GPU holds a full copy")
        formula = "2 * layers * heads / tensor * (2 * latent + rotary)"
        worksheet.work_out("decode_pair_flops", formula, "FLOP", "queries against latents, and latents summed")
    else:
        worksheet.given(
            "kv_heads_per_gpu",
            max(1, shape.kv_heads / tensor),
            "",
            "a KV head is replicated where there are fewer heads than GPUs",
        )
        worksheet.given("head_widths", 2 * shape.head_dim, "", "of a head's keys and values")
        worksheet.given("attention_widths", (shape.heads + shape.kv_heads) * shape.head_dim, "", "of queries and keys")
        formula = "layers * kv_heads_per_gpu * head_widths * bytes_per_value"
        worksheet.work_out("kv_bytes_per_token", formula, "B", "keys and values, on one GPU")
        worksheet.work_out("decode_pair_flops", pair, "FLOP", "of one query-key pair")
    worksheet.work_out("prefill_pair_flops", pair, "FLOP", "of one query-key pair")


def _weights_read(tokens: str) -> str:
    """Weight bytes that `tokens` tokens read. With random routing they activate E (1 - (1 - k/E)^tokens) experts."""
    met = f"routed_weights * (1 - (1 - top_k / experts) ** ({tokens}))"
    return f"((common_weights + {met}) * bytes_per_weight + 2 * vocab * hidden) / tensor"


def _wire(tokens: str) -> str:
    """Bytes that a GPU sends in an all-reduce of 16-bit activations."""
    return f"(2 * (tensor - 1) / tensor * 2 * hidden * {tokens})"


def _all_reduce(tokens: str, worksheet: Worksheet) -> str:
    """Seconds of the two all-reduces per layer, by the faster implementation."""
    if worksheet["tensor"] == 1:
        return "0"
    wire = _wire(tokens)
    custom, library = f"{CUSTOM_S} + {wire} / ({CUSTOM_SHARE} * link)", f"{LIBRARY_S} + {wire} / ({LIBRARY_SHARE} * link)"
    return f"2 * layers * min({custom}, {library})"
