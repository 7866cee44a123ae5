"""Bounds on the memory, descriptors and time that one client can occupy in a gateway."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import ROOT

pytestmark = pytest.mark.slow

SCRIPT = str(ROOT / "tests" / "gateway_alone.py")
MIB = 2**20
CLOSED = (ConnectionResetError, BrokenPipeError)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STREAM = json.dumps({"prompt": "x", "stream": True, "events": 10**6, "rate": 20}).encode()
FLOOD = json.dumps({"prompt": "x", "stream": True, "events": 10**6, "rate": 2_000}).encode()


def post(body: bytes, length: int | None = None) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


@dataclass
class Gateway:
    process: psutil.Process
    port: int
    began: int = 0
    peak: int = 0

    def grown_mib(self) -> float:
        rss = self.process.memory_info().rss
        self.began = self.began or rss
        self.peak = max(self.peak, rss)
        return (self.peak - self.began) / MIB

    def connect(self, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=30, **options)

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json={"prompt": "x"} | body, timeout=30)

    def metric(self, name: str) -> float:
        (found,) = [float(line.split()[-1]) for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        return found


@contextlib.contextmanager
def started(*words: str) -> Iterator[tuple[int, int]]:
    process = subprocess.Popen([sys.executable, SCRIPT, *words], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(replica: int, **settings: Any) -> Iterator[Gateway]:
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    with started("gateway", json.dumps({"replica": f"127.0.0.1:{replica}"} | settings)) as (pid, port):
        yield Gateway(psutil.Process(pid), port)


@contextlib.contextmanager
def nothing_left(gateway: Gateway) -> Iterator[Gateway]:
    for _ in range(3):
        assert gateway.ask().status_code == 200 and gateway.get("/metrics").status_code == 200
    files, gateway.began, gateway.peak = gateway.process.num_fds(), 0, 0
    gateway.grown_mib()
    yield gateway
    assert until(lambda: gateway.process.num_fds() <= files), "a descriptor was left open"
    assert until(lambda: gateway.metric("stand_in_calls") == 0), "a call was left on the replica"
    assert gateway.ask().status_code == 200


@pytest.fixture(scope="module")
def replica() -> Iterator[int]:
    with started("replica") as (_, port):
        yield port


@pytest.fixture(scope="module")
def for_all(replica: int) -> Iterator[Gateway]:
    with running(replica, connection__STALLED_S=1.0, connection__CLOSE_S=1.0, connection__LINGER_S=1.0) as found:
        yield found


@pytest.fixture
def gateway(for_all: Gateway) -> Iterator[Gateway]:
    with nothing_left(for_all) as found:
        yield found


def until(done: Callable[[], bool], limit_s: float = 15.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not (met := done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


def pour(gateway: Gateway, connection: socket.socket, chunk: bytes, mib: int) -> bytes:
    """Sends the chunk repeatedly until the amount is sent or the gateway answers; returns the answer."""
    with contextlib.suppress(*CLOSED):
        for _ in range(mib * MIB // len(chunk)):
            connection.sendall(chunk)
            gateway.grown_mib()
    return read(connection)


def read(connection: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(*CLOSED):
        while data := connection.recv(65536):
            answer += data
    connection.close()
    return answer


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), head
    error = json.loads(body)["error"]
    assert error["code"] == int(head.split()[1]) and error["message"] and {"type", "param"} <= error.keys()
    return dict(error)


BODY = CHUNKED + b"2\r\n{}\r\n"


@pytest.mark.parametrize(
    ("start", "chunk"),
    [
        pytest.param(BODY + b"0\r\n", b"x-%06d: y\r\n" % 1 * 4096, id="trailers"),
        pytest.param(BODY + b"0\r\nx-a: ", b"y" * 65536, id="one trailer"),
        pytest.param(CHUNKED + b"2;", b"a=b;" * 16384, id="a chunk's extension"),
        pytest.param(CHUNKED, b"1;a=b\r\nx\r\n" * 8192, id="tiny chunks"),
        pytest.param(b"", b"\r\n" * 32768, id="blank lines"),
        pytest.param(b"GET /", b"x" * 65536, id="a URL"),
        pytest.param(HEAD + b"x-a: ", b"y" * 65536, id="one header"),
        pytest.param(HEAD, b"a:b\r\n" * 16384, id="headers"),
    ],
)
def test_oversized_http_framing_is_refused(gateway: Gateway, start: bytes, chunk: bytes) -> None:
    answer = pour(gateway, gateway.connect(start), chunk, 64)
    assert error_of(answer)["code"] in (400, 413, 431)
    assert gateway.grown_mib() < 20


def test_unfinished_uploads_use_bounded_memory(gateway: Gateway) -> None:
    uploads = [gateway.connect(CHUNKED if index % 2 else post(b"", 15 * MIB)) for index in range(80)]
    chunk = b" " * 65536
    for _ in range(14 * 16):
        for index, upload in enumerate(uploads):
            with contextlib.suppress(*CLOSED):
                upload.sendall(b"10000\r\n" + chunk + b"\r\n" if index % 2 else chunk)
        gateway.grown_mib()
        if gateway.grown_mib() > 400:
            break
    assert gateway.grown_mib() < 250
    assert gateway.ask().status_code == 200, "a small request passes"
    refused = gateway.ask(prompt="x" * 8 * MIB)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    for upload in uploads:
        upload.close()
    assert until(lambda: gateway.ask(prompt="x" * 15 * MIB).status_code == 200), "all of it is free again"


def test_oversized_body_is_refused_by_its_content_length(gateway: Gateway) -> None:
    expecting = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (17 * MIB)
    assert error_of(read(gateway.connect(expecting)))["code"] == 413
    assert gateway.ask(prompt="x" * 17 * MIB).status_code == 413, "seen by a client that sends all of it first"


def test_unused_body_closes_the_connection(gateway: Gateway) -> None:
    for line in (b"GET /health", b"POST /nowhere", b"PUT /v1/completions"):
        answer = read(gateway.connect(line + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\nxx"))
        assert b"connection: close" in answer.split(b"\r\n\r\n")[0]


def test_requests_without_a_valid_key_are_refused_at_the_header(replica: int, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right\n")
    with running(replica, keys=str(tmp_path / "keys"), connection__LINGER_S=1.0) as gateway:
        gateway.grown_mib()
        expecting = HEAD + b"authorization: Bearer wrong\r\nexpect: 100-continue\r\ncontent-length: 1000\r\n\r\n"
        assert error_of(read(gateway.connect(expecting)))["code"] == 401
        uploads = [gateway.connect(post(b" " * MIB, 15 * MIB)) for _ in range(40)]
        assert {error_of(read(upload))["code"] for upload in uploads} == {401}
        assert gateway.grown_mib() < 30


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(HEAD + b"x-a: " + b"y" * 65536, id="a header"),
        pytest.param(b"y" * 65536, id="garbage"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 1000, id="requests"),
        pytest.param(post(b" " * 65536, 10**9), id="a body"),
    ],
)
def test_data_sent_during_a_stream_uses_bounded_memory(gateway: Gateway, behind: bytes) -> None:
    connection = gateway.connect(post(STREAM))
    assert b"200 OK" in connection.recv(65536)
    connection.settimeout(1)
    with contextlib.suppress(TimeoutError, *CLOSED):
        for _ in range(64 * MIB // len(behind)):
            connection.sendall(behind)
            gateway.grown_mib()
    assert gateway.grown_mib() < 20
    connection.settimeout(5)
    later = b"".join(connection.recv(65536) for _ in range(10))
    assert b"data: xxx" in later and b"HTTP/1.1" not in later, "the stream goes on, undisturbed"
    connection.close()


def test_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    two = post(b'{"prompt": "x"}') + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    connection = gateway.connect(two + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = read(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.endswith(b"success") and b'"object": "model"' in answer
    many = read(gateway.connect(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 5000))
    assert 1 <= many.count(b"HTTP/1.1 200 OK") <= 10


def test_unread_streams_are_cancelled(gateway: Gateway) -> None:
    cancelled = gateway.metric("stand_in_cancelled")
    slow = [gateway.connect(post(FLOOD), receive_buffer=4096) for _ in range(20)]
    assert until(lambda: gateway.metric("stand_in_cancelled") - cancelled == 20 or gateway.grown_mib() > 200)
    assert gateway.grown_mib() < 150
    for connection in slow:
        connection.close()


def test_slowly_read_stream_ends_with_an_error(replica: int) -> None:
    with running(replica) as gateway, nothing_left(gateway):
        slow = gateway.connect(post(FLOOD), receive_buffer=4096)
        assert until(lambda: gateway.metric("stand_in_calls") == 1) and until(lambda: gateway.metric("stand_in_calls") == 0)
        answer = read_to_the_end(slow)
        assert b"data: xxx" in answer and b"more slowly than it was generated" in answer[-1000:]


def read_to_the_end(connection: socket.socket) -> bytes:
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        data = connection.recv(65536)
        assert data
        answer += data
    connection.close()
    return answer


def test_unread_responses_use_bounded_memory(gateway: Gateway) -> None:
    asked = post(json.dumps({"prompt": "x", "answer": 30 * MIB}).encode())
    slow = [gateway.connect(asked, receive_buffer=4096) for _ in range(20)]
    time.sleep(1)
    assert gateway.ask().status_code == 200
    assert gateway.grown_mib() < 300
    # Admitted requests have ended and the others received a 429. Capacity is free, so a client that reads receives all bytes.
    assert until(lambda: len(gateway.ask(answer=30 * MIB).content) == 30 * MIB)
    for connection in slow:
        connection.close()


def test_unread_metrics_use_bounded_memory(gateway: Gateway) -> None:
    for path in (b"/metrics", b"/openapi.json"):
        asked = b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n"
        slow = [gateway.connect(asked * 8, receive_buffer=4096) for _ in range(50)]
        for connection in slow:
            with contextlib.suppress(TimeoutError, *CLOSED):
                connection.settimeout(0.05)
                connection.sendall(asked * 1000)
        assert gateway.grown_mib() < 60
        for connection in slow:
            connection.close()


def test_connection_limit_closes_idle_connections_first(replica: int) -> None:
    with running(replica, http__MAX_CONNECTIONS=32, connection__LINGER_S=1.0) as gateway, nothing_left(gateway):
        files = gateway.process.num_fds()
        idle = [gateway.connect(b"POST /v1/comp" if index % 2 else b"") for index in range(200)]
        assert gateway.ask().status_code == 200, "idle connections are closed first"
        assert gateway.process.num_fds() < files + 40
        streams = [gateway.connect(post(STREAM)) for _ in range(32)]
        assert all(b"200 OK" in stream.recv(65536) for stream in streams)
        for _ in range(3):
            refused = gateway.ask()
            assert refused.status_code == 429 and refused.headers["retry-after"]
        assert all(b"data:" in stream.recv(65536) for stream in streams), "those that are being answered stay"
        for connection in [*idle, *streams]:
            connection.close()


def test_low_descriptor_limit(replica: int) -> None:
    script = f"ulimit -n 300; exec {sys.executable} {SCRIPT} gateway '{json.dumps({'replica': f'127.0.0.1:{replica}'})}'"
    process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        gateway = Gateway(psutil.Process(process.pid), int(process.stdout.readline()))
        idle = [gateway.connect() for _ in range(400)]
        assert gateway.ask().status_code == 200
        for connection in idle:
            connection.close()
    finally:
        process.kill()
        process.wait()


def test_incomplete_requests_time_out(replica: int) -> None:
    impatient = {"connection__HEADER_S": 0.5, "app__UPLOAD_S": 0.5, "http__KEEP_ALIVE_S": 1, "connection__LINGER_S": 0.5}
    with running(replica, **impatient) as gateway, nothing_left(gateway):
        assert read(gateway.connect()) == b""
        assert error_of(read(gateway.connect(b"POST /v1/comp")))["code"] == 408
        assert error_of(read(gateway.connect(post(b"{", 1000))))["code"] == 408
        idle = gateway.connect(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read(idle).endswith(b"success"), "an idle connection is closed"
        behind = gateway.connect(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTT")
        assert error_of(read(behind).partition(b"success")[2])["code"] == 408
