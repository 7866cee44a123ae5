"""The picture model beside diffusers' own forward pass, its loss beside the formula, and slices of it beside the whole."""

import pytest
import torch
from torch import Tensor

from strata.platform import recipe_file
from strata.platform.recipe import ModelSection
from strata.training.diffusion.model import PictureModel, patches

SHAPE = ("model.layers=2", "model.hidden=32", "model.heads=2", "model.picture.size=16", "model.picture.text_hidden=32")


@pytest.fixture(scope="module")
def section() -> ModelSection:
    return recipe_file.load("pictures", SHAPE).model


@pytest.fixture(scope="module")
def model(section: ModelSection) -> PictureModel:
    """A model without the zeros of its initial weights, which would hide differences."""
    found = PictureModel(section, 0)
    generator = torch.Generator().manual_seed(1)
    for weight in found.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return found


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    pixels, noise = torch.randn((2, 3, 3, 16, 16), generator=generator)
    captions = torch.randint(4, 30, (3, 16), generator=generator)
    captions[:, 0], captions[:, -2], captions[:, -1] = 1, 3, 0
    return pixels, noise, torch.tensor([0.2, 0.5, 0.9]), captions


def test_velocity_is_that_of_diffusers(model: PictureModel, inputs: tuple[Tensor, ...]) -> None:
    from diffusers.models.attention_processor import JointAttnProcessor2_0

    noisy, _, times, captions = inputs
    text, pooled = model.encode(captions)
    found = model.velocity(noisy, times * 1000, text, pooled)
    ours = [block.attn.processor for block in model.transformer.transformer_blocks]
    model.transformer.set_attn_processor(JointAttnProcessor2_0())
    theirs = model.transformer(
        hidden_states=noisy, encoder_hidden_states=text, pooled_projections=pooled, timestep=times * 1000
    ).sample
    for block, processor in zip(model.transformer.transformer_blocks, ours, strict=True):
        block.attn.processor = processor
    assert torch.allclose(found, patches(theirs, 4), atol=1e-5)


def test_loss_is_the_velocitys_mean_squared_error(model: PictureModel, inputs: tuple[Tensor, ...]) -> None:
    pixels, noise, times, captions = inputs
    text, pooled = model.encode(captions)
    expected = []
    for row, time in enumerate(times.tolist()):
        noisy = (1 - time) * pixels[row : row + 1] + time * noise[row : row + 1]
        sought = noise[row : row + 1] - pixels[row : row + 1]
        velocity = model.transformer(
            hidden_states=noisy,
            encoder_hidden_states=text[row : row + 1],
            pooled_projections=pooled[row : row + 1],
            timestep=torch.tensor([1000 * time]),
        ).sample
        expected.append(((velocity - sought) ** 2).mean())
    all_rows = model(pixels, noise, times, captions, torch.ones(3), torch.tensor(3 * 16.0))
    assert all_rows.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    two_rows = model(pixels, noise, times, captions, torch.tensor([1.0, 0.0, 1.0]), torch.tensor(2 * 16.0))
    assert two_rows.item() == pytest.approx((expected[0] + expected[2]).item() / 2, rel=1e-5)


def test_patches_are_in_the_order_of_the_output() -> None:
    pixels = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    found = patches(pixels, 4)
    assert found.shape == (2, 4, 48)
    assert torch.equal(found[1, 2].view(4, 4, 3), pixels[1, :, 4:8, 0:4].permute(1, 2, 0))  # row 1, column 0


def test_a_new_model_predicts_nothing_and_is_seeded(section: ModelSection, inputs: tuple[Tensor, ...]) -> None:
    pixels, _, times, captions = inputs
    one, same, other = (PictureModel(section, seed) for seed in (5, 5, 6))
    text, pooled = one.encode(captions)
    assert not one.velocity(pixels, times, text, pooled).any()
    pairs = zip(one.parameters(), same.parameters(), other.parameters(), strict=True)
    compared = [(torch.equal(a, b), torch.equal(a, c)) for a, b, c in pairs]
    assert all(equal for equal, _ in compared) and not all(equal for _, equal in compared)
    state = torch.random.get_rng_state()
    PictureModel(section, 7)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random numbers do not change"


def test_text_changes_the_velocity(model: PictureModel, inputs: tuple[Tensor, ...]) -> None:
    noisy, _, times, captions = inputs
    other = captions.clone()
    other[:, 3] = 31
    found = [model.velocity(noisy, times * 1000, *model.encode(each)) for each in (captions, other)]
    assert (found[0] - found[1]).abs().max() > 1e-4
