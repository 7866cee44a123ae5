"""Model card of an export. Trained without Ray (`faults.py`)."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from strata.platform import recipe_file
from strata.platform.files import cache_dir
from strata.platform.recipe import LoraSection, PreferenceSection
from strata.platform.runs import Run
from strata.training.checkpoint import model_card
from strata.training.checkpoint.model_card import Origin
from strata.training.metrics import evaluations, records
from strata.training.metrics.evaluations import Evaluation, Score, Settings
from strata.training.metrics.records import Record

from ..conftest import SMALL
from ..faults import contents, strata, without_ray


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Path]:
    """Home folder with the finished run `r`."""
    home = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        patch.setenv("STRATA_HOME", str(home))
        assert strata("train", "--run", "r", *SMALL, f"data.path={corpus}") == 0
        yield home


@pytest.fixture
def run(finished: Path, home: Path) -> Run:
    shutil.copytree(finished, home, dirs_exist_ok=True)
    return Run(home / "runs" / "r")


def text(run: Run) -> str:
    return (run.export / "README.md").read_text()


def header(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text(run).split("---\n")[1])
    return found


def changed(run: Run, *overrides: str) -> None:
    (run.path / "recipe.yaml").write_text(recipe_file.dump(recipe_file.change(run.recipe(), overrides)))


def cells(run: Run, first: str) -> list[str]:
    """Cells of the only row that begins with this cell."""
    [line] = [line for line in text(run).splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_header_and_sizes(run: Run) -> None:
    found = header(run)
    tokens = found["strata"].pop("corpus")
    assert found == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["strata", "llama"],
        "strata": {"step": 8},
    }
    assert (cache_dir() / "tokens" / tokens).is_dir()
    weights = load_file(run.export / "model.safetensors")
    assert cells(run, "parameters") == [f"{sum(weight.numel() for weight in weights.values()):,}"]
    assert cells(run, "architecture") == ["LlamaForCausalLM"] and cells(run, "layers") == ["2"]
    assert cells(run, "attention heads") == ["4, with 2 for keys and values"] and cells(run, "context") == ["32 tokens"]
    assert "| experts |" not in text(run)
    assert "trained from random weights" in text(run) and "strata serve --run r" in text(run)


def test_parameters_of_several_files_are_added(run: Run) -> None:
    before = int(cells(run, "parameters")[0].replace(",", ""))
    save_file({"more.weight": torch.zeros(3, 5)}, run.export / "model-2.safetensors")
    model_card.write(run.export, run, Origin(8, "none"))
    assert cells(run, "parameters") == [f"{before + 15:,}"]


def test_data_and_tokens(run: Run, corpus: Path) -> None:
    meta = json.loads((cache_dir() / "tokens" / header(run)["strata"]["corpus"] / "meta.json").read_text())
    train, held_out = (sum(meta["shards"][split]) for split in ("train", "validation"))
    assert cells(run, "corpus") == [f"{train:,} tokens, and {held_out:,} held out for validation"]
    assert cells(run, "trained on") == ["8 steps of 4 sequences of 32 tokens"]
    assert cells(run, "source") == [f"`{corpus.name}`"]
    shutil.rmtree(cache_dir())
    model_card.write(run.export, run, Origin(8, "none"))
    assert "| corpus |" not in text(run) and cells(run, "trained on")


def sources(run: Run) -> list[str]:
    return [
        line.removeprefix("| source | ").removesuffix(" |") for line in text(run).splitlines() if line.startswith("| source |")
    ]


@pytest.mark.parametrize(
    ("overrides", "expected", "datasets"),
    [
        (("data.path=null",), ["source code of the Python standard library"], None),
        (("data.path=null", "data.hf=org/text", "data.hf_config=en"), ["org/text (en), split train"], ["org/text"]),
        (
            (
                "data.path=null",
                "data.sets=[{hf: org/a, weight: 3}, {uri: 's3://secret/place/b', kind: chat}, {hf: org/a, name: c}]",
            ),
            ["org/a, split train, 60%", "`b`, chat, 20%", "org/a, split train, 20%"],
            ["org/a"],
        ),
    ],
)
def test_sources_of_data(run: Run, overrides: tuple[str, ...], expected: list[str], datasets: list[str] | None) -> None:
    changed(run, *overrides)
    model_card.write(run.export, run, Origin(8, "x"))
    assert sources(run) == expected and header(run).get("datasets") == datasets and "secret" not in text(run)


def imported(run: Run, source: str, **train: Any) -> None:
    """Makes the run one that started from a model; its recipe has the model's values already."""
    recipe = run.recipe()
    model = recipe.model.model_copy(update={"source": source, "family": "qwen3"})
    section = recipe.train.model_copy(update=train)
    (run.path / "recipe.yaml").write_text(recipe_file.dump(recipe.model_copy(update={"model": model, "train": section})))


@pytest.mark.parametrize(
    ("source", "base", "begun"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "from Qwen/Qwen3-0.6B with"),
        ("/data/models/mine", None, "from `mine` with"),
        ("/data/runs/laptop-1/export", None, "from `laptop-1` with"),
    ],
)
def test_base_model_is_an_id_and_never_a_path(run: Run, source: str, base: str | None, begun: str) -> None:
    imported(run, source)
    model_card.write(run.export, run, Origin(8, "x"))
    assert header(run).get("base_model") == base and begun in text(run)
    assert base or "/data" not in text(run)
    assert cells(run, "trained on") == ["8 steps of 4 sequences of up to 32 tokens"] and "| corpus |" not in text(run)


def test_tokens_of_fine_tuning_data(run: Run) -> None:
    counts = {"rows": 1, "documents": 2, "counted": 3}
    sets = [
        {
            "title": name,
            "kind": "chat",
            "examples": {},
            "counts": {"train": {**counts, "tokens": 700}, "validation": {**counts, "tokens": 30}},
        }
        for name in "ab"
    ]
    meta = {
        "context": 32,
        "dtype": "uint16",
        "pad": 0,
        "objective": "tokens",
        "sets": sets,
        "inputs": [],
        "special": [],
        "notes": [],
    }
    (cache_dir() / "rows" / "x").mkdir(parents=True)
    (cache_dir() / "rows" / "x" / "meta.json").write_text(json.dumps(meta))
    imported(run, "org/model")
    model_card.write(run.export, run, Origin(8, "x"))
    assert cells(run, "corpus") == ["1,400 tokens, and 60 held out for validation"]


def test_adapters_and_preferences(run: Run) -> None:
    imported(run, "org/model", lora=LoraSection(rank=8, source="/home/me/adapter"), preference=PreferenceSection(loss="ipo"))
    record = Record(step=1, loss=0.7, lr=0.1, grad_norm=1.0, tokens_per_s=1.0, time=0.0, val_loss=0.6, preference={"margin": 1.0})
    run.metrics.write_text(json.dumps(record) + "\n")
    model_card.write(run.export, run, Origin(8, "x"))
    expected = (
        "from org/model with adapters of rank 8 (LoRA), merged into the weights, by preference optimization (ipo) with Strata."
    )
    assert expected in text(run) and "/home/me" not in text(run)
    assert "Losses of preference optimization (ipo)." in text(run) and cells(run, "final") == ["1", "0.7000", "0.6000", ""]
    shown = yaml.safe_load(text(run).split("```yaml\n")[1].split("```")[0])
    assert shown["train"]["lora"] == {"rank": 8} and shown["train"]["preference"] == {"loss": "ipo"}


def test_teacher_is_named_without_its_path(run: Run) -> None:
    changed(run, "train.distill=/home/me/.strata/runs/large/export")
    model_card.write(run.export, run, Origin(8, "x"))
    assert "from random weights by distillation of `large` with Strata." in text(run) and "/home/me" not in text(run)


def test_experts_are_listed(run: Run) -> None:
    changed(run, "model.moe={experts: 8, top_k: 3}")
    model_card.write(run.export, run, Origin(8, "x"))
    assert cells(run, "experts") == ["8, 3 for each token"]


def test_recipe_has_chosen_keys_and_no_places(run: Run) -> None:
    changed(run, "train.checkpoints=s3://bucket/secret", "train.trackers=[wandb]", "train.lr=0.003", "parallel.workers=1")
    model_card.write(run.export, run, Origin(8, "x"))
    shown = yaml.safe_load(text(run).split("```yaml\n")[1].split("```")[0])
    assert shown["train"]["lr"] == 0.003 and shown["train"]["steps"] == 8 and "clip" not in shown["train"]
    assert not shown["train"].keys() & model_card.LEFT_OUT and "workers" not in shown.get("parallel", {})


def test_losses_are_those_up_to_the_exported_step(run: Run) -> None:
    run.metrics.write_text("")
    for step in range(1, 61):
        record = Record(step=step, loss=5 - step / 100, lr=0.1, grad_norm=1.0, tokens_per_s=1.0, time=0.0)
        if step % 2 == 0:
            record["val_loss"] = 3.0 if step == 58 else 1.0 if step == 60 else 4 - step / 100
        records.append(run.metrics, record)
    model_card.write(run.export, run, Origin(59, "x"))
    assert cells(run, "first") == ["1", "4.9900", "", ""]
    assert cells(run, "final") == ["59", "4.4100", "", ""]
    assert cells(run, "best validation") == ["58", "4.4200", "3.0000", "20.09"]
    between = [line for line in text(run).splitlines() if line.startswith("|  | ") and "." in line]
    assert len(between) == model_card.LOSS_ROWS
    steps = [int(line.split("|")[2]) for line in between]
    assert steps == sorted(set(steps)) and steps[0] == 2 and steps[-1] < 58
    model_card.write(run.export, run, Origin(60, "x"))
    assert cells(run, "best validation")[0] == "60" and cells(run, "final")[2] == "1.0000"


@pytest.mark.parametrize("content", [None, b"", b"damaged\n"])
def test_card_without_records(run: Run, content: bytes | None) -> None:
    run.metrics.unlink()
    if content is not None:
        run.metrics.write_bytes(content)
    model_card.write(run.export, run, Origin(8, "x"))
    assert "The run has no records." in text(run)


def test_records_without_validation(run: Run) -> None:
    run.metrics.write_text(json.dumps({"step": 3, "loss": 2.0}) + "\n")
    model_card.write(run.export, run, Origin(8, "x"))
    assert cells(run, "final") == ["3", "2.0000", "", ""] and "best validation" not in text(run)


EVALUATION = Evaluation(
    benchmark="eval",
    command="strata eval r",
    date="2026-01-02T03:04:05+00:00",
    machine={"cores": 2},
    versions={"python": "3.11"},
    subject="r",
    step=8,
    settings=Settings(("lines",)),
    seconds=1.0,
    truncated=0,
    scores=(Score("lines", "acc", 0.5, 0.125, 16, 0, "1.0", True), Score("odd|name", "ppl", 12.0, None, 4)),
)


def test_evaluations_are_listed_once_with_the_newest_value(run: Run) -> None:
    assert "`strata eval r` adds them" in text(run)
    evaluations.write(evaluations.folder(run), EVALUATION)
    newer = replace(EVALUATION, date="2026-01-03T00:00:00+00:00", scores=(Score("lines", "acc", 0.75, 0.1, 20, 5, "1.0", True),))
    evaluations.write(evaluations.folder(run), newer)
    (evaluations.folder(run) / "20990101-damaged.json").write_text("{")
    model_card.write(run.export, run, Origin(8, "x"))
    assert cells(run, "lines") == ["acc", "0.7500 ± 0.1000", "5", "20", "8"]
    assert "| odd\\|name | ppl | 12.0000 |  | 4 | 8 |" in text(run)


def test_export_is_reproducible_and_names_neither_time_nor_machine(run: Run, home: Path) -> None:
    first = contents(run.export)
    os.utime(run.metrics, (0, 0))
    assert strata("export", "r") == 0
    assert contents(run.export) == first
    for private in (str(home), socket.gethostname(), time.strftime("%Y-%m")):
        assert private not in text(run)


def test_origin_is_read_back(run: Run) -> None:
    found = model_card.origin_of(run.export)
    assert found and found.step == 8 and (cache_dir() / "tokens" / found.corpus).is_dir()


@pytest.mark.parametrize(
    "content",
    [None, "", "# A card\n", "---\n---\n", "---\n[\n---\n", "---\nstrata: 3\n---\n", "---\nstrata: {step: x, corpus: y}\n---\n"],
)
def test_origin_of_a_card_of_another_program(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "README.md").write_text(content)
    assert model_card.origin_of(tmp_path) is None
