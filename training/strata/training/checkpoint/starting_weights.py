"""Weights that a fine-tuning run starts from: the imported model's, and those of new or given adapters."""

from pathlib import Path
from typing import Any

import torch

from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.checkpoint import pretrained
from strata.training.checkpoint.adapter import Adapter
from strata.training.checkpoint.pretrained import Pretrained
from strata.training.model import lora
from strata.training.model.quantized import Nf4Linear
from strata.training.parallel import optimizer_state
from strata.training.parallel.initial import Initial
from strata.training.parallel.magnitudes import Magnitudes
from strata.training.parallel.shard_map import Shard, whole_name


def load(engine: Any, model: ModelSection, train: TrainSection, parallel: ParallelSection, step: int) -> None:
    """Loads what no checkpoint has: at step 0 all weights, later those that are not trained. A rank reads only its own. A run
    that trains all weights does not need the imported model after its first checkpoint."""
    if model.family is None or model.source is None:
        return
    if step > 0 and all(parameter.requires_grad for parameter in engine.module.parameters()):
        return
    base = Pretrained(pretrained.resolve(model.source), model)
    _quantize(engine, model, train, parallel, base)

    def of_base(name: str, parameter: Any) -> bool:
        return not lora.is_adapter(name) and (step == 0 or not parameter.requires_grad)

    optimizer_state.load(engine, model, parallel, base, step, include=of_base)
    if train.lora is None:
        return
    lengths = Magnitudes(engine, model, parallel)
    if step == 0 and train.lora.source:
        given = Adapter(Path(train.lora.source), model, train.lora)
        optimizer_state.load(engine, model, parallel, given, step, include=lambda name, _: lora.is_adapter(name))
    elif step == 0:
        new = Initial(model, train.seed)
        optimizer_state.load(engine, model, parallel, new, step, include=lambda name, _: lora.is_product(name))
        optimizer_state.load(engine, model, parallel, lengths, step, include=lambda name, _: lora.is_magnitude(name))


def _quantize(engine: Any, model: ModelSection, train: TrainSection, parallel: ParallelSection, base: Pretrained) -> None:
    """Fills the projections that are held in four bits. One of them at a time is in memory as it is on disk."""
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    for name, module in engine.module.named_modules():
        if isinstance(module, Nf4Linear) and not module.filled:
            shape = (module.out_features, module.in_features)
            shard = Shard(whole_name(f"{name}.weight", model, parallel), shape, None, 0)
            weight = base.read_range(shard, "weight", 0, shard.numel).view(shape)
            module.fill(weight.to(engine.device, dtype))
