"""Frozen teacher of a distillation run: the model of `train.distill`, whole on each rank that has an output layer."""

import torch
from torch import Tensor

from strata.platform.model_families import imported
from strata.platform.recipe import ModelSection, TrainSection
from strata.training.checkpoint import pretrained
from strata.training.checkpoint.pretrained import Pretrained
from strata.training.distillation.losses import Output
from strata.training.model.llama import Llama


def section_of(model: ModelSection, train: TrainSection) -> ModelSection:
    """Section of the teacher of a run that trains `model`."""
    assert train.distill
    return imported.teacher(train.distill, model.context)


class Teacher:
    """A model in evaluation mode, in the precision of the training. It is no part of the trained module: an engine neither shards
    nor saves it."""

    def __init__(self, section: ModelSection, train: TrainSection, device: torch.device | str) -> None:
        assert section.source
        weights = Pretrained(pretrained.resolve(section.source), section)
        with torch.device("meta"):
            model = Llama(section, None, train.kernels)
        model.to(torch.bfloat16 if train.precision == "bf16" else torch.float32).to_empty(device=device)
        model.tie(section)  # `to_empty` allocates a tied weight twice
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(weights.whole(name))
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def output(self, tokens_bt: Tensor, positions_bt: Tensor | None, tokens: slice) -> Output:
        """Output layer's input and matrix for some tokens of each row. The rows are whole: each token attends to those before."""
        x_btd = self._model.model(tokens_bt, positions_bt)
        head = self._model.lm_head
        return Output(x_btd[:, tokens].flatten(0, 1), head.weight, head.softcap)
