"""Conversations that share system prompts, sent to an endpoint turn by turn, with the time to the first token of every turn.

The model has one word per token, so the client knows the tokens of every prompt and answer, and what a cache could hold of them.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from strata.platform.errors import UserError

FIRST_WORD = 2  # the words before are special


@dataclass(frozen=True)
class Load:
    conversations: int
    turns: int
    systems: int  # different system prompts
    system_tokens: int
    user_tokens: int
    answer_tokens: int
    concurrency: int  # conversations at a time
    think_s: float
    vocab: int
    seed: int

    @property
    def longest(self) -> int:
        return self.system_tokens + self.turns * (self.user_tokens + self.answer_tokens)


@dataclass(frozen=True)
class Turn:
    prompt: tuple[str, ...]  # words
    answer: tuple[str, ...]
    sent_at: float
    first_token_at: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.sent_at


def drive(url: str, model: str, load: Load) -> list[Turn]:
    """All turns in the order in which they were sent."""
    return asyncio.run(_drive(url, model, load))


async def _drive(url: str, model: str, load: Load) -> list[Turn]:
    draw = random.Random(load.seed)
    systems = [_words(draw, load.vocab, load.system_tokens) for _ in range(load.systems)]
    scripts = [
        (systems[number % load.systems], [_words(draw, load.vocab, load.user_tokens) for _ in range(load.turns)], draw.random())
        for number in range(load.conversations)
    ]
    waiting = iter(scripts)
    turns: list[Turn] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def client() -> None:
            for system, users, pause in waiting:
                messages = [{"role": "system", "content": system}]
                for user in users:
                    messages.append({"role": "user", "content": user})
                    turn = await _turn(http, model, messages, load.answer_tokens)
                    turns.append(turn)
                    messages.append({"role": "assistant", "content": " ".join(turn.answer)})
                    await asyncio.sleep(2 * load.think_s * pause)

        await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return sorted(turns, key=lambda turn: turn.sent_at)


async def _turn(http: httpx.AsyncClient, model: str, messages: list[dict[str, str]], tokens: int) -> Turn:
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    prompt = tuple(word for message in messages for word in message["content"].split())
    sent, first, answer = time.monotonic(), 0.0, ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            reason = (await response.aread()).decode(errors="replace")[:200]
            raise UserError(f"The endpoint answered with {response.status_code}: {reason}", "See the log of the endpoint.")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.monotonic()
                    answer += text
    return Turn(prompt, tuple(answer.split()), sent, first or time.monotonic())


def _words(draw: random.Random, vocab: int, count: int) -> str:
    return " ".join(f"w{draw.randrange(FIRST_WORD, vocab)}" for _ in range(count))


def reachable_hit_rate(turns: Sequence[Turn], block_size: int) -> float:
    """Share of prompt tokens that one cache of unlimited size would have, if it had the blocks of every replica: no choice of
    replicas finds more. A prompt's blocks are there from its first token on."""
    pending = sorted(turns, key=lambda turn: turn.first_token_at)
    cached: set[int] = set()
    hits = asked = done = 0
    for turn in sorted(turns, key=lambda turn: turn.sent_at):
        while done < len(pending) and pending[done].first_token_at <= turn.sent_at:
            cached.update(_blocks((*pending[done].prompt, *pending[done].answer[:-1]), block_size))
            done += 1
        asked += len(turn.prompt)
        for name in _blocks(turn.prompt[:-1], block_size):
            if name not in cached:
                break
            hits += block_size
    return hits / asked if asked else 0.0


def _blocks(words: Sequence[str], size: int) -> Iterator[int]:
    name = 0
    for start in range(0, len(words) - size + 1, size):
        name = hash((name, tuple(words[start : start + size])))
        yield name
