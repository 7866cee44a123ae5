"""Pipeline parallelism with DeepSpeed: the model as a list of layers, each created only on its own stage."""

import contextlib
import io
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strata.platform.recipe import LoraSection, ModelSection, ParallelSection, TrainSection
from strata.training.model import lora
from strata.training.model import ops as makers
from strata.training.model.adapters import adapt
from strata.training.model.llama import Embedding, Layer, Objective, initialize, mean_loss
from strata.training.model.norms import RMSNorm
from strata.training.model.ops import Ops
from strata.training.model.rope import positions

# Stages pass the residual stream or, for packed documents, the stream and the tokens' positions.
Passed = Tensor | tuple[Tensor, Tensor]


class StageEmbedding(Embedding):
    def forward(self, tokens_bt: Passed) -> Passed:  # type: ignore[override]
        if isinstance(tokens_bt, Tensor):
            return super().forward(tokens_bt)
        return super().forward(tokens_bt[0]), tokens_bt[1]


class StageLayer(Layer):
    """Layer of a pipeline stage. Stages pass no rotary tables, so each layer computes them itself. A layer gets its adapters
    before the next one is created: a stage never holds all projections that adapters replace by smaller ones."""

    def __init__(self, section: ModelSection, ops: Ops, layer: int, adapters: LoraSection | None) -> None:
        super().__init__(section, ops, layer)
        self.section = section
        if adapters:
            adapt(self, adapters)

    def forward(self, x_btd: Passed) -> Passed:  # type: ignore[override]
        if isinstance(x_btd, Tensor):
            return super().forward(x_btd, positions(self.section, torch.arange(x_btd.shape[1], device=x_btd.device)))
        x_btd, positions_bt = x_btd
        return super().forward(x_btd, positions(self.section, positions_bt)), positions_bt


class StageNorm(RMSNorm):
    """Last norm. It passes no positions: the head needs none."""

    def forward(self, x_btd: Passed) -> Tensor:
        return super().forward(x_btd if isinstance(x_btd, Tensor) else x_btd[0])


class StageHead(nn.Linear):
    """Output head that passes its input and its weight to the loss, which then needs no full logits."""

    def forward(self, x_btd: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x_btd, self.weight


def build(section: ModelSection, train: TrainSection, parallel: ParallelSection, objective: Objective | None) -> Any:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    ops = makers.by(train.kernels)
    kind = DualPipeVModule if parallel.schedule == "dualpipev" else PipelineModule
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the partition
        stage = kind(
            layers=layers(section, ops, train.lora),
            topology=PipeModelDataParallelTopology(parallel.pipeline, parallel.tensor, parallel.data),
            loss_fn=partial(_loss, ops, section.architecture.logit_softcap, objective),
            partition_method=f"type:{StageLayer.__name__}",  # balances the number of transformer layers per stage
        )
    for name, weight in stage.named_parameters() if section.family is None else ():
        values = torch.empty(weight.shape)  # on the host, as for a whole model, whatever the stage's device
        initialize(lora.without_base(whole_name(name, section)), values, section, train.seed)
        weight.data.copy_(values)
    return stage


def leave_out_frozen_ties(stage: Any) -> None:
    """DeepSpeed sums the gradients of a tied embedding's copies, and a frozen one has none."""
    tied = stage.tied_comms
    stage.tied_comms = {key: each for key, each in tied.items() if any(p.requires_grad for p in each["module"].parameters())}


def _loss(
    ops: Ops,
    softcap: float | None,
    objective: Objective | None,
    head: tuple[Tensor, Tensor],
    labels: tuple[Tensor, ...],
) -> Tensor:
    targets_bt, count, *more = labels
    if objective is None or not more:
        return mean_loss(ops, *head, targets_bt, count, softcap)
    return objective.loss(*head, targets_bt, count, softcap, *more)


def layers(section: ModelSection, ops: Ops, adapters: LoraSection | None = None) -> list[Any]:
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

    middle = [LayerSpec(StageLayer, section, ops, layer, adapters) for layer in range(section.layers)]
    norm = LayerSpec(StageNorm, section.hidden, section.norm_eps, ops, section.architecture.norm_offset)
    if section.tie_embeddings:
        head = TiedLayerSpec("embed", StageEmbedding, section, forward_fn=lambda embed, x_btd: (x_btd, embed.weight))
        return [TiedLayerSpec("embed", StageEmbedding, section), *middle, norm, head]
    head = LayerSpec(StageHead, section.hidden, section.vocab, bias=False)
    return [LayerSpec(StageEmbedding, section), *middle, norm, head]


def whole_name(name: str, section: ModelSection) -> str:
    """Name in the whole model of a stage's parameter."""
    if name.startswith("tied_modules.embed."):
        return "model.embed_tokens.weight"
    match = re.match(r"(\d+)\.(.*)", name)
    assert match
    index, rest = int(match[1]), match[2]
    last = section.layers
    prefix = {0: "model.embed_tokens", last + 1: "model.norm", last + 2: "lm_head"}.get(index, f"model.layers.{index - 1}")
    return f"{prefix}.{rest}"
