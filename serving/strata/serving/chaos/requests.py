"""Random requests of all kinds, reproducible by seed.

All are greedy with one sequence: only their answers are guaranteed to be the same on another replica.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Ids in every vocabulary; special tokens mostly have lower ids.
TOKEN_IDS = range(100, 500)
WORDS = (
    "import ",
    "def ",
    "self.",
    "return ",
    "class ",
    "for ",
    "in ",
    "range(",
    "None",
    "):\n    ",
    "= ",
    "if ",
    "not ",
    "value ",
)
TEMPLATE_TOKENS = 32  # upper bound for a chat template
STOPS = ("\n", ")", ":", "self", ".")
LONGEST_ANSWER = 128


@dataclass(frozen=True)
class Request:
    path: str  # /v1/completions | /v1/chat/completions
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body["stream"])

    def salted(self, salt: str) -> "Request":
        """The same request with a cache salt, so that KV blocks cached by another pass are not reused."""
        return Request(self.path, self.body | {"cache_salt": salt})


def make(count: int, seed: int, model: str, context: int, adapters: Sequence[str] = ()) -> tuple[Request, ...]:
    """`adapters`: names that requests give as their model too."""
    draw = random.Random(f"requests {seed}")
    requests = [_one(draw, model, context) for _ in range(count)]
    if adapters:
        requests = [Request(one.path, one.body | {"model": draw.choice((model, *adapters))}) for one in requests]
    return tuple(requests)


def _one(draw: random.Random, model: str, context: int) -> Request:
    shape = draw.choice((_from_ids, _from_text, _chat))
    answer = draw.randint(1, min(LONGEST_ANSWER, context // 2))
    path, prompt = shape(draw, context - answer)
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": answer, "stream": draw.random() < 0.7, **prompt}
    if draw.random() < 0.25:
        body["stop"] = draw.sample(STOPS, draw.randint(1, 2))
    if draw.random() < 0.25:
        body |= {"logprobs": True, "top_logprobs": 2} if path.endswith("chat/completions") else {"logprobs": 2}
    if body["stream"] and draw.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return Request(path, body)


def _from_ids(draw: random.Random, limit: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": draw.choices(TOKEN_IDS, k=draw.randint(1, limit))}


def _from_text(draw: random.Random, limit: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": _text(draw, limit)}


def _chat(draw: random.Random, limit: int) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": _text(draw, max(1, limit - TEMPLATE_TOKENS))}
    return "/v1/chat/completions", {"messages": [message]}


def _text(draw: random.Random, limit: int) -> str:
    """At most `limit` bytes, and so at most `limit` tokens with any tokenizer."""
    return "".join(draw.choices(WORDS, k=limit))[: draw.randint(1, limit)]
