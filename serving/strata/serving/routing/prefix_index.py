"""What a decode replica believes its engine has in its prefix cache, so that the policy can tell new tokens from old ones
without asking the engine's process.

A belief: the engine evicts by its own order, and nothing tells us. Like the engine's, blocks are named by a hash over all
tokens up to their end, the least recently used go first, and of one sequence the last block goes before the first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class PrefixIndex:
    def __init__(self, block_size: int, capacity_blocks: int) -> None:
        self._block_size = block_size
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the oldest first

    def cached_tokens(self, token_ids: Sequence[int], salt: str | None = None) -> int:
        """Never all of them: the engine must compute at least one token to have logits."""
        blocks = 0
        for name in self._names(token_ids, len(token_ids) - 1, salt):
            if name not in self._blocks:
                break
            blocks += 1
        return blocks * self._block_size

    def add(self, token_ids: Sequence[int], salt: str | None = None) -> None:
        """Tokens whose keys and values the engine has computed: of an answer, all but the last."""
        for name in reversed(list(self._names(token_ids, len(token_ids), salt))):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def _names(self, token_ids: Sequence[int], length: int, salt: str | None) -> Iterator[int]:
        """Of each whole block within the first `length` tokens. Made one by one, for a lookup ends at the first miss."""
        size = self._block_size
        tokens = array("I", token_ids)
        content, step = tokens.tobytes(), size * tokens.itemsize
        name = hash(salt)  # prompts of different salts share nothing, whatever their tokens
        for block in range(length // size):
            name = hash((name, content[block * step : (block + 1) * step]))
            yield name
