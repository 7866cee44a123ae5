"""Gradients of micro-batches, added in fp32 as they are computed, equal DeepSpeed's own sums."""

from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.platform.recipe import ParallelSection
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.loop import Job, Worker
from strata.training.parallel import accumulation

from ..conftest import SMALL, VOCAB
from .ranks import on_ranks

OVERRIDES = (
    *SMALL,
    *("model.layers=2", "train.batch=8", "train.micro_batch=1", "train.precision=bf16"),
    *("parallel.workers=2", "parallel.zero=1"),
)


def losses_and_norms(job: Job, at_once: bool) -> tuple[list[tuple[float, float]], bool]:
    if not at_once:

        def later(_: ParallelSection) -> bool:
            return False

        accumulation.immediate = later
    worker = Worker(job)
    found = [(worker.step(step)[0], float(worker.engine.get_global_grad_norm())) for step in range(4)]
    return found, "_update_hp_grad" in vars(worker.engine.optimizer)


@pytest.mark.rotation
def test_sums_equal_deepspeeds(tmp_path: Path, corpus: Path) -> None:
    recipe = recipe_file.load("laptop", [*OVERRIDES, f"data.path={corpus}"])
    tokens = shards.prepare(open_corpus(recipe.data), VOCAB, 0.1)
    job = Job(tmp_path, tokens, recipe.model, recipe.train, recipe.parallel)
    at_once, later = (on_ranks(2, losses_and_norms, job, now) for now in (True, False))
    assert all(replaced for _, replaced in at_once) and not any(replaced for _, replaced in later)
    assert at_once[0][0] == later[0][0]
