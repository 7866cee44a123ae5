"""Sampling cost of diffusion transformers: FLOPs, communication, memory, ranking, and the comparison with xDiT."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from strata.planner.collectives.cost import cost, links
from strata.planner.collectives.patterns import Place
from strata.planner.diffusion import cost as model
from strata.planner.diffusion.catalogue import PictureShape, Request, picture_model, picture_models, published_parameters
from strata.planner.diffusion.command import plan_dit
from strata.planner.diffusion.cost import SamplingPlan, attention_rate, plan_sampling
from strata.planner.diffusion.layout_rules import WARM_UP, PictureLayout
from strata.planner.diffusion.validate import errors, published_rows
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

H100, NDR = hardware.gpu("h100"), hardware.fabric("ndr-400")
FLUX, SD3 = picture_model("flux"), picture_model("sd3")
FLUX_1024, SD3_1024 = Request(1024, 1024, 28), Request(1024, 1024, 28)


def planned(shape: PictureShape = FLUX, request: Request = FLUX_1024, gpu: Any = H100, **degrees: int) -> SamplingPlan:
    return plan_sampling(shape, request, PictureLayout(**degrees), gpu, NDR)


@pytest.mark.parametrize("shape", picture_models(), ids=lambda shape: shape.name)
def test_parameters_are_those_that_the_authors_publish(shape: PictureShape) -> None:
    """The blocks alone: embeddings and refiners of text are a few percent."""
    assert shape.parameters / 1e9 == pytest.approx(published_parameters(shape.name), rel=0.05)
    assert shape.hidden % shape.heads == 0


def test_tokens_of_pictures_and_videos() -> None:
    assert FLUX_1024.tokens == 4096 and Request(512, 256, 1).tokens == 512
    assert Request(1280, 720, 50, frames=129).tokens == 80 * 45 * 33
    for wrong in (Request(1000, 1024, 1), Request(1024, 0, 1), Request(1024, 1024, 1, frames=4)):
        with pytest.raises(UserError):
            wrong.check()


def test_a_step_on_one_gpu_is_its_flops_and_bytes() -> None:
    parts = planned().parts
    tokens, h = 4096 + 512, 3072
    matrix = H100.flops["bf16"] * H100.reachable * H100.sustained
    least = 57 * 2 * tokens * 12 * h * h / matrix
    assert least < parts.products < 1.25 * least  # tiles are not filled
    assert parts.attention == pytest.approx(57 * 4 * tokens**2 * h / attention_rate(H100, "flash-3"))
    assert parts.memory == pytest.approx(57 * tokens * 22 * h * 2 / (H100.bandwidth * model.STREAMED))
    assert parts.communication == 0.0 and parts.bound == "matrix products"
    plan = planned()
    assert plan.latency_s == pytest.approx(28 * parts.total) and plan.efficiency == pytest.approx(1.0)


def test_guidance_in_two_passes_doubles_the_work() -> None:
    one, two = planned(SD3, replace(SD3_1024, guided=False)).parts, planned(SD3, SD3_1024).parts
    assert two.attention == pytest.approx(2 * one.attention) and two.memory == pytest.approx(2 * one.memory)
    split = planned(SD3, SD3_1024, cfg=2)
    assert split.parts.attention == pytest.approx(one.attention)
    size = 2 * 4096 * 4 * 16 * 4
    assert split.parts.communication == pytest.approx(cost("all_gather", size, Place(2), links(H100, NDR, launch=0.0)).seconds)


def test_ulysses_adds_two_all_to_alls_per_block() -> None:
    alone, split = planned().parts, planned(ulysses=4).parts
    assert split.attention == pytest.approx(alone.attention / 4)
    ways = links(H100, NDR, launch=0.0)
    size = 1152 * 3072 * 2
    both = sum(cost("all_to_all", values, Place(4), ways).seconds for values in (3 * size, size))
    assert split.communication == pytest.approx(57 * both)


def test_a_ring_hides_its_sends_behind_attention_if_it_can() -> None:
    assert planned(FLUX, Request(2048, 2048, 28), ring=4).parts.communication == 0.0
    slow = replace(H100, link=H100.link / 100)
    exposed = planned(FLUX, FLUX_1024, slow, ring=4).parts
    send = cost("send", 2 * 1152 * 3072 * 2, Place(1), links(slow, NDR, launch=0.0)).seconds
    assert exposed.communication == pytest.approx(57 * 3 * (send - exposed.attention / 57 / 4))
    assert exposed.bound == "communication"


def test_a_ring_pays_for_merging_its_parts() -> None:
    ring, ulysses = planned(ring=4).parts, planned(ulysses=4).parts
    assert ring.launch - ulysses.launch == pytest.approx(57 * 3 * model.MERGE_KERNELS * model.LAUNCH_S)
    assert ring.memory / ulysses.memory == pytest.approx((22 + 3 * model.MERGE) / 22)


def test_pipefusion_runs_its_exact_steps_in_sequence() -> None:
    alone, split = planned(), planned(pipefusion=3)
    assert split.parts.attention == pytest.approx(alone.parts.attention / 3, rel=1e-3)  # 57 blocks: 19 per stage
    send = cost("send", 4608 * 3072 * 2, Place(1), links(H100, NDR, launch=0.0)).seconds
    fill = 2 * split.parts.total / 3
    exact = alone.parts.compute + 2 * send
    assert split.latency_s == pytest.approx(WARM_UP * exact + (28 - WARM_UP) * split.parts.total + fill)
    only_exact = plan_sampling(FLUX, Request(1024, 1024, 2), PictureLayout(pipefusion=3), H100, NDR)
    assert only_exact.latency_s == pytest.approx(2 * exact)


def test_uneven_stages_wait_for_the_longest() -> None:
    assert planned(pipefusion=4).parts.attention == pytest.approx(planned().parts.attention * 15 / 57)


def test_memory() -> None:
    alone = planned()
    weights = 2 * (FLUX.parameters + 4.88e9)
    assert alone.memory == pytest.approx(weights + 4608 * 3072 * 2 * model.LIVE + model.RUNTIME_BYTES) and alone.fits
    assert planned(ulysses=4).memory < alone.memory
    piped = planned(pipefusion=3)
    stale = 2 * 4608 * 3072 * 2 * 19
    activations = 1536 * 3072 * 2 * model.LIVE
    assert piped.memory == pytest.approx(weights - 2 * FLUX.parameters * 2 / 3 + activations + stale + model.RUNTIME_BYTES)
    assert not planned(gpu=replace(H100, memory=alone.memory - 1)).fits


def test_flash_attention_2_on_hopper_has_a_ceiling_of_its_own() -> None:
    assert attention_rate(H100, "flash-3") == pytest.approx(0.6 * 989.4e12)
    assert attention_rate(H100, "flash-2") == pytest.approx(0.35 * 989.4e12)
    h20, a100 = hardware.gpu("h20"), hardware.gpu("a100")
    assert attention_rate(h20, "flash-2") == attention_rate(h20, "flash-3") == pytest.approx(0.6 * 148e12)
    assert attention_rate(a100, "flash-2") == attention_rate(a100, "flash-3")


def test_a_group_across_nodes_pays_for_the_network() -> None:
    inside, outside = planned(ulysses=8).parts, planned(ulysses=12, shape=replace(FLUX, heads=24)).parts
    assert outside.communication > 2 * inside.communication


def test_a_ring_or_pipeline_across_nodes_waits_for_its_slowest_send() -> None:
    ways = links(H100, NDR, launch=0.0)
    crossing = cost("send", 2 * 288 * 3072 * 2, Place(1, 2, shared=8), ways).seconds
    ring = planned(ring=16).parts
    assert ring.communication == pytest.approx(57 * 15 * (crossing - ring.attention / 57 / 16))
    assert crossing > 2 * cost("send", 2 * 288 * 3072 * 2, Place(1), ways).seconds
    inside, outside = (planned(request=Request(1024, 1024, 2), pipefusion=stages) for stages in (8, 16))  # exact steps only
    assert outside.latency_s > inside.latency_s


def test_refused_layouts() -> None:
    for degrees in ({"ulysses": 5}, {"cfg": 2}, {"pipefusion": 2, "ring": 2}):
        with pytest.raises(UserError, match="does not work"):
            planned(**degrees)
    with pytest.raises(UserError, match="neither in bf16"):
        planned(gpu=replace(H100, flops={"fp32": 1e12}))


def test_published_figures_of_xdit() -> None:
    """The errors are documented; a change of a formula must not make them worse unnoticed."""
    rows = published_rows()
    assert len(rows) == 22 and {row.gpu for row in rows} == {"h100", "h20"}
    first = rows[0]
    assert (first.published, first.published_speedup, first.predicted_speedup) == (4.30, 1.0, 1.0)
    seconds = errors([row.error for row in rows])
    assert seconds.mean < 0.12 and abs(seconds.worst) < 0.40
    assert errors([0.1, -0.3]).mean == pytest.approx(0.2) and errors([0.1, -0.3]).worst == -0.3
    assert errors([0.1, -0.3]).signed == pytest.approx(-0.1)


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(plan_dit)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_ranks_layouts(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    found = run("--model", "sd3", "--gpus", "6", "--json", str(target))
    assert found.exit_code == 0 and "cfg 2" in found.stdout and "fastest layout for each number of GPUs" in found.stdout
    plans = json.loads(target.read_text())["plans"]
    assert {plan["gpus"] for plan in plans} == {1, 2, 4, 6}
    latencies = [plan["latency_s"] for plan in plans if plan["fits"]]
    assert latencies == sorted(latencies)


def test_the_command_plans_one_layout_and_refuses_nonsense() -> None:
    assert "ulysses 2 x ring 2" in run("--layout", "ulysses=2, ring=2").stdout
    for arguments in (["--layout", "heads=2"], ["--layout", "ulysses"], ["--layout", "ulysses=5"], ["--width", "1000"]):
        assert isinstance(run(*arguments).exception, UserError)
    assert run("--model", "sd9").exit_code != 0


def test_the_command_compares_with_xdit() -> None:
    text = run("--validate").stdout
    assert "4.3 s" in text and "speedup over one GPU: mean" in text
