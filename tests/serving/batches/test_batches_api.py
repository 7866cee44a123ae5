"""Files and batches through the official client: real gateways, killed at bad moments, and a stand-in engine."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from strata.serving.tenants.commands import keys_new

HERE = Path(__file__).parent / "gateway_with_batches.py"
Start = Callable[..., "Gateway"]


class Gateway:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"
        self.client = self.of("none")

    def of(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def seen(self, **headers: str) -> dict[str, Any]:
        """Counters of the engine."""
        found: dict[str, Any] = httpx.post(f"{self.url}/tokenize", json={"prompt": "x"}, headers=headers).json()
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Any]]:
    """Starts processes, which end with the tests."""
    with ExitStack() as stack:

        def start(kind: str, **settings: Any) -> tuple[subprocess.Popen[str], int]:
            command = [sys.executable, str(HERE), kind, json.dumps(settings)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(HERE.parents[2])}
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, int(process.stdout.readline())

        yield start


@pytest.fixture(scope="module")
def engine(launch: Callable[..., Any]) -> str:
    return f"127.0.0.1:{launch('engine')[1]}"


@pytest.fixture(scope="module")
def gateway(launch: Callable[..., Any], engine: str, tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    """Gateway without keys for all tests that do not kill it. Files may have 1 MiB."""
    folder = str(tmp_path_factory.mktemp("shared"))
    return Gateway(*launch("gateway", replica=engine, folder=folder, words=["serve.files.file_mib=1"]))


@pytest.fixture
def start(launch: Callable[..., Any], engine: str, tmp_path: Path) -> Start:
    """Starts gateways that share a folder."""
    return lambda **settings: Gateway(*launch("gateway", replica=engine, folder=str(tmp_path / "files"), **settings))


def line(name: str, prompt: str = "", **body: Any) -> str:
    body = {"model": "tiny", "prompt": prompt or name} | body
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


def submit(client: openai.OpenAI, *lines: str, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    settings: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"} | more
    return client.batches.create(**settings)


def ended(client: openai.OpenAI, batch: str, limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while (found := client.batches.retrieve(batch)).status not in ("completed", "failed", "cancelled", "expired"):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def answers(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    """Lines of an output by their custom_id. No id is there twice."""
    if file is None:
        return {}
    lines = [json.loads(each) for each in client.files.content(file).text.splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


@pytest.mark.slow
def test_official_client_runs_a_batch(gateway: Gateway) -> None:
    client = gateway.client
    batch = submit(client, *(line(f"n{number}") for number in range(20)), line("bad", fail=[400]), metadata={"a": "b"})
    assert batch.status == "validating" and batch.metadata == {"a": "b"} and batch.object == "batch"
    done = ended(client, batch.id)
    assert done.status == "completed" and done.errors is None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (21, 20, 1)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    found, failed = answers(client, done.output_file_id), answers(client, done.error_file_id)
    assert found.keys() == {f"n{number}" for number in range(20)}
    assert all(each["response"]["body"]["choices"][0]["text"] == name.upper() for name, each in found.items())
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found.values())
    assert failed.keys() == {"bad"} and failed["bad"]["response"]["status_code"] == 400
    files = client.files.list()
    assert [each.id for each in files if each.id in (batch.input_file_id, done.output_file_id)]
    assert [each.id for each in client.batches.list(limit=1)][:1] == [batch.id]
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    assert client.files.retrieve(done.output_file_id).bytes == len(client.files.content(done.output_file_id).content)


@pytest.mark.slow
def test_wrong_lines_fail_the_batch_and_are_named(gateway: Gateway) -> None:
    client = gateway.client
    other = line("c").replace("/v1/completions", "/v1/embeddings")
    wrong = [line("a"), "{", line("a"), other, "[]", line("d", stream=True), line("é" * 513), line("f")[:-1] + ', "x": 1}']
    done = ended(client, submit(client, *wrong).id)
    assert done.status == "failed" and done.output_file_id is None and done.error_file_id is None
    codes = [(each.line, each.code) for each in done.errors.data]
    assert codes == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
        (5, "invalid_json_line"),
        (6, "invalid_body"),
        (7, "invalid_custom_id"),
        (8, "unknown_key"),
    ]
    assert "line 1" in done.errors.data[1].message
    assert ended(client, submit(client, "", " ").id).errors.data[0].code == "empty_file"


@pytest.mark.slow
def test_refusals(gateway: Gateway) -> None:
    client = gateway.client

    def refused(status: int, act: Callable[[], Any]) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            act()
        assert caught.value.status_code == status, caught.value
        return str(caught.value)

    assert "purpose" in refused(400, lambda: client.files.create(file=b"x", purpose="fine-tune"))
    assert "1 MiB" in refused(413, lambda: client.files.create(file=b"x" * (2**20 + 1), purpose="batch"))
    for name in ("file-" + "0" * 32, "file-../../etc/passwd", "x" * 5000):
        refused(404, lambda name=name: client.files.retrieve(name))  # type: ignore[misc]
        refused(404, lambda name=name: client.batches.retrieve(name))  # type: ignore[misc]
    file = client.files.create(file=line("a").encode(), purpose="batch").id

    def create(**changes: Any) -> Any:
        settings: Any = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"} | changes
        return client.batches.create(**settings)

    for changes in (
        {"endpoint": "/v1/models"},
        {"completion_window": "0h"},
        {"completion_window": "169h"},
        {"input_file_id": "file-" + "0" * 32},
        {"input_file_id": 3},
        {"metadata": {"a": 1}},
        {"metadata": {"a": "x" * 513}},
        {"extra_body": {"priority": 1}},
    ):
        refused(400, lambda changes=changes: create(**changes))  # type: ignore[misc]
    done = ended(client, create().id)
    assert "cannot be cancelled" in refused(409, lambda: client.batches.cancel(done.id))
    assert "batch_output" in refused(400, lambda: create(input_file_id=done.output_file_id))
    post = httpx.post(
        f"{gateway.url}/v1/files", content=b"--x\r\nbroken", headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert post.status_code == 400
    assert httpx.post(f"{gateway.url}/v1/files", json={}).status_code == 400
    assert httpx.put(f"{gateway.url}/v1/files").headers["allow"] == "GET, POST"
    assert httpx.get(f"{gateway.url}/v1/files/x/y/z").status_code == 404
    assert not [each for each in client.files.list() if each.filename == "broken"]


@pytest.mark.slow
def test_failures_are_tried_again_and_others_are_final(gateway: Gateway) -> None:
    client = gateway.client
    lines = [line("once", fail=[500]), line("gone", fail=[503]), line("always", fail=[422] * 9), line("model", model="none")]
    done = ended(client, submit(client, *lines).id)
    assert answers(client, done.output_file_id).keys() == {"once", "gone"}
    failed = answers(client, done.error_file_id)
    assert {name: each["response"]["status_code"] for name, each in failed.items()} == {"always": 422, "model": 404}


@pytest.mark.slow
def test_killed_gateway_loses_and_repeats_nothing(start: Start, tmp_path: Path) -> None:
    """Another gateway continues from the output of the killed one, whose last line is torn."""
    gateways, killed = [start() for _ in range(3)], 0
    names = [f"killed-{number}" for number in range(120)]
    batch = submit(gateways[0].client, *(line(name, seconds=0.2) for name in names))
    output = tmp_path / "files" / "_" / "files" / f"file-{batch.id.removeprefix('batch_')}-output"
    for share in (10, 60):
        while not output.exists() or output.read_bytes().count(b"\n") < share:
            time.sleep(0.01)
        holder = next(each for each in gateways if _holds(each.process.pid, output))
        holder.kill()
        killed += 1
        with output.open("ab") as torn:
            torn.write(b'{"id": "batch_req_torn", "custom_id": "n1')
        gateways.remove(holder)
    done = ended(gateways[0].client, batch.id)
    assert killed == 2 and done.status == "completed" and done.request_counts.completed == 120
    assert answers(gateways[0].client, done.output_file_id).keys() == set(names)
    seen = {name: count for name, count in gateways[0].seen()["seen"].items() if name in set(names)}
    assert len(seen) == 120 and sum(seen.values()) <= 120 + killed * 4, "only lines in flight may run twice"


def _holds(process: int, file: Path) -> bool:
    links = list(Path(f"/proc/{process}/fd").iterdir())
    return any(link.exists() and link.resolve() == file for link in links)


@pytest.mark.slow
def test_all_gateways_die_and_a_later_one_finishes(start: Start) -> None:
    first = start()
    batch = submit(first.client, *(line(f"n{number}", seconds=0.05) for number in range(60)))
    while not first.client.batches.retrieve(batch.id).request_counts.completed:
        time.sleep(0.02)
    first.kill()
    later = start()
    done = ended(later.client, batch.id)
    assert done.status == "completed" and len(answers(later.client, done.output_file_id)) == 60


@pytest.mark.slow
def test_cancelled_batch_leaves_what_was_answered(gateway: Gateway) -> None:
    client = gateway.client
    batch = submit(client, *(line(f"n{number}", seconds=0.1) for number in range(200)))
    while not client.batches.retrieve(batch.id).request_counts.completed:
        time.sleep(0.02)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
    assert 0 < done.request_counts.completed < 200
    assert len(answers(client, done.output_file_id)) == done.request_counts.completed
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.slow
def test_batches_leave_half_of_the_slots_to_others(gateway: Gateway) -> None:
    gateway.seen()
    batch = submit(gateway.client, *(line(f"n{number}", seconds=0.05) for number in range(80)))
    ended(gateway.client, batch.id)
    assert gateway.seen()["most"] == 4  # of 8


@pytest.mark.slow
def test_tenants_see_only_their_own_and_spend_their_own_limits(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    keys = {name: _new_key(name, file) for name in ("acme", "other")}
    gateway = start(keys=str(file))
    acme, other = gateway.of(keys["acme"]), gateway.of(keys["other"])
    batch = submit(acme, *(line(f"n{number}") for number in range(10)))
    done = ended(acme, batch.id)
    assert done.request_counts.completed == 10
    for act in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(done.output_file_id),
        lambda: other.files.delete(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            act()
    with pytest.raises(openai.BadRequestError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert not list(other.files.list()) and not list(other.batches.list())
    with pytest.raises(openai.AuthenticationError):
        gateway.of("unknown").files.list()


def _new_key(tenant: str, file: Path) -> str:
    with redirect_stdout(io.StringIO()) as text:
        keys_new(tenant, file)
    return text.getvalue().split()[0]
