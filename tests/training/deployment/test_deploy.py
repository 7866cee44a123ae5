"""`strata export --onnx` and `--package` around the conversion: sources, files, interrupts and failed checks. The conversion
is a stand-in here: a step that runs in torch."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.training.checkpoint.export import building_prefix
from strata.training.deployment import runners

from ..conftest import SMALL
from ..faults import StandIn, strata, without_ray
from .conftest import eager

Folder = Callable[..., Path]
FEW = ("--check", "3", "--tokens", "4")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models that were converted. The written file is not read."""
    models: list[Any] = []

    def write(model: Any, shape: object, *rest: Path) -> Path:
        models.append(model)
        file = rest[-1] / "model.onnx" if rest[-1].is_dir() else rest[-1]
        file.write_bytes(b"graph")
        return file

    monkeypatch.setattr("strata.training.deployment.onnx_folder.write", write)
    monkeypatch.setattr("strata.training.deployment.package.write", write)
    monkeypatch.setattr(runners, "onnx_runner", lambda file, shape: eager(models[-1]))
    monkeypatch.setattr(runners, "package_runner", lambda file: eager(models[-1]))
    return models


@pytest.fixture
def interrupted_run(home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        StandIn.hooks = {6: (home / "runs" / "r" / "stop").touch}
        assert strata("train", "--run", "r", *SMALL, f"data.path={corpus}") == 130
        yield home / "runs" / "r"


def test_a_run_is_exported_with_its_newest_checkpoint(
    interrupted_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: list[Any]
) -> None:
    assert strata("export", "r", "--onnx", str(tmp_path / "a" / "onnx"), "--package", str(tmp_path / "r.pt2"), *FEW) == 0
    out = capsys.readouterr().out
    assert f"exported to {interrupted_run / 'export'}" in out and out.count("12 of 12") == 2
    assert "onnxruntime" in out and "AOTInductor" in out and "tokens/s" in out and "largest logit difference" in out
    assert (tmp_path / "a" / "onnx" / "model.onnx").is_file() and (tmp_path / "r.pt2").is_file()
    assert stand_in[0].dtype == torch.float32, "the run's weights are bfloat16 or float32, the export's as asked for"
    assert sorted(each.name for each in (tmp_path / "a").iterdir()) == ["onnx"], "no temporary folder"


def test_prompts_of_a_file(folder_of: Folder, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = folder_of("llama"), tmp_path / "prompts.txt"
    file.write_text("the cat sat\n\n  \non a mat\nand the dog\nran")
    words = ("export", str(folder), "--onnx", str(tmp_path / "out"), "--prompts", str(file))
    assert strata(*words, "--check", "3", "--tokens", "5") == 0
    assert "15 of 15" in capsys.readouterr().out
    for content, reason in ((b"\n \n", "has no line with text"), (b"\xff\xfe\xff", "not text in UTF-8")):
        file.write_bytes(content)
        assert strata(*words[:3], str(tmp_path / "more"), *words[4:]) != 0
        assert reason in " ".join(capsys.readouterr().err.split())
    file.write_text("text")
    (folder / "tokenizer.json").write_text("{")
    assert strata(*words[:3], str(tmp_path / "more"), *words[4:]) != 0
    assert "The tokenizer in" in capsys.readouterr().err


def test_a_check_shortens_to_the_context(
    folder_of: Folder, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("llama")
    assert strata("export", str(folder), "--onnx", str(tmp_path / "out"), "--check", "1", "--tokens", "1000") == 0
    assert "1 prompts, 63 tokens each" in capsys.readouterr().out, "one token of the prompt, and 64 positions"


def test_an_export_that_differs_is_not_written(
    folder_of: Folder, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def zero(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return torch.zeros(1, ids.shape[1], 320), past

    monkeypatch.setattr(runners, "onnx_runner", lambda file, shape: zero)
    folder, before = folder_of("llama"), sorted(tmp_path.iterdir())
    assert strata("export", str(folder), "--onnx", str(tmp_path / "out"), *FEW) == 1
    captured = capsys.readouterr()
    assert "onnxruntime differs from transformers at 12 of 12 tokens: prompt 0, token 0" in " ".join(captured.err.split())
    assert "0 of 12" in captured.out and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError("No space left (os error 28)")])
def test_an_interrupt_or_a_full_disk_leaves_nothing(
    kind: Any, folder_of: Folder, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(model: Any, shape: object, source: Path, folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(b"half")
        raise kind

    monkeypatch.setattr("strata.training.deployment.onnx_folder.write", interrupted)
    folder, before = folder_of("llama"), sorted(tmp_path.iterdir())
    assert strata("export", str(folder), "--onnx", str(tmp_path / "out"), *FEW) == (130 if kind is KeyboardInterrupt else 1)
    captured = capsys.readouterr()
    assert ("interrupted; nothing unfinished" in captured.out) == (kind is KeyboardInterrupt)
    assert ("No space left" in captured.err) == (kind is not KeyboardInterrupt)
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_kill_left_is_removed(folder_of: Folder, home: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive, others = (tmp_path / f"{building_prefix(target, pid)}x" for pid in (ended.pid, os.getppid(), ended.pid))
    others = tmp_path / others.name.replace(socket.gethostname(), "another-host")
    for leftover in (dead, alive, others):
        leftover.mkdir()
        (leftover / "model.onnx").touch()
    assert strata("export", str(folder_of("llama")), "--onnx", str(target), *FEW) == 0
    assert (dead.exists(), alive.exists(), others.exists()) == (False, True, True)


def test_incomplete_weights(folder_of: Folder, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder_of("llama") / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file, {"format": "pt"})
    assert strata("export", str(file.parent), "--onnx", str(tmp_path / "out")) == 1
    assert "model.layers.1.mlp.up_proj.weight missing" in " ".join(capsys.readouterr().err.split())
    file.write_bytes(b"damaged")
    assert strata("export", str(file.parent), "--onnx", str(tmp_path / "out")) == 1
    assert "cannot be loaded" in capsys.readouterr().err


def test_without_tensorrt_the_onnx_model_stays(
    folder_of: Folder, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    words = ("--onnx", str(tmp_path / "out"), "--tensorrt", str(tmp_path / "engine"), *FEW)
    assert strata("export", str(folder_of("llama")), *words) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "pip install tensorrt" in text and "The ONNX model is ready" in text
    assert (tmp_path / "out" / "model.onnx").is_file() and not (tmp_path / "engine").exists()


def test_the_command_line_starts_without_torch() -> None:
    probe = "import sys, strata.training.commands; assert not {'torch', 'onnx', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
