"""Scrape targets of a fleet: one HTTP server with a page for every group of nodes.

A fleet has one target per node and exporter. Here a page has the series of many nodes, since Prometheus' work is by sample, and
one process could not answer thousands of scrapes. Two versions of each page alternate, so that values change.
"""

import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from strata.dashboards.bench.fleet import SCRAPE_S, Fleet, Node, Series

NODES_PER_PAGE = 64
MOVING = "/moving"  # counters and gauges of runs and engines, rendered at each scrape


class Pages:
    def __init__(self, fleet: Fleet) -> None:
        groups = [fleet.nodes[at : at + NODES_PER_PAGE] for at in range(0, len(fleet.nodes), NODES_PER_PAGE)]
        self._fixed = {f"/nodes/{number}": self._versions(fleet, nodes) for number, nodes in enumerate(groups)}
        self._moving = (*fleet.on_call(), *fleet.serving(), *fleet.training())
        self.paths = (*self._fixed, MOVING)

    @staticmethod
    def _versions(fleet: Fleet, nodes: Iterable[Node]) -> tuple[bytes, bytes]:
        every = [
            series
            for node in nodes
            for make in (fleet.dcgm, fleet.processes, fleet.ray_node, fleet.ray_gpus, fleet.containers)
            for series in make(node)
        ]
        return text(every, 0.0, random.Random(1)), text(every, 0.0, random.Random(2))

    def get(self, path: str) -> bytes:
        now = time.time()
        if path == MOVING:
            return text(self._moving, now, random.Random(now))
        return self._fixed[path][int(now) // SCRAPE_S % 2]


def text(every: Iterable[Series], seconds: float, rng: random.Random) -> bytes:
    return "".join(f"{series.text} {series.value(seconds, rng):.6g}\n" for series in every).encode()


@contextmanager
def serving(pages: Pages) -> Iterator[int]:
    """Serves the pages on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
