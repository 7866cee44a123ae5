"""Inputs of CUDA graphs: `tests/gpu` has the graphs."""

import torch
from torch import Tensor

from strata.serving.diffusion.cuda_graphs import changed, leaves, signature
from strata.serving.diffusion.families import Modulation, Tokens


def modulation(time: Tensor, tokens: int = 3) -> Modulation:
    rope = (torch.zeros(tokens, 4), torch.ones(tokens, 4))
    return Modulation(time, caption=torch.full((2, 5), 7.0), image_rope=rope, text_rope=rope)


def test_leaves_are_all_tensors_in_the_order_of_the_fields() -> None:
    given = modulation(torch.arange(2))
    expected = [given.time, given.caption, *given.image_rope, *given.text_rope]  # type: ignore[misc]
    assert all(a is b for a, b in zip(leaves(given), expected, strict=True))
    assert len(leaves(Tokens(torch.zeros(1, 2, 3)))) == 1


def test_signatures_tell_shapes_types_and_missing_tensors_apart() -> None:
    first = signature(modulation(torch.zeros(2)))
    assert first == signature(modulation(torch.ones(2)))
    others = [modulation(torch.zeros(3)), modulation(torch.zeros(2).half()), modulation(torch.zeros(2), tokens=4)]
    others.append(Modulation(torch.zeros(2), caption=torch.zeros(2, 5)))
    others.append(
        Modulation(torch.zeros(2), final=torch.zeros(2, 5), image_rope=others[0].image_rope, text_rope=others[0].text_rope)
    )
    assert first not in map(signature, others)
    assert len(set(map(signature, others))) == len(others)


def test_changed_sets_are_independent_and_have_memory_for_every_element() -> None:
    given = modulation(torch.ones(1).expand(2))
    copy = changed(changed(given, Tensor.contiguous), Tensor.clone)
    assert copy.final is None and copy.time.is_contiguous()
    copy.time[0] = 5
    copy.image_rope[0][0] = 9  # type: ignore[index]
    assert given.time.tolist() == [1, 1] and copy.time.tolist() == [5, 1]
    assert float(given.image_rope[0].sum()) == 0  # type: ignore[index]
