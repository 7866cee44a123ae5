"""Small model folders and a text that they are calibrated with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import ROWS

from strata.training.data import tokenizer

from ..conftest import SENTENCE

VOCAB = 320
# Sizes that 4-bit groups of 32 divide, with outliers in some channels as trained models have.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB}
OUTLIERS = {3: 8.0, 40: 5.0}


def build(row: str, **more: Any) -> Any:
    torch.manual_seed(0)
    tiny = ROWS[row]
    kind = getattr(transformers, tiny.architecture)
    config = tiny.config | SIZES | more
    layer_types = config.get("layer_types")
    if layer_types:
        config["layer_types"] = layer_types[: config["num_hidden_layers"]]
    if config.get("head_dim") == 12:
        config["head_dim"] = 16
    model = kind(kind.config_class(**config)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
        elif "layernorm" in name and parameter.shape == (SIZES["hidden_size"],):
            for channel, size in OUTLIERS.items():
                parameter.data[channel] *= size
    return model


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Hugging Face folder with a tokenizer."""

    def write(row: str, **more: Any) -> Path:
        folder = tmp_path / row
        build(row, **more).save_pretrained(folder)
        tokenizer.save(tokenizer.train([SENTENCE], VOCAB), folder, 64)
        return folder

    return write


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = SENTENCE.split()
    file.write_text("\n".join(" ".join(words[(a * 7 + b * b) % len(words)] for b in range(60)) for a in range(120)))
    return file
