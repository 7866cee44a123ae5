"""Picture models in a recipe: sizes that follow from others, and refusals of what they do not have."""

from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.layout_rules import recipe_problem
from strata.platform.recipe import Recipe


def load(*overrides: str) -> Recipe:
    return recipe_file.load("pictures", overrides)


def test_sizes_follow_from_the_pictures() -> None:
    model = load("model.hidden=96", "model.heads=6", "model.picture.size=48", "model.picture.patch=8").model
    assert (model.kv_heads, model.ffn, model.context, model.vocab) == (6, 384, 36, 512)
    assert model.picture and model.picture.patches == 36


def test_a_recipe_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    recipe = load("train.flow.prompts=[a red circle]")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_file.dump(recipe))
    assert recipe_file.load(str(path)) == recipe
    assert recipe_file.change(recipe, ["train.steps=60"]).model == recipe.model


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("model.kv_heads=1", "kv_heads=1 is 4 in this picture model"),
        ("model.ffn=100", "ffn=100 is"),
        ("model.context=100", "context=100 is 36"),
        ("model.moe.experts=4", "moe is for language models"),
        ("model.architecture.qkv_bias=true", "architecture is for language models"),
        ("model.picture.size=30", "size=30 must be a multiple of patch=4"),
        ("model.picture.size=12", "make 9 patches, fewer than 16"),
        ("model.picture.text_hidden=40", "text_hidden=40 must be a multiple of 32"),
        ("model.picture.caption_tokens=3", "caption_tokens"),
        ("model.picture.colour=1", "Unknown recipe key 'model.picture.colour'"),
        ("model.picture=null", "model"),
        ("train.flow=null", "model.picture needs train.flow"),
        ("train.flow.caption_dropout=1", "caption_dropout"),
        ("train.flow.average=1", "average"),
        ("train.flow.logit_std=0", "logit_std"),
        ("train.flow.guidance=0.5", "guidance"),
        ("train.lora.rank=4", "train.lora is for language models"),
        ("train.preference.loss=dpo", "train.preference is for language models"),
        ("train.samples.prompts=[a]", "train.samples is for language models"),
        ("train.freeze=[transformer.*]", "train.freeze is for language models"),
        ("train.kernels=liger", "train.kernels=liger"),
        ("data.hf=some/pictures", "takes data.path"),
    ],
)
def test_refusals(override: str, cause: str) -> None:
    with pytest.raises(UserError) as error:
        load(override)
    assert cause in str(error.value)


def test_flow_is_for_pictures() -> None:
    with pytest.raises(UserError, match=r"train\.flow trains a picture model"):
        recipe_file.load("laptop", ["train.flow.average=0.9"])


@pytest.mark.parametrize(
    "layout",
    [
        *({"workers": 2, "zero": zero} for zero in range(4)),
        {"workers": 2, "tensor": 2},
        {"workers": 4, "tensor": 4},
        {"workers": 4, "sequence": 4, "zero": 3},
        {"workers": 2, "zero": 3, "offload": "all"},
    ],
)
def test_layouts_that_run(layout: dict[str, object]) -> None:
    assert problem(layout) is None


@pytest.mark.parametrize(
    ("layout", "cause"),
    [
        ({"workers": 2, "pipeline": 2}, "A picture model has no pipeline (parallel.pipeline=2)"),
        ({"workers": 8, "tensor": 8}, "parallel.tensor=8 must divide model.heads=4"),
        ({"workers": 8, "sequence": 8}, "parallel.sequence=8 must divide model.heads=4"),
        ({"workers": 2, "expert": 2}, "parallel.expert=2 distributes experts"),
        ({"workers": 4, "tensor": 2, "sequence": 2}, "does not combine tensor and sequence"),
    ],
)
def test_layouts_that_do_not(layout: dict[str, object], cause: str) -> None:
    assert cause in (problem(layout) or "")


def test_captions_are_divided_as_pictures_are() -> None:
    layout = {"workers": 4, "sequence": 4}
    assert problem(layout, "model.picture.caption_tokens=12") is None
    found = problem(layout, "model.picture.caption_tokens=14")
    assert found and "parallel.sequence=4 must divide model.picture.caption_tokens=14" in found


def problem(layout: dict[str, object], *overrides: str) -> str | None:
    keys = (f"parallel.{key}={value}" for key, value in layout.items())
    recipe = load("train.batch=64", "train.micro_batch=1", *overrides, *keys)
    return recipe_problem(recipe.model, recipe.train, recipe.parallel)


def test_plans_are_for_language_models() -> None:
    from strata.planner.catalogue import library

    with pytest.raises(UserError, match="picture model"):
        library.open_model("pictures")
