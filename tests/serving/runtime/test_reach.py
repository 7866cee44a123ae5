"""No socket of a local endpoint can be reached from another machine."""

import httpx
from listening import reachable_from_outside
from support import Served, prefill_header


def test_everything_listens_on_loopback(endpoint: Served) -> None:
    long = {"model": endpoint.model, "prompt": [7] * 250, "max_tokens": 1}
    for _ in range(2):  # a KV transfer opens the connections between engines
        prefill_header(httpx.post(f"{endpoint.url}/v1/completions", json=long, timeout=60))
    assert reachable_from_outside(endpoint.process) == []
