import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.training import memory
from strata.training.memory import WORKER_BASE, memory_warnings, require_memory, worker_bytes

GIB = 2**30


def test_laptop_recipe_needs_less_than_2_gib() -> None:
    needed = worker_bytes(recipe_file.load("laptop"))
    assert WORKER_BASE < needed < 2 * GIB


def test_plain_torch_needs_more_than_our_kernels() -> None:
    """Its loss holds all logits; ours holds a chunk of them."""
    ours, torchs = (
        recipe_file.load("laptop", [f"train.kernels={kernels}", "model.vocab=32768"]) for kernels in ("strata", "torch")
    )
    assert worker_bytes(torchs) > 1.2 * worker_bytes(ours)


def test_insufficient_memory_is_reported_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_file.load("laptop")
    monkeypatch.setattr(memory, "available_memory", lambda: 1 * GIB)
    with pytest.raises(UserError, match=r"needs about \d.\d GiB .2 workers.; 1.0 GiB are free") as raised:
        require_memory(recipe.model, recipe.train, recipe.parallel)
    assert "micro_batch" in raised.value.fix


def test_gpus_that_are_too_small_are_named() -> None:
    recipe = recipe_file.load("h200")
    lines = memory_warnings(recipe.model, recipe.train, recipe.parallel, ["H200", "L40S", "a GPU nobody knows"])
    assert len(lines) == 1
    assert "l40s" in lines[0]
