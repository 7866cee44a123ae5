"""Folders of draft models, and drafts that are refused before engines start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from strata.deploy import refusals
from strata.deploy.targets import TARGETS
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving.runtime.models import checks
from strata.serving.speculation import dense, draft

OTHER = {"architectures": ["Olmo2ForCausalLM"]}  # that Strata's own drafter does not compute
WORDS = {"a": 0, "b": 1, "<end>": 2}


def model(folder: Path, vocabulary: dict[str, int] = WORDS, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": len(vocabulary)} | changes
    (folder / "config.json").write_text(json.dumps(config))
    words = {word: number for word, number in vocabulary.items() if not word.startswith("<")}
    added = [{"id": number, "content": word} for word, number in vocabulary.items() if word.startswith("<")]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))
    save_file({"w": torch.zeros(2**18)}, folder / "model.safetensors")
    return folder


def section(given: Path | str, **serve: Any) -> ServeSection:
    return ServeSection(speculative={"method": "draft", "draft": str(given)}, **serve)


def test_draft_is_a_folder_or_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, small = model(tmp_path / "target"), model(tmp_path / "small")
    checks.check_folder(section(small), target)
    monkeypatch.chdir(tmp_path)
    assert draft.resolved(section("small")).speculative.draft == str(small)  # type: ignore[union-attr]
    run = tmp_path / "runs" / "tiny"
    model(run / "export")
    (run / "recipe.yaml").write_text(recipe_file.dump(recipe_file.load("laptop")))
    assert draft.folder("tiny") == run / "export"
    (run / "export" / "config.json").unlink()
    with pytest.raises(UserError, match="no export") as refused:
        draft.folder("tiny")
    assert refused.value.fix == "Write one: strata export tiny"
    with pytest.raises(UserError, match="no run 'other'"):
        draft.folder("other")
    with pytest.raises(UserError, match="no such folder"):
        draft.folder("./other")
    with pytest.raises(UserError, match="There is no model folder"):
        checks.check_folder(section(tmp_path / "other"), target)


def test_sections_without_a_draft_are_unchanged(tmp_path: Path) -> None:
    plain, ngram = ServeSection(), ServeSection(speculative={"method": "ngram"})
    assert draft.resolved(plain) is plain and draft.resolved(ngram) is ngram
    draft.check(ngram, tmp_path)  # reads no folder
    assert draft.weights_gib(ngram) == 0


def test_draft_counts_as_memory(tmp_path: Path) -> None:
    target, small = model(tmp_path / "target"), model(tmp_path / "small")
    more = checks.memory_gib(section(small), target) - checks.memory_gib(ServeSection(), target)
    assert more == pytest.approx(2 * 2 * 2**20 / 2**30, rel=0.01)  # twice its weights, in each of two engines


@pytest.mark.parametrize(
    ("vocabulary", "reason"),
    [
        (WORDS | {"c": 3}, "a vocabulary of 4 tokens, and the served model one of 3"),
        ({"a": 1, "b": 0, "<end>": 2}, "have different tokens"),
        ({"a": 0, "b": 1, "<stop>": 2}, "have different tokens"),
    ],
)
def test_other_vocabularies_are_refused(tmp_path: Path, vocabulary: dict[str, int], reason: str) -> None:
    target, small = model(tmp_path / "target"), model(tmp_path / "small", vocabulary)
    with pytest.raises(UserError, match=reason):
        checks.check_folder(section(small), target)


def test_cache_too_small_for_drafts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be drafted, without a word."""
    target, small = model(tmp_path / "target"), model(tmp_path / "small")
    shape = recipe_file.load("laptop").model
    monkeypatch.setattr(dense, "section_of", lambda folder: shape)
    token_bytes = 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim  # keys and values in 4 bytes
    words = {"speculative": {"method": "draft", "draft": str(small), "tokens": 4}, "device": "cpu", "max_sequences": 8}
    monkeypatch.setattr(dense, "CACHE_BYTES", token_bytes * 8 * 10)
    checks.check_folder(ServeSection(**words), target)
    monkeypatch.setattr(dense, "CACHE_BYTES", token_bytes * 8 * 10 - 1)
    with pytest.raises(UserError, match=r"holds 9 tokens of each of 8 sequences, and drafts of 4 tokens need 10") as refused:
        checks.check_folder(ServeSection(**words), target)
    assert "serve.max_sequences" in refused.value.fix


def test_unigram_tokenizers_are_compared_by_position(tmp_path: Path) -> None:
    target, small = model(tmp_path / "target"), model(tmp_path / "small")
    tree = {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["<end>", 0.0]]}}
    (small / "tokenizer.json").write_text(json.dumps(tree))
    checks.check_folder(section(small), target)
    (small / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer of the 'tokenizers' library"):
        checks.check_folder(section(small), target)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("small", {"architectures": ["LlamaForCausalLMEagle3"]}, "hidden states of its target"),
        ("eagle-small", {}, "'eagle-' in its path"),
        ("small", OTHER | {"sliding_window": 8}, "attention window is 8 tokens, and the served model's None"),
        ("small", OTHER | {"layer_types": ["full_attention", "sliding_attention"]}, "several kinds of KV cache"),
        ("small", {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4"}}, "no kernel on a CPU"),
    ],
)
def test_drafts_that_vllm_would_not_use_as_drafts(tmp_path: Path, name: str, changes: dict[str, Any], reason: str) -> None:
    target, small = model(tmp_path / "target"), model(tmp_path / name, **changes)
    with pytest.raises(UserError, match=reason):
        checks.check_folder(section(small), target)


def test_windows_matter_only_to_transferred_blocks(tmp_path: Path) -> None:
    target, small = model(tmp_path / "target"), model(tmp_path / "small", sliding_window=8)
    checks.check_folder(section(small), target)  # in Strata's own drafter, nothing is transferred
    other = model(tmp_path / "other", sliding_window=8, **OTHER)
    checks.check_folder(section(other, prefill={"replicas": 0}), target)
    unused = model(tmp_path / "unused", sliding_window=8, use_sliding_window=False)
    checks.check_folder(section(unused), target)


def test_model_of_images_has_no_draft(tmp_path: Path) -> None:
    target, small = model(tmp_path / "target", vision_config={"depth": 1}), model(tmp_path / "small")
    with pytest.raises(UserError, match="a draft does not see"):
        draft.check(section(small), target)


@pytest.mark.parametrize(
    ("given", "visible"), [("small", True), ("/mnt/strata/small", True), ("/home/me/small", False), ("a/b", False)]
)
def test_pods_see_runs_and_the_shared_storage(given: str, visible: bool) -> None:
    words = ["deploy.network=tcp", "serve.kernels=vllm", f"serve.speculative={{method: draft, draft: {given}}}"]
    recipe = recipe_file.load("8xh100", words)
    image = "strata@sha256:" + "0" * 64
    if visible:
        refusals.refuse(recipe, TARGETS["gke"], ["serve"], "demo", image)
        return
    with pytest.raises(UserError, match="not visible to pods"):
        refusals.refuse(recipe, TARGETS["gke"], ["serve"], "demo", image)
