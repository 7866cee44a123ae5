"""Loads of a calibration, and other ones of its validation.

A calibration needs steps of every kind: one stream and many, short prompts and long ones, prompts beside streams, and a front end
at rest and under load. Its closed loops have each of them in turn. The rate of an open loop is a share of what a closed loop of
the same requests reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.workloads import Name, Workload

LEAST_REQUESTS = 24


@dataclass(frozen=True)
class Sizes:
    """Sizes of the requests: `context` tokens at most, and `concurrency` of them at a time."""

    context: int
    concurrency: int
    vocab: int
    waves: int  # requests of a closed loop, in multiples of its concurrency


@dataclass(frozen=True)
class Load:
    """`concurrency` of a closed loop; or, with `share`, an open loop at this share of the rate of the load `of`."""

    name: str
    workload: Workload
    requests: int
    concurrency: int = 0
    share: float = 0.0
    of: str = ""

    def level(self, rates: Mapping[str, float]) -> Level:
        """`rates`: requests per second of the closed loops, by name."""
        conversations = -(-self.requests // self.workload.requests_per_conversation)
        if self.concurrency:
            return Level(max(conversations, self.concurrency), concurrency=self.concurrency)
        return Level(conversations, rate=self.share * rates[self.of])


def calibration(sizes: Sizes) -> list[Load]:
    short, long, many = _short(sizes), _long(sizes), sizes.concurrency
    return [
        _closed(sizes, "one short", 1, short, 48),
        _closed(sizes, "one long", 1, long, 16),
        _closed(sizes, "few middle", max(2, many // 4), (short + long) // 2, 32),
        _closed(sizes, "many short", many, short, 48),
        _closed(sizes, "half long", max(2, many // 2), long, 16),
        Load("open short", _uniform(sizes, short, 48), _requests(sizes, many), share=0.6, of="many short"),
    ]


def validation(sizes: Sizes) -> list[Load]:
    short, long, many = _short(sizes), _long(sizes), sizes.concurrency
    middle = (short + long) // 3
    turns = _workload(sizes, "multiturn", min(short, (sizes.context - 16) // 4 - 24), 24, turns=4)
    mixed = _workload(sizes, "mixed", short + short // 2, 24, long_input=long - long // 8, long_share=0.25)
    half = max(2, many // 2)
    return [
        _closed(sizes, "closed, 2 at a time", 2, middle, 40),
        _closed(sizes, "closed, short and long", half, mixed.input, 24, mixed),
        _closed(sizes, "closed, multi-turn", half, turns.input, 24, turns),
        Load("Poisson, middle", _uniform(sizes, middle, 32), _requests(sizes, half), share=0.5, of="few middle"),
        Load("Poisson, short and long", mixed, _requests(sizes, half), share=0.6, of="closed, short and long"),
        Load("Poisson, multi-turn", turns, 2 * _requests(sizes, half), share=0.6, of="closed, multi-turn"),
    ]


def _short(sizes: Sizes) -> int:
    return max(8, min(128, sizes.context // 8))


def _long(sizes: Sizes) -> int:
    return max(16, min(2048, sizes.context * 3 // 4))


def _requests(sizes: Sizes, concurrency: int) -> int:
    return max(LEAST_REQUESTS, sizes.waves * concurrency)


def _closed(sizes: Sizes, name: str, concurrency: int, prompt: int, output: int, workload: Workload | None = None) -> Load:
    made = workload or _uniform(sizes, prompt, output)
    return Load(name, made, _requests(sizes, concurrency), concurrency)


def _uniform(sizes: Sizes, prompt: int, output: int) -> Workload:
    return _workload(sizes, "uniform", prompt, output)


def _workload(
    sizes: Sizes, name: Name, prompt: int, output: int, long_input: int = 0, long_share: float = 0.0, turns: int = 1
) -> Workload:
    return Workload(name, sizes.vocab, prompt, output, long_input, long_share, turns)
