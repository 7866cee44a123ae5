"""Runs the conversations on endpoints that differ in `serve.routing` alone, and writes the comparison."""

import itertools
import json
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record, metrics, recipe_file
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.serving.bench.contenders import contenders, dummy_model, server, subject
from strata.serving.bench.routing import conversations, decision
from strata.serving.bench.routing.conversations import Load
from strata.serving.bench.routing.decision import Scale

ROUTINGS = ("least-busy", "kv")
# Small enough for two cores, and slow enough that a prompt takes longer than the rest of a request.
MODEL = ("model.layers=6", "model.hidden=256", "model.ffn=768", "model.heads=8", "model.kv_heads=4")
BLOCK_SIZE = re.compile(r'block_size="(\d+)"')


@dataclass(frozen=True)
class Measured:
    ttft_s: tuple[float, ...]
    hit_rate: float
    reachable_hit_rate: float  # with the knowledge of every cache
    routed: dict[str, float]  # requests by reason

    @classmethod
    def over(cls, rounds: Sequence["Measured"]) -> "Measured":
        """All turns of the rounds, which have equally many."""
        routed = sum((Counter(each.routed) for each in rounds), Counter[str]())
        return cls(
            tuple(itertools.chain.from_iterable(each.ttft_s for each in rounds)),
            statistics.fmean(each.hit_rate for each in rounds),
            statistics.fmean(each.reachable_hit_rate for each in rounds),
            dict(routed),
        )


def bench(load: Load, replicas: int, rounds: int, overrides: Sequence[str], console: Console, path: Path) -> None:
    chosen = decision.measure(Scale())  # first: the processes of an endpoint take a while to end
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as temporary:
        words = [*MODEL, f"model.context={load.longest + 64}", f"model.vocab={load.vocab}", *overrides]
        folder = Path(temporary) / "dummy"
        dummy_model.write(folder, recipe_file.load(recipe_file.DEFAULT, words))
        served = subject.choose([*overrides], None, folder, None)
        found: dict[str, list[Measured]] = {routing: [] for routing in ROUTINGS}
        for number in range(rounds):
            texts = replace(load, seed=load.seed + number)
            for routing in ROUTINGS if number % 2 == 0 else reversed(ROUTINGS):  # the speed of a shared machine drifts
                with console.status(f"round {number + 1} of {rounds}, {routing}: {load.conversations} conversations …"):
                    found[routing].append(_measure(served, texts, replicas, routing))
    over = {routing: Measured.over(each) for routing, each in found.items()}
    run = as_json(load, replicas, rounds, over, Scale(), chosen)
    console.print(table(run))
    took = run["decision"]
    console.print(f"choice among {took['replicas']} replicas: p50 {took['p50_ms']:.2f} ms, p99 {took['p99_ms']:.2f} ms")
    write_atomic(path, json.dumps(run, indent=2))
    console.print(f"written to {path}")


def _measure(served: subject.Subject, load: Load, replicas: int, routing: str) -> Measured:
    contender = contenders.find(f"strata+serve.decode.replicas={replicas}+serve.routing={routing}")
    log = cache_dir() / "bench" / "logs" / f"routing-{routing}.log"
    try:
        with server.running(contender, served, True, log) as up:
            url = f"http://{up.target.host}:{up.target.port}"
            with httpx.Client(base_url=url, timeout=60) as http:
                before = _counters(http)
                turns = conversations.drive(url, served.model_id, load)
                after = _counters(http)
                block_size = int(BLOCK_SIZE.search(http.get("/metrics").text)[1])  # type: ignore[index]
    except server.Failed as failed:
        raise UserError(f"The endpoint with serve.routing={routing} did not start: {failed}", f"See {log}.") from None
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    asked = grown[metrics.SERVE_PREFIX_QUERIED.name]
    return Measured(
        tuple(turn.ttft_s for turn in turns),
        grown[metrics.SERVE_PREFIX_HIT.name] / asked if asked else 0.0,
        conversations.reachable_hit_rate(turns, block_size),
        {key.partition(" ")[2]: value for key, value in grown.items() if " " in key and value},
    )


def _counters(http: httpx.Client) -> dict[str, float]:
    """Counters of the prefix caches, and of the choices by reason."""
    names = tuple(each.name for each in (metrics.SERVE_PREFIX_HIT, metrics.SERVE_PREFIX_QUERIED, metrics.SERVE_ROUTED))
    text = http.get("/metrics").raise_for_status().text
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(names))
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            reason = sample.labels.get("reason")
            key = f"{sample.name} {reason}" if reason else sample.name
            sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def as_json(
    load: Load, replicas: int, rounds: int, found: dict[str, Measured], scale: Scale, chosen: Sequence[float]
) -> dict[str, Any]:
    kv, other = found["kv"], found["least-busy"]
    routings = {
        name: {
            "ttft_p50_s": statistics.median(each.ttft_s),
            "ttft_p90_s": statistics.quantiles(each.ttft_s, n=10)[-1],
            "hit_rate": each.hit_rate,
            "reachable_hit_rate": each.reachable_hit_rate,
            "routed": each.routed,
        }
        for name, each in found.items()
    }
    ratios = {
        "hits_of_reachable": kv.hit_rate / kv.reachable_hit_rate if kv.reachable_hit_rate else 0.0,
        "ttft_p50_of_least_busy": statistics.median(kv.ttft_s) / statistics.median(other.ttft_s),
    }
    times = {"p50_ms": 1e3 * statistics.median(chosen), "p99_ms": 1e3 * statistics.quantiles(chosen, n=100)[-1]}
    return {
        **benchmark_record.header("routing"),
        "load": asdict(load) | {"replicas": replicas, "rounds": rounds},
        "routings": routings,
        "ratios": ratios,
        "decision": asdict(scale) | times,
    }


def table(run: dict[str, Any]) -> Table:
    made = Table("routing", "prefix hits", "reachable", "TTFT p50", "TTFT p90", box=None, header_style="bold")
    for name, each in run["routings"].items():
        shares = (f"{each[key]:.1%}" for key in ("hit_rate", "reachable_hit_rate"))
        made.add_row(name, *shares, *(f"{1e3 * each[key]:,.0f} ms" for key in ("ttft_p50_s", "ttft_p90_s")))
    ratios = run["ratios"]
    made.add_row("ratio", f"{ratios['hits_of_reachable']:.3f} of reachable", "", f"{ratios['ttft_p50_of_least_busy']:.2f}", "")
    return made
