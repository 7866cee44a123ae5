"""`strata bench monitoring`: the simulated fleet, its past, and a run on a real Prometheus."""

import io
import json
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

from strata.dashboards import boards, queries
from strata.dashboards.bench import fleet as fleets
from strata.dashboards.bench import history, measure, report, targets
from strata.dashboards.bench.fleet import Fleet, Series
from strata.dashboards.bench.measure import Measured, Settings, Timing
from strata.monitoring.prometheus import scrape, server
from strata.platform.errors import UserError

SMALL = Fleet(20)


def names(series: list[Series]) -> set[str]:
    return {re.match(r"[\w:]+", one.text)[0] for one in series}  # type: ignore[index]


def test_nodes_have_eight_gpus_and_the_last_one_the_rest() -> None:
    assert [len(SMALL.gpus_of(node)) for node in SMALL.nodes] == [8, 8, 4]
    assert len(Fleet(16384).nodes) == 2048
    large = Fleet(16384)
    assert len({node.ray_cluster for node in large.nodes if node.team}) == 32
    assert len({node.team for node in large.nodes if node.team}) == 16
    assert sum(not node.team for node in large.nodes) > 0
    assert sum(node.is_head for node in large.nodes) == 32


def test_series_pass_the_allowlists_of_the_scrape() -> None:
    node = SMALL.nodes[0]
    allowed = re.compile(
        scrape.whole(
            (*scrape.RAY_SERIES, *scrape.DCGM_SERIES, *scrape.GPU_SERIES, *scrape.ENDPOINT_SERIES, *scrape.KUBE_STATE_SERIES)
        )
    )
    made = [*SMALL.dcgm(node), *SMALL.ray_node(node), *SMALL.ray_gpus(node), *SMALL.processes(node), *SMALL.containers(node)]
    made += [*SMALL.training(), *SMALL.on_call(), *SMALL.serving()]
    assert all(allowed.fullmatch(name) for name in names(made))
    assert len({one.text for one in made}) == len(made), "no series twice"
    assert len(fleets.dcgm_names()) == len(set(fleets.dcgm_names())) >= 8
    assert len(names(list(SMALL.dcgm(node)))) == len(fleets.dcgm_names())


def test_every_range_query_has_a_past() -> None:
    """Series that a panel draws over time, but for events that a healthy fleet does not have."""
    past = {name for span in history.spans(SMALL) for name in names(list(span.series()))}
    events = {"kuberay", "autoscaler", "alerts"}
    for query in queries.every():
        if query.instant or query.sources() & events:
            continue
        for read in query.reads():
            stored = {read.exported, f"{read.exported}_bucket"}
            assert stored & past or read.exported == "strata_gpu_devices", (query.panel, read.exported)


def test_the_past_is_as_long_as_the_boards() -> None:
    longest = {name: span.seconds for span in history.spans(SMALL) for name in names(list(span.series()))}
    for board in boards.every():
        for query in queries.of(board):
            if not query.instant and not query.panel.startswith("annotation"):
                for read in query.reads():
                    for name in {read.exported, f"{read.exported}_bucket"} & longest.keys():
                        assert longest[name] >= measure.range_seconds(board.since), (board.uid, query.panel, name)


def test_samples_of_one_block_lie_within_it_and_before_the_end() -> None:
    file = io.StringIO()
    span = history.Span(100, lambda: [Series('a{x="1"}', 2.0), Series("b", 3.0, grows=True)])
    end = 10 * history.BLOCK_S + 50
    first = history._write_window(file, span, 9 * history.BLOCK_S, end)
    second = history._write_window(file, span, 10 * history.BLOCK_S, end)
    assert history._write_window(file, span, 8 * history.BLOCK_S, end) == 0
    lines = [line.split(" ") for line in file.getvalue().splitlines()]
    assert len(lines) == first + second == 2 * 8
    times = sorted({int(time) for *_, time in lines})
    assert times == list(range(end - 100 - (end - 100) % 15, end, 15))
    assert {float(value) for name, value, time in lines if name == "b"} == {3.0 * time for time in times}
    assert all(1.9 <= float(value) <= 2.1 for name, value, _ in lines if name != "b")


def test_ranges_and_steps() -> None:
    assert [measure.range_seconds(since) for since in ("now-30m", "now-3h", "now-2d")] == [1800, 10800, 172800]
    assert [measure.step_seconds(seconds) for seconds in (3600, 10800, 13500, 13501, 86400)] == [15, 15, 15, 30, 105]


def test_pages_alternate_and_counters_move(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = targets.Pages(SMALL)
    assert pages.paths == ("/nodes/0", "/moving")
    monkeypatch.setattr(targets.time, "time", lambda: 1500.0)
    now, counters = pages.get("/nodes/0"), pages.get("/moving")
    monkeypatch.setattr(targets.time, "time", lambda: 1515.0)
    assert now != pages.get("/nodes/0") and now.count(b"\n") == pages.get("/nodes/0").count(b"\n")
    later = pages.get("/moving")

    def requests(page: bytes) -> float:
        return float(re.search(rb'strata_serve_requests_total\{[^}]*status="200"\} (\S+)', page)[1])  # type: ignore[index]

    assert requests(later) - requests(counters) == pytest.approx(150.0)
    assert targets.text([Series("a", 0.0)], 5.0, random.Random(1)) == b"a 0\n"


def measured(slowest: float) -> Measured:
    timings = (
        Timing("strata-a", "p", 0.1, 0.1, 3, 70),
        Timing("strata-a", "q", slowest, 0.3, 0, 7),
        Timing("variables", "node", 0.2, 0.1, 9, 0),
    )
    return Measured(Fleet(16), 1000, 1.5, 500, 400, 40, 33.3, 2**30, {"strata-gpu": 0.25, "strata-fleet": 0.5}, timings, 0.7)


def test_report() -> None:
    run = json.loads(json.dumps(report.as_json(measured(2.5))))
    assert (run["gpus"], run["nodes"], run["series"], run["bar_s"]) == (16, 2, 500, 2.0)
    first, second = run["boards"]
    assert (first["board"], first["queries"], first["slowest"], first["slowest_s"]) == ("strata-a", 2, "q", 2.5)
    assert (first["median_s"], first["most_series"], first["most_samples"], first["empty"]) == (1.3, 3, 70, 1)
    assert first["most_cpu_s"] == 0.3 and second["board"] == "variables"
    console = Console(file=io.StringIO(), width=150)
    report.show(run, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.75 s" in text and "2.500 s" in text and "1.50" in text


@pytest.mark.slow
@pytest.mark.rotation
def test_a_small_fleet_on_a_real_prometheus(own_home: Path) -> None:
    try:
        server.binary("prometheus")
    except UserError as error:
        pytest.skip(str(error))
    found = measure.measure(Settings(gpus=32, live_s=8, scrape_s=1), lambda _: None)
    assert found.scraped_series > 500 and found.series > found.scraped_series and found.samples_per_second > 100
    assert {"strata-gpu", "strata-fleet", "strata-teams", "strata-prices"} <= found.rule_seconds.keys()
    empty = {(timing.board, timing.panel) for timing in found.timings if timing.series == 0}
    # No operator, no autoscaler, no errors; and series of Strata's exporter, which DCGM replaces.
    assert {panel for _, panel in empty} <= EMPTY
    by_panel = {(timing.board, timing.panel): timing.series for timing in found.timings}
    assert by_panel["strata-cluster", "Least busy nodes"] == 4
    assert by_panel["strata-teams", "GPU-hours by team"] == 1


EMPTY = {
    *("Alerts", "KubeRay", "Nodes by state", "XID errors", "Hardware faults", "Throttled now"),
    *("Slowest clocks", "Power drawn and allowed", "GPUs of no team"),
    *("annotation Deployments", "annotation Restarts"),
}
