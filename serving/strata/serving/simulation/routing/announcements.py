"""Cached prefixes of a simulated engine, announced as a replica announces those of vLLM."""

from collections.abc import Iterator, Sequence

from strata.serving.routing.kv.prefix_log import GONE
from strata.serving.routing.kv.prefix_map import PrefixMap
from strata.serving.simulation.requests import SPAN, Text

POINT_TOKENS = 64  # between two prefixes that have a name


def stride(block_size: int) -> int:
    """Blocks between two points."""
    return max(1, POINT_TOKENS // block_size)


def points(text: Text, blocks: int, every: int) -> list[int]:
    """Names of the points within the first blocks of a text."""
    return list(text.names(0, blocks)[every - 1 :: every])


class Announcements:
    """Events of one engine's block cache. A text's own blocks are announced when a request of it ends."""

    def __init__(self, prefixes: PrefixMap, block_size: int) -> None:
        self._map, self.slot = prefixes, prefixes.join()
        self._block_size, self._stride = block_size, stride(block_size)
        self._public: dict[int, int] = {}  # public blocks of texts with cached blocks of their own

    def named(self, names: Sequence[int], start: int) -> None:
        """Public blocks, from the block `start` of a text on, are cached."""
        self._map.update(self.slot, ((names[k - start], self._tokens(k)) for k in self._between(start, start + len(names))))

    def released(self, text: Text, own: int) -> None:
        """The first `own` blocks of a text after its public ones are cached."""
        self._public[text.number] = first = text.public
        changes = ((text.number * SPAN + k, self._tokens(k)) for k in self._between(first, first + own))
        self._map.update(self.slot, changes)

    def evicted(self, key: int, first: int, stop: int) -> None:
        """Blocks `first` to before `stop` of a text's own lost their names, or a public block, whose name is negative, did."""
        if key < 0:
            self._map.update(self.slot, ((key, GONE),))
            return
        public = self._public[key]
        self._map.update(self.slot, ((key * SPAN + k, GONE) for k in self._between(public + first, public + stop)))
        if not first:
            del self._public[key]

    def close(self) -> None:
        self._map.leave(self.slot)

    def _between(self, start: int, stop: int) -> Iterator[int]:
        """Last blocks of the points in a range of blocks."""
        every = self._stride
        return iter(range(start + (-start - 1) % every, stop, every))

    def _tokens(self, block: int) -> int:
        return (block + 1) * self._block_size
