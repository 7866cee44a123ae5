"""Imports ahead of a worker's start."""

import json
from pathlib import Path

import pytest

from strata.serving.diffusion.replica.preload import import_classes


def test_classes_of_the_folder_are_imported(tmp_path: Path) -> None:
    index = {
        "_class_name": "StrataPicturePipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "vae": [None, None],
        "other": ["os", "system"],
        "picture": {"size": 32},
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert import_classes(tmp_path) == ["FlowMatchEulerDiscreteScheduler", "PreTrainedTokenizerFast"]


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"a": ["diffusers", 3]}', '{"a": ["diffusers", "NoSuchClass"]}'])
def test_bad_folder_is_left_to_the_worker(tmp_path: Path, text: str) -> None:
    (tmp_path / "model_index.json").write_text(text)
    assert import_classes(tmp_path) == []
    assert import_classes(tmp_path / "absent") == []
