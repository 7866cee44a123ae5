"""An import followed by an export changes nothing: names, dtypes, files, values and small files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import ROWS, Tiny
from torch import Tensor

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection
from strata.platform.runs import Run
from strata.training.checkpoint import format, ownership, pretrained
from strata.training.checkpoint.export import export_run
from strata.training.checkpoint.format import Origin
from strata.training.checkpoint.original_form import write_original_form
from strata.training.checkpoint.storage import folder
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Shard

from .folders import imported, read_all, rows, save

SMALL = {
    "tokenizer.json": b'{"any": "thing"}',
    "tokenizer_config.json": b"{}\n",
    "special_tokens_map.json": b"{ }",
    "chat_template.jinja": "{{ messages }} \u00e9\r\n".encode(),
    "vocab.json": b"{}",
    "merges.txt": b"a b\r\n",
    "tokenizer.model": bytes(range(256)),
    "added_tokens.json": b"{}",
}


def run_of(source: Path, change: Callable[[Tensor], Tensor] = lambda weight: weight) -> Run:
    """A run that has imported a folder and saved its weights, after `change`, in a checkpoint."""
    recipe = recipe_file.load("laptop", [f"model.from={source}", "model.context=32"])
    run = runs.create("r", recipe, "r")
    ownership.claim_new(run, folder(run.checkpoints))
    pretrained.prepare(recipe.model, run.path / pretrained.BASE)
    parts = [
        Fragment(Shard(name, tuple(weight.shape), None, 0), "weight", 0, change(weight).flatten())
        for name, weight in read_all(source, recipe.model).items()
    ]
    origin = Origin(recipe.model.model_dump(), "", 1, 0, run.id() or "")
    format.write(folder(run.checkpoints / format.folder_name(5)), 0, 1, 5, origin, None, parts)
    return run


def stored(model: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in sorted(model.glob("*.safetensors"))}


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = stored(one), stored(other)
    assert ours.keys() == theirs.keys()
    for file, tensors in theirs.items():
        assert ours[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = ours[file][name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
        with safe_open(one / file, "pt") as left, safe_open(other / file, "pt") as right:
            assert left.metadata() == right.metadata()


@pytest.mark.parametrize("shard", [None, "20KB"])
@rows
def test_export_is_the_import(row: Tiny, shard: str | None, tmp_path: Path) -> None:
    source = save(row, tmp_path / "source", torch.bfloat16, **({"max_shard_size": shard} if shard else {}))
    assert len(list(source.glob("*.safetensors"))) > 2 or not shard
    for name, content in SMALL.items():
        (source / name).write_bytes(content)
    run = run_of(source)
    originals = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix != ".safetensors"}
    aside = source.rename(tmp_path / "aside")  # an export does not need the folder
    exported = export_run(run, None, print)
    assert_same_tensors(exported, aside)
    assert {path.name: path.read_bytes() for path in exported.iterdir() if path.suffix not in (".safetensors", ".md")} == {
        name: content for name, content in originals.items() if name != "README.md"
    }
    kind = getattr(transformers, row.architecture)
    one, other = (kind.from_pretrained(path, dtype=torch.float32) for path in (exported, aside))
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(one(tokens).logits, other(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral"])
def test_export_has_the_checkpoint_s_weights(name: str, tmp_path: Path) -> None:
    source = save(ROWS[name], tmp_path / "source", torch.bfloat16)
    exported = export_run(run_of(source, lambda weight: -2 * weight), None, print)
    for file, tensors in stored(source).items():
        found = load_file(exported / file)
        assert all(torch.equal(found[name], -2 * tensor) for name, tensor in tensors.items())


def test_every_tensor_retains_its_own_dtype(tmp_path: Path) -> None:
    source = save(ROWS["llama"], tmp_path / "source", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    mixed = {name: tensor.to(dtypes[number % 3]) for number, (name, tensor) in enumerate(sorted(tensors.items()))}
    mixed["model.norm.weight"] = torch.tensor([-0.0, 2**-24, 65504.0, 1e-7] * 8, dtype=torch.float16)
    save_file(mixed, source / "model.safetensors", {"format": "pt", "note": "\u00e9"})
    assert_same_tensors(export_run(run_of(source), None, print), source)


def test_tensors_that_the_model_does_not_need_come_along(tmp_path: Path) -> None:
    """A copy of the tied embedding, and rotary tables that old versions of transformers saved."""
    source = save(ROWS["qwen2"], tmp_path / "source", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    exported = export_run(run_of(source), None, print)
    assert_same_tensors(exported, source)
    assert not (exported / pretrained.BUFFERS).exists() and not (exported / pretrained.TENSORS).exists()


def test_one_file_is_written_before_the_next_is_read(tmp_path: Path) -> None:
    source = save(ROWS["qwen3_moe"], tmp_path / "source", torch.bfloat16, max_shard_size="20KB")
    section = imported(source)
    pretrained.prepare(section, tmp_path / "base")
    weights = read_all(source, section)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    target = tmp_path / "target"
    target.mkdir()
    finished: list[set[str]] = []

    def weight(name: str) -> Tensor:
        before = {path.name for path in target.glob("*.safetensors")}
        assert index[name] not in before
        finished.append(before)
        return weights[name]

    write_original_form(target, tmp_path / "base", weight, section)
    assert [len(files) for files in finished] == sorted(len(files) for files in finished)
    assert len(finished[-1]) == len(set(index.values())) - 1


def test_a_second_copy_of_small_files_replaces_the_first(tmp_path: Path) -> None:
    source, base = save(ROWS["llama"], tmp_path / "source"), tmp_path / "base"
    pretrained.copy_small_files(source, base)
    first = {path.name: path.read_bytes() for path in base.iterdir()}
    (base / "tensors.json").write_text("{")
    (base / "config.json").write_text("{}")
    pretrained.copy_small_files(source, base)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == first
    listed = json.loads(first["tensors.json"])["tensors"]
    assert {"name": "lm_head.weight", "dtype": "F32", "shape": [96, 32], "file": "model.safetensors"} in listed


@pytest.mark.parametrize("damage", [lambda base: shutil.rmtree(base), lambda base: (base / "tensors.json").write_text('{"a"')])
def test_export_without_the_base_is_refused(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    run = run_of(save(ROWS["llama"], tmp_path / "source"))
    damage(run.path / "base")
    with pytest.raises(UserError, match=r"tensors\.json") as error:
        export_run(run, None, print)
    assert "Restore" in error.value.fix and not run.export.exists() and not list(run.path.glob(".export*"))


def test_sections_of_runs_load_without_the_folder(tmp_path: Path) -> None:
    source = save(ROWS["gemma3"], tmp_path / "source")
    run = run_of(source)
    section: ModelSection = run.recipe().model
    shutil.rmtree(source)
    assert run.recipe().model == section and section.family == "gemma3" and section.source == str(source)
