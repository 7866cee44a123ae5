"""Load generator: client processes that start together, each with a share of the requests.

Closed loop: a fixed concurrency. Poisson: requests arrive at random times, independent of the server's load.
"""

import asyncio
import contextlib
import gc
import json
import math
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy

from strata.platform.errors import UserError
from strata.serving.bench.clients.stream import Answer, Connections
from strata.serving.bench.clients.workloads import Request, Workload

LIMIT_S = 300.0  # timeout of a request
END_S = 5.0  # for a client process to end after SIGTERM
WARM_UP_TOKENS = 16
WARM_UP_NUMBER = (
    10**9
)  # conversations from here on are not measured: the warm-up must not put measured prompts into a prefix cache


@dataclass(frozen=True)
class Level:
    """One load level: `concurrency` for a closed loop, or `rate` (requests per second) for Poisson arrivals."""

    conversations: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else f"{self.rate:g} req/s"

    def slots(self, client: int, clients: int) -> int:
        """Requests that one of the client processes has in flight."""
        concurrency = self.concurrency or clients
        return concurrency // clients + (client < concurrency % clients)

    def numbers(self, client: int, clients: int) -> range:
        """Conversations of one of the client processes. Clients do not share them: those with fewer slots end later."""
        return range(client, self.conversations, clients)


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    model: str
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(frozen=True)
class Record:
    """One request as the client measured it. The clock is the same in all processes of the machine."""

    kind: str
    start: float
    end: float
    arrivals: tuple[float, ...]
    tokens: int
    error: str | None
    prefill: str = ""


Result = tuple[list[Record], float]  # requests of a client process, and its CPU use in cores


@dataclass(frozen=True)
class Outcome:
    records: list[Record]
    client_cpu: list[float]  # CPU use of each client process, in cores


@dataclass(frozen=True)
class Share:
    """The part of the load that one client process sends."""

    target: Target
    workload: Workload
    level: Level
    seed: int
    number: int
    of: int

    def slots(self) -> int:
        return self.level.slots(self.number, self.of)

    def numbers(self) -> range:
        return self.level.numbers(self.number, self.of)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C under load. Carries the requests finished until then."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def run(target: Target, workload: Workload, level: Level, clients: int, seed: int) -> Outcome:
    clients = min(clients, level.concurrency or clients)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients)
    processes: dict[Pipe, BaseProcess] = {}
    results: dict[Pipe, Result] = {}
    try:
        for number in range(clients):
            here, there = context.Pipe(duplex=False)
            share = Share(target, workload, level, seed, number, clients)
            process = context.Process(target=_client, args=(share, barrier, there), daemon=True)
            process.start()
            there.close()
            processes[here] = process
        while waiting := processes.keys() - results.keys():
            for pipe in wait(waiting):
                results[pipe] = _received(pipe, processes[pipe])  # type: ignore[arg-type, index]
    except KeyboardInterrupt:
        _collect_partial_results(processes, results)
        raise Interrupted(_merged(results)) from None
    finally:
        for started in processes.values():
            started.terminate()
            started.join(END_S)
            started.kill()
            started.join()
    return _merged(results)


def _received(pipe: Pipe, process: "BaseProcess") -> Result:
    try:
        result: Result = pipe.recv()
    except EOFError:
        process.join(END_S)
        raise UserError(
            f"A client process ended with code {process.exitcode} before it was done.",
            "Its output, if any, is above. Code -9: killed, perhaps for lack of memory; use fewer --clients.",
        ) from None
    return result


def _collect_partial_results(processes: "dict[Pipe, BaseProcess]", results: dict[Pipe, Result]) -> None:
    """Terminates the clients, which then send their records so far."""
    waiting = {pipe: process for pipe, process in processes.items() if pipe not in results}
    for process in waiting.values():
        process.terminate()
    for pipe in waiting:
        with contextlib.suppress(EOFError):  # it ended before the load started
            if pipe.poll(END_S):
                results[pipe] = pipe.recv()


def _merged(results: dict[Pipe, Result]) -> Outcome:
    return Outcome([record for records, _ in results.values() for record in records], [cpu for _, cpu in results.values()])


def _client(share: Share, barrier: Any, pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which terminates this process
    pipe.send(asyncio.run(_until_terminated(share, barrier)))


async def _until_terminated(share: Share, barrier: Any) -> Result:
    records: list[Record] = []
    began, cpu = time.perf_counter(), time.process_time()
    driving = asyncio.ensure_future(_drive(share, barrier, records))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, driving.cancel)
    try:
        return records, await driving
    except asyncio.CancelledError:
        return records, (time.process_time() - cpu) / (time.perf_counter() - began)


async def _drive(share: Share, barrier: Any, records: list[Record]) -> float:
    """Appends finished requests to `records`. Returns the CPU use in cores."""
    work = [_prepare(share, number) for number in share.numbers()]
    connections = Connections(share.target.host, share.target.port)
    await _warm_up(share, connections)
    gc.collect()
    gc.disable()  # its pauses would count as the server's latency
    await asyncio.to_thread(barrier.wait, LIMIT_S)
    began, cpu = time.perf_counter(), time.process_time()
    if share.level.concurrency:
        await _closed_loop(connections, deque(work), share.slots(), records)
    else:
        await _poisson(connections, work, began, _arrivals(share), records)
    used = (time.process_time() - cpu) / (time.perf_counter() - began)
    connections.close()
    return used


Prepared = list[tuple[Request, bytes]]


def _prepare(share: Share, number: int) -> Prepared:
    return [(request, message(share.target, request)) for request in share.workload.conversation(share.seed, number)]


def message(target: Target, request: Request) -> bytes:
    body = json.dumps(
        {
            "model": target.model,
            "prompt": request.prompt,
            "max_tokens": request.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    key = f"Authorization: Bearer {target.key}\r\n" if target.key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
        f"{key}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _warm_up(share: Share, connections: Connections) -> None:
    """Sends short requests at the measured concurrency. Errors are ignored: the measurement reports them."""
    requests: list[Request] = []
    for slot in range(max(share.slots(), 2)):
        number = WARM_UP_NUMBER + slot * share.of + share.number
        first = share.workload.conversation(share.seed, number)[0]
        requests.append(Request(first.prompt, min(first.output, WARM_UP_TOKENS), first.kind))
    await asyncio.gather(*(_send(connections, request, message(share.target, request)) for request in requests))


async def _closed_loop(connections: Connections, work: deque[Prepared], slots: int, records: list[Record]) -> None:
    async def slot() -> None:
        while work:
            await _converse(connections, work.popleft(), records)

    await asyncio.gather(*(slot() for _ in range(slots)))


async def _poisson(
    connections: Connections, work: list[Prepared], began: float, arrivals: Iterator[float], records: list[Record]
) -> None:
    tasks = []
    for prepared, at in zip(work, arrivals, strict=True):
        await asyncio.sleep(began + at - time.perf_counter())
        tasks.append(asyncio.create_task(_converse(connections, prepared, records)))
    await asyncio.gather(*tasks)


def _arrivals(share: Share) -> Iterator[float]:
    """Arrival times of this client's conversations: every n-th arrival of one Poisson process for all clients.

    The process generates conversations, at a rate that results in the requested number of requests per second."""
    assert share.level.rate
    mean = share.workload.requests_per_conversation / share.level.rate
    intervals = numpy.random.default_rng(share.seed).exponential(mean, share.level.conversations)
    times = numpy.cumsum(intervals)
    return iter(times[share.number :: share.of].tolist())


async def _converse(connections: Connections, conversation: Prepared, records: list[Record]) -> None:
    for request, payload in conversation:
        records.append(await _send(connections, request, payload))


async def _send(connections: Connections, request: Request, payload: bytes) -> Record:
    start = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await connections.send(payload)
    except TimeoutError:
        answer = Answer((), 0, f"no answer within {LIMIT_S:.0f} s")
    except OSError as failure:
        answer = Answer((), 0, str(failure))
    error = answer.error
    if error is None and answer.tokens != request.output:  # a shorter answer would count as speed
        error = f"{answer.tokens} tokens instead of {request.output}"
    return Record(request.kind, start, time.perf_counter(), answer.arrivals, answer.tokens, error, answer.prefill)


def seed(first: int, number: int, levels: int, level: int) -> int:
    """Seed of a level in a round, so that no prompt repeats one of another."""
    return first + number * levels + level


def closed(concurrency: int, requests: int | None, waves: int, workload: Workload) -> Level:
    count = requests or waves * max(concurrency, 6)
    return Level(max(concurrency, math.ceil(count / workload.requests_per_conversation)), concurrency=concurrency)


def poisson(rate: float, requests: int | None, seconds: float, workload: Workload) -> Level:
    count = requests or max(rate * seconds, 32)
    return Level(math.ceil(count / workload.requests_per_conversation), rate=rate)
