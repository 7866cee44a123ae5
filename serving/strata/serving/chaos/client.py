"""One request, sent as a user's client would, and all that the user would notice of its answer.

Plain HTTP and not the `openai` client, which hides when events came and whether a stream ended as it should.
"""

import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from strata.serving import access
from strata.serving.chaos.requests import Request

SILENCE_S = 120.0  # nothing at all for so long is no answer


@dataclass(frozen=True)
class Answer:
    """What must be the same whatever was killed. Counts are the server's own, where it gave them."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    tokens: tuple[str, ...]  # as the log-probabilities name them, where they were asked for; their values may round otherwise


@dataclass(frozen=True)
class Attempt:
    """Moments are of `time.monotonic`. `first` and `longest_gap_s` are of events that carry text, and of streams only."""

    began: float
    ended: float
    answer: Answer | None
    error: str | None
    retryable: bool = False  # the connection's error, or a 503: what the `openai` client sends again by itself
    first: float | None = None
    events: int = 0
    longest_gap_s: float = 0.0


class Broken(Exception):
    """The server answered, but not as it should."""


class Unavailable(Broken):
    pass


@dataclass
class _Heard:
    """What came so far."""

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
            raise Broken(f"one answer under several ids: {sorted(self.ids)}")
        return Answer(self.text, self.finish_reason, self.prompt_tokens, self.completion_tokens, tuple(self.tokens))


def fresh_connections(url: str) -> httpx.AsyncClient:
    """A client that opens a new connection each time: one kept open would stay with a gateway that is gone."""
    return httpx.AsyncClient(
        base_url=url, headers=access.headers_for(url), limits=httpx.Limits(max_keepalive_connections=0), timeout=10
    )


async def send(client: httpx.AsyncClient, request: Request) -> Attempt:
    began = time.monotonic()
    heard = _Heard()
    answer, error, retryable = None, None, False
    try:
        await (_stream if request.streams else _whole)(client, request, heard)
        answer = heard.answer()
    except (httpx.TransportError, Broken, json.JSONDecodeError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"
        retryable = isinstance(failure, httpx.TransportError | Unavailable)
    moments = heard.moments
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


async def _whole(client: httpx.AsyncClient, request: Request, heard: _Heard) -> None:
    response = await client.post(request.path, json=request.body, timeout=SILENCE_S)
    _require_success(response)
    _take(heard, response.json())


async def _stream(client: httpx.AsyncClient, request: Request, heard: _Heard) -> None:
    async with client.stream("POST", request.path, json=request.body, timeout=SILENCE_S) as response:
        if response.status_code != 200:
            await response.aread()
        _require_success(response)
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _event(heard, line.removeprefix("data: "))
    if not heard.done:
        raise Broken("the stream ended without [DONE]")


def _require_success(response: httpx.Response) -> None:
    if response.status_code != 200:
        refused = Unavailable if response.status_code == 503 else Broken
        raise refused(f"HTTP {response.status_code}: {response.text[:300]}")


def _event(heard: _Heard, data: str) -> None:
    if heard.done:
        raise Broken(f"an event after [DONE]: {data[:300]}")
    if data == "[DONE]":
        heard.done = True
        return
    before = len(heard.text)
    _take(heard, json.loads(data))
    if len(heard.text) > before:
        heard.moments.append(time.monotonic())


def _take(heard: _Heard, said: dict[str, Any]) -> None:
    """A whole answer, or one event of a stream: they differ only in how a chat's text is called."""
    if said.get("error"):
        raise Broken(f"the server said: {json.dumps(said['error'])[:300]}")
    heard.ids.add(said["id"])
    if usage := said.get("usage"):
        heard.prompt_tokens, heard.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in said["choices"]:
        if heard.finish_reason is not None and (choice.get("finish_reason") or _text(choice)):
            raise Broken("the answer went on after its finish_reason")
        heard.text += _text(choice)
        heard.tokens += _named_tokens(choice.get("logprobs") or {})
        heard.finish_reason = choice.get("finish_reason") or heard.finish_reason


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def _named_tokens(logprobs: dict[str, Any]) -> list[str]:
    if "tokens" in logprobs:
        return list(logprobs["tokens"])
    return [entry["token"] for entry in logprobs.get("content") or []]
