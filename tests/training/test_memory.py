import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.training import memory
from strata.training.memory import misfits, require_memory, worker_bytes

GIB = 2**30


def bytes_of(*overrides: str, recipe: str = "laptop") -> int:
    loaded = recipe_file.load(recipe, overrides)
    return worker_bytes(loaded.model, loaded.train, loaded.parallel)


def test_laptop_recipe_needs_less_than_2_gib() -> None:
    assert bytes_of() < 2 * GIB


def test_higher_zero_stages_need_less_memory() -> None:
    sizes = [bytes_of(f"parallel.zero={stage}", recipe="8xh100") for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert sizes[0] - sizes[3] == pytest.approx(8.03e9 * 16 * 7 / 8, rel=0.01)  # of 16 bytes a parameter, 8 ranks share all


def test_insufficient_memory_is_reported_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_file.load("laptop")
    monkeypatch.setattr(memory, "available_memory", lambda: 1 * GIB)
    with pytest.raises(UserError, match=r"needs about \d.\d GiB .2 workers.; 1.0 GiB are free") as raised:
        require_memory(recipe.model, recipe.train, recipe.parallel)
    assert "micro_batch" in raised.value.fix


def test_gpus_that_are_too_small_are_named() -> None:
    recipe = recipe_file.load("h200")
    lines = misfits(recipe.model, recipe.train, recipe.parallel, ["H200", "L40S", "a GPU nobody knows"])
    assert len(lines) == 1
    assert "l40s" in lines[0]
