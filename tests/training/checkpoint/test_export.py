"""`strata export`: the newest valid checkpoint of a run as a Hugging Face folder. Trained without Ray (`faults.py`)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from strata.platform.runs import Run
from strata.training.checkpoint import format
from strata.training.checkpoint.resharding import Reader
from strata.training.checkpoint.storage import folder
from strata.training.model import huggingface

from ..conftest import SMALL, VOCAB
from ..faults import StandIn, contents, strata, without_ray

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Path]:
    """Home folder with the run `r`, interrupted at step 6 of 8: checkpoints of steps 4 and 6, and no export."""
    home = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        patch.setenv("STRATA_HOME", str(home))
        StandIn.hooks = {6: (home / "runs" / "r" / "stop").touch}
        assert strata("train", "--run", "r", *SMALL, f"data.path={corpus}") == 130
        yield home


@pytest.fixture
def run(interrupted: Path, home: Path) -> Run:
    shutil.copytree(interrupted, home, dirs_exist_ok=True)
    return Run(home / "runs" / "r")


def check_weights(exported: Path, run: Run, step: int) -> None:
    """Compares exported weights with those of the checkpoint of `step`."""
    checkpoint = format.examine(folder(run.checkpoints / format.folder_name(step)))
    model, reader = run.recipe().model, Reader(checkpoint)
    expected = {huggingface.export_name(model, name): reader.whole(name) for name in reader.names()}
    if model.tie_embeddings:
        expected.pop("lm_head.weight", None)
    found = load_file(exported / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight.to(found[name].dtype)) for name, weight in expected.items())


def test_export_of_an_interrupted_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run.has_export()
    assert strata("export", "r") == 0
    assert capsys.readouterr().out == f"exported to {run.export}\n"
    assert run.has_export() and {path.name for path in run.export.iterdir()} >= FILES
    check_weights(run.export, run, 6)
    config = json.loads((run.export / "config.json").read_text())
    assert config["architectures"] and config["vocab_size"] == VOCAB and config["max_position_embeddings"] == 32
    words = Tokenizer.from_file(str(run.export / "tokenizer.json"))
    assert words.decode(words.encode("the cat sat").ids) == "the cat sat"


def test_export_uses_the_previous_checkpoint_if_the_newest_is_damaged(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoints / "step-00000006" / "part-00000.bin").write_bytes(b"short")
    assert strata("export", "r") == 0
    assert "Checkpoint step-00000006 is damaged" in capsys.readouterr().out
    check_weights(run.export, run, 4)


def test_second_export_replaces_the_first(run: Run) -> None:
    assert strata("export", "r") == 0
    first = contents(run.export)
    (run.export / "config.json").write_text("{}")
    (run.export / "note.txt").touch()
    assert strata("export", "r") == 0
    assert contents(run.export) == first and not list(run.path.glob(".export*"))


def test_export_to_another_folder(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "models" / "mine"
    assert strata("export", "r", "--to", str(target)) == 0
    assert f"exported to {target}" in capsys.readouterr().out and not run.has_export()
    check_weights(target, run, 6)
    before = contents(target)
    assert strata("export", "r", "--to", str(target)) == 1
    error = capsys.readouterr().err
    assert "is not an empty folder" in error and "Choose another folder with --to" in error
    assert contents(target) == before


def test_export_of_an_unknown_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert strata("export", "rr") == 1
    assert "rr" in capsys.readouterr().err
