"""Traces of requests: W3C trace context through every hop, and spans for an OpenTelemetry collector.

OpenTelemetry's own variables configure the export (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER, ...). Without an endpoint no span is made, and a client's trace context is still passed on. Spans are made
for requests, never for tokens.
"""

import os
import re
import time
from typing import Any

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
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

    def __init__(self, carrier: Carrier, tracer: Any = None, real: Any = None) -> None:
        self.carrier, self._tracer, self._real = carrier, tracer, real

    @property
    def on(self) -> bool:
        return self._real is not None

    def begin(self, name: str, kind: str = "internal", **attributes: Any) -> "Span":
        """Child that is ended later."""
        return self if self._real is None else _begin(self._tracer, name, self.carrier, kind, attributes)

    def child(self, name: str, began: float, ended: float | None = None, **attributes: Any) -> None:
        """Records a child that has ended. Times are of the monotonic clock."""
        if self._real is not None:
            _begin(self._tracer, name, self.carrier, "internal", attributes, began).end(ended)

    def event(self, name: str, **attributes: Any) -> None:
        if self._real is not None:
            self._real.add_event(name, _prefixed(attributes))

    def end(self, at: float | None = None, error: str = "", **attributes: Any) -> None:
        if self._real is None:
            return
        from opentelemetry.trace import StatusCode

        self._real.set_attributes(_prefixed(attributes))
        if error:
            self._real.set_status(StatusCode.ERROR, error)
        self._real.end(_wall_ns(at))


OFF = Span({})


class Tracer:
    def __init__(self, role: str, instance: str) -> None:
        """`instance`: name of the replica. Without a collector in the environment it makes no spans."""
        self._tracer = _tracer(role, instance) if any(map(os.environ.get, ENDPOINTS)) else None

    def begin(self, name: str, carrier: Carrier, **attributes: Any) -> Span:
        """Span of a request that arrived with this trace context, or that begins a trace."""
        if self._tracer is None:
            return Span(carrier) if carrier else OFF
        return _begin(self._tracer, name, carrier, "server", attributes)


def _tracer(role: str, instance: str) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "http/protobuf")
    exporter: Any
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporter = HttpExporter()
    name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "strata"}
    # Not the global provider: vLLM sets that one for its own spans.
    provider = TracerProvider(resource=Resource.create(name | {"service.instance.id": instance, "strata.role": role}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer("strata.serving")


def _begin(tracer: Any, name: str, parent: Carrier, kind: str, attributes: dict[str, Any], began: float | None = None) -> Span:
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    real = tracer.start_span(
        name, propagator.extract(parent), SpanKind[kind.upper()], _prefixed(attributes), start_time=_wall_ns(began)
    )
    own: Carrier = {}
    propagator.inject(own, set_span_in_context(real))
    return Span(own, tracer, real)


def _prefixed(attributes: dict[str, Any]) -> dict[str, Any]:
    """Names of attributes. Those of OpenTelemetry's conventions have dots, written as two underscores; others get a prefix."""
    known = {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
    return {key if "." in key else f"strata.{key}": value for key, value in known.items()}


def _wall_ns(monotonic: float | None) -> int:
    ago = 0.0 if monotonic is None else time.monotonic() - monotonic
    return time.time_ns() - int(ago * 1e9)
