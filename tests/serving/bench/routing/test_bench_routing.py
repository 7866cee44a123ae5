"""`strata bench routing`: what a cache could have found, the time of a choice, and the report."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from strata.platform import metrics
from strata.serving.bench.routing import decision, run
from strata.serving.bench.routing.conversations import Load, Turn, reachable_hit_rate
from strata.serving.bench.routing.decision import Scale
from strata.serving.bench.routing.run import Measured


def turn(prompt: str, answer: str, sent: float, first: float) -> Turn:
    return Turn(tuple(prompt), tuple(answer), sent, first)


def test_reachable_hits_are_those_of_one_cache_for_all() -> None:
    turns = [
        turn("abcdefgh", "ij", 0.0, 1.0),
        turn("abcdefgh", "xx", 0.5, 1.5),  # sent before the first had its first token
        turn("abcdefghijklm", "yy", 2.0, 3.0),  # the second turn; the last token of the answer has no KV entry
        turn("abcd", "zz", 2.5, 3.5),  # all of it is cached, but its last token is computed
        turn("xbcdefgh", "zz", 4.0, 5.0),
    ]
    assert reachable_hit_rate(turns, 2) == (0 + 0 + 8 + 2 + 0) / (8 + 8 + 13 + 4 + 8)
    assert reachable_hit_rate(turns, 3) == (0 + 0 + 9 + 3 + 0) / (8 + 8 + 13 + 4 + 8)
    assert reachable_hit_rate(list(reversed(turns)), 2) == reachable_hit_rate(turns, 2)
    assert reachable_hit_rate([], 2) == 0.0


def test_choice_is_timed_at_the_scale() -> None:
    times = decision.measure(Scale(replicas=20, prefixes=50, prompt_kib=16, choices=40))
    assert len(times) == 40 and 0 < statistics.median(times) < 0.05


def test_report_has_the_ratios_of_the_bars() -> None:
    load = Load(4, 3, 2, 100, 20, 10, 2, 0.1, 512, 0)
    assert load.longest == 190
    found = {
        "least-busy": Measured((0.4, 0.2, 0.3), 0.3, 0.8, {"least-busy": 3.0}),
        "kv": Measured((0.1, 0.2, 0.09), 0.76, 0.8, {"prefix": 3.0}),
    }
    made = run.as_json(load, 4, 2, found, Scale(), [k / 1e5 for k in range(1, 101)])
    assert made["ratios"] == {"hits_of_reachable": pytest.approx(0.95), "ttft_p50_of_least_busy": pytest.approx(1 / 3)}
    assert made["decision"]["p50_ms"] == pytest.approx(0.505) and 0.98 < made["decision"]["p99_ms"] <= 1.01
    assert made["routings"]["kv"]["routed"] == {"prefix": 3.0} and made["load"]["replicas"] == 4
    assert run.table(made).row_count == 3


def test_rounds_are_pooled() -> None:
    one = Measured((0.1, 0.2), 0.5, 0.8, {"prefix": 3.0, "new": 1.0})
    pooled = Measured.over([one, Measured((0.3,), 0.7, 0.9, {"prefix": 2.0, "load": 1.0})])
    assert pooled.ttft_s == (0.1, 0.2, 0.3)
    assert (pooled.hit_rate, pooled.reachable_hit_rate) == pytest.approx((0.6, 0.85))
    assert pooled.routed == {"prefix": 5.0, "new": 1.0, "load": 1.0}


def test_rounds_alternate_and_have_their_own_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []

    def measure(served: Any, load: Load, replicas: int, routing: str) -> Measured:
        measured.append((routing, load.seed))
        return Measured((0.1, 0.2), 0.5, 0.8, {})

    monkeypatch.setattr(run, "_measure", measure)
    monkeypatch.setattr(decision, "measure", lambda scale: [0.001, 0.002])
    load = Load(4, 3, 2, 100, 20, 10, 2, 0.1, 512, seed=7)
    run.bench(load, 4, 2, [], Console(quiet=True), tmp_path / "run.json")
    assert measured == [("least-busy", 7), ("kv", 7), ("kv", 8), ("least-busy", 8)]
    assert json.loads((tmp_path / "run.json").read_text())["load"]["rounds"] == 2


def test_counters_are_read_by_name_and_reason() -> None:
    class Http:
        text = "\n".join(
            [
                f'{metrics.SERVE_PREFIX_HIT.name}{{replica="a"}} 3.0',
                f'{metrics.SERVE_PREFIX_HIT.name}{{replica="b"}} 4.0',
                f'{metrics.SERVE_PREFIX_QUERIED.name}{{replica="a"}} 10.0',
                f'{metrics.SERVE_ROUTED.name}{{reason="prefix"}} 2.0',
                f'{metrics.SERVE_ROUTED.name}{{reason="prefix",replica="g"}} 1.0',
                "strata_other_total 9.0",
            ]
        )

        def get(self, path: str) -> "Http":
            return self

        def raise_for_status(self) -> "Http":
            return self

    assert run._counters(Http()) == {  # type: ignore[arg-type]
        metrics.SERVE_PREFIX_HIT.name: 7.0,
        metrics.SERVE_PREFIX_QUERIED.name: 10.0,
        f"{metrics.SERVE_ROUTED.name} prefix": 3.0,
    }
