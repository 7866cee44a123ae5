"""Traces of requests: W3C trace context through every hop, and spans for an OpenTelemetry collector.

OpenTelemetry's own variables configure the export (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER, ...). Without an endpoint no span is made, and a client's trace context is still passed on. Spans are made
for requests, never for tokens.
"""

import os
import re
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.serving.metrics.span_export import Recorded, Recorder

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Version, trace id, parent id and flags of the W3C recommendation. Ids of zeros are invalid, and so is version ff.
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
MAX_TRACESTATE = 512

Carrier = dict[str, str]  # the headers of a trace context
Headers = list[tuple[bytes, bytes]]


def variables() -> dict[str, str]:
    """OpenTelemetry's variables in this environment, for the processes of an endpoint."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}


def carrier(headers: Headers) -> Carrier:
    """Trace context of a request; empty without a valid one, as the recommendation demands."""
    sent = {name.decode(): value.decode("latin-1") for name, value in headers if name in (b"traceparent", b"tracestate")}
    if not TRACEPARENT.fullmatch(sent.get("traceparent", "")):
        return {}
    if len(sent.get("tracestate", "")) > MAX_TRACESTATE or not sent.get("tracestate", "").isprintable():
        del sent["tracestate"]
    return sent


class Span:
    """Operation of a request. Without an export it only passes the client's trace context on."""

    def __init__(self, carrier: Carrier, recorded: "Recorded | None" = None) -> None:
        self.carrier, self._recorded = carrier, recorded

    @property
    def on(self) -> bool:
        return self._recorded is not None

    def begin(self, name: str, kind: str = "internal", **attributes: Any) -> "Span":
        """Child that is ended later."""
        if self._recorded is None:
            return self
        recorded = self._recorded.child(name, kind, _prefixed(attributes), time.time_ns())
        return Span(recorded.carrier, recorded)

    def child(self, name: str, began: float, ended: float | None = None, **attributes: Any) -> None:
        """Records a child that has ended. Times are of the monotonic clock."""
        if self._recorded is not None:
            self._recorded.child(name, "internal", _prefixed(attributes), _wall_ns(began)).end(_wall_ns(ended), "", {})

    def event(self, name: str, **attributes: Any) -> None:
        if self._recorded is not None:
            self._recorded.event(name, _prefixed(attributes))

    def end(self, at: float | None = None, error: str = "", **attributes: Any) -> None:
        if self._recorded is not None:
            self._recorded.end(_wall_ns(at), error, _prefixed(attributes))


OFF = Span({})


class Tracer:
    def __init__(self, role: str, instance: str) -> None:
        """`instance`: name of the replica. Without a collector in the environment it makes no spans."""
        self._recorder: Recorder | None = None
        if any(map(os.environ.get, ENDPOINTS)) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
            from strata.serving.metrics import span_export  # only now: it imports OpenTelemetry's SDK

            self._recorder = span_export.Recorder(role, instance)

    def begin(self, name: str, carrier: Carrier, **attributes: Any) -> Span:
        """Span of a request that arrived with this trace context, or that begins a trace."""
        if self._recorder is None:
            return Span(carrier) if carrier else OFF
        return Span(*self._recorder.root(name, carrier, _prefixed(attributes)))


def _prefixed(attributes: dict[str, Any]) -> dict[str, Any]:
    """Names of attributes. Those of OpenTelemetry's conventions have dots, written as two underscores; others get a prefix."""
    known = {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
    return {key if "." in key else f"strata.{key}": value for key, value in known.items()}


def _wall_ns(monotonic: float | None) -> int:
    ago = 0.0 if monotonic is None else time.monotonic() - monotonic
    return time.time_ns() - int(ago * 1e9)
