"""Parameters of a stage on one GPU, and the bytes of state that they need, partitioned by ZeRO stage."""

from strata.planner.catalogue.shape import Shape
from strata.planner.layout import Layout
from strata.planner.memory.activations import Keeping
from strata.planner.memory.tuning import NF4_BYTES, write_adapters, write_trained
from strata.planner.worksheet import Worksheet


def write_parameters(worksheet: Worksheet, shape: Shape, layout: Layout, keeping: Keeping) -> None:
    """Parameters of a layer and of the embedding and head. Norms, routers and the narrow projections of latent attention are
    whole on every tensor-parallel GPU; with DeepSpeed, the embedding and the head too."""
    worksheet.given("attention_parameters", shape.attention_parameters(), "", "of one layer, with its norms")
    unsplit = shape.norm_parameters() + shape.narrow_parameters()
    worksheet.given("unsplit_parameters", unsplit, "", "of those, whole on every tensor-parallel GPU")
    worksheet.work_out("attention_here", "(attention_parameters - unsplit_parameters) / tensor + unsplit_parameters")
    if shape.dense_layers:
        worksheet.given("ffn_parameters", shape.dense_ffn_parameters())
        worksheet.work_out("dense_parameters", "attention_here + ffn_parameters / tensor", "", "of a dense layer, on one GPU")
    if shape.experts:
        worksheet.given("expert_gpus", layout.expert, "", "that share a layer's experts")
        worksheet.given("router_parameters", shape.router_parameters())
        worksheet.given("shared_parameters", shape.shared_parameters())
        why = "of a layer with experts, on one GPU, without them"
        worksheet.work_out("sparse_parameters", "attention_here + router_parameters + shared_parameters / tensor", "", why)
        worksheet.given("expert_parameters", shape.expert_parameters(), "", "of one")
        worksheet.work_out("experts_here", "experts / expert_gpus * expert_parameters / tensor", "", "of one layer, on one GPU")
    table = "vocab_parameters" if keeping.engine == "deepspeed" else "vocab_parameters / tensor"
    worksheet.given("vocab_parameters", shape.table_parameters(), "", "of the embedding, and of the head")
    worksheet.given("other_embeddings", shape.embedding_parameters() - shape.table_parameters(), "", "of positions")
    worksheet.work_out("embedding_parameters", f"{table} + other_embeddings", "", "on one GPU")
    worksheet.given("last_norm", shape.last_norm_parameters())
    worksheet.work_out("head_parameters", f"{table} + last_norm", "", "on one GPU")
    if keeping.tuning and keeping.tuning.adapters:
        write_adapters(worksheet, shape, layout, keeping.tuning.adapters)


def write_own(worksheet: Worksheet, shape: Shape, dense: int, sparse: int, embedding: bool, head: bool, keeping: Keeping) -> None:
    """`own` parameters of a stage, and `own_experts`. A tied head that is not where the embedding is has a copy of it."""
    worksheet.given("dense_layers", dense)
    worksheet.given("sparse_layers", sparse)
    own = [f"{kind}_layers * {kind}_parameters" for kind, count in (("dense", dense), ("sparse", sparse)) if count]
    if embedding:
        own.append("embedding_parameters")
    last = ("last_norm" if shape.tied and embedding else "head_parameters") if head else None
    if last:
        own.append(last)
    worksheet.work_out("own", " + ".join(own) or "0", "", "the stage's parameters on one GPU, experts apart")
    worksheet.work_out("own_experts", "sparse_layers * experts_here" if sparse else "0")
    if keeping.tuning:
        write_trained(worksheet, keeping.tuning, dense, sparse, dense + sparse == shape.layers, embedding, last)


def write_state(worksheet: Worksheet, layout: Layout, keeping: Keeping) -> None:
    """Bytes of parameters, gradients and optimizer state on the GPU, and of offloaded state on the host."""
    peers = layout.data * layout.sequence * layout.context
    worksheet.given("sharers", peers, "", "GPUs with the same layers: data x sequence x context")
    worksheet.given("expert_sharers", max(1, peers // layout.expert), "", "GPUs with the same experts")
    for name, stage, size, why in (
        (
            "parameters",
            3,
            _parameter_bytes(layout, keeping),
            "of a parameter" + ", with two copies in fp8" * (layout.precision == "fp8"),
        ),
        ("gradients", 2, _gradient_bytes(layout, keeping), "of a gradient"),
        ("optimizer", 1, _optimizer_bytes(layout, keeping), "of Adam's two moments, and of a copy in fp32 of the parameter"),
    ):
        worksheet.given(f"{name}_bytes", size, "B", why)
        shared = layout.zero >= stage
        part = "trained" if keeping.tuning and name != "parameters" else "own"
        share = f"{part} / sharers + {part}_experts / expert_sharers" if shared else f"{part} + {part}_experts"
        worksheet.work_out(name, f"({share}) * {name}_bytes", "B", f"partitioned by ZeRO-{stage}" if shared else "")
    if keeping.tuning and keeping.tuning.adapters and keeping.tuning.adapters.nf4:
        worksheet.given("nf4_bytes", NF4_BYTES, "B", "of a parameter in NF4, with its scales")
        worksheet.work_out("parameters", "parameters - packed * (parameters_bytes - nf4_bytes)", "B", "with projections in NF4")
    _write_offload(worksheet, layout, keeping)


def _write_offload(worksheet: Worksheet, layout: Layout, keeping: Keeping) -> None:
    """ZeRO-2 and 3 send gradients to the host as soon as they are reduced; Adam runs there on an fp32 copy of them. Where the
    workers run on CPUs, all is on the host anyway."""
    if layout.offload == "none" or keeping.cpu:
        worksheet.given("host", 0.0, "B", "nothing is offloaded")
        return
    parameters = " + parameters" if layout.offload == "all" else ""
    worksheet.work_out(
        "host", f"optimizer + gradients / gradients_bytes * 4{parameters}", "B", "in the host's memory, for this GPU"
    )
    worksheet.given("optimizer", 0.0, "B", "on the host")
    if layout.zero >= 2:
        worksheet.given("gradients", 0.0, "B", "on the host")
    if layout.offload == "all":
        worksheet.given("parameters", 0.0, "B", "on the host")


def _parameter_bytes(layout: Layout, keeping: Keeping) -> float:
    """FSDP's are the fp32 ones that Adam works on. Transformer Engine keeps two fp8 copies of bf16 matrices from step to step,
    one for each way they are multiplied."""
    return 4.0 if keeping.engine == "fsdp" or layout.precision in ("fp32", "fp8") else 2.0


def _gradient_bytes(layout: Layout, keeping: Keeping) -> float:
    """Our training adds up in fp32 where DeepSpeed can: with ZeRO, and more than one micro-batch."""
    if layout.precision == "fp32" or keeping.engine == "fsdp" or keeping.fp32_gradients:
        return 4.0
    unable = layout.zero == 0 or (layout.zero == 1 and layout.sequence > 1)
    return 4.0 if keeping.engine == "deepspeed" and layout.micro_batches > 1 and not unable else 2.0


def _optimizer_bytes(layout: Layout, keeping: Keeping) -> float:
    """DeepSpeed's ZeRO makes its own copy of the parameters even where they are in fp32."""
    copied = layout.zero > 0 if keeping.engine == "deepspeed" else False
    in_fp32 = layout.precision == "fp32" or keeping.engine == "fsdp"
    return 8.0 if in_fp32 and not copied else 12.0
