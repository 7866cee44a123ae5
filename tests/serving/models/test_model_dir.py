import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from strata.platform.errors import UserError
from strata.serving.models import model_dir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.zeros(10), "b": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_complete_folder_passes(folder: Path) -> None:
    model_dir.check(folder)


def test_incomplete_folders_are_refused(folder: Path) -> None:
    def refused(cause: str) -> None:
        with pytest.raises(UserError, match=cause):
            model_dir.check(folder)

    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    refused(r"damaged: it has \d+ bytes, but its header requires \d+")
    weights.write_bytes(whole[:20])
    refused("header is not readable")
    weights.write_bytes(b"")
    refused("header is not readable")
    weights.unlink()
    refused("has no weights")
    weights.write_bytes(whole)
    (folder / "tokenizer.json").unlink()
    refused("has no tokenizer")
    (folder / "config.json").write_text("{}")
    refused("has no .architectures")
    (folder / "config.json").write_text("{")
    refused("not valid JSON")
    (folder / "config.json").unlink()
    refused("not a model folder")
    with pytest.raises(UserError, match="There is no model folder"):
        model_dir.check(folder / "nowhere")
