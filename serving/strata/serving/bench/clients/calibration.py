"""Calibration of the clients: their capacity in events per second, measured against a server with a fixed pace.

The capacity follows from the client's CPU time per event. A busier client reads several events per system call, which is
cheaper, so the figure is a low estimate. It shows whether a benchmark measured the clients instead of the server.
"""

import asyncio
import json
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess

from strata.platform.errors import UserError
from strata.serving.bench.clients import load, measure
from strata.serving.bench.clients.workloads import Workload

START_S = 60.0
STREAMS, EVENTS, PACE_S = 32, 100, 0.01
EVENT = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": "model"}


@dataclass(frozen=True)
class Calibration:
    clients: int
    events_per_s: float  # capacity of all clients together
    pace_s: float
    itl_p50: float  # as the client measured that pace
    itl_p99: float


def calibrate(clients: int) -> Calibration:
    workload = Workload("uniform", vocab=1000, input=8, output=EVENTS, long_input=0, long_share=0, turns=1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    server = context.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    there.close()  # otherwise the pipe stays open when the server ends early
    try:
        target = load.Target("127.0.0.1", _port(here, server), "model")
        outcome = load.run(target, workload, load.Level(2 * STREAMS, concurrency=STREAMS), clients=1, seed=0)
    finally:
        server.kill()
        server.join()
    summary = measure.summarise(outcome.records, measure.Slo(1, 1))
    assert summary.itl_p50 is not None and summary.itl_p99 is not None, summary.first_error
    most = clients * summary.events_per_s / outcome.client_cpu[0]
    return Calibration(clients, most, PACE_S, summary.itl_p50, summary.itl_p99)


def _port(pipe: Pipe, server: BaseProcess) -> int:
    try:
        if pipe.poll(START_S):
            return int(pipe.recv())
        reason = f"did not start within {START_S:.0f} s"
    except EOFError:
        server.join(START_S)
        reason = f"ended with code {server.exitcode}"
    raise UserError(f"The calibration server {reason}.", "Its output, if any, is above. See 'strata doctor'.")


def _serve(pipe: Pipe) -> None:
    async def forever() -> None:
        async with await start(PACE_S) as server:
            pipe.send(server.sockets[0].getsockname()[1])
            await server.serve_forever()

    asyncio.run(forever())


async def start(pace_s: float) -> asyncio.Server:
    """Answers every completion with `max_tokens` events, one per `pace_s`, including the first."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await _answer(reader, writer, pace_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return await asyncio.start_server(connected, "127.0.0.1", 0)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace_s: float) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    tokens = json.loads(await reader.readexactly(length))["max_tokens"]
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    event = _chunk(EVENT | {"choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}]})
    clock = asyncio.get_running_loop().time
    due = clock()
    for _ in range(tokens):
        due += pace_s
        await asyncio.sleep(due - clock())
        writer.write(event)
    writer.write(_chunk(EVENT | {"choices": [], "usage": {"completion_tokens": tokens}}))
    writer.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(event: dict[str, object]) -> bytes:
    return _framed(b"data: " + json.dumps(event).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
