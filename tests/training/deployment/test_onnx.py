"""ONNX models in onnxruntime: greedy tokens of 20 prompts, padded batches, names and shapes, and weights beside the file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from support import ROOT

from strata.training.deployment import model_folder, onnx_folder, prompts, runners
from strata.training.deployment.check import compare
from strata.training.deployment.step import cache_shape

from ..faults import strata
from .conftest import padded

Folder = Callable[..., Path]


def documented_program(folder: Path) -> dict[str, Any]:
    """Variables of the program in the guide, which continues the prompt 1, 42, 7."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    variables: dict[str, Any] = {}
    exec(code.replace('"onnx/model.onnx"', repr(str(folder / "model.onnx"))), variables)
    return variables


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("llama-3", marks=pytest.mark.slow),
        *(pytest.param(row, marks=pytest.mark.rotation) for row in ("qwen3", "mistral", "gemma3-untied", "mixtral", "gpt_oss")),
    ],
)
def test_greedy_tokens_of_twenty_prompts(
    row: str, folder_of: Folder, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = folder_of(row), tmp_path / "onnx"
    assert strata("export", str(folder), "--onnx", str(target), "--tokens", "8") == 0
    assert "160 of 160" in capsys.readouterr().out
    names = {"model.onnx", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in target.iterdir()} >= names
    assert str(Path(onnx.__file__).parents[1]).encode() not in (target / "model.onnx").read_bytes(), "paths of this machine"

    model = model_folder.load(folder, "float32", "cpu")
    shape = cache_shape(model)
    padded(model, runners.onnx_runner(target / "model.onnx", shape), shape)
    session = onnxruntime.InferenceSession(target / "model.onnx", providers=["CPUExecutionProvider"])
    heads, width = shape.heads_and_widths[0]
    past = ["batch_size", heads, "past_sequence_length", width]
    assert {each.name: each.shape for each in session.get_inputs()} == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        "position_ids": ["batch_size", "sequence_length"],
    } | {f"past_key_values.{layer}.{part}": past for layer in range(2) for part in ("key", "value")}
    outputs = [each.name for each in session.get_outputs()]
    expected = model.generate(
        torch.tensor([[1, 42, 7]]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert documented_program(target)["answer"] == expected[0, 3:].tolist()
    assert outputs == ["logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"]


@pytest.mark.rotation
def test_weights_beside_the_file_in_float16(folder_of: Folder, tmp_path: Path) -> None:
    source, target = folder_of("llama", num_hidden_layers=1), tmp_path / "out"
    target.mkdir()
    model = model_folder.load(source, "float16", "cpu")
    shape = cache_shape(model)
    file = onnx_folder.write(model, shape, source, target, most_inside=0)
    weights = 2 * sum(weight.numel() for weight in model.parameters())
    assert (target / "model.onnx.data").stat().st_size > 0.9 * weights
    ids = prompts.from_vocabulary(model.config, 20, 32)
    result = compare(model, runners.onnx_runner(file, shape), shape, ids, 8, lambda: None)
    assert result.equal > 150 and not result.differences and 0 < result.largest_difference < 0.5
