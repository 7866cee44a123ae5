"""Replicas, waits and costs of a serving plan, with an invented decode step: 10 ms and 1 ms for each sequence."""

import math
from dataclasses import replace
from typing import Any

import pytest

from strata.planner.catalogue.shape import Shape
from strata.planner.serving import capacity
from strata.planner.serving.capacity import Slo, serve, transfer
from strata.planner.serving.engine_step import Load
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.specs import Fabric

LOAD = Load(requests_per_s=10, prompt=500, output=100, variation=0.5)
SHAPE = Shape("small", layers=5, hidden=64, heads=16, kv_heads=4, head_dim=6, ffn=160, vocab=1000, context=600)
GIVEN = {
    "tensor": 4,
    "prompt": 500,
    "output": 100,
    "variation": 0.5,
    "new_tokens": 500,
    "chunk": 1000,
    "chunks": 2,
    "prefill_work_s": 0.02,
    "prefill_s": 0.03,
    "transfer_s": 0.005,
    "request_s": 0.012,
    "batch_that_fits": 64,
    "dollars_per_gpu_hour": 1.8,
}


@pytest.fixture(autouse=True)
def invented_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(batch: float, context: float, worksheet: Worksheet) -> float:
        assert context == 550
        return worksheet.given("step_s", 0.01 + 0.001 * batch)

    monkeypatch.setattr(capacity, "decode", decode)


def lines(**more: float) -> Worksheet:
    found = Worksheet("test")
    for name, value in (GIVEN | more).items():
        found.given(name, value)
    return found


# ---------------------------------------------------------------- latencies of given replicas


def test_aggregated_replicas() -> None:
    """Five requests a second on each of two engines spend a tenth of the time on prefill. A batch of 12.5 decodes in 22.5 ms, or
    25 ms with prefill in between, and 5 x 100 x 25 ms are 12.5 sequences."""
    part = lines()
    pool = serve("aggregated", 0, 2, LOAD, part)
    assert pool and (pool.kind, pool.prefill_replicas, pool.decode_replicas, pool.gpus) == ("aggregated", 0, 2, 8)
    assert pool.batch == pytest.approx(12.5)
    assert pool.itl_s == pytest.approx(0.025)
    assert pool.itl_worst_s == pytest.approx(0.0225 + 0.02 / 2)
    # A prompt of half a chunk takes half a step more; 10 x 31.25 ms keep 0.3125 engines busy.
    waits = 0.3125**2 / (2 + 0.3125)  # Erlang's C for two servers
    waiter = 0.03125 / (2 - 0.3125) * (1 + 0.25) / 2
    first = 0.012 + 0.03 + 1.5 * 0.0225
    assert part["mean_wait_s"] == pytest.approx(waits * waiter)
    assert pool.ttft_p50_s == pytest.approx(first)  # fewer than half wait
    assert pool.ttft_p99_s == pytest.approx(first + waiter * math.log(waits / 0.01))
    dollars = 8 * 1.8 / 3600 / 10 * 1e6  # of a million requests
    assert pool.dollars_per_million_tokens == pytest.approx(dollars / 600)
    assert pool.dollars_per_million_output_tokens == pytest.approx(dollars / 100)


def test_disaggregated_replicas() -> None:
    """On one engine, 1,000 x (10 ms + 1 ms x batch) has no fixed point; on four, a batch is 250 x 13.3 ms."""
    part = lines()
    pool = serve("disaggregated", 1, 4, LOAD, part)
    assert pool and (pool.prefill_replicas, pool.decode_replicas, pool.gpus) == (1, 4, 20)
    assert pool.batch == pytest.approx(2.5 / 0.75)
    assert pool.itl_s == pool.itl_worst_s == pytest.approx(0.01 + 0.001 * 2.5 / 0.75)
    waiter = 0.03 / (1 - 0.3) * 1.25 / 2
    first = 0.012 + 0.03 + 0.005 + pool.itl_s
    assert part["mean_wait_s"] == pytest.approx(0.3 * waiter)
    assert pool.ttft_p99_s == pytest.approx(first + waiter * math.log(0.3 / 0.01))
    assert pool.ttft_p50_s == pytest.approx(first)
    assert serve("disaggregated", 1, 1, LOAD, lines()) is None


def test_more_than_half_of_prompts_wait() -> None:
    pool = serve("disaggregated", 1, 4, LOAD, lines(prefill_s=0.08))
    waiter = 0.08 / (1 - 0.8) * 1.25 / 2
    assert pool and pool.ttft_p50_s == pytest.approx(0.012 + 0.08 + 0.005 + pool.itl_s + waiter * math.log(0.8 / 0.5))


def test_an_almost_idle_engine_joins_fewer_steps() -> None:
    quiet = replace(LOAD, requests_per_s=0.1)
    pool = serve("aggregated", 0, 1, quiet, lines())
    assert pool and pool.batch < 1
    step = 0.01 + 0.001 * pool.batch
    assert pool.ttft_p50_s == pytest.approx(0.012 + 0.03 + 1.5 * step * pool.batch)


@pytest.mark.parametrize(
    ("kind", "prefills", "decodes", "lines_of"),
    [
        ("aggregated", 0, 2, {"prefill_work_s": 0.2}),  # all time is prefill
        ("aggregated", 0, 2, {"batch_that_fits": 12.4}),
        ("disaggregated", 1, 4, {"batch_that_fits": 3.3}),
        ("disaggregated", 1, 4, {"prefill_s": 0.1}),  # prefill engines are saturated
    ],
)
def test_loads_beyond_capacity(kind: Any, prefills: int, decodes: int, lines_of: dict[str, float]) -> None:
    assert serve(kind, prefills, decodes, LOAD, lines(**lines_of)) is None
    slack = {name: value * (0.99 if name.startswith("prefill") else 1.02) for name, value in lines_of.items()}
    if slack.get("prefill_work_s") is None:
        assert serve(kind, prefills, decodes, LOAD, lines(**slack)) is not None


def test_all_time_on_prefill_is_beyond_capacity_even_without_decoding() -> None:
    assert capacity._write_decode("aggregated", 2, replace(LOAD, output=0, prompt=550), lines(prefill_work_s=0.2)) is None
    assert capacity._write_decode("aggregated", 2, replace(LOAD, output=0, prompt=550), lines(prefill_work_s=0.199)) is not None


# ---------------------------------------------------------------- transfers


@pytest.mark.parametrize(
    ("link", "nic", "rate"),
    [("nvlink", 50e9, 450e9), ("pcie", 50e9, 63e9), ("fabric", 50e9, 50e9 * 2 / 8), ("fabric", 500e9, 63e9)],
)
def test_kv_transfer(link: Any, nic: float, rate: float) -> None:
    """Eight GPUs share two cards, none faster than its PCIe; four fifths of a rate are reached, after a millisecond."""
    gpu = replace(hardware.gpu("h100"), link=450e9, pcie=63e9, domain=8)
    found = transfer(gpu, Fabric("two cards", nic=nic, nics=2), link, lines(kv_bytes_per_token=1e6))
    assert found == pytest.approx(1e-3 + 500 * 1e6 / (0.8 * rate))


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"requests_per_s": 0}, False),
        ({"requests_per_s": 1e-9}, True),
        ({"prompt": 0}, False),
        ({"prompt": 1}, True),
        ({"output": 0}, False),
        ({"output": 1}, True),
        ({"cached": -0.01}, False),
        ({"cached": 0.99}, True),
        ({"cached": 1.0}, False),
        ({"prompt": 501}, False),  # 601 tokens in a context of 600
    ],
)
def test_valid_loads(change: dict[str, Any], valid: bool) -> None:
    load = replace(LOAD, **change)
    if valid:
        capacity._check_load(SHAPE, load)
    else:
        with pytest.raises(UserError, match=r"not a valid load|= 601 tokens exceed"):
            capacity._check_load(SHAPE, load)


def test_objectives_that_no_replicas_meet() -> None:
    """TTFT is 12 + 30 ms and a decode step 11 ms without load."""
    capacity._check_slo(LOAD, Slo(0.0421, 0.0111), lines())
    with pytest.raises(UserError, match=r"takes 0\.042 s without load: over ttft_s"):
        capacity._check_slo(LOAD, Slo(GIVEN["request_s"] + GIVEN["prefill_s"], 0.0111), lines())
    with pytest.raises(UserError, match=r"takes 0\.0110 s with one sequence: over itl_s"):
        capacity._check_slo(LOAD, Slo(0.0421, 0.01 + 0.001), lines())


# ---------------------------------------------------------------- whole plans


def test_a_plan_by_default_is_of_one_gpu_in_bf16_over_the_fabric() -> None:
    gpu, fabric = hardware.gpu("h100"), hardware.fabric("ndr-400")
    found = capacity.plan_serving(SHAPE, gpu, fabric, LOAD, Slo(1.0, 0.1), worksheet=Worksheet("test"))
    top = found.worksheet
    assert (top["tensor"], top["bytes_per_weight"], top["bytes_per_value"], top["max_sequences"]) == (1, 2, 2, 1024)
    assert (top["request_s"], top["handoff_s"], top["variation"], top["output"]) == (12e-3, 1e-3, 0.5, 100)
    assert top["transfer_rate"] == pytest.approx(0.8 * 50e9)
    assert top["dollars_per_gpu_hour"] == gpu.dollars_per_hour
    assert found.batch_that_fits == top["batch_that_fits"] == 1024
    assert (found.prefill_s, found.transfer_s, found.weights_bytes) == (
        top["prefill_s"],
        top["transfer_s"],
        top["weights_bytes"],
    )
    assert found.aggregated.gpus == found.aggregated.decode_replicas
    with pytest.raises(UserError, match="over itl_s"):
        capacity.plan_serving(SHAPE, gpu, fabric, LOAD, Slo(1.0, 0.01), worksheet=Worksheet("test"))


def test_a_curve_has_the_rates_within_capacity() -> None:
    gpu, fabric = hardware.gpu("h100"), hardware.fabric("ndr-400")
    found = capacity.plan_serving(SHAPE, gpu, fabric, LOAD, Slo(1.0, 0.1), worksheet=Worksheet("test"))
    points = capacity.curve(found, [10.0, 10_000.0])
    assert [(point.kind, point.requests_per_s) for point in points] == [("aggregated", 10.0), ("disaggregated", 10.0)]
    for point, pool in zip(points, (found.aggregated, found.disaggregated), strict=True):
        assert pool and (point.ttft_p50_s, point.ttft_p99_s, point.itl_s) == (pool.ttft_p50_s, pool.ttft_p99_s, pool.itl_s)


# ---------------------------------------------------------------- sizes


def fewest(enough: Any) -> int:
    return next(count for count in range(1, 100) if enough(count))


@pytest.mark.parametrize("slo", [Slo(0.09, 0.03), Slo(0.9, 0.014), Slo(0.068, 0.9)])
def test_aggregated_pools_are_as_small_as_possible(slo: Slo) -> None:
    load = replace(LOAD, requests_per_s=60)

    def enough(count: int) -> bool:
        pool = serve("aggregated", 0, count, load, lines())
        return bool(pool and pool.ttft_p99_s <= slo.ttft_s and pool.itl_s <= slo.itl_s)

    top = lines()
    pool = capacity._size_aggregated(load, slo, top)
    assert pool.decode_replicas == fewest(enough) > 1
    assert [part.title for part in top.parts] == ["aggregated"]


@pytest.mark.parametrize("slo", [Slo(0.09, 0.03), Slo(0.9, 0.014), Slo(0.13, 0.9)])
def test_disaggregated_pools_have_the_fewest_decoders_then_prefillers(slo: Slo) -> None:
    load = replace(LOAD, requests_per_s=60)

    def decodes(count: int) -> bool:
        pool = serve("disaggregated", 99, count, load, lines())
        return bool(pool and pool.itl_s <= slo.itl_s)

    def prefills(count: int) -> bool:
        pool = serve("disaggregated", count, fewest(decodes), load, lines())
        return bool(pool and pool.ttft_p99_s <= slo.ttft_s)

    top = lines()
    pool = capacity._size_disaggregated(load, slo, top)
    assert pool and (pool.prefill_replicas, pool.decode_replicas) == (fewest(prefills), fewest(decodes))
    assert top.parts[0]["prefills_per_decode"] == pool.prefill_replicas / pool.decode_replicas


def test_disaggregation_may_miss_the_objective() -> None:
    """KV transfer and the first decode step come on top of prefill: 12 + 30 + 5 ms, and 20 ms with two decode replicas."""
    assert capacity._size_disaggregated(LOAD, Slo(0.0669, 0.03), lines()) is None
    assert capacity._size_disaggregated(LOAD, Slo(0.0671, 0.03), lines()) is not None
    assert capacity._size_disaggregated(LOAD, Slo(0.9, 0.0099), lines()) is None
    with pytest.raises(UserError, match="100000 replicas are not enough for 10 requests/s"):
        capacity._size_aggregated(LOAD, Slo(0.041, 0.03), lines())


@pytest.mark.parametrize(("batch", "expected"), [(12.0, 6), (0.5, 19), (0.2, None)])
def test_prompt_length_from_which_remote_prefill_pays_off(
    batch: float, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token adds 10 ms to running steps and 12 ms on an idle engine, and its KV transfer takes 1 ms. A remote prefill waits
    20 + 8 + 8 ms beside that: 10 n x min(1, batch) ms against (2 + 1) n + 36 ms."""

    def prefill(prompt: float, cached: float, worksheet: Worksheet) -> None:
        assert cached == 0.25
        for name, value in (("prompt", prompt), ("prefill_work_s", 0.01 * prompt), ("prefill_s", 0.012 * prompt)):
            worksheet.given(name, value)

    monkeypatch.setattr(capacity, "prefill", prefill)
    top = lines(handoff_s=0.008, kv_bytes_per_token=1e6, transfer_rate=1e9)
    top.part("disaggregated").given("mean_wait_s", 0.02)
    top.parts[0].given("step_s", 0.008)
    pool = serve("disaggregated", 1, 4, LOAD, lines())
    assert pool
    assert capacity._remote_from(SHAPE, replace(LOAD, cached=0.25), replace(pool, batch=batch), top) == expected
    assert len(top.parts) == (1 if expected is None else 2)
