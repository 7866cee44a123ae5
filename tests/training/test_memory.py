import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.training import memory
from strata.training.memory import WORKER_BASE, memory_warnings, peak_memory, require_memory, worker_bytes

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


def test_worker_needs_700_mib_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "planned_peak", lambda recipe: 5.0 * 2**20)
    assert worker_bytes(recipe_file.load("laptop")) == 705 * 1024 * 1024


@pytest.mark.parametrize(("free", "enough"), [(3 * GIB, True), (3 * GIB - 1, False), (4 * GIB, True)])
def test_all_workers_must_fit(monkeypatch: pytest.MonkeyPatch, free: int, enough: bool) -> None:
    """Two workers with 1.5 GiB each."""
    recipe = recipe_file.load("laptop", ["parallel.workers=2"])
    monkeypatch.setattr(memory, "worker_bytes", lambda _: 1.5 * GIB)
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    if enough:
        require_memory(recipe.model, recipe.train, recipe.parallel)
        return
    with pytest.raises(UserError, match=r"needs about 3\.0 GiB \(2 workers\); 3\.0 GiB are free"):
        require_memory(recipe.model, recipe.train, recipe.parallel)


def test_peak_of_a_cpu_is_the_resident_set_of_this_process_alone() -> None:
    """The parent holds half a gigabyte more than its child ever has."""
    parent = """
import subprocess, sys
ballast = bytearray(b"x") * 2**29
child = "import torch; from strata.training.memory import peak_memory; print(peak_memory(torch.device('cpu')))"
alone = int(subprocess.run([sys.executable, "-c", child], capture_output=True, check=True, preexec_fn=lambda: None).stdout)
from strata.training.memory import peak_memory
import torch
print(alone, peak_memory(torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, check=True, text=True)
    child, own = map(int, done.stdout.split())
    assert 2**26 < child < own - 2**28


def test_peak_of_a_cpu_on_macos_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    assert peak_memory(torch.device("cpu")) == 7


def test_peak_of_a_gpu_is_its_allocated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4096 + device.index)
    assert peak_memory(torch.device("cuda:3")) == 4099
