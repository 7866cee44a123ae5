"""The clients of `strata bench serve` against servers with a known pace and known failures."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from strata.platform import ports
from strata.serving.bench.clients import calibration, load, measure
from strata.serving.bench.clients.load import Level, Outcome, Target
from strata.serving.bench.clients.measure import Slo, summarise
from strata.serving.bench.clients.stream import Connections, Reply
from strata.serving.bench.clients.workloads import Workload

WORKLOAD = Workload("uniform", vocab=100, input=8, output=20, long_input=0, long_share=0, turns=1)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def serving(start: Callable[[], Awaitable[asyncio.Server]]) -> Iterator[int]:
    """Runs the server in a thread. Yields its port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@contextmanager
def answering(handler: Handler) -> Iterator[int]:
    async def start() -> asyncio.Server:
        return await asyncio.start_server(handler, "127.0.0.1", 0)

    with serving(start) as port:
        yield port


def drive(port: int, level: Level, workload: Workload = WORKLOAD, clients: int = 2) -> Outcome:
    return load.run(Target("127.0.0.1", port, "model"), workload, level, clients, seed=0)


@pytest.mark.slow
def test_clients_measure_a_paced_server() -> None:
    pace = 0.06  # a busy machine adds milliseconds of its own
    with serving(lambda: calibration.start(pace)) as port:
        outcome = drive(port, Level(conversations=7, concurrency=3))
    summary = summarise(outcome.records, Slo(1, 1))
    assert (summary.requests, summary.errors) == (7, 0), summary.first_error
    assert [record.tokens for record in outcome.records] == [20] * 7
    assert [len(record.arrivals) for record in outcome.records] == [20] * 7  # the usage event is not a token
    assert summary.tokens_per_event == 1
    assert summary.ttft_p50 == pytest.approx(pace, rel=0.4)
    assert summary.itl_p50 == pytest.approx(pace, rel=0.2)
    assert summary.mean_itl_p50 == pytest.approx(pace, rel=0.1)
    assert summary.end_to_end_p50 == pytest.approx(20 * pace, rel=0.1)
    # Two clients with two and one slots, four and three requests.
    assert summary.seconds == pytest.approx(3 * 20 * pace, rel=0.12)
    assert len(outcome.client_cpu) == 2 and all(0 < share < 0.5 for share in outcome.client_cpu)


@pytest.mark.slow
def test_poisson_load_has_its_rate() -> None:
    with serving(lambda: calibration.start(0.002)) as port:
        outcome = drive(port, Level(conversations=60, rate=40))
    starts = sorted(record.start for record in outcome.records)
    assert len(starts) == 60 and not any(record.error for record in outcome.records)
    assert (starts[-1] - starts[0]) == pytest.approx(60 / 40, rel=0.35)
    intervals = [later - earlier for earlier, later in pairwise(starts)]
    assert max(intervals) > 2 / 40 and min(intervals) < 0.5 / 40  # random, not regular


def test_requests_of_a_conversation_are_sequential() -> None:
    workload = Workload("multiturn", vocab=100, input=4, output=3, long_input=0, long_share=0, turns=3)
    with serving(lambda: calibration.start(0.001)) as port:
        outcome = drive(port, load.closed(1, 6, 8, workload), workload)
    assert [record.kind for record in outcome.records] == ["first turn", "later turns", "later turns"] * 2
    for earlier, later in pairwise(outcome.records):
        assert later.start >= earlier.end


def test_no_server() -> None:
    with ports.reserve() as unused:
        outcome = drive(unused.port, Level(conversations=4, concurrency=2))
    assert len(outcome.records) == 4
    assert all("refused" in str(record.error).lower() or "connect" in str(record.error).lower() for record in outcome.records)
    summary = summarise(outcome.records, Slo(1, 1))
    assert (summary.errors, summary.tokens_per_s, summary.ttft_p50, summary.goodput_share) == (4, 0, None, 0)


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.partition(b"Content-Length:")[2].split()[0]))


def event(text: object, usage: int | None = None) -> bytes:
    tree = {"choices": [{"text": text}]} if usage is None else {"choices": [], "usage": {"completion_tokens": usage}}
    return b"data: " + json.dumps(tree).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


ANSWERS = {
    "HTTP 429: full": b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull",
    "the server closed the connection": HEAD + chunk(event("a")),
    "the stream ended without [DONE]": HEAD + chunk(event("a")) + chunk(b""),
    'error in the stream: "broken"': HEAD + chunk(event("a") + b'data: {"error": "broken"}\n\ndata: [DONE]\n\n') + chunk(b""),
    "the stream reported no usage": HEAD + chunk(event("a") + b"data: [DONE]\n\n") + chunk(b""),
    "3 tokens instead of 20": HEAD + chunk(event("abc") + event("", usage=3) + b"data: [DONE]\n\n") + chunk(b""),
}


@pytest.mark.parametrize("error", ANSWERS)
def test_failures_are_counted_and_named(error: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ANSWERS[error])
        await writer.drain()
        writer.close()

    with answering(handler) as port:
        outcome = drive(port, Level(conversations=2, concurrency=1))
    assert [record.error for record in outcome.records] == [error] * 2
    assert summarise(outcome.records, Slo(9, 9)).goodput_share == 0


def test_connection_is_reused_and_replaced_when_the_server_closes_it() -> None:
    connections_seen = 0
    whole = HEAD + chunk(event("a") + event("", usage=1) + b"data: [DONE]\n\n") + chunk(b"")

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections_seen
        connections_seen += 1
        for _ in range(2):
            await read_request(reader)
            writer.write(whole)
        await read_request(reader)  # the third request gets no response
        writer.close()

    async def send_five(port: int) -> list[str | None]:
        connections = Connections("127.0.0.1", port)
        request = load.message(Target("127.0.0.1", port, "model"), WORKLOAD.conversation(0, 0)[0])
        errors = [(await connections.send(request)).error for _ in range(5)]
        connections.close()
        return errors

    with answering(handler) as port:
        assert asyncio.run(send_five(port)) == [None] * 5
    assert connections_seen == 3


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_reads_may_split_the_stream_anywhere(size: int) -> None:
    """Chunks that split events and reads that split chunks, as behind proxies."""
    body = b"".join(event(letter) for letter in "abc") + b": a comment\n\n" + event("", usage=3) + b"data: [DONE]\n\n"
    raw = HEAD + b"".join(chunk(body[at : at + 11]) for at in range(0, len(body), 11)) + chunk(b"")
    reply = Reply()
    reads = [raw[at : at + size] for at in range(0, len(raw), size)]
    complete = [reply.feed(read, float(number)) for number, read in enumerate(reads)]
    assert complete == [False] * (len(reads) - 1) + [True]
    answer = reply.answer()
    assert (answer.tokens, answer.error, len(answer.arrivals)) == (3, None, 3)
    assert list(answer.arrivals) == sorted(answer.arrivals)


def test_events_of_one_read_count_as_tokens_per_read() -> None:
    reply = Reply()
    reply.feed(HEAD, 0)
    reply.feed(chunk(event("a") + event("b")) + chunk(event("c")), 1)
    reply.feed(chunk(event("d")), 2)
    assert reply.feed(chunk(event("", usage=4) + b"data: [DONE]\n\n") + chunk(b""), 3)
    answer = reply.answer()
    assert answer.arrivals == (1, 1, 1, 2)
    summary = summarise([load.Record("all", 0, 3, answer.arrivals, answer.tokens, None)], Slo(9, 9))
    assert (summary.tokens_per_event, summary.tokens_at_once, summary.itl_p50) == (1, 2, 0)


@pytest.mark.slow
def test_calibration_measures_the_capacity_of_clients() -> None:
    found = calibration.calibrate(clients=3)
    assert found.clients == 3
    assert found.itl_p50 == pytest.approx(found.pace_s, rel=0.2)
    assert found.events_per_s > 3 * 5000  # at most 200 µs of CPU time per event


def test_default_number_of_requests() -> None:
    assert load.closed(1, None, 8, WORKLOAD).conversations == 48
    assert load.closed(64, None, 8, WORKLOAD).conversations == 512
    assert load.closed(64, 10, 8, WORKLOAD).conversations == 64
    assert load.poisson(8, None, 30, WORKLOAD).conversations == 240
    assert (load.closed(4, None, 8, WORKLOAD).label, load.poisson(2.5, 9, 1, WORKLOAD).label) == ("concurrency 4", "2.5 req/s")


@pytest.mark.slow
def test_client_processes_share_a_clock() -> None:
    """Throughput is computed across processes."""
    with serving(lambda: calibration.start(0.005)) as port:
        outcome = drive(port, Level(conversations=2, concurrency=2))
    first, second = outcome.records
    assert abs(first.start - second.start) < 0.1
    assert measure.ttft(first) > 0
