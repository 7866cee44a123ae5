"""The exported folder: loads with its libraries' own classes, draws the same pictures, and guidance is the formula."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.platform import recipe_file
from strata.platform.recipe import ModelSection
from strata.training.data.pictures import captions
from strata.training.diffusion import evaluation, export
from strata.training.diffusion.model import PictureModel
from strata.training.diffusion.sampling import sample

SHAPE = ("model.layers=1", "model.hidden=32", "model.heads=2", "model.picture.size=16", "model.picture.text_hidden=32")
TEXTS = ["a red circle", "a blue square on a red background"]


@pytest.fixture(scope="module")
def section() -> ModelSection:
    return recipe_file.load("pictures", SHAPE).model


@pytest.fixture(scope="module")
def model(section: ModelSection) -> PictureModel:
    found = PictureModel(section, 0)
    generator = torch.Generator().manual_seed(1)
    for weight in found.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return found.eval()


@pytest.fixture(scope="module")
def folder(model: PictureModel, section: ModelSection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("export")
    export.write_folder(where, dict(model.named_parameters()), section, torch.float32, captions.build(TEXTS, 64))
    return where


def tokens(folder: Path, texts: list[str]) -> Any:
    return captions.encode(captions.load(folder / "tokenizer", 16), texts)


def test_components_load_by_the_index(folder: Path, section: ModelSection) -> None:
    import diffusers
    import transformers

    index = json.loads((folder / export.INDEX).read_text())
    assert index["_class_name"] == "StrataPicturePipeline" and index["vae"] == [None, None]
    assert index["picture"] == {"size": 16, "channels": 3, "range": [-1, 1]}
    libraries = {"diffusers": diffusers, "transformers": transformers}
    for name in ("transformer", "text_encoder", "tokenizer", "scheduler"):
        library, kind = index[name]
        part = getattr(libraries[library], kind).from_pretrained(folder / name)
        assert type(part).__name__ in (kind, f"{kind}Backend", "TokenizersBackend")


def test_an_export_draws_the_models_pictures(model: PictureModel, section: ModelSection, folder: Path) -> None:
    asked, empty = tokens(folder, TEXTS), tokens(folder, [""])
    found = [sample(each, asked, empty, [3, 4], 4, 3.0) for each in (model, evaluation.load(folder, section))]
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][0].shape == (16, 16, 3) and not np.array_equal(found[0][0], found[0][1])


def test_a_picture_depends_on_its_caption_and_seed_alone(model: PictureModel, folder: Path) -> None:
    asked, empty = tokens(folder, TEXTS), tokens(folder, [""])
    both = sample(model, asked, empty, [3, 4], 3, 3.0)
    alone = sample(model, asked[1:], empty, [4], 3, 3.0)
    assert np.abs(both[1].astype(int) - alone[0]).max() <= 1  # rounding
    assert not np.array_equal(alone[0], sample(model, asked[1:], empty, [5], 3, 3.0)[0])


def test_one_step_is_the_guided_velocity(model: PictureModel, folder: Path) -> None:
    asked, empty = tokens(folder, TEXTS[:1]), tokens(folder, [""])
    noise = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        found = []
        for ids in (asked, empty):
            text, pooled = model.encode(torch.from_numpy(ids))
            inputs = {"encoder_hidden_states": text, "pooled_projections": pooled, "timestep": torch.tensor([1000.0])}
            found.append(model.transformer(hidden_states=noise, **inputs).sample)
    with_caption, without = found
    for guidance in (1.0, 2.5):
        pixels = noise - (without + guidance * (with_caption - without))  # a step from noise alone to no noise
        expected = ((pixels[0].permute(1, 2, 0) + 1) * 127.5).round().clamp(0, 255).numpy()
        assert np.abs(sample(model, asked, empty, [9], 1, guidance)[0] - expected).max() <= 1


def test_a_missing_weight_is_an_error(model: PictureModel, section: ModelSection) -> None:
    weights = dict(model.named_parameters())
    weights.pop("transformer.proj_out.bias")
    with pytest.raises(AssertionError):
        export.whole_model(weights, section)


def test_the_judge_reads_an_export(folder: Path, own_home: Path) -> None:
    from strata.training.data.pictures import prepare

    chosen = recipe_file.load("pictures", [*SHAPE, "train.flow.judged=3", "train.flow.sample_steps=1"])
    prepared = prepare.prepare(chosen.data, chosen.model)
    assert chosen.train.flow
    found = evaluation.judged(folder, prepared, chosen.model, chosen.train.flow)
    assert found and 0 <= found["all"] <= 1
    assert "of 3 pictures of held-out captions are right" in evaluation.line(found, 3)
    none = recipe_file.load("pictures", [*SHAPE, "train.flow.judged=0"]).train.flow
    assert none and evaluation.judged(folder, prepared, chosen.model, none) is None
