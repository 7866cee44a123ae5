import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from strata.monitoring.top import endpoint as top_endpoint
from strata.monitoring.top.endpoint import Absent, Endpoint, EndpointWatch, increase, parse, quantile, summarize
from strata.platform import metrics
from strata.platform.errors import UserError
from strata.serving.metrics import exposition
from strata.serving.metrics.telemetry import Gateway, Replica

GATEWAY = 'model="tiny",role="gateway",replica="gateway-1"'
DECODE = 'model="tiny",role="decode",replica="decode-1"'

BEFORE = f"""\
# HELP strata_serve_requests_total Requests answered, by HTTP status
# TYPE strata_serve_requests_total counter
strata_serve_replicas{{{GATEWAY}}} 1.0
strata_serve_replicas{{{DECODE}}} 1.0
strata_serve_requests_total{{{GATEWAY},route="/v1/completions",status="200"}} 100.0
strata_serve_requests_total{{{GATEWAY},route="/metrics",status="200"}} 50.0
strata_serve_generated_tokens_total{{{GATEWAY}}} 1000.0
strata_serve_prompt_tokens_total{{{GATEWAY}}} 5000.0
strata_serve_requests_in_flight{{{GATEWAY}}} 3.0
strata_serve_requests_queued{{{GATEWAY}}} 1.0
strata_serve_prefills_total{{{DECODE},where="local",reason="short"}} 10.0
strata_serve_prefills_total{{{DECODE},where="remote",reason="long"}} 20.0
strata_serve_first_token_seconds_bucket{{{GATEWAY},le="0.01"}} 80.0
strata_serve_first_token_seconds_bucket{{{GATEWAY},le="0.02"}} 100.0
strata_serve_first_token_seconds_bucket{{{GATEWAY},le="+Inf"}} 100.0
strata_serve_kv_cache_usage{{{DECODE}}} 0.25
strata_serve_sequences_running{{{DECODE}}} 3.0
strata_serve_sequences_waiting{{{DECODE}}} 1.0
vllm:num_requests_running{{engine="0"}} 3.0
"""

AFTER = (
    BEFORE.replace('"/v1/completions",status="200"} 100.0', '"/v1/completions",status="200"} 120.0')
    .replace("} 50.0", "} 99.0")
    .replace("} 1000.0", "} 1400.0")
    .replace('reason="long"} 20.0', 'reason="long"} 26.0')
    .replace('le="0.02"} 100.0', 'le="0.02"} 120.0')
    .replace('le="+Inf"} 100.0', 'le="+Inf"} 120.0')
    + f'strata_serve_requests_total{{{GATEWAY},route="/v1/completions",status="500"}} 2.0\n'
    + f'strata_serve_rejections_total{{{GATEWAY},reason="queue-full"}} 4.0\n'
)


def named(samples: top_endpoint.Samples, name: str, **labels: str) -> float:
    [value] = [v for (n, pairs), v in samples.items() if n == name and labels.items() <= dict(pairs).items()]
    return value


def test_only_strata_series_are_parsed() -> None:
    samples = parse(BEFORE)
    assert len(samples) == 16
    assert {name for name, _ in samples} <= {f"{m.exported}{s}" for m in metrics.SERVING for s in ("", "_bucket")}


def test_rates_between_two_polls() -> None:
    before, after = parse(BEFORE), parse(AFTER)
    endpoint = summarize(after, [(2.0, increase(before, after))])
    recently = endpoint.recently
    assert recently is not None
    assert (recently.requests_per_s, recently.tokens_per_s, recently.prompt_tokens_per_s) == (11.0, 200.0, 0.0)
    assert recently.prefills == {"local": 0.0, "remote": 6.0}
    assert (recently.rejections, recently.errors) == ({"queue-full": 4.0}, 2.0)
    assert recently.first_token is not None and recently.inter_token is None
    assert recently.first_token.p50 == pytest.approx(0.015), "the 20 new observations lie between 10 and 20 ms"
    assert (endpoint.models, endpoint.in_flight, endpoint.queued) == (("tiny",), 3.0, 1.0)
    decode, gateway = endpoint.replicas
    assert (decode.name, decode.kv_usage, decode.running, decode.waiting) == ("decode-1", 0.25, 3.0, 1.0)
    assert (gateway.role, gateway.kv_usage) == ("gateway", None)


def test_parses_output_of_gateways_and_engines() -> None:
    gateway, engine = Gateway("tiny", "gateway-1"), Replica("tiny", "decode", "decode-1")

    def scrape() -> top_endpoint.Samples:
        return parse(exposition.merge([({}, gateway.text()), ({}, engine.text())]))

    before = scrape()
    gateway.request_ended("/v1/chat/completions", 200, 0.5)
    gateway.request_ended("/metrics", 200, 0.01)
    gateway.first_token(0.012)
    gateway.inter_token_latencies([0.002] * 99)
    gateway.tokens(50, 100)
    gateway.rejected("queue-full")
    engine.prefilled("remote", "long")
    engine.load(2, 1, 0.5)
    after = scrape()
    endpoint = summarize(after, [(1.0, increase(before, after))])
    recently = endpoint.recently
    assert recently and recently.first_token and recently.inter_token
    assert 0.01 < recently.first_token.p50 <= 0.015 and 0.0015 < recently.inter_token.p99 <= 0.002
    assert (recently.requests_per_s, recently.tokens_per_s, recently.prompt_tokens_per_s) == (1.0, 100.0, 50.0)
    assert (recently.prefills, recently.rejections) == ({"local": 0.0, "remote": 1.0}, {"queue-full": 1.0})
    assert [(r.role, r.kv_usage, r.running, r.waiting) for r in endpoint.replicas] == [
        ("decode", 0.5, 2.0, 1.0),
        ("gateway", None, None, None),
    ]


def test_first_poll_has_no_rates() -> None:
    assert summarize(parse(BEFORE), []).recently is None


def test_counter_reset_gives_no_negative_rate() -> None:
    before, after = parse(AFTER), parse(BEFORE)
    grown = increase(before, after)
    assert all(value >= 0 for value in grown.values())
    assert named(grown, "strata_serve_generated_tokens_total") == 1000.0
    endpoint = summarize(after, [(1.0, grown)])
    assert endpoint.recently and endpoint.recently.first_token, "a histogram after a reset is valid"


def test_new_series_of_a_known_replica_counts_and_a_new_replica_does_not() -> None:
    before = parse(BEFORE)
    other = f"{BEFORE}strata_serve_generated_tokens_total{{{GATEWAY.replace('gateway-1', 'gateway-2')}}} 9000.0\n"
    grown = increase(before, parse(other))
    assert named(grown, "strata_serve_generated_tokens_total", replica="gateway-2") == 0.0
    first_event = f'{BEFORE}strata_serve_rejections_total{{{GATEWAY},reason="no-replica"}} 1.0\n'
    assert named(increase(before, parse(first_event)), "strata_serve_rejections_total") == 1.0


def test_increases_sum_over_the_window() -> None:
    before, after = parse(BEFORE), parse(AFTER)
    grown = increase(before, after)
    endpoint = summarize(after, [(1.0, grown), (3.0, grown)])
    assert endpoint.recently and endpoint.recently.seconds == 4.0
    assert endpoint.recently.tokens_per_s == 200.0
    assert endpoint.recently.errors == 4.0


def test_quantiles_lie_in_the_right_bucket() -> None:
    rng = random.Random(3)
    values = sorted(rng.lognormvariate(-4, 1) for _ in range(5000))
    registry = CollectorRegistry()
    histogram = Histogram("h", "H", registry=registry, buckets=metrics.LATENCY_BUCKETS)
    for value in values:
        histogram.observe(value)
    buckets = {
        float(sample.labels["le"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "h_bucket"
    }
    bounds = (0.0, *metrics.LATENCY_BUCKETS)
    for share in (0.1, 0.5, 0.9, 0.99):
        true = values[int(share * len(values))]
        low = max(bound for bound in bounds if bound < true)
        high = min(bound for bound in metrics.LATENCY_BUCKETS if bound >= true)
        found = quantile(buckets, share)
        assert found is not None and low <= found <= high


def test_quantile_edge_cases_match_prometheus() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0.0, float("inf"): 0.0}, 0.5) is None
    assert quantile({0.1: 10.0, 0.2: 10.0, float("inf"): 10.0}, 0.5) == pytest.approx(0.05)
    assert quantile({0.1: 0.0, 0.2: 0.0, float("inf"): 10.0}, 0.5) == 0.2, "beyond the last bound"
    assert quantile({0.1: 5.0, 0.2: 15.0, float("inf"): 20.0}, 0.5) == pytest.approx(0.15)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "", "http://", "http://here:port", "localhost"])
def test_invalid_address(url: str) -> None:
    with pytest.raises(UserError, match=r"not the address of an endpoint[\s\S]*--url"):
        EndpointWatch(url)


@contextmanager
def serving(answer: str, port: int = 0, status: int = 200) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_endpoint_restart() -> None:
    with serving(BEFORE) as port:
        watch = EndpointWatch(f"http://127.0.0.1:{port}/")
        first, second = watch.poll(), watch.poll()
        assert isinstance(first, Endpoint) and first.recently is None
        assert isinstance(second, Endpoint) and second.recently and second.recently.tokens_per_s == 0
    gone = watch.poll()
    assert isinstance(gone, Absent) and gone.reason
    with serving(AFTER, port):
        back, later = watch.poll(), watch.poll()
        assert isinstance(back, Endpoint) and back.recently is None, "nothing is subtracted across its absence"
        assert isinstance(later, Endpoint) and later.recently
    watch.close()


def test_the_window_slides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_endpoint, "WINDOW_S", 0.2)
    with serving(BEFORE) as port:
        watch = EndpointWatch(f"http://127.0.0.1:{port}")
        began = time.monotonic()
        for _ in range(6):
            endpoint = watch.poll()
            time.sleep(0.1)
        whole = time.monotonic() - began
        watch.close()
    assert isinstance(endpoint, Endpoint) and endpoint.recently
    assert 0.2 <= endpoint.recently.seconds < whole - 0.1


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (generate_latest(CollectorRegistry()).decode(), 200, "no Strata series"),
        ("node_load1 0.5\n", 200, "no Strata series"),
        ("strata_serve_replicas{ what\n", 200, "not in the Prometheus text format"),
        ("not here", 404, "returned status 404"),
    ],
)
def test_server_that_is_not_an_endpoint(answer: str, status: int, reason: str) -> None:
    with serving(answer, status=status) as port:
        watch = EndpointWatch(f"http://127.0.0.1:{port}")
        absent = watch.poll()
        watch.close()
    assert isinstance(absent, Absent) and reason in absent.reason
