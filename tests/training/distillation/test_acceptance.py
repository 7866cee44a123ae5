"""Tokens per step of greedy speculative decoding, and the command that measures them on real folders."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from strata.platform import recipe_file, runs
from strata.training.checkpoint.export import TOKENIZER
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.distillation.acceptance import equal_tokens, tokens_per_step
from strata.training.distillation.command import eval_draft
from strata.training.quantization import rows

from ..conftest import SMALL, VOCAB
from .teachers import SECTION, write_teacher


@pytest.mark.parametrize(
    ("equal", "drafted", "expected"),
    [
        ([[1, 1, 1, 1, 1, 1]], 1, 6 / 3),
        ([[1, 1, 1, 1, 1, 1]], 2, 6 / 2),
        ([[1, 1, 1, 1, 1, 1]], 5, 6 / 1),
        ([[0, 0, 0, 0, 0, 0]], 5, 1.0),
        ([[1, 0, 1, 1, 0, 1]], 1, 6 / 4),  # 1 0, 1 1, 0, 1
        ([[1, 0, 1, 1, 0, 1]], 3, 6 / 3),  # 1 0, 1 1 0, 1
        ([[1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], 2, 12 / 5),
    ],
)
def test_tokens_per_step(equal: list[list[int]], drafted: int, expected: float) -> None:
    assert tokens_per_step(torch.tensor(equal).bool(), drafted) == pytest.approx(expected)


@pytest.mark.slow
def test_command_measures_a_draft_model(corpus: Path, tmp_path: Path) -> None:
    shape = [f"model.{key}={getattr(SECTION, key)}" for key in ("layers", "hidden", "heads", "kv_heads", "ffn")]
    recipe = recipe_file.load("laptop", [*SMALL, *shape, f"data.path={corpus}"])
    tokens = shards.prepare(open_corpus(recipe.data), VOCAB, recipe.data.holdout)
    teacher = write_teacher(tmp_path / "teacher", tokens)
    run = runs.create("same", recipe_file.change(recipe, [f"train.distill={teacher}"]), "laptop")
    write_teacher(run.export, tokens)
    (run.path / TOKENIZER).mkdir()
    app = Typer()
    app.command()(eval_draft)
    result = CliRunner().invoke(app, ["same"])
    assert result.exit_code == 0, result.output
    assert "same chooses 100.0% of" in result.output and " 1 " in result.output
    other = write_teacher(tmp_path / "other", tokens, SECTION.model_copy(update={"layers": 1}))
    held_out = rows.of_run(run, 32, 1, 0, Console(quiet=True)).held_out
    equal = equal_tokens(run.export, other, held_out, torch.device("cpu"))
    assert 0 < float(equal.float().mean()) < 1, "models that differ, agree by chance"
