"""The model as DeepSpeed's pipelines want it: a list of layers, each made only on the stage that owns it."""

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.model import Layer, RMSNorm, initialize, rotary_table

Loss = Callable[[Tensor, Tensor], Tensor]


class StageLayer(Layer):
    """Stages hand on one tensor; each layer makes the rotary table for itself."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__(section)
        self.rope_theta = section.rope_theta
        self.head_dim = section.head_dim

    def forward(self, x_btd: Tensor) -> Tensor:  # type: ignore[override]
        positions_t = torch.arange(x_btd.shape[1], device=x_btd.device)
        return super().forward(x_btd, *rotary_table(positions_t, self.head_dim, self.rope_theta))


def build(section: ModelSection, parallel: ParallelSection, seed: int, loss: Loss) -> Any:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    kind = DualPipeVModule if parallel.schedule == "dualpipev" else PipelineModule
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the partition
        stage = kind(
            layers=layers(section),
            topology=PipeModelDataParallelTopology(parallel.pipeline, parallel.tensor, parallel.data),
            loss_fn=loss,
            partition_method=f"type:{StageLayer.__name__}",  # as many transformer layers on each stage as on the others
        )
    for name, weight in stage.named_parameters():
        values = torch.ones(weight.shape)  # on the host, as for a whole model, whatever device the stage is on already
        initialize(whole_name(name, section), values, section.layers, seed)
        weight.data.copy_(values)
    return stage


def layers(section: ModelSection) -> list[Any]:
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

    table = (nn.Embedding, section.vocab, section.hidden)
    middle = [LayerSpec(StageLayer, section) for _ in range(section.layers)]
    norm = LayerSpec(RMSNorm, section.hidden, section.norm_eps)
    if section.tie_embeddings:
        head = TiedLayerSpec("embed", *table, forward_fn=lambda embed, x_btd: F.linear(x_btd, embed.weight))
        return [TiedLayerSpec("embed", *table), *middle, norm, head]
    return [LayerSpec(*table), *middle, norm, LayerSpec(nn.Linear, section.hidden, section.vocab, bias=False)]


def whole_name(name: str, section: ModelSection) -> str:
    """What a stage's parameter is called in the whole model."""
    if name.startswith("tied_modules.embed."):
        return "model.embed_tokens.weight"
    match = re.match(r"(\d+)\.(.*)", name)
    assert match
    index, rest = int(match[1]), match[2]
    last = section.layers
    prefix = {0: "model.embed_tokens", last + 1: "model.norm", last + 2: "lm_head"}.get(index, f"model.layers.{index - 1}")
    return f"{prefix}.{rest}"
