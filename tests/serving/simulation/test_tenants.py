"""Tenants in the simulation: the gateway's queue bounds what a flood does to another tenant."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.serving.simulation.command import simulate
from strata.serving.simulation.tenants import merged, parse, shares

ENGINE = ("--model", "llama-3.1-8b", "--gpu", "h100", "--max-sequences", "16", "--prompt", "500", "--output", "60")


def simulated(tenants: str, *words: str) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(simulate)
    done = CliRunner().invoke(app, [*ENGINE, "--tenants", tenants, *words, "--json", "-"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("sequences", "requests", "pools"),
    [
        (16, 300, ()),
        pytest.param(256, 6000, ("--decode", "4", "--prefill", "2", "--max-sequences", "64"), marks=pytest.mark.rotation),
    ],
)
def test_a_flood_of_ten_shares_does_not_move_another_tenant(sequences: int, requests: int, pools: tuple[str, ...]) -> None:
    load = ("--concurrency", str(sequences), "--requests", str(requests), "--max-queue", "3000", *pools)
    before, after = simulated("quiet=1,loud=1", *load)["tenants"], simulated("quiet=1,loud=10", *load)["tenants"]
    assert before["quiet"]["completed"] == after["quiet"]["completed"] == requests // 2
    assert after["loud"]["completed"] == 5 * requests
    for metric in ("ttft_s", "itl_s"):
        assert after["quiet"][metric]["p99"] == pytest.approx(before["quiet"][metric]["p99"], rel=0.1), metric
    assert after["loud"]["ttft_s"]["p99"] > 5 * before["loud"]["ttft_s"]["p99"]


def test_a_tenant_below_its_share_is_never_rejected() -> None:
    found = simulated("quiet=0.5,loud=20", "--rate", "20", "--requests", "200", "--max-queue", "50")["tenants"]
    assert found["quiet"]["rejected"] == 0 and found["loud"]["rejected"] > 100
    assert found["quiet"]["completed"] + found["loud"]["completed"] + found["loud"]["rejected"] == 50 + 2000


def test_weights_divide_the_throughput() -> None:
    load = ("--concurrency", "32", "--requests", "400", "--max-queue", "1000", "--variation", "0")
    found = simulated("small=1:1,large=1:3", *load)["tenants"]
    assert found["large"]["ttft_s"]["p50"] == pytest.approx(found["small"]["ttft_s"]["p50"], rel=0.3)
    assert (found["small"]["completed"], found["large"]["completed"]) == (100, 300)


def test_loads_are_multiples_of_the_share() -> None:
    assert shares(parse("a=1,b=10:1,c=2:2")) == {"a": 0.25, "b": 2.5, "c": 1.0}


def test_tenants_share_no_prefix() -> None:
    from strata.serving.simulation.generated import Shape, open_loop

    shape = Shape(prompt=20, output=4, shared=32, turns=2)
    load = list(merged(parse("a=1,b=1"), lambda share, number: open_loop("poisson", 1.0, 6, shape, 16, seed=0)))
    assert sorted(at for at, _ in load) == [at for at, _ in load] and len(load) == 6
    names: dict[str, set[int]] = {"a": set(), "b": set()}
    for _, request in load:
        names[request.tenant] |= set(request.text.names(0, 4))
        assert request.then is not None
        after = request.then()
        assert after is not None and after[1].tenant == request.tenant and after[1].text == request.text
    assert names["a"] and not names["a"] & names["b"]


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=0", "a=-1", "a=nan", "a=1,a=2", "a=1:0", "a=1:x", "a=inf", "a=1,,b=1"])
def test_wrong_tenants_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no list of tenants"):
        parse(text)


def test_traces_have_no_tenants() -> None:
    with pytest.raises(UserError, match="--trace excludes --tenants"):
        simulated("a=1", "--trace", "x.jsonl")
