"""Requests that `strata export --onnx` and `--package` refuse before any work, with the reason and the fix."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..faults import strata

Folder = Callable[..., Path]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("strata.training.deployment.model_folder.load", started)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert strata("export", *map(str, words)) != 0
    captured = capsys.readouterr()
    text = " ".join((captured.out + captured.err).split())
    assert "Traceback" not in text and "AssertionError" not in text
    return text


def test_sources(capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, folder_of: Folder) -> None:
    out = tmp_path / "out"
    assert "There is no run 'nothing'" in refused(capsys, "nothing", "--onnx", out)
    assert "There is no folder" in refused(capsys, tmp_path / "nowhere", "--onnx", out)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json" in refused(capsys, empty, "--onnx", out)
    folder = folder_of("llama")
    assert "--to is for runs" in refused(capsys, folder, "--to", tmp_path / "new", "--onnx", out)
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refused(capsys, folder, "--onnx", out)
    assert not out.exists()


def test_a_folder_alone_is_no_run(capsys: pytest.CaptureFixture[str], home: Path, folder_of: Folder) -> None:
    assert "There is no run" in refused(capsys, folder_of("llama"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}, "rope_type=dynamic"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not BertLMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not LlamaForCausalLM"),
        ({"model_type": "t5"}, "t5 is not a decoder"),
        ({"model_type": "a-new-one"}, "transformers cannot read its config.json"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "gemma3"}, "multimodal"),
    ],
)
def test_models(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, folder_of: Folder, change: dict[str, Any], reason: str
) -> None:
    folder = folder_of("llama")
    file = folder / "config.json"
    values = json.loads(file.read_text())
    if "model_type" in change:
        values = {"num_hidden_layers": 2}
    file.write_text(json.dumps(values | change))
    text = refused(capsys, folder, "--onnx", tmp_path / "out")
    assert reason in text and not (tmp_path / "out").exists()


def test_targets(capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, folder_of: Folder) -> None:
    folder = folder_of("llama")
    full, file = tmp_path / "full", tmp_path / "model.pt2"
    full.mkdir()
    (full / "note").touch()
    file.touch()
    assert "exists and is not an empty folder" in refused(capsys, folder, "--onnx", full)
    assert "exists and is not an empty folder" in refused(capsys, folder, "--onnx", file)
    assert f"{file} exists already" in refused(capsys, folder, "--package", file)
    assert "does not end with .pt2" in refused(capsys, folder, "--package", tmp_path / "model")
    assert "Not a directory" in refused(capsys, folder, "--onnx", file / "below")
    assert "--onnx DIR" in refused(capsys, folder, "--tensorrt", tmp_path / "engine")
    assert "--onnx DIR" in refused(capsys, folder, "--tensorrt", tmp_path / "engine", "--package", tmp_path / "new.pt2")


def test_a_target_without_permission(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert "Permission denied" in refused(capsys, folder, "--onnx", tmp_path / "out")


def test_options(capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, folder_of: Folder) -> None:
    folder, out, file = folder_of("llama"), tmp_path / "out", tmp_path / "new.pt2"
    assert "Use one of float32, float16, bfloat16" in refused(capsys, folder, "--onnx", out, "--dtype", "int8")
    assert "does not compute in bfloat16" in refused(capsys, folder, "--onnx", out, "--dtype", "bfloat16")
    assert "is not a file" in refused(capsys, folder, "--onnx", out, "--prompts", tmp_path / "none.txt")
    assert "Use --device cpu, cuda" in refused(capsys, folder, "--package", file, "--device", "toaster")
    assert "--device meta is not supported" in refused(capsys, folder, "--package", file, "--device", "meta")


def test_missing_software(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama")
    real = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, *more, **options: None if name == "g++" else real(name, *more, **options))
    monkeypatch.delenv("CXX", raising=False)
    assert "needs a C++ compiler" in refused(capsys, folder, "--package", tmp_path / "new.pt2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "onnxruntime" else object())
    assert "pip install onnxruntime" in refused(capsys, folder, "--onnx", tmp_path / "out")


def test_the_rows_of_these_tests_are_exportable(folder_of: Folder) -> None:
    from strata.training.deployment.model_folder import require_exportable

    for row in ("llama", "mistral", "qwen3", "gemma3-untied", "gpt_oss"):
        require_exportable(folder_of(row))
