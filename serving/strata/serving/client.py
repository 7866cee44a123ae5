"""Talking to an endpoint as users do, with the official `openai` client, and timing what they would feel."""

import time
from dataclasses import dataclass
from typing import Any

from strata.platform.errors import UserError
from strata.serving import access
from strata.serving.api.headers import PREFILL

TIMEOUT_S = 120.0  # without a word from the endpoint


@dataclass(frozen=True)
class Timed:
    prompt: str
    text: str
    tokens: int
    ttft_s: float
    itl_s: float  # mean over the tokens after the first
    prefill: str


def connect(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=access.key_for(url) or "none", max_retries=0, timeout=TIMEOUT_S)


def only_model(client: Any, url: str) -> str:
    import openai

    try:
        return str(client.models.list().data[0].id)
    except openai.AuthenticationError:
        raise UserError(
            f"The endpoint at {url} needs an API key that it knows.", f"Set {access.KEY} to one of its keys."
        ) from None
    except (openai.APIStatusError, IndexError, ValueError) as error:
        raise UserError(f"What answers at {url} is no endpoint with a model: {error}", "Give its address (--url).") from None
    except openai.APIConnectionError:
        raise UserError(
            f"Nothing answers at {url}.", "Start the endpoint with 'make serve', or give its address (--url)."
        ) from None


def complete(client: Any, model: str, prompt: str, max_tokens: int) -> Timed:
    """Greedy and streamed. The server may put several tokens into one event, so they are counted by its usage report."""
    start = time.perf_counter()
    raw = client.completions.with_raw_response.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, tokens, first, last = "", 0, start, start
    for event in raw.parse():
        if event.usage:
            tokens = event.usage.completion_tokens
        if event.choices and event.choices[0].text:
            last = time.perf_counter()
            first = last if not text else first
            text += event.choices[0].text
    return Timed(prompt, text, tokens, first - start, (last - first) / max(tokens - 1, 1), raw.headers[PREFILL])
