"""Fine-tuning of a part of a model: the share of parameters that `train.freeze` leaves, or adapters beside frozen projections.

Frozen parameters have no gradients and no optimizer state. An adapter of rank r has r x (inputs + outputs) parameters, and DoRA's
one more for each output. Projections in NF4 have four bits a parameter, eight for the scale of 64 of them, and 32 for that of 256
scales (arXiv 2305.14314, section 3).
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from statistics import mean

from strata.planner.catalogue.shape import Shape
from strata.planner.layout import Layout
from strata.planner.worksheet import Worksheet
from strata.platform.model_families.parameters import shapes
from strata.platform.recipe import ModelSection, TrainSection

NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
ROW_SPLIT = ("o_proj", "down_proj")

Projections = dict[str, tuple[int, int]]  # inputs and outputs


@dataclass(frozen=True)
class Adapters:
    rank: int
    targets: tuple[str, ...]
    dora: bool = False
    dropout: bool = False
    nf4: bool = False

    def parameters(self, projections: Projections, tensor: int) -> float:
        """Parameters on one GPU of the adapters of these projections."""
        return sum(self.rank * (inputs + outputs) + outputs * self.dora for inputs, outputs in self._split(projections, tensor))

    def saved(self, projections: Projections, tensor: int, products: bool) -> float:
        """Numbers that adapters save for each token: what A makes and, with dropout, its own copy of the input. DoRA saves the
        projection's result, with dropout that of each of its two terms, and a layer that stores its matrix `products` too."""
        return sum(
            self.rank + outputs * max(self.dora * (1 + self.dropout), products) + inputs * self.dropout
            for inputs, outputs in self._split(projections, tensor)
        )

    def _split(self, projections: Projections, tensor: int) -> Iterable[tuple[float, float]]:
        for name, (inputs, outputs) in projections.items():
            if name in self.targets:
                yield (inputs / tensor, outputs) if name in ROW_SPLIT else (inputs, outputs / tensor)


@dataclass(frozen=True)
class Tuning:
    """Shares from 0 to 1 of the parameters of each part that are trained. `layers` and `experts` are the mean over all layers,
    and the highest of a layer, which counts for stages of a pipeline: no stage trains a larger share."""

    layers: tuple[float, float] = (0.0, 0.0)
    experts: tuple[float, float] = (0.0, 0.0)
    embedding: float = 0.0
    head: float = 0.0
    adapters: Adapters | None = None


def tuning_of(model: ModelSection, train: TrainSection) -> Tuning | None:
    """None if the recipe trains all parameters."""
    if train.lora:
        lora = train.lora
        return Tuning(adapters=Adapters(lora.rank, lora.targets, lora.dora, lora.dropout > 0, lora.base == "nf4"))
    if not train.freeze:
        return None
    trained: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for name, shape in shapes(model).items():
        frozen = any(fnmatchcase(name, pattern) for pattern in train.freeze)
        for part in _parts(name, model.tie_embeddings):
            whole[part] += prod(shape)
            trained[part] += 0 if frozen else prod(shape)
    share = {part: trained[part] / size for part, size in whole.items()}
    layers = [share[f"layer {layer}"] for layer in range(model.layers)]
    experts = [share.get(f"experts {layer}", 0.0) for layer in range(model.layers)]
    return Tuning((mean(layers), max(layers)), (mean(experts), max(experts)), share["embedding"], share["head"])


def _parts(name: str, tied: bool) -> list[str]:
    """Parts that a parameter belongs to: a tied embedding to the head, too."""
    if match := re.match(r"model\.layers\.(\d+)\.(mlp\.experts\.)?", name):
        return [f"{'experts' if match[2] else 'layer'} {match[1]}"]
    if name == "model.embed_tokens.weight":
        return ["embedding", "head"] if tied else ["embedding"]
    return ["head"]


def write_adapters(worksheet: Worksheet, shape: Shape, layout: Layout, adapters: Adapters) -> None:
    """Parameters of a layer's adapters on one GPU, what they save, and the projections that NF4 holds."""
    heads = shape.heads * shape.head_dim
    attention: Projections = {
        "q_proj": (shape.hidden, heads),
        "k_proj": (shape.hidden, shape.kv_heads * shape.head_dim),
        "v_proj": (shape.hidden, shape.kv_heads * shape.head_dim),
        "o_proj": (heads, shape.hidden),
    }
    worksheet.given("rank", adapters.rank, "", "of the adapters")
    products = layout.recompute == "selective"

    def write(name: str, projections: Projections, tokens: str) -> None:
        parameters = adapters.parameters(projections, layout.tensor)
        worksheet.given(f"{name}_adapters", parameters, "", "parameters of the adapters on one GPU")
        worksheet.given(f"{name}_adapter_numbers", adapters.saved(projections, layout.tensor, products), "", "saved of a token")
        worksheet.work_out(f"{name}_adapter_saved", f"{tokens} * {name}_adapter_numbers * width", "B")
        worksheet.given(f"{name}_projections", sum(i * o for i, o in projections.values()), "", "parameters of the projections")

    largest = max(i * o for i, o in attention.values())
    if shape.dense_layers:
        write("dense", attention | _block(shape.hidden, shape.ffn), "tokens")
        largest = max(largest, shape.hidden * shape.ffn)
    if shape.experts:
        write("sparse", attention | _block(shape.hidden, shape.experts.shared_ffn), "tokens")
        write("expert", _block(shape.hidden, shape.experts.ffn), "dispatched")
        worksheet.work_out("sparse_adapter_saved", "sparse_adapter_saved + expert_adapter_saved", "B")
        worksheet.work_out("expert_adapters", "experts / expert_gpus * expert_adapters", "", "of one layer, on one GPU")
        largest = max(largest, shape.hidden * max(shape.experts.ffn, shape.experts.shared_ffn))
    if adapters.nf4:
        worksheet.given("largest_projection", largest)
        worksheet.work_out("dequantized", "largest_projection * width", "B", "a projection during its product")


def _block(hidden: int, width: int) -> Projections:
    return {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)} if width else {}


def write_trained(
    worksheet: Worksheet, tuning: Tuning, dense: int, sparse: int, whole: bool, embedding: bool, head: str | None
) -> None:
    """`trained` parameters of a stage and `trained_experts`. Adapters are added to the stage's own parameters. `whole`: the stage
    has all layers; `head`: the line with the parameters of its output layer."""
    if tuning.adapters:
        parts = [f"{kind}_layers * {kind}_adapters" for kind, count in (("dense", dense), ("sparse", sparse)) if count]
        worksheet.work_out("trained", " + ".join(parts) or "0", "", "parameters of the stage's adapters, experts' apart")
        worksheet.work_out("trained_experts", "sparse_layers * expert_adapters" if sparse else "0")
        worksheet.work_out("own", "own + trained", "", "with adapters")
        worksheet.work_out("own_experts", "own_experts + trained_experts")
        if tuning.adapters.nf4:
            held = [f"{kind}_layers * {kind}_projections" for kind, count in (("dense", dense), ("sparse", sparse)) if count]
            held += ["sparse_layers * experts * expert_projections"] if sparse else []
            worksheet.work_out("packed", " + ".join(held) or "0", "", "parameters in NF4")
        return
    pick = 0 if whole else 1
    worksheet.given("trained_share", tuning.layers[pick], "", "of a layer's parameters")
    worksheet.given("trained_expert_share", tuning.experts[pick], "", "of its experts'")
    worksheet.given("embedding_share", tuning.embedding)
    worksheet.given("head_share", tuning.head)
    parts = [f"trained_share * {kind}_layers * {kind}_parameters" for kind, n in (("dense", dense), ("sparse", sparse)) if n]
    parts += ["embedding_share * embedding_parameters"] if embedding else []
    parts += [f"head_share * {head}"] if head else []
    worksheet.work_out("trained", " + ".join(parts) or "0", "", "the stage's trained parameters on one GPU, experts apart")
    worksheet.work_out("trained_experts", "trained_expert_share * own_experts")
