"""Tiny model folders of several families, and runners of their steps without an export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import ROWS
from torch import Tensor

from strata.training.data import tokenizer
from strata.training.deployment.runners import Runner
from strata.training.deployment.step import DecoderStep, inputs

VOCAB = 320
CONTEXT = 64
SENTENCE = "the cat sat on a mat and the dog ran to its house where rain fell "


def build(row: str, **more: Any) -> Any:
    """A model with random weights that are large enough for different tokens after different prompts."""
    torch.manual_seed(0)
    tiny = ROWS[row]
    kind = getattr(transformers, tiny.architecture)
    config = kind.config_class(**tiny.config | {"num_hidden_layers": 2, "vocab_size": VOCAB} | more)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3)
    return model


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Hugging Face folder with a tokenizer."""

    def write(row: str, **more: Any) -> Path:
        folder = tmp_path / row
        build(row, **more).save_pretrained(folder)
        tokenizer.save(tokenizer.train([SENTENCE], VOCAB), folder, CONTEXT)
        return folder

    return write


def eager(model: Any) -> Runner:
    step = DecoderStep(model)

    def run(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad():
            logits, present = step(*inputs(ids, mask, past))
        return logits, present

    return run


def padded(model: Any, run: Runner, shape: Any, device: str = "cpu") -> None:
    """Asserts that rows of a left-padded batch have the logits of each row alone, in the prompt and in the next step."""
    rows = [[5, 9, 30, 7, 77, 21, 64, 3, 11, 50], [40, 8, 61], [17]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    first, past = run(ids, mask, shape.past(len(rows), 0, device))
    following = torch.tensor([[12], [34], [56]], device=device)
    second, _ = run(following, torch.cat([mask, torch.ones_like(following)], 1), past)
    for number, row in enumerate(rows):
        alone = torch.tensor([[*row, int(following[number])]], device=device)
        with torch.no_grad():
            expected = model(alone).logits[0]
        torch.testing.assert_close(first[number, width - len(row) :], expected[:-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(second[number, 0], expected[-1], atol=1e-4, rtol=1e-4)
