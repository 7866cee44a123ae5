"""`strata bench finetune`: contenders do the same work on the same rows, and rows are as they are described."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.planner.catalogue.shape import Experts, Shape
from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.training.bench.finetuning import contest, packed_rows, random_model
from strata.training.data.finetuning.rows import Rows

SHAPE = Shape("tiny", 2, 64, 4, 2, 16, 128, 512, 4096)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_rows_are_full_of_documents_that_count_in_part(tmp_path: Path, share: float) -> None:
    packed_rows.write(tmp_path, 40, 256, 512, length=30, share=share)
    rows = Rows(tmp_path, "train")
    lengths = np.concatenate([rows.lengths(index) for index in range(len(rows))])
    assert len(rows) >= 40 and lengths.sum() >= 40 * 256
    assert lengths.sum() / (len(rows) * 256) > 0.95
    assert 24 < np.median(lengths) < 36 and lengths.max() > 90
    counted = rows.loss_tokens(np.arange(len(rows))).sum()
    assert counted / (lengths - 1).sum() == pytest.approx(share, abs=0.03)
    assert len(Rows(tmp_path, "validation")) >= packed_rows.VALIDATION_ROWS


def test_shape_that_is_no_dense_llama_is_refused(tmp_path: Path) -> None:
    sparse = Shape("sparse", 2, 64, 4, 2, 16, 128, 512, 4096, experts=Experts(4, 2, 32))
    with pytest.raises(UserError, match="sparse is no dense Llama"):
        random_model.write(tmp_path / "model", sparse)


def test_model_is_made_once_and_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another command finishes the same model in the meantime: the first one stays."""
    monkeypatch.setattr(contest.library, "model", lambda _: SHAPE)
    write = random_model.write

    def overtaken(folder: Path, shape: Shape) -> None:
        write(folder, shape)
        write(home / ".strata" / "bench" / "models" / "tiny", shape)

    monkeypatch.setattr(random_model, "write", overtaken)
    made = contest._random_model("tiny")
    assert made == contest._random_model("tiny")  # which would fail if it wrote again
    assert {path.name for path in made.iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in made.parent.iterdir()] == ["tiny"]


@pytest.mark.rotation
def test_strata_and_transformers_learn_alike(tmp_path: Path, home: Path) -> None:
    random_model.write(tmp_path / "model", SHAPE)
    target = tmp_path / "result.json"
    command = [
        "bench",
        "finetune",
        "--recipe",
        "sft",
        "--model",
        str(tmp_path / "model"),
        "--length",
        "40",
        "--json",
        str(target),
    ]
    short = ["--steps", "3", "--warmup", "1", "--rounds", "1"]
    settings = ["model.context=128", "train.batch=4", "train.micro_batch=1", "train.precision=fp32", "parallel.workers=2"]
    done = CliRunner().invoke(build(), [*command, *short, *settings])
    assert done.exit_code == 0, done.output or done.exception
    result = json.loads(target.read_text())
    losses = {name: one["rounds"][0]["final_loss"] for name, one in result["contenders"].items()}
    assert losses["ours"] == pytest.approx(losses["bare"], rel=1e-4)
    assert result["contenders"]["bare"]["name"] == "transformers"
