"""Requests of a simulated load, and the names of the KV blocks of their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Names are integers. Each text has this many block names of its own.
SPAN = 2**24


class Text(Protocol):
    """Tokens of a prompt and its answer, as block names. Requests of one text follow each other."""

    @property
    def number(self) -> int: ...

    @property
    def public(self) -> int:
        """Leading blocks that other texts may have too. Their names are negative."""
        ...

    def names(self, start: int, stop: int) -> Sequence[int]:
        """Names of the blocks from `start` to before `stop`. Equal names: equal tokens up to the end of the block."""
        ...


@dataclass(frozen=True, slots=True)
class OwnText:
    """Text that shares its first blocks with texts of the same `opening`, and nothing else."""

    number: int
    opening: int = 0
    shared: int = 0  # blocks

    @property
    def public(self) -> int:
        return self.shared

    def names(self, start: int, stop: int) -> Sequence[int]:
        own = self.number * SPAN
        if start >= self.shared:
            return range(own + start, own + stop)
        common = -(self.opening + 1) * SPAN  # below all own names
        cut = min(stop, self.shared)
        return [*range(common + start, common + cut), *range(own + cut, own + stop)]


@dataclass(frozen=True, slots=True)
class HashedText:
    """Text of a trace that gives a hash for every `per` blocks of the prompt. The answer's blocks are the request's own. A hash
    names a block at its place only, so one that a trace repeats within a prompt names two."""

    number: int
    hashes: tuple[int, ...]
    per: int
    public: int  # full blocks of the prompt that have a hash

    def names(self, start: int, stop: int) -> Sequence[int]:
        own, per, hashes = self.number * SPAN, self.per, self.hashes
        cut = min(stop, self.public)
        hashed = (-(hashes[k // per] * SPAN + k) - 1 for k in range(start, cut))
        return [*hashed, *range(own + max(start, cut), own + stop)]


@dataclass(slots=True, eq=False)
class Request:
    number: int
    prompt: int  # tokens
    output: int
    text: Text
    # The next request of this client with its delay, once this one has been answered.
    then: Callable[[], "tuple[float, Request] | None"] | None = None
    tenant: str = ""  # of `Setup.tenants`, if there are any
