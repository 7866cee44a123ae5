"""Contenders of `strata bench dit` on tiny models without a GPU: the same pictures, recorded failures, time limits."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.serving.diffusion.bench import contenders, one_gpu, report
from strata.serving.diffusion.bench import run as bench_run
from strata.serving.diffusion.bench.contenders import COMPILED, DIFFUSERS, NAMES, OURS
from strata.serving.diffusion.bench.models import FULL_SIZE, SMALL, PictureModel
from strata.serving.diffusion.bench.one_gpu import Clock, PictureRow, measure_model

CPU = torch.device("cpu")
TINY: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
        "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6), "in_channels": 16,
    },
    "SD3Transformer2DModel": {
        "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
        "caption_projection_dim": 32, "pooled_projection_dim": 32, "sample_size": 16,
    },
    "PixArtTransformer2DModel": {
        "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "cross_attention_dim": 32, "caption_channels": 32,
        "sample_size": 16,
    },
    "DiTTransformer2DModel": {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "sample_size": 16},
}  # fmt: skip


def tiny(model: PictureModel) -> PictureModel:
    config = {**model.config, **TINY[model.transformer]}
    return replace(model, config=config, size=128, text=model.text and 10, steps=3)


MODELS = {model.family.name: tiny(model) for model in FULL_SIZE}


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: None)


@pytest.mark.parametrize("family", ["flux", "sd3", "pixart"])
def test_contenders_sample_the_same_pictures(family: str) -> None:
    model = MODELS[family]
    transformer = model.build(CPU, torch.float32)
    outputs = [contenders.comparable(model, contenders.contender(name, model, transformer)(3, 2)) for name in (DIFFUSERS, OURS)]
    assert outputs[0].shape == (2, model.family.channels(transformer), 16, 16)
    assert not torch.allclose(outputs[0][0], outputs[0][1])  # a seed each
    assert torch.allclose(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)


def test_weights_are_shared_and_modules_are_not() -> None:
    model = MODELS["sd3"].build(CPU, torch.float32)
    copied = contenders.sharing_weights(model)
    assert copied is not model and copied.transformer_blocks[0] is not model.transformer_blocks[0]
    assert [p.data_ptr() for p in copied.parameters()] == [p.data_ptr() for p in model.parameters()]


def measured(model: PictureModel, limit_s: float = 60.0, rounds: int = 2) -> tuple[PictureRow, list[str]]:
    saved: list[str] = []
    row = measure_model(
        model, NAMES, CPU, torch.float32, rounds, Clock(limit_s), lambda row: saved.append(json.dumps(asdict(row)))
    )
    return row, saved


def test_a_row_has_every_round_of_every_contender() -> None:
    model = MODELS["sd3"]
    row, saved = measured(model)
    assert list(row.contenders) == list(NAMES) and (row.steps, row.passes, row.size) == (3, 2, 128)
    assert all(len(one.seconds) == 2 and one.trouble is None for one in row.contenders.values())
    assert len(saved) >= 3 + 6 and json.loads(saved[-1]) == asdict(row)
    assert row.parameters == sum(p.numel() for p in model.build(CPU, torch.float32).parameters())
    assert row.contenders[DIFFUSERS].error == 0.0
    error = row.contenders[OURS].error
    assert error is not None and error < 1e-4


def test_dit_pictures_pass_through_the_autoencoder_for_every_contender() -> None:
    model = MODELS["dit"]
    transformer = model.build(CPU, torch.float32)
    shapes = {contenders.contender(name, model, transformer)(1, 1).shape for name in (DIFFUSERS, OURS)}
    assert shapes == {(1, 3, 128, 128)}


def test_a_failing_contender_is_recorded_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, model: PictureModel, transformer: nn.Module) -> Callable[[int, int], Tensor]:
        if name == COMPILED:
            raise RuntimeError("no compiler\nlong trace")
        broken = name == OURS

        def run(steps: int, batch: int) -> Tensor:
            if broken and steps == model.steps:
                raise ValueError("out of memory")
            return torch.ones(1)

        return run

    monkeypatch.setattr(one_gpu, "contender", failing)
    row, _ = measured(MODELS["sd3"])
    assert row.contenders[COMPILED].trouble == "RuntimeError: no compiler" and not row.contenders[COMPILED].seconds
    assert row.contenders[OURS].trouble == "ValueError: out of memory"
    assert len(row.contenders[DIFFUSERS].seconds) == 2
    report.picture_table(asdict(row))


def test_a_model_that_cannot_be_built_is_recorded() -> None:
    broken = replace(MODELS["sd3"], config={"nonsense": 1})
    row, saved = measured(broken)
    assert row.trouble is not None and row.trouble.startswith("TypeError") and not row.contenders and len(saved) == 1


def test_nothing_starts_after_the_time_limit() -> None:
    row, _ = measured(MODELS["sd3"], limit_s=-1.0)
    assert {one.trouble for one in row.contenders.values()} == {"time limit"}
    assert not any(one.seconds for one in row.contenders.values())


def test_shallow_models_have_the_same_blocks() -> None:
    flux = FULL_SIZE[0].shallow()
    assert (flux.config["num_layers"], flux.config["num_single_layers"]) == (2, 2)
    assert {k: v for k, v in flux.config.items() if "layers" not in k} == {
        k: v for k, v in FULL_SIZE[0].config.items() if "layers" not in k
    }


@pytest.mark.parametrize(
    ("name", "billions"),
    [("FLUX.1-dev 1024px", 11.9), ("SD3-medium 1024px", 2.03), ("PixArt-alpha 1024px", 0.61), ("DiT-XL/2 512px", 0.75)],
)
def test_full_size_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    """DiT: 0.68 published; diffusers repeats the embeddings of time and class in every block."""
    (model,) = (model for model in FULL_SIZE if model.name == name)
    with torch.device("meta"):
        import diffusers

        transformer = getattr(diffusers, model.transformer)(**model.config)
    assert sum(p.numel() for p in transformer.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)
    assert model.guided == (model.family.name != "flux")


def test_the_command_needs_a_gpu_for_its_gpu_part(tmp_path: Path) -> None:
    import typer
    from typer.testing import CliRunner

    from strata.serving.diffusion.bench.command import bench_dit

    app = typer.Typer()
    app.command()(bench_dit)
    if not torch.cuda.is_available():
        found = CliRunner().invoke(app, ["--gpu", "--json", str(tmp_path / "dit.json")])
        assert found.exit_code != 0 and "no GPU" in str(found.exception)


def test_the_small_model_is_split_by_every_layout() -> None:
    from strata.planner.diffusion.layout_rules import Splittable, obstacles
    from strata.serving.diffusion.bench.layouts import LAYOUTS

    of = Splittable(SMALL.config["num_attention_heads"], SMALL.config["num_layers"], 16, SMALL.guided)  # rows of tokens
    assert not any(obstacles(layout, of) for layout in LAYOUTS)


def test_the_whole_run_writes_what_was_measured_and_notes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(device: torch.device, clock: Clock) -> Iterator[dict[str, Any]]:
        yield {"case": "SD3", "flops": 1, "trouble": None, "contenders": {"strata": {"ms": 1.0, "ratio": None}}}
        raise RuntimeError("CUDA error\ntrace")

    monkeypatch.setattr(one_gpu, "attention_rows", attention)
    monkeypatch.setattr(one_gpu, "compile_ahead", lambda *_: "compiled ahead: 1 of 4")
    target = tmp_path / "dit.json"
    broken = replace(MODELS["sd3"], name="broken", config={"nonsense": 1})
    bench_run.full_size([broken, MODELS["sd3"]], CPU, torch.float32, 1, 60.0, target)
    run = json.loads(target.read_text())
    assert run["benchmark"] == "dit" and run["command"] == "strata bench dit --gpu"
    assert run["not_run"] == ["compiled ahead: 1 of 4", "attention: RuntimeError: CUDA error"] and len(run["attention"]) == 1
    assert [row["model"] for row in run["pictures"]] == ["broken", "SD3-medium 1024px"]
    assert [list(row["contenders"]) for row in run["pictures"]] == [[], list(NAMES)]
    assert all(len(run["pictures"][1]["contenders"][name]["seconds"]) == 1 for name in NAMES)


def test_a_run_out_of_time_names_what_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu, "attention_rows", lambda *_: iter(()))
    monkeypatch.setattr(one_gpu, "compile_ahead", lambda *_: None)
    bench_run.full_size([MODELS["sd3"]], CPU, torch.float32, 1, -1.0, tmp_path / "dit.json")
    run = json.loads((tmp_path / "dit.json").read_text())
    assert run["not_run"] == ["SD3-medium 1024px: time limit"] and not run["pictures"]
