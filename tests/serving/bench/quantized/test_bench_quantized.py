"""`strata bench quantized`: random weights, configurations, the report, and real engines on the CPU."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from strata.platform import benchmark_record
from strata.platform.errors import UserError
from strata.serving.bench.quantized import model, run, worker
from strata.serving.bench.quantized.command import bench_quantized
from strata.serving.bench.quantized.contenders import CONTENDERS, Contender, named
from strata.serving.bench.quantized.measure import Load, Order, arguments
from strata.serving.bench.quantized.model import Shape
from strata.serving.bench.quantized.run import Measured
from strata.training.quantization.formats import FORMATS

SHAPE = Shape(layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512)
LOAD = Load((1, 4), prompt_tokens=32, output_tokens=8, rounds=2, eager=True, head=False)


def measured(rate: float) -> Measured:
    return Measured(9.0, {1: (rate, rate, 9 * rate), 4: (3 * rate,)}, ("AnyKernel",))


def test_ratios_of_medians() -> None:
    outcomes = {"bf16": 100.0, "w4a16": 180.0, "w4a16-marlin": 200.0, "w4a16-strata": 220.0}
    found: dict[str, run.Outcome] = {name: measured(rate) for name, rate in outcomes.items()}
    record = run.as_json(SHAPE, LOAD, found | {"fp8": "failed with code 1"})
    assert record["benchmark"] == "quantized" and record["shape"]["hidden"] == 256
    ours = record["contenders"]["w4a16-strata"]
    assert ours["decode_tokens_per_s"] == {1: 220.0, 4: 660.0}
    assert ours["ratio_to_bf16"] == pytest.approx({1: 2.2, 4: 2.2})
    assert ours["ratio_to_best_of_vllm"] == pytest.approx({1: 1.1, 4: 1.1})
    assert record["contenders"]["w4a16"]["ratio_to_best_of_vllm"] is None
    assert record["contenders"]["fp8"] == "failed with code 1"
    console = Console(file=StringIO(), width=80)
    console.print(run.table(record))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split() for line in text.splitlines() if "strata" in line] == [
        ["w4a16-strata", "1", "220", "2.20", "1.10"],
        ["w4a16-strata", "4", "660", "2.20", "1.10"],
    ]


def test_without_a_base_there_are_no_ratios() -> None:
    record = run.as_json(SHAPE, LOAD, {"bf16": "failed", "w4a16-strata": measured(1.0)})
    ours = record["contenders"]["w4a16-strata"]
    assert ours["ratio_to_bf16"] is None and ours["ratio_to_best_of_vllm"] is None
    Console(file=StringIO()).print(run.table(record))


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("preset", "name"), [("W4A16", "w4a16-gptq"), ("FP8_DYNAMIC", "w8a8-fp8")])
def test_configuration_is_that_of_quantized_folders(preset: str, name: str, head: bool, tmp_path: Path) -> None:
    model.write(tmp_path, SHAPE, preset, head, 64)
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme: Any = FORMATS[name].scheme(128, "lm_head" if head else None)
    group = quantization["config_groups"]["group_0"]
    assert group["weights"] == scheme.model_dump(mode="json")["weights"]
    assert group["input_activations"] == scheme.model_dump(mode="json")["input_activations"]
    assert group["targets"] == scheme.targets
    assert quantization["format"] == group["format"] and quantization["ignore"] == ([] if head else ["lm_head"])


def test_random_weights_have_one_deviation_in_every_format() -> None:
    packed = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int32), requires_grad=False)
    narrow = torch.nn.Parameter(torch.zeros(64, 256, dtype=torch.float8_e4m3fn).t(), requires_grad=False)
    four = torch.nn.ParameterDict({"weight_packed": packed, "weight_scale": torch.zeros(64, 4)})
    eight = torch.nn.ParameterDict({"weight": narrow, "weight_scale": torch.zeros(256, 1)})
    whole = torch.nn.ModuleDict({"four": four, "eight": eight, "linear": torch.nn.Linear(64, 256), "norm": torch.nn.RMSNorm(64)})
    addresses = [parameter.data_ptr() for parameter in whole.parameters()]
    worker.fill(whole)
    assert [parameter.data_ptr() for parameter in whole.parameters()] == addresses
    shifts = torch.arange(0, 32, 4)
    codes = (packed.data[..., None] >> shifts & 15) - 8
    assert set(codes.unique().tolist()) == set(range(-8, 8))
    weights = (codes * four["weight_scale"][0, 0], narrow.float() * eight["weight_scale"][0], whole["linear"].weight)
    for weight in weights:
        assert float(weight.detach().float().std()) == pytest.approx(worker.STD, rel=0.05)
    assert bool((whole["norm"].weight == 1).all())


def test_orders_survive_the_command_line() -> None:
    order = Order("fp8", SHAPE, LOAD, "/folder", "/result.json")
    assert Order.of(order.as_json()) == order


def test_graphs_are_captured_for_the_measured_sizes_only() -> None:
    compiled = Load((16, 1), 128, 128, 1, eager=False, head=True)
    assert arguments("/folder", compiled, named("bf16"))["compilation_config"] == {"cudagraph_capture_sizes": [1, 16]}
    assert "compilation_config" not in arguments("/folder", LOAD, named("fp8-served"))
    assert arguments("/folder", compiled, named("bf16"))["max_model_len"] == 257


def test_our_attention_is_selected_by_arguments() -> None:
    ours = arguments("/folder", Load((16, 1), 128, 128, 1, eager=False, head=True), named("fp8-served"))
    assert (ours["attention_backend"], ours["kv_cache_dtype"]) == ("CUSTOM", "fp8")
    assert ours["compilation_config"] == {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 16]}
    assert named("fp8-served").environment == {"STRATA_VLLM_KERNELS": "attention,flash_prefill"}


def test_our_kernel_excludes_those_of_vllm() -> None:
    ours, marlin = (named(name).environment for name in ("w4a16-strata", "w4a16-marlin"))
    assert ours["STRATA_VLLM_KERNELS"] == "w4a16_linear" and "MarlinLinearKernel" in ours["VLLM_DISABLED_KERNELS"]
    assert "MarlinLinearKernel" not in marlin["VLLM_DISABLED_KERNELS"] and "STRATA_VLLM_KERNELS" not in marlin


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--contenders", "bf16,int3"], "int3"),
        (["--concurrency", "1,x"], "not a list"),
        (["--hidden", "200"], "multiple of 128"),
        (["--heads", "24"], "do not divide"),
    ],
)
def test_bad_input_is_refused(words: list[str], reason: str) -> None:
    app = typer.Typer()
    app.command()(bench_quantized)
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, UserError) and reason in refused.exception.cause


@pytest.mark.rotation
@pytest.mark.timeout(600)
def test_engines_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.setattr(benchmark_record, "gpus", lambda: [])
    console = Console(file=StringIO(), width=100)
    ended = run.bench([CONTENDERS[name] for name in ("bf16", "w4a16", "w4a16-strata")], SHAPE, LOAD, tmp_path / "q.json", console)
    assert ended, console.file.getvalue()  # type: ignore[attr-defined]
    found = json.loads((tmp_path / "q.json").read_text())["contenders"]
    assert found["w4a16-strata"] == "skipped: its kernel needs an NVIDIA GPU"
    assert found["w4a16"]["kernels"] == ["CPUWNA16LinearKernel"] and found["bf16"]["kernels"] == []
    assert all(rate > 0 for rate in found["w4a16"]["decode_tokens_per_s"].values())


@pytest.mark.slow
def test_a_failed_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    console = Console(file=StringIO(), width=100)
    assert not run.bench([Contender("unknown", None)], SHAPE, LOAD, tmp_path / "q.json", console)
    outcome = json.loads((tmp_path / "q.json").read_text())["contenders"]["unknown"]
    assert outcome.startswith("failed with code 1; see ") and "which is none" in outcome
