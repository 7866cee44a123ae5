"""Real engines that die under load: no answer is lost, and every greedy one equals the undisturbed one."""

import time

import httpx
import pytest
from support import Served

from strata.serving.chaos import report, run, session
from strata.serving.chaos.victims import Kind

REQUESTS = 300


@pytest.fixture(scope="module")
def storm(endpoint: Served) -> run.Outcome:
    """Both decode replicas and Serve's controller killed at once while the requests run, and, when they are back, the prefill
    replica."""
    requests = session.requests_for(endpoint.url, REQUESTS, seed=0)
    blows = [(Kind.DECODE, Kind.DECODE, Kind.CONTROLLER), (Kind.PREFILL,)]
    return run.run(endpoint.url, endpoint.process.pid, requests, blows, concurrency=12, seed=0, spare=True)


@pytest.mark.timeout(900)
def test_no_answer_is_lost_and_all_are_equal(storm: run.Outcome) -> None:
    assert storm.holds, report.failures(storm)
    assert len(storm.verdicts()) >= REQUESTS


def test_streams_went_on_elsewhere(storm: run.Outcome) -> None:
    counted = report.counted(storm.storm)
    assert counted["migrated"].get("continued", 0) > 0, counted
    assert counted["migrated"].get("refused", 0) == 0


def test_the_prefill_replica_answered_meanwhile(storm: run.Outcome) -> None:
    assert report.counted(storm.storm)["prefilled"].get("local no-decode-replica", 0) > 0
    assert storm.storm.longest_gap_s < 15


def test_the_command_says_what_was_missing_and_that_it_is_whole(endpoint: Served, storm: run.Outcome) -> None:
    said = endpoint.output.read_text()
    assert "of 2 decode replicas answer" in said or "controller does not answer" in said
    assert "The endpoint is whole again: 1 gateway, 1 prefill, 2 decode" in said


@pytest.mark.timeout(600)
def test_an_engine_that_dies_without_its_replica_and_a_gateway(endpoint: Served, storm: run.Outcome) -> None:
    requests = session.requests_for(endpoint.url, 60, seed=1)
    blows = [(Kind.DECODE_ENGINE,), (Kind.GATEWAY,)]
    outcome = run.run(endpoint.url, endpoint.process.pid, requests, blows, concurrency=8, seed=1)
    assert outcome.holds, report.failures(outcome)
    gateway = next(kill for kill in outcome.kills if kill.kind == Kind.GATEWAY)
    assert gateway.answered is not None and gateway.answered - gateway.at < 20


def test_a_client_that_leaves_frees_its_blocks_at_once(endpoint: Served) -> None:
    request = {"model": endpoint.model, "prompt": "import os\n", "max_tokens": 240, "stream": True, "ignore_eos": True}
    held = 0.0
    while not held:  # so small a model may be done before it is looked at
        with httpx.stream("POST", f"{endpoint.url}/v1/completions", json=request, timeout=60) as response:
            lines = response.iter_lines()  # kept, for httpx hangs up with it
            next(lines)
            held = _kv_usage(endpoint)
    deadline = time.monotonic() + 2
    while _kv_usage(endpoint) > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _kv_usage(endpoint: Served) -> float:
    text = httpx.get(f"{endpoint.url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("strata_serve_kv_cache_usage"))
