"""Stand-in endpoint without engines. Answers depend only on the prompt; its replicas can be killed and are replaced."""

import asyncio
import hashlib
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from strata.serving.chaos.victims import Kind, Replica

EVENT_S = 0.005


@dataclass
class StandIn:
    """A configurable endpoint.

    `breaks`: streams break with their decode replica. `errs`: they end with an error event. `wrong`: answers differ after the
    death of a decode replica. `dead`: killed replicas are not replaced. `rejects`: a new controller replaces the replicas that
    it finds."""

    breaks: bool = False
    errs: bool = False
    wrong: bool = False
    dead: bool = False
    rejects: bool = False
    away_s: float = 0.3  # from a replica's death to its replacement
    port: int = 0
    migrations: int = 0
    cut: int = 0  # streams that broke or ended with an error
    spoiled: int = 0  # wrong answers
    fewest_engines: int = 99
    killed: list[Kind] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    _alive: dict[Kind, list[Replica]] = field(default_factory=dict)
    _least_decoding: int = 99
    _pids: Iterator[int] = field(default_factory=lambda: itertools.count(1000))
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _deaths: int = 0

    # Processes, as chaos finds them

    def find(self, kind: Kind) -> list[Replica]:
        return list(self._alive[kind])

    def kill(self, replica: Replica) -> None:
        asyncio.run_coroutine_threadsafe(self._die(replica), self._loop).result()

    async def _die(self, replica: Replica) -> None:
        [kind] = [kind for kind, alive in self._alive.items() if replica in alive]
        self.killed.append(kind)
        self._alive[kind].remove(replica)
        self._least_decoding = min(self._least_decoding, len(self._alive[Kind.DECODE]))
        self.fewest_engines = min(self.fewest_engines, len(self._alive[Kind.DECODE]) + len(self._alive[Kind.PREFILL]))
        if kind == Kind.DECODE:
            self._deaths += 1
            self.migrations += 1
        if kind == Kind.GATEWAY:
            self.migrations = 0  # its counters are lost with it
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
        if not self.dead:
            self._loop.call_later(self.away_s, lambda: self._loop.create_task(self._return(kind)))

    async def _return(self, kind: Kind) -> None:
        if kind == Kind.CONTROLLER and self.rejects:
            self._alive[Kind.PREFILL] = [Replica(next(self._pids), 0.0)]
        self._alive[kind].append(Replica(next(self._pids), 0.0))
        if kind == Kind.GATEWAY:
            await self._listen()

    @property
    def least_decoding(self) -> int:
        return self._least_decoding

    # HTTP, for clients

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            path = head.split()[1]
            length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._answer(path, body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            _plain(writer, self._metrics())
        elif path == "/v1/models":
            _plain(writer, json.dumps({"data": [{"id": "stand-in", "max_model_len": 256}]}))
        elif body["stream"]:
            await self._stream(path, body, writer)
        else:
            self.received.append(body)
            words = self._words(body)
            await asyncio.sleep(EVENT_S * len(words))
            usage = {"prompt_tokens": 1, "completion_tokens": len(words)}
            choices = [_choice(path, "message", words, body, "length")]
            _plain(writer, json.dumps({"id": "one", "choices": choices, "usage": usage}))

    async def _stream(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.received.append(body)
        began_after = self._deaths
        writer.write(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        words = self._words(body)
        for number, word in enumerate(words):
            if self._deaths > began_after and self.breaks:
                self.cut += 1
                writer.transport.abort()
                return
            if self._deaths > began_after and self.errs:
                self.cut += 1
                _chunk(writer, f"data: {json.dumps({'error': {'message': 'engine died'}})}\n\n")
                break
            last = number == len(words) - 1
            choice = _choice(path, "delta", [word], body, "length" if last else None)
            _chunk(writer, f"data: {json.dumps({'id': 'one', 'choices': [choice]})}\n\n")
            await writer.drain()
            await asyncio.sleep(EVENT_S)
        if body.get("stream_options"):
            usage = {"prompt_tokens": 1, "completion_tokens": len(words)}
            _chunk(writer, f"data: {json.dumps({'id': 'one', 'choices': [], 'usage': usage})}\n\n")
        _chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _words(self, body: dict[str, Any]) -> list[str]:
        """`max_tokens` words derived from the prompt."""
        prompt = json.dumps(body.get("prompt") or body["messages"])
        digest = hashlib.sha256(prompt.encode()).hexdigest()
        spoiled = self.wrong and self._deaths > 0
        self.spoiled += spoiled
        return [f"{digest[number % 60]}{'! ' if spoiled else ' '}" for number in range(body["max_tokens"])]

    def _metrics(self) -> str:
        gateway = ",".join(f'role="gateway",replica="{one.pid}"' for one in self._alive[Kind.GATEWAY])
        lines = [f'strata_serve_migrations_total{{{gateway},outcome="continued"}} {self.migrations}']
        for kind, alive in self._alive.items():
            if kind == Kind.CONTROLLER:
                continue
            lines += [f'strata_serve_replicas{{role="{kind}",replica="{one.pid}"}} 1' for one in alive]
        return "\n".join(lines) + "\n"

    async def _up(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        for kind, number in ((Kind.PREFILL, 1), (Kind.DECODE, 2), (Kind.GATEWAY, 1), (Kind.CONTROLLER, 1)):
            self._alive[kind] = [Replica(next(self._pids), 0.0) for _ in range(number)]
        await self._listen()
        self._stop = asyncio.Event()
        started.set()
        await self._stop.wait()


@contextmanager
def stand_in(**behaviour: Any) -> Iterator[StandIn]:
    """Runs the endpoint in a thread, for tests of code that runs its own event loop."""
    one = StandIn(**behaviour)
    started = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(one._up(started)))
    thread.start()
    started.wait()
    try:
        yield one
    finally:
        one._loop.call_soon_threadsafe(one._stop.set)
        thread.join()


def _choice(path: str, part: str, words: list[str], body: dict[str, Any], finish: str | None) -> dict[str, Any]:
    chat, text = path.endswith("chat/completions"), "".join(words)
    tokens = {"content": [{"token": word} for word in words]} if chat else {"tokens": words}
    content = {part: {"content": text}} if chat else {"text": text}
    return {**content, "finish_reason": finish, "logprobs": tokens if body.get("logprobs") else None}


def _plain(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
