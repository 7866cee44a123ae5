"""Time of one choice of a replica in a gateway: from the parsed request to the replica."""

import asyncio
import random
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from strata.serving.gateway.prefix_routing import PrefixRouting, prefix_of

MESSAGES = 40


@dataclass(frozen=True)
class Scale:
    replicas: int = 200
    prefixes: int = 2000  # announced by each replica
    prompt_kib: int = 256  # of the longest prompts, about 64,000 tokens
    choices: int = 1000


def measure(scale: Scale, seed: int = 0) -> list[float]:
    """Seconds of each choice. Half of the prompts are long; every replica has the first half of one of them cached."""
    return asyncio.run(_measure(scale, seed))


async def _measure(scale: Scale, seed: int) -> list[float]:
    draw = random.Random(seed)
    routing = PrefixRouting(max_sequences=64)
    peers: list[Any] = [SimpleNamespace(name=f"replica-{number}", busy=draw.randrange(64)) for number in range(scale.replicas)]
    hot = _conversation(draw, scale.prompt_kib * 2**10)
    known = prefix_of("chat", hot, "model")
    assert known is not None
    common = known.digests[: len(known.digests) // 2]
    for peer in peers:
        slot = routing.join(peer.name)
        own = [(draw.getrandbits(64), draw.randrange(16, 4096)) for _ in range(scale.prefixes)]
        routing.map.update(slot, [*own, *((digest, 16 * place + 16) for place, digest in enumerate(common))])
    taken = []
    for number in range(scale.choices):
        tree = hot if number % 2 else _conversation(draw, 4096)
        began = time.perf_counter()
        chosen = routing.choose(peers, prefix_of("chat", tree, "model"), frozenset())
        taken.append(time.perf_counter() - began)
        assert chosen is not None
    return taken


def _conversation(draw: random.Random, size: int) -> dict[str, Any]:
    text = draw.randbytes(size // MESSAGES // 2).hex()
    return {"messages": [{"role": ("user", "assistant")[turn % 2], "content": text} for turn in range(MESSAGES)]}
