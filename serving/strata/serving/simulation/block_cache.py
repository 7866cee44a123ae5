"""KV cache of a simulated engine: blocks with names, reference counts and LRU eviction, by the rules of vLLM's block pool.

The name of a block stands for its tokens and all tokens before it, as vLLM's hash chain does. Blocks without a name (partly
filled, being filled by a decode, or equal to a named block) are counted, not listed. Free blocks without a name are used before
named ones are evicted, and named ones in the order of their last use.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockCache:
    def __init__(self, blocks: int, reuse: bool = True) -> None:
        """`reuse`: prefix caching is on."""
        self.capacity = blocks
        self.reuse = reuse
        self.free = blocks  # with and without names
        self._references: dict[int, int] = {}  # of named blocks in use
        self._evictable: OrderedDict[int, None] = OrderedDict()  # named and free, least recently used first

    @property
    def used(self) -> int:
        return self.capacity - self.free

    @property
    def references(self) -> int:
        return sum(self._references.values())

    def __contains__(self, name: int) -> bool:
        return name in self._references or name in self._evictable

    def leading(self, names: Iterable[int]) -> tuple[int, int]:
        """Number of cached names before the first that is not cached, and how many of these are free."""
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

    def hold(self, names: Sequence[int]) -> None:
        """Adds a reference to cached blocks."""
        references, evictable = self._references, self._evictable
        for name in names:
            if name in references:
                references[name] += 1
            else:
                del evictable[name]
                references[name] = 1
                self.free -= 1

    def take(self, count: int) -> None:
        """Takes free blocks, which lose their names."""
        assert count <= self.free, "more blocks taken than free"
        evict = self._evictable.popitem
        for _ in range(count - (self.free - len(self._evictable))):
            evict(False)
        self.free -= count

    def name(self, names: Sequence[int]) -> Sequence[int]:
        """Gives names to blocks in use, and returns those that were new. A block that equals a named one stays without."""
        if not self.reuse:
            return []
        references, evictable = self._references, self._evictable
        if references.keys().isdisjoint(names) and evictable.keys().isdisjoint(names):
            given = names  # the usual case, without a loop in Python
        else:
            given = [name for name in names if name not in references and name not in evictable]
        references.update(dict.fromkeys(given, 1))
        return given

    def release(self, named: Sequence[int], unnamed: int) -> None:
        """Removes a sequence's reference to its blocks. Its last block is evicted first."""
        references, evictable = self._references, self._evictable
        free = len(evictable)
        if sum(map(references.__getitem__, named)) == len(named):  # nobody else's: the usual case, without a loop in Python
            deque(map(references.__delitem__, named), maxlen=0)
            evictable.update(dict.fromkeys(reversed(named)))
        else:
            for name in reversed(named):
                if references[name] > 1:
                    references[name] -= 1
                else:
                    del references[name]
                    evictable[name] = None
        self.free += unnamed + len(evictable) - free
