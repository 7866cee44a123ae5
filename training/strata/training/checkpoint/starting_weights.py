"""Weights that a fine-tuning run starts from: the imported model's, and those of new or given adapters."""

from pathlib import Path
from typing import Any

from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.checkpoint import pretrained
from strata.training.checkpoint.adapter import Adapter
from strata.training.model import lora
from strata.training.parallel import optimizer_state
from strata.training.parallel.initial import Initial


def load(engine: Any, model: ModelSection, train: TrainSection, parallel: ParallelSection, step: int) -> None:
    """Loads what no checkpoint has: at step 0 all weights, later those that are not trained. A rank reads only its own. A run
    that trains all weights does not need the imported model after its first checkpoint."""
    if model.family is None or model.source is None:
        return
    if step > 0 and all(parameter.requires_grad for parameter in engine.module.parameters()):
        return
    base = pretrained.Pretrained(pretrained.resolve(model.source), model)

    def of_base(name: str, parameter: Any) -> bool:
        return not lora.is_adapter(name) and (step == 0 or not parameter.requires_grad)

    optimizer_state.load(engine, model, parallel, base, step, include=of_base)
    if train.lora and step == 0:
        given = train.lora.source
        adapters = Adapter(Path(given), model, train.lora) if given else Initial(model, train.seed)
        optimizer_state.load(engine, model, parallel, adapters, step, include=lambda name, _: lora.is_adapter(name))
