"""Scaling by SLO on real CPU engines: growth under load, an empty pool after an idle time, and an answer from zero."""

import concurrent.futures
import signal
import time
from pathlib import Path

import httpx
import pytest
from support import Served, start_serving

from strata.platform.metrics import SERVE_REPLICAS
from strata.serving.metrics import counters

SCALING = (
    *("serve.prefill.replicas=0", "serve.decode.replicas=0", "serve.decode.max_replicas=2", "serve.eager=true"),
    # Four places per engine: the streams of this test need two engines, however fast the machine is.
    *("serve.max_sequences=4", "serve.slo.ttft_s=5", "serve.slo.itl_s=1", "serve.slo.idle_s=8", "serve.slo.cooldown_s=5"),
)


def replicas(served: Served) -> int:
    text = httpx.get(f"{served.url}/metrics", timeout=30).text
    return int(counters.by(counters.parse(text), SERVE_REPLICAS, "role").get("decode", 0))


def ask(served: Served) -> httpx.Response:
    body = {"model": served.model, "prompt": "import os", "max_tokens": 64, "ignore_eos": True}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=240)


def wait_for(served: Served, number: int, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while (found := replicas(served)) != number:
        assert time.monotonic() < until, f"{found} replicas, not {number}\n{served.output.read_text()}"
        time.sleep(0.5)


@pytest.mark.rotation
def test_pool_grows_under_load_and_comes_back_from_zero(trained: Path) -> None:
    served, process = start_serving(trained, trained / "runs" / "tiny" / "export", *SCALING)
    try:
        served.wait_until_ready()
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            ends = time.monotonic() + 120
            while replicas(served) < 2 and time.monotonic() < ends:
                answers = list(pool.map(lambda _: ask(served).status_code, range(48)))
                assert set(answers) == {200}
        assert replicas(served) == 2, served.output.read_text()
        wait_for(served, 0, limit_s=120)
        assert httpx.get(f"{served.url}/ready").status_code == httpx.get(f"{served.url}/health").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # all of them wait for the first replica
            answers = list(pool.map(lambda _: ask(served), range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
        assert all("reason=no-engine" in answer.headers["x-strata-waited"] for answer in answers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, served.output.read_text()
    finally:
        process.kill()
