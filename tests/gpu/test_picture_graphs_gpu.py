"""Picture models with CUDA graphs and compiled blocks give the pictures of the model without them."""

from dataclasses import replace

import pytest
import torch

from strata.serving.diffusion.bench.contenders import comparable, contender
from strata.serving.diffusion.bench.models import FULL_SIZE, PictureModel
from strata.serving.diffusion.cuda_graphs import MOST, CudaGraphs
from strata.serving.diffusion.families import Modulation, Tokens


@pytest.mark.parametrize("model", FULL_SIZE, ids=lambda model: model.name)
def test_pictures_equal_those_of_diffusers(model: PictureModel) -> None:
    small = replace(model.shallow(), size=256)
    transformer = small.build(torch.device("cuda"), torch.bfloat16)
    ours = contender("strata", small, transformer)
    theirs = contender("diffusers", small, transformer)
    first, again = ours(4, 1), ours(4, 1)
    assert torch.equal(first, again)
    if small.family.name != "dit":  # whose pipeline takes no noise
        first, truth = comparable(small, first), comparable(small, theirs(4, 1))
        assert float((first - truth).norm() / truth.norm()) < 0.03


def test_replays_follow_their_inputs_and_old_graphs_make_way() -> None:
    graphs = CudaGraphs()

    def forward(tokens: Tokens, modulation: Modulation) -> torch.Tensor:
        return tokens.image * modulation.time[:, None, None] + 1

    for _ in range(2):
        for width in range(1, MOST + 3):
            for value in (2.0, 3.0, 4.0):
                tokens = Tokens(torch.full((2, 3, width), value, device="cuda"))
                found = graphs.run(forward, tokens, Modulation(torch.full((1,), value, device="cuda").expand(2)))
                assert torch.equal(found, tokens.image * value + 1)
    assert len(graphs._recorded) == MOST
