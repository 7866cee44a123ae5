"""Surroundings of an endpoint that a team shares: a file of API keys, and a collector of traces."""

import secrets
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from strata.platform import ports
from strata.serving.tenants import file as tenants_file
from strata.serving.tenants.tenant import KeyEntry, digest


class Keys:
    """File with one tenant, until the end of the block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="strata-bench-keys-")
        self.file = Path(self._folder.name) / "tenants.yaml"
        self.key = secrets.token_urlsafe()
        entry = tenants_file.TenantEntry(keys=(KeyEntry(sha256=digest(self.key.encode()).hex()),))
        tenants_file.write(self.file, {"bench": entry})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


class TraceCollector:
    """Receives spans (OTLP over HTTP) and discards them. Its process waits while the clients' processes send their load."""

    def __init__(self) -> None:
        self.batches = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                collector.batches += 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((ports.LOOPBACK, 0), Handler)
        self._server.daemon_threads = True

    @property
    def environment(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{ports.LOOPBACK}:{self._server.server_port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_SAMPLER": "always_on",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        assert kind is not None or self.batches, "the endpoint has exported no trace"
