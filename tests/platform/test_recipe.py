from pathlib import Path

import pytest
import yaml

from strata.platform import recipe_file
from strata.platform.recipe_file import RecipeError


@pytest.mark.parametrize(
    "name",
    [
        "laptop",
        "laptop-draft",
        "laptop-moe",
        "laptop-zero3",
        "laptop-offload",
        "laptop-tensor",
        "laptop-pipeline",
        "laptop-dualpipev",
        "laptop-sequence",
        "laptop-expert",
        "laptop-3d",
        "h200",
        "8xh100",
        "8xh100-moe",
        "16xh100-3d",
    ],
)
def test_built_in_recipes_are_valid(name: str) -> None:
    recipe_file.load(name)


def test_h200_has_about_a_billion_parameters() -> None:
    model = recipe_file.load("h200").model
    layer = model.hidden * (2 * model.hidden + 2 * model.kv_heads * model.head_dim + 3 * model.ffn)
    assert 0.8e9 < model.layers * layer + model.vocab * model.hidden < 1.3e9


def test_overrides_and_extends(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: laptop\ntrain: {steps: 77}\n")
    (tmp_path / "child.yaml").write_text("extends: ./mine.yaml\nmodel: {layers: 3}\n")
    recipe = recipe_file.load(str(tmp_path / "child.yaml"), ["train.lr=1e-4", "data.path=/some/where"])
    laptop = recipe_file.load()
    assert (recipe.train.steps, recipe.model.layers, recipe.train.lr) == (77, 3, 1e-4)
    assert recipe.model.hidden == laptop.model.hidden
    assert recipe.data.path == Path("/some/where")


def test_dump_loads_again() -> None:
    recipe = recipe_file.load("8xh100")
    assert recipe_file.check(yaml.safe_load(recipe_file.dump(recipe)), "dump") == recipe


@pytest.mark.parametrize(
    ("override", "cause", "fix"),
    [
        ("train.stpes=3", "Unknown recipe key 'train.stpes'", "'train.steps'"),
        ("steps=3", "Unknown recipe key 'steps'", "'train.steps'"),
        ("train.kernels=liger", "set it to strata or torch, or parallel.device to gpu", "Change"),
        ("train.kernels=triton", "should be 'strata', 'torch' or 'liger'", "Change"),
        ("serve.prefil.replicas=2", "Unknown recipe key 'serve.prefil'", "'serve.prefill'"),
        ("train.steps.more=3", "Unknown recipe key", "train.steps"),
        ("train.lr=5", "train.lr=5", "Change"),
        ("train.steps=many", "train.steps='many'", "Change"),
        ("train.steps=-1", "train.steps=-1", "Change"),
        ("model.heads=3", "must be heads=3", "Change"),
        ("model.kv_heads=3", "must be a multiple of kv_heads=3", "Change"),
        ("parallel.workers=3", "train.batch", "Change"),
        ("parallel.zero=4", "parallel.zero=4", "Change"),
        ("serve.port=99999", "serve.port=99999", "Change"),
        ("train.steps", "is not an override", "train.steps=50"),
        ("train={steps: 3", "not valid YAML", "Quote"),
    ],
)
def test_bad_values_name_cause_and_fix(override: str, cause: str, fix: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe_file.load("laptop", [override])
    assert cause in error.value.cause
    assert fix in error.value.fix


def test_bad_files_name_cause_and_fix(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Did you mean 'laptop'"):
        recipe_file.load("labtop")
    for name, text, cause in [
        ("a", "extends: ./b.yaml", "circle"),
        ("b", "extends: ./a.yaml", "circle"),
        ("c", "train: [", "not valid YAML"),
        ("d", "- list", "not sections"),
        ("e", "model: {layers: 1}", "lacks 'model.hidden'"),
        ("f", "extends: ./nowhere.yaml", "No recipe"),
    ]:
        (tmp_path / f"{name}.yaml").write_text(text)
        if name == "a":
            continue
        with pytest.raises(RecipeError, match=cause):
            recipe_file.load(str(tmp_path / f"{name}.yaml"))
