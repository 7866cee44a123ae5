"""Pipeline parallelism with DeepSpeed: the model as a list of layers, each created only on its own stage."""

import contextlib
import io
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.model import ops as makers
from strata.training.model.llama import Layer, RMSNorm, initialize, mean_loss, rotary_table
from strata.training.model.ops import Ops


class StageLayer(Layer):
    """Layer of a pipeline stage. Stages pass a single tensor, so each layer computes the rotary table itself."""

    def __init__(self, section: ModelSection, ops: Ops) -> None:
        super().__init__(section, ops)
        self.rope_theta = section.rope_theta
        self.head_dim = section.head_dim

    def forward(self, x_btd: Tensor) -> Tensor:  # type: ignore[override]
        positions_t = torch.arange(x_btd.shape[1], device=x_btd.device)
        return super().forward(x_btd, *rotary_table(positions_t, self.head_dim, self.rope_theta))


class StageHead(nn.Linear):
    """Output head that passes its input and its weight to the loss, which then needs no full logits."""

    def forward(self, x_btd: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x_btd, self.weight


def build(section: ModelSection, train: TrainSection, parallel: ParallelSection) -> Any:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    ops = makers.by(train.kernels)
    kind = DualPipeVModule if parallel.schedule == "dualpipev" else PipelineModule
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the partition
        stage = kind(
            layers=layers(section, ops),
            topology=PipeModelDataParallelTopology(parallel.pipeline, parallel.tensor, parallel.data),
            loss_fn=partial(_loss, ops),
            partition_method=f"type:{StageLayer.__name__}",  # balances the number of transformer layers per stage
        )
    for name, weight in stage.named_parameters():
        values = torch.ones(weight.shape)  # on the host, as for a whole model, whatever the stage's device
        initialize(whole_name(name, section), values, section, train.seed)
        weight.data.copy_(values)
    return stage


def _loss(ops: Ops, head: tuple[Tensor, Tensor], targets_bt: Tensor) -> Tensor:
    return mean_loss(ops, *head, targets_bt)


def layers(section: ModelSection, ops: Ops) -> list[Any]:
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

    table = (nn.Embedding, section.vocab, section.hidden)
    middle = [LayerSpec(StageLayer, section, ops) for _ in range(section.layers)]
    norm = LayerSpec(RMSNorm, section.hidden, section.norm_eps, ops)
    if section.tie_embeddings:
        head = TiedLayerSpec("embed", *table, forward_fn=lambda embed, x_btd: (x_btd, embed.weight))
        return [TiedLayerSpec("embed", *table), *middle, norm, head]
    return [LayerSpec(*table), *middle, norm, LayerSpec(StageHead, section.hidden, section.vocab, bias=False)]


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
