"""KV cache of a simulated engine: blocks with names, reference counts and LRU eviction, by the rules of vLLM's block pool.

The name of a block stands for its tokens and all tokens before it, as vLLM's hash chain does. Public blocks may be shared by
sequences that run at the same time; each has a name and a reference count. The blocks of a text after its public ones are its
own: only later requests of the same text find them, so they are one entry with a count, however many they are. Blocks without a
name (partly filled, or equal to a named block) are counted, not listed. Free blocks without a name are used before named ones are
evicted, and named ones in the order of their last use, the last block of a sequence first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockCache:
    def __init__(self, blocks: int, reuse: bool = True) -> None:
        """`reuse`: prefix caching is on."""
        self.capacity = blocks
        self.reuse = reuse
        self.free = blocks  # with and without names
        self._references: dict[int, int] = {}  # of public blocks in use
        # Named and free, least recently used first: 1 for a public block, by its negative name, and the count of blocks for a
        # text, by its number.
        self._evictable: OrderedDict[int, int] = OrderedDict()
        self._named = 0  # sum of the counts
        # Called with blocks that lost their names: a key of `_evictable`, the first of its blocks, and the one after the last.
        self.evicted: Callable[[int, int, int], None] | None = None

    @property
    def used(self) -> int:
        return self.capacity - self.free

    @property
    def references(self) -> int:
        return sum(self._references.values())

    def leading(self, names: Iterable[int]) -> tuple[int, int]:
        """Number of cached public names before the first that is not cached, and how many of these are free."""
        count = free = 0
        references, evictable = self._references, self._evictable
        for name in names:
            if name in references:
                count += 1
            elif name in evictable:
                count += 1
                free += 1
            else:
                break
        return count, free

    def own(self, text: int) -> int:
        """Number of a text's own blocks that are cached and free, from the first of them on."""
        return self._evictable.get(text, 0)

    def hold(self, names: Sequence[int]) -> None:
        """Adds a reference to cached public blocks."""
        references, evictable = self._references, self._evictable
        for name in names:
            if name in references:
                references[name] += 1
            else:
                del evictable[name]
                references[name] = 1
                self.free -= 1
                self._named -= 1

    def hold_own(self, text: int, count: int) -> None:
        """Takes the first `count` cached blocks of a text. The others lose their names."""
        before = self._evictable.pop(text, 0)
        self._named -= before
        self.free -= count
        if self.evicted is not None and before > count:
            self.evicted(text, count, before)

    def take(self, count: int) -> None:
        """Takes free blocks, which lose their names."""
        assert count <= self.free, "more blocks taken than free"
        evicted = count - (self.free - self._named)
        self.free -= count
        if evicted <= 0:
            return
        self._named -= evicted
        evictable = self._evictable
        while evicted:
            oldest = next(iter(evictable))
            blocks = evictable[oldest]
            if blocks > evicted:
                evictable[oldest] = blocks - evicted
                if self.evicted is not None:
                    self.evicted(oldest, blocks - evicted, blocks)
                return
            del evictable[oldest]
            evicted -= blocks
            if self.evicted is not None:
                self.evicted(oldest, 0, blocks)

    def name(self, names: Iterable[int]) -> list[int]:
        """Gives names to public blocks in use, and returns those that were new. A block that equals a named one stays without."""
        if not self.reuse:
            return []
        references, evictable = self._references, self._evictable
        given = [name for name in names if name not in references and name not in evictable]
        for name in given:
            references[name] = 1
        return given

    def release(self, named: Sequence[int], text: int, own: int, unnamed: int) -> None:
        """Removes a sequence's reference to its blocks: public ones, full ones of its text, and those without a name."""
        references, evictable = self._references, self._evictable
        self.free += own + unnamed
        if own and self.reuse:
            before = evictable.pop(text, 0)  # of another request of the same text; equal blocks count once
            evictable[text] = max(before, own)
            self._named += evictable[text] - before
        for name in reversed(named):
            if references[name] > 1:
                references[name] -= 1
            else:
                del references[name]
                evictable[name] = 1
                self.free += 1
                self._named += 1
