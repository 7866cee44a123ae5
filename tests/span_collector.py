"""OpenTelemetry collector in the process of a test: OTLP over HTTP, parsed by the protocol's own messages."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collected:
    spans: list[Any] = field(default_factory=list)  # messages of opentelemetry.proto.trace.v1
    resources: list[dict[str, str]] = field(default_factory=list)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def wait(self, done: Callable[["Collected"], bool], limit_s: float = 10.0) -> None:
        deadline = time.monotonic() + limit_s
        while not done(self):
            assert time.monotonic() < deadline, sorted(span.name for span in self.spans)
            time.sleep(0.01)


def attributes(span: Any) -> dict[str, Any]:
    """Values of a span or an event."""
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """Collector to which tracers made within this block send their spans."""
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
                collected.resources.append(attributes(batch.resource))
                collected.spans += [span for scope in batch.scope_spans for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()
