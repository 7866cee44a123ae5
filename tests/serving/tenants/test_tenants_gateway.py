"""Tenants through the gateway's HTTP server: limits, fair waits, deadlines, salts, models, metrics and the audit log."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gateway_in_process
import httpx
import pytest
from gateway_in_process import Gateway, until

from strata.serving.gateway.keys import Keys
from strata.serving.metrics import telemetry
from strata.serving.tenants import audit
from strata.serving.tenants.audit import AuditLog
from strata.serving.tenants.gate import Gate
from strata.serving.tenants.tenant import digest

SECRET = b"s" * 32
STREAM = {"stream": True, "events": 5, "rate": 1000}
ENDLESS = {"stream": True, "events": 10**6, "rate": 5}


def run(
    test: Callable[[Gateway], Awaitable[None]],
    tmp_path: Path,
    slots: int = 4,
    models: tuple[str, ...] = ("tiny",),
    **tenants: Any,
) -> list[dict[str, Any]]:
    """Runs a test on a gateway whose tenants have their names as keys. Returns the lines of the audit log."""
    file = tmp_path / "tenants"
    tree = {name: {"keys": [{"sha256": digest(name.encode()).hex()}]} | limits for name, limits in tenants.items()}
    file.write_text(json.dumps({"tenants": tree}, indent=1))  # JSON is YAML
    log = AuditLog(tmp_path / "audit", "g")

    async def inside() -> None:
        keys = Keys(file, SECRET)
        gate = Gate(lambda: slots, 4, SECRET, keys.lend_idle)
        async with gateway_in_process.running(keys=keys, gate=gate, audit=log, models=models) as gateway:
            await asyncio.wait_for(test(gateway), 30)

    asyncio.run(inside())
    log.close()
    return [json.loads(line) for line in (tmp_path / "audit" / "audit-g.jsonl").read_text().splitlines()]


def send(gateway: Gateway, key: str, headers: dict[str, str] | None = None, **body: Any) -> Awaitable[httpx.Response]:
    headers = {"authorization": f"Bearer {key}"} | (headers or {})
    return gateway.client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 5} | body, headers=headers)


def test_answers_have_the_limits_and_the_log_has_no_secrets(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        answer = await send(gateway, "a", {"x-request-id": "mine"}, **STREAM, user="a-user")
        assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == "1" and "x-ratelimit-limit-tokens" not in answer.headers
        assert (await send(gateway, "a")).status_code == 200
        refused = await send(gateway, "a")
        assert refused.status_code == 429 and refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["param"] == "requests_per_minute"
        assert (await send(gateway, "b", prompt="secret prompt")).status_code == 200
        assert (await send(gateway, "unknown-key")).status_code == 401
        assert (await gateway.client.get("/no%0D%0Asuch", headers={"authorization": "Bearer b"})).status_code == 404
        assert await gateway.metric('strata_serve_tenant_refusals_total{limit="requests_per_minute"') == 1
        assert await gateway.metric("strata_serve_tenant_requests_total") == 4

    lines = run(test, tmp_path, a={"requests_per_minute": 2}, b={})
    assert [(line["tenant"], line["status"]) for line in lines] == [
        ("a", 200), ("a", 200), ("a", 429), ("b", 200), (None, 401), ("b", 404),
    ]  # fmt: skip
    first = lines[0]
    assert first["request_id"] == "mine" and first["key"] == digest(b"a").hex()[:12] and first["model"] == "tiny"
    assert (first["input_tokens"], first["output_tokens"]) == (3, 1) and first["route"] == "/v1/completions"
    assert 0 <= first["queue_s"] <= first["first_token_s"] <= first["duration_s"] < 10
    assert lines[2]["input_tokens"] is None and lines[5]["route"] == "other"
    written = (tmp_path / "audit" / "audit-g.jsonl").read_text()
    assert not any(word in written for word in ("secret prompt", "unknown-key", "Bearer", digest(b"a").hex(), "a-user"))
    assert (tmp_path / "audit" / "audit-g.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_flood_waits_and_another_tenant_does_not(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        assert (await send(gateway, "b")).status_code == 200, "b is active"
        flood = [asyncio.ensure_future(send(gateway, "a", **ENDLESS)) for _ in range(9)]
        await until(lambda: gateway.replica.calls == 2)
        await until(lambda: sum(task.done() for task in flood) == 3)  # two run, four wait
        assert [task.result().status_code for task in flood if task.done()] == [429] * 3
        quiet = [await send(gateway, "b", **STREAM) for _ in range(3)]
        assert [answer.status_code for answer in quiet] == [200] * 3 and gateway.replica.calls == 2
        assert await gateway.metric("strata_serve_tenant_requests_queued") == 4
        assert await gateway.metric("strata_serve_tenant_requests_running") == 2
        for task in flood:
            task.cancel()
        await until(lambda: gateway.replica.calls == 0)
        assert (await send(gateway, "a", **STREAM)).status_code == 200, "clients that went away left the queue"
        assert await gateway.metric("strata_serve_tenant_requests_queued") == 0

    lines = run(test, tmp_path, a={}, b={})
    assert {line["status"] for line in lines} == {200, 429, 499}


@pytest.mark.parametrize("header", ["x-request-deadline", "x-strata-deadline"])
def test_a_deadline_passes_in_the_queue(tmp_path: Path, header: str) -> None:
    async def test(gateway: Gateway) -> None:
        first = asyncio.ensure_future(send(gateway, "a", **ENDLESS))
        await until(lambda: gateway.replica.calls == 1)
        late = await send(gateway, "a", {header: "0.2"})
        assert late.status_code == 504 and late.json()["error"]["type"] == "server_error"
        assert late.headers["x-ratelimit-remaining-tokens-day"] == "992", "it never ran: only the first one's estimate is charged"
        first.cancel()
        await until(lambda: gateway.replica.calls == 0)

    run(test, tmp_path, slots=1, a={"tokens_per_day": 1000})


def test_tokens_are_charged_as_used(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        answer = await send(gateway, "a", max_tokens=50)  # the replica reports 3 and 1
        assert answer.headers["x-ratelimit-remaining-tokens-day"] == "947", "with the estimate, as the answer begins"
        answer = await send(gateway, "a", max_tokens=50)
        assert answer.headers["x-ratelimit-remaining-tokens-day"] == "943"
        cut = asyncio.ensure_future(send(gateway, "a", **ENDLESS | {"rate": 1000}))
        await asyncio.sleep(0.3)
        cut.cancel()
        await until(lambda: gateway.replica.calls == 0)
        await asyncio.sleep(0.05)
        left = int((await send(gateway, "a", max_tokens=1)).headers["x-ratelimit-remaining-tokens-day"])
        assert left < 900, "a client that disconnects pays for the tokens sent"

    run(test, tmp_path, a={"tokens_per_day": 1000})


def test_salts_reach_the_replica_by_tenant(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        for key in ("a", "a", "b", "sharing"):
            await send(gateway, key, cache_salt="chosen-by-client")
        salts = [meta["cache_salt"] for meta in gateway.replica.metas[-4:]]
        assert salts[0] == salts[1] != salts[2] and salts[3] is None and all(salts[:3])

    run(test, tmp_path, a={}, b={}, sharing={"share_cache": True})


def test_models_of_a_tenant(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        headers = {"authorization": "Bearer a"}
        listed = (await gateway.client.get("/v1/models", headers=headers)).json()["data"]
        assert [card["id"] for card in listed] == ["other"]
        assert (await gateway.client.get("/v1/models/tiny", headers=headers)).status_code == 404
        for body in ({"model": "tiny"}, {}):
            refused = await send(gateway, "a", **body)
            assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"
        assert (await send(gateway, "a", model="other")).status_code == 200
        unknown = await send(gateway, "a", model="none")
        assert unknown.status_code == 404 and "'tiny'" not in unknown.text
        assert (await gateway.client.post("/tokenize", json={"prompt": "x", "model": "tiny"}, headers=headers)).status_code == 403

    run(test, tmp_path, models=("tiny", "other"), a={"models": ["other"]})


def test_tokenizing_counts_as_a_request(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        headers = {"authorization": "Bearer a"}
        assert (await send(gateway, "a")).status_code == 200
        refused = await gateway.client.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert refused.status_code == 429 and refused.json()["error"]["param"] == "requests_per_minute"

    run(test, tmp_path, a={"requests_per_minute": 1})


def test_many_prompts_are_many_sequences(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        refused = await send(gateway, "a", prompt=[[1], [2], [3]])
        assert refused.status_code == 429 and refused.json()["error"]["param"] == "concurrency"
        assert "retry-after" not in refused.headers

    run(test, tmp_path, a={"concurrency": 2})


def test_labels_of_tenants_are_bounded() -> None:
    gateway = telemetry.Gateway("tiny", "g")
    for number in range(telemetry.MAX_TENANTS + 50):
        gateway.tenant_refused(f"t{number}", "concurrency")
        gateway.tenant_refused("t0", "concurrency")
    samples = [line for line in gateway.text().splitlines() if line.startswith("strata_serve_tenant_refusals_total{")]
    assert len(samples) == telemetry.MAX_TENANTS + 1
    assert any('tenant="(others)"' in line and line.endswith(" 50.0") for line in samples)


def test_the_audit_log_is_rotated_and_bounded(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "g", file_bytes=1000, files=2)
    for number in range(100):
        log.write({"number": number, "text": "x\ny" * 20})
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit-g.jsonl", "audit-g.jsonl.1", "audit-g.jsonl.2"]
    assert all(file.stat().st_size <= 1000 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    numbers = [json.loads(line)["number"] for file in reversed(files) for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 100)) and log.lost == 0


def test_files_of_replaced_gateways_are_bounded(tmp_path: Path) -> None:
    for number in range(audit.IN_FOLDER + 3):
        (tmp_path / f"audit-{number}.jsonl").touch()
        os.utime(tmp_path / f"audit-{number}.jsonl", (number, number))
    (tmp_path / "other").touch()
    AuditLog(tmp_path, "new").close()
    assert not any((tmp_path / f"audit-{number}.jsonl").exists() for number in range(3)) and (tmp_path / "other").exists()
    assert len(list(tmp_path.glob("audit-*"))) == audit.IN_FOLDER + 1
