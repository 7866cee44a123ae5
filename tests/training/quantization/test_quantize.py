"""`strata quantize`: the folder that it writes, as transformers reads it, compared with the rounding in memory; and refusals."""

import errno
import json
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.training.checkpoint.export import building_prefix
from strata.training.quantization import folder as folders
from strata.training.quantization import layers, model_folder, quality, rounding, rows
from strata.training.quantization.command import quantize as command
from strata.training.quantization.formats import FORMATS
from strata.training.quantization.quantize import Request, quantize
from strata.training.quantization.source import resolve

from .conftest import VOCAB

Folder = Callable[..., Path]
CPU = torch.device("cpu")
QUIET = Console(quiet=True)
APP = typer.Typer()
APP.command()(command)


def request(format: str, data: Path | None, **more: Any) -> Request:
    values = {"to": None, "data": data, "samples": 16, "group_size": None, "head": False, "seed": 0, "device": "cpu"} | more
    return Request(FORMATS[format], **values)


@pytest.mark.parametrize("head", [False, True], ids=["", "head"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_written_folder_computes_what_was_rounded(
    folder_of: Folder, text: Path, format: str, head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers and compressed-tensors read the folder; the reference is the model in memory with activations rounded here."""
    held: list[Any] = []
    monkeypatch.setattr(folders, "write", spying(folders.write, held))
    source = folder_of("llama", tie_word_embeddings=False)
    written = quantize(resolve(str(source)), request(format, text, head=head), QUIET)
    assert written == source.with_name(f"llama-{format}")
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    reference = reference_of(source, held[0], format)
    found = model_folder.load(written, CPU, quantized=True)
    torch.testing.assert_close(found(ids).logits, reference(ids).logits, atol=0.02, rtol=0.02)

    values = json.loads((written / "quantization.json").read_text())
    assert values["format"] == format and values["layers"]["left"] == ([] if head else ["lm_head"])
    assert values["layers"]["quantized"] == 14 + head and values["size_ratio"] < 0.7
    assert values["after"]["weights_bytes"] == (written / "model.safetensors").stat().st_size
    config = json.loads((written / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (written / "tokenizer.json").is_file()
    assert not list(source.parent.glob(".llama*"))


def spying(write: Callable[..., None], held: list[Any]) -> Callable[..., None]:
    def written(source: Path, target: Path, plan: Any, stored: Any, changed: Any, dtype: torch.dtype) -> None:
        held.append((stored, {name: tensor.clone() for name, tensor in changed.items()}))
        write(source, target, plan, stored, changed, dtype)

    return written


def reference_of(source: Path, held: Any, format: str) -> Any:
    """The source's model with weights dequantized by hand, and activations of 8-bit formats rounded by hand."""
    stored, changed = held
    model = model_folder.load(source, CPU)
    for name, parameter in model.named_parameters():
        parameter.data = changed.get(name, parameter.data).to(torch.bfloat16).float()
    for name, tensors in stored.items():
        module = model.get_submodule(name)
        scale = tensors["weight_scale"].float()
        if "weight_packed" in tensors:
            values = unpacked(tensors["weight_packed"], 1)
            zero = unpacked(tensors["weight_zero_point"], 0) if "weight_zero_point" in tensors else torch.zeros_like(scale)
            size = values.shape[1] // scale.shape[1]
            module.weight.data = (values - zero.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)
        else:
            module.weight.data = tensors["weight"].float() * scale
            module.register_forward_pre_hook(rounded_to_8_bits(format))
    return model


def unpacked(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight values of 4 bits in each int32, the lowest first, stored with 8 added."""
    parts = torch.stack([(packed >> (4 * place)) & 15 for place in range(8)], dim + 1)
    return parts.flatten(dim, dim + 1).float() - 8


def rounded_to_8_bits(format: str) -> Callable[..., Any]:
    def rounded(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        largest = inputs[0].abs().amax(-1, keepdim=True)
        if format == "w8a8-fp8":
            scale = largest / torch.finfo(torch.float8_e4m3fn).max
            return ((inputs[0] / scale).to(torch.float8_e4m3fn).float() * scale,)
        scale = largest / 127.5
        return ((inputs[0] / scale).round().clamp(-128, 127) * scale,)

    return rounded


@pytest.mark.rotation
@pytest.mark.parametrize("row", ["llama-biases", "qwen2", "qwen3", "gemma3", "olmo2"])
def test_families(folder_of: Folder, text: Path, row: str) -> None:
    for format in ("w4a16-awq", "w8a8-int8"):
        written = quantize(resolve(str(folder_of(row))), request(format, text, samples=8), QUIET)
        values = json.loads((written / "quantization.json").read_text())
        assert values["layers"]["quantized"] == 14
        assert abs(values["perplexity_change"]) < (0.3 if format == "w4a16-awq" else 0.05), values


@pytest.mark.rotation
def test_the_same_seed_writes_the_same_folder(folder_of: Folder, text: Path, tmp_path: Path) -> None:
    source = resolve(str(folder_of("llama")))
    seeds = [0, 0, 1]
    written = [quantize(source, request("w4a16-gptq", text, to=tmp_path / f"{n}", seed=s), QUIET) for n, s in enumerate(seeds)]
    first, second, third = ((each / "model.safetensors").read_bytes() for each in written)
    assert first == second != third


def test_layers_that_no_group_divides_stay(folder_of: Folder, text: Path) -> None:
    source = folder_of("llama", intermediate_size=72)  # down_proj has 72 inputs
    written = quantize(resolve(str(source)), request("w4a16-gptq", text, samples=4), QUIET)
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    downs = [f"model.layers.{number}.mlp.down_proj" for number in range(2)]
    assert [name for name in config["ignore"] if name != "lm_head"] == downs
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    model = model_folder.load(written, CPU, quantized=True)
    assert not hasattr(model.get_submodule(downs[0]), "quantization_scheme")
    odd = folder_of("qwen2", hidden_size=40, intermediate_size=72, num_attention_heads=2, head_dim=20, num_key_value_heads=2)
    with pytest.raises(UserError, match="No group size fits"):
        quantize(resolve(str(odd)), request("w4a16-gptq", text), QUIET)


def test_output_layers_that_cannot_be_quantized(folder_of: Folder, text: Path) -> None:
    with pytest.raises(UserError, match="shares its weights with the input embedding"):
        quantize(resolve(str(folder_of("llama", tie_word_embeddings=True))), request("w8a8-fp8", text, head=True), QUIET)
    odd = folder_of("llama", tie_word_embeddings=False, hidden_size=96, intermediate_size=128, num_attention_heads=3, head_dim=32)
    with pytest.raises(UserError, match="groups of 64 do not divide the 96 inputs of the output layer"):
        quantize(resolve(str(odd)), request("w4a16-gptq", text, group_size=64, head=True), QUIET)


def test_several_files_and_an_index(folder_of: Folder, text: Path) -> None:
    source = folder_of("llama")
    model_folder.load(source, CPU).save_pretrained(source, max_shard_size="100KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    written = quantize(resolve(str(source)), request("w8a8-fp8", text), QUIET)
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "model.layers.0.mlp.up_proj.weight_scale" in index["weight_map"]
    model_folder.load(written, CPU, quantized=True)


def refused(*words: object) -> UserError:
    result = CliRunner().invoke(APP, [*map(str, words)])
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    return result.exception


def test_refusals(folder_of: Folder, text: Path, tmp_path: Path) -> None:
    folder = folder_of("llama")
    assert "not a format" in refused(folder, "--format", "w3a16").cause
    assert "--group-size 48" in refused(folder, "--group-size", 48).cause
    assert "There is no run 'nothing'" in refused("nothing").cause
    assert "There is no folder" in refused(tmp_path / "nowhere").cause
    assert "--data" in refused(folder).fix
    assert "is not a file" in refused(folder, "--data", tmp_path / "no.txt").cause
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert "too little text" in refused(folder, "--data", short).cause
    assert "--device" in refused(folder, "--data", text, "--device", "tpu").cause
    assert "Leave it out" in refused(folder, "--data", text, "--format", "w8a8-int8", "--group-size", 32).fix
    target = tmp_path / "there"
    target.mkdir()
    assert "exists already" in refused(folder, "--data", text, "--to", target).cause
    assert "mixture of experts" in refused(folder_of("qwen3_moe"), "--data", text).cause
    written = quantize(resolve(str(folder)), request("w8a8-fp8", text), QUIET)
    assert "quantized already (compressed-tensors)" in refused(written, "--data", text).cause
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be loaded" in refused(folder, "--data", text, "--to", tmp_path / "new").cause


@pytest.mark.rotation
def test_weights_that_are_not_finite_are_refused(folder_of: Folder, text: Path, tmp_path: Path) -> None:
    folder = folder_of("llama")
    model = model_folder.load(folder, CPU)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    for format in FORMATS:
        assert "Layer 1 cannot be calibrated" in refused(folder, "--data", text, "--format", format).cause
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".llama", "llama-"))] == []


def test_a_small_disk_is_refused_first(folder_of: Folder, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("llama")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    monkeypatch.setattr(rounding.Rounding, "run", None)
    assert "GB free" in refused(folder, "--data", text).cause


def test_a_disk_that_fills_leaves_nothing(folder_of: Folder, text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class RustError(Exception):
        """As safetensors raises."""

    def full(*_: object) -> None:
        raise RustError("I/O error: No space left on device (os error 28)")

    source = resolve(str(folder_of("llama")))
    monkeypatch.setattr(folders, "save_file", full)
    with pytest.raises(OSError, match="llama-w8a8-fp8") as raised:
        quantize(source, request("w8a8-fp8", text), QUIET)
    left = {path.name for path in tmp_path.iterdir()} - {".strata"}  # the cache of tokens
    assert raised.value.errno == errno.ENOSPC and left == {"llama"}


SLOW = """
import sys, time
from pathlib import Path
from rich.console import Console
from strata.training.quantization import quantize, quality
from strata.training.quantization.formats import FORMATS
from strata.training.quantization.source import resolve
def wait(*_):
    print("written", flush=True)
    time.sleep(600)
quality.agreement = wait
wanted = quantize.Request(FORMATS["w8a8-fp8"], None, Path(sys.argv[2]), 4, None, False, 0, "cpu")
quantize.quantize(resolve(sys.argv[1]), wanted, Console(quiet=True))
"""


@pytest.mark.slow
@pytest.mark.rotation
def test_kills_leave_nothing_that_looks_complete(folder_of: Folder, text: Path, tmp_path: Path) -> None:
    folder = folder_of("llama")
    target = tmp_path / "llama-w8a8-fp8"
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen([sys.executable, "-c", SLOW, folder, text], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "written\n"
            process.send_signal(number)
            process.wait(timeout=60)
        leftovers = list(tmp_path.glob(building_prefix(target, process.pid) + "*"))
        assert not target.exists() and len(leftovers) == (1 if number == signal.SIGKILL else 0)
    assert quantize(resolve(str(folder)), request("w8a8-fp8", text), QUIET) == target
    assert not list(tmp_path.glob(".llama*"))


def test_rows_of_a_file_are_held_out_from_its_end(tmp_path: Path) -> None:
    class Words:
        eos_token_id = None

        def __call__(self, text: str, **_: object) -> Any:
            return type("Encoded", (), {"input_ids": [int(word) for word in text.split()]})

    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(map(str, range(2000))))
    found = rows.of_file(file, Words(), 16, samples=8, seed=0)
    assert found.held_out.min() >= 1800 > found.calibration.max()
    assert found.calibration.shape == (8, 17) and len(found.held_out) == 12
    again = rows.of_file(file, Words(), 16, samples=8, seed=0)
    assert (found.calibration == again.calibration).all()


def test_agreement_and_perplexity(folder_of: Folder, text: Path) -> None:
    model = model_folder.load(folder_of("llama"), CPU)
    held_out = torch.randint(0, VOCAB, (4, 25), generator=torch.Generator().manual_seed(0)).numpy()
    reference = quality.greedy(model, held_out)
    assert reference.ids.shape == (4, 24) and reference.tokens == 4 * 12
    assert quality.agreement(model, reference, lambda: None) == quality.Agreement(1.0, 1.0)
    model.lm_head.weight.data.normal_()
    assert quality.agreement(model, reference, lambda: None).tokens < 0.5
    model.lm_head.weight.data.zero_()
    assert quality.perplexity(model, held_out, lambda: None) == pytest.approx(VOCAB)


def test_plans_leave_the_head_and_embeddings(folder_of: Folder) -> None:
    plan = layers.plan(model_folder.load(folder_of("llama", tie_word_embeddings=False), CPU), FORMATS["w4a16-awq"], None, False)
    assert plan.left == ("lm_head",) and plan.group_size == 32 and len(plan.quantized) == 14
