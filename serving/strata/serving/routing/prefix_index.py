"""Estimate of the engine's prefix cache, so the policy can count uncached tokens without calling the engine's process.

It is an estimate because the engine does not report evictions. It follows the engine's rules: a block is identified by a hash
over all tokens up to its end, the least recently used blocks are evicted first, and within a sequence the last block first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence


class BlockIndex:
    """Least recently used blocks, by name."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def leading(self, names: Iterable[int]) -> int:
        """Number of names in the index before the first that is not."""
        count = 0
        for name in names:
            if name not in self._blocks:
                break
            count += 1
        return count

    def add(self, names: Sequence[int]) -> None:
        """Adds the blocks of a sequence, in order."""
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class PrefixIndex:
    def __init__(self, block_size: int, capacity_blocks: int) -> None:
        self.block_size = block_size
        self._index = BlockIndex(capacity_blocks)

    def cached_tokens(self, token_ids: Sequence[int], salt: Hashable = None) -> int:
        """Number of prefix tokens that are probably cached. Never all: the engine must compute at least one token for logits."""
        return self._index.leading(self._names(token_ids, len(token_ids) - 1, salt)) * self.block_size

    def add(self, token_ids: Sequence[int], salt: Hashable = None) -> None:
        """Adds tokens whose KV entries the engine has computed: of generated tokens, all but the last."""
        self._index.add(list(self._names(token_ids, len(token_ids), salt)))

    def _names(self, token_ids: Sequence[int], length: int, salt: Hashable) -> Iterator[int]:
        """Hash of each full block within the first `length` tokens. A generator, since a lookup ends at the first miss."""
        size = self.block_size
        tokens = array("I", token_ids)
        content, step = tokens.tobytes(), size * tokens.itemsize
        name = hash(salt)  # prompts with different salts share no blocks
        for block in range(length // size):
            name = hash((name, content[block * step : (block + 1) * step]))
            yield name
