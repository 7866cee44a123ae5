"""HTTP client that records a response as a user would notice it.

Plain HTTP instead of the `openai` client, which hides the arrival times of events and how a stream ended.
"""

import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from strata.serving import access
from strata.serving.chaos.requests import Request

SILENCE_S = 120.0  # read timeout


@dataclass(frozen=True)
class Answer:
    """The parts of a response that must not depend on kills. Token counts are the server's, if it reported them."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    tokens: tuple[str, ...]  # from the log-probabilities, if requested; their values may differ by rounding


@dataclass(frozen=True)
class Attempt:
    """One try of a request. Times are of `time.monotonic`. `first` and `longest_gap_s` count stream events with text."""

    began: float
    ended: float
    answer: Answer | None
    error: str | None
    retryable: bool = False  # connection error or 503, which the `openai` client retries by itself
    first: float | None = None
    events: int = 0
    longest_gap_s: float = 0.0


class Broken(Exception):
    """The server sent an error or an invalid response."""


class Unavailable(Broken):
    pass


@dataclass
class _Response:
    """The response received so far."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    moments: list[float] = field(default_factory=list)
    done: bool = False

    def answer(self) -> Answer:
        if self.finish_reason is None:
            raise Broken("the answer has no finish_reason")
        if len(self.ids) > 1:
            raise Broken(f"one answer with several ids: {sorted(self.ids)}")
        return Answer(self.text, self.finish_reason, self.prompt_tokens, self.completion_tokens, tuple(self.tokens))


def fresh_connections(url: str) -> httpx.AsyncClient:
    """A client that opens a new connection per request. A reused connection may belong to a dead gateway."""
    return httpx.AsyncClient(
        base_url=url, headers=access.headers_for(url), limits=httpx.Limits(max_keepalive_connections=0), timeout=10
    )


async def send(client: httpx.AsyncClient, request: Request) -> Attempt:
    began = time.monotonic()
    received = _Response()
    answer, error, retryable = None, None, False
    try:
        await (_stream if request.streams else _whole)(client, request, received)
        answer = received.answer()
    except (httpx.TransportError, Broken, json.JSONDecodeError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"
        retryable = isinstance(failure, httpx.TransportError | Unavailable)
    moments = received.moments
    return Attempt(
        began=began,
        ended=time.monotonic(),
        answer=answer,
        error=error,
        retryable=retryable,
        first=moments[0] if moments else None,
        events=len(moments),
        longest_gap_s=max((later - earlier for earlier, later in itertools.pairwise(moments)), default=0.0),
    )


async def _whole(client: httpx.AsyncClient, request: Request, received: _Response) -> None:
    response = await client.post(request.path, json=request.body, timeout=SILENCE_S)
    _require_success(response)
    _add(received, response.json())


async def _stream(client: httpx.AsyncClient, request: Request, received: _Response) -> None:
    async with client.stream("POST", request.path, json=request.body, timeout=SILENCE_S) as response:
        if response.status_code != 200:
            await response.aread()
        _require_success(response)
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _event(received, line.removeprefix("data: "))
    if not received.done:
        raise Broken("the stream ended without [DONE]")


def _require_success(response: httpx.Response) -> None:
    if response.status_code != 200:
        refused = Unavailable if response.status_code == 503 else Broken
        raise refused(f"HTTP {response.status_code}: {response.text[:300]}")


def _event(received: _Response, data: str) -> None:
    if received.done:
        raise Broken(f"an event after [DONE]: {data[:300]}")
    if data == "[DONE]":
        received.done = True
        return
    before = len(received.text)
    _add(received, json.loads(data))
    if len(received.text) > before:
        received.moments.append(time.monotonic())


def _add(received: _Response, message: dict[str, Any]) -> None:
    """Adds a whole answer or one event of a stream. They differ only in the key of a chat's text."""
    if message.get("error"):
        raise Broken(f"the server sent an error: {json.dumps(message['error'])[:300]}")
    received.ids.add(message["id"])
    if usage := message.get("usage"):
        received.prompt_tokens, received.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in message["choices"]:
        if received.finish_reason is not None and (choice.get("finish_reason") or _text(choice)):
            raise Broken("the answer went on after its finish_reason")
        received.text += _text(choice)
        received.tokens += _named_tokens(choice.get("logprobs") or {})
        received.finish_reason = choice.get("finish_reason") or received.finish_reason


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def _named_tokens(logprobs: dict[str, Any]) -> list[str]:
    if "tokens" in logprobs:
        return list(logprobs["tokens"])
    return [entry["token"] for entry in logprobs.get("content") or []]
