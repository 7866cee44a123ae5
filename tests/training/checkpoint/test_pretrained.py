"""Weights of a model folder: reads of every cut and range against whole tensors, and refusals of incomplete folders."""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import ROWS
from torch import Tensor

from strata.platform.errors import UserError
from strata.platform.model_families.parameters import shapes
from strata.platform.recipe import ModelSection
from strata.training.checkpoint.pretrained import Pretrained, prepare, require_unchanged, resolve, weights_digest
from strata.training.parallel.shard_map import Cut, Shard

from ..model.families.folders import imported, save

Folders = dict[str, tuple[Path, ModelSection]]

DTYPES = {"llama": torch.float16, "gpt_oss": torch.bfloat16, "qwen3_moe": torch.float32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = {}
    for name, dtype in DTYPES.items():
        folder = save(ROWS[name], tmp_path_factory.mktemp(name), dtype, max_shard_size="30KB")
        found[name] = (folder, imported(folder))
    return found


@cache
def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Parameters by Strata's names, taken from the files without Strata's code."""
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    for name in [name for name in tensors if ".mlp.experts." in name and "_proj" in name.split(".")[-1]]:  # gpt-oss
        stacked, stem = tensors.pop(name), name.rpartition(".")[0]
        kind = "bias" if name.endswith("_bias") else "weight"
        for expert, values in enumerate(stacked):
            oriented = values if kind == "bias" else values.T
            if "gate_up" in name:
                tensors[f"{stem}.{expert}.gate_proj.{kind}"], tensors[f"{stem}.{expert}.up_proj.{kind}"] = (
                    oriented[::2],
                    oriented[1::2],
                )
            else:
                tensors[f"{stem}.{expert}.down_proj.{kind}"] = oriented
    return {name.replace(".mlp.router.", ".mlp.gate."): tensor.float() for name, tensor in tensors.items()}


@pytest.mark.parametrize("model", DTYPES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_cut_and_range(model: str, folders: Folders, data: st.DataObject) -> None:
    folder, section = folders[model]
    name = data.draw(st.sampled_from(sorted(shapes(section))))
    whole = whole_tensors(folder)[name]
    dim = data.draw(st.sampled_from([None, *range(whole.dim())]))
    cut = None
    if dim is not None:
        start = data.draw(st.integers(0, whole.shape[dim] - 1))
        cut = Cut(dim, start, data.draw(st.integers(start + 1, whole.shape[dim])))
    shard = Shard(name, tuple(whole.shape), cut, 0)
    first = data.draw(st.integers(0, shard.numel))
    last = data.draw(st.integers(first, shard.numel))
    found = Pretrained(folder, section).read_range(shard, "weight", first, last)
    part = whole if cut is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)
    assert found.dtype == torch.float32 and torch.equal(found, part.flatten()[first:last])


def test_moments_are_zero(folders: Folders) -> None:
    source = Pretrained(*folders["llama"])
    shard = Shard("model.norm.weight", (32,), None, 0)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(source.read_range(shard, kind, 3, 9), torch.zeros(6))


def test_a_read_of_some_rows_does_not_hold_the_tensor(tmp_path: Path) -> None:
    """The embedding has 4 GiB, in a sparse file."""
    folder = save(ROWS["llama"], tmp_path / "model", torch.bfloat16)
    section = imported(folder).model_copy(update={"vocab": 2**20, "hidden": 2**11})
    size = 2**20 * 2**11 * 2
    entry = {"dtype": "BF16", "shape": [2**20, 2**11], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    shard = Shard("model.embed_tokens.weight", (2**20, 2**11), Cut(1, 512, 1024), 0)
    before = psutil.Process(os.getpid()).memory_info().rss
    found = Pretrained(folder, section).read_range(shard, "weight", 10**8 + 7, 10**8 + 7 + 10**6)
    assert found.numel() == 10**6 and not found.any()
    assert psutil.Process(os.getpid()).memory_info().rss - before < 64 << 20


def with_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def cast(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (with_tensors(lambda tensors: tensors.pop(NORM)), f"lacks the tensor {NORM} (1 of "),
        (with_tensors(lambda tensors: tensors.pop("lm_head.weight")), "lacks the tensor lm_head.weight"),
        (with_tensors(lambda tensors: tensors.update(extra=torch.zeros(1))), "has the tensor extra"),
        (with_tensors(lambda tensors: tensors.update({NORM: torch.zeros(33)})), f"{NORM} in "),
        (with_tensors(lambda tensors: tensors.update({NORM: torch.zeros(33)})), "has the shape [33], not [32]"),
        (with_tensors(lambda tensors: tensors.update({NORM: torch.zeros(1, 32)})), "has the shape [1, 32], not [32]"),
        (with_tensors(cast(NORM, torch.float64)), "has the dtype F64"),
        (with_tensors(cast(NORM, torch.float8_e4m3fn)), "has the dtype F8_E4M3"),
        (with_tensors(cast("lm_head.weight", torch.uint8)), "has the dtype U8"),
        (truncate, "is damaged or truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is damaged or truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "is damaged or truncated"),
        (only_bin, "has no safetensors files, only pytorch_model.bin"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "has neither model.safetensors nor model.safetensors.index.json",
        ),
    ],
)
def test_single_file_refusals(damage: Callable[[Path], None], cause: str, tmp_path: Path) -> None:
    folder = save(ROWS["llama"], tmp_path / "model")
    section = imported(folder)
    damage(folder)
    with pytest.raises(UserError) as error:
        Pretrained(folder, section).require_complete()
    assert cause in error.value.cause and str(folder) in error.value.cause and error.value.fix


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def with_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return damage


def one_tensor_less(folder: Path) -> None:
    tensors = load_file(first_shard(folder))
    tensors.popitem()
    save_file(tensors, first_shard(folder))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda folder: first_shard(folder).unlink(), "is missing, and model.safetensors.index.json expects tensors in it"),
        (lambda folder: os.truncate(first_shard(folder), 100), "is damaged or truncated"),
        (one_tensor_less, "lacks the tensor"),
        (with_index(lambda index: index["weight_map"].pop(NORM)), f"has the tensor {NORM}, which model.safetensors.index.json"),
        (with_index(lambda index: index["weight_map"].update({NORM: "../other.safetensors"})), "is damaged: its weight_map"),
        (with_index(lambda index: index["weight_map"].update({NORM: 3})), "is damaged: its weight_map"),
        (with_index(lambda index: index.update(weight_map=[])), "is damaged: its weight_map"),
        (with_index(lambda index: index.update(weight_map={})), "is damaged: its weight_map"),
        (with_index(lambda index: index.pop("weight_map")), "is damaged: KeyError"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("["), "is damaged"),
    ],
)
def test_sharded_refusals(damage: Callable[[Path], None], cause: str, tmp_path: Path) -> None:
    folder = save(ROWS["llama"], tmp_path / "model", max_shard_size="20KB")
    section = imported(folder)
    Pretrained(folder, section).require_complete()
    damage(folder)
    with pytest.raises(UserError) as error:
        Pretrained(folder, section).require_complete()
    assert cause in error.value.cause and str(folder) in error.value.cause and error.value.fix


def test_a_tied_head_in_the_file_must_equal_the_embedding(tmp_path: Path) -> None:
    folder = save(ROWS["qwen2"], tmp_path / "model", torch.bfloat16)
    section = imported(folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, accepted in ((embedding.clone(), True), (embedding.float(), True), (embedding[:-1].clone(), False)):
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        if accepted:
            Pretrained(folder, section).require_complete()
            continue
        with pytest.raises(UserError, match=r"differs from model\.embed_tokens.weight"):
            Pretrained(folder, section).require_complete()
    head = embedding.clone()
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight in .* differs from model.embed_tokens.weight") as error:
        Pretrained(folder, section).require_complete()
    assert "tie_word_embeddings" in error.value.fix


def test_a_single_file_counts_before_an_index(tmp_path: Path) -> None:
    """As in transformers: a repository may hold the weights twice."""
    folder = save(ROWS["llama"], tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text("[")
    Pretrained(folder, imported(folder)).require_complete()


def test_nothing_is_copied_from_an_incomplete_folder(tmp_path: Path) -> None:
    folder = save(ROWS["llama"], tmp_path / "model")
    section = imported(folder)
    truncate(folder)
    with pytest.raises(UserError):
        prepare(section, tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_changed_weights_are_noticed_and_a_copy_is_not(tmp_path: Path) -> None:
    folder, record = save(ROWS["llama"], tmp_path / "model"), tmp_path / "run" / "base_weights"
    require_unchanged(folder, record, "r", "it needs those")
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)  # with other times
    require_unchanged(tmp_path / "copy", record, "r", "it needs those")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="are not those that run 'r' began with"):
        require_unchanged(folder, record, "r", "it needs those")
    require_unchanged(tmp_path / "copy", record, "r", "it needs those")


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**16 + 1, 65 * 2**16])
def test_ends_of_weight_files_count(tmp_path: Path, size: int) -> None:
    def digest(content: bytes) -> str:
        (tmp_path / "model.safetensors").write_bytes(content)
        return weights_digest(tmp_path)

    content = bytes(size)
    digests = {digest(content), digest(content + b"\0"), digest(content + b"1"), digest(b"1" + content)}
    assert len(digests) == (4 if size else 3)


def test_an_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files of subfolders, which hold the weights in other forms."""
    seen: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        seen.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name") == tmp_path
    assert seen["repository"] == "org/name" and seen["ignore_patterns"] == ["*/*"]
    assert {"config.json", "tokenizer*", "model*.safetensors", "model.safetensors.index.json"} <= set(seen["allow_patterns"])
    assert resolve(str(tmp_path)) == tmp_path
