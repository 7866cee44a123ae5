"""A small model folder, and a run with it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from strata.platform import recipe_file, runs
from strata.platform.recipe import Recipe
from strata.platform.runs import Run, State
from strata.training.checkpoint import model_card
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer
from strata.training.metrics.evaluations import Evaluation, Score, Settings
from strata.training.model.llama import Llama

from ..conftest import SENTENCE, SMALL

CONTEXT = 64
RECIPE: Recipe = recipe_file.load("laptop", [*SMALL, f"model.context={CONTEXT}"])


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model. Its scores are different for each text, which is all that the tests need."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    weights = {name: torch.randn_like(weight) / 4 for name, weight in Llama(RECIPE.model, 0, "torch").named_parameters()}
    write_folder(folder, weights, RECIPE.model, torch.float32)
    words = tokenizer.train([SENTENCE, "def main(argv=None):\n    return 0\n" * 3], RECIPE.model.vocab)
    tokenizer.save(words, folder, CONTEXT)
    return folder


@pytest.fixture
def run(home: Path, model_folder: Path) -> Run:
    """A finished run whose export is of step 5."""
    created = runs.create("r", RECIPE, "r")
    created.write_state(State("finished", 8, 8))
    shutil.copytree(model_folder, created.export)
    model_card.write(created.export, created, model_card.Origin(5, "none"))
    return created


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the task `words`, over a JSONL file."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"text": "the cat sat on a", "choices": [" mat", " dog", " red"], "answer": 0},
        {"text": "the dog ran to its", "choices": [" mat", " house", " fell"], "answer": 1},
        {"text": "its big", "choices": [" cat", " on", " red"], "answer": 2},
        {"text": "where", "choices": [" rain", " the", " a"], "answer": 0},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.yaml").write_text(
        f"""task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metadata: {{version: 3.5}}
"""
    )
    return folder


def evaluation(*scores: Score, **more: object) -> Evaluation:
    fields = {
        "benchmark": "eval",
        "command": "strata eval r",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {},
        "versions": {},
        "subject": "r",
        "step": 5,
        "settings": Settings(("words",)),
        "seconds": 1.0,
        "truncated": 0,
    }
    return Evaluation(**{**fields, "scores": scores, **more})  # type: ignore[arg-type]
