"""Folders of adapters: where they may be, and what is refused before an engine reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata.platform.errors import UserError
from strata.serving.adapters import folder
from strata.serving.adapters.folder import Rule

from . import peft_folder


@pytest.fixture
def rule(tmp_path: Path) -> Rule:
    return Rule(str(peft_folder.base(tmp_path / "base")), 8, (str(tmp_path / "runs"), str(tmp_path / "more")), on_cpu=True)


def refusal(given: Path | str, rule: Rule) -> str:
    with pytest.raises(UserError) as caught:
        folder.inspect(str(given), rule)
    assert caught.value.fix
    return caught.value.cause


def test_the_revision_names_the_content(tmp_path: Path, rule: Rule) -> None:
    one = folder.inspect(str(peft_folder.adapter(tmp_path / "runs" / "one")), rule)
    copy = folder.inspect(str(peft_folder.adapter(tmp_path / "more" / "deep" / "copy")), rule)
    assert one.revision == copy.revision and one.rank == 4 and one.folder == str(tmp_path / "runs" / "one")
    peft_folder.adapter(tmp_path / "runs" / "one", fill=b"\1")
    assert folder.revision(tmp_path / "runs" / "one") != one.revision
    peft_folder.adapter(tmp_path / "runs" / "one", lora_alpha=9)
    assert folder.revision(tmp_path / "runs" / "one") != one.revision


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"use_dora": True}, "use_dora=True, which vLLM does not compute"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "of a IA3 adapter"),
        ({"rank": 16}, "has rank 16, and this endpoint has memory for rank 8"),
        ({"inputs": 9}, "q_proj.lora_A.weight is [4, 9], and the served model needs [4, 8]"),
        ({"target": "model.layers.7.self_attn.q_proj"}, "no matrix of a projection of the served model"),
        ({"target": "classifier.lora_magnitude"}, "no matrix of a projection"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, rule: Rule, change: dict[str, Any], cause: str) -> None:
    assert cause in refusal(peft_folder.adapter(tmp_path / "runs" / "a", **change), rule)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, rule: Rule) -> None:
    other = peft_folder.base(tmp_path / "other")
    assert "was trained on" in refusal(peft_folder.adapter(tmp_path / "runs" / "a", base_model_name_or_path=str(other)), rule)
    folder.inspect(str(peft_folder.adapter(tmp_path / "runs" / "a", base_model_name_or_path=rule.base)), rule)


def test_experts_on_cpus_are_refused(tmp_path: Path, rule: Rule) -> None:
    (Path(rule.base) / "config.json").write_text(json.dumps({"num_experts": 4}))
    assert "mixtures of experts" in refusal(peft_folder.adapter(tmp_path / "runs" / "a"), rule)


def test_damaged_folders_are_refused(tmp_path: Path, rule: Rule) -> None:
    runs = tmp_path / "runs"
    assert "There is no folder" in refusal(runs / "missing", rule)
    runs.mkdir()
    assert "cannot be read" in refusal(runs, rule)  # no configuration
    whole = peft_folder.adapter(runs / "a")
    weights = whole / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "damaged" in refusal(whole, rule)
    weights.unlink()
    assert "There is no" in refusal(whole, rule)
    (whole / "adapter_config.json").write_text("[]")
    assert "not a JSON object" in refusal(whole, rule)


def test_only_folders_below_the_roots_are_read(tmp_path: Path, rule: Rule) -> None:
    outside = peft_folder.adapter(tmp_path / "outside")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(outside)
    for given in (outside, tmp_path / "runs" / ".." / "outside", tmp_path / "runs" / "link", "/no/such", "runs/a", "", "a\0b"):
        assert "is not below a folder with adapters" in refusal(given, rule)


def test_weights_are_compared_without_the_place_of_the_adapter(tmp_path: Path, rule: Rule) -> None:
    """For new weights of a model: a recipe's adapter may be anywhere, and its base is the one before."""
    elsewhere = peft_folder.adapter(tmp_path / "elsewhere", base_model_name_or_path=str(tmp_path))
    assert "is not below" in refusal(elsewhere, rule)
    folder.check_weights(elsewhere, Path(rule.base), 4)
    with pytest.raises(UserError, match="the served model needs"):
        folder.check_weights(peft_folder.adapter(tmp_path / "wide", inputs=16), Path(rule.base), 4)
