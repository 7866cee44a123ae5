"""Spans for an OpenTelemetry collector.

A span is handed over when it has ended. The SDK's tracer makes an object with locks, limits and context for each span when it
begins, which delays the first token; here the sampler alone is asked then, once for each request and process.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SCOPE = InstrumentationScope("strata.serving")
PROPAGATOR = TraceContextTextMapPropagator()

Attributes = Mapping[str, Any]


class Recorder:
    """Spans of one process."""

    def __init__(self, role: str, instance: str) -> None:
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "strata"}
        # Not the global provider: vLLM sets that one for its own spans.
        provider = TracerProvider(resource=Resource.create(name | {"service.instance.id": instance, "strata.role": role}))
        self.processor: SpanProcessor = BatchSpanProcessor(_exporter())
        provider.add_span_processor(self.processor)  # it sends what is left when the process exits
        self.sampler, self.ids = provider.sampler, provider.id_generator
        self.resource, self.limits = provider.resource, SpanLimits()

    def root(self, name: str, carrier: dict[str, str], attributes: Attributes) -> "tuple[dict[str, str], Recorded | None]":
        """First span of a request in this process, None if it is not sampled, and the trace context that it passes on."""
        context = PROPAGATOR.extract(carrier, Context())
        sender = get_current_span(context).get_span_context()
        parent = sender if sender.is_valid else None
        trace_id = self.ids.generate_trace_id() if parent is None else parent.trace_id
        is_random = TraceFlags.RANDOM_TRACE_ID if parent is None else parent.trace_flags & TraceFlags.RANDOM_TRACE_ID
        sampled = self.sampler.should_sample(context, trace_id, name, SpanKind.SERVER, dict(attributes))
        made = sampled.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags((TraceFlags.SAMPLED if made else TraceFlags.DEFAULT) | is_random)
        own = SpanContext(trace_id, self.ids.generate_span_id(), False, flags, sampled.trace_state)
        if not made:
            return _carrier(own), None
        recorded = Recorded(self, name, SpanKind.SERVER, own, parent, dict(sampled.attributes or {}), time.time_ns())
        return recorded.carrier, recorded


class Recorded:
    """A span from its begin to its end."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: dict[str, Any],
        began_ns: int,
    ) -> None:
        self._recorder, self._name, self._kind = recorder, name, kind
        self._context, self._parent = context, parent
        self._attributes, self._events, self._began_ns = attributes, list[Event](), began_ns

    @property
    def carrier(self) -> dict[str, str]:
        return _carrier(self._context)

    def child(self, name: str, kind: str, attributes: Attributes, began_ns: int) -> "Recorded":
        trace_id, flags, state = self._context.trace_id, self._context.trace_flags, self._context.trace_state
        own = SpanContext(trace_id, self._recorder.ids.generate_span_id(), False, flags, state)
        return Recorded(self._recorder, name, SpanKind[kind.upper()], own, self._context, dict(attributes), began_ns)

    def event(self, name: str, attributes: Attributes) -> None:
        self._events.append(Event(name, dict(attributes)))

    def end(self, ended_ns: int, error: str, attributes: Attributes) -> None:
        limits = self._recorder.limits
        self._recorder.processor.on_end(
            ReadableSpan(
                self._name,
                self._context,
                self._parent,
                self._recorder.resource,
                BoundedAttributes(
                    limits.max_span_attributes,
                    self._attributes | dict(attributes),
                    immutable=True,
                    max_value_len=limits.max_span_attribute_length,
                ),
                self._events,
                kind=self._kind,
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=self._began_ns,
                end_time=ended_ns,
                instrumentation_scope=SCOPE,
            )
        )


def _exporter() -> Any:
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


def _carrier(context: SpanContext) -> dict[str, str]:
    sent: dict[str, str] = {}
    PROPAGATOR.inject(sent, set_span_in_context(NonRecordingSpan(context), Context()))
    return sent
