"""Communication buffers of training programs, and the overhead of allocators and libraries."""

from strata.planner.catalogue.shape import Shape
from strata.planner.layout import Layout
from strata.planner.memory.activations import Keeping
from strata.planner.worksheet import Worksheet

GIB = 2**30
# A process that has loaded CUDA, its libraries' kernels and workspaces for matrix products: 0.5 to 0.8 GiB on A100 and H100.
CUDA_CONTEXT = 0.8 * GIB
# NCCL's buffers: 4 MiB for each channel of each ring or tree, 16 to 32 channels, for each of a layout's communicators.
COMMUNICATORS = 1.0 * GIB
# Of what comes and goes, lost to rounding and between tensors in torch's caching allocator.
GAPS = 0.05

# Gradients that ZeRO reduces at a time. 100 MB in bf16 fill a network; DeepSpeed's default of ten times as many is memory lost.
BUCKET = 5e7
# DeepSpeed's defaults, which our training leaves as they are (deepspeed/runtime/zero/config.py): numbers, not bytes.
LIVE = 1e9  # ZeRO-3 lets go of gathered parameters beyond these
PREFETCH = 5e7
SHARED_CHUNK = 25 * 2**20  # bytes that each Strata worker places in shared memory at a time to sum gradients

Lines = list[tuple[str, str, str]]  # name, formula, reason


def write_buffers(worksheet: Worksheet, shape: Shape, layout: Layout, keeping: Keeping, kinds: list[str], end: bool) -> None:
    """Communication buffers of a stage. `kinds`: its layers, dense and sparse; `end`: it has the embedding or the head."""
    deepspeed = keeping.engine == "deepspeed"
    lines = _deepspeed(worksheet, shape, layout, keeping) if deepspeed else _by_layer(worksheet, layout, kinds, end)
    lines += _exchanged(layout)
    for name, formula, why in lines:
        worksheet.work_out(name, formula, "B", why)
    worksheet.work_out("buffers", " + ".join(name for name, _, _ in lines) or "0", "B", "for communication")


def _exchanged(layout: Layout) -> Lines:
    """Tensors in transit between GPUs that share a model, with every training program."""
    lines = []
    if layout.pipeline > 1:
        lines.append(("passed_on", "2 * between * hidden * width", "between stages, sent and received"))
    if layout.sequence_parallel:
        lines.append(("gathered_tokens", "tokens * hidden * width", "of all tensor-parallel GPUs, for a matrix's gradient"))
    if layout.expert > 1:
        lines.append(("sent_tokens", "dispatched * hidden * width", "on their way to experts"))
    if layout.context > 1:
        lines.append(("passed_keys", "2 * tokens * keys_values * width", "keys and values, sent and received in a ring"))
    return lines


def _by_layer(worksheet: Worksheet, layout: Layout, kinds: list[str], end: bool) -> Lines:
    """Buffers of Megatron and FSDP: gradients are reduced in place or, if sharded, by unit (a layer, the embedding, the head)."""
    if layout.zero < 2:
        return []
    sizes = {"dense": "dense_parameters", "sparse": "sparse_parameters + experts_here"}
    units = [sizes[kind] for kind in kinds] + ["head_parameters"] * end
    worksheet.work_out("unit", f"max({', '.join(units)}, 0)", "", "parameters of the largest layer, or of the head")
    lines = [("unreduced", "unit * gradients_bytes", "a unit's gradients before they are shared out")]
    if layout.zero == 3:
        lines.append(("gathered", "2 * unit * width", "the unit at work and the next one, whole"))
    return lines


def _deepspeed(worksheet: Worksheet, shape: Shape, layout: Layout, keeping: Keeping) -> Lines:
    """DeepSpeed's buckets. On CPUs only touched memory counts, and a bucket larger than the model is not touched."""
    worksheet.given("number", 4 if layout.precision == "fp32" else 2, "B", "of a gradient as it is made")
    worksheet.work_out("all_own", "own + own_experts")
    worksheet.work_out("all_trained", "trained + trained_experts" if keeping.tuning else "all_own", "", "that have gradients")
    if layout.zero == 0:
        return _unshared(worksheet, shape, layout, keeping)
    worksheet.given("bucket_size", BUCKET, "", "gradients that DeepSpeed reduces at a time")
    bucket = "min(bucket_size, all_trained) * number" if keeping.cpu else "bucket_size * number"
    lines = [
        ("bucket", bucket, "gradients to be reduced"),
        ("flat_bucket", "min(bucket_size, all_trained) * number", "a copy of them, on the way"),
    ]
    if layout.zero == 3:
        worksheet.given("live_size", LIVE, "", "parameters that DeepSpeed leaves gathered")
        worksheet.given("prefetch_size", PREFETCH, "", "parameters that it gathers at a time")
        lines.append(("gathered", "min(live_size, all_own) * number", "whole parameters"))
        lines.append(("prefetched", "min(prefetch_size, all_own) * number", "on their way"))
        if keeping.cpu:
            lines.append(("summed", "flat_bucket", "gradients that gloo sums"))
        return lines
    lines.append(("reduced", "all_trained / sharers * number", "this worker's share of a micro-batch's gradients"))
    if keeping.cpu:
        lines.append(("gathered", "all_trained * number", "parameters after the step, which gloo gathers in memory of its own"))
    return lines


def _unshared(worksheet: Worksheet, shape: Shape, layout: Layout, keeping: Keeping) -> Lines:
    """Buffers of Strata's own gradient reduction, without ZeRO.

    On CPUs of one machine it is in shared memory: two sets of chunks, one of each worker, and a worker reads all of them.
    On GPUs all gradients are copied into persistent buckets.
    """
    lines: Lines = []
    if layout.data * layout.sequence > 1 and layout.pipeline == 1 and keeping.cpu:
        worksheet.given("largest_gradient", _largest_gradient(shape, keeping), "", "numbers; gradients are not cut")
        worksheet.given("shared_chunk", SHARED_CHUNK, "B", "gradients that a worker places in shared memory at a time")
        formula = "max(min(shared_chunk, all_trained * number), largest_gradient * number) * 2 * sharers"
        lines.append(("shared_chunks", formula, "gradients are summed in shared memory: everyone's, in two sets"))
    elif layout.data * layout.sequence > 1 and layout.pipeline == 1:
        lines.append(("buckets", "all_trained * number", "a copy of all gradients, in which they are summed"))
    if layout.precision != "fp32" and not keeping.cpu:
        why = "the step's fp32 gradients, beyond what the backward pass has let go of"
        lines.append(("copied_gradients", "max(0, 4 * all_trained - activations - logits - working)", why))
    return lines


def _largest_gradient(shape: Shape, keeping: Keeping) -> int:
    if keeping.tuning and keeping.tuning.adapters:
        return keeping.tuning.adapters.rank * max(shape.hidden, shape.ffn, shape.heads * shape.head_dim)
    return max(shape.vocab, shape.ffn) * shape.hidden


def write_allowances(worksheet: Worksheet, layout: Layout, keeping: Keeping) -> None:
    if keeping.cpu:
        formula, why = _gaps_on_cpus(layout)
        worksheet.work_out("gaps", formula, "B", why)
        worksheet.given("runtime", 0.0, "B", "libraries are there before the model is")
        return
    worksheet.given("gap_share", GAPS, "", "of what comes and goes, lost between tensors")
    worksheet.work_out("gaps", "gap_share * (activations + logits + working)", "B", "fragmentation")
    worksheet.given("cuda_context", CUDA_CONTEXT, "B", "of CUDA and its libraries")
    worksheet.given("communicators", COMMUNICATORS if layout.gpus > 1 else 0.0, "B", "NCCL's own buffers")
    worksheet.work_out("runtime", "cuda_context + communicators", "B", "not torch's")


def _gaps_on_cpus(layout: Layout) -> tuple[str, str]:
    """Heap fragmentation on CPUs.

    For an aligned block of n bytes, glibc (memalign) needs a free block of more than n. A freed tensor therefore leaves a hole
    that the same tensor of the next pass does not fit into. Workers retain freed memory (GLIBC_TUNABLES), so both count, except
    holes that other tensors fill: half of them, a quarter where tensors are sharded, as measured on three models. With ZeRO the
    fragmentation is larger by about the size of gloo's gathers and reductions, perhaps because its threads have separate arenas.
    """
    passing = "once + logits + working"
    if layout.zero == 3:
        flat = "gathered + prefetched + flat_bucket + summed"
        return f"{passing} + {flat}", "places of the pass before, and of gathered parameters, which the process keeps"
    passing = f"({passing}) * {0.5 if layout.tensor == 1 else 0.75}"
    if layout.zero == 0:
        return passing, "places of the pass before, which the process keeps"
    return f"{passing} + gathered + reduced", "places of the pass before, and gloo's, which the process keeps"
