"""Fixtures: a corpus, a small recipe, and the command line as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.platform.recipe import Recipe
from strata.training.data import shards
from strata.training.data.corpus import open_corpus

VOCAB = 512
SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=64",
    f"model.vocab={VOCAB}",
    "model.context=32",
    "train.steps=8",
    "train.time_budget_s=3600",  # a busy machine must not shorten a run
    "train.batch=4",
    "train.micro_batch=1",
    "train.warmup=1",
    "train.eval_every=4",
    "train.eval_sequences=5",
    "train.checkpoint_every=4",
    "train.matmul=highest",
)

SENTENCE = "the cat sat on a mat and the dog ran to its big red house where rain fell"


def write_corpus(folder: Path, documents: int = 60) -> Path:
    """Writes documents with deterministic words: enough structure to learn, and the same on every machine."""
    vocabulary = SENTENCE.split()
    for number in range(documents):
        words = [vocabulary[(number * 7 + place * place) % len(vocabulary)] for place in range(120)]
        (folder / f"{number:03}.txt").write_text(" ".join(words) + f". Number {number}.\n")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def home(own_home: Path) -> Path:
    return own_home


@pytest.fixture
def small_recipe(corpus: Path) -> Recipe:
    return recipe_file.load("laptop", [*SMALL, f"data.path={corpus}"])


@pytest.fixture
def tokens(home: Path, small_recipe: Recipe) -> Path:
    return shards.prepare(open_corpus(small_recipe.data), VOCAB, 0.1)


def strata_process(home: Path, *arguments: str, address: str | None = None) -> subprocess.Popen[str]:
    """Starts the command in its own process group, so that a test can send Ctrl-C to it."""
    environment = os.environ | {"STRATA_HOME": str(home)} | ({"RAY_ADDRESS": address} if address else {})
    return subprocess.Popen(
        [sys.executable, "-c", "from strata.platform.cli import main; main()", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
