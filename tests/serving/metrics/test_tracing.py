"""Traces through a gateway, a decode replica and a prefill replica, as an OpenTelemetry collector receives them."""

import time
from collections.abc import Iterator

import gateway_in_process
import pytest
import span_collector
from span_collector import Collected, attributes

from strata.serving.metrics import tracing
from strata.serving.metrics.tracing import OFF, Tracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    with span_collector.collecting(monkeypatch) as collected:
        yield collected


@pytest.mark.parametrize(
    ("sent", "valid"),
    [
        (SENT, True),
        (f"00-{TRACE}-{PARENT}-00", True),
        (f"01-{TRACE}-{PARENT}-01", True),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"00-{TRACE[1:]}-{PARENT}-01", False),
        (f"{SENT} ", False),
        (f"{SENT}\n", False),
        ("", False),
    ],
)
def test_only_valid_trace_contexts_are_accepted(sent: str, valid: bool) -> None:
    headers = [(b"traceparent", sent.encode()), (b"tracestate", b"a=1"), (b"host", b"x")]
    assert tracing.carrier(headers) == ({"traceparent": sent, "tracestate": "a=1"} if valid else {})


@pytest.mark.parametrize(("state", "passed"), [(b"a=" + b"x" * 510, True), (b"a=" + b"x" * 511, False), (b"a=\x01", False)])
def test_tracestate_is_bounded(state: bytes, passed: bool) -> None:
    found = tracing.carrier([(b"traceparent", SENT.encode()), (b"tracestate", state)])
    assert ("tracestate" in found) == passed and found["traceparent"] == SENT


def test_nothing_is_made_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracer = Tracer("gateway", "g")
    assert tracer.begin("x", {}) is OFF and OFF.begin("y") is OFF and not OFF.on
    passed = tracer.begin("x", {"traceparent": SENT})
    assert passed.begin("call", "client").carrier == {"traceparent": SENT} and not passed.on
    passed.child("y", 0.0)
    passed.event("z")
    passed.end(error="e")


def test_spans_and_their_parents(collector: Collected) -> None:
    root = Tracer("gateway", "g").begin("root", {"traceparent": SENT, "tracestate": "a=1"}, http__route="/x", sequences=2)
    began = time.monotonic() - 2
    root.child("queue", began, began + 0.5, reason=None)
    call = root.begin("call", "client")
    root.event("failover", tokens=3)
    call.end(error="lost")
    root.end(http__response__status_code=200)
    collector.wait(lambda found: len(found.spans) == 3)
    spans = {span.name: span for span in collector.spans}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert spans["root"].parent_span_id.hex() == PARENT and spans["root"].trace_state == "a=1"
    assert spans["queue"].parent_span_id == spans["call"].parent_span_id == spans["root"].span_id
    assert call.carrier == {"traceparent": f"00-{TRACE}-{spans['call'].span_id.hex()}-01", "tracestate": "a=1"}
    assert attributes(spans["root"]) == {"http.route": "/x", "strata.sequences": 2, "http.response.status_code": 200}
    assert attributes(spans["queue"]) == {}
    queued_s = (spans["queue"].end_time_unix_nano - spans["queue"].start_time_unix_nano) / 1e9
    assert abs(queued_s - 0.5) < 0.05 and spans["queue"].start_time_unix_nano < spans["root"].start_time_unix_nano
    assert (spans["call"].status.code, spans["call"].status.message) == (2, "lost") and spans["call"].kind == 3
    assert [(event.name, attributes(event)) for event in spans["root"].events] == [("failover", {"strata.tokens": 3})]
    assert collector.resources[0]["service.name"] == "strata" and collector.resources[0]["strata.role"] == "gateway"


def test_clients_may_ask_for_no_spans(collector: Collected) -> None:
    tracer = Tracer("gateway", "g")
    unsampled = tracer.begin("unsampled", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert unsampled.carrier["traceparent"].startswith(f"00-{TRACE}-") and unsampled.carrier["traceparent"].endswith("-00")
    unsampled.end()
    tracer.begin("made", {}).end()
    collector.wait(lambda found: bool(found.named("made")))
    assert [span.name for span in collector.spans] == ["made"] and collector.spans[0].trace_id.hex() != TRACE


def test_variables_of_opentelemetry_are_followed(collector: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    Tracer("gateway", "g").begin("cut", {}, http__route="/x/y/z").end()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    unsampled = Tracer("gateway", "g").begin("unsampled", {})
    assert not unsampled.on and unsampled.begin("call").carrier["traceparent"].endswith("-02")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert Tracer("gateway", "g").begin("disabled", {}) is OFF
    collector.wait(lambda found: bool(found.spans))
    assert [(span.name, attributes(span)) for span in collector.spans] == [("cut", {"http.route": "/x/y"})]


def test_gateway_traces_a_request(collector: Collected) -> None:
    async def test(gateway: gateway_in_process.Gateway) -> None:
        headers = {"traceparent": SENT, "x-request-id": "mine"}
        answer = await gateway.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        refused = await gateway.client.post("/v1/completions", json={"prompt": "x", "model": "y"}, headers=headers)
        assert (answer.status_code, refused.status_code) == (200, 404)

    gateway_in_process.run(test)
    collector.wait(lambda found: len(found.named("POST /v1/completions")) == 2 and bool(found.named("call")))
    answered, refused = sorted(collector.named("POST /v1/completions"), key=lambda span: span.start_time_unix_nano)
    assert answered.parent_span_id.hex() == PARENT and answered.trace_id.hex() == TRACE
    assert attributes(answered) == {
        "http.route": "/v1/completions",
        "strata.request_id": "mine",
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 1,
    }
    assert attributes(refused)["http.response.status_code"] == 404
    for name in ("admission", "call"):
        (span,) = collector.named(name)
        assert span.parent_span_id == answered.span_id
