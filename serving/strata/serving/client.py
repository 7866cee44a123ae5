"""Client of an endpoint: readiness, the official `openai` client, and a completion with its latencies."""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import httpx

from strata.platform.errors import UserError, shown
from strata.serving import access
from strata.serving.api.headers import PREFILL

if TYPE_CHECKING:
    import openai

TIMEOUT_S = 120.0  # without a byte from the endpoint
START_LIMIT_S = 600.0
LOOK_S = 0.2
PROBE_S = 10.0


class NotReady(UserError):
    """An endpoint that ended, or ran out of time, before `GET /ready` answered 200."""


@dataclass(frozen=True)
class Timed:
    """A completion and its latencies."""

    prompt: str
    text: str
    tokens: int
    ttft_s: float
    itl_s: float  # mean over the tokens after the first
    prefill: str


def obstacle(url: str, model: str | None = None) -> str | None:
    """The reason why `GET /ready` of the endpoint does not answer 200, None if it does. Needs no API key. `model` is one of
    several; by default the main one."""
    try:
        response = httpx.get(f"{url}/ready", params={"model": model} if model else {}, timeout=PROBE_S)
    except httpx.TransportError as error:
        return f"Nothing answers at {url}: {error}"
    if response.status_code == 200:
        return None
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} {response.text[:200]}"


def wait_until_ready(url: str, process: subprocess.Popen[bytes] | None = None, limit_s: float = START_LIMIT_S) -> None:
    """Blocks until the endpoint is ready. Raises NotReady when `process`, which serves it, ends, or after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (reason := obstacle(url)) is not None:
        if process is not None and process.poll() is not None:
            raise NotReady(
                f"The endpoint at {url} ended with code {process.returncode} before it was ready.", "Its output has the reason."
            )
        if time.monotonic() > deadline:
            raise NotReady(f"The endpoint at {url} was not ready within {limit_s:.0f} s: {reason}", "See 'strata doctor'.")
        time.sleep(LOOK_S)


def connect(url: str) -> "openai.OpenAI":
    """An `openai` client of the endpoint, with the API key that this machine has for it."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=access.key_for(url) or "none", max_retries=0, timeout=TIMEOUT_S)


def require_model(client: "openai.OpenAI", url: str, name: str | None) -> str:
    """The name, or that of the main model. Raises UserError for one that the endpoint does not have."""
    main = only_model(client, url)
    names = [card.id for card in client.models.list().data]
    if name is not None and name not in names:
        raise UserError(f"The endpoint at {url} has no model {shown(name)}.", f"Models: {', '.join(names)}.")
    return name or main


def only_model(client: "openai.OpenAI", url: str) -> str:
    """The name of the endpoint's main model."""
    import openai

    try:
        return str(client.models.list().data[0].id)
    except openai.AuthenticationError:
        raise UserError(
            f"The endpoint at {url} needs an API key that it knows.", f"Set {access.KEY} to one of its keys."
        ) from None
    except (openai.APIStatusError, IndexError, ValueError) as error:
        raise UserError(
            f"The server at {url} is no endpoint with a model: {error}", "Name an endpoint's address (--url)."
        ) from None
    except openai.APIConnectionError:
        raise UserError(
            f"Nothing answers at {url}.", "Start the endpoint with 'make serve', or name its address (--url)."
        ) from None


def answer(client: "openai.OpenAI", model: str, messages: Sequence[dict[str, Any]], max_tokens: int) -> Timed:
    """A greedy, streamed answer in a conversation."""
    start = time.perf_counter()
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=cast(Any, list(messages)),
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    return _timed(raw, str(messages[-1]["content"]), start, lambda choice: choice.delta.content)


def complete(client: "openai.OpenAI", model: str, prompt: str, max_tokens: int, stop: str | None = None) -> Timed:
    """A greedy, streamed completion that ends before `stop`."""
    start = time.perf_counter()
    raw = client.completions.with_raw_response.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stop=stop,
        stream=True,
        stream_options={"include_usage": True},
    )
    return _timed(raw, prompt, start, lambda choice: choice.text)


def _timed(raw: Any, prompt: str, start: float, text_of: Callable[[Any], str | None]) -> Timed:
    """Reads a stream to its end. An event may hold several tokens: the usage report counts them."""
    text, tokens, first, last = "", 0, start, start
    for event in raw.parse():
        if event.usage:
            tokens = event.usage.completion_tokens
        if event.choices and (part := text_of(event.choices[0])):
            last = time.perf_counter()
            first = last if not text else first
            text += part
    return Timed(prompt, text, tokens, first - start, (last - first) / max(tokens - 1, 1), raw.headers[PREFILL])
