"""Real engines killed under load: no answer is lost, and every greedy answer equals the undisturbed one."""

import time

import httpx
import pytest
from support import Served

from strata.serving.chaos import report, run, session
from strata.serving.chaos.victims import Kind

REQUESTS = 300


@pytest.fixture(scope="module")
def outcome(endpoint: Served) -> run.Outcome:
    """Kills both decode replicas and Serve's controller simultaneously under load and, after their replacement, the prefill
    replica."""
    requests = session.requests_for(endpoint.url, REQUESTS, seed=0)
    faults = [(Kind.DECODE, Kind.DECODE, Kind.CONTROLLER), (Kind.PREFILL,)]
    return run.run(endpoint.url, endpoint.process.pid, requests, faults, concurrency=12, seed=0, spare=True)


@pytest.mark.timeout(900)
def test_no_answer_is_lost_and_all_are_equal(outcome: run.Outcome) -> None:
    assert outcome.holds, report.failures(outcome)
    assert len(outcome.verdicts()) >= REQUESTS


def test_streams_continued_on_other_replicas(outcome: run.Outcome) -> None:
    counted = report.counted(outcome.disturbed)
    assert counted["migrated"].get("continued", 0) > 0, counted
    assert counted["migrated"].get("refused", 0) == 0


def test_prefill_replica_answered_without_decode_replicas(outcome: run.Outcome) -> None:
    assert report.counted(outcome.disturbed)["prefilled"].get("local no-decode-replica", 0) > 0
    assert outcome.disturbed.longest_gap_s < 15


def test_command_prints_missing_replicas_and_recovery(endpoint: Served, outcome: run.Outcome) -> None:
    printed = endpoint.output.read_text()
    assert "of 2 decode replicas answer" in printed or "controller does not answer" in printed
    assert "The endpoint has recovered: 1 gateway, 1 prefill, 2 decode" in printed


@pytest.mark.rotation
@pytest.mark.timeout(600)
def test_engine_death_without_its_replica_and_gateway_death(endpoint: Served, outcome: run.Outcome) -> None:
    requests = session.requests_for(endpoint.url, 60, seed=1)
    faults = [(Kind.DECODE_ENGINE,), (Kind.GATEWAY,)]
    second = run.run(endpoint.url, endpoint.process.pid, requests, faults, concurrency=8, seed=1)
    assert second.holds, report.failures(second)
    gateway = next(kill for kill in second.kills if kill.kind == Kind.GATEWAY)
    assert gateway.answered is not None and gateway.answered - gateway.at < 20


def test_blocks_of_a_disconnected_client_are_freed(endpoint: Served) -> None:
    request = {"model": endpoint.model, "prompt": "import os\n", "max_tokens": 240, "stream": True, "ignore_eos": True}
    held = 0.0
    while not held:  # a model this small may finish before the check
        with httpx.stream("POST", f"{endpoint.url}/v1/completions", json=request, timeout=60) as response:
            lines = response.iter_lines()  # in a variable: httpx disconnects when it is collected
            next(lines)
            held = _kv_usage(endpoint)
    deadline = time.monotonic() + 2
    while _kv_usage(endpoint) > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _kv_usage(endpoint: Served) -> float:
    text = httpx.get(f"{endpoint.url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("strata_serve_kv_cache_usage"))
